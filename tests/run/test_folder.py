"""Run: pytest tests/run/test_folder.py."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import monograph
from modes import binding_modes
from monograph.errors import InputRefused, RunInUse, Unreadable
from monograph.run.folder import Run
from monograph.run.models import load
from monograph.run.run_index import wait_until_free
from monograph.run.source import ModelSource

SOURCE = Path(monograph.__file__).parents[1]


@contextmanager
def running(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Another process running `script`, once it has printed "ready"; ended with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "ready"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


HOLD = """
import sys, time
from monograph.run.folder import Run
with Run.open(sys.argv[1]).lock():
    print("ready", flush=True)
    time.sleep(60)
"""


def begun(out: str | Path | None = None, root: str | Path = "runs") -> Run:
    """A run whose settings are written."""
    run = Run.create(out, root=root)
    run.config.touch()
    return run


@pytest.mark.parametrize("name", ["config.toml", "tokenizer.json", "metrics.jsonl", "from.json"])
def test_a_pipe_in_a_file_s_place_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    with run.lock(new=True):
        os.mkfifo(run.folder / name)
    with pytest.raises(InputRefused, match=f"{name}: expected a regular file"):
        Run.open(run.folder)


def test_one_waits_for_a_run_until_it_is_free_or_so_long(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    began = time.monotonic()
    wait_until_free(run.folder, 20.0)
    with run.lock(new=True):
        wait_until_free(run.folder, 0.3)
    assert 0.3 <= time.monotonic() - began < 10


def test_a_run_is_named_after_the_minute_and_made_once(tmp_path: Path) -> None:
    runs = [Run.create(root=tmp_path / "runs") for _ in range(3)]
    names = [run.folder.name for run in runs]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{4}", names[0])
    assert len(set(names)) == 3
    # The minute may have changed in between.
    assert names[2].endswith("-3") or names[2][:15] != names[0]


def test_runs_created_at_once_get_a_folder_each(tmp_path: Path) -> None:
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(Run.create(root=tmp_path).folder))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 16


def test_last_is_the_newest_even_if_the_clock_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = begun("runs/2099-01-01-0000"), begun("runs/2001-01-01-0000")
    os.utime(first.folder)
    assert Run.open("last").folder == second.folder
    assert second.handle == "last"
    assert first.handle == "runs/2099-01-01-0000"
    for run in (second, first):  # using a run makes it neither older nor newer
        with run.lock():
            pass
    assert Run.open("last").folder == second.folder
    member = Run.create("runs/2001-01-01-0000/members/3")
    assert Run.open("last/members/3").folder == member.folder


def test_more_than_nine_runs_keep_their_order(tmp_path: Path) -> None:
    for _ in range(11):
        newest = begun(root=tmp_path)
        assert Run.open("last", root=tmp_path).folder == newest.folder


def test_years_of_five_digits_and_names_with_digits_that_are_no_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 3e11)
    for name in ("2026-01-01-0000", "run 1²3", "١٢", "9" * 200):
        begun(tmp_path / name)
    newest = begun(root=tmp_path)
    assert (
        newest.folder.name.startswith("11476-")
        and Run.open("last", root=tmp_path).folder == newest.folder
    )
    for run in tmp_path.iterdir():
        os.utime(run / "run.lock", (3e11, 3e11))
    assert Run.open("last", root=tmp_path).folder == newest.folder


def test_runs_created_at_the_same_moment_are_ordered_by_name(tmp_path: Path) -> None:
    for name in ("a-9", "a-10", "a-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.lock").write_text('{"serial": 1}')
        (tmp_path / name / "config.toml").touch()
    assert Run.open("last", root=tmp_path).folder.name == "a-10"


def test_last_without_any_run_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="monograph train"):
        Run.open("last", root=tmp_path / "runs")


def test_a_folder_that_is_no_run_is_refused_and_runs_are_suggested(tmp_path: Path) -> None:
    newest = begun(root=tmp_path / "runs")
    with pytest.raises(InputRefused, match="no such folder.*" + newest.folder.name):
        Run.open(tmp_path / "absent", root=tmp_path / "runs")
    with pytest.raises(InputRefused, match="has no run.lock"):
        Run.open(tmp_path, root=tmp_path / "runs")


def test_the_name_of_a_run_alone_is_answered_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a run to go on with, for a model to use, and for one to begin from."""
    monkeypatch.chdir(tmp_path)
    lock = Path("runs/mine/run.lock")
    lock.parent.mkdir(parents=True)
    lock.touch()
    for find in (Run.open, load, lambda name: ModelSource.open(name).require_headers({})):
        with pytest.raises(InputRefused, match=r"no such folder; did you mean runs/mine\?$"):
            find("mine")
        with pytest.raises(InputRefused, match="no such folder") as refused:
            find("nothere")
        assert "did you mean" not in str(refused.value)


def test_an_empty_or_new_folder_may_be_given(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert Run.create(tmp_path / "empty").folder == tmp_path / "empty"
    assert Run.create(tmp_path / "deep" / "new").folder.is_dir()


def test_a_folder_with_another_run_is_refused_with_the_remedy(tmp_path: Path) -> None:
    run = begun(tmp_path / "a")
    run.log({"update": 1})
    with pytest.raises(InputRefused, match=f"--resume {run.folder}"):
        Run.create(tmp_path / "a")
    assert run.rows() == [{"update": 1}]


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputRefused, match="not empty"):
        Run.create(tmp_path)
    with pytest.raises(InputRefused, match="is a file"):
        Run.create(tmp_path / "thesis.tex")
    with pytest.raises(InputRefused, match="cannot write"):
        Run.create(tmp_path / "thesis.tex" / "run")


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    for make in (lambda: Run.create(tmp_path / "new"), lambda: Run.create(root=tmp_path / "runs")):
        with pytest.raises(InputRefused, match="Permission denied.*--out"):
            make()


def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with binding_modes(), pytest.raises(InputRefused, match="Permission denied"):
        Run.create(root=tmp_path)


def test_a_run_in_use_is_refused_by_process_and_host(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a")
    with running(HOLD, str(run.folder)) as holder:
        with (
            pytest.raises(RunInUse, match=f"process {holder.pid} on {os.uname().nodename}"),
            run.lock(),
        ):
            pass
        with pytest.raises(RunInUse, match=f"process {holder.pid}"):
            Run.create(tmp_path / "a")


def test_a_lock_frees_itself_when_its_process_is_killed(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a")
    with running(HOLD, str(run.folder)) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with run.lock():
            pass


def test_a_forked_child_does_not_keep_its_dead_parents_lock(tmp_path: Path) -> None:
    """A data worker may outlive the run by a moment; only the run itself holds the lock."""
    run = Run.create(tmp_path / "a")
    script = """
import os, sys, time
from monograph.run.folder import Run
with Run.open(sys.argv[1]).lock():
    if os.fork() == 0:
        print("ready", flush=True)
        time.sleep(5)
        os._exit(0)
    time.sleep(60)
"""
    with running(script, str(run.folder)) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with run.lock():
            pass


def test_a_lock_can_be_taken_again_and_is_not_shared_within_a_process(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a")
    for _ in range(2):
        with (
            run.lock(),
            pytest.raises(RunInUse, match=str(os.getpid())),
            Run.open(run.folder).lock(),
        ):
            pass


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ESTALE])
def test_a_lock_that_cannot_be_read_is_not_written_over(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    runs = [Run.create(tmp_path / name) for name in "ab"]
    before = [run.lock_file.read_bytes() for run in runs]
    uses = {
        "lock": lambda: runs[0].lock().__enter__(),
        "create": lambda: Run.create(tmp_path / "c"),  # its number would be that of the first
        "last": lambda: Run.open("last", tmp_path),  # would be another run
    }
    for use in uses.values():
        with (
            monkeypatch.context() as failing,
            pytest.raises(Unreadable, match=r"run\.lock: cannot be read: "),
        ):
            failing.setattr("builtins.open", fails)
            use()
    assert [run.lock_file.read_bytes() for run in runs] == before


def test_files_are_made_with_the_modes_of_the_umask(tmp_path: Path) -> None:
    former = os.umask(0o027)
    try:
        run = Run.create(tmp_path / "a")
        run.log({"update": 1})
    finally:
        os.umask(former)
    assert run.metrics.stat().st_mode & 0o777 == run.lock_file.stat().st_mode & 0o777 == 0o640


def test_two_that_found_the_same_folder_empty_do_not_share_it(tmp_path: Path) -> None:
    first, second = Run.create(tmp_path / "a"), Run.create(tmp_path / "a")
    with first.lock(new=True):
        with pytest.raises(RunInUse), second.lock(new=True):
            pass
        first.config.touch()
    with pytest.raises(InputRefused, match="already holds a run"), second.lock(new=True):
        pass


LEFT_BY_A_KILL = [[], ["from.partial"], ["from.json"], ["from.json", "config.partial"]]
LEFT_BY_A_KILL += [["teachers.partial"], ["teachers.json", "config.partial"]]


@pytest.mark.parametrize("left", LEFT_BY_A_KILL, ids=str)
@pytest.mark.parametrize("record", ["", '{"serial": 1}', '{"serial": 1, "pid": 7, "host": "gone"}'])
def test_a_run_that_was_killed_before_it_began_is_no_run(
    left: list[str], record: str, tmp_path: Path
) -> None:
    real, killed = begun(tmp_path / "a"), Run.create(tmp_path / "b")
    killed.lock_file.write_text(record)
    for name in left:
        (killed.folder / name).write_text("{}")
    assert Run.open("last", root=tmp_path).folder == real.folder
    again = begun(killed.folder)
    assert {path.name for path in again.folder.iterdir()} == {"run.lock", "config.toml"}
    assert Run.open("last", root=tmp_path).folder == again.folder
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("thesis.tex", "all"),
        ("metrics.jsonl", "{}"),
        ("config.toml", ""),
        ("from.json.old", ""),
        ("run.lock", "mine"),
    ],
)
def test_a_folder_that_holds_anything_else_is_not_touched(
    name: str, text: str, tmp_path: Path
) -> None:
    killed = Run.create(tmp_path / "a")
    (killed.folder / "from.json").write_text("{}")
    (killed.folder / name).write_text(text)
    before = {path: path.read_bytes() for path in killed.folder.iterdir()}
    with pytest.raises(InputRefused, match="already holds a run"):
        Run.create(killed.folder)
    assert {path: path.read_bytes() for path in killed.folder.iterdir()} == before


def test_files_of_those_names_are_someone_elses_without_a_lock(tmp_path: Path) -> None:
    (tmp_path / "from.json").write_text("mine")
    with pytest.raises(InputRefused, match="not empty"):
        Run.create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["from.json"]


def test_the_next_run_removes_what_a_killed_one_had_copied_of_standard_input(
    tmp_path: Path,
) -> None:
    """But not what a living process copies, nor what a run that has begun reads."""
    for run in [Run.create(tmp_path / name) for name in ("killed", "living", "begun")]:
        (run.folder / "stdin").write_text("a pipe's text")
    (tmp_path / "begun" / "config.toml").write_text("")
    with Run(tmp_path / "living").lock():
        Run.create(tmp_path / "next")
        left = {path.parent.name for path in tmp_path.glob("*/stdin")}
    assert left == {"living", "begun"}


def test_last_passes_over_a_run_that_has_saved_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    older, newer = begun("runs/a"), begun("runs/b")
    assert Run.open("last").folder == newer.folder, (
        "where none has saved anything, it is the newest"
    )
    (older.checkpoints / "step-00000003").mkdir(parents=True)
    assert not capsys.readouterr().err
    for _ in range(2):  # a command asks several times, and says it once
        assert Run.open("last").folder == older.folder
    assert capsys.readouterr().err == "note: using runs/a, as runs/b has no checkpoint yet\n"
    assert Run.open("last", needs_checkpoint=False).folder == newer.folder, (
        "it can be resumed, checked and followed"
    )
    assert (older.handle, newer.handle) == ("runs/a", "last")
    begun("runs/c")
    assert Run.open("last").folder == older.folder
    assert "using runs/a, as runs/c has no checkpoint yet (and 1 more)" in capsys.readouterr().err
    (newer.checkpoints / ".tmp-step-00000001").mkdir(parents=True)
    assert Run.open("last").folder == older.folder, "half a checkpoint is none"
    (newer.folder / "sweep.json").touch()
    assert Run.locate("last") == newer.folder, "a sweep's models are those of its members"
    assert Run.open("last").folder == older.folder, "a sweep has no single model"
    (newer.folder / "best").mkdir()
    (newer.folder / "best/run.lock").touch()
    capsys.readouterr()
    assert Run.open("last/best").folder == newer.folder / "best"
    assert capsys.readouterr().err == "note: using runs/b/best, as runs/c has no best\n"
