"""The update, on the host, of planes that live there entirely: the resident engine's own, while the device works.

Only gradients come to the host for it, and weights go to the device for the passes as ever. The device's decision,
whether an update is applied and by which factor, comes as four numbers.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.optim import Plane, join, split
from monograph.step import Step
from monograph.step.clip import update_plane
from monograph.stream.chunked_update import Chunk, cut
from monograph.stream.lanes import Home, Lanes, Space
from monograph.stream.placement import on_host
from monograph.stream.store import GRADIENT, REST, Buffer, Stage, Store

# Elements of a chunk. Its update takes long compared with the call of a graph (0.3 ms), and a few milliseconds at most:
# generated code keeps Python's lock, so nothing is launched on the device meanwhile.
MOST = 2**22
NUMBERS = 4  # a decision: the gradient's factor, whether it is applied, updates so far, learning rate; fp64


class Decision(NamedTuple):
    """The numbers of a decision, on the device and on the host."""

    there: Buffer
    home: Buffer


class HostUpdate:
    """Updates the planes of a store that stay on the host.

    Attributes:
        scale: and `accepted`, `applied`, `lr`: the numbers of the current update, on the host.
        master: memory in which split weights are joined, a chunk at a time; only the host's lane uses it.
    """

    def __init__(self, step: Step, store: Store, lanes: Lanes):
        """Allocate the host's memory; `step` makes the update."""
        self.step, self.lanes = step, lanes
        # On the meta device nothing is computed; shapes and waits are those of a real run.
        self._host = torch.device("meta" if step.device.type == "meta" else "cpu")
        # The captured functions read this memory, so each decision is copied into it.
        self.scale, self.lr = (torch.zeros((), dtype=torch.float64, device=self._host) for _ in range(2))
        self.accepted = torch.zeros((), dtype=torch.bool, device=self._host)
        self.applied = torch.zeros((), dtype=torch.int64, device=self._host)
        halved = (end - begin for stored, begin, end in self._chunks(*store.stages) if stored.splits)
        self.master = torch.empty(max(halved, default=0), device=self._host)
        self._decisions: dict[int, Decision] = {}
        # Attributes, since a capture puts compiled functions in their place.
        self.join, self.split = join_, split_

    def send(self, index: int, scale: Tensor, accepted: Tensor) -> Decision:
        """Copy a decision to the host: the `index`-th of those that may be under way at once."""
        decision = self._decisions.get(index) or self._decisions.setdefault(index, self._room(index))
        of_step = self.step.applied, self.step.lr

        def say() -> None:
            # Four numbers in one copy; fp64 holds a count of updates exactly.
            numbers = [number.to(torch.float64) for number in (scale, accepted, *of_step)]
            decision.there.tensor.copy_(torch.stack(numbers))

        self.lanes.compute(say, writes=[decision.there.space])
        self.lanes.copy(decision.home.tensor, decision.there.tensor, decision.home.space, decision.there.space)
        return decision

    def update(self, stage: Stage, decision: Decision) -> None:
        """Update a stage's planes that stay on the host, as soon as their gradients and the decision are there."""
        chunks = list(self._chunks(stage))
        if not chunks:
            return
        self.lanes.host(functools.partial(self._receive, decision.home.tensor), [decision.home.space])
        for chunk in chunks:
            stored = chunk[0]
            parts = {name: chunk.part(buffer) for name, buffer in stored.buffers.items()}
            spaces = {name: buffer.space for name, buffer in stored.buffers.items()}
            in_files = {name: part.nbytes for name, part in parts.items() if spaces[name].home == Home.DISK}
            # The gradient is only read, all other buffers are written: the next gradient may come once this is read.
            gradient = spaces.pop(GRADIENT)
            self.lanes.host(
                functools.partial(self._updated, chunk, parts),
                [gradient],
                spaces.values(),
                from_disk=sum(in_files.values()),
                to_disk=sum(size for name, size in in_files.items() if name != GRADIENT),
            )
        stage.version += 1

    def update_piece(self, plane: Plane, rest: Tensor | None) -> None:
        """Update a part of a plane; split weights are joined first, and split again.

        Each of the three is a graph of its own: fused with 16-bit integers, torch 2.13 vectorises none of them.
        """
        if rest is None:
            self.update_part(plane)
            return
        master = self.master[: len(rest)]
        self.join(master, plane.param, rest)
        self.update_part(replace(plane, param=master))
        self.split(master, plane.param, rest)

    def update_part(self, plane: Plane) -> None:
        """Update fp32 weights as decided."""
        update_plane(
            plane, plane.grad, self.scale, self.accepted,
            optim=self.step.optim, precision=self.step.precision, lr=self.lr, applied=self.applied,
        )  # fmt: skip

    @staticmethod
    def _chunks(*stages: Stage) -> list[Chunk]:
        return list(cut((stored for stage in stages for stored in stage.stored if stored.on_host), MOST))

    def _room(self, index: int) -> Decision:
        there = torch.zeros(NUMBERS, dtype=torch.float64, device=self.step.device)
        label = f"decision {index}"
        # Each decision has memory of its own: the next may be made while the host still uses this one.
        home = on_host(there, label, self.step.device)
        decision = Decision(
            Buffer(there, Space(label, Home.DEVICE)), Buffer(home, Space(f"{label} at home", Home.HOST))
        )
        self.lanes.compute(lambda: None, writes=[decision.there.space])  # so that readers of the old content are done
        return decision

    def _receive(self, decision: Tensor) -> None:
        for number, target in zip(decision, (self.scale, self.accepted, self.applied, self.lr), strict=True):
            target.copy_(number)

    @torch.no_grad()  # here, because another thread may run it
    def _updated(self, chunk: Chunk, parts: dict[str, Tensor]) -> None:
        self.update_piece(chunk.plane(parts, self._host), parts.get(REST))


def join_(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Join two halves as `monograph.optim.join` does, in place."""
    master.copy_(join(hi, lo))


def split_(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Split weights as `monograph.optim.split` does, in place."""
    for target, source in zip((hi, lo), split(master), strict=True):
        target.copy_(source)
