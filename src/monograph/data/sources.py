"""What a `source` means: its files in a fixed order, each hashed, with the weight that it was given."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from monograph.data.progress import Meter, Progress
from monograph.data.reading import COMPRESSIONS, raw_blocks, read_blocks, status_of
from monograph.data.resolve_sources import BINARY, Candidate, Skipped, locate, looks_binary
from monograph.errors import InputRefused, UsageError
from monograph.storage.reading import exists, resolved

LINES = frozenset((".jsonl", ".ndjson"))
TABLES = frozenset((".parquet", ".arrow"))
# Read as plain text these would train on their syntax or on nothing.
_NOT_READ = frozenset(
    ".bz2 .xz .lz4 .zip .tar .tgz .7z .npy .npz .bin .safetensors .pt .pth .gguf .pdf .docx".split()
) | set(COMPRESSIONS)
_LIGHTEST, _HEAVIEST = 1e-3, 1e3


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file: a text, or records.

    Attributes:
        name: what it is called in the corpus: relative to the folder or pattern it was found by, so that moving the
            data changes nothing.
        path: where it is read from.
        size: bytes of a text, decompressed; bytes of a file of records as it lies there.
        modified_ns: time of its last change, taken before it was hashed.
        sha256: of these bytes, hex.
        group: files of one group are never separated by the held-out split (a package; copies of one content).
        has_near_copies: near copies of the group's text are in other groups, so it is not held out (`near_duplicates`).
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
        """What kind of file it is: the last part of its name, or the one before .gz and .zst, in lower case."""
        return kind_of(self.path)

    @property
    def has_records(self) -> bool:
        """Whether it holds many documents, each a record."""
        return self.suffix in LINES | TABLES


@dataclass(frozen=True)
class Found:
    """What a source turned out to be: its files in a fixed order, and what was passed over as (path, reason)."""

    name: str
    files: tuple[SourceFile, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def sha256(self) -> str:
        """Hex digest of names, sizes and contents, in order."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{len(file.name.encode())}:{file.name}:{file.size}:{file.sha256}\n".encode())
        return digest.hexdigest()


def find(source: str | Path | Sequence[str | Path], spool: Path, progress: Progress | None = None) -> Found:
    """The files of `source`, hashed.

    Args:
        source: "stdlib", "-" (standard input), a file, a folder (searched recursively, hidden entries left out), a glob
            pattern, "hf://OWNER/NAME", or a list of these, each with "@WEIGHT" behind it or not. A file called "-" or
            "stdlib" is meant by "./-", "./stdlib".
        spool: a folder for standard input's bytes; must live as long as the result.
        progress: see `monograph.data.progress`.

    Raises:
        UsageError: a weight out of range, or two weights for one file.
        InputRefused: nothing there, an unsupported kind of file, an empty or binary file named one by one, a damaged
            compressed text, or no text at all.
    """
    items = [source] if isinstance(source, str | Path) else list(source)
    if not items:
        raise UsageError("data.source: an empty list; give 'stdlib', a file, a folder, a pattern or '-'")
    skipped: Skipped = []
    candidates = []
    for item in items:
        place, weight = weighted(str(item))
        candidates += [replace(each, weight=weight) for each in locate(place, spool, skipped, progress)]
    names = ["stdin" if str(item) == "-" else str(item) for item in items]
    name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    files = _hashed(_once_each(candidates, skipped), skipped, progress)
    if not files:
        reasons = ", ".join(sorted({reason for _, reason in skipped})) or "it has no files"
        raise InputRefused(f"{name}: no text in it ({reasons})")
    return Found(name=name, files=tuple(files), skipped=tuple(skipped))


def weighted(item: str) -> tuple[str, float]:
    """("books/", 2.0) of "books/@2"; the weight is 1 where none is given, or where there is a file of the whole name.

    Raises:
        UsageError: a weight out of range.
    """
    place, _, weight = item.rpartition("@")
    if not place or not re.fullmatch(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", weight) or exists(item):
        return item, 1.0
    try:
        value = float(weight)
    except ValueError:
        return item, 1.0
    if not _LIGHTEST <= value <= _HEAVIEST:
        bounds = f"from {_LIGHTEST:g} to {_HEAVIEST:g}"
        raise UsageError(f"data.source {item!r}: a weight is how often an epoch sees the text, {bounds}")
    return place, value


def _once_each(candidates: Iterable[Candidate], skipped: Skipped) -> list[Candidate]:
    # A file reached by two ways is one document: twice would double its weight, or put it on both sides of the held-out
    # split.
    unique: dict[Path, Candidate] = {}
    for candidate in candidates:
        first = unique.setdefault(resolved(candidate.path), candidate)
        if first is candidate:
            continue
        if first.weight != candidate.weight:
            weights = f"{first.weight:g} and {candidate.weight:g}"
            raise UsageError(f"data.source: {candidate.path} has the weights {weights}; leave it out at one place")
        skipped.append((str(candidate.path), "the same file as another"))
    return list(unique.values())


def kind_of(path: Path) -> str:
    """The last part of a file's name, or the one before .gz and .zst, in lower case."""
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
            raise InputRefused(f"{_shown(candidate)}: {_FAULTS[fault]}")
        if fault:
            skipped.append((str(candidate.path), fault))
        else:
            files.append(file)
    meter.finish()
    return files


def _opened(candidate: Candidate, meter: Meter) -> tuple[SourceFile, str]:
    """One pass over a file: what it is, and why it cannot be text, if so."""
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


def _shown(candidate: Candidate) -> str:
    return "standard input" if candidate.name == "stdin" else str(candidate.path)
