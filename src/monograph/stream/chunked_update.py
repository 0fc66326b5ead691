"""The update of one stage, piece by piece, on the device: fetch, the resident engine's own update, bring back.

A piece is a stretch of a plane. Desks take turns: while one is updated the others are filled or emptied. Pieces are
updated between the micro-batches of another stage, so that they come and go while that one computes. Planes that are
updated on the host are left to `monograph.stream.host_update`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from monograph.errors import OutOfDeviceMemory
from monograph.optim import Plane
from monograph.stream.lanes import Home, Lanes, Space
from monograph.stream.slots import Bound, Room
from monograph.stream.store import GRADIENT, REST, WEIGHTS, Buffer, Stage, Stored

DESKS = 4
# Elements of a piece, a multiple of the 256 that share a number in 8-bit moments: long enough to fill a link and a
# device, short beside a large model's blocks.
MOST = 2**23
HALF_DONE = "take fewer blocks a stage or fewer rows (train.micro_batch), and go on from the last checkpoint"
Renew = Callable[[Plane, Tensor | None, Tensor, Tensor, Tensor], None]


class Piece(tuple[Stored, int, int]):
    """A plane and the elements of it, from (included) to (excluded)."""

    __slots__ = ()

    def part(self, buffer: Buffer) -> Tensor:
        """What of a buffer of the plane belongs to the piece; a buffer may have one number for many elements."""
        stored, begin, end = self
        block = stored.plane.param.numel() // buffer.tensor.numel()
        return buffer.tensor[begin // block : -(-end // block)]

    def plane(self, tensors: Mapping[str, Tensor], device: torch.device) -> Plane:
        """The piece as a plane of its own, its buffers' parts on that device, by name."""
        stored, begin, end = self
        slots, matrices = stored.plane.slots, stored.plane.kind.matrix is not None
        whole = stored.plane.param.numel() // len(slots)
        return replace(
            stored.plane,
            slots=slots[begin // whole : end // whole] if matrices else slots,
            param=tensors[WEIGHTS],
            grad=tensors[GRADIENT],
            start=torch.full((), stored.start + begin, dtype=torch.int64, device=device),
            state={name: tensors[name] for name in stored.moments},
        )


def pieces(stage: Stage) -> Iterator[Piece]:
    """Those of the stage's planes that are updated on the device, of at most MOST elements."""
    return cut((stored for stored in stage.stored if not stored.on_host), MOST)


def cut(planes: Iterable[Stored], most: int) -> Iterator[Piece]:
    """The planes in pieces of at most so many elements; matrices that are updated as such stay whole."""
    for stored in planes:
        size = stored.plane.param.numel()
        whole = size // len(stored.plane.slots) if stored.plane.kind.matrix else 1
        step = max(1, most // whole) * whole
        for begin in range(0, size, step):
            yield Piece((stored, begin, min(size, begin + step)))


def guest(piece: Piece, *, gradient: bool) -> dict[Hashable, Tensor]:
    """What of a piece has to be brought to a desk, by name; the gradient only if it is at home."""
    away = {name: buffer for name, buffer in piece[0].buffers.items() if buffer.space.home != Home.DEVICE}
    return {name: piece.part(buffer) for name, buffer in away.items() if gradient or name != GRADIENT}


@dataclass
class Desks:
    """Memory for the pieces that are updated, in turn."""

    lanes: Lanes
    rooms: list[Room]
    turn: int = 0

    def next(self) -> Room:
        """The one whose turn it is."""
        self.turn += 1
        return self.rooms[self.turn % len(self.rooms)]


class Renewal:
    """One stage's update.

    Args:
        stage: which.
        desks: where pieces are brought to.
        gradients: where the stage's gradients are on the device; None: at home.

    Attributes:
        count: how many pieces it has.
    """

    def __init__(self, stage: Stage, desks: Desks, gradients: Bound | None = None):
        """Nothing is copied yet."""
        self.stage, self.desks, self.gradients = stage, desks, gradients
        self._left = pieces(stage)
        self.count = sum(1 for _ in pieces(stage))
        self._fetched: list[tuple[Piece, dict[str, Tensor], list[Space], Room]] = []

    def begin(self) -> None:
        """Fetch as many pieces as there are desks, if not done yet."""
        for piece in islice(self._left, DESKS - len(self._fetched)):
            self._fetch(piece)

    @torch.no_grad()  # wherever it is called, an evaluation among others: captured, it is one graph
    def work(self, renew: Renew, scale: Tensor, accepted: Tensor, into: Bound | None = None) -> Iterator[None]:
        """Update one piece after another, and bring each home, and to the slot `into` where the weights are wanted.

        Raises:
            OutOfDeviceMemory: some pieces are updated and others not, so that it can be neither repeated nor left out.
        """
        self.begin()
        while self._fetched:
            piece, parts, spaces, desk = self._fetched.pop(0)
            try:
                self._renew(piece, parts, spaces, desk, renew, scale, accepted, into)
            except torch.OutOfMemoryError as error:
                raise OutOfDeviceMemory(
                    f"the update of {self.stage.name} does not fit the device's memory: {HALF_DONE}"
                ) from error
            self.begin()
            yield
        self.stage.version += 1
        if into is not None:
            into.fetch(self.desks.lanes, [stored for stored in self.stage.stored if stored.on_host])
            into.slot.holds = (self.stage, self.stage.version)

    def _fetch(self, piece: Piece) -> None:
        stored, begin, end = piece
        desk, lanes = self.desks.next(), self.desks.lanes
        away = guest(piece, gradient=self.gradients is None)
        parts: dict[Any, Tensor] = desk.take(away)
        spaces = [desk.space]
        for name, target in parts.items():
            lanes.copy(target, away[name], desk.space, stored.buffers[name].space)
        for name, buffer in stored.buffers.items():
            if name == GRADIENT and self.gradients is not None:
                parts[name] = self.gradients.planes[self.stage.stored.index(stored)].grad[begin:end]
                spaces += self.gradients.writes
            elif name not in parts:
                parts[name] = piece.part(buffer)
                spaces.append(buffer.space)
        self._fetched.append((piece, parts, spaces, desk))

    def _renew(
        self,
        piece: Piece,
        parts: dict[str, Tensor],
        spaces: Sequence[Space],
        desk: Room,
        renew: Renew,
        scale: Tensor,
        accepted: Tensor,
        into: Bound | None,
    ) -> None:
        stored, begin, end = piece
        lanes = self.desks.lanes
        plane = piece.plane(parts, scale.device)
        lanes.compute(lambda: renew(plane, parts.get(REST), parts[GRADIENT], scale, accepted), writes=spaces)
        for name, buffer in stored.buffers.items():
            if name != GRADIENT and buffer.space.home != Home.DEVICE:
                lanes.copy(piece.part(buffer), parts[name], buffer.space, desk.space)
        if into is not None and stored.buffers[WEIGHTS].space.home != Home.DEVICE:
            target = into.planes[self.stage.stored.index(stored)].param[begin:end]
            lanes.compute(lambda: target.copy_(parts[WEIGHTS]), reads=[desk.space], writes=[into.slot.weights.space])
