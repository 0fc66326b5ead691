"""What is held out: `pytest tests/data/test_split.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monograph.data.sources import SourceFile
from monograph.data.split import split
from monograph.errors import UsageError

# (group, size) of files; half of the groups have several members.
FILES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 400)), min_size=2, max_size=60)


def source_files(specs, paths=None):
    return [
        SourceFile(f"{i}", paths[i] if paths else Path("none"), size, 0, f"sha{i}", f"group{group}")
        for i, (group, size) in enumerate(specs)
    ]


@given(FILES, st.floats(0, 0.5))
def test_groups_stay_whole_and_the_share_is_near(tmp_path_factory, specs, fraction):
    folder = tmp_path_factory.mktemp("split")
    paths = [folder / str(i) for i in range(len(specs))]
    for path, (_, size) in zip(paths, specs, strict=True):
        path.write_bytes(b"abcdefg\n" * (size // 8) + b"x" * (size % 8))
    files = source_files(specs, paths)
    done = split(files, fraction)
    budget = int(fraction * sum(size for _, size in specs))
    held = sum(document.bytes for document in done.held_out)
    assert held + sum(document.bytes for document in done.train) == sum(size for _, size in specs)
    assert done.train
    if done.note is None:
        group_of = {file.name: file.group for file in files}
        sides = [{group_of[document.name] for document in side} for side in (done.train, done.held_out)]
        assert not sides[0] & sides[1]
        assert budget / 2 <= held + 1 and held <= 1.5 * budget
    else:
        assert held <= budget


def test_the_choice_is_by_name_of_the_group_and_not_by_order():
    files = source_files([(i, 100) for i in range(100)])
    held = {document.name for document in split(files, 0.1).held_out}
    by_name = sorted((file.group, file.name) for file in files)
    assert len(held) == 10 and held not in ({name for _, name in by_name[:10]}, {name for _, name in by_name[-10:]})
    assert held not in ({str(i) for i in range(10)}, {str(i) for i in range(90, 100)})
    assert {document.name for document in split(files[::-1], 0.1).held_out} == held


def test_nothing_and_too_much():
    files = source_files([(0, 10), (1, 10)])
    assert split(files, 0).held_out == () and len(split(files, 0).train) == 2
    for fraction in (-0.1, 0.51, float("nan")):
        with pytest.raises(UsageError, match="data.held_out"):
            split(files, fraction)


def test_a_single_file_loses_its_end_at_a_line(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("a line of the book, ü\n" * 1000, encoding="utf-8")
    size = path.stat().st_size
    done = split([SourceFile("book.txt", path, size, 0, "s", "g")], 0.05)
    (head,), (tail,) = done.train, done.held_out
    assert (head.start, head.stop, tail.stop) == (0, tail.start, size)
    assert abs(tail.bytes - 0.05 * size) < 30 and path.read_bytes()[: head.stop].endswith(b"\n")
    assert done.note and "the last" in done.note and "book.txt" in done.note
