"""The losses of preferences: each compares the log-probabilities of two answers to one prompt.

log pi(o) is the sum of the log-probabilities of the tokens of an answer o, |o| is their number, and
h(o) = log pi(o) - log ref(o), where ref are the weights that a run begins from. w is the chosen
answer and l the rejected one:

| name   | loss of a pair                                                            | arXiv      |
|--------|---------------------------------------------------------------------------|------------|
| dpo    | -log sigmoid(B (h(w) - h(l)))                                             | 2305.18290 |
| robust | (-(1-E) log sigmoid(x) + E log sigmoid(-x)) / (1-2E), x = B (h(w) - h(l)) | 2403.00409 |
| ipo    | (h(w) / |w| - h(l) / |l| - 1 / (2 B))^2                                   | 2310.12036 |
| simpo  | -log sigmoid(B (log pi(w) / |w| - log pi(l) / |l|) - G)                   | 2405.14734 |
| orpo   | -log pi(w) / |w| - B log sigmoid(odds(w) - odds(l)), where                | 2403.07691 |
|        | odds(o) = m - log(1 - e^m), m = log pi(o) / |o|                           |            |
| kto    | D sigmoid(B (z - h(o))) of a good answer o, U sigmoid(B (h(o) - z)) of    | 2402.01306 |
|        | a bad one, where z = max(0, mean of h(o')), a constant                    |            |

B is beta, E label_smoothing, G gamma, D desirable_weight and U undesirable_weight.

An update's loss is the mean over its pairs, or over its answers for kto. IPO takes means over
tokens, as its authors' code does. For kto, each o' is a prompt of the update with the answer of
another record. The mean over all o' is of the whole update, whatever its micro-batches, so the rows
of an update are scored once before the gradient is computed.

Shapes: B rows, T positions, N = B T, S places for answers, P = S / 2 pairs, A answers of all rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from monograph.data.progress import Meter, Progress
from monograph.data.rows import Rows
from monograph.errors import UsageError
from monograph.loss import IGNORE, Batch, target_log_probabilities

_MAX_PARAMETER = 1e9


class Preference(NamedTuple):
    """The choice of a loss.

    Attributes:
        name: a name of `LOSSES`.
        parameters: the values of all its parameters.
    """

    name: str
    parameters: dict[str, float]

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss reads log ref."""
        return LOSSES[self.name].needs_reference

    @property
    def labelled(self) -> bool:
        """Return whether the loss learns from single answers, each labelled good or bad."""
        return LOSSES[self.name].labelled


def preference(name: str, **given: float | None) -> Preference:
    """Return a loss of preferences.

    Args:
        name: a name of `LOSSES`.
        given: values of its parameters; None, or a missing one: the default.

    Raises:
        UsageError: there is no such loss, it has no such parameter, or a value is out of range.
    """
    if name not in LOSSES:
        raise UsageError(f"prefer.loss = {name}: expected {', '.join(LOSSES)}")
    defaults = LOSSES[name].defaults
    chosen = {parameter: value for parameter, value in given.items() if value is not None}
    for parameter, value in chosen.items():
        if parameter not in defaults:
            raise UsageError(
                f"prefer.{parameter} does not go with prefer.loss = {name}, which has {', '.join(defaults)}"
            )
        if not 0 <= value < _MAX_PARAMETER:
            raise UsageError(f"prefer.{parameter} = {value}: expected a number from 0")
    parameters = defaults | chosen
    if parameters["beta"] == 0:
        raise UsageError("prefer.beta = 0: expected a number above 0")
    if parameters.get("label_smoothing", 0) >= 0.5:
        raise UsageError(
            f"prefer.label_smoothing = {parameters['label_smoothing']}: expected a share below 0.5"
        )
    return Preference(name, parameters)


class Answers(NamedTuple):
    """What a loss reads of P pairs, fp64 [P] each except `labels` and `expected`.

    Attributes:
        chosen, rejected: log pi of the answers.
        chosen_reference, rejected_reference: log ref of the answers.
        chosen_tokens, rejected_tokens: the numbers of tokens, at least 1.
        labels: int64 [P]; for kto 1 if the chosen answer is good and -1 if it is bad, else 0. The
            rejected answer is then o'.
        expected: 0-d, z of kto.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_reference: Tensor
    rejected_reference: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    labels: Tensor
    expected: Tensor

    @property
    def gains(self) -> tuple[Tensor, Tensor]:
        """Return h of the chosen and of the rejected answers."""
        return self.chosen - self.chosen_reference, self.rejected - self.rejected_reference

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Return the mean log-probability of a token of the chosen and of the rejected answers."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


def _dpo(pairs: Answers, *, beta: float) -> Tensor:
    chosen, rejected = pairs.gains
    return -logsigmoid(beta * (chosen - rejected))


def _robust(pairs: Answers, *, beta: float, label_smoothing: float) -> Tensor:
    chosen, rejected = pairs.gains
    margin = beta * (chosen - rejected)
    right = 1 - label_smoothing
    return (label_smoothing * logsigmoid(-margin) - right * logsigmoid(margin)) / (
        1 - 2 * label_smoothing
    )


def _ipo(pairs: Answers, *, beta: float) -> Tensor:
    chosen, rejected = pairs.gains
    difference = chosen / pairs.chosen_tokens - rejected / pairs.rejected_tokens
    return (difference - 1 / (2 * beta)).square()


def _simpo(pairs: Answers, *, beta: float, gamma: float) -> Tensor:
    chosen, rejected = pairs.means
    return -logsigmoid(beta * (chosen - rejected) - gamma)


def _orpo(pairs: Answers, *, beta: float) -> Tensor:
    # log(1 - e^m) of a mean m that rounds to 0 would be -inf.
    chosen, rejected = (mean.clamp_max(-1e-12) for mean in pairs.means)
    chosen_odds = chosen - torch.log(-torch.expm1(chosen))
    rejected_odds = rejected - torch.log(-torch.expm1(rejected))
    return -chosen - beta * logsigmoid(chosen_odds - rejected_odds)


def _kto(
    pairs: Answers, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    gain, _ = pairs.gains
    loss = torch.sigmoid(pairs.labels * (pairs.expected - gain) * beta)
    return torch.where(pairs.labels > 0, desirable_weight * loss, undesirable_weight * loss)


@dataclass(frozen=True)
class LossOfPairs:
    """A loss of preferences.

    Attributes:
        formula: returns the loss of each of P pairs, [P], from the pairs and the parameters.
        defaults: its parameters, which are keys of [prefer], with their default values.
        needs_reference: whether it reads log ref.
        labelled: whether it learns from single answers, each labelled good or bad.
    """

    formula: Callable[..., Tensor]
    defaults: dict[str, float]
    needs_reference: bool = True
    labelled: bool = False


# The names that the key prefer.loss takes.
LOSSES = {
    "dpo": LossOfPairs(_dpo, {"beta": 0.1}),
    "robust": LossOfPairs(_robust, {"beta": 0.1, "label_smoothing": 0.1}),
    "ipo": LossOfPairs(_ipo, {"beta": 0.1}),
    "simpo": LossOfPairs(_simpo, {"beta": 2.0, "gamma": 1.0}, needs_reference=False),
    "orpo": LossOfPairs(_orpo, {"beta": 0.1}, needs_reference=False),
    "kto": LossOfPairs(
        _kto, {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}, labelled=True
    ),
}


def losses(preference: Preference, pairs: Answers) -> Tensor:
    """Return the loss of each pair, [P]; see the module."""
    return LOSSES[preference.name].formula(pairs, **preference.parameters)


class Totals(NamedTuple):
    """Sums over pairs, in the order of `PreferenceLoss.totals`: 0-d fp64 tensors, or floats.

    The gain of an answer is h, or its mean log-probability for a loss without a reference. The
    margin of a pair is the gain of the chosen answer minus that of the rejected one. With labels
    there is one answer instead of a pair: a good answer counts as chosen, and the margin is the
    answer's label times its gain.

    Attributes:
        pairs: the number of pairs.
        ahead: the number of pairs with a margin above 0, and half of those with the margin 0.
        margin: the sum of the margins.
        chosen_gain: the sum of the gains of the chosen answers.
        tokens: the number of tokens of all answers.
        chosen: the number of chosen answers.
    """

    pairs: Any
    ahead: Any
    margin: Any
    chosen_gain: Any
    tokens: Any
    chosen: Any


class PreferenceLoss(nn.Module):
    """The loss of pairs of answers, for a model as `TokenLoss` takes it.

        sum = sum over pairs of `losses`
        count = number of pairs, or of single answers

    The batch holds, int64 [B, T] each:
        tokens, targets, positions.
        segments: the chosen answer of a pair has an odd number, and the rejected one the next.
        answers: an answer's number, from 1, at its first target; 0 elsewhere.

    Attributes:
        sides: all rows with answers, if the weights of the first update shall be the reference;
            empty if the caller calls `remember`.
        known: 0-d bool, whether the reference of `sides` is known.
        reference: [A + 1] fp64, the reference's log-probability of each answer, by its number.
        recording: 0-d bool, whether `forward` writes its log-probabilities into `reference`.
        labels: [A + 1] int64, each answer's label, by its number.
        apart: [2] fp64, of the present update: the sum of h(o') and the number of o'.
        expected: 0-d fp64, z during an update, else 0.
        totals: [6] fp64, `Totals` over all pairs since `take_figures` was last called.
        fill: what pads each entry of a batch; 0 if it is not named.
    """

    reference: Tensor
    known: Tensor
    recording: Tensor
    labels: Tensor
    apart: Tensor
    expected: Tensor
    totals: Tensor
    fill: Mapping[str, float] = MappingProxyType({"targets": IGNORE})

    def __init__(self, preference: Preference, answers: int, most: int):
        """Take the loss.

        Args:
            preference: the loss and its parameters.
            answers: A, the largest number of an answer.
            most: the maximum number of answers of a row, even.
        """
        super().__init__()
        self.preference = preference
        self.most = most
        self.sides: Sequence[Rows] = ()
        self.register_buffer("reference", torch.zeros(answers + 1, dtype=torch.float64))
        self.register_buffer("known", torch.zeros((), dtype=torch.bool))
        self.register_buffer("recording", torch.zeros((), dtype=torch.bool))
        self.register_buffer("labels", torch.zeros(answers + 1, dtype=torch.int64))
        self.register_buffer("apart", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("expected", torch.zeros((), dtype=torch.float64))
        self.register_buffer("totals", torch.zeros(len(Totals._fields), dtype=torch.float64))

    def remember(
        self,
        sides: Sequence[Rows],
        score: Callable[[Batch], object],
        rows: int,
        progress: Progress | None,
    ) -> None:
        """Write the log-probabilities of the present weights into `reference`.

        Args:
            sides: all rows with answers.
            score: passes a batch through this loss, without gradients.
            rows: the number of rows that are scored at the same time.
            progress: called with ("row", rows done, all rows of a side).
        """
        self.recording.fill_(True)
        try:
            for side in sides:
                meter = Meter(progress, "row", len(side))
                for batch in side.in_order(rows):
                    score(batch)
                    meter.add(min(rows, len(side) - meter.done))
        finally:
            self.recording.fill_(False)
            # Weights that are compared with themselves have no useful figures.
            self.take_figures()

    @contextmanager
    def update_of(
        self,
        index: int,
        batches: Sequence[Batch],
        score: Callable[[Sequence[Batch]], object],
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> Iterator[None]:
        """Prepare the block, in which an update's gradient is computed; see `monograph.loss`.

        Raises:
            UsageError: the reference is unknown after the first update.
        """
        # Capturing a step runs updates of index 0 on trial and then restores the buffers, so the
        # reference may be computed more than once.
        if self.sides and not self.known:
            if index:
                raise UsageError(
                    "the weights have changed since the run began, and the loss does not know what they were: keep "
                    "loss.state_dict() beside a run's checkpoints, and load it before you go on"
                )
            device = self.reference.device

            def score_on_device(batch: Batch) -> None:
                score([{name: each.to(device) for name, each in batch.items()}])

            self.remember(self.sides, score_on_device, len(batches[0]["tokens"]), None)
            self.known.fill_(True)
        if index:
            # Without sides the host need not wait for the value of `known` in later updates.
            self.sides = ()
        if self.preference.labelled:
            totals = self.totals.clone()
            self.apart.zero_()
            try:
                score(batches)
            finally:
                # The update itself will count these pairs.
                self.totals.copy_(totals)
            total, number = (sum_over_ranks(each) for each in self.apart.clone().unbind())
            self.expected.copy_((total / number.clamp_min(1)).clamp_min(0))
        try:
            yield
        finally:
            self.expected.zero_()

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sum and count; see the class."""
        log_N = target_log_probabilities(model, batch)
        kept_N = batch["targets"].flatten() != IGNORE
        rows = len(batch["tokens"])
        # A row has `most` places for answers. Padding adds zeros to the first of them.
        first_B = torch.arange(rows, device=log_N.device)[:, None] * self.most
        place_N = (first_B + (batch["segments"] - 1).clamp_min(0)).flatten()
        zeros_S = torch.zeros(rows * self.most, dtype=torch.float64, device=log_N.device)
        log_S = zeros_S.index_add(0, place_N, torch.where(kept_N, log_N.double(), 0.0))
        tokens_S = zeros_S.index_add(0, place_N, kept_N.double())
        number_S = zeros_S.long().index_add(0, place_N, batch["answers"].flatten())
        reference_S = self.reference[number_S]
        self.reference.index_put_(
            (number_S,), torch.where(self.recording, log_S.detach(), reference_S)
        )
        exists_P = number_S[::2] > 0
        # The even places of a row have chosen answers, and the odd ones the rejected answers.
        pairs = Answers(
            chosen=log_S[::2],
            rejected=log_S[1::2],
            chosen_reference=reference_S[::2],
            rejected_reference=reference_S[1::2],
            chosen_tokens=tokens_S[::2].clamp_min(1),
            rejected_tokens=tokens_S[1::2].clamp_min(1),
            labels=self.labels[number_S[::2]],
            expected=self.expected,
        )
        self._add_to_totals(pairs, exists_P)
        return torch.where(exists_P, losses(self.preference, pairs), 0.0).sum(), self.count(batch)

    def _add_to_totals(self, pairs: Answers, exists_P: Tensor) -> None:
        gains = pairs.gains if self.preference.needs_reference else pairs.means
        chosen_P, rejected_P = (each.detach() for each in gains)
        margin_P = chosen_P - rejected_P
        tokens_P = pairs.chosen_tokens + pairs.rejected_tokens
        counts_as_chosen_P = exists_P
        if self.preference.labelled:
            self.apart.add_(
                torch.stack([torch.where(exists_P, rejected_P, 0.0).sum(), exists_P.double().sum()])
            )
            margin_P = pairs.labels * chosen_P
            tokens_P = pairs.chosen_tokens
            counts_as_chosen_P = pairs.labels > 0
        # 1 if ahead, 0 if behind, and half for a margin of 0, which all pairs have at first.
        ahead_P = (margin_P.sign() + 1) / 2
        of_pairs = Totals(
            pairs=torch.ones_like(margin_P),
            ahead=ahead_P,
            margin=margin_P,
            chosen_gain=torch.where(counts_as_chosen_P, chosen_P, 0.0),
            tokens=tokens_P,
            chosen=counts_as_chosen_P.double(),
        )
        sums = [torch.where(exists_P, each_P, 0.0).sum() for each_P in of_pairs]
        self.totals.add_(torch.stack(sums))

    def count(self, batch: Batch) -> Tensor:
        """Return the number of pairs, 0-d int64."""
        return (batch["answers"] > 0).sum() // 2

    def take_figures(
        self, gathered: Callable[[Any], list[Any]] = lambda own: [own]
    ) -> dict[str, float]:
        """Set `totals` to zero, and return figures on all pairs since the last call.

        Args:
            gathered: returns the values of all ranks.

        Returns:
            accuracy: the share of pairs with the chosen answer ahead.
            margin: the mean margin.
            chosen_gain: the mean gain of the chosen answers.
            answer_tokens: the number of tokens of all answers.
        """
        totals = Totals(*map(sum, zip(*gathered(self.totals.tolist()), strict=True)))
        self.totals.zero_()
        pairs = max(1.0, totals.pairs)
        return {
            "accuracy": totals.ahead / pairs,
            "margin": totals.margin / pairs,
            "chosen_gain": totals.chosen_gain / max(1.0, totals.chosen),
            "answer_tokens": totals.tokens,
        }
