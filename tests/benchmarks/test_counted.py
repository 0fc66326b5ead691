# Run: pytest tests/benchmarks/test_counted.py
"""What was counted on a pretended card, in benchmarks/results, keeps to its bounds.

tests/pretended_gpu counts a small model again, and compiles a sample.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
OWN = "kernels written by hand,"
# The host reads a block of tokens once. A streamed update is followed by a wait, and the host's
# thread waits for the gradients if it updates.
WAITS = {
    "streamed": {"update": 2, "evaluation": 2},
    "decoding": {"block read": 1},
}


def cases(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["cases"]


def counted(model: str) -> dict[str, Any]:
    [case] = [case for case in cases("launches") if case["case"] == model]
    return case


@pytest.mark.parametrize(
    ("part", "most"),
    [
        ("decode step, batch 1", 96),
        ("decode step, batch 64", 170),
        ("its sampler, batch 1", 3),
        ("its sampler, batch 64", 5),
        ("a prompt's chunk of 128", 170),
    ],
)
def test_decoding_is_few_launches(part: str, most: int) -> None:
    counts = counted("1b")["counts"][part]
    assert counts["launches"] <= most
    assert counts["waits"] == counts["waiting_copies"] == 0


def test_a_decode_step_of_one_row_moves_its_weights_once() -> None:
    step = counted("1b")["counts"]["decode step, batch 1"]
    moved = step["product_bytes"] + step["triton_bytes"] + step["again_bytes"]
    assert step["weight_bytes"] < moved <= 1.02 * step["weight_bytes"]


@pytest.mark.parametrize(("model", "least"), [("124m", 0.49), ("1b", 0.57)])
def test_training_is_bound_by_products(model: str, least: float) -> None:
    """By the roofline of an H200, without torch's own kernels for the norm and for rounding."""
    assert counted(model)["roofline"]["H200"]["mfu"] >= least


@pytest.mark.parametrize("model", ["124m", "1b"])
def test_the_loss_waits_for_its_bytes(model: str) -> None:
    [case] = cases("launches_loss")
    found = case["counts"][model]
    assert 1 <= found["of its bytes H200"] <= 1.1


@pytest.mark.parametrize("card", ["H200", "4090"])
def test_the_answers_of_eight_members_take_at_most_two_and_a_half_times_as_long(card: str) -> None:
    """By the roofline, while texts are short; with longer ones, what attention reads takes over."""
    [case] = cases("launches_members")
    assert (case["members"], case["answers"]) == (8, 32)
    assert 1 < case["ratios"]["128"][card]["one"] <= 2.5


@pytest.mark.parametrize("model", ["124m", "1b", "nano"])
def test_a_step_has_its_time_by_the_roofline(model: str) -> None:
    for times in counted(model)["roofline"].values():
        assert min(times[part] for part in ("products", "attention", "triton", "update")) > 0


def test_machine_code_of_kernels_written_by_hand_spills_nothing() -> None:
    own = [case for case in cases("machine_code") if case["case"].startswith(OWN)]
    assert {case["sm"] for case in own} == {80, 89, 90, 100, 120}
    spilling = [
        (case["case"], case["sm"], name)
        for case in own
        for name, needs in case["kernels"].items()
        if needs["spilled_bytes"]
    ]
    assert spilling == []


def test_the_host_waits_only_where_it_must() -> None:
    waiting = [
        (case["case"], case["sm"], part)
        for case in cases("machine_code")
        for part, counts in case.get("parts", {}).items()
        if counts["waits"] + counts["waiting_copies"]
        > WAITS.get(case["case"].split(",")[0], {}).get(part, 0)
    ]
    assert waiting == []
