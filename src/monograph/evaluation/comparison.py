"""Compare two models, two ensembles, or an ensemble's settings on the same held-out text, with
error bars.

An engine is a model with its training step, or an ensemble: models that are trained together, its
*members*. Members differ in *knobs*, which are hyperparameters such as the learning rate or the seed.
One knob, usually the seed, is the *repeated* one: members that differ only in it repeat the same setting.
Names in this file call its values seeds.

Shape suffixes: U units of text (`by_document`), N members.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
from torch import nn

from monograph.data.progress import ProgressCallback
from monograph.data.rows import Rows
from monograph.errors import UsageError
from monograph.evaluation.choices import ChoiceMarks
from monograph.evaluation.significance import Mean, Table, mean, tabulate
from monograph.evaluation.text import Evaluates, Scores, by_document, difference, evaluate_members
from monograph.graph.frozen import parameter_count


@dataclass(frozen=True)
class Comparison:
    """The difference b - a of two sides, models or ensembles, on the same text or questions.

    Attributes:
        a: bits per byte of the first side, or its share of right answers; the mean over its
            members.
        b: bits per byte of the second side, or its share of right answers.
        difference: the mean of b - a over the pairs, and its standard error.
        paired_by: what the two values of a pair have in common: the value of the repeated knob, such
            as "seed", or the "document", or the "question".
        parameters: the number of parameters of one member of each side; None if an engine does not
            give it.
        unit: "bits/byte", where less is better, or "acc" (accuracy), where more is better.
    """

    a: float
    b: float
    difference: Mean
    paired_by: str
    parameters: tuple[int, int] | None = None
    unit: Literal["bits/byte", "acc"] = "bits/byte"

    @property
    def verdict(self) -> str:
        """The verdict in words: which is better at 95 %."""
        if self.difference.is_noise is None:
            # There is a single pair, so there is no standard error.
            return f"one {self.paired_by} cannot tell it from chance"
        if self.difference.is_noise:
            return "the difference may be chance"
        less_is_better = self.unit == "bits/byte"
        b_is_less = self.difference.value < 0
        b_is_better = b_is_less if less_is_better else not b_is_less
        return "b is better" if b_is_better else "a is better"

    def __str__(self) -> str:
        error = ""
        if self.difference.standard_error is not None:
            error = f" ± {self.difference.standard_error:.3f}"
        # A long text is cut into units of several documents each (`by_document`).
        pairs = "units of text" if self.paired_by == "document" else f"{self.paired_by}s"
        parts = [
            f"b - a = {self.difference.value:+.3f}{error} {self.unit} ({self.difference.n} {pairs})",
            self.verdict,
        ]
        if self.parameters:
            parts.append(f"{percent(*self.parameters)} parameters")
        return " · ".join(parts)


def percent(one: float, other: float) -> str:
    """Return how much larger `other` is than `one`: `+4 %`."""
    return f"{100 * (other / one - 1):+.0f} %"


@overload
def compare(
    a: Evaluates,
    b: Evaluates,
    held_out: Rows,
    *,
    over: str = ...,
    progress: ProgressCallback | None = ...,
) -> Comparison: ...
@overload
def compare(
    a: Evaluates, b: Rows, *, over: str = ..., progress: ProgressCallback | None = ...
) -> Table: ...
def compare(
    a: Evaluates,
    b: Evaluates | Rows,
    held_out: Rows | None = None,
    *,
    over: str = "seed",
    progress: ProgressCallback | None = None,
) -> Comparison | Table:
    """Compare two engines, or the settings of one ensemble, in bits per byte of the same text.

    `compare(a, b, held_out)` compares two engines. If both have members of several seeds, such as an
    `Ensemble` over seeds, their members are paired by seed, so that what a seed contributes to both
    cancels. Other engines are paired by document (`by_document`). The error bar then tells how sure the
    difference of these two trained models is, but not whether models of other seeds would differ in the
    same way.

    `compare(engine, held_out)` returns the ensemble's settings with mean and standard error over
    seeds, and says which are tied with the best (`tabulate`).

    Args:
        a: an engine, or any object with `evaluate(batch) -> (sum, count)`, scalars of one model or
            [N] of N members.
        b: another engine, or `held_out` itself.
        held_out: rows, such as `corpus.held_out`.
        over: the name of the repeated knob.
        progress: called with the number of rows scored, or of units of text (`by_document`).

    Raises:
        UsageError: there are no rows, the loss counts something other than the rows' targets, or the
            members of an ensemble differ in more than the repeated knob.
    """
    if isinstance(b, Rows):
        knobs = _member_knobs(a)
        if not knobs:
            raise UsageError(
                "compare(engine, held_out) is for an ensemble; for two engines, compare(a, b, held_out)"
            )
        return tabulate(bits_per_byte(a, b, progress), knobs, over)
    if held_out is None:
        raise UsageError("compare needs the text that was held out: compare(a, b, held_out)")
    return compare_on(a, held_out, b, held_out, over, progress)


def compare_on(
    a: Evaluates,
    rows_a: Rows,
    b: Evaluates,
    rows_b: Rows,
    over: str = "seed",
    progress: ProgressCallback | None = None,
) -> Comparison:
    """Compare two engines as `compare(a, b, held_out)` does, if their tokenizers may differ.

    Each reads the same documents, in the rows of its own tokenizer.

    Args:
        a: the first engine.
        rows_a: the documents in its tokenizer's rows.
        b: the second engine.
        rows_b: the same documents in its tokenizer's rows.
        over: the name of the repeated knob.
        progress: see `compare`.

    Raises:
        UsageError: see `compare`; or the documents differ.
    """
    index_by_seed_a = _index_by_seed(a, over)
    index_by_seed_b = _index_by_seed(b, over)
    shared_seeds = [seed for seed in index_by_seed_a if seed in index_by_seed_b]
    if len(shared_seeds) > 1:
        member_bits_a = bits_per_byte(a, rows_a, progress)
        member_bits_b = bits_per_byte(b, rows_b, progress)
        bits_a = [member_bits_a[index_by_seed_a[seed]] for seed in shared_seeds]
        bits_b = [member_bits_b[index_by_seed_b[seed]] for seed in shared_seeds]
        b_minus_a = mean([bit_b - bit_a for bit_a, bit_b in zip(bits_a, bits_b, strict=True)])
        paired_by = over
        mean_a = float(np.mean(bits_a))
        mean_b = float(np.mean(bits_b))
    else:
        # If the sides share at most one seed, one member of each side is compared: the member of that
        # seed, or the first member.
        member_a = index_by_seed_a[shared_seeds[0]] if shared_seeds else 0
        member_b = index_by_seed_b[shared_seeds[0]] if shared_seeds else 0
        scores_a = _scores_of_member(by_document(a, rows_a, progress), member_a)
        scores_b = _scores_of_member(by_document(b, rows_b, progress), member_b)
        b_minus_a = difference(scores_b, minus=scores_a)
        paired_by = "document"
        mean_a = float(scores_a.bits_per_byte_N[0])
        mean_b = float(scores_b.bits_per_byte_N[0])
    parameters_a = _member_parameters(a)
    parameters_b = _member_parameters(b)
    parameters = None
    if parameters_a and parameters_b:
        parameters = (parameters_a, parameters_b)
    return Comparison(
        a=mean_a, b=mean_b, difference=b_minus_a, paired_by=paired_by, parameters=parameters
    )


def compare_answers(
    a: Mapping[Hashable, Sequence[ChoiceMarks]], b: Mapping[Hashable, Sequence[ChoiceMarks]]
) -> Comparison:
    """Compare two sides by their answers to the same questions.

    A side is one model, or several models that differ in the seed.

    Args:
        a: the answers of each member of the first side, by the member's seed. If the sides share
            several seeds, members are paired by seed; else one member of each side is compared
            question by question.
        b: the answers of the second side.
    """
    shared_seeds = [seed for seed in a if seed in b]
    if len(shared_seeds) > 1:
        paired_by = "seed"
        marks_a = [_right_share(a[seed]) for seed in shared_seeds]
        marks_b = [_right_share(b[seed]) for seed in shared_seeds]
    else:
        paired_by = "question"
        seed_a = shared_seeds[0] if shared_seeds else next(iter(a))
        seed_b = shared_seeds[0] if shared_seeds else next(iter(b))
        marks_a = [float(answer.acc) for answer in a[seed_a]]
        marks_b = [float(answer.acc) for answer in b[seed_b]]
    b_minus_a = mean([mark_b - mark_a for mark_a, mark_b in zip(marks_a, marks_b, strict=True)])
    mean_a = float(np.mean(marks_a))
    mean_b = float(np.mean(marks_b))
    return Comparison(a=mean_a, b=mean_b, difference=b_minus_a, paired_by=paired_by, unit="acc")


def _right_share(answers: Sequence[ChoiceMarks]) -> float:
    """Return the share of right answers (`ChoiceMarks.acc`)."""
    return float(np.mean([answer.acc for answer in answers]))


def bits_per_byte(
    engine: Evaluates, rows: Rows, progress: ProgressCallback | None = None
) -> list[float]:
    """Return the bits per byte of each member.

    Raises:
        UsageError: there are no rows, or the loss counts something other than the rows' targets.
    """
    values = []
    for evaluation in evaluate_members(engine, rows, progress=progress):
        if evaluation.bits_per_byte is None:
            raise UsageError(
                "the loss counts something other than the rows' targets: its sum says nothing about bytes"
            )
        values.append(evaluation.bits_per_byte)
    return values


def _member_knobs(engine: object) -> list[dict[str, Any]]:
    """Return each member's knobs by name; an empty list for an engine without knobs."""
    return [dict(knobs.items()) for knobs in getattr(engine, "knobs", None) or ()]


def _index_by_seed(engine: object, over: str) -> dict[Hashable, int]:
    """Return {value of the repeated knob: index of the member}; {} for an engine of one model.

    Raises:
        UsageError: the members also differ in another knob.
    """
    member_knobs = _member_knobs(engine)
    other_names = set[str]().union(*member_knobs) - {over}
    for name in sorted(other_names):
        # Values such as lists cannot be in a set, but their texts can.
        if len({repr(knobs.get(name)) for knobs in member_knobs}) > 1:
            raise UsageError(
                f"the members differ in {name} too: compare(engine, held_out, over={over!r}) says which is best"
            )
    return {knobs[over]: index for index, knobs in enumerate(member_knobs) if over in knobs}


def _scores_of_member(scores: Scores, member: int) -> Scores:
    """Return the scores of the member with this index, with bits [U, 1]."""
    return Scores(scores.bits_UN[:, member : member + 1], scores.bytes_U)


def _member_parameters(engine: object) -> int | None:
    """Return the number of parameters of one member; None if the engine does not give it."""
    members = list(getattr(engine, "members", ()))
    module = members[0] if members else getattr(engine, "model", None)
    return parameter_count(module) if isinstance(module, nn.Module) else None
