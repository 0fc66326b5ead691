"""Run: pytest tests/report/test_page.py

The pages of all reports, as far as can be told without a browser: their markup, the data of their
charts, their colours, and the script that sorts, run by Node on a stand-in for the document.
tests/report/test_in_a_browser.py does the rest where one is.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as xml
from collections import Counter
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monograph.report.chart_markup import figure, payload
from monograph.report.charts import Chart, Line, columns, moving_median
from monograph.report.page import Drawings, section, table
from monograph.report.page import page as page_of
from reports import CHARTED, HOSTILE, KINDS

VOID = {"meta", "br", "link", "img"}
UPLOT = files("monograph.report").joinpath("uplot")
NODE = shutil.which("node")


class Page(HTMLParser):
    """Every element in order, with its attributes, its text and the elements around it."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.elements: list[dict[str, Any]] = []
        self.open: list[dict[str, Any]] = []
        self.feed(source)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = {
            "tag": tag,
            "text": "",
            "inside": [each["tag"] for each in self.open],
            **dict(attrs),
        }
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data: str) -> None:
        for each in self.open:
            each["text"] += data

    def all(self, tag: str) -> list[dict[str, Any]]:
        return [each for each in self.elements if each["tag"] == tag]


@pytest.fixture(scope="module", params=KINDS)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(KINDS[request.param](tmp_path_factory.mktemp(request.param)))


# ---- markup --------------------------------------------------------------------------------------


def test_a_page_needs_nothing_but_itself(page: Page) -> None:
    names = ("src", "href", "xlink:href", "data", "srcset", "action")
    assert all(
        each[name].startswith("#") for each in page.elements for name in names if name in each
    )
    style = page.all("style")[0]["text"]
    assert (
        "url(" not in style
        and "@import" not in style
        and not page.all("link")
        and not page.all("img")
    )


def test_ids_are_ones_own(page: Page) -> None:
    ids = Counter(each["id"] for each in page.elements if "id" in each)
    assert not ids or max(ids.values()) == 1


def test_it_has_one_headline_and_says_its_language_and_themes(page: Page) -> None:
    assert [len(page.all(tag)) for tag in ("h1", "main", "title")] == [1, 1, 1]
    assert page.all("html")[0]["lang"] == "en" and page.all("h1")[0]["text"].strip()
    assert {"name": "color-scheme", "content": "light dark"}.items() <= page.all("meta")[2].items()


def test_headings_leave_out_no_level_and_every_head_of_a_table_has_a_name(page: Page) -> None:
    """A screen reader's list of headings is the page's outline, and a cell is read with the names
    of its heads.
    """
    levels = [int(each["tag"][1]) for each in page.elements if re.fullmatch(r"h[1-6]", each["tag"])]
    assert levels[0] == 1 and max(b - a for a, b in itertools.pairwise(levels)) <= 1
    assert all(each["text"].strip() for each in page.all("th"))


def test_a_still_picture_stands_where_a_chart_is_drawn(page: Page) -> None:
    """For readers without JavaScript; its lines are in the page's colours, and its values are in
    words beside it.
    """
    stills = page.all("svg")
    assert all(each["role"] == "img" and ": " in each["aria-label"] for each in stills)
    for still in re.findall(r"<svg .*?</svg>", page.source, re.DOTALL):
        assert (
            xml.fromstring(still).tag.endswith("svg")
            and "<polyline" in still
            and "<text" not in still
        )
        assert not re.search(r"#[0-9a-f]{6}", still)
    readouts = [each["text"] for each in page.all("p") if each.get("class") == "readout"]
    assert len(readouts) == len(stills) and all(readouts)


def script(page: Page, part: str) -> str:
    """The script of the page with these words in it."""
    [found] = [each["text"] for each in page.all("script") if part in each["text"]]
    return found


def test_what_others_wrote_is_no_markup(page: Page) -> None:
    assert (
        not [each for each in page.all("script") if "alert(1)" in each["text"]]
        and "\x1b" not in page.source
    )


def test_whatever_can_be_pressed_can_be_reached_by_keyboard(page: Page) -> None:
    assert not [each for each in page.elements if any(name.startswith("on") for name in each)]
    assert all(each.get("tabindex", "0") == "0" for each in page.elements)
    sorting = script(page, "table.sortable")
    assert re.findall(r"querySelector\(\"(\w+)\"\)\.addEventListener\(\"(\w+)\"", sorting) == [
        ("button", "click")
    ]
    assert (
        sorting.count("addEventListener") == 1 and ":focus-visible" in page.all("style")[0]["text"]
    )
    scrolling = [each for each in page.elements if each.get("class") == "scroll"]
    assert scrolling and all(each["tabindex"] == "0" and each["aria-label"] for each in scrolling)


def test_each_column_has_a_button_and_each_row_all_columns(page: Page) -> None:
    found = re.findall(r'<table class="sortable">.*?</table>', page.source, re.DOTALL)
    assert found
    for markup in found:
        made = Page(markup)
        heads = made.all("th")
        assert all(each["aria-sort"] == "none" and each["scope"] == "col" for each in heads)
        assert len(made.all("button")) == len(heads) and all(
            each["type"] == "button" for each in made.all("button")
        )
        rows = re.findall(r"<tr>(.*?)</tr>", markup)[1:]
        assert rows and all(row.count("<td") == len(heads) for row in rows)


# ---- charts --------------------------------------------------------------------------------------


def test_the_library_of_the_charts_is_the_released_one() -> None:
    """uPlot 1.6.32, as its repository has it under that tag; its licence is in the package and in
    each page.
    """
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in map(UPLOT.joinpath, SHA256)
    }
    assert digests == SHA256
    assert "(v1.6.32)" in UPLOT.joinpath("uPlot.iife.min.js").read_text("utf-8")[:100]


SHA256 = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_comes_with_its_licence_and_only_where_it_draws(
    kind: str, tmp_path: Path
) -> None:
    source = KINDS[kind](tmp_path)
    assert ("var uPlot=" in source) == ("The MIT License" in source) == (kind in CHARTED)
    assert len(source) < (200_000 if kind in CHARTED else 30_000)


def test_a_name_in_the_data_cannot_end_its_script(tmp_path: Path) -> None:
    table = columns(
        [{"update": 1, "tokens": 5, "x": 1.0}, {"update": 2, "tokens": 9, "x": 2.0}], ["x"]
    )
    chart = Chart("x", HOSTILE, [Line("x", HOSTILE)], (0, 1), levels={HOSTILE: 0.5}, note=HOSTILE)
    source = page_of(kind="a", title="b", headline="c", assessment="", key_figures=[], sections=[],
                     drawings=Drawings([table], [chart]))  # fmt: skip
    page = Page(source)
    [data] = [each["text"] for each in page.all("script") if each.get("id") == "data"]
    assert json.loads(data)["charts"][0]["title"] == HOSTILE
    assert not [each for each in page.all("script") if each["text"].startswith("alert")]
    assert (
        figure(chart, [table]).count("<script") == 0 and payload([table], [chart]).count("<") == 0
    )


def test_a_long_run_is_thinned_but_keeps_what_happened() -> None:
    rows: list[dict[str, Any]] = [
        {"update": n, "tokens": 10 * n, "x": float(n), "wall_s": n / 2} for n in range(1, 9001)
    ]
    rows[4567]["skipped"] = True
    rows += [
        {"update": 7001, "tokens": 70_010, "eval_loss": 3.0},
        {"update": 7001, "share": 0.5, "sample": "text"},
    ]
    table = columns(rows, ["x", "eval_loss", "missing"])
    assert set(table) == {"tokens", "update", "time", "x", "eval_loss"}
    assert len(table["update"]) <= 1203 and {4568, 7001, 9000} <= set(table["update"])
    at = table["update"].index(7001)
    assert (table["eval_loss"][at], table["tokens"][at], table["time"][at]) == (3.0, 70_010, 3500.5)


def test_values_that_are_not_finite_are_left_out() -> None:
    rows = [
        {"update": n, "tokens": n, "x": x} for n, x in enumerate([2.0, None, math.nan, math.inf, 5])
    ]
    assert columns(rows, ["x"])["x"] == [2.0, None, None, None, 5]


def test_a_spike_leaves_the_trend_where_it_was() -> None:
    values = np.full(1000, 2.0)
    values[500] = 1e6
    at, medians = moving_median(values)
    assert len(at) == 300 and at[0] == 0 and at[-1] == 999
    assert (medians == 2.0).all()


def test_only_the_page_of_a_run_in_progress_loads_itself_again() -> None:
    given: dict[str, Any] = {"kind": "a", "title": "b", "headline": "c", "assessment": "", "key_figures": [],
                             "sections": [], "drawings": Drawings()}  # fmt: skip
    assert "location.reload" not in page_of(**given)
    source = page_of(**given, refresh_s=15)
    assert 'data-refresh="15"' in source and "location.reload" in source


def test_a_table_or_section_of_nothing_is_nothing() -> None:
    assert table("a", ["b"], []) == "" and section("a", "", "") == ""


# ---- colours -------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Of "#rgb" or "#rrggbb" (WCAG 2.2, relative luminance)."""
    digits = colour.removeprefix("#")
    parts = (
        [int(digit * 2, 16) for digit in digits] if len(digits) == 3 else [*bytes.fromhex(digits)]
    )
    linear = [
        p / 255 / 12.92 if p / 255 <= 0.04045 else ((p / 255 + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_can_be_read_in_both_themes(page: Page) -> None:
    style = page.all("style")[0]["text"]
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w+)", part))
        for part in style.split("prefers-color-scheme: dark")[:2]
    )
    dark = dict(re.findall(r"--(\w+): (#\w+)", style.split("prefers-color-scheme: dark")[1]))
    assert (
        light.keys() == dark.keys()
        and luminance(light["paper"]) > 0.9
        and luminance(dark["paper"]) < 0.1
    )
    for theme in (light, dark):
        for colour in ("ink", "muted", "accent", "warn", "second", "third", "fourth"):
            for ground in ("paper", "wash"):
                assert contrast(theme[colour], theme[ground]) >= 4.5, (colour, ground)


# ---- sorting -------------------------------------------------------------------------------------

DOCUMENT = """
const { heads, rows, script, presses } = JSON.parse(require("fs").readFileSync(0, "utf8"));
class Head {
  attributes = { "aria-sort": "none" };
  button = { addEventListener: (_, go) => this.go = go };
  querySelector(name) { if (name !== "button") throw name; return this.button }
  getAttribute(name) { return this.attributes[name] }
  setAttribute(name, value) { this.attributes[name] = value }
}
const names = heads.map(() => new Head());
const body = { rows: rows.map((cells, name) => ({ name, cells: cells.map(([textContent, value]) => (
  { textContent, dataset: value === undefined ? {} : { value } })) })) };
body.append = (...given) => body.rows = [...body.rows.filter((row) => !given.includes(row)), ...given];
const document = { querySelectorAll: (query) => query === "table.sortable" ? [
  { tBodies: [body], tHead: { rows: [{ cells: names }] } }] : [] };
eval(script);
console.log(JSON.stringify(presses.map((column) => {
  names[column].go();
  return [body.rows.map((row) => row.name), names.map((each) => each.getAttribute("aria-sort"))];
})));
"""


def pressed(markup: str, script: str, presses: list[int]) -> list[tuple[list[int], list[str]]]:
    """The order of a table's rows and what its columns say, after each press."""
    rows = [
        [
            (cell["text"], cell["data-value"]) if "data-value" in cell else (cell["text"],)
            for cell in Page(row).all("td")
        ]
        for row in re.findall(r"<tr>(?:<td.*?)</tr>", markup)
    ]
    given = {"heads": Page(markup).all("th"), "rows": rows, "script": script, "presses": presses}
    done = subprocess.run(
        [NODE or "", "-e", DOCUMENT], input=json.dumps(given), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [(order, says) for order, says in json.loads(done.stdout)]


@pytest.mark.skipif(NODE is None, reason="needs node, which runs the page's script")
def test_a_column_sorts_up_down_and_back(page: Page) -> None:
    numbers = [3.5, None, -1.0, 20.0, 3.5]
    names = ["pear", "apple", "Fig", "fig", "10"]
    markup = table("fruit", ["n", "name"], [[("" if n is None else f"{n:g} kg", n), name] for n, name in zip(
        numbers, names, strict=True)])  # fmt: skip
    found = pressed(markup, script(page, "table.sortable"), [0, 0, 0, 1, 0])
    up, down = [2, 0, 4, 3, 1], [3, 0, 4, 2, 1]  # equal ones as they were, what is not known last
    assert [order for order, _ in found[:3]] == [up, down, [0, 1, 2, 3, 4]]
    # By the language's own rules.
    assert found[3][0] == [4, 1, 3, 2, 0] or found[3][0] == [4, 1, 2, 3, 0]
    assert found[4][0] == up
    assert [says for _, says in found] == [
        ["ascending", "none"], ["descending", "none"], ["none", "none"], ["none", "ascending"], ["ascending", "none"],
    ]  # fmt: skip


@pytest.mark.skipif(NODE is None, reason="needs node, which runs the page's script")
def test_the_ladder_sorts_by_each_of_its_columns(tmp_path: Path) -> None:
    source = KINDS["ladder"](tmp_path)
    sorting, markup = (
        script(Page(source), "table.sortable"),
        re.findall(r'<table class="sortable">.*?</table>', source, re.DOTALL)[0],
    )
    for column in range(len(Page(markup).all("th"))):
        [(order, _)] = pressed(markup, sorting, [column])
        assert sorted(order) == [0, 1, 2, 3] and (order[-1] == 3 or column in (0, 3, 10)), (
            "what was not measured is last"
        )
