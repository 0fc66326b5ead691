"""The live block of many runs at once: a bar, and a table that changes as they learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType

from rich.text import Text

from monograph.measure import quantities
from monograph.run.screen import Screen


class CrowdBlock:
    """A context manager. On a terminal bar and table are redrawn in place; elsewhere there is a line now and then.

    Work is counted in updates of one member; `table` gives the lines as they stand, and is asked only when told so.
    """

    def __init__(self, screen: Screen, work: int, table: Callable[[], Sequence[str]], done: int = 0) -> None:
        self._screen, self._work, self._table, self._done, self._began = screen, max(1, work), table, done, done
        self._figures, self._note, self._lines = "", "", list(table())
        self._since_s = monotonic()
        self._live = screen.live(self._region, self._spoken)

    def __enter__(self) -> CrowdBlock:
        self._since_s = monotonic()
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def update(self, done: int, figures: str) -> None:
        """So much of the work is done; cheap enough for every update."""
        self._done, self._figures = done, figures

    def retell(self) -> None:
        """The table changed."""
        self._lines = list(self._table())

    def note(self, text: str) -> None:
        """A line under the bar."""
        self._note = text
        if not self._screen.is_live:
            self._screen.print(Text(f"  {text}"))

    def _region(self) -> list[Text]:
        note = [Text(f"  {self._note}", style="dim")] if self._note else []
        room = max(2, self._screen.height - 3 - len(note))
        shown = self._lines if len(self._lines) <= room else [*self._lines[: room - 1], "..."]
        rows = [Text(f"  {line}", style="dim" if number == 0 else "") for number, line in enumerate(shown)]
        return [self._bar(self._screen.width), *note, *rows]

    def _bar(self, width: int) -> Text:
        tail = f" {self._progress()}"
        room = max(0, width - len(tail) - 2)
        filled = round(min(1.0, self._done / self._work) * room)
        return Text.assemble("  ", ("━" * filled, "cyan"), ("─" * (room - filled), "dim"), tail)

    def _spoken(self) -> Text:
        return Text(f"  {self._progress()}")

    def _progress(self) -> str:
        share = f"{100 * self._done / self._work:>3.0f} %"
        return "   ".join(filter(None, [share, self._figures, self._time()]))

    def _time(self) -> str:
        spent, done = monotonic() - self._since_s, self._done - self._began
        if not done or self._done >= self._work:
            return quantities.clock_time(spent)
        return f"{quantities.clock_time(spent / done * (self._work - self._done))} left"
