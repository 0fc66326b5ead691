"""Damaged and odd tables, parquet and arrow, each with what pyarrow makes of it when it reads it in
one go.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data.damaged_files import Texts, good_text, harmed

COLUMNS: list[Callable[[list[str]], pa.Array]] = [
    lambda texts: pa.array(texts),
    lambda texts: pa.array(texts),
    lambda texts: pa.array(texts),
    lambda texts: pa.array(texts, pa.large_string()),
    lambda texts: pa.array(texts, pa.string_view()),
    lambda texts: pa.array([text * 3 for text in texts], pa.string_view()),
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
        if kind not in BINARY:
            return None, 0
        rows = [row for chunk in column.chunks for row in _bytes(chunk)]
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError):
        return None, 0
    texts = [_decoded(row) for row in rows]
    return [text for text in texts if text], sum(text is None for text in texts)


BINARY = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


def _bytes(chunk: pa.Array) -> list[bytes | None]:
    if pa.types.is_dictionary(chunk.type):
        chunk.validate(full=True)  # before anything follows its indices
        return [None if row is None else row.encode() for row in chunk.to_pylist()]
    chunk = chunk.view(BINARY[chunk.type])
    chunk.validate(full=True)  # before anything follows its offsets
    return chunk.to_pylist()


def _decoded(row: bytes | None) -> str | None:
    try:
        return None if row is None or b"\0" in row else row.decode()
    except UnicodeDecodeError:
        return None


def parquet_case(draw: random.Random, folder: Path) -> tuple[Path, Texts, int]:
    file = io.BytesIO()
    options = {
        "compression": draw.choice(["snappy", "zstd", "none", "gzip"]),
        "use_dictionary": draw.random() < 0.5,
    }
    pq.write_table(
        table(draw),
        file,
        write_page_checksum=True,
        row_group_size=draw.choice([7, 1000]),
        **options,
    )
    data = harmed(draw, file.getvalue()) if draw.random() < 0.7 else file.getvalue()
    path = folder / "case.parquet"
    path.write_bytes(data)
    texts = table_texts(
        lambda: pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True).read(["text"])
    )
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
