"""The loss of reinforcement learning: the log-probabilities of drawn tokens, each times the weight
of its answer.

The weights and what is done with rho, the ratio of a token's probability to the one with which it
was drawn, are in `monograph.rl.advantages`; the form that answers may have is in
`monograph.rl.form`.

Shapes: B rows, T positions, N = B T.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.loss import IGNORE, Batch, target_log_probabilities
from monograph.rl.advantages import ADVANTAGES, UNUSED, Ratio
from monograph.rl.form import AnswerForm

Estimator = Literal["k1", "k2", "k3", "entropy"]
KLS: tuple[Estimator, ...] = ("k1", "k2", "k3")


class Kl(NamedTuple):
    """A term that holds the model near its reference, the weights that the run begins from.

    With l = log pi - log ref of a drawn token: k1 takes strength times the sum of an answer's l
    from its reward; k2 adds strength times l^2 / 2 to a token's loss, and k3 adds strength times
    e^-l - 1 + l. On policy, the gradient of
    k1 is that of KL(pi || ref) of whole answers. Those of k2 and k3 are of the next token, at the places that answers
    come to: of KL(pi || ref) and of KL(ref || pi) (Tang and Munos 2025, arXiv 2506.09477).

    "entropy" is k2 with a reference that finds all tokens equally likely: its gradient is that of
    minus the entropy of the next token, at these places.
    """

    estimator: Estimator
    strength: float

    @property
    def needs_reference(self) -> bool:
        """Return whether log-probabilities of a reference are computed."""
        return self.estimator != "entropy"


def penalty(
    kl: str | None,
    kl_coef: float | None,
    entropy_coef: float | None,
    advantage: str | None,
    section: str = "",
) -> Kl | None:
    """Return the term that is added to the loss or taken from the reward; None without one.

    Args:
        kl: "k1", "k2" or "k3"; "none" or None: no such term.
        kl_coef: its strength.
        entropy_coef: the strength of a term for even choices; None: no such term.
        advantage: the name of the advantage; None for a teacher.
        section: what the names have before them in messages, such as "rl.".

    Raises:
        UsageError: a strength is missing or of nothing, or the terms do not go together or with the
            objective.
    """
    for name, value in (("kl_coef", kl_coef), ("entropy_coef", entropy_coef)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{section}{name} = {value}: expected a number above 0")
    if kl in (None, "none"):
        if kl_coef is not None:
            raise UsageError(
                f"{section}kl_coef is the strength of {section}kl: say {', '.join(KLS[:-1])} or {KLS[-1]}"
            )
        return None if entropy_coef is None else Kl("entropy", entropy_coef)
    if kl not in KLS:
        raise UsageError(f"{section}kl = {kl!r}: expected {', '.join(KLS[:-1])} or {KLS[-1]}")
    if kl_coef is None:
        raise UsageError(
            f"{section}kl = {kl}: say how strong it is, such as {section}kl_coef = 0.05"
        )
    if entropy_coef is not None:
        raise UsageError(
            f"{section}entropy_coef does not go with {section}kl = {kl}: leave one of them out"
        )
    if kl == "k1" and (advantage is None or ADVANTAGES[advantage].divides):
        undivided = [name for name, each in ADVANTAGES.items() if not each.divides]
        raise UsageError(
            f"{section}kl = k1 is a part of the reward, which {section}advantage = {advantage} divides by its "
            f"deviation: take {', '.join(undivided)}, or k2 or k3"
        )
    return Kl(kl, kl_coef)


class PolicyLoss(nn.Module):
    """The weighted negative log-probabilities of drawn tokens, for a model as `TokenLoss` takes it.

    sum = - sum over positions with targets != -100 of factors * w + penalties * k
    count = sum of shares

    where w is log softmax(hidden @ head.T / temperature)[target], or what `monograph.rl.advantages`
    says of it with the ratio rho, and k is the estimate of `Kl`.

    The batch holds, all [B, T]: `tokens` and `targets`, and for packed rows `segments` and
    `positions`, int64; and `factors` and `shares` (see `Weight`), 0 where nothing is drawn, and
    `drawn`, the log-probability with which decoding drew each target, fp64. With a KL term it also
    holds `penalties` and `reference`, the reference's log-probability. A row without `segments` has
    one answer. With a form, w is over the tokens that it allows, and the batch holds `states`,
    int64.

    Attributes:
        totals: [6] fp64, over all micro-batches since it was last set to zero: the sum of |log-probability - drawn|,
            the largest, the number of targets, the sum of rho, how many targets are clipped, and
            the sum of log-probability - reference.
    """

    totals: Tensor
    fill: Mapping[str, float] = MappingProxyType({"targets": IGNORE})

    def __init__(
        self,
        temperature: float = 1.0,
        ratio: Ratio = UNUSED,
        kl: Kl | None = None,
        advantage: str = "dr_grpo",
        updates: int = 1,
        form: AnswerForm | None = None,
    ):
        """Take the temperature with which tokens are drawn, the use of rho, the KL term, and
        `Options`' next three.
        """
        super().__init__()
        self.form = form
        self.temperature = temperature
        self.ratio = ratio
        self.kl = kl
        self.advantage = advantage
        self.updates = updates
        self.register_buffer("totals", torch.zeros(6, dtype=torch.float64))

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sum and count; see the class."""
        kept_N = batch["targets"].flatten() != IGNORE
        log_N = self.log_probabilities(model, batch)
        drawn_N = batch["drawn"].flatten()
        factors_N = batch["factors"].flatten().to(log_N.dtype)
        apart_N = torch.where(kept_N, log_N - drawn_N.to(log_N.dtype), 0.0)
        rho_N = (
            self._of_answers(apart_N, kept_N, batch) if self.ratio.kind == "sequence" else apart_N
        ).exp()
        gained_N, clipped_N = self._gained(log_N, rho_N, factors_N)
        terms_N = gained_N
        far_N = torch.zeros_like(log_N)
        if "reference" in batch:
            # Elsewhere the difference is of nothing, and its exponential could overflow to a
            # gradient of NaN.
            far_N = torch.where(kept_N, log_N - batch["reference"].flatten().to(log_N.dtype), 0.0)
        if self.kl is not None and self.kl.estimator != "k1":  # which is in the rewards
            near_N = (
                torch.expm1(-far_N) + far_N if self.kl.estimator == "k3" else far_N.square() / 2
            )
            terms_N = gained_N - batch["penalties"].flatten().to(log_N.dtype) * near_N
        with torch.no_grad():
            exact_N = torch.where(kept_N, (log_N - drawn_N).abs(), 0.0).double()
            total, largest, number, *sums = self.totals.unbind()
            more = [
                torch.where(kept_N, each, 0.0).double().sum() for each in (rho_N, clipped_N, far_N)
            ]
            now = (
                total + exact_N.sum(),
                torch.maximum(largest, exact_N.amax()),
                number + kept_N.sum(),
            )
            self.totals.copy_(
                torch.stack([*now, *(old + new for old, new in zip(sums, more, strict=True))])
            )
        return -torch.where(kept_N, terms_N, 0.0).sum(), self.count(batch)

    def log_probabilities(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the log-probability of each target, [N], and of token 0 where there is no target."""
        states = batch.get("states")
        among = (self.form.allowed, states.flatten()) if self.form and states is not None else None
        return target_log_probabilities(model, batch, self.temperature, among)

    def _gained(self, log_N: Tensor, rho_N: Tensor, factors_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return each position's part of what is maximised, and whether its ratio is clipped."""
        kind, low, high = self.ratio
        if kind == "none":
            return log_N * factors_N, torch.zeros_like(log_N)
        if kind == "truncate":
            return rho_N.detach().clamp_max(high) * log_N * factors_N, rho_N > high
        within_N = rho_N.clamp(1 - low, 1 + high)
        return torch.minimum(rho_N * factors_N, within_N * factors_N), (
            rho_N - within_N
        ) * factors_N > 0

    def _of_answers(self, values_N: Tensor, kept_N: Tensor, batch: Batch) -> Tensor:
        """Return at each position the mean of the values over the targets of its answer."""
        rows, length = batch["targets"].shape
        segments = batch["segments"] if "segments" in batch else torch.zeros_like(batch["targets"])
        # An answer has at most as many places as a row has positions.
        place_N = (
            torch.arange(rows, device=values_N.device)[:, None] * (length + 1) + segments
        ).flatten()
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
            drawn_minus_scored, drawn_minus_scored_max; ratio: mean rho; clipped: share of targets;
            kl: nats a token.
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
