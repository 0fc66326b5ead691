"""Keep the inputs of stages until the backward pass: on the device, or on the host.

A state is the tensor that passes from one stage to the next for one micro-batch; an update has G micro-batches.
"""

import torch
from torch import Tensor

from monograph.stream.lanes import Home, Lanes, Space
from monograph.stream.placement import on_host

RINGS = 2  # sets of device memory for G states that come back from the host: one in use, one being filled


class Boundaries:
    """The inputs of all stages but the first.

    Kept on the device, they are (stages - 1) G states. Offloaded, they are at most 4 G states on the device for any
    depth, 2 G of them for inputs that come back, and the host keeps the rest.

    Attributes:
        most_bytes: the most bytes on the device at any moment: of inputs, and of the gradient of the input in use.
    """

    def __init__(self, lanes: Lanes, device: torch.device, *, offloaded: bool, last: int):
        """Begin with no inputs; `last` is the index of the last stage, whose inputs are needed again at once."""
        self.lanes, self.device, self.offloaded, self.last = lanes, device, offloaded, last
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
        self.lanes.compute(lambda: None, writes=[space])  # the stage before wrote it: readers wait for its computation
        # The last stage's input stays: the backward pass needs it first.
        if keep and self.offloaded and stage != self.last:
            like = self._host.get((stage, g))
            # Page-locked memory is slow to get, and the next update's inputs usually have the same shapes, so it is
            # kept until a shape differs.
            if like is None or like[0].shape != state.shape or like[0].dtype != state.dtype:
                label = f"kept input {g} of stage {stage}"
                like = self._host[stage, g] = on_host(state, label, self.device), Space(label, Home.HOST)
            self.lanes.copy(like[0], state, like[1], space)

    def passed(self, stage: int, *, keep: bool) -> None:
        """Release a stage's inputs on the device after its forward pass, if they are not kept there."""
        if stage == self.last or (keep and not self.offloaded):
            return
        # This happens after all micro-batches, so that the allocator can give the memory to the next stage.
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
                self.lanes.compute(lambda: None, writes=[ring[1]])  # earlier computations may have used this memory
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
