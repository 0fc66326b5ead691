"""Decides which documents are held out of training, by a keyed hash: no state, no random numbers."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from monograph.data import LARGEST_SHARE
from monograph.data.sources import SourceFile
from monograph.data.text import cut_position
from monograph.errors import UsageError

_KEY = b"monograph held out 1"
# Records are held out by the bucket that their text falls into: millions of them need no more memory than a few do.
BUCKETS = 1 << 16

Group = TypeVar("Group", bound=Hashable)


@dataclass(frozen=True)
class Split:
    """Which documents are held out, and lines for the person if it could not be done as it should.

    Attributes:
        cuts: by the index of a file of text, the byte from which on it is held out: 0, or its size for none of it.
        buckets: bool [BUCKETS], which records are.
        notes: what was cut, or held out beyond the share that was asked for.
    """

    cuts: tuple[int, ...]
    buckets: NDArray[np.bool_]
    notes: tuple[str, ...]


def fingerprint(text: bytes) -> bytes:
    """The keyed hash of a record's text: equal texts are never separated by the split."""
    return hashlib.sha256(_KEY + b"\0" + text).digest()


def bucket(digest: bytes) -> int:
    """The bucket of a text with this fingerprint."""
    return int.from_bytes(digest[:2])


def check_fraction(fraction: float) -> None:
    """Refuses a share that cannot be held out.

    Raises:
        UsageError: outside [0, LARGEST_SHARE].
    """
    if not 0 <= fraction <= LARGEST_SHARE:
        raise UsageError(f"data.held_out = {fraction}: must be a fraction from 0 to {LARGEST_SHARE}, such as 0.05")


def split(files: Sequence[SourceFile], bucket_bytes: NDArray[np.int64], fraction: float) -> Split:
    """Hold out about `fraction` of the bytes of the texts, and about as much of the records'.

    Groups of texts (a package; copies of one content) that have no near copy elsewhere are taken in the order of
    sha256(key, group), and buckets of records in order, while they fit the budget of fraction · bytes. If less than
    half of it can be filled that way, one more is taken whole where it is no larger than the budget. Where every one
    left is larger, the end of the largest text is cut off at a line end instead; the records remain at what fits, or
    else at the smallest bucket.

    Args:
        files: all files; those with records are passed over here.
        bucket_bytes: int64 [BUCKETS], bytes of the records' texts in each bucket.
        fraction: from 0 to 0.5.
    """
    texts = [index for index, file in enumerate(files) if not file.has_records]
    groups: dict[str, list[int]] = defaultdict(list)
    for index in texts:
        groups[files[index].group].append(index)
    sizes = {group: sum(files[index].size for index in members) for group, members in groups.items()}
    budget = math.floor(fraction * sum(sizes.values()))
    alone = [group for group, members in groups.items() if not any(files[index].twin for index in members)]
    order = sorted(alone or groups, key=lambda group: fingerprint(group.encode()))
    held, enough = _taken(order, sizes, budget)
    cuts, notes = [file.size for file in files], []
    for index in [index for group in held if enough for index in groups[group]]:
        cuts[index] = 0
    if not enough:
        largest = groups[max(order, key=lambda group: sizes[group])]
        for index in largest:
            file, tail = files[index], budget // len(largest)
            cuts[index] = cut_position(file.path, max(1, file.size - tail), file.size)
            if cuts[index] < file.size:
                end = f"the last {file.size - cuts[index]:,} bytes of {file.name}"
                notes = [f"held out: {end} (too few documents to hold out whole)"]
    buckets, record_note = _held_buckets(bucket_bytes, fraction)
    return Split(tuple(cuts), buckets, (*notes, *record_note))


def _held_buckets(bucket_bytes: NDArray[np.int64], fraction: float) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
    order = np.flatnonzero(bucket_bytes).tolist()
    sizes = {each: int(bucket_bytes[each]) for each in order}
    total, notes = sum(sizes.values()), tuple[str, ...]()
    held, enough = _taken(order, sizes, math.floor(fraction * total))
    if not enough and len(order) > 1:
        held = held or {min(order, key=lambda each: sizes[each])}
        share = sum(sizes[each] for each in held) / total
        notes = (f"held out: {share:.1%} of the records' text, not {fraction:.1%} (too few records)",)
    buckets = np.zeros(BUCKETS, dtype=np.bool_)
    buckets[list(held)] = True
    return buckets, notes


def _taken(order: Sequence[Group], sizes: Mapping[Group, int], budget: int) -> tuple[set[Group], bool]:
    """Which groups are held out, and whether they are at least half of the budget."""
    held: set[Group] = set()
    taken = 0
    for group in order:
        if taken + sizes[group] <= budget:
            held.add(group)
            taken += sizes[group]
    if 2 * taken < budget:
        fitting = next((group for group in order if group not in held and sizes[group] <= budget), None)
        if fitting is None:
            return held, False
        held.add(fitting)
    return held, True
