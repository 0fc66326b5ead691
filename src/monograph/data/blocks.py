"""The bytes of a file in bounded memory: as they are, or decompressed where its name ends in .gz or .zst."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from monograph.data.progress import Meter
from monograph.errors import InputRefused
from monograph.storage.reading import open_input, unreadable

T = TypeVar("T")
BLOCK_BYTES = 1 << 20
COMPRESSIONS = (".gz", ".zst")

_GZIP, _GZIP_MAGIC = 31, b"\x1f\x8b"  # zlib's number for gzip with its checksum and length verified
# Text becomes five times smaller, and the most monotonous logs some hundred times. Deflate's limit is 1032 and zstd has
# none, so whoever means more unpacks it, when a disk has said yes to all of it.
LEAST_UNPACKED_BYTES, MOST_UNPACKED = 1 << 28, 200
# A zstd block of 4 bytes stands for up to 128 KiB, so this much makes at most 32 MiB.
_ZSTD_STEP_BYTES = 1 << 10


class Damaged(InputRefused):
    """A file that cannot be trusted as a whole, whatever could be read of it before."""

    def __init__(self, path: Path, fault: str, remedy: str = "get the file again or leave it out") -> None:
        super().__init__(f"{path}: {fault}; {remedy}")
        self.fault = fault


def missing(source: Path | str, library: str, extra: str) -> InputRefused:
    """The error to raise for a source that an optional library reads, which is not installed."""
    return InputRefused(
        f"{source}: reading it needs {library}, which is not installed: pip install 'monograph[{extra}]'"
    )


def raw_blocks(path: Path, meter: Meter | None = None) -> Iterator[bytes]:
    """The bytes of a file as they lie there, in blocks of 1 MiB at most, counted by `meter`.

    Raises:
        Unreadable: not readable.
    """
    try:
        with open_input(path) as file:
            while block := file.read(BLOCK_BYTES):
                if meter is not None:
                    meter.add(len(block))
                yield block
    except OSError as error:
        raise unreadable(path, error) from None


def read_blocks(path: Path, meter: Meter | None = None) -> Iterator[bytes]:
    """The content in blocks of 1 MiB at most; `meter` counts the bytes on the disk.

    What comes before damage is yielded before the error: nothing of it may be used until the end was reached.

    Raises:
        Damaged: cut short, a wrong checksum, bytes after the end that belong to nothing, or a compression bomb.
        Unreadable: not readable.
        InputRefused: zstandard is not installed.
    """
    raw = raw_blocks(path, meter)
    decode = {".gz": _gunzip, ".zst": _unzstd}.get(path.suffix.lower())
    yield from raw if decode is None else unpacked(path, ((len(block), block) for block in decode(path, raw)))


def unpacked(path: Path, parts: Iterable[tuple[int, T]]) -> Iterator[T]:
    """The parts of what was packed in a file, given as (bytes, part), as long as their sum is no compression bomb's.

    Raises:
        Damaged: it is.
    """
    packed, total = path.stat().st_size, 0
    for size, part in parts:
        total += size
        if total > max(LEAST_UNPACKED_BYTES, MOST_UNPACKED * packed):
            fault = f"is a compression bomb: {packed:,} bytes become {total:,} and more, {MOST_UNPACKED} times as many"
            raise Damaged(path, fault, "if all of it is meant, unpack it and give that")
        yield part


def _gunzip(path: Path, raw: Iterator[bytes]) -> Iterator[bytes]:
    member, begun = None, False
    for data in raw:
        more = False  # the decoder holds output for which there was no room
        while data or more:
            if member is None:
                data = data.lstrip(b"\0") if begun else data  # the format allows zeros after a member
                if not data:
                    break
                if data[:2] != _GZIP_MAGIC[: len(data)]:
                    raise Damaged(path, "has bytes after its end" if begun else "is not gzip")
                member, begun = zlib.decompressobj(_GZIP), True
            try:
                content = member.decompress(data, BLOCK_BYTES)
            except zlib.error as error:
                raise Damaged(path, f"is damaged ({error})") from None
            if content:
                yield content
            data, more = member.unconsumed_tail, len(content) == BLOCK_BYTES
            if member.eof:
                data, more, member = member.unused_data, False, None
    if member is not None:
        raise Damaged(path, "is cut short: it ends inside a gzip member")


def _unzstd(path: Path, raw: Iterator[bytes]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise missing(path, "zstandard", "zstd") from None
    decoder, frame = zstandard.ZstdDecompressor(), None
    for block in raw:
        for begin in range(0, len(block), _ZSTD_STEP_BYTES):
            data = block[begin : begin + _ZSTD_STEP_BYTES]
            while data:
                frame = frame or decoder.decompressobj()
                try:
                    content = frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise Damaged(path, f"is damaged ({error})") from None
                for place in range(0, len(content), BLOCK_BYTES):
                    yield content[place : place + BLOCK_BYTES]
                data = b""
                if frame.eof:
                    data, frame = frame.unused_data, None
    if frame is not None:
        raise Damaged(path, "is cut short: it ends inside a zstd frame")
