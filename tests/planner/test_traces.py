"""Run: pytest tests/planner/test_traces.py (traces of steps are kept in the cache folder)"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batches import tiny_config
from monograph.optim import AdamW
from monograph.planner import traces
from monograph.planner.traces import traced_bytes
from monograph.predict.fake_memory import ORIGINS
from monograph.predict.footprint import Footprint, Work

WORK = Work(tiny_config(), rows=2, length=32, optim=AdamW())


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """The steps that were traced, each of which needs 10 bytes more than the one before."""
    found = list[Work]()

    def trace(work: Work) -> Footprint:
        found.append(work)
        return Footprint(
            "forward", {name: 10 * len(found) + place for place, name in enumerate(ORIGINS)}
        )

    monkeypatch.setattr(traces, "footprint", trace)
    monkeypatch.setenv("MONOGRAPH_HOME", str(tmp_path / "home"))
    return found


def test_a_step_is_traced_once(traced: list[Work], monkeypatch: pytest.MonkeyPatch) -> None:
    first = traced_bytes(WORK)
    assert traced_bytes(WORK) == first and list(first) == list(ORIGINS) and len(traced) == 1
    assert (
        traced_bytes(replace(WORK, rows=3)) != first
        and traced_bytes(WORK) == first
        and len(traced) == 2
    )
    monkeypatch.setattr(traces, "code_digest", lambda: "another version")
    assert traced_bytes(WORK) != first


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"a": 1}', '{"a": {"weights": 1}}', "\x00", '{"a": ' * 100_000]
)
def test_a_damaged_file_is_written_anew(content: str, traced: list[Work], tmp_path: Path) -> None:
    traced_bytes(WORK)
    [kept] = (tmp_path / "home").iterdir()
    kept.write_text(content)
    assert traced_bytes(WORK) == traced_bytes(WORK) and len(traced) == 2


def test_a_trace_with_another_number_is_made_anew(traced: list[Work], tmp_path: Path) -> None:
    first = traced_bytes(WORK)["weights"]
    traced_bytes(replace(WORK, rows=3))
    [kept] = (tmp_path / "home").iterdir()
    kept.write_text(kept.read_text().replace(f"[{first},", f"[{first + 1},"))
    assert (
        traced_bytes(WORK)["weights"] == 30 and traced_bytes(replace(WORK, rows=3))["weights"] == 20
    )


def test_old_traces_go(traced: list[Work], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_TRACES", 2)
    for rows in (1, 2, 3, 2, 3, 1):
        traced_bytes(replace(WORK, rows=rows))
    assert [work.rows for work in traced] == [1, 2, 3, 1]


def test_a_folder_that_cannot_be_written_costs_time_alone(
    traced: list[Work], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MONOGRAPH_HOME", str(tmp_path / "file"))
    assert traced_bytes(WORK)["weights"] == 10 and traced_bytes(WORK)["weights"] == 20
