"""Dropout by counter: which elements are dropped is a pure function of (seed, draw, site, element).

So a member of an ensemble drops what it drops alone, and a repeated pass drops the same; no generator, no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from monograph.ops.philox import LOW32, philox

F = torch.nn.functional


class Counter(Protocol):
    """What numbers the passes of a member.

    Attributes:
        seed: 0-d int64, of the member.
        draw: 0-d int64, which pass it is: another one drops others.
    """

    seed: Tensor
    draw: Tensor


class Dropout:
    """What replaces torch's functions of dropout in a forward pass.

    keep[i] = word_i >= p 2^32,   word_i = Philox(key = seed, counter = (i, draw, site))

    Attributes:
        site: calls of dropout in this pass so far.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.site = 0

    def kept(self, shape: tuple[int, ...], rate: float | Tensor) -> Tensor:
        """Which elements stay, bool of that shape; the next site's."""
        size, site, seed, draw = math.prod(shape), self.site, self._counter.seed, self._counter.draw
        self.site += 1
        fours = torch.arange(-(-size // 4), device=seed.device)
        zero = torch.zeros_like(fours)
        counter = (fours, zero + (draw & LOW32), zero + site, zero + (draw >> 32 & LOW32))
        words = philox(counter, (zero + (seed & LOW32), zero + (seed >> 32 & LOW32)))
        return torch.stack(words, -1).flatten()[:size].view(shape) >= (_number(rate, zero) * 2.0**32).to(torch.int64)

    def of(self, hidden: Tensor, rate: float | Tensor, mask: tuple[int, ...], inplace: bool = False) -> Tensor:
        """`hidden` with some elements zero, the others divided by 1 - p; the mask's shape broadcasts against it."""
        if not isinstance(rate, Tensor) and rate == 0:
            self.site += 1  # which other members may drop at
            return hidden
        scale = (1.0 / (1.0 - _number(rate, hidden))).to(hidden.dtype)
        factor = torch.where(self.kept(mask, rate), scale, 0.0)
        return hidden.mul_(factor) if inplace else hidden * factor

    def functions(self) -> dict[str, Callable[..., Tensor]]:
        """What stands for which function of `torch.nn.functional`."""

        def elements(hidden: Tensor, p: float | Tensor = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            return self.of(hidden, p, tuple(hidden.shape), inplace) if training else hidden

        def channels(spatial: int) -> Callable[..., Tensor]:
            def dropout(
                hidden: Tensor, p: float | Tensor = 0.5, training: bool = True, inplace: bool = False
            ) -> Tensor:
                kept = tuple(hidden.shape[: hidden.ndim - spatial]) + (1,) * spatial
                return self.of(hidden, p, kept, inplace) if training else hidden

            return dropout

        return {"dropout": elements} | {f"dropout{n}d": channels(n) for n in (1, 2, 3)}


def _number(rate: float | Tensor, like: Tensor) -> Tensor:
    return rate if isinstance(rate, Tensor) else torch.full((), rate, dtype=torch.float64, device=like.device)
