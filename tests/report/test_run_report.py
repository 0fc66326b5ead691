"""Run: pytest tests/report/test_run_report.py (the page is read by a parser, the figures by an
image library).
"""

from __future__ import annotations

import json
import math
import resource
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from monograph.errors import DiskFull
from monograph.report import figures, run_figures
from monograph.report.metrics import BITS_PER_BYTE, METRICS
from monograph.report.run_report import About, run_page, write_report

YARDSTICKS = {"trigram": 2.82, "gzip -9": 1.97, "order 6": 1.87, "xz -9": 1.66}
SUMMARY = {
    "schema": "monograph.train/1",
    "run": "runs/a",
    "params": 1_130_000,
    "tokens": 200_000,
    "wall_s": 186.2,
    "compile_s": 19.2,
    "eval_bits_per_byte": 1.7612,
    "recompiles": 0,
    "mfu": None,
    "device": "<b>& co",
}
SAMPLES = [(0.15, "def f():\n    pass"), (1.0, "<script>alert(1)</script>\x1b[31m\x00")]


def metrics(updates: int = 100) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for update in range(1, updates + 1):
        skipped = update in (40, 41)
        rows.append(
            {
                "update": update,
                "tokens": 2000 * update,
                "train_loss": None if skipped else 2 + 5 / update,
                "lr": 1e-3 * min(1, update / 10),
                "grad_norm": None if skipped else 1 + 1 / update,
                "tokens_per_s": 15_000 + update,
                "skipped": skipped,
            }
        )
        if update % 20 == 0:
            rows.append(
                {"update": update, "tokens": 2000 * update, "eval_bits_per_byte": 1.7 + 20 / update}
            )
    return rows


class Page(HTMLParser):
    """What a browser would see: tags still open, ids, references to elsewhere, and text by tag."""

    VOID = {"meta", "br", "link", "img"}

    def __init__(self, source: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in self.VOID:
            self.stack.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "data", "srcset"):
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack:
            self.text.setdefault(self.stack[-1], []).append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "2026-11-20-1403"
    folder.mkdir()
    (folder / "config.toml").write_text('[data]\nsource = "stdlib"  # <&>\n')
    write_report(folder, SUMMARY, metrics(), About(YARDSTICKS, SAMPLES))
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    page = Page((folder / "report.html").read_text())
    assert page.stack == []
    return page


def test_a_card_s_numbers_and_moments_at_which_it_became_slower_are_shown(tmp_path: Path) -> None:
    slower = {"tokens_per_s": 9000.0, "before": 15_000.0, "why": "the GPU is slowed by <heat>"}
    gauges = {"gpu_utilization_percent": 93, "gpu_memory_bytes": 3e9, "gpu_power_w": 312.5, "gpu_temperature_c": 71,
              "gpu_clock_hz": 1.98e9}  # fmt: skip
    rows = [
        {"update": n, "tokens": 2000 * n, "tokens_per_s": 15_000, **(gauges if n % 2 else {})}
        for n in range(4)
    ]
    write_report(
        tmp_path, SUMMARY, [*rows, {"update": 3, "tokens": 6000, "slower": slower}], About({}, [])
    )
    page = (tmp_path / "report.html").read_text()
    figures = (
        "utilisation, %",
        "power, W",
        "temperature, °C",
        "clock, Hz",
        "memory of all programs, bytes",
    )
    assert all(f"GPU {name}" in page for name in figures)
    assert "Slowdowns" in page and "slowed by &lt;heat&gt;" in page
    write_report(tmp_path, SUMMARY, rows[:1], About({}, []))
    page = (tmp_path / "report.html").read_text()
    assert "GPU" not in page and "Slowdowns" not in page


def test_every_figure_is_a_file_and_part_of_the_sheet(folder: Path) -> None:
    names = {path.name for path in (folder / "figures").iterdir()}
    assert names == {
        f"{name}.png"
        for name in ("sheet", "held_out", "loss", "learning_rate", "gradient_norm", "speed")
    }
    for name in names:
        picture = np.asarray(Image.open(folder / "figures" / name).convert("L"))
        assert 0.5 < (picture > 250).mean() < 0.99  # mostly paper, and not only


def test_text_of_a_model_or_file_cannot_become_markup(page: Page) -> None:
    assert "<script>alert(1)</script>·[31m·" in "".join(page.text["pre"])
    assert 'source = "stdlib"  # <&>' in "".join(page.text["pre"])
    assert "<b>& co" in "".join(page.text["td"])


def test_result_is_set_among_the_yardsticks(page: Page) -> None:
    assert page.text["h1"] == ["1.76 bits per byte on held-out text"]
    standing = "".join(page.text["p"])
    assert (
        "Below trigram (2.82), gzip -9 (1.97) and order 6 (1.87); not yet below xz -9 (1.66)"
        in standing
    )


@pytest.mark.parametrize("bits", [[8.1, 5.98], [8.1], [8.1, 1.2], [2.0, 9.0], [8.1, 3.0, 1.7]])
def test_where_the_run_stands_is_on_the_axes(bits: list[float]) -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    yardsticks = {"gzip -9": 1.75, "xz -9": 0.75}
    rows = [{"tokens": at, "eval_bits_per_byte": value} for at, value in enumerate(bits, 1)]
    run_figures._draw_metric(axes, rows, BITS_PER_BYTE, yardsticks)
    low, high = axes.get_ylim()
    assert all(low < level < high for level in (bits[-1], *yardsticks.values()))
    assert len(bits) == 1 or bits[-1] > 2 or high < 5, "a steep start does not flatten what matters"


def test_quantities_have_their_units_and_absent_ones_no_place(page: Page) -> None:
    assert {"1.13 M", "200 k", "3 min 06 s"} <= set(page.text["dd"])
    assert "MFU" not in page.text["dt"]
    # The tables of pairs are the last ones; before them are held-out scores, with a row of heads.
    cells = dict(zip(page.text["th"][::-1], page.text["td"][::-1], strict=False))
    assert cells["compile time"] == "19 s" and cells["held-out, bits per byte"] == "1.761"
    assert "schema" not in cells
    assert cells["recompiles"] == "0"


@pytest.mark.parametrize("key", ["train_loss", "grad_norm", "tokens_per_s"])
@pytest.mark.parametrize(
    "ends", [[9, 7, 6, 5, 4.5, 4.17], [2, 900, 850, 880, 700, 406], [406], [1, 2, 3, 4, 5, 6]]
)
def test_no_label_lies_on_a_line_or_another_label(key: str, ends: list[float]) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    rows = [{"tokens": 512 * at, key: value} for at, value in enumerate(ends, 1)]
    with matplotlib.rc_context():
        matplotlib.rcParams.update(figures.STYLE)
        figure = Figure(figsize=(3.5, 2.5), layout="constrained")
        axes = figure.add_subplot()
        [metric] = [metric for metric in METRICS if metric.key == key]
        run_figures._draw_metric(axes, rows, metric, {})
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == (2 if key == "tokens_per_s" else 1)
    assert not any(box.overlaps(other) for box in boxes for other in boxes if other is not box)
    for line in axes.lines[:2]:  # the values and their trend
        corners = axes.transData.transform(np.column_stack(line.get_data()))
        across = np.linspace(corners[0, 0], corners[-1, 0], 500)
        points = np.column_stack([across, np.interp(across, *corners.T)])
        assert not any(box.contains(x, y) for box in boxes for x, y in points)


def test_equal_runs_give_equal_files(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / folder.name
    other.mkdir()
    (other / "config.toml").write_bytes((folder / "config.toml").read_bytes())
    write_report(other, SUMMARY, metrics(), About(YARDSTICKS, SAMPLES))
    assert (other / "report.html").read_bytes() == (folder / "report.html").read_bytes()


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"update": 0, "tokens": 0, "eval_bits_per_byte": 8.1}],
        [
            {
                "update": 1,
                "tokens": 2000,
                "train_loss": 7.6,
                "lr": 0.0,
                "grad_norm": 0.0,
                "tokens_per_s": 9.0,
                "skipped": False,
            }
        ],
        [
            {
                "update": 1,
                "tokens": 2000,
                "train_loss": None,
                "lr": 1e-3,
                "grad_norm": None,
                "tokens_per_s": 9.0,
                "skipped": True,
            }
        ],
    ],
    ids=["none", "one evaluation of nothing seen", "one update", "one skipped update"],
)
def test_a_run_that_hardly_began_has_a_report_too(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    write_report(tmp_path, {}, rows, About({}, []))
    assert Page((tmp_path / "report.html").read_text()).stack == []


def test_a_full_disk_leaves_the_former_report(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    former = [tmp_path / "report.html", tmp_path / "figures" / "sheet.png"]
    for path in former:
        path.write_text("former")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(DiskFull, match="the run itself is complete"):
            write_report(tmp_path, {}, [], About({}, []))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.read_text() for path in former] == ["former", "former"]
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


@pytest.mark.slow
def test_a_persons_own_style_is_neither_used_nor_changed() -> None:
    import matplotlib

    plain = run_figures.draw(metrics(), YARDSTICKS, "title", "subtitle")
    with matplotlib.rc_context(
        {"lines.marker": "o", "axes.titlelocation": "right", "font.size": 40}
    ):
        before = dict(matplotlib.rcParams)
        assert run_figures.draw(metrics(), YARDSTICKS, "title", "subtitle") == plain
        assert dict(matplotlib.rcParams) == before


def test_values_that_are_not_finite_are_left_out() -> None:
    rows = [{"tokens": 1, "x": 2.0}, {"tokens": 2, "x": None}, {"tokens": 3}, {"tokens": 4, "x": 5}]
    tokens, loss = run_figures._series(rows, "x")
    assert tokens.tolist() == [1, 4] and loss.tolist() == [2, 5]
    assert all(map(math.isfinite, loss))


def test_memory_is_drawn_where_it_was_measured(tmp_path: Path) -> None:
    planned = {"weights": 2**30, "gradients": 2**30, "activations": 3 * 2**30}
    measured = {
        "weights": 2**30,
        "gradients": 2**30,
        "activations, loss head, workspace": 4 * 2**30,
    }
    for found, drawn in (
        ({"planned": planned}, False),
        ({"planned": planned, "measured": measured}, True),
    ):
        rows = [*metrics(10), {"update": 2, "memory": found}]
        _, pictures = run_figures.draw(rows, {}, "", "")
        assert (pictures[-1].name == "memory") == drawn and len(pictures) == 4 + drawn
        page = run_page(tmp_path, {}, rows, About())
        assert ("Peak memory" in page) == ("5.00 GiB" in page) == ("6.00 GiB" in page) == drawn


CHARTS = {
    "text": ({"train_loss": 3.0, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 9.0},
             {"eval_loss": 3.1, "eval_bits_per_byte": 1.7},
             ["held_out", "loss", "learning_rate", "gradient_norm", "speed"]),
    "chats": ({"train_loss": 3.0, "lr": 0.1}, {"eval_loss": 3.1, "eval_bits_per_byte": None},
              ["loss", "learning_rate"]),
    "rewards": ({"train_loss": 0.0, "reward": 0.5, "entropy": 1.0}, {"eval_reward": 0.4}, ["reward", "entropy"]),
    "preferences": ({"train_loss": 0.7, "accuracy": 0.5, "margin": -1.0}, {"eval_loss": 0.7, "eval_accuracy": 0.4,
                    "eval_margin": 0.1}, ["accuracy", "margin"]),
}  # fmt: skip


def data_of(page: str) -> Any:
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


@pytest.mark.parametrize("kind", CHARTS)
def test_the_first_chart_is_wide_and_shows_what_is_held_out(kind: str, tmp_path: Path) -> None:
    update, scores, names = CHARTS[kind]
    rows = [{"update": n, "tokens": 9 * n, "wall_s": n} | update for n in range(1, 30)]
    charts = data_of(
        run_page(tmp_path, {}, [*rows, {"update": 29, "tokens": 261} | scores], About())
    )["charts"]
    assert [chart["name"] for chart in charts] == names
    assert [chart["is_wide"] for chart in charts] == [True, *[False] * (len(names) - 1)]
    labels = [line["label"] for line in charts[0]["lines"]]
    assert labels[-1] == "held out" and (kind == "text" or labels[0] == "training")
    loss = [[line["key"] for line in chart["lines"]] for chart in charts if chart["name"] == "loss"]
    assert loss in ([], [["train_loss", "eval_loss"]]), "training and held-out loss in one chart"


def test_where_the_learning_rate_kinks_is_said(tmp_path: Path) -> None:
    moments = [(10, "warm-up ends"), (60, "cool-down begins early"), (500, "after the end")]
    data = data_of(run_page(tmp_path, {}, metrics(), About(moments=moments)))
    [rate] = [chart for chart in data["charts"] if chart["name"] == "learning_rate"]
    marks = [(data["tables"][0]["update"][mark["row"]], mark["label"]) for mark in rate["marks"]]
    assert marks == moments[:2]
    assert rate["limits"][1] > 1.4e-3, "room for the words above the curve"


def test_a_run_in_progress_says_so_and_loads_itself_again(tmp_path: Path) -> None:
    for state, again in (("in progress", True), ("stopped", False), ("", False)):
        page = run_page(tmp_path, {}, metrics(3), About(), state)
        assert (f"Training run, {state} ·" in page) == bool(state) and (
            "location.reload" in page
        ) == again


@pytest.mark.parametrize("bits", [math.nan, math.inf, -math.inf, 0.0, None])
def test_any_score_and_any_count_is_said_in_words(bits: float | None, tmp_path: Path) -> None:
    summary = SUMMARY | {
        "eval_bits_per_byte": bits,
        "passed_over": {"empty": 2, "not JSON": 1_000},
        "notes": {},
    }
    text = run_page(tmp_path, summary, metrics(20), About(YARDSTICKS, SAMPLES))
    assert ">2 empty, 1,000 not JSON<" in text and ">none<" in text
