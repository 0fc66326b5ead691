"""Run: pytest tests/laws/test_nothing_half_done.py [-m slow] (faults at every operation of all else
that writes).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import pytest

from daily import nightly
from faults.harness import EVERY_FAULT, EVERY_UNREAD, FaultServer, Outcome, unavailable
from faults.power import power_cuts
from faults.scenarios import CASES, Case

pytestmark = [
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or ""),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
REFUSALS = {"DiskFull", "InputRefused", "NoValidCheckpoint", "RunInUse", "Unreadable", "UsageError"}
# Which take long each time, and are made of what the others write, and saves.
ONLY_AT_NIGHT = {"train", "sweep"}
# The first three are made of saves, the last one is made anew.
NEVER_CUT = {"sweep", "stream", "train", "follow"}
# By day one format of a model, since adapters are written alike, and a run's beginning, since a
# student begins so.
LIKE_OTHERS = {
    "export gguf",
    "export of adapters, hf",
    "export of adapters, gguf",
    "student",
    "stream",
}
# Which the command line says in one line, with exit code 7.
SAID = ("OSError: [Errno 5]", "OSError: [Errno 28]")


def named(cases: Set[str]) -> list[Any]:
    return nightly(sorted(cases), cases - LIKE_OTHERS)


@pytest.fixture(autouse=True)
def no_plug_is_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def require_true(verdict: str, outcome: Outcome) -> None:
    """What an error says of what was kept is so, and a failing disk has its own exit code."""
    kind, said = outcome.error or ("", "")
    assert "nothing was kept" not in said or verdict == "former"
    assert "is written whole" not in said or verdict == "new"
    if outcome.mode in ("full-once", "full", "broken-once", "broken"):
        assert kind in ("", "DiskFull", "OSError", "Unreadable")


def struck_everywhere(
    case: Case, faults: FaultServer, scratch: Path, modes: Sequence[str], stride: int
) -> Counter[str]:
    """What was found after each fault; nothing may be lost, and the next time must come to its end."""
    found: Counter[str] = Counter()
    reads = modes[0] in EVERY_UNREAD
    (scratch / "prepared").mkdir()
    case.prepare(scratch / "prepared")
    for outcome in faults.every_operation(case.steps, scratch / "prepared", scratch, modes, stride):
        where = f"{outcome.mode} at {outcome.number}, {outcome.operation}: {outcome.error}"
        assert outcome.killed == (outcome.mode in ("kill", "torn")) and (
            outcome.killed or not outcome.signal
        ), where
        refused = outcome.error is None or outcome.error[0] in REFUSALS - (
            {"NoValidCheckpoint"} if reads else set()
        )
        assert refused or (": ".join(outcome.error or ()).startswith(SAID) and not reads), where
        try:
            verdict = case.look(outcome.folder)
            assert verdict == "new" or outcome.killed or outcome.error
            require_true(verdict, outcome)
            case.again(outcome.folder)
        except Exception as error:
            raise AssertionError(where) from error
        found[verdict] += 1
    return found


@pytest.mark.parametrize("name", named(CASES.keys() - ONLY_AT_NIGHT))
def test_a_fault_at_any_operation_leaves_the_former_or_the_new(
    name: str, faults: FaultServer, tmp_path: Path
) -> None:
    found = struck_everywhere(CASES[name], faults, tmp_path, CASES[name].modes, CASES[name].stride)
    print(f"{name}: {found.total()} faults, {dict(found)}, none lost")
    assert found["former"] and found.total() >= len(CASES[name].modes)


@pytest.mark.parametrize(
    ("modes", "stride"),
    [(("EIO", "EMFILE from here on"), 15), pytest.param(EVERY_UNREAD, 1, marks=pytest.mark.slow)],
)
# Others: test_unread_is_unknown.
@pytest.mark.parametrize("name", ["metrics", "beginning", "resume"])
def test_a_read_that_fails_is_a_refusal_and_nothing_is_lost(
    name: str, modes: Sequence[str], stride: int, faults: FaultServer, tmp_path: Path
) -> None:
    found = struck_everywhere(CASES[name], faults, tmp_path, modes, stride)
    print(f"{name}: {found.total()} reads that failed, {dict(found)}, none lost")
    assert found["former"] and found["new"]


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"]
)
@pytest.mark.parametrize("name", named(CASES.keys() - NEVER_CUT))
def test_a_power_cut_at_any_moment_leaves_the_former_or_the_new(
    name: str, every: bool, faults: FaultServer, tmp_path: Path
) -> None:
    case, found, at = CASES[name], Counter[str](), set[int]()
    (tmp_path / "prepared").mkdir()
    case.prepare(tmp_path / "prepared")
    for outcome in power_cuts(
        faults, case.steps, tmp_path / "prepared", tmp_path, 1 if every else case.stride
    ):
        try:
            found[case.look(outcome.folder)] += 1
            # `look` has seen it whole; this takes its time.
            if outcome.number % 6 == 0 and outcome.number not in at:
                case.again(outcome.folder)
        except Exception as error:
            raise AssertionError(f"before operation {outcome.number}") from error
        at.add(outcome.number)
    print(f"{name}: {found.total()} states after a power cut, {dict(found)}, none lost")
    assert found["former"] and found["new"] and found.total() > len(at)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", CASES)
def test_every_fault_at_every_operation(name: str, faults: FaultServer, tmp_path: Path) -> None:
    found = struck_everywhere(
        CASES[name], faults, tmp_path, EVERY_FAULT, 12 if name == "train" else 1
    )
    print(f"{name}: {found.total()} faults, {dict(found)}, none lost")
