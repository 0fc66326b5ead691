"""The training step: the exact gradient of one update's micro-batches, then the update. Every engine runs it.

    gradient = d/dp  (sum over micro-batches of loss sums) / (sum over micro-batches of target counts)

which is the large batch's gradient for any split into micro-batches. The host reads no tensor here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph import fp8, recompute, siblings
from monograph.graph.inspect import parts, unwrapped
from monograph.graph.lora import kept_state
from monograph.graph.precision import Precision
from monograph.graph.remat import Policy, Remat
from monograph.graph.replay import CudaGraphs, Recorder
from monograph.loss import CountedLoss, Loss, counted, pair, token_loss
from monograph.optim import (
    AdamW,
    Optimizer,
    Plane,
    checked,
    hidden_matrices,
    planes,
    trainable,
    unlinked,
)
from monograph.schedule import Schedule, constant, factor_at
from monograph.step.clip import WINDOW, Clip
from monograph.step.deciding import Deciding, largest, reciprocal
from monograph.step.held import Held
from monograph.step.result import Update

DEVICE_BOUND = 0.5  # share of a micro-step's time that launching it takes, below which it is not worth a replay


class Step(Deciding):
    """A module, its loss and its optimizer, ready to step: `step(window) -> Update`.

    The module's trainable parameters become views of flat planes (see `monograph.optim`), so move it and load its
    weights first. A layer that mixes rows, such as BatchNorm, sees one micro-batch at a time: then, and only then, the
    gradient depends on how the window is cut.

    Attributes:
        recorder: what captures a micro-step for its replay once the step is captured (`monograph.capture`), on a GPU;
            None: it is called every time.
        announce: gets a line when a micro-step cannot be replayed, with the reason.
    """

    CAPTURED: tuple[str, ...] = ("forward", "apply", "evaluate")
    CAPTURED_BESIDE_BLOCKS: tuple[str, ...] = ("apply",)

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
        sum_over_ranks: Callable[[Tensor], Tensor] = lambda total: total,
    ):
        """Prepare a step.

        Args:
            model: any module.
            loss: `loss(model, batch) -> (sum, count)`; with a `count(batch)` of its own the targets are counted before
                the first backward, otherwise the summed gradient is divided by the summed count before clipping, which
                is the same equation.
            optim: the optimizer, AdamW or Muon; AdamW() by default.
            schedule: factor of the learning rate by update index; constant by default.
            clip: largest norm of an update's gradient, None for no clipping; a `Clip` may also skip what stands out.
            precision: the compute dtype; fp32 (no change) by default. With fp16 the loss is scaled: see
                `Precision.rescale_`; an update whose scaled gradient overflows is skipped as every non-finite one is.
                With fp8 `left_in_bf16` names the weights of blocks whose sides are no multiples of 16.
            remat: which activations are computed a second time in the backward pass; none by default.
            sum_over_ranks: sums a 0-d count over all processes.
        """
        _check(model=model, loss=loss, schedule=schedule, precision=precision, remat=remat)
        self.model, self.loss, self.clip, self.sum_over_ranks = unwrapped(model), loss, Clip.of(clip), sum_over_ranks
        self.optim = checked(optim or AdamW())
        self.schedule, self.precision = schedule or constant(), precision or Precision()
        if self.optim.state == "all-bf16" and self.precision.dtype != torch.bfloat16:
            name = self.precision.name
            raise UsageError(f"all-bf16 keeps the weights in bf16, which precision {name} cannot use: take bf16 or fp8")
        self.left_in_bf16 = fp8.use(self.model, hidden_matrices(self.model)) if self.precision.name == "fp8" else []
        self.remat: Policy = remat or Remat.Off()
        recompute.follow(self.model, self.remat)
        self.settled_for: bool | None = None
        self.planes = self.laid_out()
        self.device = self.place()
        self.index, self.holds_average = 0, False
        of_members = self.planes[0].param.shape[:-1]
        zeros = functools.partial(torch.zeros, of_members, device=self.device)
        # Never write a 0-d float64 tensor inside a captured function: torch 2.13 loses the mutation (docs/log.md).
        self.lr, self.loss_sum, self.count = (zeros(dtype=torch.float64) for _ in range(3))
        self.applied, self.tokens, self.skipped, self.good = (zeros(dtype=torch.int64) for _ in range(4))
        self.largest = largest(self.planes[0].grad.dtype)
        self.recent = torch.zeros((*of_members, 2, WINDOW), dtype=torch.float64, device=self.device)
        self.loss_scale = zeros(dtype=torch.float32).fill_(self.precision.loss_scale if self.precision.scaled else 1.0)
        self.scope: Literal["none", "whole", "blocks"] = "none"  # of what is captured
        # A captured micro-step reads the factor of its loss where it was at the capture.
        self.seed = zeros(dtype=torch.float64).reshape(-1)  # a 0-d float64 argument would be traced twice
        self.recorder: Recorder | None = CudaGraphs(self.device, DEVICE_BOUND) if self.device.type == "cuda" else None
        self.announce: Callable[[str], None] = lambda line: None
        self.micro_step: Callable[[Any], None] = self._micro_step
        self.forward: Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]] = self._forward
        self.evaluate: Callable[[Any], tuple[Tensor, Tensor]] = self._evaluate
        self.apply: Callable[[], Tensor] = self._apply
        self.held = Held(self.model, self.planes)

    def __call__(self, window: Iterable[Any]) -> Update:
        """Accumulate over the window's micro-batches, then update."""
        accumulate(self, window)
        return update(self)

    # An ensemble's step differs from one model's in what follows, up to `accepts`.

    def laid_out(self) -> list[Plane]:
        """The trainable parameters in planes."""
        in_order = siblings.side_by_side(self.model, trainable(self.model))
        made = planes(in_order, self.optim.kinds(self.model), self.optim.state, parts=parts(self.model))
        siblings.settle(self.model)
        return [self.begun(plane) for plane in made]

    def place(self) -> torch.device:
        """Where it computes."""
        return self.planes[0].param.device

    def context(self) -> AbstractContextManager[None]:
        """The context in which the loss is called."""
        return self.precision.context(self.device.type)

    def set_lr(self) -> float | tuple[float, ...]:
        """Fill in the learning rate of the present update, and return it."""
        lr = self.optim.lr * factor_at(self.schedule, self.index)
        self.lr.fill_(lr)
        return lr

    def summed(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The batch's loss and its targets."""
        return pair(self.loss(self.model, batch))

    def count_targets(self, batch: Any) -> Tensor | None:
        """The batch's targets if the loss can count them without a forward pass."""
        return counted(self.loss.count(batch), self.device) if isinstance(self.loss, CountedLoss) else None

    def count_window(self, batches: Sequence[Any]) -> None:
        """Fill in the factor of the window's losses, from its targets if they can be counted before.

        Raises:
            UsageError: the module's parameters are not those any more that the step was made of.
        """
        self.held.require()
        counts = [self.count_targets(batch) for batch in batches]
        total = torch.ones((), device=self.device)
        if batches and counts[0] is not None:
            total = self.sum_over_ranks(torch.stack(counts).sum(0))  # type: ignore[arg-type]
        self.seed.copy_(reciprocal(total) * self.loss_scale)

    def settle(self, batch: Any) -> None:
        """Choose what the policy of recomputation keeps, once: it takes the shapes of a batch to know."""
        captured = self.scope != "none"
        if self.settled_for != captured:
            with self.context():
                recompute.settle(self.model, lambda twin: self.loss(twin, batch), captured=captured)
            self.settled_for = captured

    def state(self) -> dict[str, Tensor]:
        """The model's tensors that training changes, by name; tied ones once."""
        return kept_state(self.model)

    def discard(self) -> None:
        """Forget what was accumulated since the last update."""
        for plane in self.planes:
            plane.grad.zero_()
        self.loss_sum.zero_()
        self.count.zero_()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """In the block the module holds its averaged weights, if the optimizer keeps an average (`ema`).

        Only to look at: what is trained or saved inside is lost or wrong afterwards. Buffers are not averaged.
        """
        if self.optim.ema is None or self.holds_average:
            yield
            return
        trained = [plane.param.clone() for plane in self.planes]
        try:
            self.holds_average = True
            for plane in self.planes:
                plane.param.copy_(plane.state["ema"])
            yield
        finally:
            for plane, param in zip(self.planes, trained, strict=True):
                plane.param.copy_(param)
            self.holds_average = False

    @contextmanager
    def assembled(self) -> Iterator[nn.Module]:
        """The module as it can be called on its own, all of its weights in one place. Only to look at."""
        yield self.model

    def _micro_step(self, batch: Any) -> None:
        """Add a micro-batch's gradient, loss and count; nothing but the device's memory is changed, in place."""
        with unlinked(self.planes), self.context():
            loss, loss_sum, count = self.run(batch)
        self.differentiate(loss, count)
        self.loss_sum += loss_sum
        self.count += count

    def differentiate(self, loss: Tensor, count: Tensor) -> None:
        """Add the gradient of a micro-batch's loss; a constant loss has none, as without targets it may be.

        Raises:
            UsageError: the loss is a constant, and there are targets.
        """
        if loss.requires_grad:
            loss.backward()
        elif bool((count > 0).any()):
            raise UsageError(
                "the loss does not depend on any trainable parameter: return its sum as the model's operations give "
                "it, without .item(), .detach(), torch.no_grad() or a new tensor made of it"
            )
        else:
            self.add_no_gradient()

    def add_no_gradient(self) -> None:
        """A hook for ranks, which have to meet in every backward pass."""

    def run(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(what is differentiated, loss, count) of a micro-batch."""
        return self.forward(batch, self.seed)

    # The functions named in CAPTURED are what `graph.capture` replaces by compiled ones. They are called in the step's
    # context: autocast entered inside a captured function keeps it out of torch's cache between runs.

    def _forward(self, batch: Any, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss_sum, count = self.summed(batch)
        return self.scaled(loss_sum, seed), loss_sum.detach(), count

    def scaled(self, loss_sum: Tensor, seed: Tensor) -> Tensor:
        """What is differentiated: the loss times its factor, of all members."""
        wide = loss_sum.to(torch.promote_types(loss_sum.dtype, torch.float32))  # a scaled loss is beyond fp16
        return (wide * seed.view_as(wide).to(wide.dtype)).sum()

    def _evaluate(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.summed(batch)

    def _apply(self) -> Tensor:
        grad_norm = self.apply_([plane.grad for plane in self.planes])
        for plane in self.planes:
            plane.grad.zero_()
        return grad_norm

    def apply_(self, grads: Sequence[Tensor]) -> Tensor:
        """Clip and apply the summed gradients, [size] for each plane; returns their norm before clipping."""
        squares = [each for plane, grad in zip(self.planes, grads, strict=True) for each in self.squares(plane, grad)]
        grad_norm, scale, accepted = self.decide(squares)
        for plane, total in zip(self.planes, grads, strict=True):
            self.renew(plane, total, scale, accepted)
        return grad_norm


def _check(**given: Any) -> None:
    """Refuse arguments of another kind; None stands for the default."""
    expected: dict[str, tuple[Any, str]] = {
        "model": (nn.Module, "a torch.nn.Module"),
        "loss": (Callable, "a function of (model, batch) that returns (sum, count)"),
        "schedule": (Callable, "a function of the update's index, such as monograph.warmup_cosine(...)"),
        "precision": (Precision, 'a monograph.Precision("bf16") or the like'),
        "remat": (Policy, "one of monograph.Remat's, such as Remat.Full()"),
    }
    for name, (kind, words) in expected.items():
        value = given[name]
        if not isinstance(value, kind) and (value is not None or name in ("model", "loss")):
            raise UsageError(f"{name} is a {type(value).__name__}: expected {words}")


# ── the step ────────────────────────────────────────────────────────────────────────────────────


def accumulate(step: Step, window: Iterable[Any]) -> None:
    """Add the gradient of one update: its micro-batches may be ragged, padded, few or many.

    Args:
        step: the step whose gradients are added to.
        window: the update's micro-batches, in any form that the step's loss takes.
    """
    if isinstance(window, (Mapping, Tensor)):
        raise UsageError("a window is a list of micro-batches: pass [batch], not batch")
    batches = list(window)
    with all_or_nothing(step):
        step.count_window(batches)
        for plane in step.planes:
            plane.link()
        for batch in batches:
            step.settle(batch)
            step.micro_step(batch)


def update(step: Step) -> Update:
    """Clip, update and clear: once per window, however many micro-batches it had.

    An update whose loss or gradient is not finite, or whose window had no target, changes neither weights nor optimizer
    state; the device decides, and `Update.skipped` counts.
    """
    with all_or_nothing(step):
        return closed(step, step.set_lr(), step.apply())


@contextmanager
def all_or_nothing(step: Step) -> Iterator[None]:
    """What fails in the block leaves nothing that was accumulated: the next window's update would be of both."""
    try:
        yield
    except BaseException:  # Ctrl-C, too
        step.discard()
        raise


def closed(step: Step, lr: float | tuple[float, ...], grad_norm: Tensor) -> Update:
    """What an update did that was just applied; the next window begins."""
    loss, count = step.loss_sum / step.count, step.count.clone()
    step.loss_sum.zero_()
    step.count.zero_()
    step.index += 1
    return Update(step.index - 1, loss, count, lr, grad_norm, step.tokens.clone(), step.skipped.clone())


# ────────────────────────────────────────────────────────────────────────────────────────────────
