"""Store flat arrays in memory-mapped files with checksums.

The arrays are the tokens of a tokenised text, and its indices, such as where each document starts. A
file with an array is a *shard*. It has unsigned integers in little-endian order, and then one crc32 for
each 1 MiB of the integers. It is not a .npy file, because numpy reads a damaged or shortened .npy file
without a warning. The manifest.json of a corpus has the `seal` of each shard: a hash of its checksums.
"""

import hashlib
import os
import struct
import zlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from monograph.data.progress import Meter
from monograph.errors import InputRefused
from monograph.storage.reading import open_input, readable

BLOCK_BYTES = 1 << 20
_CHECKSUM = struct.Struct("<I")
# The dtype of all shards but those of tokens.
INDEX_DTYPE: np.dtype[Any] = np.dtype("<u8")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest dtype for all ids: uint16 up to 65,536 entries, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """A writer of one shard, which is given the array piece by piece.

    The file is complete and synced after the `with` block, unless the block raises an error.

    Args:
        path: a file that does not exist yet.
        dtype: the items' dtype.

    Attributes:
        count: the number of items so far.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.count = 0
        self._dtype = dtype
        self._pending = bytearray()  # bytes of items that do not fill a block yet
        self._checksums = bytearray()
        self._file = open(path, "xb")

    def append(self, items: NDArray[Any]) -> None:
        """Add items at the end."""
        self.count += len(items)
        self._pending += items.astype(self._dtype).tobytes()
        while len(self._pending) >= BLOCK_BYTES:
            self._write_block(BLOCK_BYTES)

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Complete the file, or only close it after an error."""
        with self._file:
            if error_type is None:
                if self._pending:
                    self._write_block(len(self._pending))
                self._file.write(self._checksums)
                self._file.flush()
                os.fsync(self._file.fileno())

    def _write_block(self, size: int) -> None:
        block = bytes(self._pending[:size])
        del self._pending[:size]
        self._checksums += _CHECKSUM.pack(zlib.crc32(block))
        self._file.write(block)


def seal(path: Path) -> str:
    """Return the hex sha256 of a shard's checksums.

    This hash identifies the content of the shard, but is much faster to compute than a hash of the
    content itself.
    """
    with readable(path), open_input(path) as file:
        _, checksums = _size_and_checksums(file)
        return hashlib.sha256(checksums).hexdigest()


def open_shard(
    path: Path, dtype: np.dtype[Any], expected_seal: str, meter: Meter | None = None
) -> NDArray[Any]:
    """Map the array of a shard read-only, after checking every byte (about 1 s per GB).

    Args:
        path: the file.
        dtype: the items' dtype.
        expected_seal: the `seal` of the file.
        meter: counts the bytes that are checked; None: nothing is reported.

    Raises:
        InputRefused: the file is missing or damaged, or has another `seal`. The message has the
            first damaged block.
    """
    try:
        with readable(path), open_input(path) as file:
            items_bytes, checksums = _size_and_checksums(file)
            is_shortened = len(checksums) % _CHECKSUM.size != 0
            if is_shortened or hashlib.sha256(checksums).hexdigest() != expected_seal:
                raise InputRefused(f"{path}: is damaged, or not the file that manifest.json lists")
            file.seek(0)
            blocks = len(checksums) // _CHECKSUM.size
            left_bytes = items_bytes
            for number, (checksum,) in enumerate(_CHECKSUM.iter_unpack(checksums), 1):
                block = file.read(min(BLOCK_BYTES, left_bytes))
                if zlib.crc32(block) != checksum:
                    raise InputRefused(
                        f"{path}: block {number} of {blocks} is damaged (wrong checksum)"
                    )
                left_bytes -= len(block)
                if meter is not None:
                    meter.add(len(block))
        count = items_bytes // dtype.itemsize
        if count == 0:
            # An empty file cannot be mapped.
            return np.empty(0, dtype)
        with readable(path):
            return np.asarray(np.memmap(path, dtype, "r", shape=(count,)))
    except OSError as error:
        raise InputRefused(f"{path}: cannot be read ({error.strerror})") from None


def _size_and_checksums(file: BinaryIO) -> tuple[int, bytes]:
    """Return (bytes of the items, the checksums after them) of a shard.

    The number of bytes follows from the file's size, because each block of items has one checksum.
    """
    file_bytes = os.fstat(file.fileno()).st_size
    blocks = -(-file_bytes // (BLOCK_BYTES + _CHECKSUM.size))  # rounded up
    items_bytes = max(0, file_bytes - _CHECKSUM.size * blocks)
    file.seek(items_bytes)
    return items_bytes, file.read()
