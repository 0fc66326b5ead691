"""Iterate over the documents of a source in order, any number of times: texts, stretches of texts,
and records.

A keyed hash decides which documents are held out, so the split needs neither state nor random
numbers.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from monograph.data import LARGEST_SHARE
from monograph.data.completions import completion_records, texts_of
from monograph.data.conversations import conversation_records
from monograph.data.forms import Kind, RecordKeys, RecordSettings
from monograph.data.loss_mask import Answering
from monograph.data.progress import Meter, Progress
from monograph.data.reading import Damaged, cut_position, parts_of, read_text
from monograph.data.records import Fault, Record, json_lines
from monograph.data.sources import LINES, SourceFile, place_of
from monograph.data.tables import table_rows
from monograph.errors import InputRefused, UsageError

_KEY = b"monograph held out 1"
# Records are held out by the hash bucket of their text, so that millions of them need no more
# memory than a few.
BUCKETS = 1 << 16

Group = TypeVar("Group", bound=Hashable)


class Split(NamedTuple):
    """The choice of held-out documents.

    Attributes:
        cuts: by file index, the byte from which on a text file is held out: 0 if all of it is, its
            size if none of it.
        buckets: bool [BUCKETS], true where the bucket's records are held out.
        notes: lines for the user about a text that was cut, or about more text held out than
            requested.
    """

    cuts: tuple[int, ...]
    buckets: NDArray[np.bool_]
    notes: tuple[str, ...]


def fingerprint(text: bytes) -> bytes:
    """Return the keyed hash of a text, by which the split orders texts and never separates equal
    records.
    """
    return hashlib.sha256(_KEY + b"\0" + text).digest()


def bucket(digest: bytes) -> int:
    """Return the bucket of a text with this fingerprint."""
    return int.from_bytes(digest[:2])


def check_fraction(fraction: float) -> None:
    """Check the share to hold out.

    Raises:
        UsageError: the share is outside [0, LARGEST_SHARE].
    """
    if not 0 <= fraction <= LARGEST_SHARE:
        raise UsageError(
            f"data.held_out = {fraction}: must be a fraction from 0 to {LARGEST_SHARE}, such as 0.05"
        )


def split(files: Sequence[SourceFile], bucket_bytes: NDArray[np.int64], fraction: float) -> Split:
    """Hold out about `fraction` of the bytes of the text files, and about `fraction` of the
    records' bytes.

    A group of text files is a package, or all copies of one content. Groups without near copies
    elsewhere are taken in the order of sha256(key, group), and buckets of records by number, each
    if it still fits the budget of fraction · bytes. If they fill less than half of the budget, the
    next group that is no larger than the whole budget is taken, too. If every remaining group is
    larger, the end of the largest text is cut off at a line end instead; with records, the buckets
    that fit are held out, or at least the smallest bucket.

    Args:
        files: all files; those with records are ignored.
        bucket_bytes: int64 [BUCKETS], bytes of the records' texts in each bucket.
        fraction: from 0 to 0.5.
    """
    texts = [index for index, file in enumerate(files) if not file.has_records]
    groups: dict[str, list[int]] = defaultdict(list)
    for index in texts:
        groups[files[index].group].append(index)
    sizes = {
        group: sum(files[index].size for index in members) for group, members in groups.items()
    }
    budget = math.floor(fraction * sum(sizes.values()))
    alone = [
        group
        for group, members in groups.items()
        if not any(files[index].has_near_copies for index in members)
    ]
    order = sorted(alone or groups, key=lambda group: fingerprint(group.encode()))
    held, enough = _taken(order, sizes, budget)
    cuts = [file.size for file in files]
    notes = []
    if enough:
        for index in chain.from_iterable(groups[group] for group in held):
            cuts[index] = 0
    else:
        largest = groups[max(order, key=sizes.__getitem__)]
        for index in largest:
            file = files[index]
            tail = budget // len(largest)
            cuts[index] = cut_position(file.path, max(1, file.size - tail), file.size)
            if cuts[index] < file.size:
                end = f"the last {file.size - cuts[index]:,} bytes of {file.name}"
                notes = [f"held out: {end} (too few documents to hold out whole)"]
    buckets, record_note = _held_buckets(bucket_bytes, fraction)
    return Split(tuple(cuts), buckets, (*notes, *record_note))


def _held_buckets(
    bucket_bytes: NDArray[np.int64], fraction: float
) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
    order = np.flatnonzero(bucket_bytes).tolist()
    sizes = {bucket: int(bucket_bytes[bucket]) for bucket in order}
    total = sum(sizes.values())
    notes = tuple[str, ...]()
    held, enough = _taken(order, sizes, math.floor(fraction * total))
    if not enough and len(order) > 1:
        held = held or {min(order, key=sizes.__getitem__)}
        share = sum(sizes[bucket] for bucket in held) / total
        notes = (
            f"held out: {share:.1%} of the records' text, not {fraction:.1%} (too few records)",
        )
    buckets = np.zeros(BUCKETS, dtype=np.bool_)
    buckets[list(held)] = True
    return buckets, notes


def _taken(
    order: Sequence[Group], sizes: Mapping[Group, int], budget: int
) -> tuple[set[Group], bool]:
    """Return the groups to hold out, and whether they fill at least half of the budget."""
    held: set[Group] = set()
    taken = 0
    for group in order:
        if taken + sizes[group] <= budget:
            held.add(group)
            taken += sizes[group]
    if 2 * taken < budget:
        fitting = next(
            (group for group in order if group not in held and sizes[group] <= budget), None
        )
        if fitting is None:
            return held, False
        held.add(fitting)
    return held, True


EMPTY_TEXT = "empty text"
_REMEDY = "correct or remove it, or train with data.bad_records=skip"


class Document(NamedTuple):
    """A text that gets one beginning token and one end token.

    Attributes:
        file: index of its source file.
        record: its line or row in the file, from 1; 0 for a text file.
        held_out: whether it is held out of training.
        bytes: length of its text in UTF-8.
        parts: an iterator, to be consumed once, over (part of the text, bytes read so far).
    """

    file: int
    record: int
    held_out: bool
    bytes: int
    parts: Iterator[tuple[str, int]]


class Reading(NamedTuple):
    """Options for reading records.

    Attributes:
        text_key: the key of a record's text.
        skip_bad: whether bad records are skipped; otherwise they are errors.
        answering: how conversations become rows; None if records are texts. Conversations are read
            as the texts that `conversation_text` returns.
        ignored: the keys of records that are left out.
        is_chosen: whether `text_key` asks for conversations, so that keys of other kinds of records
            are ignored.
        plain: whether conversations are a prompt and a completion each, texts that no chat template
            renders.
    """

    text_key: str
    skip_bad: bool
    answering: Answering | None = None
    ignored: tuple[str, ...] = ()
    is_chosen: bool = False
    plain: bool = False

    @property
    def asked(self) -> RecordSettings:
        """Return what the settings say about the records."""
        return RecordSettings(self.text_key if self.is_chosen else None, frozenset(self.ignored))

    @property
    def ignored_training_keys(self) -> list[str]:
        """Return the ignored keys that would say what is trained."""
        return self.asked.ignored_training_keys

    def keys(self) -> RecordKeys:
        """Return a reader of the keys of conversations."""
        return RecordKeys(Kind.CONVERSATIONS, self.asked, self.is_chosen)


class Survey(NamedTuple):
    """The result of a first pass over all records.

    Attributes:
        bucket_bytes: int64 [BUCKETS], bytes of text by bucket of the split.
        unusable: indices of the files that are skipped whole.
        skipped: {reason: count} of the skipped records and files.
        notes: lines for the user about the records that are skipped, and about the keys that are
            ignored.
    """

    bucket_bytes: NDArray[np.int64]
    unusable: frozenset[int]
    skipped: dict[str, int]
    notes: tuple[str, ...]


def survey(files: Sequence[SourceFile], reading: Reading, meter: Meter) -> Survey:
    """Read every record once before any is used, because damage may come at the end of a compressed
    file or a table.

    Raises:
        InputRefused: a record is bad or a file is damaged, and `reading` does not skip them; the
            message names it.
    """
    bucket_bytes = np.zeros(BUCKETS, dtype=np.int64)
    unusable: set[int] = set()
    skipped: Counter[str] = Counter()
    first_bad = ""
    records = 0
    keys = reading.keys()
    for index, file in enumerate(files):
        if not file.has_records:
            continue
        before = bucket_bytes.copy()
        reasons: Counter[str] = Counter()
        try:
            for number, text in _records(file, reading, keys):
                records += 1
                if isinstance(text, Fault):
                    line = f"{place_of(file.path, number)}: {text.detail}"
                    if not reading.skip_bad:
                        raise refused(line)
                    first_bad = first_bad or line
                    reasons[text.reason] += 1
                elif text:
                    content = text.encode()
                    bucket_bytes[bucket(fingerprint(content))] += len(content)
                    meter.add(len(content))
                else:
                    reasons[EMPTY_TEXT] += 1
        except Damaged as error:
            if not reading.skip_bad:
                raise
            # The records before the damage may be damaged, too.
            bucket_bytes = before
            reasons = Counter({"damaged file": 1})
            first_bad = first_bad or f"{file.path}: {error.fault}"
            unusable.add(index)
        skipped += reasons
    notes = (*_note(skipped, records, first_bad), *keys.notes())
    return Survey(bucket_bytes, frozenset(unusable), dict(skipped), notes)


def refused(line: str) -> InputRefused:
    """Return the error for a bad record, described by `line`, that is not skipped."""
    return InputRefused(f"{line}; {_REMEDY}")


def _note(skipped: Counter[str], records: int, first_bad: str) -> tuple[str, ...]:
    if not skipped:
        return ()
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.most_common())
    first = f"; the first: {first_bad}" if first_bad else ""
    return (f"skipped of {records:,} records: {reasons}{first}",)


def _records(file: SourceFile, reading: Reading, keys: RecordKeys) -> Iterator[Record]:
    if reading.plain:
        return completion_records(file, keys)
    if reading.answering:
        return conversation_records(file, keys)
    return (json_lines if file.suffix in LINES else table_rows)(file.path, reading.text_key)


class Documents:
    """All documents of some files, split in two; the constructor reads every record once.

    Attributes:
        files: the files.
        reading: how records are read.
        survey: the result of the first pass over the records.
        split: the choice of held-out documents.
        notes: lines for the user about the survey and the split.

    Raises:
        InputRefused: as in `survey`.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        reading: Reading,
        held_out: float,
        progress: Progress | None = None,
    ) -> None:
        self.files, self.reading = files, reading
        meter = Meter(
            progress if any(file.has_records for file in files) else None, "records", None
        )
        self.survey = survey(files, reading, meter)
        meter.finish()
        self.split: Split = split(files, self.survey.bucket_bytes, held_out)
        self.notes = (*self.survey.notes, *self.split.notes)

    @cached_property
    def text_bytes(self) -> int:
        """Return the bytes of all texts in UTF-8."""
        return sum(file.size for file in self.files if not file.has_records) + int(
            self.survey.bucket_bytes.sum()
        )

    @cached_property
    def train_bytes(self) -> int:
        """Return the bytes of the texts that are not held out."""
        return self._train_file_bytes + int(self.survey.bucket_bytes[~self.split.buckets].sum())

    @cached_property
    def _train_file_bytes(self) -> int:
        return sum(
            cut
            for file, cut in zip(self.files, self.split.cuts, strict=True)
            if not file.has_records
        )

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents in the order of their files; consume a document's parts before asking
        for the next.
        """
        for index, file in enumerate(self.files):
            if file.has_records:
                for number, text, size, digest in self._good(index):
                    held_out = bool(self.split.buckets[bucket(digest)])
                    yield Document(index, number, held_out, size, _record_parts(text, size))
                continue
            cut = self.split.cuts[index]
            for start, stop in ((0, cut), (cut, file.size)):
                if start < stop:
                    yield Document(
                        index, 0, start == cut, stop - start, read_text(file.path, start, stop)
                    )

    def sample(self, budget_bytes: int) -> Iterator[str]:
        """Yield about `budget_bytes` of training text: files in the order of sha256(name), records
        chosen by hash.
        """
        share = min(1.0, budget_bytes / max(1, self.train_bytes))
        left = round(share * self._train_file_bytes)
        order: Sequence[int] = range(len(self.files))
        if share < 1:
            order = sorted(
                order, key=lambda index: hashlib.sha256(self.files[index].name.encode()).digest()
            )
        for index in order:
            file, stop = self.files[index], self.split.cuts[index]
            if file.has_records:
                for _, text, _, digest in self._good(index):
                    if (
                        not self.split.buckets[bucket(digest)]
                        and int.from_bytes(digest[2:6]) < share * 2**32
                    ):
                        for whole in texts_of(text) if self.reading.plain else (text,):
                            yield from parts_of(whole)
            elif stop and left > 0:
                stop = stop if stop <= left else cut_position(file.path, left, stop)
                left -= stop
                yield from (part for part, _ in read_text(file.path, 0, stop))

    def _good(self, index: int) -> Iterator[tuple[int, str, int, bytes]]:
        """Yield (record number, text, bytes of the text, its fingerprint) for each usable record of
        a file.
        """
        if index in self.survey.unusable:
            return
        for number, text in _records(self.files[index], self.reading, self.reading.keys()):
            if text and not isinstance(text, Fault):
                content = text.encode()
                yield number, text, len(content), fingerprint(content)


def _record_parts(text: str, size: int) -> Iterator[tuple[str, int]]:
    chars = 0
    for part in parts_of(text):
        chars += len(part)
        yield part, size * chars // len(text)
