"""Run: pytest tests/measure/test_in_a_browser.py

The pages of all reports in a real headless Chromium: nothing said on the console, nothing fetched, both themes, and the
keyboard alone. Needs `pip install playwright && playwright install chromium`; skipped, with the reason, without.
Screenshots are in the test's temporary folder, or in $MONOGRAPH_SCREENSHOTS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reports import KINDS

driver = pytest.importorskip("playwright.sync_api", reason="needs playwright and its Chromium, which are not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with driver.sync_playwright() as running:
        try:
            found = running.chromium.launch()
        except driver.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield found
        found.close()


@pytest.fixture(params=KINDS)
def page(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"{request.param}.html"
    path.write_text(KINDS[request.param](tmp_path))
    return path


@pytest.mark.parametrize(("scheme", "is_light"), [("light", True), ("dark", False)])
def test_a_page_is_quiet_whole_and_in_its_theme(browser: Any, page: Path, scheme: str, is_light: bool) -> None:
    view = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 900})
    said: list[str] = []
    asked: list[str] = []
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.on("request", lambda request: asked.append(request.url))
    view.goto(page.as_uri())
    assert said == [] and asked == [page.as_uri()]
    rgb = view.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")
    assert (sum(rgb) > 3 * 200) == is_light
    for width in (1200, 420):
        view.set_viewport_size({"width": width, "height": 900})
        assert view.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"
    boxes = view.evaluate("[...document.querySelectorAll('svg')].map((e) => e.getBoundingClientRect().width)")
    assert boxes and min(boxes) > 100
    folder = Path(os.environ.get("MONOGRAPH_SCREENSHOTS", page.parent))
    view.set_viewport_size({"width": 1200, "height": 900})
    view.screenshot(path=str(folder / f"{page.stem}-{scheme}.png"), full_page=True)
    view.close()


def test_a_table_is_sorted_by_keyboard_alone(browser: Any, page: Path) -> None:
    view = browser.new_page()
    view.goto(page.as_uri())
    first = "document.querySelector('table.sortable')"
    for _ in range(200):
        view.keyboard.press("Tab")
        if view.evaluate(f"document.activeElement === {first}.querySelector('button')"):
            break
    else:
        pytest.fail("the first column's name is never reached")
    assert view.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    order = f"[...{first}.tBodies[0].rows].map((row) => row.textContent)"
    given = view.evaluate(order)
    for key, says in (("Enter", "ascending"), ("Space", "descending"), ("Enter", "none")):
        view.keyboard.press(key)
        assert view.evaluate(f"{first}.querySelector('th').getAttribute('aria-sort')") == says
        assert sorted(view.evaluate(order)) == sorted(given)
    assert view.evaluate(order) == given
    view.close()
