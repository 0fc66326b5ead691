"""Takes pictures of a page of each kind of report, at 1280 and 400 px, light and dark, and says what is wrong.

    python tests/pictures.py FOLDER

It ends with 1 if a text is below 10 px, cut, on another one or too pale, or a page wider than its window.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from reports import KINDS

DRIVER = Path(__file__).parent / "chromium.py"
SCHEMES = ("light", "dark")
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
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
