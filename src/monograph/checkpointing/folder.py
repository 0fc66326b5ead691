"""Read and verify one checkpoint.

A checkpoint is a folder of three files and a manifest. The manifest has a digest of each block of
each file (`monograph.storage.blocks`), and a digest of itself. In a file of more than LARGE_BYTES,
each tensor is read when it is requested, so that the memory never holds the whole file.
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
    MAX_JSON_BYTES,
    is_folder,
    kind_of,
    parse_json,
    readable,
    status,
)

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "MANIFEST.json"
FORMAT = "monograph-checkpoint-1"
# The tensors of a larger file are read one by one, so that the memory never holds the whole file.
LARGE_BYTES = 2**30
# The number of blocks of a `LargeFile` that stay in memory. A block may have the end of one tensor and
# the beginning of the next, and should not be read twice.
KEPT_BLOCKS = 4
# The suffix of an old folder while a new checkpoint of the same update gets the folder's name.
REPLACED = ".replaced"
FOLDER_NAME = re.compile(r"step-([0-9]{8,18})(\.replaced)?")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The whole state of a run between two updates.

    Attributes:
        update: the number of updates that are done.
        model: the module's tensors by name; tied weights are there once.
        optimizer: the optimizer's tensors by name.
        state: everything else, as values of JSON. A loaded state has string keys, and lists in
            place of tuples.
        run: the identity of the run that wrote the checkpoint. By it a caller notices that a folder belongs to
            another run.
    """

    update: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""


class CheckpointDamaged(InputRefused):
    """A file of a checkpoint differs from the manifest, or the manifest is damaged.

    Attributes:
        file: the file or folder.
        expected: a description of what was expected, such as a digest.
        actual: a description of what was found.
    """

    def __init__(self, file: Path, expected: str, actual: str) -> None:
        super().__init__(f"{file}: expected {expected}, found {actual}")
        self.file = file
        self.expected = expected
        self.actual = actual


@dataclass(frozen=True)
class FileEntry:
    """The manifest's entry for one file.

    Attributes:
        bytes: the file's length.
        sha256: the digest of each block of the file.
    """

    bytes: int
    sha256: list[str]


@dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json.

    Attributes:
        run: the identity of the run, see `Checkpoint`.
        update: the number of updates that are done.
        files: the entry of each file by the file's name.
    """

    run: str
    update: int
    files: dict[str, FileEntry]

    @property
    def root(self) -> str:
        """Return the SHA-256 of the manifest's content.

        The content has digests of the files, so this digest covers every byte of the checkpoint.
        """
        return hashlib.sha256(json.dumps(self._content()).encode()).hexdigest()

    def encode(self) -> bytes:
        """Return the bytes of MANIFEST.json.

        Any other bytes count as damage, even with the same content, so that every flipped bit is
        noticed.
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


class LargeFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file by name, in the file's order.

    A tensor is read and verified when it is requested. The file stays open, so the tensors remain
    those of this file even if another file gets its name.
    """

    def __init__(
        self,
        descriptor: int,
        entries: list[tensor_layout.TensorEntry],
        start: int,
        read: Callable[[int, int], bytes],
    ):
        """Keep the file open until this object is deleted.

        Args:
            descriptor: the file descriptor. A duplicate of it is kept, so the caller may close it.
            entries: the file's tensors.
            start: the offset of the tensors' bytes in the file.
            read: a function that gets a file descriptor and the index of a block, and returns the
                block's bytes. It raises CheckpointDamaged if their digest is wrong.
        """
        self._file = os.dup(descriptor)
        weakref.finalize(self, os.close, self._file)
        self._entries = {entry.name: entry for entry in entries}
        self._start = start
        read_block = functools.partial(read, self._file)
        self._read_block_cached = functools.lru_cache(KEPT_BLOCKS)(read_block)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)  # the names

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        target = tensor_layout.bytes_of(tensor)
        tensor_start = self._start + entry.begin
        copied = 0  # bytes of the tensor
        while copied < len(target):
            index, offset = divmod(tensor_start + copied, blocks.BLOCK_BYTES)
            block = self._read_block_cached(index)
            part = block[offset : offset + len(target) - copied]
            target[copied : copied + len(part)] = part
            copied += len(part)
        return tensor

    def like(self, name: str) -> Tensor:
        """Return a meta tensor with the shape and dtype of the named tensor, without reading it."""
        entry = self._entries[name]
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")


def is_gone(folder: Path) -> bool:
    """Return whether there is nothing at a checkpoint's path.

    A run that still trains may have removed it as an old checkpoint. A file or a broken link at this path is
    not gone: it is a damaged checkpoint.
    """
    return status(folder, follow=False) is None


def verify(folder: Path) -> None:
    """Check every byte of a checkpoint against its manifest, in constant memory.

    Raises:
        CheckpointDamaged: a file is damaged. The message names the file, and the expected and the
            actual digest, length or list of files.
    """
    for name, entry in read_manifest(folder).files.items():
        with _open_regular(folder / name, entry.bytes) as descriptor:
            digests = blocks.digests_of(descriptor, entry.bytes)
        _require_digests(folder / name, expected=entry.sha256, actual=digests)


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint into memory and verify it.

    The bytes in memory are verified, because a file might change after it was verified. A file of more than
    LARGE_BYTES is verified now, and each of its tensors is read and verified when it is requested, which may
    also raise CheckpointDamaged.

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
    """Return a checkpoint's update and state, without reading its tensors.

    Raises:
        CheckpointDamaged: the manifest or the state is damaged; see `verify`.
    """
    manifest = read_manifest(folder)
    return manifest.update, _load_state(folder / STATE, manifest.files[STATE])


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check what can be checked quickly.

    Checked are the manifest's digest, the folder's name, and the list and the lengths of the files.

    Raises:
        CheckpointDamaged: see `verify`.
    """
    path = folder / MANIFEST
    if not is_folder(folder):
        raise CheckpointDamaged(folder, expected="a folder", actual=kind_of(folder))
    with _open_regular(path) as descriptor:
        data = os.read(descriptor, min(os.fstat(descriptor).st_size, MAX_JSON_BYTES))
        present = sorted(os.listdir(folder))
    manifest = _parse_manifest(path, data)
    match = FOLDER_NAME.fullmatch(folder.name)
    if match and int(match[1]) != manifest.update:
        raise CheckpointDamaged(
            path,
            expected=f"update {int(match[1])} as in the folder's name",
            actual=f"update {manifest.update}",
        )
    expected = sorted([*manifest.files, MANIFEST])
    if present != expected:
        raise CheckpointDamaged(
            folder, expected=f"the files {', '.join(expected)}", actual=", ".join(present)
        )
    for name, entry in manifest.files.items():
        with _open_regular(folder / name, entry.bytes):
            pass  # opened only to check that it is a regular file of this length
    return manifest


def _parse_manifest(path: Path, data: bytes) -> Manifest:
    """Return the manifest that is encoded in the bytes of MANIFEST.json.

    Raises:
        CheckpointDamaged: the bytes are not those that `Manifest.encode` returns, or an entry has a
            wrong type.
    """
    try:
        content = parse_json(data)
        actual_format = f"format {content['format']} with blocks of {content['block_bytes']} bytes"
        expected_format = f"format {FORMAT} with blocks of {blocks.BLOCK_BYTES} bytes"
        if actual_format != expected_format:
            raise CheckpointDamaged(path, expected=expected_format, actual=actual_format)
        # The names are not taken from the manifest, because a forged one could name any file.
        files = {name: FileEntry(**content["files"][name]) for name in (MODEL, OPTIMIZER, STATE)}
        manifest = Manifest(run=content["run"], update=content["update"], files=files)
        recorded_root = content["root"]
        canonical = manifest.encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(
            path, expected="a manifest", actual=f"something else ({type(error).__name__}: {error})"
        ) from error
    if data != canonical:
        if manifest.root != recorded_root:
            actual = f"sha256 {manifest.root}"
        else:
            actual = "the same content spelled otherwise"
        raise CheckpointDamaged(path, expected=f"content of sha256 {recorded_root}", actual=actual)
    # The digest is right, but a forged manifest may have wrong entries and a matching digest.
    numbers = [manifest.update, *(entry.bytes for entry in files.values())]
    are_natural = all(type(number) is int and number >= 0 for number in numbers)
    are_lists = all(isinstance(entry.sha256, list) for entry in files.values())
    if not (are_natural and are_lists and isinstance(manifest.run, str)):
        raise CheckpointDamaged(
            path,
            expected="natural numbers, a text and lists of digests in their places",
            actual="something else",
        )
    return manifest


def _load_state(path: Path, entry: FileEntry) -> dict[str, Any]:
    """Read and verify state.json; raises CheckpointDamaged."""
    if entry.bytes > MAX_JSON_BYTES:
        raise CheckpointDamaged(
            path, expected=f"at most {MAX_JSON_BYTES} bytes", actual=f"{entry.bytes} bytes"
        )
    text = bytearray(entry.bytes)
    with _open_regular(path, entry.bytes) as descriptor:
        digests = blocks.read_pieces(descriptor, [memoryview(text)])  # this fills `text`
    _require_digests(path, entry.sha256, digests)
    try:
        return dict(parse_json(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(
            path, expected="a JSON object", actual=f"something else ({error})"
        ) from error


def _load_tensors(path: Path, entry: FileEntry) -> Mapping[str, Tensor]:
    """Verify a file of tensors, and read its tensors or, if it is large, only its header.

    Raises:
        CheckpointDamaged: the file is damaged.
    """
    is_large = entry.bytes > LARGE_BYTES
    with _open_regular(path, entry.bytes) as descriptor:
        if is_large:
            _require_digests(path, entry.sha256, blocks.digests_of(descriptor, entry.bytes))
        try:
            length_field = os.pread(descriptor, tensor_layout.LENGTH_BYTES, 0)
            prefix_bytes = tensor_layout.prefix_bytes(length_field, entry.bytes)
            prefix = os.pread(descriptor, prefix_bytes, 0)  # everything before the tensors
            if is_large:
                return LargeFile(
                    descriptor,
                    entries=tensor_layout.tensor_entries(prefix, entry.bytes),
                    start=len(prefix),
                    read=functools.partial(_read_block, path, entry),
                )
            tensors = tensor_layout.allocate(prefix, entry.bytes)  # `read_pieces` below fills them
        except tensor_layout.LayoutError as error:
            # The header was read before its digest was checked. A wrong digest is the better
            # explanation, so it is raised first.
            _require_digests(path, entry.sha256, blocks.digests_of(descriptor, entry.bytes))
            raise CheckpointDamaged(
                path, expected="a safetensors file", actual=str(error)
            ) from error
        verified_prefix = bytearray(len(prefix))
        pieces = [memoryview(verified_prefix), *map(tensor_layout.bytes_of, tensors.values())]
        digests = blocks.read_pieces(descriptor, pieces)
        _require_digests(path, entry.sha256, digests)
        # The shapes of `tensors` come from the first read of the header, before its verification.
        if verified_prefix != prefix:
            raise CheckpointDamaged(
                path, expected="the same header when read twice", actual="another one"
            )
    return tensors


def _read_block(path: Path, entry: FileEntry, descriptor: int, index: int) -> bytes:
    """Read one block of an open file, and verify it; raises CheckpointDamaged."""
    with readable(path):
        content = os.pread(descriptor, blocks.BLOCK_BYTES, index * blocks.BLOCK_BYTES)
    # The digests of all blocks are passed, with that of this block replaced, so that the message can say
    # which block of how many is damaged.
    expected = list(entry.sha256)
    actual = list(entry.sha256)
    actual[index] = hashlib.sha256(content).hexdigest()
    _require_digests(path, expected, actual)
    return content


@contextmanager
def _open_regular(path: Path, expected_bytes: int | None = None) -> Iterator[int]:
    """Open a regular file for reading during the `with` block, and yield its file descriptor.

    Args:
        path: the file; a symbolic link is refused.
        expected_bytes: the length that the file must have; None: any.

    Raises:
        CheckpointDamaged: the file is missing, not a regular file, or not of the expected length.
        Unreadable: the system failed to read the file, so its content is unknown.
    """
    try:
        with readable(path):
            # Without O_NONBLOCK, opening a pipe with this name would wait for a writer forever.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                entry = os.fstat(descriptor)
                if not stat.S_ISREG(entry.st_mode):
                    raise CheckpointDamaged(
                        path, expected="a regular file", actual=stat.filemode(entry.st_mode)
                    )
                if expected_bytes is not None and entry.st_size != expected_bytes:
                    raise CheckpointDamaged(
                        path, expected=f"{expected_bytes} bytes", actual=f"{entry.st_size} bytes"
                    )
                yield descriptor
            finally:
                os.close(descriptor)
    except OSError as error:
        obstacle = "a symbolic link" if error.errno == errno.ELOOP else f"'{error.strerror}'"
        raise CheckpointDamaged(path, expected="a readable file", actual=obstacle) from error


def _require_digests(path: Path, expected: list[str], actual: list[str]) -> None:
    """Require that the digests of all blocks are as expected; raises CheckpointDamaged."""
    for number, (expected_digest, actual_digest) in enumerate(zip_longest(expected, actual), 1):
        if expected_digest != actual_digest:
            where = f" in block {number} of {len(expected)}" if len(expected) > 1 else ""
            raise CheckpointDamaged(
                path, expected=f"sha256 {expected_digest}{where}", actual=f"sha256 {actual_digest}"
            )
