# Run: pytest tests/planner/test_page.py
"""The table of docs/plan.md is what the planner says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_of_the_page_is_the_planner_s():
    spec = importlib.util.spec_from_file_location("make_plan", DOCS / "make_plan.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    shown = script.PAGE.read_text().split(script.BEGIN)[1].split(script.END)[0].strip()
    assert shown == script.table(script.plans()), "run: python docs/make_plan.py"
