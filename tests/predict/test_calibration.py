# Run: pytest tests/predict/test_calibration.py
"""What updates took is kept by device and precision, and makes every predicted time longer alike;
nothing else.
"""

from __future__ import annotations

import errno
import functools
import json
from dataclasses import replace

import pytest
import torch

from batches import tiny_config
from monograph.device import card_device
from monograph.optim import AdamW
from monograph.planner import PlanRequest, defaults, plan
from monograph.predict import roofline
from monograph.predict.footprint import Footprint, Work
from monograph.predict.roofline import MAX_MEASUREMENTS, Calibration, peak_flops, update_time

CARD = replace(card_device("4090"), free_memory_bytes=2**34)
STEP = Work(tiny_config(), rows=64, length=16, optim=AdamW(), window_rows=64)
WORK = Work(tiny_config(), rows=4, length=16, optim=AdamW(), precision="bf16", window_rows=8)


def noted(file, *ratios, device=CARD, work=WORK):
    expected = update_time(work, device, 1e12).total_s
    for ratio in ratios:
        Calibration(file).note_time(device, work, ratio * expected, 1e12)
    return Calibration(file)


def test_the_median_of_the_newest_counts_by_device_and_precision(tmp_path):
    file = tmp_path / "deep" / "calibration.json"
    found = noted(file, *[100.0] * MAX_MEASUREMENTS, *[3.0, 1.0, 2.0, 2.0, 2.0, 50.0])
    assert found.slowness(CARD, "bf16") == pytest.approx(2.5, abs=0.51)
    assert len(json.loads(file.read_text())["seen"].popitem()[1]) == MAX_MEASUREMENTS
    assert (
        found.slowness(CARD, "fp32") is None and found.slowness(card_device("H100"), "bf16") is None
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"schema": "monograph.calibration/1", "seen": {"a": ["x"]}}',
        "\0",
        "9" * (1 << 25),
    ],
    ids=len,
)
def test_a_damaged_file_is_none_and_is_replaced(tmp_path, text):
    file = tmp_path / "calibration.json"
    file.write_text(text)
    assert Calibration(file).slowness(CARD, "bf16") is None
    assert noted(file, 2.0).slowness(CARD, "bf16") == pytest.approx(2.0)


def test_a_file_that_cannot_be_read_is_not_replaced(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    noted(file := tmp_path / "calibration.json", 2.0)
    with monkeypatch.context() as failing:
        failing.setattr("builtins.open", fails)
        Calibration(file).note_time(CARD, WORK, 1.0, 1e12)
    assert Calibration(file).slowness(CARD, "bf16") == pytest.approx(2.0)


def test_what_cannot_be_written_is_forgotten(tmp_path):
    (tmp_path / "file").write_text("")
    assert noted(tmp_path / "file" / "calibration.json", 2.0).slowness(CARD, "bf16") is None
    (taken := tmp_path / "calibration.json").mkdir()
    assert noted(taken, 2.0).slowness(CARD, "bf16") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.json", "file"], (
        "nothing half-written"
    )


def test_a_plan_is_slower_by_the_ratio_and_otherwise_the_same(tmp_path):
    asked = PlanRequest(STEP, precisions=("bf16",))
    plain, slow = (
        plan(asked, CARD, CARD.peak_flops, known)
        for known in (None, noted(tmp_path / "c.json", 2.0))
    )
    assert (plain.calibrated, slow.calibrated) == (False, True)
    assert [each.work for each in slow.candidates] == [each.work for each in plain.candidates]
    for before, after in zip(plain.candidates, slow.candidates, strict=True):
        assert after.update_s == pytest.approx(2 * before.update_s)
        assert after.tokens_per_s == pytest.approx(before.tokens_per_s / 2)


def test_what_no_datasheet_says_is_measured_in_the_dtype_that_it_is_computed_in(monkeypatch):
    calls = []

    def measured(device, dtype, seconds):
        calls.append(dtype)
        two = torch.ones(2, 2, device=device, dtype=dtype)
        return {torch.bfloat16: 1e9}[dtype] * float(two.mm(two)[0, 0])

    monkeypatch.setattr(roofline, "measured_matmul_flops", measured)
    monkeypatch.setattr(
        roofline, "_measured_flops", functools.cache(roofline._measured_flops.__wrapped__)
    )
    for _ in range(2):
        found = peak_flops(replace(CARD, peak_flops={"bf16": 1e12}), ("bf16", "fp16", "fp8"))
        assert found["fp16"] == found["bf16"] == 1e12 and found["fp8"] == 2e9
    assert len(calls) == 1, "it takes 0.2 s, and does not change"


MIB = 2**20
TRACED = {
    "weights": 500 * MIB,
    "gradients": 500 * MIB,
    "activations": 90 * MIB,
    "workspace": 10 * MIB,
}


def grown(factor):
    return TRACED | {"activations": int(factor * 90 * MIB), "workspace": int(factor * 10 * MIB)}


def remembered(file, *residuals, traced=TRACED, work=WORK, device=CARD):
    for more in residuals:
        Calibration(file).note_memory(device, work, traced, sum(traced.values()) + more)
    return Calibration(file)


def test_what_the_allocator_took_beyond_a_trace_counts_for_steps_like_it(tmp_path):
    found = remembered(tmp_path / "c.json", 30 * MIB, 32 * MIB, 90 * MIB)
    assert found.residual(CARD, WORK, TRACED) == 32 * MIB
    assert (
        found.residual(CARD, WORK, grown(1.9))
        == found.residual(CARD, WORK, grown(0.51))
        == 32 * MIB
    )
    assert found.residual(CARD, WORK, grown(2.1)) == found.residual(CARD, WORK, grown(0.49)) == 0
    # What the weights weigh is known to the byte, and tells nothing.
    assert found.residual(CARD, WORK, TRACED | {"weights": 9000 * MIB}) == 32 * MIB
    for work in (replace(WORK, compile="blocks"), replace(WORK, precision="fp32")):
        assert found.residual(CARD, work, TRACED) == 0
    assert found.residual(card_device("H100"), WORK, TRACED) == 0


def test_a_trace_that_found_too_much_is_believed_but_for_a_twentieth(tmp_path):
    found = remembered(tmp_path / "c.json", -3 * MIB)
    assert found.residual(CARD, WORK, TRACED) == -3 * MIB
    found = remembered(tmp_path / "c.json", -50 * MIB, -50 * MIB)
    assert found.residual(CARD, WORK, TRACED) == -5 * MIB
    assert found.residual(CARD, WORK, TRACED | {"workspace": MIB, "activations": 99 * MIB}) == -MIB


@pytest.mark.parametrize("more", [101 * MIB, -101 * MIB, 10**12])
def test_more_than_all_that_passes_is_something_else_on_the_device(tmp_path, more):
    assert remembered(tmp_path / "c.json", more).residual(CARD, WORK, TRACED) == 0


def test_times_and_memory_are_kept_side_by_side_and_the_newest_count(tmp_path):
    file = tmp_path / "c.json"
    noted(file, 2.0)
    remembered(file, *[MIB] * MAX_MEASUREMENTS, *[7 * MIB] * MAX_MEASUREMENTS)
    noted(file, 2.0)
    assert Calibration(file).slowness(CARD, "bf16") == pytest.approx(2.0)
    assert Calibration(file).residual(CARD, WORK, TRACED) == 7 * MIB
    assert len(json.loads(file.read_text())["beyond"].popitem()[1]) == MAX_MEASUREMENTS


def test_a_file_of_before_there_was_memory_in_it_is_read(tmp_path):
    noted(file := tmp_path / "c.json", 2.0)
    file.write_text(
        json.dumps(
            {name: part for name, part in json.loads(file.read_text()).items() if name != "beyond"}
        )
    )
    assert Calibration(file).slowness(CARD, "bf16") == pytest.approx(2.0)


@pytest.mark.parametrize(
    "beyond", ["[]", '{"a": 1}', '{"a": [[1]]}', '{"a": [[1, "x"]]}', '{"a": [[Infinity, 1]]}']
)
def test_damaged_memory_is_none(tmp_path, beyond):
    file = tmp_path / "c.json"
    noted(file, 2.0)
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"beyond": "HERE"}).replace('"HERE"', beyond)
    )
    assert Calibration(file).residual(CARD, WORK, TRACED) == 0
    assert remembered(file, MIB).residual(CARD, WORK, TRACED) == MIB


def test_after_one_run_the_plan_of_the_same_step_is_what_was_measured(tmp_path, monkeypatch):
    """And stays it, however often it is measured again: what is kept is beyond the trace, not
    beyond the plan.
    """
    monkeypatch.setattr(defaults, "traced_bytes", lambda work: dict(TRACED))
    tight, file = (
        replace(CARD, free_memory_bytes=1300 * MIB + defaults.CONTEXT_BYTES),
        tmp_path / "c.json",
    )
    monkeypatch.setattr(defaults, "MAX_ESTIMATE_ERROR", 1e9)
    asked = PlanRequest(STEP, precisions=("bf16",), scopes=("blocks",), remats=("none",))
    for measured in (1131 * MIB, 1131 * MIB, 1131 * MIB):
        found = plan(asked, tight, tight.peak_flops, Calibration(file)).chosen
        assert found.traced == TRACED
        Calibration(file).note_memory(tight, found.work, found.traced, measured)
    assert found.peak_memory_bytes == measured and found.residual_bytes == 31 * MIB
    assert found.by_origin["workspace"] == 41 * MIB and sum(found.by_origin.values()) == measured


def test_what_earlier_runs_took_beyond_the_trace_can_make_a_plan_smaller(tmp_path, monkeypatch):
    """A step that fits by its trace and has not fitted on the device is not chosen again."""

    def footprint(work):
        return Footprint(
            "backward", {"weights": 1000 * MIB, "activations": 10 * work.rows * MIB, "workspace": 0}
        )

    monkeypatch.setattr(defaults, "traced_bytes", lambda work: footprint(work).by_origin)
    monkeypatch.setattr(defaults, "MAX_ESTIMATE_ERROR", 1e9)
    card = replace(
        CARD, free_memory_bytes=int(1645 * MIB / defaults.CARD_SHARE) + defaults.CONTEXT_BYTES
    )
    asked = PlanRequest(STEP, precisions=("bf16",), scopes=("blocks",), remats=("none",))
    before = plan(asked, card, card.peak_flops).chosen
    assert before.work.rows == 64
    known = remembered(
        tmp_path / "c.json", 20 * MIB, traced=before.traced, work=before.work, device=card
    )
    after = plan(asked, card, card.peak_flops, known)
    assert after.chosen is None or after.chosen.work.rows < 64
    assert after.chosen.peak_memory_bytes <= after.budget_bytes
