"""Recognise a change of this package's own code, for what is kept in caches and made by that code."""

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from monograph.storage.reading import entries, is_folder, read_input

PACKAGE = Path(__file__).parents[1]


@cache
def code_digest(*parts: str) -> str:
    """Return the hex SHA-256 of Python files of this package.

    What the files contain decides, and not their sizes and dates: an installation gives the same files
    new dates, and some package managers give all files one date.

    Args:
        *parts: files, and folders with all below them, relative to the package; none for all of it.

    Raises:
        Unreadable: the system failed to read a file.
    """
    digest = hashlib.sha256()
    for part in parts or ("",):
        for path in _python_files(PACKAGE / part):
            content = read_input(path)
            # The name and the length keep what moves from one file to another apart.
            digest.update(f"{path.relative_to(PACKAGE)} {len(content)} ".encode())
            digest.update(content)
    return digest.hexdigest()


def _python_files(path: Path) -> Iterator[Path]:
    """Yield a path if it is a Python file's, or the Python files below a folder."""
    if path.suffix == ".py":
        yield path
    elif is_folder(path):
        for entry in entries(path):
            yield from _python_files(entry)
