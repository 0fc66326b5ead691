"""Run: pytest tests/report/test_in_a_browser.py

The pages of all reports in a real headless Chromium: no word on the console, nothing fetched, both themes, wide and
narrow, and the keyboard alone. It is that of Qt's WebEngine; skipped, with the reason, where that cannot be loaded.
Screenshots are in the tests' temporary folder, or in $MONOGRAPH_SCREENSHOTS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clocks import HANG_S
from reports import KINDS

pytest.importorskip("PyQt6.QtWebEngineCore", reason="Qt's WebEngine is not here", exc_type=ImportError)

DRIVER = Path(__file__).parents[1] / "chromium.py"
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What Chromium saw, by theme and kind of page."""
    folder = tmp_path_factory.mktemp("pages")
    pages = [folder / f"{kind}.html" for kind in KINDS]
    for page in pages:
        (folder / page.stem).mkdir()
        page.write_text(KINDS[page.stem](folder / page.stem))
    pictures, found = os.environ.get("MONOGRAPH_SCREENSHOTS", str(folder)), {}
    for scheme in SCHEMES:
        command = [sys.executable, str(DRIVER), scheme, pictures, *map(str, pages)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stderr[-2000:]
        found[scheme] = json.loads(done.stdout.splitlines()[-1])
    for kind, page in zip(KINDS, pages, strict=True):
        for scheme in SCHEMES:
            found[scheme][kind]["own"] = page.as_uri()
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_quiet_whole_and_in_its_theme(seen: dict[str, Any], kind: str, scheme: str) -> None:
    page = seen[scheme][kind]
    assert "Chrome/" in page["agent"]
    assert page["said"] == [] and page["asked"] == [page["own"]]
    assert (sum(page["background"][:3]) > 3 * 200) == (scheme == "light")
    assert page["boxes"] and min(page["boxes"]) > 100
    assert page["sticks_out"] == {"420": False, "1200": False}


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_sorted_by_keyboard_alone(seen: dict[str, Any], kind: str) -> None:
    keys = seen["light"][kind]["keyboard"]
    assert keys is not None, "the first column's name is never reached"
    assert keys["outline"] != "none"
    assert [says for says, _ in keys["steps"]] == ["ascending", "descending", "none"]
    assert all(sorted(order) == sorted(keys["given"]) for _, order in keys["steps"])
    assert keys["steps"][2][1] == keys["given"]
