"""The cache of tokenised corpora: `pytest tests/data/test_store.py [-m slow]` (slow: every kind of
fault).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from faults.harness import FaultServer, unavailable
from monograph.data import shards, store
from monograph.data.documents import ReadingPlan
from monograph.data.sources import find_sources
from monograph.data.store import CorpusRequest, open_or_build
from monograph.errors import DiskFull, InputRefused, Unreadable
from monograph.storage import reading
from monograph.text.tokenizer import Tokenizer


def request_for(folder, tokenizer=None, held_out=0.1):
    found = find_sources(folder, folder)
    return CorpusRequest(
        found, held_out, tokenizer or Tokenizer.bytes(), ReadingPlan("text", skip_bad=False)
    )


def contents(stored):
    return [
        (
            side.files,
            side.first_documents.tolist(),
            side.tokens.tolist(),
            side.starts.tolist(),
            side.records.tolist(),
            side.bytes,
        )
        for side in (stored.train, stored.held_out)
    ]


@pytest.fixture
def request_(texts):
    return request_for(texts)


def test_the_second_time_nothing_is_tokenised(texts, tmp_path, monkeypatch):
    first = open_or_build(request_for(texts, 300), tmp_path)
    monkeypatch.setattr(store, "_build", None)
    second = open_or_build(request_for(texts, 300), tmp_path)
    assert contents(first) == contents(second) and first.tokenizer.hash == second.tokenizer.hash
    assert second.notes == () and first.folder == second.folder
    assert sorted(path.name for path in first.folder.iterdir()) == sorted(
        ["manifest.json", "tokenizer.json"]
        + [
            f"{side}.{name}"
            for side in ("train", "held_out")
            for name in ("tokens", "starts", "records")
        ]
    )


def test_what_decides_the_tokens_decides_the_folder(texts, trained, tmp_path):
    shutil.copytree(texts, tmp_path / texts.name)
    same = request_for(tmp_path / texts.name)
    requests = [
        request_for(texts),
        request_for(texts, 300),
        request_for(texts, trained),
        request_for(texts, held_out=0.2),
    ]
    assert same.key == requests[0].key
    (tmp_path / texts.name / "001.txt").write_text("changed")
    requests.append(request_for(tmp_path / texts.name))
    assert len({request.key for request in requests}) == 5


@pytest.fixture
def quick_folder():
    """A folder where waiting for the disk takes no time, if there is one: these tests build often."""
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        yield Path(folder)


def test_any_damaged_file_is_noticed_named_and_made_again(texts, quick_folder):
    request = request_for(texts, 300)
    whole = open_or_build(request, quick_folder)
    for path in sorted(whole.folder.iterdir()):
        for harm in ("flip", "cut", "remove"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 4
            path.unlink()
            if harm != "remove":
                path.write_bytes(data if harm == "flip" else data[: len(data) // 2])
            again = open_or_build(request, quick_folder)
            assert contents(again) == contents(whole)
            (note,) = again.notes
            assert path.name in note and note.endswith(": tokenised again") and "\n" not in note


def test_tokens_that_cannot_be_read_are_neither_removed_nor_made_again(
    texts, quick_folder, monkeypatch
):
    def fails(path, *_, **__):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    whole = open_or_build(request := request_for(texts, 300), quick_folder)
    before = {path.name: path.stat().st_mtime_ns for path in whole.folder.iterdir()}
    for function, module in (("open", reading), ("memmap", shards.np)):
        with (
            monkeypatch.context() as failing,
            pytest.raises(Unreadable, match="cannot be read: Stale file handle"),
        ):
            failing.setattr(module, function, fails, raising=False)
            open_or_build(request, quick_folder)
        assert {path.name: path.stat().st_mtime_ns for path in whole.folder.iterdir()} == before


def test_a_file_of_another_corpus_is_noticed(texts, tmp_path):
    one, other = (
        open_or_build(request_for(texts), tmp_path),
        open_or_build(request_for(texts, held_out=0.2), tmp_path),
    )
    shutil.copy(other.folder / "train.tokens", one.folder / "train.tokens")
    assert (
        "not the file that manifest.json lists"
        in open_or_build(request_for(texts), tmp_path).notes[0]
    )
    shutil.copy(other.folder / "manifest.json", one.folder / "manifest.json")
    assert "another corpus's" in open_or_build(request_for(texts), tmp_path).notes[0]


def test_the_cache_is_where_it_was_chosen_to_be(request_, tmp_path, monkeypatch):
    assert open_or_build(request_, tmp_path / "own").folder.is_relative_to(tmp_path / "own")
    monkeypatch.setenv("MONOGRAPH_HOME", str(tmp_path / "home"))
    assert open_or_build(request_).folder.is_relative_to(tmp_path / "home")
    monkeypatch.delenv("MONOGRAPH_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert open_or_build(request_).folder.is_relative_to(tmp_path / "xdg" / "monograph")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    assert open_or_build(request_).folder.is_relative_to(tmp_path / "user" / ".cache" / "monograph")


def test_a_cache_that_cannot_be_written(request_, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    blocked = tmp_path / "file" / "below"
    with pytest.raises(
        InputRefused, match=r"below.*: cannot be written \(Not a directory\); set `cache`"
    ):
        open_or_build(request_, blocked)
    monkeypatch.setenv("MONOGRAPH_HOME", str(blocked))
    with pytest.raises(InputRefused, match="cannot be written"):
        open_or_build(request_)
    monkeypatch.delenv("MONOGRAPH_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    at_exit = []
    monkeypatch.setattr(store.atexit, "register", at_exit.append)
    stored = open_or_build(request_)
    (note,), kept = stored.notes, stored.folder.parent.parent
    assert "cannot be written" in note and f"kept in {kept} for now, and made again" in note
    assert stored.folder.is_dir()
    at_exit.pop()()
    assert not kept.exists()


def test_a_full_disk_is_said_and_leaves_nothing(request_, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "append", full)
        with pytest.raises(DiskFull, match="no room to write"):
            open_or_build(request_, tmp_path)
    assert [path.suffix for path in (tmp_path / "corpora").iterdir()] == [".lock"]
    assert open_or_build(request_, tmp_path).notes == ()


def test_text_that_changes_meanwhile_is_not_cached(texts, tmp_path):
    moving = shutil.copytree(texts, tmp_path / "moving")
    request = request_for(moving)
    (moving / "001.txt").write_bytes(b"x" * (moving / "001.txt").stat().st_size)
    with pytest.raises(InputRefused, match="001.txt: changed while it was being read"):
        open_or_build(request, tmp_path)
    (moving / "001.txt").unlink()
    with pytest.raises(InputRefused, match="001.txt: cannot be read"):
        open_or_build(request, tmp_path)


def test_two_processes_build_once(request_, tmp_path, monkeypatch):
    stored = open_or_build(request_, tmp_path)
    aside = stored.folder.with_suffix(".aside")
    stored.folder.rename(aside)
    told, entered = [], threading.Event()

    def progress(stage, *_):
        told.append(stage)
        if "waiting" in stage:
            entered.set()

    monkeypatch.setattr(store, "_build", lambda *_: pytest.fail("built a second time"))
    results = []
    with open(stored.folder.with_suffix(".lock")) as other_process:
        fcntl.flock(other_process, fcntl.LOCK_EX)
        waiting = threading.Thread(
            target=lambda: results.append(open_or_build(request_, tmp_path, progress))
        )
        waiting.start()
        assert entered.wait(5)
        aside.rename(stored.folder)
    waiting.join(10)
    assert contents(results[0]) == contents(stored)


# ---- faults at every operation -------------------------------------------------------------------


QUICK = ("kill", "full-once")


def build(folder: Path) -> None:
    open_or_build(request_for(folder / "texts", held_out=0.2), folder / "cache")


@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
@pytest.mark.parametrize(
    "mode",
    [
        "kill",
        *(
            pytest.param(mode, marks=pytest.mark.slow)
            for mode in ("full-once", "torn", "short", "full", "broken-once", "broken")
        ),
    ],
)
def test_after_a_fault_at_any_operation_the_next_start_is_right(quick_folder, mode):
    texts, scratch = quick_folder / "prepared" / "texts", quick_folder / "scratch"
    texts.mkdir(parents=True)
    scratch.mkdir()
    for i in range(6):
        (texts / f"{i}.txt").write_text(f"text number {i}\n" * 20)
    expected = contents(open_or_build(request_for(texts, held_out=0.2), quick_folder / "expected"))
    struck = 0
    with FaultServer() as faults:
        for outcome in faults.every_operation(build, quick_folder / "prepared", scratch, [mode]):
            struck += 1
            if outcome.error is not None:
                assert outcome.error[0] in ("DiskFull", "InputRefused", "Unreadable"), outcome
            stored = open_or_build(
                request_for(outcome.folder / "texts", held_out=0.2), outcome.folder / "cache"
            )
            assert contents(stored) == expected
            # Whatever was left half-made was never taken for the whole, so there was nothing to
            # mend.
            assert stored.notes == ()
            assert not list((outcome.folder / "cache" / "corpora").glob("*.building"))
    print(f"{mode}: {struck} faults, none lost")
    assert struck > 5
