# Run: pytest tests/measure/test_calibration.py
"""What updates took is kept by device and precision, and makes every predicted time longer alike; nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from batches import tiny_llama
from monograph.device import named
from monograph.measure.calibration import MOST, Calibration, peak_flops
from monograph.measure.footprint import Work
from monograph.measure.roofline import update_time
from monograph.optim import AdamW
from monograph.planner import Asked, plan

CARD = replace(named("4090"), free_memory_bytes=2**34)
WORK = Work(tiny_llama().config, 4, 16, AdamW(), precision="bf16", window_rows=8)


def noted(file, *ratios, device=CARD, work=WORK):
    expected = update_time(work, device, 1e12).total_s
    for ratio in ratios:
        Calibration(file).note(device, work, ratio * expected, 1e12)
    return Calibration(file)


def test_the_median_of_the_newest_counts_by_device_and_precision(tmp_path):
    file = tmp_path / "deep" / "calibration.json"
    found = noted(file, *[100.0] * MOST, *[3.0, 1.0, 2.0, 2.0, 2.0, 50.0])
    assert found.slowness(CARD, "bf16") == pytest.approx(2.5, abs=0.51)
    assert len(json.loads(file.read_text())["seen"].popitem()[1]) == MOST
    assert found.slowness(CARD, "fp32") is None and found.slowness(named("H100"), "bf16") is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": "monograph.calibration/1", "seen": {"a": ["x"]}}', "\0"])
def test_a_damaged_file_is_none_and_is_replaced(tmp_path, text):
    file = tmp_path / "calibration.json"
    file.write_text(text)
    assert Calibration(file).slowness(CARD, "bf16") is None
    assert noted(file, 2.0).slowness(CARD, "bf16") == pytest.approx(2.0)


def test_what_cannot_be_written_is_forgotten(tmp_path):
    (tmp_path / "file").write_text("")
    assert noted(tmp_path / "file" / "calibration.json", 2.0).slowness(CARD, "bf16") is None
    (taken := tmp_path / "calibration.json").mkdir()
    assert noted(taken, 2.0).slowness(CARD, "bf16") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.json", "file"], "nothing half-written"


def test_a_plan_is_slower_by_the_ratio_and_otherwise_the_same(tmp_path):
    asked = Asked(tiny_llama().config, 16, 64 * 16, precisions=("bf16",))
    plain, slow = (plan(asked, CARD, CARD.peak_flops, known) for known in (None, noted(tmp_path / "c.json", 2.0)))
    assert (plain.calibrated, slow.calibrated) == (False, True)
    assert [each.work for each in slow.candidates] == [each.work for each in plain.candidates]
    for before, after in zip(plain.candidates, slow.candidates, strict=True):
        assert after.update_s == pytest.approx(2 * before.update_s)
        assert after.tokens_per_s == pytest.approx(before.tokens_per_s / 2)


def test_what_no_datasheet_says_is_measured_in_the_dtype_that_it_is_computed_in():
    found = peak_flops(replace(CARD, peak_flops={"bf16": 1e12}), ("bf16", "fp16", "fp8"))
    assert found["fp16"] == found["bf16"] == 1e12 and found["fp8"] > 0
