"""Run the training step that all engines share: the exact gradient of one window, then the update.

    gradient = d/dw (sum over micro-batches of loss sums) / (sum over micro-batches of target counts)

This is the gradient of the whole window, however the window is split into micro-batches. The host
reads no tensor here, so it never waits for the device. `Parameters` (parameters.py) holds what
differs between resident, stacked, streamed and sharded parameters.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph import fp8, recompute
from monograph.graph.compilable import AttributeValue, Compilable, Scope
from monograph.graph.inspect import buffers_kept, modes_kept, unwrap_
from monograph.graph.precision import FP8, Precision
from monograph.graph.remat import Policy, Remat
from monograph.graph.replay import CudaGraphs, Recorder
from monograph.loss import IGNORE, SHARES, Loss, TokenLoss, has_count, token_loss
from monograph.optim import (
    AdamW,
    Optimizer,
    ParameterKind,
    Plane,
    hidden_matrices,
    initialise,
    require_optimizer,
    temporary_params,
    unlinked,
)
from monograph.schedule import Schedule, constant
from monograph.step.clip import (
    WINDOW,
    Clip,
    Update,
    largest_lr,
    largest_squarable,
    make_splittable_,
    reciprocal,
    squares,
    update_plane,
    without_spikes_,
)
from monograph.step.guard import ParameterGuard
from monograph.step.losses import balances, loss_update_context, move_loss_
from monograph.step.on_device import OnDevice
from monograph.step.parameters import LearningRates, Parameters
from monograph.step.parts import BACKWARD, FORWARD, OPTIMIZER, PartTimer


def sum_of_one_rank(total: Tensor) -> Tensor:
    """Return the sum over all ranks where there is only one: `total` itself."""
    return total


class Decision(NamedTuple):
    """What the device decides about an update.

    Attributes:
        grad_norm: norm of the mean loss's gradient before clipping.
        scale: factor that turns the planes' summed gradient into the clipped gradient.
        accepted: whether the update is applied, bool.
    """

    grad_norm: Tensor
    scale: Tensor
    accepted: Tensor


@final
class Step:
    """A module, its loss and its optimizer, ready to step: `step(window) -> Update`.

    The module's trainable parameters become views of flat planes (see `monograph.optim`), so move
    the module to its device and load its weights first. A layer that mixes rows, such as BatchNorm,
    sees one micro-batch at a time; only such a layer makes the gradient depend on how the window is
    cut.

    Attributes:
        index: number of updates so far, skipped ones included.
        planes: the trainable parameters, in flat buffers.
        block_formats: the formats of the parameters that are rounded after each update, by name.
        left_in_bf16: names of the weights that fp8 leaves in bf16.
        holds_average: whether the planes hold the averaged weights now, see `averaged`.
        scope: what one graph of a capture holds (`monograph.capture`); "none" if the step is not captured.
        lr: learning rate of the current update. `lr` to `loss_factor` are tensors on the device,
            0-d ([1] for `loss_factor`), or [N] for an ensemble of N members.
        loss_sum: sum of losses in the current window.
        count: number of targets in the current window.
        applied: updates applied so far.
        tokens: targets trained on so far.
        skipped: updates skipped so far.
        good: updates accepted since the loss scale last changed.
        loss_scale: factor of the loss in fp16; 1 in other precisions.
        loss_factor: factor of each micro-batch's loss: loss scale / number of the window's targets,
            or the loss scale alone if the loss cannot count targets beforehand.
        largest_norm: the largest gradient norm that is applied; a larger gradient could overflow moments
            or weights.
        largest_lr: the largest learning rate that is applied; a larger one, times a group's
            factor and decay, could exceed `largest_norm`.
        recent: log-norm and loss of the last 128 applied updates, [2, 128] or [N, 2, 128]; see
            `Clip`.
        recorder: records a micro-step and replays it on a GPU (`monograph.capture`); None: every
            micro-step is called.
        announce: called with one line, the reason, when a micro-step cannot be replayed.
        guard: notices that the parameters of the module were changed.
        parts: times the parts of an update.
        kept_choice_is_for_capture: whether `choose_kept_results` last chose for a captured step; None
            before its first choice.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss = token_loss,
        optim: Optimizer | None = None,
        schedule: Schedule | None = None,
        clip: float | Clip | None = None,
        precision: Precision | None = None,
        remat: Policy | None = None,
        sum_over_ranks: Callable[[Tensor], Tensor] = sum_of_one_rank,
        parameters: Parameters | None = None,
        block_formats: Mapping[str, str] | None = None,
    ):
        """Prepare a step.

        Args:
            model: any module.
            loss: `loss(model, batch) -> (sum, count)`. If it has a method `count(batch)`, the
                window's targets are counted before the first backward pass. Otherwise the summed
                gradient is divided by the summed count before clipping, which gives the same
                gradient.
            optim: the optimizer, such as `Muon()`; `AdamW()` by default.
            schedule: factor of the learning rate by update index; constant by default.
            clip: largest norm of an update's gradient; None: no clipping. A `Clip` may also skip
                spikes.
            precision: the compute dtype; fp32 by default. With fp16 the loss is scaled (see
                `Precision.rescale_`), and an update whose scaled gradient overflows is skipped.
                With fp8 the matrices of `left_in_bf16` stay in bf16, because a side is not a
                multiple of 16. "fp8_head" needs the default loss, whose products with the head are
                then in fp8.
            remat: which activations the backward pass recomputes; none by default.
            sum_over_ranks: sums a 0-d tensor over all ranks.
            parameters: where the parameters live; each step needs its own. By default they are in
                planes on the module's device.
            block_formats: {name of a parameter: its format}, for parameters that are rounded to a
                format of a GGUF file (`monograph.model.gguf.block_formats` returns those of a model).
                Forward and backward passes then use the rounded weights, which the model holds; the
                optimizer's state holds the unrounded ones, to which the gradients are applied.
        """
        _check_types(loss=loss, schedule=schedule, precision=precision, remat=remat)
        self.model = unwrap_(model)
        self.loss = loss
        self.clip = Clip.of(clip)
        self.parameters = parameters or OnDevice()
        self.optim = require_optimizer(optim or AdamW())
        self.sum_over_ranks = sum_over_ranks
        self.balances = balances(self.model, self.loss)
        self.schedule = schedule or constant()
        self.precision = precision or Precision()
        self.block_formats = dict(block_formats or {})
        _require_together(self.optim, self.precision, is_rounding=bool(self.block_formats))
        self.left_in_bf16: list[str] = []
        if self.precision.name == "fp8":
            self.left_in_bf16 = fp8.convert_(self.model, hidden_matrices(self.model))
        if self.precision.name == "fp8_head":
            if type(self.loss) is not TokenLoss:
                raise UsageError("fp8_head is for the default loss, token_loss: use bf16")
            fp8.convert_head_(self.model)
        self.remat: Policy = remat or Remat.Off()
        recompute.apply_policy(self.model, self.remat)
        self.index = 0
        self.kept_choice_is_for_capture: bool | None = None
        self.holds_average = False
        self.planes = self.parameters.place(self)
        self.device = self.parameters.device or self.planes[0].param.device
        move_loss_(self.loss, self.device)
        member_shape = self.planes[0].param.shape[:-1]  # [N] for an ensemble, otherwise []
        zeros = functools.partial(torch.zeros, member_shape, device=self.device)
        # Never write a 0-d float64 tensor inside a captured function: torch 2.13 loses the mutation
        # (dev/log.md). `lr`, `loss_sum` and `count` are written outside of captured functions only.
        self.lr = zeros(dtype=torch.float64)
        # The members' learning rates that `lr` holds; empty before the first update.
        self._rates_on_device: tuple[float, ...] = ()
        self.loss_sum = zeros(dtype=torch.float64)
        self.count = zeros(dtype=torch.float64)
        self.applied = zeros(dtype=torch.int64)
        self.tokens = zeros(dtype=torch.int64)
        self.skipped = zeros(dtype=torch.int64)
        self.good = zeros(dtype=torch.int64)
        self.largest_norm = largest_squarable(self.planes[0].grad.dtype)
        kinds = (plane.kind for plane in self.planes)
        self.largest_lr = largest_lr(kinds, self.largest_norm).to(self.device)
        self.recent = torch.zeros(
            (*member_shape, 2, WINDOW), dtype=torch.float64, device=self.device
        )
        initial_scale = self.precision.loss_scale if self.precision.scales_loss else 1.0
        self.loss_scale = zeros(dtype=torch.float32).fill_(initial_scale)
        self.scope: Scope | Literal["none"] = "none"
        # `loss_factor` is an argument of a captured function, and a 0-d float64 argument would be
        # traced twice, so it is [1].
        self.loss_factor = zeros(dtype=torch.float64).reshape(-1)
        self.recorder: Recorder | None = None
        if self.parameters.replays and self.device.type == "cuda":
            self.recorder = CudaGraphs(self.device)
        self.announce: Callable[[str], None] = lambda line: None
        self.micro_step: Callable[[object], None] = self._micro_step
        self.forward = Compilable(self._forward)
        self.evaluate = Compilable(self.parameters.sums)
        self.apply = Compilable(self.parameters.apply)
        self.squares = Compilable(squares)
        # The values of the attributes that a capture replaced, in order; `uncapture` restores them.
        self.former_values: list[AttributeValue] = []
        self.guard = ParameterGuard(self.model, self.planes)
        self.parts = PartTimer(self.device)

    def __call__(self, window: Iterable[object]) -> Update:
        """Accumulate over the window's micro-batches, then update."""
        accumulate(self, window)
        return update(self)

    def kinds_of(self, model: nn.Module, optim: Optimizer) -> dict[str, ParameterKind]:
        """Return how an optimizer updates each parameter of a model, by name, with its block format.

        Args:
            model: the step's model, or a member of an ensemble.
            optim: the step's optimizer, or the member's.
        """
        return {
            name: kind._replace(block_format=self.block_formats.get(name))
            for name, kind in optim.kinds(model).items()
        }

    def prepare_plane(self, plane: Plane) -> Plane:
        """Prepare a new plane's weights and optimizer state for the first update; return the plane."""
        if plane.kind.block_format is None:
            make_splittable_(plane.param, self.precision)
        initialise(plane, self.optim)
        return plane

    def link(self) -> None:
        """Make backward passes add gradients to the planes: each `.grad` becomes a view of one."""
        for plane in self.planes:
            plane.link()

    @property
    def counters(self) -> dict[str, Tensor]:
        """Return the tensors, by name, that updates write and that a run's state includes."""
        names = ["applied", "tokens", "skipped"]
        if self.precision.scales_loss:
            names += ["loss_scale", "good"]
        if self.clip and self.clip.skip_spikes:
            names += ["recent"]
        own_counters = {name: getattr(self, name) for name in names}
        return {**own_counters, **self.parameters.counters}

    @contextmanager
    def counters_kept(self) -> Iterator[None]:
        """Restore the counters after the block, so that updates in the block are not counted."""
        values = {name: counter.clone() for name, counter in self.counters.items()}
        try:
            yield
        finally:
            for name, counter in self.counters.items():
                counter.copy_(values[name])

    def discard(self) -> None:
        """Reset the gradient, loss and count that were accumulated since the last update."""
        self.parameters.discard()
        self.parts = PartTimer(self.device)
        self.loss_sum.zero_()
        self.count.zero_()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged weights into the module for the block, if the optimizer has `ema`.

        The block may only read the weights: what it trains is lost, and what it saves is wrong.
        Buffers are not averaged.
        """
        if self.optim.ema is None or self.holds_average:
            yield
            return
        self.parameters.wait_for_planes(to_write=True)
        with temporary_params(self.planes, [plane.state["ema"] for plane in self.planes]):
            self.holds_average = True
            try:
                yield
            finally:
                # The device may still be copying the average.
                self.parameters.wait_for_planes(to_write=True)
                self.holds_average = False

    def assembled(self) -> AbstractContextManager[nn.Module]:
        """Give the block a read-only module with all of its weights in one place, ready to call."""
        return self.parameters.assembled()

    @contextmanager
    def context(self) -> Iterator[None]:
        """Enter the contexts in which the loss can be called."""
        with self.parameters.context(), self.precision.context(self.device.type):
            yield

    def set_lr(self) -> LearningRates:
        """Write the current update's learning rate to `lr` on the device, and return it."""
        lr = self.parameters.rates()
        if not isinstance(lr, tuple):
            self.lr.fill_(lr)
        elif lr != self._rates_on_device:  # they change only with a schedule that is not constant
            self.lr.copy_(
                torch.tensor(lr, dtype=torch.float64, pin_memory=self.lr.is_cuda), non_blocking=True
            )
            self._rates_on_device = lr
        return lr

    def count_window(self, batches: Sequence[object]) -> None:
        """Set `loss_factor` for a window, from the number of its targets if the loss can count them.

        Args:
            batches: all micro-batches of the window.

        Raises:
            UsageError: the module's parameters were changed since the step was made.
        """
        self.guard.require_unchanged()
        counts_of_batches = [self.parameters.targets(batch) for batch in batches]
        known_counts = [count for count in counts_of_batches if count is not None]
        if known_counts:
            total = self.sum_over_ranks(torch.stack(known_counts).sum(0))
            self.loss_factor.copy_(reciprocal(total) * self.loss_scale)
        else:
            # The gradient is divided by the number of targets later, in `gradient_scale`.
            self.loss_factor.copy_(self.loss_scale)

    def with_shares(self, batch: Any) -> Any:
        """Return a micro-batch, with each token's share of the loss if the model balances experts.

        Call `count_window` for the micro-batch's window first.
        """
        if not self.balances:
            return batch
        # The targets are [rows, positions], or [N, rows, positions] if each of N members has its own.
        factor = self.loss_factor.view(*self.lr.shape, 1, 1)
        return {**batch, SHARES: (batch["targets"] != IGNORE) * factor}

    def sum_window_over_ranks(self) -> None:
        """Sum the window's loss and count over all ranks; call this once, before the update."""
        totals = self.sum_over_ranks(torch.stack([self.loss_sum, self.count.double()]))
        self.loss_sum.copy_(totals[0])
        self.count.copy_(totals[1])

    def choose_kept_results(self, batch: object) -> None:
        """Choose which activations the recomputation policy keeps, from the shapes of a micro-batch.

        The choice is made once, and again after a capture or its release. It is made from the loss of a
        copy of the model whose tensors have shapes but no numbers.
        """
        captured = self.scope != "none"
        if self.kept_choice_is_for_capture != captured:
            with unlinked(self.planes), self.context(), buffers_kept(self.loss):
                recompute.choose_kept_results(
                    self.model,
                    lambda fake_model: self.loss(fake_model, batch),
                    captured=captured,
                    device=self.device,
                    unsharded=self.parameters.unsharded_module(),
                )
            self.kept_choice_is_for_capture = captured

    # ── the training step: read this first ──────────────────────────────────────────────────────
    #
    # One update trains on a window, which is cut into micro-batches. With l(w) the loss of one
    # target and w the weights, the update is
    #
    #     grad = (sum over micro-batches of d/dw sum of l) / (number of targets of the whole window)
    #     norm = |grad|
    #     w, moments <- rule(w, moments, grad * min(1, clip / norm))
    #
    # and it is skipped if `norm` or the loss is not finite. The first line is `_micro_step`, which
    # `accumulate`, below, runs for each micro-batch. The other lines are `clip_and_apply`, which
    # `update`, below, runs once. Both are called through `Parameters`: a streamed model runs the
    # same functions stage by stage.

    def _micro_step(self, batch: object) -> None:
        """Add a micro-batch's gradient to the planes, and its loss and count to the window's.

        All results are written in place on the device, so that a captured micro-step can be
        replayed.
        """
        # The block includes the backward pass, as that may recompute parts of the forward pass.
        with self.parameters.fused_gradients():
            # torch cannot trace a forward pass of bf16 weights that have fp32 gradients. So `unlinked`
            # removes such gradients during the forward pass.
            with unlinked(self.planes), self.context():
                loss, loss_sum, count = self.forward(batch, self.loss_factor)
            self.differentiate(loss, loss_sum, count)

    # `forward` is `_forward`, compiled after a capture (`Parameters.captured` lists what a capture
    # compiles). It is called in the step's context: if a compiled function entered autocast itself,
    # torch would not cache it between runs.
    def _forward(self, batch: object, loss_factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss_sum, count = self.parameters.sums(batch)
        return self.scaled_loss(loss_sum, loss_factor), loss_sum.detach(), count

    def scaled_loss(self, loss_sum: Tensor, loss_factor: Tensor) -> Tensor:
        """Return the scalar to differentiate: loss times factor, summed over members, at least fp32."""
        # A loss times its loss scale can exceed the range of fp16.
        wide = loss_sum.to(torch.promote_types(loss_sum.dtype, torch.float32))
        return (wide * loss_factor.view_as(wide).to(wide.dtype)).sum()

    def differentiate(self, loss: Tensor, loss_sum: Tensor, count: Tensor) -> bool:
        """Run the backward pass, and add the micro-batch's loss and count to the window's.

        Args:
            loss: the scalar to differentiate.
            loss_sum: the sum of the micro-batch's losses, detached.
            count: the number of its targets.

        Returns:
            Whether there was a backward pass. There is none if the loss is a constant, which it may
            be in a micro-batch without targets.

        Raises:
            UsageError: the loss is a constant although the micro-batch has targets.
        """
        self.parts.begin(BACKWARD)
        if loss.requires_grad:
            loss.backward()
        elif bool((count > 0).any()):
            raise UsageError(
                "the loss does not depend on any trainable parameter: return its sum as the model's operations give "
                "it, without .item(), .detach(), torch.no_grad() or a new tensor made of it"
            )
        self.loss_sum += loss_sum
        self.count += count
        self.parts.begin(FORWARD)  # of the next micro-batch
        return loss.requires_grad

    def clip_and_apply(self, grads: Sequence[Tensor]) -> Tensor:
        """Update all planes by their summed gradients, clipped.

        Args:
            grads: each plane's summed gradient, [size]; empty where this rank has no rows.

        Returns:
            The gradient's norm before clipping.
        """
        planes_with_grads = [
            (plane, grad) for plane, grad in zip(self.planes, grads, strict=True) if grad.numel()
        ]
        sums_of_squares = [
            sum_of_squares
            for plane, grad in planes_with_grads
            for sum_of_squares in self.squares(plane, grad)
        ]
        grad_norm, scale, accepted = self.decide(sums_of_squares)
        # In the block, a rank also has what its update needs of other ranks' rows, such as the
        # directions of Muon.
        with self.parameters.with_directions(grads, scale):
            for plane, grad in planes_with_grads:
                self.parameters.update_plane(plane, grad, scale, accepted)
        return grad_norm

    def decide(self, sums_of_squares: Sequence[Tensor]) -> Decision:
        """Decide on the device whether to apply the update, and count it as applied or skipped.

        Args:
            sums_of_squares: of the summed gradient, one for each section of a plane.
        """
        scale = self.gradient_scale()
        grad_norm = self.parameters.add_squares(sums_of_squares).sqrt() * scale
        clipped_norm = grad_norm if self.clip is None else grad_norm.clamp_max(self.clip.norm)
        accepted = grad_norm.isfinite() & self.accepts(clipped_norm)
        if self.clip is not None and self.clip.skip_spikes:
            accepted = without_spikes_(
                accepted, grad_norm, self.loss_sum / self.count, self.recent, self.applied
            )
        if self.clip is not None:
            # torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
            scale = scale * (self.clip.norm / (grad_norm + 1e-6)).clamp_max(1.0)
        self.applied.add_(accepted)
        self.tokens.add_(torch.where(accepted, self.count, 0.0).round().to(torch.int64))
        self.skipped.add_(~accepted)
        if self.precision.scales_loss:
            self.precision.rescale_(
                self.loss_scale, self.good, finite=grad_norm.isfinite(), accepted=accepted
            )
        return Decision(grad_norm, scale, accepted)

    def gradient_scale(self) -> Tensor:
        """Return the factor that turns the planes' summed gradient into the mean loss's gradient."""
        if has_count(self.loss):
            # `count_window` knew the number of targets, and `loss_factor` divided each loss by it.
            mean_factor = torch.ones_like(self.lr)
        else:
            mean_factor = reciprocal(self.count)
        return mean_factor / self.loss_scale

    def accepts(self, clipped_norm: Tensor) -> Tensor:
        """Return whether a gradient of this norm, after clipping, may be applied, bool.

        Every comparison with NaN is false, so a NaN anywhere refuses the update.
        """
        has_targets = (self.count > 0) & self.count.isfinite()
        cannot_overflow = (clipped_norm <= self.largest_norm) & (self.lr.abs() <= self.largest_lr)
        accepted = cannot_overflow & self.loss_sum.isfinite() & has_targets
        frozen = self.parameters.frozen
        return accepted if frozen is None else accepted & ~frozen

    def update_plane(self, plane: Plane, total: Tensor, scale: Tensor, accepted: Tensor) -> None:
        """Update a plane's weights and moments by its summed gradient `total`, times `scale`."""
        update_plane(
            plane,
            total,
            scale,
            accepted,
            optim=self.optim,
            precision=self.precision,
            lr=self.lr,
            applied=self.applied,
        )

    # ── each optimizer's formula is in a file of optim/ ──────────────────────────────────────────


def _check_types(**arguments: object) -> None:
    """Refuse arguments of a wrong type; None, which stands for the default, is refused for `loss`."""
    expected: dict[str, tuple[Any, str]] = {
        "loss": (Callable, "a function of (model, batch) that returns (sum, count)"),
        "schedule": (
            Callable,
            "a function of the update's index, such as monograph.warmup_cosine(...)",
        ),
        "precision": (Precision, 'a monograph.Precision("bf16") or the like'),
        "remat": (Policy, "one of monograph.Remat's, such as Remat.Full()"),
    }
    for name, (kind, words) in expected.items():
        value = arguments[name]
        is_default = value is None and name != "loss"
        if not is_default and not isinstance(value, kind):
            raise UsageError(f"{name} is a {type(value).__name__}: expected {words}")


def _require_together(optim: Optimizer, precision: Precision, *, is_rounding: bool) -> None:
    if not optim.master_weights and precision.dtype != torch.bfloat16:
        raise UsageError(
            f"master_weights = False keeps the weights in bf16, which precision {precision.name} cannot use: take bf16 "
            "or fp8"
        )
    if not is_rounding:
        return
    if not optim.master_weights:
        raise UsageError(
            "block_formats keep the unrounded weights, and master_weights = False does not: leave one out"
        )
    if optim.ema is not None:
        raise UsageError("block_formats: a mean of rounded weights is not rounded: take ema = None")
    if precision.name in FP8:
        raise UsageError(
            f"block_formats: precision {precision.name} would round the weights again: take bf16 or fp32"
        )


def accumulate(step: Step, window: Iterable[object]) -> None:
    """Add the gradient of one update's window to the step's gradient.

    Args:
        step: the step.
        window: the update's micro-batches, in any form that the step's loss takes. They may differ
            in shape and number from window to window.

    Raises:
        UsageError: `window` is a single batch, or not a list of micro-batches.
    """
    if isinstance(window, (Mapping, Tensor)) or not isinstance(window, Iterable):
        raise UsageError(
            f"a window is a list of micro-batches, not a {type(window).__name__}: pass [batch]"
        )
    step.parameters.begin()
    # An engine's window is a generator, which cuts the micro-batches and copies them to the device now.
    batches = list(window)
    # For example, a comparison was passed by mistake.
    if any(isinstance(batch, bool) for batch in batches):
        raise UsageError(
            f"a window is a list of micro-batches, and {batches[0]} is not a micro-batch"
        )

    with discard_on_failure(step), prepared_loss(step, batches):
        # The window's targets are counted before its first backward pass. So each loss can be divided by
        # their number, and gradients need not be divided later.
        step.count_window(batches)
        batches = [step.with_shares(batch) for batch in batches]
        for batch in batches:
            step.choose_kept_results(batch)
        step.parts.begin(FORWARD)
        step.parameters.accumulate(batches)


@contextmanager
def prepared_loss(step: Step, batches: Sequence[object]) -> Iterator[None]:
    """Let the loss prepare for an update whose gradient is computed in the block.

    A loss of a row may depend on the update's other rows (`update_of` in `monograph.loss`).

    Args:
        step: the step.
        batches: all micro-batches of the update.
    """

    def score(scored_batches: Sequence[object]) -> None:
        with modes_kept(step.model), torch.no_grad():
            step.model.train(False)
            step.parameters.score(scored_batches)

    with loss_update_context(step.loss, step.index, batches, score, step.sum_over_ranks):
        yield


def update(step: Step) -> Update:
    """Clip the accumulated gradient, update the weights and clear the gradient; call once per window.

    If the loss or gradient is not finite, or the window had no target, neither weights nor
    optimizer state change. The device decides this, and `Update.skipped` counts it.
    """
    with discard_on_failure(step):
        step.parts.begin(OPTIMIZER)
        step.parameters.complete()
        lr = step.set_lr()
        grad_norm = step.apply()
        step.parameters.applied()
        return finish_update(step, lr, grad_norm)


@contextmanager
def discard_on_failure(step: Step) -> Iterator[None]:
    """Discard the accumulated gradient if the block fails.

    Otherwise the next update would also contain the failed window.
    """
    try:
        yield
    except BaseException:  # includes Ctrl-C
        step.discard()
        raise


def finish_update(step: Step, lr: LearningRates, grad_norm: Tensor) -> Update:
    """Reset the window's sums and count the update; return the update's numbers."""
    # Stages are updated in turn, so the parts of a staged update overlap and are not timed.
    marks = () if step.parameters.staged else step.parts.end()
    index = step.index
    loss = step.loss_sum / step.count
    count = step.count.clone()
    step.loss_sum.zero_()
    step.count.zero_()
    step.index += 1
    return Update(
        index=index,
        loss=loss,
        count=count,
        lr=lr,
        grad_norm=grad_norm,
        tokens=step.tokens.clone(),
        skipped=step.skipped.clone(),
        marks=marks,
    )
