"""Update planes whose buffers are all off the device on the host, by the resident engine's own update.

The device computes meanwhile. Only gradients come to the host for this, and weights go to the device for the passes as
always. The device's decision, whether an update is applied and by which factor, comes as four numbers.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.optim import Plane, join, split_
from monograph.step import Step
from monograph.step.clip import update_plane
from monograph.stream.chunked_update import Chunk, cut
from monograph.stream.lanes import Home, Lanes, Space
from monograph.stream.placement import on_host
from monograph.stream.store import GRADIENT, REST, Buffer, Stage, Store

# Elements of a chunk. Its update should take long compared with calling a graph (0.3 ms), but only a few milliseconds:
# nothing is launched on the device meanwhile, as generated code keeps Python's lock.
MOST = 2**22
NUMBERS = 4  # of a decision, in fp64: the gradient's factor, whether it is applied, updates so far, learning rate


class Decision(NamedTuple):
    """The memory of a decision's numbers, on the device (`there`) and on the host (`home`)."""

    there: Buffer
    home: Buffer


class HostUpdate:
    """The updates on the host of a store's planes.

    Attributes:
        scale: factor of the gradient in the current update, on the host like the next three.
        accepted: whether the update is applied.
        applied: the number of updates so far.
        lr: the learning rate.
        master: memory in which the split weights of a chunk are joined; only the host lane uses it.
    """

    def __init__(self, step: Step, store: Store, lanes: Lanes):
        """Allocate memory on the host for updates of `step`."""
        self.step, self.lanes = step, lanes
        # On the meta device nothing is computed; shapes and waits are those of a real run.
        self._host = torch.device("meta" if step.device.type == "meta" else "cpu")
        # Captured functions read this memory, so each decision is copied into it.
        self.scale, self.lr = (torch.zeros((), dtype=torch.float64, device=self._host) for _ in range(2))
        self.accepted = torch.zeros((), dtype=torch.bool, device=self._host)
        self.applied = torch.zeros((), dtype=torch.int64, device=self._host)
        halved = (end - begin for stored, begin, end in self._chunks(*store.stages) if stored.splits)
        self.master = torch.empty(max(halved, default=0), device=self._host)
        self._decisions: dict[int, Decision] = {}
        # These are attributes, as a capture replaces them by compiled functions.
        self.join, self.split = join_, split_

    def send(self, index: int, scale: Tensor, accepted: Tensor) -> Decision:
        """Copy a decision to the host, into the memory of that index; decisions of several indices may be under way."""
        decision = self._decisions.get(index) or self._decisions.setdefault(index, self._room(index))
        of_step = self.step.applied, self.step.lr

        def say() -> None:
            # One copy takes all four numbers; fp64 holds a count of updates exactly.
            numbers = [number.to(torch.float64) for number in (scale, accepted, *of_step)]
            decision.there.tensor.copy_(torch.stack(numbers))

        self.lanes.compute(say, writes=[decision.there.space])
        self.lanes.copy(decision.home.tensor, decision.there.tensor, decision.home.space, decision.there.space)
        return decision

    def update(self, stage: Stage, decision: Decision) -> None:
        """Update a stage's planes that live on the host, as soon as their gradients and the decision are there."""
        if not (chunks := list(self._chunks(stage))):
            return
        self.lanes.host(functools.partial(self._receive, decision.home.tensor), [decision.home.space])
        for chunk in chunks:
            stored = chunk[0]
            parts = {name: chunk.part(buffer) for name, buffer in stored.buffers.items()}
            spaces = {name: buffer.space for name, buffer in stored.buffers.items()}
            in_files = {name: part.nbytes for name, part in parts.items() if spaces[name].home == Home.DISK}
            # The gradient is only read, so the next gradient may come once it was read; all other buffers are written.
            self.lanes.host(
                functools.partial(self._updated, chunk, parts),
                [spaces.pop(GRADIENT)],
                spaces.values(),
                from_disk=sum(in_files.values()),
                to_disk=sum(size for name, size in in_files.items() if name != GRADIENT),
            )
        stage.version += 1

    def update_piece(self, plane: Plane, rest: Tensor | None) -> None:
        """Update a part of a plane; split weights are joined before and split again afterwards.

        Each of the three steps is a graph of its own: if an update is fused with 16-bit integers, torch 2.13 vectorises
        none of it.
        """
        if rest is None:
            self.update_part(plane)
            return
        master = self.master[: len(rest)]
        self.join(master, plane.param, rest)
        self.update_part(replace(plane, param=master))
        self.split(master, plane.param, rest)

    def update_part(self, plane: Plane) -> None:
        """Update weights that are not split by the decision received."""
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
        # Each decision has memory of its own, as the next one may be made while the host still uses this one.
        own = on_host(there, label, self.step.device)
        decision = Decision(Buffer(there, Space(label, Home.DEVICE)), Buffer(own, Space(f"{label} at home", Home.HOST)))
        self.lanes.compute(lambda: None, writes=[decision.there.space])  # earlier computations may have used its memory
        return decision

    def _receive(self, decision: Tensor) -> None:
        for number, target in zip(decision, (self.scale, self.accepted, self.applied, self.lr), strict=True):
            target.copy_(number)

    @torch.no_grad()  # a thread may run it, and whether gradients are enabled is a setting of each thread
    def _updated(self, chunk: Chunk, parts: dict[str, Tensor]) -> None:
        self.update_piece(chunk.plane(parts, self._host), parts.get(REST))


def join_(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Join halves into `master` in place, as `monograph.optim.join` does."""
    master.copy_(join(hi, lo))
