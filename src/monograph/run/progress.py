"""Show what a run does, on standard error.

A stage is a piece of work with a name, such as "compile". It is shown as one line. The training of
a run, or of a sweep, is shown as a bar with figures, a curve or a table. On a terminal, what runs
now is redrawn in place, in the *region* at the bottom of the screen. Elsewhere plain lines are printed.
`monograph.run.screen` does both.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from types import TracebackType
from typing import NamedTuple, Self, TextIO

from rich.text import Text

from monograph.errors import Stopped
from monograph.report import quantities
from monograph.run.curve import ASCII, BRAILLE, YARDSTICK_WIDTH, curve_pieces
from monograph.run.screen import Screen, cut_to_width, one_line

LABEL_WIDTH = 10  # characters of the column of labels at the left
_TIME_COLUMN = 78  # the column in which a stage's time ends
_CURVE_ROWS = 8  # the largest height of a curve, in lines without its x axis
_MIN_CURVE_ROWS = 4  # a flatter curve is not drawn
_SAMPLE_HEAD_WIDTH = 18  # characters before a sample, such as "  sample at 10 %"
_LABEL_STYLES = {
    "done": "bold green",
    "stopped": "bold yellow",
    "warning": "bold yellow",
    "next": "bold cyan",
}
_CURVE_STYLES = {"scale": "dim", "curve": "cyan", "level": "dim", "name": ""}

# The last digit of a number with its unit. A time may have two numbers, as in "5 min 05 s".
_WITH_UNIT = re.compile(r"\d(?: min \d+)? (?:s|min|h|ms|B|kB|MB|GB|KiB|MiB|GiB|k|M|G|tok/s)\b")
_NO_BREAK = "\N{NO-BREAK SPACE}"


def wrap_lines(text: str, width: int) -> list[str]:
    """Wrap a text into lines of at most `width` characters, without a break between a number and
    its unit.
    """
    unbroken = _WITH_UNIT.sub(lambda match: match[0].replace(" ", _NO_BREAK), text)
    return [line.replace(_NO_BREAK, " ") for line in textwrap.wrap(unbroken, width)]


def _with_label(label: str, text: str) -> Text:
    """Return a line with a label in the column at the left; "" leaves the column empty."""
    return Text.assemble((label.ljust(LABEL_WIDTH), _LABEL_STYLES.get(label, "bold")), text)


def _with_label_first(label: str, lines: Sequence[str]) -> list[Text]:
    """Return lines with a column for labels at their left; the label is in that of the first line."""
    return [_with_label(label if i == 0 else "", line) for i, line in enumerate(lines)]


class Progress:
    """The lines that a run prints on standard error.

        progress = Progress()
        progress.line("data", "Python's standard library, 612 files, 10.1 MB")
        with progress.stage("compile", "whole step") as stage:
            ...
            stage.result = "0 graph breaks"
        with TrainingBlock(progress.screen, updates=1465, tokens=3_000_000, yardsticks={}) as block:
            block.update(1, loss=4.9, tokens_per_s=15_800, memory_bytes=236_000_000)

    On a terminal the current stage or block is redrawn in place twice a second. Elsewhere a plain
    line is printed at the end of each stage. During a stage or block, further lines are printed at
    growing intervals, if something has changed since the last one.

    Attributes:
        screen: where the lines are printed.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.screen = Screen(stream)
        self._watch: Callable[[str], None] = lambda _: None

    def header(self, text: str) -> None:
        """Print a text without a label, and an empty line."""
        lines = wrap_lines(text, self.screen.width)
        self.screen.print(*(Text(line, style="bold") for line in lines), Text(""))

    def line(self, label: str, *texts: str) -> None:
        """Print a label in the column at the left, and texts next to it.

        Each text begins on a new line, and is wrapped.
        """
        width = self.screen.width - LABEL_WIDTH
        lines = list[str]()
        for text in texts:
            lines += wrap_lines(text, width) or [""]  # an empty text is an empty line
        self.screen.print(*_with_label_first(label, lines))

    def gap(self) -> None:
        """Print an empty line."""
        self.screen.print(Text(""))

    @contextmanager
    def watched(self, watch: Callable[[str], None]) -> Iterator[None]:
        """Call a function each time that a stage reports how far it is, for stages in the `with` block.

        So a run whose time is limited can notice during a long stage that its time is over.

        Args:
            watch: called with the stage's text and what was reported (`RunningStage.report`), as one text.
                If it raises an error, that ends the stage's work.
        """
        former_watch = self._watch
        self._watch = watch
        try:
            yield
        finally:
            self._watch = former_watch

    @contextmanager
    def stage(self, label: str, text: str) -> Iterator[RunningStage]:
        """Show a stage with its elapsed time during the `with` block, and print its final line.

        Args:
            label: the word in the column at the left.
            text: what the stage does.
        """
        stage = RunningStage(label, text, self._watch)
        try:
            with self.screen.live(
                region=lambda: [stage.running_line()], status=stage.running_line, state=stage.state
            ):
                yield stage
        except Exception:
            stage.outcome = "failed after "
            raise
        except BaseException:  # such as Ctrl-C
            stage.outcome = "stopped after "
            raise
        finally:
            self.screen.print(*stage.final_lines(self.screen.width))


def silent() -> Progress:
    """Return a `Progress` that shows nothing."""
    return Progress(io.StringIO())


class RunningStage:
    """A stage that runs now; see `Progress.stage`.

    Attributes:
        label: the word in the column at the left.
        text: what the stage does.
        outcome: words before the time in the final line: "failed after ", "stopped after ", or ""
            if the stage was completed.
        result: a text after the time in the final line, which the caller sets; "" for none.
    """

    def __init__(
        self, label: str, text: str, watch: Callable[[str], None] = lambda _: None
    ) -> None:
        self.label = label
        self.text = text
        self._watch = watch
        self.outcome = ""
        self.result = ""
        self._start_s = monotonic()
        self._detail = ""

    def report(self, what: str, done: int, total: int | None = None) -> None:
        """Show how much of the work is done, as in "file 3 of 10".

        Its type is that of `monograph.data.progress.ProgressCallback`.

        Args:
            what: a noun in the singular for a unit of work.
            done: the number of the unit that is done now.
            total: the number of all units; None if it is unknown.
        """
        self._detail = f"   {what} {done:,}"
        if total:
            self._detail += f" of {total:,}"
        self._watch(f"{self.text}: {self._detail.strip()}")

    def state(self) -> str:
        """Return what the stage last reported."""
        return self._detail

    def running_line(self) -> Text:
        """Return the line that is shown while the stage runs."""
        elapsed = quantities.duration(int(monotonic() - self._start_s))
        return _with_label(self.label, f"{self.text}{self._detail}   {elapsed}")

    def final_lines(self, width: int) -> list[Text]:
        """Return the lines that stay after the stage.

        Args:
            width: the screen's width in characters.
        """
        time = self.outcome + quantities.duration(monotonic() - self._start_s)
        room = min(_TIME_COLUMN, width) - LABEL_WIDTH
        # Dots fill the last line of the text up to the time: at least three, between two spaces.
        *earlier_lines, last = wrap_lines(self.text, room - len(time) - 5) or [""]
        dots = "." * (room - len(last) - len(time) - 2)
        last = f"{last} {dots} {time}"
        # The result stands behind the time if there is room, after three spaces, or else below.
        has_room = LABEL_WIDTH + len(last) + 3 + len(self.result) <= width
        result_lines = list[str]()
        if self.result and has_room:
            last += f"   {self.result}"
        elif self.result:
            result_lines = wrap_lines(self.result, width - LABEL_WIDTH)
        return _with_label_first(self.label, [*earlier_lines, last, *result_lines])


class _Display:
    """A context manager that shows a bar with figures and a note: the base class of `TrainingBlock`
    and `SweepDisplay`.

    Args:
        screen: where it is shown.
        work: number of all units of work, such as updates.
        done_before: number of units that were done by earlier processes.
    """

    def __init__(self, screen: Screen, work: int, done_before: int) -> None:
        self._screen = screen
        self._work = work
        self._done_before = done_before
        self._done = done_before  # by earlier processes and this one
        self._figures = ""
        self._note = ""
        self._start_s = monotonic()
        self._outcome = ""  # words before the elapsed time, as in `RunningStage.outcome`
        # On a terminal the region is redrawn. Elsewhere the status is printed if the state has changed.
        self._live = screen.live(
            region=self._region,
            status=self._plain_line,
            state=lambda: (self._done, self._figures),
        )

    def __enter__(self) -> Self:
        self._start_s = monotonic()
        self._live.__enter__()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(error_type, error, trace)
        if error is not None:
            # Ctrl-C raises KeyboardInterrupt, which is no Exception.
            was_stopped = isinstance(error, Stopped) or not isinstance(error, Exception)
            self._outcome = "stopped after " if was_stopped else "failed after "
        self._print_final()

    def _print_final(self) -> None:
        """Print what stays on the screen after the `with` block."""
        self._screen.print(self._bar() if self._screen.is_live else self._plain_line())

    def set_end(self, work: int) -> None:
        """Change the number of all units of work."""
        self._work = work

    def note(self, text: str) -> None:
        """Show a line under the bar, such as what limits the speed."""
        self._note = text

    def _region(self) -> list[Text]:
        """Return the lines that are redrawn on a terminal."""
        lines = [self._bar()]
        if self._note:
            lines.append(Text(f"  {self._note}", style="dim"))
        return lines

    def _bar(self) -> Text:
        start = self._text_before_bar()
        end = f" {self._text_after_bar()}"
        room = max(0, self._screen.width - len(start) - len(end))
        filled = round(min(1.0, self._done / self._work) * room)
        return Text.assemble(start, ("━" * filled, "cyan"), ("─" * (room - filled), "dim"), end)

    def _plain_line(self) -> Text:
        """Return the bar's figures without the bar, for a stream that is not a terminal."""
        return Text(self._text_before_bar() + self._text_after_bar())

    def _text_before_bar(self) -> str:
        """Return the text before the bar, which also begins the plain line."""
        return "  "

    def _text_after_bar(self) -> str:
        """Return the text after the bar: the share of the work, figures, and the time."""
        share = f"{100 * self._done / self._work:>3.0f} %"
        return "   ".join(filter(None, [share, self._figures, self._time()]))

    def _time(self) -> str:
        """Return the time that is left; if it cannot be estimated, the elapsed time."""
        elapsed_s = monotonic() - self._start_s
        if self._outcome:
            return self._outcome + quantities.clock_time(elapsed_s)
        done_here = self._done - self._done_before
        # `done_here` may be negative: after many skipped updates a run goes back to an earlier checkpoint,
        # which may be older than the one from which this process resumed the run.
        if done_here <= 0 or self._done >= self._work:
            return quantities.clock_time(elapsed_s)
        left_s = elapsed_s / done_here * (self._work - self._done)
        return f"{quantities.clock_time(left_s)} left"


class _Score(NamedTuple):
    """A point of the held-out curve: a measure of held-out text, after some update.

    Attributes:
        update: the update.
        tokens: number of tokens trained on until then.
        value: the measure.
    """

    update: int
    tokens: int
    value: float


class TrainingBlock(_Display):
    """A context manager that shows a run's bar, its held-out curve, and texts that the model wrote.

    On a terminal it is redrawn in place, and its last state stays. Elsewhere it prints a line of
    figures at growing intervals, each text as soon as it is written, and the curve at the end.

    Args:
        screen: where it is shown.
        updates: number of updates of the whole run.
        tokens: number of tokens of the whole run, as estimated. It scales the curve until the first
            point says how many tokens an update has.
        yardsticks: {name: value} of levels that are drawn with the curve for comparison, such as what
            simple models of text reach.
        start: the update after which this process continues the run.
        measure: the name of what the curve shows, such as "bits/byte".
    """

    def __init__(
        self,
        screen: Screen,
        updates: int,
        tokens: int,
        yardsticks: Mapping[str, float],
        start: int = 0,
        measure: str = "bits/byte",
    ) -> None:
        super().__init__(screen, updates, start)
        self._tokens = tokens
        self._yardsticks = yardsticks
        self._measure = measure
        self._held_out: list[_Score] = []
        self._samples: list[tuple[float, str]] = []  # share of the run, text

    def _print_final(self) -> None:
        if self._screen.is_live:
            self._screen.print(*self._region())
        else:
            self._screen.print(self._plain_line(), *self._curve())

    def update(
        self,
        at: int,
        *,
        loss: float,
        tokens_per_s: float,
        memory_bytes: int | None,
        skipped: int = 0,
        score: str = "",
    ) -> None:
        """Report that an update is done. It takes so little time that every update may be reported.

        Args:
            at: the update, counted from 1.
            loss: the loss, shown if `score` is "".
            tokens_per_s: the speed.
            memory_bytes: the memory in use; None to show none.
            skipped: number of skipped updates since the run's start.
            score: a text in place of the loss.
        """
        figures = [score or f"loss {loss:.3f}", quantities.count(tokens_per_s, "tok/s")]
        if memory_bytes is not None:
            figures.append(quantities.memory(memory_bytes))
        if skipped:
            figures.append(f"{skipped} skipped")
        self._done = at
        self._figures = "   ".join(figures)

    def set_end(self, work: int) -> None:
        """Change the run's number of updates, and in proportion the number of tokens."""
        self._tokens = round(self._tokens * work / self._work)
        super().set_end(work)

    def held_out(self, at: int, tokens: int, value: float) -> None:
        """Add a point to the curve.

        The caller of a resumed run adds the points of earlier processes, too.

        Args:
            at: the update after which held-out text was measured.
            tokens: number of tokens trained on until then.
            value: the measure.
        """
        self._held_out.append(_Score(at, tokens, value))

    def sample(self, share: float, text: str) -> None:
        """Show a text that the model wrote.

        Args:
            share: the share of the run after which it was written, from 0 to 1.
            text: the text.
        """
        self._samples.append((share, text))
        if not self._screen.is_live:
            self._screen.print(self._sample_line(share, text))

    def _region(self) -> list[Text]:
        bar = super()._region()
        samples = [self._sample_line(share, text) for share, text in self._samples]
        # Three more lines are needed: the curve's heading, its x axis, and a free one below the region.
        room = self._screen.height - len(samples) - len(bar) - 3
        return [*bar, *self._curve(room), *samples]

    def _plain_line(self) -> Text:
        line = super()._plain_line()
        if self._held_out:
            line.append(f"   held-out {self._measure} {self._held_out[-1].value:.2f}")
        return line

    def _text_before_bar(self) -> str:
        return f"  update {self._done:>{len(str(self._work))}}/{self._work} "

    def _time(self) -> str:
        time = super()._time()
        # Before the first update the time that is left is unknown, so `time` is the elapsed time.
        if self._done == self._done_before and not self._outcome:
            time += " so far"
        return time

    def _curve(self, room: int = _CURVE_ROWS) -> list[Text]:
        """Return the lines of the curve with its heading; none if there is too little to draw, or too
        little room.

        Args:
            room: number of lines that the plot may take.
        """
        rows = min(_CURVE_ROWS, room)
        # A single point is worth drawing only if it can be compared with a yardstick.
        is_comparable = len(self._held_out) + len(self._yardsticks) >= 2
        if not self._held_out or not is_comparable or rows < _MIN_CURVE_ROWS:
            return []
        width = self._screen.width
        last = self._held_out[-1]
        # The number of tokens at the end of the run is extrapolated: in some runs only the tokens
        # of sampled answers count, and the length of an answer is not known beforehand.
        x_end: float = self._tokens
        if last.update and last.tokens:
            x_end = last.tokens * self._work / last.update
        pieces_of_rows = curve_pieces(
            [score.tokens for score in self._held_out],
            [score.value for score in self._held_out],
            width,
            rows,
            self._yardsticks,
            x_end,
            BRAILLE if self._screen.is_utf8 else ASCII,
        )
        title = f"  held-out {self._measure}   {last.value:.2f} now"
        note = "  on the same text" if self._yardsticks else ""
        lines = [Text.assemble(title.ljust(width - YARDSTICK_WIDTH), (note, "dim"))]
        for pieces in pieces_of_rows:
            styled_texts = [(text, _CURVE_STYLES[role]) for role, text in pieces]
            lines.append(Text.assemble(*styled_texts))
        return lines

    def _sample_line(self, share: float, text: str) -> Text:
        head = f"  sample at {100 * share:.0f} %".ljust(_SAMPLE_HEAD_WIDTH)
        return Text.assemble(
            (head, "dim"), cut_to_width(one_line(text), self._screen.width - len(head))
        )


class SweepDisplay(_Display):
    """A context manager that shows a sweep's bar and table.

    On a terminal they are redrawn in place. Elsewhere the bar's figures are printed at growing
    intervals.

    Args:
        screen: where they are shown.
        work: number of all units of work. A unit is one update of one member.
        table: returns the table's lines. It is called now and at each `refresh_table`.
        done: number of units that were done by earlier processes.
    """

    def __init__(
        self, screen: Screen, work: int, table: Callable[[], Sequence[str]], done: int = 0
    ) -> None:
        super().__init__(screen, max(1, work), done)
        self._table = table
        self._lines = list(table())

    def update(self, done: int, figures: str) -> None:
        """Report how much is done. It takes so little time that every update may be reported.

        Args:
            done: number of units that are done.
            figures: a text after the share, such as the speed.
        """
        self._done = done
        self._figures = figures

    def resume(self, units: int) -> None:
        """Report that `units` more units of work were done by an earlier process.

        They count as done, but not for the speed of this process.
        """
        self._done += units
        self._done_before += units

    def shorten_bar(self, units: int) -> None:
        """Report that `units` units of the remaining work will not be done."""
        self.set_end(max(1, self._work - units))  # not 0, since the share is divided by it

    def _print_final(self) -> None:
        if self._done > self._done_before:  # a bar says nothing if this process did no work
            super()._print_final()

    def refresh_table(self) -> None:
        """Get the table's lines again, since they have changed."""
        self._lines = list(self._table())

    def note(self, text: str) -> None:
        """Show a line under the bar. Without a terminal, print the line now."""
        super().note(text)
        if not self._screen.is_live:
            self._screen.print(Text(f"  {text}"))

    def _region(self) -> list[Text]:
        region = super()._region()
        room = max(2, self._screen.height - len(region) - 2)  # two lines stay free
        lines = self._lines
        if len(lines) > room:
            lines = [*lines[: room - 1], "..."]
        for number, line in enumerate(lines):
            is_heading = number == 0
            region.append(Text(f"  {line}", style="dim" if is_heading else ""))
        return region
