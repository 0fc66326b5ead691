"""Run: pytest tests/run/test_writing.py (a folder of results is new, and there as a whole or not at
all).
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from monograph.errors import InputRefused
from monograph.interrupts import Terminated
from monograph.run.writing import results_folder


def test_each_has_a_dated_folder_of_its_own(tmp_path: Path) -> None:
    found = []
    for number in range(3):
        with results_folder(None, tmp_path / "profiles") as folder:
            (folder / "a").write_text(str(number))
        found.append(folder)
    assert len(set(found)) == 3 and {folder.parent for folder in found} == {tmp_path / "profiles"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("out", [None, "given", "deep/inside", "empty"])
def test_of_a_failure_nothing_is_left(
    out: str | None, error: type[BaseException], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with (
        pytest.raises(error),
        results_folder(out and tmp_path / out, tmp_path / "profiles") as folder,
    ):
        (folder / "half").touch()
        raise error
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_of_what_was_terminated_nothing_is_left(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), results_folder(tmp_path / "given", tmp_path) as folder:
        (folder / "half").touch()
        signal.raise_signal(signal.SIGTERM)
    assert [*tmp_path.iterdir()] == [] and signal.getsignal(signal.SIGTERM) is before


def test_what_was_there_stays(tmp_path: Path) -> None:
    with results_folder(None, tmp_path) as kept:
        (kept / "a").touch()
    with pytest.raises(ValueError), results_folder(None, tmp_path):
        raise ValueError
    assert [*tmp_path.iterdir()] == [kept]


@pytest.mark.parametrize(
    ("name", "words"),
    [(".", "holds something already"), ("file", "holds something"), ("file/in", "cannot write")],
)
def test_no_folder_is_written_over(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputRefused, match=words), results_folder(tmp_path / name, tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
