"""Iterate over the documents of a source in order, and hold some of them out of training.

A document is a text file or a record (a line of a .jsonl file, or a row of a table). A text file
that is partly held out is two documents. `Documents` can be iterated any number of times.

The *split* says which documents are held out. A keyed hash decides it, so it needs neither state
nor random numbers.
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

from monograph.data import MAX_HELD_OUT
from monograph.data.completions import completion_records, prompt_and_completion
from monograph.data.conversations import conversation_records
from monograph.data.forms import RecordKeys, RecordKind, RecordSettings
from monograph.data.loss_mask import AnswerOptions
from monograph.data.progress import Meter, ProgressCallback
from monograph.data.reading import Damaged, cut_position, read_text, text_parts
from monograph.data.records import Fault, NumberedText, json_texts
from monograph.data.sources import LINE_SUFFIXES, SourceFile, place_of
from monograph.data.tables import table_texts
from monograph.errors import InputRefused, UsageError

_KEY = b"monograph held out 1"  # the key of the hash that decides the split
# The number of buckets into which records are put by the hash of their text. A bucket is held out as a
# whole, so the split of millions of records takes no more memory than a split of a few.
BUCKETS = 1 << 16

# What is held out as a whole: a group of text files (`SourceFile.group`), or a bucket of records.
Unit = TypeVar("Unit", bound=Hashable)


class Split(NamedTuple):
    """The choice of held-out documents.

    Attributes:
        cuts: for each file, the position of the first byte that is held out. A text file is held out
            from there to its end: as a whole if the position is 0, and not at all if the position is the
            file's size. For files of records the position is their size, because `held_out_buckets` decides
            about their records.
        held_out_buckets: bool [BUCKETS], true where the bucket's records are held out.
        notes: lines for the user, if a text was cut in two, or if the share of held-out records is
            not the requested one.
    """

    cuts: tuple[int, ...]
    held_out_buckets: NDArray[np.bool_]
    notes: tuple[str, ...]


def split_hash(text: bytes) -> bytes:
    """Return the keyed hash of a text, which decides whether the text is held out.

    Equal texts have equal hashes, so they are always on the same side of the split.
    """
    return hashlib.sha256(_KEY + b"\0" + text).digest()


def bucket_of(digest: bytes) -> int:
    """Return the bucket of a text with this `split_hash`."""
    return int.from_bytes(digest[:2])


def check_held_out(fraction: float) -> None:
    """Check the share to hold out.

    Raises:
        UsageError: the share is outside [0, MAX_HELD_OUT].
    """
    if not 0 <= fraction <= MAX_HELD_OUT:
        raise UsageError(
            f"data.held_out = {fraction}: must be a fraction from 0 to {MAX_HELD_OUT}, such as 0.05"
        )


def split(files: Sequence[SourceFile], bucket_bytes: NDArray[np.int64], fraction: float) -> Split:
    """Hold out about `fraction` of the bytes of the text files, and about `fraction` of the bytes
    of the records.

    Text files are held out in groups. A group is a package, or all files with the same bytes. A
    group is not considered if other groups have near copies of its text, unless this holds for all
    groups. Records are held out in buckets. Groups and buckets are chosen separately, by the same
    steps. The budget is `fraction` of the bytes of all groups, or of all buckets. Groups are
    considered in the order of sha256(key, group), and buckets in the order of their numbers:

    1. A group or bucket is held out if it still fits the budget.
    2. If step 1 fills less than half of the budget, one more group or bucket is held out: the next
       one that is no larger than the whole budget.
    3. If step 2 finds no such group, no group is held out. Instead, the end of the largest group is
       held out, cut off at the end of a line.
    4. If step 2 finds no such bucket, only the buckets of step 1 are held out. If there are none, the
       smallest bucket is.

    Args:
        files: all files; those with records are ignored.
        bucket_bytes: int64 [BUCKETS], bytes of the records' texts in each bucket.
        fraction: from 0 to 0.5.
    """
    cuts, file_notes = _cut_text_files(files, fraction)
    buckets, record_notes = _split_buckets(bucket_bytes, fraction)
    return Split(cuts, buckets, (*file_notes, *record_notes))


def _cut_text_files(
    files: Sequence[SourceFile], fraction: float
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return `Split.cuts`, and notes for the user."""
    groups: dict[str, list[int]] = defaultdict(list)  # the indices of the files of each group
    for index, file in enumerate(files):
        if not file.has_records:
            groups[file.group].append(index)
    sizes = {}
    without_near_copies = []
    for group, members in groups.items():
        sizes[group] = sum(files[index].size for index in members)
        if not any(files[index].has_near_copies for index in members):
            without_near_copies.append(group)
    budget = math.floor(fraction * sum(sizes.values()))
    order = sorted(without_near_copies or groups, key=lambda group: split_hash(group.encode()))
    held_out_groups, is_enough = _fill_budget(order, sizes, budget)
    cuts = [file.size for file in files]
    if is_enough:
        for index in chain.from_iterable(groups[group] for group in held_out_groups):
            cuts[index] = 0
        return tuple(cuts), ()
    # The same number of bytes is cut off every file of the largest group, because they may be
    # copies of one text.
    notes: tuple[str, ...] = ()
    largest = groups[max(order, key=sizes.__getitem__)]
    tail_bytes = budget // len(largest)
    for index in largest:
        file = files[index]
        # A file's first byte is never held out, so that a part of the file is trained on.
        earliest_cut = max(1, file.size - tail_bytes)
        cuts[index] = cut_position(file.path, earliest_cut, file.size)
        if cuts[index] < file.size:
            end = f"the last {file.size - cuts[index]:,} bytes of {file.name}"
            notes = (f"held out: {end} (too few documents to hold out whole)",)
    return tuple(cuts), notes


def _split_buckets(
    bucket_bytes: NDArray[np.int64], fraction: float
) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
    """Return `Split.held_out_buckets`, and notes for the user."""
    order = np.flatnonzero(bucket_bytes).tolist()  # the buckets that have records
    sizes = {bucket: int(bucket_bytes[bucket]) for bucket in order}
    total = sum(sizes.values())
    notes: tuple[str, ...] = ()
    held_out, is_enough = _fill_budget(order, sizes, math.floor(fraction * total))
    # If there is only one bucket, it is not held out, because nothing would be left to train on.
    if not is_enough and len(order) > 1:
        if not held_out:
            held_out = {min(order, key=sizes.__getitem__)}
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
    """Return the units to hold out, and whether they fill at least half of the budget.

    Args:
        order: the groups or buckets, in the order in which they are considered.
        sizes: the bytes of each.
        budget: the bytes to hold out.
    """
    held_out: set[Unit] = set()
    held_out_bytes = 0
    for unit in order:
        if held_out_bytes + sizes[unit] <= budget:
            held_out.add(unit)
            held_out_bytes += sizes[unit]
    if 2 * held_out_bytes >= budget:
        return held_out, True
    # Less than half of the budget is filled. So if one more unit is added that is no larger than the budget,
    # the sum is below one and a half budgets.
    small_units = [unit for unit in order if unit not in held_out and sizes[unit] <= budget]
    if not small_units:
        return held_out, False
    held_out.add(small_units[0])
    return held_out, True


EMPTY_TEXT = "empty text"  # the reason to skip a record with an empty text
_BAD_RECORD_REMEDY = "correct or remove it, or train with data.bad_records=skip"


class Document(NamedTuple):
    """A text file, a part of a text file, or a record. It gets one beginning and one end token.

    Attributes:
        file: index of the document's source file.
        record: the document's line or row in the file, from 1; 0 for a text file.
        held_out: whether the document is held out of training.
        bytes: length of the text in UTF-8.
        parts: an iterator over (part of the text, bytes of the text that have been read so far). It
            can be consumed once. The bytes are for reports of progress, and may be estimates.
    """

    file: int
    record: int
    held_out: bool
    bytes: int
    parts: Iterator[tuple[str, int]]


class ReadingPlan(NamedTuple):
    """How the records of a corpus are read.

    `monograph.data.corpus` decides it from the settings and a sample of the records.

    Attributes:
        text_key: the key of a record's text.
        skip_bad: whether bad records are skipped; otherwise they are errors.
        answer_options: how conversations become rows of tokens; None if records are texts.
        ignored_keys: the keys of records that are ignored.
        is_kind_set: whether the user asked for conversations by `text_key`. A record may also have the keys
            of another form (`monograph.data.forms`). If this is True, these keys are ignored; otherwise they
            are refused.
        without_template: whether each conversation is a prompt and a completion that are plain texts,
            so that they are trained on without a chat template.
    """

    text_key: str
    skip_bad: bool
    answer_options: AnswerOptions | None = None
    ignored_keys: tuple[str, ...] = ()
    is_kind_set: bool = False
    without_template: bool = False

    @property
    def record_settings(self) -> RecordSettings:
        """Return what the settings say about the records."""
        return RecordSettings(
            self.text_key if self.is_kind_set else None, frozenset(self.ignored_keys)
        )

    @property
    def ignored_training_keys(self) -> list[str]:
        """Return the ignored keys that would otherwise say what is trained (`RecordSettings`)."""
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
        damaged_files: indices of the damaged files, which are skipped as a whole.
        skipped: {reason: count} of the skipped records and files.
        notes: lines for the user about skipped records and ignored keys.
    """

    bucket_bytes: NDArray[np.int64]
    damaged_files: frozenset[int]
    skipped: dict[str, int]
    notes: tuple[str, ...]


def survey(files: Sequence[SourceFile], reading: ReadingPlan, meter: Meter) -> Survey:
    """Read every record once, to find bad records and to count the bytes of each bucket.

    All records are read before any of them is used, because a compressed file or a table may show that
    it is damaged only at its end.

    Raises:
        InputRefused: a record is bad or a file is damaged, and `reading.skip_bad` is false. The
            message names the record or the file.
    """
    bucket_bytes = np.zeros(BUCKETS, dtype=np.int64)
    damaged_files: set[int] = set()
    skipped: Counter[str] = Counter()
    first_bad = ""  # the place and the fault of the first bad record
    records = 0
    keys = reading.keys()
    for index, file in enumerate(files):
        if not file.has_records:
            continue
        bytes_before_file = bucket_bytes.copy()
        skipped_in_file: Counter[str] = Counter()
        try:
            for number, text in _records(file, reading, keys):
                records += 1
                if isinstance(text, Fault):
                    place_and_fault = f"{place_of(file.path, number)}: {text.detail}"
                    if not reading.skip_bad:
                        raise bad_record_error(place_and_fault)
                    first_bad = first_bad or place_and_fault
                    skipped_in_file[text.reason] += 1
                elif text:
                    content = text.encode()
                    bucket_bytes[bucket_of(split_hash(content))] += len(content)
                    meter.add(len(content))
                else:
                    skipped_in_file[EMPTY_TEXT] += 1
        except Damaged as error:
            if not reading.skip_bad:
                raise
            # No record of this file is used, because records before the damage may be damaged as well.
            # So the bytes and the faults that were counted in this file are taken back.
            bucket_bytes = bytes_before_file
            skipped_in_file = Counter({"damaged file": 1})
            first_bad = first_bad or f"{file.path}: {error.fault}"
            damaged_files.add(index)
        skipped += skipped_in_file
    notes = (*_skipped_notes(skipped, records, first_bad), *keys.notes())
    return Survey(bucket_bytes, frozenset(damaged_files), dict(skipped), notes)


def bad_record_error(place_and_fault: str) -> InputRefused:
    """Return the error for a bad record that is not skipped, given "PLACE: FAULT"."""
    return InputRefused(f"{place_and_fault}; {_BAD_RECORD_REMEDY}")


def _skipped_notes(skipped: Counter[str], records: int, first_bad: str) -> tuple[str, ...]:
    """Return a line for the user about skipped records, or nothing if none was skipped."""
    if not skipped:
        return ()
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.most_common())
    first = f"; the first: {first_bad}" if first_bad else ""
    return (f"skipped of {records:,} records: {reasons}{first}",)


def _records(file: SourceFile, reading: ReadingPlan, keys: RecordKeys) -> Iterator[NumberedText]:
    """Yield (record number from 1, text or fault) for every record of a file."""
    if reading.without_template:
        return completion_records(file, keys)
    if reading.answer_options:
        return conversation_records(file, keys)
    if file.suffix in LINE_SUFFIXES:
        return json_texts(file.path, reading.text_key)
    return table_texts(file.path, reading.text_key)


class Documents:
    """All documents of some files. Some of the documents are held out of training.

    The constructor reads every record once.

    Attributes:
        files: the files.
        reading: how records are read.
        survey: the result of the first pass over the records.
        split: the choice of held-out documents.
        notes: lines for the user about the survey and the split.

    Args:
        files: the files.
        reading: how records are read.
        held_out: the fraction of the bytes to hold out.
        progress: called to report progress; None: nothing is reported.

    Raises:
        InputRefused: as in `survey`.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        reading: ReadingPlan,
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
        train_buckets = ~self.split.held_out_buckets
        return self._train_file_bytes + int(self.survey.bucket_bytes[train_buckets].sum())

    @cached_property
    def _train_file_bytes(self) -> int:
        """Return the bytes of the text files that are not held out."""
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
                    is_held_out = bool(self.split.held_out_buckets[bucket_of(record.digest)])
                    parts = _record_parts(record.text, record.size_bytes)
                    yield Document(index, record.number, is_held_out, record.size_bytes, parts)
                continue
            # The text before the cut is trained on, and the text after it is held out. If one of the two is
            # empty, there is no document for it.
            cut = self.split.cuts[index]
            for start, stop in ((0, cut), (cut, file.size)):
                if start < stop:
                    is_held_out = start == cut
                    parts = read_text(file.path, start, stop)
                    yield Document(index, 0, is_held_out, stop - start, parts)

    def sample(self, budget_bytes: int) -> Iterator[str]:
        """Yield about `budget_bytes` of the training text, in parts.

        If there is more training text, the same share of text files and of records is taken. Text files
        are taken in the order of sha256(name), until they have this share of the bytes of all text
        files. A record is taken if its hash, as a fraction of the largest hash, is below the share.
        """
        share = min(1.0, budget_bytes / max(1, self.train_bytes))
        left_bytes = round(share * self._train_file_bytes)  # still to be taken from text files
        order: Sequence[int] = range(len(self.files))
        if share < 1:
            order = sorted(
                order, key=lambda index: hashlib.sha256(self.files[index].name.encode()).digest()
            )
        for index in order:
            file = self.files[index]
            if file.has_records:
                for record in self._usable_records(index):
                    is_held_out = self.split.held_out_buckets[bucket_of(record.digest)]
                    # Bytes 2 to 5 of the hash choose the sample, because bytes 0 and 1 have chosen the
                    # bucket.
                    is_sampled = int.from_bytes(record.digest[2:6]) < share * 2**32
                    if not is_held_out and is_sampled:
                        yield from self._sampled_parts(record.text)
                continue
            stop = self.split.cuts[index]  # the end of the file's training text
            if stop and left_bytes > 0:
                if stop > left_bytes:
                    stop = cut_position(file.path, left_bytes, stop)
                left_bytes -= stop
                yield from (part for part, _ in read_text(file.path, 0, stop))

    def _sampled_parts(self, text: str) -> Iterator[str]:
        """Yield the parts of a record's text on which a tokenizer is trained."""
        # The text of a prompt with its completion is JSON. The tokenizer is trained on the two texts in it, and
        # not on the syntax.
        texts = prompt_and_completion(text) if self.reading.without_template else (text,)
        for each_text in texts:
            yield from text_parts(each_text)

    def _usable_records(self, index: int) -> Iterator["_UsableRecord"]:
        """Yield the records of a file that have a text and no fault."""
        if index in self.survey.damaged_files:
            return
        # This pass needs a reader of keys of its own. Its counts of ignored keys are not used, because `survey`
        # has counted them already.
        for number, text in _records(self.files[index], self.reading, self.reading.keys()):
            if text and not isinstance(text, Fault):
                content = text.encode()
                yield _UsableRecord(number, text, len(content), split_hash(content))


class _UsableRecord(NamedTuple):
    """A record that has a text.

    Attributes:
        number: its line or row in the file, from 1.
        text: its text; if it is a conversation, what `conversation_text` returns.
        size_bytes: length of the text in UTF-8.
        digest: the text's `split_hash`.
    """

    number: int
    text: str
    size_bytes: int
    digest: bytes


def _record_parts(text: str, size: int) -> Iterator[tuple[str, int]]:
    """Yield the parts of a record's text, as `Document.parts` has them.

    The bytes that have been read are estimated from the characters.
    """
    chars = 0
    for part in text_parts(text):
        chars += len(part)
        yield part, size * chars // len(text)
