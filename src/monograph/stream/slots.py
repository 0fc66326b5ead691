"""Hold stages in slots, device memory that one stage after another is copied to, and run a stage's
passes there.

A pass is of one micro-batch: forward, and later forward again with the backward pass.
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
from monograph.stream.lanes import Home, Lanes, Space
from monograph.stream.store import GRADIENT, WEIGHTS, Further, Stage, StoredPlane, staged

Key = Hashable
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
HostPiece = Callable[[Plane, Tensor | None], None]  # updates a part of a plane on the host
BLOCK_SLOTS = 2  # stages of blocks take turns in this many slots


class DeviceBuffer:
    """Device memory for tensors by name, which do not share memory, as a graph would copy inputs
    that overlap.

    Attributes:
        space: all of this memory, for the lanes.
    """

    def __init__(self, name: str, held_in_turn: Iterable[Mapping[K, Tensor]], device: torch.device):
        """Allocate enough memory to hold each of these sets of tensors, one set at a time."""
        self.space = Space(name, Home.DEVICE)
        sizes: dict[tuple[Key, torch.dtype], int] = {}
        for tensors in held_in_turn:
            for key, tensor in tensors.items():
                # The dtype is a part of the key, as weights of one kind are bf16 where they are
                # split, else fp32.
                at = key, tensor.dtype
                sizes[at] = max(sizes.get(at, 0), tensor.numel())
        self._memory = {
            at: torch.zeros(size, dtype=at[1], device=device) for at, size in sizes.items()
        }

    @property
    def size_bytes(self) -> int:
        """Return its bytes."""
        return sum(memory.nbytes for memory in self._memory.values())

    def take(self, tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Return the memory for one set of tensors."""
        return {
            key: self._memory[key, tensor.dtype][: tensor.numel()]
            for key, tensor in tensors.items()
        }


def traveling(stage: Stage, name: str) -> dict[Key, Tensor]:
    """Return the stage's buffers of a name that do not live on the device, by their plane's number.

    By this key planes of one kind share memory, and so do embedding and head.
    """
    buffers = {stored.plane.number: stored.buffers[name] for stored in stage.stored}
    return {at: buffer.tensor for at, buffer in buffers.items() if buffer.space.home != Home.DEVICE}


class Slot:
    """Device memory for the weights and gradients of one stage.

    Attributes:
        weights: the memory for weights.
        gradients: the memory for gradients.
        holds: the stage whose weights are there, and the version of these.
    """

    def __init__(self, name: str, stages: list[Stage], device: torch.device):
        """Allocate enough memory for the largest of the stages."""
        self.weights = DeviceBuffer(
            f"{name}, weights", [traveling(stage, WEIGHTS) for stage in stages], device
        )
        self.gradients = DeviceBuffer(
            f"{name}, gradients", [traveling(stage, GRADIENT) for stage in stages], device
        )
        self.holds: tuple[Stage, int] | None = None


class StageOnDevice:
    """A stage on the device.

    Attributes:
        stage: the stage.
        slot: its slot.
        planes: its planes with weights and gradients on the device.
    """

    def __init__(self, stage: Stage, slot: Slot):
        """Make planes of the slot's memory; nothing is copied."""
        self.stage, self.slot = stage, slot
        weights, gradients = (
            room.take(traveling(stage, name))
            for room, name in ((slot.weights, WEIGHTS), (slot.gradients, GRADIENT))
        )
        self.planes = [
            replace(
                stored.plane,
                param=weights.get(stored.plane.number, stored.plane.param),
                grad=gradients.get(stored.plane.number, stored.plane.grad),
            )
            for stored in stage.stored
        ]

    @property
    def reads(self) -> list[Space]:
        """Return the spaces that its forward pass reads."""
        return self._spaces(WEIGHTS, self.slot.weights)

    @property
    def writes(self) -> list[Space]:
        """Return the spaces that its backward pass adds to."""
        return self._spaces(GRADIENT, self.slot.gradients)

    def _spaces(self, name: str, memory: DeviceBuffer) -> list[Space]:
        own = [stored.buffers[name].space for stored in self.stage.stored]
        return list(dict.fromkeys(s if s.home == Home.DEVICE else memory.space for s in own))

    def fetch(self, lanes: Lanes, planes: Sequence[StoredPlane]) -> None:
        """Copy these planes' weights to the slot."""
        for stored, plane in zip(self.stage.stored, self.planes, strict=True):
            weights = stored.buffers[WEIGHTS]
            if stored in planes and weights.space.home != Home.DEVICE:
                lanes.copy(plane.param, weights.tensor, self.slot.weights.space, weights.space)

    @contextmanager
    def parameters(self) -> Iterator[None]:
        """In the block the model's parameters are the weights on the device, elsewhere those at
        home.
        """
        before = [slot.parameter.data for plane in self.planes for slot in plane.slots]
        for plane in self.planes:
            plane.hold(plane.param)
            plane.fuse()
        for family in self.stage.families:
            family.look()
        try:
            yield
        finally:
            for parameter, data in zip(self.stage.slots, before, strict=True):
                parameter.grad = None
                parameter.data = data
            for family in self.stage.families:
                family.look()

    def link(self) -> None:
        """Make the backward pass add gradients to those in the slot."""
        for plane in self.planes:
            plane.link()


class Slots:
    """The slots of a model, and the stages in them.

    Stages of blocks take turns in two slots. The first and the last stage take turns in a third
    one, unless they share
    weights: then each has a slot of its own, and the first stage stays in its slot.
    """

    def __init__(self, stages: list[Stage], tied: bool, lanes: Lanes, device: torch.device):
        """Allocate the memory."""
        self.lanes = lanes
        first, *middle, last = stages
        # The last stage of a tied model reads weights of the first, so both are needed at once.
        ends = [[first], [last]] if tied else [[first, last]]
        self.pools = [
            [Slot(f"slot of ends {n}", sharing, device)] for n, sharing in enumerate(ends)
        ]
        self.pools.append(
            [
                Slot(f"slot {number}", middle, device)
                for number in range(min(BLOCK_SLOTS, len(middle)))
            ]
        )
        self._pool = dict.fromkeys(middle, self.pools[-1])
        self._pool |= {first: self.pools[0], last: self.pools[len(ends) - 1]}

    @property
    def device_bytes(self) -> int:
        """Return the bytes of all slots."""
        every = [slot for pool in self.pools for slot in pool]
        return sum(slot.weights.size_bytes + slot.gradients.size_bytes for slot in every)

    def fetch(self, stage: Stage) -> StageOnDevice:
        """Return the stage with its current weights in a slot; they are copied unless they are
        there already.
        """
        here = self.claim(stage)
        if here.slot.holds != (stage, stage.version):
            here.fetch(self.lanes, stage.stored)
            here.slot.holds = (stage, stage.version)
        return here

    def claim(self, stage: Stage) -> StageOnDevice:
        """Return the stage in a slot, whatever weights are in it."""
        # A stage that is in a slot already keeps it, or its weights would be fetched a second time.
        pool = self._pool[stage]
        slot = next((slot for slot in pool if slot.holds and slot.holds[0] is stage), pool[0])
        pool.remove(slot)
        pool.append(slot)  # the slot used longest ago is first
        return StageOnDevice(stage, slot)


class _Called(Exception):
    """Raised in place of the model's forward pass, with the arguments that the loss called the
    model with.
    """


class Passes:
    """All that a walk computes: the passes of a model in stages, with the step's loss, and the
    updates between them.

    A pass runs while the model's parameters are those of the stage on the device, whose planes
    there are `planes`. Copies are not computed, so a clock that pretends to compute has another
    class in this one's place.
    """

    def __init__(self, step: Step):
        """Take the step's module and loss, and run nothing."""
        self.step = step
        self.model = staged(step.model)

    def bound(self, needed: Sequence[StageOnDevice], call: Callable[[], T], backward: bool) -> T:
        """Run a call while the model's parameters are in the slots, and their gradients, too, if
        `backward`.
        """
        with ExitStack() as stack:
            stack.enter_context(self.step.parameters.fusing())
            for stage in needed:
                stack.enter_context(stage.parameters())
                if backward:
                    stage.link()
            return call()

    def begin(self, batch: object) -> tuple[Tensor, Further]:
        """Return the first block's input, and the other arguments of blocks, from the loss's call
        of the model.
        """

        def called(*args: object, **kwargs: object) -> None:
            # An exception keeps the loss from going on after the call, as the model has no output
            # yet.
            raise _Called(args, kwargs)

        try:
            with self._forward(called):
                self.step.loss(self.step.model, batch)
        except _Called as stopped:
            args, kwargs = stopped.args
        else:
            raise UsageError(
                "memory = stream: the loss did not call its model, which it must do once"
            )
        return self.model.begin(*args, **kwargs)

    def forward(self, stage: Stage, state: Tensor, further: Further) -> Tensor:
        """Return the output of a stage of blocks."""
        with (
            torch.no_grad(),
            self.step.context(),
            self._repeatable([block for _, block in stage.blocks]),
        ):
            return self._blocks(stage, state, further)

    def first(self, batch: object) -> tuple[Tensor, Further]:
        """Return the first stage's output, and the other arguments of blocks."""
        with torch.no_grad(), self.step.context(), self._repeatable(self.model.parts_before):
            return self.begin(batch)

    def score(self, state: Tensor, batch: object) -> tuple[Tensor, Tensor]:
        """Return the sum of losses and the number of targets, from the last stage's input."""
        with self.step.context(), self._resumed(state):
            return self.step.evaluate(batch)

    def loss(self, planes: Sequence[Plane], state: Tensor, batch: object) -> Tensor:
        """Add the loss and the last stage's gradient; return the gradient of its input."""
        state = state.detach().requires_grad_()
        with self._tracing(planes), self._resumed(state):
            loss, loss_sum, count = self.step.forward(batch, self.step.loss_factor)
        self.step.differentiate(loss, loss_sum, count)
        return _gradient_of(state)

    def again(
        self,
        planes: Sequence[Plane],
        state: Tensor,
        *,
        stage: Stage,
        further: Further,
        gradient: Tensor,
    ) -> Tensor:
        """Add a stage's gradient; return the gradient of its input."""
        state = state.detach().requires_grad_()
        with self._tracing(planes):
            out = self._blocks(stage, state, further)
        # Autograd's graph of a stage ends at its input, whose gradient is passed to the stage
        # before as a tensor.
        out.backward(gradient)
        return _gradient_of(state)

    def first_again(self, planes: Sequence[Plane], batch: object, gradient: Tensor) -> None:
        """Add the first stage's gradient."""
        with self._tracing(planes):
            state, _ = self.begin(batch)
        if state.requires_grad:
            state.backward(gradient)

    def squares(self, plane: Plane, grad: Tensor) -> list[Tensor]:
        """Return the sum of squares of each part of a plane's gradient."""
        return self.step.squares(plane, grad)

    def update_part(
        self, plane: Plane, rest: Tensor | None, total: Tensor, scale: Tensor, accepted: Tensor
    ) -> None:
        """Update a part of a plane on the device; split weights are joined before and split again
        afterwards.
        """
        if rest is None:
            self.step.update_plane(plane, total, scale, accepted)
            return
        whole = replace(plane, param=join(plane.param, rest))
        self.step.update_plane(whole, total, scale, accepted)
        split_(whole.param, plane.param, rest)

    def update_on_host(self, update: HostPiece, plane: Plane, rest: Tensor | None) -> None:
        """Update a part of a plane on the host, by the function that does it there."""
        update(plane, rest)

    def _blocks(self, stage: Stage, hidden: Tensor, further: Further) -> Tensor:
        for at, block in stage.blocks:
            hidden = block(hidden, *further[at])
        return hidden

    @contextmanager
    def _tracing(self, planes: Sequence[Plane]) -> Iterator[None]:
        """In the block a forward pass can run whose gradient is computed afterwards."""
        with torch.enable_grad(), unlinked(planes), self.step.context():
            yield

    @contextmanager
    def _repeatable(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """In the block modules run that will run again for their gradient and must compute the same
        then.

        Raises:
            UsageError: a module drew a random number or wrote a buffer.
        """
        # States are compared instead of refusing such modules, as a dropout may have rate 0 and a
        # buffer may only be read.
        draws = self._draws()
        buffers = _written(modules)
        yield
        for before, after in zip(draws, self._draws(), strict=True):
            if not torch.equal(before, after):
                raise UsageError(
                    f"memory = stream runs {type(modules[0]).__name__} a second time for its gradient, and it draws "
                    "random numbers (dropout?), which would be others then: set that to 0, or use memory = device"
                )
        for name, now in _written(modules).items():
            if now != buffers.get(name):
                raise UsageError(
                    f"memory = stream runs {type(modules[0]).__name__} a second time for its gradient, and it writes "
                    f"its buffer {name}, which would be written twice: use memory = device"
                )

    def _draws(self) -> list[Tensor]:
        """Return the states of torch's random generators."""
        device = self.step.device
        return [
            torch.get_rng_state(),
            *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else []),
        ]

    @contextmanager
    def _forward(self, instead: Callable[..., Tensor | None]) -> Iterator[None]:
        """In the block a call of the model runs `instead`."""
        model = self.step.model
        model.forward = instead
        try:
            yield
        finally:
            del model.forward

    @contextmanager
    def _resumed(self, hidden: Tensor) -> Iterator[None]:
        """In the block a call of the model returns its output from the last block's output
        `hidden`.
        """
        calls = 0

        def ended(*args: object, **kwargs: object) -> Tensor:
            nonlocal calls
            # A captured loss runs this once, when it is traced, not at each call.
            if not torch.compiler.is_compiling():
                calls += 1
            return self.model.end(hidden)

        with self._forward(ended):
            yield
        if calls > 1:
            raise UsageError(
                f"memory = stream: the loss calls its model {calls} times, and the blocks run once: call it once, on "
                "all rows, or use memory = device"
            )


def _written(modules: Sequence[nn.Module]) -> dict[str, tuple[int, int]]:
    """Return each buffer's identity and version; one of them changes if the buffer is replaced or
    written in place.
    """
    named = (entry for module in modules for entry in module.named_buffers())
    return {name: (id(buffer), buffer._version) for name, buffer in named}


def _gradient_of(state: Tensor) -> Tensor:
    # A micro-batch without targets gives no gradient, but the stage before expects one.
    return torch.zeros_like(state) if state.grad is None else state.grad
