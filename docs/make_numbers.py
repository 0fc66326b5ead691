"""Write the tables of measured numbers, of docs/measured.md and other pages, from
benchmarks/results/.

Usage: python docs/make_numbers.py (rewrites them between the markers; tests/test_readme.py
compares)
"""

from __future__ import annotations

from pathlib import Path

import measured_tables as tables
from made_parts import with_made_parts

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- made by docs/make_numbers.py -->"


def pages() -> dict[Path, list[str]]:
    """Return the tables of each page, in order."""
    made = {
        "docs/measured.md": [tables.table(), tables.climbing()],
        "docs/peers.md": [
            tables.peers("xeon/train_peers"),
            tables.peers("train_peers"),
            tables.quality("now/time_to_quality"),
            tables.quality(),
        ],
        "docs/generate.md": [tables.generating()],
        "docs/serve.md": [tables.serving(), tables.serving("gpu/serve")],
        "docs/rewards.md": [tables.answering()],
        "docs/siblings.md": [tables.fusing()],
        "docs/lora.md": [tables.sharing_a_base(), tables.launching_members()],
        "docs/transfer.md": [tables.carrying()],
        "docs/sweep.md": [tables.sweeping()],
        "docs/profile.md": [tables.changing()],
        "docs/distributed.md": [tables.sharing()],
        "docs/gpu.md": [
            tables.launching(),
            tables.freezing(),
            tables.banking(),
            tables.limiting(),
            tables.lasting(),
            tables.assembling(),
            tables.assembling_own(),
            tables.taking(),
            tables.timing(),
            tables.decoding_on_a_card(),
            tables.ensembles_on_a_card(),
            tables.streaming_on_a_card(),
        ],
    }
    return {ROOT / name: shown for name, shown in made.items()}


def main() -> None:
    """Write the tables between the markers."""
    for page, shown in pages().items():
        text = with_made_parts(page.read_text(encoding="utf-8"), BEGIN, shown)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
