"""Run: pytest tests/rl/test_rewards_page.py (what docs/rewards.md shows is what was measured)."""

from __future__ import annotations

from scripts import script


def test_tables_and_picture_are_the_results_s() -> None:
    made = script("docs/make_rewards.py")
    shown = [part.split(made.END)[0].strip() for part in made.PAGE.read_text().split(made.BEGIN)[1:]]
    assert shown == [made.tasks(), made.ladder(), made.beside()], "run: python docs/make_rewards.py"
    assert made.drawn() == made.PICTURE.read_text(encoding="utf-8"), "run: python docs/make_rewards.py"
