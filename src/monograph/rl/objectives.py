"""The objectives of reinforcement learning, each as the weight of an answer's tokens in one sum.

With a, the advantage, and s, the answer's share of the denominator, as the table says, an update minimises

    loss = sum over answers i of group g, tokens t of  - a[i] w(rho[i, t]) / sum over i of s[i]

r are the rewards of the G answers to a prompt, |o| is the number of tokens of an answer with the one that ends it, L
the most tokens of one. rho is the probability of a token, or of an answer, divided by that with which it was drawn.

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
    sequence(l, h)  clip(l, h) with rho of a whole answer: the exponential of the mean of its tokens' log rho

With one update of each draw rho is 1, up to rounding, and w is log pi, which has the same gradient there, as rounding
alone could leave the narrow limits of gspo. Only cispo uses rho even then: it is truncated importance sampling.

The gradients of reinforce, rloo and dr_grpo at rho = 1 are those of the expected reward, the last one times (G - 1) /
(G L). That of grpo is not: it gives tokens of short right answers more weight, and of long wrong ones less. That of
dapo is, up to a factor that all answers of an update share and that depends on their lengths. The standard deviation is
the unbiased one. A group whose rewards are all equal has the advantage 0, exactly, except for reinforce.
"""

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

Objective = Literal["dr_grpo", "rloo", "grpo", "dapo", "reinforce", "cispo", "gspo"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
UNSCALED: tuple[Objective, ...] = ("dr_grpo", "rloo", "reinforce")  # those that do not divide by a deviation
BY_LENGTH: tuple[Objective, ...] = ("grpo", "gspo")  # those in which tokens of long answers weigh less
_LEAST_DEVIATION = 1e-4


class Ratio(NamedTuple):
    """How a loss uses rho: "none" not at all, and else as the module says, with the numbers l and h."""

    kind: Literal["none", "clip", "truncate", "sequence"]
    low: float = 0.0
    high: float = 0.0


UNUSED = Ratio("none")
_RATIOS: dict[Objective, Ratio] = {
    "dapo": Ratio("clip", 0.2, 0.28), "cispo": Ratio("truncate", 0.0, 5.0), "gspo": Ratio("sequence", 3e-4, 4e-4),
}  # fmt: skip


def ratio_of(objective: Objective, updates: int) -> Ratio:
    """Return how an objective uses rho, for a number of updates that are made of each draw."""
    ratio = _RATIOS.get(objective, Ratio("clip", 0.2, 0.2))
    return UNUSED if updates == 1 and ratio.kind != "truncate" else ratio


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
        return bool(self.factor if isinstance(self.factor, float | int) else any(self.factor)) or self.penalty > 0


def weights(objective: Objective, rewards: Sequence[float], lengths: Sequence[int], longest: int) -> list[Weight]:
    """Return the weights of one group's answers.

    Args:
        objective: the name of the objective.
        rewards: the reward of each answer to one prompt, at least two.
        lengths: the number of tokens of each answer, with the one that ends it.
        longest: most tokens that an answer may have.
    """
    size = len(rewards)
    if objective == "reinforce":
        return [Weight(reward, 1) for reward in rewards]
    if objective == "dr_grpo":
        return [Weight(value, longest) for value in centred(rewards)]
    if objective == "rloo":
        # r[i] - (S - r[i]) / (G - 1) = G / (G - 1) (r[i] - S / G), where S is the sum of all G rewards
        return [Weight(value * size / (size - 1), 1) for value in centred(rewards)]
    deviation = statistics.stdev(rewards) + _LEAST_DEVIATION
    pairs = [(value / deviation, length) for value, length in zip(centred(rewards), lengths, strict=True)]
    if objective in BY_LENGTH:
        return [Weight(value / length, 1) for value, length in pairs]
    return [Weight(value, length) for value, length in pairs]


def centred(rewards: Sequence[float]) -> list[float]:
    """Return the rewards less their mean, exact zeros if all are equal."""
    if min(rewards) == max(rewards):  # the mean of equal numbers may differ from them in its last digit
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]
