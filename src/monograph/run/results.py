"""A folder for what a command found out: a new one, there as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from monograph.errors import InputRefused
from monograph.interrupts import taken_back
from monograph.run.folder import claim_new_folder, explained
from monograph.storage.reading import entries, exists, is_file


@contextmanager
def results_folder(out: Path | None, root: Path) -> Iterator[Path]:
    """A folder for the block to write files into: `out`, or `root`/YYYY-MM-DD-HHMM; none is left if the block fails.

    Raises:
        InputRefused: `out` is a file, holds something, or cannot be made.
        DiskFull: it cannot be made for want of space.
    """
    if out is not None and (is_file(out) or entries(out)):
        raise InputRefused(f"--out {out}: holds something already; name a new folder")
    given = root if out is None else out
    new = [each for each in (given, *given.parents) if not exists(each)]
    with explained(given):
        folder = claim_new_folder(root) if out is None else out
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with taken_back():
            yield folder
    except BaseException:
        with suppress(OSError):  # another program may have put something there meanwhile
            for file in folder.iterdir():
                file.unlink()
            for each in [*([folder] if out is None else []), *new]:
                each.rmdir()
        raise
