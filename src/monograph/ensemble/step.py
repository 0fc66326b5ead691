"""The training step of N members: the step of one, whose tensors have a leading member axis.

Shapes: N members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from monograph import compat
from monograph.ensemble import numbers
from monograph.ensemble.call import Members, Tensors
from monograph.errors import UsageError
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.loss import CountedLoss, Loss, counted, pair
from monograph.optim import Optimizer, Plane, checked, planes, trainable
from monograph.schedule import Schedule, factor_at
from monograph.step import Clip, Step, Update, closed


class EnsembleStep(Step):
    """A step in which every member has its own loss, norm, clipping, rate and acceptance: none reads another's.

    Attributes:
        members: what it trains.
        frozen: [N] bool, members that are never updated again.
    """

    CAPTURED: tuple[str, ...] = (*Step.CAPTURED, "whole")

    def __init__(
        self,
        members: Members,
        *,
        loss: Loss,
        optims: Sequence[Optimizer],
        schedules: Sequence[Schedule],
        clip: float | Clip | None,
        precision: Precision | None,
        remat: Remat.Budget,
        each: bool,
    ):
        """Prepare a step; the arguments are those of `monograph.Ensemble`, one optimizer and one schedule a member."""
        self.members, self.optims, self.schedules, self.each = members, [checked(o) for o in optims], schedules, each
        if precision is not None and precision.name == "fp8":
            raise UsageError("an ensemble has no fp8 products: torch cannot batch them; take bf16")
        if optims[0].state != "fp32":
            raise UsageError(
                f"an ensemble keeps its moments in fp32, not {optims[0].state!r}: leave the optimizer's state"
            )
        if not isinstance(remat, Remat.Budget):
            raise UsageError(f"an ensemble recomputes by Remat.Budget(share), not {remat}")
        self.kept_share = remat.fraction
        device = members.seeds.device
        compat.quiet_layout_of_stacked_gradients()
        self.frozen = torch.zeros(members.stack.size, dtype=torch.bool, device=device)
        merged = numbers.merged(self.optims, device)
        super().__init__(members.stack.module, loss=loss, optim=merged, clip=clip, precision=precision)
        self.whole: Callable[[Any, Tensor], Tensor] = self._whole

    def laid_out(self) -> list[Plane]:
        """The stacked parameters in planes [N, size]."""
        of_members = [optim.kinds(m) for optim, m in zip(self.optims, self.members.stack.members, strict=True)]
        made = planes(trainable(self.model), numbers.kinds(of_members, self.frozen.device), lead=1)
        return [self.begun(plane) for plane in made]

    @contextmanager
    def context(self) -> Iterator[None]:
        """The precision's context and the members', in which a graph is compiled with its budget.

        Raises:
            UsageError: something is to be recomputed and nothing is captured.
        """
        if self.kept_share < 1 and self.scope == "none" and torch.is_grad_enabled():
            raise UsageError("an ensemble recomputes only in captured graphs: engine.capture(window) first")
        with self.members.context(), super().context(), compat.activations_kept(self.kept_share):
            yield

    @property
    def of_members(self) -> dict[str, Tensor]:
        """The counters of a step, [N] each."""
        return super().counters

    @property
    def counters(self) -> dict[str, Tensor]:
        """Those, who is frozen, and how many passes dropout has seen."""
        return self.of_members | {"frozen": self.frozen, "draw": self.members.draw}

    def _micro_step(self, batch: Any) -> None:
        super()._micro_step(batch)
        self.members.draw += 1

    def _whole(self, batch: Any, seed: Tensor) -> Tensor:
        """Gradient and update of a window of one micro-batch: what is summed over one need not be kept."""
        buffers = dict(self.model.named_buffers())

        def loss(parameters: Tensors) -> tuple[Tensor, tuple[Tensor, Tensor, Tensors]]:
            # What a transform is given from outside cannot be written in it, as running means are.
            own = {name: buffer.clone() for name, buffer in buffers.items()}
            loss_sum, count = self.summed(batch, parameters | own)
            return self.scaled(loss_sum, seed), (loss_sum.detach(), count, own)

        # Views that are made here: a graph copies inputs that overlap and are written.
        parameters = {name: view for plane in self.planes for name, view in plane.views(plane.param)}
        grads, (loss_sum, count, written) = torch.func.grad(loss, has_aux=True)(parameters)
        for name, buffer in buffers.items():
            buffer.copy_(written[name])
        self.loss_sum.copy_(loss_sum)
        self.count.copy_(count)
        return self.apply_([torch.cat([grads[slot.name].flatten(1) for slot in p.slots], dim=-1) for p in self.planes])

    def summed(self, batch: Any, parameters: Tensors | None = None) -> tuple[Tensor, Tensor]:
        """Losses and targets of the members, [N] each."""

        def of_one(module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
            return pair(self.loss(module, batch))

        loss_sum, count = self.members(of_one, batch, each=self.each, parameters=parameters)
        return loss_sum, count

    def count_targets(self, batch: Any) -> Tensor | None:
        """The targets of each member's batch, [N], if the loss can count them."""
        if not isinstance(self.loss, CountedLoss):
            return None
        if not self.each:
            return counted(self.loss.count(batch), self.device).expand(self.members.stack.size)
        of_one = self.loss.count
        count: Tensor = torch.vmap(lambda batch: counted(of_one(batch), self.device))(batch)
        return count

    def count_window(self, batches: Sequence[Any]) -> None:
        """See `Step.count_window`; the members' own parameters are compared, too."""
        self.members.stack.require_views(self.index)
        super().count_window(batches)

    def set_lr(self) -> tuple[float, ...]:
        """Fill in the members' learning rates."""
        pairs = zip(self.optims, self.schedules, strict=True)
        lr = tuple(optim.lr * factor_at(schedule, self.index) for optim, schedule in pairs)
        self.lr.copy_(torch.tensor(lr, dtype=torch.float64), non_blocking=True)
        return lr

    def accepts(self, grad_norm: Tensor) -> Tensor:
        """Which members' gradients make an update."""
        return super().accepts(grad_norm) & ~self.frozen


def update_whole(step: EnsembleStep, batch: Any) -> Update:
    """`accumulate(step, [batch])` and `update(step)` in one: where both are captured, in one graph."""
    step.count_window([batch])
    lr = step.set_lr()
    with step.context():
        grad_norm = step.whole(batch, step.seed)
    step.members.draw += 1
    return closed(step, lr, grad_norm)
