"""Reads UTF-8 text files in bounded memory, in parts whose tokens are the whole text's tokens."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from monograph.data.progress import Meter
from monograph.errors import InputRefused

BLOCK_BYTES = 1 << 20
PART_CHARS = 1 << 15

# Between a letter or digit and a space or line feed that a letter or digit follows. Every split pattern that
# `tokenizer_file` accepts ends a word there whatever stands further left or right, so a text cut there has the tokens
# of the uncut text.
_SAFE_CUT = re.compile(r"(?<=[^\W_])(?=[ \n][^\W_])")
_NEAR_END_CHARS = 2000


def refuse_unreadable(path: Path, error: OSError) -> InputRefused:
    """The error to raise for a source that the operating system does not let us read."""
    return InputRefused(f"{path}: cannot be read ({error.strerror or error}); check its permissions or leave it out")


def status_of(path: Path) -> os.stat_result:
    """The size and times of a source file."""
    try:
        return os.stat(path)
    except OSError as error:
        raise refuse_unreadable(path, error) from None


def sha256_of(path: Path, meter: Meter) -> tuple[str, int, bool]:
    """One pass over a file: (hex sha256, size in bytes, whether a NUL byte is among its first 8 KiB)."""
    digest, size, has_nul = hashlib.sha256(), 0, False
    try:
        with open(path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                # The rule by which git calls a file binary.
                has_nul = has_nul or (size == 0 and b"\0" in block[:8192])
                digest.update(block)
                size += len(block)
                meter.add(len(block))
    except OSError as error:
        raise refuse_unreadable(path, error) from None
    return digest.hexdigest(), size, has_nul


def cut_position(path: Path, wanted: int, size: int) -> int:
    """Where to cut a text file in two: after the first line feed from `wanted` on, else between two characters.

    Returns `size` where there is no such place (the file is one character long).
    """
    with open(path, "rb") as file:
        file.seek(wanted)
        window = file.read(1 << 16)
    line_end = window.find(b"\n")
    if line_end >= 0 and wanted + line_end + 1 < size:
        return wanted + line_end + 1
    starts = (wanted + i for i, byte in enumerate(window[:8]) if byte & 0xC0 != 0x80 and wanted + i > 0)
    return next(starts, size)


def read_text(path: Path, start: int, stop: int) -> Iterator[tuple[str, int]]:
    """The text of bytes [start, stop) of a UTF-8 file, in parts of at most `PART_CHARS` characters.

    Yields (part, bytes read so far in this range). Line ends and byte order marks are kept as they are. Parts end at a
    place where tokens end too, except in a stretch of `PART_CHARS` characters that has none (such as 32 Ki letters
    without a space): there one word is cut in two.

    Raises:
        InputRefused: not UTF-8 (names file, byte and line), shorter than `stop`, or not readable.
    """
    try:
        with open(path, "rb") as file:
            file.seek(start)
            yield from _parts(_decoded(file, path, start, stop))
    except OSError as error:
        raise refuse_unreadable(path, error) from None


def _decoded(file: BinaryIO, path: Path, start: int, stop: int) -> Iterator[tuple[str, int]]:
    rest, offset = b"", start
    while offset + len(rest) < stop:
        block = file.read(min(BLOCK_BYTES, stop - offset - len(rest)))
        if not block:
            raise InputRefused(f"{path}: became shorter while it was being read; run again when it no longer changes")
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


def _not_utf8(path: Path, offset: int, byte: int) -> InputRefused:
    line = 1
    with open(path, "rb") as file:
        remaining = offset
        while block := file.read(min(BLOCK_BYTES, remaining)):
            line += block.count(b"\n")
            remaining -= len(block)
    return InputRefused(
        f"{path}: byte {offset} (line {line}) is not UTF-8: 0x{byte:02x}; convert the file to UTF-8 or leave it out"
    )


def _parts(texts: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    carry, done = "", 0
    for text, done in texts:
        carry += text
        while len(carry) > PART_CHARS:
            cut = cut_for_tokens(carry, PART_CHARS)
            yield carry[:cut], done
            carry = carry[cut:]
    if carry:
        yield carry, done


def cut_for_tokens(text: str, limit: int) -> int:
    """The last place in text[:limit] where a cut does not change the tokens; `limit` if there is none."""
    for low in (max(0, limit - _NEAR_END_CHARS), 0):
        cuts = [match.start() for match in _SAFE_CUT.finditer(text, low, limit) if match.start() > 0]
        if cuts:
            return cuts[-1]
    return limit
