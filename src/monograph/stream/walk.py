"""Walk over the stages, each with all micro-batches: forward, backward and the update, while the next stage is fetched.

All micro-batches of a window go through a stage before the next stage, so weights cross the link once in each direction
of an update, however many micro-batches there are. The forward pass keeps only the inputs of stages; in the backward
pass a stage computes again what its gradient needs.
"""

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
    """The walk of micro-batches through the stages of a model and back.

    Attributes:
        store: the stages.
        lanes: the lanes that copy and compute.
        slots: the device memory for stages.
        boundaries: the inputs of stages.
        updates: the updates of stages.
        fresh: whether no gradient was added since the last update.
        sum_over_ranks: sums a tensor over the processes that train together; None for a single process.
    """

    def __init__(self, step: Step, store: Store, lanes: Lanes, placement: Placement):
        """Allocate the device's memory; loss, context and update are those of `step`."""
        self.step, self.store, self.lanes, self.placement = step, store, lanes, placement
        self.passes = Passes(step)
        self.slots = Slots(store.stages, store.tied, lanes, placement.device)
        self.boundaries = Boundaries(lanes, placement.device, offloaded=placement.offload, last=len(store.stages) - 1)
        self.updates = Updates(step, store, lanes, placement)
        # Gradients at home need no zeros then: a slot's gradients are set to zero before they are first added to.
        self.fresh = True
        self.sum_over_ranks: Callable[[Tensor], Tensor] | None = None
        lanes.finish()  # no lane knows of the work that made this memory and the planes

    @property
    def device_bytes(self) -> int:
        """Return the bytes of slots and staging buffers."""
        return self.slots.device_bytes + self.updates.device_bytes

    # ── there and back ──────────────────────────────────────────────────────────────────────────

    def accumulate(self, batches: Sequence[Any], observe: Observe | None = None) -> None:
        """Add the gradient, losses and counts of the micro-batches.

        Args:
            batches: the micro-batches of one window.
            observe: a function that is called with each stage's planes on the device once its gradient is complete;
                no update is made then.
        """
        updates = self.updates
        if updates.waiting and observe:
            updates.flush()
        updates.repeatable = True
        further = self._forward(batches, keep=True)
        first, *middle, last = self.store.stages
        gradients: list[Any] = [None for _ in batches]
        in_backward = updates.in_backward and observe is None
        # The last stage comes first, as all other gradients are computed from its gradient.
        for here in self._visits([last, *reversed(middle), first], back=len(batches)):
            self._prepare_gradients(here)
            for g, batch in enumerate(batches):
                self._backward(here, g, batch, further, gradients)
                updates.update_some(len(batches))
            if observe:
                self.lanes.compute(functools.partial(observe, here.planes), here.writes)
                continue
            if self.sum_over_ranks:
                for plane in here.planes:
                    self.lanes.compute(functools.partial(self._sum, plane, self.sum_over_ranks), here.writes)
            if in_backward and here.stage is last:
                updates.decide_by_losses()
            updates.measure(here)
            updates.store_gradients(here)
            if in_backward:
                updates.update_in_backward(here)
        updates.finish_begun()
        self.fresh = False

    def evaluate(self, batches: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
        """Return the sum of losses and the number of targets of each micro-batch."""
        self._forward(batches, keep=False)
        last = self.store.stages[-1]
        here, scores = self._next(last, back=0)(), []
        for g, batch in enumerate(batches):
            state, space = self.boundaries.take(last.index, g)
            scores.append(self._compute(here, functools.partial(self.passes.score, state, batch), [space]))
        return scores

    def _forward(self, batches: Sequence[Any], *, keep: bool) -> list[Any]:
        """Run all stages but the last forward; return for each micro-batch the other arguments of its blocks."""
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
        """Yield the stages on the device, one after another, while the next one is fetched.

        In a backward pass the inputs of `back` micro-batches are fetched as well.
        """
        ready = self._next(order[0], back)()
        for _, following in pairwise([*order, None]):
            # It is requested before this stage computes, so that it comes meanwhile.
            coming = self._next(following, back) if following else None
            yield ready
            if coming is not None:
                ready = coming()

    def _next(self, stage: Stage, back: int) -> Callable[[], StageOnDevice]:
        """Begin to fetch a stage's weights, or to update it; return a function that returns the stage on the device."""
        if back:
            self.boundaries.fetch(stage.index, back)
        if stage not in self.updates.waiting:
            here = self.slots.fetch(stage)
            return lambda: here
        # Weights that are updated on the device first go from there to the slot, instead of crossing the link again.
        into = self.slots.claim(stage)
        self.updates.begin(stage, into)
        return lambda: self._finished(into)

    def _finished(self, into: StageOnDevice) -> StageOnDevice:
        self.updates.finish_begun()
        return into

    def _compute(
        self, here: StageOnDevice, call: Callable[[], Any], also_reads: Sequence[Space] = (), *, backward: bool = False
    ) -> Any:
        """Run a call while the model's parameters are the stage's weights on the device, shared ones included."""
        needed = self._needed(here)
        work = functools.partial(self.bound, needed, call, backward)
        reads = [*also_reads, *(space for stage in needed for space in stage.reads)]
        return self.lanes.compute(work, reads, [s for stage in needed for s in stage.writes] if backward else ())

    def bound(self, needed: Sequence[StageOnDevice], call: Callable[[], Any], backward: bool) -> Any:
        """Run a call while the model's parameters are in the slots, and their gradients, too, if `backward`."""
        with ExitStack() as stack:
            stack.enter_context(self.step.fusing())
            for stage in needed:
                stack.enter_context(stage.parameters())
                if backward:
                    stage.link()
            return call()

    def _needed(self, here: StageOnDevice) -> list[StageOnDevice]:
        first, last = self.store.stages[0], self.store.stages[-1]
        # Tied weights lie in the first stage's slot, where both stages add to one gradient.
        return [here, self.slots.fetch(first)] if self.store.tied and here.stage is last else [here]

    # ── gradients ───────────────────────────────────────────────────────────────────────────────

    def _prepare_gradients(self, here: StageOnDevice) -> None:
        """Set the slot's gradients to zero, or to the sum of earlier windows."""
        if self.store.tied and here.stage is self.store.stages[0]:
            return  # the last stage, which adds to the same gradients, has done it
        for stage in self._needed(here):
            for stored, plane in zip(stage.stage.stored, stage.planes, strict=True):
                home = stored.buffers[GRADIENT]
                if self.fresh:
                    self.lanes.compute(plane.grad.zero_, writes=stage.writes)
                # A second window of the same update adds to the gradient that the first one left at home.
                elif home.space.home != Home.DEVICE:
                    self.lanes.copy(plane.grad, home.tensor, stage.slot.gradients.space, home.space)

    @staticmethod
    def _sum(plane: Plane, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        plane.grad.copy_(sum_over_ranks(plane.grad))

    # ── updates ─────────────────────────────────────────────────────────────────────────────────

    def update(self) -> Tensor:
        """Clip and apply the accumulated gradient; return its norm before clipping."""
        grad_norm = self.updates.decide(fresh=self.fresh)
        self.fresh = True
        return grad_norm

    def discard(self) -> None:
        """Forget the gradient that was added since the last update."""
        self.fresh = True
