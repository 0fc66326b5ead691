"""Read a file in bounded memory: its bytes in blocks, and UTF-8 text in parts.

The tokens of the parts are the tokens of the whole text. A file whose name ends in .gz or .zst is
decompressed.
"""

import importlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from monograph.data.progress import Meter
from monograph.errors import InputRefused
from monograph.extras import command_for
from monograph.storage.reading import open_input, refusing

T = TypeVar("T")
BLOCK_BYTES = 1 << 20
COMPRESSIONS = (".gz", ".zst")

_GZIP, _GZIP_MAGIC = 31, b"\x1f\x8b"  # zlib's number for gzip with its checksum and length verified
# A file that becomes larger than both 256 MiB and 200 times its size counts as a compression bomb.
# Text shrinks about five times, the most monotonous logs some hundred times; deflate's limit is
# 1032, and zstd has none.
LEAST_UNPACKED_BYTES = 1 << 28
MOST_UNPACKED = 200
# A zstd block of 4 bytes can stand for 128 KiB, so 1 KiB of input becomes at most 32 MiB.
_ZSTD_STEP_BYTES = 1 << 10


class Damaged(InputRefused):
    """A file is damaged, so that nothing read from it can be trusted, not even what came before the
    damage.
    """

    def __init__(
        self, path: Path, fault: str, remedy: str = "get the file again or leave it out"
    ) -> None:
        super().__init__(f"{path}: {fault}; {remedy}")
        self.fault = fault


def import_library(library: str, source: Path | str, extra: str) -> Any:
    """Import an optional library that reading a source needs.

    Raises:
        InputRefused: it is not installed.
    """
    try:
        return importlib.import_module(library)
    except ImportError:
        needs = f"reading it needs {library}, which is not installed"
        raise InputRefused(f"{source}: {needs}: {command_for(extra, library)}") from None


def raw_blocks(path: Path, meter: Meter | None = None) -> Iterator[bytes]:
    """Yield the raw bytes of a file in blocks of at most 1 MiB, counted by `meter`.

    Raises:
        Unreadable: the file cannot be read.
    """
    with refusing(path), open_input(path) as file:
        while block := file.read(BLOCK_BYTES):
            if meter is not None:
                meter.add(len(block))
            yield block


def read_blocks(path: Path, meter: Meter | None = None) -> Iterator[bytes]:
    """Yield the decompressed content in blocks of at most 1 MiB; `meter` counts the bytes on the
    disk.

    The blocks before damage are yielded before the error is raised, so use none of them before the
    end is reached.

    Raises:
        Damaged: the file is cut short, has a wrong checksum or bytes after its end, or is a
            compression bomb.
        Unreadable: the file cannot be read.
        InputRefused: zstandard is not installed.
    """
    raw = raw_blocks(path, meter)
    decode = {".gz": _gunzip, ".zst": _unzstd}.get(path.suffix.lower())
    yield from (
        raw
        if decode is None
        else refuse_bombs(path, ((len(block), block) for block in decode(path, raw)))
    )


def refuse_bombs(path: Path, parts: Iterable[tuple[int, T]]) -> Iterator[T]:
    """Yield the parts unpacked from a file, given as (size in bytes, part), while their total size
    is plausible.

    Raises:
        Damaged: the total is that of a compression bomb.
    """
    packed = path.stat().st_size
    total = 0
    for size, part in parts:
        total += size
        if total > max(LEAST_UNPACKED_BYTES, MOST_UNPACKED * packed):
            fault = f"is a compression bomb: {packed:,} bytes become {total:,} and more, {MOST_UNPACKED} times as many"
            raise Damaged(path, fault, "if all of it is meant, unpack it and give that")
        yield part


def _gunzip(path: Path, raw: Iterator[bytes]) -> Iterator[bytes]:
    member, begun = None, False
    for data in raw:
        more = False  # the decoder still holds output that did not fit
        while data or more:
            if member is None:
                # The format allows zeros after a member.
                data = data.lstrip(b"\0") if begun else data
                if not data:
                    break
                if data[:2] != _GZIP_MAGIC[: len(data)]:
                    raise Damaged(path, "has bytes after its end" if begun else "is not gzip")
                member = zlib.decompressobj(_GZIP)
                begun = True
            try:
                content = member.decompress(data, BLOCK_BYTES)
            except zlib.error as error:
                raise Damaged(path, f"is damaged ({error})") from None
            if content:
                yield content
            data = member.unconsumed_tail
            more = len(content) == BLOCK_BYTES
            if member.eof:
                data = member.unused_data
                more = False
                member = None
    if member is not None:
        raise Damaged(path, "is cut short: it ends inside a gzip member")


def _unzstd(path: Path, raw: Iterator[bytes]) -> Iterator[bytes]:
    zstandard = import_library("zstandard", path, "zstd")
    decoder = zstandard.ZstdDecompressor()
    frame = None
    for block in raw:
        for begin in range(0, len(block), _ZSTD_STEP_BYTES):
            data = block[begin : begin + _ZSTD_STEP_BYTES]
            while data:
                frame = frame or decoder.decompressobj()
                try:
                    content = frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise Damaged(path, f"is damaged ({error})") from None
                yield from (
                    content[place : place + BLOCK_BYTES]
                    for place in range(0, len(content), BLOCK_BYTES)
                )
                data = b""
                if frame.eof:
                    data = frame.unused_data
                    frame = None
    if frame is not None:
        raise Damaged(path, "is cut short: it ends inside a zstd frame")


# Tokenizers are fastest on parts of about PART_CHARS characters; a part is longer where there is no
# place to cut.
PART_CHARS, LONGEST_PART_CHARS = 1 << 12, 1 << 15

# The place after a letter or digit and before a space or line feed that another letter or digit
# follows. All split patterns that `tokenizer_file` accepts end a word there, independent of the
# text further left and right, so a text cut there has the tokens of the uncut text.
_SAFE_CUT = re.compile(r"(?<=[^\W_])(?=[ \n][^\W_])")
_NEAR_END_CHARS = 2000


def status_of(path: Path) -> os.stat_result:
    """Return a source file's `os.stat`; raise the errors of `unreadable`."""
    with refusing(path):
        return os.stat(path)


def cut_position(path: Path, wanted: int, size: int) -> int:
    """Return the byte at which to cut a text file in two: after the first line feed from `wanted`
    on in 64 KiB.

    Without a line feed there, it is the next place between two characters; in a file of one
    character, it is `size`.
    """
    window = b"".join(_stretch(path, wanted, min(size, wanted + (1 << 16))))
    if (line_end := window.find(b"\n")) >= 0 and wanted + line_end + 1 < size:
        return wanted + line_end + 1
    starts = (
        wanted + i for i, byte in enumerate(window[:8]) if byte & 0xC0 != 0x80 and wanted + i > 0
    )
    return next(starts, size)


def read_text(path: Path, start: int, stop: int) -> Iterator[tuple[str, int]]:
    """Yield (part of the text, bytes read so far) of bytes [start, stop) of a UTF-8 file.

    The range counts decompressed bytes. Line ends and byte order marks are kept. Parts end where
    tokens end, too, except in a stretch of `LONGEST_PART_CHARS` characters without such a place (32
    Ki letters without a space, say), which is cut inside a word.

    Raises:
        InputRefused: the file is not UTF-8 (the message names file, byte and line), shorter than
            `stop`, damaged, or not readable.
    """
    rest, done = "", 0
    for text, done in _decoded(path, start, stop):
        *parts, rest = _cut(rest + text, LONGEST_PART_CHARS)
        yield from ((part, done) for part in parts)
    yield from ((part, done) for part in parts_of(rest))


def _decoded(path: Path, start: int, stop: int) -> Iterator[tuple[str, int]]:
    rest = b""
    offset = start
    for block in _stretch(path, start, stop):
        data = rest + block
        try:
            text = data.decode("utf-8")
            rest = b""
        except UnicodeDecodeError as error:
            cut_short = error.reason == "unexpected end of data" and offset + len(data) < stop
            if not cut_short:
                raise _not_utf8(path, offset + error.start, data[error.start]) from None
            text = data[: error.start].decode("utf-8")
            rest = data[error.start :]
        offset += len(data) - len(rest)
        yield text, offset - start
    if offset < stop:
        raise InputRefused(
            f"{path}: became shorter while it was being read; run again when it no longer changes"
        )


def _stretch(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yield bytes [start, stop) of the decompressed content in blocks, or as many of them as exist."""
    if path.suffix.lower() in COMPRESSIONS:
        place = 0
        for block in read_blocks(path):
            wanted = block[max(0, start - place) : max(0, stop - place)]
            place += len(block)
            if wanted:
                yield wanted
        return
    with refusing(path), open_input(path) as file:
        file.seek(start)
        while start < stop and (block := file.read(min(BLOCK_BYTES, stop - start))):
            start += len(block)
            yield block


def _not_utf8(path: Path, offset: int, byte: int) -> InputRefused:
    line = 1 + sum(block.count(b"\n") for block in _stretch(path, 0, offset))
    fault = f"byte {offset} (line {line}) is not UTF-8: 0x{byte:02x}"
    return InputRefused(f"{path}: {fault}; convert the file to UTF-8 or leave it out")


def parts_of(text: str) -> Iterator[str]:
    """Yield a text in the parts in which `read_text` would yield it."""
    return filter(None, _cut(text, PART_CHARS))


def _cut(text: str, longest_rest: int) -> Iterator[str]:
    """Yield parts of a text, and as the last item the rest, which has at most `longest_rest`
    characters or none.
    """
    begin = 0
    while len(text) - begin > longest_rest:
        # The slice has one character more than a part may have, since that one decides whether a
        # cut is safe.
        end = begin + cut_for_tokens(
            text[begin : begin + LONGEST_PART_CHARS + 1], PART_CHARS, LONGEST_PART_CHARS
        )
        yield text[begin:end]
        begin = end
    yield text[begin:]


def cut_for_tokens(text: str, wanted: int, longest: int) -> int:
    """Return where to cut a text without changing its tokens: the last such index below `wanted`,
    else the next one.

    If there is none up to `longest`, it is `longest` or the end of the text.
    """
    for low in (max(0, wanted - _NEAR_END_CHARS), 0):
        if cuts := [
            match.start() for match in _SAFE_CUT.finditer(text, low, wanted) if match.start() > 0
        ]:
            return cuts[-1]
    later = _SAFE_CUT.search(text, wanted)
    return min(later.start() if later else len(text), longest)
