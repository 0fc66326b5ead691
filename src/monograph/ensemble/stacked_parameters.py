"""What a training step needs from the parameters of N members that are stacked.

Planes (flat tensors of many parameters), losses, norms and learning rates have a leading member axis.

Shapes: N members.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from monograph import compat
from monograph.ensemble.call import MemberCaller, Tensors
from monograph.ensemble.optimizers import merge_kinds
from monograph.errors import UsageError
from monograph.graph.compilable import Compilable, Scope
from monograph.graph.lora import Factor
from monograph.graph.member_factors import MemberFactor, MemberGradient
from monograph.graph.precision import FP8, Precision
from monograph.graph.remat import Remat
from monograph.loss import SHARES, Batch, check_result, count_tensor, has_count, require_constant
from monograph.ops.fused_gradients import fused_gradients
from monograph.optim import Muon, Optimizer, Plane, planes, require_optimizer, trainable
from monograph.optim.formats import FORMATS
from monograph.schedule import Schedule, factor_at
from monograph.step import OnDevice, Step, Update, finish_update, prepared_loss

# What a differentiated function returns: the loss, and (sum of losses, count, new buffers). It has a name,
# since Dynamo cannot trace the definition of a function whose annotation it would have to evaluate.
_LossAndSums = tuple[Tensor, tuple[Tensor, Tensor, Tensors]]


class StackedParameters(OnDevice):
    """The parameters of N members, as a step uses them.

    Each member has its own loss, norm, clipping and learning rate, and its updates are accepted or
    skipped independently of the other members.

    Attributes:
        caller: calls functions for all members at once.
        optims: an optimizer for each member.
        schedules: a schedule for each member.
        each: whether each member has its own rows.
        optim: the first member's optimizer. The step reads from it what is the same for all members.
        kept_share: the share of all layers' activations that a captured graph keeps.
        frozen: which members are never updated again, [N] bool.
        gradient_and_update: computes the gradient of a window of one micro-batch and updates by it.
            It can be captured as one graph.
        counters: state tensors of the ensemble as a whole, by name.
    """

    differentiable = False  # a gradient inside vmap is not a gradient of the stack
    # Members are small, so launching the kernels of an update takes longer than running them.
    replays_update = True

    def __init__(
        self,
        caller: MemberCaller,
        *,
        optims: Sequence[Optimizer],
        schedules: Sequence[Schedule],
        precision: Precision | None,
        remat: Remat.Budget,
        each: bool,
    ):
        """Make the parameters. The arguments are those of `monograph.Ensemble`, with one optimizer
        and one schedule for each member.

        Raises:
            UsageError: an ensemble does not have this precision, optimizer state or recomputation.
        """
        super().__init__()
        self.caller = caller
        self.optims = [require_optimizer(optim) for optim in optims]
        self.schedules = schedules
        self.each = each
        if precision is not None and precision.name in FP8:
            raise UsageError("an ensemble has no fp8 products: torch cannot batch them; take bf16")
        if not FORMATS[optims[0].state].exact:
            raise UsageError(
                f"an ensemble keeps its moments in fp32, not {optims[0].state!r}: leave the optimizer's state"
            )
        if not isinstance(remat, Remat.Budget):
            raise UsageError(f"an ensemble recomputes by Remat.Budget(share), not {remat}")
        self.kept_share = remat.fraction
        device = caller.seeds.device
        compat.quiet_layout_of_stacked_gradients()
        self.frozen: Tensor = torch.zeros(caller.stack.size, dtype=torch.bool, device=device)
        self.gradient_and_update = Compilable(self._gradient_and_update)
        self.counters = {"frozen": self.frozen, "draw": caller.draw}
        self.optim = self.optims[0]

    def member_counters(self, member: int) -> dict[str, Tensor]:
        """Return one member's counters, 0-d views by name. Counters of the ensemble as a whole are left out."""
        return {
            name: counter[member]
            for name, counter in self.step.counters.items()
            if name not in self.counters
        }

    def accumulate_and_update(self, batch: Batch) -> Update:
        """Compute the gradient of a window of one micro-batch, and update by it.

        If the step is captured, both are one graph.
        """
        step = self.step
        self.caller.stack.require_views(step.index)
        with prepared_loss(step, [batch]):
            step.count_window([batch])
            lr = step.set_lr()
            with step.context():
                grad_norm = self.gradient_and_update(step.with_shares(batch), step.loss_factor)
        self.caller.draw += 1
        return finish_update(step, lr, grad_norm)

    def _gradient_and_update(self, batch: Batch, loss_factor: Tensor) -> Tensor:
        """Compute the gradient of a window of one micro-batch, and update by it.

        The gradient is not stored, as no other micro-batch's gradient is added to it.

        Returns:
            Each member's gradient norm, [N].
        """
        step = self.step
        buffers = self.caller.buffers()
        # Running means are written by forward passes. But inside torch.func.grad, a tensor from outside
        # cannot be written, so the passes write to clones, which are copied back.

        def loss(parameters: Tensors) -> _LossAndSums:
            clones = {name: buffer.clone() for name, buffer in buffers.items()}
            loss_sum, count = self.sums(batch, parameters | clones)
            return step.scaled_loss(loss_sum, loss_factor), (loss_sum.detach(), count, clones)

        # The parameters are made here, as views of the planes. If the graph got both as inputs, it would
        # copy them, as they overlap and are written.
        parameters = {
            name: view for plane in step.planes for name, view in plane.views(plane.param)
        }
        # Gradients are returned, not stored in `.grad`, so that the graph frees them like its other
        # intermediates.
        grads, (loss_sum, count, new_buffers) = torch.func.grad(loss, has_aux=True)(parameters)
        for name, buffer in buffers.items():
            buffer.copy_(new_buffers[name])
        step.loss_sum.copy_(loss_sum)
        step.count.copy_(count)
        members = self.caller.stack.size
        plane_grads = [
            torch.cat([grads[placed.name].reshape(members, -1) for placed in plane.placed], dim=-1)
            for plane in step.planes
        ]
        return step.clip_and_apply(plane_grads)

    # ── the parameters ──────────────────────────────────────────────────────────────────────────

    def place(self, step: Step) -> list[Plane]:
        """Move the stacked parameters into planes [N, size]."""
        self.step = step
        member_kinds = [
            step.kinds_of(member, optim)
            for optim, member in zip(self.optims, self.caller.stack.members, strict=True)
        ]
        padded = self.caller.stack.padded_parameters()
        if padded and isinstance(self.optim, Muon):
            raise UsageError(
                f"{padded[0]} has another rank in some members, and Muon's steps depend on a matrix's shape: take "
                "AdamW, or one rank"
            )
        kinds = merge_kinds(member_kinds, self.frozen.device)
        stacked_planes = planes(trainable(step.model), kinds, lead=1)
        return [step.prepare_plane(plane) for plane in stacked_planes]

    def fuse_gradients_of_adapters(self) -> None:
        """Round adapters once for an update, and let their products add gradients to the planes.

        In a captured graph, a layer's adapters then have no other kernels than products
        (`monograph.graph.member_factors`). The gradients of experts' adapters are left to autograd.
        """
        factors = {
            f"{path}.weight": module
            for path, module in self.step.model.named_modules()
            if isinstance(module, Factor)
        }
        for plane in self.step.planes:
            if not any(placed.name in factors for placed in plane.placed):
                continue
            plane.rounded = torch.empty_like(plane.param, dtype=self.step.precision.dtype)
            # `.data` has a version of its own, so that writing it makes no gradient stale for autograd.
            totals = plane.grad.data
            for placed, (name, weight) in zip(
                plane.placed, plane.views(plane.rounded), strict=True
            ):
                if name in factors:
                    # The class of the module is changed, so that all references to it stay valid.
                    gradient = MemberGradient(weight.data, totals, placed.offset)
                    factors[name].__class__ = MemberFactor
                    factors[name].member_gradient = gradient  # type: ignore[assignment]
        self._fuses_gradients = bool(factors)

    def fused_gradients(self) -> AbstractContextManager[None]:
        """Make a context in which adapters' products add their gradients to the planes, if this was chosen."""
        return fused_gradients() if self._fuses_gradients else nullcontext()

    def captured(self, scope: Scope) -> list[Compilable[..., Any]]:
        """Return the functions of the step that are captured, `gradient_and_update` included."""
        return [*super().captured(scope), self.gradient_and_update]

    @contextmanager
    def context(self) -> Iterator[None]:
        """Make a context in which `caller` can be called, and in which graphs that are compiled keep
        `kept_share` of the activations.

        Raises:
            UsageError: activations are to be recomputed, but the step is not captured.
        """
        # Only a compiler divides a graph into what is kept and what is recomputed.
        if self.kept_share < 1 and self.step.scope == "none" and torch.is_grad_enabled():
            raise UsageError(
                "an ensemble recomputes only in captured graphs: engine.capture(window) first"
            )
        with self.caller.context(), compat.limit_saved_activations(self.kept_share):
            yield

    def rates(self) -> tuple[float, ...]:
        """Return each member's learning rate."""
        # Most members share a schedule. It is called once for all of them, because a hundred calls would
        # take longer than to launch the update.
        factors = dict[int, float]()
        for schedule in self.schedules:
            if id(schedule) not in factors:
                factors[id(schedule)] = factor_at(schedule, self.step.index)
        pairs = zip(self.optims, self.schedules, strict=True)
        return tuple(optim.lr * factors[id(schedule)] for optim, schedule in pairs)

    def sums(self, batch: Any, parameters: Tensors | None = None) -> tuple[Tensor, Tensor]:
        """Return the members' sums of losses and numbers of targets, [N] each.

        Args:
            batch: a micro-batch.
            parameters: parameters and buffers that replace those of the stack, by name; None: none.
        """

        def member_sums(module: nn.Module, batch: object) -> tuple[Tensor, Tensor]:
            return check_result(self.step.loss(module, batch))

        size = self.caller.stack.size
        # The weights that balance a model's experts (`monograph.loss.SHARES`) are [N, ...], even if all
        # members get the same rows. Then the rows are expanded, so that all of the batch is [N, ...].
        has_shares = self.step.balances and SHARES in batch
        if has_shares and not self.each:
            batch = {
                name: rows if name == SHARES else rows.expand(size, *rows.shape)
                for name, rows in batch.items()
            }
        loss_sum, count = self.caller(
            member_sums, batch, each=self.each or has_shares, parameters=parameters
        )
        # The count is checked here, as a tensor inside vmap does not say whether it requires a
        # gradient.
        return loss_sum, require_constant(count)

    def targets(self, batch: object) -> Tensor | None:
        """Return the number of targets in each member's batch, [N]; None: the loss cannot count them."""
        loss = self.step.loss
        device = self.step.device
        if not has_count(loss):
            return None
        if not self.each:
            return count_tensor(loss.count(batch), device).expand(self.caller.stack.size)
        # A loss counts one member's batch and may index it by position, so its count is vmapped.
        return torch.vmap(lambda batch: count_tensor(loss.count(batch), device))(batch)

    def accumulate(self, batches: Sequence[object]) -> None:
        """Add the members' gradients of each micro-batch to the planes."""
        step = self.step
        self.caller.stack.require_views(step.index)
        step.link()
        self.round_weights()
        for batch in batches:
            step.micro_step(batch)
            self.caller.draw += 1  # dropout drops other elements in the next micro-batch
