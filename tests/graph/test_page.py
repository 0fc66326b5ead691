# Run: pytest tests/graph/test_page.py
"""docs/lora.md quotes the results of its benchmarks, and they say what it says."""

from __future__ import annotations

import json

from scripts import script


def test_the_page_is_what_the_script_makes():
    made = script("docs/make_adapters.py")
    assert made.PAGE.read_text() == made.page(made.PAGE.read_text()), (
        "run: python docs/make_adapters.py"
    )


def test_fewer_bits_take_less_memory_and_what_was_planned_was_measured():
    made = script("docs/make_adapters.py")
    cases = json.loads((made.RESULTS / "adapters.json").read_text())["cases"]
    for model in ("1b", "8b"):
        peaks = [case["peak_bytes"] for case in cases if case["model"] == model]
        assert len(peaks) == 5
        for remat in ("none", "full"):
            sizes = [each[remat] for each in peaks]
            assert sizes == sorted(sizes, reverse=True)
    seen = [case["measured"] for case in cases if case["measured"]]
    assert len(seen) >= 3 and all(abs(each["error"]) <= 0.05 for each in seen)


def test_every_way_computed_the_same_loss():
    made = script("docs/make_adapters.py")
    assert (
        made.spread_of_losses(json.loads((made.RESULTS / "adapter_peers.json").read_text())) < 1e-4
    )
