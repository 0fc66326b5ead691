"""Move whole files between memory and disk in blocks of 64 MiB, and compute each block's SHA-256
digest in threads.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

# One thread computes SHA-256 (0.3 to 2 GB/s, by processor) more slowly than a disk reads; hashlib
# releases the GIL.
BLOCK_BYTES = 64 * 1024 * 1024
HASH_THREADS = min(8, os.cpu_count() or 1)
MOST_PIECES = os.sysconf("SC_IOV_MAX")

Block = list[memoryview]


def in_blocks(pieces: Iterable[memoryview]) -> Iterator[Block]:
    """Regroup pieces of any length, without copying, into blocks of exactly BLOCK_BYTES (the last
    may be shorter).
    """
    block: Block = []
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
    """Create the file from its pieces and make its content durable.

    Returns:
        The SHA-256 digest of each block of BLOCK_BYTES.

    Raises:
        OSError: with the path; also if the file exists. A failed fsync is never retried: the kernel
            may have dropped the pages that it could not write, so that a second fsync would succeed
            and prove nothing (PostgreSQL's "fsyncgate", 2018).
    """
    try:
        with open(path, "xb", buffering=0) as file:

            def written() -> Iterator[Block]:
                for index, block in enumerate(in_blocks(pieces)):
                    _transfer(os.pwritev, file.fileno(), block, index * BLOCK_BYTES)
                    yield block

            digests = _digests(written())
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)
        raise
    return digests


def read_pieces(descriptor: int, pieces: Iterable[memoryview]) -> list[str]:
    """Fill the pieces from the file's start, and return the digest of each block of the bytes now
    in the pieces.
    """
    return _digests(
        in_blocks(pieces),
        lambda at, block: _transfer(os.preadv, descriptor, block, at * BLOCK_BYTES),
    )


def digests_of(descriptor: int, length: int) -> list[str]:
    """Return the digest of each block of the file's first `length` bytes, with a few blocks in
    memory at a time.
    """
    lengths = (min(BLOCK_BYTES, length - start) for start in range(0, length, BLOCK_BYTES))
    return read_pieces(descriptor, (memoryview(bytearray(size)) for size in lengths))


def write_at(descriptor: int, piece: memoryview, start: int) -> None:
    """Write a piece into an open file at byte `start`."""
    if len(piece):
        _transfer(os.pwritev, descriptor, [piece], start)


def digest_at(descriptor: int, index: int, length: int) -> bytes:
    """Return the SHA-256 digest of one block of a file of `length` bytes, in binary."""
    block = memoryview(bytearray(min(BLOCK_BYTES, length - index * BLOCK_BYTES)))
    _transfer(os.preadv, descriptor, [block], index * BLOCK_BYTES)
    return hashlib.sha256(block).digest()


def _digests(
    blocks: Iterable[Block], fill: Callable[[int, Block], None] | None = None
) -> list[str]:
    def digest(index: int, block: Block) -> str:
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
            # A block may be a copy (from a device, or of a strided view), so keep only a few in
            # memory.
            if index >= HASH_THREADS:
                pending[index - HASH_THREADS].result()
        return [future.result() for future in pending]


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int], descriptor: int, block: Block, start: int
) -> None:
    """Repeat `os.pwritev` or `os.preadv`, which may move only a part of the block, until all of it
    has moved.
    """
    pieces = list(block)
    offset = start
    while pieces:
        moved = call(descriptor, pieces[:MOST_PIECES], offset)
        if moved == 0:
            raise OSError(errno.EIO, "the file ended early")
        offset += moved
        whole = 0
        while whole < len(pieces) and moved >= len(pieces[whole]):
            moved -= len(pieces[whole])
            whole += 1
        del pieces[:whole]
        if moved:
            pieces[0] = pieces[0][moved:]
