"""Run: pytest tests/test_extras.py (how a missing library is installed: beside this installation,
by its own name)
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from monograph import extras
from monograph.extras import command_for, install_command
from pages import PAGES
from scripts import ROOT


def test_the_command_is_for_the_python_that_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setattr(extras, "PathFinder", SimpleNamespace(find_spec=lambda name: name))
    monkeypatch.chdir(tmp_path)
    assert install_command(["gguf>=0.17"]) == ".venv/bin/python -m pip install 'gguf>=0.17'"
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert install_command(["wandb"]) == f"{tmp_path}/.venv/bin/python -m pip install wandb"
    # As in an environment of uv.
    monkeypatch.setattr(extras, "PathFinder", SimpleNamespace(find_spec=lambda name: None))
    assert (
        install_command(["wandb"]) == f"uv pip install --python {tmp_path}/.venv/bin/python wandb"
    )


def test_looking_for_pip_leaves_setuptools_its_distutils() -> None:
    program = """
import warnings
from monograph.extras import install_command
install_command(["wandb"])
warnings.simplefilter("error")
import setuptools, distutils
print(distutils.__file__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "setuptools" in done.stdout


def test_an_extra_is_what_its_metadata_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [
        "torch>=2.11",
        "gguf>=0.17; extra == 'gguf'",
        'datasets>=4.0; extra == "hub"',
        'pyarrow; extra == "hub"',
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: said)
    assert command_for("gguf", "gguf").endswith(" install 'gguf>=0.17'")
    assert command_for("hub", "huggingface_hub").endswith(" install 'datasets>=4.0' pyarrow")
    assert command_for("zstd", "zstandard").endswith(" install zstandard")


def test_nobody_is_told_to_ask_an_index_for_this_package() -> None:
    """Its name there may be a stranger's: a command takes a path, or the libraries by their names."""
    asks = re.compile(r"(pip|pipx|uv tool) install [^\n`]*['\" ]monograph(?![\w./-])")
    places = [*PAGES, *(ROOT / "src").rglob("*.py"), ROOT / "setup_venv.py", ROOT / "Makefile"]
    assert not [str(path) for path in places if asks.search(path.read_text())]
    assert asks.search("pip install 'monograph[gguf]'") and not asks.search(
        "pip install 'dist/monograph-0.2.0.whl'"
    )


def test_what_the_readme_shows_works_in_the_environment_that_it_makes() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    [installed] = re.findall(r'else "\.\[([\w,]+)\]"', (ROOT / "setup_venv.py").read_text())
    assert set(installed.split(",")) == {"serve", "gguf", "tensorboard"} <= extras.keys()
    pinned = (ROOT / "constraints.txt").read_text()
    for extra in installed.split(","):
        for requirement in extras[extra]:
            assert f"\n{requirement.partition('>')[0]}==" in pinned, requirement
