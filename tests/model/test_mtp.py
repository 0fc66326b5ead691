# Run: pytest tests/model/test_mtp.py
"""A head for multi-token prediction: it computes its equation, which is that of transformers, and
folders keep it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batches import tiny_config, tiny_llama
from monograph.errors import InputRefused
from monograph.laws.comparisons import relative_error
from monograph.model.config import LlamaConfig
from monograph.model.gguf import save_gguf
from monograph.model.hub import load_model, prefixes_left_out, save_model
from monograph.model.llama import Llama
from monograph.text.tokenizer import Tokenizer

HEAD = {"mtp_num_hidden_layers": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
# By model_type: shapes whose heads have a mixture of experts, four norms, joined layers in files, or a
# window.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5, "layer_types": ("sliding_attention", "full_attention")},
    "phi3": {"partial_rotary_factor": 0.5},
    "qwen3_moe": EXPERTS,
    "qwen3_5_text": {"layer_types": ("linear_attention", "full_attention")},
    "qwen3_next": {"layer_types": ("linear_attention", "full_attention"), **EXPERTS},
    "qwen3_5_moe_text": {"layer_types": ("linear_attention", "full_attention"), **EXPERTS},
    "lfm2": {"layer_types": ("conv", "full_attention")},
}


def with_head(model_type: str = "llama", dtype: torch.dtype = torch.float64, **sizes: Any) -> Llama:
    """A model whose norms do not multiply by 1 alone."""
    shape = {"initializer_range": 0.3, **SHAPES[model_type], **HEAD, **sizes}
    model = tiny_llama(dtype, model_type=model_type, **shape)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            noise = torch.rand(parameter.shape, generator=generator)
            parameter.data.add_(noise.to(dtype))
    return model


def tokens(rows: int = 2, length: int = 11) -> Tensor:
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(1))


# ---- the equation ------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x: Tensor, position: int) -> Tensor:
    """One head's channels, [X]: pairs are in its two halves."""
    half = len(x) // 2
    angle = position * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x[:half], x[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def block_of_llama(weights: dict[str, Tensor], x: Tensor, heads: int, groups: int) -> Tensor:
    """A block of a Llama on one document, [T, D], position by position."""
    normed = rms(x, weights["input_layernorm.weight"])
    projected = {
        name: normed @ weights[f"self_attn.{name}_proj.weight"].T for name in ("q", "k", "v")
    }
    width = projected["q"].shape[1] // heads
    attended = torch.zeros_like(projected["q"])
    for position in range(len(x)):
        for head in range(heads):
            own = slice(head * width, (head + 1) * width)
            group = head * groups // heads
            shared = slice(group * width, (group + 1) * width)
            query = rotated(projected["q"][position, own], position)
            scores = torch.stack(
                [query @ rotated(projected["k"][s, shared], s) for s in range(position + 1)]
            )
            shares = (scores / width**0.5).softmax(0)
            attended[position, own] = shares @ projected["v"][: position + 1, shared]
    x = x + attended @ weights["self_attn.o_proj.weight"].T
    normed = rms(x, weights["post_attention_layernorm.weight"])
    gate = normed @ weights["mlp.gate_proj.weight"].T
    up = normed @ weights["mlp.up_proj.weight"].T
    return x + (gate * gate.sigmoid() * up) @ weights["mlp.down_proj.weight"].T


def slow_logits_ahead(model: Llama, document: Tensor) -> Tensor:
    """The logits of x_t+2 for each t of one document [T] but its last, from the equation alone."""
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    hidden = model(document[None])[0].detach()
    embedded = weights["model.embed_tokens.weight"][document]
    joined = torch.cat(
        [
            rms(embedded[1:], weights["mtp.pre_fc_norm_embedding.weight"]),
            rms(hidden[:-1], weights["mtp.pre_fc_norm_hidden.weight"]),
        ],
        dim=-1,
    )
    prefix = "mtp.layers.0."
    of_block = {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }
    config = model.config
    mixed = block_of_llama(
        of_block,
        joined @ weights["mtp.fc.weight"].T,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    return rms(mixed, weights["mtp.norm.weight"]) @ weights["lm_head.weight"].T


def logits_ahead(model: Llama, rows: Tensor) -> Tensor:
    """The logits of x_t+2 for each t but the last, [B, T - 1, V]."""
    hidden = model(rows)
    return model.logits(model.predict_ahead(hidden[:, :-1], rows[:, 1:]))


def test_it_is_its_equation():
    model = with_head()
    rows = tokens()
    slow = torch.stack([slow_logits_ahead(model, row) for row in rows])
    assert relative_error(logits_ahead(model, rows), slow) <= 1e-12
    # The halves of fc's input are not exchanged: the test would see it.
    fc = model.mtp.fc.weight
    fc.data.copy_(fc.roll(fc.shape[1] // 2, dims=1))
    assert relative_error(logits_ahead(model, rows), slow) > 0.01


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_next"])
def test_it_is_that_of_transformers(model_type):
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    model = with_head(model_type, torch.float32)
    values = model.config.to_hf()
    config = AutoConfig.for_model(**values)
    config.num_mtp_layers = 1
    config.mtp_layer_types = ["full_attention"]
    theirs = AutoModelForCausalLM.from_config(config).eval()
    head = MtpModel(theirs, 1).eval()
    own_names = {
        "enorm.weight": "pre_fc_norm_embedding.weight",
        "hnorm.weight": "pre_fc_norm_hidden.weight",
        "eh_proj.weight": "fc.weight",
        "post_norm.weight": "norm.weight",
    }
    state = {}
    for name in head.state_dict():
        inner = name.removeprefix("layers.0.")
        if inner in own_names:
            state[name] = model.state_dict()[f"mtp.{own_names[inner]}"]
        elif inner.startswith("mtp_block."):
            state[name] = of_transformers(model, inner.removeprefix("mtp_block."))
    head.load_state_dict(state, strict=False)
    theirs.get_input_embeddings().load_state_dict(model.model.embed_tokens.state_dict())
    assert set(state) == {name for name in head.state_dict() if name.startswith("layers.")}
    rows = tokens()
    hidden = model(rows).detach()
    positions = torch.arange(1, rows.shape[1])[None].expand(len(rows), -1)
    expected = head.forward_layer(
        0,
        hidden[:, :-1],
        positions,
        MtpCache(config=config.get_mtp_config()),
        input_ids=rows[:, 1:],
    )
    # transformers counts the positions from 1, so rotations round otherwise; its norms are in fp32.
    assert relative_error(model.predict_ahead(hidden[:, :-1], rows[:, 1:]), expected) <= 1e-5


def of_transformers(model: Llama, name: str) -> Tensor:
    """A tensor of the head's block as transformers has it in memory."""
    state = model.mtp.layers[0].state_dict()
    if name == "mlp.experts.gate_up_proj":
        return torch.cat(
            [state["mlp.experts.gate_proj.weight"], state["mlp.experts.up_proj.weight"]], dim=1
        )
    if name == "mlp.experts.down_proj":
        return state["mlp.experts.down_proj.weight"]
    return state[name]


def test_the_decoder_is_that_without_a_head():
    with_it = tiny_llama(**HEAD)
    without = tiny_llama()
    assert torch.equal(with_it(tokens()), without(tokens()))
    kept = {name for name in with_it.state_dict() if not name.startswith("mtp.")}
    assert kept == set(without.state_dict())


# ---- folders -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", SHAPES)
def test_a_folder_keeps_it_in_bits(model_type, tmp_path):
    model = with_head(model_type, torch.float32)
    save_model(model, tmp_path / "one")
    names = load_file(tmp_path / "one/model.safetensors")
    own = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    assert {f"mtp.{name}.weight" for name in own} <= names.keys()
    loaded = load_model(tmp_path / "one", mtp=True)
    assert loaded.config == model.config
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert torch.equal(logits_ahead(loaded, tokens()), logits_ahead(model, tokens()))
    save_model(loaded, tmp_path / "two")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize("model_type", SHAPES)
def test_a_model_is_loaded_without_it_unless_it_is_asked_for(model_type, tmp_path):
    model = with_head(model_type, torch.float32)
    save_model(model, tmp_path / "folder")
    loaded = load_model(tmp_path / "folder")
    assert loaded.mtp is None
    assert prefixes_left_out(tmp_path / "folder") == ["mtp."]
    assert prefixes_left_out(tmp_path / "folder", mtp=True) == []
    assert torch.equal(loaded(tokens()), model(tokens()))


def published(folder: Path) -> None:
    """Write a folder whose config.json does not mention the head, as that of Qwen3-Next."""
    save_model(with_head("qwen3_next", torch.float32), folder)
    values = json.loads((folder / "config.json").read_text())
    del values["mtp_num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(values))


def test_a_folder_need_not_mention_it(tmp_path):
    published(tmp_path / "folder")
    assert load_model(tmp_path / "folder", mtp=True).mtp is not None
    assert load_model(tmp_path / "folder").mtp is None


def test_a_folder_without_it_and_one_with_a_part_of_it_are_refused(tmp_path):
    save_model(tiny_llama(), tmp_path / "without")
    with pytest.raises(InputRefused, match=r"without: it has no mtp\.\* tensors, so no head"):
        load_model(tmp_path / "without", mtp=True)
    save_model(with_head(dtype=torch.float32), tmp_path / "part")
    path = tmp_path / "part/model.safetensors"
    tensors = load_file(path)
    del tensors["mtp.fc.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(
        InputRefused, match="1 missing in the weights of a llama, .* 'mtp.fc.weight'"
    ):
        load_model(tmp_path / "part", mtp=True)
    load_model(tmp_path / "part")


@pytest.mark.parametrize("number", [2, True, -1])
def test_a_number_of_layers_that_no_head_has_is_refused(number):
    with pytest.raises(InputRefused, match="mtp_num_hidden_layers = .*: expected 0 or 1"):
        tiny_config(mtp_num_hidden_layers=number)


def test_a_family_without_feed_forward_layers_has_none():
    with pytest.raises(
        InputRefused, match="mtp_num_hidden_layers = 1 is not supported with model_"
    ):
        LlamaConfig.preset("nano", family="nemotron_h", **HEAD)


def test_a_gguf_file_leaves_it_out_and_says_so(tmp_path):
    gguf = pytest.importorskip("gguf")
    said: list[str] = []
    config = tiny_config(vocab_size=259, **HEAD)
    save_gguf(Llama(config), tmp_path / "out", Tokenizer.bytes(), None, said.append)
    assert any(
        "mtp.* (multi-token prediction) is left out, as llama.cpp knows no" in line for line in said
    )
    with_it = gguf.GGUFReader(tmp_path / "out/model.gguf")
    save_gguf(
        Llama(tiny_config(vocab_size=259)), tmp_path / "plain", Tokenizer.bytes(), None, said.append
    )
    without = gguf.GGUFReader(tmp_path / "plain/model.gguf")
    assert [each.name for each in with_it.tensors] == [each.name for each in without.tensors]
    for mine, theirs in zip(with_it.tensors, without.tensors, strict=True):
        assert (mine.data == theirs.data).all(), mine.name
