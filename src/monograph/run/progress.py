"""Show a run on standard error: stages as aligned lines, and the training block with its curve."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from types import TracebackType
from typing import Self, TextIO

from rich.text import Text

from monograph.errors import Stopped
from monograph.report import quantities
from monograph.run.screen import ASCII, BRAILLE, YARDSTICK_WIDTH, Screen, curve_pieces, cut, shown

LABEL_WIDTH = 10
_TIME_COLUMN = 78  # where a stage's time ends
_CURVE_ROWS = 8
_LABEL_STYLES = {
    "done": "bold green",
    "stopped": "bold yellow",
    "warning": "bold yellow",
    "next": "bold cyan",
}
_CURVE_STYLES = {"scale": "dim", "curve": "cyan", "level": "dim", "name": ""}

# A time, or a number and its unit.
_WITH_UNIT = re.compile(r"\d(?: min \d+)? (?:s|min|h|ms|B|kB|MB|GB|KiB|MiB|GiB|k|M|G|tok/s)\b")
_NO_BREAK = "\N{NO-BREAK SPACE}"


def wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines of at most `width` characters, each number on the line of its unit."""
    kept = _WITH_UNIT.sub(lambda found: found[0].replace(" ", _NO_BREAK), text)
    return [line.replace(_NO_BREAK, " ") for line in textwrap.wrap(kept, width)]


class Progress:
    """The display of a run on standard error, from its first line to its last; it is never silent
    for long.

        progress = Progress()
        progress.line("data", "Python's standard library, 612 files, 10.1 MB")
        with progress.stage("compile", "whole step") as stage: ...; stage.result = "0 graph breaks"
        with TrainingBlock(progress.screen, updates=1465, tokens=3_000_000, yardsticks={...}) as
        block:
            block.update(index, loss=4.9, tokens=450_000, tokens_per_s=15_800,
            memory_bytes=236_000_000)

    On a terminal the current stage or block is redrawn in place twice a second. Elsewhere a plain
    line is printed at the end of each stage and, in between, now and then if something changed.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.screen = Screen(stream)
        self._watch: Callable[[str], None] = lambda _: None

    def header(self, text: str) -> None:
        """Print a line without a label, followed by an empty one."""
        self.screen.print(
            *(Text(row, style="bold") for row in wrapped(text, self.screen.width)), Text("")
        )

    def line(self, label: str, *texts: str) -> None:
        """Print `label` in its column and each of `texts` on a line of its own next to it, wrapped."""
        width = self.screen.width - LABEL_WIDTH
        rows = [row for text in texts for row in wrapped(text, width) or [""]]
        self.screen.print(*(_labelled(label if i == 0 else "", row) for i, row in enumerate(rows)))

    def gap(self) -> None:
        """Print an empty line."""
        self.screen.print(Text(""))

    @contextmanager
    def watched(self, watch: Callable[[str], None]) -> Iterator[None]:
        """Call `watch` for each report of a stage that begins in the `with` block; it may end the
        work by an exception.

        It gets the stage's text with what was reported.
        """
        before, self._watch = self._watch, watch
        try:
            yield
        finally:
            self._watch = before

    @contextmanager
    def stage(self, label: str, text: str) -> Iterator[Stage]:
        """Show a stage of work with its elapsed time while it runs; its line with the time stays on
        the screen.
        """
        stage = Stage(label, text, self._watch)
        try:
            with self.screen.live(lambda: [stage.running()], stage.running, stage.state):
                yield stage
        except Exception:
            stage.outcome = "failed after "
            raise
        except BaseException:
            stage.outcome = "stopped after "
            raise
        finally:
            self.screen.print(*stage.ended(self.screen.width))


def silent() -> Progress:
    """Return a display that shows nothing."""
    return Progress(io.StringIO())


class Stage:
    """A running stage of work.

    Attributes:
        label: the word in the left column; text: what the stage does.
        outcome: words before the time of a stage that did not come to its end, such as "failed
            after ".
        result: the text shown after the time; the caller sets it.
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
        """Show how far the work is, as in "file 3 of 10"; a `monograph.data.progress.Progress`
        callback.
        """
        self._detail = f"   {what} {done:,}" + (f" of {total:,}" if total else "")
        self._watch(f"{self.text}: {self._detail.strip()}")

    def state(self) -> str:
        """Return what `running` shows, without the time."""
        return self._detail

    def running(self) -> Text:
        """Return the line shown while the stage runs."""
        elapsed = quantities.duration(int(monotonic() - self._start_s))
        return _labelled(self.label, f"{self.text}{self._detail}   {elapsed}")

    def ended(self, width: int) -> list[Text]:
        """Return the lines that stay after the stage, for a screen of `width` characters."""
        time = self.outcome + quantities.duration(monotonic() - self._start_s)
        room = min(_TIME_COLUMN, width) - LABEL_WIDTH
        *rows, last = wrapped(self.text, room - len(time) - 5) or [""]
        rows.append(f"{last} {'.' * (room - len(last) - len(time) - 2)} {time}")
        if self.result and LABEL_WIDTH + len(rows[-1]) + 3 + len(self.result) <= width:
            rows[-1] += f"   {self.result}"
        elif self.result:
            rows += wrapped(self.result, width - LABEL_WIDTH)
        return [_labelled(self.label if i == 0 else "", row) for i, row in enumerate(rows)]


class _Display:
    """A context manager that shows a bar with figures and a note, redrawn in place on a terminal.

    Args:
        screen: the screen to print on.
        work: the number of units of work in all.
        start: the number of units that were done before.
    """

    def __init__(self, screen: Screen, work: int, start: int) -> None:
        self._screen = screen
        self._work = work
        self._start = start
        self._done = start
        self._figures = self._note = ""
        self._since_s = monotonic()
        self._outcome = ""
        self._live = screen.live(self._region, self._spoken, lambda: (self._done, self._figures))

    def __enter__(self) -> Self:
        self._since_s = monotonic()
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)
        if kind is not None:
            stopped = issubclass(kind, Stopped) or not issubclass(kind, Exception)
            self._outcome = "stopped after " if stopped else "failed after "
        self._leave()

    def _leave(self) -> None:
        """Print what stays on the screen."""
        self._screen.print(self._bar() if self._screen.is_live else self._spoken())

    def ends_at(self, work: int) -> None:
        """Report that there is another amount of work than at first."""
        self._work = work

    def note(self, text: str) -> None:
        """Show a line under the bar, such as what limits the speed."""
        self._note = text

    def _region(self) -> list[Text]:
        return [self._bar(), *([Text(f"  {self._note}", style="dim")] if self._note else [])]

    def _bar(self) -> Text:
        head = self._head()
        tail = f" {self._progress()}"
        room = max(0, self._screen.width - len(head) - len(tail))
        filled = round(min(1.0, self._done / self._work) * room)
        return Text.assemble(head, ("━" * filled, "cyan"), ("─" * (room - filled), "dim"), tail)

    def _spoken(self) -> Text:
        return Text(self._head() + self._progress())

    def _head(self) -> str:
        return "  "

    def _progress(self) -> str:
        share = f"{100 * self._done / self._work:>3.0f} %"
        return "   ".join(filter(None, [share, self._figures, self._time()]))

    def _time(self) -> str:
        elapsed_s = monotonic() - self._since_s
        done = self._done - self._start
        if self._outcome:
            return self._outcome + quantities.clock_time(elapsed_s)
        # A run may go back before the update it resumed from.
        if done <= 0 or self._done >= self._work:
            return quantities.clock_time(elapsed_s)
        return f"{quantities.clock_time(elapsed_s / done * (self._work - self._done))} left"


class TrainingBlock(_Display):
    """A context manager that shows a run's bar, its held-out curve among the yardsticks, and its
    samples.

    On a terminal it is redrawn in place, and its last state stays. Elsewhere it prints a line of
    figures now and then, samples as they come, and the curve at the end.

    Args:
        screen: where it is shown.
        updates: of the whole run.
        tokens: of the whole run, until a point of the curve tells how many an update has.
        yardsticks: values among which the curve is drawn, by name.
        start: the update from which the run goes on.
        measure: what is measured on held-out text.
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
        self._held_out: list[tuple[int, float, float]] = []  # update, tokens, value
        self._samples: list[tuple[float, str]] = []

    def _leave(self) -> None:
        self._screen.print(
            *(self._region() if self._screen.is_live else [self._spoken(), *self._curve()])
        )

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
        """Report that update `at` (counted from 1) is done; cheap enough for every update."""
        parts = [score or f"loss {loss:.3f}", quantities.count(tokens_per_s, "tok/s")]
        if memory_bytes is not None:
            parts.append(quantities.memory(memory_bytes))
        if skipped:
            parts.append(f"{skipped} skipped")
        self._done = at
        self._figures = "   ".join(parts)

    def ends_at(self, work: int) -> None:
        """Report that the run has another number of updates than it had at first."""
        self._tokens = round(self._tokens * work / self._work)
        super().ends_at(work)

    def held_out(self, at: int, tokens: int, value: float) -> None:
        """Add a point after update `at` to the curve; after a resume the caller adds the earlier
        points, too.
        """
        self._held_out.append((at, tokens, value))

    def sample(self, share: float, text: str) -> None:
        """Show a text that the model wrote after `share` (0 to 1) of the run."""
        self._samples.append((share, text))
        if not self._screen.is_live:
            self._screen.print(self._sample_line(share, text))

    def _region(self) -> list[Text]:
        above = super()._region()
        samples = [self._sample_line(share, text) for share, text in self._samples]
        return [*above, *self._curve(self._screen.height - len(samples) - len(above) - 3), *samples]

    def _spoken(self) -> Text:
        held_out = (
            f"   held-out {self._measure} {self._held_out[-1][2]:.2f}" if self._held_out else ""
        )
        return super()._spoken().append(held_out)

    def _head(self) -> str:
        return f"  update {self._done:>{len(str(self._work))}}/{self._work} "

    def _time(self) -> str:
        return super()._time() + (
            " so far" if self._done == self._start and not self._outcome else ""
        )

    def _curve(self, spare_rows: int = _CURVE_ROWS) -> list[Text]:
        rows = min(_CURVE_ROWS, spare_rows)
        if len(self._held_out) + len(self._yardsticks) < 2 or not self._held_out or rows < 4:
            return []  # one point alone is no curve
        width = self._screen.width
        updates, xs, ys = zip(*self._held_out, strict=True)
        # Answers, which alone count in some runs, are as long as they are.
        x_end = xs[-1] * self._work / updates[-1] if updates[-1] and xs[-1] else self._tokens
        cells = BRAILLE if self._screen.is_utf8 else ASCII
        pieces = curve_pieces(xs, ys, width, rows, self._yardsticks, x_end, cells)
        title = f"  held-out {self._measure}   {ys[-1]:.2f} now"
        note = "  on the same text" if self._yardsticks else ""
        heading = Text.assemble(title.ljust(width - YARDSTICK_WIDTH), (note, "dim"))
        return [
            heading,
            *(
                Text.assemble(*((text, _CURVE_STYLES[role]) for role, text in row))
                for row in pieces
            ),
        ]

    def _sample_line(self, share: float, text: str) -> Text:
        head = f"  sample at {share:.0%}".replace("%", " %").ljust(18)
        return Text.assemble((head, "dim"), cut(shown(text), self._screen.width - len(head)))


def _labelled(label: str, text: str) -> Text:
    return Text.assemble((label.ljust(LABEL_WIDTH), _LABEL_STYLES.get(label, "bold")), text)


class SweepDisplay(_Display):
    """A context manager that shows a sweep's bar and table, redrawn in place on a terminal, else as
    occasional lines.

    Work is counted in updates of single members. `table` returns the table's lines; it is called
    again at `retell`.
    """

    def __init__(
        self, screen: Screen, work: int, table: Callable[[], Sequence[str]], done: int = 0
    ) -> None:
        super().__init__(screen, max(1, work), done)
        self._table = table
        self._lines = list(table())

    def update(self, done: int, figures: str) -> None:
        """Report that `done` units of work are finished; cheap enough for every update."""
        self._done, self._figures = done, figures

    def resume(self, units: int) -> None:
        """Report that `units` units of work were finished by an earlier process."""
        self._done += units
        self._start += units

    def spare(self, units: int) -> None:
        """Report that `units` units of the remaining work are not needed."""
        self.ends_at(max(1, self._work - units))

    def _leave(self) -> None:
        if self._done > self._start:
            super()._leave()

    def retell(self) -> None:
        """Report that the table has changed."""
        self._lines = list(self._table())

    def note(self, text: str) -> None:
        """Show a line under the bar."""
        super().note(text)
        if not self._screen.is_live:
            self._screen.print(Text(f"  {text}"))

    def _region(self) -> list[Text]:
        above = super()._region()
        room = max(2, self._screen.height - 2 - len(above))
        shown = self._lines if len(self._lines) <= room else [*self._lines[: room - 1], "..."]
        return [
            *above,
            *(
                Text(f"  {line}", style="dim" if number == 0 else "")
                for number, line in enumerate(shown)
            ),
        ]
