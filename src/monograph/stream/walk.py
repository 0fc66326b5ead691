"""Walk over the stages with all micro-batches, forward and backward, and fetch the next stage
while the current one computes.

A stage is some consecutive blocks of the model, or the parts before or after them. Its weights come
to a slot, which is device memory for one stage (`monograph.stream.slots`). A window is the rows of
one update. All micro-batches of a window pass one stage before they pass the next. So weights cross
the link between host and device once in the forward pass and once in the backward pass, for any
number of micro-batches. The forward pass keeps only the inputs of stages, on the device or on the
host (`StageInputs`). In the backward pass a stage recomputes what its gradient needs.

A state is the tensor that one stage passes to the next for one micro-batch. A window has G
micro-batches.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from monograph.optim import Plane
from monograph.step import Step
from monograph.stream.lanes import Home, Lanes, Space
from monograph.stream.placement import Placement, on_host
from monograph.stream.slots import Passes, Slots, StageOnDevice
from monograph.stream.store import GRADIENT, BlockArguments, Buffer, Stage, Store
from monograph.stream.updates import Updates

T = TypeVar("T")
# The number of sets of device memory for inputs that come back from the host. A set holds one stage's
# G inputs. One set is in use while the other is filled.
INPUT_SETS = 2


class StageInputs:
    """The inputs of all stages except the first.

    If the inputs stay on the device, they are (stages - 1) · G states there. If they are offloaded,
    there are at most 4 G states on the device for any number of stages, and the host keeps the
    rest. These 4 G states are the inputs of the stage that computes, the inputs of the next stage, and
    INPUT_SETS = 2 sets of memory for inputs that come back.

    Attributes:
        lanes: the lanes that copy and compute.
        device: the device that computes.
        offloaded: whether inputs are kept on the host.
        last: the index of the last stage.
        peak_bytes: the largest number of bytes on the device so far, of inputs and of the gradient of
            the input in use.
    """

    def __init__(self, lanes: Lanes, device: torch.device, *, offloaded: bool, last: int):
        """Begin without inputs.

        Args:
            lanes: the lanes that copy and compute.
            device: the device that computes.
            offloaded: whether inputs are kept on the host.
            last: the index of the last stage; its inputs stay on the device, because the backward
                pass needs them first.
        """
        self.lanes = lanes
        self.device = device
        self.offloaded = offloaded
        self.last = last
        self.peak_bytes = 0
        # The inputs on the device, and the memory for kept inputs on the host, by (stage,
        # micro-batch).
        self._on_device: dict[tuple[int, int], Buffer] = {}
        self._host_copies: dict[tuple[int, int], Buffer] = {}
        # The memory for inputs that come back, by (number of the set, micro-batch).
        self._input_sets: dict[tuple[int, int], Buffer] = {}

    @property
    def device_bytes(self) -> int:
        """Return the bytes of inputs on the device now."""
        # An input that has come back is in both dicts, and counts once.
        buffers = (*self._on_device.values(), *self._input_sets.values())
        tensors = [buffer.tensor for buffer in buffers]
        distinct = {id(tensor): tensor for tensor in tensors}
        return sum(tensor.nbytes for tensor in distinct.values())

    def store_input(self, stage: int, g: int, state: Tensor, *, keep: bool) -> None:
        """Store an input.

        Args:
            stage: the index of the stage that has this input.
            g: the number of the micro-batch.
            state: the input.
            keep: whether the input is kept until the backward pass.
        """
        # Each input has its own space, so that a reader waits only for this input.
        space = Space(f"input {g} of stage {stage}", Home.DEVICE)
        self._on_device[stage, g] = Buffer(state, space)
        self.peak_bytes = max(self.peak_bytes, self.device_bytes)
        # The previous stage has computed the input, so readers wait for that computation.
        self.lanes.declare_written(space)
        # The last stage's input only stays on the device: the backward pass needs it first.
        if keep and self.offloaded and stage != self.last:
            host_copy = self._host_copies.get((stage, g))
            # Pinned memory is slow to allocate, and the next update's inputs usually have the same
            # shapes, so the memory is kept until a shape differs.
            if host_copy is None or not _fits(host_copy.tensor, state):
                label = f"kept input {g} of stage {stage}"
                memory = on_host(state, label, self.device)
                host_copy = self._host_copies[stage, g] = Buffer(memory, Space(label, Home.HOST))
            self.lanes.copy(host_copy.tensor, state, host_copy.space, space)

    def release_inputs(self, stage: int, *, keep: bool) -> None:
        """Release a stage's inputs after its forward pass, unless they stay on the device."""
        if stage == self.last or (keep and not self.offloaded):
            return
        # The inputs of all micro-batches are released together, so that the allocator can give their
        # memory to the next stage.
        for key in [key for key in self._on_device if key[0] == stage]:
            _, space = self._on_device.pop(key)
            # Later computations may reuse the memory, so they wait for the copy to the host.
            self.lanes.declare_written(space)

    def fetch_inputs(self, stage: int, count: int) -> None:
        """Copy a stage's inputs for `count` micro-batches back to the device."""
        # The first stage reads the batch itself, and the last stage's inputs never left the device.
        if not self.offloaded or stage in (0, self.last):
            return
        for g in range(count):
            host_copy = self._host_copies[stage, g]
            set_and_batch = stage % INPUT_SETS, g
            buffer = self._input_sets.get(set_and_batch)
            if buffer is None or not _fits(buffer.tensor, host_copy.tensor):
                memory = torch.empty(
                    host_copy.tensor.shape, dtype=host_copy.tensor.dtype, device=self.device
                )
                buffer = self._input_sets[set_and_batch] = Buffer(
                    memory, Space(f"returned input {set_and_batch}", Home.DEVICE)
                )
                # Earlier computations may have used this memory, so the copy waits for them.
                self.lanes.declare_written(buffer.space)
            self.lanes.copy(buffer.tensor, host_copy.tensor, buffer.space, host_copy.space)
            self._on_device[stage, g] = buffer

    def input_of(self, stage: int, g: int) -> Buffer:
        """Return a stage's input for a micro-batch, on the device."""
        return self._on_device[stage, g]

    def take_input(self, stage: int, g: int) -> Buffer:
        """Return a stage's input for a micro-batch, and release it, because it is not used again."""
        gradient_bytes = self._on_device[stage, g].tensor.nbytes  # the input's gradient is as large
        self.peak_bytes = max(self.peak_bytes, self.device_bytes + gradient_bytes)
        return self._on_device.pop((stage, g))

    def clear(self) -> None:
        """Release all inputs on the device."""
        self._on_device.clear()


def _fits(memory: Tensor, tensor: Tensor) -> bool:
    """Return whether memory has the shape and dtype of a tensor."""
    return memory.shape == tensor.shape and memory.dtype == tensor.dtype


# A function that is called with a stage's planes on the device when their gradient is complete.
Observe = Callable[[Sequence[Plane]], None]


class Walk:
    """The walk of micro-batches through the stages of a model and back.

    Attributes:
        store: the stages.
        lanes: the lanes that copy and compute.
        passes: computes the stages' passes and updates.
        slots: the device memory for stages.
        stage_inputs: the inputs of stages.
        updates: the updates of stages.
        gradient_is_empty: whether no gradient was added since the last update.
        sum_over_ranks: sums a tensor over all ranks; None: there is one rank.
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
        """Allocate the device's memory for slots and staging buffers.

        Args:
            step: the step, which has the loss, the context and the update.
            store: the stages.
            lanes: the lanes that copy and compute.
            placement: where buffers live and when weights are updated.
            sum_over_ranks: sums a tensor over all ranks; None: there is one rank.
            passes: makes the object that computes the step's passes and updates.
        """
        self.step = step
        self.store = store
        self.lanes = lanes
        self.placement = placement
        self.passes = passes(step)
        self.slots = Slots(store.stages, store.tied, lanes, placement.device)
        self.stage_inputs = StageInputs(
            lanes, placement.device, offloaded=placement.offload, last=len(store.stages) - 1
        )
        self.updates = Updates(step, store, lanes, placement, self.passes)
        # While this is true, gradients at home may have any values, because they are not read: a
        # slot's gradients are set to zero before anything is added to them.
        self.gradient_is_empty = True
        self.sum_over_ranks = sum_over_ranks
        # This memory and the planes were allocated outside of the lanes, which therefore cannot wait
        # for that work. So wait for it here.
        lanes.finish()

    @property
    def device_bytes(self) -> int:
        """Return the bytes of slots and staging buffers."""
        return self.slots.device_bytes + self.updates.device_bytes

    # ── forward and backward ────────────────────────────────────────────────────────────────────

    def accumulate(self, batches: Sequence[object], observe: Observe | None = None) -> None:
        """Add the gradient, losses and counts of the micro-batches.

        Args:
            batches: the micro-batches of one window.
            observe: called with each stage's planes on the device when the stage's gradient is
                complete. Then no weight is updated. None: weights are trained.
        """
        updates = self.updates
        # While gradients are only observed, no weight may be updated. So updates that wait come first.
        if updates.waiting and observe:
            updates.flush()
        updates.repeatable = True
        block_arguments = self._forward(batches, keep=True)
        first, *middle, last = self.store.stages
        gradients: dict[int, Tensor] = {}  # the gradient of the current state, by micro-batch
        updates_in_backward = updates.in_backward and observe is None
        # The last stage comes first, because all other gradients are computed from its gradient.
        backward_order = [last, *reversed(middle)]
        # Nothing needs the gradient of tokens, so a frozen embedding is not fetched again.
        if first.stored_planes:
            backward_order.append(first)
        for stage_on_device in self._visits(backward_order, inputs_to_fetch=len(batches)):
            self._prepare_gradients(stage_on_device)
            for g, batch in enumerate(batches):
                self._backward(stage_on_device, g, batch, block_arguments, gradients)
                updates.update_due_chunks(len(batches))
            if observe:
                self.lanes.compute(
                    functools.partial(observe, stage_on_device.planes), stage_on_device.writes
                )
                continue
            if self.sum_over_ranks:
                for plane in stage_on_device.planes:
                    self.lanes.compute(
                        functools.partial(self._sum, plane, self.sum_over_ranks),
                        stage_on_device.writes,
                    )
            if updates_in_backward and stage_on_device.stage is last:
                updates.decide_by_losses()
            updates.compute_squares(stage_on_device)
            updates.store_gradients(stage_on_device)
            if updates_in_backward:
                updates.update_in_backward(stage_on_device)
        updates.finish_current()
        self.gradient_is_empty = False

    def evaluate(self, batches: Sequence[object]) -> list[tuple[Tensor, Tensor]]:
        """Return the sum of losses and the number of targets of each micro-batch."""
        self._forward(batches, keep=False)
        last = self.store.stages[-1]
        finish_request = self._request(last, inputs_to_fetch=0)
        stage_on_device = finish_request()
        scores = []
        for g, batch in enumerate(batches):
            state, space = self.stage_inputs.take_input(last.index, g)
            scores.append(
                self._compute(
                    stage_on_device,
                    functools.partial(self.passes.evaluate_last, state, batch),
                    [space],
                )
            )
        return scores

    def _forward(self, batches: Sequence[object], *, keep: bool) -> list[BlockArguments]:
        """Run all stages except the last forward.

        Returns:
            For each micro-batch, the arguments of its blocks besides the state.
        """
        # The first stage replaces the empty tuples.
        block_arguments: list[BlockArguments] = [() for _ in batches]
        self.updates.finish_current()
        self.stage_inputs.clear()
        for stage_on_device in self._visits(self.store.stages[:-1]):
            stage = stage_on_device.stage
            for g, batch in enumerate(batches):
                if stage.blocks:
                    state, space = self.stage_inputs.input_of(stage.index, g)
                    work = functools.partial(
                        self.passes.forward_blocks, stage, state, block_arguments[g]
                    )
                    output = self._compute(stage_on_device, work, [space])
                else:
                    output, block_arguments[g] = self._compute(
                        stage_on_device, functools.partial(self.passes.forward_first, batch)
                    )
                self.stage_inputs.store_input(stage.index + 1, g, output, keep=keep)
                self.updates.update_due_chunks(len(batches))
            self.stage_inputs.release_inputs(stage.index, keep=keep)
        return block_arguments

    def _backward(
        self,
        stage_on_device: StageOnDevice,
        g: int,
        batch: object,
        block_arguments: list[BlockArguments],
        gradients: dict[int, Tensor],
    ) -> None:
        """Run a stage backward for micro-batch g.

        Args:
            stage_on_device: the stage.
            g: the number of the micro-batch.
            batch: the micro-batch.
            block_arguments: for each micro-batch, the arguments of its blocks besides the state.
            gradients: by micro-batch, the gradient of the stage's output. It is replaced by the
                gradient of the stage's input.
        """
        planes = [plane for stage in self._needed_stages(stage_on_device) for plane in stage.planes]
        first = self.store.stages[0]
        last = self.store.stages[-1]
        if stage_on_device.stage is first:
            run_first = functools.partial(self.passes.backward_first, planes, batch, gradients[g])
            self._compute(stage_on_device, run_first, backward=True)
            return
        state, space = self.stage_inputs.take_input(stage_on_device.stage.index, g)
        if stage_on_device.stage is last:
            work = functools.partial(self.passes.backward_last, planes, state, batch)
        else:
            work = functools.partial(
                self.passes.backward_blocks,
                planes,
                state,
                stage=stage_on_device.stage,
                block_arguments=block_arguments[g],
                gradient=gradients[g],
            )
        gradients[g] = self._compute(stage_on_device, work, [space], backward=True)

    def _visits(self, order: Sequence[Stage], inputs_to_fetch: int = 0) -> Iterator[StageOnDevice]:
        """Yield the stages on the device, one after another, while the next stage is fetched.

        Args:
            order: the stages.
            inputs_to_fetch: in a backward pass, the number of micro-batches whose inputs are fetched
                with each stage; 0 in a forward pass.
        """
        finish_request = self._request(order[0], inputs_to_fetch)
        ready = finish_request()
        for next_stage in order[1:]:
            # The next stage is requested before this one computes, so that it is copied while this
            # one computes.
            finish_request = self._request(next_stage, inputs_to_fetch)
            yield ready
            ready = finish_request()
        yield ready

    def _request(self, stage: Stage, inputs_to_fetch: int) -> Callable[[], StageOnDevice]:
        """Begin to fetch a stage, or to update it if its update is waiting.

        Returns:
            A function that finishes the fetch or the update, and returns the stage on the device.
        """
        if inputs_to_fetch:
            self.stage_inputs.fetch_inputs(stage.index, inputs_to_fetch)
        if stage not in self.updates.waiting:
            stage_on_device = self.slots.fetch(stage)
            return lambda: stage_on_device
        # The new weights are copied to the slot within the device, so that they do not cross the link
        # again.
        in_slot = self.slots.claim(stage)
        self.updates.begin(stage, in_slot)
        return lambda: self._finish_update(in_slot)

    def _finish_update(self, in_slot: StageOnDevice) -> StageOnDevice:
        self.updates.finish_current()
        return in_slot

    def _compute(
        self,
        stage_on_device: StageOnDevice,
        call: Callable[[], T],
        also_reads: Sequence[Space] = (),
        *,
        backward: bool = False,
    ) -> T:
        """Run a call while the model's parameters are the stage's weights on the device.

        Weights that the stage shares with another stage are included.

        Args:
            stage_on_device: the stage.
            call: the call.
            also_reads: spaces that the call reads besides the weights.
            backward: whether the call adds to gradients.
        """
        needed = self._needed_stages(stage_on_device)
        work = functools.partial(self.passes.run_with_weights, needed, call, backward)
        reads = [*also_reads, *(space for stage in needed for space in stage.reads)]
        writes = list[Space]()
        if backward:
            writes = [space for stage in needed for space in stage.writes]
        return self.lanes.compute(work, reads, writes)

    def _needed_stages(self, stage_on_device: StageOnDevice) -> list[StageOnDevice]:
        """Return the stages on the device whose weights a stage reads: itself, and a tied one."""
        first = self.store.stages[0]
        last = self.store.stages[-1]
        # Tied weights are in the first stage's slot, where both stages add to one gradient.
        if self.store.tied and stage_on_device.stage is last:
            return [stage_on_device, self.slots.fetch(first)]
        return [stage_on_device]

    # ── gradients ───────────────────────────────────────────────────────────────────────────────

    def _prepare_gradients(self, stage_on_device: StageOnDevice) -> None:
        """Set the slot's gradients to zero, or to the sum of earlier windows."""
        if self.store.tied and stage_on_device.stage is self.store.stages[0]:
            return  # The last stage adds to the same gradients, and has prepared them.
        for needed in self._needed_stages(stage_on_device):
            for stored, plane in zip(needed.stage.stored_planes, needed.planes, strict=True):
                home = stored.buffers[GRADIENT]
                if self.gradient_is_empty:
                    self.lanes.compute(plane.grad.zero_, writes=needed.writes)
                # A second window of the same update adds to the gradient that the first window left
                # at home. If home is the device, that gradient is in place already.
                elif home.space.home != Home.DEVICE:
                    self.lanes.copy(
                        plane.grad, home.tensor, needed.slot.gradients.space, home.space
                    )

    @staticmethod
    def _sum(plane: Plane, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Replace a plane's gradient by its sum over all ranks."""
        plane.grad.copy_(sum_over_ranks(plane.grad))

    # ── updates ─────────────────────────────────────────────────────────────────────────────────

    def update(self) -> Tensor:
        """Clip and apply the accumulated gradient; return its norm before clipping."""
        grad_norm = self.updates.decide(gradient_is_empty=self.gradient_is_empty)
        self.gradient_is_empty = True
        return grad_norm

    def discard(self) -> None:
        """Discard the gradient that was added since the last update."""
        self.gradient_is_empty = True
