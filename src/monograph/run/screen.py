"""Show progress on a terminal, in a region that is redrawn in place, or as plain lines on any other stream."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from time import monotonic
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.text import Text

from monograph.terminal import is_terminal, own, takes_colour, takes_escapes, visible

WIDTH = 100  # longest line, in characters
NARROWEST = 40  # printed lines are not cut below this; a narrower terminal wraps them
REDRAW_S = 0.5  # interval of redrawing on a terminal
SPEAK_S = 10.0  # elsewhere, the interval after which a line is printed if nothing else was

# ASCII for a stream that is not UTF-8; any other character that its encoding lacks becomes "?"
_ASCII = str.maketrans(
    {"━": "=", "─": "-", "·": "-", "…": "~", "⏎": "\\", "−": "-", "→": "->", "≤": "<=", "≥": ">=", "×": "x", "±": "+-"}
)


class _Stream:
    """A text stream that replaces characters its encoding lacks, and drops all output once a write has failed.

    A closed terminal, or a pipe that nobody reads, must not end a run after hours of work.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self.encoding = stream.encoding or "utf-8"  # in-memory streams have no encoding and take any character
        self.is_utf8 = self.encoding.lower().replace("-", "") == "utf8"

    def write(self, text: str) -> int:
        if not self.is_utf8:
            text = text.translate(_ASCII).encode(self.encoding, "replace").decode(self.encoding)
        self._try(lambda stream: own(stream, text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def _try(self, call: Callable[[TextIO], None]) -> None:
        if self._stream is not None:
            try:
                call(self._stream)
            except (OSError, ValueError):
                self._stream = None

    def isatty(self) -> bool:
        return is_terminal(self._stream)

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is gone")
        return self._stream.fileno()


class Screen:
    """The lines printed to `stream` (default: standard error), with one live region below them.

    Without support for escape sequences, lines are plain, without colour or redrawing. NO_COLOR only turns colour off.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = _Stream(sys.stderr if stream is None else stream)
        self.is_live = takes_escapes(self._stream)
        self.is_utf8 = self._stream.is_utf8
        self._is_terminal = is_terminal(self._stream)
        self._console = Console(
            file=self._stream,  # type: ignore[arg-type]
            force_terminal=self.is_live,
            color_system="auto" if takes_colour(self._stream) else None,
            width=None if self._is_terminal else WIDTH,
            markup=False,
            highlight=False,
            emoji=False,
            soft_wrap=True,
        )
        self._last_spoken_s = monotonic()

    @property
    def width(self) -> int:
        """Return how many characters fit a line: one less than the terminal has, as some wrap after the last."""
        return max(NARROWEST, min(WIDTH, self._console.width - 1)) if self._is_terminal else WIDTH

    @property
    def height(self) -> int:
        """Return the terminal's number of lines."""
        return self._console.height

    def print(self, *lines: Text) -> None:
        """Write `lines` above the live region, each cut to `width` characters."""
        for line in _fitted(lines, self.width):
            self._console.print(line)
        self._stream.flush()
        self._last_spoken_s = monotonic()

    @contextmanager
    def live(self, region: Callable[[], list[Text]], status: Callable[[], Text]) -> Iterator[None]:
        """Keep `region()` on the terminal during the `with` block, or print `status()` after SPEAK_S of silence.

        Both are called from another thread, so that progress shows while the main thread is busy. The region vanishes
        at the end. Any other text written to standard error appears above it.
        """
        if not self.is_live:
            with _every(REDRAW_S, lambda: self._speak(status)):
                yield
            return
        view = Live(
            # Wrapped lines would take more rows than are redrawn, so lines are cut even on a narrow terminal.
            get_renderable=lambda: Text("\n").join(_fitted(region(), max(1, min(self.width, self._console.width - 1)))),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # standard output is for results
            redirect_stderr=False,
        )
        with redirect_stderr(_Above(self._console, sys.stderr)), view, _every(REDRAW_S, view.refresh):
            view.refresh()
            yield

    def _speak(self, status: Callable[[], Text]) -> None:
        if monotonic() - self._last_spoken_s >= SPEAK_S:
            self.print(status())


class _Above(FileProxy):
    """The standard error stream while a region is live below it; it writes above the region."""

    def write(self, text: str) -> int:
        return self.own(visible(text))

    def own(self, text: str) -> int:
        return super().write(text)


def _fitted(lines: Sequence[Text], width: int) -> list[Text]:
    # A line with escaped characters loses its colours, because they refer to character positions.
    fitted = [line if visible(line.plain) == line.plain else Text(visible(line.plain), line.style) for line in lines]
    for line in fitted:
        line.truncate(width, overflow="ellipsis")
    return fitted


def shown(text: str) -> str:
    """Return `text` from a model or a file as one line, in which each line end is a sign."""
    return visible(text.expandtabs(4).replace("\n", "⏎"))


def cut(text: str, width: int) -> str:
    """Return `text` cut to at most `width` terminal cells; a wide character takes two."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


@contextmanager
def _every(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` every `seconds` from a thread while the `with` block runs."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            act()

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
