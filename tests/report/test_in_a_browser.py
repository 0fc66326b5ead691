"""Run: pytest tests/report/test_in_a_browser.py

The pages of all reports in a real headless Chromium: no word on the console, nothing fetched, both
themes, readable at the width of a desk and of a phone, and the keyboard alone. It is that of Qt's
WebEngine; skipped, with the reason, where that cannot be loaded. Pictures are in the tests'
temporary folder, or in $MONOGRAPH_SCREENSHOTS.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pictures
from reports import CHARTED, KINDS
from visitor import Visitor

pytest.importorskip(
    "PyQt6.QtWebEngineCore", reason="Qt's WebEngine is not here", exc_type=ImportError
)

Look = Callable[[str], dict[str, Any]]
SCHEMES = ("light", pytest.param("dark", marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return pictures.pages(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def seen(paths: list[Path]) -> Look:
    """What Chromium saw in a theme, by kind of page."""
    folder = Path(os.environ.get("MONOGRAPH_SCREENSHOTS", str(paths[0].parent)))

    @functools.cache
    def look(scheme: str) -> dict[str, Any]:
        found = pictures.seen(scheme, folder, paths)
        for path in paths:
            found[path.stem]["own"] = path.as_uri()
        return found

    return look


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_quiet_whole_and_in_its_theme(seen: Look, kind: str, scheme: str) -> None:
    page = seen(scheme)[kind]
    assert "Chrome/" in page["agent"]
    assert page["said"] == [] and page["asked"] == [page["own"]]
    assert (sum(page["background"][:3]) > 3 * 200) == (scheme == "light")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_text_can_be_read_at_both_widths(seen: Look, kind: str, scheme: str) -> None:
    """No text below 10 px, too pale, cut or on another one, on the page and in its charts; no page
    is too wide.
    """
    for width, look in seen(scheme)[kind]["looked_at"].items():
        assert pictures.wrong(look) == {}, width
        assert look["texts"] > 60 and (look["charts"] > 0) == (kind in CHARTED)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_sorted_by_keyboard_alone(seen: Look, kind: str) -> None:
    keys = seen("light")[kind]["keyboard"]
    assert keys is not None, "the first column's name is never reached"
    assert keys["outline"] != "none"
    assert [says for says, _ in keys["steps"]] == ["ascending", "descending", "none"]
    assert all(sorted(order) == sorted(keys["given"]) for _, order in keys["steps"])
    assert keys["steps"][2][1] == keys["given"]


# ---- what the reader of a chart can do -----------------------------------------------------------


@pytest.fixture(scope="module")
def visitor() -> Iterator[Visitor]:
    visitor = Visitor("light")
    yield visitor
    visitor.close()


LOSS = "document.getElementById('chart-loss')"
READ = f"{LOSS}.querySelector('.readout').textContent"


def tools(visitor: Visitor) -> list[str]:
    """The buttons of the loss's chart that can be seen."""
    found: list[str] = visitor.read(
        f"[...{LOSS}.querySelectorAll('.tools button:not([hidden])')].map((e) => e.textContent)"
    )
    return found


@pytest.fixture
def run(visitor: Visitor, paths: list[Path]) -> Visitor:
    visitor.visit(next(path.as_uri() for path in paths if path.stem == "run"))
    visitor.wait(f"{READ}.startsWith('at 1.45 M tokens')")
    return visitor


def test_the_values_under_the_pointer_are_read_out(run: Visitor) -> None:
    at_the_end = run.read(READ)
    assert "training" in at_the_end and "held out 3.9" in at_the_end
    run.hover(f"{LOSS}.querySelector('.u-over')")
    there = run.wait(f"!{READ}.startsWith('at 1.45 M') && {READ}")
    tokens = float(there.removeprefix("at ").split(" k tokens")[0])
    assert 600 < tokens < 850 and "held out 4" in there


def test_a_chart_is_read_zoomed_and_reset_by_keyboard_alone(run: Visitor) -> None:
    run.read(f"{LOSS}.querySelector('.plot').focus() || 1")
    assert run.read("getComputedStyle(document.activeElement).outlineStyle") != "none"
    for _ in range(3):
        run.press("Left")
    assert run.wait(f"!{READ}.startsWith('at 1.45 M tokens') || {READ}.includes('1.44') || {READ}")
    run.press("Home")
    assert "training 8" in run.wait(f"{READ}.startsWith('at 2.05 k tokens') && {READ}")
    assert tools(run) == ["log"]
    run.press("Plus")
    run.wait(f"!{LOSS}.querySelector('.tools button').hidden")
    assert tools(run) == ["reset zoom", "log"]
    run.press("Escape")
    run.wait(f"{LOSS}.querySelector('.tools button').hidden")


def test_the_reader_chooses_the_axis_the_scale_and_the_smoothing(run: Visitor) -> None:
    choices = run.read(
        "[...document.querySelector('select').options].map((option) => option.textContent)"
    )
    assert choices == ["tokens", "updates", "time"]
    for axis, words in (("update", "at update 710"), ("time", "after 7:34")):
        run.read(f"(() => {{ const e = document.querySelector('select'); e.value = '{axis}';"
                 "e.dispatchEvent(new Event('change')); return 1 })()")  # fmt: skip
        assert run.wait(f"{READ}.startsWith('{words}') && {READ}")
    rough = run.read(READ)
    run.read("(() => { const e = document.querySelector('input[type=range]'); e.value = 0;"
             "e.dispatchEvent(new Event('input')); return 1 })()")  # fmt: skip
    assert run.wait(f"{READ} !== {rough!r} && {READ}")
    run.click(f"[...{LOSS}.querySelectorAll('.tools button')].at(-1)")
    assert (
        run.read(
            f"[...{LOSS}.querySelectorAll('.tools button')].at(-1).getAttribute('aria-pressed')"
        )
        == "true"
    )
    run.read("location.reload() || 1")
    # While the page loads, there is no chart to ask.
    assert run.wait(
        f"document.readyState === 'complete' && {READ}.startsWith('after 7:34') && {READ}"
    ), "a page that loads itself again keeps the choices"
    assert run.said() == []


def test_a_chart_is_drawn_anew_for_the_width_it_gets(run: Visitor) -> None:
    drawn = f"{LOSS}.querySelector('canvas').getBoundingClientRect().width"
    for width in (1280, 400, 700):
        run.resize(width, 800)
        place = run.read(f"{LOSS}.querySelector('.plot').clientWidth")
        assert run.wait(f"{drawn} === {place}") and place > 200
