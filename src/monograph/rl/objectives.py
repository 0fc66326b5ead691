"""The objectives of reinforcement learning, each as the weight of an answer's tokens in one sum.

Answers are drawn from the weights that the update changes, one update a draw. The ratio of new to old probabilities is
then 1, and every objective here is

    loss = sum over answers i of group g, tokens t of  - a[i] log pi(o[i, t] | prompt, o[i, <t])  /  sum over i of s[i]

with a, the advantage, and s, the answer's share of the denominator, as the table says. r are the rewards of the G
answers to a prompt, |o| is the number of tokens of an answer with the one that ends it, L the most tokens of one.

| name      | a[i]                                  | s[i] | source                                       |
|-----------|---------------------------------------|------|----------------------------------------------|
| reinforce | r[i]                                  | 1    | Williams 1992, Machine Learning 8            |
| rloo      | r[i] - mean of the others' r          | 1    | Ahmadian et al. 2024, arXiv 2402.14740       |
| grpo      | (r[i] - mean r) / (std r + 1e-4) / |o| | 1   | Shao et al. 2024, arXiv 2402.03300           |
| dr_grpo   | r[i] - mean r                         | L    | Liu et al. 2025, arXiv 2503.20783            |
| dapo      | (r[i] - mean r) / (std r + 1e-4)      | |o|  | Yu et al. 2025, arXiv 2503.14476             |

The gradients of reinforce, rloo and dr_grpo are those of the expected reward, the last one times (G - 1) / (G L). That
of grpo is not: it gives tokens of short right answers more weight, and of long wrong ones less. That of dapo is, up to
a factor that all answers of an update share and that depends on their lengths. The standard deviation is the unbiased
one. A group whose rewards are all equal has the advantage 0, exactly, except for reinforce.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

Objective = Literal["dr_grpo", "rloo", "grpo", "dapo", "reinforce"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
_LEAST_DEVIATION = 1e-4


class Weight(NamedTuple):
    """An answer's part in an update: the factor of each of its tokens, and its share of the denominator."""

    factor: float
    share: float


def weights(objective: Objective, rewards: Sequence[float], lengths: Sequence[int], longest: int) -> list[Weight]:
    """Return the weights of one group's answers.

    Args:
        objective: the name of the objective.
        rewards: the reward of each answer to one prompt, at least two.
        lengths: the number of tokens of each answer, with the one that ends it.
        longest: most tokens that an answer may have.
    """
    return _OF[objective](rewards, lengths, longest)


def centred(rewards: Sequence[float]) -> list[float]:
    """Return the rewards less their mean, exact zeros if all are equal."""
    if min(rewards) == max(rewards):  # the mean of equal numbers may differ from them in its last digit
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


def _standardised(rewards: Sequence[float]) -> list[float]:
    deviation = statistics.stdev(rewards) + _LEAST_DEVIATION
    return [value / deviation for value in centred(rewards)]


def _reinforce(rewards: Sequence[float], lengths: Sequence[int], longest: int) -> list[Weight]:
    return [Weight(reward, 1) for reward in rewards]


def _rloo(rewards: Sequence[float], lengths: Sequence[int], longest: int) -> list[Weight]:
    # r[i] - (S - r[i]) / (G - 1) = G / (G - 1) (r[i] - S / G), where S is the sum of all G rewards
    others = len(rewards) - 1
    return [Weight(value * len(rewards) / others, 1) for value in centred(rewards)]


def _grpo(rewards: Sequence[float], lengths: Sequence[int], longest: int) -> list[Weight]:
    return [Weight(value / length, 1) for value, length in zip(_standardised(rewards), lengths, strict=True)]


def _dr_grpo(rewards: Sequence[float], lengths: Sequence[int], longest: int) -> list[Weight]:
    return [Weight(value, longest) for value in centred(rewards)]


def _dapo(rewards: Sequence[float], lengths: Sequence[int], longest: int) -> list[Weight]:
    return [Weight(value, length) for value, length in zip(_standardised(rewards), lengths, strict=True)]


_OF: dict[Objective, Callable[[Sequence[float], Sequence[int], int], list[Weight]]] = {
    "dr_grpo": _dr_grpo, "rloo": _rloo, "grpo": _grpo, "dapo": _dapo, "reinforce": _reinforce,
}  # fmt: skip
