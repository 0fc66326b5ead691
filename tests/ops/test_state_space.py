# Run: pytest tests/ops/test_state_space.py
"""Mamba 2's scan in chunks is the recurrence, token for token: outputs, last state and all gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monograph.graph.capture import compiled
from monograph.laws.comparisons import error_within, relative_error
from monograph.ops import state_space


def drawn(rows, length, seed, dtype=torch.float64, groups=2, heads=6, size=5, width=7):
    """Queries, keys, values, decays and a state, random."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    values = (
        normal(rows, groups, length, size),
        normal(rows, groups, length, size),
        normal(rows, heads, length, width),
        -normal(rows, heads, length).exp() * 0.3,
        normal(rows, heads, size, width),
    )
    return [tensor.to(dtype) for tensor in values]


def results(rule, inputs, starts):
    """Outputs, last state, and the gradients of a function of both."""
    *inputs, state = [tensor.clone().requires_grad_() for tensor in inputs]
    out, last = rule(*inputs, starts, state)
    (out.cos().sum() + last.sin().sum()).backward()
    return [out.detach(), last.detach(), *(tensor.grad for tensor in (*inputs, state))]


def begun(rows, length, seed, share=0.15):
    """Whether a document begins at each position; never at the first one, as in a batch."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(rows, length, generator=generator) < share
    starts[:, 0] = False
    return starts


CHUNK = state_space.CHUNK
LENGTHS = st.one_of(
    st.sampled_from([1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]), st.integers(1, 250)
)


@settings(max_examples=25)
@given(length=LENGTHS, share=st.sampled_from([0.0, 0.01, 0.3]), seed=st.integers(0, 99))
def test_chunks_are_the_recurrence(length, share, seed):
    inputs = drawn(2, length, seed)
    starts = begun(2, length, seed, share) if share else None
    in_chunks = results(state_space.chunked, inputs, starts)
    token_by_token = results(state_space.recurrent, inputs, starts)
    for ours, plain in zip(in_chunks, token_by_token, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_documents_in_a_row_are_documents_alone():
    """Documents of one token, of a chunk and one more, and of a row that ends within a chunk."""
    lengths = [1, CHUNK, CHUNK + 1, 1, CHUNK - 1, 5]
    query, key, value, decay, _ = drawn(1, sum(lengths), 3)
    starts = torch.zeros(1, sum(lengths), dtype=torch.bool)
    firsts = [sum(lengths[:number]) for number in range(1, len(lengths))]
    starts[0, firsts] = True
    packed, _ = state_space.chunked(query, key, value, decay, starts)
    begin = 0
    for length in lengths:
        part = slice(begin, begin + length)
        alone, _ = state_space.recurrent(
            query[:, :, part], key[:, :, part], value[:, :, part], decay[:, :, part]
        )
        torch.testing.assert_close(packed[:, :, part], alone, rtol=1e-12, atol=1e-12)
        begin += length


def test_chunks_are_as_exact_as_the_recurrence_in_fp32():
    exact = results(state_space.recurrent, drawn(2, 300, 0), None)
    inputs = drawn(2, 300, 0, torch.float32)
    naive = results(state_space.recurrent, inputs, None)
    ours = results(state_space.chunked, inputs, None)
    for each in zip(ours, naive, exact, strict=True):
        assert error_within(*each, k=4)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_holds_it(backend):
    inputs = drawn(2, 150, 1)
    starts = begun(2, 150, 1)
    in_graph = results(compiled(state_space.chunked, backend), inputs, starts)
    eager = results(state_space.chunked, inputs, starts)
    for ours, plain in zip(in_graph, eager, strict=True):
        assert relative_error(ours, plain) < 1e-12


def test_members_of_an_ensemble_are_rows():
    members = [drawn(2, 70, seed) for seed in range(3)]
    starts = begun(2, 70, 0)
    stacked = [torch.stack(each).requires_grad_() for each in zip(*members, strict=True)]

    def scan(*inputs):
        return state_space.chunked(*inputs[:-1], starts, inputs[-1])

    out, last = torch.vmap(scan)(*stacked)
    found = torch.autograd.grad(out.cos().sum() + last.sin().sum(), stacked)
    for member, inputs in enumerate(members):
        alone = results(state_space.chunked, inputs, starts)[2:]
        for ours, plain in zip(found, alone, strict=True):
            torch.testing.assert_close(ours[member], plain, rtol=1e-12, atol=1e-12)
