# Run: pytest tests/ops/test_logit_cap.py
"""Capped logits in each loss, and in log-probabilities, against whole logits in float64 that autograd
differentiates.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monograph.ops.cross_entropy import linear_cross_entropy, token_log_probabilities
from monograph.ops.logit_cap import cap_slope, capped
from monograph.ops.mixture import Teacher, mixture_cross_entropy
from monograph.ops.token_rows import ReplacementRows, with_replaced_rows

N, D, V = 23, 8, 31
CAP = 2.0  # logits have a spread of about 3, so that many are bent


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(V, (N,), generator=generator)
    targets[::4] = -100
    return hidden, weight, targets


def log_softmax(hidden: Tensor, weight: Tensor, cap: float | None = CAP) -> Tensor:
    logits = hidden @ weight.T
    return (logits if cap is None else cap * torch.tanh(logits / cap)).log_softmax(-1)


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    kept = targets != -100
    return -log_softmax(hidden, weight)[kept, targets[kept]].sum()


def assert_same(loss: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    found = torch.autograd.grad(loss, leaves)
    for mine, theirs in zip(found, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_the_cap_and_its_slope_are_their_equations() -> None:
    logits = torch.linspace(-9, 9, 41, dtype=torch.float64, requires_grad=True)
    bounded = capped(logits, CAP)
    torch.testing.assert_close(bounded, CAP * torch.tanh(logits / CAP), rtol=1e-15, atol=0)
    (slope,) = torch.autograd.grad(bounded.sum(), logits)
    torch.testing.assert_close(cap_slope(bounded.detach(), CAP), slope, rtol=1e-12, atol=1e-15)
    assert capped(logits, None) is logits
    # Two roundings of bfloat16 less than by its operators.
    low = logits.detach().bfloat16()
    assert torch.equal(capped(low, CAP), (CAP * torch.tanh(low.float() / CAP)).bfloat16())


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("way", ["eager", "captured", "reference"])
def test_a_loss_and_its_gradients(way: str, device_type: str) -> None:
    hidden, weight, targets = inputs()

    def of(h: Tensor, w: Tensor) -> Tensor:
        impl = "reference" if way == "reference" else "chunked"
        return linear_cross_entropy(
            h, w, targets, chunks=3, impl=impl, device_type=device_type, cap=CAP
        )[0]

    if way == "captured":
        of = torch.compile(of, fullgraph=True, backend="aot_eager")
    assert_same(of(hidden, weight), plain_loss(hidden, weight, targets), [hidden, weight])
    with torch.no_grad():
        torch.testing.assert_close(of(hidden, weight), plain_loss(hidden, weight, targets))


@pytest.mark.parametrize("captured", [False, True])
def test_trained_rows_of_a_frozen_head(captured: bool) -> None:
    hidden, weight, targets = inputs()
    frozen, index = weight.detach(), torch.tensor([4, 9])
    slots = torch.full((V,), -1).index_copy_(0, index, torch.arange(2))
    values = (frozen[index] + 0.3).requires_grad_()
    rows = ReplacementRows(values, index, slots)

    def of(h: Tensor, v: Tensor) -> Tensor:
        own = rows._replace(values_KD=v)
        return linear_cross_entropy(h, frozen, targets, chunks=2, rows=own, cap=CAP)[0]

    run = torch.compile(of, fullgraph=True, backend="aot_eager") if captured else of
    expected = plain_loss(hidden, with_replaced_rows(frozen, rows), targets)
    assert_same(run(hidden, values), expected, [hidden, values])


def test_members_on_one_frozen_head() -> None:
    _, weight, targets = inputs()
    frozen = torch.nn.Parameter(weight.detach(), requires_grad=False)
    hidden = torch.stack([inputs(seed)[0].detach() for seed in range(3)]).requires_grad_()
    losses = torch.vmap(lambda h: linear_cross_entropy(h, frozen, targets, cap=CAP)[0])(hidden)
    expected = torch.stack([plain_loss(member, frozen, targets) for member in hidden])
    assert_same(losses.sum(), expected.sum(), [hidden])


@pytest.mark.parametrize("chunks", [1, 3])
def test_log_probabilities(chunks: int) -> None:
    hidden, weight, targets = inputs()
    tokens, weights = targets.clamp_min(0), torch.linspace(-1, 1, N, dtype=torch.float64)
    logs = token_log_probabilities(hidden, weight, tokens, chunks=chunks, cap=CAP)
    expected = log_softmax(hidden, weight).gather(-1, tokens[:, None])[:, 0]
    assert_same((logs * weights).sum(), (expected * weights).sum(), [hidden, weight])


def test_distillation_from_teachers_with_and_without_a_cap() -> None:
    hidden, weight, targets = inputs()
    teachers = []
    for seed, cap in ((1, 1.0), (2, None)):
        states, head, _ = inputs(seed)
        teachers.append(Teacher(states.detach(), head.detach(), cap))
    mean = sum(log_softmax(*teacher).exp() for teacher in teachers) / 2
    log_q, kept = log_softmax(hidden, weight), targets != -100
    divergence = torch.special.xlogy(mean, mean) - mean * log_q
    expected = 0.3 * plain_loss(hidden, weight, targets) + 0.7 * divergence[kept].sum()
    loss, _ = mixture_cross_entropy(
        hidden, weight, targets, teachers=teachers, share=0.3, chunks=3, cap=CAP
    )
    assert_same(loss, expected, [hidden, weight])
