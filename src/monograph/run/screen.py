"""Where progress is shown: a terminal, with a region redrawn in place, or anything else, as plain lines."""

from __future__ import annotations

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

from monograph.terminal import own, takes_colour, takes_escapes, visible

WIDTH = 100  # characters, at most
NARROWEST = 40  # characters of a printed line, at least: a narrower terminal breaks it, where we could only cut
REDRAW_S = 0.5  # on a terminal
SPEAK_S = 10.0  # otherwise: a line at least and, while nothing changes stage, at most this often

# What a stream that is not UTF-8 gets instead; anything else it cannot show becomes "?"
_ASCII = str.maketrans(
    {"━": "=", "─": "-", "·": "-", "…": "~", "⏎": "\\", "−": "-", "→": "->", "≤": "<=", "≥": ">=", "×": "x", "±": "+-"}
)


class _Stream:
    """A text stream that shows what its encoding can and falls silent once it is gone.

    A terminal that was closed, or a pipe nobody reads, must not end a run that has hours of work in it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self.encoding = stream.encoding or "utf-8"  # in-memory streams have none and take any character
        self.is_utf8 = self.encoding.lower().replace("-", "") == "utf8"

    def write(self, text: str) -> int:
        if self._stream is not None:
            if not self.is_utf8:
                text = text.translate(_ASCII).encode(self.encoding, "replace").decode(self.encoding)
            try:
                own(self._stream, text)
            except (OSError, ValueError):
                self._stream = None
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._stream = None

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is gone")
        return self._stream.fileno()


class Screen:
    """Prints lines to `stream` (default: standard error) and keeps one region live below them.

    Plain lines, without colour and without redrawing, where the stream takes no escapes; no colour with NO_COLOR.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = _Stream(sys.stderr if stream is None else stream)
        self.is_live = takes_escapes(self._stream)
        self.is_utf8 = self._stream.is_utf8
        self._is_terminal = self._stream.isatty()
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
        """Characters a line may have; one less than the terminal has, as some wrap when the last one is written."""
        return max(NARROWEST, min(WIDTH, self._console.width - 1)) if self._is_terminal else WIDTH

    @property
    def height(self) -> int:
        """Lines the terminal has."""
        return self._console.height

    def print(self, *lines: Text) -> None:
        """Write `lines` above the live region, each cut at `width`."""
        for line in _fitted(lines, self.width):
            self._console.print(line)
        self._stream.flush()
        self._last_spoken_s = monotonic()

    @contextmanager
    def live(self, region: Callable[[], list[Text]], status: Callable[[], Text]) -> Iterator[None]:
        """For the `with` block, keep `region()` on the terminal, or print `status()` after SPEAK_S of silence.

        Both are called from a thread of their own, so they speak while the main one is busy; the region vanishes at the
        end. Other text sent to standard error appears above it.
        """
        if not self.is_live:
            with _every(REDRAW_S, lambda: self._speak(status)):
                yield
            return
        view = Live(
            # What wraps would take more rows than are redrawn, so here a narrow terminal has its lines cut.
            get_renderable=lambda: Text("\n").join(_fitted(region(), max(1, min(self.width, self._console.width - 1)))),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # results go there, and not to this stream
            redirect_stderr=False,
        )
        with redirect_stderr(_Above(self._console, sys.stderr)), view, _every(REDRAW_S, view.refresh):
            view.refresh()
            yield

    def _speak(self, status: Callable[[], Text]) -> None:
        if monotonic() - self._last_spoken_s >= SPEAK_S:
            self.print(status())


class _Above(FileProxy):
    """Standard error while a region is live below it."""

    def write(self, text: str) -> int:
        return self.own(visible(text))

    def own(self, text: str) -> int:
        return super().write(text)


def _fitted(lines: Sequence[Text], width: int) -> list[Text]:
    # A line that is not visible as it stands loses its colours, whose places are counted in its characters.
    fitted = [line if visible(line.plain) == line.plain else Text(visible(line.plain), line.style) for line in lines]
    for line in fitted:
        line.truncate(width, overflow="ellipsis")
    return fitted


def shown(text: str) -> str:
    """`text` from a model or a file on one line, its line ends as signs."""
    return visible(text.expandtabs(4).replace("\n", "⏎"))


def cut(text: str, width: int) -> str:
    """`text` in at most `width` terminal cells, which a wide character takes two of."""
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
