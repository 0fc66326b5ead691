"""Run the training step of every engine: the exact gradient of one update's micro-batches, then the
update.

    gradient = d/dp  (sum over micro-batches of loss sums) / (sum over micro-batches of target
    counts)

This is the large batch's gradient for any split into micro-batches. The host reads no tensor here.
The step's `Parameters` say what differs where they are stacked, streamed or sharded.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph import fp8, recompute
from monograph.graph.compilable import Compilable, Replaced, Scope
from monograph.graph.inspect import buffers_kept, modes_kept, unwrap_
from monograph.graph.precision import Precision
from monograph.graph.remat import Policy, Remat
from monograph.graph.replay import CudaGraphs, Recorder
from monograph.loss import IGNORE, SHARES, Loss, counts, token_loss
from monograph.optim import (
    AdamW,
    Optimizer,
    Plane,
    checked,
    hidden_matrices,
    holding,
    initialise,
    unlinked,
)
from monograph.schedule import Schedule, constant
from monograph.step.clip import (
    WINDOW,
    Clip,
    Update,
    largest,
    largest_rate,
    make_splittable_,
    reciprocal,
    squares,
    update_plane,
    without_spikes_,
)
from monograph.step.guard import ParameterGuard
from monograph.step.losses import balances, of_the_update, put_
from monograph.step.on_device import OnDevice
from monograph.step.parameters import Parameters, Rates
from monograph.step.parts import Parts


def alone(total: Tensor) -> Tensor:
    """Return the sum over the ranks of a single process."""
    return total


@final
class Step:
    """A module, its loss and its optimizer, ready to step: `step(window) -> Update`.

    The module's trainable parameters become views of flat planes (see `monograph.optim`), so move
    it and load its weights first. A layer that mixes rows, such as BatchNorm, sees one micro-batch
    at a time: then, and only then, the gradient depends on how the window is cut.

    Attributes:
        lr: learning rate of the current update. This and the next seven are 0-d tensors on the
            device, or [N].
        loss_sum: sum of losses in the current window.
        count: number of targets in the current window.
        applied: updates applied so far.
        tokens: targets trained on so far.
        skipped: updates skipped so far.
        good: updates accepted since the loss scale last changed.
        loss_scale: factor of the loss in fp16, else 1.
        loss_factor: factor of a micro-batch's loss: the loss scale / the window's targets.
        largest: the largest norm of a gradient that is applied. Above it, moments and weights could
            overflow.
        largest_rate: the learning rate above which, times a group's factor and decay, `largest` is
            exceeded.
        recent: the remembered numbers of the last applied updates, [2, 128] or [N, 2, 128]; see
            `Clip`.
        recorder: captures a micro-step for its replay on a GPU (`monograph.capture`); None: it is
            called every time.
        announce: gets a line when a micro-step cannot be replayed, with the reason.
    """

    # Whether the step was captured when it was chosen what recomputation keeps.
    kept_for: bool | None

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
        sum_over_ranks: Callable[[Tensor], Tensor] = alone,
        parameters: Parameters | None = None,
    ):
        """Prepare a step.

        Args:
            model: any module.
            loss: `loss(model, batch) -> (sum, count)`; with a `count(batch)` of its own the targets
                are counted before the first backward, otherwise the summed gradient is divided by
                the summed count before clipping, which is the same equation.
            optim: the optimizer, AdamW or Muon; AdamW() by default.
            schedule: factor of the learning rate by update index; constant by default.
            clip: largest norm of an update's gradient, None for no clipping; a `Clip` may also skip
                spikes.
            precision: the compute dtype; fp32 (no change) by default. With fp16 the loss is scaled:
                see `Precision.rescale_`; an update whose scaled gradient overflows is skipped as
                every non-finite one is. With fp8 `left_in_bf16` names the weights of blocks whose
                sides are no multiples of 16.
            remat: which activations are computed a second time in the backward pass; none by
                default.
            sum_over_ranks: sums a 0-d count over all processes.
            parameters: where the parameters are, for this step alone; by default in planes on the
                module's device.
        """
        _check(loss=loss, schedule=schedule, precision=precision, remat=remat)
        self.model = unwrap_(model)
        self.loss = loss
        self.clip = Clip.of(clip)
        self.parameters = parameters or OnDevice()
        self.optim = checked(optim or AdamW())
        self.sum_over_ranks = sum_over_ranks
        self.balances = balances(self.model, self.loss)
        self.schedule = schedule or constant()
        self.precision = precision or Precision()
        _require_together(self.optim, self.precision)
        self.left_in_bf16 = (
            fp8.use(self.model, hidden_matrices(self.model)) if self.precision.name == "fp8" else []
        )
        self.remat: Policy = remat or Remat.Off()
        recompute.follow(self.model, self.remat)
        self.index = 0
        self.kept_for = None
        self.holds_average = False
        self.planes = self.parameters.place(self)
        self.device = self.parameters.device or self.planes[0].param.device
        put_(self.loss, self.device)
        lead = self.planes[0].param.shape[:-1]
        zeros = functools.partial(torch.zeros, lead, device=self.device)
        # Never write a 0-d float64 tensor inside a captured function: torch 2.13 loses the mutation
        # (dev/log.md).
        self.lr, self.loss_sum, self.count = (zeros(dtype=torch.float64) for _ in range(3))
        self.applied, self.tokens, self.skipped, self.good = (
            zeros(dtype=torch.int64) for _ in range(4)
        )
        self.largest = largest(self.planes[0].grad.dtype)
        self.largest_rate = largest_rate((plane.kind for plane in self.planes), self.largest).to(
            self.device
        )
        self.recent = torch.zeros((*lead, 2, WINDOW), dtype=torch.float64, device=self.device)
        self.loss_scale = zeros(dtype=torch.float32).fill_(
            self.precision.loss_scale if self.precision.scaled else 1.0
        )
        self.scope: Scope | Literal["none"] = "none"  # the scope of the capture, if there was one
        # A 0-d float64 argument would be traced twice.
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
        self.replaced: list[Replaced] = []  # what a capture replaced, in order
        self.guard = ParameterGuard(self.model, self.planes)
        self.parts = Parts(self.device)

    def __call__(self, window: Iterable[object]) -> Update:
        """Accumulate over the window's micro-batches, then update."""
        accumulate(self, window)
        return update(self)

    def begun(self, plane: Plane) -> Plane:
        """Prepare a plane for the first update, and return it."""
        make_splittable_(plane.param, self.precision)
        initialise(plane, self.optim)
        return plane

    def link(self) -> None:
        """Make backward passes add gradients to the planes."""
        for plane in self.planes:
            plane.link()

    @property
    def counters(self) -> dict[str, Tensor]:
        """Return the tensors that updates write and a run's state holds, by name."""
        names = ["applied", "tokens", "skipped"]
        names += ["loss_scale", "good"] if self.precision.scaled else []
        names += ["recent"] if self.clip and self.clip.skip_spikes else []
        return {name: getattr(self, name) for name in names} | {**self.parameters.counters}

    @contextmanager
    def counters_kept(self) -> Iterator[None]:
        """Set the counters back after the block, whatever updates are made in it."""
        kept = {name: counter.clone() for name, counter in self.counters.items()}
        try:
            yield
        finally:
            for name, counter in self.counters.items():
                counter.copy_(kept[name])

    def discard(self) -> None:
        """Forget gradient, loss and count since the last update."""
        self.parameters.discard()
        self.parts = Parts(self.device)
        self.loss_sum.zero_()
        self.count.zero_()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the module hold its averaged weights in the block, if the optimizer keeps an average
        (`ema`).

        The weights may only be read: training or saving inside is lost or wrong afterwards. Buffers
        are not averaged.
        """
        if self.optim.ema is None or self.holds_average:
            yield
            return
        self.parameters.at_rest(written=True)
        with holding(self.planes, [plane.state["ema"] for plane in self.planes]):
            self.holds_average = True
            try:
                yield
            finally:
                # A copy of the average may still be under way.
                self.parameters.at_rest(written=True)
                self.holds_average = False

    def assembled(self) -> AbstractContextManager[nn.Module]:
        """In the block give a module that can be called on its own, all of its weights in one
        place; only to read.
        """
        return self.parameters.assembled()

    @contextmanager
    def context(self) -> Iterator[None]:
        """In the block the loss can be called."""
        with self.parameters.context(), self.precision.context(self.device.type):
            yield

    def set_lr(self) -> Rates:
        """Fill in the learning rate of the current update, and return it."""
        lr = self.parameters.rates()
        if isinstance(lr, tuple):
            self.lr.copy_(
                torch.tensor(lr, dtype=torch.float64, pin_memory=self.lr.is_cuda), non_blocking=True
            )
        else:
            self.lr.fill_(lr)
        return lr

    def count_window(self, batches: Sequence[object]) -> None:
        """Set the factor of the window's losses, from its targets if they can be counted
        beforehand.

        Raises:
            UsageError: the module's parameters were changed since the step was made.
        """
        self.guard.require()
        of_batches = [self.parameters.targets(batch) for batch in batches]
        known = [count for count in of_batches if count is not None]
        total = (
            self.sum_over_ranks(torch.stack(known).sum(0))
            if known
            else torch.ones((), device=self.device)
        )
        self.loss_factor.copy_(reciprocal(total) * self.loss_scale)

    def shared(self, batch: Any) -> Any:
        """Return a batch of the window counted last; if the model balances its experts, with the
        tokens' shares.
        """
        if not self.balances:
            return batch
        factor = self.loss_factor.view(*self.lr.shape, 1, 1)
        return {**batch, SHARES: (batch["targets"] != IGNORE) * factor}

    def total(self) -> None:
        """Sum the window's loss and count over the ranks, once before its update."""
        totals = self.sum_over_ranks(torch.stack([self.loss_sum, self.count.double()]))
        self.loss_sum.copy_(totals[0])
        self.count.copy_(totals[1])

    def choose_kept(self, batch: object) -> None:
        """Choose, once, which activations the recomputation policy keeps; this needs the shapes of
        a batch.
        """
        captured = self.scope != "none"
        if self.kept_for != captured:
            with unlinked(self.planes), self.context(), buffers_kept(self.loss):
                recompute.choose_kept(
                    self.model,
                    lambda twin: self.loss(twin, batch),
                    captured=captured,
                    device=self.device,
                    unsharded=self.parameters.whole(),
                )
            self.kept_for = captured

    # ── the training step: read this first ──────────────────────────────────────────────────────
    #
    # With l(w) the loss of a target, an update over all micro-batches of a window is
    #
    #     grad = (sum over micro-batches of d/dw sum of l) / (number of targets of the whole window)
    #     norm = |grad|
    #     w, moments <- rule(w, moments, grad * min(1, clip / norm)),   unless norm or loss is not finite
    #
    # `accumulate`, below, calls `_micro_step` for each micro-batch, and `update` calls
    # `clip_and_apply` once. Both do so by way of the parameters, as stages that come and go take
    # another way.

    def _micro_step(self, batch: object) -> None:
        """Add a micro-batch's gradient, loss and count, in place in the device's memory and nowhere
        else.
        """
        # In the backward pass, too, which may recompute parts of the forward pass.
        with self.parameters.fusing():
            with unlinked(self.planes), self.context():
                loss, loss_sum, count = self.forward(batch, self.loss_factor)
            self.differentiate(loss, loss_sum, count)

    def differentiate(self, loss: Tensor, loss_sum: Tensor, count: Tensor) -> bool:
        """Add a micro-batch's gradient, loss and count; return whether it has a gradient.

        It has none if the loss is a constant, as it may be without targets.

        Raises:
            UsageError: the loss is a constant although there are targets.
        """
        self.parts.begin("backward")
        if loss.requires_grad:
            loss.backward()
        elif bool((count > 0).any()):
            raise UsageError(
                "the loss does not depend on any trainable parameter: return its sum as the model's operations give "
                "it, without .item(), .detach(), torch.no_grad() or a new tensor made of it"
            )
        self.loss_sum += loss_sum
        self.count += count
        self.parts.begin("forward")  # of the next micro-batch
        return loss.requires_grad

    # A capture replaces the functions that `Parameters.captured` names by compiled ones. They are
    # called in the step's context, as autocast entered inside a captured function keeps it out of
    # torch's cache between runs.

    def _forward(self, batch: object, loss_factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss_sum, count = self.parameters.sums(batch)
        return self.scaled(loss_sum, loss_factor), loss_sum.detach(), count

    def scaled(self, loss_sum: Tensor, loss_factor: Tensor) -> Tensor:
        """Return the number to differentiate: the loss times its factor, summed over all members."""
        # A scaled loss is beyond fp16.
        wide = loss_sum.to(torch.promote_types(loss_sum.dtype, torch.float32))
        return (wide * loss_factor.view_as(wide).to(wide.dtype)).sum()

    def clip_and_apply(self, grads: Sequence[Tensor]) -> Tensor:
        """Clip and apply the summed gradients, [size] for each plane; return their norm before
        clipping.
        """
        filled = [
            (plane, grad) for plane, grad in zip(self.planes, grads, strict=True) if grad.numel()
        ]
        grad_norm, scale, accepted = self.decide(
            [part for pair in filled for part in self.squares(*pair)]
        )
        with self.parameters.directed(grads, scale):
            for plane, total in filled:
                self.parameters.update_plane(plane, total, scale, accepted)
        return grad_norm

    def decide(self, squares: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Decide on an update from the sums of squares of all parts, and count it.

        Returns:
            The gradient's norm before clipping, the factor of the summed gradient, and whether it
            is applied.
        """
        scale = self.unscaled()
        grad_norm = self.parameters.add_squares(squares).sqrt() * scale
        longest = grad_norm if self.clip is None else grad_norm.clamp_max(self.clip.norm)
        accepted = grad_norm.isfinite() & self.accepts(longest)
        if self.clip is not None and self.clip.skip_spikes:
            accepted = without_spikes_(
                accepted, grad_norm, self.loss_sum / self.count, self.recent, self.applied
            )
        if self.clip is not None:
            scale = scale * (self.clip.norm / (grad_norm + 1e-6)).clamp_max(1.0)
        self.applied.add_(accepted)
        self.tokens.add_(torch.where(accepted, self.count, 0.0).round().to(torch.int64))
        self.skipped.add_(~accepted)
        if self.precision.scaled:
            self.precision.rescale_(
                self.loss_scale, self.good, finite=grad_norm.isfinite(), accepted=accepted
            )
        return grad_norm, scale, accepted

    def unscaled(self) -> Tensor:
        """Return the factor that turns the summed gradient in the planes into the mean loss's
        gradient.
        """
        return (
            torch.ones_like(self.lr) if counts(self.loss) else reciprocal(self.count)
        ) / self.loss_scale

    def accepts(self, grad_norm: Tensor) -> Tensor:
        """Return whether a gradient of this norm, after clipping, makes an update, bool.

        Every comparison with NaN is false, so a NaN anywhere refuses the update.
        """
        counts = (self.count > 0) & self.count.isfinite()
        fine = (
            (grad_norm <= self.largest)
            & (self.lr.abs() <= self.largest_rate)
            & self.loss_sum.isfinite()
            & counts
        )
        frozen = self.parameters.frozen
        return fine if frozen is None else fine & ~frozen

    def update_plane(self, plane: Plane, total: Tensor, scale: Tensor, accepted: Tensor) -> None:
        """Update a plane by its summed gradient."""
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

    # ── the formula of each optimizer is in optim/updates.py ────────────────────────────────────


def _check(**given: object) -> None:
    """Refuse arguments of another type; None stands for the default."""
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
        value = given[name]
        if not isinstance(value, kind) and (value is not None or name == "loss"):
            raise UsageError(f"{name} is a {type(value).__name__}: expected {words}")


def _require_together(optim: Optimizer, precision: Precision) -> None:
    if not optim.master_weights and precision.dtype != torch.bfloat16:
        raise UsageError(
            f"master_weights = False keeps the weights in bf16, which precision {precision.name} cannot use: take bf16 "
            "or fp8"
        )


def accumulate(step: Step, window: Iterable[object]) -> None:
    """Add the gradient of one update, whose micro-batches may be ragged, padded, few or many.

    Args:
        step: the step whose gradients are added to.
        window: the update's micro-batches, in any form that the step's loss takes.
    """
    if isinstance(window, (Mapping, Tensor)) or not isinstance(window, Iterable):
        raise UsageError(
            f"a window is a list of micro-batches, not a {type(window).__name__}: pass [batch]"
        )
    step.parameters.begin()
    batches = list(window)
    if any(isinstance(batch, bool) for batch in batches):
        raise UsageError(f"a window is a list of micro-batches, and {batches[0]} is none")

    def score(some: Sequence[object]) -> None:
        with modes_kept(step.model), torch.no_grad():
            step.model.train(False)
            step.parameters.score(some)

    with (
        all_or_nothing(step),
        of_the_update(step.loss, step.index, batches, score, step.sum_over_ranks),
    ):
        # The window's targets are counted before its first backward pass, so that each loss is
        # divided by their number at once, and gradients need no second pass.
        step.count_window(batches)
        batches = [step.shared(batch) for batch in batches]
        for batch in batches:
            step.choose_kept(batch)
        step.parts.begin("forward")
        step.parameters.accumulate(batches)


def update(step: Step) -> Update:
    """Clip, update and clear, once per window, however many micro-batches it had.

    An update whose loss or gradient is not finite, or whose window had no target, changes neither
    weights nor optimizer state; the device decides, and `Update.skipped` counts.
    """
    with all_or_nothing(step):
        step.parts.begin("optimizer")
        step.parameters.complete()
        return closed(step, step.set_lr(), step.apply())


@contextmanager
def all_or_nothing(step: Step) -> Iterator[None]:
    """Discard the accumulated gradient if the block fails, as the next update would be of both
    windows otherwise.
    """
    try:
        yield
    except BaseException:  # Ctrl-C, too
        step.discard()
        raise


def closed(step: Step, lr: Rates, grad_norm: Tensor) -> Update:
    """Return the numbers of the update that was just applied, and begin the next window."""
    marks = () if step.parameters.staged else step.parts.end()  # stages are updated in turn
    loss = step.loss_sum / step.count
    count = step.count.clone()
    step.loss_sum.zero_()
    step.count.zero_()
    step.index += 1
    return Update(
        step.index - 1, loss, count, lr, grad_norm, step.tokens.clone(), step.skipped.clone(), marks
    )
