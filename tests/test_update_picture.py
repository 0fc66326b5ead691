"""Run: pytest tests/test_update_picture.py (the picture of docs/design.md shows the way that an
update goes through the code, and all of it can be read).
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from scripts import ROOT, script

PHONE_PX = 368  # what a phone of 400 px leaves of the page


@pytest.fixture(scope="module")
def drawing() -> Any:
    return script("docs/make_update.py")


@pytest.fixture(scope="module")
def updates(drawing: Any) -> Any:
    return drawing.traced()


def test_the_picture_is_the_way_of_an_update(drawing: Any, updates: Any) -> None:
    picture = drawing.drawn(drawing.way(updates))
    assert picture == drawing.PICTURE.read_text(encoding="utf-8"), "run: python docs/make_update.py"


def test_a_stop_that_no_update_passes_is_refused(
    drawing: Any, updates: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(drawing.STOPS, "optim/muon.py:muon_", drawing.Stop())
    with pytest.raises(ValueError, match=r"does not pass \['optim/muon.py:muon_'\]"):
        drawing.way(updates)


@pytest.mark.parametrize(
    ("place", "each"),
    [("step/step.py:Step._micro_step", ""), ("step/step.py:Step.decide", "for each plane")],
)
def test_how_often_a_function_is_called_is_not_only_said(
    drawing: Any, updates: Any, place: str, each: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(drawing.STOPS, place, drawing.Stop(each))
    with pytest.raises(ValueError, match=re.escape(place)):
        drawing.way(updates)


def test_updates_that_go_different_ways_are_refused(drawing: Any, updates: Any) -> None:
    with pytest.raises(ValueError, match="same way"):
        drawing.way([updates[0], updates[1][:1]])


def test_all_of_the_picture_can_be_read_on_a_phone(drawing: Any) -> None:
    picture = drawing.PICTURE.read_text(encoding="utf-8")
    assert drawing.FONT_SIZE * PHONE_PX / drawing.WIDTH >= 10
    texts = re.findall(r'<text (?:class="(\w+)" )?x="(\d+)" y="(\d+)">([^<]+)<', picture)
    width = drawing.CHARACTER_WIDTH
    ends: dict[str, float] = {}
    for kind, x, y, text in texts:
        if kind == "file":
            assert ends[y] + width / 2 <= float(x) - len(text) * width, text
        else:
            ends[y] = float(x) + len(text) * width
            assert ends[y] <= drawing.WIDTH - drawing.RIGHT, text
    assert len(texts) > len(drawing.STOPS) and "prefers-color-scheme: dark" in picture


def test_the_page_explains_each_numbered_step(drawing: Any) -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    steps = [stop.number for stop in drawing.STOPS.values() if stop.number]
    way = page.partition("figures/update.svg")[2].partition("\n## ")[0]
    assert [int(number) for number in re.findall(r"^(\d)\. ", way, re.M)] == steps
