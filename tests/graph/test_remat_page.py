# Run: pytest tests/graph/test_remat_page.py
"""What docs/memory.md shows of recomputation is what was measured."""

from __future__ import annotations

import xml.etree.ElementTree as xml

import pytest
from made_parts import made_parts

from scripts import script


@pytest.fixture
def made():
    return script("docs/make_remat.py")


def test_the_tables_of_the_page_are_the_result_s(made):
    found = made.result()
    shown = made_parts(made.PAGE.read_text(), made.BEGIN)
    assert shown == [made.budgets(found), made.policies(found)], "run: python docs/make_remat.py"


def test_the_picture_has_every_line_and_follows_the_reader_s_theme(made):
    picture = made.drawn(made.result())
    assert picture == made.PICTURE.read_text(encoding="utf-8"), "run: python docs/make_remat.py"
    words = {
        element.text for element in xml.fromstring(picture).iter() if element.tag.endswith("}text")
    }
    assert {name for _, name, _, _ in made.LINES} <= words
    assert "prefers-color-scheme: dark" in picture and not any(colour in picture.split("</style>", 1)[1] for colour in (
        made.figures.INK, made.figures.ACCENT, made.figures.WARN,
    ))  # fmt: skip
