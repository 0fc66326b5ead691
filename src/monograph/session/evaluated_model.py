"""Load a model to evaluate, with its precision and tokenizer and, for a run, the text held out of
its training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from monograph.data.progress import Progress
from monograph.device import default_device
from monograph.errors import InputRefused, Warn
from monograph.evaluation.choices import Accuracy, ChoiceMarks, Question, choose
from monograph.graph.precision import Precision
from monograph.loss import IGNORE, Batch, Loss, target_log_probabilities, token_loss
from monograph.model.llama import Llama
from monograph.report.quantities import counted
from monograph.run.folder import Run
from monograph.run.models import load_trained, load_with_tokenizer
from monograph.session.objectives import objective_of
from monograph.session.recorded import own_copies, run_settings, strange_text
from monograph.text.tokenizer import Tokenizer

LONGEST_ROW = 4096
_READING = (
    "sequence_length",
    "packing",
    "text_key",
    "ignore_keys",
    "bad_records",
    "answers",
    "too_long",
)
_TEXT = ("source", "weights", "held_out")


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with its precision and its tokenizer; if it comes from a run, also the text that was
    held out.

    Attributes:
        module: the model; loss: its loss; tokenizer: its tokenizer.
        precision: the precision in which it is evaluated, the run's own.
        reading: the arguments of `corpus` that say how to read any text.
        averaged: whether the weights are averages.
        own_text: the further arguments of `corpus` that name the run's text, for use without
            --data; empty if the run learned from other records.
        fingerprint: the fingerprint of the run's text at training.
        strange: a warning to print before `own_text` is read; empty if the text is the user's own.
        drew_answers: whether the run drew answers between its updates, so that its speed is not
            that of a step.
    """

    module: nn.Module
    loss: Loss
    tokenizer: Tokenizer
    precision: Precision
    reading: dict[str, Any]
    averaged: bool = False
    own_text: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    strange: str = ""
    drew_answers: bool = False

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, number of targets) of a batch, computed uncompiled in this model's
        precision.
        """
        with self.precision.context(default_device().type):
            return self.loss(
                self.module, {name: tensor.to(default_device()) for name, tensor in batch.items()}
            )


def require_finite(loss: float, name: str, text: str) -> None:
    """Refuse a loss that is NaN or infinite, since it cannot be compared.

    Raises:
        InputRefused: the loss is NaN or infinite.
    """
    if not math.isfinite(loss):
        raise InputRefused(
            f"{name}: its loss on {text} is {loss}: an output of the model is not finite"
        )


def of_run(run: Run, warn: Warn) -> EvaluatedModel:
    """Load a run's newest sound model; see `load_trained`."""
    settings = run_settings(run, runs=("model.init",))
    precision = Precision(settings.train.precision)  # in another precision the figures would differ
    text = settings.data.model_dump() | own_copies(settings.data, settings.origins)
    objective = objective_of(settings)
    module, loss, tokenizer, state, averaged = load_trained(run, warn, precision, settings.programs)
    return EvaluatedModel(
        module,
        loss,
        tokenizer,
        precision,
        {key: text[key] for key in _READING},
        averaged,
        {key: text[key] for key in _TEXT} if objective.is_of_texts else {},
        state["fingerprint"],
        strange_text(run, settings.data.source, settings.programs),
        objective.answers_on_device,
    )


def of_folder(folder: str, warn: Warn) -> EvaluatedModel:
    """Load the model of a Hugging Face folder or weight file."""
    model, tokenizer = load_with_tokenizer(folder, warn)
    length = min(model.config.max_position_embeddings, LONGEST_ROW)
    return EvaluatedModel(
        model, token_loss, tokenizer, Precision("fp32"), {"sequence_length": length}
    )


def mixed(members: Sequence[EvaluatedModel], name: str) -> EvaluatedModel:
    """Return a model that finds a token as probable as N members do on average.

    loss = ln N - logsumexp over members of log p(target),   summed over targets in fp64

    Each member computes in its own precision, and of each only the targets' log-probabilities are
    kept.

    Raises:
        InputRefused: a member is no language model of this package, or their tokenizers differ.
    """
    shortest = min(members, key=lambda member: int(member.reading["sequence_length"]))
    tokenizers = {member.tokenizer.hash for member in members}
    if len(tokenizers) > 1 or not all(isinstance(member.module, Llama) for member in members):
        raise InputRefused(
            f"{name}: only language models of one tokenizer have probabilities to average: name one of the sweep's runs"
        )

    def loss(_: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        log_MN = []
        for member in members:
            with member.precision.context(default_device().type):
                log_MN.append(target_log_probabilities(member.module, batch).double())
        kept_N = batch["targets"].flatten() != IGNORE
        losses_N = math.log(len(members)) - torch.stack(log_MN).logsumexp(0)
        return torch.where(kept_N, losses_N, 0.0).sum(), kept_N.sum()

    together = nn.ModuleList(member.module for member in members)
    averaged = members[0].averaged
    return replace(
        shortest, module=together, loss=loss, precision=Precision("fp32"), averaged=averaged
    )


def answered(
    subject: EvaluatedModel, questions: list[Question], chat: bool, report: Progress, warn: Warn
) -> tuple[list[ChoiceMarks], Accuracy]:
    """Return a model's answers and its accuracy; see `evaluation.choices.choose`.

    Raises:
        InputRefused: the model is not a Llama, so it is unknown how to score continuations of a
            question.
    """
    if not isinstance(subject.module, Llama):
        what = (
            "a mixture"
            if isinstance(subject.module, nn.ModuleList)
            else "the run holds a module of its own, which"
        )
        raise InputRefused(f"{what} does not say what follows a question: give a text")
    answers, shares = choose(
        subject.module, subject.tokenizer, questions, subject.precision, report, chat
    )
    if shares.cut:
        warn(
            f"{counted(shares.cut, 'question')} did not fit the model's positions: the beginning was left out"
        )
    return answers, shares
