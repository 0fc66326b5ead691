"""Run: pytest tests/sweeps/test_rounds.py (how many members at once, by the times that were
measured)
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monograph.sweeps.concurrency import (
    WidthTime,
    choose_width,
    next_width,
    predict_total_s,
    predict_update_s,
    sizes_of_rounds,
)

COMPILE_S = 20.0


@given(st.integers(1, 300), st.integers(1, 300))
def test_rounds_are_few_and_equal(members: int, width: int) -> None:
    found = sizes_of_rounds(members, width)
    assert sum(found) == members and max(found) <= width and max(found) - min(found) <= 1
    assert len(found) == -(-members // width) and found == sorted(found, reverse=True)


def measured(
    time: Callable[[int], float], members: int, updates: int, most: int | None = None
) -> dict[int, WidthTime]:
    """What a caller measures who follows the advice."""
    timed: dict[int, WidthTime] = {}
    while (width := next_width(timed, members, most or members, updates)) is not None:
        assert width not in timed
        timed[width] = WidthTime(time(width), COMPILE_S)
    return timed


def test_overhead_alone_is_shared_by_all() -> None:
    """One update takes .01 s, however many members: 16 at once take a sixteenth of the time."""
    timed = measured(lambda k: 0.01, 16, 10_000)
    assert timed.keys() == {1, 16}
    found = choose_width(timed, 16, 10_000)
    assert found.members == 16 and found.total_s == pytest.approx(100)
    assert found.why == "16 members, all at once (measured at 1, 16)"


def test_what_does_not_pay_is_said() -> None:
    """Fused, a member takes all but 4 % of what it takes alone, and compiling is never paid back;
    or it takes more.
    """
    found = choose_width({1: WidthTime(0.1, 20), 8: WidthTime(0.8 / 1.04, 20)}, 8, 1000)
    assert found.members == 8 and found.why == "8 members, all at once (measured at 1, 8)"
    timed = measured(lambda k: 0.1 * k * (1.0 if k == 1 else 1.6), 16, 10_000)
    found = choose_width(timed, 16, 10_000)
    assert found.members == 1 and found.total_s == pytest.approx(16 * 0.1 * 10_000)
    assert found.why.endswith(
        "0.62x over one after another, so one after another (measured at 1, 16)"
    )


def test_evaluations_count_in_the_choice() -> None:
    """Training takes 8 s alone and 6 s at once, evaluations 1 s alone and 5 s at once."""
    timed = {1: WidthTime(0.1, 20), 8: WidthTime(0.6, 20)}
    assert choose_width(timed, 8, 10).members == 8
    found = choose_width(timed, 8, 10, held_out_s={1: 1.0, 8: 5.0})
    assert found.members == 1 and found.total_s == pytest.approx(9)
    assert ": 0.82x over one after another" in found.why


def test_the_reason_names_the_planned_memory() -> None:
    found = choose_width(
        {1: WidthTime(0.1, 20), 8: WidthTime(0.2, 20)}, 8, 1000, {1: 9 * 10**8, 8: 2**31}
    )
    assert found.why.startswith("8 members, all at once (2.00 GiB; one alone 858.3 MiB) (measured")


def test_a_short_run_measures_nothing_that_cannot_pay() -> None:
    """2 members of 10 updates of .1 s: all of it is a second, compiling takes 20."""
    timed = measured(lambda k: 0.1, 2, 10)
    assert timed.keys() == {1}
    assert (
        "compiling a wider graph takes too much of what it could save"
        in choose_width(timed, 2, 10).why
    )


def test_a_first_sweep_does_not_compile_for_a_minute_what_could_save_little_more() -> None:
    """16 members of 82 updates of .065 s are 85 s; a wider graph takes 4 times 17 s to compile, and
    could save 80 s.
    """
    alone = {1: WidthTime(0.065, 17.0)}
    assert next_width(alone, 16, 16, 82, compile_ratio=4.0) is None
    assert next_width(alone, 16, 16, 820, compile_ratio=4.0) == 16
    assert next_width({1: WidthTime(0.065, 0.0)}, 16, 16, 1, compile_ratio=4.0) == 16, (
        "nothing is compiled"
    )


@given(
    st.floats(1e-3, 1),
    st.floats(0, 100),
    st.integers(2, 64),
    st.integers(1, 10_000),
    st.floats(1, 5),
)
def test_a_disappointment_costs_no_more_than_half_as_long_again(
    alone: float, compile_s: float, members: int, updates: int, compile_ratio: float
) -> None:
    """A wider graph that is no faster than one after another."""
    timed = {1: WidthTime(alone, compile_s)}
    if next_width(timed, members, members, updates, compile_ratio) is not None:
        assert compile_ratio * compile_s <= 0.5 * members * alone * updates


def test_memory_bounds_the_width() -> None:
    timed = measured(lambda k: 0.01, 16, 10_000, most=6)
    assert max(timed) == 6, "rounds of 6, 5 and 5"
    assert choose_width(timed, 16, 10_000).members == 6
    assert "6 at once" in choose_width(timed, 16, 10_000).why
    assert measured(lambda k: 0.01, 16, 10_000, most=1).keys() == {1}


def test_a_promise_is_measured_before_it_is_believed() -> None:
    """With 9 members of which 8 fit, a width of 5 promises as few rounds of less work each."""
    timed = measured(lambda k: 0.01 * k, 9, 100_000, most=8)
    assert 5 in timed
    assert choose_width({1: WidthTime(0.01, 20), 4: WidthTime(0.03, 20)}, 4, 1000).members == 4


@given(
    st.dictionaries(st.integers(2, 32), st.floats(1e-3, 1), min_size=1, max_size=5), st.floats(1e-3, 1),
    st.integers(1, 32), st.integers(1, 10_000),
)  # fmt: skip
def test_the_choice_is_the_best_of_the_measured(
    others: dict[int, float], alone: float, members: int, updates: int
) -> None:
    timed = {
        width: WidthTime(seconds, COMPILE_S) for width, seconds in ({1: alone} | others).items()
    }
    found = choose_width(timed, members, updates)
    assert found.total_s == min(predict_total_s(timed, members, width, updates) for width in timed)
    assert found.total_s <= members * alone * updates * (1 + 1e-9), (
        "never slower than one after another"
    )


def test_between_measured_widths_there_is_a_line() -> None:
    timed = {1: WidthTime(1.0, 0), 5: WidthTime(3.0, 0)}
    assert [predict_update_s(timed, width) for width in (1, 3, 5, 10)] == [1, 2, 3, 6]
    assert predict_update_s({1: WidthTime(1.0, 0), 5: WidthTime(0.5, 0)}, 3) == 1, (
        "more members take no less time"
    )


def test_one_member() -> None:
    assert (
        measured(lambda k: 1.0, 1, 10).keys() == {1}
        and choose_width({1: WidthTime(1, 1)}, 1, 10).why == "one member"
    )
