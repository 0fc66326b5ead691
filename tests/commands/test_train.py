"""Run: pytest tests/commands/test_train.py (stopped, short of disk or memory, branched, own modules)."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from commands.forked import PROGRAM, CommandServer
from commands.inputs import OWN, TINY
from monograph import checkpointing
from monograph.model import hub
from monograph.run.folder import Run
from monograph.session.choices import discard

# So slow that there is time to stop it, and long enough.
SLOW = """
import time
import torch
from torch import nn

def build(vocab_size):
    return nn.Sequential(nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size))

def loss(model, batch):
    time.sleep(0.05)
    targets = batch["targets"].flatten()
    logits = model(batch["tokens"]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()
"""
LONG = [*OWN, "train.updates=400", "train.save_every=200", "model.init=slow.py:build", "--out", "run"]


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def rows(run: Path, key: str = "train_loss") -> list[dict[str, Any]]:
    return [row for row in Run(run).rows() if key in row]


def sound(run: Path) -> int:
    """The update of the newest checkpoint; each that is there is whole."""
    for path in (run / "checkpoints").glob("step-*"):
        checkpointing.verify(path)
    return int(newest(run).name[5:])


# ---- stopped -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_the_printed_command_goes_on(number: int, server: CommandServer, here: Path) -> None:
    (here / "slow.py").write_text(SLOW)
    command = server.start(here, "train", *LONG, figures=0)
    command.until(lambda: (here / "run/metrics.jsonl").exists())
    command.signal(number)
    done = command.wait()
    assert done.code == 75, done.err
    said = re.fullmatch(r"saved at update (\d+); continue: (.+)", done.err.splitlines()[-1])
    assert said and sound(here / "run") == int(said[1]) == len(rows(here / "run")) < 400
    program, *arguments = shlex.split(said[2].replace(f"{sys.executable} -m monograph", PROGRAM))
    assert program == PROGRAM
    again = server.start(here, *arguments, figures=0)
    again.until(lambda: len(rows(here / "run")) > int(said[1]))
    again.signal(number)
    assert again.wait().code == 75
    assert [row["update"] for row in rows(here / "run")] == list(range(1, sound(here / "run") + 1))


def test_a_second_interrupt_leaves_at_once(server: CommandServer, here: Path) -> None:
    (here / "slow.py").write_text(SLOW.replace("0.05", "0.5"))
    command = server.start(here, "train", *LONG, figures=0)
    command.until(lambda: (here / "run/metrics.jsonl").exists())
    command.signal(signal.SIGINT)
    time.sleep(0.05)  # two signals at once are one
    command.signal(signal.SIGINT)
    done = command.wait()
    assert done.code == 130 and "Traceback" not in done.err
    assert sound(here / "run") == 0 and server.run(here, "check", "run").code == 0


def test_usr1_saves_and_goes_on(server: CommandServer, here: Path) -> None:
    (here / "slow.py").write_text(SLOW)
    command = server.start(here, "train", *LONG, figures=0)
    command.until(lambda: (here / "run/metrics.jsonl").exists())
    command.signal(signal.SIGUSR1)
    command.until(lambda: newest(here / "run").name > "step-00000000")
    saved = sound(here / "run")
    command.until(lambda: len(rows(here / "run")) > saved)
    command.signal(signal.SIGTERM)
    assert command.wait().code == 75 and 0 < saved < 200


def test_interrupted_before_it_trains(server: CommandServer, here: Path) -> None:
    (here / "slow.py").write_text(SLOW + "\ntime.sleep(60)\n")
    command = server.start(here, "train", *LONG, figures=0)
    command.until(lambda: (here / "run/config.toml").exists())
    command.signal(signal.SIGINT)
    done = command.wait()
    assert done.code == 130 and "Traceback" not in done.err
    (here / "slow.py").write_text(SLOW.replace("0.05", "0"))
    assert server.run(here, "train", "--resume", "run", "--json", figures=0).code == 0, "resumable from its start"


def test_a_folder_in_use(server: CommandServer, here: Path) -> None:
    (here / "slow.py").write_text(SLOW)
    command = server.start(here, "train", *LONG, figures=0)
    command.until(lambda: (here / "run/metrics.jsonl").exists())
    with CommandServer() as other:
        for arguments in (["--resume", "run"], ["texts", "--out", "run"]):
            done = other.run(here, "train", *arguments)
            assert done.code == 8 and f"in use by process {command.pid}" in done.err
        assert other.run(here, "check", "run").code == 0
    command.signal(signal.SIGTERM)
    assert command.wait().code == 75


# ---- short of something --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_bytes", [20_000, 2000, 400])
def test_a_full_disk_keeps_the_last_checkpoint(file_bytes: int, server: CommandServer, here: Path) -> None:
    """Files that may not grow: first the checkpoints, then metrics, then the settings do not fit."""
    small = [*TINY, "train.updates=40", "train.keep=2", "model.intermediate_size=8"]
    limit = {"file_bytes": file_bytes}
    done = server.run(here, "train", *small, "--out", "run", figures=0, **limit)
    assert done.code == 7 and "Traceback" not in done.err, done.err
    if (here / "run").exists():
        assert server.run(here, "train", "--resume", "run", figures=0).code == 0
    else:
        assert server.run(here, "train", *small, "--out", "run", figures=0).code == 0
    assert sound(here / "run") == 40


def test_a_disk_that_fills_up_during_training(server: CommandServer, here: Path) -> None:
    """The metrics grow until they may not; what was saved before stays, and a resume ends as if nothing had been."""
    long = [*TINY, "train.updates=420", "train.save_every=50", "--out", "run"]
    done = server.run(here, "train", *long, figures=0, file_bytes=65_000)
    assert done.code == 7 and "cannot write run/metrics.jsonl" in done.err.splitlines()[-1], done.err
    assert 0 < sound(here / "run") < 420
    assert server.run(here, "train", "--resume", "run", figures=0).code == 0 and sound(here / "run") == 420
    assert [row["update"] for row in rows(here / "run")] == list(range(1, 421))


POISON = SLOW.replace("time.sleep(0.05)", "calls.append(1)").replace("def build", "calls = []\n\ndef build")
POISON = POISON.replace('reduction="sum"), (', 'reduction="sum") * (1 if len(calls) < 14 else float("nan")), (')


def test_diverged_by_a_poisoned_loss(server: CommandServer, here: Path) -> None:
    (here / "slow.py").write_text(POISON)
    done = server.run(here, "train", *OWN, "train.updates=60", "model.init=slow.py:build", "--out", "run", figures=0)
    assert done.code == 5 and "20 updates in a row" in done.err.splitlines()[-1]
    skipped = [row["skipped"] for row in rows(here / "run")]
    assert skipped[-20:] == [True] * 20 and not any(skipped[:-20])
    assert sound(here / "run") > 0


def test_diverged_by_an_absurd_learning_rate(server: CommandServer, here: Path) -> None:
    arguments = [*TINY, "optim.lr=1e6", "optim.schedule=constant", "train.updates=200", "train.save_every=1"]
    done = server.run(here, "train", *arguments, "--out", "run", figures=0)
    assert done.code == 5 and "lower optim.lr" in done.err.splitlines()[-1], done.err
    for path in (here / "run/checkpoints").glob("step-*"):
        assert all(bool(tensor.isfinite().all()) for tensor in checkpointing.load(path).model.values()), path.name


# ---- another beginning ---------------------------------------------------------------------------------------------


def test_from_a_run(server: CommandServer, here: Path) -> None:
    root = [*TINY, "optim.lr=3e-3", "data.tokenizer=bpe:300"]
    assert server.run(here, "train", *root, figures=0).code == 0
    parent = next((here / "runs").iterdir())
    at_6 = checkpointing.load(parent / "checkpoints/step-00000006")
    done = server.run(
        here, "train", "--from", "last@6", "train.updates=4", "train.save_every=1", "--out", "b", figures=0
    )
    assert done.code == 0 and "after update 6" in done.err, done.err
    first = json.loads((here / "b/metrics.jsonl").read_text().splitlines()[0])
    begun = checkpointing.load(sorted((here / "b/checkpoints").glob("step-*"))[0])
    assert first["update"] == 1 and first["tokens"] < 130 and not first["skipped"]
    assert begun.state["engine"]["applied"] > at_6.state["engine"]["applied"], "Adam's bias correction goes on"
    config = (here / "b/config.toml").read_text()
    assert "lr = 0.003" in config and "hidden_size = 16" in config and "updates = 4" in config
    assert (here / "b/tokenizer.json").read_bytes() == (parent / "tokenizer.json").read_bytes()
    (here / "more").mkdir()
    (here / "more/x.txt").write_text("delta gamma " * 80)
    done = server.run(here, "train", "--from", "b", "more", "train.updates=2", "--out", "c", figures=0)
    assert done.code == 0 and (here / "c/tokenizer.json").read_bytes() == (here / "b/tokenizer.json").read_bytes()


def test_a_branch_counts_its_own_skipped_updates(server: CommandServer, here: Path) -> None:
    (here / "own.py").write_text(POISON.replace("len(calls) < 14", "len(calls) != 6"))
    assert server.run(here, "train", *OWN, "model.init=own.py:build", "--out", "a", figures=0).code == 0
    assert sum(row["skipped"] for row in rows(here / "a")) == 1
    (here / "own.py").write_text(SLOW.replace("0.05", "0"))
    assert server.run(here, "train", "--from", "a", "train.updates=3", "--out", "b", figures=0).code == 0
    assert [row["skipped"] for row in rows(here / "b")] == [False] * 3


def test_a_branch_that_was_killed_before_its_first_checkpoint(server: CommandServer, here: Path) -> None:
    assert server.run(here, "train", *TINY, "--out", "a", figures=0).code == 0
    arguments = ["train", "--from", "a", "train.updates=3", "--out", "b"]
    assert server.run(here, *arguments, figures=0).code == 0
    expected = checkpointing.load(newest(here / "b"))
    for name in ("checkpoints", "metrics.jsonl"):
        path = here / "b" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = server.run(here, "train", "--resume", "b", figures=0)
    assert done.code == 0 and "weights and optimizer of" in done.err
    again = checkpointing.load(newest(here / "b"))
    assert all(torch.equal(again.model[name], tensor) for name, tensor in expected.model.items())


def test_changed_data_changed_settings_changed_module(server: CommandServer, here: Path) -> None:
    (here / "own.py").write_text(SLOW.replace("0.05", "0"))
    assert server.run(here, "train", *OWN, "model.init=own.py:build", "--out", "run", figures=0).code == 0
    shutil.rmtree(newest(here / "run"))
    metrics = (here / "run/metrics.jsonl").read_text()
    metrics = "".join(line for line in metrics.splitlines(keepends=True) if "summary" not in line)
    (here / "run/metrics.jsonl").write_text(metrics)

    def refused(path: Path, text: str, part: str) -> None:
        before = path.read_text()
        path.write_text(text)
        done = server.run(here, "train", "--resume", "run")
        assert done.code == 3 and part in done.err.splitlines()[-1], done.err
        path.write_text(before)

    refused(here / "texts/3.txt", "something else " * 9, "texts: not what run was trained on")
    refused(here / "own.py", SLOW, "own.py: not the file that run was trained with")
    config = (here / "run/config.toml").read_text()
    refused(
        here / "run/config.toml", config.replace("lr = 0.001", "lr = 0.002"), "config.toml: not what the run was begun"
    )
    refused(here / "run/metrics.jsonl", metrics[:100], "rows are missing")
    assert server.run(here, "train", "--resume", "run", figures=0).code == 0


def test_a_module_of_its_own_from_end_to_end(server: CommandServer, here: Path) -> None:
    (here / "own.py").write_text(SLOW.replace("0.05", "0"))
    done = server.run(here, "train", *OWN, "model.init=own.py:build", "--out", "run", "--json", figures=0)
    assert done.code == 0, done.err
    trained = json.loads(done.out)
    scored = server.run(here, "evaluate", "run", "--json")
    assert json.loads(scored.out.splitlines()[-1])["loss"] == pytest.approx(trained["eval_loss"], rel=1e-6)
    for arguments in (["generate", "run", "a"], ["export", "run", "--to", "out"]):
        done = server.run(here, *arguments)
        assert done.code == 3 and "holds a module of its own (own.py:build), not a Llama" in done.err
        assert done.err.count("\n") == 1 and not done.out
    done = server.run(here, "train", "--from", "run", "--out", "b", "train.updates=1", figures=0)
    assert done.code == 0 and "evaluate b" in done.err


def test_a_loss_that_counts_something_else(server: CommandServer, here: Path) -> None:
    """Its sum is no likelihood of the text: there is a loss, and no bits per byte."""
    (here / "own.py").write_text(SLOW.replace("0.05", "0").replace("(targets != -100).sum()", "targets.new_tensor(4)"))
    done = server.run(here, "train", *OWN, "model.init=own.py:build", "--out", "run", "--json", figures=0)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["eval_bits_per_byte"] is None and result["eval_loss"] > 0


def test_from_a_hugging_face_folder(server: CommandServer, here: Path) -> None:
    """Its tokenizer, its shape; weights that are stored in bf16 are trained as fp32."""
    assert server.run(here, "train", *TINY, "data.tokenizer=bpe:270", "--out", "a", figures=0).code == 0
    assert server.run(here, "export", "a", "--to", "hf").code == 0
    model = hub.load_model(here / "hf", torch.bfloat16)
    shutil.copy(here / "hf/tokenizer.json", here / "tokenizer.json")
    shutil.rmtree(here / "hf")
    hub.save_model(model, here / "hf")
    shutil.move(here / "tokenizer.json", here / "hf/tokenizer.json")
    shown = server.run(here, "data", "show", *OWN[:1], *OWN[2:], "model.init=hf")
    assert "tokens of 270 kinds" in shown.out, "what `data show` decodes is what is trained on"
    done = server.run(here, "train", *OWN[:1], *OWN[2:], "model.init=hf", "--out", "b", figures=0)
    assert done.code == 0, done.err
    assert (here / "b/tokenizer.json").read_bytes() == (here / "hf/tokenizer.json").read_bytes()
    assert {tensor.dtype for tensor in checkpointing.load(newest(here / "b")).model.values()} == {torch.float32}
    cut = newest(here / "b")
    shutil.rmtree(cut)
    (here / "b/metrics.jsonl").write_text(
        "".join(x for x in (here / "b/metrics.jsonl").read_text().splitlines(keepends=True) if "summary" not in x)
    )
    assert server.run(here, "train", "--resume", "b", figures=0).code == 0 and newest(here / "b") == cut


def test_a_model_with_more_entries_than_its_tokenizer_writes_only_tokens(server: CommandServer, here: Path) -> None:
    done = server.run(here, "train", *TINY, "model.vocab_size=2000", "--out", "run", figures=0)
    assert done.code == 0, done.err
    done = server.run(here, "generate", "run", "alpha", "--temperature", "5", "--json", "--max-tokens", "20")
    assert max(json.loads(done.out)["completions"][0]["token_ids"]) < 259


def test_out_of_memory_halves_the_micro_batch(server: CommandServer, here: Path) -> None:
    hungry = SLOW.replace("time.sleep(0.05)", "if len(batch['tokens']) > 1: raise torch.OutOfMemoryError('no memory')")
    (here / "own.py").write_text(hungry)
    done = server.run(here, "train", *OWN, "model.init=own.py:build", "--out", "run", figures=0)
    assert done.code == 0 and "micro_batch is now 1" in done.err, done.err


# ---- what it prints ------------------------------------------------------------------------------------------------


def test_the_last_lines_work_as_printed(here: Path) -> None:
    """In a real shell, in the same folder, for a run in runs/ and without `monograph` on the PATH."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join(
        p for p in environment["PATH"].split(":") if not Path(p, "monograph").exists()
    )
    tiny = subprocess.run(
        [sys.executable, PROGRAM, "train", *TINY], cwd=here, env=environment, capture_output=True, text=True, check=True
    )
    lines = [line[10:].strip() if line.startswith(("next", " " * 10)) else line for line in tiny.stderr.splitlines()]
    commands = [line for line in lines if " -m monograph " in line and "my_texts" not in line]
    assert len(commands) == 2 and all(" last " in line for line in commands), tiny.stderr
    for line in commands:
        done = subprocess.run(line, shell=True, cwd=here, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)
    assert (here / "out/config.json").is_file()


def test_a_run_that_fails_is_not_the_last_one(server: CommandServer, here: Path) -> None:
    assert server.run(here, "train", *TINY, figures=0).code == 0
    assert server.run(here, "train", *TINY, "model.vocab_size=20").code == 3
    assert server.run(here, "generate", "last", "alpha", "--max-tokens", "2").code == 0


def test_discard_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    (run.folder / "mine.txt").write_text("1")
    discard(run)
    assert [path.name for path in run.folder.iterdir()] == ["mine.txt"]
