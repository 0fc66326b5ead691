# Run: pytest tests/ops/test_delta_rule.py
"""The gated delta rule in chunks is the recurrence, token for token: outputs, last state and all
gradients.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from monograph.graph.capture import compiled
from monograph.laws.comparisons import error_within, relative_error
from monograph.ops import delta_rule


def drawn(rows, length, seed, dtype=torch.float64, repeated=False, heads=3, size=5, width=7):
    """Queries, keys, values, decays, shares, a state; with `repeated` all keys are equal and all is
    written.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys = F.normalize(normal(rows, heads, length, size), dim=-1)
    decay, beta = -normal(rows, heads, length).exp() * 0.3, normal(rows, heads, length).sigmoid()
    if repeated:
        keys, decay, beta = keys[:, :, :1].expand_as(keys), decay * 0, beta * 0 + 1
    values = (
        normal(rows, heads, length, size),
        keys,
        normal(rows, heads, length, width),
        decay,
        beta,
    )
    return [tensor.to(dtype).contiguous() for tensor in (*values, normal(rows, heads, size, width))]


def results(rule, inputs, starts):
    """Outputs, last state, and the gradients of a function of both."""
    *inputs, state = [tensor.clone().requires_grad_() for tensor in inputs]
    out, last = rule(*inputs, starts, state)
    (out.cos().sum() + last.sin().sum()).backward()
    return [out.detach(), last.detach(), *(tensor.grad for tensor in (*inputs, state))]


def begun(rows, length, seed):
    return torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) < 0.15


CHUNKS = st.sampled_from(
    [1, delta_rule.CHUNK - 1, delta_rule.CHUNK, delta_rule.CHUNK + 1, 3 * delta_rule.CHUNK]
)


@settings(max_examples=20)
@given(length=st.one_of(CHUNKS, st.integers(1, 150)), packed=st.booleans(), seed=st.integers(0, 99))
def test_chunks_are_the_recurrence(length, packed, seed):
    inputs, starts = drawn(2, length, seed), begun(2, length, seed) if packed else None
    pairs = zip(
        *(results(rule, inputs, starts) for rule in (delta_rule.chunked, delta_rule.recurrent)),
        strict=True,
    )
    for ours, plain in pairs:
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("repeated", [False, True])
def test_chunks_are_as_exact_as_the_recurrence_in_fp32(repeated):
    exact = results(delta_rule.recurrent, drawn(2, 200, 0, repeated=repeated), None)
    inputs = drawn(2, 200, 0, torch.float32, repeated)
    naive, ours = (
        results(rule, inputs, None) for rule in (delta_rule.recurrent, delta_rule.chunked)
    )
    for each in zip(ours, naive, exact, strict=True):
        assert error_within(*each, k=4)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_holds_it(backend):
    inputs, starts = drawn(2, 150, 1), begun(2, 150, 1)
    pairs = zip(
        *(
            results(rule, inputs, starts)
            for rule in (compiled(delta_rule.chunked, backend), delta_rule.chunked)
        ),
        strict=True,
    )
    assert all(relative_error(*pair) < 1e-12 for pair in pairs)


def test_members_of_an_ensemble_are_rows():
    members = [drawn(2, 70, seed) for seed in range(3)]
    starts = begun(2, 70, 0)
    stacked = [torch.stack(each) for each in zip(*members, strict=True)]

    inputs = [tensor.requires_grad_() for tensor in stacked]
    out, last = torch.vmap(lambda *inputs: delta_rule.chunked(*inputs[:-1], starts, inputs[-1]))(
        *inputs
    )
    found = torch.autograd.grad(out.cos().sum() + last.sin().sum(), inputs)
    for member, inputs in enumerate(members):
        for ours, alone in zip(found, results(delta_rule.chunked, inputs, starts)[2:], strict=True):
            torch.testing.assert_close(ours[member], alone, rtol=1e-12, atol=1e-12)
