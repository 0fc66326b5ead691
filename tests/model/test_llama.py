# Run: pytest tests/model/test_llama.py
"""The decoder against a plain float64 one and against transformers; compiled, vmapped, cached; its
first weights.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from monograph.decode.cache import KVCache
from monograph.errors import InputRefused
from monograph.laws.comparisons import relative_error
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama

SMALL = LlamaConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    initializer_range=0.3,
    tie_word_embeddings=True,
)
WINDOWED = replace(
    SMALL, model_type="qwen3", sliding_window=3, layer_types=("sliding_attention", "full_attention")
)
# What Dynamo itself does to an input that is no leaf.
DYNAMO_GRAD = (
    "ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning"
)
VMAP_LOOP = "ignore:There is a performance drop because we have not yet implemented the batching rule:UserWarning"


def _tokens(config, rows=2, length=12, seed=0):
    return torch.randint(
        config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def test_first_weights_have_the_spread_that_the_docstring_states():
    config = LlamaConfig.preset("nano", num_hidden_layers=8, initializer_range=0.02)
    for name, parameter in Llama(config).named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all()
            continue
        spread = (
            0.02 / math.sqrt(16) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        )
        # Four standard errors of a standard deviation of n normal draws.
        assert abs(parameter.std().item() / spread - 1) < 4 / math.sqrt(2 * parameter.numel()), name


def test_first_weights_follow_from_seed_and_name_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model, same, other = Llama(SMALL, seed=1), Llama(SMALL, seed=1), Llama(SMALL, seed=2)
    deeper = Llama(replace(SMALL, num_hidden_layers=3, vocab_size=50), seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    key = "model.layers.1.self_attn.q_proj.weight"
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, same.state_dict()[name])
        assert weight.ndim == 1 or not torch.equal(weight, other.state_dict()[name])
    assert torch.equal(model.state_dict()[key], deeper.state_dict()[key])
    assert not torch.equal(
        model.state_dict()[key], model.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    )


def test_a_tied_head_is_the_embedding():
    model = Llama(SMALL)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" in model.state_dict()
    untied = Llama(replace(SMALL, tie_word_embeddings=False))
    assert not torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)


def test_a_sequence_longer_than_the_positions_is_refused():
    model = Llama(replace(SMALL, max_position_embeddings=8))
    model(_tokens(SMALL, length=8))
    with pytest.raises(
        InputRefused, match="9 tokens is longer than the model's max_position_embeddings = 8"
    ):
        model(_tokens(SMALL, length=9))


@pytest.mark.parametrize("impl", ["auto", "reference"])
@torch.no_grad()
def test_token_by_token_with_a_cache_equals_the_whole(impl):
    model, tokens = Llama(SMALL, attention=impl).double(), _tokens(SMALL)
    cache = _cache()
    first = model(tokens[:, :5], positions=torch.arange(5).expand(2, -1), cache=cache)
    rest = [
        model(tokens[:, t : t + 1], positions=torch.full((2, 1), t), cache=cache)
        for t in range(5, 12)
    ]
    assert relative_error(torch.cat([first, *rest], dim=1), model(tokens)) < 1e-12


def _cache():
    """Space for the keys and values of two rows."""
    return KVCache.allocate(SMALL, 2, 16, torch.float64, torch.device("cpu"))


def test_segments_and_a_cache_do_not_go_together():
    with pytest.raises(ValueError, match="give positions, not segments"):
        Llama(SMALL)(_tokens(SMALL), segments=torch.ones(2, 12, dtype=torch.int64), cache=_cache())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_hidden_states_have_the_dtype_of_the_weights(dtype):
    model = Llama(SMALL).to(dtype)
    hidden = model(_tokens(SMALL), segments=torch.ones(2, 12, dtype=torch.int64))
    assert hidden.dtype == model.logits(hidden).dtype == dtype
    exact = Llama(SMALL).double()(_tokens(SMALL))
    assert relative_error(hidden, exact) < 30 * torch.finfo(dtype).eps


def test_autocast_computes_in_bf16_with_fp32_weights():
    model, tokens = Llama(SMALL), _tokens(SMALL)
    segments = torch.ones_like(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(tokens, segments=segments)
        assert model.logits(hidden).dtype == torch.bfloat16
    assert 1e-4 < relative_error(hidden, model(tokens)) < 30 * torch.finfo(torch.bfloat16).eps


@pytest.mark.filterwarnings(VMAP_LOOP)
@pytest.mark.parametrize(
    ("impl", "compiled"),
    [
        ("auto", False),
        ("reference", False),
        pytest.param("auto", True, marks=pytest.mark.slow),
        pytest.param("reference", True, marks=pytest.mark.slow),
    ],
)
def test_members_under_vmap_equal_each_model_alone(impl, compiled):
    members = [Llama(SMALL, seed, impl).double() for seed in range(3)]
    stacked, _ = torch.func.stack_module_state(members)
    stacked = {name: value.detach().requires_grad_() for name, value in stacked.items()}
    tokens = _tokens(SMALL)
    segments = (torch.arange(12) // 5 + 1).expand(2, 12)

    def hidden(parameters):
        return torch.func.functional_call(members[0], parameters, (tokens,), {"segments": segments})

    together = torch.func.vmap(hidden)
    if compiled:
        together = torch.compile(together, backend="aot_eager", fullgraph=True)
    out = together(stacked)
    name = "model.layers.0.self_attn.k_proj.weight"
    (gradient,) = torch.autograd.grad(out.square().sum(), stacked[name])
    for index, member in enumerate(members):
        alone = member(tokens, segments=segments)
        own = member.model.layers[0].self_attn.k_proj.weight
        assert relative_error(out[index], alone) < 1e-12
        assert (
            relative_error(gradient[index], torch.autograd.grad(alone.square().sum(), own)[0])
            < 1e-12
        )


@pytest.mark.filterwarnings(DYNAMO_GRAD)
@pytest.mark.parametrize(
    "config", [pytest.param(SMALL, marks=pytest.mark.slow), WINDOWED], ids=["llama", "windows"]
)
def test_one_graph_serves_every_batch_and_one_every_block(config):
    model, tokens = Llama(config), _tokens(SMALL)
    torch.compiler.reset()
    whole, block = CompileCounter(), CompileCounter()
    compiled = torch.compile(model, backend=whole, fullgraph=True, dynamic=False)
    for seed in range(3):
        segments = torch.randint(3, (2, 12), generator=torch.Generator().manual_seed(seed)).sort(
            dim=1
        )[0]
        out = compiled(_tokens(SMALL, seed=seed), segments=segments, positions=segments)
        torch.testing.assert_close(
            out, model(_tokens(SMALL, seed=seed), segments=segments, positions=segments)
        )
    assert whole.frame_count == 1
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(backend=block, fullgraph=True, dynamic=False)
    model(tokens, segments=torch.ones_like(tokens))
    assert block.frame_count == 1
