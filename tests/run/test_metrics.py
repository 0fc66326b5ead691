"""Run: pytest tests/run/test_metrics.py (the rows of a run: whole, once each, in JSON)."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from typing import Any

import pytest

from monograph.errors import DiskFull, InputRefused
from monograph.run.folder import Run


def test_rows_come_back_and_the_file_is_json_whatever_the_numbers(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a")
    run.log({"update": 1, "train_loss": math.nan, "parts": [1.5, math.inf], "text": "ü\n"})
    run.log({"update": 2, "train_loss": 4.25})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = run.metrics.read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse) for line in lines] == run.rows()
    assert run.rows() == [
        {"update": 1, "train_loss": None, "parts": [1.5, None], "text": "ü\n"},
        {"update": 2, "train_loss": 4.25},
    ]


def test_a_resumed_run_has_every_row_once(tmp_path: Path) -> None:
    """Rows after the checkpoint's offset, whole or cut, go; those before stay as they were, byte
    for byte.
    """
    run = Run.create(tmp_path / "a")
    for update in range(1, 4):
        run.log({"update": update})
    offset = run.sync_metrics()
    assert offset == run.metrics_offset
    kept = run.metrics.read_bytes()
    run.log({"update": 4})
    with run.metrics.open("ab") as file:
        file.write(b'{"update": 5')
    assert [row["update"] for row in run.rows()] == [1, 2, 3, 4]
    run.truncate_metrics(offset)
    assert run.metrics.read_bytes() == kept
    run.log({"update": 4})
    assert [row["update"] for row in run.rows()] == [1, 2, 3, 4]


def test_missing_rows_are_refused(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a")
    run.log({"update": 1})
    with pytest.raises(InputRefused, match="rows are missing"):
        run.truncate_metrics(run.metrics_offset + 1)


@pytest.mark.parametrize(
    "row",
    [
        {"summary": 5},
        {"summary": {"update": 6.0}},
        {"tokens_per_s": "x"},
        {"update": "x"},
        {"update": 6.0},
        {"diverged": "x"},
        {"eval_loss": "x"},
        {"own_s": "x"},
        {"sample": [1]},
        {},
        [1],
    ],
    ids=str,
)
def test_a_row_of_other_types_is_refused_by_its_line(row: Any, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    run.log({"update": 1, "train_loss": 2.0, "eval_loss": None})
    with run.metrics.open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(InputRefused, match=r"metrics\.jsonl:2: not a row of metrics"):
        run.rows()


def test_a_run_without_rows_has_offset_zero(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a")
    assert run.rows() == []
    assert run.sync_metrics() == 0
    run.truncate_metrics(0)


def test_a_full_disk_leaves_no_half_row(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel write part of a line and then refuse, as a full disk does."""
    run = Run.create(tmp_path / "a")
    run.log({"update": 1, "text": "x" * 100})
    kept = run.metrics.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept) + 20, limits[1]))
    try:
        with pytest.raises(DiskFull, match="metrics.jsonl"):
            run.log({"update": 2, "text": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert run.metrics.read_bytes() == kept
