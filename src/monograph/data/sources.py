"""Finds the text files that a `source` means: the standard library, files, folders, glob patterns, standard input."""

from __future__ import annotations

import glob
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from monograph.data.files import writing
from monograph.data.progress import Meter, Progress
from monograph.data.text import BLOCK_BYTES, refuse_unreadable, sha256_of, status_of
from monograph.data.twins import groups_with_twins
from monograph.errors import InputRefused, UsageError

# Not library code: generated tables, programs, other people's packages, and tests (the only files that are not UTF-8).
_NOT_LIBRARY = frozenset(
    "test tests idle_test encodings pydoc_data idlelib turtledemo lib2to3 site-packages dist-packages".split()
)
_BUILD_TABLE = "_sysconfigdata"  # how this Python was compiled: a table that differs between machines


# Read as plain text these would train on their syntax or on nothing.
_NOT_PLAIN_TEXT = frozenset(
    ".jsonl .ndjson .parquet .arrow .gz .zst .bz2 .xz .lz4 .zip .tar .tgz .7z"
    " .npy .npz .bin .safetensors .pt .pth .gguf .pdf .docx".split()
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One text file.

    Attributes:
        name: what it is called in the corpus: relative to the folder or pattern it was found by, so that moving the
            data changes nothing.
        path: where it is read from.
        size: bytes.
        modified_ns: time of its last change, taken before it was hashed.
        sha256: of its contents, hex.
        group: files of one group are never separated by the held-out split (a package; copies of one content).
        twin: near copies of the group's text are in other groups, so it is not held out (see `monograph.data.twins`).
    """

    name: str
    path: Path
    size: int
    modified_ns: int
    sha256: str
    group: str
    twin: bool = False


@dataclass(frozen=True)
class Found:
    """What a source turned out to be: its files in a fixed order, and what was passed over as (path, reason)."""

    name: str
    files: tuple[SourceFile, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def bytes(self) -> int:
        """Bytes of text in all files."""
        return sum(file.size for file in self.files)

    @property
    def sha256(self) -> str:
        """Hex digest of names, sizes and contents, in order."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{len(file.name.encode())}:{file.name}:{file.size}:{file.sha256}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    path: Path
    # Named one by one: a fault in it is an error, where a folder's or pattern's file is passed over and counted.
    chosen: bool
    group: str = ""
    twin: bool = False


def find(source: str | Path | Sequence[str | Path], spool: Path, progress: Progress | None = None) -> Found:
    """The files of `source`, hashed.

    Args:
        source: "stdlib", "-" (standard input), a file, a folder (searched recursively, hidden entries left out), a glob
            pattern, or a list of these. A file called "-" or "stdlib" is meant by "./-", "./stdlib".
        spool: a folder for standard input's bytes; must live as long as the result.
        progress: see `monograph.data.progress`.

    Raises:
        InputRefused: nothing there, an unsupported kind of file, an empty or binary file named one by one, or no text
            at all.
    """
    items = [source] if isinstance(source, str | Path) else list(source)
    if not items:
        raise UsageError("data.source: an empty list; give 'stdlib', a file, a folder, a pattern or '-'")
    skipped: list[tuple[str, str]] = []
    candidates = [candidate for item in items for candidate in _locate(item, spool, skipped, progress)]
    names = ["stdin" if str(item) == "-" else str(item) for item in items]
    name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    files = _hashed(_once_each(candidates, skipped), skipped, progress)
    if not files:
        reasons = ", ".join(sorted({reason for _, reason in skipped})) or "it has no files"
        raise InputRefused(f"{name}: no text to train on ({reasons})")
    return Found(name=name, files=tuple(files), skipped=tuple(skipped))


def _locate(
    item: str | Path, spool: Path, skipped: list[tuple[str, str]], progress: Progress | None
) -> list[_Candidate]:
    if str(item) == "stdlib":
        return _standard_library()
    if str(item) == "-":
        return [_Candidate("stdin", spooled_stdin(spool, progress), chosen=True)]
    path = Path(item).expanduser()
    if os.path.isdir(path):
        return _folder(path, skipped)
    if os.path.isfile(path):
        return [_Candidate(path.name, path, chosen=True)]
    if os.path.exists(path):
        raise InputRefused(f"{path}: not a regular file; for a pipe give '-' and standard input")
    if any(mark in str(item) for mark in "*?["):
        return _pattern(path, skipped)
    raise InputRefused(f"{path}: no such file or folder (looked from {Path.cwd()})")


def _standard_library() -> list[_Candidate]:
    root = Path(sysconfig.get_path("stdlib"))
    packages: dict[str, list[tuple[str, Path]]] = {}
    for name, path in _walk(root, [], leave_out=_NOT_LIBRARY):
        if path.suffix == ".py" and not path.name.startswith(_BUILD_TABLE):
            packages.setdefault(name.split("/")[0].removesuffix(".py"), []).append((name, path))
    if not packages:
        raise InputRefused(
            f"{root}: this Python has no standard library as .py files; give your own text as data.source"
        )
    twins = groups_with_twins({package: [path for _, path in files] for package, files in packages.items()})
    named = sorted((name, path, package) for package, files in packages.items() for name, path in files)
    return [_Candidate(name, path, False, package, package in twins) for name, path, package in named]


def spooled_stdin(spool: Path, progress: Progress | None) -> Path:
    """Write standard input to the file `stdin` in a folder; raises UsageError for a terminal."""
    if sys.stdin.isatty():
        raise UsageError(
            "data.source '-': standard input is a terminal; pipe text in, as in: monograph train - < book.txt"
        )
    path, meter = spool / "stdin", Meter(progress, "stdin", None)
    with writing(spool), open(path, "wb") as file:
        while block := sys.stdin.buffer.read(BLOCK_BYTES):
            file.write(block)
            meter.add(len(block))
    meter.finish()
    return path


def _folder(folder: Path, skipped: list[tuple[str, str]]) -> list[_Candidate]:
    name = folder.resolve().name
    return [_Candidate(f"{name}/{relative}", path, chosen=False) for relative, path in _walk(folder, skipped)]


def _pattern(pattern: Path, skipped: list[tuple[str, str]]) -> list[_Candidate]:
    fixed = next(parent for parent in pattern.parents if not any(mark in str(parent) for mark in "*?["))
    found: list[_Candidate] = []
    for hit in map(Path, sorted(glob.glob(str(pattern), recursive=True))):
        if hit.is_dir():
            # "texts/*" means the files; "**" reports folders beside the files that it finds inside them.
            found.extend(_folder(hit, skipped) if "**" not in str(pattern) else ())
        elif hit.is_file():
            found.append(_Candidate(hit.relative_to(fixed).as_posix(), hit, chosen=False))
        else:
            skipped.append((str(hit), "not a regular file"))
    if not found:
        raise InputRefused(f"{pattern}: no file matches this pattern (looked from {Path.cwd()})")
    return found


def _walk(
    folder: Path, skipped: list[tuple[str, str]], leave_out: frozenset[str] = frozenset()
) -> list[tuple[str, Path]]:
    """(relative name, path) of the regular files under a folder, sorted; no folder is entered twice."""
    found: list[tuple[str, Path]] = []
    pending, entered = [(folder, "")], set()
    try:
        while pending:
            current, prefix = pending.pop()
            status = os.stat(current)
            if (status.st_dev, status.st_ino) in entered:
                continue
            entered.add((status.st_dev, status.st_ino))
            for entry in sorted(os.scandir(current), key=lambda entry: entry.name):
                if entry.name in leave_out:
                    continue
                if entry.name.startswith(".") or entry.name == "__pycache__":
                    skipped.append((entry.path, "hidden"))
                elif os.path.isdir(entry.path):
                    pending.append((Path(entry.path), f"{prefix}{entry.name}/"))
                elif os.path.isfile(entry.path):
                    found.append((prefix + entry.name, Path(entry.path)))
                else:
                    skipped.append((entry.path, "not a regular file"))
    except OSError as error:
        raise refuse_unreadable(Path(error.filename or folder), error) from None
    return sorted(found)


def _once_each(candidates: Iterable[_Candidate], skipped: list[tuple[str, str]]) -> list[_Candidate]:
    # A file reached by two ways is one document: twice would double its weight, or put it on both sides of the held-out
    # split.
    unique: dict[str, _Candidate] = {}
    for candidate in candidates:
        real = os.path.realpath(candidate.path)
        if real in unique:
            skipped.append((str(candidate.path), "the same file as another"))
        else:
            unique[real] = candidate
    return list(unique.values())


def _hashed(
    candidates: list[_Candidate], skipped: list[tuple[str, str]], progress: Progress | None
) -> list[SourceFile]:
    for candidate in candidates:
        if candidate.path.suffix.lower() in _NOT_PLAIN_TEXT:
            remedy = "convert it to plain text, or choose other files with a pattern"
            raise InputRefused(f"{candidate.path}: {candidate.path.suffix} files are not read yet; {remedy}")
    meter = Meter(progress, "sources", sum(status_of(candidate.path).st_size for candidate in candidates))
    files = []
    for candidate in candidates:
        modified_ns = status_of(candidate.path).st_mtime_ns
        sha256, size, has_nul = sha256_of(candidate.path, meter)
        fault = "empty" if size == 0 else "binary" if has_nul else ""
        if fault and candidate.chosen:
            raise InputRefused(f"{_shown(candidate)}: {_FAULTS[fault]}")
        if fault:
            skipped.append((str(candidate.path), fault))
            continue
        name = os.fsencode(candidate.name).decode("utf-8", "backslashreplace")
        files.append(
            SourceFile(name, candidate.path, size, modified_ns, sha256, candidate.group or sha256, candidate.twin)
        )
    meter.finish()
    return files


_FAULTS = {
    "empty": "empty file; give a file with text",
    "binary": "has NUL bytes, so it is binary or UTF-16; give UTF-8 text",
}


def _shown(candidate: _Candidate) -> str:
    return "standard input" if candidate.name == "stdin" else str(candidate.path)
