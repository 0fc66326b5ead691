"""Run: pytest tests/rl/test_rewards_page.py (what the pages of rewards and preferences show is what
was measured).
"""

from __future__ import annotations

from made_parts import made_parts

from scripts import script


def test_tables_and_picture_are_the_results_s() -> None:
    made = script("docs/make_rewards.py")
    for page, tables in made.TABLES.items():
        shown = made_parts(page.read_text(encoding="utf-8"), made.BEGIN)
        assert shown == [table() for table in tables], "run: python docs/make_rewards.py"
    for drawn, picture in (
        (made.drawn, made.PICTURE),
        (made.drawn_episodes, made.PICTURE_OF_EPISODES),
    ):
        assert drawn() == picture.read_text(encoding="utf-8"), "run: python docs/make_rewards.py"
