"""Turn documents into shards of token ids, in bounded memory, and train a tokenizer for them.

A side is "train" or "held_out": the documents that are trained on, and those that are kept for
evaluation. A shard is one of the arrays that `SideWriter` writes for each side. A document is
encoded part by part. One thread reads parts before they are needed.
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

from monograph.data.completions import Completions, prompt_and_completion
from monograph.data.conversations import Conversation
from monograph.data.documents import Document, Documents, bad_record_error
from monograph.data.loss_mask import ConversationConverter, MaskedRow, skipped_notes
from monograph.data.progress import Meter, ProgressCallback
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
    """Yield `items` in order, while a thread makes up to `count` of the next ones.

    An error in `items` is raised when its item would be yielded. The thread starts when the first
    item is asked for. Close this generator if you may leave it early (`contextlib.closing`):
    closing it ends the thread, and waits for at most one item.

    Args:
        items: an iterator that nothing but the thread consumes.
        count: at least 1.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="monograph-ahead")
    try:
        # Each job returns a list of one item, or an empty list at the end of the items.
        pending = deque(pool.submit(list, islice(items, 1)) for _ in range(count))
        while one_item := pending.popleft().result():
            pending.append(pool.submit(list, islice(items, 1)))
            yield from one_item
    finally:
        pool.shutdown(cancel_futures=True)


# More text than this hardly changes the merges, but takes longer to count.
TOKENIZER_SAMPLE_BYTES = 1 << 27
SIDES = ("train", "held_out")
_BATCH_CHARS = 1 << 19
_PREFETCHED = 2  # batches
# Batches that are encoded at once. While the tokenizers library converts the results of one batch,
# in a single thread that holds Python's lock, its own threads encode the other batch.
_ENCODERS = 2
_FED_PARTS = 256  # parts of text that the tokenizers library takes at a time while it counts words


class Stretch(NamedTuple):
    """A stretch of a document's text.

    Attributes:
        document: the document.
        text: the stretch.
        inside: whether the stretch follows another stretch of the document.
    """

    document: Document
    text: str
    inside: bool


class StretchBatch(NamedTuple):
    """Consecutive parts, which are encoded together.

    Attributes:
        parts: the parts, in order.
        read_bytes: bytes of text that have been read for this batch and all earlier batches.
    """

    parts: list[Stretch]
    read_bytes: int


def train_tokenizer(
    documents: Documents, vocab_size: int, progress: ProgressCallback | None
) -> tuple[Tokenizer, tuple[str, ...]]:
    """Train a byte-level BPE on the training documents, or on a sample of 128 MiB of them.

    Returns:
        The tokenizer, and notes for the user. There is a note if the tokenizer is smaller than
        requested, or was trained on a sample.
    """
    fed_bytes = 0
    stop = threading.Event()

    def feed() -> Iterator[str]:
        nonlocal fed_bytes
        sample = documents.sample(TOKENIZER_SAMPLE_BYTES)
        # This yields lists of parts. An empty list ends the iteration.
        lists = iter(lambda: list(islice(sample, _FED_PARTS)), [])
        with closing(prefetch(lists, _PREFETCHED)) as ready:
            for text in chain.from_iterable(ready):
                if stop.is_set():
                    # Returning would only end the text, and the library would then compute merges
                    # for seconds.
                    raise CancelledError
                yield text
                fed_bytes += len(text.encode())

    meter = Meter(progress, "tokenizer", min(documents.train_bytes, TOKENIZER_SAMPLE_BYTES))
    # The library does not return before it has finished. So it runs in another thread, while this
    # thread reports progress.
    with ThreadPoolExecutor(1, thread_name_prefix="monograph-tokenizer") as pool:
        training = pool.submit(Tokenizer.train_bpe, feed(), vocab_size)
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
    """A writer of the files of one side of the held-out split.

    STEM.tokens has [bos] + ids + [eos] of every document. STEM.starts has D + 1 entries: the index
    of each document's first token, and at last the number of tokens. STEM.records has D entries: the
    line or row of each document in its file, 0 for a text file.

    With conversations, each `MaskedRow` counts as a document. STEM.tokens then has only the ids of
    the rows, because the chat template writes the beginning and the end. STEM.answers has the begin
    and the end of each trained stretch of tokens.

    Attributes:
        tokens: the writer of STEM.tokens.
        bytes: bytes of all texts so far, as the tokenizer gives them back; with conversations, only
            those of the trained text.
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
        """Create the files.

        Args:
            stem: the path of the files without the suffix.
            tokenizer: the tokenizer of the ids.
            files: number of source files.
            stack: closes the files.
            conversations: whether the caller will call `add_row`; otherwise it will call `add`.
        """

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
        # The entries that `add` has collected and `write` has not written yet.
        self._pending_tokens: list[int] = []
        self._pending_starts: list[int] = []
        self._pending_records: list[int] = []

    def add(self, document: Document, ids: list[int]) -> None:
        """Add the ids of the next part of a document."""
        if document is not self._document:
            self._end_document()
            self._pending_records.append(document.record)
            self._pending_tokens.append(self._bos)
            self._document = document
            self.counts[document.file] += 1
        self._pending_tokens.extend(ids)

    def add_row(self, document: Document, row: MaskedRow) -> None:
        """Write a row of a conversation, and which of its tokens are trained on."""
        assert self._answers is not None
        begin = self.tokens.count
        ids = np.array(row.ids, dtype=np.int64)
        self._starts.append(np.array([begin], dtype=np.int64))
        self._records.append(np.array([document.record], dtype=np.int64))
        self._answers.append(begin + np.array(row.spans, dtype=np.int64).reshape(-1))
        self.tokens.append(ids)
        self.counts[document.file] += 1
        for first, last in row.spans:
            # `bytes_of` needs the token before each token, on which a space may depend.
            self.bytes += self._tokenizer.bytes_of(ids[first:last], ids[first - 1 : last - 1])

    def write(self) -> None:
        """Write the documents that `add` has collected."""
        tokens = np.array(self._pending_tokens, dtype=np.int64)
        # The bytes of tokens are counted and not those of the text, because a tokenizer may change
        # a text (NFC, spaces). `bytes_of` needs the token before each token, so the first token,
        # which has none, is counted separately.
        first_bytes = int(self._tokenizer.token_bytes[tokens[:1]].sum())
        self.bytes += first_bytes + self._tokenizer.bytes_of(tokens[1:], tokens[:-1])
        self.tokens.append(tokens)
        self._starts.append(np.array(self._pending_starts, dtype=np.int64))
        self._records.append(np.array(self._pending_records, dtype=np.int64))
        self._pending_tokens.clear()
        self._pending_starts.clear()
        self._pending_records.clear()

    def finish(self) -> None:
        """End the last document, and write the entries that are left."""
        self._end_document()
        self.write()

    def _end_document(self) -> None:
        """Add the end token of the current document, and the start of the next document.

        Before the first document there is no current one, so no end token is added. After the last
        document, the start is the number of tokens.
        """
        if self._document is not None:
            self._pending_tokens.append(self._eos)
        self._pending_starts.append(self.tokens.count + len(self._pending_tokens))


def encode_documents(
    documents: Iterable[Document],
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    folder: Path,
    meter: Meter,
) -> tuple[dict[str, SideWriter], tuple[str, ...]]:
    """Write FOLDER/train.* and FOLDER/held_out.* of texts, in one pass.

    One thread reads, `_ENCODERS` threads call the tokenizer, which works on all cores, and this
    thread writes the results. It writes them in the order of the text, so the files do not depend
    on timing.

    Returns:
        {side: its writer}, for the writers' counts; and notes for the user.

    Raises:
        InputRefused: the tokenizer would lose some text; the message names file, line and text.
    """
    spellings = SpecialTokenSpellings(tokenizer)
    with ExitStack() as stack:
        sides = {side: SideWriter(folder / side, tokenizer, len(files), stack) for side in SIDES}
        batches = stack.enter_context(closing(prefetch(_batches(documents), _PREFETCHED)))
        pool = stack.enter_context(
            ThreadPoolExecutor(_ENCODERS, thread_name_prefix="monograph-tokens")
        )
        encoding: deque[tuple[StretchBatch, Future[list[list[int]]]]] = deque()
        for batch in batches:
            _count_spellings(spellings, batch.parts, files)
            encoding.append((batch, pool.submit(_encode_parts, tokenizer, batch.parts, files)))
            # There is one batch more than encoders, so that a batch is ready when an encoder is.
            if len(encoding) > _ENCODERS:
                _write_batch(sides, *encoding.popleft(), meter)
        while encoding:
            _write_batch(sides, *encoding.popleft(), meter)
        for side in sides.values():
            side.finish()
    return sides, spellings.notes()


def _count_spellings(
    spellings: SpecialTokenSpellings, parts: Sequence[Stretch], files: Sequence[SourceFile]
) -> None:
    for part in parts:
        where = str(files[part.document.file].path)
        if part.document.record:
            where = place_of(files[part.document.file].path, part.document.record)
        spellings.count(where, [part.text])


def encode_conversations(
    documents: Documents,
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    folder: Path,
    meter: Meter,
) -> tuple[dict[str, SideWriter], dict[str, int], tuple[str, ...]]:
    """Write FOLDER/train.* and FOLDER/held_out.* of conversations, in one pass.

    Returns:
        {side: its writer}, for the writers' counts; {reason: number of conversations that are
        skipped for this reason}; and notes for the user.

    Raises:
        InputRefused: a conversation cannot be trained on, and bad records are not skipped. The
            message names the conversation.
    """
    reading = documents.reading
    assert reading.answering is not None
    if reading.plain:
        return _encode_completions(documents, files, tokenizer, folder, meter)
    answers = ConversationConverter(tokenizer, reading.answering)
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
            untagged_before = answers.counts["untagged"]
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
                # All conversations may have this fault, so they are not skipped.
                raise InputRefused(f"{where}: {error}") from None
            if untagged_before == 0 and answers.counts["untagged"] > 0:
                # `answers` does not know the place of the first untagged answer, which is here.
                answers.untagged = f"{where}: {answers.untagged}"
            for row in rows:
                sides["held_out" if document.held_out else "train"].add_row(document, row)
            meter.add(document.bytes)
        for side in sides.values():
            side.finish()
    return sides, dict(skipped), answers.notes(skipped, first_bad)


def _encode_completions(
    documents: Documents,
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    folder: Path,
    meter: Meter,
) -> tuple[dict[str, SideWriter], dict[str, int], tuple[str, ...]]:
    """Do what `encode_conversations` does, for prompts and completions without a chat template."""
    reading = documents.reading
    assert reading.answering is not None
    completions = Completions(tokenizer, reading.answering)
    spellings = SpecialTokenSpellings(tokenizer)
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
            spellings.count(where, [*prompt_and_completion(text)])
            try:
                row = completions.row(text)
            except Unusable as unusable:
                if not reading.skip_bad:
                    raise bad_record_error(f"{where}: {unusable}") from None
                skipped[unusable.fault.reason] += 1
                first_bad = first_bad or f"{where}: {unusable}"
                continue
            except InputRefused as error:
                # All conversations may have this fault, so they are not skipped.
                raise InputRefused(f"{where}: {error}") from None
            sides["held_out" if document.held_out else "train"].add_row(document, row)
            meter.add(document.bytes)
        for side in sides.values():
            side.finish()
    return sides, dict(skipped), (*skipped_notes(skipped, first_bad), *spellings.notes())


def _encode_parts(
    tokenizer: Tokenizer, parts: Sequence[Stretch], files: Sequence[SourceFile]
) -> list[list[int]]:
    """Return the ids of each part.

    Raises:
        InputRefused: as in `encode_documents`.
    """
    # A tokenizer that puts a space before a text must not put one before a part inside a text. So
    # the two kinds of parts are encoded in two batches.
    is_inside = [part.inside and tokenizer.space_first for part in parts]
    ids: dict[bool, Iterator[list[int]]] = {}
    try:
        for inside in {*is_inside}:
            texts = [
                part.text
                for part, part_inside in zip(parts, is_inside, strict=True)
                if part_inside == inside
            ]
            ids[inside] = iter(tokenizer.encode_batch(texts, inside))
    except InputRefused as error:
        # The error does not name a document of the batch, so find the document that is meant.
        lost = next(
            (part.document for part in parts if tokenizer.loss(part.text, part.inside)), None
        )
        if lost is None:
            raise
        file = files[lost.file]
        if lost.record:
            where = place_of(file.path, lost.record)
        else:
            where = f"{file.path}:{_first_lost_line(tokenizer, file)}"
        raise InputRefused(f"{where}: {error}") from None
    return [next(ids[inside]) for inside in is_inside]


def _first_lost_line(tokenizer: Tokenizer, file: SourceFile) -> int:
    """Return the number, from 1, of the first line of a text file that the tokenizer would change."""
    number = 1
    inside = False
    for part, _ in read_text(file.path, 0, file.size):
        if tokenizer.loss(part, inside):
            for index, line in enumerate(StringIO(part, newline="\n")):
                if tokenizer.loss(line, inside or index > 0):
                    return number + index
            # No single line is changed, only the part as a whole, so name the part's first line.
            return number
        number += part.count("\n")
        inside = True
    return number


def _write_batch(
    sides: dict[str, SideWriter],
    batch: StretchBatch,
    encoding: Future[list[list[int]]],
    meter: Meter,
) -> None:
    for part, ids in zip(batch.parts, encoding.result(), strict=True):
        sides["held_out" if part.document.held_out else "train"].add(part.document, ids)
    for side in sides.values():
        side.write()
    meter.add(batch.read_bytes - meter.done)


def _batches(documents: Iterable[Document]) -> Iterator[StretchBatch]:
    """Yield batches of parts.

    Batches are large enough to keep all cores busy, and small enough for bounded memory.
    """
    parts: list[Stretch] = []
    chars = 0
    document_begin = 0  # in bytes of the text of all documents
    for document in documents:
        for number, (text, read_bytes) in enumerate(document.parts):
            parts.append(Stretch(document, text, inside=number > 0))
            chars += len(text)
            if chars >= _BATCH_CHARS:
                yield StretchBatch(parts, document_begin + read_bytes)
                parts = []
                chars = 0
        document_begin += document.bytes
    if parts:
        yield StretchBatch(parts, document_begin)
