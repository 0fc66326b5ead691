"""Print lines on a terminal or another stream.

On a terminal, a region below the printed lines is redrawn in place.
"""

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

from monograph.terminal import is_terminal, takes_colour, takes_escapes, visible, write_as_is

WIDTH = 100  # characters of the longest line
NARROWEST = 40  # lines are not cut to fewer characters; a narrower terminal wraps them
REDRAW_S = 0.5  # interval of redrawing on a terminal
# On another stream, the first line is printed after FIRST_LINE_S seconds. Each interval to the next line
# is twice as long as the one before, up to MAX_LINE_INTERVAL_S.
FIRST_LINE_S = 10.0
MAX_LINE_INTERVAL_S = 60.0

# ASCII for a stream that is not UTF-8. Any other character that its encoding lacks becomes "?".
_ASCII = str.maketrans(
    {
        "━": "=",
        "─": "-",
        "·": "-",
        "…": "~",
        "⏎": "\\",
        "−": "-",
        "→": "->",
        "≤": "<=",
        "≥": ">=",
        "×": "x",
        "±": "+-",
    }
)


class _FailsafeStream:
    """A text stream whose writes do not fail.

    Characters that the encoding lacks are replaced. After a failed write, all further output is
    dropped: a closed terminal, or a pipe whose reader has ended, must not end a run after hours of work.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        # In-memory streams have no encoding and take any character.
        self.encoding = stream.encoding or "utf-8"
        self.is_utf8 = self.encoding.lower().replace("-", "") == "utf8"

    def write(self, text: str) -> int:
        if not self.is_utf8:
            text = text.translate(_ASCII).encode(self.encoding, "replace").decode(self.encoding)
        self._try(lambda stream: write_as_is(stream, text))
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
    """Lines that are printed to a stream, with one live region below them.

    A stream that does not take escape sequences gets plain lines, without colour or redrawing. The
    environment variable NO_COLOR only turns colour off.

    Attributes:
        is_live: whether a region can be redrawn in place.
        is_utf8: whether the stream's encoding is UTF-8.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = _FailsafeStream(sys.stderr if stream is None else stream)
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

    @property
    def width(self) -> int:
        """Return the largest number of characters in a line."""
        if not self._is_terminal:
            return WIDTH
        # One less than the terminal has, since some terminals wrap after the last character.
        return max(NARROWEST, min(WIDTH, self._console.width - 1))

    @property
    def height(self) -> int:
        """Return the terminal's number of lines."""
        return self._console.height

    def print(self, *lines: Text) -> None:
        """Write lines above the live region, each cut to `width` characters."""
        for line in _cut_lines(lines, self.width):
            self._console.print(line)
        self._stream.flush()

    @contextmanager
    def live(
        self,
        region: Callable[[], list[Text]],
        status: Callable[[], Text],
        state: Callable[[], object],
    ) -> Iterator[None]:
        """Show progress during the `with` block.

        On a terminal a region is redrawn in place, and disappears at the end of the block. Other
        text that is written to standard error appears above it. Elsewhere lines are printed at
        growing intervals. The three functions are called from another thread, so that progress is
        shown while the main thread is busy.

        Args:
            region: returns the lines of the region.
            status: returns the line to print if the stream is not a terminal.
            state: returns a value that changes with the progress. If it is the same as at the last
                line, no line is printed.
        """
        if not self.is_live:
            with _every(REDRAW_S, _OccasionalLines(self, status, state).print_if_due):
                yield
            return

        def cut_region() -> Text:
            # Lines are cut even on a terminal that is narrower than `width`: a wrapped line would
            # take more rows than are redrawn.
            width = max(1, min(self.width, self._console.width - 1))
            return Text("\n").join(_cut_lines(region(), width))

        view = Live(
            get_renderable=cut_region,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # standard output is for results
            redirect_stderr=False,  # `_ErrorsAboveRegion` does this, and makes texts visible
        )
        with (
            redirect_stderr(_ErrorsAboveRegion(self._console, sys.stderr)),
            view,
            _every(REDRAW_S, view.refresh),
        ):
            view.refresh()
            yield


class _OccasionalLines:
    """Lines about the progress, at growing intervals, in place of a region; see `Screen.live`."""

    def __init__(
        self, screen: Screen, status: Callable[[], Text], state: Callable[[], object]
    ) -> None:
        self._screen = screen
        self._status = status
        self._state = state
        self._interval_s = FIRST_LINE_S
        self._next_s = monotonic() + FIRST_LINE_S
        self._last_state: object = None

    def print_if_due(self) -> None:
        """Print a line if it is time and the state has changed."""
        if monotonic() < self._next_s:
            return
        state = self._state()
        if state == self._last_state:
            return
        self._last_state = state
        self._interval_s = min(2 * self._interval_s, MAX_LINE_INTERVAL_S)
        self._next_s = monotonic() + self._interval_s
        self._screen.print(self._status())


class _ErrorsAboveRegion(FileProxy):
    """The standard error stream while a region is live; it writes above the region.

    Control characters are made visible, except by `write_as_is`, which `monograph.terminal.write_as_is`
    calls for the escape sequences of this package.
    """

    def write(self, text: str) -> int:
        return self.write_as_is(visible(text))

    def write_as_is(self, text: str) -> int:
        return super().write(text)


def _cut_lines(lines: Sequence[Text], width: int) -> list[Text]:
    """Return lines with control characters made visible, each cut to `width` characters.

    The given lines may be cut in place.
    """
    cut_lines = []
    for line in lines:
        visible_text = visible(line.plain)
        if visible_text != line.plain:
            # The colours of parts are lost, because they refer to positions in the former text.
            line = Text(visible_text, line.style)
        line.truncate(width, overflow="ellipsis")
        cut_lines.append(line)
    return cut_lines


def one_line(text: str) -> str:
    """Return a text of a model or a file as one line, with a sign for each line end."""
    return visible(text.expandtabs(4).replace("\n", "⏎"))


def cut_to_width(text: str, width: int) -> str:
    """Return a text cut to at most `width` columns of a terminal; a wide character takes two."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1) + "…"


@contextmanager
def _every(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` from another thread every `seconds` during the `with` block."""
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
