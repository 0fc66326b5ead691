# Run: pytest tests/ensemble/test_page.py
"""The tables and the picture of docs/ensemble.md are made from the results."""

from __future__ import annotations

from scripts import ROOT, script


def test_tables_and_picture_are_the_results():
    page, picture = script("docs/make_ensemble.py").made()
    assert page == (ROOT / "docs" / "ensemble.md").read_text(encoding="utf-8")
    assert picture == (ROOT / "docs" / "figures" / "crossover.svg").read_text(encoding="utf-8")


def test_what_is_recommended_is_never_slower_than_one_after_another():
    found = script("docs/make_ensemble.py").result("crossover")
    assert all(case["gain"][str(case["chosen"])] >= 0.95 for case in found["cases"])
