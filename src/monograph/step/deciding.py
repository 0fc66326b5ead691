"""What an update decides and does to planes: clipping, acceptance, counters, and the optimizer's own update."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from monograph.graph.precision import Precision
from monograph.loss import CountedLoss, Loss
from monograph.ops.once import once
from monograph.optim import Optimizer, Plane, initialise, settled, update_
from monograph.step.clip import Clip, looked_at, remember_, stands_out


class Deciding:
    """The part of a step that knows gradients and planes but no module, and is the same wherever the planes are.

    Attributes:
        lr: of the present update; loss_sum and count: of its window; applied, tokens, skipped, good, loss_scale: of all
            updates so far. 0-d tensors on the device, or [N] of N members.
        largest: neither the rate nor the norm of a gradient that is applied may be above it, or moments and weights
            could overflow.
        recent: what is remembered of the last applied updates, [2, 128] or [N, 2, 128]; see `Clip`.
    """

    loss: Loss
    optim: Optimizer
    clip: Clip | None
    precision: Precision
    largest: float
    lr: Tensor
    loss_sum: Tensor
    count: Tensor
    applied: Tensor
    tokens: Tensor
    skipped: Tensor
    good: Tensor
    loss_scale: Tensor
    recent: Tensor

    @property
    def counters(self) -> dict[str, Tensor]:
        """The tensors that the updates write and a run's state holds, by name."""
        names = ["applied", "tokens", "skipped"]
        names += ["loss_scale", "good"] if self.precision.scaled else []
        names += ["recent"] if self.clip and self.clip.skip_spikes else []
        return {name: getattr(self, name) for name in names}

    @contextmanager
    def counters_kept(self) -> Iterator[None]:
        """Whatever updates are made in the block, afterwards the counters are what they were."""
        kept = {name: counter.clone() for name, counter in self.counters.items()}
        yield
        for name, counter in self.counters.items():
            counter.copy_(kept[name])

    def begun(self, plane: Plane) -> Plane:
        """The plane as it is before the first update."""
        if self.settles(plane):
            plane.param.copy_(settled(plane.param))
        initialise(plane, self.optim)
        return plane

    def settles(self, plane: Plane) -> bool:
        """Whether the plane's weights are kept where their bf16 rounding and the rest are 32 bits: see `settled`."""
        return self.precision.rounds and plane.param.dtype == torch.float32

    def accepts(self, grad_norm: Tensor) -> Tensor:
        """Whether a gradient of this norm, after clipping, makes an update, bool.

        What is compared is false of NaN, so that a number that is none anywhere refuses the update.
        """
        counts = (self.count > 0) & self.count.isfinite()
        return (grad_norm <= self.largest) & (self.lr.abs() <= self.largest) & self.loss_sum.isfinite() & counts

    def squares(self, plane: Plane, grad: Tensor) -> list[Tensor]:
        """The sum of squares of each of the plane's parts, fp64."""
        found = grad.split(plane.parts, dim=-1)
        norms = (torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64) for part in found)
        return [norm.square().reshape(grad.shape[:-1]) for norm in norms]  # torch 2.11 keeps a dimension of one number

    def decide(self, squares: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """From the squares of all parts, and count it: (norm, factor of the summed gradient, whether it is applied)."""
        scale = self.unscaled()
        # One by one: the bits of a sum of many depend on who computes it.
        grad_norm = functools.reduce(torch.add, squares).sqrt() * scale
        longest = grad_norm if self.clip is None else grad_norm.clamp_max(self.clip.norm)
        accepted = grad_norm.isfinite() & self.accepts(longest)
        if self.clip is not None and self.clip.skip_spikes:
            found = looked_at(grad_norm, self.loss_sum / self.count)
            accepted = accepted & ~stands_out(found, self.recent, self.applied)
            remember_(self.recent, found, self.applied, accepted)
        if self.clip is not None:
            scale = scale * (self.clip.norm / (grad_norm + 1e-6)).clamp_max(1.0)
        self.applied.add_(accepted)
        self.tokens.add_(torch.where(accepted, self.count, 0.0).round().to(torch.int64))
        self.skipped.add_(~accepted)
        if self.precision.scaled:
            self.precision.rescale_(self.loss_scale, self.good, finite=grad_norm.isfinite(), accepted=accepted)
        return grad_norm, scale, accepted

    def unscaled(self) -> Tensor:
        """The factor that makes the summed gradient, as it lies in the planes, that of the mean loss."""
        counted = isinstance(self.loss, CountedLoss)
        return (torch.ones_like(self.lr) if counted else reciprocal(self.count)) / self.loss_scale

    def renew(self, plane: Plane, total: Tensor, scale: Tensor, accepted: Tensor) -> None:
        """Update a plane by its summed gradient."""
        grad = total * once(scale.to(total.dtype)).unsqueeze(-1)
        compute = self.precision.products(grad.dtype)
        update_(plane, self.optim, grad, lr=self.lr, applied=self.applied, accepted=accepted, compute=compute)
        if self.settles(plane):
            plane.param.copy_(settled(plane.param))


def largest(dtype: torch.dtype) -> float:
    """The largest number whose square is finite in the dtype of gradients and moments, which is fp32 at least."""
    return math.sqrt(torch.finfo(torch.promote_types(dtype, torch.float32)).max)


def reciprocal(count: Tensor) -> Tensor:
    """1 / count in fp64; 1 of none."""
    return 1.0 / torch.where(count == 0, 1.0, count)
