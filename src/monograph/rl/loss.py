"""The loss of reinforcement learning: the log-probabilities of drawn tokens, each times the weight of an objective.

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
(G L). Those of grpo and dapo are not: both divide by the group's standard deviation, and grpo also gives tokens of
short right answers more weight, and of long wrong ones less. The standard deviation is the unbiased one. A group whose
rewards are all equal, up to the rounding of sums (ROUNDING), has the advantage 0, exactly, except for reinforce.

Answers may have a form: only tokens after which an answer can still get it are drawn, and learned from. A token is then
drawn from the softmax over the allowed tokens alone, and its log-probability is that of this distribution wherever it
is computed: drawn, in the loss, of a reference or a teacher. So a token that had no alternative has the log-probability
0, and no gradient.

Shapes: B rows, T positions, N = B T.
"""

import functools
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from monograph.decode.automata import Arena, allowed, constraint
from monograph.errors import InputRefused, UsageError
from monograph.loss import IGNORE, Batch, target_log_probabilities
from monograph.rl.prompts import Prompts
from monograph.rl.rewards import FormName

_MOST_MASKS = 1 << 28  # bytes of the masks of all states


class Form:
    """A form over a tokenizer's tokens.

    Attributes:
        automaton: what decoding follows.
    """

    def __init__(self, name: FormName, prompts: Prompts, ends: Collection[int], device: torch.device) -> None:
        """Compile a form.

        Args:
            name: the form.
            prompts: the prompts, after which the tokenizer may begin every text with a space.
            ends: tokens that end an answer.
            device: where the loss follows it.

        Raises:
            InputRefused: it cannot be used with these tokens or prompts.
        """
        tokenizer = prompts.tokenizer
        leads = {tokenizer.lead(prompt.ids) for prompt in (*prompts.train, *prompts.held_out)}
        if len(leads) > 1:
            raise InputRefused(
                f"{prompts.name}: the tokenizer begins answers with a space after some prompts, and after others not: "
                "answers cannot have a form"
            )
        self.automaton = constraint(name.kind, name.value, tokenizer.pieces, ends, leads.pop())
        tables = Arena.holding([self.automaton], tokenizer.vocab_size, device)
        start = tables.take(self.automaton)
        assert start is not None
        self._start = start
        self.allowed: Callable[[Tensor], Tensor] = functools.partial(allowed, tables)
        states = len(tables.row_S)
        # A state with counters has many masks.
        if (
            not self.automaton.counts and states * tokenizer.vocab_size <= _MOST_MASKS
        ):  # to compute a mask takes more memory than to look it up
            each = [allowed(tables, torch.tensor([state], device=device)) for state in range(states)]
            self.allowed = functools.partial(_looked_up, torch.cat(each))

    def states(self, token_ids: Sequence[int]) -> list[int]:
        """Return the state before each of an answer's tokens, as `allowed` takes it; 0 allows every token."""
        state = 0
        found = list[int]()
        for token in token_ids:
            found.append(self._start + state)
            state = self.automaton.after(state, token)
        return found


def _looked_up(masks_SV: Tensor, state_C: Tensor) -> Tensor:
    return masks_SV[state_C]


Objective = Literal["dr_grpo", "rloo", "grpo", "dapo", "reinforce", "cispo", "gspo"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
UNSCALED: tuple[Objective, ...] = ("dr_grpo", "rloo", "reinforce")  # those that do not divide by a deviation
BY_LENGTH: tuple[Objective, ...] = ("grpo", "gspo")  # those in which tokens of long answers weigh less
_LEAST_DEVIATION = 1e-4
# What rounding may add to a reward, relative to the larger of 1 and the largest reward. A sum of n parts is off by at
# most n 2^-53 of the sum of their sizes, in whatever order it is made: this is room for 2^12 parts of together twice
# that size. No reward means so little.
ROUNDING = 2.0**-40


class Ratio(NamedTuple):
    """How a loss uses rho: "none" not at all, and else as the module says, with the numbers l and h."""

    kind: Literal["none", "clip", "truncate", "sequence"]
    low: float = 0.0
    high: float = 0.0


UNUSED = Ratio("none")
_RATIOS: dict[Objective, Ratio] = {
    "dapo": Ratio("clip", 0.2, 0.28),
    "cispo": Ratio("truncate", 0.0, 5.0),
    "gspo": Ratio("sequence", 3e-4, 4e-4),
}


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


def are_equal(rewards: Sequence[float]) -> bool:
    """Return whether rewards differ by nothing but the rounding of sums; true without any."""
    if not rewards:
        return True
    least = min(rewards)
    most = max(rewards)
    return most - least <= ROUNDING * max(1.0, -least, most)


def centred(rewards: Sequence[float]) -> list[float]:
    """Return the rewards less their mean, exact zeros if all are equal."""
    if are_equal(rewards):  # divided by their deviation, differences of rounding would weigh like real ones
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


Estimator = Literal["k1", "k2", "k3", "entropy"]
KLS: tuple[Estimator, ...] = ("k1", "k2", "k3")


class Kl(NamedTuple):
    """A term that holds the model near its reference, the weights that the run begins from.

    With l = log pi - log ref of a drawn token: k1 takes strength times the sum of an answer's l from its reward; k2
    adds strength times l^2 / 2 to a token's loss, and k3 adds strength times e^-l - 1 + l. On policy, the gradient of
    k1 is that of KL(pi || ref) of whole answers. Those of k2 and k3 are of the next token, at the places that answers
    come to: of KL(pi || ref) and of KL(ref || pi) (Tang and Munos 2025, arXiv 2506.09477).

    "entropy" is k2 with a reference that finds all tokens equally likely: its gradient is that of minus the entropy of
    the next token, at these places.
    """

    estimator: Estimator
    strength: float

    @property
    def needs_reference(self) -> bool:
        """Return whether log-probabilities of a reference are computed."""
        return self.estimator != "entropy"


def penalty(
    kl: str | None, kl_coef: float | None, entropy_coef: float | None, advantage: str | None, section: str = ""
) -> Kl | None:
    """Return the term that is added to the loss or taken from the reward; None without one.

    Args:
        kl: "k1", "k2" or "k3"; "none" or None: no such term.
        kl_coef: its strength.
        entropy_coef: the strength of a term for even choices; None: no such term.
        advantage: the objective; None for a teacher.
        section: what the names have before them in messages, such as "rl.".

    Raises:
        UsageError: a strength is missing or of nothing, or the terms do not go together or with the objective.
    """
    for name, value in (("kl_coef", kl_coef), ("entropy_coef", entropy_coef)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{section}{name} = {value}: expected a number above 0")
    if kl in (None, "none"):
        if kl_coef is not None:
            raise UsageError(f"{section}kl_coef is the strength of {section}kl: say {', '.join(KLS[:-1])} or {KLS[-1]}")
        return None if entropy_coef is None else Kl("entropy", entropy_coef)
    if kl not in KLS:
        raise UsageError(f"{section}kl = {kl!r}: expected {', '.join(KLS[:-1])} or {KLS[-1]}")
    if kl_coef is None:
        raise UsageError(f"{section}kl = {kl}: say how strong it is, such as {section}kl_coef = 0.05")
    if entropy_coef is not None:
        raise UsageError(f"{section}entropy_coef does not go with {section}kl = {kl}: leave one of them out")
    if kl == "k1" and advantage not in UNSCALED:
        raise UsageError(
            f"{section}kl = k1 is a part of the reward, which {section}advantage = {advantage} divides by its "
            f"deviation: take {', '.join(UNSCALED)}, or k2 or k3"
        )
    return Kl(kl, kl_coef)


class PolicyLoss(nn.Module):
    """The weighted negative log-probabilities of drawn tokens, for a model as `TokenLoss` takes it.

    sum = - sum over positions with targets != -100 of factors * w + penalties * k
    count = sum of shares

    where w is log softmax(hidden @ head.T / temperature)[target], or what the module says of it with the ratio
    rho, and k is the estimate of `Kl`.

    The batch holds, all [B, T]: `tokens` and `targets`, and for packed rows `segments` and `positions`, int64; and
    `factors` and `shares` (see the module), 0 where nothing is drawn, and `drawn`, the log-probability with which
    decoding drew each target, fp64. With a KL term it also holds `penalties` and `reference`, the reference's
    log-probability. A row without `segments` has one answer. With a form, w is over the tokens that it allows, and the
    batch holds `states`, int64.

    Attributes:
        totals: [6] fp64, over all micro-batches since it was last set to zero: the sum of |log-probability - drawn|,
            the largest, the number of targets, the sum of rho, how many targets are clipped, and the sum of
            log-probability - reference.
    """

    totals: Tensor
    fill: Mapping[str, float] = MappingProxyType({"targets": IGNORE})

    def __init__(
        self,
        temperature: float = 1.0,
        ratio: Ratio = UNUSED,
        kl: Kl | None = None,
        objective: Objective = "dr_grpo",
        updates: int = 1,
        form: Form | None = None,
    ):
        """Take the temperature with which tokens are drawn, the use of rho, the KL term, and `Options`' next three."""
        super().__init__()
        self.form = form
        self.temperature = temperature
        self.ratio = ratio
        self.kl = kl
        self.objective, self.updates = objective, updates
        self.register_buffer("totals", torch.zeros(6, dtype=torch.float64))

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sum and count; see the class."""
        kept_N = batch["targets"].flatten() != IGNORE
        log_N = self.log_probabilities(model, batch)
        drawn_N = batch["drawn"].flatten()
        factors_N = batch["factors"].flatten().to(log_N.dtype)
        apart_N = torch.where(kept_N, log_N - drawn_N.to(log_N.dtype), 0.0)
        rho_N = (self._of_answers(apart_N, kept_N, batch) if self.ratio.kind == "sequence" else apart_N).exp()
        gained_N, clipped_N = self._gained(log_N, rho_N, factors_N)
        terms_N = gained_N
        far_N = torch.zeros_like(log_N)
        if "reference" in batch:
            # Elsewhere the difference is of nothing, and its exponential could overflow to a gradient of NaN.
            far_N = torch.where(kept_N, log_N - batch["reference"].flatten().to(log_N.dtype), 0.0)
        if self.kl is not None and self.kl.estimator != "k1":  # which is in the rewards
            near_N = torch.expm1(-far_N) + far_N if self.kl.estimator == "k3" else far_N.square() / 2
            terms_N = gained_N - batch["penalties"].flatten().to(log_N.dtype) * near_N
        with torch.no_grad():
            exact_N = torch.where(kept_N, (log_N - drawn_N).abs(), 0.0).double()
            total, largest, number, *sums = self.totals.unbind()
            more = [torch.where(kept_N, each, 0.0).double().sum() for each in (rho_N, clipped_N, far_N)]
            now = (total + exact_N.sum(), torch.maximum(largest, exact_N.amax()), number + kept_N.sum())
            self.totals.copy_(torch.stack([*now, *(old + new for old, new in zip(sums, more, strict=True))]))
        return -torch.where(kept_N, terms_N, 0.0).sum(), self.count(batch)

    def log_probabilities(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the log-probability of each target, [N], and of token 0 where there is no target."""
        states = batch.get("states")
        among = (self.form.allowed, states.flatten()) if self.form and states is not None else None
        return target_log_probabilities(model, batch, self.temperature, among)

    def _gained(self, log_N: Tensor, rho_N: Tensor, factors_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return each position's part of the objective, and whether its ratio is clipped."""
        kind, low, high = self.ratio
        if kind == "none":
            return log_N * factors_N, torch.zeros_like(log_N)
        if kind == "truncate":
            return rho_N.detach().clamp_max(high) * log_N * factors_N, rho_N > high
        within_N = rho_N.clamp(1 - low, 1 + high)
        return torch.minimum(rho_N * factors_N, within_N * factors_N), (rho_N - within_N) * factors_N > 0

    def _of_answers(self, values_N: Tensor, kept_N: Tensor, batch: Batch) -> Tensor:
        """Return at each position the mean of the values over the targets of its answer."""
        rows, length = batch["targets"].shape
        segments = batch["segments"] if "segments" in batch else torch.zeros_like(batch["targets"])
        # An answer has at most as many places as a row has positions.
        place_N = (torch.arange(rows, device=values_N.device)[:, None] * (length + 1) + segments).flatten()
        zeros_S = torch.zeros(rows * (length + 1), dtype=torch.float64, device=values_N.device)
        sums_S = zeros_S.index_add(0, place_N, values_N.double())
        counts_S = zeros_S.index_add(0, place_N, kept_N.double())
        return (sums_S / counts_S.clamp_min(1))[place_N].to(values_N.dtype)

    def count(self, batch: Batch) -> Tensor:
        """Return the sum of the shares, 0-d fp64."""
        return batch["shares"].sum()

    def taken(self, gathered: Callable[[Any], list[Any]] = lambda own: [own]) -> dict[str, float]:
        """Return figures on all targets since the last call; see `totals`.

        Args:
            gathered: returns the values of all ranks.

        Returns:
            drawn_minus_scored, drawn_minus_scored_max; ratio: mean rho; clipped: share of targets; kl: nats a token.
        """
        totals, largest, *others = zip(*gathered(self.totals.tolist()), strict=True)
        total, targets, rho, clipped, far = map(sum, (totals, *others))
        self.totals.zero_()
        number = max(1.0, targets)
        return {
            "drawn_minus_scored": total / number,
            "drawn_minus_scored_max": max(largest),
            "ratio": rho / number,
            "clipped": clipped / number,
            "kl": far / number,
        }
