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
from monograph.graph.remat import Policy
from monograph.loss import Loss, token_loss
from monograph.optim import AdamW, Optimizer, Plane, join, split
from monograph.resident import IGNORE
from monograph.schedule import Schedule
from monograph.step import Step
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

    CAPTURED_BESIDE_BLOCKS: tuple[str, ...] = ("squares", "renew_part")

    def __init__(  # noqa: PLR0913 - those of a step, and two
        self,
        model: nn.Module,
        *,
        loss: Loss = token_loss,
        optim: Optimizer | None = None,
        schedule: Schedule | None = None,
        clip: float | None = None,
        precision: Precision | None = None,
        remat: Policy | None = None,
        placement: Placement | None = None,
        lanes: Lanes | None = None,
    ):
        """Prepare a step; see `monograph.Streamed`."""
        optim, precision = optim or AdamW(), precision or Precision()
        self.placement = placement or Placement()
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
        super().__init__(model, loss=loss, optim=optim, schedule=schedule, clip=clip, precision=precision, remat=remat)
        self.recorder = None
        self.walk = Walk(self, self.store, lanes or Lanes(executor(self.placement.device)), self.placement)
        self.renew_part: Callable[..., None] = self._renew_part

    def laid_out(self) -> list[Plane]:
        """The planes of all stages, at home."""
        self.store = stored(
            self.model,
            self.optim.kinds(self.model),
            self.optim,
            rounds=self._rounds,
            placement=self.placement,
        )
        return [each.plane for each in self.store.stored]

    def place(self) -> torch.device:
        """Where it computes."""
        return self.placement.device

    def accumulate(self, batches: Sequence[Any], observe: Observe | None = None) -> None:
        """Add the gradient of the micro-batches; the arguments are those of `Walk.accumulate`."""
        if self.placement.when == "backward" and observe is None:
            if not self.walk.fresh:
                raise UsageError("weights that are updated during the backward pass take one window an update")
            self.set_lr()
        self.count_window(batches)
        for batch in batches:
            self.settle(batch)
        self.walk.accumulate(batches, observe)

    def warm(self, batch: Any) -> None:
        """Compile everything that an update runs; nothing changes."""
        kept = {name: counter.clone() for name, counter in self.counters.items()}
        self.accumulate([without_targets(batch)])
        self.apply()  # without a target the device refuses it
        self.walk.flush()
        self.discard()
        for name, counter in self.counters.items():
            counter.copy_(kept[name])

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
    def assembled(self) -> Iterator[None]:
        """In the block the module is what it was made as: at home, its weights in fp32. Only to look at."""
        self.changed_at_home()
        split_ones = [each for each in self.store.stored if each.splits]
        for each in split_ones:
            _point(each.plane, each.plane.state["ema"] if self.holds_average else each.master())
        try:
            yield
        finally:
            for each in split_ones:
                _point(each.plane, each.plane.param)


def _point(plane: Plane, flat: Tensor) -> None:
    for (_, parameter, _), (_, view) in zip(plane.slots, plane.views(flat), strict=True):
        parameter.data = view


def without_targets(batch: Any) -> Any:
    """The batch with nothing to predict, so that an update of it is refused."""
    return {name: torch.full_like(t, IGNORE) if name == "targets" else t for name, t in batch.items()}
