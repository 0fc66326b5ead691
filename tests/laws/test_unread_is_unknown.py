"""Run: pytest -m slow tests/laws/test_unread_is_unknown.py (every command with reads that fail;
nothing is lost). By day tests/laws/test_nothing_half_done.py has a resume with such reads.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from faults.harness import ERRORS, EVERY_UNREAD, FaultServer, Outcome, unavailable
from faults.reading import COMMANDS, KEPT, RUNS, kept, prepare, printed_in, results, sound_updates
from monograph.run.folder import Run
from monograph.run.run_index import serial_number

pytestmark = [
    pytest.mark.slow,  # before a command there are the runs that it reads
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or ""),
]
REFUSED, NOT_WRITTEN, DONE = "refused", "not written", "done all the same"
FOUND = {3: REFUSED, 7: NOT_WRITTEN, 0: DONE}
TWO = ("EIO", "EMFILE from here on")
# At night, of how many reads one is struck in each of nine modes: with 9 every read once, with 3 by
# three errors.
STRIDES = {"check": 3, "generate": 3, "export": 3, "export gguf": 3, "evaluate": 3, "train": 18}


@pytest.fixture(scope="module")
def prepared(faults: FaultServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared").resolve()
    assert faults.run(prepare, folder).error is None
    return folder


class Judge:
    """Looks at what a command leaves whose reads failed; `expected` is what it leaves when they do
    not.
    """

    def __init__(self, name: str, faults: FaultServer, prepared: Path, scratch: Path) -> None:
        self.name, self.faults, self.before = name, faults, kept(prepared)
        self.serial = serial_number(prepared / "runs" / "newest")
        whole = scratch / "whole"
        shutil.copytree(prepared, whole)
        done = faults.run(COMMANDS[name], whole, "record-reads")
        assert done.error is None
        self.reads, self.expected = done.journal, results(whole)

    def found(self, outcome: Outcome) -> str:
        """Whether it was refused or done; anything else fails."""
        code, said = self._ended(outcome)
        if code == 0:
            self._as_expected(outcome.folder)
        else:
            assert re.fullmatch(r"error: [^\n]+", said), said
            unread = {each.path for each in outcome.journal[outcome.number - 1 :]}
            assert any(names(said, path, outcome.folder) for path in unread), said
            assert code == 3 or (
                code == 7 and re.search("cannot (write|save|be (written|synced))", said)
            ), said
        self._nothing_is_lost(outcome.folder, done=code == 0)
        return FOUND[code]

    def _ended(self, outcome: Outcome) -> tuple[int, str]:
        assert not outcome.signal, f"signal {outcome.signal}"
        if outcome.error is None:
            return 0, ""
        assert outcome.error[0] == "Ended", outcome.error
        code, _, told = outcome.error[1].partition("\n")
        assert "Traceback" not in told
        return int(code), told.strip().splitlines()[-1]

    def _as_expected(self, folder: Path) -> None:
        assert results(folder) == self.expected, (
            "what could not be read was taken for something else"
        )
        printed_in(folder).unlink()

    def _nothing_is_lost(self, folder: Path, done: bool) -> None:
        newest = folder / "runs" / "newest"
        assert serial_number(newest) == self.serial
        if self.name not in RUNS:
            assert kept(folder) == self.before
            return
        updates = sound_updates(newest)
        assert updates[:KEPT] == list(range(updates[0], updates[0] - KEPT, -1)), (
            "a sound checkpoint was removed"
        )
        if not done:  # a person goes on with what has begun, or types the same again
            run, resume = RUNS[self.name]
            again = self.faults.run(
                resume if Run(folder / run).has_begun else COMMANDS[self.name], folder
            )
            assert again.error is None, again.error
            self._as_expected(folder)


def names(line: str, path: str, root: Path) -> bool:
    """Whether a line names a file, or the folder that it is in; of an unfinished one what it is to
    become.
    """
    file = root / path
    parts = (f" {path or '.'}:", file.name, file.parent.name)
    return any(part.removeprefix(".").removesuffix(".partial") in line for part in parts)


def struck(
    judge: Judge, prepared: Path, scratch: Path, modes: Sequence[str], stride: int
) -> dict[str, Counter[str]]:
    """What was found after each read that failed, by mode."""
    found: dict[str, Counter[str]] = {mode: Counter() for mode in modes}
    for outcome in judge.faults.every_operation(
        COMMANDS[judge.name], prepared, scratch, modes, stride, judge.reads
    ):
        try:
            found[outcome.mode][judge.found(outcome)] += 1
        except Exception as error:
            raise AssertionError(
                f"{outcome.mode} at {outcome.number}, {outcome.operation}: {outcome.error}"
            ) from error
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_a_read_that_fails_is_a_line_and_nothing_is_lost(
    name: str, faults: FaultServer, prepared: Path, tmp_path: Path
) -> None:
    judge = Judge(name, faults, prepared, tmp_path)
    found = struck(judge, prepared, tmp_path, TWO, stride=len(judge.reads) // 2)
    assert sum(found.values(), Counter()).total() >= 4


@pytest.mark.timeout(14400)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_read_of_a_command(
    name: str, faults: FaultServer, prepared: Path, tmp_path: Path
) -> None:
    """Prints what came of each error; docs/reliability.md has the sum."""
    judge, stride = Judge(name, faults, prepared, tmp_path), STRIDES.get(name, 9)
    print(
        row(name, len(judge.reads), stride, struck(judge, prepared, tmp_path, EVERY_UNREAD, stride))
    )


def row(name: str, reads: int, stride: int, found: dict[str, Counter[str]]) -> str:
    """Of each error: how many ended in a line and code 3 or 7, and after how many the command did
    all the same.
    """
    of_errors = [
        sum((found[mode] for mode in found if mode.split()[0] == error), Counter())
        for error in ERRORS
    ]
    cells = [f"{each[REFUSED] + each[NOT_WRITTEN]} + {each[DONE]}" for each in of_errors]
    injected = sum(each.total() for each in of_errors)
    return f"| `{name}` | {reads} | {stride} | {injected:,} | {' | '.join(cells)} | 0 |"
