"""Read a file in bounded memory: its bytes in blocks, and its UTF-8 text in parts.

Parts are cut such that their tokens, one part after the other, are the tokens of the whole text. A
file whose name ends in .gz or .zst is decompressed.
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

# zlib's `wbits` for the format gzip: zlib then verifies the checksum and the length.
_GZIP = 31
_GZIP_MAGIC = b"\x1f\x8b"
# A file that becomes larger than both 256 MiB and 200 times its size counts as a compression bomb.
# Text is compressed about 5 times, and very monotonous logs about 100 times. Deflate can compress
# up to 1032 times, and zstd without limit.
LEAST_UNPACKED_BYTES = 1 << 28
MOST_UNPACKED = 200
# Bytes that are given to zstd at a time. A zstd block of 4 bytes can stand for 128 KiB, so 1 KiB of
# input becomes at most 32 MiB.
_ZSTD_STEP_BYTES = 1 << 10


class Damaged(InputRefused):
    """A file is damaged.

    Nothing that was read from it can be trusted, not even what came before the damage.

    Attributes:
        fault: what is wrong with the file.
    """

    def __init__(
        self, path: Path, fault: str, remedy: str = "get the file again or leave it out"
    ) -> None:
        super().__init__(f"{path}: {fault}; {remedy}")
        self.fault = fault


def import_library(library: str, source: Path | str, extra: str) -> Any:
    """Import an optional library that is needed to read a source.

    Args:
        library: the library's name.
        source: what is to be read, for the error.
        extra: the extra of Monograph that installs the library.

    Raises:
        InputRefused: the library is not installed.
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
    """Yield the decompressed content of a file in blocks of at most 1 MiB.

    Damage is noticed only when it is reached, after the blocks before it have been yielded. So use
    no block before the end is reached.

    Args:
        path: the file.
        meter: counts the bytes on the disk; None: nothing is reported.

    Raises:
        Damaged: the file is cut short, has a wrong checksum or bytes after its end, or is a
            compression bomb.
        Unreadable: the file cannot be read.
        InputRefused: zstandard is not installed.
    """
    raw = raw_blocks(path, meter)
    suffix = path.suffix.lower()
    if suffix == ".gz":
        blocks = _gunzip(path, raw)
    elif suffix == ".zst":
        blocks = _unzstd(path, raw)
    else:
        yield from raw
        return
    yield from refuse_bombs(path, ((len(block), block) for block in blocks))


def refuse_bombs(path: Path, parts: Iterable[tuple[int, T]]) -> Iterator[T]:
    """Yield the parts that were unpacked from a file, unless it is a compression bomb.

    Args:
        path: the packed file.
        parts: (size in bytes, part) of each part.

    Raises:
        Damaged: the parts so far are so large that the file is a compression bomb.
    """
    packed_bytes = path.stat().st_size
    unpacked_bytes = 0
    for size, part in parts:
        unpacked_bytes += size
        if unpacked_bytes > max(LEAST_UNPACKED_BYTES, MOST_UNPACKED * packed_bytes):
            fault = (
                f"is a compression bomb: {packed_bytes:,} bytes become {unpacked_bytes:,} and more, "
                f"{MOST_UNPACKED} times as many"
            )
            raise Damaged(path, fault, "if all of it is meant, unpack it and give that")
        yield part


def _gunzip(path: Path, raw: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the content of a gzip file, which is one or more members, in blocks of at most 1
    MiB.
    """
    decoder = None  # of the current member; None between members
    has_begun = False  # whether the first member has begun
    for data in raw:
        holds_output = False  # whether the decoder has output that did not fit into the last block
        while data or holds_output:
            if decoder is None:
                if has_begun:
                    # The format allows zeros after a member.
                    data = data.lstrip(b"\0")
                if not data:
                    break
                # A block may end after the first byte of the magic.
                if data[:2] != _GZIP_MAGIC[: len(data)]:
                    fault = "has bytes after its end" if has_begun else "is not gzip"
                    raise Damaged(path, fault)
                decoder = zlib.decompressobj(_GZIP)
                has_begun = True
            try:
                content = decoder.decompress(data, BLOCK_BYTES)
            except zlib.error as error:
                raise Damaged(path, f"is damaged ({error})") from None
            if content:
                yield content
            if decoder.eof:
                data = decoder.unused_data
                holds_output = False
                decoder = None
            else:
                data = decoder.unconsumed_tail
                holds_output = len(content) == BLOCK_BYTES
    if decoder is not None:
        raise Damaged(path, "is cut short: it ends inside a gzip member")


def _unzstd(path: Path, raw: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the content of a zstd file, which is one or more frames, in blocks of at most 1 MiB."""
    zstandard = import_library("zstandard", path, "zstd")
    decompressor = zstandard.ZstdDecompressor()
    decoder = None  # of the current frame; None between frames
    for block in raw:
        for begin in range(0, len(block), _ZSTD_STEP_BYTES):
            data = block[begin : begin + _ZSTD_STEP_BYTES]
            while data:
                decoder = decoder or decompressor.decompressobj()
                try:
                    content = decoder.decompress(data)
                except zstandard.ZstdError as error:
                    raise Damaged(path, f"is damaged ({error})") from None
                for offset in range(0, len(content), BLOCK_BYTES):
                    yield content[offset : offset + BLOCK_BYTES]
                data = b""
                if decoder.eof:
                    data = decoder.unused_data
                    decoder = None
    if decoder is not None:
        raise Damaged(path, "is cut short: it ends inside a zstd frame")


# Tokenizers are fastest on parts of about PART_CHARS characters. A part is longer if there is no
# place to cut, but no longer than LONGEST_PART_CHARS.
PART_CHARS = 1 << 12
LONGEST_PART_CHARS = 1 << 15

# The place between a letter or digit and a space or line feed that another letter or digit follows.
# All split patterns that `tokenizer_file` accepts end a word there, whatever stands further left
# and right. So a text that is cut there has the tokens of the uncut text.
_SAFE_CUT = re.compile(r"(?<=[^\W_])(?=[ \n][^\W_])")
_NEAR_END_CHARS = 2000


def status_of(path: Path) -> os.stat_result:
    """Return the `os.stat` of a source file.

    Raises:
        Unreadable: it cannot be read.
    """
    with refusing(path):
        return os.stat(path)


def cut_position(path: Path, wanted: int, size: int) -> int:
    """Return the byte at which to cut a text file in two.

    It follows the first line feed in the 64 KiB from `wanted` on. If there is none, it is the next
    place between two characters; in a file of one character it is `size`.

    Args:
        path: the file.
        wanted: the smallest byte.
        size: bytes of the decompressed file.
    """
    window = b"".join(_read_range(path, wanted, min(size, wanted + (1 << 16))))
    line_feed = window.find(b"\n")
    # A cut at the end of the file would leave nothing after it.
    if line_feed >= 0 and wanted + line_feed + 1 < size:
        return wanted + line_feed + 1
    # A character has up to 4 bytes. All of them but the first have the bits 10 at their front.
    for offset, byte in enumerate(window[:8]):
        if byte & 0xC0 != 0x80 and wanted + offset > 0:
            return wanted + offset
    return size


def read_text(path: Path, start: int, stop: int) -> Iterator[tuple[str, int]]:
    """Yield (part of the text, bytes read so far) of the bytes [start, stop) of a UTF-8 file.

    The range counts decompressed bytes. Line ends and byte order marks are kept. Parts end where
    tokens end. The exception is a stretch of `LONGEST_PART_CHARS` characters without a place to
    cut, such as 32 Ki letters without a space: it is cut inside a word.

    Raises:
        InputRefused: the file is not UTF-8 (the message names file, byte and line), shorter than
            `stop`, damaged, or not readable.
    """
    rest = ""
    read_bytes = 0
    for text, read_bytes in _decode_blocks(path, start, stop):
        # The last part stays for later, since the next text decides where it ends.
        *parts, rest = _split_into_parts(rest + text, LONGEST_PART_CHARS)
        yield from ((part, read_bytes) for part in parts)
    yield from ((part, read_bytes) for part in parts_of(rest))


def _decode_blocks(path: Path, start: int, stop: int) -> Iterator[tuple[str, int]]:
    """Yield (text, bytes read so far) for each block of the bytes [start, stop) of a file."""
    rest = b""  # the first bytes of a character that the next block completes
    offset = start
    for block in _read_range(path, start, stop):
        data = rest + block
        try:
            text = data.decode("utf-8")
            rest = b""
        except UnicodeDecodeError as error:
            is_cut_by_block = error.reason == "unexpected end of data" and offset + len(data) < stop
            if not is_cut_by_block:
                raise _utf8_error(path, offset + error.start, data[error.start]) from None
            text = data[: error.start].decode("utf-8")
            rest = data[error.start :]
        offset += len(data) - len(rest)
        yield text, offset - start
    if offset < stop:
        raise InputRefused(
            f"{path}: became shorter while it was being read; run again when it no longer changes"
        )


def _read_range(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes [start, stop) of the decompressed content in blocks.

    Fewer bytes are yielded if the content is shorter.
    """
    if path.suffix.lower() in COMPRESSIONS:
        offset = 0
        # The blocks after `stop` are read as well, since damage may show only there.
        for block in read_blocks(path):
            wanted = block[max(0, start - offset) : max(0, stop - offset)]
            offset += len(block)
            if wanted:
                yield wanted
        return
    with refusing(path), open_input(path) as file:
        file.seek(start)
        while start < stop and (block := file.read(min(BLOCK_BYTES, stop - start))):
            start += len(block)
            yield block


def _utf8_error(path: Path, offset: int, byte: int) -> InputRefused:
    """Return the error for a byte of a file that is not UTF-8."""
    line = 1 + sum(block.count(b"\n") for block in _read_range(path, 0, offset))
    fault = f"byte {offset} (line {line}) is not UTF-8: 0x{byte:02x}"
    return InputRefused(f"{path}: {fault}; convert the file to UTF-8 or leave it out")


def parts_of(text: str) -> Iterator[str]:
    """Yield a text in parts that are cut as those of `read_text`."""
    return filter(None, _split_into_parts(text, PART_CHARS))


def _split_into_parts(text: str, longest_rest: int) -> Iterator[str]:
    """Yield parts of a text, and then the rest.

    The rest has at most `longest_rest` characters, and may be empty.
    """
    begin = 0
    while len(text) - begin > longest_rest:
        # One character more than a part may have: it decides whether a cut before it is safe.
        window = text[begin : begin + LONGEST_PART_CHARS + 1]
        end = begin + cut_for_tokens(window, PART_CHARS, LONGEST_PART_CHARS)
        yield text[begin:end]
        begin = end
    yield text[begin:]


def cut_for_tokens(text: str, wanted: int, longest: int) -> int:
    """Return the index at which to cut a text without changing its tokens.

    It is the last safe place before `wanted`, or else the next one. If there is none up to
    `longest`, it is `longest` or the end of the text, whichever comes first.
    """
    # The characters near `wanted` are searched first, because most texts have a place there, and a
    # search from the beginning would take longer.
    for low in (max(0, wanted - _NEAR_END_CHARS), 0):
        matches = _SAFE_CUT.finditer(text, low, wanted)
        cuts = [match.start() for match in matches if match.start() > 0]
        if cuts:
            return cuts[-1]
    later = _SAFE_CUT.search(text, wanted)
    return min(later.start() if later else len(text), longest)
