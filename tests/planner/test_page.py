# Run: pytest tests/planner/test_page.py
"""The table of docs/plan.md is what the planner says."""

from __future__ import annotations

from scripts import script


def test_the_table_of_the_page_is_the_planner_s():
    made = script("docs/make_plan.py")
    shown = made.PAGE.read_text().split(made.BEGIN)[1].split(made.END)[0].strip()
    assert shown == made.table(made.plans()), "run: python docs/make_plan.py"
