"""How much each drawn answer of a group weighs in an update: the advantages, from REINFORCE to
GSPO.

With a, the advantage, and s, the answer's share of the denominator, an update minimises

    loss = sum over answers i of group g, tokens t of  - a[i] w(rho[i, t]) / sum over i of s[i]

r are the rewards of the G answers to a prompt, |o| is the number of tokens of an answer with the one that ends it, L
the most tokens of one. rho is the probability of a token, or of an answer, divided by that with
which it was drawn.

| name      | a[i]                                   | s[i] | w                    | source             |
|-----------|----------------------------------------|------|----------------------|--------------------|
| reinforce | r[i]                                   | 1    | clip(0.2, 0.2)       | Williams 1992      |
| rloo      | r[i] - mean of the others' r           | 1    | clip(0.2, 0.2)       | arXiv 2402.14740   |
| grpo      | (r[i] - mean r) / (std r + 1e-4) / |o| | 1    | clip(0.2, 0.2)       | arXiv 2402.03300   |
| dr_grpo   | r[i] - mean r                          | L    | clip(0.2, 0.2)       | arXiv 2503.20783   |
| dapo      | (r[i] - mean r) / (std r + 1e-4)       | |o|  | clip(0.2, 0.28)      | arXiv 2503.14476   |
| cispo     | (r[i] - mean r) / (std r + 1e-4)       | |o|  | truncate(5)          | arXiv 2506.13585   |
| gspo      | (r[i] - mean r) / (std r + 1e-4) / |o| | 1    | sequence(3e-4, 4e-4) | arXiv 2507.18071   |

    clip(l, h)      min(rho a, clamp(rho, 1 - l, 1 + h) a) / a              (Schulman et al. 2017, 1707.06347)
    truncate(h)     min(rho, h), as a constant, times log pi
    sequence(l, h)  clip(l, h) with rho of a whole answer: the exponential of the mean of its
        tokens' log rho

With one update of each draw rho is 1, up to rounding, and w is log pi, which has the same gradient
there, as rounding alone could leave the narrow limits of gspo. Only cispo uses rho even then: it is
truncated importance sampling.

The gradients of reinforce, rloo and dr_grpo at rho = 1 are those of the expected reward, the last
one times (G - 1) / (G L). Those of grpo and dapo are not: both divide by the group's standard
deviation, and grpo also gives tokens of short right answers more weight, and of long wrong ones
less. The standard deviation is the unbiased one. A group whose rewards are all equal, up to the
rounding of sums (ROUNDING), has the advantage 0, exactly, except for reinforce.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

_LEAST_DEVIATION = 1e-4
# What rounding may add to a reward, relative to the larger of 1 and the largest reward. A sum of n
# parts is off by at most n 2^-53 of the sum of their sizes, in whatever order it is made: this is
# room for 2^12 parts of together twice that size. No reward means so little.
ROUNDING = 2.0**-40


class Ratio(NamedTuple):
    """How a loss uses rho: "none" not at all, and else as the module says, with the numbers l and
    h.
    """

    kind: Literal["none", "clip", "truncate", "sequence"]
    low: float = 0.0
    high: float = 0.0


UNUSED = Ratio("none")


class Weight(NamedTuple):
    """An answer's part in an update.

    Attributes:
        factor: the factor of each of its tokens, or a factor for each.
        share: its share of the denominator.
        penalty: the factor of each token's KL term.
    """

    factor: float | Sequence[float]
    share: float
    penalty: float = 0.0

    @property
    def counts(self) -> bool:
        """Return whether the answer changes the gradient."""
        return (
            bool(self.factor if isinstance(self.factor, float | int) else any(self.factor))
            or self.penalty > 0
        )


def are_equal(rewards: Sequence[float]) -> bool:
    """Return whether rewards differ by nothing but the rounding of sums; true without any."""
    if not rewards:
        return True
    least = min(rewards)
    most = max(rewards)
    return most - least <= ROUNDING * max(1.0, -least, most)


def centred(rewards: Sequence[float]) -> list[float]:
    """Return the rewards less their mean, exact zeros if all are equal."""
    # Divided by their deviation, differences of rounding would weigh like real ones.
    if are_equal(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


def standardised(rewards: Sequence[float]) -> list[float]:
    """Return the rewards less their mean, divided by their deviation."""
    deviation = statistics.stdev(rewards) + _LEAST_DEVIATION
    return [value / deviation for value in centred(rewards)]


def _reinforce(rewards: Sequence[float], lengths: Sequence[int], longest: int) -> list[Weight]:
    return [Weight(reward, 1) for reward in rewards]


def _dr_grpo(rewards: Sequence[float], lengths: Sequence[int], longest: int) -> list[Weight]:
    return [Weight(value, longest) for value in centred(rewards)]


def _rloo(rewards: Sequence[float], lengths: Sequence[int], longest: int) -> list[Weight]:
    # r[i] - (S - r[i]) / (G - 1) = G / (G - 1) (r[i] - S / G), where S is the sum of all G rewards
    size = len(rewards)
    return [Weight(value * size / (size - 1), 1) for value in centred(rewards)]


def _per_answer(rewards: Sequence[float], lengths: Sequence[int], longest: int) -> list[Weight]:
    return [
        Weight(value / length, 1)
        for value, length in zip(standardised(rewards), lengths, strict=True)
    ]


def _per_token(rewards: Sequence[float], lengths: Sequence[int], longest: int) -> list[Weight]:
    return [
        Weight(value, length) for value, length in zip(standardised(rewards), lengths, strict=True)
    ]


@dataclass(frozen=True)
class Advantage:
    """An advantage.

    Attributes:
        weights: the weights of a group's answers, from the rewards, at least two; the numbers of
            tokens, with the one that ends an answer; and the most tokens that an answer may have.
        ratio: how rho is used, where more than one update is made of a draw.
        divides: whether it divides by the deviation of the rewards, so that nothing can be added to
            them.
        by_length: whether tokens of long answers weigh less, and with them their KL term.
        compares: whether answers are compared with others to their prompt, so that equal rewards
            teach nothing.
    """

    weights: Callable[[Sequence[float], Sequence[int], int], list[Weight]]
    ratio: Ratio = Ratio("clip", 0.2, 0.2)
    divides: bool = True
    by_length: bool = False
    compares: bool = True


# The names that the key rl.advantage takes.
ADVANTAGES = {
    "dr_grpo": Advantage(_dr_grpo, divides=False),
    "rloo": Advantage(_rloo, divides=False),
    "grpo": Advantage(_per_answer, by_length=True),
    "dapo": Advantage(_per_token, Ratio("clip", 0.2, 0.28)),
    "reinforce": Advantage(_reinforce, divides=False, compares=False),
    "cispo": Advantage(_per_token, Ratio("truncate", 0.0, 5.0)),
    "gspo": Advantage(_per_answer, Ratio("sequence", 3e-4, 4e-4), by_length=True),
}


def ratio_of(advantage: str, updates: int) -> Ratio:
    """Return how an advantage uses rho, for a number of updates that are made of each draw."""
    ratio = ADVANTAGES[advantage].ratio
    return UNUSED if updates == 1 and ratio.kind != "truncate" else ratio
