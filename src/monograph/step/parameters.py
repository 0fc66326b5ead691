"""Say what a training step asks of its parameters: where they are, and how their gradients and
updates are made.

A step computes the equation of an update (`step.py`). Everything about it that depends on where the
parameters are is a method here, and each engine implements them in a class of its own:

    step/on_device.py            one module on one device       `OnDevice`
    ensemble/stacked.py          N members in one stack         `Stacked`
    stream/parameters.py         stages that come and go        `InStages`
    distributed/replicated.py    a copy on every rank (DDP)     `Replicas`
    distributed/sharded.py       rows on every rank (FSDP2)     `Shards`
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
from monograph.graph.lora import kept_state
from monograph.loss import counted, counts, pair
from monograph.optim import Plane
from monograph.schedule import factor_at

if TYPE_CHECKING:
    from monograph.step.step import Step

Sums = tuple[Tensor, Tensor]  # sum of losses, and number of targets
Rates = float | tuple[float, ...]  # the learning rate, or one for each member


class Parameters(ABC):
    """The trainable parameters of one step.

    What is implemented here is right for every engine that has no reason of its own.

    Attributes:
        step: the step; it is known from `place` on.
        device: the device that computes; None: that of the planes.
        staged: whether a pass goes through the model stage by stage, so that it never is on the
            device as a whole.
        replays: whether a recorded micro-step may be replayed.
        differentiable: whether `sums` may be differentiated outside of `accumulate`.
        counters: tensors of a state in addition to the step's own counters, by name.
        frozen: which members are never updated again, bool [N].
    """

    step: Step
    device: torch.device | None = None
    staged = False
    replays = True
    differentiable = True
    frozen: Tensor | None = None

    def __init__(self) -> None:
        self.counters: Mapping[str, Tensor] = {}

    # ── where they are ──────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def place(self, step: Step) -> list[Plane]:
        """Move the step's trainable parameters into planes, once; the step has a model, loss and
        optimizer by then.
        """

    def captured(self, scope: Scope) -> list[Compilable[..., Any]]:
        """Return the functions that a capture of this scope compiles."""
        step = self.step
        # In scope "blocks" the passes are functions of the blocks, and only the update is a
        # function of the step.
        return [step.forward, step.apply, step.evaluate] if scope == "whole" else [step.apply]

    # ── accumulate ──────────────────────────────────────────────────────────────────────────────

    def context(self) -> AbstractContextManager[None]:
        """In the block the loss can be called; the precision has a context in addition."""
        return nullcontext()

    def fusing(self) -> AbstractContextManager[None]:
        """In the block products may add gradients to the planes, see
        `monograph.ops.fused_gradients`.
        """
        return nullcontext()

    def sums(self, batch: object) -> Sums:
        """Return the batch's summed loss and the number of its targets."""
        return pair(self.step.loss(self.step.model, batch))

    def targets(self, batch: object) -> Tensor | None:
        """Return the number of the batch's targets, if the loss can count them without a forward
        pass.
        """
        loss = self.step.loss
        return counted(loss.count(batch), self.step.device) if counts(loss) else None

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
        """Forget the gradient since the last update."""

    def begin_again(self) -> None:
        """Get ready to repeat a pass that ran out of memory."""

    # ── apply ───────────────────────────────────────────────────────────────────────────────────

    def rates(self) -> Rates:
        """Return the learning rate of the current update, or one for each member."""
        return float(self.step.optim.lr * factor_at(self.step.schedule, self.step.index))

    def complete(self) -> None:
        """Do what is left when a window is complete, before its update."""

    @abstractmethod
    def apply(self) -> Tensor:
        """Clip and apply the accumulated gradient, and forget it; return its norm before clipping."""

    def add_squares(self, squares: Sequence[Tensor]) -> Tensor:
        """Add up the squares of all parts."""
        # They are added one by one, as the bits of a sum of many depend on the code that computes
        # it.
        return functools.reduce(torch.add, squares)

    def directed(self, grads: Sequence[Tensor], scale: Tensor) -> AbstractContextManager[None]:
        """In the block planes know what takes other ranks' rows, from their gradients and these
        gradients' factor.
        """
        return nullcontext()

    def update_plane(self, plane: Plane, total: Tensor, scale: Tensor, accepted: Tensor) -> None:
        """Update a plane by its summed gradient."""
        self.step.update_plane(plane, total, scale, accepted)

    # ── at rest ─────────────────────────────────────────────────────────────────────────────────

    def at_rest(self, *, written: bool) -> None:
        """Wait until the planes may be read, and if `written` also written."""

    def weights(self) -> dict[str, Tensor]:
        """Return the model's tensors that training changes, by name, tied ones once."""
        return kept_state(self.step.model)

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take note that other values were copied into the tensors that `weights` returned."""

    def whole(self) -> nn.Module | None:
        """Return a module of the same shapes, perhaps without values, if the step's own is sharded."""
        return None

    def assembled(self) -> AbstractContextManager[nn.Module]:
        """In the block give a module that can be called on its own, all of its weights in one
        place.
        """
        return nullcontext(self.step.model)

    def gathered(self) -> nn.Module:
        """Return a module with all weights as they are now, to be called on every rank; the same
        each time.
        """
        return self.step.model
