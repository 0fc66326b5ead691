"""Run: pytest tests/test_house.py

What keeps the code in order: layers, lazy imports, one reader of what others wrote.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import monograph

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src" / "monograph").rglob("*.py"))
TESTS = sorted(path for path in (ROOT / "tests").rglob("test_*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def nodes() -> dict[Path, list[ast.AST]]:
    """All nodes of each file of the package that may read JSON or look for a home: parsed and
    walked once.
    """
    texts = {path: path.read_text() for path in SOURCES}
    return {
        path: [*ast.walk(ast.parse(text))]
        for path, text in texts.items()
        if re.search(r"json(lib)?\s*\.\s*load|expanduser", text)
    }


def test_no_drawer_for_everything() -> None:
    drawers = {"utils", "util", "helpers", "common", "misc"}
    assert not [
        name(path) for path in SOURCES if drawers & {path.stem, *path.relative_to(ROOT).parts}
    ]


def test_each_test_file_says_how_to_run_it() -> None:
    silent = [name(path) for path in TESTS if name(path) not in path.read_text().split("\n", 1)[0]]
    assert not silent


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(folder / "src")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("room", "line", "refusal"),
    [
        ("", "", None),
        (
            "errors.py",
            "import monograph.step",
            "monograph.errors is not allowed to import monograph.step",
        ),
        (
            "loss.py",
            "import monograph.optim",
            "monograph.loss is not allowed to import monograph.optim",
        ),
        ("nowhere.py", "", "monograph.nowhere"),
    ],
    ids=["the house", "upward", "sideways", "unplaced"],
)
def test_imports_point_down(room: str, line: str, refusal: str | None, tmp_path: Path) -> None:
    pytest.importorskip("importlinter")
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    if room:
        with (tmp_path / "src" / "monograph" / room).open("a") as file:
            file.write(f"\n{line}\n")
    done = lint(tmp_path)
    assert (done.returncode == 0) == (refusal is None), done.stdout
    assert refusal is None or refusal in done.stdout


def fresh(program: str) -> str:
    """What `program` prints in a new process that has imported nothing."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_import_monograph_imports_nothing_heavy() -> None:
    program = "import sys, monograph; dir(monograph); print({'torch', 'numpy', 'pydantic', 'typer'} & set(sys.modules))"
    assert fresh(program) == "set()\n"


def test_every_public_name_is_there() -> None:
    assert all(hasattr(monograph, name) for name in monograph.__all__)


@pytest.mark.slow
def test_every_public_name_is_there_whatever_was_imported_before() -> None:
    missing = fresh(
        "import monograph\n"
        "for name in monograph.__all__:\n"
        "    try: getattr(monograph, name)\n"
        "    except Exception as error: print(name, repr(error))"
    )
    assert not missing


def test_a_public_name_is_never_a_room() -> None:
    """`monograph.train` must be the function whatever was imported first, so no room may have a
    public name's name.
    """
    rooms = {path.stem for path in (ROOT / "src" / "monograph").iterdir()}
    assert not rooms & set(monograph.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = monograph.trian


def test_constraints_pin_every_dependency_and_name_no_build_or_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    wanted = [
        *project["dependencies"],
        *itertools.chain(*project["optional-dependencies"].values()),
    ]
    assert {
        requirement.split(">=")[0] for requirement in wanted if ">=" in requirement
    } <= pins.keys()
    assert not [pin for pin in pins.values() if not all(part.isdigit() for part in pin.split("."))]


# What they read is what this program wrote itself, through a pipe or from an engine's own text.
OWN_JSON = {
    "lm_eval/model.py",
    "text/sandbox.py",
    "text/template.py",
    "distributed/world.py",
    "text/tokenizer.py",
}
OWN_JSON |= {
    "model/gguf_words.py",
    "text/tokenizer_trial.py",
    "data/tables.py",
    "data/conversations.py",
    "profiling/profiler.py",
    "profiling/memory.py",
    "rl/processes.py",
    "rl/worker.py",
}


def test_json_of_others_has_one_reader_and_homes_one_function(
    nodes: dict[Path, list[ast.AST]],
) -> None:
    """`parse_json` refuses a key that is there twice; `Path.expanduser` raises where `~NAME` is no
    user's home.
    """
    for path in nodes:
        inner = path.relative_to(ROOT / "src" / "monograph").as_posix()
        for node in nodes[path]:
            if isinstance(node, ast.Attribute) and node.attr in ("expanduser", "load", "loads"):
                text = ast.unparse(node)
                assert node.attr != "expanduser" or text == "os.path.expanduser", name(path)
                assert (
                    text not in ("json.loads", "json.load", "jsonlib.loads") or inner in OWN_JSON
                ), name(path)


def test_mutants_are_put_into_files_and_sought_by_tests_that_exist() -> None:
    # Its own imports are installed by `make mutants` alone, so its text is read.
    named = set(re.findall(r'"([\w/]+\.py)"', (ROOT / "tests/mutants.py").read_text()))
    folders = (ROOT / "src/monograph", ROOT / "tests")
    assert named
    assert not [name for name in named if not any((folder / name).exists() for folder in folders)]


def test_no_step_engine_or_plan_is_any() -> None:
    """mypy is strict, but would let anything pass that somebody calls `Any`."""
    names = "step|engine|parameters|planes?|optim|schedule|walk|store|world|plan|job|session|objective|settings"
    untyped = re.compile(rf"\b({names})\b: Any\b")
    lines = [
        f"{name(path)}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text().splitlines()
    ]
    assert len(SOURCES) > 300 and [line for line in lines if untyped.search(line)] == []
