"""Learn from preferences: pairs of answers, or single answers that are labelled good or bad.

Most losses compare the model with a *reference*, the weights that the run begins from. The
reference's log-probabilities of all answers are computed once, before the first update.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from monograph.config import Settings
from monograph.config.keys import PREFERENCES_WAY, PreferSection
from monograph.data.corpus import Corpus
from monograph.data.forms import RecordSettings
from monograph.engine import Engine
from monograph.ensemble import Ensemble
from monograph.errors import InputRefused
from monograph.evaluation import Evaluation
from monograph.graph.shared_base import compute_alike
from monograph.graph.trial import Trial
from monograph.loss import Batch
from monograph.model.llama import Llama
from monograph.planner import defaults
from monograph.predict.footprint import AnswerScoring
from monograph.report.quantities import counted
from monograph.rl.pairs import PairRows, loss_for, read_pairs
from monograph.rl.preference_loss import PreferenceLoss
from monograph.rl.preferences import Preference, preference
from monograph.run.progress import Progress
from monograph.session.choices import FP8, MODEL_FROM_CODE, MTP, QUANTIZED, STREAMED, Condition
from monograph.session.objective import (
    CurveOfScores,
    DecidedObjective,
    HeldOutScore,
    Objective,
    RunWindows,
    held_out_text,
)
from monograph.session.objectives.texts import RowsTask
from monograph.session.plan import RunPlan
from monograph.session.reference import read_reference, write_reference


def preference_of(settings: Settings) -> Preference:
    """Return the loss that the settings name, with its parameters.

    Raises:
        UsageError: a parameter is out of range, or belongs to another loss.
    """
    parameters = settings.section(PreferSection).model_dump()
    loss = parameters.pop("loss")
    return preference(loss, **parameters)


@dataclass(frozen=True)
class Preferences(Objective):
    """Learn from preferences.

    Attributes:
        preference: the loss with its parameters; None until `decide` reads the settings.
    """

    way = PREFERENCES_WAY
    records_can_choose = True
    needs_model = True
    is_of_texts = False
    lr_share = defaults.JUDGED_SHARE
    sweeps = True
    # The members can then share the work of scoring all rows with the reference: see
    # `PreferenceTask.prepare_references`.
    members_have_own_rows = True
    excluded = (
        (MODEL_FROM_CODE, "such a model has no tokenizer: name a run or a folder"),
        (STREAMED, "it is not built for streaming: leave it out"),
        (FP8, "it was not tried: take bf16"),
        (QUANTIZED, "it was not tried: leave it out"),
        (MTP, "only texts train the head: leave it out"),
        (
            Condition("train.tokens", lambda choices: choices.tokens is not None),
            "pairs are counted, not tokens: give updates, epochs or minutes",
        ),
        (
            Condition("data.packing = padded", lambda choices: choices.packing == "padded"),
            "the two answers of a pair share a row: leave it out",
        ),
    )

    preference: Preference | None = None

    def records_noun(self, settings: Settings) -> str:
        """Return what messages call the records."""
        return "labelled answers" if preference_of(settings).labelled else "pairs of answers"

    def value_for_records(
        self, source: str | Sequence[str], record_settings: RecordSettings, skip_bad: bool
    ) -> str | None:
        """Return the default loss for pairs or labelled answers; None for other records."""
        return loss_for(source, record_settings, skip_bad)

    def needs_same_records(self, value: str | None, other: str | None) -> bool:
        """Return whether two losses both learn from pairs, or both from labelled answers."""
        if value is None or other is None:
            return False
        return preference(value).labelled == preference(other).labelled

    def unused_key_error(self, origin: str, key: str, written: str) -> str:
        """Return the error message for a key of [prefer] without prefer.loss."""
        return f"{origin}: {key} = {written} is of preferences: give prefer.loss, too, such as dpo"

    def decide(self, settings: Settings, length: int) -> DecidedObjective:
        """Return this way to learn with the loss that the settings name, and the values of the
        loss's parameters.
        """
        loss = preference_of(settings)
        parameters = {f"prefer.{name}": value for name, value in loss.parameters.items()}
        return DecidedObjective(Preferences(loss), parameters)

    def answer_scoring(self, plan: RunPlan) -> AnswerScoring:
        """Return "rows": answers are scored by the usual attention; see `Objective.answer_scoring`."""
        return "rows"

    def open(self, plan: RunPlan, progress: Progress) -> "PreferenceTask":
        """Read the run's pairs, and print how many there are."""
        preference = self.preference
        assert preference is not None
        reading = plan.job.reading
        with progress.stage("pairs", str(reading.source)) as stage:
            pairs = read_pairs(reading, labelled=preference.labelled, progress=stage.report)
            noun = "answer" if preference.labelled else "pair"
            held_out = held_out_text(pairs.held_out.documents, reading.held_out)
            bad_records = sum(pairs.skipped.values())
            skipped = f", {counted(bad_records, 'bad record')} skipped" if bad_records else ""
            stage.result = (
                f"{counted(pairs.train.documents, noun)}, rows {pairs.stats.packed_share:.1%} full, "
                f"{held_out}{skipped}"
            )
        for line in pairs.notes:
            progress.line("note", line)
        return PreferenceTask(pairs, preference)


class PreferenceTask(RowsTask):
    """The task of `Preferences`."""

    score = CurveOfScores("accuracy", "eval_accuracy")

    def __init__(self, data: Corpus, preference: Preference):
        """Take the pairs and the loss."""
        super().__init__(data)
        self.preference = preference

    def loss(self, plan: RunPlan, model: nn.Module) -> PreferenceLoss:
        """Return the loss.

        Raises:
            InputRefused: the module is not a language model.
        """
        if not isinstance(model, Llama):
            raise InputRefused(
                f"model.init = {plan.job.recipe.init}: prefer.loss needs a language model, not a {type(model).__name__}"
            )
        train = self.data.train
        held_out = self.data.held_out
        assert isinstance(train, PairRows) and isinstance(held_out, PairRows)
        answers = train.answers + held_out.answers
        max_row_answers = max(train.max_row_answers, held_out.max_row_answers)
        loss = PreferenceLoss(self.preference, answers, max_row_answers)
        # Answers are numbered from 1; 0 stands for no answer.
        loss.labels[1:] = torch.from_numpy(np.concatenate([train.labels, held_out.labels]))
        return loss

    @property
    def is_chat(self) -> bool:
        """Return whether the pairs are of chats."""
        rows = self.data.held_out if len(self.data.held_out) else self.data.train
        assert isinstance(rows, PairRows)
        return rows.has_chats

    @property
    def _loss(self) -> PreferenceLoss:
        return _preference_loss(self.engine.loss)

    def prepare_reference_scores(
        self, resumed: bool, rows_per_window: int, progress: Progress
    ) -> None:
        """Score all answers with the initial weights; see `Task.prepare_reference_scores`."""
        if not self.preference.needs_reference:
            return
        if resumed:
            self._read_reference()
            return
        self.score_reference(rows_per_window, progress)
        self._write_reference()

    def score_reference(self, rows_per_window: int, progress: Progress) -> None:
        """Score all answers with the present weights; see `Task.score_reference`."""
        if self.preference.needs_reference:
            self._score(self._loss, self.engine.evaluate, rows_per_window, progress)

    def prepare_references(
        self,
        members: Sequence[Self],
        engine: Engine,
        resumed: bool,
        rows_per_window: int,
        progress: Progress,
    ) -> None:
        """Score all answers with the initial weights; see `SweptTask.prepare_references`.

        At the start, the members usually compute the same function, because new adapters have no
        effect. Then the rows are divided among the members, so that each answer is scored once.
        """
        if not isinstance(engine, Ensemble):
            [member] = members
            member.prepare_reference_scores(resumed, rows_per_window, progress)
            return
        if not self.preference.needs_reference:
            return
        if resumed:
            for member in members:
                member._read_reference()
            return
        loss = _preference_loss(engine.step.loss)
        if compute_alike(engine.members):

            def score_shares(batch: Batch) -> None:
                # [rows, ...] becomes [members, rows of a member, ...].
                shares = {
                    name: tensor.unflatten(0, (engine.size, -1)) for name, tensor in batch.items()
                }
                engine.evaluate_each(shares)

            # [members, answers + 1]
            loss.reference.zero_()
            self._score(loss, score_shares, engine.size * rows_per_window, progress)
            # Each answer is scored by one member, and is 0 in the others.
            loss.reference.copy_(loss.reference.sum(0).expand_as(loss.reference))
        else:
            self._score(loss, engine.evaluate, rows_per_window, progress)
        for member in members:
            member._write_reference()

    def _score(
        self,
        loss: PreferenceLoss,
        score: Callable[[Batch], object],
        rows: int,
        progress: Progress,
    ) -> None:
        """Write the log-probabilities of all answers under the present weights into a loss.

        Args:
            loss: the loss, of one model or of all members.
            score: passes a batch through the loss, without gradients.
            rows: the number of rows that are scored at the same time.
            progress: the display.
        """
        with progress.stage("reference", "log-probabilities under the initial weights") as stage:
            loss.remember((self.data.train, self.data.held_out), score, rows, stage.report)
            # Each answer is scored by one rank, and is 0 on the others.
            loss.reference.copy_(self.world.sum(loss.reference))
            answers = loss.reference.shape[-1] - 1  # number 0 stands for no answer
            stage.result = f"of {counted(answers, 'answer')}"

    def _read_reference(self) -> None:
        read_reference(self.run, self.data.fingerprint, self._reference_tensors)

    def _write_reference(self) -> None:
        write_reference(self.run, self.data.fingerprint, self._reference_tensors, self.world)

    @property
    def _reference_tensors(self) -> dict[str, torch.Tensor]:
        return {"log_probabilities": self._loss.reference}

    def describe_trial(self, trial: Trial) -> str:
        """Return a text on the result of a trial step.

        It does not have the loss, which means nothing as long as the reference is not scored.
        """
        return "answers compared, gradients finite"

    def figures(self, windows: RunWindows) -> dict[str, Any]:
        """Return the accuracy, margin and more on the answers of the last update."""
        figures = self._loss.take_figures(self.world.all_gather)
        self.answer_tokens += int(figures["answer_tokens"])
        return {**figures, "tokens": self.answer_tokens}

    def held_out_score(self, evaluation: Evaluation, rows: int) -> HeldOutScore:
        """Return the loss, accuracy and margin on held-out answers."""
        figures = self._loss.take_figures(self.world.all_gather)
        entries = {
            "eval_loss": evaluation.loss,
            "eval_bits_per_byte": evaluation.bits_per_byte,
            "eval_accuracy": figures["accuracy"],
            "eval_margin": figures["margin"],
            "eval_rows": rows,
        }
        return HeldOutScore(self.answer_tokens, entries, figures["accuracy"], evaluation)

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the accuracy and margin of the last update, and the last held-out accuracy."""
        # This entry says that the figures are about labelled answers, not about pairs.
        labelled_entry = {"labelled": True} if self.preference.labelled else {}
        update_rows = [row for row in rows if "accuracy" in row]
        if not update_rows:
            return labelled_entry
        last = {key: update_rows[-1][key] for key in ("tokens", "accuracy", "margin")}
        evaluations = [row for row in rows if "eval_accuracy" in row]
        eval_accuracy = evaluations[-1]["eval_accuracy"] if evaluations else None
        return {**last, "eval_accuracy": eval_accuracy, **labelled_entry}

    def describe_result(
        self,
        rows: Sequence[Mapping[str, Any]],
        held_out: Evaluation | None,
        yardsticks: Mapping[str, float],
    ) -> str:
        """Return the share of held-out pairs or answers that the model judges as they are labelled."""
        if not held_out:
            return ""
        accuracy = self.summary(rows)["eval_accuracy"]
        if self.preference.labelled:
            return f"   agrees with the labels of {accuracy:.1%} of the held-out answers"
        return f"   prefers the chosen answer in {accuracy:.1%} of the held-out pairs"


def _preference_loss(loss: object) -> PreferenceLoss:
    assert isinstance(loss, PreferenceLoss)
    return loss


OBJECTIVE = Preferences()
