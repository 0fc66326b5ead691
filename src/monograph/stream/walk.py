"""The walk: for each stage, for each micro-batch. Forward, back, and the update, with what comes next on its way.

All micro-batches of a window go through a stage before the next one is looked at, so weights cross the link once in
each direction of an update, however many micro-batches it has. Only what goes from stage to stage is kept on the way
there; on the way back a stage computes again what its gradient needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from torch import Tensor

from monograph.optim import Plane
from monograph.step import Step
from monograph.stream.boundaries import Boundaries
from monograph.stream.lanes import Home, Lanes, Space
from monograph.stream.passes import Passes
from monograph.stream.placement import Placement
from monograph.stream.slots import Slots, StageOnDevice
from monograph.stream.store import GRADIENT, Stage, Store
from monograph.stream.updates import Updates

Observe = Callable[[Sequence[Plane]], None]


class Walk:
    """Takes micro-batches through the stages of a model and back.

    Attributes:
        store: the stages.
        lanes: what copies and computes.
        slots: where stages are on the device.
        boundaries: what goes from stage to stage.
        updates: of them.
        fresh: whether no gradient was added since the last update.
    """

    def __init__(self, step: Step, store: Store, lanes: Lanes, placement: Placement):
        """Take the device's memory; `step` is the one whose loss, context and update are used."""
        self.step, self.store, self.lanes, self.placement = step, store, lanes, placement
        self.passes = Passes(step)
        self.slots = Slots(store.stages, store.tied, lanes, placement.device)
        self.boundaries = Boundaries(lanes, placement.device, offloaded=placement.offload, last=len(store.stages) - 1)
        self.updates = Updates(step, store, lanes, placement)
        # No zeros are written at home for it: a slot's gradients are emptied when they are first added to.
        self.fresh = True
        lanes.finish()  # what was done to this memory, and to the planes, no lane knows of

    @property
    def device_bytes(self) -> int:
        """What slots and staging buffers take."""
        return self.slots.device_bytes + self.updates.device_bytes

    # ── there and back ──────────────────────────────────────────────────────────────────────────

    def accumulate(self, batches: Sequence[Any], observe: Observe | None = None) -> None:
        """Add the gradient, losses and counts of the micro-batches.

        Args:
            batches: of one window.
            observe: is called with each stage's planes on the device when its gradient is complete; no update is made.
        """
        updates = self.updates
        if updates.waiting and observe:
            updates.flush()
        updates.repeatable = True
        further = self._forward(batches, keep=True)
        first, *middle, last = self.store.stages
        gradients: list[Any] = [None for _ in batches]
        in_backward = updates.in_backward and observe is None
        # The last stage first, as its gradient is what all others are computed from.
        for here in self._visits([last, *reversed(middle), first], back=len(batches)):
            self._prepare_gradients(here)
            for g, batch in enumerate(batches):
                self._backward(here, g, batch, further, gradients)
                updates.update_some(len(batches))
            if observe:
                self.lanes.compute(functools.partial(observe, here.planes), here.writes)
                continue
            if in_backward and here.stage is last:
                updates.decide_by_losses()
            updates.measure(here)
            updates.store_gradients(here)
            if in_backward:
                updates.update_in_backward(here)
        updates.finish_begun()
        self.fresh = False

    def evaluate(self, batches: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
        """Return the sum of losses and the targets of each micro-batch."""
        self._forward(batches, keep=False)
        last = self.store.stages[-1]
        here, scores = self._next(last, back=0)(), []
        for g, batch in enumerate(batches):
            state, space = self.boundaries.take(last.index, g)
            scores.append(self._compute(here, functools.partial(self.passes.score, state, batch), [space]))
        return scores

    def _forward(self, batches: Sequence[Any], *, keep: bool) -> list[Any]:
        """Run every stage but the last forward; return what each micro-batch's blocks take besides."""
        further: list[Any] = [None for _ in batches]
        self.updates.finish_begun()
        self.boundaries.clear()
        for here in self._visits(self.store.stages[:-1]):
            stage = here.stage
            for g, batch in enumerate(batches):
                if stage.blocks:
                    state, space = self.boundaries.of(stage.index, g)
                    work = functools.partial(self.passes.forward, stage, state, further[g])
                    output = self._compute(here, work, [space])
                else:
                    output, further[g] = self._compute(here, functools.partial(self.passes.first, batch))
                self.boundaries.put(stage.index + 1, g, output, keep=keep)
                self.updates.update_some(len(batches))
            self.boundaries.passed(stage.index, keep=keep)
        return further

    def _backward(self, here: StageOnDevice, g: int, batch: Any, further: list[Any], gradients: list[Any]) -> None:
        planes = [plane for stage in self._needed(here) for plane in stage.planes]
        first, last = self.store.stages[0], self.store.stages[-1]
        if here.stage is first:
            last_one = functools.partial(self.passes.first_again, planes, batch, gradients[g])
            self._compute(here, last_one, backward=True)
            return
        state, space = self.boundaries.take(here.stage.index, g)
        if here.stage is last:
            work = functools.partial(self.passes.loss, planes, state, batch)
        else:
            work = functools.partial(
                self.passes.again, planes, state, stage=here.stage, further=further[g], gradient=gradients[g]
            )
        gradients[g] = self._compute(here, work, [space], backward=True)

    def _visits(self, order: Sequence[Stage], back: int = 0) -> Iterator[StageOnDevice]:
        """Yield the stages on the device, one after another, the next one under way meanwhile.

        On the way back so are the inputs of `back` micro-batches.
        """
        ready = self._next(order[0], back)()
        for _, following in pairwise([*order, None]):
            # Asked for before this stage is computed with, so that it comes meanwhile.
            coming = self._next(following, back) if following else None
            yield ready
            if coming is not None:
                ready = coming()

    def _next(self, stage: Stage, back: int) -> Callable[[], StageOnDevice]:
        """Have a stage's weights fetched, or its update prepared; return what to call when it is wanted."""
        if back:
            self.boundaries.fetch(stage.index, back)
        if stage not in self.updates.waiting:
            here = self.slots.fetch(stage)
            return lambda: here
        # Weights that are updated on the device on their way need no second trip: they go from there to the slot.
        into = self.slots.claim(stage)
        self.updates.begin(stage, into)
        return lambda: self._finished(into)

    def _finished(self, into: StageOnDevice) -> StageOnDevice:
        self.updates.finish_begun()
        return into

    def _compute(
        self, here: StageOnDevice, call: Callable[[], Any], also_reads: Sequence[Space] = (), *, backward: bool = False
    ) -> Any:
        """Run with the stage's weights, and those that it shares, in the model's parameters."""
        needed = self._needed(here)
        work = functools.partial(self.bound, needed, call, backward)
        reads = [*also_reads, *(space for stage in needed for space in stage.reads)]
        return self.lanes.compute(work, reads, [s for stage in needed for s in stage.writes] if backward else ())

    def bound(self, needed: Sequence[StageOnDevice], call: Callable[[], Any], backward: bool) -> Any:
        """Call with the model's parameters in the slots, and with their gradients there if `backward`."""
        with ExitStack() as stack:
            for stage in needed:
                stack.enter_context(stage.parameters())
                if backward:
                    stage.link()
            return call()

    def _needed(self, here: StageOnDevice) -> list[StageOnDevice]:
        first, last = self.store.stages[0], self.store.stages[-1]
        # Tied weights lie in the first stage's slot, and both stages add to one gradient there.
        return [here, self.slots.fetch(first)] if self.store.tied and here.stage is last else [here]

    # ── gradients ───────────────────────────────────────────────────────────────────────────────

    def _prepare_gradients(self, here: StageOnDevice) -> None:
        """Make the slot's gradients zero, or what was added before."""
        if self.store.tied and here.stage is self.store.stages[0]:
            return  # done where they were first needed
        for stage in self._needed(here):
            for stored, plane in zip(stage.stage.stored, stage.planes, strict=True):
                home = stored.buffers[GRADIENT]
                if self.fresh:
                    self.lanes.compute(plane.grad.zero_, writes=stage.writes)
                # A second window of the same update adds to what the first one left at home.
                elif home.space.home != Home.DEVICE:
                    self.lanes.copy(plane.grad, home.tensor, stage.slot.gradients.space, home.space)

    # ── updates ─────────────────────────────────────────────────────────────────────────────────

    def update(self) -> Tensor:
        """Clip and apply what was added; return the gradient's norm before clipping."""
        grad_norm = self.updates.decide(fresh=self.fresh)
        self.fresh = True
        return grad_norm

    def flush(self) -> None:
        """See `Updates.flush`."""
        self.updates.flush()

    def discard(self) -> None:
        """Forget what was added since the last update."""
        self.fresh = True
