"""Run: pytest tests/run/test_progress.py (plain text, another encoding, and a real
pseudo-terminal).
"""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from monograph.run import screen
from monograph.run.progress import Progress, SweepDisplay, TrainingBlock, wrap_lines

YARDSTICKS = {"trigram": 2.82, "gzip -9": 1.97}
COLOUR = re.compile(r"\x1b\[[\d;]*m")


def speak(progress: Progress, pause_s: float = 0.0) -> None:
    """A whole run in a moment."""
    progress.header("monograph 0.1   2 cores, 24 GiB, no GPU")
    progress.line(
        "data",
        "Python's standard library, 612 files, 10.1 MB  (held out: whole packages, 31 files, 0.5 MB)",
    )
    with progress.stage("tokens", "byte-level BPE, 2,048 entries") as stage:
        stage.report("files", 100, 612)
        time.sleep(pause_s)
        stage.result = "2.9 bytes/token"
    with TrainingBlock(progress.screen, updates=40, tokens=80_000, yardsticks=YARDSTICKS) as block:
        for index in range(1, 41):
            block.update(
                index,
                loss=5.0 - index / 20,
                tokens_per_s=15_800,
                memory_bytes=2**28,
                skipped=index // 40,
            )
            if index % 10 == 0:
                block.held_out(index, 2_000 * index, 4.0 - index / 20)
                block.sample(index / 40, 'def f():\n\treturn "\x1b[31mü\x07"' + 100 * "字")
        time.sleep(pause_s)
    progress.line("done", "3 min 06 s", "held out 2.00 bits/byte")


@contextmanager
def terminal(
    monkeypatch: pytest.MonkeyPatch, **environment: str
) -> Iterator[tuple[io.TextIOWrapper, list[str]]]:
    """A pseudo-terminal's writing end and, once the block has ended, what arrived at the other."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "TERM": "xterm-256color",
        "COLUMNS": "120",
        "LINES": "40",
        **environment,
    }.items():
        monkeypatch.setenv(name, value)
    reading, writing = pty.openpty()
    arrived: list[str] = []
    chunks: list[bytes] = []

    def drain() -> None:
        try:
            while chunk := os.read(reading, 65536):
                chunks.append(chunk)
        except OSError:  # EIO: the writing end is closed
            pass

    thread = threading.Thread(target=drain)
    thread.start()
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        yield stream, arrived
    thread.join()
    os.close(reading)
    arrived.append(b"".join(chunks).decode().replace("\r\n", "\n"))


def test_without_a_terminal_there_are_only_plain_lines_of_bounded_width() -> None:
    stream = io.StringIO()
    speak(Progress(stream))
    text = stream.getvalue()
    assert "\x1b" not in text and "\r" not in text and "\x07" not in text
    assert all(screen.cell_len(line) <= 100 for line in text.splitlines())
    assert text.count("sample at") == 4
    assert "update 40/40" in text and "1 skipped" in text and "15.8 k tok/s" in text


def test_labels_stand_in_a_column_of_their_own() -> None:
    stream = io.StringIO()
    speak(Progress(stream))
    lines = stream.getvalue().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("data"))
    assert re.fullmatch(r"data {6}\S.*", lines[start])
    assert re.fullmatch(r" {10}\S.*", lines[start + 1])  # what did not fit goes on below
    assert re.fullmatch(
        r"tokens    byte-level BPE, 2,048 entries \.+ \d\.\d s   2\.9 bytes/token", lines[start + 2]
    )
    assert lines[-2:] == ["done      3 min 06 s", "          held out 2.00 bits/byte"]


def test_the_curve_stays_at_the_end_among_its_yardsticks() -> None:
    stream = io.StringIO()
    speak(Progress(stream))
    text = stream.getvalue()
    assert re.search(r"[\u2801-\u28ff].*trigram 2\.82", text)
    assert "2.00 now" in text


def test_a_stream_that_is_not_utf8_gets_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    speak(Progress(stream))
    stream.flush()
    text = raw.getvalue().decode("ascii")
    assert re.search(r"[.':].*trigram 2\.82", text)
    assert "def f():\\" in text


def test_a_long_stage_speaks_now_and_then_but_not_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "REDRAW_S", 0.01)
    monkeypatch.setattr(screen, "FIRST_LINE_S", 0.15)
    stream = io.StringIO()
    with Progress(stream).stage("compile", "whole step") as stage:
        stage.report("graphs", 3, 5)
        time.sleep(0.5)
    lines = stream.getvalue().splitlines()
    assert 1 <= len(lines) - 1 <= 4
    assert re.fullmatch(r"compile   whole step   graphs 3 of 5   0\.0 s", lines[0])
    assert lines[-1].startswith("compile   whole step ....")


def test_a_log_has_a_line_where_something_changed_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    speakers: list[Callable[[], None]] = []

    @contextmanager
    def every(_: float, act: Callable[[], None]) -> Iterator[None]:
        speakers.append(act)
        yield

    monkeypatch.setattr(screen, "_every", every)
    monkeypatch.setattr(screen, "monotonic", lambda: now)
    stream = io.StringIO()
    progress = Progress(stream)
    now = 100.0  # a line was printed long ago
    with progress.stage("start", "training eagerly while the step compiles") as stage:
        for second in range(1, 601):
            now = 100.0 + second
            stage.report("update", min(second, 200))
            speakers[-1]()
    *spoken, end = stream.getvalue().splitlines()
    updates = [int(re.findall(r"update (\d+)", line)[0]) for line in spoken]
    assert updates == [10, 30, 70, 130, 190, 200], (
        "10 s, twice as long each time up to a minute, and no line twice"
    )
    assert end.startswith("start     training eagerly while the step compiles ...")


@pytest.mark.parametrize(
    ("raised", "said"), [(ZeroDivisionError, "failed after"), (KeyboardInterrupt, "stopped after")]
)
def test_a_stage_that_fails_says_so_and_passes_the_error_on(
    raised: type[BaseException], said: str
) -> None:
    stream = io.StringIO()
    with pytest.raises(raised), Progress(stream).stage("trial", "one eager step"):
        raise raised
    assert re.fullmatch(rf"trial     one eager step \.+ {said} 0\.0 s\n", stream.getvalue())


def test_a_run_that_is_to_end_earlier_ends_at_100_percent() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    with TrainingBlock(progress.screen, 410, 4_100_000, {}) as block:
        block.update(200, loss=3.0, tokens_per_s=1.0, memory_bytes=None)
        block.held_out(200, 2_000_000, 2.0)
        block.set_end(237)
        block.update(237, loss=3.0, tokens_per_s=1.0, memory_bytes=None)
        block.held_out(237, 2_370_000, 2.0)
    assert "update 237/237 100 %" in stream.getvalue()
    assert "2.37 M tokens" in stream.getvalue(), "the curve's axis ends with the run"


def test_the_curve_of_a_run_whose_answers_are_short_is_as_wide_as_the_others() -> None:
    """An update has up to 10,000 tokens, of which 2,500 are answers."""
    stream = io.StringIO()
    with TrainingBlock(Progress(stream).screen, 10, 100_000, {}) as block:
        for index in range(11):
            block.held_out(index, 2_500 * index, 0.5)
    assert "25 k tokens" in stream.getvalue()


def test_one_point_alone_is_no_curve() -> None:
    stream = io.StringIO()
    with TrainingBlock(Progress(stream).screen, 10, 100_000, {}) as block:
        block.held_out(10, 2_500, 0.5)
    assert "0.50" in stream.getvalue() and "tokens" not in stream.getvalue()


def test_a_terminal_that_goes_away_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    speak(Progress(Gone()))
    closed = io.StringIO()
    progress = Progress(closed)
    closed.close()
    speak(progress)


def test_a_terminal_is_redrawn_in_place_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "REDRAW_S", 0.02)
    with terminal(monkeypatch) as (stream, arrived):
        speak(Progress(stream), pause_s=0.2)
    text = arrived[0]
    # The cursor hides and comes back.
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 2
    assert "\x1b[1A" in text
    assert COLOUR.search(text)
    last = COLOUR.sub("", text).rpartition("\x1b[2K")[2]
    assert "sample at 100 %" in last and last.rstrip().endswith("held out 2.00 bits/byte")
    assert all(screen.cell_len(line) <= 100 for line in last.splitlines())


def test_a_terminal_shows_that_a_stage_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread is busy all the while, as in a long compilation."""
    monkeypatch.setattr(screen, "REDRAW_S", 0.05)
    with terminal(monkeypatch) as (stream, arrived):
        with Progress(stream).stage("compile", "whole step"):
            end = time.monotonic() + 1.3
            while time.monotonic() < end:
                pass
    drawn = COLOUR.sub("", arrived[0])
    assert drawn.count("compile   whole step") >= 5
    assert "whole step   0.0 s" in drawn and "whole step   1.0 s" in drawn


def test_plain_lines_of_the_terminals_width_where_no_escapes_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with terminal(monkeypatch, COLUMNS="60", TERM="dumb") as (stream, arrived):
        speak(Progress(stream), pause_s=0.1)
    assert "\x1b" not in arrived[0]
    assert max(screen.cell_len(line) for line in arrived[0].splitlines()) == 59


def test_redrawn_without_colour_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, NO_COLOR="1") as (stream, arrived):
        speak(Progress(stream), pause_s=0.1)
    assert "\x1b" in arrived[0] and not COLOUR.search(arrived[0])


def test_what_is_redrawn_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line wider than the terminal would take two rows, and the cursor would go up too few."""
    with terminal(monkeypatch, COLUMNS="60") as (stream, arrived):
        progress = Progress(stream)
        with progress.stage("compile", "whole step " * 20):
            pass
        with TrainingBlock(progress.screen, 10**9, 10**12, YARDSTICKS) as block:
            block.update(10**8, loss=3.0, tokens_per_s=1e9, memory_bytes=2**40, skipped=10**6)
            block.note("a note " * 20)
            block.held_out(10**8, 10**11, 2.0)
            time.sleep(2.5 * screen.REDRAW_S)
    drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", arrived[0]).replace("\r", "\n")
    assert max(screen.cell_len(line) for line in drawn.splitlines()) <= 60


def test_other_text_on_standard_error_appears_above_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with terminal(monkeypatch) as (stream, arrived):
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress().stage("compile", "whole step"):
            print("a warning from elsewhere", file=sys.stderr)
        assert sys.stderr is stream
    lines = COLOUR.sub("", arrived[0]).splitlines()
    warning = next(i for i, line in enumerate(lines) if line.endswith("a warning from elsewhere"))
    assert any("compile   whole step ..." in line for line in lines[warning:])


def test_samples_cannot_act_on_the_terminal() -> None:
    assert screen.one_line("a\x1b[2J\rb\n\tc\x07\u202e") == r"a\x1b[2J\rb⏎    c\x07\u202e"


def test_a_number_stays_on_the_line_of_its_unit() -> None:
    assert wrap_lines("fp32, about 5 min 05 s more", 18) == ["fp32, about", "5 min 05 s more"]
    assert wrap_lines("peak memory 152.3 MiB planned", 18) == ["peak memory", "152.3 MiB planned"]
    assert wrap_lines("1.46 M tokens", 13) == ["1.46 M tokens"]


def test_a_long_text_is_wrapped_before_its_time() -> None:
    stream = io.StringIO()
    with Progress(stream).stage("data", "one/long/path " * 12) as stage:
        stage.result = "many words " * 12
    lines = stream.getvalue().splitlines()
    assert len(lines) > 3
    assert all(len(line) <= 100 for line in lines)
    assert (
        sum(line.count("path") for line in lines) == 12
        and sum(line.count("words") for line in lines) == 12
    )


class Tty(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


WIDTHS = (*range(1, 25), *range(25, 61, 5))
SOME = (1, 2, 3, 4, 6, 9, 13, 18, 24, 45)


@pytest.mark.parametrize(
    "widths", [SOME, pytest.param(WIDTHS, marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_of_any_size_is_drawn_on(
    term: str, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    table = ["lr   bits/byte " * 4, *("1e-3   2.500 " * 4 for _ in range(9))]
    for width in widths:
        for height in (1, 2, 5, 12):
            monkeypatch.setenv("COLUMNS", str(width))
            monkeypatch.setenv("LINES", str(height))
            stream = Tty()
            progress = Progress(stream)
            live, crowd = progress.screen.is_live, SweepDisplay(progress.screen, 10, lambda: table)
            progress.header("monograph 0.1   " * 9)
            progress.line("data", "many words " * 9, "")
            with progress.stage("tokens", "many words " * 9) as stage:
                stage.result = "result " * 20
            with TrainingBlock(
                progress.screen, 40, 80_000, YARDSTICKS if width % 2 else {}
            ) as block:
                block.update(7, loss=1.0, tokens_per_s=1.0, memory_bytes=1)
                block.held_out(1, 1_000, 3.0)
                block.held_out(35, 70_000, 2.0)
                block.sample(0.5, "字" * 60)
                block.note("note " * 30)
            with crowd:
                crowd.update(5, "figures " * 9)
            before, region = len(stream.getvalue()), [*block._region(), *crowd._region()]
            with progress.screen.live(region.copy, block._plain_line, str):
                pass
            drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stream.getvalue()[before:])
            assert bool(drawn) == live
            assert all(screen.cell_len(line) <= width for line in drawn.splitlines())
