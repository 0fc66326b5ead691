"""`monograph evaluate`: measure bits per byte of a run's held-out or other text, or the share of
questions answered.
"""

import json as jsonlib
from collections.abc import Sequence

from monograph.data.corpus import corpus as open_corpus
from monograph.data.progress import ProgressCallback
from monograph.device import default_device
from monograph.errors import UsageError
from monograph.evaluation import Evaluation, evaluate
from monograph.evaluation.choices import Accuracy, are_question_files, read_questions
from monograph.report.quantities import counted
from monograph.run.folder import Run, standard_json
from monograph.run.progress import Progress
from monograph.run.recipe import find_run
from monograph.session.evaluated_model import (
    EvaluatedModel,
    answer_questions,
    load_from_folder,
    load_from_run,
    load_mixture,
    require_finite,
)
from monograph.sweeps.results import mixture_members
from monograph.terminal import warn

# The scores of text and of questions that --json prints. Those that were not measured are null.
TEXT_SCORES = ("bits_per_byte", "perplexity", "loss", "tokens")
# `cut` is left out, because it is no score: it counts questions that were shortened to fit the model.
# `answer_questions` warns of these.
QUESTION_SCORES = tuple(key for key in Accuracy._fields if key != "cut")


def run(run: str, *, data: list[str], chat: bool, json: bool) -> None:
    """Print how well a model predicts a text, or how many questions it answers; see the command line's
    help.

    Args:
        run: a run, a model's folder, or SWEEP/mixture, which averages the probabilities of the
            sweep's members.
        data: files of text, or of questions. Empty: the text that the run held out of its training.
        chat: whether to ask the questions as in a chat.
        json: whether to print the scores as JSON, too.
    """
    members = mixture_members(run)
    model, is_run = _open_model(run, members)
    if not data and not model.own_text_arguments:
        if is_run:
            reason = "learned from answers, not from text, so no text was held out for it"
        else:
            reason = "is no run, so nothing was held out for it"
        raise UsageError(f"{run} {reason}: give the text to score with --data")
    model.module.to(default_device()).eval()
    has_questions = are_question_files(data, model.reading.get("text_key"), chat)
    scores: Evaluation | Accuracy
    with Progress().stage("evaluate", run) as stage:
        if has_questions:
            scores, line = _answer_questions(model, data, chat, stage.report)
        else:
            scores, line = _score_text(model, data, stage.report)
    if isinstance(scores, Evaluation):
        require_finite(scores.loss, run, "this text")
    together = f", {counted(len(members), 'member')} together" if members else ""
    weights = ", averaged weights" if model.averaged else ""
    print(f"{line}{together}{weights}")
    if json:
        measured = scores._asdict()
        entries = {
            "schema": "monograph.evaluate/1",
            **standard_json({key: measured.get(key) for key in (*TEXT_SCORES, *QUESTION_SCORES)}),
            "weights": "averaged" if model.averaged else "last",
        }
        print(jsonlib.dumps(entries))


def _open_model(name: str, members: Sequence[Run]) -> tuple[EvaluatedModel, bool]:
    """Return the model, and whether it comes from a run.

    Args:
        name: what the user typed.
        members: the runs of a sweep, if `name` is the sweep's mixture; otherwise empty.
    """
    if members:
        return load_mixture(members, name, warn), True
    named_run = find_run(name)
    if named_run:
        return load_from_run(named_run, warn), True
    return load_from_folder(name, warn), False


def _score_text(
    model: EvaluatedModel, data: list[str], report: ProgressCallback
) -> tuple[Evaluation, str]:
    """Return the scores on a text, and a line about them.

    The text is the given one or, if `data` is empty, the part of the run's text that the run held out.
    """
    if model.text_warning and not data:
        warn(model.text_warning)
    # The arguments of `open_corpus` that say which text is opened. Those in `model.reading` say how.
    text_arguments = {"source": data, "held_out": 0.0} if data else model.own_text_arguments
    text = open_corpus(
        tokenizer=model.tokenizer, **model.reading, **text_arguments, progress=report
    )
    if not data and text.fingerprint != model.fingerprint:
        # A changed text may be split into training text and held-out text at another place than before.
        warn(f"{text.name} changed since the run: what is held out now may have been trained on")
    rows = text.train if data else text.held_out  # nothing is held out of a given text
    scores = evaluate(model, rows, progress=report)
    result = f"loss {scores.loss:.4f}"
    if scores.bits_per_byte is not None:
        result = f"{scores.bits_per_byte:.4f} bits per byte, perplexity {scores.perplexity:.2f}"
    size = f"{counted(scores.tokens, 'token')}, {counted(scores.bytes, 'byte')} of {text.name}"
    return scores, f"{result}, {size}"


def _answer_questions(
    model: EvaluatedModel, data: list[str], chat: bool, report: ProgressCallback
) -> tuple[Accuracy, str]:
    """Return the accuracy on questions with several choices, and a line about it."""
    _, accuracy = answer_questions(model, read_questions(data), chat, report, warn)
    shares = [f"{name} {_share(accuracy, name)}" for name in ("acc", "acc_norm", "acc_bytes")]
    first_file, *more_files = data
    files = f"{first_file} and {len(more_files)} more" if more_files else first_file
    source = f"{counted(accuracy.questions, 'question')} of {files}"
    return accuracy, f"{', '.join(shares)}; guessing {accuracy.chance:.4f}; {source}"


def _share(accuracy: Accuracy, name: str) -> str:
    """Return as text one of the shares of correct answers, with its standard error if there is one."""
    share = getattr(accuracy, name)
    standard_error = getattr(accuracy, f"{name}_stderr")
    if standard_error is None:
        return f"{share:.4f}"
    return f"{share:.4f} ± {standard_error:.4f}"
