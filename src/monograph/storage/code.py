"""Recognise values of keys that name code, and read the file with the code.

Code is a function in a Python file, written FILE.py:FUNCTION. Whether a value names code depends on the
value alone, and never on which files exist, because a stranger may have made them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from monograph.errors import InputRefused
from monograph.storage.reading import read_input

# The largest Python file that is read. No person writes a larger one, and a huge sparse file would exhaust
# the memory.
MAX_CODE_BYTES = 16 * 1024 * 1024
HUB = "hf://"  # a value with this prefix names a repository on the Hugging Face Hub


@dataclass(frozen=True)
class Code:
    """A function in a Python file.

    Attributes:
        value: the value that names it, FILE.py:FUNCTION.
        path: FILE.py; a relative path begins at the working folder.
        function: FUNCTION.
    """

    value: str
    path: Path
    function: str

    def source(self) -> bytes:
        """Read the file.

        Raises:
            InputRefused: the file is missing, or is larger than MAX_CODE_BYTES.
            Unreadable: the system failed to read the file.
        """
        try:
            return read_input(self.path, MAX_CODE_BYTES)
        except OSError as error:
            raise InputRefused(
                f"{self.value}: {self.path} cannot be read ({error.strerror}); it is looked for from {Path.cwd()}"
            ) from None

    def digest(self) -> str:
        """Return the hex SHA-256 of the file; raises like `source`."""
        return hashlib.sha256(self.source()).hexdigest()

    def vouched_source(self, sha256: str | None) -> bytes:
        """Read the file in order to run it, and verify its digest.

        The caller must run the returned bytes. The file may have changed if it is read again.

        Args:
            sha256: the digest that the file must have; None if the file may not run.

        Raises:
            InputRefused: the file may not run, or has another digest; or see `source`.
        """
        if sha256 is None:
            raise InputRefused(
                f"{self.value}: nobody has said that {self.path} may run; name it on the command line"
            )
        source = self.source()
        if hashlib.sha256(source).hexdigest() != sha256:
            raise InputRefused(f"{self.value}: {self.path} changed after it was read; try again")
        return source


def code_named(value: str | None) -> Code | None:
    """Return the code that a value names; None if the value does not name code.

    A value names code if the part before its last colon ends with .py and the part after it is a
    Python identifier, unless the value begins with HUB. A slash at the end names a folder instead.
    """
    if value is None or value.startswith(HUB):
        return None
    file, _, function = value.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        return None
    return Code(value, Path(file), function)


def folder_named(path: Path) -> str:
    """Return a folder's path as the value of a key, with a slash at the end if it would name code."""
    return f"{path}/" if code_named(str(path)) else str(path)


def digests(values: Iterable[str | None]) -> Mapping[str, str]:
    """Return for each value that names code the digest of its file; other values are left out.

    Raises:
        InputRefused, Unreadable: see `Code.source`.
    """
    codes = [code_named(value) for value in values]
    return {code.value: code.digest() for code in codes if code is not None}
