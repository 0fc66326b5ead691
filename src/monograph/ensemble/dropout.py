"""Dropout without a random generator, for all members at once.

Whether an element is dropped depends only on four numbers: the member's seed, the number of the
micro-batch (draw), the number of the dropout's call in the pass (site), and the element's index. The
formula is in `Dropout`. So a member of an ensemble drops the same elements as when it is trained alone,
and recomputation drops the same elements as the first pass.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from monograph.ops.philox import LOW32, philox


class DropoutCounter(nn.Module):
    """A module whose buffers are a member's seed and the number of the micro-batch.

    They are buffers so that vmap can give each member its own seed.

    Attributes:
        seed: the member's seed, 0-d int64.
        draw: the number of the micro-batch, 0-d int64. Each micro-batch drops other elements.
    """

    seed: Tensor
    draw: Tensor

    def __init__(self, seed: Tensor, draw: Tensor):
        super().__init__()
        self.register_buffer("seed", seed, persistent=False)
        self.register_buffer("draw", draw, persistent=False)


class Dropout:
    """Replaces torch's dropout functions in a forward pass.

    With the rate p, this says whether element i is kept:

    keep[i] = word_i >= p 2^32,   word_i = Philox(key = seed, counter = (i, draw, site))

    Attributes:
        site: the number of calls of dropout in this pass so far. It tells the calls apart.
    """

    def __init__(self, counter: DropoutCounter) -> None:
        self._counter = counter
        self.site = 0

    def keep_mask(self, shape: tuple[int, ...], rate: float | Tensor) -> Tensor:
        """Return which elements are kept, bool of this shape, and count this call in `site`."""
        size = math.prod(shape)
        site = self.site
        seed = self._counter.seed
        draw = self._counter.draw
        self.site += 1
        # Philox gives four words for each counter: element i has word i mod 4 of counter i // 4.
        block_count = -(-size // 4)  # size / 4, rounded up
        blocks = torch.arange(block_count, device=seed.device)
        # Counter and key are words of 32 bits, so draw and seed, of 64 bits, are two words each. Adding
        # `zero` gives a word the shape of `blocks`.
        zero = torch.zeros_like(blocks)
        draw_low = zero + (draw & LOW32)
        draw_high = zero + ((draw >> 32) & LOW32)
        counter = (blocks, draw_low, zero + site, draw_high)
        key = (zero + (seed & LOW32), zero + ((seed >> 32) & LOW32))
        words = torch.stack(philox(counter, key), -1).flatten()[:size].view(shape)
        threshold = (_as_tensor(rate, zero) * 2.0**32).to(torch.int64)
        return words >= threshold

    def apply(
        self,
        hidden: Tensor,
        rate: float | Tensor,
        mask_shape: tuple[int, ...],
        inplace: bool = False,
    ) -> Tensor:
        """Return `hidden` with dropped elements at zero and the others divided by 1 - p.

        Args:
            hidden: any shape.
            rate: p, a number or a 0-d tensor.
            mask_shape: the mask's shape, which broadcasts to that of `hidden`.
            inplace: whether to write the result into `hidden`.
        """
        if not isinstance(rate, Tensor) and rate == 0:
            # The call is counted, so that later calls have the same numbers as in a member that has a
            # higher rate here.
            self.site += 1
            return hidden
        # The scale is computed in fp64 and rounded once, so that a rate in a tensor gives the same
        # bits as a number.
        scale = (1.0 / (1.0 - _as_tensor(rate, hidden))).to(hidden.dtype)
        factor = torch.where(self.keep_mask(mask_shape, rate), scale, 0.0)
        return hidden.mul_(factor) if inplace else hidden * factor

    def apply_alpha(
        self, hidden: Tensor, rate: float, mask_shape: tuple[int, ...], inplace: bool = False
    ) -> Tensor:
        """Return alpha dropout of `hidden`. The arguments are those of `apply`.

        Dropped elements get SELU's limit. All elements are then scaled and shifted, so that mean 0 and
        variance 1 are kept.
        """
        # The limit of SELU for very negative inputs, -lambda alpha with SELU's two constants.
        limit = -1.7580993408473766
        # With the rate 1 all elements are dropped, and the formula would divide by zero.
        scale = ((1 - rate) * (1 + rate * limit**2)) ** -0.5 if rate < 1 else 0.0
        kept_or_limit = torch.where(self.keep_mask(mask_shape, rate), hidden, limit)
        output = kept_or_limit * scale - scale * limit * rate
        return hidden.copy_(output) if inplace else output

    def functions(self) -> dict[str, Callable[..., Tensor]]:
        """Return the replacements of functions of `torch.nn.functional`, by name."""

        def replacement(
            apply: Callable[..., Tensor],
            masked_dims: int | None = None,
            unmasked_dims: int = 0,
            training_by_default: bool = True,
        ) -> Any:
            """Return a dropout function that calls `apply`.

            Spatial dropout drops whole channels, so its mask has the size 1 in the dimensions of
            positions.

            Args:
                apply: `self.apply` or `self.apply_alpha`.
                masked_dims: the number of first dimensions in which the mask has the input's size;
                    None: all but `unmasked_dims`.
                unmasked_dims: the number of last dimensions in which the mask has the size 1.
                training_by_default: torch's default of the argument `training`.
            """

            def dropout(
                hidden: Tensor,
                p: float | Tensor = 0.5,
                training: bool = training_by_default,
                inplace: bool = False,
            ) -> Tensor:
                if not training:
                    return hidden
                masked = hidden.ndim - unmasked_dims if masked_dims is None else masked_dims
                mask_shape = tuple(hidden.shape[:masked]) + (1,) * (hidden.ndim - masked)
                return apply(hidden, p, mask_shape, inplace)

            return dropout

        return {
            "dropout": replacement(self.apply),
            # For dropout1d and dropout3d, torch takes an input with one dimension fewer as one without a
            # batch. But for dropout2d it takes one with three dimensions as [batch, channels, length].
            "dropout1d": replacement(self.apply, unmasked_dims=1),
            "dropout2d": replacement(self.apply, masked_dims=2),
            "dropout3d": replacement(self.apply, unmasked_dims=3),
            "alpha_dropout": replacement(self.apply_alpha, training_by_default=False),
            "feature_alpha_dropout": replacement(
                self.apply_alpha, masked_dims=2, training_by_default=False
            ),
        }


def _as_tensor(rate: float | Tensor, like: Tensor) -> Tensor:
    """Return a rate as a tensor on the device of `like`; a number becomes 0-d fp64."""
    if isinstance(rate, Tensor):
        return rate
    return torch.full((), rate, dtype=torch.float64, device=like.device)
