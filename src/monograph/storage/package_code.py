"""A digest of this package's own code.

The key of a cache's entry contains it, so that nothing is taken from the cache that other code has made.
"""

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from monograph.storage.reading import entries, is_folder, read_input

PACKAGE = Path(__file__).parents[1]  # the folder of the package `monograph`


@cache
def code_digest(*parts: str) -> str:
    """Return the hex SHA-256 of Python files of this package.

    It depends on the names and contents of the files, and not on their dates. An installation gives the
    same files new dates, and some package managers give all files the same date.

    Args:
        *parts: files and folders, relative to the package. A folder stands for all Python files below it. No
            parts stand for the whole package.

    Raises:
        Unreadable: the system failed to read a file.
    """
    digest = hashlib.sha256()
    folders_and_files = [PACKAGE / part for part in parts] if parts else [PACKAGE]
    for folder_or_file in folders_and_files:
        for path in _python_files(folder_or_file):
            content = read_input(path)
            # The name and the length are included, so that the digest also changes if code moves from the end
            # of one file to the beginning of the next.
            digest.update(f"{path.relative_to(PACKAGE)} {len(content)} ".encode())
            digest.update(content)
    return digest.hexdigest()


def _python_files(path: Path) -> Iterator[Path]:
    """Yield the path itself if it is a Python file, or the Python files below it if it is a folder."""
    if path.suffix == ".py":
        yield path
    elif is_folder(path):
        for entry in entries(path):
            yield from _python_files(entry)
