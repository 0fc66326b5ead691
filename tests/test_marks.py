"""Run: pytest tests/test_marks.py"""

from __future__ import annotations

from pathlib import Path

import marks

DENSE = '''"""A file."""

# Why.
class Group:
    """A type."""

    def size(self, given):
        """Return a size."""
        a, b = 1, 2
        c, d, e = 1, 2, 3
        if (found := given) is None:
            return a if b else c
        return (d,
                e)  # fmt: skip
'''


def test_each_mark_counts_its_kind_and_docstrings_are_no_code(tmp_path: Path) -> None:
    (tmp_path / "dense.py").write_text(DENSE)
    (tmp_path / "other.py").write_text("class Group:\n    pass\n")
    found, places, shared = marks.marks_of(sorted(tmp_path.glob("*.py")))
    lines = 8 + 2
    assert found == marks.Marks(
        parallel=2 * 100 / lines,
        parallel_of_three=1,
        ternaries=100 / lines,
        walruses=100 / lines,
        wide=0,
        comments=100 / lines,
        unformatted=1,
        shared_names=1,
    )
    assert {place.line for place in places if place.kind == "parallel"} == {9, 10}
    assert shared == {"Group": ["dense.py", "other.py"]}
    assert len([*marks.table(found, None)]) == 1 + len(marks.TITLES) == 1 + len(found)


def test_an_alias_that_stands_for_two_things_is_counted_and_the_same_alias_twice_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "one.py").write_text(
        "class Plan:\n    pass\n\n\nBatch = dict[str, int]\nRow = tuple[int]\nLIMIT = 3\n_Own = int\n"
    )
    (tmp_path / "two.py").write_text(
        "Plan = dict[str, int]\nBatch = dict[str, int]\nRow = list[int]\nLIMIT = 4\n_Own = str\n"
    )
    _, _, shared = marks.marks_of(sorted(tmp_path.glob("*.py")))
    assert shared == {"Plan": ["one.py", "two.py"], "Row": ["one.py", "two.py"]}
