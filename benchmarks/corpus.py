"""Measure the preparation of text: peak memory by the size of the source, and speed compared with
the tokenizer's own.

Makes sources of given sizes (JSON lines plain and gzipped, parquet, plain text; a quarter of the
text each), prepares each in its own process, and opens it again from the cache. Memory should not
depend on the size.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

SRC = Path(__file__).resolve().parents[1] / "src"
VOCABULARY, LENGTH = 4096, 256
RECORDS_PER_FILE, TEXT_FILE_RECORDS = 100_000, 1000


def main() -> None:
    """Measure, print a table, and write it as JSON if asked to."""
    import harness  # not at the top: it imports torch, which the measured process does not need

    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--gigabytes",
        type=float,
        nargs="+",
        default=[0.05, 0.1],
        metavar="G",
        help="sizes, in order",
    )
    parser.add_argument(
        "--folder", type=Path, help="where sources and caches may lie for a while; twice the size"
    )
    given = parser.parse_args()
    sizes = [0.002, 0.004] if given.smoke else given.gigabytes
    found = harness.result(
        "corpus", {"vocabulary": VOCABULARY, "sequence_length": LENGTH, "gigabytes": sizes}
    )
    harness.print_machine(found)
    for gigabytes in sizes:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            write_source(Path(folder) / "source", round(gigabytes * 1e9))
            found["cases"].append({"gigabytes": gigabytes, **measured(Path(folder))})
        harness.write(given.out, found)
    first, last = found["cases"][0], found["cases"][-1]
    grown = (last["peak_bytes"] - first["peak_bytes"]) / max(
        1, last["text_bytes"] - first["text_bytes"]
    )
    found["peak_bytes_per_text_byte"] = grown
    columns = [
        "text GB",
        "documents",
        "peak MB",
        "of it heap MB",
        "MB/s per core",
        "tokenizer alone",
        "cores",
        "again s",
    ]
    harness.print_table(columns, [row(case) for case in found["cases"]])
    print(f"the peak grows by {grown:.4f} bytes per byte of text")
    harness.write(given.out, found)


def row(case: dict[str, Any]) -> list[str]:
    """Return a case's line of the table."""
    per_core = case["text_bytes"] / 1e6 / case["cpu_s"]
    return [
        f"{case['text_bytes'] / 1e9:.3f}",
        f"{case['documents']:,}",
        f"{case['peak_bytes'] / 1e6:.0f}",
        f"{case['peak_heap_bytes'] / 1e6:.0f}",
        f"{per_core:.2f}",
        f"{case['tokenizer_bytes_per_cpu_s'] / 1e6:.2f}",
        f"{case['cpu_s'] / case['wall_s']:.2f}",
        f"{case['again_s']:.1f}",
    ]


def write_source(folder: Path, size: int) -> None:
    """Write files with `size` bytes of text: words with the frequencies of a language, in documents
    of about 2 kB.
    """
    folder.mkdir()
    draw = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkqjxz"))
    words = ["".join(draw.choice(letters, draw.integers(2, 11))) for _ in range(50_000)]
    paragraphs = [
        " ".join(words[min(i, 49_999)] for i in draw.zipf(1.3, 60)) + ".\n" for _ in range(5000)
    ]
    average = sum(map(len, paragraphs)) / len(paragraphs)
    for kind, write in {
        "lines": _lines,
        "packed": _packed,
        "table": _table,
        "plain": _plain,
    }.items():
        documents = max(40, round(size / 4 / (6 * average)))
        for part, begin in enumerate(range(0, documents, RECORDS_PER_FILE)):
            count = min(RECORDS_PER_FILE, documents - begin)
            picked = draw.integers(0, len(paragraphs), (count, 6)).tolist()
            texts = [
                f"{kind} {begin + i}. " + "".join(paragraphs[p] for p in six)
                for i, six in enumerate(picked)
            ]
            write(folder / f"{kind}-{part:03}", texts)


def _lines(path: Path, texts: list[str]) -> None:
    with open(path.with_suffix(".jsonl"), "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))


def _packed(path: Path, texts: list[str]) -> None:
    with gzip.open(path.with_suffix(".jsonl.gz"), "wt", compresslevel=1, encoding="utf-8") as file:
        file.writelines(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))


def _table(path: Path, texts: list[str]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(
        pa.table({"text": texts}), path.with_suffix(".parquet"), row_group_size=10_000
    )


def _plain(path: Path, texts: list[str]) -> None:
    path.mkdir()
    for begin in range(0, len(texts), TEXT_FILE_RECORDS):
        (path / f"{begin}.txt").write_text(
            "".join(texts[begin : begin + TEXT_FILE_RECORDS]), encoding="utf-8"
        )


def measured(folder: Path) -> dict[str, Any]:
    """Return time and memory of a separate process that prepares the source in `folder`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--prepare", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    shutil.rmtree(folder / "cache")
    case: dict[str, Any] = json.loads(done.stdout)
    return case


def prepare(folder: Path) -> dict[str, Any]:
    """Prepare the source and open it again, in this process; return times and memory."""
    from monograph.data.corpus import corpus
    from monograph.text.tokenizer import Tokenizer

    heap, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            heap[0] = max(heap[0], _status("RssAnon"))

    threading.Thread(target=watch, daemon=True).start()
    before_bytes, began_s = _status("VmHWM"), time.monotonic()
    began_cpu_s = _cpu_s()
    settings: dict[str, Any] = {"sequence_length": LENGTH, "cache": folder / "cache"}
    built = corpus(folder / "source", tokenizer="bpe", vocab_size=VOCABULARY, **settings)
    wall_s, cpu_s = time.monotonic() - began_s, _cpu_s() - began_cpu_s
    built.train.window(np.arange(64) * len(built.train) // 64)
    began_s = time.monotonic()
    again = corpus(folder / "source", tokenizer="bpe", vocab_size=VOCABULARY, **settings)
    again_s = time.monotonic() - began_s
    assert again.fingerprint == built.fingerprint
    peak_bytes = _status("VmHWM")
    ended.set()
    text = next(iter((folder / "source").rglob("*.txt"))).read_text(encoding="utf-8")[:4_000_000]
    parts = [text[i : i + 4096] for i in range(0, len(text), 4096)]
    began_cpu_s, tokenizer = _cpu_s(), Tokenizer.from_file(built.folder)
    tokenizer.encode_batch(parts)
    alone_cpu_s = _cpu_s() - began_cpu_s
    return {
        "text_bytes": built.stats.bytes,
        "source_bytes": sum(
            path.stat().st_size for path in (folder / "source").rglob("*") if path.is_file()
        ),
        "files": built.stats.files,
        "documents": built.stats.documents,
        "rows": len(built.train),
        "packed_share": built.stats.packed_share,
        "import_bytes": before_bytes,
        "peak_bytes": peak_bytes,
        "peak_heap_bytes": heap[0],
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "again_s": again_s,
        "tokenizer_bytes_per_cpu_s": len(text.encode()) / alone_cpu_s,
    }


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    if sys.argv[1:2] == ["--prepare"]:
        print(json.dumps(prepare(Path(sys.argv[2]))))
    else:
        main()
