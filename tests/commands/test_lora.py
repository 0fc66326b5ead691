"""Run: pytest tests/commands/test_lora.py (adapters through every command)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapted import LINEAR
from commands.forked import CommandServer, Done
from commands.inputs import OWN, newest, over, with_texts
from monograph.graph.lora import Lora, adapt
from monograph.graph.lora_merge import merge
from monograph.model.adapter import install_adapters, read_adapter
from monograph.model.config import LlamaConfig
from monograph.model.hub import load_model, save_model
from monograph.model.llama import Llama
from monograph.run.models import load
from monograph.text.tokenizer import Tokenizer

LORA = over(OWN, "train.updates=6", "lora.rank=4", "model.init=base")
TENSORS = 2 * 2 * len(LINEAR)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, server: CommandServer) -> Path:
    """A base as a Hugging Face folder in bf16, and a run of adapters beside it."""
    here = with_texts(tmp_path_factory.mktemp("lora"))
    done = train_on_base(here, server, "--json")
    (here / "train.json").write_text(done.out.splitlines()[-1])
    return here


def train_on_base(here: Path, server: CommandServer, *more: str) -> Done:
    """Write a base and train adapters on it, as `base` and `run` in a folder of texts."""
    write_base(here / "base")
    done = server.run(here, "train", *LORA, *more, "--out", "run", figures=0)
    assert done.code == 0, done.err
    return done


def write_base(folder: Path, seed: int = 0, **sizes: Any) -> None:
    config = LlamaConfig(
        vocab_size=259, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, **sizes,
    )  # fmt: skip
    save_model(Llama(config, seed=seed).bfloat16(), folder, Tokenizer.bytes())


def test_a_checkpoint_holds_adapters_and_no_second_copy_of_the_base(folder: Path) -> None:
    saved = load_file(newest(folder / "run") / "model.safetensors")
    assert len(saved) == TENSORS and all(".lora_" in name for name in saved)
    moments = load_file(newest(folder / "run") / "optimizer.safetensors")
    assert len(moments) == 2 * TENSORS
    config = (folder / "run" / "config.toml").read_text()
    assert (
        f'init = "{folder / "base"}"' in config
        and "lr = 0.0002" in config
        and 'targets = "all-linear"' in config
    )
    assert json.loads((folder / "train.json").read_text())["params"] == sum(
        t.numel() for t in saved.values()
    ) + sum(p.numel() for p in load_model(folder / "base").parameters())


def test_the_merged_model_and_the_adapter_are_exported(folder: Path, server: CommandServer) -> None:
    done = server.run(folder, "export", "run", "--to", "out")
    assert done.code == 0 and "out/adapter: the adapters alone" in done.out, done.err
    merged, base = load_model(folder / "out"), load_model(folder / "base")
    assert merged.model.embed_tokens.weight.dtype == torch.bfloat16, "the base's own"
    assert merged.config.tie_word_embeddings and "lm_head.weight" not in load_file(
        folder / "out/model.safetensors"
    )
    again = load_model(folder / "base")
    stored = read_adapter(folder / "out" / "adapter")
    install_adapters(again, stored.lora, start=stored)
    merge(again)
    changed = {
        name
        for name, p in merged.named_parameters()
        if not torch.equal(p, dict(base.named_parameters())[name])
    }
    assert changed and all(name.split(".")[-2] in LINEAR for name in changed)
    assert all(
        torch.equal(p, q) for p, q in zip(merged.parameters(), again.parameters(), strict=True)
    )
    assert all(torch.equal(p, q) for p, q in zip(merged.parameters(), load(folder / "out/adapter")[0].parameters(),
                                                 strict=True))  # fmt: skip
    assert (folder / "out" / "tokenizer.json").exists()


def test_every_command_takes_the_run_and_the_adapter(folder: Path, server: CommandServer) -> None:
    if not (folder / "out").exists():
        assert server.run(folder, "export", "run", "--to", "out").code == 0
    for of in ("run", "out/adapter"):
        assert server.run(folder, "generate", of, "alpha", "--max-tokens", "4").code == 0
    scored = server.run(folder, "evaluate", "run", "--json")
    loss = json.loads((folder / "train.json").read_text())["eval_loss"]
    assert json.loads(scored.out.splitlines()[-1])["loss"] == pytest.approx(loss, rel=1e-6), (
        scored.err
    )
    assert server.run(folder, "evaluate", "out/adapter", "--data", "texts").code == 0
    done = server.run(folder, "plan", "model.init=base", "lora.rank=4", "data.sequence_length=32")
    assert done.code == 0 and "; adapters " in done.out, done.err
    done = server.run(
        folder,
        "train",
        *over(OWN, "train.updates=1", "model.init=out/adapter", "train.keep=9"),
        "--out",
        "further",
    )
    assert done.code == 0, done.err
    assert "rank = 4" in (folder / "further" / "config.toml").read_text()
    # Its first checkpoint is of before the first update.
    first = load_file(folder / "further/checkpoints/step-00000000/model.safetensors")
    whole = load_file(folder / "out/adapter/adapter_model.safetensors")
    assert all(
        torch.equal(whole[f"base_model.model.{name}"], tensor) for name, tensor in first.items()
    )


@pytest.mark.slow
def test_magnitudes_a_stable_scale_and_a_rate_of_bs_own(
    folder: Path, server: CommandServer
) -> None:
    wanted = over(
        LORA,
        "lora.rank=4",
        "lora.dora=true",
        "lora.alpha=8",
        "lora.rslora=true",
        "optim.lr=0.001",
        "lora.lr_ratio=16",
        "train.updates=3",
    )
    done = server.run(folder, "train", *wanted, "--out", "three", "--json", figures=0)
    assert done.code == 0, done.err
    config = (folder / "three" / "config.toml").read_text()
    lines = (
        "rank = 4",
        "alpha = 8.0",
        "rslora = true",
        "dora = true",
        "lr = 0.001",
        "lr_ratio = 16.0",
    )
    assert all(line in config for line in lines), config
    loss = json.loads(done.out.splitlines()[-1])["eval_loss"]
    scored = server.run(folder, "evaluate", "three", "--json")
    assert json.loads(scored.out.splitlines()[-1])["loss"] == pytest.approx(loss, rel=1e-6), (
        scored.err
    )
    assert server.run(folder, "export", "three", "--to", "three.out").code == 0
    values = json.loads((folder / "three.out/adapter/adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"], values["use_rslora"], values["use_dora"]) == (
        4,
        8,
        True,
        True,
    )
    merged, adapted = (load(folder / name)[0] for name in ("three.out", "three.out/adapter"))
    assert all(map(torch.equal, merged.parameters(), adapted.parameters()))
    wanted = over(
        OWN,
        "train.updates=2",
        "model.init=three.out/adapter",
        "lora.alpha=8",
        "lora.rslora=true",
        "optim.lr=0.001",
        "lora.lr_ratio=16",
    )
    done = server.run(folder, "train", *wanted, "--out", "three.on", figures=0)
    assert done.code == 0, done.err
    done = server.run(folder, "export", "three", "--to", "three.gguf", "--format", "gguf")
    assert (
        done.code == 0
        and "has no form for magnitudes (lora.dora): the model is written" in done.err
    )
    assert not (folder / "three.gguf" / "adapter").exists()
    done = server.run(folder, "export", "run", "--to", "run.gguf", "--format", "gguf")
    assert done.code == 0 and "run.gguf/adapter/adapter.gguf: the adapters alone" in done.out, (
        done.err
    )


@pytest.mark.slow
def test_a_sweep_of_ranks(folder: Path, server: CommandServer) -> None:
    settings = [each for each in LORA if not each.startswith("lora.rank")]
    done = server.run(folder, "sweep", *settings, "lora.rank=2,4", "--out", "sweep", figures=0)
    assert done.code == 0, done.err
    members = sorted((folder / "sweep").rglob("model.safetensors"))
    assert len(members) >= 2 and all(len(load_file(path)) == TENSORS for path in members)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["lora.rank=4"], "lora.rank: adapters are added to frozen weights"),
        (["model.init=base", "lora.alpha=8"], "lora.alpha is for adapters, and none are trained: give their rank too"),
        (["model.init=base", "lora.rank=4", 'lora.targets=["qproj"]'], "no linear layer is called 'qproj'"),
        (["model.init=base", "lora.rank=4", "train.memory=stream", "lora.dropout=0.1"],
         "runs each block twice, and lora.dropout = 0.1 would drop other inputs the second time: say lora.dropout = 0"),
        (["model.init=base", "lora.rank=4", "train.precision=fp8"], "with lora.rank take bf16 or fp32"),
        (["model.init=base", "lora.rank=0"], "lora.rank = \"0\": expected a whole number above 0"),
        (["model.init=base", "lora.rank=1000"], "lora.rank = 1000: these layers' weights have rank 16 at most; lower"),
        (["model.init=base", "lora.rank=4:dori"], "lora.rank = \"4:dori\": expected a whole number above 0"),
        (["model.init=base", "lora.rank=4", "lora.alpha=0"], "lora.alpha = \"0\": expected a number above 0"),
        (["model.init=base", "lora.rank=4", "lora.rslora=sqrt"], "lora.rslora = \"sqrt\": expected true or false"),
        (["model.init=base", "lora.rank=4", "lora.lr_ratio=0"], "lora.lr_ratio = \"0\": expected a number above 0"),
        (["model.init=base", "lora.lr_ratio=16"], "lora.lr_ratio is for adapters, and none are trained: give their"),
        (["model.init=base", "lora.dora=true"], "lora.dora is for adapters, and none are trained: give their rank too"),
        (["model.init=base", "lora.rank=4", "lora.base=int4"], "lora.base = \"int4\": expected auto, int8 or nf4"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_trained(
    folder: Path, server: CommandServer, change: list[str], words: str
) -> None:
    done = server.run(folder, "train", *over(OWN, *change), "--out", "refused")
    assert done.code == 2 and words in done.err, done.err
    assert not (folder / "refused").exists()


def test_other_adapters_than_the_stored_ones_or_the_parents_are_refused(
    folder: Path, server: CommandServer
) -> None:
    if not (folder / "out").exists():
        assert server.run(folder, "export", "run", "--to", "out").code == 0
    done = server.run(
        folder, "train", *over(OWN, "model.init=out/adapter", "lora.rank=8"), "--out", "refused"
    )
    assert done.code == 2 and "but the adapter in out/adapter has 4" in done.err
    done = server.run(folder, "train", "--from", "run", "lora.rank=8", "--out", "refused")
    assert done.code == 2 and "--from goes on with the weights" in done.err
    assert (
        server.run(
            folder, "train", "--from", "run", "train.updates=1", "--out", "branch", figures=0
        ).code
        == 0
    )


def test_a_base_that_is_gone_or_another_one_is_refused_by_name(
    here: Path, server: CommandServer
) -> None:
    write_base(here / "base")
    assert (
        server.run(here, "train", *over(LORA, "train.updates=1"), "--out", "run", figures=0).code
        == 0
    )
    shutil.rmtree(newest(here / "run"))
    lines = (here / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (here / "run" / "metrics.jsonl").write_text(
        "".join(line for line in lines if '"summary"' not in line)
    )
    (here / "base").rename(here / "moved")
    for command in (["train", "--resume", "run"], ["generate", "run", "a"], ["evaluate", "run"]):
        done = server.run(here, *command)
        assert done.code == 3 and f"{here / 'base'}: no such folder" in done.err
    (here / "moved").rename(here / "base")
    tensors = load_file(here / "base" / "model.safetensors")
    save_file(
        tensors | {"model.norm.weight": tensors["model.norm.weight"] * 1.01},
        here / "base/model.safetensors",
    )
    for command in (["train", "--resume", "run"], ["generate", "run", "a"], ["evaluate", "run"],
                    ["export", "run", "--to", "out"]):  # fmt: skip
        done = server.run(here, *command)
        assert (
            done.code == 3
            and f"{here / 'base'}: its weights are not those that the adapters" in done.err
        ), done.err
    save_file({name: t.float() for name, t in tensors.items()}, here / "base/model.safetensors")
    assert server.run(here, "generate", "run", "a", "--max-tokens", "2").code == 0, (
        "the same numbers in fp32"
    )


def test_an_adapter_beside_other_weights_of_the_same_shape_is_refused(
    here: Path, server: CommandServer
) -> None:
    write_base(here / "base")
    write_base(here / "other", seed=1)
    short = over(LORA, "train.updates=1")
    assert server.run(here, "train", *short, "--out", "run", figures=0).code == 0
    assert server.run(here, "export", "run", "--to", "out").code == 0
    config = here / "out" / "adapter" / "adapter_config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"base_model_name_or_path": str(here / "other")}))
    train = ("train", *over(OWN, "train.updates=2", "model.init=out/adapter"), "--out", "further")
    for typed in (
        ("generate", "out/adapter", "a"),
        ("export", "out/adapter", "--to", "again"),
        train,
    ):
        done = server.run(here, *typed)
        assert done.code == 3 and "trained on other weights than those of" in done.err, done.err
        assert sum(line.startswith("error") for line in done.err.splitlines()) == 1
    assert not (here / "again").exists()
    (here / "out" / "adapter" / "monograph_base.json").unlink()
    assert server.run(here, "generate", "out/adapter", "a", "--max-tokens", "1").code == 0, (
        "as PEFT's own folders"
    )


def test_a_quantised_base_is_scored_as_it_was_trained_and_merged_into_the_folders(
    folder: Path, server: CommandServer
) -> None:
    done = server.run(
        folder,
        "train",
        *over(LORA, "train.updates=2"),
        "lora.base=nf4",
        "--out",
        "four",
        "--json",
        figures=0,
    )
    assert done.code == 0, done.err
    scored = server.run(folder, "evaluate", "four", "--json")
    loss = json.loads(done.out.splitlines()[-1])["eval_loss"]
    assert json.loads(scored.out.splitlines()[-1])["loss"] == pytest.approx(loss, rel=1e-6), (
        scored.err
    )
    expected = load_model(folder / "base")
    adapt(expected, Lora(4))
    expected.load_state_dict(load_file(newest(folder / "four") / "model.safetensors"), strict=False)
    merge(expected)
    assert all(map(torch.equal, load(folder / "four")[0].parameters(), expected.parameters()))


@pytest.mark.slow
def test_a_run_is_a_base_too(folder: Path, server: CommandServer) -> None:
    done = server.run(
        folder, "train", *over(LORA, "model.init=run", "train.updates=2"), "--out", "on", figures=0
    )
    assert done.code == 0, done.err
    assert server.run(folder, "evaluate", "on").code == 0
    settings = over(OWN, "train.updates=2", "model.init=run")
    done = server.run(folder, "train", *settings, "--out", "whole", figures=0)
    assert done.code == 0, f"the merged model, all of its weights: {done.err}"
    exported = server.run(folder, "export", "on", "--to", "on.out")
    assert exported.code == 0, exported.err


def test_a_module_of_ones_own(here: Path, server: CommandServer) -> None:
    (here / "own.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build(vocab_size):\n"
        "    return nn.Sequential(nn.Embedding(vocab_size, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, vocab_size))\n"
        "def loss(model, batch):\n"
        "    targets = batch['targets'].flatten()\n"
        "    logits = model(batch['tokens']).flatten(0, 1)\n"
        "    return nn.functional.cross_entropy(logits, targets, reduction='sum'), (targets != -100).sum()\n"
    )
    settings = over(OWN, "train.updates=2", "model.init=own.py:build", "lora.rank=2")
    done = server.run(here, "train", *settings, "--out", "run", "--json", figures=0)
    assert done.code == 0, done.err
    assert len(load_file(newest(here / "run") / "model.safetensors")) == 4
    scored = server.run(here, "evaluate", "run", "--json")
    loss = json.loads(done.out.splitlines()[-1])["eval_loss"]
    assert json.loads(scored.out.splitlines()[-1])["loss"] == pytest.approx(loss, rel=1e-6), (
        scored.err
    )


@pytest.mark.slow
def test_experts_in_four_bits_with_adapters_are_trained_and_exported_merged_alone(
    folder: Path, server: CommandServer
) -> None:
    write_base(folder / "experts", model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2)
    targets = 'lora.targets=["q_proj", "gate_proj", "up_proj", "down_proj"]'
    wanted = over(LORA, "model.init=experts", "lora.base=nf4", targets, "train.save_every=3")
    done = server.run(folder, "train", *wanted, "--out", "mixed", "--json", figures=0)
    assert done.code == 0, done.err
    saved = load_file(newest(folder / "mixed") / "model.safetensors")
    assert saved["model.layers.0.mlp.experts.up_proj.lora_A.weight"].shape == (4, 4, 16)
    done = server.run(folder, "export", "mixed", "--to", "mixed-out")
    assert (
        done.code == 0 and "has an adapter for each expert, for which PEFT has no form" in done.err
    )
    merged, base = (load_model(folder / name).state_dict() for name in ("mixed-out", "experts"))
    changed = {name for name in base if not torch.equal(merged[name], base[name])}
    assert {name.split(".")[-2] for name in changed} == {
        "q_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    for name in ("mixed", "mixed-out"):
        assert server.run(folder, "generate", name, "alpha", "--max-tokens", "3").code == 0


@pytest.mark.slow
def test_an_lfm2s_adapters_go_through_the_commands(tmp_path: Path, server: CommandServer) -> None:
    """Their folder has the files' names, and what is read of it computes the same."""
    here = with_texts(tmp_path)
    write_base(here / "base", model_type="lfm2", layer_types=("conv", "full_attention"))
    targets = 'lora.targets=["o_proj", "gate_proj"]'
    done = server.run(here, "train", *LORA, "optim.lr=0.1", targets, "--out", "run", figures=0)
    assert done.code == 0, done.err
    done = server.run(here, "export", "run", "--to", "out", figures=0)
    assert done.code == 0 and "out/adapter: the adapters alone" in done.out, done.err
    written = json.loads((here / "out/adapter/adapter_config.json").read_text())
    assert written["target_modules"] == ["model.layers.1.self_attn.out_proj", "w1"]
    run, peft = load(here / "run")[0], load(here / "out/adapter")[0]
    assert all(map(torch.equal, run.parameters(), peft.parameters()))
    further = over(OWN, "train.updates=1", "model.init=out/adapter", "train.keep=9")
    done = server.run(here, "train", *further, "--out", "further", figures=0)
    assert done.code == 0, done.err
    first = load_file(here / "further/checkpoints/step-00000000/model.safetensors")
    last = load_file(newest(here / "run") / "model.safetensors")
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in first)
    texts = [
        server.run(here, "generate", "base", "a", "--max-tokens", "8", "--json", *more, figures=0)
        for more in (["--adapter", "a=run"], ["--adapter", "a=out/adapter"], [])
    ]
    assert all(done.code == 0 for done in texts), [done.err for done in texts]
    by_run, by_folder, by_base = (
        json.loads(done.out.splitlines()[-1])["completions"] for done in texts
    )
    assert by_run == by_folder != by_base
