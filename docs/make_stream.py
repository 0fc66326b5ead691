"""Write the table of docs/stream.md from benchmarks/results/stream.json.

Usage: python docs/make_stream.py (tests/stream/test_page.py compares)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from made_parts import with_made_parts

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "stream.md"
RESULT = DOCS.parent / "benchmarks" / "results" / "stream.json"
BEGIN = "<!-- made by docs/make_stream.py -->"
GIB = 2**30


def table(found: dict[str, Any]) -> str:
    """Return a row for the streamed run and one for the resident run."""
    case, machine = found["cases"][0], found["machine"]
    streamed, resident = case["resumed"], case["resident"]
    tokens = found["settings"]["rows"] * found["settings"]["shape"]["max_position_embeddings"]
    lines = [
        f"{streamed['parameters'] / 1e9:.2f} billion parameters in fp32, {found['settings']['updates']} updates of "
        f"{tokens} tokens on {machine['device']}, {machine['cores']} cores, a memory budget in place of a device, "
        "killed with SIGKILL in the middle of an update and resumed from its checkpoint: losses and norms "
        f"{'are those of the resident run in every bit' if found['equal_bits'] else 'DIFFER'}. "
        "Printed by [benchmarks/stream.py](../benchmarks/stream.py).",
        "",
        "| weights | on the device | on the host | process, peak | time per update |",
        "|---|---|---|---|---|",
        f"| streamed | {streamed['device_bytes'] / GIB:.2f} GiB (slots, staging buffers and boundaries) | "
        f"{streamed['home_bytes'] / GIB:.1f} GiB | {streamed['rss_bytes'] / GIB:.1f} GiB | "
        f"{min(streamed['seconds']):.0f} s |",
        f"| resident | all | {16 * resident['parameters'] / GIB:.1f} GiB | {resident['rss_bytes'] / GIB:.1f} GiB | "
        f"{min(resident['seconds']):.0f} s |",
    ]
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with a new table."""
    return with_made_parts(text, BEGIN, [table(json.loads(RESULT.read_text()))])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
