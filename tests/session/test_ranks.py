"""Run: pytest tests/session/test_ranks.py"""

from __future__ import annotations

import io
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monograph.distributed.world import World
from monograph.run.progress import LABEL_WIDTH, Progress
from monograph.run.screen import WIDTH
from monograph.session import ranks
from monograph.session.shown_commands import command_line, show_command


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an environment in .venv whose Python is a link, as they are, and nothing on the
    PATH.
    """
    executable(tmp_path / "elsewhere" / "python3")
    (tmp_path / "project/.venv/bin").mkdir(parents=True)
    (tmp_path / "project/.venv/bin/python").symlink_to(tmp_path / "elsewhere/python3")
    executable(tmp_path / "project/.venv/bin/monograph")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "project/.venv/bin/python"))
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    return tmp_path / "project"


def called(monkeypatch: pytest.MonkeyPatch, name: object) -> str:
    monkeypatch.setattr(sys, "argv", [str(name), "train"])
    return command_line("train", "--resume", "last").removesuffix(" train --resume last")


def test_as_a_module_of_an_environment_here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert called(monkeypatch, "/src/monograph/__main__.py") == ".venv/bin/python -m monograph"


def test_as_a_script_here_and_from_below(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert called(monkeypatch, ".venv/bin/monograph") == ".venv/bin/monograph"
    monkeypatch.chdir(place / ".venv/bin")
    assert called(monkeypatch, "./monograph") == "./monograph"


def test_from_elsewhere_it_is_the_whole_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert called(monkeypatch, place / ".venv/bin/monograph").endswith(
        "/project/.venv/bin/monograph"
    )


def test_on_the_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place / ".venv/bin"))
    assert called(monkeypatch, place / ".venv/bin/monograph") == "monograph"
    assert called(monkeypatch, "/src/monograph/__main__.py") == "monograph"


def test_another_installation_on_the_path_is_not_meant(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(place.parent / "elsewhere/monograph")
    assert called(monkeypatch, place / ".venv/bin/monograph") == ".venv/bin/monograph"
    assert called(monkeypatch, "/src/monograph/__main__.py") == ".venv/bin/python -m monograph"


@pytest.mark.parametrize("prompt", ["class Cache:", "it's $HOME `x`", 'a "b" \\', ""])
def test_arguments_survive_the_shell(
    prompt: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [".venv/bin/monograph"])
    assert shlex.split(command_line("generate", "my runs/a", prompt))[1:] == [
        "generate",
        "my runs/a",
        prompt,
    ]


@pytest.mark.parametrize("length", [5, 400])
def test_a_command_is_never_cut(length: int, capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    show_command(Progress(screen), "next", "generate", "x" * length)
    assert "x" * length in screen.getvalue() + capsys.readouterr().err


def test_a_long_command_goes_on_indented_and_is_read_as_one() -> None:
    screen = io.StringIO()
    words = ["sweep", *(f"optim.key_{number}=a b" for number in range(9))]
    show_command(Progress(screen), "next", *words)
    lines = screen.getvalue().splitlines()
    assert len(lines) > 2 and all(line.startswith(" " * LABEL_WIDTH) for line in lines[1:])
    command = "\n".join(line[LABEL_WIDTH:] for line in lines).replace("\\\n", "")  # as a shell does
    assert shlex.split(command)[-len(words) :] == words
    assert all(len(line) <= WIDTH for line in lines) and lines[0].startswith("next ")


def test_an_interrupted_sweep_is_continued_as_a_sweep(tmp_path: Path) -> None:
    begun: Any = SimpleNamespace(folder=tmp_path, has_begun=True)
    with (
        pytest.raises(KeyboardInterrupt, match=r"^continue: monograph sweep --out s$"),
        ranks.report_error_once(
            World(), begun, lambda: "monograph sweep --out s", has_not_begun=lambda: False
        ),
    ):
        raise KeyboardInterrupt
