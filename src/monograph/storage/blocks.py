"""Read and write whole files in blocks of 64 MiB, and compute each block's SHA-256 in threads.

A piece is any part of a file's content, in memory. A block is a list of pieces that together have
BLOCK_BYTES. The last block of a file may be shorter.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

BLOCK_BYTES = 64 * 1024 * 1024
# One thread computes SHA-256 (0.3 to 2 GB/s) more slowly than a disk reads. Several threads run in parallel,
# because hashlib releases the GIL.
HASH_THREADS = min(8, os.cpu_count() or 1)
_MAX_PIECES = os.sysconf("SC_IOV_MAX")  # the most that one call of os.preadv or os.pwritev takes

FileBlock = list[memoryview]


def group_into_blocks(pieces: Iterable[memoryview]) -> Iterator[FileBlock]:
    """Group pieces of any length into blocks. Pieces are cut where a block ends, but not copied."""
    block: FileBlock = []
    room = BLOCK_BYTES
    for piece in pieces:
        rest = piece
        while len(rest):
            block.append(rest[:room])
            rest = rest[room:]
            room -= len(block[-1])
            if room == 0:
                yield block
                block = []
                room = BLOCK_BYTES
    if block:
        yield block


def write_file(path: Path, pieces: Iterable[memoryview]) -> list[str]:
    """Create a file from its pieces, and make its content durable.

    Returns:
        The SHA-256 digest of each block.

    Raises:
        OSError: the file exists, or cannot be written; `filename` is the path.
    """
    try:
        with open(path, "xb", buffering=0) as file:

            def write_blocks() -> Iterator[FileBlock]:
                for index, block in enumerate(group_into_blocks(pieces)):
                    _transfer(os.pwritev, file.fileno(), block, index * BLOCK_BYTES)
                    yield block

            digests = _digests(write_blocks())
            # A failed fsync is not retried. The kernel may have dropped the pages that it could not
            # write, and a second fsync would then succeed (PostgreSQL's "fsyncgate", 2018).
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)
        raise
    return digests


def read_pieces(descriptor: int, pieces: Iterable[memoryview]) -> list[str]:
    """Fill the pieces with the content of an open file, from its beginning.

    Returns:
        The digest of each block, computed from the bytes in memory.
    """

    def fill(index: int, block: FileBlock) -> None:
        _transfer(os.preadv, descriptor, block, index * BLOCK_BYTES)

    return _digests(group_into_blocks(pieces), fill)


def digests_of(descriptor: int, length: int) -> list[str]:
    """Return the hex digest of each block in the first `length` bytes of an open file.

    Only a few blocks are in memory at a time.
    """
    lengths = (min(BLOCK_BYTES, length - start) for start in range(0, length, BLOCK_BYTES))
    return read_pieces(descriptor, (memoryview(bytearray(size)) for size in lengths))


def write_at(descriptor: int, piece: memoryview, start: int) -> None:
    """Write a piece into an open file at byte `start`."""
    if len(piece):
        _transfer(os.pwritev, descriptor, [piece], start)


def digest_at(descriptor: int, index: int, length: int) -> bytes:
    """Return the SHA-256 of a block of an open file, as 32 bytes.

    Args:
        descriptor: the file descriptor.
        index: the block's index.
        length: the length of the whole file in bytes.
    """
    block = memoryview(bytearray(min(BLOCK_BYTES, length - index * BLOCK_BYTES)))
    _transfer(os.preadv, descriptor, [block], index * BLOCK_BYTES)
    return hashlib.sha256(block).digest()


def _digests(
    blocks: Iterable[FileBlock], fill: Callable[[int, FileBlock], None] | None = None
) -> list[str]:
    """Return the hex digest of each block.

    Args:
        blocks: the blocks. Their generator runs in this thread.
        fill: a function that gets a block's index and the block, and fills it. It is called in the
            thread that then computes the digest. None: the blocks are already filled.
    """

    def digest(index: int, block: FileBlock) -> str:
        if fill is not None:
            fill(index, block)
        sha256 = hashlib.sha256()
        for piece in block:
            sha256.update(piece)
        return sha256.hexdigest()

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        pending: list[Future[str]] = []
        for index, block in enumerate(blocks):
            pending.append(pool.submit(digest, index, block))
            # Wait for an earlier block, so that only a few blocks are in memory. A block may be a copy
            # of a strided tensor, or of a tensor on a device.
            if index >= HASH_THREADS:
                pending[index - HASH_THREADS].result()
        return [future.result() for future in pending]


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    descriptor: int,
    block: FileBlock,
    start: int,
) -> None:
    """Write or read a whole block.

    Args:
        call: os.pwritev or os.preadv; one call may move only a part of the block.
        descriptor: the file descriptor.
        block: the block.
        start: the block's offset in the file.

    Raises:
        OSError: the call failed, or the file ends before the block.
    """
    pieces = list(block)
    offset = start
    while pieces:
        moved = call(descriptor, pieces[:_MAX_PIECES], offset)
        if moved == 0:
            raise OSError(errno.EIO, "the file ended early")
        offset += moved
        moved_pieces = 0  # number of pieces that have moved entirely
        while moved_pieces < len(pieces) and moved >= len(pieces[moved_pieces]):
            moved -= len(pieces[moved_pieces])
            moved_pieces += 1
        del pieces[:moved_pieces]
        if moved:  # The rest are bytes of the first piece that has not moved entirely.
            pieces[0] = pieces[0][moved:]
