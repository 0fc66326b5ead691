"""Reads a file in bounded memory: its bytes in blocks, and UTF-8 text in parts.

The parts' tokens are the whole text's tokens. Bytes come as they are, or decompressed where a name ends in .gz or .zst.
"""

from __future__ import annotations

import os
import re
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


# Tokenizers work fastest on parts of about PART_CHARS, and take longer ones where there is no place to cut.
PART_CHARS, LONGEST_PART_CHARS = 1 << 12, 1 << 15

# Between a letter or digit and a space or line feed that a letter or digit follows. Every split pattern that
# `tokenizer_file` accepts ends a word there whatever stands further left or right, so a text cut there has the tokens
# of the uncut text.
_SAFE_CUT = re.compile(r"(?<=[^\W_])(?=[ \n][^\W_])")
_NEAR_END_CHARS = 2000


def status_of(path: Path) -> os.stat_result:
    """The size and times of a source file."""
    try:
        return os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from None


def cut_position(path: Path, wanted: int, size: int) -> int:
    """Where to cut a text file in two: after the first line feed from `wanted` on, else between two characters.

    Returns `size` where there is no such place (the file is one character long).
    """
    window = b"".join(_stretch(path, wanted, min(size, wanted + (1 << 16))))
    line_end = window.find(b"\n")
    if line_end >= 0 and wanted + line_end + 1 < size:
        return wanted + line_end + 1
    starts = (wanted + i for i, byte in enumerate(window[:8]) if byte & 0xC0 != 0x80 and wanted + i > 0)
    return next(starts, size)


def read_text(path: Path, start: int, stop: int) -> Iterator[tuple[str, int]]:
    """The text of bytes [start, stop) of a UTF-8 file, decompressed if it is compressed, in parts.

    Yields (part, bytes read so far in this range). Line ends and byte order marks are kept as they are. Parts end at a
    place where tokens end too, except in a stretch of `LONGEST_PART_CHARS` characters that has none (such as 32 Ki
    letters without a space): there one word is cut in two.

    Raises:
        InputRefused: not UTF-8 (names file, byte and line), shorter than `stop`, damaged, or not readable.
    """
    carry, done = "", 0
    for text, done in _decoded(path, start, stop):
        carry += text
        begin = 0
        while len(carry) - begin > LONGEST_PART_CHARS:
            end = begin + cut_for_tokens(carry[begin : begin + LONGEST_PART_CHARS + 1], PART_CHARS, LONGEST_PART_CHARS)
            yield carry[begin:end], done
            begin = end
        carry = carry[begin:]
    for part in parts_of(carry):
        yield part, done


def _decoded(path: Path, start: int, stop: int) -> Iterator[tuple[str, int]]:
    rest, offset = b"", start
    for block in _stretch(path, start, stop):
        data = rest + block
        try:
            text, rest = data.decode("utf-8"), b""
        except UnicodeDecodeError as error:
            cut_short = error.reason == "unexpected end of data" and offset + len(data) < stop
            if not cut_short:
                raise _not_utf8(path, offset + error.start, data[error.start]) from None
            text, rest = data[: error.start].decode("utf-8"), data[error.start :]
        offset += len(data) - len(rest)
        yield text, offset - start
    if offset < stop:
        raise InputRefused(f"{path}: became shorter while it was being read; run again when it no longer changes")


def _stretch(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Bytes [start, stop) of the content, in blocks, or what there is of them."""
    if path.suffix.lower() in COMPRESSIONS:
        place = 0
        for block in read_blocks(path):
            wanted = block[max(0, start - place) : max(0, stop - place)]
            place += len(block)
            if wanted:
                yield wanted
        return
    try:
        with open_input(path) as file:
            file.seek(start)
            while start < stop and (block := file.read(min(BLOCK_BYTES, stop - start))):
                start += len(block)
                yield block
    except OSError as error:
        raise unreadable(path, error) from None


def _not_utf8(path: Path, offset: int, byte: int) -> InputRefused:
    line = 1 + sum(block.count(b"\n") for block in _stretch(path, 0, offset))
    return InputRefused(
        f"{path}: byte {offset} (line {line}) is not UTF-8: 0x{byte:02x}; convert the file to UTF-8 or leave it out"
    )


def parts_of(text: str) -> Iterator[str]:
    """A text in the parts that `read_text` would give of it."""
    begin = 0
    while len(text) - begin > PART_CHARS:
        # One character more than a part may have: whether a cut is safe depends on what follows it.
        end = begin + cut_for_tokens(text[begin : begin + LONGEST_PART_CHARS + 1], PART_CHARS, LONGEST_PART_CHARS)
        yield text[begin:end]
        begin = end
    if begin < len(text):
        yield text[begin:]


def cut_for_tokens(text: str, wanted: int, longest: int) -> int:
    """Where to cut a text so that its tokens stay: the last such place up to `wanted`, else the first one after it.

    `longest`, or the end of the text, if there is none.
    """
    for low in (max(0, wanted - _NEAR_END_CHARS), 0):
        cuts = [match.start() for match in _SAFE_CUT.finditer(text, low, wanted) if match.start() > 0]
        if cuts:
            return cuts[-1]
    later = _SAFE_CUT.search(text, wanted)
    return min(later.start() if later else len(text), longest)
