"""Losses: what a training step minimises, as (sum over targets, number of targets).

A loss is any callable `loss(model, batch) -> (sum, count)`. One that also has `count(batch)` tells how many targets a
batch has without a forward pass, so that an update's total is known before its first backward.

Shapes: B rows, T positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph.token_rows import rows_of
from monograph.ops.cross_entropy import linear_cross_entropy

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]


@runtime_checkable
class CountedLoss(Protocol):
    """A loss whose targets can be counted from the batch alone."""

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Differentiable sum of the losses, and the number of targets summed (both 0-d)."""
        ...

    def count(self, batch: Any) -> Tensor:
        """The number of targets in the batch, 0-d integer tensor on the batch's device."""
        ...


class TokenLoss:
    """Next-token cross-entropy of a model that returns hidden states and has `model.lm_head.weight` [V, D].

    sum = sum over positions with targets != -100 of -log softmax(hidden @ head.T)[target],   in nats

    The batch holds `tokens` and `targets` [B, T] int64, and where rows are packed `segments` and `positions` [B, T]
    int64.
    """

    def __init__(self, impl: Literal["chunked", "reference"] = "chunked"):
        """`impl` chooses the cross-entropy: see `monograph.ops.cross_entropy.linear_cross_entropy`."""
        self.impl = impl
        self.head: Callable[..., tuple[Tensor, Tensor]] = linear_cross_entropy

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sum in nats, count); see the class."""
        hidden_BTD = model(batch["tokens"], segments=batch.get("segments"), positions=batch.get("positions"))
        head: Any = model.lm_head
        targets_N, rows = batch["targets"].flatten(), rows_of(head)
        return self.head(hidden_BTD.flatten(0, -2), head.weight, targets_N, impl=self.impl, rows=rows)

    def count(self, batch: Batch) -> Tensor:
        """Number of targets that are not -100, 0-d int64."""
        return (batch["targets"] != -100).sum()


token_loss = TokenLoss()

_EXPECTED = "the loss must return (sum of the losses, number of targets): loss(model, batch) -> (sum, count)"


def pair(result: Any) -> tuple[Tensor, Tensor]:
    """What a loss returned, its count as a tensor.

    Raises:
        UsageError: it is no pair of a 0-d tensor and a number.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise UsageError(_EXPECTED)
    total, count = result
    if not isinstance(total, Tensor) or total.ndim:
        found = f"a tensor of shape {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise UsageError(f"{_EXPECTED}; its sum is {found}, expected a tensor of one number: .sum()")
    if isinstance(count, int):
        count = torch.full((), count, device=total.device)  # which, unlike torch.tensor, waits for no copy
    if not isinstance(count, Tensor) or count.ndim:
        raise UsageError(f"{_EXPECTED}; its count is {type(count).__name__}, expected a whole number")
    if count.is_floating_point():
        kind = str(count.dtype).removeprefix("torch.")
        raise UsageError(f"{_EXPECTED}; its count is {kind}, expected a whole number: .sum() of booleans, or .long()")
    return total, count
