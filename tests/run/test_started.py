"""Run: pytest tests/run/test_started.py (what a run records of how it was started)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from monograph import __version__
from monograph.run.folder import Run
from monograph.run.started import describe_start, note_start, starts_of


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "run").mkdir()
    return Run(tmp_path / "run")


def started(run: Run, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/monograph", *words])
    note_start(run)


def git(*words: str) -> None:
    owner = {
        f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    subprocess.run(["git", *words], check=True, capture_output=True, env=os.environ | owner)


def test_each_start_is_kept_with_the_command_as_one_would_type_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(run, monkeypatch, "train", "my texts/", "--minutes", "3")
    started(run, monkeypatch, "train", "--resume", "last")
    shown = describe_start(run)
    assert shown[:2] == [
        ("command", "monograph train 'my texts/' --minutes 3"),
        ("continued by", "monograph train --resume last"),
    ]
    assert f"monograph {__version__}" in dict(shown)[
        "versions"
    ] and "git commit of your folder" not in dict(shown)


def commit_in(folder: Path) -> str:
    git("init", "-q", str(folder))
    (folder / "own.py").write_text("a = 1\n")
    git("-C", str(folder), "add", "own.py")
    git("-C", str(folder), "commit", "-q", "-m", "a")
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    )
    return done.stdout[:12]


@pytest.mark.parametrize(
    "way", ["a branch", "a folder inside", "packed", "no branch", "another working tree"]
)
def test_the_commit_of_the_working_folder_is_kept(
    way: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = run.folder.parent
    commit = commit_in(here)
    match way:
        case "a folder inside":
            monkeypatch.chdir(run.folder)
        case "packed":
            git("pack-refs", "--all")
        case "no branch":
            git("checkout", "-q", "--detach")
        case "another working tree":
            git("worktree", "add", "-q", "tree")
            monkeypatch.chdir(here / "tree")
    started(run, monkeypatch, "train")
    assert dict(describe_start(run))["git commit of your folder"] == commit


@pytest.mark.parametrize(
    "head", ["ref: ../../../etc/passwd", "ref: refs/heads/none", "", "x" * 40, "\xff"]
)
def test_a_damaged_repository_is_no_commit(
    head: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.folder.parent / ".git").mkdir()
    (run.folder.parent / ".git/HEAD").write_text(head)
    started(run, monkeypatch, "train")
    assert "git commit of your folder" not in dict(describe_start(run))


def test_a_repository_s_own_programs_are_not_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_in(run.folder.parent)
    Path("watch").write_text("#!/bin/sh\ntouch was-run\n")
    Path("watch").chmod(0o755)
    git("config", "core.fsmonitor", str(Path("watch").absolute()))
    started(run, monkeypatch, "train")
    assert not Path("was-run").exists()


@pytest.mark.parametrize(
    "content",
    [b"\xff\n", b"[1]\n", b'{"command": 3}\n', b'{"command": "a", "versions": 3}\n', b"{" * 9000],
)
def test_a_damaged_record_stops_nothing(
    content: bytes, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.starts.write_bytes(content)
    describe_start(run)
    started(run, monkeypatch, "train")
    assert starts_of(run)[-1]["command"] == "monograph train"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_something_else_in_its_place_stops_nothing(
    make: object, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(run.starts)  # type: ignore[operator]
    started(run, monkeypatch, "train")
    describe_start(run)
