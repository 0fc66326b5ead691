# Run: pytest tests/data/test_twins.py
"""Near copies are found by their long lines, and are not held out."""

from __future__ import annotations

from pathlib import Path

from monograph.data.sources import find
from monograph.data.split import split
from monograph.data.twins import groups_with_twins

LINES = [f"    result_{i} = compute_something_long({i}, {i * i})" for i in range(100)]


def written(folder: Path, name: str, lines: list[str]) -> Path:
    path = folder / name
    path.write_text("\n".join(lines))
    return path


def test_a_share_of_long_lines_makes_twins_and_short_lines_do_not(tmp_path):
    one = written(tmp_path, "one", LINES)
    near = written(tmp_path, "near", [f"entirely_different_line_number_{i}" for i in range(95)] + LINES[:5])
    far = written(tmp_path, "far", [f"another_unrelated_line_number_{i}" for i in range(98)] + LINES[10:12])
    short = written(tmp_path, "short", ["return None", "else:", *(f"short_but_{i}" for i in range(50))])
    shorter = written(tmp_path, "shorter", ["return None", "else:"])
    groups = {path.name: [path] for path in (one, near, far, short, shorter)}
    # 5 of 100 are too many, 2 of 100 are not; `one` shares 7 of its own.
    assert groups_with_twins(groups) == {"one", "near"}


def test_held_out_packages_of_the_standard_library_have_no_twin(tmp_path):
    files = find("stdlib", tmp_path).files
    sides = split(files, 0.05)
    twins = {file.name for file in files if file.twin}
    assert twins and not twins & {document.name for document in sides.held_out}
    assert sum(document.bytes for document in sides.held_out) > 0.04 * sum(file.size for file in files)
