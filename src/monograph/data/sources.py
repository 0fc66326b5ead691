"""Resolve a `source` to its files in a fixed order, with their hashes and weights."""

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from monograph.data.progress import Meter, Progress
from monograph.data.reading import COMPRESSIONS, raw_blocks, read_blocks, status_of
from monograph.data.resolve_sources import BINARY, Candidate, Skipped, locate, looks_binary
from monograph.errors import InputRefused, UsageError
from monograph.storage.reading import exists, resolved

LINES = frozenset((".jsonl", ".ndjson"))
TABLES = frozenset((".parquet", ".arrow"))
# Kinds of files that are refused: as plain text they would teach their syntax, or nothing.
_NOT_READ = frozenset(
    ".bz2 .xz .lz4 .zip .tar .tgz .7z .npy .npz .bin .safetensors .pt .pth .gguf .pdf .docx".split()
) | set(COMPRESSIONS)
_LIGHTEST, _HEAVIEST = 1e-3, 1e3


class SourceFile(NamedTuple):
    """A file that holds a text or records.

    Attributes:
        name: its name in the corpus, relative to the folder or pattern that it comes from, so that moving the data
            changes nothing.
        path: the file.
        size: bytes of a text, decompressed; bytes on the disk for a file of records.
        modified_ns: time of its last change, taken before it was hashed.
        sha256: hex digest of the bytes that `size` counts.
        group: the held-out split never separates files of one group (a package, or copies of one content).
        has_near_copies: whether other groups have near copies of the group's text (`near_duplicates`), so that it is
            not held out.
        weight: how many times an epoch sees it.
    """

    name: str
    path: Path
    size: int
    modified_ns: int
    sha256: str
    group: str
    has_near_copies: bool = False
    weight: float = 1.0

    @property
    def suffix(self) -> str:
        """Return the kind of file: the last part of its name, or the one before .gz and .zst, in lower case."""
        return kind_of(self.path)

    @property
    def has_records(self) -> bool:
        """Return whether it holds records, each of which is a document."""
        return self.suffix in LINES | TABLES


class Sources(NamedTuple):
    """The files of a source in a fixed order, and the skipped files as (path, reason)."""

    name: str
    files: tuple[SourceFile, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def sha256(self) -> str:
        """Return the hex digest of all files' names, sizes and contents, in order."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{len(file.name.encode())}:{file.name}:{file.size}:{file.sha256}\n".encode())
        return digest.hexdigest()


def find(source: str | Path | Sequence[str | Path], spool: Path, progress: Progress | None = None) -> Sources:
    """Find and hash the files of `source`.

    Args:
        source: "stdlib", "-" (standard input), a file, a folder (searched recursively, without hidden entries), a glob
            pattern, "hf://OWNER/NAME", or a list of these, each with or without "@WEIGHT" at its end. A file called "-"
            or "stdlib" is written "./-" or "./stdlib".
        spool: a folder for a copy of standard input; it must exist as long as the result is used.
        progress: see `monograph.data.progress`.

    Raises:
        UsageError: a weight is out of range, or a file has two weights.
        InputRefused: nothing is there, a kind of file is not supported, a file named one by one is empty or binary, a
            compressed text is damaged, or there is no text at all.
    """
    items = [source] if isinstance(source, str | Path) else list(source)
    if not items:
        raise UsageError("data.source: an empty list; give 'stdlib', a file, a folder, a pattern or '-'")
    skipped: Skipped = []
    candidates = []
    for item in items:
        place, weight = weighted(str(item))
        candidates += [candidate._replace(weight=weight) for candidate in locate(place, spool, skipped, progress)]
    names = ["stdin" if str(item) == "-" else str(item) for item in items]
    name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    if not (files := _hashed(_once_each(candidates, skipped), skipped, progress)):
        reasons = ", ".join(sorted({reason for _, reason in skipped})) or "it has no files"
        raise InputRefused(f"{name}: no text in it ({reasons})")
    return Sources(name=name, files=tuple(files), skipped=tuple(skipped))


def weighted(item: str) -> tuple[str, float]:
    """Return ("books/", 2.0) for "books/@2"; the weight is 1 if none is given or a file has the whole name.

    Raises:
        UsageError: the weight is out of range.
    """
    place, _, weight = item.rpartition("@")
    if not place or not re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", weight) or exists(item):
        return item, 1.0
    value = float(weight)
    if not _LIGHTEST <= value <= _HEAVIEST:
        bounds = f"from {_LIGHTEST:g} to {_HEAVIEST:g}"
        raise UsageError(f"data.source {item!r}: a weight is how often an epoch sees the text, {bounds}")
    return place, value


def _once_each(candidates: Iterable[Candidate], skipped: Skipped) -> list[Candidate]:
    # Keep a file that is reached in two ways once: a second time would double its weight.
    unique: dict[Path, Candidate] = {}
    for candidate in candidates:
        if (first := unique.setdefault(resolved(candidate.path), candidate)) is candidate:
            continue
        if first.weight != candidate.weight:
            weights = f"{first.weight:g} and {candidate.weight:g}"
            raise UsageError(f"data.source: {candidate.path} has the weights {weights}; leave it out at one place")
        skipped.append((str(candidate.path), "the same file as another"))
    return list(unique.values())


def kind_of(path: Path) -> str:
    """Return the last part of a file's name, or the one before .gz and .zst, in lower case."""
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    return inner.suffix.lower()


def _hashed(candidates: list[Candidate], skipped: Skipped, progress: Progress | None) -> list[SourceFile]:
    for candidate in candidates:
        path, kind = candidate.path, kind_of(candidate.path)
        if kind in _NOT_READ or (kind in TABLES and path.suffix.lower() in COMPRESSIONS):
            remedy = "convert it to plain text, or choose other files with a pattern"
            raise InputRefused(f"{path}: {kind} files are not read; {remedy}")
    meter = Meter(progress, "sources", sum(status_of(candidate.path).st_size for candidate in candidates))
    files = []
    for candidate in candidates:
        file, fault = _opened(candidate, meter)
        if fault and candidate.chosen:
            where = "standard input" if candidate.name == "stdin" else candidate.path
            raise InputRefused(f"{where}: {_FAULTS[fault]}")
        if fault:
            skipped.append((str(candidate.path), fault))
        else:
            files.append(file)
    meter.finish()
    return files


def _opened(candidate: Candidate, meter: Meter) -> tuple[SourceFile, str]:
    """Read a file once; return it, and its fault (a key of `_FAULTS`) or ""."""
    path, digest, size, has_nul = candidate.path, hashlib.sha256(), 0, False
    records = kind_of(path) in LINES | TABLES
    modified_ns = status_of(path).st_mtime_ns
    for block in (raw_blocks if records else read_blocks)(path, meter):
        has_nul = has_nul or (size == 0 and looks_binary(block))
        digest.update(block)
        size += len(block)
    sha256 = digest.hexdigest()
    name = os.fsencode(candidate.name).decode("utf-8", "backslashreplace")
    file = SourceFile(
        name, path, size, modified_ns, sha256, candidate.group or sha256, candidate.has_near_copies, candidate.weight
    )
    return file, "empty" if size == 0 else "binary" if has_nul and not records else ""


_FAULTS = {"empty": "empty file; give a file with text", "binary": BINARY}
