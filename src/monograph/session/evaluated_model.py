"""Load a model to evaluate, with its precision and tokenizer.

A model may come from a run, from a folder of weights, or be the mixture of several runs of a sweep.
Only a run has a text of its own, part of which was held out of its training.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from monograph.data.progress import ProgressCallback
from monograph.device import default_device
from monograph.ensemble.one_base import OneBase, have_one_base
from monograph.errors import InputRefused, Warn
from monograph.evaluation.choices import Accuracy, ChoiceMarks, Question, choose
from monograph.graph.precision import Precision
from monograph.loss import (
    IGNORE,
    Batch,
    Loss,
    log_probabilities_by_hidden,
    target_log_probabilities,
    token_loss,
)
from monograph.model.llama import Llama
from monograph.report.quantities import counted
from monograph.run.folder import Run
from monograph.run.models import Trained, load_trained, load_with_tokenizer
from monograph.session.objectives import objective_of
from monograph.session.recorded import copies_of_missing_files, foreign_text_warning, run_settings
from monograph.text.tokenizer import Tokenizer

# A model that no run made has no settings that say how long its rows of text are. They are as long as
# its positions allow, but have at most this many tokens.
MAX_ROW_TOKENS = 4096
# The settings in the section [data] of a run that say how text is read, whichever text it is.
_READING_KEYS = (
    "sequence_length",
    "packing",
    "text_key",
    "ignore_keys",
    "bad_records",
    "answers",
    "too_long",
)
# The settings in [data] that name the text from which the run took its training data and the part
# that it held out.
_OWN_TEXT_KEYS = ("source", "weights", "held_out")


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with all that is needed to evaluate it: its loss, tokenizer and precision, and the
    text of its run if it comes from one.

    Attributes:
        module: the model.
        loss: the model's loss.
        tokenizer: the model's tokenizer.
        precision: the precision in which the model is evaluated: the run's own, or fp32.
        reading: the arguments of `data.corpus.corpus` that say how to read any text.
        averaged: whether the weights are averages over updates.
        own_text_arguments: the further arguments of `corpus` that name the text from which the run
            learned. The held-out part of this text is evaluated if the user names no text with
            --data. {} if the run did not learn from texts.
        fingerprint: the fingerprint that the run's own text had in training, a hash by which a changed
            text is noticed.
        text_warning: a warning to print before the run's own text is read. There is one if another
            user began the run and it names files outside of its folder; else it is "".
        samples_answers: whether the run sampled answers between its updates. Then the times of its
            updates include the sampling, so `compare` does not show them as the model's speed.
    """

    module: nn.Module
    loss: Loss
    tokenizer: Tokenizer
    precision: Precision
    reading: dict[str, Any]
    averaged: bool = False
    own_text_arguments: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    text_warning: str = ""
    samples_answers: bool = False

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, number of targets) of a batch, both 0-d, computed eagerly in this
        model's precision.
        """
        device = default_device()
        on_device = {name: tensor.to(device) for name, tensor in batch.items()}
        with self.precision.context(device.type):
            return self.loss(self.module, on_device)


def require_finite(loss: float, name: str, text: str) -> None:
    """Refuse a loss that is NaN or infinite, since it cannot be compared.

    Raises:
        InputRefused: the loss is NaN or infinite.
    """
    if not math.isfinite(loss):
        raise InputRefused(
            f"{name}: its loss on {text} is {loss}: an output of the model is not finite"
        )


def load_from_run(run: Run, warn: Warn) -> EvaluatedModel:
    """Load the model of a run's newest valid checkpoint; see `load_trained`."""
    evaluated, _ = _load_beside(run, warn, None)
    return evaluated


def load_mixture(runs: Sequence[Run], name: str, warn: Warn) -> EvaluatedModel:
    """Load the mixture of a sweep's finished runs; see `mixture_of`. Adapters on one base share it.

    Args:
        runs: the runs.
        name: what the user typed, SWEEP/mixture, for errors.
        warn: called with each line that the user should read.
    """
    first, trained = _load_beside(runs[0], warn, None)
    members = [first]
    for run in runs[1:]:
        member, _ = _load_beside(run, warn, (first, trained))
        members.append(member)
    return mixture_of(members, name)


def _load_beside(
    run: Run, warn: Warn, other: tuple[EvaluatedModel, Trained] | None
) -> tuple[EvaluatedModel, Trained]:
    """Load a run's model.

    Args:
        run: the run.
        warn: called with each line that the user should read.
        other: what this function returned for another run, whose base this run's model shares if it
            can; None: there is no other run.

    Returns:
        The model as it is evaluated, and as `load_trained` has loaded it.
    """
    # `run_settings` refuses settings that name a Python file which would run here and which this
    # user does not trust. Only the file of `model.init`, which builds the model, is run here.
    settings = run_settings(run, code_keys=("model.init",))
    # In another precision the scores would differ from the scores during training.
    precision = Precision(settings.train.precision)
    # If the run was moved, a recorded path may lead nowhere. Then the run's own copy is read. The
    # origin of a setting says in which config.toml, and so in which folder, it was recorded.
    data_settings = settings.data.model_dump()
    data_settings |= copies_of_missing_files(settings.data, settings.origins)
    objective = objective_of(settings)
    own_text_arguments = {}
    if objective.is_of_texts:
        own_text_arguments = {key: data_settings[key] for key in _OWN_TEXT_KEYS}
    # The values that name code, such as FILE.py:FUNCTION. `load_trained` and `foreign_text_warning` need
    # them to tell whether this user began the run.
    programs = settings.programs
    model_to_share_with: Trained | None = None
    if other is not None:
        other_evaluated, other_trained = other
        if other_evaluated.precision.name == precision.name:
            model_to_share_with = other_trained
    trained = load_trained(run, warn, precision, programs, model_to_share_with)
    evaluated = EvaluatedModel(
        module=trained.model,
        loss=trained.loss,
        tokenizer=trained.tokenizer,
        precision=precision,
        reading={key: data_settings[key] for key in _READING_KEYS},
        averaged=trained.averaged,
        own_text_arguments=own_text_arguments,
        fingerprint=trained.state["fingerprint"],
        text_warning=foreign_text_warning(run, settings.data.source, programs),
        samples_answers=objective.samples_answers,
    )
    return evaluated, trained


def load_from_folder(folder: str, warn: Warn) -> EvaluatedModel:
    """Load the model of a Hugging Face folder or weight file, in fp32."""
    model, tokenizer = load_with_tokenizer(folder, warn)
    length = min(model.config.max_position_embeddings, MAX_ROW_TOKENS)
    return EvaluatedModel(
        model, token_loss, tokenizer, Precision("fp32"), {"sequence_length": length}
    )


def mixture_of(members: Sequence[EvaluatedModel], name: str) -> EvaluatedModel:
    """Return a model whose probability of a token is the mean of its members' probabilities.

        loss = sum over N targets of ln M - logsumexp over M members of log p(target)

    Each member computes in its own precision; the sum is in fp64. Memory holds the targets'
    log-probabilities of all members, but the logits of only one member at a time. Members that are
    adapters on one base in memory share one forward pass up to the head.

    Shapes: M members, N targets of a batch.

    Args:
        members: the models of a sweep's finished runs.
        name: what the user typed, SWEEP/mixture, for errors.

    Raises:
        InputRefused: a member is not a `Llama`, or the members' tokenizers differ.
    """
    # Rows must fit all members, so the text is read as the member with the shortest rows reads it.
    shortest = min(members, key=lambda member: int(member.reading["sequence_length"]))
    tokenizers = {member.tokenizer.hash for member in members}
    if len(tokenizers) > 1 or not all(isinstance(member.module, Llama) for member in members):
        raise InputRefused(
            f"{name}: only language models of one tokenizer have probabilities to average: name one of the sweep's runs"
        )

    modules = [member.module for member in members]
    is_one_precision = len({member.precision.name for member in members}) == 1
    one_base = OneBase(modules) if is_one_precision and have_one_base(modules) else None

    def log_probabilities(batch: Batch) -> Iterator[Tensor]:
        """Yield the log-probabilities of the targets for each member, [N]."""
        device_type = default_device().type
        if one_base is not None:
            with members[0].precision.context(device_type):
                for hidden_ND, lm_head in one_base.hidden(batch):
                    yield log_probabilities_by_hidden(hidden_ND, lm_head, batch).double()
            return
        for member in members:
            with member.precision.context(device_type):
                own_log_N = target_log_probabilities(member.module, batch).double()
            yield own_log_N

    def loss(_: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and the number of targets of a batch."""
        log_MN = torch.stack(list(log_probabilities(batch)))
        losses_N = math.log(len(members)) - log_MN.logsumexp(0)
        is_target_N = batch["targets"].flatten() != IGNORE
        return torch.where(is_target_N, losses_N, 0.0).sum(), is_target_N.sum()

    # All runs of a sweep have the same text, so the text and the fingerprint of `shortest` are
    # right.
    return replace(
        shortest,
        module=nn.ModuleList(modules),
        loss=loss,
        # The loss enters the precision of each member, so the precision around it has no effect.
        precision=Precision("fp32"),
        # Scores are shown with the word "averaged" or "last" for the weights. The first member
        # decides.
        averaged=members[0].averaged,
    )


def answer_questions(
    subject: EvaluatedModel,
    questions: list[Question],
    chat: bool,
    report: ProgressCallback,
    warn: Warn,
) -> tuple[list[ChoiceMarks], Accuracy]:
    """Let a model answer multiple-choice questions, and return its answers and its accuracy.

    Args:
        subject: the model.
        questions: the questions.
        chat: whether a question is asked as a message of a chat.
        report: the progress.
        warn: prints a warning if questions had to be cut.

    Raises:
        InputRefused: the model is not a `Llama`: how another module scores continuations of a
            question is unknown.
    """
    if not isinstance(subject.module, Llama):
        # The module of a mixture is a ModuleList; see `mixture_of`.
        if isinstance(subject.module, nn.ModuleList):
            raise InputRefused("a mixture cannot answer questions: give a text")
        raise InputRefused(
            "the run holds a module of its own, which cannot answer questions: give a text"
        )
    answers, accuracy = choose(
        subject.module, subject.tokenizer, questions, subject.precision, report, chat
    )
    if accuracy.cut:
        cut = counted(accuracy.cut, "question")
        warn(f"{cut} did not fit the model's positions: the beginning was left out")
    return answers, accuracy
