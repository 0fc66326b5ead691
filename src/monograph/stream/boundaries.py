"""The activations between stages: each micro-batch's input of a stage, kept until the backward pass.

They stay on the device, or are offloaded to the host.

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

    On the device they take the memory of (stages - 1) G activations. Offloaded they take that of 4 G, whatever the
    depth (2 G of them for those that come back), and the host keeps the rest.

    Attributes:
        most_bytes: the most bytes that the inputs, and the gradient of the one in use, took on the device at once.
    """

    def __init__(self, lanes: Lanes, device: torch.device, *, offloaded: bool, last: int):
        """Begin empty; `last` is the index of the last stage, whose inputs are wanted again at once."""
        self.lanes, self.device, self.offloaded, self.last = lanes, device, offloaded, last
        self.most_bytes = 0
        self._states: dict[tuple[int, int], tuple[Tensor, Space]] = {}
        self._host: dict[tuple[int, int], tuple[Tensor, Space]] = {}
        self._rings: dict[tuple[int, int], tuple[Tensor, Space]] = {}

    @property
    def device_bytes(self) -> int:
        """Return the bytes that the inputs take on the device now."""
        distinct = {id(kept): kept for kept, _ in (*self._states.values(), *self._rings.values())}
        return sum(map(_bytes, distinct.values()))

    def put(self, stage: int, g: int, state: Tensor, *, keep: bool) -> None:
        """Take over micro-batch g's input of a stage; `keep` it for the backward pass."""
        # Each tensor has a space of its own, so that work that reads one input waits for that one alone.
        space = Space(f"input {g} of stage {stage}", Home.DEVICE)
        self._states[stage, g] = state, space
        self.most_bytes = max(self.most_bytes, self.device_bytes)
        self.lanes.compute(_nothing, writes=[space])  # so that readers wait for the work that computed the input
        # The last stage's input is not offloaded: the backward pass wants it first.
        if keep and self.offloaded and stage != self.last:
            like = self._host.get((stage, g))
            # Page-locked memory is slow to get, and the next update's inputs usually have the same shapes: it is kept
            # until a shape changes.
            if like is None or like[0].shape != state.shape or like[0].dtype != state.dtype:
                label = f"kept input {g} of stage {stage}"
                like = on_host(state, label, self.device), Space(label, Home.HOST)
                self._host[stage, g] = like
            self.lanes.copy(like[0], state, like[1], space)

    def passed(self, stage: int, *, keep: bool) -> None:
        """Free a stage's inputs on the device, which its forward pass has read."""
        if stage == self.last or (keep and not self.offloaded):
            return
        # Only when all micro-batches have passed, so that the allocator can give the memory to the next stage.
        for key in [key for key in self._states if key[0] == stage]:
            _, space = self._states.pop(key)
            self.lanes.compute(_nothing, writes=[space])  # later work on this lane may get the memory

    def fetch(self, stage: int, count: int) -> None:
        """Start to bring a stage's inputs back to the device."""
        # The first stage reads the batch itself, and the last one's input has never left the device.
        if not self.offloaded or stage in (0, self.last):
            return
        for g in range(count):
            home, its_space = self._host[stage, g]
            at = stage % RINGS, g
            ring = self._rings.get(at)
            if ring is None or ring[0].shape != home.shape or ring[0].dtype != home.dtype:
                memory = torch.empty(home.shape, dtype=home.dtype, device=self.device)
                ring = self._rings[at] = memory, Space(f"ring {at}", Home.DEVICE)
                self.lanes.compute(_nothing, writes=[ring[1]])  # work so far may still read the ring's old content
            self.lanes.copy(ring[0], home, ring[1], its_space)
            self._states[stage, g] = ring

    def of(self, stage: int, g: int) -> tuple[Tensor, Space]:
        """Return a stage's input on the device, and its space, which a reader has to name."""
        return self._states[stage, g]

    def take(self, stage: int, g: int) -> tuple[Tensor, Space]:
        """Return the same as `of`, for the last time: the input is forgotten."""
        self.most_bytes = max(self.most_bytes, self.device_bytes + _bytes(self._states[stage, g][0]))
        return self._states.pop((stage, g))

    def clear(self) -> None:
        """Forget the inputs on the device."""
        self._states.clear()


def _bytes(tensor: Tensor) -> int:
    return tensor.nbytes


def _nothing() -> None:
    pass
