"""Compares two models, two ensembles, or an ensemble's settings on the same held-out text, with
error bars.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
from torch import nn

from monograph.data.progress import Progress
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
        a: bits per byte of the first side, or its share of questions answered right; the mean over
            its members.
        b: the same of the second side.
        difference: the mean of b - a over the pairs, and its standard error.
        paired_by: the repeated knob, such as "seed", or "document" or "question".
        parameters: the numbers of parameters of one member of each side; None if an engine does not
            give them.
        unit: "bits/byte", of which less is better, or "acc", of which more is better.
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
            return f"one {self.paired_by} cannot tell it from chance"
        if self.difference.is_noise:
            return "no difference that could not be chance"
        return (
            "b is better"
            if (self.difference.value < 0) == (self.unit == "bits/byte")
            else "a is better"
        )

    def __str__(self) -> str:
        error = (
            ""
            if self.difference.standard_error is None
            else f" ± {self.difference.standard_error:.3f}"
        )
        units = {"document": "units of text"}.get(self.paired_by, f"{self.paired_by}s")
        parts = [
            f"b - a = {self.difference.value:+.3f}{error} {self.unit} ({self.difference.n} {units})",
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
    a: Evaluates, b: Evaluates, held_out: Rows, *, over: str = ..., progress: Progress | None = ...
) -> Comparison: ...
@overload
def compare(
    a: Evaluates, b: Rows, *, over: str = ..., progress: Progress | None = ...
) -> Table: ...
def compare(
    a: Evaluates,
    b: Evaluates | Rows,
    held_out: Rows | None = None,
    *,
    over: str = "seed",
    progress: Progress | None = None,
) -> Comparison | Table:
    """Compare two engines, or the settings of one ensemble, in bits per byte of the same text.

    `compare(a, b, held_out)` pairs engines of several members, such as an `Ensemble` over seeds, by
    seed, so that what a seed contributes to both cancels. It pairs other engines by document
    (`by_document`), which tells how sure the difference of these two trained models is, but not
    whether another seed would give it.

    `compare(engine, held_out)` returns the ensemble's settings with mean and standard error over
    seeds, and says which are tied with the best (`tabulate`).

    Args:
        a: an engine, or any object with `evaluate(batch) -> (sum, count)`, scalars of one model or
            [N] of N members.
        b: another engine, or `held_out` itself.
        held_out: rows, such as `corpus.held_out`.
        over: the knob that only repeats a setting.
        progress: called with the rows or units scored.

    Raises:
        UsageError: there are no rows, the loss's sum says nothing about bytes, or the members of an
            ensemble differ in more than the repeated knob.
    """
    if isinstance(b, Rows):
        knobs = _knobs(a)
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
    progress: Progress | None = None,
) -> Comparison:
    """Compare two engines as `compare(a, b, held_out)` does, but each reads the documents in its
    own tokenizer's rows.

    Raises:
        UsageError: see `compare`; or the documents differ.
    """
    # indices by value of the repeated knob
    members_a = _repetitions(a, over)
    members_b = _repetitions(b, over)
    pairs = [(members_a[key], members_b[key]) for key in members_a if key in members_b]
    if len(pairs) > 1:
        values_a = bits_per_byte(a, rows_a, progress)
        values_b = bits_per_byte(b, rows_b, progress)
        both = [(values_a[i], values_b[j]) for i, j in pairs]
        gap = mean([second - first for first, second in both])
        by = over
        first, second = (float(np.mean(values)) for values in zip(*both, strict=True))
    else:
        # The sides share no two values of the knob, so compare one member of each.
        i, j = pairs[0] if pairs else (0, 0)
        scores_a = _one(by_document(a, rows_a, progress), i)
        scores_b = _one(by_document(b, rows_b, progress), j)
        gap = difference(scores_b, scores_a)
        by = "document"
        first = float(scores_a.bits_per_byte_N[0])
        second = float(scores_b.bits_per_byte_N[0])
    size_a = _parameters(a)
    size_b = _parameters(b)
    return Comparison(first, second, gap, by, (size_a, size_b) if size_a and size_b else None)


def compare_answers(
    a: Mapping[Hashable, Sequence[ChoiceMarks]], b: Mapping[Hashable, Sequence[ChoiceMarks]]
) -> Comparison:
    """Compare two sides of one or several models each that answered the same questions.

    Args:
        a: the answers of each member of the first side, by the member's seed. If the sides share
            several seeds, members are paired by seed; else one member of each side is compared
            question by question.
        b: the answers of the second side.
    """
    both = [key for key in a if key in b]
    if len(both) > 1:
        pairs = [(_share(a[key]), _share(b[key])) for key in both]
    else:
        keys = (both[0], both[0]) if both else (next(iter(a)), next(iter(b)))
        pairs = [(float(i.acc), float(j.acc)) for i, j in zip(a[keys[0]], b[keys[1]], strict=True)]
    first, second = (float(np.mean(values)) for values in zip(*pairs, strict=True))
    gap = mean([j - i for i, j in pairs])
    return Comparison(first, second, gap, "seed" if len(both) > 1 else "question", unit="acc")


def _share(answers: Sequence[ChoiceMarks]) -> float:
    return float(np.mean([answer.acc for answer in answers]))


def bits_per_byte(engine: Evaluates, rows: Rows, progress: Progress | None = None) -> list[float]:
    """Return the bits per byte of each member.

    Raises:
        UsageError: there are no rows, or the loss's sum says nothing about bytes.
    """
    measured = [
        evaluation.bits_per_byte for evaluation in evaluate_members(engine, rows, progress=progress)
    ]
    values = [value for value in measured if value is not None]
    if len(values) < len(measured):
        raise UsageError(
            "the loss counts something other than the rows' targets: its sum says nothing about bytes"
        )
    return values


def _knobs(engine: object) -> list[dict[str, Any]]:
    """Return the knobs of each member, by name; none for an engine without knobs."""
    return [dict(knobs.items()) for knobs in getattr(engine, "knobs", None) or ()]


def _repetitions(engine: object, over: str) -> dict[Hashable, int]:
    """Return the indices of members by their value of the repeated knob; empty for an engine of one
    model.
    """
    knobs = _knobs(engine)
    indices = {member[over]: index for index, member in enumerate(knobs) if over in member}
    others = {name for member in knobs for name in member if name != over}
    varied = [
        name for name in sorted(others) if len({repr(member.get(name)) for member in knobs}) > 1
    ]
    if varied:
        raise UsageError(
            f"the members differ in {varied[0]} too: compare(engine, held_out, over={over!r}) says which is best"
        )
    return indices


def _one(scores: Scores, member: int) -> Scores:
    return Scores(scores.bits_UN[:, member : member + 1], scores.bytes_U)


def _parameters(engine: object) -> int | None:
    """Return the number of parameters of one member; None if the engine does not give it."""
    module = next(iter(getattr(engine, "members", ())), None) or getattr(engine, "model", None)
    return parameter_count(module) if isinstance(module, nn.Module) else None
