"""Cutting and packing: `pytest tests/data/test_pack.py`."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clocks import least_s
from monograph.data import pack
from monograph.data.pack import best_fit_decreasing, plan_rows


def naive_best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


def test_rows_are_filled_as_by_best_fit_decreasing():
    """Many of one length, which are placed together and fill several rows, the last one in part."""
    draws = random.Random(0)
    for _ in range(3000):
        capacity = draws.randint(1, 40)
        kinds = [draws.randint(1, capacity) for _ in range(draws.randint(0, 8))]
        lengths = [length for length in kinds for _ in range(draws.randint(1, 30))]
        rows = best_fit_decreasing(np.array(lengths, dtype=np.int64), capacity)
        used = np.bincount(rows, weights=lengths) if lengths else np.array([])
        assert sorted(capacity - used) == naive_best_fit_decreasing(lengths, capacity)


@pytest.mark.parametrize("packed", [True, False])
@given(
    documents=st.lists(st.integers(2, 90), max_size=40),
    length=st.integers(1, 33),
    block=st.integers(1, 60),
    border=st.integers(0, 40),
)
def test_every_token_but_the_first_is_a_target_once(packed, documents, length, block, border):
    starts = np.concatenate([[0], np.cumsum(documents, dtype=np.int64)])
    parts = [min(border, len(documents)), len(documents) - min(border, len(documents))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "BLOCK_PIECES", block)  # a plan of more pieces lies in files
        plan = plan_rows(starts, length, packed, parts)
    assert sum(plan.part_rows) == len(plan.offsets) - 1
    first, second = np.split(plan.starts, [plan.offsets[plan.part_rows[0]]])
    assert (first < starts[parts[0]]).all() and (second >= starts[parts[0]]).all()
    inputs = [
        start + i
        for start, count in zip(plan.starts, plan.lengths, strict=True)
        for i in range(count)
    ]
    last = set((starts[1:] - 1).tolist())
    assert sorted(inputs) == [token for token in range(sum(documents)) if token not in last]
    assert plan.offsets[0] == 0 and plan.offsets[-1] == len(plan.starts)
    sizes = [
        int(plan.lengths[a:b].sum()) for a, b in zip(plan.offsets, plan.offsets[1:], strict=False)
    ]
    assert all(0 < size <= length for size in sizes)
    if not packed:
        assert (np.diff(plan.offsets) == 1).all()
    assert plan.filled_share == pytest.approx(sum(sizes) / (len(sizes) * length) if sizes else 0)


def test_a_million_pieces_take_seconds_and_leave_no_room():
    lengths = np.minimum(
        1024, np.random.default_rng(0).lognormal(5.5, 1, 1_000_000).astype(np.int64) + 1
    )
    rows = best_fit_decreasing(lengths, 1024)
    assert least_s(lambda: best_fit_decreasing(lengths, 1024), 3) < 3
    assert lengths.sum() / (1024 * (rows.max() + 1)) > 0.999
