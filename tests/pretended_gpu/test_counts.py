"""Run: make gpu-less ARGS=tests/pretended_gpu/test_counts.py

What a small model's micro-step and update launch, and the bytes that their kernels move, do not
grow unseen. In a process of its own, since counting changes how Inductor writes kernels.
"""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from monograph.decode.cache import KVCache
from monograph.model.config import LlamaConfig
from monograph.ops.attention import BLOCK

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KEPT = BENCHMARKS / "results" / "launches.json"
COUNTS = ("launches", "triton_bytes", "again_bytes", "waits", "waiting_copies")
SECONDS = "triton_s H200"  # by a card's datasheet; instructions are among what takes them
# Wide enough that the weights are most of what a step reads.
WIDE = LlamaConfig.preset(
    "nano",
    num_hidden_layers=2,
    hidden_size=768,
    intermediate_size=2304,
    num_attention_heads=12,
    num_key_value_heads=2,
    head_dim=64,
)


@pytest.fixture(scope="module")
def launches() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    import launches
    import pretended

    pretended.watch()
    return launches


@pytest.fixture(scope="module")
def counted(launches: Any) -> dict[str, dict[str, float]]:
    return launches.counts(
        launches.CASES["nano"], None, Namespace(unpacked=False, smoke=False, precision="bf16")
    )


def test_a_step_launches_no_more_and_moves_no_more_bytes_than_was_written_down(counted) -> None:
    """What takes less is written down by `benchmarks/launches.py`, which also counts larger models."""
    kept = next(case for case in json.loads(KEPT.read_text())["cases"] if case["case"] == "nano")
    grown = [
        f"{part}: {name} {found[name]:,.0f}, {kept['counts'][part][name]:,.0f} in {KEPT.name}"
        for part, found in counted.items()
        for name in (*COUNTS, SECONDS)
        # The kept bytes are on a line through two other depths.
        if name in found and found[name] > kept["counts"][part][name] * 1.005
    ]
    assert not grown


def test_a_decode_step_is_five_launches_a_layer_and_reads_its_weights_once(launches) -> None:
    step, sampler, chunk = launches.decoding(WIDE, 1).values()
    # Beside the layer: the embedding, the rotary tables (2), and the last norm with the head.
    assert step["launches"] - sampler["launches"] == 2 * 5 + 4
    # The edits of the logits, the sampler, and the rows' new state.
    assert sampler["launches"] == 3
    assert step["cublas"] == 0
    assert_weights_are_read_once(launches, step)
    # A layer of a prompt takes ten. The last one computes its keys and values alone, in three, and
    # the table of angles is one launch.
    assert chunk["launches"] == 10 + 3 + 1
    assert not any(part["waits"] or part["waiting_copies"] for part in (step, sampler, chunk))


def assert_weights_are_read_once(launches: Any, step: dict[str, float]) -> None:
    """Beside the weights of `WIDE`, a step moves the cache, hidden states of one row, and logits."""
    moved = step["triton_bytes"] + step["again_bytes"]
    slots = launches.PROMPT + launches.TOKENS
    cache_bytes = KVCache.bytes_per_row(WIDE, slots, torch.bfloat16, BLOCK)
    assert moved - cache_bytes <= 1.02 * step["weight_bytes"]


def test_a_decode_step_of_64_rows_is_eight_launches_a_layer(launches) -> None:
    config = launches.shape_of(launches.CASES["nano"], layers=2).config
    step, sampler = launches.decoding(config, 64).values()
    # Beside the layers: the embedding with the first norm, the table of angles, and the head. Four of
    # a layer are products of cuBLAS.
    assert step["launches"] - sampler["launches"] == 2 * 8 + 3
    assert step["cublas"] == 2 * 4 + 1
    assert sampler["launches"] == 4
    assert not any(part["waits"] or part["waiting_copies"] for part in (step, sampler))


@pytest.mark.parametrize("preset", ["124m", "1b"])
def test_the_loss_waits_for_its_bytes(launches, preset: str) -> None:
    """Its instructions would take no tenth longer than a card's memory."""
    found = launches.loss_counts(launches.CASES[preset], rows=8)
    assert 1 <= found["of its bytes H200"] <= 1.1
    assert found["instructions_of_a_logit"] > 0


@pytest.mark.parametrize(("base", "adapts", "of_a_layer"), [("int8", False, 5), ("nf4", True, 9)])
def test_a_frozen_base_is_read_once_and_adapters_are_a_launch_for_each_product(
    launches, base: str, adapts: bool, of_a_layer: int
) -> None:
    step = launches.frozen_step(WIDE, base, adapts)
    # Beside the layers: the four launches around them, and the sampler's three.
    assert step["launches"] == 2 * of_a_layer + 4 + 3
    assert step["cublas"] == 0
    assert step["waits"] == step["waiting_copies"] == 0
    assert_weights_are_read_once(launches, step)


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_rows_with_their_own_adapters_are_a_launch_for_each_product(launches, base: str) -> None:
    config = LlamaConfig.preset("nano", num_hidden_layers=2)
    step = launches.banked_step(config, base, rows=8)
    # As for one adapter of all rows.
    assert step["launches"] == 2 * 9 + 4 + 3
    assert step["cublas"] == 0
    assert step["waits"] == step["waiting_copies"] == 0


def test_members_sample_answers_in_as_many_launches_as_one(launches, capsys) -> None:
    result = launches.measured_members(is_smoke=True)
    one, together, alone = list(result["counts"].values())[:3]
    assert together["launches"] == one["launches"] <= alone["launches"]
    assert not any(part["waits"] or part["waiting_copies"] for part in (one, together))
    # The rows of two members fit the tile of one, so the kernels read its weights once for both.
    assert one["triton_bytes"] < together["triton_bytes"] < 2 * one["triton_bytes"]
    assert one["flops"] <= together["flops"] < 2 * one["flops"]
    launches.show(result)
    shown = capsys.readouterr().out
    assert all(f"{card}, 128 positions: all members take " in shown for card in launches.CARDS)


def test_tiles_of_rows_that_read_the_same_weights_run_side_by_side(launches) -> None:
    """Programs begin in the order of the grid's first axis, and a cache then has the weights."""
    from monograph.ops.layer_kernels import StoredLayer, multiply
    from pretended_gpu import card

    codes = torch.empty(64, 128, dtype=torch.int8, device="cuda")
    layer = StoredLayer("int8", (codes, torch.empty(64, device="cuda")))
    x_BK = torch.empty(200, 128, dtype=torch.bfloat16, device="cuda")
    with card.logged() as log:
        multiply(x_BK, [layer], [64])
    [launch] = log.of(card.Launch)
    assert launch.grid.x == 4  # of 64 rows each


@pytest.mark.parametrize("rows", [1, 16])
def test_a_delta_net_is_four_launches_in_a_decode_step_and_waits_for_nothing(
    counted, launches, rows: int
) -> None:
    layers = launches.hybrid_layers(rows, mode="captured")
    # Gated attention takes five launches, a feed-forward layer two, and a mixture with a shared
    # expert eight.
    assert [part["launches"] for part in layers.values()] == [4 + 8, 5 + 8, 4 + 2, 5 + 2]
    assert not any(part["cublas"] or part["aten"] for part in layers.values())
    assert not any(part["waits"] or part["waiting_copies"] for part in layers.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernels_of_a_delta_net_spill_nothing(counted, dtype: torch.dtype) -> None:
    """The largest heads, whose state of 128 x 128 numbers is in registers, and Qwen3-Next's taps."""
    import pretended

    from monograph.ops import delta_net_kernels as kernels

    def unwritten(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="cuda")

    shape = kernels.DeltaNetShape(2, 4, 128, 128, True)
    channels = shape.channels
    position, count, limit = (unwritten(1, kind=torch.int64) for _ in range(3))
    projected = unwritten(1, channels + 4 * 128 + 2 * 4)
    parameters = kernels.DeltaNetParameters(
        unwritten(4), unwritten(4), unwritten(128), eps=1e-6, l2_eps=1e-6
    )
    with pretended.Counted() as launched:
        mixed, is_new = kernels.convolve_token(
            projected, unwritten(channels, 1, 4), position, count, limit, unwritten(1, 4, channels),
            shape,
        )  # fmt: skip
        state = unwritten(1, 4, 128, 128, kind=torch.float32)
        kernels.delta_rule_token(mixed, projected, parameters, is_new, state, count, shape)
    found = {kernel.name: kernel.stack_bytes for kernel in launched.kernels}
    assert found == {"_convolve_token": 0, "_delta_rule_token": 0}


def test_a_replayed_micro_step_is_one_graph_and_nothing_waits(counted) -> None:
    replayed = counted["micro-step replayed"]
    assert (replayed["graphs"], replayed["launches"]) == (1, 0)
    assert not any(part["waits"] or part["waiting_copies"] for part in counted.values())


def test_constants_in_compiled_code_are_what_a_card_would_compute(launches) -> None:
    """Inductor computes them on the card, whose kernels compute nothing here."""

    def function(x: torch.Tensor) -> torch.Tensor:
        quarter = torch.zeros(64, device="cuda") + 0.25
        return torch.where(x > 0, x * torch.full((64,), 2.0, device="cuda"), quarter)

    # What this leaves in the card's memory, no constant may be.
    torch.full((64,), 2.0039, device="cuda")
    _, [code] = run_and_get_code(torch.compile(function), torch.empty(64, device="cuda"))
    constants = re.findall(r"tl\.full\(\[1\], ([-\w.]+), tl\.float32\)", code)
    assert sorted(map(float, constants)) == [0.0, 0.25, 2.0]


@pytest.mark.parametrize("base", ["auto", "nf4"])
def test_members_read_their_base_as_often_as_one_and_launch_little_more(launches, base) -> None:
    import members_launches

    config = LlamaConfig.preset("nano", num_hidden_layers=1)
    # Of four members of rank 16, the factors of a layer would have the shape of a weight of nano.
    alone, together = (members_launches.counted(config, base, many) for many in (1, 3))
    for name in ("base_bytes", "base_bytes_by_kernels", "base_bytes_by_products"):
        assert alone["micro-step"][name] == together["micro-step"][name]
    assert alone["micro-step"]["base_bytes_by_products"] > 0
    assert (alone["micro-step"]["base_bytes_by_kernels"] > 0) == (base == "nf4")
    launched = [sum(part["launches"] for part in each.values()) for each in (alone, together)]
    # A kernel more for each matrix of an adapter, such as one that copies its total, would be 1.1 times as many.
    assert launched[1] <= 1.05 * launched[0]
