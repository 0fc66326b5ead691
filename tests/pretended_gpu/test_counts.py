"""Run: make gpu-less ARGS=tests/pretended_gpu/test_counts.py

What a small model's micro-step and update launch, and the bytes that their kernels move, do not
grow unseen. In a process of its own, since counting changes how Inductor writes kernels.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KEPT = BENCHMARKS / "results" / "launches.json"


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, float]]:
    sys.path.insert(0, str(BENCHMARKS))
    import launches
    import pretended

    pretended.watch()
    return launches.counts(
        launches.CASES["nano"], None, Namespace(unpacked=False, smoke=False, precision="bf16")
    )


def test_a_step_launches_no_more_and_moves_no_more_bytes_than_was_written_down(counted) -> None:
    """What takes less is written down by `benchmarks/launches.py`, which also counts larger models."""
    kept = next(case for case in json.loads(KEPT.read_text())["cases"] if case["case"] == "nano")
    grown = [
        f"{part}: {name} {found[name]:,.0f}, {kept['counts'][part][name]:,.0f} in {KEPT.name}"
        for part, found in counted.items()
        for name in ("launches", "triton_bytes", "again_bytes", "waits", "waiting_copies")
        # The kept bytes are on a line through two other depths.
        if found[name] > kept["counts"][part][name] * 1.005
    ]
    assert not grown


def test_a_decode_step_is_five_launches_a_layer_and_waits_for_nothing(counted) -> None:
    import launches

    config = launches.shape_of(launches.CASES["nano"], layers=2).config
    step, sampler, chunk = launches.decoding(config, 1).values()
    # Beside the layer: the embedding, the rotary tables (2), and the last norm with the head.
    assert step["launches"] - sampler["launches"] == 2 * 5 + 4
    # The edits of the logits, the sampler, and the rows' new state.
    assert sampler["launches"] == 3
    assert step["cublas"] == 0
    # A layer of a prompt takes ten. The last one computes its keys and values alone, in three, and
    # the table of angles is one launch.
    assert chunk["launches"] == 10 + 3 + 1
    assert not any(part["waits"] or part["waiting_copies"] for part in (step, sampler, chunk))


@pytest.mark.parametrize("rows", [1, 16])
def test_a_delta_net_is_four_launches_in_a_decode_step_and_waits_for_nothing(
    counted, rows: int
) -> None:
    import launches

    layers = launches.hybrid_layers(rows, mode="captured")
    # Gated attention takes five launches, a feed-forward layer two, and a mixture with a shared
    # expert eight.
    assert [part["launches"] for part in layers.values()] == [4 + 8, 5 + 8, 4 + 2, 5 + 2]
    assert not any(part["cublas"] or part["aten"] for part in layers.values())
    assert not any(part["waits"] or part["waiting_copies"] for part in layers.values())


def test_a_replayed_micro_step_is_one_graph_and_nothing_waits(counted) -> None:
    replayed = counted["micro-step replayed"]
    assert (replayed["graphs"], replayed["launches"]) == (1, 0)
    assert not any(part["waits"] or part["waiting_copies"] for part in counted.values())
