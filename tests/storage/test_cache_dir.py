"""Run: pytest tests/storage/test_cache_dir.py (where the caches are, and that they are a
convenience only).
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from monograph.config import Settings
from monograph.session import locked_run
from monograph.storage import cache_dir
from monograph.storage.cache_dir import cache_root, files_in, keep_compiled

FILLED: list[str] = []  # the folders that another process would have filled


@pytest.fixture(autouse=True)
def _bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FILLED.clear()
    filled = lambda code: FILLED.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])  # noqa: E731
    monkeypatch.setattr(cache_dir, "start_python", filled)
    for name in ("MONOGRAPH_HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    # Whatever is set below is taken back after the test.
    monkeypatch.setattr(os, "environ", dict(os.environ))


def test_the_stronger_choice_wins(tmp_path: Path) -> None:
    assert cache_root() == (tmp_path / ".cache" / "monograph", False)
    os.environ["XDG_CACHE_HOME"] = "/xdg"
    assert cache_root() == (Path("/xdg/monograph"), False)
    os.environ["MONOGRAPH_HOME"] = "~/mine"
    assert cache_root() == (tmp_path / "mine", True)
    assert cache_root("/given") == (Path("/given"), True)


def test_compiled_code_lies_beside_the_tokens_unless_a_person_says_otherwise(
    tmp_path: Path,
) -> None:
    keep_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(
        tmp_path / ".cache" / "monograph" / "compiled"
    )
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/elsewhere"
    keep_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"


class Reached(Exception):
    """A command came to where torch is set up."""


@pytest.mark.parametrize("command", ["train", "sweep", "profile"])
def test_a_command_names_its_place_before_torch_names_one(
    command: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """The import of torch._dynamo writes a folder that anybody could have made before."""
    module = importlib.import_module(f"monograph.commands.{command}")
    # `train` opens its run in a module of its own.
    opening = locked_run if command == "train" else module

    def make_repeatable(device: torch.device) -> None:
        raise Reached(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))

    monkeypatch.setattr(opening, "make_repeatable", make_repeatable)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        Reached, match=re.escape(str(tmp_path / ".cache" / "monograph" / "compiled"))
    ):
        if command == "sweep":
            module.run(
                [], samples=None, verify=None, distill=False, prune=None, out=None, json=False
            )
        elif command == "profile":
            module.run(Settings(), out=None, json=False)
        else:
            module.run(Settings(), out=None, resume=None, from_=None, json=False)


def test_where_nothing_can_be_written_torch_keeps_its_own(tmp_path: Path) -> None:
    (tmp_path / ".cache").write_text("a file in the way")
    keep_compiled()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_only_a_new_folder_that_torch_will_use_is_filled_aside(tmp_path: Path) -> None:
    for home, chosen in (("a", None), ("a", None), ("b", "/own")):
        os.environ["MONOGRAPH_HOME"] = str(tmp_path / home)
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        if chosen:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = chosen
        keep_compiled()
    assert FILLED == [str(tmp_path / "a" / "compiled")]


def test_what_was_used_longest_ago_goes_once_the_folder_is_full(
    tmp_path: Path, monkeypatch: Any
) -> None:
    folder = tmp_path / ".cache" / "monograph" / "compiled"
    (folder / "ab").mkdir(parents=True)
    for age, name in enumerate(("new.so", "ab/read.so", "ab/old.so", "older.so")):
        (folder / name).write_bytes(bytes(10))
        # The time of reading, of writing.
        os.utime(folder / name, (1.7e9 - age, 1e9 if age == 1 else 1.7e9 - age))
    monkeypatch.setattr(cache_dir, "MOST_COMPILED_BYTES", 40)
    keep_compiled()
    assert len(files_in(folder)) == 4, "it fits"
    (folder / "steps").write_bytes(b"1")
    keep_compiled()
    assert sorted(path.name for _, _, path in files_in(folder)) == ["new.so", "steps"]


def test_a_process_aside_ends_when_this_one_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    waits = f"import pathlib, time; pathlib.Path({str(mark)!r}).touch(); time.sleep(60)"
    starts = f"""
import time
from monograph.storage.cache_dir import start_python
print(start_python({waits!r}).pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        until(mark.exists)
        parent.kill()
    until(lambda: not alive(child))


def until(holds: Any) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(number: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{number}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
