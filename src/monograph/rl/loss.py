"""The loss of reinforcement learning: the log-probability of each sampled token, times the weight of
its answer.

`monograph.rl.advantages` defines the weights. It also defines how a loss uses rho, which is the
probability of a token divided by the probability with which it was sampled. `monograph.rl.form`
restricts answers to a form, such as a regular expression.

Shapes: B rows, T positions, N = B T, S = B (T + 1) segments, one for padding in each row.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.loss import IGNORE, Batch, target_log_probabilities
from monograph.rl.advantages import ADVANTAGES, NO_RATIO, RatioUse
from monograph.rl.form import AnswerForm

Estimator = Literal["k1", "k2", "k3", "entropy"]
# The estimators that the key rl.kl takes; "entropy" has a key of its own.
KLS: tuple[Estimator, ...] = ("k1", "k2", "k3")


class Kl(NamedTuple):
    """A term that keeps the model near its reference, the weights that the run begins from.

    With l = log pi - log ref of a sampled token:

        k1       subtracts strength times the sum of an answer's l from the answer's reward
        k2       adds strength times l^2 / 2 to a token's loss
        k3       adds strength times e^-l - 1 + l to a token's loss
        entropy  adds strength times (log pi)^2 / 2 to a token's loss

    On policy, the gradient of k1 is the gradient of KL(pi || ref) between distributions of whole answers.
    The gradients of the others are about the distribution of the next token, summed over the positions of
    the sampled answers (Tang and Munos 2025, arXiv 2506.09477):

        k2       the gradient of KL(pi || ref)
        k3       the gradient of KL(ref || pi)
        entropy  the gradient of minus the entropy of pi. The term is k2 with log ref = 0 for every token:
                 a log ref that is the same for all tokens does not change the gradient of KL(pi || ref)

    Attributes:
        estimator: the name of the term.
        strength: its factor, above 0.
    """

    estimator: Estimator
    strength: float

    @property
    def needs_reference(self) -> bool:
        """Return whether log-probabilities of a reference are computed."""
        return self.estimator != "entropy"


def kl_term(
    kl: str | None,
    kl_coef: float | None,
    entropy_coef: float | None,
    advantage: str | None,
    section: str = "",
) -> Kl | None:
    """Return the term that is added to the loss or subtracted from the reward; None: no such term.

    Args:
        kl: "k1", "k2" or "k3"; "none" or None: no KL term.
        kl_coef: the strength of the KL term.
        entropy_coef: the strength of a term that favours entropy; None: no such term.
        advantage: the name of the advantage; None: a teacher scores the answers.
        section: the prefix of these names in messages, such as "rl.".

    Raises:
        UsageError: a strength is missing or not above 0, both terms are asked for, or k1 is asked
            for with a teacher or with an advantage that refuses it.
    """
    for name, value in (("kl_coef", kl_coef), ("entropy_coef", entropy_coef)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{section}{name} = {value}: expected a number above 0")
    choices = f"{', '.join(KLS[:-1])} or {KLS[-1]}"
    if kl in (None, "none"):
        if kl_coef is not None:
            raise UsageError(f"{section}kl_coef is the strength of {section}kl: say {choices}")
        return None if entropy_coef is None else Kl("entropy", entropy_coef)
    if kl not in KLS:
        raise UsageError(f"{section}kl = {kl!r}: expected {choices}")
    if kl_coef is None:
        raise UsageError(
            f"{section}kl = {kl}: say how strong it is, such as {section}kl_coef = 0.05"
        )
    if entropy_coef is not None:
        raise UsageError(
            f"{section}entropy_coef does not go with {section}kl = {kl}: leave one of them out"
        )
    if kl == "k1":
        if advantage is None:
            raise UsageError(
                f"{section}kl = k1 changes the rewards of whole answers, but a teacher scores each token: "
                f"leave {section}kl out"
            )
        reason = ADVANTAGES[advantage].k1_refused
        if reason:
            others = [name for name, other in ADVANTAGES.items() if not other.k1_refused]
            raise UsageError(
                f"{section}kl = k1 is a part of the reward, which {section}advantage = {advantage} {reason}: "
                f"take {', '.join(others)}, or k2 or k3"
            )
    return Kl(kl, kl_coef)


class PolicyTotals(NamedTuple):
    """Sums over targets, in the order of `PolicyLoss.totals`: 0-d fp64 tensors, or floats.

    Attributes:
        gap_sum: the sum of |log-probability - sampled log-probability|.
        gap_max: the largest of these differences.
        targets: the number of targets.
        ratio_sum: the sum of rho.
        clipped: the number of targets whose rho is clipped.
        kl_sum: the sum of log-probability - reference; 0 without a reference.
    """

    gap_sum: Any
    gap_max: Any
    targets: Any
    ratio_sum: Any
    clipped: Any
    kl_sum: Any


class PolicyLoss(nn.Module):
    """The weighted negative log-probability of sampled tokens, for a model as `TokenLoss` takes it.

        sum = sum of penalties * k - factors * w over positions with targets != -100
        count = sum of shares

    where w is log softmax(hidden @ head.T / temperature)[target], or the function of the ratio rho
    that `monograph.rl.advantages` defines, and k is the estimate of `Kl`.

    The batch holds, [B, T] each:
        tokens, targets: int64.
        segments, positions: int64, of packed rows. A row without segments has one answer.
        factors, shares: fp64, see `AnswerWeight`; 0 where nothing is sampled.
        drawn: fp64, the log-probability with which each target was sampled.
        penalties, reference: fp64, with a term `Kl`: see `AnswerWeight`, and the reference's
            log-probability of each target; 0 for the term "entropy".
        states: int64, with a form: the state of its automaton. The softmax is then over the tokens
            that the form allows there.

    Attributes:
        totals: [6] fp64, `PolicyTotals` over all micro-batches since `take_figures` was last
            called.
        fill: what pads each entry of a batch; 0 if it is not named.
    """

    totals: Tensor
    fill: Mapping[str, float] = MappingProxyType({"targets": IGNORE})

    def __init__(
        self,
        temperature: float = 1.0,
        ratio: RatioUse = NO_RATIO,
        kl: Kl | None = None,
        advantage: str = "dr_grpo",
        updates: int = 1,
        form: AnswerForm | None = None,
    ):
        """Take the settings of the loss.

        Args:
            temperature: divides the logits, as it does when tokens are sampled.
            ratio: how rho is used.
            kl: the KL term; None: no such term.
            advantage: the name of the advantage. The loss does not use it; `monograph.rollouts`
                does.
            updates: the number of updates that use each sample, for `monograph.rollouts` as well.
            form: the form of the answers; None: any.
        """
        super().__init__()
        self.form = form
        self.temperature = temperature
        self.ratio = ratio
        self.kl = kl
        self.advantage = advantage
        self.updates = updates
        self.register_buffer("totals", torch.zeros(len(PolicyTotals._fields), dtype=torch.float64))

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sum and count; see the class."""
        has_target_N = batch["targets"].flatten() != IGNORE
        log_N = self.log_probabilities(model, batch)
        sampled_log_N = batch["drawn"].flatten()
        factors_N = batch["factors"].flatten().to(log_N.dtype)
        log_ratio_N = torch.where(has_target_N, log_N - sampled_log_N.to(log_N.dtype), 0.0)
        if self.ratio.kind == "sequence":
            log_ratio_N = self._answer_means(log_ratio_N, has_target_N, batch)
        rho_N = log_ratio_N.exp()
        terms_N, clipped_N = self._policy_terms(log_N, rho_N, factors_N)
        kl_log_ratio_N = torch.zeros_like(log_N)
        if "reference" in batch:
            # At a position without a target the difference means nothing. It is set to 0, because its
            # exponential could overflow and give a gradient of NaN.
            reference_N = batch["reference"].flatten().to(log_N.dtype)
            kl_log_ratio_N = torch.where(has_target_N, log_N - reference_N, 0.0)
        # The term k1 is not added here: it has been subtracted from the rewards (`monograph.rl.arrange`).
        if self.kl is not None and self.kl.estimator != "k1":
            if self.kl.estimator == "k3":
                kl_N = torch.expm1(-kl_log_ratio_N) + kl_log_ratio_N
            else:
                kl_N = kl_log_ratio_N.square() / 2
            terms_N = terms_N - batch["penalties"].flatten().to(log_N.dtype) * kl_N
        with torch.no_grad():
            # `sampled_log_N` is fp64, so the difference is fp64, too.
            gap_N = torch.where(has_target_N, (log_N - sampled_log_N).abs(), 0.0).double()
            self._add_to_totals(has_target_N, gap_N, rho_N, clipped_N, kl_log_ratio_N)
        return -torch.where(has_target_N, terms_N, 0.0).sum(), self.count(batch)

    def log_probabilities(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the log-probability of each target, [N], and of token 0 where there is no target."""
        allowed_tokens = None
        if self.form and "states" in batch:
            allowed_tokens = (self.form.allowed, batch["states"].flatten())
        return target_log_probabilities(model, batch, self.temperature, allowed_tokens)

    def _policy_terms(
        self, log_N: Tensor, rho_N: Tensor, factors_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return factors * w of each position, which is maximised, and whether rho is clipped."""
        kind, low, high = self.ratio
        if kind == "none":
            return log_N * factors_N, torch.zeros_like(log_N)
        if kind == "truncate":
            return rho_N.detach().clamp_max(high) * log_N * factors_N, rho_N > high
        within_N = rho_N.clamp(1 - low, 1 + high)
        terms_N = torch.minimum(rho_N * factors_N, within_N * factors_N)
        # rho is clipped where the minimum is the second of the two products and differs from the first.
        is_clipped_N = (rho_N - within_N) * factors_N > 0
        return terms_N, is_clipped_N

    def _answer_means(self, values_N: Tensor, has_target_N: Tensor, batch: Batch) -> Tensor:
        """Return at each position the mean of the values over the targets of its answer."""
        rows, length = batch["targets"].shape
        # Without segments, a row is one answer.
        segments = batch["segments"] if "segments" in batch else torch.zeros_like(batch["targets"])
        # A packed row has at most `length` answers, whose segments are numbered from 1. Its padding is
        # segment 0.
        segments_per_row = length + 1
        first_B = torch.arange(rows, device=values_N.device)[:, None] * segments_per_row
        segment_N = (first_B + segments).flatten()
        zeros_S = torch.zeros(rows * segments_per_row, dtype=torch.float64, device=values_N.device)
        sums_S = zeros_S.index_add(0, segment_N, values_N.double())
        counts_S = zeros_S.index_add(0, segment_N, has_target_N.double())
        return (sums_S / counts_S.clamp_min(1))[segment_N].to(values_N.dtype)

    def _add_to_totals(
        self,
        has_target_N: Tensor,
        gap_N: Tensor,
        rho_N: Tensor,
        clipped_N: Tensor,
        kl_log_ratio_N: Tensor,
    ) -> None:
        """Add the sums over the targets of a micro-batch to `totals`, for `take_figures`."""
        before = PolicyTotals(*self.totals.unbind())
        ratio, clipped, kl = (
            torch.where(has_target_N, values_N, 0.0).double().sum()
            for values_N in (rho_N, clipped_N, kl_log_ratio_N)
        )
        after = PolicyTotals(
            gap_sum=before.gap_sum + gap_N.sum(),
            gap_max=torch.maximum(before.gap_max, gap_N.amax()),
            targets=before.targets + has_target_N.sum(),
            ratio_sum=before.ratio_sum + ratio,
            clipped=before.clipped + clipped,
            kl_sum=before.kl_sum + kl,
        )
        self.totals.copy_(torch.stack([*after]))

    def count(self, batch: Batch) -> Tensor:
        """Return the sum of the shares, 0-d fp64."""
        return batch["shares"].sum()

    def take_figures(
        self, gathered: Callable[[Any], list[Any]] = lambda own: [own]
    ) -> dict[str, float]:
        """Set `totals` to zero, and return figures on all targets since the last call.

        Args:
            gathered: a function of this process's values, which returns a list with the values of each
                rank (a process of distributed training).

        Returns:
            drawn_minus_scored: the mean of |log-probability - sampled log-probability|.
            drawn_minus_scored_max: the largest of these differences.
            ratio: the mean of rho.
            clipped: the share of targets whose rho is clipped.
            kl: the mean of log-probability - reference's log-probability; 0 without a reference.
        """
        ranks = [PolicyTotals(*values) for values in gathered(self.totals.tolist())]
        self.totals.zero_()
        targets = max(1.0, sum(rank.targets for rank in ranks))
        return {
            "drawn_minus_scored": sum(rank.gap_sum for rank in ranks) / targets,
            "drawn_minus_scored_max": max(rank.gap_max for rank in ranks),
            "ratio": sum(rank.ratio_sum for rank in ranks) / targets,
            "clipped": sum(rank.clipped for rank in ranks) / targets,
            "kl": sum(rank.kl_sum for rank in ranks) / targets,
        }
