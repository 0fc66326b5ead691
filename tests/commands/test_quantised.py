"""Run: pytest tests/commands/test_quantised.py (folders with weights in 4 or 8 bits in every command)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commands.forked import CommandServer, Done
from commands.inputs import OWN, over, with_texts
from few_bits import by_definition, quantise
from model.seeing import seeing
from monograph.graph.frozen import NF4Linear
from monograph.model.config import LlamaConfig
from monograph.model.hub import load_model, save_model
from monograph.model.llama import Llama
from monograph.run.folder import Run
from monograph.run.models import load_trained
from monograph.text.tokenizer import Tokenizer

LORA = over(OWN, "train.updates=3", "lora.rank=4", "optim.lr=0.05")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> Path:
    """Folders in nf4 and in fp8, and a run of adapters on the first."""
    here = with_texts(tmp_path_factory.mktemp("few_bits"))
    config = LlamaConfig(
        vocab_size=259, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    for form in ("nf4", "fp8"):
        save_model(Llama(config, seed=0).bfloat16(), here / form, Tokenizer.bytes())
        quantise(here / form, form, skipped=("layers.1.self_attn",))
    train(here, server, "model.init=nf4", "lora.base=nf4", "--out", "run")
    return here


def train(here: Path, server: CommandServer, *arguments: str) -> str:
    """Train adapters, and return what was printed."""
    done = server.run(here, "train", *LORA, *arguments, figures=0)
    return said(done)


def said(done: Done) -> str:
    """Return all output as one line, since long lines are wrapped."""
    assert done.code == 0, done.err
    return " ".join((done.out + done.err).split())


def test_a_run_says_what_becomes_of_the_folders_numbers(here: Path, server: CommandServer) -> None:
    found = train(here, server, "model.init=nf4", "lora.base=nf4", "--out", "same")
    assert (
        "keeps the codes of bitsandbytes nf4 as they are; 4 layers that are in 16 bits there stay so"
        in found
    )
    found = train(here, server, "model.init=nf4", "--out", "auto")
    assert (
        "stored as bitsandbytes nf4, and read as bf16; lora.base = nf4 keeps its codes as they are"
        in found
    )
    found = train(here, server, "model.init=fp8", "lora.base=int8", "--out", "again")
    assert "stored as fp8 in blocks of 128 x 128, and rounded again to int8" in found


def test_all_weights_are_trained_from_the_dequantised_ones(
    here: Path, server: CommandServer
) -> None:
    settings = [each for each in LORA if not each.startswith("lora.")]
    arguments = ("model.init=fp8", "train.updates=1", "optim.lr=1e-30", "--out", "full")
    done = server.run(here, "train", *over(settings, *arguments[:3]), *arguments[3:], figures=0)
    assert (
        "stored as fp8 in blocks of 128 x 128: all are trained, from their values in bf16"
        in said(done)
    )
    trained = load_trained(Run(here / "full"), lambda line: None).model.state_dict()
    for name, tensor in load_model(here / "fp8").state_dict().items():
        assert torch.equal(trained[name], tensor.float()), name


def test_a_run_is_evaluated_on_the_codes_and_exported_in_full(
    here: Path, server: CommandServer
) -> None:
    model = load_trained(Run(here / "run"), lambda line: None).model
    attention = model.model.layers[0].self_attn  # type: ignore[union-attr, index]
    assert isinstance(attention.q_proj, NF4Linear)
    assert not isinstance(model.model.layers[1].self_attn.q_proj, NF4Linear)  # type: ignore[union-attr, index]
    assert server.run(here, "evaluate", "run", figures=0).code == 0
    assert "run: all weights are written in full, though" in said(
        server.run(here, "export", "run", "--to", "out", figures=0)
    )
    config = json.loads((here / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
    assert (
        "quantization_config" not in (here / "out" / "adapter" / "adapter_config.json").read_text()
    )


def test_a_folder_is_written_with_and_exported(here: Path, server: CommandServer) -> None:
    written = said(server.run(here, "generate", "nf4", "alpha", "--max-tokens", "3", figures=0))
    assert "nf4: stored as bitsandbytes nf4, read as bf16" in written
    exported = said(server.run(here, "export", "nf4", "--to", "plain", figures=0))
    assert "nf4: stored as bitsandbytes nf4, read as bf16" in exported
    stored = load_file(here / "nf4" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    found = load_model(here / "plain").get_parameter(name)
    assert torch.equal(found, by_definition(stored, name).bfloat16())


def test_a_plan_is_made_for_a_folder(here: Path, server: CommandServer) -> None:
    done = server.run(here, "plan", *LORA, "model.init=nf4", "lora.base=nf4", figures=0)
    assert "parameters frozen in 4 bits" in said(done)


def test_a_copy_of_a_whole_model_in_few_bits_is_not_recommended(
    here: Path, server: CommandServer
) -> None:
    """`--original` would be refused."""
    torch.manual_seed(0)
    model = seeing("mistral3", vocab_size=259).bfloat16()
    model.save_pretrained(here / "seeing")
    Tokenizer.bytes().save(here / "seeing/tokenizer.json")
    quantise(here / "seeing", "fp8", skipped=("vision_tower", "multi_modal"))
    train(here, server, "model.init=seeing", "--out", "tuned")
    exported = said(server.run(here, "export", "tuned", "--to", "text", figures=0))
    assert "only the text model is written: multi_modal_projector.*, vision_tower.* are" in exported
    assert "--original" not in exported
    done = server.run(here, "export", "tuned", "--to", "whole", "--original", "seeing")
    assert done.code == 3 and "is stored in 4 or 8 bits" in done.err


def test_a_method_that_is_not_read_is_refused_in_one_line(
    here: Path, server: CommandServer
) -> None:
    save_model(load_model(here / "nf4"), here / "gptq", Tokenizer.bytes())
    path = here / "gptq" / "config.json"
    table = {"quantization_config": {"quant_method": "gptq"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | table))
    for command in (["generate", "gptq", "a"], ["train", *LORA, "model.init=gptq", "--out", "no"]):
        done = server.run(here, *command, figures=0)
        assert done.code == 2 or done.code == 3, done.err
        assert "quant_method = 'gptq' is not read" in done.err
        assert "Traceback" not in done.err
    assert not (here / "no").exists()
