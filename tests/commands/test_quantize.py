"""Run: pytest tests/commands/test_quantize.py (weights rounded in training, from `train` to `export`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from batches import tiny_config
from commands.forked import CommandServer
from commands.inputs import TINY, over
from laws.test_exported_is_original import read_back
from monograph import checkpointing
from monograph.model.hub import save_model
from monograph.model.llama import Llama
from monograph.ops.weight_blocks import round_to_blocks
from monograph.run.models import load
from monograph.text.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
ROUNDED = over(
    TINY, "model.hidden_size=32", "model.intermediate_size=32", "train.updates=4", "train.quantize=int4",
)  # fmt: skip


def begun(model: str) -> list[str]:
    """The settings of one update that begins from a model."""
    settings = [setting for setting in ROUNDED if not setting.startswith("model.")]
    kept = [setting for setting in settings if not setting.startswith("data.tokenizer")]
    return over(kept, "train.updates=1", f"model.init={model}")


def run(server: CommandServer, place: Path, *arguments: str) -> Any:
    done = server.run(place, *arguments, figures=0)
    assert done.code == 0, done.err
    return done


def test_a_run_is_resumed_exported_and_begun_from(server: CommandServer, here: Path) -> None:
    run(server, here, "train", *ROUNDED, "--out", "whole")
    run(server, here, "train", *over(ROUNDED, "train.save_every=2"), "--out", "cut")
    for folder in sorted((here / "cut/checkpoints").iterdir())[1:]:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    run(server, here, "train", "--resume", "cut")
    whole, resumed = (
        checkpointing.load_newest(here / name / "checkpoints", print) for name in ("whole", "cut")
    )
    assert whole.update == resumed.update == 4
    for name in whole.optimizer:
        assert torch.equal(whole.optimizer[name], resumed.optimizer[name]), name
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(
        whole.model[name], round_to_blocks(whole.optimizer[f"master.{name}"], "Q4_0")
    )
    assert not torch.equal(whole.model[name], whole.optimizer[f"master.{name}"])

    # The format is that of training, unless another one is asked for.
    run(server, here, "export", "whole", "--to", "file", "--format", "gguf")
    header = gguf.GGUFReader(here / "file/model.gguf").fields
    assert header["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_0
    stored = read_back(here / "file/model.gguf")
    assert torch.equal(stored["blk.0.ffn_up.weight"], whole.model[name])
    run(server, here, "export", "whole", "--to", "wide", "--format", "gguf", "--dtype", "f32")
    assert torch.equal(
        read_back(here / "wide/model.gguf")["blk.0.ffn_up.weight"], stored["blk.0.ffn_up.weight"]
    )
    # A Hugging Face folder has the rounded weights, too.
    run(server, here, "export", "whole", "--to", "hf")
    model, _ = load(here / "hf")
    assert torch.equal(dict(model.named_parameters())[name], whole.model[name])

    # The masters can be rounded to another format, but not be left out.
    branch = ["train", "--from", "whole", "train.updates=1", "--out"]
    done = server.run(here, *branch, "none", "train.quantize=none", figures=0)
    assert done.code == 3 and "'master." in done.err and "train.quantize" in done.err
    run(server, here, *branch, "other", "train.quantize=int8")
    branched = checkpointing.load_newest(here / "other/checkpoints", print)
    assert torch.equal(
        branched.model[name], round_to_blocks(branched.optimizer[f"master.{name}"], "Q8_0")
    )
    run(server, here, "train", *begun("hf"), "--out", "again")


def test_a_run_in_other_integers_does_not_take_over_the_optimizer(
    server: CommandServer, here: Path
) -> None:
    plain = over(ROUNDED, "train.quantize=none", "train.updates=1")
    run(server, here, "train", *plain, "--out", "plain")
    branch = ["--from", "plain", "train.quantize=int4", "train.updates=1", "--out", "branch"]
    done = server.run(here, "train", *branch, figures=0)
    assert done.code == 3 and "'master." in done.err and "train.quantize" in done.err
    # Its weights can be begun from.
    run(server, here, "train", *begun("plain"), "--out", "begun")


@pytest.mark.slow
def test_a_sweep_has_members_with_and_without_rounding(server: CommandServer, here: Path) -> None:
    """Members of one graph are rounded alike, each from its own masters."""
    settings = over(ROUNDED, "train.updates=2", "train.seed=0,1", "train.quantize=none,int4")
    done = run(server, here, "sweep", *settings, "--out", "s", "--json")
    assert len(json.loads(done.out.splitlines()[-1])["members"]) == 4
    name = "model.layers.0.mlp.up_proj.weight"
    kept = [
        checkpointing.load_newest(folder / "checkpoints", print)
        for folder in sorted((here / "s/members").iterdir())
    ]
    rounded = [each for each in kept if f"master.{name}" in each.optimizer]
    assert (len(kept), len(rounded)) == (4, 2)
    for each in rounded:
        assert torch.equal(
            each.model[name], round_to_blocks(each.optimizer[f"master.{name}"], "Q4_0")
        )
    assert not torch.equal(rounded[0].model[name], rounded[1].model[name])


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("lora.rank=2", "with lora.rank take lora.base = int8 or nf4"),
        ("train.memory=stream", "whole weights are rounded after an update: take device"),
        ("train.parallel=ddp", "it was not tried: leave one out"),
        ("train.precision=fp8", "products would round the weights again"),
        ("optim.ema=0.9", "a mean of rounded weights is not rounded"),
        (
            "optim.state=bf16 optim.master_weights=false train.precision=bf16",
            "small updates of rounded weights",
        ),
        ("model.intermediate_size=40", "intermediate_size = 40 is not a multiple of 32"),
        ("train.quantize=int3", "none, int4 or int8"),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_one_line(
    server: CommandServer, here: Path, given: str, problem: str
) -> None:
    done = server.run(here, "train", *over(ROUNDED, *given.split()), "--out", "refused", figures=0)
    assert done.code in (2, 3) and problem in done.err, done.err
    assert len(done.err.strip().splitlines()[-1:]) == 1 and "Traceback" not in done.err
    assert not (here / "refused/checkpoints").exists()


def test_a_plan_refuses_a_model_of_which_there_is_no_such_file(
    server: CommandServer, here: Path
) -> None:
    """Whether its shape is that of a folder, which training refuses before it reads any text, or a new one."""
    config = tiny_config(model_type="exaone4", vocab_size=259, sliding_window=8)
    save_model(Llama(config), here / "exaone", Tokenizer.bytes())
    problem = "there is none of this model: sliding_window = 8: llama.cpp computes windows in"
    for command in ("plan", "train"):
        done = server.run(here, command, *begun("exaone"), figures=0)
        assert done.code == 3 and problem in done.err, done.err
        assert "tokens " not in done.out + done.err
    done = server.run(here, "plan", *over(ROUNDED, "model.intermediate_size=40"))
    assert done.code == 3 and "intermediate_size = 40 is not a multiple of 32" in done.err
