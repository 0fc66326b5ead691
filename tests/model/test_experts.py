"""Run: pytest tests/model/test_experts.py    A mixture's grouped way computes the dense way, its equation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import tiny_llama
from monograph.laws.comparisons import relative_error
from monograph.model.config import LlamaConfig
from monograph.model.mixture import Mixture

CONFIG = LlamaConfig(
    model_type="qwen3_moe", vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=4, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=24,
)  # fmt: skip


def mixture(config, seed=0, dtype=torch.float64):
    generator, made = torch.Generator().manual_seed(seed), Mixture(config).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(
                0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    return made, torch.randn(2, 9, config.hidden_size, generator=generator, dtype=torch.float64).to(
        dtype
    )


def outputs(made, hidden, way):
    made.impl, leaves = way, [hidden.clone().requires_grad_(), *made.parameters()]
    out = made(leaves[0])
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


@settings(max_examples=20)
@given(count=st.integers(1, 7), normalised=st.booleans(), seed=st.integers(0, 99))
def test_grouped_is_dense(count, normalised, seed):
    config = replace(CONFIG, num_experts_per_tok=count, norm_topk_prob=normalised)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        made, hidden = mixture(config, seed, dtype)
        grouped, dense = (outputs(made, hidden, way) for way in ("grouped", "dense"))
        # With one expert of weight 1 the router has no gradient but rounding.
        least = 1e-2 * max(its.norm() for its in dense)
        assert all(
            (mine - its).norm() <= bound * max(its.norm(), least)
            for mine, its in zip(grouped, dense, strict=True)
        )


@pytest.mark.parametrize("way", ["grouped", "dense"])
def test_a_token_depends_on_no_other_token(way):
    made, hidden = mixture(CONFIG)
    made.impl = way
    other = hidden.clone()
    other[:, 5:] = -3 * hidden[:, 5:]
    assert relative_error(made(other)[:, :5], made(hidden)[:, :5]) < 1e-14
    assert relative_error(made(other)[:, 5:], made(hidden)[:, 5:]) > 0.1


def test_an_expert_that_no_token_chose_has_a_gradient_of_zeros_in_a_step_that_changes_others():
    made, hidden = mixture(replace(CONFIG, num_experts_per_tok=1))
    gradient = outputs(made, hidden[:1, :2], "grouped")[3]
    idle = (gradient == 0).all((-1, -2))
    assert 5 <= idle.sum() <= 6


def test_a_captured_model_is_one_graph_without_a_break():
    import torch._dynamo as dynamo

    model, tokens = (
        tiny_llama(**{"model_type": "olmoe", "num_experts": 5, "num_experts_per_tok": 2}),
        torch.arange(24),
    )
    explained = dynamo.explain(model)(tokens[None])
    assert explained.graph_count == 1 and explained.graph_break_count == 0
