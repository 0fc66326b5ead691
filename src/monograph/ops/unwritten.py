"""Begin the sums of gradients by their first terms instead of zeros.

A total is a buffer in which the gradients of a weight are summed over the micro-batches of an update. To
begin with zeros, all totals would have to be written after each update, and the first addition would read
them. Instead, a total keeps the numbers of the last update until the first micro-step after it:

        total <- g                      for the weight's first gradient g
        total <- total + g              for each further gradient
        total <- 0                      at the end of this micro-step, for a weight without a gradient

Until then the total is *unwritten*. An operator that adds to totals asks `take` whether it must write
instead. Code that can only add calls `zero_if_unwritten_` first. Both act when they run and not when a graph
is traced, so the same compiled graph serves all micro-steps. A CUDA graph repeats what they did when it was
recorded, so the first micro-step of an update has a recording of its own (`monograph.graph.capture.replayed`).

A total is found by the place of its weight in memory, not by its own place: a compiled graph that changes a
total may hand an operator a copy of the total, but never a copy of a weight.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MemoryPlace = tuple[Any, Any]  # a storage, and the index of an element in it


@dataclass
class _Total:
    """The total of a weight in the first micro-step of an update.

    Attributes:
        tensor: the total.
        is_unwritten: whether it holds numbers of an earlier update.
    """

    tensor: Tensor
    is_unwritten: bool = True


# The totals of the first micro-step of an update while it runs, by the places where their weights begin; else
# empty. This is not a variable of one thread, because autograd runs the backward pass on a GPU in a thread of its own.
_totals = dict[MemoryPlace, _Total]()


@contextmanager
def unwritten(weights_and_totals: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Make a context for the first micro-step of an update, in which totals are unwritten.

    At the end of the block they hold the sums of the micro-step. After an exception their contents are undefined.

    Args:
        weights_and_totals: each weight with its total.
    """
    totals = {_place_of(weight): _Total(total) for weight, total in weights_and_totals}
    _totals.update(totals)
    try:
        yield
        left = [total.tensor for total in totals.values() if total.is_unwritten]
        if left:
            torch._foreach_zero_(left)
    finally:
        for place in totals:
            del _totals[place]


def take(total: Tensor, weight: Tensor | None) -> bool:
    """Return whether a total is unwritten, so that the caller must write to it instead of adding.

    From now on it counts as written.

    Args:
        total: a weight's total, or one view of the totals of weights that lie side by side, such as those of
            a fused query, key and value. If only some of these are unwritten, they become zeros, and the
            caller must add.
        weight: the weight, or the first of these weights. None if the tensor is not a weight's total.
    """
    if weight is None or not _totals:
        return False
    storage, begin = _place_of(weight)
    offset = 0
    unwritten_parts = list[Tensor]()
    while offset < total.numel() and (storage, begin + offset) in _totals:
        own_total = _totals[storage, begin + offset]  # of the weight that begins here
        end = offset + own_total.tensor.numel()
        if own_total.is_unwritten:
            # A part of `total`, not `own_total.tensor`: `total` may be a copy, which the caller goes on
            # with.
            unwritten_parts.append(total.view(-1)[offset:end])
            own_total.is_unwritten = False
        offset = end
    if sum(part.numel() for part in unwritten_parts) == total.numel():
        return True
    for part in unwritten_parts:
        part.zero_()
    return False


@torch.library.custom_op("monograph::zero_if_unwritten_", mutates_args=("total",))
def zero_if_unwritten_(total: Tensor, weight: Tensor) -> None:
    """Set a total to zeros if it is unwritten, so that any operator may add to it afterwards.

    Args:
        total: see `take`.
        weight: see `take`.
    """
    if take(total, weight):
        total.zero_()


@zero_if_unwritten_.register_fake
def _(total: Tensor, weight: Tensor) -> None:
    pass


def _place_of(weight: Tensor) -> MemoryPlace:
    """Return where a tensor begins in memory. A fake tensor has such a place, too."""
    return weight.untyped_storage()._cdata, weight.storage_offset()
