"""Compute dropout without a random generator: a mask is a pure function of (seed, draw, site, element).

So a member of an ensemble drops the same elements as when trained alone, and so does a repeated pass.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from monograph.ops.philox import LOW32, philox

F = torch.nn.functional


class Counter(nn.Module):
    """A module whose buffers are the numbers that tell a member's passes apart.

    Attributes:
        seed: the member's seed, 0-d int64.
        draw: the number of the pass, 0-d int64; each pass drops other elements.
    """

    seed: Tensor
    draw: Tensor

    def __init__(self, seed: Tensor, draw: Tensor):
        super().__init__()
        self.register_buffer("seed", seed, persistent=False)
        self.register_buffer("draw", draw, persistent=False)


class Dropout:
    """The replacement of torch's dropout functions in a forward pass.

    keep[i] = word_i >= p 2^32,   word_i = Philox(key = seed, counter = (i, draw, site))

    Attributes:
        site: the number of calls of dropout in this pass so far.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter, self.site = counter, 0

    def kept(self, shape: tuple[int, ...], rate: float | Tensor) -> Tensor:
        """Return the mask of elements that stay at the next site, bool of that shape."""
        size, site, seed, draw = math.prod(shape), self.site, self._counter.seed, self._counter.draw
        self.site += 1
        # Philox gives four words for each counter: element i has word i mod 4 of counter i // 4.
        fours = torch.arange(-(-size // 4), device=seed.device)
        zero = torch.zeros_like(fours)
        counter = (fours, zero + (draw & LOW32), zero + site, zero + (draw >> 32 & LOW32))
        words = philox(counter, (zero + (seed & LOW32), zero + (seed >> 32 & LOW32)))
        return torch.stack(words, -1).flatten()[:size].view(shape) >= (_number(rate, zero) * 2.0**32).to(torch.int64)

    def of(self, hidden: Tensor, rate: float | Tensor, mask: tuple[int, ...], inplace: bool = False) -> Tensor:
        """Return `hidden` with dropped elements zero and others divided by 1 - p; the shape `mask` broadcasts to it."""
        if not isinstance(rate, Tensor) and rate == 0:
            self.site += 1  # other members may have a higher rate here, and count the site
            return hidden
        # It is computed in fp64 and rounded once, so that a rate in a tensor gives the same bits as a number.
        scale = (1.0 / (1.0 - _number(rate, hidden))).to(hidden.dtype)
        factor = torch.where(self.kept(mask, rate), scale, 0.0)
        return hidden.mul_(factor) if inplace else hidden * factor

    def alpha(self, hidden: Tensor, rate: float, mask: tuple[int, ...], inplace: bool = False) -> Tensor:
        """Return `hidden` with dropped elements at SELU's limit, scaled and shifted to keep mean 0 and variance 1."""
        # The limit of SELU for very negative inputs, -lambda alpha.
        limit = -1.7580993408473766
        scale = ((1 - rate) * (1 + rate * limit**2)) ** -0.5 if rate < 1 else 0.0
        out = torch.where(self.kept(mask, rate), hidden, limit) * scale - scale * limit * rate
        return hidden.copy_(out) if inplace else out

    def functions(self) -> dict[str, Callable[..., Tensor]]:
        """Return the replacements of functions of `torch.nn.functional`, by name."""

        def made(of: Callable[..., Tensor], kept: int | None, last: int = 0, default: bool = True) -> Any:
            """Return a dropout whose mask has the first `kept` dimensions, or all but the `last` ones."""

            def dropout(
                hidden: Tensor, p: float | Tensor = 0.5, training: bool = default, inplace: bool = False
            ) -> Tensor:
                # Spatial dropout drops whole channels, so the mask has size 1 in the dimensions of positions.
                own = hidden.ndim - last if kept is None else kept
                mask = tuple(hidden.shape[:own]) + (1,) * (hidden.ndim - own)
                return of(hidden, p, mask, inplace) if training else hidden

            return dropout

        kinds = {"alpha_dropout": None, "feature_alpha_dropout": 2}
        alphas = {name: made(self.alpha, kept, 0, False) for name, kept in kinds.items()}
        # torch reads three dimensions in dropout2d as [N, C, L], and one fewer in the others as a batch of one.
        spatial = {"dropout2d": made(self.of, 2)} | {f"dropout{n}d": made(self.of, None, n) for n in (1, 3)}
        return {"dropout": made(self.of, None)} | spatial | alphas


def _number(rate: float | Tensor, like: Tensor) -> Tensor:
    return rate if isinstance(rate, Tensor) else torch.full((), rate, dtype=torch.float64, device=like.device)
