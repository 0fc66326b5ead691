"""Which lines of the package only a GPU reaches, and which of them were reached.

    PYTHONPATH=tests python -m pretended_gpu.reached            lists the lines, by reading the conditions
    PYTHONPATH=tests python -m pretended_gpu.reached FOLDER     those that coverage's files in the folder do not have

A line is a GPU's if it is under a condition that asks for one (`x.is_cuda`, `type == "cuda"`,
`torch.cuda.is_available()`), behind a return of everything else, or in a function or class that is
named after CUDA. What asks for the device of a plan (`device_type`) is not: a CPU plans for GPUs.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "monograph"
# Lines that no test on a pretended sm_90 executes, by their file and the beginning of their text,
# with the reason.
CANNOT = {
    "device.py: raise UsageError(": "a card older than torch's build: tests/test_device.py has one by name",
    'graph/precision.py: return "this GPU has no bf16': "a card without bf16: so has tests/graph/test_precision.py",
    "planner/streaming.py: updates +=": "planning for a GPU, which a CPU's tests do",
    "session/ladder.py: torch.cuda.empty_cache()": "a ladder on a card takes minutes",
    "session/warmup.py: return peak_memory_bytes": "the same",
    "session/session.py: return": "a rank of several, in a process that is not measured: test_ranks.py",
}


def asks(test: ast.expr) -> int:
    """Return 1 if a condition holds on a GPU only, -1 if it fails on a GPU only, else 0."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return -asks(test.operand)
    if isinstance(test, ast.BoolOp):
        each = {asks(value) for value in test.values}
        both = isinstance(test.op, ast.And)
        return int(both and 1 in each and -1 not in each) - int(not both and -1 in each)
    match test:
        case (
            ast.Attribute(attr="is_cuda")
            | ast.Name("cuda" | "on_cuda")
            | ast.Call(ast.Attribute(attr="is_available"))
        ):
            return 1
        case ast.Compare(
            ast.Attribute(attr="type"), [operator], [ast.Constant("cuda" | "cpu" as kind)]
        ):
            return 1 if (kind == "cuda") == isinstance(operator, ast.Eq) else -1
    return 0


def of_a_gpu(body: Sequence[ast.stmt], inside: bool = False) -> Iterator[ast.stmt]:
    """Yield the statements of a block that only a GPU executes, those of inner blocks included."""
    for statement in body:
        named = (
            isinstance(statement, ast.FunctionDef | ast.ClassDef)
            and "cuda" in statement.name.lower()
        )
        within = inside or named
        if inside and not is_docstring(statement):
            yield statement
        sign = asks(statement.test) if isinstance(statement, ast.If) else 0
        for name in ("body", "orelse", "finalbody"):
            yield from of_a_gpu(
                getattr(statement, name, []), within or sign == {"body": 1, "orelse": -1}.get(name)
            )
        for each in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            yield from of_a_gpu(each.body, within)
        if isinstance(statement, ast.If) and not statement.orelse and asks(statement.test) == -1:
            inside = inside or isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue)


def is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def lines(root: Path = PACKAGE) -> dict[Path, dict[int, str]]:
    """Return the first lines of a GPU's statements, and their text, by file."""
    found: dict[Path, dict[int, str]] = {}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        every = text.splitlines()
        mine = {
            each.lineno: every[each.lineno - 1].strip() for each in of_a_gpu(ast.parse(text).body)
        }
        if mine:
            found[path] = mine
    return found


def settings(folder: Path) -> str:
    """Return coverage's settings for runs that write to a folder, in whatever process they are."""
    return f"""[run]
parallel = true
data_file = {folder}/coverage
source = {PACKAGE}
patch = subprocess, _exit
"""


def executed(folder: Path) -> dict[Path, set[int]]:
    """Return the lines of the package that the runs executed."""
    import coverage

    found: dict[Path, set[int]] = {}
    for file in folder.glob("coverage.*"):
        data = coverage.CoverageData(str(file))
        data.read()
        for name in data.measured_files():
            found.setdefault(Path(name), set()).update(data.lines(name) or [])
    return found


def main(arguments: list[str]) -> int:
    """Print the lines that were not reached, and how many were; return 1 if one of them has no
    reason.
    """
    mine, reached, silent = lines(), executed(Path(arguments[0])) if arguments else {}, 0
    missed = [
        (f"{path.relative_to(PACKAGE)}:{number}", text)
        for path, of in mine.items()
        for number, text in of.items()
        if number not in reached.get(path, ())
    ]
    for place, text in missed:
        line = f"{place.partition(':')[0]}: {text}"
        reason = next((why for begin, why in CANNOT.items() if line.startswith(begin)), "")
        silent += not reason
        print(f"{place}: {text}" + (f"   # {reason}" if reason else ""))
    total = sum(map(len, mine.values()))
    print(
        f"{total - len(missed)} of {total} lines that only a GPU reaches were reached, {silent} are not explained"
    )
    return int(bool(arguments) and silent > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
