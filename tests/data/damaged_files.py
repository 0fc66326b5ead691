"""Files with damaged or odd lines of JSON, plain and compressed, each with what an independent
reader makes of them.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import zstandard

Texts = list[str] | None  # None: the file is refused

WORDS = [
    "the",
    "naïve",
    "数据",
    "🙂",
    "a\tb",
    'say "x"',
    "\\",
    "line\nline",
    "end.",
    "́",
    "\u2028",
    "<|eos|>",
]
ODD = [
    "null", "true", "0", "-1e999", "1" * 5000, "[]", "{}", '""', '"\\ud800"', '"\\udc00x"', '"a\\u0000b"', "NaN",
    '"\\ud83d\\ude42"', '{"text": "deeper"}', '["text"]', "'single'", '"\t"', "01", "1.", '"open', '"\\x41"', "tru",
    "-Infinity", "[" * 3000 + "]" * 3000, '"' + "x" * 50_000 + '"',
]  # fmt: skip


def good_text(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 12)))


# ── lines of JSON ─────────────────────────────────────────────────────────────────────────────────


def damaged_line(draw: random.Random) -> bytes:
    """A line that is no longer, or not quite, a good record; no line feed in it."""
    record = {
        "id": draw.randrange(99),
        "text": good_text(draw),
        "meta": {"url": "http://x", "tags": [1, None, 2.5]},
    }
    line = json.dumps(record, ensure_ascii=draw.random() < 0.5)
    data = bytearray(line.encode())
    place = draw.randrange(len(data))
    text = json.dumps(record["text"])
    makers: list[Callable[[], bytes]] = [
        lambda: bytes(data[:place]),
        lambda: bytes(data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]),
        lambda: bytes(data[:place] + data[place + draw.randrange(1, 9) :]),
        lambda: bytes(data[:place] + draw.randbytes(draw.randrange(1, 5)) + data[place:]),
        lambda: line.encode(draw.choice(["utf-16", "utf-16-le", "utf-32-be", "utf-8-sig"])),
        lambda: line.encode("latin-1", "replace") if draw.random() < 0.5 else line.encode("cp1252", "replace"),
        lambda: b'{"text": ' + draw.choice(ODD).encode() + b"}",
        lambda: draw.choice(ODD).encode(),
        lambda: b'{"id": ' + draw.choice(ODD).encode() + b', "text": ' + text.encode() + b"}",
        lambda: b'{"text": "first", "text": ' + text.encode() + b"}",
        lambda: b'{"te\\u0078t": ' + text.encode() + b', "text": "second"}',
        lambda: b'{"meta": {"a": 1, "a": 2}, "text": ' + text.encode() + b"}",
        lambda: b'{"' + draw.choice(["Text", " text", "text ", "", "txt"]).encode() + b'": ' + text.encode() + b"}",
        lambda: line.encode() + draw.choice([b"}", b" x", line.encode(), b"\0", b",", b"  \r", b"\x1a"]),
        lambda: draw.choice([b"", b"   ", b"\r", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\x0b"]),
        lambda: bytes(data),
    ]  # fmt: skip
    return draw.choice(makers)().replace(b"\n", b" ")


class _Twice(Exception):
    pass


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise _Twice
    return dict(pairs)


def line_text(line: bytes) -> str | None:
    """Python's json on one line: its text; "" for what holds none; None if it is bad."""

    def refuse(name: str) -> object:
        raise ValueError(name)

    if not line.strip(b" \t\r\n\v\f"):
        return ""
    try:
        found = json.loads(
            line.decode("utf-8"), parse_constant=refuse, object_pairs_hook=_pairs, parse_int=len
        )
        text = found["text"] if isinstance(found, dict) else None
        if not isinstance(text, str) or "\0" in text:
            return None
        text.encode("utf-8")
    except (ValueError, KeyError, RecursionError, _Twice):
        return None
    return text


def lines_case(draw: random.Random, folder: Path) -> tuple[Path, Texts, int]:
    """A file of one damaged record behind a good one: its path, its texts, its bad records."""
    lines = [json.dumps({"text": "the first"}).encode(), damaged_line(draw)]
    path = folder / "case.jsonl"
    path.write_bytes(b"\n".join(lines) + draw.choice([b"", b"\n", b"\r\n"]))
    texts = [line_text(line) for line in lines]
    return path, [text for text in texts if text], sum(text is None for text in texts)


# ── files that are read as a whole ────────────────────────────────────────────────────────────────


def harmed(draw: random.Random, data: bytes) -> bytes:
    """Some bytes of a file changed, cut off, left out, added or exchanged."""
    place, other = sorted(draw.sample(range(len(data)), 2))
    flipped = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 3])):
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return draw.choice(
        [
            bytes(flipped),
            bytes(flipped),
            data[:place],
            data[: len(data) - draw.randrange(1, min(20, len(data)))],
            data[:place] + data[other:],
            data + draw.randbytes(draw.randrange(1, 30)),
            data[:place] + bytes(other - place) + data[other:],
            data[:place] + data[place:other][::-1] + data[other:],
        ]
    )


def _content(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def gzip_case(draw: random.Random, folder: Path) -> tuple[Path, Texts, int]:
    """What Python's gzip reads, which verifies sizes and checksums."""
    texts = [good_text(draw) for _ in range(draw.randrange(1, 30))]
    half = len(texts) // 2
    members = (
        [_content(texts[:half]), _content(texts[half:])]
        if draw.random() < 0.3
        else [_content(texts)]
    )
    data = harmed(draw, b"".join(map(gzip.compress, members)))
    path = folder / "case.jsonl.gz"
    path.write_bytes(data)
    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(data)).read()
    except (OSError, EOFError, zlib.error):
        return path, None, 0
    found = [line_text(line) for line in content.split(b"\n")]
    return path, [text for text in found if text], sum(text is None for text in found)


def zstd_case(draw: random.Random, folder: Path) -> tuple[Path, Texts, int]:
    """Frames carry a checksum, so what is accepted has to be what was written: all of it, or whole
    frames less.
    """
    texts = [good_text(draw) for _ in range(draw.randrange(1, 30))]
    half = len(texts) // 2 if draw.random() < 0.3 else 0
    packer = zstandard.ZstdCompressor(write_checksum=True, level=draw.choice([1, 3, 19]))
    frames = [packer.compress(_content(part)) for part in (texts[:half], texts[half:]) if part]
    data = harmed(draw, b"".join(frames))
    path = folder / "case.jsonl.zst"
    path.write_bytes(data)
    try:
        content = b"".join(_frames(data))
    except (zstandard.ZstdError, MemoryError):  # a size that nothing has
        return path, None, 0
    return path, [text for line in content.split(b"\n") if (text := line_text(line))], 0


def _frames(data: bytes) -> list[bytes]:
    """Each frame on its own, by the library's one-shot interface; an error for a byte too few or
    too many.
    """
    found = []
    while data:
        size = _frame_size(data)
        found.append(zstandard.ZstdDecompressor().decompress(data[:size], max_output_size=1 << 22))
        data = data[size:]
    return found


def _frame_size(data: bytes) -> int:
    """Bytes of the frame that the data begins with (RFC 8878, sections 3.1.1 and 3.1.2)."""
    magic = int.from_bytes(data[:4], "little")
    if magic & 0xFFFFFFF0 == 0x184D2A50:
        size = 8 + int.from_bytes(data[4:8], "little")
        if len(data) < 8 or size > len(data):
            raise zstandard.ZstdError("a skippable frame is cut short")
        return size
    parameters = zstandard.get_frame_parameters(data)
    place = zstandard.frame_header_size(data)
    while True:
        if place + 3 > len(data):
            raise zstandard.ZstdError("a frame is cut short")
        header = int.from_bytes(data[place : place + 3], "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        place += 3 + (1 if kind == 1 else size)
        if last:
            place += 4 if parameters.has_checksum else 0
            if place > len(data):
                raise zstandard.ZstdError("a frame is cut short")
            return place
