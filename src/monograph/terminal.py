"""The edge of the output: whatever is written to a terminal passes `visible`, so that no text of others commands it.

Our own display alone writes through `own`, after it has made the texts in it visible.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# What a terminal obeys: control characters but for line feed and tab, line separators, marks that turn the direction of
# writing around; and halves of surrogate pairs, which no encoding has.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""`text` with each character that a terminal obeys spelled out, such as \x1b; line feeds and tabs stay."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Return the same on one line."""
    return visible(re.sub(r"\s*\n\s*", " ", text.strip()))


def warn(line: str) -> None:
    """Print a warning where results are not."""
    print(f"warning: {line}", file=sys.stderr)


def shell_words(*words: str | Path) -> str:
    """Return a command line of which a shell makes exactly these words, printed on one line or pasted."""
    return " ".join(_shell_word(str(word)) for word in words)


def _shell_word(word: str) -> str:
    if visible(word) == word and "\n" not in word:
        return shlex.quote(word)
    kept = (chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in word.encode(errors="surrogateescape"))
    return "$'" + "".join({"\\": "\\\\", "'": "\\'"}.get(each, each) for each in kept) + "'"


class Terminal:
    """A text stream that ends at a terminal: all that is written is made visible, but for what `own` gets."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.own = stream, stream.write

    def write(self, text: str) -> int:
        """Write a text that may be anybody's."""
        self.own(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def own(stream: Any, text: str) -> None:
    """Write our own escape sequences, and texts among them that are visible already."""
    getattr(stream, "own", stream.write)(text)


def guard() -> None:
    """Make the standard streams take any text: none that a wrapper closed, none that cannot be encoded or commands."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        if name == "stdin":
            continue
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif stream.isatty() and not isinstance(stream, Terminal):
            setattr(sys, name, Terminal(stream))


def takes_escapes(stream: Any) -> bool:
    """Return whether `stream` may be sent escape sequences: a terminal that is not dumb."""
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def takes_colour(stream: Any) -> bool:
    """Return whether those sequences may be colours: not with NO_COLOR (no-color.org)."""
    return takes_escapes(stream) and not os.environ.get("NO_COLOR")
