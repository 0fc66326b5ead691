"""Read a file in bounded memory: its bytes in blocks, and its UTF-8 text in parts.

A text is cut into parts only where no token crosses the cut, so the tokens of its parts, one part
after the other, are the tokens of the uncut text. A file whose name ends in .gz or .zst is
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

Item = TypeVar("Item")
BLOCK_BYTES = 1 << 20
COMPRESSIONS = (".gz", ".zst")

# zlib's `wbits` for the format gzip: zlib then verifies the checksum and the length.
_GZIP_WBITS = 31
_GZIP_MAGIC = b"\x1f\x8b"
# A file that becomes larger than both 256 MiB and 200 times its size counts as a compression bomb.
# Text is compressed about 5 times, and very monotonous logs about 100 times. Deflate can compress
# up to 1032 times, and zstd without limit.
BOMB_MIN_BYTES = 1 << 28
BOMB_MIN_RATIO = 200
# The number of bytes that zstd gets in one call. A zstd block of 4 bytes can stand for 128 KiB, so
# 1 KiB of input becomes at most 32 MiB.
_ZSTD_STEP_BYTES = 1 << 10

# Tokenizers are fastest on parts of about PART_CHARS characters. A part is longer if there is no
# place to cut, but no longer than LONGEST_PART_CHARS.
PART_CHARS = 1 << 12
LONGEST_PART_CHARS = 1 << 15
# A safe place to cut is after a letter or digit and before a space or line feed that another letter or
# digit follows. All split patterns that `tokenizer_file` accepts end a word there, whatever the rest of
# the text is. So a text that is cut there has the tokens of the uncut text.
_SAFE_CUT = re.compile(r"(?<=[^\W_])(?=[ \n][^\W_])")
# The last safe place before a position is first looked for in this many characters before it.
_NEAR_CHARS = 2000
# How many bytes `cut_position` searches for a line feed, and then for the first byte of a character. A
# character has at most 4 bytes.
_LINE_SEARCH_BYTES = 1 << 16
_CHARACTER_SEARCH_BYTES = 8


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
    """Import an optional library that is needed to read a source, and return the module.

    Args:
        library: the library's name.
        source: the file or dataset that needs the library, for the error.
        extra: the extra of Monograph that installs the library.

    Raises:
        InputRefused: the library is not installed.
    """
    try:
        return importlib.import_module(library)
    except ImportError:
        needs = f"reading it needs {library}, which is not installed"
        raise InputRefused(f"{source}: {needs}: {command_for(extra, library)}") from None


def status_of(path: Path) -> os.stat_result:
    """Return the `os.stat` of a source file.

    Raises:
        Unreadable: it cannot be read.
    """
    with refusing(path):
        return os.stat(path)


def raw_blocks(path: Path, meter: Meter | None = None) -> Iterator[bytes]:
    """Yield the bytes of a file as they are on the disk, in blocks of at most 1 MiB.

    Args:
        path: the file.
        meter: counts the bytes; None: nothing is reported.

    Raises:
        Unreadable: the file cannot be read.
    """
    with refusing(path), open_input(path) as file:
        while block := file.read(BLOCK_BYTES):
            if meter is not None:
                meter.add(len(block))
            yield block


def decompressed_blocks(path: Path, meter: Meter | None = None) -> Iterator[bytes]:
    """Yield the decompressed content of a file in blocks of at most 1 MiB.

    Damage is noticed only when it is reached, after the blocks before it have been yielded. So the
    blocks cannot be trusted until the last one has been yielded.

    Args:
        path: the file.
        meter: counts the bytes on the disk, before decompression; None: nothing is reported.

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


def refuse_bombs(path: Path, sized_items: Iterable[tuple[int, Item]]) -> Iterator[Item]:
    """Yield the items that were unpacked from a file, until they are too large for an honest file.

    Args:
        path: the packed file.
        sized_items: (size in bytes, item) of each item.

    Raises:
        Damaged: the items so far are so large that the file is a compression bomb.
    """
    packed_bytes = path.stat().st_size
    unpacked_bytes = 0
    for item_bytes, item in sized_items:
        unpacked_bytes += item_bytes
        if unpacked_bytes > max(BOMB_MIN_BYTES, BOMB_MIN_RATIO * packed_bytes):
            fault = (
                f"is a compression bomb: {packed_bytes:,} bytes become {unpacked_bytes:,} and more, "
                f"{BOMB_MIN_RATIO} times as many"
            )
            raise Damaged(path, fault, "if all of it is meant, unpack it and give that")
        yield item


def _gunzip(path: Path, raw: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the content of a gzip file in blocks of at most 1 MiB.

    A gzip file is one or more members, which are compressed independently of each other.
    """
    decoder = None  # the decoder of the current member; None between members
    has_member = False  # whether a first member has been found
    for data in raw:
        # Whether the decoder may have more output than fitted into the last block that it returned.
        # If so, it is called again, even without further input.
        may_have_output = False
        while data or may_have_output:
            if decoder is None:
                if has_member:
                    # The format allows zeros after a member.
                    data = data.lstrip(b"\0")
                if not data:
                    break
                # A block may end after the first byte of the magic.
                if data[:2] != _GZIP_MAGIC[: len(data)]:
                    fault = "has bytes after its end" if has_member else "is not gzip"
                    raise Damaged(path, fault)
                decoder = zlib.decompressobj(_GZIP_WBITS)
                has_member = True
            try:
                content = decoder.decompress(data, BLOCK_BYTES)
            except zlib.error as error:
                raise Damaged(path, f"is damaged ({error})") from None
            if content:
                yield content
            if decoder.eof:
                data = decoder.unused_data
                may_have_output = False
                decoder = None
            else:
                data = decoder.unconsumed_tail
                may_have_output = len(content) == BLOCK_BYTES
    if decoder is not None:
        raise Damaged(path, "is cut short: it ends inside a gzip member")


def _unzstd(path: Path, raw: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the content of a zstd file in blocks of at most 1 MiB.

    A zstd file is one or more frames, which are compressed independently of each other.
    """
    zstandard = import_library("zstandard", path, "zstd")
    decompressor = zstandard.ZstdDecompressor()
    decoder = None  # the decoder of the current frame; None between frames
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


def cut_position(path: Path, earliest: int, size: int) -> int:
    """Return the position, in bytes, at which to cut a text file in two.

    It is the position after the first line feed in the 64 KiB from `earliest` on. If there is no
    line feed, it is the next position between two characters. It is `size` if the file cannot be
    cut there, because only one character is left.

    Args:
        path: the file.
        earliest: the first position that is allowed.
        size: bytes of the decompressed file.
    """
    window = b"".join(_read_range(path, earliest, min(size, earliest + _LINE_SEARCH_BYTES)))
    line_feed = window.find(b"\n")
    # A cut at the end of the file would leave nothing after it.
    if line_feed >= 0 and earliest + line_feed + 1 < size:
        return earliest + line_feed + 1
    # In UTF-8, all bytes of a character except the first begin with the bits 10.
    for offset, byte in enumerate(window[:_CHARACTER_SEARCH_BYTES]):
        is_first_byte = byte & 0xC0 != 0x80
        # A cut at 0 would leave nothing before it.
        if is_first_byte and earliest + offset > 0:
            return earliest + offset
    return size


def read_text(path: Path, start: int, stop: int) -> Iterator[tuple[str, int]]:
    """Yield (part of the text, bytes read so far) of the bytes [start, stop) of a UTF-8 file.

    The range counts decompressed bytes. Line ends and byte order marks are kept. Parts end at safe
    places (`_SAFE_CUT`). The exception is a stretch of `LONGEST_PART_CHARS` characters without such
    a place, such as 32 Ki letters without a space: it is cut inside a word.

    Raises:
        InputRefused: the file is not UTF-8 (the message names file, byte and line), shorter than
            `stop`, damaged, or not readable.
    """
    rest = ""  # the text that has been read and is in no part yet
    read_bytes = 0
    for text, read_bytes in _decode_blocks(path, start, stop):
        # Up to LONGEST_PART_CHARS characters wait for the next text, which decides where they are
        # cut.
        *parts, rest = _split_into_parts(rest + text, LONGEST_PART_CHARS)
        yield from ((part, read_bytes) for part in parts)
    yield from ((part, read_bytes) for part in text_parts(rest))


def _decode_blocks(path: Path, start: int, stop: int) -> Iterator[tuple[str, int]]:
    """Yield (text, bytes read so far) for each block of the bytes [start, stop) of a file."""
    incomplete = b""  # the first bytes of a character that the next block completes
    offset = start  # where `incomplete` begins in the file
    for block in _read_range(path, start, stop):
        data = incomplete + block
        try:
            text = data.decode("utf-8")
            incomplete = b""
        except UnicodeDecodeError as error:
            is_cut_by_block = error.reason == "unexpected end of data" and offset + len(data) < stop
            if not is_cut_by_block:
                raise _utf8_error(path, offset + error.start, data[error.start]) from None
            text = data[: error.start].decode("utf-8")
            incomplete = data[error.start :]
        offset += len(data) - len(incomplete)
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
        for block in decompressed_blocks(path):
            in_range = block[max(0, start - offset) : max(0, stop - offset)]
            offset += len(block)
            if in_range:
                yield in_range
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


def text_parts(text: str) -> Iterator[str]:
    """Yield a text in parts, which are cut in the same way as those of `read_text`."""
    return filter(None, _split_into_parts(text, PART_CHARS))


def _split_into_parts(text: str, longest_rest: int) -> Iterator[str]:
    """Yield the parts of the beginning of a text, and at last the rest of the text.

    The rest is not cut. It has at most `longest_rest` characters, and may be empty.
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

    It is the last safe place (`_SAFE_CUT`) before `wanted`, or else the next one. If there is none
    up to `longest`, it is `longest` or the end of the text, whichever comes first.
    """
    # The characters near `wanted` are searched first, because most texts have a safe place there,
    # and a search from the beginning would take longer.
    for search_begin in (max(0, wanted - _NEAR_CHARS), 0):
        matches = _SAFE_CUT.finditer(text, search_begin, wanted)
        cuts = [match.start() for match in matches if match.start() > 0]
        if cuts:
            return cuts[-1]
    next_cut = _SAFE_CUT.search(text, wanted)
    return min(next_cut.start() if next_cut else len(text), longest)
