"""The weight of each sampled answer of a group in an update: the advantages, from REINFORCE to GSPO.

An update minimises

    loss = - (sum over i and t of a[i] w(rho[i, t])) / (sum over i of s[i])

where i runs over the answers of all groups and t over the tokens of answer i. a[i] is the advantage
of the answer, s[i] is its term of the denominator, and w is a function of rho. rho is the probability
of a token, or of an answer, divided by the probability with which it was sampled. In the table, r are
the rewards of the G answers to a prompt. |o| is the number of tokens of an answer, including the one
that ends it, and L is the maximum of this number.

| name      | a[i]                                   | s[i] | w                    | source             |
|-----------|----------------------------------------|------|----------------------|--------------------|
| reinforce | r[i]                                   | 1    | clip(0.2, 0.2)       | Williams 1992      |
| rloo      | r[i] - mean of the others' r           | 1    | clip(0.2, 0.2)       | arXiv 2402.14740   |
| grpo      | (r[i] - mean r) / (std r + 1e-4) / |o| | 1    | clip(0.2, 0.2)       | arXiv 2402.03300   |
| dr_grpo   | r[i] - mean r                          | L    | clip(0.2, 0.2)       | arXiv 2503.20783   |
| dapo      | (r[i] - mean r) / (std r + 1e-4)       | |o|  | clip(0.2, 0.28)      | arXiv 2503.14476   |
| cispo     | (r[i] - mean r) / (std r + 1e-4)       | |o|  | truncate(5)          | arXiv 2506.13585   |
| gspo      | (r[i] - mean r) / (std r + 1e-4) / |o| | 1    | sequence(3e-4, 4e-4) | arXiv 2507.18071   |

    clip(l, h)      min(rho a, clamp(rho, 1 - l, 1 + h) a) / a  (Schulman et al. 2017, arXiv 1707.06347)
    truncate(h)     min(rho, h) log pi, where pi is the probability of the token, and no gradient goes
                    through min(rho, h)
    sequence(l, h)  clip(l, h), where rho is of a whole answer: the exponential of the mean of its
                    tokens' log rho

If each sample is used for one update only, rho is 1 up to rounding. Then w = log pi is used, which has
the same gradient at rho = 1, and whose gradient no rounding error can clip, as the narrow limits of
gspo could. Only cispo uses rho even then, as truncated importance sampling.

At rho = 1 the gradients of reinforce and rloo are those of the expected reward. The gradient of dr_grpo
is that gradient times (G - 1) / (G L). The gradients of grpo and dapo are not: both divide by the
group's standard deviation, and grpo also gives the tokens of short right answers more weight and those
of long wrong answers less. The standard deviation is the unbiased one. If all rewards of a group are
equal up to ROUNDING, the advantage is exactly 0, except for reinforce.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

# Added to a deviation, so that nearly equal rewards are not divided by nearly 0.
_DEVIATION_EPSILON = 1e-4
# Two rewards are equal up to rounding if they differ by no more than ROUNDING times the largest magnitude
# of a reward, or ROUNDING itself if that is below 1. A reward may be a sum of parts, and a sum of n parts,
# added in any order, is off by at most n 2^-53 times the sum of their magnitudes. So ROUNDING allows for
# 2^12 parts whose magnitudes sum to twice the largest reward: 2^12 * 2^-53 * 2 = 2^-40. A real difference
# of rewards is larger.
ROUNDING = 2.0**-40


class RatioUse(NamedTuple):
    """How a loss uses rho.

    Attributes:
        kind: which function w of the module's table it uses; "none" if it does not use rho.
        low: l of that function.
        high: h of that function.
    """

    kind: Literal["none", "clip", "truncate", "sequence"]
    low: float = 0.0
    high: float = 0.0


NO_RATIO = RatioUse("none")


class AnswerWeight(NamedTuple):
    """An answer's part in an update.

    Attributes:
        factor: the factor of all its tokens, or one factor for each token.
        share: its term of the denominator.
        penalty: the factor of each token's KL term.
    """

    factor: float | Sequence[float]
    share: float
    penalty: float = 0.0

    @property
    def changes_gradient(self) -> bool:
        """Return whether the answer changes the gradient."""
        if isinstance(self.factor, float | int):
            has_factor = self.factor != 0
        else:
            has_factor = any(self.factor)
        return has_factor or self.penalty > 0


def rewards_are_equal(rewards: Sequence[float]) -> bool:
    """Return whether rewards are equal up to ROUNDING; true if there are none."""
    if not rewards:
        return True
    smallest = min(rewards)
    largest = max(rewards)
    return largest - smallest <= ROUNDING * max(1.0, -smallest, largest)


def centred_rewards(rewards: Sequence[float]) -> list[float]:
    """Return the rewards minus their mean; exact zeros if all are equal up to ROUNDING."""
    # The caller may divide by the deviation, which would make differences by rounding as large as real
    # ones.
    if rewards_are_equal(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


def standardised_rewards(rewards: Sequence[float]) -> list[float]:
    """Return the rewards minus their mean, divided by their standard deviation + 1e-4."""
    deviation = statistics.stdev(rewards) + _DEVIATION_EPSILON
    return [value / deviation for value in centred_rewards(rewards)]


# The functions below return the weights of a group's answers, see `Advantage.weights`.


def _reinforce(
    rewards: Sequence[float], lengths: Sequence[int], max_tokens: int
) -> list[AnswerWeight]:
    return [AnswerWeight(reward, 1) for reward in rewards]


def _dr_grpo(
    rewards: Sequence[float], lengths: Sequence[int], max_tokens: int
) -> list[AnswerWeight]:
    return [AnswerWeight(value, max_tokens) for value in centred_rewards(rewards)]


def _rloo(rewards: Sequence[float], lengths: Sequence[int], max_tokens: int) -> list[AnswerWeight]:
    # r[i] - (S - r[i]) / (G - 1) = G / (G - 1) (r[i] - S / G), where S is the sum of all G rewards
    size = len(rewards)
    return [AnswerWeight(value * size / (size - 1), 1) for value in centred_rewards(rewards)]


def _grpo(rewards: Sequence[float], lengths: Sequence[int], max_tokens: int) -> list[AnswerWeight]:
    return [
        AnswerWeight(value / length, 1)
        for value, length in zip(standardised_rewards(rewards), lengths, strict=True)
    ]


def _dapo(rewards: Sequence[float], lengths: Sequence[int], max_tokens: int) -> list[AnswerWeight]:
    return [
        AnswerWeight(value, length)
        for value, length in zip(standardised_rewards(rewards), lengths, strict=True)
    ]


@dataclass(frozen=True)
class Advantage:
    """An advantage.

    Attributes:
        meaning: how it weighs an answer, in one line for the pages about the key rl.advantage.
        weights: returns the weights of a group's answers. Its arguments are the answers' rewards, at
            least two; their numbers of tokens, each with the token that ends the answer; and the
            maximum of this number.
        ratio: how rho is used if each sample is used for several updates.
        k1_refused: why it cannot be used with the KL estimator k1, which is a part of the reward, as the
            end of the sentence "the reward, which this advantage ..."; "": it can be used with k1.
        divides_by_length: whether it divides by the number of an answer's tokens. The factor of the
            answer's KL term is then divided by it, too.
        compares_answers: whether it compares the answers to a prompt, so that a group with equal
            rewards has no gradient.
    """

    meaning: str
    weights: Callable[[Sequence[float], Sequence[int], int], list[AnswerWeight]]
    ratio: RatioUse = RatioUse("clip", 0.2, 0.2)
    k1_refused: str = ""
    divides_by_length: bool = False
    compares_answers: bool = True


# The `k1_refused` of advantages that divide by the deviation of the rewards.
_BY_DEVIATION = "divides by its deviation"
# The names that the key rl.advantage takes.
ADVANTAGES = {
    "dr_grpo": Advantage("its reward less the group's mean", _dr_grpo),
    "rloo": Advantage("its reward less the mean of the others", _rloo),
    "grpo": Advantage(
        "dr_grpo's, divided by the group's deviation and its own length",
        _grpo,
        k1_refused=_BY_DEVIATION,
        divides_by_length=True,
    ),
    "dapo": Advantage(
        "dr_grpo's, divided by the group's deviation, with a higher upper limit",
        _dapo,
        RatioUse("clip", 0.2, 0.28),
        k1_refused=_BY_DEVIATION,
    ),
    "reinforce": Advantage("its reward", _reinforce, compares_answers=False),
    "cispo": Advantage(
        "dapo's, with truncated importance sampling",
        _dapo,
        RatioUse("truncate", 0.0, 5.0),
        k1_refused=_BY_DEVIATION,
    ),
    "gspo": Advantage(
        "grpo's, with one ratio for the whole answer",
        _grpo,
        RatioUse("sequence", 3e-4, 4e-4),
        k1_refused=_BY_DEVIATION,
        divides_by_length=True,
    ),
}


def ratio_of(advantage: str, updates: int) -> RatioUse:
    """Return how an advantage uses rho if each sample is used for this number of updates."""
    ratio = ADVANTAGES[advantage].ratio
    if updates == 1 and ratio.kind != "truncate":
        return NO_RATIO
    return ratio
