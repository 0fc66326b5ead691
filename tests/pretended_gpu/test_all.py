"""Run: pytest tests/pretended_gpu/test_all.py (which tests `make gpu-less ARGS=...` runs, and how)"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script, which imports what lies beside it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from pretended_gpu import all

    return all


@pytest.mark.parametrize(
    ("arguments", "numbers", "marked"),
    [
        (["tests/laws"], True, True),
        (["tests/laws", "-m", "gpu and not slow"], True, False),
        (["tests/pretended_gpu/test_order.py"], True, False),
        (["tests/pretended_gpu/test_planned.py", "-k", "nf4"], False, False),
        (["tests/pretended_gpu/test_machine_code.py"], False, False),
        (["tests/pretended_gpu/test_counts.py::test_one"], False, False),
    ],
)
def test_arguments_run_tests_for_a_gpu_and_compute_where_these_need_numbers(
    every: ModuleType, arguments: list[str], numbers: bool, marked: bool
) -> None:
    part = every.part_of(arguments)
    assert (part.sm, part.numbers, part.tests == ["-m", "gpu"]) == ("90", numbers, marked)


def test_every_test_of_the_pretended_card_is_of_a_part(every: ModuleType) -> None:
    """Those that need no card are run with all other tests, too."""
    without_a_card = {"all", "environment", "planted", "reached"}
    here = Path(__file__).parent
    names = {path.stem.removeprefix("test_") for path in here.glob("test_*.py")} - without_a_card
    ran = {argument for part in every.ALL + every.NIGHTLY for argument in part.tests}
    assert {name for name in names if f"{every.HERE}/test_{name}.py" not in ran} == set()
