"""`monograph compare`: test whether a model is better than another on the same text or questions,
and how surely.
"""

import json as jsonlib
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from monograph.data.corpus import corpus
from monograph.data.progress import Progress as Report
from monograph.data.rows import Rows
from monograph.device import default_device
from monograph.errors import InputRefused, UsageError
from monograph.evaluation.choices import Accuracy, ChoiceMarks, hold_questions, read_questions
from monograph.evaluation.comparison import (
    Comparison,
    bits_per_byte,
    compare_answers,
    compare_on,
    percent,
)
from monograph.graph.frozen import parameter_count
from monograph.loss import Batch
from monograph.report.compare_report import Compared, compare_page
from monograph.report.quantities import count, counted
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.run.recipe import names_run
from monograph.run.run_index import SWEEP
from monograph.run.writing import write_whole
from monograph.session.evaluated_model import (
    EvaluatedModel,
    answered,
    mixed,
    of_folder,
    of_run,
    require_finite,
)
from monograph.storage.reading import contents, exists, is_file, is_folder, without_links
from monograph.sweeps.folder import seeds_of_best
from monograph.sweeps.results import mixture_members
from monograph.terminal import warn


@dataclass(frozen=True)
class _Side:
    """One of the compared: a run, a model's folder, a sweep's best setting with all its seeds, or
    all its members.

    Attributes:
        name: the name that the user gave.
        subjects: a model for each seed.
        knobs: the seed of each model, if there are several models.
        tokens_per_s: the training speed; None if it was not measured, or if other members trained
            at the same time.
        runs: the run of each model; empty for a model's folder and for all members of a sweep
            together.
    """

    name: str
    subjects: list[EvaluatedModel]
    knobs: tuple[dict[str, Any], ...]
    tokens_per_s: float | None
    runs: tuple[Run, ...] = ()

    @property
    def members(self) -> list[torch.nn.Module]:
        """Return the models."""
        return [subject.module for subject in self.subjects]

    @property
    def is_run(self) -> bool:
        """Return whether this is a run, which records how it reads text and what text it held out."""
        return bool(self.subjects[0].own_text)

    @property
    def params(self) -> int:
        """Return the number of parameters of one model."""
        return parameter_count(self.members[0])

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of losses and the number of targets for each of N seeds, both [N], as an
        engine does.
        """
        sums = [subject.evaluate(batch) for subject in self.subjects]
        return torch.stack([total for total, _ in sums]), torch.stack([size for _, size in sums])


@dataclass(frozen=True)
class _Result:
    """The measurements of all sides.

    Attributes:
        scores: for each side, bits per byte or the share of questions answered correctly.
        comparisons: the comparison of every other side with the first.
        documents: the number of the text's documents; 0 for questions.
        accuracies: the accuracy of each side's first model; empty for text.
    """

    scores: list[float]
    comparisons: list[Comparison]
    documents: int = 0
    accuracies: tuple[Accuracy, ...] = ()


def run(
    runs: Sequence[str], *, data: list[str], chat: bool, report: Path | None, json: bool
) -> None:
    """Compare every run with the first; see the command line's help."""
    if len(runs) < 2:
        raise UsageError(
            "compare takes two runs or more, the first being what the others are compared with"
        )
    if not data and not names_run(runs[0]):
        raise UsageError(
            f"{runs[0]} is no run, so nothing was held out for it: name a run first, or a text with --data"
        )
    if report:
        _require_page(report)
    sides = [_side(name) for name in runs]
    if not data and not sides[0].subjects[0].own_text:
        raise UsageError(
            f"{runs[0]} learned from answers, not from text, so no text was held out for it: give one with --data"
        )
    reading = next((side.subjects[0].reading for side in sides if side.is_run), {})
    quiz = hold_questions(data, reading.get("text_key"), chat)
    first = sides[0]
    on = f"on {' and '.join(data)}" if data else f"on what {first.name} held out"
    progress = Progress()
    with progress.stage("compare", on) as stage:
        result = (
            _asked(sides, data, chat, stage.report)
            if quiz
            else _read(sides, data, reading, stage.report)
        )
    width = max(map(len, runs))
    for side, score in zip(sides, result.scores, strict=True):
        speed = f"   {count(side.tokens_per_s, 'tok/s')}" if side.tokens_per_s else ""
        seeds = f"   {counted(len(side.subjects), 'seed')}" if len(side.subjects) > 1 else ""
        scored = f"acc {score:.4f}" if quiz else f"{score:.4f} bits/byte"
        print(f"{side.name:<{width}}   {scored}   {count(side.params)} parameters{speed}{seeds}")
    lines = [
        _line(first, side, comparison, result.documents)
        for side, comparison in zip(sides[1:], result.comparisons, strict=True)
    ]
    for line in lines:
        print(line)
    if report:
        unit = "share correct" if quiz else "bits/byte"
        page = compare_page(f"{' and '.join(runs)} {on}", unit, _compared(sides, result), lines)
        write_whole(report, page)
        progress.line("report", str(report))
    if json:
        print(jsonlib.dumps(_json(sides, result)))


def _side(name: str) -> _Side:
    runs: dict[int, Run] = {}
    members = mixture_members(name)
    if not members and (names_run(name) or not exists(name)):
        folder = Run.located(name)
        runs = seeds_of_best(folder) if is_file(folder / SWEEP) else {0: Run.open(name)}
    subjects = [of_run(run, warn) for run in members or runs.values()] or [of_folder(name, warn)]
    subjects = [mixed(subjects, name)] if members else subjects
    for subject in subjects:
        subject.module.to(default_device()).eval()
    knobs = tuple({"seed": seed} for seed in runs) if len(runs) > 1 else ()
    speed = _speed(next(iter(runs.values()))) if runs and not subjects[0].drew_answers else None
    return _Side(name, subjects, knobs, speed, tuple(runs.values()))


def _require_page(path: Path) -> None:
    """Refuse a place where no page can be written, before the models are measured.

    Raises:
        UsageError: the name does not end in .html, so the file may be something else.
        InputRefused: there is no such folder, or a folder has that name.
    """
    if path.suffix != ".html":
        raise UsageError(f"--report {path}: expected a name that ends in .html")
    if is_folder(path):
        raise InputRefused(
            f"--report {path}: is a folder; name a file in it, such as {path / 'compare.html'}"
        )
    if not is_folder(path.parent):
        raise InputRefused(f"--report {path}: there is no folder {path.parent}; make it first")


def _compared(sides: Sequence[_Side], result: _Result) -> list[Compared]:
    """Return the sides as their page shows them."""
    made = []
    for place, (side, score) in enumerate(zip(sides, result.scores, strict=True)):
        curves = [run.rows() for run in side.runs]
        config = ""
        if side.runs:
            config = (contents(side.runs[0].config) or b"").decode("utf-8", "replace")
        known = Compared(side.name, side.params, score, side.tokens_per_s, curves, config)
        if place:
            comparison = result.comparisons[place - 1]
            gap = comparison.difference
            known = replace(
                known,
                difference=gap.value,
                standard_error=gap.standard_error,
                pairs=_pairs(comparison, result.documents),
                verdict=_verdict(sides[0], side, comparison),
            )
        made.append(known)
    return made


def _read(
    sides: Sequence[_Side], data: list[str], reading: dict[str, Any], report: Report
) -> _Result:
    """Measure every side's bits per byte on the same text."""
    first = sides[0]
    if first.subjects[0].strange and not data:
        warn(first.subjects[0].strange)
    texts = [_rows(side, first, data, reading) for side in sides]
    own = statistics.fmean(bits_per_byte(first, texts[0], report))
    others = zip(sides[1:], texts[1:], strict=True)
    comparisons = [
        compare_on(first, texts[0], side, rows, progress=report) for side, rows in others
    ]
    scores = [own, *(comparison.b for comparison in comparisons)]
    for side, score in zip(sides, scores, strict=True):
        require_finite(score, side.name, "this text")
    return _Result(scores, comparisons, texts[0].documents)


def _rows(side: _Side, first: _Side, data: list[str], reading: dict[str, Any]) -> Rows:
    """Return the given text, or the first side's held-out text, in rows of this side's tokenizer."""
    subject = side.subjects[0]
    own = first.subjects[0].own_text
    # A folder does not record how to read text: it reads as the runs do, in rows no longer than it
    # has positions.
    shortest = min(
        int(config["sequence_length"]) for config in (subject.reading, reading) if config
    )
    how = subject.reading if side.is_run else reading | {"sequence_length": shortest}
    if data:
        return corpus(tokenizer=subject.tokenizer, **how, source=data, held_out=0.0).train
    if not side.is_run:
        warn(
            f"{side.name} does not say what it was trained on: what {first.name} held out may be part of it"
        )
    elif subject.own_text != own:
        warn(f"{side.name} was trained on other text: what {first.name} held out may be part of it")
    text = corpus(tokenizer=subject.tokenizer, **how, **own)
    if subject.own_text == own and text.fingerprint != subject.fingerprint:
        warn(
            f"{text.name} changed since {side.name}: what is held out now may have been trained on"
        )
    if len(text.held_out) == 0:
        raise UsageError(
            f"{first.name} held nothing out (data.held_out = 0): name a run that did as the first"
        )
    return text.held_out


def _asked(sides: Sequence[_Side], data: list[str], chat: bool, report: Report) -> _Result:
    """Measure the share of questions that each side answers correctly."""
    questions = read_questions(data)
    answers: list[dict[Hashable, list[ChoiceMarks]]] = []
    accuracies = []
    for side in sides:
        per_seed = [answered(subject, questions, chat, report, warn) for subject in side.subjects]
        names = [knobs["seed"] for knobs in side.knobs] or [0]
        answers.append({name: given for name, (given, _) in zip(names, per_seed, strict=True)})
        accuracies.append(per_seed[0][1])
    comparisons = [compare_answers(answers[0], others) for others in answers[1:]]
    scores = [
        statistics.fmean(answer.acc for given in side.values() for answer in given)
        for side in answers
    ]
    return _Result(scores, comparisons, accuracies=tuple(accuracies))


def _speed(run: Run) -> float | None:
    """Return the median training speed; None for a sweep's member, as members train together."""
    if is_file(without_links(run.folder).parent.parent / SWEEP):
        return None
    rates = [row["tokens_per_s"] for row in run.rows() if row.get("tokens_per_s")]
    return statistics.median(rates) if rates else None


def _line(first: _Side, side: _Side, comparison: Comparison, documents: int) -> str:
    gap = comparison.difference
    error = "" if gap.standard_error is None else f" ± {gap.standard_error:.4f}"
    pairs = _pairs(comparison, documents)
    verdict = _verdict(first, side, comparison)
    cost = [f"{percent(first.params, side.params)} parameters"]
    if first.tokens_per_s and side.tokens_per_s:
        cost.append(f"{percent(first.tokens_per_s, side.tokens_per_s)} tokens/s")
    difference = f"{side.name} - {first.name} = {gap.value:+.4f}{error} {comparison.unit} ({pairs})"
    return " · ".join([difference, verdict, *cost])


def _pairs(comparison: Comparison, documents: int) -> str:
    n = comparison.difference.n
    grouped = comparison.paired_by == "document" and n < documents
    return f"{n} groups of documents" if grouped else counted(n, comparison.paired_by)


def _verdict(first: _Side, side: _Side, comparison: Comparison) -> str:
    better = {"a is better": first, "b is better": side}.get(comparison.verdict)
    return f"{better.name} is better" if better else comparison.verdict


def _json(sides: Sequence[_Side], result: _Result) -> dict[str, Any]:
    accuracies = result.accuracies or (None,) * len(sides)
    runs = [
        {
            "run": side.name,
            "bits_per_byte": None if accuracy else score,
            "acc": score if accuracy else None,
            "acc_norm": accuracy and accuracy.acc_norm,
            "acc_bytes": accuracy and accuracy.acc_bytes,
            "params": side.params,
            "tokens_per_s": side.tokens_per_s,
            "seeds": [knobs["seed"] for knobs in side.knobs],
        }
        for side, score, accuracy in zip(sides, result.scores, accuracies, strict=True)
    ]
    differences = [
        {
            "run": side.name,
            "against": sides[0].name,
            "difference": comparison.difference.value,
            "standard_error": comparison.difference.standard_error,
            "pairs": comparison.difference.n,
            "paired_by": comparison.paired_by,
            "is_noise": comparison.difference.is_noise,
            "unit": comparison.unit,
        }
        for side, comparison in zip(sides[1:], result.comparisons, strict=True)
    ]
    return {"schema": "monograph.compare/1", "runs": runs, "differences": differences}
