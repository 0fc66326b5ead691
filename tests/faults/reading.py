"""Commands that read, as a person types them, in a folder that has runs and all that they are made of.

The commands run in a FaultServer's forks. What one leaves behind, what it prints included, is compared with what it
leaves when every read succeeds.
"""

from __future__ import annotations

import io
import os
import re
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import monograph.commands.check
import monograph.commands.compare
import monograph.commands.data
import monograph.commands.evaluate
import monograph.commands.export
import monograph.commands.generate
import monograph.commands.sweep
import monograph.commands.train  # noqa: F401 - imported here once, and not in every fork
from commands.inputs import TINY, over
from laws.resumed import write_inputs
from monograph.cli import main
from monograph.session import story
from monograph.session.session import Session
from monograph.sweeps import board

UPDATES, STOPPED, KEPT = 7, 5, 3
RUN = [*over(TINY, f"train.updates={UPDATES}", "train.save_every=1"), f"train.keep={KEPT}"]
ADAPTERS = [*(each for each in RUN if not each.startswith("model.")), "model.init=base", "lora.rank=2"]
TIMES = re.compile(r'"(\w*(tokens_per_s|_s|seconds|peak_memory_bytes))": [-0-9.e+]+')


class Ended(Exception):
    """A command that did not end with 0: its exit code, and what it said."""


def carry_out(folder: Path, *arguments: str) -> None:
    """A command in the folder, without figures; what it prints is kept there. Raises Ended."""
    os.environ |= {"MONOGRAPH_HOME": str(folder / "cache"), "NO_COLOR": "1"}
    story.write_report = board.write_sweep_report = lambda *_: None  # type: ignore[assignment]
    os.chdir(folder)
    told, printed, code = io.StringIO(), io.StringIO(), None
    with redirect_stderr(told), redirect_stdout(printed):
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code
    if code:
        raise Ended(f"{code}\n{told.getvalue()}")
    folder.with_suffix(".printed").write_text(TIMES.sub(r'"\1": 0', printed.getvalue()))


def prepare(folder: Path) -> None:
    """Two runs that were stopped after update 5 of 7, of a fresh model and of adapters; the latter is the newest."""
    write_inputs(folder)
    records = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(records[:-1]))  # but for a bad one
    save = Session.save

    def stopping(session: Session) -> None:
        save(session)
        if session.engine.index == STOPPED - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with patch.object(Session, "save", stopping):
        for name, settings in (("first", RUN), ("adapted", ADAPTERS)):
            try:
                carry_out(folder, "train", *settings, "--out", f"runs/{name}")
            except Ended as end:
                if not str(end).startswith("75\n"):
                    raise


def check(folder: Path) -> None:
    carry_out(folder, "check", "runs/first")


def generate(folder: Path) -> None:
    carry_out(folder, "generate", "last", "alpha", "--max-tokens", "4")


def generate_from_a_folder(folder: Path) -> None:
    carry_out(folder, "generate", "base", "alpha", "--max-tokens", "4")


def export(folder: Path) -> None:
    carry_out(folder, "export", "last", "--to", "out")


def export_gguf(folder: Path) -> None:
    carry_out(folder, "export", "runs/first", "--to", "out", "--format", "gguf")


def evaluate(folder: Path) -> None:
    carry_out(folder, "evaluate", "runs/first", "--json")


def evaluate_other_text(folder: Path) -> None:
    carry_out(folder, "evaluate", "last", "--data", "records.jsonl", "--json")


def resume(folder: Path) -> None:
    carry_out(folder, "train", "--resume", "runs/first")


def resume_adapters(folder: Path) -> None:
    carry_out(folder, "train", "--resume", "last")


def train(folder: Path) -> None:
    carry_out(folder, "train", *RUN, "--out", "runs/new")


def compare(folder: Path) -> None:
    carry_out(folder, "compare", "runs/first", "runs/adapted")


def show_data(folder: Path) -> None:
    carry_out(folder, "data", "show", "texts", "data.tokenizer=bytes", "data.sequence_length=32", "data.held_out=0.2")
