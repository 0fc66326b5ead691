"""Which parts of a text have near copies elsewhere in it, so that holding them out would measure recall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from monograph.storage.reading import read_input

# A line this long, in bytes without indentation, is hardly ever written twice by chance.
LINE_BYTES = 24
# With packages of Python 3.11 held out that share no more of their lines than this, an order-6 byte model of the rest
# needs 1.87 bits per byte; with twins (ntpath of posixpath, wave of sunau) held out as well, 1.72.
SHARED_LINES = 0.03


def groups_with_twins(groups: Mapping[str, Iterable[Path]]) -> set[str]:
    """The groups of which more than SHARED_LINES of the distinct long lines stand in another group, too."""
    lines = {name: {line for path in paths for line in _long_lines(path)} for name, paths in groups.items()}
    found_in = Counter(line for own in lines.values() for line in own)
    return {name for name, own in lines.items() if sum(found_in[line] > 1 for line in own) > SHARED_LINES * len(own)}


def _long_lines(path: Path) -> Iterable[bytes]:
    return (stripped for line in read_input(path, None).split(b"\n") if len(stripped := line.strip()) >= LINE_BYTES)
