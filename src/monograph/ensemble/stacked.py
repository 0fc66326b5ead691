"""Keep the parameters of N members in one stack: planes, losses, norms and rates have a leading
member axis.

Shapes: N members.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from monograph import compat
from monograph.ensemble.call import Members, Tensors
from monograph.ensemble.optimizers import kinds
from monograph.errors import UsageError
from monograph.graph.compilable import Compilable, Scope
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.loss import SHARES, Batch, constant, counted, counts, pair
from monograph.optim import Optimizer, Plane, checked, planes, trainable
from monograph.optim.formats import FORMATS
from monograph.schedule import Schedule, factor_at
from monograph.step import OnDevice, Step, Update, finish_update


class Stacked(OnDevice):
    """The parameters of N members: each has its own loss, norm, clipping, rate and acceptance,
    whatever the others do.

    Attributes:
        members: the members.
        optims: an optimizer for each member.
        schedules: a schedule for each member.
        each: whether every member has rows of its own.
        optim: the first member's optimizer, for the step, which asks it what all members share.
        frozen: which members are never updated again, [N] bool.
    """

    differentiable = False  # a gradient inside of vmap is not one of the stack

    def __init__(
        self,
        members: Members,
        *,
        optims: Sequence[Optimizer],
        schedules: Sequence[Schedule],
        precision: Precision | None,
        remat: Remat.Budget,
        each: bool,
    ):
        """Take what `monograph.Ensemble` takes, with one optimizer and one schedule for each
        member.
        """
        super().__init__()
        self.members = members
        self.optims = [checked(o) for o in optims]
        self.schedules = schedules
        self.each = each
        if precision is not None and precision.name == "fp8":
            raise UsageError("an ensemble has no fp8 products: torch cannot batch them; take bf16")
        if not FORMATS[optims[0].state].exact:
            raise UsageError(
                f"an ensemble keeps its moments in fp32, not {optims[0].state!r}: leave the optimizer's state"
            )
        if not isinstance(remat, Remat.Budget):
            raise UsageError(f"an ensemble recomputes by Remat.Budget(share), not {remat}")
        self.kept_share = remat.fraction
        device = members.seeds.device
        compat.quiet_layout_of_stacked_gradients()
        self.frozen: Tensor = torch.zeros(members.stack.size, dtype=torch.bool, device=device)
        self.update_in_one = Compilable(self._update_in_one)
        self.counters = {"frozen": self.frozen, "draw": members.draw}
        self.optim = self.optims[0]

    def counters_of(self, member: int) -> dict[str, Tensor]:
        """Return one member's counters of the step, 0-d views by name."""
        return {
            name: counter[member]
            for name, counter in self.step.counters.items()
            if name not in self.counters
        }

    def update_whole(self, batch: Batch) -> Update:
        """Do `accumulate(step, [batch])` and `update(step)`, in one graph where they are captured."""
        step = self.step
        self.members.stack.require_views(step.index)
        step.count_window([batch])
        lr = step.set_lr()
        with step.context():
            grad_norm = self.update_in_one(step.with_shares(batch), step.loss_factor)
        self.members.draw += 1
        return finish_update(step, lr, grad_norm)

    def _update_in_one(self, batch: Batch, loss_factor: Tensor) -> Tensor:
        """Compute the gradient and update of a window of one micro-batch, whose gradient need not
        be kept to add to.
        """
        step = self.step
        buffers = self.members.buffers()

        def loss(parameters: Tensors) -> tuple[Tensor, tuple[Tensor, Tensor, Tensors]]:
            # A transform cannot write to tensors from outside, as it would to running means, so
            # they are cloned.
            own = {name: buffer.clone() for name, buffer in buffers.items()}
            loss_sum, count = self.sums(batch, parameters | own)
            return step.scaled_loss(loss_sum, loss_factor), (loss_sum.detach(), count, own)

        # Views are made here, as a graph would copy inputs that overlap and are written.
        parameters = {
            name: view for plane in step.planes for name, view in plane.views(plane.param)
        }
        # Gradients are results instead of `.grad`, so that the graph frees them like its other
        # intermediates.
        grads, (loss_sum, count, written) = torch.func.grad(loss, has_aux=True)(parameters)
        for name, buffer in buffers.items():
            buffer.copy_(written[name])
        step.loss_sum.copy_(loss_sum)
        step.count.copy_(count)
        size = self.members.stack.size
        flat = [
            torch.cat([grads[slot.name].reshape(size, -1) for slot in p.slots], dim=-1)
            for p in step.planes
        ]
        return step.clip_and_apply(flat)

    # ── the parameters ──────────────────────────────────────────────────────────────────────────

    def place(self, step: Step) -> list[Plane]:
        """Move the stacked parameters into planes [N, size]."""
        self.step = step
        of_members = [
            optim.kinds(m) for optim, m in zip(self.optims, self.members.stack.members, strict=True)
        ]
        # Numbers that differ between members become tensors [N]; equal ones stay numbers, which
        # keeps the graph simple.
        made = planes(trainable(step.model), kinds(of_members, self.frozen.device), lead=1)
        return [step.prepare_plane(plane) for plane in made]

    def captured(self, scope: Scope) -> list[Compilable[..., Any]]:
        """Return the functions of the step, and the update of a window of one micro-batch."""
        return [*super().captured(scope), self.update_in_one]

    @contextmanager
    def context(self) -> Iterator[None]:
        """In the block the members can be called together, and a graph is compiled with their
        budget of activations.

        Raises:
            UsageError: activations are to be recomputed, but the step is not captured.
        """
        if self.kept_share < 1 and self.step.scope == "none" and torch.is_grad_enabled():
            raise UsageError(
                "an ensemble recomputes only in captured graphs: engine.capture(window) first"
            )
        with self.members.context(), compat.limit_saved_activations(self.kept_share):
            yield

    def rates(self) -> tuple[float, ...]:
        """Return each member's rate."""
        pairs = zip(self.optims, self.schedules, strict=True)
        return tuple(optim.lr * factor_at(schedule, self.step.index) for optim, schedule in pairs)

    def sums(self, batch: Any, parameters: Tensors | None = None) -> tuple[Tensor, Tensor]:
        """Return the members' sums of losses and numbers of targets, [N] each."""

        def of_one(module: nn.Module, batch: object) -> tuple[Tensor, Tensor]:
            return pair(self.step.loss(module, batch))

        size = self.members.stack.size
        balanced = self.step.balances and SHARES in batch
        # Each member has shares of its own, even of rows that all get.
        if balanced and not self.each:
            batch = {
                name: rows if name == SHARES else rows.expand(size, *rows.shape)
                for name, rows in batch.items()
            }
        loss_sum, count = self.members(
            of_one, batch, each=self.each or balanced, parameters=parameters
        )
        # Inside vmap, no tensor says whether it requires a gradient.
        return loss_sum, constant(count)

    def targets(self, batch: object) -> Tensor | None:
        """Return the targets of each member's batch, [N], if the loss can count them."""
        loss = self.step.loss
        device = self.step.device
        if not counts(loss):
            return None
        if not self.each:
            return counted(loss.count(batch), device).expand(self.members.stack.size)
        # It is vmapped, as a loss counts one member's batch and may index it by position.
        return torch.vmap(lambda batch: counted(loss.count(batch), device))(batch)

    def accumulate(self, batches: Sequence[object]) -> None:
        """Add the members' gradients of each micro-batch to the planes."""
        step = self.step
        self.members.stack.require_views(step.index)
        step.link()
        for batch in batches:
            step.micro_step(batch)
            self.members.draw += 1  # the next micro-batch drops other elements
