"""Read and verify one checkpoint: a folder of three files and a manifest with digests of every
byte, its own included.

If a file is too large to be in memory next to its tensors' destination, each tensor is read when it
is requested.
"""

import errno
import functools
import hashlib
import json
import os
import re
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.storage import blocks, tensor_layout
from monograph.storage.reading import (
    MOST_JSON_BYTES,
    is_folder,
    kind_of,
    parse_json,
    readable,
    status,
)

# Number of blocks kept in memory: a tensor may begin in the block in which the one before it ended.
KEPT_BLOCKS = 4


class LargeFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file by name, in the file's order, read and verified block by
    block when requested.

    The file stays open, so the tensors are those of this file even if its name is later given to
    another one.
    """

    def __init__(
        self,
        descriptor: int,
        entries: list[tensor_layout.Entry],
        start: int,
        read: Callable[[int, int], bytes],
    ):
        """Keep the file open for as long as this object lives.

        Args:
            descriptor: descriptor of the open file; a duplicate is kept.
            entries: the file's tensors.
            start: the offset of the tensors' bytes in the file.
            read: a function of descriptor and index that returns a block, or raises if its digest
                is wrong.
        """
        self._file = os.dup(descriptor)
        weakref.finalize(self, os.close, self._file)
        self._entries = {entry.name: entry for entry in entries}
        self._start = start
        self._block = functools.lru_cache(KEPT_BLOCKS)(functools.partial(read, self._file))

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        target = tensor_layout.bytes_of(tensor)
        at = self._start + entry.begin
        done = 0
        while done < len(target):
            index, offset = divmod(at + done, blocks.BLOCK_BYTES)
            part = self._block(index)[offset : offset + len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)
        return tensor

    def like(self, name: str) -> Tensor:
        """Return a meta tensor with the shape and dtype of the named tensor, without reading it."""
        entry = self._entries[name]
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")


MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "MANIFEST.json"
FORMAT = "monograph-checkpoint-1"
# Above this size tensors are read one by one, so that the file is never in memory as a whole.
LARGE_BYTES = 2**30
# A checkpoint's folder has this suffix for the moment in which its successor of the same update
# takes its place.
REPLACED = ".replaced"
FOLDER_NAME = re.compile(r"step-([0-9]{8,18})(\.replaced)?")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The whole state of a run between two updates.

    Attributes:
        update: the number of updates done.
        model: the module's tensors by name; tied weights appear once.
        optimizer: the optimizer's tensors by name.
        state: everything else, as JSON returns it (string keys, lists for tuples).
        run: identity of the run that wrote the checkpoint, so that a caller can detect another
            run's folder.
    """

    update: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""


class CheckpointDamaged(InputRefused):
    """A file of a checkpoint differs from its manifest, or the manifest is damaged."""

    def __init__(self, file: Path, expected: str, actual: str) -> None:
        super().__init__(f"{file}: expected {expected}, found {actual}")
        self.file = file
        self.expected = expected
        self.actual = actual


@dataclass(frozen=True)
class FileEntry:
    """The manifest's entry for one file: its length and the SHA-256 of each of its blocks."""

    bytes: int
    sha256: list[str]


@dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json: the identity of a checkpoint and an entry for each of its
    files.
    """

    run: str
    update: int
    files: dict[str, FileEntry]

    @property
    def root(self) -> str:
        """Return the SHA-256 digest of the manifest's content, which covers every byte of the
        checkpoint.
        """
        return hashlib.sha256(json.dumps(self._content()).encode()).hexdigest()

    def encode(self) -> bytes:
        """Return the manifest's only valid bytes: any others count as damage, so that every flipped
        bit is noticed.
        """
        return (json.dumps({**self._content(), "root": self.root}, indent=1) + "\n").encode()

    def _content(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "run": self.run,
            "update": self.update,
            "block_bytes": blocks.BLOCK_BYTES,
            "files": {name: vars(entry) for name, entry in self.files.items()},
        }


def is_gone(folder: Path) -> bool:
    """Return whether a checkpoint's name is there no more: a run that still trains removes those
    that it replaces.

    Anything else that stands in its place, such as a file or a link to nothing, is a damaged
    checkpoint.
    """
    return status(folder, follow=False) is None


def verify(folder: Path) -> None:
    """Check every byte of a checkpoint against its manifest, in constant memory.

    Raises:
        CheckpointDamaged: a file is damaged; the message names it with the expected and the actual
            digest, length or list of files.
    """
    for name, entry in read_manifest(folder).files.items():
        with _opened(folder / name, entry.bytes) as descriptor:
            _require(folder / name, entry.sha256, blocks.digests_of(descriptor, entry.bytes))


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint into memory, and verify the bytes in memory rather than the file.

    Files of more than LARGE_BYTES are verified now, and again when their tensors are requested,
    which may then raise.

    Raises:
        CheckpointDamaged: see `verify`.
    """
    manifest = read_manifest(folder)
    return Checkpoint(
        update=manifest.update,
        model=_load_tensors(folder / MODEL, manifest.files[MODEL]),
        optimizer=_load_tensors(folder / OPTIMIZER, manifest.files[OPTIMIZER]),
        state=_load_state(folder / STATE, manifest.files[STATE]),
        run=manifest.run,
    )


def load_state(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return a checkpoint's update and state, without reading its tensors; raise CheckpointDamaged
    like `verify`.
    """
    manifest = read_manifest(folder)
    return manifest.update, _load_state(folder / STATE, manifest.files[STATE])


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest and make all cheap checks: its own digest, the folder's name, the list and
    lengths of files.

    Raises:
        CheckpointDamaged: see `verify`.
    """
    path = folder / MANIFEST
    if not is_folder(folder):
        raise CheckpointDamaged(folder, "a folder", kind_of(folder))
    with _opened(path) as descriptor:
        data = os.read(descriptor, min(os.fstat(descriptor).st_size, MOST_JSON_BYTES))
        present = sorted(os.listdir(folder))
    manifest = _parse(path, data)
    named = FOLDER_NAME.fullmatch(folder.name)
    if named and int(named[1]) != manifest.update:
        raise CheckpointDamaged(
            path, f"update {int(named[1])} as in the folder's name", f"update {manifest.update}"
        )
    expected = sorted([*manifest.files, MANIFEST])
    if present != expected:
        raise CheckpointDamaged(folder, f"the files {', '.join(expected)}", ", ".join(present))
    for name, entry in manifest.files.items():
        with _opened(folder / name, entry.bytes):
            pass
    return manifest


def _parse(path: Path, data: bytes) -> Manifest:
    try:
        content = parse_json(data)
        kind = f"format {content['format']} with blocks of {content['block_bytes']} bytes"
        ours = f"format {FORMAT} with blocks of {blocks.BLOCK_BYTES} bytes"
        if kind != ours:
            raise CheckpointDamaged(path, ours, kind)
        # The names come from this list and never from the manifest, which so cannot make other
        # files be opened.
        files = {name: FileEntry(**content["files"][name]) for name in (MODEL, OPTIMIZER, STATE)}
        manifest = Manifest(content["run"], content["update"], files)
        stated = content["root"]
        canonical = manifest.encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(
            path, "a manifest", f"something else ({type(error).__name__}: {error})"
        ) from error
    if data != canonical:
        actual = (
            f"sha256 {manifest.root}"
            if manifest.root != stated
            else "the same content spelled otherwise"
        )
        raise CheckpointDamaged(path, f"content of sha256 {stated}", actual)
    numbers = [manifest.update, *(entry.bytes for entry in files.values())]
    kinds = [(manifest.run, str), *((entry.sha256, list) for entry in files.values())]
    natural = all(type(number) is int and number >= 0 for number in numbers)
    if not (natural and all(isinstance(*kind) for kind in kinds)):
        raise CheckpointDamaged(
            path, "natural numbers, a text and lists of digests in their places", "something else"
        )
    return manifest


def _load_state(path: Path, entry: FileEntry) -> dict[str, Any]:
    if entry.bytes > MOST_JSON_BYTES:
        raise CheckpointDamaged(path, f"at most {MOST_JSON_BYTES} bytes", f"{entry.bytes} bytes")
    text = bytearray(entry.bytes)
    with _opened(path, entry.bytes) as descriptor:
        _require(path, entry.sha256, blocks.read_pieces(descriptor, [memoryview(text)]))
    try:
        return dict(parse_json(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(path, "a JSON object", f"something else ({error})") from error


def _load_tensors(path: Path, entry: FileEntry) -> Mapping[str, Tensor]:
    with _opened(path, entry.bytes) as descriptor:
        if entry.bytes > LARGE_BYTES:
            _require(path, entry.sha256, blocks.digests_of(descriptor, entry.bytes))
        try:
            start = os.pread(descriptor, tensor_layout.LENGTH_BYTES, 0)
            prefix = os.pread(descriptor, tensor_layout.header_bytes(start, entry.bytes), 0)
            if entry.bytes > LARGE_BYTES:
                layout = tensor_layout.entries(prefix, entry.bytes)
                return LargeFile(
                    descriptor, layout, len(prefix), functools.partial(_read_block, path, entry)
                )
            tensors = tensor_layout.decode(prefix, entry.bytes)
        except tensor_layout.LayoutError as error:
            # The header was read before its digest was checked, so first see whether a wrong digest
            # explains the error.
            _require(path, entry.sha256, blocks.digests_of(descriptor, entry.bytes))
            raise CheckpointDamaged(path, "a safetensors file", str(error)) from error
        again = bytearray(len(prefix))
        pieces = [memoryview(again), *map(tensor_layout.bytes_of, tensors.values())]
        _require(path, entry.sha256, blocks.read_pieces(descriptor, pieces))
        # `tensors` were laid out by a header that was read before its digest was checked.
        if again != prefix:
            raise CheckpointDamaged(path, "the same header when read twice", "another one")
    return tensors


def _read_block(path: Path, entry: FileEntry, descriptor: int, index: int) -> bytes:
    """Return one block of the open file, checked against its digest."""
    with readable(path):
        content = os.pread(descriptor, blocks.BLOCK_BYTES, index * blocks.BLOCK_BYTES)
    expected = list(entry.sha256)
    actual = list(entry.sha256)
    actual[index] = hashlib.sha256(content).hexdigest()
    _require(path, expected, actual)
    return content


@contextmanager
def _opened(path: Path, expected_bytes: int | None = None) -> Iterator[int]:
    """Open a regular file for reading, never through a symbolic link.

    Raises:
        CheckpointDamaged: the file is missing, not a regular file, or not of the expected length.
        Unreadable: the system failed to read it, so its content is unknown.
    """
    try:
        with readable(path):
            # Without O_NONBLOCK a pipe of that name would hang.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                entry = os.fstat(descriptor)
                if not stat.S_ISREG(entry.st_mode):
                    raise CheckpointDamaged(path, "a regular file", stat.filemode(entry.st_mode))
                if expected_bytes is not None and entry.st_size != expected_bytes:
                    raise CheckpointDamaged(
                        path, f"{expected_bytes} bytes", f"{entry.st_size} bytes"
                    )
                yield descriptor
            finally:
                os.close(descriptor)
    except OSError as error:
        obstacle = "a symbolic link" if error.errno == errno.ELOOP else f"'{error.strerror}'"
        raise CheckpointDamaged(path, "a readable file", obstacle) from error


def _require(path: Path, expected: list[str], actual: list[str]) -> None:
    for number, (want, have) in enumerate(zip_longest(expected, actual), 1):
        if want != have:
            where = f" in block {number} of {len(expected)}" if len(expected) > 1 else ""
            raise CheckpointDamaged(path, f"sha256 {want}{where}", f"sha256 {have}")
