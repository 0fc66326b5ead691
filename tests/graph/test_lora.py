# Run: pytest tests/graph/test_lora.py
"""Adapters: which layers get one, what they are called, what they begin with, what is refused, and
merging.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import monograph as mono
from adapted import KINDS, LINEAR, SMALL, adapted_llama, trained
from batches import packed, ragged, tiny_llama
from monograph.errors import UsageError
from monograph.graph import fp8
from monograph.graph.inspect import blocks
from monograph.graph.lora import (
    Lora,
    LoraLinear,
    adapt,
    adapted_layers,
    checkpoint_state,
    may_start_without_gradient,
)
from monograph.graph.lora_merge import merge
from monograph.graph.precision import Precision
from monograph.graph.rounded_base import round_frozen_weights
from monograph.graph.siblings import fuse_siblings, unfuse_siblings
from monograph.loss import token_loss
from monograph.model.adapter import install_adapters


def test_names_of_the_base_stay_and_only_adapters_are_trained():
    model, plain = tiny_llama(), tiny_llama()
    found = adapt(model, SMALL)
    assert len(found) == 7 * 2 and all(type(layer) is LoraLinear for layer in found.values())
    beside = {f"{name}.lora_{factor}.weight" for name in found for factor in "AB"}
    assert set(model.state_dict()) == set(plain.state_dict()) | beside
    assert (
        {name for name, p in model.named_parameters() if p.requires_grad}
        == beside
        == set(checkpoint_state(model))
    )
    assert set(checkpoint_state(plain)) == set(plain.state_dict())
    assert list(blocks(model)) == list(blocks(plain))


def test_a_linear_layer_in_a_sequence_is_no_block_with_an_adapter():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    adapt(module, SMALL)
    assert not blocks(module) and len(adapted_layers(module)) == 2


def test_fresh_adapters_are_kaiming_uniform_and_zero_from_streams_of_their_own():
    model, other, torch_state = tiny_llama(hidden_size=160), tiny_llama(), torch.get_rng_state()
    found = adapt(model, Lora(rank=64))
    bound = 1 / math.sqrt(160)
    a = found["model.layers.0.self_attn.q_proj"].lora_A.weight.detach()
    reference = torch.empty(4000, 160)
    nn.init.kaiming_uniform_(reference, a=math.sqrt(5), generator=torch.Generator().manual_seed(0))
    assert reference.abs().max() <= bound + 1e-7 and 0.99 * bound < a.abs().max() <= bound
    assert (
        a.std() == pytest.approx(bound / math.sqrt(3), rel=0.02) and a.mean().abs() < 0.03 * bound
    )
    assert all(not layer.lora_B.weight.any() for layer in found.values())
    assert torch.equal(torch.get_rng_state(), torch_state)
    one = adapt(other, SMALL)["model.layers.1.mlp.up_proj"].lora_A.weight
    same, fewer, later = tiny_llama(), tiny_llama(), tiny_llama()
    assert torch.equal(adapt(same, SMALL)["model.layers.1.mlp.up_proj"].lora_A.weight, one)
    assert torch.equal(
        adapt(fewer, Lora(4, targets=("up_proj",)))["model.layers.1.mlp.up_proj"].lora_A.weight, one
    )
    assert not torch.equal(
        adapt(later, SMALL, seed=1)["model.layers.1.mlp.up_proj"].lora_A.weight, one
    )


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (
            ("q_proj", "v_proj"),
            {f"model.layers.{i}.self_attn.{name}" for i in (0, 1) for name in ("q_proj", "v_proj")},
        ),
        (("layers.1.mlp.up_proj",), {"model.layers.1.mlp.up_proj"}),
        (("model.layers.0.mlp.up_proj",), {"model.layers.0.mlp.up_proj"}),
        (
            r".*\.1\..*\.(o|down)_proj",
            {"model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj"},
        ),
    ],
)
def test_targets_are_suffixes_or_a_whole_regular_expression(targets, found):
    assert set(adapt(tiny_llama(), Lora(4, targets=targets))) == found


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (
            ("q_proj", "qproj"),
            r"no linear layer is called 'qproj'; there are down_proj, gate_proj, k_proj",
        ),
        (("proj",), "no linear layer is called 'proj'"),
        (("lm_head",), "lm_head is the head, whose weight the loss reads"),
        (("embed_tokens",), "model.embed_tokens is not a plain linear layer but Embedding"),
        ("q_proj", r'matches no whole name .* write a list, \["q_proj"\]'),
        ("x.*", "matches no whole name of a linear layer such as model.layers.0.self_attn.q_proj"),
        ("(", "is not a regular expression"),
    ],
)
def test_a_target_that_is_nothing_is_refused_with_what_there_is(targets, words):
    model = tiny_llama()
    with pytest.raises(UsageError, match=words):
        adapt(model, Lora(4, targets=targets))
    assert not adapted_layers(model) and all(p.requires_grad for p in model.parameters()), (
        "nothing was changed"
    )


def test_what_cannot_have_an_adapter_is_refused():
    model = tiny_llama()
    adapt(model, SMALL)
    with pytest.raises(UsageError, match="has adapters already"):
        adapt(model, SMALL)
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    with pytest.raises(UsageError, match="0.weight and 1.weight are one tensor"):
        adapt(tied, SMALL)
    with pytest.raises(UsageError, match="fp8"):
        fp8.convert_(model, [name for name, _ in model.named_parameters()])
    fused = tiny_llama()
    fuse_siblings(fused, ragged(2)["tokens"])
    with pytest.raises(UsageError, match="unfuse_siblings"):
        adapt(fused, SMALL)
    assert all(p.requires_grad for p in fused.parameters())
    unfuse_siblings(fused)
    assert len(adapt(fused, SMALL)) == 14


def test_the_down_projections_of_siblings_are_one_product():
    model, plain = adapted_llama(), adapted_llama()
    fusion = fuse_siblings(model, ragged(2)["tokens"])
    assert {len(family) for family in fusion.families} == {2, 3} and len(fusion.families) == 4
    torch.testing.assert_close(
        model(ragged(2)["tokens"]), plain(ragged(2)["tokens"]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_base_in_the_dtype_of_the_arithmetic_gives_the_same_bits(precision, family, tied):
    """It is rounded once and not at each call; norms, and whatever else is read in fp32, stay."""
    wide, narrow_one = (
        adapted_llama(model_type=family, tie_word_embeddings=tied, precision=each)
        for each in ("fp32", precision)
    )
    dtype = Precision(precision).dtype
    kinds = {name: p.dtype for name, p in narrow_one.named_parameters()}
    assert {kind for name, kind in kinds.items() if "norm" in name or "lora" in name} == {
        torch.float32
    }
    assert {kind for name, kind in kinds.items() if "norm" not in name and "lora" not in name} == {
        dtype
    }
    results = []
    for model in (wide, narrow_one):
        with torch.autocast("cpu", dtype):
            loss, count = token_loss(model, packed(4))
        (loss / count).backward()
        results.append([loss, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_weight_that_is_read_elsewhere_is_not_rounded():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.inner = nn.Embedding(8, 4), nn.Linear(4, 4)
            self.lm_head = nn.Linear(4, 8, bias=False)
            self.lm_head.weight = self.embed.weight

    module = Own()
    adapt(module, SMALL)
    round_frozen_weights(module, torch.bfloat16)
    assert (
        module.embed.weight.dtype == torch.float32 and module.inner.weight.dtype == torch.bfloat16
    )


@pytest.mark.parametrize("base", ["auto", "int8", "nf4"])
def test_merged_is_a_plain_model_with_the_same_outputs(base):
    model = adapted_llama(Lora(4, 6.0, base=base), dtype=torch.float32, tie_word_embeddings=True)
    tokens = ragged(3)["tokens"]
    before = model(tokens)
    merge(model)
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} <= {
        nn.Linear,
        type(model.lm_head),
    }
    assert set(model.state_dict()) == set(tiny_llama(tie_word_embeddings=True).state_dict())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(model(tokens), before, rtol=2e-5, atol=2e-6)
    merge(model)  # nothing is left to do


@pytest.mark.parametrize("base", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_merged_weight_has_the_dtype_of_the_others(base, dtype, tmp_path):
    model = tiny_llama().to(dtype)
    adapt(model, Lora(2, 4.0, base=base))
    with pytest.raises(UsageError, match=r"weights in 8 or 4 bits: call .*merge\(model\)"):
        mono.save(model, tmp_path / "out")
    merge(model)
    assert {p.dtype for p in model.parameters()} == {dtype} and model(
        ragged(2)["tokens"]
    ).isfinite().all()


def test_experts_have_no_magnitudes():
    model = tiny_llama(model_type="olmoe", num_experts=2, num_experts_per_tok=1)
    with pytest.raises(
        UsageError,
        match=r"lora.dora: model\..*experts.up_proj holds experts, for which there is no DoRA",
    ):
        adapt(model, Lora(4, targets=("up_proj",), dora=True))
    assert (
        all(p.requires_grad for p in model.parameters())
        and len(adapt(model, Lora(4, dora=True))) == 2 * 4
    )


def test_a_row_of_zeros_stays_one():
    module = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8))
    with torch.no_grad():
        module[1].weight[3] = 0
    adapt(module, KINDS["dora"])
    output = module(torch.arange(9))
    output.square().sum().backward()
    assert output.isfinite().all() and all(
        p.grad.isfinite().all() for p in module.parameters() if p.requires_grad
    )
    merge(module)
    assert module(torch.arange(9)).isfinite().all()


def test_biases_stay_where_they_are():
    model = adapted_llama(Lora(4, 6.0, base="nf4"), model_type="qwen2")
    bias = model.model.layers[0].self_attn.q_proj.bias
    merge(model)
    assert model.model.layers[0].self_attn.q_proj.bias is bias


def test_dropout_is_of_the_adapter_alone_and_in_training():
    model = adapted_llama(Lora(4, 6.0, dropout=0.5))
    tokens, plain = ragged(2)["tokens"], adapted_llama()
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), plain(tokens))
    fresh = tiny_llama()
    install_adapters(fresh, Lora(4, dropout=0.5))
    assert torch.equal(fresh(tokens), tiny_llama()(tokens)), "B = 0"


def test_only_a_stands_still_at_first():
    model = tiny_llama()
    adapt(model, SMALL)
    loss, count = token_loss(model, ragged(4))
    (loss / count).backward()
    still = {name for name, p in model.named_parameters() if p.requires_grad and not p.grad.any()}
    assert (
        still == {name for name, p in model.named_parameters() if may_start_without_gradient(name)}
        and len(still) == 14
    )
    assert len(LINEAR) == 7


def test_any_module():
    module = nn.Sequential(
        nn.Embedding(9, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 9)
    )
    plain = module(torch.arange(9))
    assert set(adapt(module, SMALL)) == {"1.0", "2"}
    assert torch.equal(module(torch.arange(9)), plain)
    assert not torch.equal(trained(module)(torch.arange(9)), plain)
