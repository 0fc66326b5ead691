"""What goes from stage to stage, for each micro-batch: kept where it was made until the way back, or taken to the host.

Shapes: G micro-batches of an update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monograph.stream.lanes import Home, Lanes, Space
from monograph.stream.placement import on_host

RINGS = 2  # sets of G states on the way back from the host: one in use, one coming


class Boundaries:
    """The inputs of all stages but the first.

    On the device they take (stages - 1) G states. Offloaded they take 4 G there, whatever the depth, 2 G of them for
    what comes back, and the host keeps the rest.

    Attributes:
        most_bytes: the most that inputs, and the gradient of the one that is used, took on the device at any moment.
    """

    def __init__(self, lanes: Lanes, device: torch.device, *, offloaded: bool, last: int):
        """Nothing is kept yet; `last` is the index of the last stage, whose inputs are wanted again at once."""
        self.lanes, self.device, self.offloaded, self.last = lanes, device, offloaded, last
        self.most_bytes = 0
        self._states: dict[tuple[int, int], tuple[Tensor, Space]] = {}
        self._host: dict[tuple[int, int], tuple[Tensor, Space]] = {}
        self._rings: dict[tuple[int, int], tuple[Tensor, Space]] = {}

    @property
    def device_bytes(self) -> int:
        """What they take on the device now."""
        distinct = {id(kept): kept for kept, _ in (*self._states.values(), *self._rings.values())}
        return sum(map(_bytes, distinct.values()))

    def put(self, stage: int, g: int, state: Tensor, *, keep: bool) -> None:
        """Take over micro-batch g's input of a stage; `keep` it for the way back."""
        # A space of its own for each tensor: whoever reads one input waits for that one alone.
        space = Space(f"input {g} of stage {stage}", Home.DEVICE)
        self._states[stage, g] = state, space
        self.most_bytes = max(self.most_bytes, self.device_bytes)
        self.lanes.compute(_nothing, writes=[space])  # it was: who reads it waits for what was computed so far
        # The last stage's input is not taken away: it is the first that the way back wants.
        if keep and self.offloaded and stage != self.last:
            like = self._host.get((stage, g))
            # Page-locked memory is slow to get, and the next update's inputs have the same shapes: kept until one has
            # not.
            if like is None or like[0].shape != state.shape or like[0].dtype != state.dtype:
                label = f"kept input {g} of stage {stage}"
                like = on_host(state, label, self.device), Space(label, Home.HOST)
                self._host[stage, g] = like
            self.lanes.copy(like[0], state, like[1], space)

    def passed(self, stage: int, *, keep: bool) -> None:
        """Let go of a stage's inputs on the device, which its forward pass has read."""
        if stage == self.last or (keep and not self.offloaded):
            return
        # Dropped when all micro-batches have passed, so that the allocator can give the memory to the next stage.
        for key in [key for key in self._states if key[0] == stage]:
            _, space = self._states.pop(key)
            self.lanes.compute(_nothing, writes=[space])  # its memory is computed with from here on

    def fetch(self, stage: int, count: int) -> None:
        """Have the inputs of a stage brought back."""
        # The first stage reads the batch itself, and the last one's input has never left.
        if not self.offloaded or stage in (0, self.last):
            return
        for g in range(count):
            home, its_space = self._host[stage, g]
            at = stage % RINGS, g
            ring = self._rings.get(at)
            if ring is None or ring[0].shape != home.shape or ring[0].dtype != home.dtype:
                memory = torch.empty(home.shape, dtype=home.dtype, device=self.device)
                ring = self._rings[at] = memory, Space(f"ring {at}", Home.DEVICE)
                self.lanes.compute(_nothing, writes=[ring[1]])  # what was there before is computed with until here
            self.lanes.copy(ring[0], home, ring[1], its_space)
            self._states[stage, g] = ring

    def of(self, stage: int, g: int) -> tuple[Tensor, Space]:
        """A stage's input, on the device, and the space that who reads it reads."""
        return self._states[stage, g]

    def take(self, stage: int, g: int) -> tuple[Tensor, Space]:
        """The same for the last time."""
        self.most_bytes = max(self.most_bytes, self.device_bytes + _bytes(self._states[stage, g][0]))
        return self._states.pop((stage, g))

    def clear(self) -> None:
        """Forget what is on the device."""
        self._states.clear()


def _bytes(tensor: Tensor) -> int:
    return tensor.nbytes


def _nothing() -> None:
    pass
