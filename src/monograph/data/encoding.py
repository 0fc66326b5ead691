"""Turn documents into token shards: train a tokenizer if needed, then encode part by part in
bounded memory.

One thread reads the parts ahead of their use.
"""

import threading
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from monograph.data.completions import Completions, texts_of
from monograph.data.conversations import Conversation
from monograph.data.documents import Document, Documents, bad_record_error
from monograph.data.loss_mask import Answers, Row, skipped_notes
from monograph.data.progress import Meter, Progress
from monograph.data.reading import read_text
from monograph.data.records import Unusable
from monograph.data.shards import INDEX, ShardWriter, token_dtype
from monograph.data.sources import SourceFile, place_of
from monograph.data.spelled import SpecialTokenSpellings
from monograph.errors import InputRefused
from monograph.text.chat import require_read
from monograph.text.tokenizer import Tokenizer

Item = TypeVar("Item")


def prefetch(items: Iterator[Item], count: int) -> Generator[Item, None, None]:
    """Yield `items` in order, with up to `count` of them made ahead by a thread.

    An error in `items` is raised when the turn of its item comes. The thread starts at the first
    item, and has ended when this generator has ended or was closed (see `contextlib.closing`),
    which waits for one item at most.

    Args:
        items: an iterator that nothing but the thread consumes.
        count: at least 1.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="monograph-ahead")
    try:
        pending = deque(pool.submit(list, islice(items, 1)) for _ in range(count))
        while made := pending.popleft().result():
            pending.append(pool.submit(list, islice(items, 1)))
            yield from made
    finally:
        pool.shutdown(cancel_futures=True)


# With more text the merges hardly change, while the time to count words grows.
TOKENIZER_SAMPLE_BYTES = 1 << 27
SIDES = ("train", "held_out")
_BATCH_CHARS = 1 << 19
_READ_AHEAD = 2
# Batches encoded at once. While the tokenizers library converts one batch's results in a single
# thread that holds Python's lock, its own threads work on the other batch.
_ENCODERS = 2
_FED_PARTS = 256  # parts of text that the tokenizers library takes at a time while it counts words


class Part(NamedTuple):
    """A stretch of a document's text; `inside` says whether it follows another stretch of the
    document.
    """

    document: Document
    text: str
    inside: bool


class Batch(NamedTuple):
    """Parts of documents in order, and the bytes of text read up to the end of the last one."""

    parts: list[Part]
    read_bytes: int


def train_tokenizer(
    documents: Documents, vocab_size: int, progress: Progress | None
) -> tuple[Tokenizer, tuple[str, ...]]:
    """Train a byte-level BPE on the training documents, or on a sample of 128 MiB of them.

    Returns:
        The tokenizer, and notes for the user if it is not as requested.
    """
    fed_bytes = 0
    stop = threading.Event()

    def fed() -> Iterator[str]:
        nonlocal fed_bytes
        sample = documents.sample(TOKENIZER_SAMPLE_BYTES)
        stretches = iter(lambda: list(islice(sample, _FED_PARTS)), [])
        with closing(prefetch(stretches, _READ_AHEAD)) as ready:
            for text in chain.from_iterable(ready):
                if stop.is_set():
                    # At a mere end of the parts, the library would go on to merge, for seconds.
                    raise CancelledError
                yield text
                fed_bytes += len(text.encode())

    meter = Meter(progress, "tokenizer", min(documents.train_bytes, TOKENIZER_SAMPLE_BYTES))
    # The library returns only at the end, so it runs in a thread, and this thread reports progress.
    with ThreadPoolExecutor(1, thread_name_prefix="monograph-tokenizer") as pool:
        training = pool.submit(Tokenizer.train_bpe, fed(), vocab_size)
        try:
            while not training.done():
                wait([training], timeout=0.2)
                meter.add(min(fed_bytes, meter.total or 0) - meter.done)
        finally:
            stop.set()
    tokenizer = training.result()
    notes = []
    meter.finish()
    if documents.train_bytes > TOKENIZER_SAMPLE_BYTES:
        notes = [f"the tokenizer was trained on {TOKENIZER_SAMPLE_BYTES >> 20} MiB of the text"]
    if documents.train_bytes and tokenizer.vocab_size < vocab_size:
        reason = "the text has no more pairs to merge"
        notes = [
            f"the tokenizer has {tokenizer.vocab_size:,} entries, not {vocab_size:,}: {reason}"
        ]
    return tokenizer, tuple(notes)


class SideWriter:
    """A writer of one side of the split: STEM.tokens, STEM.starts, STEM.records and, for
    conversations, STEM.answers.

    STEM.tokens has [bos] + ids + [eos] of every document. STEM.starts has D + 1 entries: the index
    of each document's first token, and the end. STEM.records has D entries: the document's line or
    row in its file, 0 for a text file. With conversations, each `Row` counts as a document and
    begins as the chat template says, and STEM.answers has the begin and end of each trained stretch
    of tokens.

    Attributes:
        tokens: the shard of tokens.
        bytes: bytes of all texts so far, as the tokenizer reads them; with conversations, of the
            trained text.
        counts: number of documents of each file.
    """

    def __init__(
        self,
        stem: Path,
        tokenizer: Tokenizer,
        files: int,
        stack: ExitStack,
        conversations: bool = False,
    ):
        def shard(suffix: str, dtype: np.dtype[Any] = INDEX) -> ShardWriter:
            return stack.enter_context(ShardWriter(stem.with_suffix(suffix), dtype))

        self.tokens = shard(".tokens", token_dtype(tokenizer.vocab_size))
        self._starts = shard(".starts")
        self._records = shard(".records")
        self._answers = shard(".answers") if conversations else None
        self._bos = tokenizer.bos_id
        self._eos = tokenizer.eos_id
        self._tokenizer = tokenizer
        self._document: Document | None = None
        self.bytes = 0
        self.counts = [0] * files
        self._pending: tuple[list[int], list[int], list[int]] = ([], [], [])

    def add(self, document: Document, ids: list[int]) -> None:
        """Add the ids of the next part of a document."""
        tokens, _, records = self._pending
        if document is not self._document:
            self._end_document()
            records.append(document.record)
            tokens.append(self._bos)
            self._document = document
            self.counts[document.file] += 1
        tokens.extend(ids)

    def add_row(self, document: Document, row: Row) -> None:
        """Add a row of a conversation, and the spans that are trained on."""
        assert self._answers is not None
        begin = self.tokens.count
        ids = np.array(row.ids, dtype=np.int64)
        self._starts.append(np.array([begin], dtype=np.int64))
        self._records.append(np.array([document.record], dtype=np.int64))
        self._answers.append(begin + np.array(row.spans, dtype=np.int64).reshape(-1))
        self.tokens.append(ids)
        self.counts[document.file] += 1
        bytes_of = self._tokenizer.bytes_of
        self.bytes += sum(
            bytes_of(ids[first:last], ids[first - 1 : last - 1]) for first, last in row.spans
        )

    def write(self) -> None:
        """Pass the buffered ids on to the shards."""
        for shard, items in zip(
            (self.tokens, self._starts, self._records), self._pending, strict=True
        ):
            added = np.array(items, dtype=np.int64)
            # Count the tokens' bytes, since a tokenizer may change a text (NFC, spaces).
            if shard is self.tokens:
                first = self._tokenizer.token_bytes[added[:1]].sum()
                self.bytes += int(first) + self._tokenizer.bytes_of(added[1:], added[:-1])
            shard.append(added)
            items.clear()

    def end(self) -> None:
        """Complete the last document."""
        self._end_document()
        self.write()

    def _end_document(self) -> None:
        """Write the end token of the document before, if there is one, and the start of what
        follows.
        """
        tokens, starts, _ = self._pending
        if self._document is not None:
            tokens.append(self._eos)
        starts.append(self.tokens.count + len(tokens))


def encode_documents(
    documents: Iterable[Document],
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    folder: Path,
    meter: Meter,
) -> tuple[dict[str, SideWriter], tuple[str, ...]]:
    """Write FOLDER/train.* and FOLDER/held_out.*, in one pass; return the writers, for their
    counts, and notes.

    One thread reads, `_ENCODERS` threads call the tokenizer, which works on all cores, and this
    thread writes the results in the order of the text, so the files do not depend on timing.

    Raises:
        InputRefused: the tokenizer would lose some text; the message names file, line and text.
    """
    spelled = SpecialTokenSpellings(tokenizer)
    with ExitStack() as stack:
        sides = {side: SideWriter(folder / side, tokenizer, len(files), stack) for side in SIDES}
        batches = stack.enter_context(closing(prefetch(_batches(documents), _READ_AHEAD)))
        pool = stack.enter_context(
            ThreadPoolExecutor(_ENCODERS, thread_name_prefix="monograph-tokens")
        )
        encoding: deque[tuple[Batch, Future[list[list[int]]]]] = deque()
        for batch in batches:
            _see(spelled, batch.parts, files)
            encoding.append((batch, pool.submit(_encoded, tokenizer, batch.parts, files)))
            if len(encoding) > _ENCODERS:
                _write(sides, *encoding.popleft(), meter)
        while encoding:
            _write(sides, *encoding.popleft(), meter)
        for side in sides.values():
            side.end()
    return sides, spelled.notes()


def _see(
    spelled: SpecialTokenSpellings, parts: Sequence[Part], files: Sequence[SourceFile]
) -> None:
    for part in parts:
        file = files[part.document.file]
        where = (
            place_of(file.path, part.document.record) if part.document.record else str(file.path)
        )
        spelled.see(where, [part.text])


def encode_conversations(
    documents: Documents,
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    folder: Path,
    meter: Meter,
) -> tuple[dict[str, SideWriter], dict[str, int], tuple[str, ...]]:
    """Write FOLDER/train.* and FOLDER/held_out.* of conversations, in one pass.

    Returns:
        The writers; {reason: number of skipped conversations}, empty unless bad records are
        skipped; and notes for the user.

    Raises:
        InputRefused: a conversation cannot be trained on as asked; the message names it.
    """
    reading = documents.reading
    assert reading.answering is not None
    if reading.plain:
        return _encode_completions(documents, files, tokenizer, folder, meter)
    answers = Answers(tokenizer, reading.answering)
    skipped = Counter[str]()
    first_bad = ""
    with ExitStack() as stack:
        sides = {
            side: SideWriter(folder / side, tokenizer, len(files), stack, conversations=True)
            for side in SIDES
        }
        for document in documents:
            where = place_of(files[document.file].path, document.record)
            conversation = Conversation.of_text("".join(part for part, _ in document.parts))
            known = answers.counts["untagged"]
            try:
                require_read(tokenizer, conversation.template_variables)
                rows = answers.rows(conversation)
            except Unusable as unusable:
                if not reading.skip_bad:
                    raise bad_record_error(f"{where}: {unusable}") from None
                skipped[unusable.fault.reason] += 1
                first_bad = first_bad or f"{where}: {unusable}"
                continue
            except InputRefused as error:
                raise InputRefused(f"{where}: {error}") from None
            if answers.counts["untagged"] > known == 0:
                answers.untagged = f"{where}: {answers.untagged}"
            for row in rows:
                sides["held_out" if document.held_out else "train"].add_row(document, row)
            meter.add(document.bytes)
        for side in sides.values():
            side.end()
    return sides, dict(skipped), answers.notes(skipped, first_bad)


def _encode_completions(
    documents: Documents,
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    folder: Path,
    meter: Meter,
) -> tuple[dict[str, SideWriter], dict[str, int], tuple[str, ...]]:
    """Do as `encode_conversations`, for prompts and completions that no chat template renders."""
    reading = documents.reading
    assert reading.answering is not None
    completions = Completions(tokenizer, reading.answering)
    spelled = SpecialTokenSpellings(tokenizer)
    skipped = Counter[str]()
    first_bad = ""
    with ExitStack() as stack:
        sides = {
            side: SideWriter(folder / side, tokenizer, len(files), stack, conversations=True)
            for side in SIDES
        }
        for document in documents:
            where = place_of(files[document.file].path, document.record)
            text = "".join(part for part, _ in document.parts)
            spelled.see(where, [*texts_of(text)])
            try:
                row = completions.row(text)
            except Unusable as unusable:
                if not reading.skip_bad:
                    raise bad_record_error(f"{where}: {unusable}") from None
                skipped[unusable.fault.reason] += 1
                first_bad = first_bad or f"{where}: {unusable}"
                continue
            except InputRefused as error:
                raise InputRefused(f"{where}: {error}") from None
            sides["held_out" if document.held_out else "train"].add_row(document, row)
            meter.add(document.bytes)
        for side in sides.values():
            side.end()
    return sides, dict(skipped), (*skipped_notes(skipped, first_bad), *spelled.notes())


def _encoded(
    tokenizer: Tokenizer, parts: Sequence[Part], files: Sequence[SourceFile]
) -> list[list[int]]:
    """Return the ids of each part."""
    inside = [part.inside and tokenizer.space_first for part in parts]
    ids: dict[bool, Iterator[list[int]]] = {}
    try:
        for kind in {*inside}:
            texts = [
                part.text for part, its_kind in zip(parts, inside, strict=True) if its_kind == kind
            ]
            ids[kind] = iter(tokenizer.encode_batch(texts, kind))
    except InputRefused as error:
        lost = next(
            (part.document for part in parts if tokenizer.loss(part.text, part.inside)), None
        )
        if lost is None:
            raise
        file = files[lost.file]
        where = (
            place_of(file.path, lost.record)
            if lost.record
            else f"{file.path}:{_line_lost(tokenizer, file)}"
        )
        raise InputRefused(f"{where}: {error}") from None
    return [next(ids[kind]) for kind in inside]


def _line_lost(tokenizer: Tokenizer, file: SourceFile) -> int:
    """Return the first line of a text file, from 1, that the tokenizer would lose."""
    number, inside = 1, False
    for part, _ in read_text(file.path, 0, file.size):
        if tokenizer.loss(part, inside):
            lines = enumerate(StringIO(part, newline="\n"))
            return number + next(
                (n for n, line in lines if tokenizer.loss(line, inside or n > 0)), 0
            )
        number = number + part.count("\n")
        inside = True
    return number


def _write(
    sides: dict[str, SideWriter], batch: Batch, encoding: Future[list[list[int]]], meter: Meter
) -> None:
    for part, ids in zip(batch.parts, encoding.result(), strict=True):
        sides["held_out" if part.document.held_out else "train"].add(part.document, ids)
    for side in sides.values():
        side.write()
    meter.add(batch.read_bytes - meter.done)


def _batches(documents: Iterable[Document]) -> Iterator[Batch]:
    """Yield batches of parts, large enough to keep all cores busy and small enough for bounded
    memory.
    """
    parts: list[Part] = []
    chars = begin = 0
    for document in documents:
        for number, (text, done) in enumerate(document.parts):
            parts.append(Part(document, text, number > 0))
            chars += len(text)
            if chars >= _BATCH_CHARS:
                yield Batch(parts, begin + done)
                parts = []
                chars = 0
        begin += document.bytes
    if parts:
        yield Batch(parts, begin)
