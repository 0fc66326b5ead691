"""Files that become many times as large when they are read, each made a mebibyte at a time."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

KINDS = (
    "txt.gz",
    "txt.zst",
    "parquet",
    "dictionary.parquet",
    "zstd.arrow",
    "dictionary.arrow",
    "view.arrow",
)


def shared(one: pa.Array, times: int) -> pa.Array:
    """An array of views whose rows all show the one text of another."""
    _, views, text = one.buffers()
    return pa.Array.from_buffers(
        one.type, times, [None, pa.py_buffer(views.to_pybytes()[:16] * times), text]
    )


def made(kind: str, mebibytes: int, folder: Path) -> Path:
    """The file of that kind which becomes so much; it is made once."""
    path, text = folder / f"bomb-{mebibytes}.{kind}", "x" * (1 << 20)
    if path.exists():
        return path
    if kind.startswith("txt"):
        pack = gzip.compress if kind.endswith("gz") else zstandard.ZstdCompressor().compress
        path.write_bytes(pack(text.encode()) * mebibytes)  # members, or frames, one after another
        return path
    column, batches = pa.array([text]), mebibytes
    if kind.startswith("dictionary"):
        column, batches = (
            pa.DictionaryArray.from_arrays(pa.array([0] * mebibytes, pa.int32()), column),
            1,
        )
    if kind.startswith("view"):
        column, batches = shared(pa.array([text], pa.string_view()), mebibytes), 1
    table = pa.table({"text": column})
    if kind.endswith("parquet"):
        written = pq.ParquetWriter(
            path, table.schema, compression="zstd", use_dictionary=kind.startswith("dictionary")
        )
    else:
        written = pa.ipc.new_file(
            path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
        )
    with written as file:
        for _ in range(batches):
            file.write_table(table)
    return path
