"""Run: pytest tests/evaluation/test_significance.py (error bars, ties and Student's t)"""

from __future__ import annotations

import math
import random
import statistics

import pytest

from monograph.evaluation.significance import mean, mean_text, t_quantile, tabulate

# Abramowitz and Stegun, table 26.10, two-sided 95 %.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 7: 2.365, 10: 2.228, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("degrees", "expected"), TABLE.items())
def test_students_t(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=6e-4)


def test_students_t_covers_what_it_says() -> None:
    """Of many samples of three normal numbers, 95 % have zero inside mean ± t · standard error."""
    draws = random.Random(0)
    inside = sum(bool(mean([draws.gauss(0, 1) for _ in range(3)]).is_noise) for _ in range(4000))
    assert abs(inside / 4000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)


def test_a_mean_and_its_error() -> None:
    assert mean([2.0]) == (2.0, None, 1) and mean([2.0]).is_noise is None
    found = mean([1.0, 2.0, 3.0])
    assert found.value == 2 and found.standard_error == pytest.approx(1 / math.sqrt(3))
    assert (
        mean_text(found) == "2.000 ± 0.577"
        and mean_text(None) == "diverged"
        and mean_text(mean([1.0])) == "1.000"
    )


def grid(rates: int, seeds: int) -> list[dict[str, float]]:
    return [{"lr": 10.0**-rate, "seed": seed} for rate in range(rates) for seed in range(seeds)]


def test_settings_are_compared_with_the_best() -> None:
    #          lr 1        lr 0.1      lr 0.01     lr 0.001
    values = [2.50, 2.60, 2.40, 2.50, 2.41, 2.50, 3.00, 3.11]
    table = tabulate(values, grid(4, 2))
    assert [s.knobs for s in table.settings] == [{"lr": 10.0**-rate} for rate in range(4)]
    assert table.best and table.best.setting is table.settings[1] and table.best.member == 2
    assert table.settings[1].mean == mean([2.40, 2.50]) and table.settings[1].difference is None
    first, close, far = (table.settings[i] for i in (0, 2, 3))
    assert close.difference and close.difference.value == pytest.approx(0.005)
    # The better half is the best and its neighbour: one paired difference, two seeds.
    assert table.degrees == 1 and table.noise == pytest.approx(statistics.stdev([0.01, 0.0]))
    assert (first.tied, close.tied, far.tied) == (False, True, False), "12.7 · .0071 / √2 = .064"
    assert "tied (+0.005)" in str(table) and "1 degree of freedom" in table.how
    assert table.line(table.settings[1]) == "lr=0.1: 2.450 ± 0.050 bits/byte   best"


def test_a_seeds_own_luck_cancels() -> None:
    """Seeds differ by 1, settings by .01: paired, that is as clear as day; unpaired it would drown."""
    luck = [0.0, 1.0, -1.0, 0.5, 0.3, -0.2]
    values = [
        2 + 0.01 * s + each + 1e-4 * ((s * 7 + i) % 3)
        for s in range(4)
        for i, each in enumerate(luck)
    ]
    table = tabulate(values, grid(4, 6))
    assert table.best and table.best.setting is table.settings[0]
    assert [s.tied for s in table.settings] == [None, False, False, False]


def test_what_is_far_from_the_best_lends_it_no_noise() -> None:
    calm = [2.00, 2.01, 2.10, 2.11, 2.20, 2.212]
    assert (
        tabulate([*calm, 3, 9, 4, 8, 5, 7], grid(6, 2)).noise
        == tabulate([*calm, 3, 3, 4, 4, 5, 5], grid(6, 2)).noise
    )


def test_one_seed_has_no_error_bar() -> None:
    table = tabulate([2.0, 2.1], [{"lr": 1.0}, {"lr": 0.1}])
    assert [s.tied for s in table.settings] == [None, None] and "one seed" in table.how
    assert table.best and table.best.member == 0 and table.noise is None


def test_one_setting_has_nothing_beside_it() -> None:
    table = tabulate([2.0, 2.1], [{"seed": 0}, {"seed": 1}])
    assert (
        table.best
        and table.best.member == 0
        and len(table.settings) == 1
        and "nothing to compare" in table.how
    )


def test_one_setting_that_is_left_is_not_called_one_seed() -> None:
    table = tabulate([2.0, 2.1, None, math.nan], grid(2, 2))
    assert (
        table.best and table.how == "the others diverged: there is nothing to compare the best with"
    )
    assert tabulate([None] * 4, grid(2, 2)).how == "all diverged"


def test_a_member_that_diverged() -> None:
    values = [1.0, None, 2.0, 2.1, math.nan, math.inf]
    table = tabulate(values, grid(3, 2))
    assert table.best and table.best.setting is table.settings[1], (
        "the first has a lower mean, of one seed of two"
    )
    assert table.settings[0].failed == (1,) and "1 of 2 diverged" in table.line(table.settings[0])
    assert table.settings[2].mean is None and "diverged" in table.line(table.settings[2])
    assert table.values == (1.0, None, 2.0, 2.1, None, None)
    assert tabulate([None, None], grid(1, 2)).best is None


def test_ties_are_rarely_missed() -> None:
    """Settings that are equal but for noise: the best of two is told from the other in about 5 % of
    all tables.
    """
    draws, untied, tables = random.Random(1), 0, 2000
    for _ in range(tables):
        table = tabulate([draws.gauss(0, 1) for _ in range(2 * 4)], grid(2, 4))
        untied += any(setting.tied is False for setting in table.settings)
    assert abs(untied / tables - 0.05) < 4 * math.sqrt(0.05 * 0.95 / tables)
