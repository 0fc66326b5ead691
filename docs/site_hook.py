"""What makes a site of these pages, which are written for a repository: a hook of mkdocs
(`make site`).

The navigation is the tables of docs/README.md. A link to a file outside docs/ leads to a page with
that file's text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BESIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
LANGUAGES = {".py": "python", ".json": "json", ".cpp": "cpp", ".toml": "toml"}
LARGEST = 100_000  # characters; of a longer file the beginning is shown
LONGEST_WORD = 30  # characters of code that fit a line of a phone
NOT_SEARCHED = "---\nsearch: {exclude: true}\n---\n"


def navigation() -> list[dict[str, Any]]:
    """The overview's headings, and under each the pages of its table."""
    groups: list[dict[str, Any]] = [{"Overview": "README.md"}]
    for part in re.split(r"^## ", (ROOT / "docs/README.md").read_text(), flags=re.M)[1:]:
        title, _, text = part.partition("\n")
        groups.append({title: re.findall(r"^\| \[\w+\]\((\w+\.md)\)", text, re.M)})
    return [*groups, {"The repository": [f"code/{name}" for name in BESIDE]}]


def place(path: Path) -> str:
    """Where the site has a file of the repository, from its root."""
    inside = path.relative_to(ROOT).as_posix()
    if inside.startswith("docs/") and path.suffix != ".py":
        return inside.removeprefix("docs/")
    return "README.md" if inside == "docs" else f"code/{inside.removesuffix('.md')}.md"


def linked(path: Path) -> dict[str, Path]:
    """The links of a page, and the files or folders of the repository that they lead to."""
    found = {link: (path.parent / link).resolve() for link in LINK.findall(path.read_text())}
    return {link: to for link, to in found.items() if to.exists() and ROOT in to.parents}


def outside() -> set[Path]:
    """Every file and folder outside docs/ that a page links to, and those that these link to."""
    waiting = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in BESIDE)]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        new = {*linked(path).values()} - seen if path.suffix == ".md" else set()
        seen |= new
        waiting += new
    return {path for path in seen if place(path).startswith("code/")}


def shown(path: Path) -> str:
    """A file as a page: the text of a page, the code of a program, the names in a folder."""
    if path.suffix == ".md":
        # For developers: what a user searches for is not there.
        notes = path.is_relative_to(ROOT / "dev")
        return (NOT_SEARCHED if notes else "") + path.read_text()
    if path.is_dir():
        text, language = (
            "\n".join(sorted(each.name for each in path.iterdir() if each.name[0] not in "._")),
            "",
        )
    else:
        text, language = path.read_text()[:LARGEST], LANGUAGES.get(path.suffix, "")
    title = path.relative_to(ROOT).as_posix()
    return f"{NOT_SEARCHED}# {title}\n\n````{language}\n{text}\n````\n"


def as_page(path: Path) -> str:
    """A page of the repository as one of the site: its links lead to pages of the site."""
    here, links = posixpath.dirname(place(path)), linked(path)
    # GitHub takes the backslash from a pipe in the code of a table's cell; the site would show it,
    # and needs none.
    text = re.sub(
        r"^\|.*\|$",
        lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), row[0]),
        path.read_text(),
        flags=re.M,
    )
    return LINK.sub(
        lambda at: posixpath.relpath(place(links[at[1]]), here or ".") if at[1] in links else at[0],
        text,
    )


def whole_words(html: str) -> str:
    """The HTML of a page whose short code without spaces, such as an option, is not broken into
    lines.
    """
    return re.sub(rf"<code>(?=[^<\s]{{1,{LONGEST_WORD}}}</code>)", '<code class="word">', html)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mkdocs asks what becomes of a page's HTML."""
    return whole_words(html)


def on_config(config: MkDocsConfig) -> None:
    """Mkdocs asks for the navigation."""
    config.nav = navigation()


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Mkdocs asks for pages that are not in docs/."""
    from mkdocs.structure.files import File

    for path in outside():
        files.append(File.generated(config, place(path), content=shown(path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mkdocs asks for the text of a page; programs are not pages, though they may hold what looks
    like a link.
    """
    source = page.file.src_uri
    path = (
        ROOT / source.removeprefix("code/")
        if source.startswith("code/")
        else ROOT / "docs" / source
    )
    return as_page(path) if path.exists() else markdown
