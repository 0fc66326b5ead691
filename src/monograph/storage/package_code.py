"""A digest of this package's own code, by which a cache recognises what other code has made."""

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from monograph.storage.reading import entries, is_folder, read_input

PACKAGE = Path(__file__).parents[1]


@cache
def code_digest(*parts: str) -> str:
    """Return the hex SHA-256 of Python files of this package.

    It depends on the names and contents of the files, and not on their dates: an installation gives the
    same files new dates, and some package managers give all files one date.

    Args:
        *parts: files and folders, relative to the package. Of a folder, all files below it count. Without
            parts the whole package counts.

    Raises:
        Unreadable: the system failed to read a file.
    """
    digest = hashlib.sha256()
    for part in parts or ("",):
        for path in _python_files(PACKAGE / part):
            content = read_input(path)
            # With name and length, code that moves from one file to the next changes the digest.
            digest.update(f"{path.relative_to(PACKAGE)} {len(content)} ".encode())
            digest.update(content)
    return digest.hexdigest()


def _python_files(path: Path) -> Iterator[Path]:
    """Yield the path itself if it is a Python file, or else the Python files below the folder."""
    if path.suffix == ".py":
        yield path
    elif is_folder(path):
        for entry in entries(path):
            yield from _python_files(entry)
