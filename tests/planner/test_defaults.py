# Run: pytest tests/planner/test_defaults.py
"""The default run is sized so that it beats gzip on any machine, and its updates fit the time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monograph.model.config import LlamaConfig
from monograph.planner.defaults import (
    DEFAULT,
    LEARNING_RATES,
    UPDATES_SHARE,
    default_seconds,
    interval,
    known_learning_rate,
    most_epochs,
    updates_in_time,
    warmup,
)


@given(st.floats(0.5, 600), st.floats(1e-4, 1e3))
def test_the_default_run_is_never_too_short_to_beat_gzip(minutes, seconds_per_update):
    seconds = default_seconds(minutes, seconds_per_update)
    updates = updates_in_time(UPDATES_SHARE * seconds, seconds_per_update, 10**9)
    assert (
        (updates + 1) * DEFAULT.tokens_per_update
        >= DEFAULT.tokens
        > 2 * DEFAULT.tokens_to_beat_gzip
    )
    assert seconds >= 60 * minutes


def test_a_fast_machine_takes_the_minutes_and_a_slow_one_says_how_long():
    assert default_seconds(3.0, 0.09) == pytest.approx(180)
    assert default_seconds(3.0, 1.0) == pytest.approx(
        DEFAULT.tokens / DEFAULT.tokens_per_update / UPDATES_SHARE
    )


def test_every_preset_has_a_learning_rate_and_the_default_is_one_of_them():
    assert all(LlamaConfig.preset(name).parameter_count() > 0 for name in LEARNING_RATES)
    for preset, rate in LEARNING_RATES.items():
        assert (
            known_learning_rate(preset, "adamw")
            == rate
            <= known_learning_rate(preset, "muon")
            <= 3 * rate
        )
    assert DEFAULT.preset in LEARNING_RATES
    assert LlamaConfig.preset(DEFAULT.preset).vocab_size == DEFAULT.vocabulary


@given(st.floats(1, 1e5), st.floats(1e-4, 100), st.integers(1, 10**6))
def test_updates_fit_the_time_however_long_they_take(seconds, per_update, most):
    updates = updates_in_time(seconds, per_update, most)
    assert 1 <= updates <= most
    assert updates == 1 or updates * per_update <= seconds * (1 + 1e-9)


@given(st.integers(1, 10**6))
def test_warmup_is_a_small_part(updates):
    assert 0 <= warmup(updates) <= max(10, updates // 20) and warmup(updates) <= updates


@given(st.integers(1, 10**6), st.integers(1, 100))
def test_intervals_happen_about_as_often_as_asked(updates, times):
    every = interval(updates, times)
    assert updates // every <= times and (every == 1 or updates / every > times / 2)


def test_few_epochs():
    assert 1 <= most_epochs(0.3) <= most_epochs(1.0) <= 16
