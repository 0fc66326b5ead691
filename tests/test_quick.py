"""Which tests `make quick` runs: `pytest tests/test_quick.py`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import quick

ROOT = Path(__file__).resolve().parents[1]


def test_a_changed_file_draws_the_tests_that_import_it() -> None:
    touched = quick.touching({"src/monograph/step/clip.py"})
    assert "tests/test_clip.py" in touched
    assert "tests/test_quick.py" not in touched


def test_the_cheapest_fit_the_budget_and_the_others_are_named() -> None:
    costs = {"tests/cheap.py": 1.0, "tests/dear.py": quick.BUDGET_CPU_S + 1}
    assert quick.chosen([*costs], costs, set()) == (["tests/cheap.py"], ["tests/dear.py"])
    fits, _ = quick.chosen([*costs], costs, {"tests/dear.py"})
    assert fits == ["tests/dear.py", "tests/cheap.py"], (
        "what was changed itself is run whatever it costs"
    )


@pytest.mark.parametrize(
    "paths", [{"src/monograph/step/clip.py"}, {"README.md", "tests/test_clip.py"}]
)
def test_every_test_that_it_runs_is_there(paths: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(quick, "changed", lambda: paths)
    monkeypatch.setattr(quick.subprocess, "run", run)
    monkeypatch.setattr(quick.sys, "argv", ["quick.py"])
    assert quick.main() == 0
    tests = [
        argument.partition("::")[0] for argument in commands[0] if argument.startswith("tests/")
    ]
    assert tests
    assert all((ROOT / test).is_file() for test in tests)


def test_nothing_that_touches_a_test_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "changed", lambda: {"CHANGELOG.md"})
    monkeypatch.setattr(quick, "touching", lambda paths: [])
    monkeypatch.setattr(
        quick.subprocess, "run", lambda *_, **__: pytest.fail("pytest without a file runs them all")
    )
    assert quick.main() == 0
