"""Store flat arrays in memory-mapped files with checksums: the tokens of a split, and their index.

Layout: a 128-byte header (magic, version, item size, vocabulary, count, block size, the tokenizer's sha256, and the
crc32 of these), `count` unsigned integers in little-endian order, then one crc32 per 1 MiB block of the integers. The
format is our own because numpy reads a damaged or shortened .npy file without a warning.
"""

import hashlib
import os
import struct
import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from monograph.data.progress import Meter
from monograph.errors import InputRefused
from monograph.storage.reading import open_input, readable

_MAGIC, _VERSION = b"MONOGRPH", 1
_HEADER = struct.Struct("<8sIIQQQ32s")
_HEADER_BYTES = 128
BLOCK_BYTES = 1 << 20
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest dtype for all ids: uint16 up to 65,536 entries, else uint32."""
    return _DTYPES[2 if vocab_size <= 1 << 16 else 4]


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """A piecewise writer of one array; the file is complete and durable once the `with` block ends without an error.

    Args:
        path: a file that does not exist yet.
        dtype: the items' dtype.
        vocab_size: V of the tokenizer; 0 for an index.
        tokenizer_hash: hex sha256 of the tokenizer that the file belongs to.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], vocab_size: int, tokenizer_hash: str) -> None:
        self.count = 0
        self._dtype, self._vocab_size, self._tokenizer_hash = dtype, vocab_size, bytes.fromhex(tokenizer_hash)
        self._pending, self._checksums = bytearray(), bytearray()
        self._file = open(path, "xb")
        self._file.write(bytes(_HEADER_BYTES))

    def append(self, items: NDArray[Any]) -> None:
        """Add items at the end."""
        self.count += len(items)
        self._pending += items.astype(self._dtype).tobytes()
        while len(self._pending) >= BLOCK_BYTES:
            self._write_block(BLOCK_BYTES)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Complete the file, or only close it after an error."""
        with self._file:
            if kind is None:
                if self._pending:
                    self._write_block(len(self._pending))
                self._file.write(self._checksums)
                self._file.seek(0)
                self._file.write(self._header())
                self._file.flush()
                os.fsync(self._file.fileno())

    def _write_block(self, size: int) -> None:
        block = bytes(self._pending[:size])
        del self._pending[:size]
        self._checksums += struct.pack("<I", zlib.crc32(block))
        self._file.write(block)

    def _header(self) -> bytes:
        sizes = (self._dtype.itemsize, self._vocab_size, self.count, BLOCK_BYTES)
        header = _HEADER.pack(_MAGIC, _VERSION, *sizes, self._tokenizer_hash).ljust(_HEADER_BYTES - 4, b"\0")
        return header + struct.pack("<I", zlib.crc32(header))


@dataclass(frozen=True)
class _Frame:
    """The header and checksums of a shard."""

    itemsize: int
    count: int
    block_bytes: int
    tokenizer_sha256: bytes
    checksums: tuple[int, ...]
    seal: str


def seal(path: Path) -> str:
    """Return the hex sha256 of a shard's header and checksums: cheap to read, and another for other content."""
    with readable(path), open_input(path) as file:
        return _frame(file, path).seal


def open_shard(path: Path, tokenizer_hash: str, expected_seal: str, meter: Meter | None = None) -> NDArray[Any]:
    """Map an array read-only, after checking every byte of it (about 1 s per GB).

    Raises:
        InputRefused: the file is missing, damaged (the message names the first bad block), of an unexpected size, made
            with another tokenizer, or has another `seal`.
    """
    try:
        with readable(path), open_input(path) as file:
            frame = _frame(file, path)
            if frame.tokenizer_sha256 != bytes.fromhex(tokenizer_hash):
                raise InputRefused(f"{path}: was made with another tokenizer")
            if frame.seal != expected_seal:
                raise InputRefused(f"{path}: is damaged, or not the file that manifest.json lists")
            left = frame.count * frame.itemsize
            file.seek(_HEADER_BYTES)
            for number, checksum in enumerate(frame.checksums, 1):
                block = file.read(min(frame.block_bytes, left))
                if zlib.crc32(block) != checksum:
                    raise InputRefused(f"{path}: block {number} of {len(frame.checksums)} is damaged (wrong checksum)")
                left -= len(block)
                if meter is not None:
                    meter.add(len(block))
        if frame.count == 0:  # nothing to map
            return np.empty(0, _DTYPES[frame.itemsize])
        with readable(path):
            return np.asarray(np.memmap(path, _DTYPES[frame.itemsize], "r", _HEADER_BYTES, (frame.count,)))
    except OSError as error:
        raise InputRefused(f"{path}: cannot be read ({error.strerror})") from None


def _frame(file: BinaryIO, path: Path) -> _Frame:
    header = file.read(_HEADER_BYTES)
    if len(header) != _HEADER_BYTES or struct.unpack("<I", header[-4:])[0] != zlib.crc32(header[:-4]):
        raise InputRefused(f"{path}: its header is damaged or it is not a shard of Monograph's")
    magic, version, itemsize, _, count, block_bytes, sha256 = _HEADER.unpack_from(header)
    if (magic, version) != (_MAGIC, _VERSION) or itemsize not in _DTYPES or not block_bytes:
        raise InputRefused(f"{path}: is not a version {_VERSION} shard of Monograph's")
    payload = count * itemsize
    blocks = -(-payload // block_bytes)
    expected, actual = _HEADER_BYTES + payload + 4 * blocks, os.fstat(file.fileno()).st_size
    if actual != expected:
        raise InputRefused(f"{path}: is {actual:,} bytes, not the {expected:,} of its header; it was cut or added to")
    file.seek(_HEADER_BYTES + payload)
    checksums = file.read()
    digest = hashlib.sha256(header + checksums).hexdigest()
    return _Frame(itemsize, count, block_bytes, sha256, struct.unpack(f"<{blocks}I", checksums), digest)
