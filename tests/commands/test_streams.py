"""Run: pytest tests/commands/test_streams.py (standard output that nobody reads, terminals that take no escapes)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands.forked import CommandServer
from commands.inputs import TINY, with_texts

COMMANDS = [
    ["train", "--resume", "run", "--json"],
    ["train", "--print-config"],
    ["generate", "run", "alpha", "--max-tokens", "4"],
    ["generate", "run", "alpha", "-n", "3", "--max-tokens", "4"],
    ["generate", "run", "alpha", "--max-tokens", "4", "--json"],
    ["evaluate", "run"],
    ["export", "run", "--to", "out"],
    ["data", "show", *TINY],
    ["data", "build", *TINY],
    ["check"],
    ["check", "run"],
    ["--help"],
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> Path:
    """A folder with a run that has come to its end."""
    folder = with_texts(tmp_path_factory.mktemp("streams"))
    assert server.run(folder, "train", *TINY, "--out", "run", figures=0).code == 0
    return folder


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_reader_that_went_away_is_no_error(arguments: list[str], place: Path, server: CommandServer) -> None:
    done = server.run(place, *arguments, reader=0)
    assert done.code == 141 and "rror" not in done.err and "Traceback" not in done.err, done.err


# Everything that shows progress or marks tokens, and a refusal.
COLOURED = {
    "train texts",
    "train --resume",
    "data show",
    "data build",
    "generate nothere",
    "generate run",
    "evaluate run",
}


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [({"NO_COLOR": "1", "TERM": "xterm"}, set()), ({"TERM": "dumb"}, set()), ({"TERM": "xterm"}, COLOURED)],
    ids=["no colour", "dumb", "colour"],
)
def test_a_terminal_gets_the_escapes_that_it_takes(
    environment: dict[str, str], coloured: set[str], place: Path, server: CommandServer, tmp_path: Path
) -> None:
    found = set()
    new = [["train", *TINY, "--out", str(tmp_path / "new")], ["generate", "nothere"]]
    for arguments in [*new, *(each for each in COMMANDS if each[0] != "export")]:
        done = server.run(place, *arguments, env=environment, terminal=1, figures=0)
        assert done.out and done.code == (3 if "nothere" in arguments else 0), done.out
        assert "\x1b" not in done.out or environment["TERM"] != "dumb"
        if re.search(r"\x1b\[[\d;]*m", done.out):
            found.add(" ".join(arguments[:2]))
    assert found == coloured
