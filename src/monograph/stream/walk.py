"""Walk over the stages, each with all micro-batches: forward, backward and the update, while the
next stage is fetched.

All micro-batches of a window go through a stage before the next stage, so weights cross the link
once in each direction of an update, however many micro-batches there are. The forward pass keeps
only the inputs of stages, on the device or on the host (`Boundaries`); in the backward pass a stage
computes again what its gradient needs.

A state is the tensor that passes from one stage to the next for one micro-batch; an update has G
micro-batches.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from monograph.optim import Plane
from monograph.step import Step
from monograph.stream.lanes import Home, Lanes, Space
from monograph.stream.placement import Placement, on_host
from monograph.stream.slots import Passes, Slots, StageOnDevice
from monograph.stream.store import GRADIENT, Further, Stage, Store
from monograph.stream.updates import Updates

T = TypeVar("T")
# Sets of device memory for G states that come back from the host: one in use, one being filled.
RINGS = 2


class Boundaries:
    """The inputs of all stages but the first.

    Kept on the device, they are (stages - 1) G states. Offloaded, they are at most 4 G states on
    the device for any depth, 2 G of them for inputs that come back, and the host keeps the rest.

    Attributes:
        most_bytes: the most bytes on the device at any moment: of inputs, and of the gradient of
            the input in use.
    """

    def __init__(self, lanes: Lanes, device: torch.device, *, offloaded: bool, last: int):
        """Begin with no inputs; `last` is the index of the last stage, whose inputs are needed
        again at once.
        """
        self.lanes = lanes
        self.device = device
        self.offloaded = offloaded
        self.last = last
        self.most_bytes = 0
        self._states: dict[tuple[int, int], tuple[Tensor, Space]] = {}
        self._host: dict[tuple[int, int], tuple[Tensor, Space]] = {}
        self._rings: dict[tuple[int, int], tuple[Tensor, Space]] = {}

    @property
    def device_bytes(self) -> int:
        """Return the bytes of inputs on the device now."""
        distinct = {id(kept): kept for kept, _ in (*self._states.values(), *self._rings.values())}
        return sum(kept.nbytes for kept in distinct.values())

    def put(self, stage: int, g: int, state: Tensor, *, keep: bool) -> None:
        """Take over micro-batch g's input of a stage; `keep` it for the backward pass."""
        # Each input has a space of its own, so that a reader waits for this input alone.
        space = Space(f"input {g} of stage {stage}", Home.DEVICE)
        self._states[stage, g] = state, space
        self.most_bytes = max(self.most_bytes, self.device_bytes)
        # The stage before wrote it: readers wait for its computation.
        self.lanes.compute(lambda: None, writes=[space])
        # The last stage's input stays: the backward pass needs it first.
        if keep and self.offloaded and stage != self.last:
            like = self._host.get((stage, g))
            # Page-locked memory is slow to get, and the next update's inputs usually have the same
            # shapes, so it is kept until a shape differs.
            if like is None or like[0].shape != state.shape or like[0].dtype != state.dtype:
                label = f"kept input {g} of stage {stage}"
                like = self._host[stage, g] = (
                    on_host(state, label, self.device),
                    Space(label, Home.HOST),
                )
            self.lanes.copy(like[0], state, like[1], space)

    def passed(self, stage: int, *, keep: bool) -> None:
        """Release a stage's inputs on the device after its forward pass, if they are not kept
        there.
        """
        if stage == self.last or (keep and not self.offloaded):
            return
        # This happens after all micro-batches, so that the allocator can give the memory to the
        # next stage.
        for key in [key for key in self._states if key[0] == stage]:
            _, space = self._states.pop(key)
            # Later computations may reuse its memory: they wait for the copy.
            self.lanes.compute(lambda: None, writes=[space])

    def fetch(self, stage: int, count: int) -> None:
        """Copy a stage's inputs for `count` micro-batches back to the device."""
        # The first stage reads the batch itself, and the last one's inputs have never left.
        if not self.offloaded or stage in (0, self.last):
            return
        for g in range(count):
            home, its_space = self._host[stage, g]
            at = stage % RINGS, g
            ring = self._rings.get(at)
            if ring is None or ring[0].shape != home.shape or ring[0].dtype != home.dtype:
                memory = torch.empty(home.shape, dtype=home.dtype, device=self.device)
                ring = self._rings[at] = memory, Space(f"ring {at}", Home.DEVICE)
                # Earlier computations may have used this memory.
                self.lanes.compute(lambda: None, writes=[ring[1]])
            self.lanes.copy(ring[0], home, ring[1], its_space)
            self._states[stage, g] = ring

    def of(self, stage: int, g: int) -> tuple[Tensor, Space]:
        """Return a stage's input on the device, and the space that its readers read."""
        return self._states[stage, g]

    def take(self, stage: int, g: int) -> tuple[Tensor, Space]:
        """Return the same as `of`, and forget it."""
        self.most_bytes = max(self.most_bytes, self.device_bytes + self._states[stage, g][0].nbytes)
        return self._states.pop((stage, g))

    def clear(self) -> None:
        """Forget the inputs on the device."""
        self._states.clear()


Observe = Callable[[Sequence[Plane]], None]


class Walk:
    """The walk of micro-batches through the stages of a model and back.

    Attributes:
        store: the stages.
        lanes: the lanes that copy and compute.
        passes: all that is computed.
        slots: the device memory for stages.
        boundaries: the inputs of stages.
        updates: the updates of stages.
        fresh: whether no gradient was added since the last update.
        sum_over_ranks: sums a tensor over the processes that train together; None for a single
            process.
    """

    def __init__(
        self,
        step: Step,
        store: Store,
        lanes: Lanes,
        placement: Placement,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
        passes: Callable[[Step], Passes] = Passes,
    ):
        """Allocate the device's memory; loss, context and update are those of `step`, which
        `passes` computes.
        """
        self.step = step
        self.store = store
        self.lanes = lanes
        self.placement = placement
        self.passes = passes(step)
        self.slots = Slots(store.stages, store.tied, lanes, placement.device)
        self.boundaries = Boundaries(
            lanes, placement.device, offloaded=placement.offload, last=len(store.stages) - 1
        )
        self.updates = Updates(step, store, lanes, placement, self.passes)
        # Gradients at home need no zeros then: a slot's gradients are set to zero before they are
        # first added to.
        self.fresh = True
        self.sum_over_ranks = sum_over_ranks
        lanes.finish()  # no lane knows of the work that made this memory and the planes

    @property
    def device_bytes(self) -> int:
        """Return the bytes of slots and staging buffers."""
        return self.slots.device_bytes + self.updates.device_bytes

    # ── there and back ──────────────────────────────────────────────────────────────────────────

    def accumulate(self, batches: Sequence[object], observe: Observe | None = None) -> None:
        """Add the gradient, losses and counts of the micro-batches.

        Args:
            batches: the micro-batches of one window.
            observe: a function that is called with each stage's planes on the device once its
                gradient is complete; no update is made then.
        """
        updates = self.updates
        if updates.waiting and observe:
            updates.flush()
        updates.repeatable = True
        further = self._forward(batches, keep=True)
        first, *middle, last = self.store.stages
        gradients: dict[int, Tensor] = {}  # of the states, by micro-batch
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
                    self.lanes.compute(
                        functools.partial(self._sum, plane, self.sum_over_ranks), here.writes
                    )
            if in_backward and here.stage is last:
                updates.decide_by_losses()
            updates.measure(here)
            updates.store_gradients(here)
            if in_backward:
                updates.update_in_backward(here)
        updates.finish_begun()
        self.fresh = False

    def evaluate(self, batches: Sequence[object]) -> list[tuple[Tensor, Tensor]]:
        """Return the sum of losses and the number of targets of each micro-batch."""
        self._forward(batches, keep=False)
        last = self.store.stages[-1]
        here = self._next(last, back=0)()
        scores = []
        for g, batch in enumerate(batches):
            state, space = self.boundaries.take(last.index, g)
            scores.append(
                self._compute(here, functools.partial(self.passes.score, state, batch), [space])
            )
        return scores

    def _forward(self, batches: Sequence[object], *, keep: bool) -> list[Further]:
        """Run all stages but the last forward; return for each micro-batch the other arguments of
        its blocks.
        """
        further: list[Further] = [() for _ in batches]
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
                    output, further[g] = self._compute(
                        here, functools.partial(self.passes.first, batch)
                    )
                self.boundaries.put(stage.index + 1, g, output, keep=keep)
                self.updates.update_some(len(batches))
            self.boundaries.passed(stage.index, keep=keep)
        return further

    def _backward(
        self,
        here: StageOnDevice,
        g: int,
        batch: object,
        further: list[Further],
        gradients: dict[int, Tensor],
    ) -> None:
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
                self.passes.again,
                planes,
                state,
                stage=here.stage,
                further=further[g],
                gradient=gradients[g],
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
        """Begin to fetch a stage's weights, or to update it; return a function that returns the
        stage on the device.
        """
        if back:
            self.boundaries.fetch(stage.index, back)
        if stage not in self.updates.waiting:
            here = self.slots.fetch(stage)
            return lambda: here
        # Weights that are updated on the device first go from there to the slot, instead of
        # crossing the link again.
        into = self.slots.claim(stage)
        self.updates.begin(stage, into)
        return lambda: self._finished(into)

    def _finished(self, into: StageOnDevice) -> StageOnDevice:
        self.updates.finish_begun()
        return into

    def _compute(
        self,
        here: StageOnDevice,
        call: Callable[[], T],
        also_reads: Sequence[Space] = (),
        *,
        backward: bool = False,
    ) -> T:
        """Run a call while the model's parameters are the stage's weights on the device, shared
        ones included.
        """
        needed = self._needed(here)
        work = functools.partial(self.passes.bound, needed, call, backward)
        reads = [*also_reads, *(space for stage in needed for space in stage.reads)]
        return self.lanes.compute(
            work, reads, [s for stage in needed for s in stage.writes] if backward else ()
        )

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
                # A second window of the same update adds to the gradient that the first one left at
                # home.
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
