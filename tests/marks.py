"""How dense the package's code is, beside what it was and beside other projects. A mirror, not a
limit.

Run: make marks          (ARGS=--record keeps today's figures, ARGS=--list names the places)

Each figure counts something that makes code hard to read where it is misused: unrelated values on
one line, conditions inside expressions, assignments that a reader must hunt for, lines that do not
fit, formatting that was switched off, one name for several things. Some of each reads well; nothing
is rewritten for a count.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "monograph"
RECORD = ROOT / "benchmarks" / "results" / "marks.json"
WIDE = 110  # columns from which on a line counts as wide

# Per 100 lines of code, and in all for the last two; counted in November 2026 in their main
# branches.
ANCHORS: dict[str, tuple[float | None, ...]] = {
    "nanochat": (0.74, None, 1.5, 0.0, 3.7, 26.0, 0, None),
    "equinox": (0.03, None, 0.7, 0.01, 0.1, 11.0, 0, None),
    "gpt-fast": (0.33, None, 0.5, 0.0, 2.3, 9.0, 0, None),
    "litgpt": (0.17, None, 0.8, 0.1, 2.5, 8.0, 0, None),
}


class Marks(NamedTuple):
    """What is counted: per 100 lines of code but for those in all."""

    parallel: float
    parallel_of_three: int  # in all
    ternaries: float
    walruses: float
    wide: float
    comments: float
    unformatted: int  # in all
    shared_names: int  # in all


TITLES = (
    "assignments of several values, per 100 lines",
    "of three and more, in all",
    "conditions inside expressions",
    "assignments inside expressions",
    f"lines of {WIDE} columns and more",
    "comments",
    "fmt: skip and fmt: off, in all",
    "public types of the same name, in all",
)
_TYPE_NAME = re.compile("[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Place(NamedTuple):
    """Where something was found."""

    kind: str
    path: Path
    line: int


class Counted(NamedTuple):
    """What one file has."""

    code_lines: int
    comments: int
    wide: int
    places: list[Place]
    types: dict[str, str]  # public type: the expression that it is an alias of, or "" for a class


def count(path: Path) -> Counted:
    """Return what a file has."""
    text = path.read_text()
    tree = ast.parse(text)
    tokens = [*tokenize.generate_tokens(io.StringIO(text).readline)]
    documented = {
        line for node in docstrings(tree) for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    code: set[int] = set()
    for token in tokens:
        if token.type not in _NO_CODE:
            code |= {*range(token.start[0], token.end[0] + 1)} - documented
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    unformatted = [
        Place("unformatted", path, token.start[0])
        for token in comments
        if "# fmt: " in token.string
    ]
    lines = text.splitlines()
    wide = sum(len(lines[number - 1]) >= WIDE for number in code)
    return Counted(
        len(code),
        len(comments) - len(unformatted),
        wide,
        [*unformatted, *found(tree, path)],
        dict(public_types(tree)),
    )


def docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the docstrings of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first


def public_types(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the public classes of a file, each with "", and its aliases of types, each with the
    expression behind it. A name in capital and small letters is taken for a type's.
    """
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, ""
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and _TYPE_NAME.fullmatch(target.id):
                yield target.id, ast.unparse(node.value)


def found(tree: ast.Module, path: Path) -> Iterator[Place]:
    """Yield the assignments and conditions that are counted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            target = node.targets[0]
            if isinstance(target, ast.Tuple):
                yield Place("parallel", path, node.lineno)
                if len(target.elts) > 2:
                    yield Place("parallel_of_three", path, node.lineno)
        elif isinstance(node, ast.IfExp):
            yield Place("ternaries", path, node.lineno)
        elif isinstance(node, ast.NamedExpr):
            yield Place("walruses", path, node.lineno)


def marks_of(files: Iterable[Path]) -> tuple[Marks, list[Place], dict[str, list[str]]]:
    """Return the figures of files, the places behind them, and the files of each name that stands
    for several types.
    """
    counted = {path: count(path) for path in files}
    places = [place for each in counted.values() for place in each.places]
    times = Counter(place.kind for place in places)
    lines = sum(each.code_lines for each in counted.values())
    named = defaultdict[str, list[tuple[str, str]]](list)
    for path, each in counted.items():
        for name, meaning in each.types.items():
            named[name].append((path.name, meaning))
    shared = {
        name: [path for path, _ in homes]
        for name, homes in named.items()
        if len(homes) > 1 and not _are_one_alias({meaning for _, meaning in homes})
    }

    def per_100(number: int) -> float:
        return round(100 * number / lines, 2)

    marks = Marks(
        per_100(times["parallel"]),
        times["parallel_of_three"],
        per_100(times["ternaries"]),
        per_100(times["walruses"]),
        per_100(sum(each.wide for each in counted.values())),
        per_100(sum(each.comments for each in counted.values())),
        times["unformatted"],
        len(shared),
    )
    return marks, places, shared


def _are_one_alias(meanings: set[str]) -> bool:
    # Rooms that do not import each other may each write the same alias; it stands for one thing.
    return len(meanings) == 1 and "" not in meanings


def table(now: Marks, before: dict[str, object] | None) -> Iterator[str]:
    """Yield the lines of the table."""
    then = Marks(**before["marks"]) if before else None  # type: ignore[arg-type]
    heads = ["now", str(before["date"]) if before else "before", *ANCHORS]
    yield " " * 46 + "".join(f"{head:>12}" for head in heads)
    for index, title in enumerate(TITLES):
        values = [
            now[index],
            then[index] if then else None,
            *(anchor[index] for anchor in ANCHORS.values()),
        ]
        yield f"{title:46}" + "".join(
            f"{'' if value is None else f'{value:g}':>12}" for value in values
        )


def main() -> None:
    """Print the table; see the top."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--record", action="store_true", help=f"add today's figures to {RECORD.name}"
    )
    parser.add_argument(
        "--list", metavar="KIND", help=f"name the places of {', '.join(Marks._fields)}"
    )
    given = parser.parse_args()
    now, places, shared = marks_of(sorted(SRC.rglob("*.py")))
    record: list[dict[str, object]] = json.loads(RECORD.read_text()) if RECORD.exists() else []
    if given.list == "shared_names":
        for name, paths in sorted(shared.items()):
            print(f"{name}: {', '.join(sorted(paths))}")
        return
    if given.list:
        for place in places:
            if place.kind == given.list:
                print(f"{place.path.relative_to(ROOT)}:{place.line}")
        return
    for line in table(now, record[-1] if record else None):
        print(line)
    if given.record:
        record.append({"date": date.today().isoformat(), "marks": now._asdict()})
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
