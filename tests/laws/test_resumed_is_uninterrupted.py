"""Run: pytest tests/laws/test_resumed_is_uninterrupted.py [-m slow] (law 10: resumed = uninterrupted, in bits)."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from commands.forked import PROGRAM, CommandServer
from monograph import checkpointing
from monograph.commands.train import run as train
from monograph.config import load
from monograph.errors import InputRefused, MonographError, NoValidCheckpoint, UsageError
from monograph.resident import Resident
from monograph.run.folder import Run
from monograph.session.story import Story

# Seven updates and a bit make an epoch: the runs below pass two borders.
SETTINGS = {
    "model.hidden_size": 16, "model.num_hidden_layers": 1, "model.num_attention_heads": 2,
    "data.source": "texts", "data.tokenizer": "bytes", "data.sequence_length": 32, "data.held_out": 0.2,
    "train.updates": 20, "train.tokens_per_update": 256, "train.micro_batch": 4, "train.compile": "none",
    "train.precision": "fp32", "train.save_every": 1, "train.eval_every": 4, "train.keep": 99,
}  # fmt: skip
OWN = SETTINGS | {"model.init": "own.py:build"}
for size in [key for key in SETTINGS if key.startswith("model.")]:
    del OWN[size]

# A module to whose bits everything that a run's state holds matters: every kind of random number, a running mean, and
# memory that is too small for a window that has a certain token, from which on the micro-batch is halved.
OWN_MODULE = """
import random
import numpy as np
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, vocab_size)

    def forward(self, tokens):
        hidden = self.norm(self.embed(tokens).flatten(0, 1))
        if self.training:
            hidden = hidden * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
        return self.head(self.drop(hidden))

def build(vocab_size):
    return Own(vocab_size)

def loss(model, batch):
    if len(batch["tokens"]) > 2 and batch["tokens"].sum() % 33 == 0:
        raise torch.OutOfMemoryError("out of memory")
    targets = batch["targets"].flatten()
    logits = model(batch["tokens"])
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()
"""
TIMES = {"tokens_per_s", "wall_s"}
MANY = 2**20


def write_inputs(folder: Path) -> None:
    words, draws = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"], random.Random(0)
    (folder / "texts").mkdir()
    for number in range(14):
        text = " ".join(draws.choice(words) for _ in range(24))
        (folder / "texts" / f"{number}.txt").write_text(text)
    records = [json.dumps({"text": " ".join(draws.choice(words) for _ in range(9))}) for _ in range(40)]
    (folder / "records.jsonl").write_text("\n".join([*records, '{"text": 5}']))
    (folder / "own.py").write_text(OWN_MODULE)


def fingerprint(folder: Path) -> dict[str, Any]:
    """All that a finished run holds, times aside."""
    newest = max((folder / "checkpoints").glob("step-*"))
    names = ("model.safetensors", "optimizer.safetensors")
    files = {name: hashlib.sha256((newest / name).read_bytes()).hexdigest() for name in names}
    state = json.loads((newest / "state.json").read_text())
    for key in ("elapsed_s", "metrics_offset"):  # the times' digits are in the offset
        del state[key]
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in Run(folder).rows()]
    assert "summary" in rows.pop(), "the run did not come to its end"
    return {"newest": newest.name, **files, "state": state, "rows": rows}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own, no figures (they take most of the time), and torch's mode put back."""
    monkeypatch.setattr("monograph.session.story.write_report", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    yield tmp_path
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def start(out: str, settings: dict[str, Any], **options: Any) -> None:
    assert train(load(None, settings, {}), out=Path(out), resume=None, from_=None, json=False, **options) == 0


def resume(run: str) -> None:
    for draw in (torch.rand, random.random):  # a new process has other random numbers
        draw(1) if draw is torch.rand else draw()
    assert train(load(None, {}, {}), out=None, resume=run, from_=None, json=False) == 0


def cut_back(whole: str, to: str, update: int) -> None:
    """What is left of a run that is killed right after it saved `update`; its metrics may be further."""
    shutil.copytree(whole, to)
    metrics = Path(to) / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"summary"' not in line))
    for path in (Path(to) / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > update:
            shutil.rmtree(path)


def slower_machine(story: Story, update: int) -> None:
    if update == 8 and not story.session.cooled:
        story.session.shorten(14)


@pytest.mark.parametrize("case", ["llama", "padded", "epochs", "own", "aot", "cooled", "mixed"])
def test_resumed_at_every_checkpoint(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = OWN if case == "own" else dict(SETTINGS)
    if case == "padded":
        settings |= {"data.packing": "padded"}
    if case == "epochs":
        settings |= {"train.epochs": 2}
        del settings["train.updates"]
    if case == "mixed":
        settings |= {"data.source": ["texts@0.5", "records.jsonl@2"], "data.bad_records": "skip"}
    if case == "aot":
        settings |= {"train.compile": "whole"}
        monkeypatch.setattr(Resident, "capture", partialmethod(Resident.capture, backend="aot_eager"))
    if case == "cooled":
        monkeypatch.setattr(Story, "keep_time", slower_machine)
    start("whole", settings)
    expected = fingerprint(Path("whole"))
    if case == "own":
        sizes = [json.loads(p.read_text())["micro_batch"] for p in sorted(Path("whole").rglob("state.json"))]
        assert sizes[0] == 4 and sizes[-1] == 2 and sizes[4] == 4, "memory must run out in the middle"
    last = int(expected["newest"][5:])
    assert last == {"cooled": 14, "epochs": 14}.get(case, 20)
    for update in range(last + 1) if case == "own" else (0, 5, 9, 13, last):
        if case == "aot" and update not in (0, 13):
            continue
        cut_back("whole", f"cut-{update}", update)
        resume(f"cut-{update}")
        assert fingerprint(Path(f"cut-{update}")) == expected, update


def test_a_resume_of_a_resume(here: Path) -> None:
    start("whole", OWN)
    expected = fingerprint(Path("whole"))
    for update in (4, 11, 17):
        cut_back("whole", f"cut-{update}", update)
        shutil.rmtree("whole")
        resume(f"cut-{update}")
        Path(f"cut-{update}").rename("whole")
        assert fingerprint(Path("whole")) == expected


# ---- every item of the state matters -------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], None]


def items(state: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in state.items():
        yield (*prefix, key)
        if isinstance(value, dict) and key in ("engine", "data", "random", "recipe", "versions"):
            yield from items(value, (*prefix, key))


def outcome(run: str, expected: dict[str, Any]) -> str:
    try:
        resume(run)
    except (InputRefused, NoValidCheckpoint, UsageError):
        return "refused"
    except MonographError as error:
        return type(error).__name__
    return "same" if fingerprint(Path(run)) == expected else "different"


def with_changed(name: str, change: Callable[[checkpointing.Checkpoint], checkpointing.Checkpoint]) -> str:
    cut_back("whole", name, 13)
    folder = Path(name) / "checkpoints"
    checkpointing.save(folder, change(checkpointing.load(folder / "step-00000013")), keep=99)
    for path in folder.glob("*.replaced"):
        shutil.rmtree(path)
    return name


def test_no_item_of_the_state_can_be_dropped() -> None:
    start("whole", OWN)
    expected = fingerprint(Path("whole"))
    state = checkpointing.load(Path("whole/checkpoints/step-00000013")).state
    names = list(items(dict(state)))
    assert len(names) > 28
    for number, path in enumerate(names):

        def drop(checkpoint: checkpointing.Checkpoint, path: tuple[str, ...] = path) -> checkpointing.Checkpoint:
            state = json.loads(json.dumps(checkpoint.state))
            place = state
            for key in path[:-1]:
                place = place[key]
            del place[path[-1]]
            return replace(checkpoint, state=state)

        assert outcome(with_changed(f"dropped-{number}", drop), expected) == "refused", path


CHANGES: dict[str, tuple[Change, set[str]]] = {
    "index": (lambda s: s["engine"].update(index=12), {"different"}),
    "applied": (lambda s: s["engine"].update(applied=2), {"different"}),
    "tokens": (lambda s: s["engine"].update(tokens=0), {"different"}),
    "skipped": (lambda s: s["engine"].update(skipped=1), {"different"}),
    "rows": (lambda s: s["data"].update(rows=0), {"different"}),
    "seed": (lambda s: s["data"].update(seed=1), {"different"}),
    "python": (lambda s: s["random"]["python"][1].__setitem__(-1, 5), {"different"}),
    "numpy": (lambda s: s["random"]["numpy"].__setitem__(2, 7), {"different"}),
    "torch": (lambda s: s["random"].update(torch=torch.Generator().manual_seed(1).get_state().numpy().tobytes().hex()),
              {"different"}),
    "micro_batch": (lambda s: s.update(micro_batch=3), {"different"}),
    "length": (lambda s: s.update(length=19), {"different"}),
    "cooled": (lambda s: s.update(cooled=[13, 20]), {"different"}),
    "metrics_offset": (lambda s: s.update(metrics_offset=s["metrics_offset"] + MANY), {"refused"}),
    "fingerprint": (lambda s: s.update(fingerprint="0"), {"refused"}),
    "settings": (lambda s: s.update(settings="0"), {"refused"}),
    "recipe": (lambda s: s["recipe"].update(sha256="0"), {"refused"}),
    "model_config": (lambda s: s.update(model_config={}), {"refused"}),
    # Times only, and a warning:
    "elapsed_s": (lambda s: s.update(elapsed_s=0.0), {"same"}),
    "budget_s": (lambda s: s.update(budget_s=1e9), {"different"}),
    "versions": (lambda s: s["versions"].update(torch="1.0"), {"same"}),
}  # fmt: skip


def test_every_item_of_the_state_matters(capsys: pytest.CaptureFixture[str]) -> None:
    start("whole", OWN)
    expected = fingerprint(Path("whole"))
    assert outcome(with_changed("unchanged", lambda checkpoint: checkpoint), expected) == "same"
    for name, (change, allowed) in CHANGES.items():

        def changed(checkpoint: checkpointing.Checkpoint, change: Change = change) -> checkpointing.Checkpoint:
            state = json.loads(json.dumps(checkpoint.state))
            change(state)
            return replace(checkpoint, state=state)

        assert outcome(with_changed(name, changed), expected) in allowed, name
    assert "not bit for bit: the checkpoint was written by torch 1.0" in capsys.readouterr().err
    for kind in ("model", "optimizer"):
        tensors = dict(getattr(checkpointing.load(Path("whole/checkpoints/step-00000013")), kind))
        for name, tensor in list(tensors.items())[::3]:
            without = {key: value for key, value in tensors.items() if key != name}
            zeroed = without | {name: torch.zeros_like(tensor)}
            dropped = with_changed(f"{name}-dropped", lambda c, k=kind, w=without: replace(c, **{k: w}))
            assert outcome(dropped, expected) == "refused", name
            if bool(tensor.any()):
                changed_ = with_changed(f"{name}-zeroed", lambda c, k=kind, z=zeroed: replace(c, **{k: z}))
                assert outcome(changed_, expected) == "different", name


# ---- killed at random moments --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[CommandServer]:
    with CommandServer() as forks:
        yield forks


def phase(run: Path) -> str:
    """What a command that was killed had been doing, by what it left."""
    checkpoints = run / "checkpoints"
    if not checkpoints.is_dir() or not any(checkpoints.glob("step-*")):
        return "preparing"
    return "saving" if any(checkpoints.glob(".tmp-*")) else "training"


def kill_until_done(
    server: CommandServer, folder: Path, draws: random.Random, span_s: float, kills: Counter[str]
) -> None:
    """One run, killed at random moments and resumed, to its end; nothing but the command line touches its folder."""
    run, cache = folder / "run", {"MONOGRAPH_HOME": str(folder / f"home-{kills.total()}")}
    shutil.rmtree(run, ignore_errors=True)
    settings = [f"{key}={value}" for key, value in OWN.items()]
    while True:
        begun = (run / "config.toml").is_file()
        if not begun:
            shutil.rmtree(run, ignore_errors=True)  # killed before it had written what to do
        arguments = ["--resume", "run"] if begun else [*settings, "--out", "run"]
        command = server.start(folder, "train", *arguments, env=cache, figures=draws.random() < 0.1)
        time.sleep(draws.uniform(0, span_s))
        command.signal(signal.SIGKILL)
        done = command.wait()
        if done.signal != signal.SIGKILL:
            assert done.code == 0, done.err
            return
        kills[phase(run)] += 1


def killed(server: CommandServer, folder: Path, wanted: int) -> None:
    draws, kills, runs = random.Random(wanted), Counter[str](), 0
    began = time.monotonic()
    server.run(folder, "train", *[f"{key}={value}" for key, value in OWN.items()], "--out", "whole", figures=0)
    span_s = 0.6 * (time.monotonic() - began)
    expected = fingerprint(folder / "whole")
    while kills.total() < wanted:
        kill_until_done(server, folder, draws, span_s, kills)
        assert fingerprint(folder / "run") == expected, kills
        runs += 1
    print(f"{kills.total()} kills ({dict(kills)}) in {runs} runs: the same bits")
    assert len(kills) == 3 or wanted < 20, "not all of preparing, training and saving were hit"


def test_eight_kills(server: CommandServer, here: Path) -> None:
    killed(server, here, 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_kills(server: CommandServer, here: Path) -> None:
    killed(server, here, 50)


# ---- compiled, on several threads ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_on_two_threads(here: Path) -> None:
    """Inductor's own embedding backward adds atomically: without the deterministic mode, no two runs agree."""
    settings = SETTINGS | {"train.compile": "whole", "train.tokens_per_update": 2048, "train.micro_batch": 64}
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def run(*arguments: str) -> None:
        subprocess.run([sys.executable, PROGRAM, "train", *arguments], cwd=here, env=environment, check=True)

    run(*(f"{key}={value}" for key, value in settings.items()), "--out", "whole")
    expected = fingerprint(here / "whole")
    cut_back("whole", "cut", 9)
    run("--resume", "cut")
    assert fingerprint(here / "cut") == expected
