"""Decides which documents are held out of training, by a keyed hash: no state, no random numbers."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monograph.data.sources import SourceFile
from monograph.data.text import cut_position
from monograph.errors import UsageError

LARGEST_SHARE = 0.5  # of the bytes: beyond it there is less to train on than to measure on
_KEY = b"monograph held out 1"


@dataclass(frozen=True, slots=True)
class Document:
    """Bytes [start, stop) of a text file: what gets one beginning and one end token."""

    name: str
    path: Path
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        """Length in bytes of UTF-8."""
        return self.stop - self.start


@dataclass(frozen=True)
class Split:
    """The documents of both sides in source order, and a line for the person if a document had to be cut."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    note: str | None


def split(files: Sequence[SourceFile], fraction: float) -> Split:
    """Hold out about `fraction` of the bytes.

    Groups of files (a package; copies of one content) that have no near copy elsewhere are taken in the order of
    sha256(key, group) while they fit the budget of fraction · bytes. If less than half of it can be filled that way,
    one more group is taken whole where it is no larger than the budget; where every group left is larger (a single
    file, for one) the end of the largest is cut off at a line end.

    Raises:
        UsageError: fraction outside [0, LARGEST_SHARE].
    """
    if not 0 <= fraction <= LARGEST_SHARE:
        raise UsageError(f"data.held_out = {fraction}: must be a fraction from 0 to {LARGEST_SHARE}, such as 0.05")
    groups: dict[str, list[SourceFile]] = defaultdict(list)
    for file in files:
        groups[file.group].append(file)
    sizes = {group: sum(file.size for file in members) for group, members in groups.items()}
    budget = math.floor(fraction * sum(sizes.values()))
    candidates = [group for group, members in groups.items() if not any(file.twin for file in members)] or list(groups)
    order = sorted(candidates, key=lambda group: hashlib.sha256(_KEY + b"\0" + group.encode()).digest())
    held: set[str] = set()
    taken = 0
    for group in order:
        if taken + sizes[group] <= budget:
            held.add(group)
            taken += sizes[group]
    left = [group for group in order if group not in held]
    cut_group = None
    if 2 * taken < budget:
        fitting = next((group for group in left if sizes[group] <= budget), None)
        if fitting is not None:
            held.add(fitting)
        else:
            held, cut_group = set(), max(left, key=lambda group: sizes[group])
    return _documents(files, held, cut_group, budget // len(groups[cut_group]) if cut_group is not None else 0)


def _documents(files: Sequence[SourceFile], held: set[str], cut_group: str | None, tail_bytes: int) -> Split:
    train: list[Document] = []
    held_out: list[Document] = []
    note = None
    for file in files:
        whole = Document(file.name, file.path, 0, file.size)
        if file.group != cut_group:
            (held_out if file.group in held else train).append(whole)
            continue
        cut = cut_position(file.path, max(1, file.size - tail_bytes), file.size)
        train.append(Document(file.name, file.path, 0, cut))
        if cut < file.size:
            held_out.append(Document(file.name, file.path, cut, file.size))
            note = f"held out: the last {file.size - cut:,} bytes of {file.name} (too few documents to hold out whole)"
    return Split(tuple(train), tuple(held_out), note)
