"""Hold stages in slots on the device, and run a stage's passes there.

A stage is some consecutive blocks of the model, or the parts before or after them
(`monograph.stream.store`). A plane is a flat buffer of a stage's parameters of one kind
(`monograph.optim.Plane`). The home of a buffer is where it is kept: on the device, on the host or
in a file. A slot is device memory to which one stage after another is copied. A pass computes one
stage for one micro-batch: first forward, and later forward again and backward. Split weights are
fp32 weights that are stored as two halves of 16 bits (`monograph.optim.narrow.split`).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.optim import Plane, join, split_, unlinked
from monograph.step import Step
from monograph.stream.frozen import FROZEN
from monograph.stream.lanes import Home, Lanes, Space
from monograph.stream.store import GRADIENT, WEIGHTS, BlockArguments, Stage, StoredPlane, as_staged

TensorKey = Hashable
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
# The type of a function that updates a part of a plane on the host, called with (the part, the low
# halves of split weights or None).
HostPartUpdate = Callable[[Plane, Tensor | None], None]
BLOCK_SLOTS = 2  # stages of blocks take turns in this many slots


class DeviceBuffer:
    """Device memory for one set of named tensors at a time.

    Tensors of a set do not overlap, because a captured graph would copy inputs that overlap.

    Attributes:
        space: all of this memory, as one unit that work on the lanes reads or writes.
    """

    def __init__(
        self, name: str, sets_of_tensors: Iterable[Mapping[K, Tensor]], device: torch.device
    ):
        """Allocate enough memory for the largest tensors of each name.

        Args:
            name: the name of the space.
            sets_of_tensors: the sets, by name; the buffer holds one of them at a time.
            device: the device of the memory.
        """
        self.space = Space(name, Home.DEVICE)
        sizes: dict[tuple[TensorKey, torch.dtype], int] = {}
        for tensors in sets_of_tensors:
            for key, tensor in tensors.items():
                # The dtype is a part of the key, because weights of one kind are bf16 if they are
                # split and fp32 otherwise.
                key_and_dtype = key, tensor.dtype
                sizes[key_and_dtype] = max(sizes.get(key_and_dtype, 0), tensor.numel())
        self._memory = {
            (key, dtype): torch.zeros(size, dtype=dtype, device=device)
            for (key, dtype), size in sizes.items()
        }

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the memory."""
        return sum(memory.nbytes for memory in self._memory.values())

    def views(self, tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Return views of the memory, one for each tensor of a set."""
        return {
            key: self._memory[key, tensor.dtype][: tensor.numel()]
            for key, tensor in tensors.items()
        }


def tensors_to_fetch(stage: Stage, name: str) -> dict[TensorKey, Tensor]:
    """Return the stage's buffers of one name that must be copied to the device.

    Args:
        stage: the stage.
        name: the name of the buffers, e.g. "weights".

    Returns:
        The buffers that do not live on the device, by the number of their plane. Stages whose
        planes have the same number take turns in the same memory of a slot.
    """
    buffers = {stored.plane.number: stored.buffers[name] for stored in stage.stored_planes}
    return {
        number: buffer.tensor
        for number, buffer in buffers.items()
        if buffer.space.home != Home.DEVICE
    }


def frozen_to_fetch(stage: Stage) -> dict[TensorKey, Tensor]:
    """Return the memory of the stage's frozen tensors if it must be copied to the device, by a key."""
    frozen = stage.frozen
    return {FROZEN: frozen.memory} if frozen.packed and frozen.space.home != Home.DEVICE else {}


class Slot:
    """Device memory for the weights, gradients and frozen tensors of one stage.

    Attributes:
        weights: the memory for weights.
        gradients: the memory for gradients.
        frozen: the memory for tensors that are not trained.
        loaded: the stage whose weights are in the slot, and the version of these weights; None:
            no weights were copied to it yet.
        loaded_frozen: the same for frozen tensors. Updates do not change them, so a stage that is
            still in its slot in the next update is not copied again.
    """

    def __init__(self, name: str, stages: list[Stage], device: torch.device):
        """Allocate enough memory for the largest of the stages."""
        self.weights = DeviceBuffer(
            f"{name}, weights", [tensors_to_fetch(stage, WEIGHTS) for stage in stages], device
        )
        self.gradients = DeviceBuffer(
            f"{name}, gradients", [tensors_to_fetch(stage, GRADIENT) for stage in stages], device
        )
        self.frozen = DeviceBuffer(
            f"{name}, {FROZEN}", [frozen_to_fetch(stage) for stage in stages], device
        )
        self.loaded: tuple[Stage, int] | None = None
        self.loaded_frozen: tuple[Stage, int] | None = None

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the slot."""
        return self.weights.size_bytes + self.gradients.size_bytes + self.frozen.size_bytes


class StageOnDevice:
    """A stage on the device.

    Attributes:
        stage: the stage.
        slot: its slot.
        planes: the stage's planes, with weights and gradients on the device.
        frozen: the memory of the stage's frozen tensors on the device.
    """

    def __init__(self, stage: Stage, slot: Slot):
        """Make planes of the slot's memory; nothing is copied."""
        self.stage = stage
        self.slot = slot
        weights = slot.weights.views(tensors_to_fetch(stage, WEIGHTS))
        gradients = slot.gradients.views(tensors_to_fetch(stage, GRADIENT))
        self.planes = [
            # A buffer that lives on the device is not in the slot, and is used where it is.
            replace(
                stored.plane,
                param=weights.get(stored.plane.number, stored.plane.param),
                grad=gradients.get(stored.plane.number, stored.plane.grad),
            )
            for stored in stage.stored_planes
        ]
        # Tensors that live on the device are not in the slot, either.
        self.frozen = slot.frozen.views(frozen_to_fetch(stage)).get(FROZEN, stage.frozen.memory)

    @property
    def reads(self) -> list[Space]:
        """Return the spaces that the stage's forward pass reads."""
        spaces = self._spaces(WEIGHTS, self.slot.weights)
        if frozen_to_fetch(self.stage):
            spaces.append(self.slot.frozen.space)
        return spaces

    @property
    def writes(self) -> list[Space]:
        """Return the spaces to which the stage's backward pass adds."""
        return self._spaces(GRADIENT, self.slot.gradients)

    def _spaces(self, name: str, memory: DeviceBuffer) -> list[Space]:
        """Return where the planes' buffers of one name are on the device, each space once.

        A buffer that does not live on the device is in the slot's `memory`.
        """
        stored_spaces = [stored.buffers[name].space for stored in self.stage.stored_planes]
        spaces = [space if space.home == Home.DEVICE else memory.space for space in stored_spaces]
        return list(dict.fromkeys(spaces))

    def fetch(self, lanes: Lanes, planes: Sequence[StoredPlane]) -> None:
        """Copy these planes' weights to the slot."""
        for stored, plane in zip(self.stage.stored_planes, self.planes, strict=True):
            weights = stored.buffers[WEIGHTS]
            if stored in planes and weights.space.home != Home.DEVICE:
                lanes.copy(plane.param, weights.tensor, self.slot.weights.space, weights.space)

    def fetch_frozen(self, lanes: Lanes) -> None:
        """Copy the stage's frozen tensors to the slot, unless they are there."""
        frozen = self.stage.frozen
        if self.slot.loaded_frozen == (self.stage, frozen.version):
            return
        # An interrupted copy leaves parts of two stages in the slot.
        self.slot.loaded_frozen = None
        if frozen_to_fetch(self.stage):
            lanes.copy(self.frozen, frozen.memory, self.slot.frozen.space, frozen.space)
        self.slot.loaded_frozen = self.stage, frozen.version

    @contextmanager
    def use_as_parameters(self) -> Iterator[None]:
        """Make the model's tensors those of the stage on the device, within the `with` block.

        Outside the `with` block they are the tensors at home.
        """
        weights_at_home = [
            placed.parameter.data for plane in self.planes for placed in plane.placed
        ]
        for plane in self.planes:
            plane.rebind_parameters(plane.param)
            plane.fuse_gradients()
        self.stage.frozen.bind(self.frozen)
        # Projections that are computed as one product refer to the parameters' memory, which has
        # changed (`monograph.graph.fused_linears`).
        for family in self.stage.families:
            family.update_views()
        try:
            yield
        finally:
            for parameter, data in zip(self.stage.parameters, weights_at_home, strict=True):
                parameter.grad = None
                parameter.data = data
            self.stage.frozen.bind(self.stage.frozen.memory)
            for family in self.stage.families:
                family.update_views()

    def link(self) -> None:
        """Make the next backward pass add to the gradients in the slot."""
        for plane in self.planes:
            plane.link()


class Slots:
    """The slots of a model, and the stages in them.

    Stages of blocks take turns in two slots. If the first and the last stage share weights (the
    model is tied), each of them has its own slot, and the first stage stays in its slot. Otherwise
    these two take turns in a third slot.

    Attributes:
        lanes: the lanes that copy and compute.
        pools: lists of slots; the stages of a pool take turns in its slots. The least recently used
            slot is first.
    """

    def __init__(self, stages: list[Stage], tied: bool, lanes: Lanes, device: torch.device):
        """Allocate the memory.

        Args:
            stages: the stages of the model, in order.
            tied: whether the last stage reads weights of the first.
            lanes: the lanes that copy and compute.
            device: the device that computes.
        """
        self.lanes = lanes
        first, *middle, last = stages
        # The last stage of a tied model reads weights of the first, so both are needed at once.
        stages_of_ends = [[first], [last]] if tied else [[first, last]]
        self.pools = [
            [Slot(f"slot of ends {number}", stages_in_turn, device)]
            for number, stages_in_turn in enumerate(stages_of_ends)
        ]
        # If the model is not tied, both are the same pool.
        first_pool = self.pools[0]
        last_pool = self.pools[-1]
        block_slots = min(BLOCK_SLOTS, len(middle))
        block_pool = [Slot(f"slot {number}", middle, device) for number in range(block_slots)]
        self.pools.append(block_pool)
        self._pool_of = dict.fromkeys(middle, block_pool)
        self._pool_of[first] = first_pool
        self._pool_of[last] = last_pool

    @property
    def device_bytes(self) -> int:
        """Return the bytes of all slots."""
        return sum(slot.device_bytes for pool in self.pools for slot in pool)

    def fetch(self, stage: Stage) -> StageOnDevice:
        """Copy the stage to a slot, unless it is there, and return it."""
        stage_on_device = self.claim(stage)
        if stage_on_device.slot.loaded != (stage, stage.version):
            stage_on_device.slot.loaded = None  # as in `StageOnDevice.fetch_frozen`
            stage_on_device.fetch(self.lanes, stage.stored_planes)
            stage_on_device.slot.loaded = (stage, stage.version)
        return stage_on_device

    def claim(self, stage: Stage) -> StageOnDevice:
        """Assign a slot to the stage and return the stage in it; only frozen tensors are copied."""
        pool = self._pool_of[stage]
        slot = pool[0]
        # A stage that is in a slot keeps it, so that its weights are not fetched a second time.
        for occupied in pool:
            if occupied.loaded and occupied.loaded[0] is stage:
                slot = occupied
                break
        # The last slot is the one used most recently.
        pool.remove(slot)
        pool.append(slot)
        stage_on_device = StageOnDevice(stage, slot)
        stage_on_device.fetch_frozen(self.lanes)
        return stage_on_device


class _ModelCalled(Exception):
    """Stops the loss where it calls the model; its `args` are the call's (args, kwargs)."""


class Passes:
    """Computes the passes of a model in stages, with the step's loss, and the updates of planes.

    While a pass runs, the model's parameters are the stage's weights on the device. The argument
    `planes` of a pass has the stage's planes on the device. Passes make no copies, so a subclass
    that replaces all computations is enough to predict times (`monograph.stream.clock`).

    A state is the tensor that one stage passes to the next for one micro-batch.
    """

    def __init__(self, step: Step):
        """Take the step's module and loss; nothing is computed.

        Raises:
            UsageError: the module cannot run in stages.
        """
        self.step = step
        self.model = as_staged(step.model)

    def run_with_weights(
        self, needed: Sequence[StageOnDevice], call: Callable[[], T], backward: bool
    ) -> T:
        """Run a call while the model's parameters are the weights in the slots.

        Args:
            needed: the stages whose parameters the call uses.
            call: the call.
            backward: whether the call adds to the gradients in the slots.

        Returns:
            The result of the call.
        """
        with ExitStack() as stack:
            stack.enter_context(self.step.parameters.fused_gradients())
            for stage in needed:
                stack.enter_context(stage.use_as_parameters())
                if backward:
                    stage.link()
            return call()

    def begin(self, batch: object) -> tuple[Tensor, BlockArguments]:
        """Run the model's `begin` with the arguments that the loss calls the model with.

        Returns:
            The first block's input, and for each block its arguments besides the state.

        Raises:
            UsageError: the loss does not call the model.
        """

        def stop(*args: object, **kwargs: object) -> None:
            # The model has no output yet, so the loss must not continue.
            raise _ModelCalled(args, kwargs)

        try:
            with self._replace_forward(stop):
                self.step.loss(self.step.model, batch)
        except _ModelCalled as stopped:
            args, kwargs = stopped.args
        else:
            raise UsageError(
                "memory = stream: the loss did not call its model, which it must do once"
            )
        return self.model.begin(*args, **kwargs)

    def forward_blocks(
        self, stage: Stage, state: Tensor, block_arguments: BlockArguments
    ) -> Tensor:
        """Return the output of a stage of blocks."""
        modules = [block for _, block in stage.blocks]
        with torch.no_grad(), self.step.context(), self._require_repeatable(modules):
            return self._run_blocks(stage, state, block_arguments)

    def forward_first(self, batch: object) -> tuple[Tensor, BlockArguments]:
        """Return the first stage's output, and for each block its arguments besides the state."""
        modules = self.model.parts_before
        with torch.no_grad(), self.step.context(), self._require_repeatable(modules):
            return self.begin(batch)

    def evaluate_last(self, state: Tensor, batch: object) -> tuple[Tensor, Tensor]:
        """Return the sum of losses and the number of targets, from the last stage's input."""
        with self.step.context(), self._end_from(state):
            return self.step.evaluate(batch)

    def backward_last(self, planes: Sequence[Plane], state: Tensor, batch: object) -> Tensor:
        """Run the last stage with the loss, and backward; this adds to the loss and the gradient.

        Returns:
            The gradient of the stage's input `state`.
        """
        state = state.detach().requires_grad_()
        with self._recording_graph(planes), self._end_from(state):
            loss, loss_sum, count = self.step.forward(batch, self.step.loss_factor)
        self.step.differentiate(loss, loss_sum, count)
        return _gradient_of(state)

    def backward_blocks(
        self,
        planes: Sequence[Plane],
        state: Tensor,
        *,
        stage: Stage,
        block_arguments: BlockArguments,
        gradient: Tensor,
    ) -> Tensor:
        """Recompute a stage of blocks, and run it backward; this adds to the stage's gradient.

        Args:
            planes: the stage's planes on the device.
            state: the stage's input.
            stage: the stage.
            block_arguments: for each block, its arguments besides the state.
            gradient: the gradient of the stage's output.

        Returns:
            The gradient of the stage's input.
        """
        # The state is detached, so that autograd's graph begins at this stage. The gradient is
        # passed to the previous stage as a tensor.
        state = state.detach().requires_grad_()
        with self._recording_graph(planes):
            output = self._run_blocks(stage, state, block_arguments)
        output.backward(gradient)
        return _gradient_of(state)

    def backward_first(self, planes: Sequence[Plane], batch: object, gradient: Tensor) -> None:
        """Recompute the first stage, and run it backward; this adds to the stage's gradient.

        Args:
            planes: the stage's planes on the device.
            batch: the micro-batch.
            gradient: the gradient of the stage's output.
        """
        with self._recording_graph(planes):
            state, _ = self.begin(batch)
        # If no parameter before the blocks is trained, there is nothing to compute.
        if state.requires_grad:
            state.backward(gradient)

    def squares(self, plane: Plane, grad: Tensor) -> list[Tensor]:
        """Return the sum of squares of each part of a plane's gradient."""
        return self.step.squares(plane, grad)

    def update_part(
        self, plane: Plane, rest: Tensor | None, total: Tensor, scale: Tensor, accepted: Tensor
    ) -> None:
        """Update a part of a plane on the device, in place.

        Args:
            plane: the part; its weights are fp32, or the high halves of split weights.
            rest: the low halves of split weights; None: the weights are not split.
            total: the accumulated gradient.
            scale: the gradient's factor.
            accepted: whether the update is applied.
        """
        if rest is None:
            self.step.update_plane(plane, total, scale, accepted)
            return
        joined = replace(plane, param=join(plane.param, rest))
        self.step.update_plane(joined, total, scale, accepted)
        split_(joined.param, plane.param, rest)

    def update_on_host(self, update: HostPartUpdate, plane: Plane, rest: Tensor | None) -> None:
        """Update a part of a plane on the host, in place, by calling `update`.

        The call goes through this method, so that a subclass can replace it.
        """
        update(plane, rest)

    def _run_blocks(self, stage: Stage, hidden: Tensor, block_arguments: BlockArguments) -> Tensor:
        for index, block in stage.blocks:
            hidden = block(hidden, *block_arguments[index])
        return hidden

    @contextmanager
    def _recording_graph(self, planes: Sequence[Plane]) -> Iterator[None]:
        """Make autograd record a forward pass in the `with` block, for a backward pass after it."""
        # `unlinked` removes the fp32 `.grad` of bf16 parameters for the time of the pass, because
        # torch cannot trace a parameter whose gradient has another dtype.
        with torch.enable_grad(), unlinked(planes), self.step.context():
            yield

    @contextmanager
    def _require_repeatable(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Check that modules, which run in the `with` block, would compute the same a second time.

        The backward pass will run them again.

        Raises:
            UsageError: a module drew a random number or wrote a buffer.
        """
        # The states of generators and buffers are compared before and after. A module is not refused
        # for its class, because the rate of a dropout may be 0, and a buffer may only be read.
        generators_before = self.generator_states()
        buffers_before = _buffer_versions(modules)
        yield
        for before, after in zip(generators_before, self.generator_states(), strict=True):
            if not torch.equal(before, after):
                raise UsageError(
                    f"memory = stream runs {type(modules[0]).__name__} a second time for its gradient, and it draws "
                    "random numbers (dropout?), which would differ then: set the rate to 0, or use memory = device"
                )
        for name, version in _buffer_versions(modules).items():
            if version != buffers_before.get(name):
                raise UsageError(
                    f"memory = stream runs {type(modules[0]).__name__} a second time for its gradient, and it writes "
                    f"its buffer {name}, which would be written twice: use memory = device"
                )

    def generator_states(self) -> list[Tensor]:
        """Return the states of torch's random generators, of the host and of the device."""
        states = [torch.get_rng_state()]
        if self.step.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.step.device))
        return states

    @contextmanager
    def _replace_forward(self, replacement: Callable[..., Tensor | None]) -> Iterator[None]:
        """Make a call of the model run `replacement`, within the `with` block."""
        model = self.step.model
        # This attribute of the object hides the method `forward` of its class, until it is deleted.
        model.forward = replacement
        try:
            yield
        finally:
            del model.forward

    @contextmanager
    def _end_from(self, hidden: Tensor) -> Iterator[None]:
        """Make a call of the model compute only its end, within the `with` block.

        Args:
            hidden: the output of the model's last block, from which the end is computed.

        Raises:
            UsageError: the model was called more than once.
        """
        calls = 0

        def end(*args: object, **kwargs: object) -> Tensor:
            nonlocal calls
            # A captured loss runs this line only when it is traced, so calls are not counted then.
            if not torch.compiler.is_compiling():
                calls += 1
            return self.model.end(hidden)

        with self._replace_forward(end):
            yield
        if calls > 1:
            raise UsageError(
                f"memory = stream: the loss calls its model {calls} times, and the blocks run once: call it once, on "
                "all rows, or use memory = device"
            )


def _buffer_versions(modules: Sequence[nn.Module]) -> dict[str, tuple[int, int]]:
    """Return each buffer's (identity, version), by name.

    The identity changes if the buffer is replaced, the version if it is written in place.
    """
    named_buffers = (entry for module in modules for entry in module.named_buffers())
    return {name: (id(buffer), buffer._version) for name, buffer in named_buffers}


def _gradient_of(state: Tensor) -> Tensor:
    """Return the gradient of a stage's input."""
    # A micro-batch without targets has no gradient, but the previous stage needs a tensor.
    return torch.zeros_like(state) if state.grad is None else state.grad
