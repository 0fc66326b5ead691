"""Damaged and odd records of every kind of source, each beside what an independent reader makes of the same bytes."""

from __future__ import annotations

import gzip
import io
import json
import random
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from monograph.data.documents import Documents, Reading
from monograph.data.sources import find
from monograph.errors import InputRefused

Texts = list[str] | None  # None: the file is refused

WORDS = ["the", "naïve", "数据", "🙂", "a\tb", 'say "x"', "\\", "line\nline", "end.", "́", "\u2028", "<|eos|>"]
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
    record = {"id": draw.randrange(99), "text": good_text(draw), "meta": {"url": "http://x", "tags": [1, None, 2.5]}}
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
        found = json.loads(line.decode("utf-8"), parse_constant=refuse, object_pairs_hook=_pairs, parse_int=len)
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
    members = [_content(texts[:half]), _content(texts[half:])] if draw.random() < 0.3 else [_content(texts)]
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
    """Frames carry a checksum, so what is accepted has to be what was written: all of it, or whole frames less."""
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
    """Each frame on its own, by the library's one-shot interface; an error for a byte too few or too many."""
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


# ── tables ────────────────────────────────────────────────────────────────────────────────────────

COLUMNS: list[Callable[[list[str]], pa.Array]] = [
    lambda texts: pa.array(texts),
    lambda texts: pa.array(texts),
    lambda texts: pa.array(texts),
    lambda texts: pa.array(texts, pa.large_string()),
    lambda texts: pa.array(texts).dictionary_encode(),
    lambda texts: pa.array([None if len(text) % 3 == 0 else text for text in texts]),
    lambda texts: pa.array([text + ("\0" if len(text) % 3 == 0 else "") for text in texts]),
    lambda texts: pa.array(["" if len(text) % 2 else text for text in texts]),
    lambda texts: pa.array([len(text) for text in texts]),
    lambda texts: pa.array([text.encode() for text in texts]),
    lambda texts: pa.array([[text] for text in texts]),
    lambda texts: pa.array([{"text": text} for text in texts]),
    lambda texts: pa.nulls(len(texts)),
    lambda texts: pa.array([True] * len(texts)),
    lambda texts: pa.array([b"\xff" + text.encode() for text in texts]).view(pa.string()),
]


def table(draw: random.Random) -> pa.Table:
    texts = [good_text(draw) for _ in range(draw.randrange(2, 40))]
    column = draw.choice(COLUMNS)(texts)
    names = draw.choice([["text", "id"]] * 8 + [["txt", "id"], ["text", "text"], ["id", "text"]])
    return pa.Table.from_arrays([column, pa.array(range(len(texts)))], names=names)


def table_texts(read: Callable[[], pa.Table]) -> tuple[Texts, int]:
    """What pyarrow reads in one go, and which of it is a text."""
    try:
        found = read()
        found.validate(full=False)
        column = found.column("text")
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            return None, 0
        rows = [row for chunk in column.chunks for row in _bytes(chunk, pa.types.is_large_string(kind))]
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError):
        return None, 0
    texts = [_decoded(row) for row in rows]
    return [text for text in texts if text], sum(text is None for text in texts)


def _bytes(chunk: pa.Array, large: bool) -> list[bytes | None]:
    if pa.types.is_dictionary(chunk.type):
        chunk.validate(full=True)  # before anything follows its indices
        return [None if row is None else row.encode() for row in chunk.to_pylist()]
    chunk = chunk.view(pa.large_binary() if large else pa.binary())
    chunk.validate(full=True)  # before anything follows its offsets
    return chunk.to_pylist()


def _decoded(row: bytes | None) -> str | None:
    try:
        return None if row is None or b"\0" in row else row.decode()
    except UnicodeDecodeError:
        return None


def parquet_case(draw: random.Random, folder: Path) -> tuple[Path, Texts, int]:
    file = io.BytesIO()
    options = {"compression": draw.choice(["snappy", "zstd", "none", "gzip"]), "use_dictionary": draw.random() < 0.5}
    pq.write_table(table(draw), file, write_page_checksum=True, row_group_size=draw.choice([7, 1000]), **options)
    data = harmed(draw, file.getvalue()) if draw.random() < 0.7 else file.getvalue()
    path = folder / "case.parquet"
    path.write_bytes(data)
    texts = table_texts(lambda: pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True).read(["text"]))
    return path, *texts


def arrow_case(draw: random.Random, folder: Path) -> tuple[Path, Texts, int]:
    whole, file = table(draw), io.BytesIO()
    stream = draw.random() < 0.7
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(file, whole.schema) as writer:
        writer.write_table(whole, max_chunksize=9)
    data = harmed(draw, file.getvalue()) if draw.random() < 0.7 else file.getvalue()
    path = folder / "case.arrow"
    path.write_bytes(data)
    opened = pa.ipc.open_file if data[:6] == b"ARROW1" else pa.ipc.open_stream
    texts = table_texts(lambda: opened(pa.BufferReader(data)).read_all())
    return path, *texts


CASES = {
    "lines": lines_case, "gzip": gzip_case, "zstd": zstd_case, "parquet": parquet_case, "arrow": arrow_case,
}  # fmt: skip


# ── what Monograph makes of them ──────────────────────────────────────────────────────────────────


def read(path: Path, skip: bool) -> tuple[list[str], dict[str, int]]:
    """The texts that would be trained on, and what was passed over."""
    documents = Documents(find(path, path.parent).files, Reading("text", skip), 0.0)
    texts = ["".join(part for part, _ in document.parts) for document in documents]
    skipped = {reason: count for reason, count in documents.survey.skipped.items() if reason != "empty text"}
    return texts, skipped


def check(kind: str, seed: int, folder: Path) -> Counter[str]:
    """One damaged file, read in both ways, against the oracle; what became of it."""
    path, expected, bad = CASES[kind](random.Random(f"{kind} {seed}"), folder)
    try:
        texts, skipped = read(path, skip=True)
    except InputRefused as error:  # nothing at all is left of the file: it is empty
        assert path.name in str(error) and path.stat().st_size == 0, (kind, seed, error)
        return Counter({"refused, empty file": 1})
    whole_file = skipped == {"damaged file": 1}
    if expected is None:
        assert whole_file and texts == [], (kind, seed, skipped, texts)
    elif not whole_file:
        assert texts == expected and sum(skipped.values()) == bad, (kind, seed, skipped, bad)
    else:
        assert texts == []  # refused although its reader takes it: it does not carry the marks of a whole file
    try:
        assert read(path, skip=False)[0] == expected and not skipped, (kind, seed)
        return Counter({"is good": 1})
    except InputRefused as error:
        assert skipped and path.name in str(error) and "\n" not in str(error), (kind, seed, error)
        return Counter({f"refused, or skipped as {reason}": 1 for reason in skipped})
