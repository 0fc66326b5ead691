"""Keep a step's parameters, gradients and optimizer state on one device, in planes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from monograph.graph import siblings
from monograph.graph.inspect import parameter_blocks
from monograph.graph.remat import Remat
from monograph.loss import Loss, MtpLoss, TokenLoss
from monograph.ops.fused_gradients import fused_gradients, may_fuse
from monograph.ops.unwritten import unwritten
from monograph.optim import Plane, added_at_once, planes, trainable, unlinked
from monograph.step.parameters import Parameters, Sums

if TYPE_CHECKING:
    from monograph.step.step import Step


class OnDevice(Parameters):
    """The parameters of one module on one device; a step's default.

    Attributes:
        rounds_in_update: whether an update, after writing the weights, also rounds them for the products
            of the next window. Otherwise each window begins with rounding them.
    """

    def __init__(self, *, fused: bool | None = None, rounds_in_update: bool = False):
        """Choose how weight gradients reach the planes, and when weights are rounded.

        Args:
            fused: whether matrix products add weight gradients to the planes directly (see
                `monograph.ops.fused_gradients`); None: if that saves work.
            rounds_in_update: as the attribute. Then no weight may be written through `.data` between
                an update and the next window, because torch does not count such writes, and the
                window would use weights that were rounded before.
        """
        super().__init__()
        self.rounds_in_update = rounds_in_update
        self._asked_to_fuse = fused
        self._fuses_gradients = False  # the choice, known from `place` on
        # Parameters whose gradients are added by matrix products, with the sums; known from `place` on.
        self._totals: list[tuple[Tensor, Tensor]] = []
        # What `_weight_versions` returned when `Plane.rounded` was last written; (): never, or unknown.
        self._rounded_versions: tuple[int, ...] = ()

    def place(self, step: Step) -> list[Plane]:
        """Move the trainable parameters into planes on their own device."""
        self.step = step
        on_cuda = any(p.is_cuda for p in step.model.parameters())
        if self._asked_to_fuse is None:
            self._fuses_gradients = can_fuse_gradients(step, on_cuda)
        else:
            self._fuses_gradients = self._asked_to_fuse
        if self._fuses_gradients:
            siblings.fuse_known(step.model)
        # Siblings are linear layers with the same input, such as q, k and v, and together a family. They are
        # multiplied as one matrix, so their parameters must lie side by side in a plane.
        ordered_parameters = siblings.in_family_order(step.model, trainable(step.model))
        new_planes = planes(
            ordered_parameters,
            step.kinds_of(step.model, step.optim),
            step.optim.state,
            master_weights=step.optim.master_weights,
            layers=parameter_blocks(step.model),
        )
        # Parameters that are updated in different ways are in different planes. A family that has such
        # parameters is split into smaller ones, and a layer that is left alone is multiplied alone.
        siblings.split_separated_families(step.model)
        for plane in new_planes:
            step.prepare_plane(plane)
        if self._fuses_gradients:
            # Without recomputation, autograd keeps all rounded weights for the backward pass anyway.
            # So rounding each weight once an update, into `plane.rounded`, takes no more memory.
            can_round_once = isinstance(step.remat, Remat.Off)
            for plane in new_planes:
                needs_rounding = (
                    not plane.kind.is_vector and plane.param.dtype != step.precision.dtype
                )
                if can_round_once and needs_rounding:
                    plane.rounded = torch.empty_like(plane.param, dtype=step.precision.dtype)
                plane.fuse_gradients()
        for family in siblings.families(step.model):
            family.update_views()
        self._totals = []
        for plane in new_planes:
            if plane.adds_by_products:
                totals = plane.views(plane.grad)
                self._totals += [
                    (placed.parameter, total.data)
                    for placed, (_, total) in zip(plane.placed, totals, strict=True)
                ]
        self.begins_sums = bool(self._totals)
        return new_planes

    def fused_gradients(self) -> AbstractContextManager[None]:
        """Let matrix products in the block add gradients to the planes, if `place` chose that."""
        return self._added_by_products() if self._fuses_gradients else nullcontext()

    @contextmanager
    def _added_by_products(self) -> Iterator[None]:
        """Let matrix products in the block add gradients to the planes, or write those that are first."""
        totals = self._totals if self.begins_sums else []
        # `unwritten` ends before `added_at_once`, which adds to all totals.
        with fused_gradients(), added_at_once(self.step.planes), unwritten(totals):
            yield

    def accumulate(self, batches: Sequence[object]) -> None:
        """Add the gradient of each micro-batch to the planes."""
        # `link` makes each `.grad` a view of a plane. It is called for each window, because a
        # caller's `zero_grad()` may have set `.grad` to None since the last one.
        self.step.link()
        self.round_weights()
        for batch in batches:
            self.step.micro_step(batch)
            self.begins_sums = False

    def round_weights(self) -> None:
        """Write each `Plane.rounded`, unless the last update wrote it and no weight was written since."""
        if not self.rounds_in_update or self._weight_versions() != self._rounded_versions:
            for plane in self.step.planes:
                plane.round()
            self._rounded_versions = self._weight_versions()

    def _weight_versions(self) -> tuple[int, ...]:
        """Return torch's counts of writes in place to the weights of which there are rounded copies.

        Writes through `.data` are not counted.
        """
        rounded_planes = [plane for plane in self.step.planes if plane.rounded is not None]
        # A parameter and its plane share memory, but have counts of their own.
        of_planes = [plane.param._version for plane in rounded_planes]
        of_parameters = [
            placed.parameter._version for plane in rounded_planes for placed in plane.placed
        ]
        return (*of_planes, *of_parameters)

    def score(self, batches: Iterable[object]) -> list[Sums]:
        """Return the sums of each micro-batch, without gradients."""
        step = self.step
        with unlinked(step.planes), step.context():
            return [step.evaluate(batch) for batch in batches]

    def discard(self) -> None:
        """Forget the accumulated gradient: the next micro-step begins its sums."""
        self._zero_gradients()
        self.begins_sums = bool(self._totals)

    def _zero_gradients(self) -> None:
        """Set the gradients to zero, except those that the next micro-step writes."""
        for plane in self.step.planes:
            if not plane.adds_by_products:
                plane.grad.zero_()

    def complete(self) -> None:
        """Set the gradients to zero if the window had no micro-step that wrote them."""
        if self.begins_sums:
            for _, total in self._totals:
                total.zero_()

    def apply(self) -> Tensor:
        """Clip and apply the planes' gradients, and reset them; return the norm before clipping."""
        grad_norm = self.step.clip_and_apply([plane.grad for plane in self.step.planes])
        if self.rounds_in_update:
            # A compiled update rounds the new weights in the kernel that computes them.
            for plane in self.step.planes:
                plane.round()
        self._zero_gradients()
        return grad_norm

    def applied(self) -> None:
        """Note that the next micro-step begins new sums, and that the update rounded the weights it wrote."""
        self.begins_sums = bool(self._totals)
        if self.rounds_in_update:
            self._rounded_versions = self._weight_versions()


def can_fuse_gradients(step: Step, on_cuda: bool) -> bool:
    """Return whether a step's matrix products can add gradients to the planes, and save time by doing so.

    See `monograph.ops.fused_gradients`.
    """
    # A hook may read a gradient, and autograd does not get the gradients that products add.
    has_hooks = any(
        p._backward_hooks or p._post_accumulate_grad_hooks for p in step.model.parameters()
    )
    return not has_hooks and fuses_gradients(
        type(step.model), step.loss, step.precision.name, on_cuda
    )


def fuses_gradients(model: type[nn.Module], loss: Loss, precision: str, on_cuda: bool) -> bool:
    """Return whether a step of this kind adds gradients to the planes by its matrix products.

    Args:
        model: the model's class.
        loss: the loss.
        precision: the compute precision, as in `Precision.name`.
        on_cuda: whether the products are computed on a GPU.
    """
    # A CPU computes separate siblings faster, and cannot add bf16 products to fp32 numbers.
    device_can = on_cuda and precision in ("bf16", "fp16", "fp8_head")
    # A caller's own model or loss may read gradients, too, which autograd would not get.
    reads_no_gradients = type(loss) in (TokenLoss, MtpLoss) and may_fuse(model)
    return device_can and reads_no_gradients
