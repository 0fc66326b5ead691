"""Keep tokenised corpora in a cache.

A *corpus* is the text of a source as tokens, divided into two *sides*: the documents to train on, and
those that are held out for evaluation. It is built in a temporary folder, which is renamed when it is
complete. Every file is checked when the corpus is opened. A `CorpusRequest` says which corpus is
wanted: it has everything on which the tokens depend, and its hash is the name of the corpus's folder.
"""

import atexit
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monograph.data import encoding
from monograph.data.documents import Documents, ReadingPlan, check_held_out
from monograph.data.loss_mask import TEMPLATE_DATE, AnswerOptions, configured_stop_ids
from monograph.data.progress import Meter, ProgressCallback
from monograph.data.reading import status_of
from monograph.data.shards import INDEX_DTYPE, open_shard, seal, token_dtype
from monograph.data.sources import Sources
from monograph.errors import InputRefused
from monograph.storage.cache_dir import cache_root
from monograph.storage.reading import exists, parse_json, read_input, status
from monograph.storage.writing import cache_errors_explained, sync, temporary_folder, write_durably
from monograph.text.chat import template_of
from monograph.text.tokenizer import Tokenizer
from monograph.text.tokenizer_file import MAX_FILE_BYTES

_FORMAT_VERSION = 3
# This number is raised when the code begins to read conversations in another way. The number is a part
# of the name of a folder with conversations (`CorpusRequest.key`), so the tokens of conversations are
# then made again. A run that resumes compares `_FORMAT_VERSION`, but not this number, because most
# conversations still give the same tokens.
_CONVERSATION_READER_VERSION = 2
_LOCK_POLL_S = 0.2  # the time between two attempts to get the lock of a corpus


class CorpusRequest(NamedTuple):
    """Everything on which a corpus's tokens depend.

    Attributes:
        sources: the files.
        held_out: the fraction of bytes to hold out.
        tokenizer: the tokenizer, or the number of entries of the one to train.
        reading: how records are read.
    """

    sources: Sources
    held_out: float
    tokenizer: Tokenizer | int
    reading: ReadingPlan

    @property
    def document_values(self) -> list[Any]:
        """Return the values on which the documents and their split depend, for a hash.

        They are the files, the fraction to hold out, and how records are read if some files have
        records.
        """
        # The values and their order must not change between versions, because runs and the names of
        # folders depend on their hash. So a value that was introduced later is appended only if it is
        # not empty.
        reading_values: list[Any] | None = None
        if any(file.has_records for file in self.sources.files):
            reading_values = [self.reading.text_key, self.reading.skip_bad]
            if self.reading.answer_options:
                reading_values += self._answer_values(self.reading.answer_options)
            # Of the ignored keys, only those count that would otherwise say what is trained on.
            if self.reading.ignored_training_keys:
                reading_values.append(self.reading.ignored_training_keys)
        return [_FORMAT_VERSION, self.sources.sha256, self.held_out, reading_values]

    def _answer_values(self, answer_options: AnswerOptions) -> list[Any]:
        """Return the values, besides the messages, on which the tokens of conversations depend."""
        # Prompts and completions without a template are joined as they are. So of the options, only the
        # largest length changes tokens. The text in this list distinguishes it from the list for a template.
        if self.reading.without_template:
            return ["prompt and completion", answer_options.max_inputs]
        # With a template, the tokenizer is one that has it, and none is trained.
        assert isinstance(self.tokenizer, Tokenizer)
        template = template_of(self.tokenizer)
        values = [
            answer_options,
            template.source,
            sorted(template.tokens.items()),
            sorted(configured_stop_ids(self.tokenizer)),
            TEMPLATE_DATE,
        ]
        # Further templates of the model, such as one for chats with tools.
        named = sorted(
            (name, other.source) for name, other in self.tokenizer.config.named_templates.items()
        )
        if named:
            values.append(named)
        return values

    @property
    def key(self) -> str:
        """Return a hash of the request in hex, which is the folder's name."""
        if isinstance(self.tokenizer, Tokenizer):
            tokenizer = self.tokenizer.hash
        else:
            tokenizer = f"bpe:{self.tokenizer}"
        reader_version = [_CONVERSATION_READER_VERSION] if self.reading.answer_options else []
        values = json.dumps([*self.document_values, tokenizer, *reader_version])
        return hashlib.sha256(values.encode()).hexdigest()[:32]


class Side(NamedTuple):
    """One side of the held-out split, tokenised.

    Attributes:
        tokens: uint16 or uint32, memory-mapped: [bos] + ids + [eos] of each document. A conversation
            is stored as one or more rows (`monograph.data.loss_mask.MaskedRow`), each of which counts
            as a document and has only its own ids, without [bos] and [eos].
        starts: int64 [D + 1], memory-mapped: index of each document's first token, and at last the
            number of tokens.
        records: int64 [D], memory-mapped: the line or row of each document in its file, 0 for a
            text file.
        bytes: UTF-8 bytes of all texts; with conversations, of the trained text.
        files: names of the files [F].
        first_documents: int64 [F + 1], index of the first document of each file, and at last the
            number of documents.
        answers: int64 [2 S], memory-mapped, ascending: for each answer of a conversation that is
            trained on, the index of its first token and the index after its last one. None for
            texts, because all of their tokens are trained on.

    Shapes: D documents, F files, S answers that are trained on.
    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    records: NDArray[np.int64]
    bytes: int
    files: tuple[str, ...]
    first_documents: NDArray[np.int64]
    answers: NDArray[np.int64] | None = None

    @property
    def conversations(self) -> int:
        """Return the number of conversations, 0 for texts."""
        if self.answers is None:
            return 0
        # Here a document is a row of a conversation, and all rows of a conversation have the same record
        # number. So a conversation begins where the record number changes or a file begins. If a file has
        # no documents, the next file begins at the same document, and `unique` counts it once. If that was
        # the last file, its begin is the number of documents, where no conversation begins.
        record_begins = np.flatnonzero(np.diff(self.records)) + 1
        begins = np.concatenate([[0], record_begins, self.first_documents[:-1]])
        return len(np.unique(begins[begins < len(self.records)]))

    def document_name(self, document: int) -> str:
        """Return a document's name: FILE, or FILE:RECORD with its line or row in the file."""
        file = self.files[int(np.searchsorted(self.first_documents, document, side="right")) - 1]
        record = int(self.records[document])
        return f"{file}:{record}" if record else file


class StoredCorpus(NamedTuple):
    """A tokenised corpus.

    Attributes:
        folder: the corpus's folder in the cache.
        tokenizer: the tokenizer of the corpus's tokens.
        train: the training side of the held-out split.
        held_out: the held-out side.
        skipped: {reason: count} of skipped records.
        notes: lines for the user.
    """

    folder: Path
    tokenizer: Tokenizer
    train: Side
    held_out: Side
    skipped: dict[str, int]
    notes: tuple[str, ...]


def open_or_build(
    request: CorpusRequest,
    cache: str | Path | None = None,
    progress: ProgressCallback | None = None,
) -> StoredCorpus:
    """Return the tokenised corpus from the cache. Build it first if it is missing or damaged there.

    Args:
        request: the inputs that decide the tokens.
        cache: the cache folder; None: $MONOGRAPH_HOME, else $XDG_CACHE_HOME/monograph, else
            ~/.cache/monograph. If one of the last two cannot be written, a temporary folder is used
            instead. It is removed at exit, and a note says so.
        progress: called to report progress (`monograph.data.progress`); None: nothing is reported.

    Raises:
        UsageError: the share to hold out is out of range.
        InputRefused: the text cannot be read or has a bad record, or a cache that the user chose
            cannot be written.
        DiskFull: the cache has no room.
    """
    check_held_out(request.held_out)
    root, is_chosen = cache_root(cache)
    folder = root / "corpora" / request.key
    damage_notes: tuple[str, ...] = ()
    if exists(folder):
        try:
            return _open(folder, request, progress)
        # `Unreadable` is not an InputRefused, so it is not caught here, and the run ends: the corpus may be
        # undamaged, and must not be built again.
        except InputRefused as error:
            damage_notes = (f"{error}: tokenised again",)
    root, root_notes = _writable_root(root, is_chosen)
    # `_writable_root` may have returned a temporary folder, so the folder is set again.
    folder = root / "corpora" / request.key
    with cache_errors_explained(root), _locked(folder.with_suffix(".lock"), progress):
        try:
            # Another process may have built the corpus while this one waited for the lock.
            return _open(folder, request, progress)
        except InputRefused:
            notes = _build(folder, request, progress)
    return _open(folder, request, progress, (*root_notes, *damage_notes, *notes))


def _writable_root(root: Path, is_chosen: bool) -> tuple[Path, tuple[str, ...]]:
    """Return the cache folder, or a temporary one in its place, and notes for the user.

    Raises:
        InputRefused: the cache folder cannot be written, and the user chose it.
    """
    try:
        with cache_errors_explained(root):
            (root / "corpora").mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=root / "corpora").close()
    except InputRefused as error:
        if is_chosen:
            raise
        until_exit = ExitStack()
        temporary = until_exit.enter_context(temporary_folder())
        atexit.register(until_exit.close)
        (temporary / "corpora").mkdir()
        return temporary, (
            f"{error}; tokens are kept in {temporary} for now, and made again next time",
        )
    return root, ()


@contextmanager
def _locked(path: Path, progress: ProgressCallback | None) -> Iterator[None]:
    """Hold a lock on a file during the block. The kernel frees the lock however the process ends."""
    with open(path, "w") as file:
        meter: Meter | None = None
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                meter = meter or Meter(
                    progress, "waiting for another process that tokenises this text", None
                )
                meter.add(0)  # This call reports that the process still waits.
                time.sleep(_LOCK_POLL_S)
        yield


def _build(
    folder: Path, request: CorpusRequest, progress: ProgressCallback | None
) -> tuple[str, ...]:
    """Build a corpus in its folder, and return the notes of `_write`."""
    building = folder.with_suffix(".building")
    # A killed process may have left this folder behind. No other process can be using it now,
    # because this process holds the lock.
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        notes = _write(building, request, progress)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(building, folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return notes


def _write(
    building: Path, request: CorpusRequest, progress: ProgressCallback | None
) -> tuple[str, ...]:
    """Write all files of a corpus.

    Returns:
        Notes for the user on the training of the tokenizer, which are shown only now. All other notes
        are in the manifest, and are shown whenever the corpus is opened.
    """
    files = request.sources.files
    reading = request.reading
    training_notes: tuple[str, ...] = ()
    documents = Documents(files, reading, request.held_out, progress)
    if isinstance(request.tokenizer, Tokenizer):
        tokenizer = request.tokenizer
    else:
        entries = request.tokenizer
        tokenizer, training_notes = encoding.train_tokenizer(documents, entries, progress)
    meter = Meter(progress, "bytes tokenised", documents.text_bytes)
    if reading.answer_options:
        encoded = encoding.encode_conversations(documents, files, tokenizer, building, meter)
    else:
        encoded = encoding.encode_documents(documents, files, tokenizer, building, meter)
    meter.finish()
    for file in files:
        if status_of(file.path).st_mtime_ns != file.modified_ns:
            raise InputRefused(
                f"{file.path}: changed while it was being read; run again when it no longer changes"
            )
    tokenizer_json = tokenizer.to_json()
    write_durably(building / "tokenizer.json", tokenizer_json)
    digests = {"tokenizer.json": hashlib.sha256(tokenizer_json.encode()).hexdigest()}
    for side_name in encoding.SIDES:
        for path in _shard_paths(building, side_name, reading):
            digests[path.name] = seal(path)  # the digest of a shard's checksums
    manifest = {
        "key": request.key,
        "tokenizer": tokenizer.hash,
        "names": [file.name for file in files],
        "sides": {
            side: {"bytes": writer.bytes, "documents": writer.document_counts}
            for side, writer in encoded.writers.items()
        },
        # Bad records were skipped by the survey, the first pass over all records. Records that the chat
        # template refuses were skipped while they were encoded.
        "skipped": dict(Counter(documents.survey.skipped) + Counter(encoded.skipped)),
        "notes": (*documents.notes, *tokenizer.notes, *encoded.notes),
        "files": digests,
    }
    write_durably(
        building / "manifest.json",
        json.dumps(manifest | {"sha256": _digest(manifest)}, ensure_ascii=False),
    )
    sync(building)
    return training_notes


def _shard_paths(folder: Path, side: str, reading: ReadingPlan) -> list[Path]:
    """Return the files of one side: the tokens first, and then the indices, in the order of `_open`."""
    suffixes = ["tokens", "starts", "records"]
    if reading.answer_options:
        suffixes.append("answers")
    return [folder / f"{side}.{suffix}" for suffix in suffixes]


def _digest(manifest: dict[str, Any]) -> str:
    """Return the hex sha256 of a manifest without its own digest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _open(
    folder: Path,
    request: CorpusRequest,
    progress: ProgressCallback | None,
    notes: tuple[str, ...] = (),
) -> StoredCorpus:
    """Read and verify every file of a corpus folder, and return the corpus.

    Args:
        folder: the corpus's folder.
        request: the request that led to this folder.
        progress: called to report progress; None: nothing is reported.
        notes: lines for the user in addition to those of the manifest.

    Raises:
        InputRefused: a file is missing, damaged, or of another corpus; the message names it.
        Unreadable: a file cannot be read. It may be undamaged, so the corpus must not be built
            again.
    """
    manifest = _manifest(folder, request.key)
    tokenizer = _tokenizer(folder / "tokenizer.json", manifest, request.tokenizer)
    paths = {side: _shard_paths(folder, side, request.reading) for side in encoding.SIDES}
    statuses = (status(path) for side in encoding.SIDES for path in paths[side])
    total_bytes = sum(entry.st_size for entry in statuses if entry is not None)
    meter = Meter(progress, "verify", total_bytes)
    digests = manifest["files"]
    sides = {}
    for side in encoding.SIDES:
        tokens_path, *index_paths = paths[side]
        tokens = open_shard(
            tokens_path, token_dtype(tokenizer.vocab_size), digests[tokens_path.name], meter
        )
        # `answers` is a list of one array for conversations, and empty for texts. The stored numbers are
        # unsigned. They are viewed as int64, because numpy computes with unsigned and int64 numbers in
        # floats.
        starts, records, *answers = [
            open_shard(path, INDEX_DTYPE, digests[path.name], meter).view(np.int64)
            for path in index_paths
        ]
        counts = manifest["sides"][side]
        sides[side] = Side(
            tokens=tokens,
            starts=starts,
            records=records,
            bytes=counts["bytes"],
            files=tuple(manifest["names"]),
            first_documents=np.cumsum([0, *counts["documents"]]),
            answers=answers[0] if answers else None,
        )
    meter.finish()
    return StoredCorpus(
        folder=folder,
        tokenizer=tokenizer,
        train=sides["train"],
        held_out=sides["held_out"],
        skipped=manifest["skipped"],
        notes=(*notes, *manifest["notes"]),
    )


def _manifest(folder: Path, key: str) -> dict[str, Any]:
    """Return the manifest of a corpus folder, after checking its checksum and its key."""
    path = folder / "manifest.json"
    try:
        manifest: dict[str, Any] = parse_json(read_input(path))
        digest = manifest.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InputRefused(f"{path}: cannot be read ({type(error).__name__})") from None
    if digest != _digest(manifest) or manifest["key"] != key:
        raise InputRefused(f"{path}: is damaged (its checksum is wrong) or another corpus's")
    return manifest


def _tokenizer(path: Path, manifest: dict[str, Any], requested: Tokenizer | int) -> Tokenizer:
    """Return the tokenizer of a corpus, after checking the corpus's tokenizer.json.

    It is the requested tokenizer, or the one that was trained for the corpus and is in the file.

    Args:
        path: the file.
        manifest: the corpus's manifest.
        requested: the tokenizer, or the number of entries of the one to train.
    """
    try:
        text = read_input(path, MAX_FILE_BYTES)
    except OSError as error:
        raise InputRefused(f"{path}: cannot be read ({error.strerror})") from None
    if hashlib.sha256(text).hexdigest() != manifest["files"][path.name]:
        raise InputRefused(f"{path}: is damaged (its checksum is wrong)")
    if isinstance(requested, Tokenizer):
        return requested
    tokenizer = Tokenizer.from_file(path, trusted=True)
    if tokenizer.hash != manifest["tokenizer"]:
        raise InputRefused(f"{path}: is read differently by this version of Monograph")
    return tokenizer
