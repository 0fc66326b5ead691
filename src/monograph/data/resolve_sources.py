"""Locate the files of a source: the standard library, folders, patterns, saved datasets, the hub, standard input.

Packages of the standard library with near copies in other packages (`near_duplicates`) are marked and so never held
out, since a score on them would measure recall of the training text.
"""

import os
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from monograph.data.progress import Meter, Progress
from monograph.data.reading import BLOCK_BYTES
from monograph.data.tables import hub_tables, saved_tables
from monograph.errors import InputRefused, UsageError
from monograph.storage.reading import exists, is_file, is_folder, matching, read_input, refusing, resolved
from monograph.storage.writing import writing

# A line of this many bytes, without indentation, is hardly ever written twice by chance.
LINE_BYTES = 24
# The largest share of a group's long lines that other groups may have, too. With only such packages of Python 3.11 held
# out, an order-6 byte model of the rest scores 1.87 bits per byte on them; with near copies (ntpath of posixpath, wave
# of sunau) held out as well, it scores 1.72.
SHARED_LINES = 0.03


def near_duplicates(groups: Mapping[str, Iterable[Path]]) -> set[str]:
    """Return the groups that share more than SHARED_LINES of their distinct long lines with other groups."""
    lines = {name: {line for path in paths for line in _long_lines(path)} for name, paths in groups.items()}
    groups_with = Counter(line for own in lines.values() for line in own)
    return {name for name, own in lines.items() if sum(groups_with[line] > 1 for line in own) > SHARED_LINES * len(own)}


def _long_lines(path: Path) -> Iterable[bytes]:
    return (stripped for line in read_input(path, None).split(b"\n") if len(stripped := line.strip()) >= LINE_BYTES)


# Folders that are not library code: generated tables, programs, installed packages, and tests (only these have files
# that are not UTF-8).
_NOT_LIBRARY = frozenset(
    "test tests idle_test encodings pydoc_data idlelib turtledemo lib2to3 site-packages dist-packages".split()
)
_BUILD_TABLE = "_sysconfigdata"  # records how this Python was compiled, and differs between machines

HUB = "hf://"
MOST_STDIN_BYTES = 1 << 34
BINARY = "has NUL bytes, so it is binary or UTF-16; give UTF-8 text"
Skipped = list[tuple[str, str]]


class Candidate(NamedTuple):
    """A file of a source, before it is opened; see `SourceFile`, which it becomes.

    `chosen` says whether the file itself was named: then its faults are errors, while a file that was found in a folder
    or by a pattern is skipped and counted.
    """

    name: str
    path: Path
    chosen: bool
    group: str = ""
    has_near_copies: bool = False
    weight: float = 1.0


def locate(item: str, spool: Path, skipped: Skipped, progress: Progress | None) -> list[Candidate]:
    """Return the files of one item of a source; append the skipped ones to `skipped` as (path, reason)."""
    if item == "stdlib":
        return _standard_library()
    if item == "-":
        return [Candidate("stdin", spooled_stdin(spool, progress), chosen=True)]
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
    copied = near_duplicates({package: [path for _, path in files] for package, files in packages.items()})
    named = sorted((name, path, package) for package, files in packages.items() for name, path in files)
    return [Candidate(name, path, False, package, package in copied) for name, path, package in named]


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
    path, meter = spool / "stdin", Meter(progress, "stdin", None)
    with writing(spool), open(path, "wb") as file:
        most = min(MOST_STDIN_BYTES, shutil.disk_usage(spool).free // 2)
        while block := sys.stdin.buffer.read(BLOCK_BYTES):
            if not meter.done and looks_binary(block):
                raise InputRefused(f"standard input: {BINARY}")
            if meter.done + len(block) > most:
                bound = f"{most / 2**30:.3g} GiB ({MOST_STDIN_BYTES >> 30} GiB, or half of what is free in {spool})"
                raise InputRefused(f"standard input: has more than {bound}; write it to a file and give that")
            file.write(block)
            meter.add(len(block))
    meter.finish()
    return path


def looks_binary(begin: bytes) -> bool:
    """Return whether a file with this beginning is binary by git's rule, a NUL in its first 8,192 bytes."""
    return b"\0" in begin[:8192]


def _folder(folder: Path, skipped: Skipped) -> list[Candidate]:
    name = resolved(folder).name
    return [Candidate(f"{name}/{relative}", path, chosen=False) for relative, path in _walk(folder, skipped)]


def _pattern(pattern: Path, skipped: Skipped) -> list[Candidate]:
    fixed = next(parent for parent in pattern.parents if not any(mark in str(parent) for mark in "*?["))
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


def _walk(folder: Path, skipped: Skipped, leave_out: frozenset[str] = frozenset()) -> list[tuple[str, Path]]:
    """Return (relative name, path) of the regular files under a folder, sorted; links do not enter a folder twice."""
    files: list[tuple[str, Path]] = []
    pending, entered = [(folder, "")], set()
    with refusing(folder):
        while pending:
            current, prefix = pending.pop()
            status = os.stat(current)
            if (status.st_dev, status.st_ino) in entered:
                continue
            entered.add((status.st_dev, status.st_ino))
            if (tables := saved_tables(current)) is not None:
                files.extend((prefix + path.relative_to(current).as_posix(), path) for path in tables)
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
