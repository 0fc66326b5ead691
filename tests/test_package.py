"""Run: pytest tests/test_package.py

What the wheel and the sdist hold; at night, that the wheel suffices where nothing else of the
project is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from clocks import HANG_S
from installed import installed

ROOT = Path(__file__).resolve().parents[1]
BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)
NEEDED = {"pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "setup.cfg", "PKG-INFO"}
EXTRAS = ["serve", "gguf"]
TEST_TOOLS = [
    "pytest",
    "pytest-timeout",
    "hypothesis",
    "transformers",
    "accelerate",
    "xllamacpp",
    "tensorboard",
]
# Where MKL is slow, a step calls what is compiled from matmul.cpp, which only AVX-512 runs.
PROGRAM = """
import sys, torch, monograph
from monograph.device import cpu_model
from monograph.graph.matmul import native
left, right = torch.rand(64, 64), torch.rand(64, 64)
assert "avx512f" not in cpu_model()[1] or torch.allclose(native(left, right), left @ right)
assert monograph.__file__.startswith(sys.argv[1])
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of this checkout's files, and the wheel that is built from the sdist alone; by
    setuptools alone.
    """
    checkout, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    for name in files():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    build(checkout, "build_sdist", out)
    [sdist] = out.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        # Python 3.11.0 to 3.11.3 have no filters.
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        packed.extractall(out, **safely)
    build(out / sdist.name.removesuffix(".tar.gz"), "build_wheel", out)
    [wheel] = out.glob("*.whl")
    return sdist, wheel


def files() -> list[str]:
    """What git has, and new files that it would take."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        listed, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def build(folder: Path, what: str, out: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, out], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def sources() -> set[str]:
    return {name.removeprefix("src/") for name in files() if name.startswith("src/monograph/")}


def test_the_wheel_has_every_file_of_the_package_and_no_other(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[1]).namelist()
    about = {name for name in names if ".dist-info/" in name}
    assert {*names} - about == sources()
    assert {name.partition(".dist-info/")[2] for name in about} == {
        "licenses/LICENSE", "METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt",
    }  # fmt: skip


def test_the_sdist_has_what_building_needs_and_no_test(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as packed:
        names = {member.name.partition("/")[2] for member in packed.getmembers() if member.isfile()}
    assert {name for name in names if ".egg-info/" not in name} == {
        f"src/{name}" for name in sources()
    } | NEEDED


@pytest.mark.slow
def test_the_installed_wheel_computes_and_passes_the_story(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    """In an environment with nothing else in it, a home without files, and no source; pip needs its
    index.

    1.4 GB, or 5 GB where the index has torch's CUDA build.
    """
    wanted = [
        f"{built[1]}[{','.join(EXTRAS)}]",
        *TEST_TOOLS,
        "--constraint",
        ROOT / "constraints.txt",
    ]
    python = installed(tmp_path / "venv", *wanted)
    home, place = tmp_path / "home", tmp_path / "place"
    (home / "tmp").mkdir(parents=True)
    shutil.copytree(ROOT / "tests", place / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", place)
    environment = {
        "PATH": os.defpath,
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "LANG": "C.UTF-8",
    }

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run(python, "-c", PROGRAM, tmp_path / "venv")
    monograph = python.with_name("monograph")
    shutil.copy(ROOT / "README.md", place)
    settings = [
        "README.md",
        "data.tokenizer=bytes",
        "data.sequence_length=32",
        "train.tokens_per_update=128",
    ]
    settings += ["model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
    assert "0 recompiles" in run(
        monograph, "train", *settings, "train.updates=4", "train.compile=whole"
    )
    assert "sampled in the graph" in run(
        monograph, "generate", "last", "[project]", "--max-tokens", "8"
    )
    told = run(
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "pythonpath=tests",
        "tests/test_story.py",
    )
    assert "1 passed" in told
