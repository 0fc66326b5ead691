"""Run: pytest tests/ops/test_log_probabilities.py"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monograph.laws.comparisons import error_within
from monograph.ops.cross_entropy import token_log_probabilities
from monograph.ops.token_rows import ReplacementRows
from monograph.profiling.memory import LiveBytes

N, D, V = 37, 16, 61


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    tokens = torch.randint(V, (N,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), tokens


def reference(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    return (hidden @ weight.T / temperature).log_softmax(-1)[torch.arange(N), tokens]


def gradients(values: Tensor, *of: Tensor) -> Tensor:
    """Of a function of all of them that is no plain sum."""
    factors = torch.linspace(-1, 2, N, dtype=values.dtype)
    found = torch.autograd.grad((values.exp() * factors).sum() + values.square().sum(), of)
    return torch.cat([each.flatten() for each in found])


@pytest.mark.parametrize("chunks", [None, 1, 3, N])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_the_equation(
    chunks: int | None, temperature: float
) -> None:
    hidden, weight, tokens = inputs()
    ours = token_log_probabilities(hidden, weight, tokens, temperature, chunks=chunks)
    exact = reference(hidden, weight, tokens, temperature)
    assert (ours - exact).abs().max() < 1e-12
    wanted = gradients(exact, hidden, weight)
    assert (gradients(ours, hidden, weight) - wanted).norm() < 1e-12 * wanted.norm()
    with torch.no_grad():
        assert torch.equal(
            token_log_probabilities(hidden, weight, tokens, temperature, chunks=chunks), ours
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_errs_no_more_than_the_plain_way(dtype: torch.dtype) -> None:
    hidden, weight, tokens = inputs(dtype)
    exact = inputs()
    exact_values = reference(hidden.double(), weight.double(), tokens, 1.0)
    ours = token_log_probabilities(hidden, weight, tokens, chunks=3)
    naive = (hidden @ weight.T).float().log_softmax(-1)[torch.arange(N), tokens]
    assert ours.dtype == torch.float32
    error_within(ours, naive, exact_values)
    wide = gradients(reference(*exact, 1.0), *exact[:2])
    error_within(gradients(ours, hidden, weight), gradients(naive, hidden, weight), wide)


def test_trained_rows_of_a_frozen_weight_get_the_gradient() -> None:
    hidden, weight, tokens = inputs()
    values = torch.randn(2, D, dtype=torch.float64, requires_grad=True)
    index, slots = torch.tensor([3, 40]), torch.full((V,), -1)
    slots[index] = torch.arange(2)
    ours = token_log_probabilities(
        hidden, weight.detach(), tokens, rows=ReplacementRows(values, index, slots)
    )
    whole = weight.detach().index_put((index,), values)
    exact = reference(hidden, whole, tokens, 1.0)
    assert (gradients(ours, hidden, values) - gradients(exact, hidden, values)).norm() < 1e-11


def test_the_logits_of_all_tokens_are_never_in_memory() -> None:
    tokens, vocabulary = 256, 4096
    hidden = torch.randn(tokens, D, requires_grad=True)
    weight, ids = (
        torch.randn(vocabulary, D, requires_grad=True),
        torch.randint(vocabulary, (tokens,)),
    )
    with LiveBytes() as live:
        token_log_probabilities(hidden, weight, ids, chunks=8).sum().backward()
    # A chunk's logits, their softmax and gradient, and two gradients of the weight.
    assert (
        live.peak_bytes
        < 5 * tokens // 8 * vocabulary * 4 + 3 * weight.nbytes
        < 5 * tokens * vocabulary
    )
