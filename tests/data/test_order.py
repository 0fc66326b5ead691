"""The order of rows: `pytest tests/data/test_order.py`."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clocks import least_s
from monograph.data.rows import RowShare, row_share, rows_at, weighted_rows_at

SEEDS = st.integers(-(2**70), 2**70)


@given(rows=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_an_epoch_visits_every_row_once(rows, seed, epoch):
    assert sorted(rows_at(epoch * rows, rows, rows, seed)) == list(range(rows))


@given(
    rows=st.integers(1, 10**12),
    seed=SEEDS,
    start=st.integers(0, 10**15),
    counts=st.lists(st.integers(0, 40), max_size=5),
)
def test_the_order_does_not_depend_on_how_it_is_asked_for(rows, seed, start, counts):
    whole = rows_at(start, sum(counts), rows, seed)
    starts = np.cumsum([start, *counts])
    parts = [rows_at(int(s), count, rows, seed) for s, count in zip(starts, counts, strict=False)]
    assert whole.tolist() == [row for part in parts for row in part]
    assert all(0 <= row < rows for row in whole)


WEIGHTS = st.sampled_from([0.001, 0.1, 0.25, 0.5, 1, 1.5, 2, 7.3])
SHARES = st.lists(st.builds(row_share, st.integers(1, 40), WEIGHTS), min_size=1, max_size=4)


@given(shares=SHARES, seed=SEEDS, epochs=st.integers(1, 9))
def test_every_row_is_seen_as_often_as_its_share_says(shares, seed, epochs):
    visits = sum(each.visits for each in shares)
    order = weighted_rows_at(0, epochs * visits, shares, seed)
    borders = np.cumsum([0, *(each.rows for each in shares)])
    for each, first, end in zip(shares, borders, borders[1:], strict=False):
        mine = (first <= order) & (order < end)
        assert (mine.reshape(epochs, visits).sum(axis=1) == each.visits).all()
        seen = np.bincount(order[mine] - first, minlength=each.rows)
        # After any number of epochs the rows differ by one visit at most; after 1/w epochs of
        # weight w all had one.
        assert seen.min() >= epochs * each.visits // each.rows and seen.max() <= -(
            -epochs * each.visits // each.rows
        )
    assert order.min() >= 0 and order.max() < borders[-1]


@given(
    shares=SHARES,
    seed=SEEDS,
    start=st.integers(0, 10**9),
    counts=st.lists(st.integers(0, 40), max_size=5),
)
def test_shares_do_not_depend_on_how_they_are_asked_for(shares, seed, start, counts):
    whole = weighted_rows_at(start, sum(counts), shares, seed)
    starts = itertools.accumulate(counts, initial=start)
    parts = [
        weighted_rows_at(place, count, shares, seed)
        for place, count in zip(starts, counts, strict=False)
    ]
    assert whole.tolist() == [row for part in parts for row in part]


@given(rows=st.integers(1, 3000), seed=SEEDS, start=st.integers(0, 10**6))
def test_without_weights_the_order_is_the_rows_own(rows, seed, start):
    assert (
        weighted_rows_at(start, 50, [row_share(rows, 1.0)], seed).tolist()
        == rows_at(start, 50, rows, seed).tolist()
    )


def test_half_of_the_rows_is_another_half_in_another_order():
    shares = [row_share(1000, 0.5), row_share(300, 1.0)]
    first, second, third = weighted_rows_at(0, 2400, shares, 3).reshape(3, 800)
    halves = [set(epoch[epoch < 1000].tolist()) for epoch in (first, second, third)]
    assert halves[0] | halves[1] == set(range(1000)) and not halves[0] & halves[1]
    # Chance takes 250 rows of the first half again; four standard deviations are 45.
    assert abs(len(halves[0] & halves[2]) - 250) < 45
    # The shares are mixed: 300 of the 800 visits, evenly over the epoch.
    assert all(abs((part >= 1000).sum() - 75) < 25 for part in first.reshape(4, 200))


def test_a_share_without_rows_is_never_visited():
    assert sorted(
        weighted_rows_at(0, 4, [row_share(0, 2), row_share(2, 2), row_share(0, 0.5)], 0)
    ) == [
        0,
        0,
        1,
        1,
    ]


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def test_epochs_and_seeds_give_independent_uniform_orders():
    rows, epochs = 10, 20_000
    orders = rows_at(0, rows * epochs, rows, seed=1).reshape(epochs, rows)
    by_seed = np.array([rows_at(0, rows, rows, seed) for seed in range(2000)])
    for sample in (orders, by_seed):
        # 99.99th percentiles of chi-square with 9 and 89 degrees of freedom: 33.7 and 145.
        for position in range(rows):
            assert chi_square(np.bincount(sample[:, position], minlength=rows)) < 33.7
        pairs = np.bincount(sample[:, 0] * rows + sample[:, 1], minlength=rows * rows).reshape(
            rows, rows
        )
        assert chi_square(pairs[~np.eye(rows, dtype=bool)]) < 145
    # The row at one place says nothing about the row at the same place one epoch later.
    successive = np.bincount(orders[:-1, 3] * rows + orders[1:, 3], minlength=rows * rows)
    assert chi_square(successive) < 157


def test_large_epochs_look_shuffled():
    rows = 1_000_003
    order = rows_at(0, rows, rows, seed=5)
    steps = np.diff(order)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.005
    assert (np.abs(steps) < 10).mean() < 1e-4


def test_seeking_takes_no_time_at_a_billion_rows():
    assert least_s(lambda: rows_at(7_123_456_789, 2048, 10**9, seed=3), 0.05) < 0.05


def test_the_order_is_part_of_the_checkpoint_format():
    # Integer arithmetic only, so these hold on every machine; a change breaks resuming from every
    # existing checkpoint.
    assert rows_at(5, 8, 7, seed=42).tolist() == GOLDEN
    assert rows_at(10**12, 2, 10**9, seed=-1).tolist() == GOLDEN_LARGE
    assert (
        weighted_rows_at(30, 8, [RowShare(7, 3), RowShare(4, 8), RowShare(5, 5)], seed=42).tolist()
        == GOLDEN_SHARES
    )


GOLDEN = [2, 6, 1, 3, 4, 2, 6, 5]
GOLDEN_SHARES = [8, 7, 8, 0, 7, 10, 11, 3]
GOLDEN_LARGE = [452364685, 569644390]
