"""Learn from preferences: pairs of answers, or single answers that are labelled good or bad.

Most losses compare with a reference, the weights that the run begins from: the log-probabilities of
all answers under them are computed once, before the first update, by the step's own evaluation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from monograph.config import Settings
from monograph.config.keys import PREFERENCES_WAY, PreferSection
from monograph.data.corpus import Corpus
from monograph.data.forms import RecordSettings
from monograph.errors import InputRefused
from monograph.evaluation import Evaluation
from monograph.graph.trial import Trial
from monograph.model.llama import Llama
from monograph.planner import defaults
from monograph.predict.footprint import Judged
from monograph.report.quantities import counted
from monograph.rl.pairs import PairRows, loss_for, read_pairs
from monograph.rl.preference_loss import PreferenceLoss
from monograph.rl.preferences import Preference, preference
from monograph.run.progress import Progress
from monograph.session.choices import FP8, OF_CODE, STREAMED, Condition
from monograph.session.objective import HeldOutScore, Objective, Opened, RunWindows, held_out_said
from monograph.session.objectives.texts import RowsTask
from monograph.session.plan import RunPlan
from monograph.session.reference import read_reference, write_reference


def preference_of(settings: Settings) -> Preference:
    """Return the loss that the settings name, with its parameters.

    Raises:
        UsageError: a parameter is out of range, or of another loss.
    """
    given = settings.section(PreferSection).model_dump()
    return preference(given.pop("loss"), **given)


@dataclass(frozen=True)
class Preferences(Objective):
    """Learn from preferences.

    Attributes:
        preference: the loss, once the settings are read.
    """

    way = PREFERENCES_WAY
    by_records = True
    needs_model = True
    is_of_texts = False
    rate_share = defaults.JUDGED_SHARE
    excluded = (
        (OF_CODE, "a program says no tokenizer: name a run or a folder"),
        (STREAMED, "it is not built for streaming: leave it out"),
        (FP8, "it was not tried: take bf16"),
        (
            Condition("train.tokens", lambda made: made.tokens is not None),
            "pairs are counted, not tokens: give updates, epochs or minutes",
        ),
        (
            Condition("data.packing = padded", lambda made: made.packing == "padded"),
            "the two answers of a pair share a row: leave it out",
        ),
    )

    preference: Preference | None = None

    def records(self, settings: Settings) -> str:
        """Return what its records are."""
        return "labelled answers" if preference_of(settings).labelled else "pairs of answers"

    def of_records(
        self, source: str | Sequence[str], asked: RecordSettings, skip_bad: bool
    ) -> str | None:
        """Return the usual loss for records that are judged answers; None for others."""
        return loss_for(source, asked, skip_bad)

    def learns_alike(self, one: str | None, other: str | None) -> bool:
        """Return whether both losses learn from records of the same kind, pairs or labelled
        answers.
        """
        return (
            None not in (one, other)
            and len({preference(loss).labelled for loss in (one, other) if loss}) == 1
        )

    def unused(self, origin: str, key: str, written: str) -> str:
        """Return the refusal of a parameter without a loss; see `Objective.unused`."""
        return f"{origin}: {key} = {written} is of preferences: give prefer.loss, too, such as dpo"

    def opened(self, settings: Settings, length: int) -> Opened:
        """Return this objective with the loss that the settings name, and the parameters that the
        loss has.
        """
        chosen = preference_of(settings)
        return Opened(
            Preferences(chosen),
            {f"prefer.{name}": value for name, value in chosen.parameters.items()},
        )

    def judged(self, plan: RunPlan) -> Judged:
        """Return that answers stand in rows."""
        return "rows"

    def open(self, plan: RunPlan, progress: Progress) -> "PreferenceTask":
        """Read the run's pairs, and print how many there are."""
        chosen = self.preference
        assert chosen is not None
        reading = plan.job.reading
        with progress.stage("pairs", str(reading.source)) as stage:
            pairs = read_pairs(reading, labelled=chosen.labelled, progress=stage.report)
            held = held_out_said(pairs.held_out.documents, reading.held_out)
            skipped = sum(pairs.skipped.values())
            left_out = f", {counted(skipped, 'bad record')} skipped" if skipped else ""
            stage.result = (
                f"{counted(pairs.train.documents, 'answer' if chosen.labelled else 'pair')}, rows "
                f"{pairs.stats.packed_share:.1%} full, {held}{left_out}"
            )
        for line in pairs.notes:
            progress.line("note", line)
        return PreferenceTask(pairs, chosen)


class PreferenceTask(RowsTask):
    """The task of `Preferences`."""

    score = "accuracy", "eval_accuracy"

    def __init__(self, data: Corpus, chosen: Preference):
        """Take the pairs and the loss."""
        super().__init__(data)
        self.preference = chosen

    def loss(self, plan: RunPlan, model: nn.Module) -> PreferenceLoss:
        """Return the loss.

        Raises:
            InputRefused: the module gives no probabilities of tokens.
        """
        if not isinstance(model, Llama):
            raise InputRefused(
                f"model.init = {plan.job.recipe.init}: prefer.loss needs a language model, not a {type(model).__name__}"
            )
        train, held = self.data.train, self.data.held_out
        assert isinstance(train, PairRows) and isinstance(held, PairRows)
        loss = PreferenceLoss(
            self.preference, train.answers + held.answers, max(train.most, held.most)
        )
        loss.labels[1:] = torch.from_numpy(np.concatenate([train.labels, held.labels]))
        return loss

    @property
    def is_chat(self) -> bool:
        """Return whether the pairs are of chats."""
        rows = self.data.held_out if len(self.data.held_out) else self.data.train
        assert isinstance(rows, PairRows)
        return rows.chats

    @property
    def _loss(self) -> PreferenceLoss:
        loss = self.engine.step.loss
        assert isinstance(loss, PreferenceLoss)
        return loss

    def score_reference(self, resumed: bool, rows_per_window: int, progress: Progress) -> None:
        """Score all answers by the first weights; see `Task.score_reference`."""
        if not self.preference.needs_reference:
            return
        loss = self._loss
        tensors = {"log_probabilities": loss.reference}
        if resumed:
            read_reference(self.run, self.data.fingerprint, tensors)
            return
        with progress.stage("reference", "log-probabilities under the initial weights") as stage:
            sides = self.data.train, self.data.held_out
            loss.remember(sides, self.engine.evaluate, rows_per_window, stage.report)
            # Each answer is scored by one rank.
            loss.reference.copy_(self.world.sum(loss.reference))
            stage.result = f"of {counted(len(loss.reference) - 1, 'answer')}"
        write_reference(self.run, self.data.fingerprint, tensors, self.world)

    def trial_result(self, trial: Trial) -> str:
        """Return that there are gradients; the loss has no reference yet."""
        return "answers compared, gradients finite"

    def figures(self, windows: RunWindows) -> dict[str, Any]:
        """Return how well the answers of the last update are told apart."""
        figures = self._loss.take_figures(self.world.gathered)
        self.answer_tokens += int(figures["answer_tokens"])
        return {**figures, "tokens": self.answer_tokens}

    def evaluate(self, rows_per_window: int, limit: int | None) -> HeldOutScore | None:
        """Return how well held-out answers are told apart, with their loss."""
        scored = self.scored(rows_per_window, limit)
        if scored is None:
            return None
        found, rows = scored
        compared = self._loss.take_figures(self.world.gathered)
        figures = {"eval_loss": found.loss, "eval_bits_per_byte": found.bits_per_byte}
        figures |= {f"eval_{name}": compared[name] for name in ("accuracy", "margin")}
        return HeldOutScore(
            self.answer_tokens, {**figures, "eval_rows": rows}, compared["accuracy"], found
        )

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return how well answers were told apart in the end."""
        labelled = {"labelled": True} if self.preference.labelled else {}
        compared = [row for row in rows if "accuracy" in row]
        if not compared:
            return labelled
        held: Mapping[str, Any] = next(
            (row for row in reversed(rows) if "eval_accuracy" in row), {}
        )
        last = {key: compared[-1][key] for key in ("tokens", "accuracy", "margin")}
        return {**last, "eval_accuracy": held.get("eval_accuracy"), **labelled}

    def standing(
        self,
        rows: Sequence[Mapping[str, Any]],
        held_out: Evaluation | None,
        yardsticks: Mapping[str, float],
    ) -> str:
        """Return how well held-out answers are told apart."""
        if not held_out:
            return ""
        share = self.summary(rows)["eval_accuracy"]
        if self.preference.labelled:
            return f"   agrees with the labels of {share:.1%} of the held-out answers"
        return f"   prefers the chosen answer in {share:.1%} of the held-out pairs"


OBJECTIVE = Preferences()
