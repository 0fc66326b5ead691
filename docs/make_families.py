"""Write the table of docs/model.md that says which law has which family of models as a member.

Usage: python docs/make_families.py (rewrites docs/model.md between the markers;
tests/test_readme.py compares)
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from made_parts import with_made_parts

from monograph.model.families import FAMILIES

PAGE = Path(__file__).resolve().parent / "model.md"
BEGIN = "<!-- made by docs/make_families.py -->"
# A column's name, the test, and the table of its members there.
COLUMNS = {
    "transformers": ("tests/model/test_families.py", "FAMILIES"),
    "recomputed (3)": ("tests/laws/test_recomputed_is_stored.py", "FAMILIES"),
    "streamed (4)": ("tests/laws/test_streamed_is_resident.py", "FAMILIES"),
    "ensemble (5)": ("tests/laws/test_member_is_solo.py", "ZOO"),
    "cached (8)": ("tests/laws/test_cached_is_full.py", "SHAPES"),
    "packed (9)": ("tests/laws/test_packed_is_separate.py", "FAMILIES"),
    "llama.cpp (11)": ("tests/laws/test_exported_is_original.py", "SHAPES"),
    "planned (12)": ("tests/laws/test_planned_is_measured.py", "EAGER"),
}


def page(text: str) -> str:
    """Return the page's text with a new table."""
    return with_made_parts(text, BEGIN, [table()])


def table() -> str:
    """Return the table; a cell is a link to the test that has a member of the family."""
    members = {name: set(_families(*where)) for name, where in COLUMNS.items()}
    lines = [f"| model_type | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for family in FAMILIES:
        cells = [
            f"[test](../{COLUMNS[name][0]})" if family in members[name] else "" for name in COLUMNS
        ]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _families(file: str, name: str) -> Iterator[str]:
    """Yield the model_types of a test's members."""
    module = importlib.import_module(
        file.removeprefix("tests/").removesuffix(".py").replace("/", ".")
    )
    if name == "ZOO":
        for kind, made in module.ZOO.items():
            if kind.startswith("our "):
                yield made.build(0).config.model_type
        return
    for key, value in getattr(module, name).items():
        yield _family(key, value)


def _family(key: str, value: Any) -> str:
    config = getattr(value, "config", value)
    if isinstance(config, dict):
        return str(config.get("model_type", key if key in FAMILIES else "llama"))
    return str(getattr(config, "model_type", key))


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    sys.path.insert(0, str(PAGE.parents[1] / "tests"))
    main()
