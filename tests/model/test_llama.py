# Run: pytest tests/model/test_llama.py
"""The decoder against a plain float64 one and against transformers; compiled, vmapped, cached; its first weights."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from monograph.errors import InputRefused
from monograph.model.config import Llama3Scaling, LlamaConfig
from monograph.model.llama import Llama
from numerics import relative_error
from reference import llama as reference

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
# What Dynamo itself does to an input that is no leaf.
DYNAMO_GRAD = "ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning"
VMAP_LOOP = "ignore:There is a performance drop because we have not yet implemented the batching rule:UserWarning"


@st.composite
def configs(draw):
    key_value, head_dim = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([4, 6, 16]))
    heads = key_value * draw(st.sampled_from([1, 2, 4]))
    return LlamaConfig(
        vocab_size=draw(st.integers(3, 50)),
        hidden_size=heads * draw(st.integers(2, 6)),
        intermediate_size=draw(st.integers(5, 40)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=heads,
        num_key_value_heads=key_value,
        head_dim=head_dim,
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        rope_theta=draw(st.sampled_from([1e4, 5e5])),
        rope_scaling=draw(st.sampled_from([None, Llama3Scaling(4.0, 1.0, 4.0, 16)])),
        tie_word_embeddings=draw(st.booleans()),
        initializer_range=0.3,
    )


def _tokens(config, rows=2, length=12, seed=0):
    return torch.randint(config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def _gradients(logits, parameters):
    weights = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).reshape(logits.shape).to(logits.dtype)
    return torch.autograd.grad((logits * weights).sum(), parameters)


@settings(max_examples=12)
@given(config=configs(), seed=st.integers(0, 99))
def test_float64_equals_the_plain_decoder(config, seed):
    model, tokens = Llama(config, seed).double(), _tokens(config, length=9, seed=seed)
    segments = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1] * 9])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 0], [*range(9)]])
    weights = dict(model.named_parameters())
    ours = model(tokens, segments=segments, positions=positions)
    plain = reference.hidden_states(weights, config, tokens, segments, positions)
    assert relative_error(ours, plain) < 1e-12
    logits, plain_logits = model.logits(ours), reference.logits(weights, config, plain)
    assert relative_error(logits, plain_logits) < 1e-12
    gradients, plain_gradients = (_gradients(x, list(weights.values())) for x in (logits, plain_logits))
    for name, ours_, plain_ in zip(weights, gradients, plain_gradients, strict=True):
        assert relative_error(ours_, plain_) < 1e-11, name


@settings(max_examples=20)
@given(config=configs(), seed=st.integers(0, 99))
def test_fp32_equals_transformers(config, seed):
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    model, theirs = Llama(config, seed), LlamaForCausalLM(TheirConfig(**config.to_hf()))
    theirs.load_state_dict(model.state_dict())
    tokens = _tokens(config, length=40, seed=seed)
    ours, their_logits = model.logits(model(tokens)), theirs(tokens).logits
    assert relative_error(ours, their_logits) < 1e-5
    assert model.state_dict().keys() == theirs.state_dict().keys()
    named, their_named = dict(model.named_parameters()), dict(theirs.named_parameters())
    gradients = _gradients(ours, list(named.values()))
    expected = _gradients(their_logits, [their_named[name] for name in named])
    for name, ours_, theirs_ in zip(named, gradients, expected, strict=True):
        assert relative_error(ours_, theirs_) < 1e-5, name


def test_parameters_are_counted_and_shaped_as_the_configuration_says():
    for name in ("nano", "1b", "8b"):
        config = LlamaConfig.preset(name)
        start = time.process_time()
        with torch.device("meta"):
            model = Llama(config)
        assert time.process_time() - start < 2  # drawing 8b would take minutes
        shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
        layers = {
            f"model.layers.{i}.{k}": s
            for i in range(config.num_hidden_layers)
            for k, s in config.layer_shapes().items()
        }
        assert shapes == {**config.outer_shapes(), **layers}
        assert sum(parameter.numel() for parameter in model.parameters()) == config.parameter_count()
        assert not list(model.buffers())


def test_first_weights_have_the_spread_that_the_docstring_states():
    config = LlamaConfig.preset("nano", num_hidden_layers=8, initializer_range=0.02)
    for name, parameter in Llama(config).named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all()
            continue
        spread = 0.02 / math.sqrt(16) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
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
    assert not torch.equal(model.state_dict()[key], model.state_dict()["model.layers.0.self_attn.q_proj.weight"])


def test_a_tied_head_is_the_embedding():
    model = Llama(SMALL)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" in model.state_dict()
    untied = Llama(replace(SMALL, tie_word_embeddings=False))
    assert not torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)


def test_a_sequence_longer_than_the_positions_is_refused():
    model = Llama(replace(SMALL, max_position_embeddings=8))
    model(_tokens(SMALL, length=8))
    with pytest.raises(InputRefused, match="9 tokens is longer than the model's max_position_embeddings = 8"):
        model(_tokens(SMALL, length=9))


class _Cache:
    """All slots of every layer, zero where nothing was stored."""

    def __init__(self, config, rows, slots):
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, slots, config.head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)

    def update(self, layer_index, key, value, positions):
        rows = torch.arange(len(positions))[:, None]
        for stored, new in ((self.keys[layer_index], key), (self.values[layer_index], value)):
            stored[rows, :, positions] = new.transpose(1, 2)
        return self.keys[layer_index], self.values[layer_index]


@pytest.mark.parametrize("impl", ["auto", "reference"])
@torch.no_grad()
def test_token_by_token_with_a_cache_equals_the_whole(impl):
    model, tokens = Llama(SMALL, attention=impl).double(), _tokens(SMALL)
    cache = _Cache(SMALL, rows=2, slots=16)
    first = model(tokens[:, :5], cache=cache)
    rest = [model(tokens[:, t : t + 1], positions=torch.full((2, 1), t), cache=cache) for t in range(5, 12)]
    assert relative_error(torch.cat([first, *rest], dim=1), model(tokens)) < 1e-12


def test_segments_and_a_cache_do_not_go_together():
    with pytest.raises(ValueError, match="give positions, not segments"):
        Llama(SMALL)(_tokens(SMALL), segments=torch.ones(2, 12, dtype=torch.int64), cache=_Cache(SMALL, 2, 12))


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
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("impl", ["auto", "reference"])
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
        assert relative_error(gradient[index], torch.autograd.grad(alone.square().sum(), own)[0]) < 1e-12


@pytest.mark.filterwarnings(DYNAMO_GRAD)
def test_one_graph_serves_every_batch_and_one_every_block():
    model, tokens = Llama(SMALL), _tokens(SMALL)
    torch.compiler.reset()
    whole, block = CompileCounter(), CompileCounter()
    compiled = torch.compile(model, backend=whole, fullgraph=True, dynamic=False)
    for seed in range(3):
        segments = torch.randint(3, (2, 12), generator=torch.Generator().manual_seed(seed)).sort(dim=1)[0]
        out = compiled(_tokens(SMALL, seed=seed), segments=segments, positions=segments)
        torch.testing.assert_close(out, model(_tokens(SMALL, seed=seed), segments=segments, positions=segments))
    assert whole.frame_count == 1
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(backend=block, fullgraph=True, dynamic=False)
    model(tokens, segments=torch.ones_like(tokens))
    assert block.frame_count == 1
