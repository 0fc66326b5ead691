"""Name a function in a Python file. Everything that asks whether a value names code, or reads such
a file, asks here.

What is code depends on the value alone, never on the files that lie around, since those may be a
stranger's.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from monograph.errors import InputRefused
from monograph.storage.reading import read_input

# Longer than any program that a person writes; a sparse file may be huge.
MOST_CODE_BYTES = 16 * 1024 * 1024
HUB = "hf://"  # a value that begins like this names a repository


@dataclass(frozen=True)
class Code:
    """A function in a Python file, as FILE.py:FUNCTION names it.

    Attributes:
        value: the value as it was given.
        path: the file; it is looked for from the working folder.
        function: the function's name.
    """

    value: str
    path: Path
    function: str

    def source(self) -> bytes:
        """Read the file.

        Raises:
            InputRefused: it cannot be read, or is larger than MOST_CODE_BYTES.
            Unreadable: the system failed to read it.
        """
        try:
            return read_input(self.path, MOST_CODE_BYTES)
        except OSError as error:
            raise InputRefused(
                f"{self.value}: {self.path} cannot be read ({error.strerror}); it is looked for from {Path.cwd()}"
            ) from None

    def digest(self) -> str:
        """Return the hex SHA-256 of the file; raises like `source`."""
        return hashlib.sha256(self.source()).hexdigest()

    def vouched_source(self, sha256: str | None) -> bytes:
        """Read the file to run it: the caller runs these bytes, and opens the file no second time.

        Args:
            sha256: the digest of the file that may run; None if none may.

        Raises:
            InputRefused: no file may run, or this is not the one that may; or see `source`.
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
    """Return the code that a value names, or None if it names something else.

    A value is code if what stands before its last colon ends with .py and what stands after it is a
    Python name, unless the value begins with HUB. A folder that is called so is named with a slash
    at the end.
    """
    if value is None or value.startswith(HUB):
        return None
    file, _, function = value.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        return None
    return Code(value, Path(file), function)


def folder_named(path: Path) -> str:
    """Return the name of a folder, with a slash at the end if it would name code without one."""
    return f"{path}/" if code_named(str(path)) else str(path)


def digests(values: Iterable[str | None]) -> Mapping[str, str]:
    """Return the digest of each file that the values name as code, by value; raises like
    `Code.source`.
    """
    codes = [code_named(value) for value in values]
    return {code.value: code.digest() for code in codes if code is not None}
