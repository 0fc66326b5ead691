"""`monograph compare`: tell whether one model is better than another, or the difference is noise.

The models are measured on the same text, or on the same questions with several choices. A side is
what one name on the command line stands for. It has several models if the name is a sweep whose best
setting was trained with several seeds, and otherwise one.
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
from monograph.data.progress import ProgressCallback
from monograph.data.rows import Rows
from monograph.device import default_device
from monograph.errors import InputRefused, UsageError
from monograph.evaluation.choices import Accuracy, ChoiceMarks, are_question_files, read_questions
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
from monograph.run.writing import write_atomically
from monograph.session.evaluated_model import (
    EvaluatedModel,
    answer_questions,
    load_from_folder,
    load_from_run,
    load_mixture,
    require_finite,
)
from monograph.storage.reading import contents, exists, is_file, is_folder, without_links
from monograph.sweeps.folder import seeds_of_best
from monograph.sweeps.results import mixture_members
from monograph.terminal import warn


@dataclass(frozen=True)
class _Side:
    """What is compared: a run, a model's folder, a sweep's best setting, or a sweep's mixture.

    A mixture is all members of a sweep, whose predictions are averaged.

    Attributes:
        name: the name that the user gave.
        models: the models: one for each seed of a sweep's best setting, otherwise one.
        knobs: the seed of each model as a setting, {"seed": seed}; empty if there is only one model.
            `compare_on` pairs the models of two sides that have equal settings.
        tokens_per_s: the training speed; None if it was not measured, or if members of a sweep
            trained at the same time.
        runs: the run of each model; empty for a model's folder and for a mixture.
    """

    name: str
    models: list[EvaluatedModel]
    knobs: tuple[dict[str, Any], ...]
    tokens_per_s: float | None
    runs: tuple[Run, ...] = ()

    @property
    def members(self) -> list[torch.nn.Module]:
        """Return the models' modules."""
        return [model.module for model in self.models]

    @property
    def has_own_text(self) -> bool:
        """Return whether this is a run that was trained on text.

        Such a run records how it reads text, and which part of its text it held out. A model's folder,
        or a run that learned from answers, does not.
        """
        # The models of a side differ only in their seeds, so the first one stands for all.
        return bool(self.models[0].own_text_arguments)

    @property
    def params(self) -> int:
        """Return the number of parameters of one model."""
        return parameter_count(self.members[0])

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of losses and the number of targets of each of N models, both [N].

        This is the interface of an engine with members, for which `compare_on` was written.
        """
        sums = [model.evaluate(batch) for model in self.models]
        totals = torch.stack([total for total, _ in sums])
        sizes = torch.stack([size for _, size in sums])
        return totals, sizes


@dataclass(frozen=True)
class _Result:
    """The measurements of all sides.

    Attributes:
        scores: for each side, bits per byte or the share of correctly answered questions.
        comparisons: for each side but the first, its comparison with the first.
        documents: number of documents of the text; 0 for questions.
        accuracies: the accuracy of each side's first model; empty for text.
    """

    scores: list[float]
    comparisons: list[Comparison]
    documents: int = 0
    accuracies: tuple[Accuracy, ...] = ()


def run(
    runs: Sequence[str], *, data: list[str], chat: bool, report: Path | None, json: bool
) -> None:
    """Compare every run with the first; see the command line's help.

    Args:
        runs: two or more names. Each is that of a run, a sweep, SWEEP/mixture or a model's folder.
        data: files of text, or of questions; empty: the text that the first run held out.
        chat: whether to ask the questions as in a chat.
        report: the HTML page to write; None to write none.
        json: whether to print the measurements as JSON, too.
    """
    if len(runs) < 2:
        raise UsageError(
            "compare takes two runs or more, the first being what the others are compared with"
        )
    if not data and not names_run(runs[0]):
        raise UsageError(
            f"{runs[0]} is not a run, so it has no held-out text: name a run first, or give a text with --data"
        )
    if report:
        _require_page(report)
    sides = [_open_side(name) for name in runs]
    if not data and not sides[0].has_own_text:
        raise UsageError(
            f"{runs[0]} learned from answers, not from text, so no text was held out for it: give one with --data"
        )
    # How text is read by the first side that has a text of its own. Sides without one read text in the
    # same way. If no side has one, this is {}, and the defaults apply.
    reading = next((side.models[0].reading for side in sides if side.has_own_text), {})
    has_questions = are_question_files(data, reading.get("text_key"), chat)
    first = sides[0]
    on_data = f"on {' and '.join(data)}" if data else f"on what {first.name} held out"
    progress = Progress()
    with progress.stage("compare", on_data) as stage:
        if has_questions:
            result = _compare_answers_to_questions(sides, data, chat, stage.report)
        else:
            result = _compare_texts(sides, data, reading, stage.report)
    width = max(map(len, runs))
    for side, score in zip(sides, result.scores, strict=True):
        score_text = f"acc {score:.4f}" if has_questions else f"{score:.4f} bits/byte"
        print(f"{side.name:<{width}}   {score_text}   {_facts_text(side)}")
    lines = [
        _difference_line(first, side, comparison, result.documents)
        for side, comparison in zip(sides[1:], result.comparisons, strict=True)
    ]
    for line in lines:
        print(line)
    if report:
        title = f"{' and '.join(runs)} {on_data}"
        unit = "share correct" if has_questions else "bits/byte"
        page = compare_page(title, unit, _page_sides(sides, result), lines)
        write_atomically(report, page)
        progress.line("report", str(report))
    if json:
        print(jsonlib.dumps(_json_object(sides, result)))


def _open_side(name: str) -> _Side:
    """Load the models of one side.

    Raises:
        InputRefused: there is no such run or folder, or its model cannot be used.
        NoValidCheckpoint: a run has no valid checkpoint.
    """
    runs_by_seed: dict[int, Run] = {}  # empty for a mixture and for a model's folder
    members = mixture_members(name)  # empty if the name is not that of a mixture
    if members:
        models = [load_mixture(members, name, warn)]
    elif names_run(name) or not exists(name):
        # A name that does not exist also comes here, since the error of `Run.locate` suggests others.
        folder = Run.locate(name)
        if is_file(folder / SWEEP):
            runs_by_seed = seeds_of_best(folder)
        else:
            # A single run is not paired with others by its seed, so any number will do.
            runs_by_seed = {0: Run.open(name)}
        models = [load_from_run(run, warn) for run in runs_by_seed.values()]
    else:
        models = [load_from_folder(name, warn)]
    for model in models:
        model.module.to(default_device()).eval()
    knobs: tuple[dict[str, Any], ...] = ()
    if len(runs_by_seed) > 1:
        knobs = tuple({"seed": seed} for seed in runs_by_seed)
    runs = tuple(runs_by_seed.values())
    tokens_per_s = None
    # The speed of a run that learned from sampled answers includes the sampling, so it says nothing
    # about the model.
    if runs and not models[0].samples_answers:
        tokens_per_s = _median_speed(runs[0])
    return _Side(name, models, knobs, tokens_per_s, runs)


def _facts_text(side: _Side) -> str:
    """Return a side's number of parameters, its training speed, and its number of seeds if several."""
    facts = [f"{count(side.params)} parameters"]
    if side.tokens_per_s:
        facts.append(count(side.tokens_per_s, "tok/s"))
    if len(side.models) > 1:
        facts.append(counted(len(side.models), "seed"))
    return "   ".join(facts)


def _require_page(path: Path) -> None:
    """Require a path where a page can be written. This is checked before the models are measured.

    Raises:
        UsageError: the name does not end in .html, so the file may be something else.
        InputRefused: there is no such folder, or the path is a folder.
    """
    if path.suffix != ".html":
        raise UsageError(f"--report {path}: expected a name that ends in .html")
    if is_folder(path):
        raise InputRefused(
            f"--report {path}: is a folder; name a file in it, such as {path / 'compare.html'}"
        )
    if not is_folder(path.parent):
        raise InputRefused(f"--report {path}: there is no folder {path.parent}; make it first")


def _page_sides(sides: Sequence[_Side], result: _Result) -> list[Compared]:
    """Return the sides as the page shows them."""
    page_sides = []
    for index, (side, score) in enumerate(zip(sides, result.scores, strict=True)):
        curves = [run.rows() for run in side.runs]
        config = ""
        if side.runs:
            config = (contents(side.runs[0].config) or b"").decode("utf-8", "replace")
        page_side = Compared(side.name, side.params, score, side.tokens_per_s, curves, config)
        if index > 0:  # the first side is not compared with itself
            comparison = result.comparisons[index - 1]
            page_side = replace(
                page_side,
                difference=comparison.difference.value,
                standard_error=comparison.difference.standard_error,
                averaged_over=_pairs_text(comparison, result.documents),
                verdict=_verdict(sides[0], side, comparison),
            )
        page_sides.append(page_side)
    return page_sides


def _compare_texts(
    sides: Sequence[_Side], data: list[str], reading: dict[str, Any], report: ProgressCallback
) -> _Result:
    """Measure each side's bits per byte on the same text.

    Args:
        sides: the sides.
        data: the text; empty for the first side's held-out text.
        reading: how to read text for a side that has no text of its own.
        report: shows the progress.
    """
    first = sides[0]
    if first.models[0].text_warning and not data:
        warn(first.models[0].text_warning)
    # The same text for each side, in the tokens of its models.
    rows_of_sides = [_rows_for(side, first, data, reading) for side in sides]
    first_rows = rows_of_sides[0]
    first_score = statistics.fmean(bits_per_byte(first, first_rows, report))
    comparisons = []
    for side, rows in zip(sides[1:], rows_of_sides[1:], strict=True):
        comparisons.append(compare_on(first, first_rows, side, rows, progress=report))
    # In a comparison, `b` is the score of the other side.
    scores = [first_score, *(comparison.b for comparison in comparisons)]
    for side, score in zip(sides, scores, strict=True):
        require_finite(score, side.name, "this text")
    return _Result(scores, comparisons, first_rows.documents)


def _rows_for(side: _Side, first: _Side, data: list[str], reading: dict[str, Any]) -> Rows:
    """Return the text as rows of one side's tokens.

    Args:
        side: the side whose tokenizer is used.
        first: the first side.
        data: the text; empty for the first side's held-out text.
        reading: how to read text for a side that has no text of its own.
    """
    model = side.models[0]
    first_text_arguments = first.models[0].own_text_arguments
    side_reading = model.reading
    if not side.has_own_text:
        # Such a side does not record how to read text, so it reads text as another side does. Its rows must
        # fit into the model's positions (`model.reading`), and must not be longer than the other side's
        # rows. `reading` is {} if no side has a text of its own.
        readings = [each for each in (model.reading, reading) if each]
        length = min(int(each["sequence_length"]) for each in readings)
        side_reading = reading | {"sequence_length": length}
    if data:
        # All of a given text is evaluated: nothing is held out, and `train` is everything.
        return corpus(tokenizer=model.tokenizer, **side_reading, source=data, held_out=0.0).train
    if not side.has_own_text:
        warn(
            f"{side.name} does not say what it was trained on: what {first.name} held out may be part of it"
        )
    elif model.own_text_arguments != first_text_arguments:
        warn(f"{side.name} was trained on other text: what {first.name} held out may be part of it")
    text = corpus(tokenizer=model.tokenizer, **side_reading, **first_text_arguments)
    if model.own_text_arguments == first_text_arguments and text.fingerprint != model.fingerprint:
        warn(
            f"{text.name} changed since {side.name}: what is held out now may have been trained on"
        )
    if len(text.held_out) == 0:
        raise UsageError(
            f"{first.name} held nothing out (data.held_out = 0): name a run that did as the first"
        )
    return text.held_out


def _compare_answers_to_questions(
    sides: Sequence[_Side], data: list[str], chat: bool, report: ProgressCallback
) -> _Result:
    """Measure the share of questions that each side answers correctly."""
    questions = read_questions(data)
    # For each side, the answers of its models by their seeds.
    answers_of_sides: list[dict[Hashable, list[ChoiceMarks]]] = []
    accuracies = []
    for side in sides:
        # A side with one model records no seed, and any number will do.
        seeds = [knobs["seed"] for knobs in side.knobs] or [0]
        answers_by_seed: dict[Hashable, list[ChoiceMarks]] = {}
        accuracy_by_seed = []
        for seed, model in zip(seeds, side.models, strict=True):
            answers, accuracy = answer_questions(model, questions, chat, report, warn)
            answers_by_seed[seed] = answers
            accuracy_by_seed.append(accuracy)
        answers_of_sides.append(answers_by_seed)
        accuracies.append(accuracy_by_seed[0])
    first_answers, *other_answers = answers_of_sides
    comparisons = [compare_answers(first_answers, others) for others in other_answers]
    scores = []
    for answers_by_seed in answers_of_sides:
        correct = [answer.acc for answers in answers_by_seed.values() for answer in answers]
        scores.append(statistics.fmean(correct))
    return _Result(scores, comparisons, accuracies=tuple(accuracies))


def _median_speed(run: Run) -> float | None:
    """Return a run's median training speed in tokens per second; None if it was not recorded.

    It is also None for a member of a sweep, because members train at the same time and share the device.
    """
    # A member's folder is SWEEP/members/NUMBER.
    if is_file(without_links(run.folder).parent.parent / SWEEP):
        return None
    rates = [row["tokens_per_s"] for row in run.rows() if row.get("tokens_per_s")]
    return statistics.median(rates) if rates else None


def _difference_line(first: _Side, side: _Side, comparison: Comparison, documents: int) -> str:
    """Return the line that says how a side differs from the first, and how certain this is."""
    gap = comparison.difference
    error = "" if gap.standard_error is None else f" ± {gap.standard_error:.4f}"
    pairs = _pairs_text(comparison, documents)
    verdict = _verdict(first, side, comparison)
    cost = [f"{percent(first.params, side.params)} parameters"]
    if first.tokens_per_s and side.tokens_per_s:
        cost.append(f"{percent(first.tokens_per_s, side.tokens_per_s)} tokens/s")
    difference = f"{side.name} - {first.name} = {gap.value:+.4f}{error} {comparison.unit} ({pairs})"
    return " · ".join([difference, verdict, *cost])


def _pairs_text(comparison: Comparison, documents: int) -> str:
    """Return how many pairs of measurements the difference is made from, and what a pair is."""
    n = comparison.difference.n
    # Many documents are compared in groups, each of which is one pair.
    if comparison.paired_by == "document" and n < documents:
        return f"{n} groups of documents"
    return counted(n, comparison.paired_by)


def _verdict(first: _Side, side: _Side, comparison: Comparison) -> str:
    """Return the verdict of a comparison with the sides' names in place of a and b."""
    # In a comparison, the first side is called a, and the other one b.
    if comparison.verdict == "a is better":
        return f"{first.name} is better"
    if comparison.verdict == "b is better":
        return f"{side.name} is better"
    return comparison.verdict


def _json_object(sides: Sequence[_Side], result: _Result) -> dict[str, Any]:
    """Return the measurements as the object that --json prints."""
    # Without questions there are no accuracies.
    accuracies = result.accuracies or (None,) * len(sides)
    entries = [
        {
            "run": side.name,
            "bits_per_byte": None if accuracy else score,
            "acc": score if accuracy else None,
            "acc_norm": accuracy.acc_norm if accuracy else None,
            "acc_bytes": accuracy.acc_bytes if accuracy else None,
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
    return {"schema": "monograph.compare/1", "runs": entries, "differences": differences}
