"""Run: pytest tests/test_site.py (the pages as a site, `make site`: it is whole, and asks nobody
else)
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pages import LOG, PAGES, README
from scripts import ROOT, script
from visitor import Visitor

# What a browser fetches without being asked to: of a page, and of a style sheet.
FETCHED = {
    ".html": re.compile(
        r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=\"?(?:https?:)?//"
    ),
    ".css": re.compile(r"url\(\"?(?:https?:)?//|@import"),
}


SITE = script("docs/site_hook.py")
THERE = {SITE.place(path) for path in [*SITE.outside(), *(ROOT / "docs").rglob("*")]}


def test_each_page_is_in_the_navigation_once() -> None:
    groups = SITE.navigation()
    named = [
        name
        for group in groups
        for found in group.values()
        for name in ([found] if found == "README.md" else found)
    ]
    pages = [page.name for page in PAGES if page != README]
    assert sorted(name for name in named if not name.startswith("code/")) == sorted(pages)


def test_the_navigation_tells_the_kinds_of_pages_apart() -> None:
    groups = [title for group in SITE.navigation() for title in group]
    assert groups == [
        "Overview",
        "Start",
        "How to",
        "Reference",
        "Why",
        "The code",
        "The repository",
    ]
    rows = re.findall(r"^\| \[.*$", (ROOT / "docs/README.md").read_text(), re.M)
    assert not [
        row for row in rows if not re.fullmatch(r"\| \[(\w+)\]\(\1\.md\) \| [A-Z][^|]*\. \|", row)
    ]


def test_notes_for_developers_are_not_in_the_search() -> None:
    assert SITE.shown(LOG).startswith(SITE.NOT_SEARCHED) and not SITE.shown(README).startswith(
        SITE.NOT_SEARCHED
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_pages_of_the_site(page: Path) -> None:
    text = SITE.as_page(page)
    links = [
        posixpath.normpath(posixpath.join(posixpath.dirname(SITE.place(page)), at))
        for at in SITE.LINK.findall(text)
    ]
    assert links and not set(links) - THERE
    assert not re.findall(r"^\|.*`[^`|]*\\\|[^`]*`.*\|$", text, re.M), (
        "a backslash that the site would show"
    )


def test_an_option_is_not_broken_at_its_hyphens() -> None:
    html = "<p><code>--min-p</code> <code>--stop TEXT</code></p><pre><span></span><code>make train</code></pre>"
    assert SITE.whole_words(html) == html.replace("<code>--min-p", '<code class="word">--min-p')
    assert SITE.whole_words(f"<code>{'x' * 31}</code>") == f"<code>{'x' * 31}</code>"
    assert re.search(r"code\.word \{[^}]*white-space: nowrap", (ROOT / "docs/site.css").read_text())


@pytest.mark.slow(reason="builds the site, where mkdocs is installed")
def test_the_site_is_built_and_asks_nobody_else(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for suffix, fetched in FETCHED.items():
        paths = [*(tmp_path / "site").rglob(f"*{suffix}")]
        assert paths and not [path for path in paths if fetched.search(path.read_text())]
    assert all(
        (tmp_path / "site/figures" / figure.name).exists()
        for figure in (ROOT / "docs/figures").iterdir()
    )
    assert len([*(tmp_path / "site").glob("*.html")]) >= len(PAGES) - 1


THEME = """<div class="md-search" role="dialog"></div>
<div class="md-typeset__scrollwrap"></div><nav class="md-code__nav"></nav><main></main>
<script src="site.js"></script>"""


@pytest.mark.slow(reason="starts a browser")
def test_what_the_theme_makes_has_names_and_the_keyboard_whenever_it_makes_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "page.html").write_text(THEME)
    (tmp_path / "site.js").write_text((ROOT / "docs/site.js").read_text())
    visitor = Visitor("light")
    visitor.visit((tmp_path / "page.html").as_uri())
    assert visitor.read("document.querySelector('.md-search').ariaLabel") == "Search"
    later = "<nav class='md-code__nav'></nav><div class='md-typeset__scrollwrap'></div>"
    visitor.read(f'((document.querySelector("main").innerHTML = "{later}"), 1)')
    visitor.wait("document.querySelector('main nav').ariaLabel === 'Code block 2'")
    wide = "[...document.querySelectorAll('.md-typeset__scrollwrap')]"
    assert visitor.read(f"{wide}.every(each => each.tabIndex === 0)")
    visitor.close()
    assert "extra_javascript: [site.js]" in (ROOT / "mkdocs.yml").read_text()
