"""The loss of pairs of answers, in the form of `monograph.loss`: sums over the rows of a batch.

The equations of each loss are in `monograph.rl.preferences`, with the meaning of h, z and o'. The
*reference* is the log-probability of each answer by the weights that the run begins from.

Shapes: B rows, T positions, N = B T, S places for answers in a batch, P = S / 2 pairs, A answers of
all rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from monograph.data.progress import Meter, ProgressCallback
from monograph.data.rows import Rows
from monograph.errors import UsageError
from monograph.loss import IGNORE, Batch, target_log_probabilities
from monograph.rl.preferences import Preference, PreferenceInputs, losses


class PreferenceTotals(NamedTuple):
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
        sides: the rows to train on and the held-out rows, if this loss has to compute the reference
            itself, just before the first update. Empty if the caller computes it by `remember`, or if
            the loss needs no reference.
        known: 0-d bool, whether the reference of `sides` has been computed.
        reference: [A + 1] fp64, the reference's log-probability of each answer, by its number.
        recording: 0-d bool, whether `forward` writes its log-probabilities into `reference`.
        labels: [A + 1] int64, each answer's label, by its number.
        apart: [2] fp64, for kto: the sum of h(o') and the number of the o', over the rows that were
            scored since the present update began. z is computed from them.
        expected: 0-d fp64, for kto: z during an update, else 0.
        totals: [6] fp64, `PreferenceTotals` over all pairs since `take_figures` was last called.
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

    def __init__(self, preference: Preference, answers: int, max_row_answers: int):
        """Allocate the buffers.

        Args:
            preference: the loss and its parameters.
            answers: A, the largest number of an answer.
            max_row_answers: the maximum number of answers of a row, even.
        """
        super().__init__()
        self.preference = preference
        self.max_row_answers = max_row_answers
        self.sides: Sequence[Rows] = ()
        self.register_buffer("reference", torch.zeros(answers + 1, dtype=torch.float64))
        self.register_buffer("known", torch.zeros((), dtype=torch.bool))
        self.register_buffer("recording", torch.zeros((), dtype=torch.bool))
        self.register_buffer("labels", torch.zeros(answers + 1, dtype=torch.int64))
        self.register_buffer("apart", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("expected", torch.zeros((), dtype=torch.float64))
        self.register_buffer(
            "totals", torch.zeros(len(PreferenceTotals._fields), dtype=torch.float64)
        )

    def remember(
        self,
        sides: Sequence[Rows],
        score: Callable[[Batch], object],
        rows: int,
        progress: ProgressCallback | None,
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
                for batch in side.batches_in_order(rows):
                    score(batch)
                    meter.add(min(rows, len(side) - meter.done))
        finally:
            self.recording.fill_(False)
            # The figures of this pass are dropped: the weights were compared with themselves.
            self.totals.zero_()

    @contextmanager
    def update_of(
        self,
        index: int,
        batches: Sequence[Batch],
        score: Callable[[Sequence[Batch]], object],
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> Iterator[None]:
        """Prepare for a block that computes the gradient of an update; see `monograph.loss`.

        If the reference is not known yet, it is computed. For kto, z is computed, too.

        Raises:
            UsageError: the reference is unknown after the first update.
        """
        # When a step is captured, it runs trial updates with the index 0, and then restores the buffers.
        # So the reference may be computed more than once.
        if self.sides and not self.known.all():
            if index:
                raise UsageError(
                    "the weights have changed since the run began, and the loss does not know what they were: keep "
                    "loss.state_dict() beside a run's checkpoints, and load it before you go on"
                )
            device = self.reference.device
            # A batch is [B, T], or [N, B, T] if each of N members of an ensemble has its own rows. In
            # the latter case, each row of `sides` is scored by all members.
            *members, rows, _ = batches[0]["tokens"].shape

            def score_on_device(batch: Batch) -> None:
                on_device = {
                    name: tensor.to(device).expand(*members, *tensor.shape)
                    for name, tensor in batch.items()
                }
                score([on_device])

            self.remember(self.sides, score_on_device, rows, None)
            self.known.fill_(True)
        if index:
            # Without `sides`, the test above does not read `known` in later updates. So the host does not
            # wait for the device.
            self.sides = ()
        if self.preference.labelled:
            totals_before = self.totals.clone()
            self.apart.zero_()
            try:
                score(batches)
            finally:
                # This pass must not change the totals, since the update itself will add the same pairs.
                self.totals.copy_(totals_before)
            gain_sum, count = (sum_over_ranks(value) for value in self.apart.clone().unbind(-1))
            self.expected.copy_((gain_sum / count.clamp_min(1)).clamp_min(0))
        try:
            yield
        finally:
            self.expected.zero_()

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sum and count; see the class."""
        log_N = target_log_probabilities(model, batch)
        has_target_N = batch["targets"].flatten() != IGNORE
        rows = len(batch["tokens"])
        # Sums over the tokens of each answer are collected in S places, `max_row_answers` for each row.
        # An answer's place follows from its segment. Padding has the first place too, but adds only zeros.
        first_B = torch.arange(rows, device=log_N.device)[:, None] * self.max_row_answers
        place_N = (first_B + (batch["segments"] - 1).clamp_min(0)).flatten()
        zeros_S = torch.zeros(rows * self.max_row_answers, dtype=torch.float64, device=log_N.device)
        log_S = zeros_S.index_add(0, place_N, torch.where(has_target_N, log_N.double(), 0.0))
        tokens_S = zeros_S.index_add(0, place_N, has_target_N.double())
        number_S = zeros_S.long().index_add(0, place_N, batch["answers"].flatten())
        reference_S = self.reference[number_S]
        # If `recording` is set, this writes the log-probabilities into the reference. Otherwise it writes
        # back the values that it has read.
        self.reference.index_put_(
            (number_S,), torch.where(self.recording, log_S.detach(), reference_S)
        )
        exists_P = number_S[::2] > 0
        # The even places of a row have chosen answers, and the odd ones the rejected answers.
        pairs = PreferenceInputs(
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

    def _add_to_totals(self, pairs: PreferenceInputs, exists_P: Tensor) -> None:
        """Add the sums over the pairs of a micro-batch to `totals`, and for kto to `apart`.

        Args:
            pairs: a pair for each two places.
            exists_P: whether there is a pair in these places.
        """
        gains = pairs.gains if self.preference.needs_reference else pairs.means
        chosen_P, rejected_P = (gain_P.detach() for gain_P in gains)
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
        # 1 if ahead, 0 if behind, and 1/2 for a margin of 0, which all pairs have before the first update.
        ahead_P = (margin_P.sign() + 1) / 2
        pair_values = PreferenceTotals(
            pairs=torch.ones_like(margin_P),
            ahead=ahead_P,
            margin=margin_P,
            chosen_gain=torch.where(counts_as_chosen_P, chosen_P, 0.0),
            tokens=tokens_P,
            chosen=counts_as_chosen_P.double(),
        )
        sums = [torch.where(exists_P, value_P, 0.0).sum() for value_P in pair_values]
        self.totals.add_(torch.stack(sums))

    def count(self, batch: Batch) -> Tensor:
        """Return the number of pairs, 0-d int64."""
        return (batch["answers"] > 0).sum() // 2

    def take_figures(
        self, gathered: Callable[[Any], list[Any]] = lambda own: [own]
    ) -> dict[str, float]:
        """Set `totals` to zero, and return figures on all pairs since the last call.

        Args:
            gathered: a function of this process's values, which returns a list with the values of each
                rank (a process of distributed training).

        Returns:
            accuracy: the share of pairs with the chosen answer ahead.
            margin: the mean margin.
            chosen_gain: the mean gain of the chosen answers.
            answer_tokens: the number of tokens of all answers.
        """
        totals = PreferenceTotals(*map(sum, zip(*gathered(self.totals.tolist()), strict=True)))
        self.totals.zero_()
        pairs = max(1.0, totals.pairs)
        return {
            "accuracy": totals.ahead / pairs,
            "margin": totals.margin / pairs,
            "chosen_gain": totals.chosen_gain / max(1.0, totals.chosen),
            "answer_tokens": totals.tokens,
        }
