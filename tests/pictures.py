"""Takes pictures of all pages, at 1280 and 400 px, light and dark, and says what is wrong with
those of reports.

    python tests/pictures.py FOLDER

The pages are one of each kind of report, the endpoint's in both modes, and the first of the
documentation, if `make site` has built it. tests/serve/test_page.py says what would be wrong with
the endpoint's.

It ends with 1 if a text is below 10 px, cut, on another one or too pale, or a page wider than its
window.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from reports import KINDS
from serve.test_page import MARKDOWN, StandIn, tells
from visitor import Visitor

DRIVER = Path(__file__).parent / "chromium.py"
SITE = Path(__file__).parents[1] / "site" / "index.html"
SCHEMES = ("light", "dark")
WIDTHS = (1280, 400)
FAULTS = ("small", "pale", "cut", "over")


def pages(folder: Path) -> list[Path]:
    """The page of each kind of report, as a file."""
    made = []
    for kind, page in KINDS.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        made.append(folder / f"{kind}.html")
        made[-1].write_text(page(folder / kind))
    return made


def seen(scheme: str, folder: Path, paths: list[Path]) -> dict[str, dict[str, Any]]:
    """What Chromium sees of each page in a theme; its pictures are in the folder."""
    command = [sys.executable, str(DRIVER), scheme, str(folder), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def of_the_endpoint(folder: Path, scheme: str) -> None:
    """Takes pictures of a chat that was answered, with its options, and of a text that was
    continued.
    """
    server, visitor = StandIn(), Visitor(scheme)
    visitor.visit(server.url)
    visitor.wait("document.querySelector('#model').textContent === 'fox-tales@4000'")
    tells(visitor, MARKDOWN)
    for width in WIDTHS:
        visitor.resize(width, 900)
        visitor.read("((document.querySelector('#options').open = true), 1)")
        visitor.picture(str(folder / f"endpoint-options-{scheme}-{width}.png"))
        visitor.read("((document.querySelector('#options').open = innerWidth > 820), 1)")
        visitor.picture(str(folder / f"endpoint-chat-{scheme}-{width}.png"))
    visitor.click("document.querySelectorAll('.modes label')[1]")
    for width in WIDTHS:
        visitor.resize(width, 900)
        visitor.picture(str(folder / f"endpoint-text-{scheme}-{width}.png"))
    visitor.close()
    server.close()


def of_the_documentation(folder: Path, scheme: str) -> None:
    """Takes pictures of the first page."""
    if not SITE.exists():
        print(f"documentation, {scheme}: no picture, as make site has not built it")
        return
    visitor = Visitor(scheme)
    visitor.visit(SITE.as_uri())
    for width in WIDTHS:
        visitor.resize(width, 1400)
        visitor.picture(str(folder / f"documentation-{scheme}-{width}.png"))
    visitor.close()


def wrong(look: dict[str, Any]) -> dict[str, Any]:
    """What is wrong with a page at one width."""
    found = {fault: look[fault] for fault in FAULTS if look[fault]}
    return found | ({"wider": look["wider"]} if look["wider"] > 0 else {})


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    paths, faults = pages(folder), 0
    for scheme in SCHEMES:
        for kind, page in seen(scheme, folder, paths).items():
            for line in page["said"]:
                print(f"{kind}, {scheme}: {line}")
            for width, look in page["looked_at"].items():
                faults += bool(wrong(look)) + bool(page["said"])
                print(
                    f"{kind}-{scheme}-{width}.png: {look['texts']} texts, {look['charts']} charts {wrong(look) or ''}"
                )
        of_the_endpoint(folder, scheme)
        of_the_documentation(folder, scheme)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
