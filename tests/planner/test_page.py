# Run: pytest tests/planner/test_page.py
"""The tables of docs/plan.md are what the planner says."""

from __future__ import annotations

import pytest
from made_parts import made_parts

from scripts import script


def shown(made) -> str:
    return made_parts(made.PAGE.read_text(), made.BEGIN)[0]


@pytest.mark.slow
def test_the_table_of_the_page_is_the_planner_s(monkeypatch):
    """Of the cards that one trace decides; the largest card, whose plan needs another, is planned
    at night.
    """
    made = script("docs/make_plan.py")
    monkeypatch.setattr(made, "CARDS", made.CARDS[:-1])
    assert shown(made).rpartition("\n")[0] == made.table(made.plans()), (
        "run: python docs/make_plan.py"
    )


@pytest.mark.slow
def test_the_table_and_the_picture_of_the_page_are_the_planner_s():
    made = script("docs/make_plan.py")
    found = made.plans()
    assert shown(made) == made.table(found), "run: python docs/make_plan.py"
    assert made.drawn(found) == made.PICTURE.read_text(encoding="utf-8"), (
        "run: python docs/make_plan.py"
    )


@pytest.mark.slow  # 18 plans, of up to 80 blocks, played by the clock
def test_the_table_of_what_is_streamed_is_the_planner_s():
    made = script("docs/make_plan.py")
    (streamed,) = made_parts(made.PAGE.read_text(), made.STREAM_BEGIN)
    assert streamed == made.streamed_table(), "run: python docs/make_plan.py"
