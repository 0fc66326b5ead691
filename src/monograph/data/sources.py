"""Resolve a `source` to its files in a fixed order, with their hashes and weights (`find_sources`).

A source is the standard library, a file, a folder, a pattern, a saved dataset, a dataset of the
hub, or standard input. Standard input is first copied to a file, in a folder that the caller gives, the
*spool*.

Some packages of the standard library have near copies in other packages (`near_duplicates`). They are
marked, so that they are never held out: a score on such a package would measure how well a model recalls
its training text.
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

from monograph.data import MAX_WEIGHT, MIN_WEIGHT
from monograph.data.progress import Meter, ProgressCallback
from monograph.data.reading import (
    BLOCK_BYTES,
    COMPRESSIONS,
    decompressed_blocks,
    raw_blocks,
    status_of,
)
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
from monograph.storage.writing import cache_errors_explained

# A line is *long* from this size on, without indentation. Two programmers hardly ever write an
# equal line of this size by chance.
LONG_LINE_BYTES = 24
# If other groups have more than this share of a group's long lines, the group counts as a near duplicate.
# Measured on the packages of Python 3.11, with a model that predicts a byte from the six bytes before it:
# without near duplicates among the held-out packages, it scores 1.87 bits per byte on them. With near
# duplicates (ntpath, whose near copy is posixpath, and wave, whose near copy is sunau), it scores 1.72,
# because it has seen their text.
MAX_SHARED_LINES = 0.03


def near_duplicates(groups: Mapping[str, Iterable[Path]]) -> set[str]:
    """Return the groups that share more than MAX_SHARED_LINES of their long lines with other groups.

    Equal lines within a group count once.

    Args:
        groups: {name of a group: its files}.
    """
    lines = {
        name: {line for path in paths for line in _long_lines(path)}
        for name, paths in groups.items()
    }
    # For each line, the number of groups that have it.
    group_counts = Counter(line for group_lines in lines.values() for line in group_lines)
    duplicates = set()
    for name, group_lines in lines.items():
        shared = sum(group_counts[line] > 1 for line in group_lines)
        if shared > MAX_SHARED_LINES * len(group_lines):
            duplicates.add(name)
    return duplicates


def _long_lines(path: Path) -> Iterable[bytes]:
    """Yield the long lines of a file, without indentation."""
    for line in read_input(path, None).split(b"\n"):
        stripped = line.strip()
        if len(stripped) >= LONG_LINE_BYTES:
            yield stripped


# Folders of the standard library that are not library code: tests, generated tables, programs and
# installed packages. Some files of the tests are not UTF-8; all other files are.
_NOT_LIBRARY_CODE = frozenset(
    "test tests idle_test encodings pydoc_data idlelib turtledemo lib2to3 site-packages dist-packages".split()
)
# The beginning of the name of a file that records how this Python was compiled. The file's content
# differs between machines, so it is left out.
_BUILD_TABLE_PREFIX = "_sysconfigdata"

# The name of the file that has a copy of standard input.
STDIN = "stdin"
MAX_STDIN_BYTES = 1 << 34
_BINARY_FAULT = "has NUL bytes, so it is binary or UTF-16; give UTF-8 text"
# A list of (path, reason), to which functions append the files that they skip.
Skipped = list[tuple[str, str]]


class UnreadFile(NamedTuple):
    """A file of a source before it is read.

    `is_named` says whether the user named this file itself, and not a folder that has it or a pattern
    that matches it. If a named file has a fault, that is an error. Any other file with a fault is skipped
    and counted. The other attributes are those of `SourceFile`.
    """

    name: str
    path: Path
    is_named: bool
    group: str = ""
    has_near_copies: bool = False
    weight: float = 1.0


def _locate(
    item: str, spool: Path, skipped: Skipped, progress: ProgressCallback | None
) -> list[UnreadFile]:
    """Return the files of one item of a source.

    Args:
        item: the item, such as a path.
        spool: a folder for a copy of standard input.
        skipped: the list to which skipped files are appended.
        progress: called to report progress; None: nothing is reported.
    """
    if item == "stdlib":
        return _standard_library()
    if item == "-":
        return [UnreadFile(STDIN, spooled_stdin(spool, progress), is_named=True)]
    if item.startswith(HUB):
        return [UnreadFile(f"{item}/{path.name}", path, is_named=True) for path in hub_tables(item)]
    path = Path(os.path.expanduser(item))
    if is_folder(path):
        return _folder(path, skipped)
    if is_file(path):
        return [UnreadFile(path.name, path, is_named=True)]
    if exists(path):
        raise InputRefused(f"{path}: not a regular file; for a pipe give '-' and standard input")
    if any(mark in item for mark in "*?["):
        return _pattern(path, skipped)
    raise InputRefused(f"{path}: no such file or folder (looked from {Path.cwd()})")


def _standard_library() -> list[UnreadFile]:
    """Return the files of this Python's standard library, grouped by package."""
    root = Path(sysconfig.get_path("stdlib"))
    packages: dict[str, list[tuple[str, Path]]] = {}  # (name, path) of the files of each package
    not_reported: Skipped = []  # the user is not told about skipped files of Python
    for name, path in _walk(root, not_reported, leave_out=_NOT_LIBRARY_CODE):
        if path.suffix == ".py" and not path.name.startswith(_BUILD_TABLE_PREFIX):
            package = name.split("/")[0].removesuffix(".py")
            packages.setdefault(package, []).append((name, path))
    if not packages:
        raise InputRefused(
            f"{root}: this Python has no standard library as .py files; give your own text as data.source"
        )
    with_near_copies = near_duplicates(
        {package: [path for _, path in files] for package, files in packages.items()}
    )
    in_order = sorted(
        (name, path, package) for package, files in packages.items() for name, path in files
    )
    return [
        UnreadFile(
            name, path, is_named=False, group=package, has_near_copies=package in with_near_copies
        )
        for name, path, package in in_order
    ]


def spooled_stdin(spool: Path, progress: ProgressCallback | None) -> Path:
    """Write standard input to a file in the folder `spool`, and return the file's path.

    Raises:
        UsageError: standard input is a terminal.
        InputRefused: standard input is binary, or larger than 16 GiB or half of the free space.
    """
    if sys.stdin.isatty():
        raise UsageError(
            "data.source '-': standard input is a terminal; pipe text in, as in: monograph train - < book.txt"
        )
    path = spool / STDIN
    meter = Meter(progress, STDIN, None)
    with cache_errors_explained(spool), open(path, "wb") as file:
        limit_bytes = min(MAX_STDIN_BYTES, shutil.disk_usage(spool).free // 2)
        while block := sys.stdin.buffer.read(BLOCK_BYTES):
            is_first_block = meter.done == 0
            if is_first_block and _looks_binary(block):
                raise InputRefused(f"standard input: {_BINARY_FAULT}")
            if meter.done + len(block) > limit_bytes:
                raise InputRefused(
                    f"standard input: has more than {limit_bytes / 2**30:.3g} GiB ({MAX_STDIN_BYTES >> 30} GiB, "
                    f"or half of what is free in {spool}); write it to a file and give that"
                )
            file.write(block)
            meter.add(len(block))
    meter.finish()
    return path


def _looks_binary(begin: bytes) -> bool:
    """Return whether a file with this beginning is binary.

    By git's rule, a binary file has a NUL in its first 8,192 bytes.
    """
    return b"\0" in begin[:8192]


def _folder(folder: Path, skipped: Skipped) -> list[UnreadFile]:
    """Return the files of a folder, named by their paths from the folder on."""
    folder_name = resolved(folder).name
    return [
        UnreadFile(f"{folder_name}/{relative_name}", path, is_named=False)
        for relative_name, path in _walk(folder, skipped)
    ]


def _pattern(pattern: Path, skipped: Skipped) -> list[UnreadFile]:
    """Return the files that a pattern matches, named by their paths below its base."""
    # The base is the innermost folder of the pattern whose path has no wildcards.
    base = next(
        parent for parent in pattern.parents if not any(mark in str(parent) for mark in "*?[")
    )
    candidates: list[UnreadFile] = []
    for path in matching(pattern):
        if is_folder(path):
            # If a pattern such as "texts/*" matches a folder, the folder's files are meant. A pattern
            # with "**" matches these files as well, so they must not be added a second time.
            if "**" not in str(pattern):
                candidates.extend(_folder(path, skipped))
        elif is_file(path):
            candidates.append(UnreadFile(path.relative_to(base).as_posix(), path, is_named=False))
        else:
            skipped.append((str(path), "not a regular file"))
    if not candidates:
        raise InputRefused(f"{pattern}: no file matches this pattern (looked from {Path.cwd()})")
    return candidates


def _walk(
    folder: Path, skipped: Skipped, leave_out: frozenset[str] = frozenset()
) -> list[tuple[str, Path]]:
    """Return (name relative to the folder, path) of the regular files under a folder, sorted.

    A folder is entered once, even if links lead to it again. If a folder has a saved dataset, only the
    dataset's tables are returned of that folder.

    Args:
        folder: the folder.
        skipped: the list to which skipped files are appended.
        leave_out: names of files and folders that are left out and not counted as skipped.
    """
    files: list[tuple[str, Path]] = []
    pending = [(folder, "")]  # (folder, the beginning of its files' names) of folders to enter
    entered = set()  # the identities of folders that have been entered
    with refusing(folder):
        while pending:
            current, prefix = pending.pop()
            status = os.stat(current)
            identity = (status.st_dev, status.st_ino)
            if identity in entered:
                continue
            entered.add(identity)
            tables = saved_tables(current)
            if tables is not None:
                for path in tables:
                    files.append((prefix + path.relative_to(current).as_posix(), path))
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


LINE_SUFFIXES = frozenset((".jsonl", ".ndjson"))
TABLE_SUFFIXES = frozenset((".parquet", ".arrow"))
# Files with these suffixes are refused. As plain text, they would teach a model their syntax, or
# nothing.
_UNSUPPORTED_SUFFIXES = frozenset(
    ".bz2 .xz .lz4 .zip .tar .tgz .7z .npy .npz .bin .safetensors .pt .pth .gguf .pdf .docx".split()
) | set(COMPRESSIONS)
# Tables in plain text. They count as faulty, because a model would also learn their syntax.
_TEXT_TABLE_SUFFIXES = frozenset((".csv", ".tsv"))
# The beginning of a .json file that is an array of records: a byte order mark of UTF-8, if there is
# one, and then "[{".
_ARRAY_OF_RECORDS = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")
# The beginnings of Arrow and Parquet files.
_TABLE_MAGIC = (b"ARROW1", b"PAR1")
_IF_TEXT = "call it .txt if its text is meant"
# {the fault of a file: the message about it if the user named the file}. Other files are skipped, and counted by
# these faults.
_FAULTS = {
    "empty": "empty file; give a file with text",
    "binary": _BINARY_FAULT,
    "a table by another name": "an Arrow or a Parquet file: name it .arrow or .parquet, and its rows are read",
    "a table as text": f"a table, whose commas would be learned, too: write it as .parquet or .jsonl; {_IF_TEXT}",
    "an array of records": f"a JSON array that would be learned as text: write a record a line (.jsonl); {_IF_TEXT}",
}


class SourceFile(NamedTuple):
    """A file with a text or with records.

    Attributes:
        name: the name in the corpus, relative to the folder or pattern of the source, so that it
            stays the same when the data is moved.
        path: the file.
        size: bytes of a decompressed text, or bytes on the disk of a file of records.
        modified_ns: time of the last change, as it was before the file was hashed.
        sha256: hex digest of the bytes that `size` counts.
        group: the name of the file's group: a package, or all files with the same bytes. A group is
            held out of training as a whole, or not at all.
        has_near_copies: whether other groups have near copies of the group's text
            (`near_duplicates`). Such a group is not held out.
        weight: number of times that an epoch sees the file.
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
        """Return the suffix of the file's name, see `suffix_of`."""
        return suffix_of(self.path)

    @property
    def has_records(self) -> bool:
        """Return whether the file has records, each of which is a document."""
        return self.suffix in LINE_SUFFIXES | TABLE_SUFFIXES


class Sources(NamedTuple):
    """The files of a source in a fixed order.

    Attributes:
        name: the source as it was given.
        files: the files.
        skipped: (path, reason) of each skipped file.
    """

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


def find_sources(
    source: str | Path | Sequence[str | Path],
    spool: Path,
    progress: ProgressCallback | None = None,
    weights: Sequence[float] | None = None,
) -> Sources:
    """Find and hash the files of `source`.

    Args:
        source: "stdlib", "-" (standard input), a file, a folder (searched recursively, without
            hidden entries), a glob pattern, "hf://OWNER/NAME", or a list of these. A file called
            "-" or "stdlib" is written "./-" or "./stdlib".
        spool: a folder for a copy of standard input; it must exist as long as the result is used.
        progress: called to report progress (`monograph.data.progress`); None: nothing is reported.
        weights: number of times that an epoch sees each of the sources; None: once each.

    Raises:
        UsageError: a weight is out of range, there are more or fewer weights than sources, or a
            file has two weights.
        InputRefused: nothing is there, a kind of file is not supported, a file that the user named
            is empty or binary, a compressed text is damaged, or there is no text at all.
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
    files = _read_files(_deduplicated(candidates, skipped), skipped, progress)
    if not files:
        reasons = ", ".join(sorted({reason for _, reason in skipped})) or "it has no files"
        raise InputRefused(f"{name}: no text in it ({reasons})")
    return Sources(name=name, files=tuple(files), skipped=tuple(skipped))


def _weights(items: Sequence[object], weights: Sequence[float] | None) -> Sequence[float]:
    """Return the weight of each item, after checking the weights; 1 if there are none."""
    if weights is None:
        return [1.0] * len(items)
    if len(weights) != len(items):
        raise UsageError(
            f"data.weights has {len(weights)} numbers and data.source {len(items)}: give one for each"
        )
    for weight in weights:
        if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise UsageError(
                f"data.weights: {weight:g} is not from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
            )
    return [float(weight) for weight in weights]


def source_paths(source: str | Sequence[str]) -> list[Path]:
    """Return the paths of a source's files without reading the files.

    Standard input and the standard library are left out.

    Raises:
        UsageError, InputRefused: as in `find_sources`.
    """
    items = [source] if isinstance(source, str) else source
    paths = list[Path]()
    for item in items:
        if item not in ("-", "stdlib"):
            # The spool is not used, since the item is not standard input. Skipped files are not reported.
            candidates = _locate(item, spool=Path(), skipped=[], progress=None)
            paths += [candidate.path for candidate in candidates]
    return paths


def _deduplicated(candidates: Iterable[UnreadFile], skipped: Skipped) -> list[UnreadFile]:
    """Return each file once. Otherwise a file that two items name would get twice its weight.

    Raises:
        UsageError: a file has two weights.
    """
    unique: dict[Path, UnreadFile] = {}
    for candidate in candidates:
        first = unique.setdefault(resolved(candidate.path), candidate)
        if first is candidate:
            continue
        if first.weight != candidate.weight:
            raise UsageError(
                f"data.source: {candidate.path} has the weights {first.weight:g} and {candidate.weight:g}; "
                "leave it out at one place"
            )
        skipped.append((str(candidate.path), "the same file as another"))
    return list(unique.values())


def suffix_of(path: Path) -> str:
    """Return the suffix of a file's name in lower case; of NAME.jsonl.gz, for example, ".jsonl"."""
    uncompressed = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    return uncompressed.suffix.lower()


def place_of(path: Path, record: int) -> str:
    """Return a record's place for a message, such as FILE:LINE."""
    separator = ":" if suffix_of(path) in LINE_SUFFIXES else ", row "
    return f"{path}{separator}{record}"


def _read_files(
    candidates: list[UnreadFile], skipped: Skipped, progress: ProgressCallback | None
) -> list[SourceFile]:
    """Read and hash files. Return those without a fault, and append the others to `skipped`.

    Raises:
        InputRefused: a kind of file is not read, or a file that the user named has a fault.
    """
    for candidate in candidates:
        path = candidate.path
        suffix = suffix_of(path)
        is_compressed_table = suffix in TABLE_SUFFIXES and path.suffix.lower() in COMPRESSIONS
        if suffix in _UNSUPPORTED_SUFFIXES or is_compressed_table:
            raise InputRefused(
                f"{path}: {suffix} files are not read; convert it to plain text, or choose other files with a pattern"
            )
    total_bytes = sum(status_of(candidate.path).st_size for candidate in candidates)
    meter = Meter(progress, "sources", total_bytes)
    files = []
    for candidate in candidates:
        file, fault = _read_file(candidate, meter)
        if fault and candidate.is_named:
            where = "standard input" if candidate.name == STDIN else candidate.path
            raise InputRefused(f"{where}: {_FAULTS[fault]}")
        if fault:
            skipped.append((str(candidate.path), fault))
        else:
            files.append(file)
    meter.finish()
    return files


def _read_file(candidate: UnreadFile, meter: Meter) -> tuple[SourceFile, str]:
    """Read and hash a file.

    Returns:
        The file.
        The file's fault, a key of `_FAULTS`; "": it has none.
    """
    path = candidate.path
    suffix = suffix_of(path)
    has_records = suffix in LINE_SUFFIXES | TABLE_SUFFIXES
    # The time is read before the file, so that a change while it is read is noticed later.
    modified_ns = status_of(path).st_mtime_ns
    # Records are decompressed only when they are read. A text is decompressed here already, because
    # its size is needed.
    blocks = raw_blocks(path, meter) if has_records else decompressed_blocks(path, meter)
    digest = hashlib.sha256()
    size = 0
    fault = ""
    for block in blocks:
        is_first_block = size == 0
        if is_first_block and not has_records:
            fault = _text_fault(suffix, block)
        digest.update(block)
        size += len(block)
    if size == 0:
        fault = "empty"
    sha256 = digest.hexdigest()
    name = os.fsencode(candidate.name).decode("utf-8", "backslashreplace")
    file = SourceFile(
        name=name,
        path=path,
        size=size,
        modified_ns=modified_ns,
        sha256=sha256,
        group=candidate.group or sha256,
        has_near_copies=candidate.has_near_copies,
        weight=candidate.weight,
    )
    return file, fault


def _text_fault(suffix: str, begin: bytes) -> str:
    """Return why a file is not a text, a key of `_FAULTS`; "": it may be a text.

    Args:
        suffix: the suffix of the file's name, see `suffix_of`.
        begin: the beginning of the file.
    """
    if _looks_binary(begin):
        return "a table by another name" if begin.startswith(_TABLE_MAGIC) else "binary"
    if suffix in _TEXT_TABLE_SUFFIXES:
        return "a table as text"
    if suffix == ".json" and _ARRAY_OF_RECORDS.match(begin):
        return "an array of records"
    return ""
