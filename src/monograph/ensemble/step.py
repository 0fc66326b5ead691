"""Lay out a step for N members: planes, losses, norms and rates have a leading member axis.

The members' optimizers are merged into one, in which a number that differs between members is a tensor [N].

Shapes: N members.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from monograph import compat
from monograph.ensemble.call import Members, Tensors
from monograph.ensemble.knobs import Knobs
from monograph.errors import UsageError
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.loss import SHARES, Loss, constant, counted, counts, pair
from monograph.optim import Kind, Optimizer, Plane, checked, planes, trainable
from monograph.optim.optimizer import Knob
from monograph.schedule import Schedule, factor_at
from monograph.step import Clip, Layout, Step, Update, closed
from monograph.step.layout import shared

# The optimizer's fields in which members may differ; all other fields shape the graph.
_OF_OPTIMIZER = ("lr", "betas", "eps", "weight_decay", "momentum")

_NUMBERS = ("lr", "weight_decay", "momentum", "eps")  # fields of a `Kind` in which members may differ


def optimizers(
    optim: Optimizer | type[Optimizer] | Sequence[Optimizer], knobs: Sequence[Mapping[str, Any]]
) -> list[Optimizer]:
    """Return one optimizer for each member.

    Args:
        optim: one optimizer for all, whose fields are replaced by the knobs of the same names; or one for each member.
        knobs: each member's knobs by name.

    Raises:
        UsageError: there are not as many optimizers as members, one is no optimizer, or they differ in a field that
            must be equal.
    """
    if isinstance(optim, list | tuple):
        optims = list(optim)
        if len(optims) != len(knobs):
            raise UsageError(f"{len(optims)} optimizers for {len(knobs)} members: pass one, or one each")
    else:
        first = optim() if isinstance(optim, type) and issubclass(optim, Optimizer) else optim
        if not isinstance(first, Optimizer):
            raise UsageError(f"optim = {optim!r}: expected one of this package's, such as monograph.AdamW(lr=1e-3)")
        names = [field.name for field in fields(first) if field.name in _OF_OPTIMIZER]
        optims = [replace(first, **{name: own[name] for name in names if name in own}) for own in knobs]
    for number, other in enumerate(optims):
        if type(other) is not type(optims[0]):
            raise UsageError(f"members 0 and {number} have different optimizers; those of one graph share its kind")
        # All other fields shape the graph, which all members share.
        shared = (field.name for field in fields(other) if field.name not in (*_OF_OPTIMIZER, "groups"))
        if odd := next((name for name in shared if getattr(other, name) != getattr(optims[0], name)), None):
            raise UsageError(
                f"members 0 and {number} differ in the optimizer's {odd}, which one graph shares; "
                f"a member may have its own {', '.join(_OF_OPTIMIZER)}"
            )
    return optims


def require_read(knobs: Sequence[Any], optim: Optimizer) -> None:
    """Refuse a knob that changes nothing, as tables would list it although its members are equal.

    Args:
        knobs: each member's knobs, after the member was built.
        optim: any member's optimizer.

    Raises:
        UsageError: nothing has read a knob, and the optimizer has no field of its name.
    """
    # The ensemble itself reads seeds and the optimizer's numbers.
    own = ["seed", *(field.name for field in fields(optim) if field.name in _OF_OPTIMIZER)]
    for member_knobs in knobs:
        unread = Knobs.unread(member_knobs) if isinstance(member_knobs, Knobs) else []
        if name := next((name for name in unread if name not in own), None):
            raise UsageError(
                f"the knob {name} changes nothing: the function that builds a member does not read it, and of "
                f"{type(optim).__name__} a member has its own {', '.join(own[1:])}; take it out, or read it"
            )


def seeds(knobs: Sequence[Mapping[str, Any]], device: torch.device) -> torch.Tensor:
    """Return the seeds of the members' dropout, [N] int64; by default a member's number.

    Raises:
        UsageError: a seed is no whole number.
    """
    seeds = [own.get("seed", number) for number, own in enumerate(knobs)]
    if odd := [seed for seed in seeds if not isinstance(seed, int)]:
        raise UsageError(f"seed = {odd[0]!r}: expected a whole number")
    return torch.tensor(seeds, dtype=torch.int64, device=device)


def _merged(optims: Sequence[Optimizer], device: torch.device) -> Optimizer:
    """Return one optimizer whose betas and eps are tensors [N] where the members' differ."""
    one, other = zip(*(optim.betas for optim in optims), strict=True)
    # The learning rate is not merged, as it changes with each update and is in `Step.lr` [N].
    betas: Any = _knob(one, device), _knob(other, device)
    eps: Any = _knob([optim.eps for optim in optims], device)
    return replace(optims[0], betas=betas, eps=eps)


def _kinds(of_members: Sequence[Mapping[str, Kind]], device: torch.device) -> dict[str, Kind]:
    """Return how each parameter is updated, by name; numbers are tensors [N] where the members' differ."""
    by_kind: dict[tuple[Kind, ...], Kind] = {}
    for of_parameter in zip(*(of.values() for of in of_members), strict=True):
        numbers = {name: _knob([getattr(kind, name) for kind in of_parameter], device) for name in _NUMBERS}
        by_kind.setdefault(of_parameter, of_parameter[0]._replace(**numbers))
    return {name: by_kind[tuple(of[name] for of in of_members)] for name in of_members[0]}


def _knob(values: Sequence[Any], device: torch.device) -> Knob:
    """Return the members' common value, or else a tensor [N] of their values, fp64."""
    if all(value == values[0] for value in values):
        return values[0]
    return torch.tensor(values, dtype=torch.float64, device=device)


class Stacked:
    """A step in which every member has its own loss, norm, clipping, rate and acceptance, independent of the others.

    Attributes:
        members: the members.
        optims: an optimizer for each member.
        schedules: a schedule for each member.
        each: whether every member has rows of its own.
        frozen: which members are never updated again, [N] bool.
        step: the step that trains them.
    """

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
        """Make the step; arguments as for `monograph.Ensemble`, with one optimizer and one schedule for each member."""
        self.members = members
        self.optims = [checked(o) for o in optims]
        self.schedules = schedules
        self.each = each
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
        # This is an attribute, as a capture replaces it by a compiled function.
        self.whole: Callable[[Any, Tensor], Tensor] = self._whole
        layout = Layout(
            planes=self._planes,
            captured=lambda step, scope: [*Layout().captured(step, scope), (self, "whole")],
            context=self._context,
            rates=self._rates,
            sums=lambda step, batch: self.sums(batch),
            targets=self._targets,
            accumulate=self._accumulate,
            counters={"frozen": self.frozen, "draw": members.draw},
            frozen=self.frozen,
        )
        # Numbers that differ between members become tensors [N]; equal ones stay numbers, which keeps the graph simple.
        merged = _merged(self.optims, device)
        self.step = Step(members.stack.module, loss=loss, optim=merged, clip=clip, precision=precision, layout=layout)

    def counters(self, member: int) -> dict[str, Tensor]:
        """Return one member's counters of the step, 0-d views by name."""
        own = self.step.layout.counters
        return {name: counter[member] for name, counter in self.step.counters.items() if name not in own}

    def update_whole(self, batch: Any) -> Update:
        """Do `accumulate(step, [batch])` and `update(step)`, in one graph where they are captured."""
        step = self.step
        self.members.stack.require_views(step.index)
        step.count_window([batch])
        lr = step.set_lr()
        with step.context():
            grad_norm = self.whole(shared(step, batch), step.loss_factor)
        self.members.draw += 1
        return closed(step, lr, grad_norm)

    def _whole(self, batch: Any, loss_factor: Tensor) -> Tensor:
        """Compute the gradient and update of a window of one micro-batch, whose gradient need not be kept to add to."""
        step = self.step
        buffers = self.members.buffers()

        def loss(parameters: Tensors) -> tuple[Tensor, tuple[Tensor, Tensor, Tensors]]:
            # A transform cannot write to tensors from outside, as it would to running means, so they are cloned.
            own = {name: buffer.clone() for name, buffer in buffers.items()}
            loss_sum, count = self.sums(batch, parameters | own)
            return step.scaled(loss_sum, loss_factor), (loss_sum.detach(), count, own)

        # Views are made here, as a graph would copy inputs that overlap and are written.
        parameters = {name: view for plane in step.planes for name, view in plane.views(plane.param)}
        # Gradients are results instead of `.grad`, so that the graph frees them like its other intermediates.
        grads, (loss_sum, count, written) = torch.func.grad(loss, has_aux=True)(parameters)
        for name, buffer in buffers.items():
            buffer.copy_(written[name])
        step.loss_sum.copy_(loss_sum)
        step.count.copy_(count)
        size = self.members.stack.size
        flat = [torch.cat([grads[slot.name].reshape(size, -1) for slot in p.slots], dim=-1) for p in step.planes]
        return step.clip_and_apply(flat)

    # ── the layout ──────────────────────────────────────────────────────────────────────────────

    def _planes(self, step: Step) -> list[Plane]:
        """Move the stacked parameters into planes [N, size]."""
        of_members = [optim.kinds(m) for optim, m in zip(self.optims, self.members.stack.members, strict=True)]
        made = planes(trainable(step.model), _kinds(of_members, self.frozen.device), lead=1)
        return [step.begun(plane) for plane in made]

    @contextmanager
    def _context(self, step: Step) -> Iterator[None]:
        """In the block the members can be called together, and a graph is compiled with their budget of activations.

        Raises:
            UsageError: activations are to be recomputed, but the step is not captured.
        """
        if self.kept_share < 1 and step.scope == "none" and torch.is_grad_enabled():
            raise UsageError("an ensemble recomputes only in captured graphs: engine.capture(window) first")
        with self.members.context(), compat.activations_kept(self.kept_share):
            yield

    def _rates(self, step: Step) -> tuple[float, ...]:
        pairs = zip(self.optims, self.schedules, strict=True)
        return tuple(optim.lr * factor_at(schedule, step.index) for optim, schedule in pairs)

    def sums(self, batch: Any, parameters: Tensors | None = None) -> tuple[Tensor, Tensor]:
        """Return the members' sums of losses and numbers of targets, [N] each."""

        def of_one(module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
            return pair(self.step.loss(module, batch))

        size = self.members.stack.size
        balanced = self.step.balances and SHARES in batch
        if balanced and not self.each:  # each member has shares of its own, even of rows that all get
            batch = {name: rows if name == SHARES else rows.expand(size, *rows.shape) for name, rows in batch.items()}
        loss_sum, count = self.members(of_one, batch, each=self.each or balanced, parameters=parameters)
        return loss_sum, constant(count)  # inside vmap, no tensor says whether it requires a gradient

    def _targets(self, step: Step, batch: Any) -> Tensor | None:
        """Return the targets of each member's batch, [N], if the loss can count them."""
        loss, device = step.loss, step.device
        if not counts(loss):
            return None
        if not self.each:
            return counted(loss.count(batch), device).expand(self.members.stack.size)
        # It is vmapped, as a loss counts one member's batch and may index it by position.
        return torch.vmap(lambda batch: counted(loss.count(batch), device))(batch)

    def _accumulate(self, step: Step, batches: Sequence[Any]) -> None:
        self.members.stack.require_views(step.index)
        step.link()
        for batch in batches:
            step.micro_step(batch)
            self.members.draw += 1  # the next micro-batch drops other elements
