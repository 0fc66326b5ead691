"""Run: pytest tests/rl/test_sums_of_rewards.py (how a sum was rounded neither fails an answer nor
teaches).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from monograph.rl.advantages import ADVANTAGES
from monograph.rl.rewards import Answer, FunctionReward
from rewarded import OPTIONS, windows

PARTS = {"right": 0.7, "short": 0.2, "form": 0.1}
SUMS = [0.7 + 0.2 + 0.1, 0.1 + 0.2 + 0.7, 1.0]  # 1 - 2^-53, 1 - 2^-53 and 1


def test_parts_that_add_up_to_1_pass_in_any_order() -> None:
    rewards = [
        FunctionReward(lambda prompt, answer, record, parts=parts: dict(parts)).score(
            [Answer("", "", {}, "p.jsonl:1")]
        )[0]
        for parts in itertools.permutations(PARTS.items())
    ]
    assert set(rewards) == {1.0}


def test_a_sum_that_rounding_left_below_1_is_right_and_a_group_of_such_sums_is_dead() -> None:
    assert len(set(SUMS)) == 2
    rollouts = windows(replace(OPTIONS, advantage="grpo"), reward=lambda text: SUMS[len(text) % 3])
    window = next(rollouts)
    assert (rollouts.numbers["pass_at_1"], rollouts.numbers["dead"]) == (1.0, 1.0)
    assert not window["factors"].any()


@pytest.mark.parametrize("advantage", [each for each in ADVANTAGES if each != "reinforce"])
def test_differences_of_rounding_weigh_exactly_nothing_and_real_ones_do(advantage: str) -> None:
    for scale in (1.0, 1e6):
        sums = [scale * each for each in SUMS]
        assert all(
            weight.factor == 0 for weight in ADVANTAGES[advantage].weights(sums, [2, 3, 4], 5)
        )
        real = [scale, scale * (1 - 1e-9), scale]
        assert all(
            weight.factor != 0 for weight in ADVANTAGES[advantage].weights(real, [2, 3, 4], 5)
        )
        # A deviation that is next to nothing does not make what it divides large.
        assert all(
            abs(weight.factor) < 1e-4 * scale
            for weight in ADVANTAGES[advantage].weights(real, [2, 3, 4], 5)
        )
