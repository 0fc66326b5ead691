"""Damaged and odd records of every kind of source, each beside what an independent reader makes of
the same bytes.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from data.damaged_files import gzip_case, lines_case, zstd_case
from data.damaged_tables import arrow_case, parquet_case
from monograph.data.documents import Documents, ReadingPlan
from monograph.data.sources import find_sources
from monograph.errors import InputRefused

CASES = {
    "lines": lines_case, "gzip": gzip_case, "zstd": zstd_case, "parquet": parquet_case, "arrow": arrow_case,
}  # fmt: skip


def read(path: Path, skip: bool) -> tuple[list[str], dict[str, int]]:
    """The texts that would be trained on, and what was passed over."""
    documents = Documents(find_sources(path, path.parent).files, ReadingPlan("text", skip), 0.0)
    texts = ["".join(part for part, _ in document.parts) for document in documents]
    skipped = {
        reason: count
        for reason, count in documents.survey.skipped.items()
        if reason != "empty text"
    }
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
        # Refused although its reader takes it: it does not carry the marks of a whole file.
        assert texts == []
    try:
        assert read(path, skip=False)[0] == expected and not skipped, (kind, seed)
        return Counter({"is good": 1})
    except InputRefused as error:
        assert skipped and path.name in str(error) and "\n" not in str(error), (kind, seed, error)
        return Counter({f"refused, or skipped as {reason}": 1 for reason in skipped})
