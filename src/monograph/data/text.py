"""Reads UTF-8 text files in bounded memory, in parts whose tokens are the whole text's tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from monograph.data.blocks import BLOCK_BYTES, COMPRESSIONS, read_blocks
from monograph.errors import InputRefused
from monograph.storage.reading import open_input, unreadable

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
