"""Run: pytest tests/run/test_sweep_display.py (the live block of many runs)"""

from __future__ import annotations

import io

import pytest

from monograph.errors import Diverged, Stopped
from monograph.run import screen
from monograph.run.progress import SweepDisplay
from monograph.run.screen import Screen


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def test_elsewhere_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(screen, "REDRAW_S", 0.01)
    stream = io.StringIO()
    with SweepDisplay(Screen(stream), 200, lambda: ["lr", "1"], done=50) as block:
        block.update(100, "12 k tok/s")
        block.note("SIGINT: saving after this update")
        while "50 %" not in stream.getvalue():
            pass
    text = stream.getvalue()
    assert (
        "50 %   12 k tok/s" in text
        and "left" in text
        and "SIGINT: saving" in text
        and "\x1b" not in text
    )


def test_on_a_terminal_the_table_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    table = ["lr   bits/byte", "1e-3"]
    block = SweepDisplay(Screen(Terminal()), 100, lambda: table)
    table[1] = "1e-3   2.500"
    assert "2.500" not in "".join(line.plain for line in block._region())
    block.refresh_table()
    block.update(30, "12 k tok/s")
    bar, *rows = (line.plain for line in block._region())
    assert (
        "30 %   12 k tok/s" in bar and "━" in bar and rows == ["  lr   bits/byte", "  1e-3   2.500"]
    )


def test_a_long_table_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    block = SweepDisplay(Screen(Terminal()), 1, lambda: [str(i) for i in range(500)])
    region = block._region()
    assert len(region) <= block._screen.height and region[-1].plain.strip() == "..."


def test_nothing_to_do() -> None:
    stream = io.StringIO()
    with SweepDisplay(Screen(stream), 0, list):
        pass
    assert not stream.getvalue()


def test_it_ends_at_100_percent_of_what_it_then_is() -> None:
    """A part that was done before, a part that is trained, and one that a divergence leaves out."""
    stream = io.StringIO()
    with SweepDisplay(Screen(stream), 200, list, done=50) as block:
        block.resume(40)
        block.update(120, "12 k tok/s")
        block.shorten_bar(80)
    assert stream.getvalue() == "  100 %   12 k tok/s   0:00\n"


@pytest.mark.parametrize(("error", "words"), [
    (Stopped("saved"), "stopped after 0:00"), (KeyboardInterrupt(), "stopped after 0:00"),
    (Diverged("nan"), "failed after 0:00"),
])  # fmt: skip
def test_what_is_stopped_or_fails_has_no_time_left(error: BaseException, words: str) -> None:
    stream = io.StringIO()
    with pytest.raises(type(error)), SweepDisplay(Screen(stream), 200, list) as block:
        block.update(50, "12 k tok/s")
        raise error
    assert stream.getvalue() == f"   25 %   12 k tok/s   {words}\n"
