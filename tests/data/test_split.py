"""What is held out: `pytest tests/data/test_split.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monograph.data.documents import BUCKETS, check_held_out, split
from monograph.data.sources import SourceFile
from monograph.errors import UsageError

# (group, size) of files; half of the groups have several members.
FILES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 400)), min_size=2, max_size=60)


NO_RECORDS = np.zeros(BUCKETS, dtype=np.int64)


def source_files(specs, paths=None):
    return [
        SourceFile(f"{i}", paths[i] if paths else Path("none"), size, 0, f"sha{i}", f"group{group}")
        for i, (group, size) in enumerate(specs)
    ]


def held_bytes(files, done):
    return sum(file.size - cut for file, cut in zip(files, done.cuts, strict=True))


@given(FILES, st.floats(0, 0.5))
@example([(0, 1), (0, 1)], 0.5)  # too short to be cut
def test_groups_stay_whole_and_the_share_is_near(tmp_path_factory, specs, fraction):
    folder = tmp_path_factory.mktemp("split")
    paths = [folder / str(i) for i in range(len(specs))]
    for path, (_, size) in zip(paths, specs, strict=True):
        path.write_bytes(b"abcdefg\n" * (size // 8) + b"x" * (size % 8))
    files = source_files(specs, paths)
    done = split(files, NO_RECORDS, fraction)
    budget = int(fraction * sum(size for _, size in specs))
    held = held_bytes(files, done)
    assert all(0 <= cut <= file.size for file, cut in zip(files, done.cuts, strict=True)) and any(
        done.cuts
    )
    if not done.notes:
        both = list(zip(files, done.cuts, strict=True))
        train, out = (
            {file.group for file, cut in both if cut},
            {file.group for file, cut in both if cut < file.size},
        )
        assert not train & out
        assert budget / 2 <= held + 1 and held <= 1.5 * budget
    else:
        assert 0 < held <= budget


def test_the_choice_is_by_name_of_the_group_and_not_by_order():
    files = source_files([(i, 100) for i in range(100)])
    held = {
        file.name
        for file, cut in zip(files, split(files, NO_RECORDS, 0.1).cuts, strict=True)
        if not cut
    }
    by_name = sorted((file.group, file.name) for file in files)
    assert len(held) == 10 and held not in (
        {name for _, name in by_name[:10]},
        {name for _, name in by_name[-10:]},
    )
    assert held not in ({str(i) for i in range(10)}, {str(i) for i in range(90, 100)})
    turned = files[::-1]
    assert {
        f.name
        for f, cut in zip(turned, split(turned, NO_RECORDS, 0.1).cuts, strict=True)
        if not cut
    } == held


def test_nothing_and_too_much():
    files = source_files([(0, 10), (1, 10)])
    assert (
        split(files, NO_RECORDS, 0).cuts == (10, 10)
        and not split(files, NO_RECORDS, 0).held_out_buckets.any()
    )
    for fraction in (-0.1, 0.51, float("nan")):
        with pytest.raises(UsageError, match="data.held_out"):
            check_held_out(fraction)


def test_a_single_file_loses_its_end_at_a_line(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("a line of the book, ü\n" * 1000, encoding="utf-8")
    size = path.stat().st_size
    done = split([SourceFile("book.txt", path, size, 0, "s", "g")], NO_RECORDS, 0.05)
    (cut,) = done.cuts
    assert abs(size - cut - 0.05 * size) < 30 and path.read_bytes()[:cut].endswith(b"\n")
    assert "the last" in done.notes[0] and "book.txt" in done.notes[0]


@given(
    st.dictionaries(st.integers(0, BUCKETS - 1), st.integers(1, 500), max_size=60),
    st.floats(0, 0.5),
)
def test_records_are_held_out_by_bucket_and_the_share_is_near(buckets, fraction):
    sizes = np.zeros(BUCKETS, dtype=np.int64)
    sizes[list(buckets)] = list(buckets.values())
    done = split([], sizes, fraction)
    held, budget = int(sizes[done.held_out_buckets].sum()), int(fraction * sizes.sum())
    assert held < sizes.sum() or not buckets
    if done.notes:
        # Less than half, because every bucket that is left is larger; or more, because all are.
        left = sizes[~done.held_out_buckets & (sizes > 0)]
        assert (0 < 2 * held < budget < left.min()) or held == min(buckets.values()) > budget
        assert "too few records" in done.notes[0]
    elif len(buckets) > 1:
        assert budget / 2 <= held + 1 and held <= 1.5 * budget
    else:
        assert held == 0
