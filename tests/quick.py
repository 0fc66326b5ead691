"""`make quick`: the tests that touch what changed, the cheapest first, as many as a minute holds.

    python tests/quick.py [PYTEST ARGUMENT ...]

What changed is what git says of the working tree and of the commits that the branch has over
`origin/main` (else over `main`). A test file touches a file of the package that it, or a helper of
the tests, imports; whose name it has; or for which a row of CONTRIBUTING.md names it. What a test
file costs is known from `benchmarks/results/tests.json`, which `make test-costs` writes. A minute
of CPU time is more by the clock if the machine is busy.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

from costs import UNKNOWN_CPU_S, measured_cpu_s

ROOT = Path(__file__).resolve().parents[1]
BUDGET_CPU_S = 60.0  # of both workers together; lint takes the other half of the minute
TEST = r"tests/[\w/]+(?:\.py)?"


def git(*arguments: str) -> list[str]:
    """The lines that a git command prints; none where it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed() -> set[str]:
    """Paths of files that differ from the branch's beginning, or are new."""
    begun = (
        git("merge-base", "HEAD", "origin/main") or git("merge-base", "HEAD", "main") or ["HEAD"]
    )
    return {
        *git("diff", "--name-only", begun[0]),
        *git("ls-files", "--others", "--exclude-standard"),
    }


def module(path: str) -> str:
    """The name under which a file of the package, or a helper of the tests, is imported."""
    return (
        path.removeprefix("src/")
        .removeprefix("tests/")
        .removesuffix(".py")
        .removesuffix("/__init__")
        .replace("/", ".")
    )


@functools.cache
def imported(test: Path) -> frozenset[str]:
    """Every module, and every name in one, that a file of the tests imports, or that its helpers
    do.
    """
    found = set[str]()
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    helpers = (ROOT / "tests" / f"{name.replace('.', '/')}.py" for name in found)
    of_helpers = (imported(helper) for helper in helpers if helper != test and helper.is_file())
    return frozenset(found).union(*of_helpers)


def named_by_rows(paths: set[str]) -> set[str]:
    """The files and folders of tests that the rows of CONTRIBUTING.md name for the paths."""
    rows = [
        line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("|")
    ]
    return {
        test
        for row in rows
        if any(f"]({path})" in row for path in paths)
        for test in re.findall(TEST, row)
    }


def touching(paths: set[str]) -> list[str]:
    """Test files that are among the paths, or that touch one of them."""
    source = {path for path in paths if path.startswith("src/")}
    modules, names = (
        {module(path) for path in paths},
        {f"test_{Path(path).stem}.py" for path in source},
    )
    tests = {
        test.relative_to(ROOT).as_posix(): test
        for test in sorted((ROOT / "tests").rglob("test_*.py"))
    }
    wanted = tuple(paths | named_by_rows(source))
    return [
        name
        for name, test in tests.items()
        if name.startswith(wanted) or test.name in names or imported(test) & modules
    ]


def chosen(
    tests: list[str], costs: dict[str, float], paths: set[str]
) -> tuple[list[str], list[str]]:
    """Those that fit the budget, and those that do not; tests that are among the changed paths are
    run in addition.
    """
    fits, left, spent_s = [test for test in tests if test in paths], list[str](), 0.0
    for test in sorted({*tests} - paths, key=lambda test: costs.get(test, UNKNOWN_CPU_S)):
        spent_s += costs.get(test, UNKNOWN_CPU_S)
        (fits if spent_s <= BUDGET_CPU_S or not fits else left).append(test)
    return fits, left


def main() -> int:
    """Run them; the exit code is pytest's."""
    paths = changed()
    fits, left = chosen(touching(paths), measured_cpu_s(), paths)
    if left:
        print(f"left for `make test`: {' '.join(left)}")
    if not fits:
        print("no test touches what changed")
        return 0
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "--forks",
        "2",
        *fits,
    ]
    return subprocess.run([*command, *sys.argv[1:]], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
