"""Commands that read, as a person types them, in a folder that has runs and all that they are made
of.

The commands run in a FaultServer's forks. What one leaves behind, what it prints included, is
compared with what it leaves when every read succeeds.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
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
from faults.harness import Scenario
from laws.resumed import fingerprint
from monograph.checkpointing import CheckpointDamaged, verify
from monograph.cli import main
from monograph.model.config import LlamaConfig
from monograph.model.hub import save_model
from monograph.model.llama import Llama
from monograph.run.folder import Run
from monograph.session import reporting
from monograph.session.session import Session
from monograph.sweeps import progress
from monograph.text.tokenizer import Tokenizer

UPDATES, STOPPED, KEPT = 6, 5, 3
RUN = [*over(TINY, f"train.updates={UPDATES}", "train.save_every=1"), f"train.keep={KEPT}"]
FROM_BASE = [*(each for each in RUN if not each.startswith("model.")), "model.init=base"]
SWEEP = [*over(RUN, "train.updates=2"), "optim.lr=1e-3,2e-3"]
TIMES = re.compile(
    r'"(\w*(tokens_per_s|_s|memory_bytes))": [-0-9.e+]+|[\d.]+ ?k? tok/s|[-+]\d+ % tokens/s'
)


class Ended(Exception):
    """A command that did not end with 0: its exit code, and what it said."""


def carry_out(folder: Path, *arguments: str) -> None:
    """A command in the folder, without figures; what it prints is kept beside the folder. Raises
    Ended.
    """
    os.environ |= {"MONOGRAPH_HOME": str(folder / "cache"), "NO_COLOR": "1"}
    reporting.write_report = progress.write_sweep_report = lambda *_: None  # type: ignore[assignment]
    reporting.SAMPLE_TOKENS = 4  # 48 would take longer than all updates
    os.chdir(folder)
    # Of what the server's has read ahead, no encoding can be set any more.
    sys.stdin = open(os.devnull)
    told, printed = io.StringIO(), io.StringIO()
    code: object = 0
    with redirect_stderr(told), redirect_stdout(printed):
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code
    if code:
        raise Ended(f"{code}\n{told.getvalue()}")
    printed_in(folder).write_text(TIMES.sub("", printed.getvalue()).replace(str(folder), ""))


def printed_in(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.printed")


def prepare(folder: Path) -> None:
    """A text, a base, an adapter beside it, a finished run and sweep, and the newest: a run stopped
    after update 5.
    """
    (folder / "texts").mkdir()
    for number, words in enumerate(("alpha beta", "gamma delta", "epsilon zeta", "eta theta")):
        (folder / "texts" / f"{number}.txt").write_text(f"{words} " * 40)
    (folder / "records.jsonl").write_text('{"text": "alpha beta gamma delta"}\n' * 20)
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    config = LlamaConfig(vocab_size=259, num_key_value_heads=1, max_position_embeddings=32, **shape)
    save_model(Llama(config), folder / "base", Tokenizer.bytes())
    carry_out(folder, "train", *FROM_BASE, "lora.rank=2", "--out", "adapted")
    carry_out(folder, "export", "adapted", "--to", "merged")
    (folder / "merged" / "adapter").rename(folder / "adapter")
    stored = folder / "adapter" / "adapter_config.json"
    stored.write_text(
        json.dumps(json.loads(stored.read_text()) | {"base_model_name_or_path": "../base"})
    )
    shutil.rmtree(folder / "adapted")
    shutil.rmtree(folder / "merged")
    carry_out(folder, "train", *over(RUN, "train.updates=1"), "--out", "runs/older")
    carry_out(folder, "sweep", *SWEEP, "--out", "runs/sweep")
    save = Session.save

    def stopping(session: Session) -> None:
        save(session)
        if session.engine.index == STOPPED - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with patch.object(Session, "save", stopping):
        try:
            carry_out(folder, "train", *RUN, "--out", "runs/newest")
        except Ended as end:
            if not str(end).startswith("75\n"):
                raise


def check(folder: Path) -> None:
    carry_out(folder, "check", "last")


def generate(folder: Path) -> None:
    carry_out(folder, "generate", "last", "alpha", "--max-tokens", "4")


def generate_from_adapter(folder: Path) -> None:
    carry_out(folder, "generate", "adapter", "alpha", "--max-tokens", "4")


def export(folder: Path) -> None:
    carry_out(folder, "export", "last", "--to", "out")


def export_gguf(folder: Path) -> None:
    carry_out(folder, "export", "base", "--to", "out", "--format", "gguf")


def export_whole(folder: Path) -> None:
    carry_out(folder, "export", "base", "--to", "out", "--original", "base")


def evaluate(folder: Path) -> None:
    carry_out(folder, "evaluate", "last", "--json")


def evaluate_records(folder: Path) -> None:
    carry_out(folder, "evaluate", "base", "--data", "records.jsonl", "--json")


def compare(folder: Path) -> None:
    carry_out(folder, "compare", "runs/older", "last")


def show_data(folder: Path) -> None:
    carry_out(
        folder, "data", "show", "tex*/*.txt", "data.tokenizer=base", "data.sequence_length=32"
    )


def resume(folder: Path) -> None:
    carry_out(folder, "train", "--resume", "last")


def train(folder: Path) -> None:
    carry_out(folder, "train", *FROM_BASE, "--out", "trained")


def resume_trained(folder: Path) -> None:
    carry_out(folder, "train", "--resume", "trained")


def sweep(folder: Path) -> None:
    carry_out(folder, "sweep", "--out", "runs/sweep", "--json")


# Commands that write a run, and what goes on with it.
RUNS = {"resume": ("runs/newest", resume), "train": ("trained", resume_trained)}
COMMANDS: dict[str, Scenario] = {
    each.__name__.replace("_", " "): each
    for each in (
        check, generate, generate_from_adapter, export, export_gguf, export_whole, evaluate,
        evaluate_records, compare, show_data, resume, train, sweep,
    )
}  # fmt: skip


def results(folder: Path) -> list[Any]:
    """All that a command that came to its end leaves, times aside."""
    trained = [fingerprint(folder / run) for run, _ in RUNS.values() if is_whole(Run(folder / run))]
    exported = {
        path.name: digest(path) for path in sorted(folder.glob("out/**/*")) if path.is_file()
    }
    return [printed_in(folder).read_text(), trained, exported]


def is_whole(run: Run) -> bool:
    return run.metrics.exists() and any("summary" in row for row in run.rows())


def kept(folder: Path) -> dict[str, str]:
    """Digests of all that a command which only reads may not change; a lock and the starts tell who
    came last.
    """
    places = ("texts", "base", "adapter", "runs", "records.jsonl")
    files = [
        path
        for place in places
        for path in (folder / place, *(folder / place).rglob("*"))
        if path.is_file()
    ]
    return {
        str(path.relative_to(folder)): digest(path)
        for path in files
        if path.name not in ("run.lock", "starts.jsonl")
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sound_updates(run: Path) -> list[int]:
    """Updates of the sound checkpoints, newest first."""
    found = []
    for path in sorted(run.glob("checkpoints/step-*"), reverse=True):
        try:
            verify(path)
        except CheckpointDamaged:
            continue
        found.append(int(path.name[5:]))
    return found
