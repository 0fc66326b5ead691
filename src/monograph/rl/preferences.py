"""The losses of preferences: each compares the log-probabilities of two answers to one prompt.

With log pi(o), the sum of the log-probabilities of an answer's tokens, |o|, their number, and h(o) = log pi(o) -
log ref(o), where ref are the weights that a run begins from; w is the chosen answer and l the
rejected one:

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

An update's loss is the mean over its pairs, or answers. IPO takes means over tokens, as its
authors' code does. KTO's o' are answers of other records written after the prompts of an update's
answers; their mean is over the whole update, however it is cut into micro-batches, so each update's
rows are scored once before they are learned from.

Shapes: B rows, T positions, N = B T, S places for answers, P pairs.
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

_LARGEST = 1e9


class Preference(NamedTuple):
    """A loss by its name, with its parameters."""

    name: str
    parameters: dict[str, float]

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss compares with the weights that the run began from."""
        return LOSSES[self.name].compares

    @property
    def labelled(self) -> bool:
        """Return whether the loss learns from single answers, each labelled good or bad."""
        return LOSSES[self.name].labelled


def preference(name: str, **given: float | None) -> Preference:
    """Return a loss of preferences.

    Args:
        name: a name of `LOSSES`.
        given: values of its parameters; None, or nothing: the usual value.

    Raises:
        UsageError: there is no such loss, it lacks a parameter, or a number is out of range.
    """
    if name not in LOSSES:
        raise UsageError(f"prefer.loss = {name}: expected {', '.join(LOSSES)}")
    usual = LOSSES[name].usual
    numbers = {parameter: value for parameter, value in given.items() if value is not None}
    for parameter, value in numbers.items():
        if parameter not in usual:
            raise UsageError(
                f"prefer.{parameter} does not go with prefer.loss = {name}, which has {', '.join(usual)}"
            )
        if not 0 <= value < _LARGEST:
            raise UsageError(f"prefer.{parameter} = {value}: expected a number from 0")
    parameters = usual | numbers
    if parameters["beta"] == 0:
        raise UsageError("prefer.beta = 0: expected a number above 0")
    if parameters.get("label_smoothing", 0) >= 0.5:
        raise UsageError(
            f"prefer.label_smoothing = {parameters['label_smoothing']}: expected a share below 0.5"
        )
    return Preference(name, parameters)


class Answers(NamedTuple):
    """Pairs of answers, [P] each: sums of log-probabilities, the reference's, numbers of tokens,
    and labels.

    With labels, the chosen answers are the single ones and `expected` is z, 0-d.
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
    return (
        chosen / pairs.chosen_tokens - rejected / pairs.rejected_tokens - 1 / (2 * beta)
    ).square()


def _simpo(pairs: Answers, *, beta: float, gamma: float) -> Tensor:
    chosen, rejected = pairs.means
    return -logsigmoid(beta * (chosen - rejected) - gamma)


def _orpo(pairs: Answers, *, beta: float) -> Tensor:
    # log(1 - e^m) of a mean m that rounds to 0 would be -inf.
    chosen, rejected = (mean.clamp_max(-1e-12) for mean in pairs.means)
    odds = (chosen - torch.log(-torch.expm1(chosen))) - (
        rejected - torch.log(-torch.expm1(rejected))
    )
    return -chosen - beta * logsigmoid(odds)


def _kto(
    pairs: Answers, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    gain, _ = pairs.gains
    lost = torch.sigmoid(pairs.labels * (pairs.expected - gain) * beta)
    return torch.where(pairs.labels > 0, desirable_weight * lost, undesirable_weight * lost)


@dataclass(frozen=True)
class LossOfPairs:
    """A loss of preferences.

    Attributes:
        formula: returns the loss of each of P pairs, [P], from the pairs and the parameters.
        usual: its parameters, keys of [prefer], with their usual values.
        compares: whether it compares with the weights that the run began from.
        labelled: whether it learns from single answers, each labelled good or bad.
    """

    formula: Callable[..., Tensor]
    usual: dict[str, float]
    compares: bool = True
    labelled: bool = False


# The names that the key prefer.loss takes.
LOSSES = {
    "dpo": LossOfPairs(_dpo, {"beta": 0.1}),
    "robust": LossOfPairs(_robust, {"beta": 0.1, "label_smoothing": 0.1}),
    "ipo": LossOfPairs(_ipo, {"beta": 0.1}),
    "simpo": LossOfPairs(_simpo, {"beta": 2.0, "gamma": 1.0}, compares=False),
    "orpo": LossOfPairs(_orpo, {"beta": 0.1}, compares=False),
    "kto": LossOfPairs(
        _kto, {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}, labelled=True
    ),
}


def losses(preference: Preference, pairs: Answers) -> Tensor:
    """Return the loss of each pair, [P]; see the module."""
    return LOSSES[preference.name].formula(pairs, **preference.parameters)


class PreferenceLoss(nn.Module):
    """The loss of pairs of answers, for a model as `TokenLoss` takes it.

    sum = sum over pairs of `losses`, count = number of pairs, or of single answers

    The batch holds, [B, T] int64 each: `tokens`, `targets`, `segments` and `positions`, where a
    chosen answer's segment is odd and its rejected one's the next; and `answers`, an answer's
    number, above 0, where its first target is.

    Attributes:
        sides: rows whose reference the weights of the first update are; empty if the caller calls
            `remember`.
        known: 0-d bool; whether that reference has been taken.
        reference: [A + 1] fp64, the reference's log-probability of each answer, by its number.
        recording: 0-d bool; whether the log-probabilities that are computed become those of the
            reference.
        labels: [A + 1] int64, each answer's label, by its number.
        apart: [2] fp64, the sum of h(o') since it was last set to zero, and the number of these
            answers.
        expected: 0-d fp64, z during an update, else 0.
        totals: [6] fp64, over all pairs since it was last set to zero: their number, how many have
            the chosen answer ahead (half of those that tie), the sums of the margins and of the
            chosen answers' gains, and the numbers of tokens and of chosen answers. An answer's gain
            is h, or its mean log-probability for a loss without a reference; a margin is the
            difference of two gains. With labels, good answers count as chosen, one is ahead if its
            gain has the sign of its label, and its margin is the product of the two.
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
            most: most answers of a row, even.
        """
        super().__init__()
        self.preference, self.most = preference, most
        self.sides: Sequence[Rows] = ()
        self.register_buffer("reference", torch.zeros(answers + 1, dtype=torch.float64))
        self.register_buffer("known", torch.zeros((), dtype=torch.bool))
        self.register_buffer("recording", torch.zeros((), dtype=torch.bool))
        self.register_buffer("labels", torch.zeros(answers + 1, dtype=torch.int64))
        self.register_buffer("apart", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("expected", torch.zeros((), dtype=torch.float64))
        self.register_buffer("totals", torch.zeros(6, dtype=torch.float64))

    def remember(
        self,
        sides: Sequence[Rows],
        score: Callable[[Batch], object],
        rows: int,
        progress: Progress | None,
    ) -> None:
        """Take the present weights as the reference.

        Args:
            sides: all rows with answers.
            score: passes a batch through this loss, without gradients.
            rows: rows that are scored at once.
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
            self.take_figures()  # figures of the weights on themselves say nothing

    @contextmanager
    def update_of(
        self,
        index: int,
        batches: Sequence[Batch],
        score: Callable[[Sequence[Batch]], object],
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> Iterator[None]:
        """In the block an update's gradient is computed; see `monograph.loss`.

        Raises:
            UsageError: the reference is unknown, though updates have been made.
        """
        # A capture rehearses updates at index 0, and puts the buffers back: then the reference is
        # taken again.
        if self.sides and not self.known:
            if index:
                raise UsageError(
                    "the weights have changed since the run began, and the loss does not know what they were: keep "
                    "loss.state_dict() beside a run's checkpoints, and load it before you go on"
                )
            device = self.reference.device
            self.remember(
                self.sides,
                lambda batch: score([{name: each.to(device) for name, each in batch.items()}]),
                len(batches[0]["tokens"]),
                None,
            )
            self.known.fill_(True)
        if index:
            self.sides = ()  # so that the host need not read `known` again
        if self.preference.labelled:
            figures = self.totals.clone()
            self.apart.zero_()
            try:
                score(batches)
            finally:
                self.totals.copy_(figures)  # these pairs will be counted again
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
        # A row has a place for each of its answers; padding adds zeros to the first of them.
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
        there_P = number_S[::2] > 0
        pairs = Answers(
            log_S[::2],
            log_S[1::2],
            reference_S[::2],
            reference_S[1::2],
            tokens_S[::2].clamp_min(1),
            tokens_S[1::2].clamp_min(1),
            self.labels[number_S[::2]],
            self.expected,
        )
        self._note(pairs, there_P)
        return torch.where(there_P, losses(self.preference, pairs), 0.0).sum(), self.count(batch)

    def _note(self, pairs: Answers, there_P: Tensor) -> None:
        gains = pairs.gains if self.preference.needs_reference else pairs.means
        chosen_P, rejected_P = (each.detach() for each in gains)
        margin_P = chosen_P - rejected_P
        tokens_P = pairs.chosen_tokens + pairs.rejected_tokens
        good_P = there_P
        if self.preference.labelled:
            self.apart.add_(
                torch.stack([torch.where(there_P, rejected_P, 0.0).sum(), there_P.double().sum()])
            )
            margin_P = pairs.labels * chosen_P
            tokens_P = pairs.chosen_tokens
            good_P = pairs.labels > 0
        ahead_P = (margin_P.sign() + 1) / 2  # a tie, as in the first update, is a half
        gain_P = torch.where(good_P, chosen_P, 0.0)
        now = (torch.ones_like(margin_P), ahead_P, margin_P, gain_P, tokens_P, good_P.double())
        self.totals.add_(torch.stack([torch.where(there_P, each, 0.0).sum() for each in now]))

    def count(self, batch: Batch) -> Tensor:
        """Return the number of pairs, 0-d int64."""
        return (batch["answers"] > 0).sum() // 2

    def take_figures(
        self, gathered: Callable[[Any], list[Any]] = lambda own: [own]
    ) -> dict[str, float]:
        """Return figures on all pairs since the last call: see `totals`.

        Args:
            gathered: returns the values of all ranks.

        Returns:
            accuracy: the share of pairs with the chosen answer ahead; margin and chosen_gain:
                means; answer_tokens.
        """
        number, ahead, margin, gain, tokens, good = map(
            sum, zip(*gathered(self.totals.tolist()), strict=True)
        )
        self.totals.zero_()
        pairs = max(1.0, number)
        return {
            "accuracy": ahead / pairs,
            "margin": margin / pairs,
            "chosen_gain": gain / max(1.0, good),
            "answer_tokens": tokens,
        }
