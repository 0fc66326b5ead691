"""Run: pytest tests/ops/test_unwritten.py

Sums of gradients that begin with their first terms: they are those that begin with zeros, whatever an
earlier window left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import monograph.step.on_device
from batches import captured_to_train, packed, tiny_llama
from laws.replaying import assert_same_bits
from monograph.graph.precision import Precision
from monograph.laws.comparisons import outcome
from monograph.ops.fused_gradients import add_product_, add_scaled_
from monograph.ops.unwritten import take, unwritten, zero_if_unwritten_
from monograph.optim import AdamW, Muon, Optimizer
from monograph.resident import Resident
from monograph.step import accumulate
from streamed import FAMILIES

# Experts' matrices are added to by a graph's own operators, and filters by autograd.
MIXTURE = FAMILIES["gpt_oss"] | {"layer_types": ("full_attention",) * 2}
HYBRID = FAMILIES["qwen3_5"] | {"layer_types": ("linear_attention", "full_attention")}


def engine(
    begins: str, *, optim: Optimizer | None = None, precision: str = "fp32", **sizes: Any
) -> Resident:
    """An engine whose products add gradients; its sums begin by writing, or with zeros as the reference."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(monograph.step.on_device, "can_fuse_gradients", lambda *_: True)
        made = Resident(
            tiny_llama(**sizes), optim=optim or AdamW(lr=1e-2), clip=0.5,
            precision=Precision(precision), micro_batch=2, rounds_in_update=True,
        )  # fmt: skip
        parameters = made.step.parameters
    assert parameters.begins_sums
    if begins == "with zeros":
        parameters._totals = []
        parameters.begins_sums = False
        for plane in made.step.planes:
            plane.adds_by_products = False
    return made


def spoil(made: Resident) -> None:
    """Let the numbers that an update leaves be NaN, which no sum may read."""
    if made.step.parameters.begins_sums:
        for _, total in made.step.parameters._totals:
            total.fill_(torch.nan)


def failing_in_its_second_call(function: Callable[..., Any]) -> Callable[..., Any]:
    calls = itertools.count(1)

    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        if next(calls) == 2:
            raise RuntimeError("stopped")
        return result

    return call


def all_that_happens(made: Resident) -> dict[str, Tensor]:
    """Train through windows that are whole, fail, are discarded, in two parts, NaN and empty."""
    updates = []

    def update() -> None:
        updates.append(made.update())
        spoil(made)

    made.accumulate(packed(5, seed=0))
    update()
    with pytest.MonkeyPatch.context() as patched, pytest.raises(RuntimeError, match="stopped"):
        patched.setattr(
            made.step, "differentiate", failing_in_its_second_call(made.step.differentiate)
        )
        made.accumulate(packed(4, seed=1))
    spoil(made)
    made.accumulate(packed(2, seed=2))
    made.step.discard()
    spoil(made)
    made.accumulate(packed(2, seed=3))
    made.accumulate(packed(4, seed=4))
    update()
    made.accumulate(packed(4, seed=5))
    made.step.planes[0].grad[0] = torch.nan
    update()
    accumulate(made.step, [])
    update()
    assert float(updates[-1].grad_norm) == 0.0
    made.accumulate(packed(4, seed=6))
    update()
    assert int(updates[-1].skipped) == 2
    return outcome(made.state(), updates)


@pytest.mark.parametrize(
    ("scope", "sizes"),
    [
        ("none", {"tie_word_embeddings": True}),
        ("none", {"precision": "bf16", "optim": Muon(lr=1e-2)}),
        ("none", MIXTURE),
        ("none", HYBRID),
        pytest.param("blocks", {"precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param("whole", {"tie_word_embeddings": True}, marks=pytest.mark.slow),
        pytest.param("whole", {"precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param("blocks", {"tie_word_embeddings": True}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_sums_begun_by_writing_are_those_begun_with_zeros(scope: str, sizes: Any) -> None:
    results = []
    for begins in ("by writing", "with zeros"):
        made = engine(begins, **sizes)
        if scope != "none":
            captured_to_train(made, packed(5), scope=scope)
            spoil(made)
        results.append(all_that_happens(made))
    assert_same_bits(*results)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEFT, RIGHT = numbers(5, 4), numbers(5, 3, seed=1)


@contextmanager
def two_weights() -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Two weights side by side, whose totals are unwritten in the block, and one view of their totals."""
    weights, totals = torch.zeros(4, 3), torch.full((4, 3), torch.nan)
    pairs = zip(weights.split(2), totals.split(2), strict=True)
    with unwritten(pairs):
        yield totals, weights.split(2)


def test_siblings_are_written_together_or_one_by_one() -> None:
    expected = LEFT.T @ RIGHT
    with two_weights() as (totals, (first, _)):
        add_product_(totals, LEFT, RIGHT, first)
        add_product_(totals, LEFT, RIGHT, first)
    assert torch.equal(totals, expected + expected)
    for written in (0, 1):
        alone = slice(2 * written, 2 * written + 2)
        with two_weights() as (totals, weights):
            add_product_(totals[alone], LEFT[:, alone], RIGHT, weights[written])
            add_product_(totals, LEFT, RIGHT, weights[0])
        twice = expected.clone()
        twice[alone] += expected[alone]
        assert torch.equal(totals, twice)


def test_a_weight_without_a_gradient_has_zeros() -> None:
    with two_weights() as (totals, (_, second)):
        zero_if_unwritten_(totals[2:], second)
        totals[2:] += 1
        zero_if_unwritten_(totals[2:], second)
    assert totals.tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2


def test_a_copy_of_a_total_is_written_too() -> None:
    """As compiled graphs make them, and store them in the total afterwards."""
    factor = torch.tensor(0.3)
    with two_weights() as (totals, (first, second)):
        for weight, part in ((first, totals[:2]), (second, totals[2:])):
            copied = part.clone()
            add_scaled_(copied, RIGHT[:2], factor, weight)
            part.copy_(copied)
    assert torch.equal(totals, torch.cat([RIGHT[:2], RIGHT[:2]]) * factor)


def test_other_sums_and_other_steps_are_only_added_to() -> None:
    total, weight = numbers(4, 3), torch.zeros(4, 3)
    expected = total + LEFT.T @ RIGHT
    with two_weights():
        add_product_(total, LEFT, RIGHT)
        assert torch.equal(total, expected)
        assert not take(total, weight)
    with pytest.raises(RuntimeError, match="stopped"), unwritten([(weight, total)]):
        raise RuntimeError("stopped")
    assert not take(total, weight)
