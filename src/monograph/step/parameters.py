"""Define what a training step needs from its parameters: their place, gradients and updates.

A step computes the equation of an update (`step.py`). What depends on where the parameters live is
a method of `Parameters`, and each engine has a subclass of it:

    step/on_device.py                 one module on one device       `OnDevice`
    ensemble/stacked_parameters.py    N members in one stack         `StackedParameters`
    stream/parameters.py              stages that come and go        `InStages`
    distributed/replicated.py         a copy on every rank (DDP)     `Replicas`
    distributed/sharded.py            rows on every rank (FSDP2)     `Shards`
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from monograph.graph.compilable import Compilable, Scope
from monograph.graph.lora import checkpoint_state
from monograph.loss import check_result, count_tensor, has_count
from monograph.optim import Plane
from monograph.schedule import factor_at

if TYPE_CHECKING:
    from monograph.step.step import Step

Sums = tuple[Tensor, Tensor]  # of a batch: the sum of its losses, and the number of its targets
LearningRates = float | tuple[float, ...]  # the learning rate, or each member's learning rate


class Parameters(ABC):
    """The trainable parameters of one step, and what the step does with them.

    The methods implemented here are defaults, which an engine overrides where it differs.

    Attributes:
        step: the step; set by `place`.
        device: the device that computes; None: the planes' device.
        staged: whether a pass goes through the model stage by stage, so that the whole model is
            never on the device.
        replays: whether a recorded micro-step may be replayed.
        replays_update: whether a captured update is recorded and replayed, too. That pays where the
            device computes it faster than the host launches its kernels.
        begins_sums: whether the next micro-step begins the sums of gradients. Their buffers then have
            numbers of an earlier window, which it replaces (`monograph.ops.unwritten`). Otherwise it
            adds to the buffers.
        differentiable: whether `sums` may be differentiated outside of `accumulate`.
        counters: state tensors in addition to the step's own counters, by name.
        frozen: which members of an ensemble are never updated again, bool [N]; None: no member is.
    """

    step: Step
    device: torch.device | None = None
    staged = False
    replays = True
    replays_update = False
    begins_sums = False
    differentiable = True
    frozen: Tensor | None = None

    def __init__(self) -> None:
        self.counters: Mapping[str, Tensor] = {}

    # ── where they are ──────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def place(self, step: Step) -> list[Plane]:
        """Move the step's trainable parameters into planes, and return the planes.

        A step calls this once, after setting its model, loss, optimizer and precision.
        """

    def captured(self, scope: Scope) -> list[Compilable[..., Any]]:
        """Return the functions that a capture of this scope compiles."""
        step = self.step
        if scope == "whole":
            return [step.forward, step.apply, step.evaluate]
        # In scope "blocks" the blocks themselves are compiled for the passes.
        return [step.apply]

    # ── accumulate ──────────────────────────────────────────────────────────────────────────────

    def context(self) -> AbstractContextManager[None]:
        """Return a context in which the loss can be called; the step adds the precision's context."""
        return nullcontext()

    def fused_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which matrix products may add gradients to the planes themselves.

        See `monograph.ops.fused_gradients`. By default autograd adds them.
        """
        return nullcontext()

    def sums(self, batch: object) -> Sums:
        """Return the batch's summed loss and the number of its targets."""
        return check_result(self.step.loss(self.step.model, batch))

    def targets(self, batch: object) -> Tensor | None:
        """Return the number of the batch's targets; None if the loss must run to count them."""
        loss = self.step.loss
        return count_tensor(loss.count(batch), self.step.device) if has_count(loss) else None

    def begin(self) -> None:
        """Get ready for a window, before its micro-batches are cut; `complete` is its counterpart."""

    @abstractmethod
    def accumulate(self, batches: Sequence[object]) -> None:
        """Add the gradient of a window's micro-batches."""

    @abstractmethod
    def score(self, batches: Iterable[object]) -> list[Sums]:
        """Return the sums of each micro-batch, without gradients."""

    @abstractmethod
    def discard(self) -> None:
        """Reset the gradient accumulated since the last update."""

    def begin_again(self) -> None:
        """Get ready to repeat a pass that ran out of memory."""

    # ── apply ───────────────────────────────────────────────────────────────────────────────────

    def rates(self) -> LearningRates:
        """Return the learning rate of the current update, or each member's."""
        return float(self.step.optim.lr * factor_at(self.step.schedule, self.step.index))

    def complete(self) -> None:
        """Finish the accumulation of a window, before its update."""

    @abstractmethod
    def apply(self) -> Tensor:
        """Clip, apply and reset the accumulated gradient; return its norm before clipping."""

    def applied(self) -> None:
        """Note on the host that `apply` has been called, or replayed, for a window."""

    def add_squares(self, squares: Sequence[Tensor]) -> Tensor:
        """Return the sum of all parts' sums of squares."""
        # They are added one by one: the bits of `torch.sum` depend on the kernel that computes it.
        return functools.reduce(torch.add, squares)

    def with_directions(
        self, grads: Sequence[Tensor], scale: Tensor
    ) -> AbstractContextManager[None]:
        """Return a context in which the planes can be updated.

        Muon's direction of a matrix depends on all of its rows, and a sharded plane has only this rank's.
        Sharded parameters therefore fetch the directions here, and others have nothing to do.

        Args:
            grads: each plane's summed gradient.
            scale: factor of the gradients.
        """
        return nullcontext()

    def update_plane(self, plane: Plane, total: Tensor, scale: Tensor, accepted: Tensor) -> None:
        """Update a plane by its summed gradient `total`; see `Step.update_plane`."""
        self.step.update_plane(plane, total, scale, accepted)

    # ── between updates ─────────────────────────────────────────────────────────────────────────

    def wait_for_planes(self, *, to_write: bool) -> None:
        """Wait until the planes may be read, and with `to_write` also until they may be written."""

    def weights(self) -> dict[str, Tensor]:
        """Return the model's tensors that training changes, by name; tied tensors once."""
        return checkpoint_state(self.step.model)

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over the values that a caller has written into the tensors that `weights` returned.

        Nothing is to be done if these tensors are the planes' own memory.
        """

    def unsharded_module(self) -> nn.Module | None:
        """Return a module with tensors of full shapes, perhaps without values.

        None: the step's own module is not sharded.
        """
        return None

    def assembled(self) -> AbstractContextManager[nn.Module]:
        """Return a context that gives a module with all weights in one place, ready to call."""
        return nullcontext(self.step.model)

    def gathered(self) -> nn.Module:
        """Return a module with all current weights, the same object each time; call on every rank."""
        return self.step.model
