"""Run: pytest tests/commands/test_streams.py

Standard output that nobody reads, terminals that take no escapes, texts that would command a
terminal.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from commands.forked import CommandServer
from commands.inputs import TINY, over, with_texts
from monograph.terminal import visible

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
# `check` compiles nothing then, which is no matter here.
NO_COMPILER = {"CXX": "no-such-compiler"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> Path:
    """A folder with a run that has come to its end."""
    folder = with_texts(tmp_path_factory.mktemp("streams"))
    assert server.run(folder, "train", *TINY, "--out", "run", figures=0).code == 0
    return folder


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_reader_that_went_away_is_no_error(
    arguments: list[str], place: Path, server: CommandServer
) -> None:
    done = server.run(place, *arguments, env=NO_COMPILER, reader=0)
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
    [
        pytest.param(
            {"NO_COLOR": "1", "TERM": "xterm"}, set(), id="no colour", marks=pytest.mark.slow
        ),
        pytest.param({"TERM": "dumb"}, set(), id="dumb", marks=pytest.mark.slow),
        pytest.param({"TERM": "xterm"}, COLOURED, id="colour"),
    ],
)
def test_a_terminal_gets_the_escapes_that_it_takes(
    environment: dict[str, str],
    coloured: set[str],
    place: Path,
    server: CommandServer,
    tmp_path: Path,
) -> None:
    found = set()
    new = [["train", *TINY, "--out", str(tmp_path / "new")], ["generate", "nothere"]]
    for arguments in [*new, *(each for each in COMMANDS if each[0] != "export")]:
        done = server.run(place, *arguments, env=environment | NO_COMPILER, terminal=1, figures=0)
        assert done.out and done.code == (3 if "nothere" in arguments else 0), done.out
        assert "\x1b" not in done.out or environment["TERM"] != "dumb"
        if re.search(r"\x1b\[[\d;]*m", done.out):
            found.add(" ".join(arguments[:2]))
    assert found == coloured


# A title, a colour that no part of our display has, the end of a paste, C1's start of both, what
# turns writing around.
HOSTILE = "\x1b]0;owned\x07\x1b[53mover\x9b53m\x9d0;owned\x9c\x1b[201~\u202eid\x85\b\x7f"
# What rich sends: colours, the cursor up, a line cleared, the cursor hidden and shown.
OURS = re.compile(r"\x1b\[(?!53m)[\d;]*m|\x1b\[\d*A|\x1b\[2K|\x1b\[\?25[hl]")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> Path:
    """A folder with a run of which everything that a stranger may choose is hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    texts = folder / f"texts{HOSTILE}"
    texts.mkdir()
    for number in range(10):
        (texts / f"{number}{HOSTILE}.txt").write_text(
            f"{HOSTILE} {number}\n" * 12, encoding="utf-8"
        )
    (folder / "bad.jsonl").write_text(json.dumps({HOSTILE: HOSTILE}) + "\n")
    (folder / "config.toml").write_text('model.preset = "\\u001B]0;owned\\u0007"\n')
    return folder


@pytest.mark.slow
def test_no_text_of_others_commands_a_terminal(hostile: Path, server: CommandServer) -> None:
    texts, run = f"texts{HOSTILE}", f"run{HOSTILE}"
    tiny = over([texts, *TINY[1:]], "data.held_out=0.3")
    short = "\x1b]0;own\x07\x1b[53m\x9b\u202e"  # as many bytes as the model has positions for
    written = ["--regex", re.escape(short)]
    said = {}
    for arguments, code in (
        (["train", *tiny, "--out", run], 0),
        (["train", "--resume", run], 0),
        (["sweep", *tiny, "train.seed=0,1", "--out", f"sweep{HOSTILE}"], 0),
        (["generate", run, HOSTILE[:5], *written], 0),
        (["evaluate", run], 0),
        (["evaluate", run, "--data", texts], 0),
        (["compare", run, run], 0),
        (["check", run], 0),
        (["export", run, "--to", f"out{HOSTILE}"], 0),
        (["plan", *tiny], 0),
        (["data", "show", *tiny], 0),
        (["data", "build", *tiny], 0),
        (["train", *tiny, "--print-config"], 0),
        (["train", *tiny, "--out", run], 3),
        (["train", "bad.jsonl"], 3),
        (["train", "config.toml"], 2),
        (["train", f"nothere{HOSTILE}"], 3),
        (["train", f"train.x=1{HOSTILE}"], 2),
        (["generate", f"nothere{HOSTILE}"], 3),
        (["generate", run, "--regex", f"({HOSTILE}"], 3),
        ([HOSTILE], 2),
        ([f"--{HOSTILE}"], 2),
    ):
        done = server.run(hostile, *arguments, env={"TERM": "xterm"}, terminal=1, figures=0)
        assert done.code == code, done.out
        rest = OURS.sub("", done.out).replace("\r\n", "\n").replace("\r", "")
        assert visible(rest) == rest, f"{arguments}: {rest!r}"
        said[arguments[0]] = said.get(arguments[0], "") + rest
    for command in ("train", "evaluate", "compare", "export", "data"):
        assert "]0;owned" in said[command], command  # visible, and not left out
    assert visible(HOSTILE[:5] + short) in said["generate"]
    piped = server.run(hostile, "generate", run, HOSTILE[:5], *written)
    assert piped.out == f"{HOSTILE[:5]}{short}\n"  # to a file every character


SHOWING = [["generate", "run", "字é"], ["data", "show", *TINY], ["train", *TINY, "--out", "字"]]


@pytest.mark.parametrize("arguments", SHOWING, ids=lambda arguments: arguments[0])
def test_a_stream_that_cannot_show_a_character_spells_it(
    arguments: list[str], place: Path, server: CommandServer, tmp_path: Path
) -> None:
    shutil.copytree(place, tmp_path / "here")
    (tmp_path / "here" / "texts" / "0.txt").write_text("字 é " * 60)
    done = server.run(tmp_path / "here", *arguments, env={"PYTHONIOENCODING": "ascii"}, figures=0)
    assert done.code == 0 and (done.out + done.err).isascii(), done.err
    assert r"\u5b57" in done.out or arguments[0] == "train"
