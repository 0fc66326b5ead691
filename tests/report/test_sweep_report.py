"""Run: pytest tests/report/test_sweep_report.py (a sweep's figures and page, for any shape of
sweep)
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import pytest

from monograph.report.chart_markup import payload
from monograph.report.sweep_charts import (
    MemberCurve,
    SweepScore,
    sweep_drawings,
)
from monograph.report.sweep_report import sweep_pictures, write_page_so_far, write_sweep_report

BITS = SweepScore("eval_bits_per_byte", "bits/byte")
REWARD = SweepScore("eval_reward", "reward", higher_is_better=True)


def setting(values: list[float | None], standing: str = "", **knobs: Any) -> dict[str, Any]:
    there = [value for value in values if value is not None]
    mean = sum(there) / len(there) if there else None
    return {"knobs": knobs, "mean": mean, "standard_error": 0.01 if there else None, "values": values,
            "standing": standing}  # fmt: skip


def curve(**knobs: Any) -> MemberCurve:
    rows = [
        {"update": i, "tokens": 100 * i, "eval_bits_per_byte": 8.0 / i, "eval_rows": 9}
        for i in range(1, 5)
    ]
    last = rows[-1] | {"eval_bits_per_byte": 99.0, "eval_rows": 500}
    return MemberCurve(knobs, [{"update": 1, "tokens": 5, "train_loss": 3.0}, *rows, last])


SWEEPS = {
    "rates": [
        setting([2.5, 2.6], lr=1e-3),
        setting([2.4, 2.41], "best", lr=1e-2),
        setting([None, None], lr=1.0),
    ],
    "names": [setting([2.5, None], "best", name="adamw"), setting([2.5, 2.6], "tied", name="muon")],
    "two knobs": [setting([2.0 + i, 3.0], lr=10.0**-i, wd=w) for i in range(3) for w in (0.0, 0.1)],
    "one setting": [setting([2.5, 2.6], "best")],
    "mixed": [setting([2.5], warmup="auto"), setting([2.6], "best", warmup=10)],
    "pairs": [setting([2.5], betas=(0.9, 0.95)), setting([2.6], betas=(0.8, 0.9))],
    "all lost": [setting([None, None], lr=1e-3), setting([None], lr=1e-2)],
    "booleans": [setting([2.5], tied=True), setting([2.6], tied=False)],
    "same score": [setting([2.5, 2.5], lr=1e-3), setting([2.5, 2.5], lr=1e-2)],
    "many": [setting([2.5 + i / 100], name=f"n{i}") for i in range(60)],
}


BY_DAY = ("rates", "two knobs", "mixed", "all lost", "many")


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each in BY_DAY else pytest.mark.slow) for each in SWEEPS],
)
def test_a_figure_for_each_knob_that_varies_and_one_of_the_curves(name: str) -> None:
    settings = SWEEPS[name]
    curves = [curve(**each["knobs"]) for each in settings]
    pictures = sweep_pictures(settings, curves, BITS)
    varied = [
        key
        for key in settings[0]["knobs"]
        if len({repr(each["knobs"][key]) for each in settings}) > 1
    ]
    assert [picture.name for picture in pictures] == [
        *(f"against_{key}" for key in varied),
        "curves",
    ]
    assert all(picture.png[:4] == b"\x89PNG" for picture in pictures)
    charts = sweep_drawings(settings, curves, BITS)
    assert [chart.name for chart in charts.charts] == [picture.name for picture in pictures]
    shown = json.loads(payload(charts.tables, charts.charts))
    for chart in shown["charts"]:
        assert chart["lines"] and all(
            line["key"] in shown["tables"][line["table"]] or name == "all lost"
            for line in chart["lines"]
        )


def test_members_without_an_evaluation_have_no_curve() -> None:
    assert [d.name for d in sweep_pictures(SWEEPS["rates"], [({"lr": 1e-3}, [])], BITS)] == [
        "against_lr"
    ]


@pytest.mark.parametrize(
    "name", ["rates", pytest.param("one setting", marks=pytest.mark.slow), "all lost"]
)
def test_the_page_says_what_came_of_it(name: str, tmp_path: Path) -> None:
    settings = SWEEPS[name]
    top = next((each for each in settings if each["standing"] == "best"), None)
    knobs = {f"optim.{key}": value for key, value in (top or {"knobs": {}})["knobs"].items()}
    best = {"knobs": knobs, "mean": top["mean"], "unit": "bits/byte"} if top else None
    members = [
        {"knobs": each["knobs"], "diverged": None if each["mean"] else 3} for each in settings
    ]
    advice = [
        {"text": "a <table>.", "command": "monograph sweep <b>"},
        {"text": "It is real.", "command": None},
    ]
    found = {
        "measure": BITS._asdict(),
        "best": best,
        "members": members,
        "advice": advice,
        "tokens_per_s": 1000.0,
        "wall_s": 60.0,
    }
    (tmp_path / "config.toml").write_text("[train]\nupdates = 3 # <b>\n")
    write_sweep_report(tmp_path, found, settings, [curve(**each["knobs"]) for each in settings])
    page = (tmp_path / "report.html").read_text()
    assert (
        '<p class="standing">a &lt;table&gt;. It is real.</p>' in page
        and "updates = 3 # &lt;b&gt;" in page
    )
    assert (
        page.count("<pre>monograph sweep &lt;b&gt;</pre>") == 1
        and "$" not in page.split("<script")[0]
    )
    headline = {"rates": "2.405 bits/byte at lr 0.01", "all lost": "Every member diverged"}.get(
        name, "2.550 bits/byte"
    )
    assert f"<h1>{headline}</h1>" in page
    assert page.count("<svg") == len([*(tmp_path / "figures").glob("*.png")])
    xml.fromstring("<svg" + page.split("<svg")[1].split("</svg>")[0] + "</svg>")


def test_the_page_of_a_sweep_in_progress_says_so_and_loads_itself_again(tmp_path: Path) -> None:
    settings = [setting([2.5], "best", lr=1e-3), setting([None], lr=1e-2)]
    members = [{"knobs": each["knobs"], "diverged": None} for each in settings]
    best = {"knobs": {"optim.lr": 1e-3}, "mean": 2.5, "unit": "bits/byte"}
    found = {
        "measure": BITS._asdict(),
        "best": best,
        "members": members,
        "advice": [],
        "finished": 1,
        "tokens_per_s": None,
        "wall_s": 60.0,
    }
    curves = [curve(lr=1e-3), MemberCurve({"lr": 1e-2}, [])]
    for state, reloads in (("in progress", True), ("stopped", False)):
        write_page_so_far(tmp_path, found, settings, curves, [], state)
        page = (tmp_path / "report.html").read_text()
        assert f"Sweep, {state} ·" in page and "1 of 2 members have finished." in page
        assert (
            "<h1>2.500 bits/byte at lr 0.001 so far</h1>" in page
            and ("location.reload" in page) == reloads
        )
    write_page_so_far(
        tmp_path, found | {"best": None}, settings, [({}, []), ({}, [])], [], "in progress"
    )
    assert "<h1>No score yet</h1>" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "figures").exists()
