# Run: pytest tests/stream/test_page.py
"""docs/stream.md quotes the result of its benchmark, which is what the law says."""

from __future__ import annotations

import json

from scripts import script


def test_the_page_is_what_the_script_makes():
    made = script("docs/make_stream.py")
    assert made.PAGE.read_text() == made.page(made.PAGE.read_text()), (
        "run: python docs/make_stream.py"
    )


def test_the_published_run_was_equal_and_within_its_budget():
    found = json.loads(script("docs/make_stream.py").RESULT.read_text())
    streamed = found["cases"][0]["resumed"]
    assert found["equal_bits"] and streamed["parameters"] >= 1e9
    assert streamed["device_bytes"] <= 2 * 2**30 < 12 * 2**30 <= streamed["home_bytes"]
