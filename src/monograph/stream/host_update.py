"""The update of planes whose buffers are all at home, made there: the resident engine's own, while the device works.

Only gradients come home for it, and weights go to the device for the passes as ever. What the device decides, whether
an update is applied and by which factor, comes as four numbers.
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

# Elements of a chunk: long compared with what calling a graph takes (0.3 ms), and a few milliseconds at most,
# in which nothing is launched on the device, as generated code keeps Python's lock.
MOST = 2**22
NUMBERS = 4  # of a decision: factor of the gradient, whether it is applied, updates so far, learning rate; fp64


class Decision(NamedTuple):
    """The numbers of a decision, on the device and at home."""

    there: Buffer
    home: Buffer


class HostUpdate:
    """Updates the planes of a store that stay at home.

    Attributes:
        scale: and `accepted`, `applied` and `lr`: those of the update that is made, on the host.
        master: where split weights are joined, a chunk at a time; only the host lane sees it.
    """

    def __init__(self, step: Step, store: Store, lanes: Lanes):
        """Take the host's memory; `step` is the one whose update is made."""
        self.step, self.lanes = step, lanes
        # On the meta device nothing is computed, but shapes and waits are those of a real run.
        self._host = torch.device("meta" if step.device.type == "meta" else "cpu")
        # Memory that does not change, which the captured functions read: each decision is copied into it.
        self.scale, self.lr = (torch.zeros((), dtype=torch.float64, device=self._host) for _ in range(2))
        self.accepted = torch.zeros((), dtype=torch.bool, device=self._host)
        self.applied = torch.zeros((), dtype=torch.int64, device=self._host)
        halved = (end - begin for stored, begin, end in self._chunks(*store.stages) if stored.splits)
        self.master = torch.empty(max(halved, default=0), device=self._host)
        self._decisions: dict[int, Decision] = {}
        # Attributes, since a capture puts compiled functions in their place.
        self.join, self.split = join_, split_

    def send(self, index: int, scale: Tensor, accepted: Tensor) -> Decision:
        """Have a decision copied to the host, the index-th of those that may be under way at once."""
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
        """Update those planes of a stage that stay at home, as soon as their gradients and the decision are there."""
        chunks = list(self._chunks(stage))
        if not chunks:
            return
        self.lanes.host(functools.partial(self._receive, decision.home.tensor), [decision.home.space])
        for chunk in chunks:
            stored = chunk[0]
            parts = {name: chunk.part(buffer) for name, buffer in stored.buffers.items()}
            spaces = {name: buffer.space for name, buffer in stored.buffers.items()}
            in_files = {name: part.nbytes for name, part in parts.items() if spaces[name].home == Home.DISK}
            # The gradient is read alone, all other buffers are written: the next gradient may come as soon as it was
            # read.
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
        """Update a part of a plane, and where its weights are split: joined, and split again.

        Each in a graph of its own: fused with 16-bit integers, torch 2.13 generates code without vectors for all of it.
        """
        if rest is None:
            self.update_part(plane)
            return
        master = self.master[: len(rest)]
        self.join(master, plane.param, rest)
        self.update_part(replace(plane, param=master))
        self.split(master, plane.param, rest)

    def update_part(self, plane: Plane) -> None:
        """Update whole weights, by what was decided."""
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
        # Of each decision its own memory: the next may be made while the host still works by this one.
        home = on_host(there, label, self.step.device)
        decision = Decision(
            Buffer(there, Space(label, Home.DEVICE)), Buffer(home, Space(f"{label} at home", Home.HOST))
        )
        self.lanes.compute(lambda: None, writes=[decision.there.space])  # whatever was there before is done with
        return decision

    def _receive(self, decision: Tensor) -> None:
        for number, target in zip(decision, (self.scale, self.accepted, self.applied, self.lr), strict=True):
            target.copy_(number)

    @torch.no_grad()  # a thread of its own may do it
    def _updated(self, chunk: Chunk, parts: dict[str, Tensor]) -> None:
        self.update_piece(chunk.plane(parts, self._host), parts.get(REST))


def join_(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """`monograph.optim.join` in place."""
    master.copy_(join(hi, lo))


def split_(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """`monograph.optim.split` in place."""
    for target, source in zip((hi, lo), split(master), strict=True):
        target.copy_(source)
