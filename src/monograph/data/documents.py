"""Iterate over the documents of a source in order, and hold some of them out of training.

A document is a text file or a record (a line of a .jsonl file, or a row of a table). A text file
that is partly held out is two documents. `Documents` can be iterated any number of times.

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
from monograph.data.completions import completion_records, prompt_and_completion
from monograph.data.conversations import conversation_records
from monograph.data.forms import RecordKeys, RecordKind, RecordSettings
from monograph.data.loss_mask import Answering
from monograph.data.progress import Meter, ProgressCallback
from monograph.data.reading import Damaged, cut_position, parts_of, read_text
from monograph.data.records import Fault, Record, json_lines
from monograph.data.sources import LINES, SourceFile, place_of
from monograph.data.tables import table_rows
from monograph.errors import InputRefused, UsageError

_KEY = b"monograph held out 1"
# Records are held out by the bucket of their text's hash. A split of millions of records then takes
# no more memory than a split of a few.
BUCKETS = 1 << 16

# The split holds out whole units. A unit is a group of text files, or a bucket of records.
Unit = TypeVar("Unit", bound=Hashable)


class Split(NamedTuple):
    """The choice of held-out documents.

    Attributes:
        cuts: for each file, by its index, the first byte of a text file that is held out. 0: the
            whole file is held out. The file's size: nothing of it is held out.
        buckets: bool [BUCKETS], true where the bucket's records are held out.
        notes: lines for the user, if a text was cut in two, or if the share of held-out records is
            not the requested one.
    """

    cuts: tuple[int, ...]
    buckets: NDArray[np.bool_]
    notes: tuple[str, ...]


def fingerprint(text: bytes) -> bytes:
    """Return the keyed hash of a text.

    Equal records have equal hashes, so the split never separates them.
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
    """Hold out about `fraction` of the bytes of the text files, and about `fraction` of the bytes
    of the records.

    Text files are held out in groups. A group is a package, or all files with the same bytes.
    A group is not considered if other groups have near copies of its text, unless this holds for
    all groups. The budget is fraction · bytes. Groups are considered in the order of sha256(key,
    group), and buckets of records in the order of their numbers:

    1. Each is held out if it still fits the budget.
    2. If they fill less than half of the budget, the next one that is no larger than the whole
       budget is held out as well.
    3. If every remaining group is larger than the budget, no group is held out. The end of the
       largest one is cut off at the end of a line instead.
    4. If every remaining bucket is larger than the budget, the buckets that fit are held out, or
       the smallest one if none fits.

    Args:
        files: all files; those with records are ignored.
        bucket_bytes: int64 [BUCKETS], bytes of the records' texts in each bucket.
        fraction: from 0 to 0.5.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for index, file in enumerate(files):
        if not file.has_records:
            groups[file.group].append(index)
    sizes = {
        group: sum(files[index].size for index in members) for group, members in groups.items()
    }
    budget = math.floor(fraction * sum(sizes.values()))
    without_near_copies = [
        group
        for group, members in groups.items()
        if not any(files[index].has_near_copies for index in members)
    ]
    order = sorted(without_near_copies or groups, key=lambda group: fingerprint(group.encode()))
    held_out, is_enough = _fill_budget(order, sizes, budget)
    cuts = [file.size for file in files]
    notes = []
    if is_enough:
        for index in chain.from_iterable(groups[group] for group in held_out):
            cuts[index] = 0
    else:
        # All files of the largest group are cut by the same size, because they may be copies of one
        # text.
        largest = groups[max(order, key=sizes.__getitem__)]
        for index in largest:
            file = files[index]
            tail_bytes = budget // len(largest)
            # A file's first byte is never held out, so that a part of the file is trained on.
            earliest_cut = max(1, file.size - tail_bytes)
            cuts[index] = cut_position(file.path, earliest_cut, file.size)
            if cuts[index] < file.size:
                end = f"the last {file.size - cuts[index]:,} bytes of {file.name}"
                notes = [f"held out: {end} (too few documents to hold out whole)"]
    buckets, record_notes = _split_buckets(bucket_bytes, fraction)
    return Split(tuple(cuts), buckets, (*notes, *record_notes))


def _split_buckets(
    bucket_bytes: NDArray[np.int64], fraction: float
) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
    """Return `Split.buckets`, and notes for the user."""
    order = np.flatnonzero(bucket_bytes).tolist()
    sizes = {bucket: int(bucket_bytes[bucket]) for bucket in order}
    total = sum(sizes.values())
    notes = tuple[str, ...]()
    held_out, is_enough = _fill_budget(order, sizes, math.floor(fraction * total))
    # A single bucket is not held out, because nothing would be left to train on.
    if not is_enough and len(order) > 1:
        held_out = held_out or {min(order, key=sizes.__getitem__)}
        share = sum(sizes[bucket] for bucket in held_out) / total
        notes = (
            f"held out: {share:.1%} of the records' text, not {fraction:.1%} (too few records)",
        )
    buckets = np.zeros(BUCKETS, dtype=np.bool_)
    buckets[list(held_out)] = True
    return buckets, notes


def _fill_budget(
    order: Sequence[Unit], sizes: Mapping[Unit, int], budget: int
) -> tuple[set[Unit], bool]:
    """Return the units to hold out, and whether they fill at least half of the budget."""
    held_out: set[Unit] = set()
    held_out_bytes = 0
    for unit in order:
        if held_out_bytes + sizes[unit] <= budget:
            held_out.add(unit)
            held_out_bytes += sizes[unit]
    if 2 * held_out_bytes < budget:
        # Less than half of the budget is filled. So one more unit, which is no larger than the
        # budget, exceeds the budget by less than half.
        fitting = [unit for unit in order if unit not in held_out and sizes[unit] <= budget]
        if not fitting:
            return held_out, False
        held_out.add(fitting[0])
    return held_out, True


EMPTY_TEXT = "empty text"
_REMEDY = "correct or remove it, or train with data.bad_records=skip"


class Document(NamedTuple):
    """A text that gets one beginning token and one end token.

    Attributes:
        file: index of the document's source file.
        record: the document's line or row in the file, from 1; 0 for a text file.
        held_out: whether the document is held out of training.
        bytes: length of the text in UTF-8.
        parts: an iterator over (part of the text, bytes of the text that are read so far). It can
            be consumed once. The bytes are for progress only.
    """

    file: int
    record: int
    held_out: bool
    bytes: int
    parts: Iterator[tuple[str, int]]


class Reading(NamedTuple):
    """How the records of a corpus are read, as `monograph.data.corpus` decides from the settings.

    Attributes:
        text_key: the key of a record's text.
        skip_bad: whether bad records are skipped; otherwise they are errors.
        answering: how conversations become rows of tokens; None if records are texts.
        ignored: the keys of records that are ignored.
        is_kind_set: whether the user asked for conversations by `text_key`. If so, keys of other
            kinds of records are ignored.
        plain: whether each conversation is a prompt and a completion, both of them texts, which no
            chat template renders.
    """

    text_key: str
    skip_bad: bool
    answering: Answering | None = None
    ignored: tuple[str, ...] = ()
    is_kind_set: bool = False
    plain: bool = False

    @property
    def record_settings(self) -> RecordSettings:
        """Return what the settings say about the records."""
        return RecordSettings(self.text_key if self.is_kind_set else None, frozenset(self.ignored))

    @property
    def ignored_training_keys(self) -> list[str]:
        """Return the ignored keys that would otherwise say what is trained."""
        return self.record_settings.ignored_training_keys

    def keys(self) -> RecordKeys:
        """Return a new reader of the keys of conversations.

        It counts the keys that it ignores, so each pass over the records needs its own.
        """
        return RecordKeys(RecordKind.CONVERSATIONS, self.record_settings, self.is_kind_set)


class Survey(NamedTuple):
    """The result of a first pass over all records.

    Attributes:
        bucket_bytes: int64 [BUCKETS], bytes of the usable records' texts in each bucket.
        unusable: indices of the damaged files, which are skipped as a whole.
        skipped: {reason: count} of the skipped records and files.
        notes: lines for the user about skipped records and ignored keys.
    """

    bucket_bytes: NDArray[np.int64]
    unusable: frozenset[int]
    skipped: dict[str, int]
    notes: tuple[str, ...]


def survey(files: Sequence[SourceFile], reading: Reading, meter: Meter) -> Survey:
    """Read every record once, before the first one is used.

    This is necessary because damage of a compressed file or a table may show only at its end.

    Raises:
        InputRefused: a record is bad or a file is damaged, and `reading.skip_bad` is false. The
            message names the record or the file.
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
        bytes_before_file = bucket_bytes.copy()
        reasons: Counter[str] = Counter()
        try:
            for number, text in _records(file, reading, keys):
                records += 1
                if isinstance(text, Fault):
                    line = f"{place_of(file.path, number)}: {text.detail}"
                    if not reading.skip_bad:
                        raise bad_record_error(line)
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
            # No record of this file is used, because records before the damage may be damaged as
            # well.
            bucket_bytes = bytes_before_file
            reasons = Counter({"damaged file": 1})
            first_bad = first_bad or f"{file.path}: {error.fault}"
            unusable.add(index)
        skipped += reasons
    notes = (*_skipped_notes(skipped, records, first_bad), *keys.notes())
    return Survey(bucket_bytes, frozenset(unusable), dict(skipped), notes)


def bad_record_error(line: str) -> InputRefused:
    """Return the error for a bad record that is not skipped.

    Args:
        line: the record's place and its fault.
    """
    return InputRefused(f"{line}; {_REMEDY}")


def _skipped_notes(skipped: Counter[str], records: int, first_bad: str) -> tuple[str, ...]:
    if not skipped:
        return ()
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.most_common())
    first = f"; the first: {first_bad}" if first_bad else ""
    return (f"skipped of {records:,} records: {reasons}{first}",)


def _records(file: SourceFile, reading: Reading, keys: RecordKeys) -> Iterator[Record]:
    """Yield (record number from 1, text or fault) for every record of a file."""
    if reading.plain:
        return completion_records(file, keys)
    if reading.answering:
        return conversation_records(file, keys)
    if file.suffix in LINES:
        return json_lines(file.path, reading.text_key)
    return table_rows(file.path, reading.text_key)


class Documents:
    """All documents of some files, some of which are held out of training.

    The constructor reads every record once.

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
        progress: ProgressCallback | None = None,
    ) -> None:
        self.files = files
        self.reading = reading
        # Text files are not read here, so there is no progress to report on them.
        has_records = any(file.has_records for file in files)
        meter = Meter(progress if has_records else None, "records", None)
        self.survey = survey(files, reading, meter)
        meter.finish()
        self.split: Split = split(files, self.survey.bucket_bytes, held_out)
        self.notes = (*self.survey.notes, *self.split.notes)

    @cached_property
    def text_bytes(self) -> int:
        """Return the bytes of all texts in UTF-8."""
        file_bytes = sum(file.size for file in self.files if not file.has_records)
        return file_bytes + int(self.survey.bucket_bytes.sum())

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
        """Yield the documents in the order of their files.

        Consume the parts of a document before you ask for the next one.
        """
        for index, file in enumerate(self.files):
            if file.has_records:
                for record in self._usable_records(index):
                    is_held_out = bool(self.split.buckets[bucket(record.digest)])
                    parts = _record_parts(record.text, record.size_bytes)
                    yield Document(index, record.number, is_held_out, record.size_bytes, parts)
                continue
            cut = self.split.cuts[index]
            for start, stop in ((0, cut), (cut, file.size)):
                if start < stop:
                    is_held_out = start == cut
                    parts = read_text(file.path, start, stop)
                    yield Document(index, 0, is_held_out, stop - start, parts)

    def sample(self, budget_bytes: int) -> Iterator[str]:
        """Yield parts of about `budget_bytes` of training text.

        If there is more training text than that, the files come in the order of sha256(name), and
        the records are those whose hash falls below the share of the text that is wanted.
        """
        share = min(1.0, budget_bytes / max(1, self.train_bytes))
        left_bytes = round(share * self._train_file_bytes)  # of the text files
        order: Sequence[int] = range(len(self.files))
        if share < 1:
            order = sorted(
                order, key=lambda index: hashlib.sha256(self.files[index].name.encode()).digest()
            )
        for index in order:
            file = self.files[index]
            stop = self.split.cuts[index]
            if file.has_records:
                for record in self._usable_records(index):
                    is_held_out = self.split.buckets[bucket(record.digest)]
                    # The first two bytes of the hash have chosen the bucket.
                    is_sampled = int.from_bytes(record.digest[2:6]) < share * 2**32
                    if not is_held_out and is_sampled:
                        yield from self._sampled_parts(record.text)
            elif stop and left_bytes > 0:
                if stop > left_bytes:
                    stop = cut_position(file.path, left_bytes, stop)
                left_bytes -= stop
                yield from (part for part, _ in read_text(file.path, 0, stop))

    def _sampled_parts(self, text: str) -> Iterator[str]:
        """Yield the parts of a record's text on which a tokenizer is trained."""
        # The text of a plain conversation is JSON, on whose syntax no tokenizer should be trained.
        texts = prompt_and_completion(text) if self.reading.plain else (text,)
        for inner in texts:
            yield from parts_of(inner)

    def _usable_records(self, index: int) -> Iterator["_UsableRecord"]:
        """Yield the records of a file that have a text and no fault."""
        if index in self.survey.unusable:
            return
        # A new reader of keys, because `survey` has already counted them in its own.
        for number, text in _records(self.files[index], self.reading, self.reading.keys()):
            if text and not isinstance(text, Fault):
                content = text.encode()
                yield _UsableRecord(number, text, len(content), fingerprint(content))


class _UsableRecord(NamedTuple):
    """A record that has a text.

    Attributes:
        number: its line or row in the file, from 1.
        text: its text; of a conversation, what `conversation_text` returns.
        size_bytes: length of the text in UTF-8.
        digest: the text's `fingerprint`.
    """

    number: int
    text: str
    size_bytes: int
    digest: bytes


def _record_parts(text: str, size: int) -> Iterator[tuple[str, int]]:
    """Yield `Document.parts` of a record's text, with bytes that are estimated from characters."""
    chars = 0
    for part in parts_of(text):
        chars += len(part)
        yield part, size * chars // len(text)
