"""Keep a step's parameters, gradients and optimizer state on one device, in planes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from monograph.graph import siblings
from monograph.graph.inspect import parameter_blocks
from monograph.graph.remat import Remat
from monograph.loss import TokenLoss
from monograph.ops.fused_gradients import fusing
from monograph.optim import Plane, planes, trainable, unlinked, vectors_at_once
from monograph.step.parameters import Parameters, Sums

if TYPE_CHECKING:
    from monograph.step.step import Step


class OnDevice(Parameters):
    """The parameters of one module on one device; of a step's parameters this is the default."""

    def __init__(self, *, fused: bool | None = None):
        """Take whether products add gradients (see `monograph.ops.fused_gradients`); None: where
        that saves work.
        """
        super().__init__()
        self._fused = fused
        self._adding = False  # whether they do

    def place(self, step: Step) -> list[Plane]:
        """Move the trainable parameters into planes, on the device where they are."""
        self.step = step
        on_cuda = any(p.is_cuda for p in step.model.parameters())
        self._adding = fuses(step, on_cuda) if self._fused is None else self._fused
        if self._adding:
            siblings.fuse_known(step.model)
        # Fused siblings are read as one matrix, so their parameters must lie next to each other in
        # a plane.
        in_order = siblings.side_by_side(step.model, trainable(step.model))
        made = planes(
            in_order,
            step.optim.kinds(step.model),
            step.optim.state,
            master_weights=step.optim.master_weights,
            parts=parameter_blocks(step.model),
        )
        siblings.part_moved(step.model)
        begun = [step.prepare_plane(plane) for plane in made]
        if self._adding:
            # Where nothing is recomputed, a backward pass needs all rounded weights anyway.
            rounds = isinstance(step.remat, Remat.Off)
            for plane in begun:
                if rounds and not plane.kind.vector and plane.param.dtype != step.precision.dtype:
                    plane.rounded = torch.empty_like(plane.param, dtype=step.precision.dtype)
                plane.fuse()
        for family in siblings.families(step.model):
            family.look()
        return begun

    def fusing(self) -> AbstractContextManager[None]:
        """In the block products add gradients to the planes, if they do at all."""
        return _fusing(self.step.planes) if self._adding else nullcontext()

    def accumulate(self, batches: Sequence[object]) -> None:
        """Add the gradient of each micro-batch to the planes."""
        # Gradients are linked in each window, as `zero_grad()` may have set `.grad` to None since
        # the last one.
        self.step.link()
        for plane in self.step.planes:
            plane.round()
        for batch in batches:
            self.step.micro_step(batch)

    def score(self, batches: Iterable[object]) -> list[Sums]:
        """Return the sums of each micro-batch, without gradients."""
        step = self.step
        with unlinked(step.planes), step.context():
            return [step.evaluate(batch) for batch in batches]

    def discard(self) -> None:
        """Set the planes' gradients to zero."""
        for plane in self.step.planes:
            plane.grad.zero_()

    def apply(self) -> Tensor:
        """Clip and apply the gradients of the planes, and set them to zero; return their norm
        before clipping.
        """
        grad_norm = self.step.clip_and_apply([plane.grad for plane in self.step.planes])
        self.discard()
        return grad_norm


@contextmanager
def _fusing(planes: Sequence[Plane]) -> Iterator[None]:
    with fusing(), vectors_at_once(planes):
        yield


def fuses(step: Step, on_cuda: bool) -> bool:
    """Return whether a step's products can add gradients, and do so in less time."""
    # A CPU computes separate siblings faster, and cannot add bf16 products to fp32 numbers. Code of
    # others may ask for gradients itself, or by hooks.
    own = type(step.loss) is TokenLoss and vars(type(step.model)).get("fuses", False)
    hooked = any(
        p._backward_hooks or p._post_accumulate_grad_hooks for p in step.model.parameters()
    )
    return on_cuda and step.precision.name in ("bf16", "fp16") and own and not hooked
