"""Turn documents into shards of token ids, in bounded memory, and train a tokenizer for them.

A *side* is "train" or "held_out": the documents that are trained on, and those that are kept for
evaluation. A *shard* is one of the arrays that `SideWriter` writes for each side. A document may be
larger than memory, so its text is read and encoded in *parts*. One thread reads parts before they are
needed.
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

from monograph.data.completions import CompletionEncoder, prompt_and_completion
from monograph.data.conversations import Conversation
from monograph.data.documents import Document, Documents, bad_record_error
from monograph.data.loss_mask import ConversationConverter, MaskedRow, skipped_notes
from monograph.data.progress import Meter, ProgressCallback
from monograph.data.reading import read_text
from monograph.data.records import Unusable
from monograph.data.shards import INDEX_DTYPE, ShardWriter, token_dtype
from monograph.data.sources import SourceFile, place_of
from monograph.data.spelled import SpecialTokenSpellings
from monograph.errors import InputRefused
from monograph.text.chat import require_variables_read
from monograph.text.tokenizer import Tokenizer

Item = TypeVar("Item")


def prefetch(items: Iterator[Item], count: int) -> Generator[Item, None, None]:
    """Yield `items` in order, while a thread makes up to `count` of the next ones.

    An error in `items` is raised when the item would be yielded. The thread starts when the first
    item is asked for. Use `contextlib.closing` around this generator if you may leave it early:
    closing it ends the thread, and waits for at most one item.

    Args:
        items: an iterator that only this generator consumes, in its thread.
        count: at least 1.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="monograph-ahead")
    try:
        # Each job returns a list of the next item, or an empty list if there are no more items.
        pending = deque(pool.submit(list, islice(items, 1)) for _ in range(count))
        while one_item := pending.popleft().result():
            pending.append(pool.submit(list, islice(items, 1)))
            yield from one_item
    finally:
        pool.shutdown(cancel_futures=True)


# A tokenizer is trained on at most this much text. More text hardly changes the merges, but takes
# longer to count.
TOKENIZER_SAMPLE_BYTES = 1 << 27
SIDES = ("train", "held_out")
_BATCH_CHARS = 1 << 19  # the characters of a batch of parts, which are encoded together
_PREFETCHED = 2  # the number of batches that are prefetched
# The number of batches that are encoded at the same time. While the tokenizers library converts the results
# of one batch, in a single thread that holds Python's lock, its own threads encode the other batch.
_ENCODERS = 2
# The number of parts in each list that `train_tokenizer` prefetches. The tokenizers library also takes
# texts in lists of this length.
_TRAINING_PARTS = 256


class DocumentPart(NamedTuple):
    """A part of a document's text.

    Attributes:
        document: the document.
        text: the text of the part.
        inside: whether it is not the first part of the document.
    """

    document: Document
    text: str
    inside: bool


class PartBatch(NamedTuple):
    """Consecutive parts, of one or several documents, which are encoded together.

    Attributes:
        parts: the parts, in order.
        read_bytes: bytes of text that have been read for this batch and all earlier batches.
    """

    parts: list[DocumentPart]
    read_bytes: int


def train_tokenizer(
    documents: Documents, vocab_size: int, progress: ProgressCallback | None
) -> tuple[Tokenizer, tuple[str, ...]]:
    """Train a byte-level BPE on the training documents, or on a sample of 128 MiB of them.

    Returns:
        The tokenizer.
        Notes for the user, if the tokenizer is smaller than requested, or was trained on a sample.
    """
    read_bytes = 0  # the bytes that the library has taken so far
    stop = threading.Event()

    def training_text() -> Iterator[str]:
        nonlocal read_bytes
        sample = documents.sample(TOKENIZER_SAMPLE_BYTES)
        # `iter` with two arguments calls the function until it returns the second one: here it yields
        # lists of parts until a list is empty.
        lists = iter(lambda: list(islice(sample, _TRAINING_PARTS)), [])
        with closing(prefetch(lists, _PREFETCHED)) as prefetched_lists:
            for text in chain.from_iterable(prefetched_lists):
                if stop.is_set():
                    # This error stops the training immediately. If this function returned instead, the
                    # library would take that for the end of the text, and compute merges for seconds.
                    raise CancelledError
                yield text
                read_bytes += len(text.encode())

    meter = Meter(progress, "tokenizer", min(documents.train_bytes, TOKENIZER_SAMPLE_BYTES))
    # The library does not return before it has finished. So it runs in another thread, while this
    # thread reports progress.
    with ThreadPoolExecutor(1, thread_name_prefix="monograph-tokenizer") as pool:
        training = pool.submit(Tokenizer.train_bpe, training_text(), vocab_size)
        try:
            while not training.done():
                wait([training], timeout=0.2)
                # A sample may have a few more bytes than the total, so the report is capped.
                bytes_to_report = min(read_bytes, meter.total or 0)
                meter.add(bytes_to_report - meter.done)
        finally:
            stop.set()
    tokenizer = training.result()
    meter.finish()
    note = ""
    if documents.train_bytes > TOKENIZER_SAMPLE_BYTES:
        note = f"the tokenizer was trained on {TOKENIZER_SAMPLE_BYTES >> 20} MiB of the text"
    # If both notes apply, this one replaces the one above, because it says what the user did not get.
    if documents.train_bytes and tokenizer.vocab_size < vocab_size:
        reason = "the text has no more pairs to merge"
        note = f"the tokenizer has {tokenizer.vocab_size:,} entries, not {vocab_size:,}: {reason}"
    return tokenizer, (note,) if note else ()


class SideWriter:
    """A writer of the files of one side of the held-out split.

    The files, for D documents:

    - STEM.tokens has [bos] + ids + [eos] of every document.
    - STEM.starts has D + 1 entries: the index of each document's first token in STEM.tokens, and at
      last the number of all tokens.
    - STEM.records has D entries: the line or row of each document in its file, 0 for a text file.

    A conversation is written as one or more `MaskedRow`s, each of which counts as a document. In this
    case STEM.tokens has only the ids of these rows, because the chat template itself writes the tokens
    of the beginning and the end. A further file, STEM.answers, has for each answer that is trained on
    the index of its first token in STEM.tokens, and the index after its last token.

    Attributes:
        tokens: the writer of STEM.tokens.
        bytes: bytes of all texts so far, as the tokenizer decodes them; with conversations, only
            those of the trained text.
        document_counts: number of documents of each file.
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
            conversations: whether the documents are rows of conversations, given to `write_row`;
                otherwise they are texts, given to `add_part` and written by `write_added`.
        """

        def shard(suffix: str, dtype: np.dtype[Any] = INDEX_DTYPE) -> ShardWriter:
            return stack.enter_context(ShardWriter(stem.with_suffix(suffix), dtype))

        self.tokens = shard(".tokens", token_dtype(tokenizer.vocab_size))
        self._starts = shard(".starts")
        self._records = shard(".records")
        self._answers = shard(".answers") if conversations else None
        self._bos = tokenizer.bos_id
        self._eos = tokenizer.eos_id
        self._tokenizer = tokenizer
        self._document: Document | None = None  # the document whose parts are being added
        self.bytes = 0
        self.document_counts = [0] * files
        # The entries that `add_part` has collected and `write_added` has not written yet.
        self._pending_tokens: list[int] = []
        self._pending_starts: list[int] = []
        self._pending_records: list[int] = []

    def add_part(self, document: Document, ids: list[int]) -> None:
        """Collect the ids of the next part of a document."""
        if document is not self._document:
            self._end_document()
            self._pending_records.append(document.record)
            self._pending_tokens.append(self._bos)
            self._document = document
            self.document_counts[document.file] += 1
        self._pending_tokens.extend(ids)

    def write_row(self, document: Document, row: MaskedRow) -> None:
        """Write a row of a conversation, and which of its tokens are trained on."""
        assert self._answers is not None
        begin = self.tokens.count
        ids = np.array(row.ids, dtype=np.int64)
        self._starts.append(np.array([begin], dtype=np.int64))
        self._records.append(np.array([document.record], dtype=np.int64))
        self._answers.append(begin + np.array(row.spans, dtype=np.int64).reshape(-1))
        self.tokens.append(ids)
        self.document_counts[document.file] += 1
        for span_begin, span_end in row.spans:
            # `bytes_of` needs the token before each token, on which a space may depend.
            self.bytes += self._tokenizer.bytes_of(
                ids[span_begin:span_end], ids[span_begin - 1 : span_end - 1]
            )

    def write_added(self) -> None:
        """Write what `add_part` has collected."""
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
        self.write_added()

    def _end_document(self) -> None:
        """Add the end token of the current document, and the start of the next document.

        Before the first document there is no end token to add. After the last document there is no
        next one: the start is then the number of all tokens, which is the last entry of STEM.starts.
        """
        if self._document is not None:
            self._pending_tokens.append(self._eos)
        self._pending_starts.append(self.tokens.count + len(self._pending_tokens))


class EncodedSides(NamedTuple):
    """The result of encoding all documents.

    Attributes:
        writers: {side: its writer}, for the writers' counts. The files are complete.
        skipped: {reason: number of conversations that were skipped}.
        notes: lines for the user.
    """

    writers: dict[str, SideWriter]
    skipped: dict[str, int]
    notes: tuple[str, ...]


def encode_documents(
    documents: Iterable[Document],
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    folder: Path,
    meter: Meter,
) -> EncodedSides:
    """Write FOLDER/train.* and FOLDER/held_out.* of texts, in one pass.

    One thread reads, `_ENCODERS` threads call the tokenizer, which works on all cores, and this
    thread writes the results. It writes them in the order of the text, so the files do not depend
    on timing.

    Raises:
        InputRefused: the tokenizer would change some text; the message names file, line and text.
    """
    spellings = SpecialTokenSpellings(tokenizer)
    with ExitStack() as stack:
        writers = {side: SideWriter(folder / side, tokenizer, len(files), stack) for side in SIDES}
        batches = stack.enter_context(closing(prefetch(_batches(documents), _PREFETCHED)))
        pool = stack.enter_context(
            ThreadPoolExecutor(_ENCODERS, thread_name_prefix="monograph-tokens")
        )
        # The batches that the encoders work on or have finished, each with the future of its ids.
        submitted: deque[tuple[PartBatch, Future[list[list[int]]]]] = deque()
        for batch in batches:
            _count_spellings(spellings, batch.parts, files)
            submitted.append((batch, pool.submit(_encode_parts, tokenizer, batch.parts, files)))
            # One batch more than there are encoders is submitted, so that an encoder that has finished need
            # not wait for its next batch.
            if len(submitted) > _ENCODERS:
                oldest_batch, encoded = submitted.popleft()
                _write_batch(writers, oldest_batch, encoded, meter)
        for batch, encoded in submitted:
            _write_batch(writers, batch, encoded, meter)
        for writer in writers.values():
            writer.finish()
    return EncodedSides(writers, {}, spellings.notes())


def _side_of(document: Document) -> str:
    """Return the side of a document, one of SIDES."""
    return "held_out" if document.held_out else "train"


def _count_spellings(
    spellings: SpecialTokenSpellings, parts: Sequence[DocumentPart], files: Sequence[SourceFile]
) -> None:
    """Count the records and text files, among these parts, that spell special tokens."""
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
) -> EncodedSides:
    """Write FOLDER/train.* and FOLDER/held_out.* of conversations, in one pass.

    Raises:
        InputRefused: a conversation cannot be trained on, and bad records are not skipped. The
            message names the conversation.
    """
    reading = documents.reading
    assert reading.answer_options is not None
    if reading.without_template:
        return _encode_completions(documents, files, tokenizer, folder, meter)
    answers = ConversationConverter(tokenizer, reading.answer_options)
    skipped = Counter[str]()
    first_bad = ""  # the place and the fault of the first conversation that is skipped
    with ExitStack() as stack:
        writers = {
            side: SideWriter(folder / side, tokenizer, len(files), stack, conversations=True)
            for side in SIDES
        }
        for document in documents:
            where = place_of(files[document.file].path, document.record)
            conversation = Conversation.of_text("".join(part for part, _ in document.parts))
            untagged_before = answers.counts["untagged"]
            try:
                require_variables_read(tokenizer, conversation.template_variables)
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
            # The text of an untagged answer differs from what the template itself tags as the assistant's.
            # The converter describes the first such answer, but does not know its record. So the place is
            # added here.
            if untagged_before == 0 and answers.counts["untagged"] > 0:
                answers.first_untagged = f"{where}: {answers.first_untagged}"
            for row in rows:
                writers[_side_of(document)].write_row(document, row)
            meter.add(document.bytes)
        for writer in writers.values():
            writer.finish()
    return EncodedSides(writers, dict(skipped), answers.notes(skipped, first_bad))


def _encode_completions(
    documents: Documents,
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    folder: Path,
    meter: Meter,
) -> EncodedSides:
    """Write FOLDER/train.* and FOLDER/held_out.* of prompts with completions that are plain texts.

    No chat template is used. Arguments and errors are those of `encode_conversations`.
    """
    reading = documents.reading
    assert reading.answer_options is not None
    completions = CompletionEncoder(tokenizer, reading.answer_options)
    spellings = SpecialTokenSpellings(tokenizer)
    skipped = Counter[str]()
    first_bad = ""  # the place and the fault of the first record that is skipped
    with ExitStack() as stack:
        writers = {
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
            writers[_side_of(document)].write_row(document, row)
            meter.add(document.bytes)
        for writer in writers.values():
            writer.finish()
    notes = (*skipped_notes(skipped, first_bad), *spellings.notes())
    return EncodedSides(writers, dict(skipped), notes)


def _encode_parts(
    tokenizer: Tokenizer, parts: Sequence[DocumentPart], files: Sequence[SourceFile]
) -> list[list[int]]:
    """Return the ids of each part.

    Raises:
        InputRefused: as in `encode_documents`.
    """
    # A tokenizer with `inserts_space` puts a space before a text, but must not put one before a part
    # inside a text. So it encodes the first parts of documents in one call, and all other parts in another
    # call. A tokenizer without `inserts_space` encodes all parts in one call.
    is_inside = [part.inside and tokenizer.inserts_space for part in parts]
    ids_by_inside: dict[bool, Iterator[list[int]]] = {}
    try:
        for inside in set(is_inside):
            texts = [
                part.text
                for part, part_inside in zip(parts, is_inside, strict=True)
                if part_inside == inside
            ]
            ids_by_inside[inside] = iter(tokenizer.encode_batch(texts, inside))
    except InputRefused as error:
        # The error has the text but not its document, so the document is searched for in the batch.
        changed = next(
            (part.document for part in parts if tokenizer.describe_change(part.text, part.inside)),
            None,
        )
        if changed is None:
            raise
        file = files[changed.file]
        if changed.record:
            where = place_of(file.path, changed.record)
        else:
            where = f"{file.path}:{_first_changed_line(tokenizer, file)}"
        raise InputRefused(f"{where}: {error}") from None
    # Each of the two iterators is in the order of its parts, so this restores the order of all parts.
    return [next(ids_by_inside[inside]) for inside in is_inside]


def _first_changed_line(tokenizer: Tokenizer, file: SourceFile) -> int:
    """Return the number, from 1, of the first line of a text file that the tokenizer would change."""
    number = 1
    inside = False
    for part, _ in read_text(file.path, 0, file.size):
        if tokenizer.describe_change(part, inside):
            for index, line in enumerate(StringIO(part, newline="\n")):
                if tokenizer.describe_change(line, inside or index > 0):
                    return number + index
            # No single line is changed, only the part as a whole, so name the part's first line.
            return number
        number += part.count("\n")
        inside = True
    return number


def _write_batch(
    writers: dict[str, SideWriter],
    batch: PartBatch,
    encoded: Future[list[list[int]]],
    meter: Meter,
) -> None:
    """Wait until a batch is encoded, and write its ids."""
    for part, ids in zip(batch.parts, encoded.result(), strict=True):
        writers[_side_of(part.document)].add_part(part.document, ids)
    for writer in writers.values():
        writer.write_added()
    meter.add(batch.read_bytes - meter.done)


def _batches(documents: Iterable[Document]) -> Iterator[PartBatch]:
    """Yield batches of parts.

    Batches are large enough to keep all cores busy, and small enough for bounded memory.
    """
    parts: list[DocumentPart] = []
    chars = 0
    document_begin = 0  # in bytes of the text of all documents
    for document in documents:
        for number, (text, read_bytes) in enumerate(document.parts):
            parts.append(DocumentPart(document, text, inside=number > 0))
            chars += len(text)
            if chars >= _BATCH_CHARS:
                yield PartBatch(parts, document_begin + read_bytes)
                parts = []
                chars = 0
        document_begin += document.bytes
    if parts:
        yield PartBatch(parts, document_begin)
