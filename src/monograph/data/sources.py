"""Resolve a `source` to its files in a fixed order, with their hashes and weights.

Files are those of the standard library, folders, patterns, saved datasets, the hub or standard
input. Packages of the standard library with near copies in other packages (`near_duplicates`) are
marked and so never held out, since a score on them would measure recall of the training text.
"""

import hashlib
import os
import re
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from monograph.data import HEAVIEST, LIGHTEST
from monograph.data.progress import Meter, Progress
from monograph.data.reading import BLOCK_BYTES, COMPRESSIONS, raw_blocks, read_blocks, status_of
from monograph.data.tables import hub_tables, saved_tables
from monograph.errors import InputRefused, UsageError
from monograph.storage.code import HUB
from monograph.storage.reading import (
    exists,
    is_file,
    is_folder,
    matching,
    read_input,
    refusing,
    resolved,
)
from monograph.storage.writing import writing

# A line of this many bytes, without indentation, is hardly ever written twice by chance.
LINE_BYTES = 24
# The largest share of a group's long lines that other groups may have, too. With only such packages
# of Python 3.11 held out, an order-6 byte model of the rest scores 1.87 bits per byte on them; with
# near copies (ntpath of posixpath, wave of sunau) held out as well, it scores 1.72.
SHARED_LINES = 0.03


def near_duplicates(groups: Mapping[str, Iterable[Path]]) -> set[str]:
    """Return the groups that share more than SHARED_LINES of their distinct long lines with other
    groups.
    """
    lines = {
        name: {line for path in paths for line in _long_lines(path)}
        for name, paths in groups.items()
    }
    groups_with = Counter(line for own in lines.values() for line in own)
    return {
        name
        for name, own in lines.items()
        if sum(groups_with[line] > 1 for line in own) > SHARED_LINES * len(own)
    }


def _long_lines(path: Path) -> Iterable[bytes]:
    return (
        stripped
        for line in read_input(path, None).split(b"\n")
        if len(stripped := line.strip()) >= LINE_BYTES
    )


# Folders that are not library code: generated tables, programs, installed packages, and tests (only
# these have files that are not UTF-8).
_NOT_LIBRARY = frozenset(
    "test tests idle_test encodings pydoc_data idlelib turtledemo lib2to3 site-packages dist-packages".split()
)
# Records how this Python was compiled, and differs between machines.
_BUILD_TABLE = "_sysconfigdata"

STDIN = "stdin"
MOST_STDIN_BYTES = 1 << 34
BINARY = "has NUL bytes, so it is binary or UTF-16; give UTF-8 text"
Skipped = list[tuple[str, str]]


class Candidate(NamedTuple):
    """A file of a source, before it is opened; see `SourceFile`, which it becomes.

    `chosen` says whether the file itself was named: then its faults are errors, while a file that
    was found in a folder or by a pattern is skipped and counted.
    """

    name: str
    path: Path
    chosen: bool
    group: str = ""
    has_near_copies: bool = False
    weight: float = 1.0


def _locate(item: str, spool: Path, skipped: Skipped, progress: Progress | None) -> list[Candidate]:
    """Return the files of one item of a source; append the skipped ones to `skipped` as (path,
    reason).
    """
    if item == "stdlib":
        return _standard_library()
    if item == "-":
        return [Candidate(STDIN, spooled_stdin(spool, progress), chosen=True)]
    if item.startswith(HUB):
        return [Candidate(f"{item}/{path.name}", path, chosen=True) for path in hub_tables(item)]
    path = Path(os.path.expanduser(item))
    if is_folder(path):
        return _folder(path, skipped)
    if is_file(path):
        return [Candidate(path.name, path, chosen=True)]
    if exists(path):
        raise InputRefused(f"{path}: not a regular file; for a pipe give '-' and standard input")
    if any(mark in item for mark in "*?["):
        return _pattern(path, skipped)
    raise InputRefused(f"{path}: no such file or folder (looked from {Path.cwd()})")


def _standard_library() -> list[Candidate]:
    root = Path(sysconfig.get_path("stdlib"))
    packages: dict[str, list[tuple[str, Path]]] = {}
    for name, path in _walk(root, [], leave_out=_NOT_LIBRARY):
        if path.suffix == ".py" and not path.name.startswith(_BUILD_TABLE):
            packages.setdefault(name.split("/")[0].removesuffix(".py"), []).append((name, path))
    if not packages:
        raise InputRefused(
            f"{root}: this Python has no standard library as .py files; give your own text as data.source"
        )
    copied = near_duplicates(
        {package: [path for _, path in files] for package, files in packages.items()}
    )
    named = sorted(
        (name, path, package) for package, files in packages.items() for name, path in files
    )
    return [
        Candidate(name, path, False, package, package in copied) for name, path, package in named
    ]


def spooled_stdin(spool: Path, progress: Progress | None) -> Path:
    """Write standard input to the file `stdin` in a folder, and return its path.

    Raises:
        UsageError: standard input is a terminal.
        InputRefused: it is binary, or larger than 16 GiB or half of the free space.
    """
    if sys.stdin.isatty():
        raise UsageError(
            "data.source '-': standard input is a terminal; pipe text in, as in: monograph train - < book.txt"
        )
    path = spool / STDIN
    meter = Meter(progress, STDIN, None)
    with writing(spool), open(path, "wb") as file:
        most = min(MOST_STDIN_BYTES, shutil.disk_usage(spool).free // 2)
        while block := sys.stdin.buffer.read(BLOCK_BYTES):
            if not meter.done and _looks_binary(block):
                raise InputRefused(f"standard input: {BINARY}")
            if meter.done + len(block) > most:
                bound = f"{most / 2**30:.3g} GiB ({MOST_STDIN_BYTES >> 30} GiB, or half of what is free in {spool})"
                raise InputRefused(
                    f"standard input: has more than {bound}; write it to a file and give that"
                )
            file.write(block)
            meter.add(len(block))
    meter.finish()
    return path


def _looks_binary(begin: bytes) -> bool:
    """Return whether a file with this beginning is binary by git's rule, a NUL in its first 8,192
    bytes.
    """
    return b"\0" in begin[:8192]


def _folder(folder: Path, skipped: Skipped) -> list[Candidate]:
    name = resolved(folder).name
    return [
        Candidate(f"{name}/{relative}", path, chosen=False)
        for relative, path in _walk(folder, skipped)
    ]


def _pattern(pattern: Path, skipped: Skipped) -> list[Candidate]:
    fixed = next(
        parent for parent in pattern.parents if not any(mark in str(parent) for mark in "*?[")
    )
    candidates: list[Candidate] = []
    for hit in matching(pattern):
        if is_folder(hit):
            # A folder that "texts/*" matches stands for its files. "**" matches those files itself.
            candidates.extend(_folder(hit, skipped) if "**" not in str(pattern) else ())
        elif is_file(hit):
            candidates.append(Candidate(hit.relative_to(fixed).as_posix(), hit, chosen=False))
        else:
            skipped.append((str(hit), "not a regular file"))
    if not candidates:
        raise InputRefused(f"{pattern}: no file matches this pattern (looked from {Path.cwd()})")
    return candidates


def _walk(
    folder: Path, skipped: Skipped, leave_out: frozenset[str] = frozenset()
) -> list[tuple[str, Path]]:
    """Return (relative name, path) of the regular files under a folder, sorted; links do not enter
    a folder twice.
    """
    files: list[tuple[str, Path]] = []
    pending = [(folder, "")]
    entered = set()
    with refusing(folder):
        while pending:
            current, prefix = pending.pop()
            status = os.stat(current)
            if (status.st_dev, status.st_ino) in entered:
                continue
            entered.add((status.st_dev, status.st_ino))
            if (tables := saved_tables(current)) is not None:
                files.extend(
                    (prefix + path.relative_to(current).as_posix(), path) for path in tables
                )
                continue
            for entry in sorted(os.scandir(current), key=lambda entry: entry.name):
                if entry.name in leave_out:
                    continue
                if entry.name.startswith(".") or entry.name == "__pycache__":
                    skipped.append((entry.path, "hidden"))
                elif is_folder(entry.path):
                    pending.append((Path(entry.path), f"{prefix}{entry.name}/"))
                elif is_file(entry.path):
                    files.append((prefix + entry.name, Path(entry.path)))
                else:
                    skipped.append((entry.path, "not a regular file"))
    return sorted(files)


LINES = frozenset((".jsonl", ".ndjson"))
TABLES = frozenset((".parquet", ".arrow"))
# Kinds of files that are refused: as plain text they would teach their syntax, or nothing.
_NOT_READ = frozenset(
    ".bz2 .xz .lz4 .zip .tar .tgz .7z .npy .npz .bin .safetensors .pt .pth .gguf .pdf .docx".split()
) | set(COMPRESSIONS)
# Records in forms that others read: as plain text they would be learned with their syntax.
_ROWS = frozenset((".csv", ".tsv"))
# How a .json file begins that is one array of records.
_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")


class SourceFile(NamedTuple):
    """A file that holds a text or records.

    Attributes:
        name: its name in the corpus, relative to the folder or pattern that it comes from, so that
            moving the data changes nothing.
        path: the file.
        size: bytes of a text, decompressed; bytes on the disk for a file of records.
        modified_ns: time of its last change, taken before it was hashed.
        sha256: hex digest of the bytes that `size` counts.
        group: the held-out split never separates files of one group (a package, or copies of one
            content).
        has_near_copies: whether other groups have near copies of the group's text
            (`near_duplicates`), so that it is not held out.
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
        """Return the kind of file: the last part of its name, or the one before .gz and .zst, in
        lower case.
        """
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
            digest.update(
                f"{len(file.name.encode())}:{file.name}:{file.size}:{file.sha256}\n".encode()
            )
        return digest.hexdigest()


def find(
    source: str | Path | Sequence[str | Path],
    spool: Path,
    progress: Progress | None = None,
    weights: Sequence[float] | None = None,
) -> Sources:
    """Find and hash the files of `source`.

    Args:
        source: "stdlib", "-" (standard input), a file, a folder (searched recursively, without
            hidden entries), a glob pattern, "hf://OWNER/NAME", or a list of these. A file called
            "-" or "stdlib" is written "./-" or "./stdlib".
        spool: a folder for a copy of standard input; it must exist as long as the result is used.
        progress: see `monograph.data.progress`.
        weights: how often an epoch sees each of the sources; None: once.

    Raises:
        UsageError: a weight is out of range, there are not as many as sources, or a file has two
            weights.
        InputRefused: nothing is there, a kind of file is not supported, a file named one by one is
            empty or binary, a compressed text is damaged, or there is no text at all.
    """
    items = [source] if isinstance(source, str | Path) else list(source)
    if not items:
        raise UsageError(
            "data.source: an empty list; give 'stdlib', a file, a folder, a pattern or '-'"
        )
    skipped: Skipped = []
    candidates = []
    for item, weight in zip(items, _weights(items, weights), strict=True):
        for candidate in _locate(str(item), spool, skipped, progress):
            candidates.append(candidate._replace(weight=weight))
    names = [STDIN if str(item) == "-" else str(item) for item in items]
    name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    if not (files := _hashed(_once_each(candidates, skipped), skipped, progress)):
        reasons = ", ".join(sorted({reason for _, reason in skipped})) or "it has no files"
        raise InputRefused(f"{name}: no text in it ({reasons})")
    return Sources(name=name, files=tuple(files), skipped=tuple(skipped))


def _weights(items: Sequence[object], weights: Sequence[float] | None) -> Sequence[float]:
    if weights is None:
        return [1.0] * len(items)
    if len(weights) != len(items):
        raise UsageError(
            f"data.weights has {len(weights)} numbers and data.source {len(items)}: give one for each"
        )
    for weight in weights:
        if not LIGHTEST <= weight <= HEAVIEST:
            raise UsageError(f"data.weights: {weight:g} is not from {LIGHTEST:g} to {HEAVIEST:g}")
    return [float(weight) for weight in weights]


def located(source: str | Sequence[str]) -> list[Path]:
    """Return the files of a source without reading them, except standard input and those of the
    standard library.

    Raises:
        UsageError, InputRefused: as in `find`.
    """
    items = [source] if isinstance(source, str) else source
    kept = [item for item in items if item not in ("-", "stdlib")]
    return [candidate.path for place in kept for candidate in _locate(place, Path(), [], None)]


def _once_each(candidates: Iterable[Candidate], skipped: Skipped) -> list[Candidate]:
    # Keep a file that is reached in two ways once: a second time would double its weight.
    unique: dict[Path, Candidate] = {}
    for candidate in candidates:
        if (first := unique.setdefault(resolved(candidate.path), candidate)) is candidate:
            continue
        if first.weight != candidate.weight:
            weights = f"{first.weight:g} and {candidate.weight:g}"
            raise UsageError(
                f"data.source: {candidate.path} has the weights {weights}; leave it out at one place"
            )
        skipped.append((str(candidate.path), "the same file as another"))
    return list(unique.values())


def kind_of(path: Path) -> str:
    """Return the last part of a file's name, or the one before .gz and .zst, in lower case."""
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    return inner.suffix.lower()


def place_of(path: Path, record: int) -> str:
    """Return a record's place for a message, such as FILE:LINE."""
    return f"{path}{':' if kind_of(path) in LINES else ', row '}{record}"


def _hashed(
    candidates: list[Candidate], skipped: Skipped, progress: Progress | None
) -> list[SourceFile]:
    for candidate in candidates:
        path = candidate.path
        kind = kind_of(candidate.path)
        if kind in _NOT_READ or (kind in TABLES and path.suffix.lower() in COMPRESSIONS):
            remedy = "convert it to plain text, or choose other files with a pattern"
            raise InputRefused(f"{path}: {kind} files are not read; {remedy}")
    meter = Meter(
        progress, "sources", sum(status_of(candidate.path).st_size for candidate in candidates)
    )
    files = []
    for candidate in candidates:
        file, fault = _opened(candidate, meter)
        if fault and candidate.chosen:
            where = "standard input" if candidate.name == STDIN else candidate.path
            raise InputRefused(f"{where}: {_FAULTS[fault]}")
        if fault:
            skipped.append((str(candidate.path), fault))
        else:
            files.append(file)
    meter.finish()
    return files


def _opened(candidate: Candidate, meter: Meter) -> tuple[SourceFile, str]:
    """Read a file once; return it, and its fault (a key of `_FAULTS`) or ""."""
    path = candidate.path
    kind = kind_of(path)
    records = kind in LINES | TABLES
    modified_ns = status_of(path).st_mtime_ns
    digest = hashlib.sha256()
    size = 0
    fault = ""
    for block in (raw_blocks if records else read_blocks)(path, meter):
        if size == 0:
            fault = "" if records else _fault(kind, block)
        digest.update(block)
        size += len(block)
    sha256 = digest.hexdigest()
    name = os.fsencode(candidate.name).decode("utf-8", "backslashreplace")
    file = SourceFile(
        name,
        path,
        size,
        modified_ns,
        sha256,
        candidate.group or sha256,
        candidate.has_near_copies,
        candidate.weight,
    )
    return file, fault if size else "empty"


def _fault(kind: str, begin: bytes) -> str:
    """Return why a file of this kind with this beginning is no text (a key of `_FAULTS`), or ""."""
    if _looks_binary(begin):
        return "a table by another name" if begin.startswith(_TABLES_BEGIN) else "binary"
    if kind in _ROWS:
        return "a table as text"
    return "an array of records" if kind == ".json" and _ARRAY.match(begin) else ""


_TABLES_BEGIN = (b"ARROW1", b"PAR1")
_MEANT = "call it .txt if its text is meant"
_FAULTS = {
    "empty": "empty file; give a file with text",
    "binary": BINARY,
    "a table by another name": "an Arrow or a Parquet file: name it .arrow or .parquet, and its rows are read",
    "a table as text": f"a table, whose commas would be learned, too: write it as .parquet or .jsonl; {_MEANT}",
    "an array of records": f"a JSON array that would be learned as text: write a record a line (.jsonl); {_MEANT}",
}
