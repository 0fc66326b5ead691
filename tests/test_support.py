# Run: pytest tests/test_support.py
"""docs/support.md says what the code does."""

from __future__ import annotations

import pytest

from monograph.graph.remat import named
from scripts import script


@pytest.fixture(scope="module")
def made():
    return script("docs/make_support.py")


def test_the_page_is_what_the_script_makes(made):
    assert made.PAGE.read_text() == made.page(made.PAGE.read_text()), "run: python docs/make_support.py"


def test_what_is_called_held_is_in_the_law_and_nothing_else(made):
    from laws.test_cross import CROSS

    held = {(p, remat, scope) for p, remat, scope, _ in CROSS}
    for precision in made.PRECISIONS:
        for remat in made.REMATS:
            for scope in made.SCOPES:
                policy = named(float(remat) if remat == "0.3" else remat)
                refused = made.refusal(precision=precision, remat=remat, compile=scope)
                assert ((precision, policy, scope) in held) == (refused is None)
