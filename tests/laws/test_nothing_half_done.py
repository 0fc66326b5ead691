"""Run: pytest tests/laws/test_nothing_half_done.py [-m slow] (faults at every operation of all else that writes)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from faults.harness import FaultServer, unavailable
from faults.scenarios import CASES, Case

pytestmark = [
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or ""),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
REFUSALS = {"DiskFull", "InputRefused", "RunInUse"}
SAID = ("OSError: [Errno 5]", "OSError: [Errno 28]")  # which the command line says in one line, with exit code 7


@pytest.fixture(scope="module")
def faults() -> Iterator[FaultServer]:
    with FaultServer() as server:
        yield server


@pytest.fixture(autouse=True)
def no_plug_is_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def struck_everywhere(
    case: Case, faults: FaultServer, scratch: Path, modes: Sequence[str], stride: int
) -> Counter[str]:
    """What was found after each fault; nothing may be lost, and the next time must come to its end."""
    found: Counter[str] = Counter()
    (scratch / "prepared").mkdir()
    case.prepare(scratch / "prepared")
    for outcome in faults.every_operation(case.steps, scratch / "prepared", scratch, modes, stride):
        where = f"{outcome.mode} at {outcome.number}, {outcome.operation}: {outcome.error}"
        assert outcome.killed == (outcome.mode in ("kill", "torn")) and (outcome.killed or not outcome.signal), where
        refused = outcome.error is None or outcome.error[0] in REFUSALS
        assert refused or ": ".join(outcome.error or ()).startswith(SAID), where
        try:
            verdict = case.look(outcome.folder)
            assert verdict == "new" or outcome.killed or outcome.error
            case.again(outcome.folder)
        except Exception as error:
            raise AssertionError(where) from error
        found[verdict] += 1
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_fault_at_any_operation_leaves_the_former_or_the_new(name: str, faults: FaultServer, tmp_path: Path) -> None:
    found = struck_everywhere(CASES[name], faults, tmp_path, CASES[name].modes, CASES[name].stride)
    print(f"{name}: {found.total()} faults, {dict(found)}, none lost")
    assert found["former"] and found.total() >= 20
