"""Run: pytest tests/test_figures.py (the pictures of a first run are those of the run that is
recorded beside them).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

import pytest

from monograph.report.run_report import About, write_report
from scripts import ROOT, script


@pytest.fixture(scope="module")
def drawing() -> Any:
    return script("docs/make_figures.py")


def words(svg: str) -> list[str]:
    return [
        element.text or ""
        for element in xml.fromstring(svg).iter()
        if element.tag.endswith("}text")
    ]


def test_the_first_picture_is_the_committed_run_and_complete_at_once(drawing: Any) -> None:
    run, picture = drawing.recording(), drawing.FIRST_RUN.read_text()
    assert picture == drawing.first_run(run)
    assert "animation" not in picture and "prefers-color-scheme: dark" in picture
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', picture).groups())  # type: ignore[union-attr]
    assert height <= 360 and width <= 830
    end = run.curve[-1]["eval_bits_per_byte"]
    assert any(f"{end:.2f}" in line for line in words(picture)), "the last held-out bits per byte"
    assert sum("sample at" in line for line in words(picture)) == 3


def test_the_picture_of_a_sweep_is_the_committed_one(drawing: Any) -> None:
    """And each of its lines is whole."""
    picture = drawing.SWEEP.read_text()
    assert picture == drawing.adapter_sweep() and "prefers-color-scheme: dark" in picture
    shown = " ".join(" ".join(words(picture)).split())
    recorded = json.loads(drawing.SWEEP_RECORDING.read_text())
    for line in recorded["lines"]:
        assert " ".join(line.split()) in shown, line
    assert recorded["command"].split() == [
        word for word in shown.partition(" plan ")[0].split() if word not in ("$", "\\")
    ]


def test_a_transcript_of_a_sweep_keeps_what_is_shown(drawing: Any) -> None:
    lines = [
        "monograph 0", "data      read", "plan      8 members", "          at once", "   12 %   9 tok/s",
        "", "members   lr", "          0.1", "advice    more", "          monograph sweep", "best      lr=0.1",
    ]  # fmt: skip
    kept = drawing.lines_of_sweep(lines)
    assert kept == [lines[2], lines[3], lines[6], lines[7], lines[10]]


def test_the_page_of_the_first_run_shows_lines_of_the_committed_run(drawing: Any) -> None:
    run, page = drawing.recording(), (ROOT / "docs/first_run.md").read_text()
    [shown] = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert shown.splitlines() and not [
        line for line in shown.splitlines() if line not in run.before + run.after
    ]
    assert f"`held-out {run.curve[-1]['eval_bits_per_byte']:.2f} bits/byte`" in page


def test_the_held_out_curve_is_the_committed_run(drawing: Any) -> None:
    assert words(drawing.HELD_OUT.read_text()) == words(drawing.held_out(drawing.recording()))


def test_a_recording_is_what_the_pictures_need_of_a_run(drawing: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for update in range(1, 201):
        at = {"update": update, "tokens": 1000 * update}
        losses = {"train_loss": 8 - update / 50, "lr": 0.1, "grad_norm": 1.0}
        rows.append(at | losses | {"tokens_per_s": 900.0, "wall_s": update})
        if update % 20 == 0:
            rows.append(
                at | {"eval_loss": 3.0, "eval_bits_per_byte": 1.6 + 20 / update, "eval_rows": 64}
            )
        if update in (30, 100, 200):
            rows.append(at | {"share": update / 200, "sample": f"def f():\n\treturn '<&{update}>'"})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.toml").write_text("[train]\nupdates = 200\n")
    write_report(
        tmp_path, {"eval_bits_per_byte": 1.7}, rows, About({"gzip -9": 2.1, "xz -9": 1.65})
    )
    log = tmp_path / "log"
    log.write_text(
        "monograph 0\n\ndata      reading   1 s\ndata      read ... 2 s\n  update 1/200\n\ndone      3 s\n"
    )
    run = drawing.recorded(tmp_path, log)
    assert len(run.rows) == 10 + 3 + 1 and run.last["update"] == 200
    assert run.yardsticks == {"gzip -9": 2.1, "xz -9": 1.65}
    picture = drawing.first_run(run)
    assert (
        "&lt;&amp;200&gt;" in picture
        and "read ... 2 s" in picture
        and "reading   1 s" not in picture
    )
    assert "200/200" in picture and picture.count("<path") >= 3
    for svg in (picture, drawing.held_out(run)):
        assert any("gzip -9" in line and "2.10" in line for line in words(svg))
