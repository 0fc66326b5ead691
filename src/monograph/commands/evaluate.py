"""`monograph evaluate`: measure bits per byte of a run's held-out or other text, or the share of
questions answered.
"""

import json as jsonlib

from monograph.data.corpus import corpus as open_corpus
from monograph.data.progress import ProgressCallback
from monograph.device import default_device
from monograph.errors import UsageError
from monograph.evaluation import Evaluation, evaluate
from monograph.evaluation.choices import Accuracy, hold_questions, read_questions
from monograph.report.quantities import counted
from monograph.run.folder import standard_json
from monograph.run.progress import Progress
from monograph.run.recipe import run_named
from monograph.session.evaluated_model import (
    EvaluatedModel,
    answer_questions,
    load_from_folder,
    load_from_run,
    mixture_of,
    require_finite,
)
from monograph.sweeps.results import mixture_members
from monograph.terminal import warn

# The keys that --json prints; the value is null where a score was not measured.
TEXT = ("bits_per_byte", "perplexity", "loss", "tokens")
QUESTIONS = tuple(key for key in Accuracy._fields if key != "cut")


def run(run: str, *, data: list[str], chat: bool, json: bool) -> None:
    """Score the held-out rows of the run's data, or all given text or questions; see the command
    line's help.
    """
    members = mixture_members(run)
    runs = members or [trained for trained in [run_named(run)] if trained]
    subjects = [load_from_run(each, warn) for each in runs] or [load_from_folder(run, warn)]
    subject = mixture_of(subjects, run) if members else subjects[0]
    if not data and not subject.own_text:
        what = (
            "learned from answers, not from text, so no text" if runs else "is no run, so nothing"
        )
        raise UsageError(f"{run} {what} was held out for it: give the text to score with --data")
    subject.module.to(default_device()).eval()
    quiz = hold_questions(data, subject.reading.get("text_key"), chat)
    with Progress().stage("evaluate", run) as stage:
        measured, line = (
            _questions(subject, data, chat, stage.report)
            if quiz
            else _text(subject, data, stage.report)
        )
    if isinstance(measured, Evaluation):
        require_finite(measured.loss, run, "this text")
    together = f", {counted(len(members), 'member')} together" if members else ""
    print(line + together + (", averaged weights" if subject.averaged else ""))
    if json:
        scores = {key: measured._asdict().get(key) for key in (*TEXT, *QUESTIONS)}
        weights = "averaged" if subject.averaged else "last"
        print(
            jsonlib.dumps(
                {"schema": "monograph.evaluate/1", **standard_json(scores), "weights": weights}
            )
        )


def _text(
    subject: EvaluatedModel, data: list[str], report: ProgressCallback
) -> tuple[Evaluation, str]:
    if subject.text_warning and not data:
        warn(subject.text_warning)
    where = {"source": data, "held_out": 0.0} if data else subject.own_text
    text = open_corpus(tokenizer=subject.tokenizer, **subject.reading, **where, progress=report)
    if not data and text.fingerprint != subject.fingerprint:
        warn(f"{text.name} changed since the run: what is held out now may have been trained on")
    result = evaluate(subject, text.train if data else text.held_out, progress=report)
    standing = f"loss {result.loss:.4f}"
    if result.bits_per_byte is not None:
        standing = f"{result.bits_per_byte:.4f} bits per byte, perplexity {result.perplexity:.2f}"
    return (
        result,
        f"{standing}, {counted(result.tokens, 'token')}, {counted(result.bytes, 'byte')} of {text.name}",
    )


def _questions(
    subject: EvaluatedModel, data: list[str], chat: bool, report: ProgressCallback
) -> tuple[Accuracy, str]:
    result = answer_questions(subject, read_questions(data), chat, report, warn)[1]
    shares = [f"{name} {_share(result, name)}" for name in ("acc", "acc_norm", "acc_bytes")]
    source = f"{counted(result.questions, 'question')} of {data[0]}{f' and {len(data) - 1} more' if data[1:] else ''}"
    return result, f"{', '.join(shares)}; guessing {result.chance:.4f}; {source}"


def _share(result: Accuracy, name: str) -> str:
    error = getattr(result, f"{name}_stderr")
    return f"{getattr(result, name):.4f}" + ("" if error is None else f" ± {error:.4f}")
