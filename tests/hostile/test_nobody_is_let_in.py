"""Run: pytest tests/hostile/test_nobody_is_let_in.py (what the package's own code may not do, by
its bytecode).
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

import monograph
from monograph.run.recipe import ModelRecipe

PACKAGE = Path(monograph.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
# Names that unpickle, extract archives, or run a text as a program.
NEVER = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "Unpickler", "allow_pickle",
    "tarfile", "zipfile", "unpack_archive", "extractall", "eval", "exec", "execfile", "system", "popen", "yaml",
    "__import__",
}  # fmt: skip
# Where a name of these means something else, or the one thing that it is there for.
ALLOWED = {
    "eval": {  # a module's own method: it is to compute, not to learn
        "commands/compare.py", "commands/evaluate.py", "decode/completion.py", "decode/generator.py",
        "distributed/sharded.py", "evaluation/choices.py", "rl/rollouts.py",
        "serve/versions.py", "engine.py", "graph/siblings.py", "lm_eval/model.py",
        "ensemble/one_base.py",
    },
    "system": {"serve/messages_request.py"},  # the system prompt of a request
    # What an archive says of its entries is read, and none of them.
    "zipfile": {"model/torch_file.py"},
}  # fmt: skip
RUNS_A_TEXT = {"rl/worker.py"}  # a reward's programs, in processes of their own
STARTS_PROGRAMS = {"text/template.py", "text/tokenizer_trial.py", "rl/processes.py"}
# This package's own: one compiles the constraints of requests, one a first graph for a new cache
# folder.
STARTS_PROGRAMS |= {"serve/compiling.py", "storage/cache_dir.py"}
# Of model.init = FILE.py:FUNCTION, which a person names as they name a program.
RUNS_A_FILE = {"run/recipe.py"}


def names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names(constant)


@functools.cache
def compiled(path: Path) -> set[str]:
    return set(names(compile(path.read_text(), str(path), "exec")))


@pytest.fixture(scope="module")
def nodes() -> dict[str, list[ast.AST]]:
    """All nodes of each file of the package: they are parsed and walked once."""
    return {
        path.relative_to(PACKAGE).as_posix(): [*ast.walk(ast.parse(path.read_text()))]
        for path in SOURCES
    }


def test_nothing_unpickles_or_extracts_and_one_program_runs_a_text(
    nodes: dict[str, list[ast.AST]],
) -> None:
    found = {
        (each, path.relative_to(PACKAGE).as_posix())
        for path in SOURCES
        for each in compiled(path) & NEVER
    }
    expected = {(name, file) for name, files in ALLOWED.items() for file in files}
    assert found == expected | {("exec", file) for file in RUNS_A_TEXT}
    for name, files in ALLOWED.items():  # and there it is a method, not the built-in function
        for file in files:
            calls = [node.func for node in nodes[file] if isinstance(node, ast.Call)]
            assert not [each for each in calls if isinstance(each, ast.Name) and each.id == name], (
                file
            )


def test_weights_are_the_only_thing_that_torch_loads(nodes: dict[str, list[ast.AST]]) -> None:
    """`torch.load` is called once, and with `weights_only=True`."""
    calls = []
    for file, of_file in nodes.items():
        for node in of_file:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "torch.load",
                "np.load",
                "numpy.load",
            ):
                options = {each.arg: ast.unparse(each.value) for each in node.keywords}
                calls.append((file, options.get("weights_only")))
    assert calls == [("model/torch_file.py", "True")]


def test_programs_are_started_in_five_places_and_files_run_in_one() -> None:
    by_file = {path.relative_to(PACKAGE).as_posix(): compiled(path) for path in SOURCES}
    started = {
        file
        for file, found in by_file.items()
        if found & {"Popen", "check_output", "posix_spawn", "execv"}
    }
    started |= {file for file, found in by_file.items() if {"subprocess", "run"} <= found}
    assert started == STARTS_PROGRAMS
    assert {file for file, found in by_file.items() if "exec_module" in found} == RUNS_A_FILE


def imports(nodes: list[ast.AST], name: str, *modules: str) -> bool:
    found = (node for node in nodes if isinstance(node, ast.ImportFrom))
    return any(
        node.module in modules and name in {each.name for each in node.names} for node in found
    )


def test_what_runs_a_file_knows_who_named_it(nodes: dict[str, list[ast.AST]]) -> None:
    """A checkpoint vouches for no program, and settings of a run are read where they are held to
    that run's rules.

    All else that reads a TOML file reads one that a person named, and looks whether it is a run's,
    or writes it itself.
    """
    runs = {
        file
        for file, found in nodes.items()
        if imports(found, "build_from_file", "monograph.run.recipe")
    }
    assert runs == {"run/models.py"}
    homes = "monograph.config", "monograph.config.sources"
    reads = {file for file, found in nodes.items() if imports(found, "load", *homes)}
    assert reads == {
        "config/__init__.py",
        "session/recorded.py",
        "sweeps/spec.py",
        "sweeps/folder.py",
    }
    for file in ("cli/typed.py", "sweeps/spec.py"):
        assert "command_line_settings" in compiled(PACKAGE / file)
    vouched = {"evil.py:build": "digest"}
    recipe = ModelRecipe.recorded(
        {"init": "evil.py:build", "preset": "auto", "sizes": {}, "seed": 0, "vouched": vouched}
    )
    assert not recipe.vouched, "a checkpoint vouches for nothing"


def test_every_dependency_has_its_reason() -> None:
    root = PACKAGE.parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    rows = re.findall(
        r"^\| ([\w-]+)(?: \(extra\))? \|.*\| ([\d.]+)", (root / "SECURITY.md").read_text(), re.M
    )
    wanted = [*project["dependencies"], *extras["parquet"], *extras["zstd"]]
    assert sorted(f"{name}>={floor}" for name, floor in rows) == sorted(wanted)


@pytest.mark.parametrize(
    "name", ["import pickle", "x = eval('1')", "from zipfile import ZipFile", "os.system('true')"]
)
def test_the_check_sees_them(name: str) -> None:
    assert set(names(compile(name, "x", "exec"))) & NEVER


# Where a file is opened for reading that no person names: parts of the system, and what this
# process wrote itself.
NO_INPUT = {
    "checkpointing/folder.py": "a checkpoint, with the same care and never through a link",
    "commands/generate.py": "a pipe of the shell's, <(command), up to a bound",
    "compat/inductor.py": "what the compiler wrote",
    "cards.py": "a table of the package",
    "commands/recipes.py": "a recipe of the package",
    "config/recipes.py": "the recipes of the package",
    "device.py": "/proc and /sys",
    "distributed/checkpoint.py": "a file that this process writes on",
    "distributed/world.py": "/proc",
    "storage/reading.py": "the one place",
    "storage/writing.py": "a file or a folder, to sync it",
    "graph/matmul.py": "a source of the package",
    "model/files.py": "a copy that this process has just made",
    "profiling/memory.py": "/proc",
    "profiling/profiler.py": "a trace that was just written",
    "report/page.py": "a page of the package",
    "serve/app.py": "a page and a document of the package",
    "serve/compiling.py": "a pipe to a process of its own",
    "run/trust.py": "the secret of this user, never through a link",
}


def opens(call: ast.Call) -> bool:
    """Whether that opens a file for reading by its path, as far as a call shows it."""
    name, mode = (
        ast.unparse(call.func),
        [*call.args, *(each.value for each in call.keywords if each.arg == "mode")],
    )
    if name == "os.open":
        return "O_RDONLY" in ast.unparse(call)
    if name == "open":
        return not any(
            isinstance(each, ast.Constant) and str(each.value)[:1] in "wxa" for each in mode[1:]
        )
    if name.endswith((".read_text", ".read_bytes")):
        return True
    return name.endswith(".open") and any(
        isinstance(each, ast.Constant) and each.value in ("r", "rb") for each in mode
    )


def test_inputs_are_opened_in_one_place(nodes: dict[str, list[ast.AST]]) -> None:
    """`open_input` refuses a FIFO, which would be waited for, and a device, which may never end."""
    calls = [
        (file, node)
        for file, found in nodes.items()
        for node in found
        if isinstance(node, ast.Call)
    ]
    assert {file for file, call in calls if opens(call)} == NO_INPUT.keys()
