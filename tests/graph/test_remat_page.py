# Run: pytest tests/graph/test_remat_page.py
"""What docs/memory.md shows of recomputation is what was measured."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("make_remat", DOCS / "make_remat.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_page_are_the_result_s(script):
    found = script.result()
    shown = [part.split(script.END)[0].strip() for part in script.PAGE.read_text().split(script.BEGIN)[1:]]
    assert shown == [script.budgets(found), script.policies(found)], "run: python docs/make_remat.py"


def test_the_picture_has_every_line_and_follows_the_reader_s_theme(script):
    picture = script.drawn(script.result())
    words = {element.text for element in xml.fromstring(picture).iter() if element.tag.endswith("}text")}
    assert {name for _, name, _, _ in script.LINES} <= words
    assert "prefers-color-scheme: dark" in picture and not any(colour in picture.split("</style>", 1)[1] for colour in (
        script.figures.INK, script.figures.ACCENT, script.figures.WARN,
    ))  # fmt: skip
