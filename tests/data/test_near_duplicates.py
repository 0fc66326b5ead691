# Run: pytest tests/data/test_near_duplicates.py
"""Near copies are found by their long lines, and are not held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from monograph.data.documents import BUCKETS, split
from monograph.data.sources import find_sources, near_duplicates

LINES = [f"    result_{i} = compute_something_long({i}, {i * i})" for i in range(100)]


def written(folder: Path, name: str, lines: list[str]) -> Path:
    path = folder / name
    path.write_text("\n".join(lines))
    return path


def test_a_share_of_long_lines_makes_near_copies_and_short_lines_do_not(tmp_path):
    one = written(tmp_path, "one", LINES)
    near = written(
        tmp_path, "near", [f"entirely_different_line_number_{i}" for i in range(95)] + LINES[:5]
    )
    far = written(
        tmp_path, "far", [f"another_unrelated_line_number_{i}" for i in range(98)] + LINES[10:12]
    )
    short = written(
        tmp_path, "short", ["return None", "else:", *(f"short_but_{i}" for i in range(50))]
    )
    shorter = written(tmp_path, "shorter", ["return None", "else:"])
    groups = {path.name: [path] for path in (one, near, far, short, shorter)}
    # 5 of 100 are too many, 2 of 100 are not; `one` shares 7 of its own.
    assert near_duplicates(groups) == {"one", "near"}


def test_held_out_packages_of_the_standard_library_have_no_twin(tmp_path):
    files = find_sources("stdlib", tmp_path).files
    cuts = split(files, np.zeros(BUCKETS, dtype=np.int64), 0.05).cuts
    held = [file for file, cut in zip(files, cuts, strict=True) if cut < file.size]
    assert any(file.has_near_copies for file in files) and not any(
        file.has_near_copies for file in held
    )
    assert sum(file.size for file in held) > 0.04 * sum(file.size for file in files)
