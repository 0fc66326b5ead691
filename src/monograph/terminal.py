"""Guard the output: text of any origin is printed so that it cannot control the terminal.

All text that is written to a terminal passes `visible`. Only Monograph's own display writes escape
sequences, through `write_as_is`, and passes the texts in it through `visible` first.
"""

import io
import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

# Characters that a terminal obeys: control characters except line feed and tab, line separators,
# and marks that reverse the direction of writing. Lone surrogates are included because no encoding
# can write them.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Return a text in which characters that a terminal obeys are spelled out, such as \x1b.

    Line feeds and tabs stay.
    """
    return _OBEYED.sub(lambda match: ascii(match[0])[1:-1], text)  # without the quotes of `ascii`


def one_line(text: str) -> str:
    """Return the text as one visible line, its lines joined by spaces."""
    return visible(re.sub(r"\s*\n\s*", " ", text.strip()))


def warn(line: str) -> None:
    """Print a warning to standard error, so that it does not mix with results."""
    print(f"warning: {line}", file=sys.stderr)


def shell_words(*words: str | Path) -> str:
    """Return one printable line that a user can paste into a shell, which splits it into these words."""
    return " ".join(_shell_word(str(word)) for word in words)


def _shell_word(word: str) -> str:
    """Return one word as a shell has to read it, without characters that a terminal obeys."""
    if visible(word) == word and "\n" not in word:
        return shlex.quote(word)
    # The form $'...' of bash, in which any byte can be written as \x and two digits.
    letters = (
        chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}"
        for byte in word.encode(errors="surrogateescape")
    )
    escapes = {"\\": "\\\\", "'": "\\'"}
    return "$'" + "".join(escapes.get(letter, letter) for letter in letters) + "'"


class Terminal:
    """A wrapper of a terminal's text stream that passes all text through `visible`.

    Its attribute `write_as_is` is the stream's own `write`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.write_as_is = stream.write

    def write(self, text: str) -> int:
        """Write a text of any origin."""
        self.write_as_is(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts of any origin."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def write_as_is(stream: TextIO, text: str) -> None:
    """Write a text with Monograph's own escape sequences, which a guarded stream would spell out."""
    getattr(stream, "write_as_is", stream.write)(text)


def guard() -> None:
    """Make the standard streams accept any text, and guard those that are terminals.

    A stream that was closed becomes one that writes nothing. A character that an encoding lacks is
    spelled out.
    """
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        if name == "stdin":
            continue
        if stream is None or getattr(stream, "closed", False):
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif is_terminal(stream) and not isinstance(stream, Terminal):
            setattr(sys, name, Terminal(stream))


def is_terminal(stream: object) -> bool:
    """Return whether a stream is a terminal."""
    # A program that calls `main` may have replaced sys.stdout by an object that only has `write`.
    isatty = getattr(stream, "isatty", None)
    return isatty is not None and bool(isatty())


def takes_escapes(stream: object) -> bool:
    """Return whether a stream is a terminal that accepts escape sequences; a dumb one does not."""
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def takes_colour(stream: object) -> bool:
    """Return whether a stream accepts colours and NO_COLOR does not forbid them (no-color.org)."""
    return takes_escapes(stream) and not os.environ.get("NO_COLOR")
