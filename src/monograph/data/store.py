"""Keep tokenised corpora in a cache: built in a temporary folder, renamed when complete, and
checked when opened.

A corpus's `CorpusRequest` decides its tokens, and so the name of its folder.
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
from monograph.data.documents import Documents, Reading, check_fraction
from monograph.data.loss_mask import TEMPLATE_DATE, stops_of
from monograph.data.progress import Meter, Progress
from monograph.data.reading import status_of
from monograph.data.shards import INDEX, open_shard, seal, token_dtype
from monograph.data.sources import Sources
from monograph.errors import InputRefused
from monograph.storage.cache_dir import cache_root
from monograph.storage.reading import exists, parse_json, read_input, status
from monograph.storage.writing import sync, temporary_folder, write_durably, writing
from monograph.text.chat import template_of
from monograph.text.tokenizer import Tokenizer
from monograph.text.tokenizer_file import MAX_FILE_BYTES

FORMAT = 3
# Changes with what conversations are read as, so that tokens of earlier versions are made again.
# Unlike `FORMAT` it is no part of a corpus's fingerprint, since most conversations are read as
# before, and their runs go on.
READER = 2


class CorpusRequest(NamedTuple):
    """The inputs that decide a corpus's tokens.

    Attributes:
        text: the files.
        held_out: the fraction of bytes to hold out.
        tokenizer: the tokenizer, or the number of entries of the one to train.
        reading: how records are read.
    """

    text: Sources
    held_out: float
    tokenizer: Tokenizer | int
    reading: Reading

    @property
    def sources(self) -> list[Any]:
        """Return the values that decide the documents: the files and, if some have records, how
        these are read.
        """
        records = any(file.has_records for file in self.text.files)
        reading: list[Any] | None = (
            [self.reading.text_key, self.reading.skip_bad] if records else None
        )
        if reading and self.reading.plain and self.reading.answering:
            reading += ["prompt and completion", self.reading.answering.longest]
        elif reading and self.reading.answering:
            assert isinstance(self.tokenizer, Tokenizer)
            template = template_of(self.tokenizer)
            stops = sorted(stops_of(self.tokenizer))
            reading += [
                self.reading.answering,
                template.source,
                sorted(template.tokens.items()),
                stops,
                TEMPLATE_DATE,
            ]
            named = sorted(
                (name, other.source) for name, other in self.tokenizer.config.named.items()
            )
            if named:
                reading.append(named)
        if reading and self.reading.ignored_training_keys:
            reading.append(self.reading.ignored_training_keys)
        return [FORMAT, self.text.sha256, self.held_out, reading]

    @property
    def key(self) -> str:
        """Return the folder's name in hex; equal requests have equal keys."""
        asked = (
            self.tokenizer.hash
            if isinstance(self.tokenizer, Tokenizer)
            else f"bpe:{self.tokenizer}"
        )
        reader = [READER] if self.reading.answering else []
        return hashlib.sha256(json.dumps([*self.sources, asked, *reader]).encode()).hexdigest()[:32]


_POLL_S = 0.2


class Side(NamedTuple):
    """One side of the held-out split, tokenised.

    Attributes:
        tokens: uint16 or uint32, memory-mapped: [bos] + ids + [eos] of each document, or the ids of
            each `Row` of a conversation, which counts as a document.
        starts: int64 [D + 1], memory-mapped: index of each document's first token, and the end.
        records: int64 [D], memory-mapped: the line or row of each document in its file, 0 for a
            text file.
        bytes: UTF-8 bytes of all texts; with conversations, of the trained text.
        files: names of the files [F].
        first: int64 [F + 1], index of the first document of each file, and the end.
        answers: int64 [2 S], memory-mapped, rising: begin and end of each trained stretch of tokens
            in conversations; None for texts, which are trained on whole.
    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    records: NDArray[np.int64]
    bytes: int
    files: tuple[str, ...]
    first: NDArray[np.int64]
    answers: NDArray[np.int64] | None = None

    @property
    def conversations(self) -> int:
        """Return the number of conversations, 0 for texts."""
        if self.answers is None:
            return 0
        # A document is a row of a conversation, so a conversation begins where the record or the
        # file changes.
        begins = np.concatenate([[0], np.flatnonzero(np.diff(self.records)) + 1, self.first[:-1]])
        return len(np.unique(begins[begins < len(self.records)]))

    def name(self, document: int) -> str:
        """Return a document's name: its file's name, and after a colon its line or row there."""
        file = self.files[int(np.searchsorted(self.first, document, side="right")) - 1]
        record = int(self.records[document])
        return f"{file}:{record}" if record else file


class StoredCorpus(NamedTuple):
    """A tokenised corpus and its folder; `skipped` is {reason: count} of skipped records."""

    folder: Path
    tokenizer: Tokenizer
    train: Side
    held_out: Side
    skipped: dict[str, int]
    notes: tuple[str, ...]


def open_or_build(
    request: CorpusRequest, cache: str | Path | None = None, progress: Progress | None = None
) -> StoredCorpus:
    """Return the tokenised corpus from the cache, or build it if it is missing or damaged there.

    Args:
        request: the inputs that decide the tokens.
        cache: the cache folder; by default $MONOGRAPH_HOME, else $XDG_CACHE_HOME/monograph, else
            ~/.cache/monograph. If the last two cannot be written, it is a temporary folder that
            vanishes at exit, and a note says so.
        progress: see `monograph.data.progress`.

    Raises:
        UsageError: the share to hold out is out of range.
        InputRefused: the text cannot be read or has a bad record, or a cache that the user chose
            cannot be written.
        DiskFull: the cache has no room.
    """
    check_fraction(request.held_out)
    root, chosen = cache_root(cache)
    folder = root / "corpora" / request.key
    damage: tuple[str, ...] = ()
    if exists(folder):
        try:
            return _open(folder, request, progress)
        except InputRefused as error:
            damage = (f"{error}: tokenised again",)
    root, unwritable = _writable(root, chosen)
    folder = root / "corpora" / request.key
    with writing(root), _locked(folder.with_suffix(".lock"), progress):
        try:
            # Another process may have built it while this one waited for the lock.
            return _open(folder, request, progress)
        except InputRefused:
            notes = _build(folder, request, progress)
    return _open(folder, request, progress, (*unwritable, *damage, *notes))


def _writable(root: Path, chosen: bool) -> tuple[Path, tuple[str, ...]]:
    try:
        with writing(root):
            (root / "corpora").mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=root / "corpora").close()
    except InputRefused as error:
        if chosen:
            raise
        until_exit = ExitStack()
        temporary = until_exit.enter_context(temporary_folder())
        atexit.register(until_exit.close)
        (temporary / "corpora").mkdir()
        return temporary, (
            f"{error}; until then tokens are kept in {temporary} and made again next time",
        )
    return root, ()


@contextmanager
def _locked(path: Path, progress: Progress | None) -> Iterator[None]:
    """Hold a lock on a file during the block; the kernel frees it however the process ends."""
    with open(path, "w") as file:
        waiting: Meter | None = None
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting = waiting or Meter(
                    progress, "waiting for another process that tokenises this text", None
                )
                waiting.add(0)
                time.sleep(_POLL_S)
        yield


def _build(folder: Path, request: CorpusRequest, progress: Progress | None) -> tuple[str, ...]:
    building = folder.with_suffix(".building")
    # A killed process may have left this folder behind. Only the holder of the lock gets here.
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


def _write(building: Path, request: CorpusRequest, progress: Progress | None) -> tuple[str, ...]:
    """Write all files of a corpus; return the notes that are shown only now, unlike those in the
    manifest.
    """
    files = request.text.files
    reading = request.reading
    notes = tuple[str, ...]()
    documents = Documents(files, reading, request.held_out, progress)
    tokenizer = request.tokenizer
    if not isinstance(tokenizer, Tokenizer):
        tokenizer, notes = encoding.train_tokenizer(documents, tokenizer, progress)
    meter = Meter(progress, "bytes tokenised", documents.text_bytes)
    skipped = documents.survey.skipped
    stored_notes = (*documents.notes, *tokenizer.notes)
    if reading.answering:
        sides, unusable, more = encoding.encode_conversations(
            documents, files, tokenizer, building, meter
        )
        skipped = dict(Counter(skipped) + Counter(unusable))
        stored_notes = (*stored_notes, *more)
    else:
        sides, more = encoding.encode_documents(documents, files, tokenizer, building, meter)
        stored_notes = (*stored_notes, *more)
    meter.finish()
    for file in files:
        if status_of(file.path).st_mtime_ns != file.modified_ns:
            raise InputRefused(
                f"{file.path}: changed while it was being read; run again when it no longer changes"
            )
    text = tokenizer.to_json()
    write_durably(building / "tokenizer.json", text)
    manifest = {
        "key": request.key,
        "tokenizer": tokenizer.hash,
        "names": [file.name for file in files],
        "sides": {
            name: {"bytes": side.bytes, "documents": side.counts} for name, side in sides.items()
        },
        "skipped": skipped,
        "notes": stored_notes,
        "files": {
            "tokenizer.json": hashlib.sha256(text.encode()).hexdigest(),
            **{
                path.name: seal(path)
                for side in encoding.SIDES
                for path in _shards(building, side, reading)
            },
        },
    }
    write_durably(
        building / "manifest.json",
        json.dumps(manifest | {"sha256": _digest(manifest)}, ensure_ascii=False),
    )
    sync(building)
    return notes


def _shards(folder: Path, side: str, reading: Reading) -> list[Path]:
    suffixes = ["tokens", "starts", "records"] + (["answers"] if reading.answering else [])
    return [folder / f"{side}.{suffix}" for suffix in suffixes]


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _open(
    folder: Path, request: CorpusRequest, progress: Progress | None, notes: tuple[str, ...] = ()
) -> StoredCorpus:
    """Read and verify every file of a corpus folder.

    Raises:
        InputRefused: a file is missing, damaged, or of another corpus; the message names it.
        Unreadable: a file cannot be read. It may be sound, so the corpus must not be built again.
    """
    manifest = _manifest(folder, request.key)
    tokenizer = _tokenizer(folder / "tokenizer.json", manifest, request.tokenizer)
    paths = {side: _shards(folder, side, request.reading) for side in encoding.SIDES}
    statuses = (status(path) for side in encoding.SIDES for path in paths[side])
    meter = Meter(progress, "verify", sum(entry.st_size for entry in statuses if entry))
    sides = {}
    for side in encoding.SIDES:
        kinds = token_dtype(tokenizer.vocab_size), INDEX, INDEX, INDEX
        pairs = zip(paths[side], kinds, strict=False)
        tokens, *index = (
            open_shard(path, kind, manifest["files"][path.name], meter) for path, kind in pairs
        )
        kept = manifest["sides"][side]
        first = np.cumsum([0, *kept["documents"]])
        starts, records, *answers = (array.view(np.int64) for array in index)
        sides[side] = Side(
            tokens, starts, records, kept["bytes"], tuple(manifest["names"]), first, *answers
        )
    meter.finish()
    notes = (*notes, *manifest["notes"])
    return StoredCorpus(
        folder, tokenizer, sides["train"], sides["held_out"], manifest["skipped"], notes
    )


def _manifest(folder: Path, key: str) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest: dict[str, Any] = parse_json(read_input(path))
        digest = manifest.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InputRefused(f"{path}: cannot be read ({type(error).__name__})") from None
    if digest != _digest(manifest) or manifest["key"] != key:
        raise InputRefused(f"{path}: is damaged (its checksum is wrong) or another corpus's")
    return manifest


def _tokenizer(path: Path, manifest: dict[str, Any], asked: Tokenizer | int) -> Tokenizer:
    try:
        text = read_input(path, MAX_FILE_BYTES)
    except OSError as error:
        raise InputRefused(f"{path}: cannot be read ({error.strerror})") from None
    if hashlib.sha256(text).hexdigest() != manifest["files"][path.name]:
        raise InputRefused(f"{path}: is damaged (its checksum is wrong)")
    if isinstance(asked, Tokenizer):
        return asked
    tokenizer = Tokenizer.from_file(path, trusted=True)
    if tokenizer.hash != manifest["tokenizer"]:
        raise InputRefused(f"{path}: is read differently by this version of Monograph")
    return tokenizer
