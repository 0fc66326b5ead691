"""Load what is evaluated: a trained model, its precision and tokenizer, and the text held out of its training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from monograph.data.progress import Progress
from monograph.device import default_device
from monograph.errors import InputRefused
from monograph.evaluation.choices import Accuracy, Answer, Question, choose
from monograph.graph.precision import Precision
from monograph.loss import Batch, Loss, token_loss
from monograph.model.llama import Llama
from monograph.report.quantities import counted
from monograph.run.folder import Run
from monograph.run.models import load, load_trained
from monograph.session.recorded import own_copies, run_settings, strange_text
from monograph.text.tokenizer import Tokenizer

LONGEST_ROW = 4096
_READING = ("sequence_length", "packing", "text_key", "bad_records", "answers", "too_long")


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with its precision and its tokenizer; if it comes from a run, also the text that was held out."""

    module: nn.Module
    loss: Loss
    tokenizer: Tokenizer
    precision: Precision
    reading: dict[str, Any]  # arguments of `corpus`
    averaged: bool = False
    own_text: dict[str, Any] = field(default_factory=dict)  # further arguments, used where no --data is given
    fingerprint: str = ""
    strange: str = ""  # a warning shown before `own_text` is read; empty if the text is the user's own

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, number of targets), computed uncompiled and in the run's own precision."""
        with self.precision.context(default_device().type):
            return self.loss(self.module, {name: tensor.to(default_device()) for name, tensor in batch.items()})


def require_finite(loss: float, name: str, text: str) -> None:
    """Refuse a loss that is NaN or infinite, since it cannot be compared or ranked.

    Raises:
        InputRefused: the loss is NaN or infinite.
    """
    if not math.isfinite(loss):
        raise InputRefused(f"{name}: its loss on {text} is {loss}: an output of the model is not finite")


def of_run(run: Run, warn: Callable[[str], None]) -> EvaluatedModel:
    """Load a run's newest sound model; see `load_trained`."""
    settings = run_settings(run)
    precision = Precision(settings.train.precision)  # in another precision the figures would differ
    text = settings.data.model_dump() | own_copies(settings)
    module, loss, tokenizer, state, averaged = load_trained(run, warn, precision)
    return EvaluatedModel(
        module,
        loss,
        tokenizer,
        precision,
        {key: text[key] for key in _READING},
        averaged,
        {key: text[key] for key in ("source", "held_out")},
        state["fingerprint"],
        strange_text(run, settings),
    )


def of_folder(folder: str, warn: Callable[[str], None]) -> EvaluatedModel:
    """Load the model of a Hugging Face folder or weight file."""
    model, tokenizer = load(folder, warn)
    length = min(model.config.max_position_embeddings, LONGEST_ROW)
    return EvaluatedModel(model, token_loss, tokenizer, Precision("fp32"), {"sequence_length": length})


def answered(
    subject: EvaluatedModel, questions: list[Question], chat: bool, report: Progress, warn: Callable[[str], None]
) -> tuple[list[Answer], Accuracy]:
    """Return a model's answers and its accuracy; see `evaluation.choose`.

    Raises:
        InputRefused: the model is not a Llama, so nothing says how it goes on from a question.
    """
    if not isinstance(subject.module, Llama):
        raise InputRefused("the run holds a module of its own, which does not say what follows a question: give a text")
    answers, shares = choose(subject.module, subject.tokenizer, questions, subject.precision, report, chat)
    if shares.cut:
        warn(f"{counted(shares.cut, 'question')} did not fit the model's positions: the beginning was left out")
    return answers, shares
