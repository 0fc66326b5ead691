"""The streamed step: the resident step's loss, decision and update, without its planes on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph.lora import adapters
from monograph.graph.precision import Precision
from monograph.optim import AdamW, Optimizer, Plane, join, split
from monograph.step import Clip, Step
from monograph.step.step import all_or_nothing
from monograph.stream.at_home import join_, split_
from monograph.stream.cuda import executor
from monograph.stream.lanes import Lanes
from monograph.stream.placement import Placement
from monograph.stream.store import stored
from monograph.stream.walk import Observe, Walk


class StreamedStep(Step):
    """A step whose planes live where a placement says, and come to the device stage by stage.

    Attributes:
        placement: where.
        store: the stages.
        walk: what takes micro-batches through them.
    """

    CAPTURED_BESIDE_BLOCKS: tuple[str, ...] = (
        "squares",
        "renew_part",
        "renew_at_home",
        "join_at_home",
        "split_at_home",
    )

    def __init__(
        self,
        model: nn.Module,
        *,
        optim: Optimizer | None = None,
        clip: float | Clip | None = None,
        precision: Precision | None = None,
        placement: Placement | None = None,
        lanes: Lanes | None = None,
        **others: Any,
    ):
        """Prepare a step; see `monograph.Streamed`. `others` are `Step`'s own."""
        optim, precision = optim or AdamW(), precision or Precision()
        self.placement = placement or Placement()
        if not isinstance(self.placement, Placement):
            raise UsageError(f"placement = {placement!r}: expected a monograph.Placement(...)")
        if self.placement.when == "backward" and clip is not None:
            raise UsageError(
                "weights that are updated during the backward pass cannot be clipped by the whole gradient's norm: "
                'clip=None, or when="next forward", which hides the update too'
            )
        if optim.state == "all-bf16":
            raise UsageError("memory = stream keeps full-precision weights: all-bf16 is for memory = device")
        if adapters(model):
            raise UsageError("memory = stream fetches weights that are trained, not frozen ones: take memory = device")
        self._rounds = precision.rounds
        super().__init__(model, optim=optim, clip=clip, precision=precision, **others)
        self.recorder = None
        self.walk = Walk(self, self.store, lanes or Lanes(executor(self.placement.device)), self.placement)
        self.renew_part: Callable[..., None] = self._renew_part
        self.renew_at_home: Callable[..., None] = self.walk.updates.at_home.renew
        self.join_at_home: Callable[..., None] = join_
        self.split_at_home: Callable[..., None] = split_

    def laid_out(self) -> list[Plane]:
        """The planes of all stages, at home."""
        self.store = stored(
            self.model, self.optim.kinds(self.model), self.optim, rounds=self._rounds, placement=self.placement
        )
        return [each.plane for each in self.store.stored]

    def place(self) -> torch.device:
        """Where it computes."""
        return self.placement.device

    def set_lr(self) -> float | tuple[float, ...]:
        """See `Step.set_lr`; an update that still waits is made first, by its own."""
        self.walk.flush()
        return super().set_lr()

    def accumulate(self, batches: Sequence[Any], observe: Observe | None = None) -> None:
        """Add the gradient of the micro-batches; the arguments are those of `Walk.accumulate`."""
        if self.placement.when == "backward" and observe is None:
            if not self.walk.fresh:
                raise UsageError("weights that are updated during the backward pass take one window an update")
            self.set_lr()
        with all_or_nothing(self):
            self.count_window(batches)
            for batch in batches:
                self.settle(batch)
            self.walk.accumulate(batches, observe)

    def discard(self) -> None:
        """Forget what was accumulated since the last update."""
        self.walk.discard()
        self.loss_sum.zero_()
        self.count.zero_()

    def _apply(self) -> Tensor:
        return self.walk.update()

    def _renew_part(self, plane: Plane, rest: Tensor | None, total: Tensor, scale: Tensor, accepted: Tensor) -> None:
        """Update a part of a plane, and where its weights are split: joined, and split again."""
        if rest is None:
            self.renew(plane, total, scale, accepted)
            return
        whole = replace(plane, param=join(plane.param, rest))
        self.renew(whole, total, scale, accepted)
        hi, lo = split(whole.param)
        plane.param.copy_(hi)
        rest.copy_(lo)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """See `Step.averaged`; what is on the device is fetched anew."""
        if self.optim.ema is None or self.holds_average:
            yield
            return
        self.changed_at_home()
        with ExitStack() as stack:
            stack.callback(self.changed_at_home)
            stack.enter_context(super().averaged())
            stack.callback(self.walk.lanes.finish)  # before the average, on its way to the device, is written over
            yield

    def at_home(self) -> None:
        """Have every update made and brought home."""
        self.walk.flush()
        self.walk.lanes.finish()

    def changed_at_home(self) -> None:
        """The same, and what is at home fetched anew."""
        self.at_home()
        for stage in self.store.stages:
            stage.version += 1

    @contextmanager
    def assembled(self) -> Iterator[nn.Module]:
        """See `Step.assembled`: the module is what it was made as, at home, its weights in fp32."""
        self.changed_at_home()
        split_ones = [each for each in self.store.stored if each.splits]
        for each in split_ones:
            each.plane.hold(each.plane.state["ema"] if self.holds_average else each.master())
        try:
            yield self.model
        finally:
            for each in split_ones:
                each.plane.hold(each.plane.param)
