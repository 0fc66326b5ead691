"""Scores a model by loss, perplexity and bits per byte on text that it was not trained on.

`by_document` scores each document separately, so that two models of any tokenizers can be compared
in pairs.

Shape suffixes: D documents, U units (whole documents that follow one another), R rows, T positions,
N members.
"""

import math
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monograph.data.progress import Meter, Progress
from monograph.data.rows import IGNORE, Rows
from monograph.errors import UsageError
from monograph.evaluation.significance import Mean
from monograph.loss import Batch


class Evaluates(Protocol):
    """An engine, or another object that can score a batch."""

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (sum of losses in nats, number of targets) without gradients; both are [N] for N
        members.
        """


class Evaluation(NamedTuple):
    """Scores over a set of rows.

    Attributes:
        loss: nats per target.
        bits_per_byte: nats / ln 2 per byte of the targets' text; comparable across tokenizers. None
            if the loss counts something other than the rows' targets, so that its sum says nothing
            about bytes.
        perplexity: exp(loss), per token.
        tokens: what the loss counted, targets or the sum of their weights, rounded.
        bytes: bytes of the targets' text; the end of a document is a target of no bytes.
    """

    loss: float
    bits_per_byte: float | None
    perplexity: float
    tokens: int
    bytes: int


def evaluate(
    engine: Evaluates,
    rows: Rows,
    *,
    batch_rows: int = 16,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Score rows.

        loss = sum over targets of -ln p(target) / targets        bits per byte = sum of -log2 p(target) / bytes

    A document longer than a row is scored in pieces, each without the piece before it as context.

    Args:
        engine: an engine of one model.
        rows: a split of a corpus, such as `corpus.held_out`.
        batch_rows: rows scored at once; it changes no result beyond rounding.
        limit: score only this many rows, evenly spaced; None: all.
        progress: called with ("row", rows done, all rows).

    Raises:
        UsageError: there are no rows, the engine has several members, or the arguments are not an
            engine and rows.
    """
    results = evaluate_members(engine, rows, batch_rows=batch_rows, limit=limit, progress=progress)
    if len(results) > 1:
        raise UsageError(
            f"an engine of {len(results)} members has as many results: monograph.compare(engine, rows)"
        )
    return results[0]


def evaluate_members(
    engine: Evaluates,
    rows: Rows,
    *,
    batch_rows: int = 16,
    limit: int | None = None,
    progress: Progress | None = None,
) -> list[Evaluation]:
    """Score rows by every member of an engine; a single model counts as one member. See `evaluate`.

    Raises:
        UsageError: the arguments are not an engine and rows, or there are no rows.
    """
    if not callable(getattr(engine, "evaluate", None)):
        raise UsageError(
            f"a {type(engine).__name__} scores no batch: give an engine, such as monograph.Resident(model)"
        )
    if not isinstance(rows, Rows):
        raise UsageError(
            f"the rows are a {type(rows).__name__}: give a split of a corpus, such as corpus.held_out"
        )
    if len(rows) == 0:
        raise UsageError(
            "there is nothing to evaluate on: data.held_out is 0; give other text (--data)"
        )
    count = len(rows.spread(limit))
    sums = []
    meter = Meter(progress, "row", count)
    for batch in rows.in_order(batch_rows, limit):
        sums.append(engine.evaluate(batch))
        # The last batch is filled up with empty rows.
        meter.add(min(batch_rows, count - meter.done))
    totals_N = torch.stack([torch.atleast_1d(total).double() for total, _ in sums]).sum(0).tolist()
    counts_N = torch.stack([torch.atleast_1d(count) for _, count in sums]).sum(0).tolist()
    coverage = rows.coverage(limit)
    return [
        _evaluation(total, counted, *coverage)
        for total, counted in zip(totals_N, counts_N, strict=True)
    ]


def _evaluation(total: float, counted: float, targets: int, size: int) -> Evaluation:
    loss = total / (counted or 1.0)
    bits = total / math.log(2) / size if counted == targets else None
    return Evaluation(loss, bits, math.exp(min(loss, 700.0)), round(counted), size)


# More units would hardly narrow an error bar, and each costs at least one forward pass.
MOST_UNITS = 256
ROWS = 8  # rows of a forward pass


class Scores(NamedTuple):
    """The bits that a model needs for each unit of text.

    Attributes:
        bits_UN: float64, sum of -log2 p(target) for each unit and member.
        bytes_U: int64, bytes of each unit's targets.
    """

    bits_UN: NDArray[np.float64]
    bytes_U: NDArray[np.int64]

    @property
    def bits_per_byte_N(self) -> NDArray[np.float64]:
        """Bits per byte of each member over all units."""
        per_byte_N: NDArray[np.float64] = self.bits_UN.sum(0) / self.bytes_U.sum()
        return per_byte_N


def by_document(engine: Evaluates, rows: Rows, progress: Progress | None = None) -> Scores:
    """Score each document separately: a batch has the targets of one unit only, in the rows where
    they always are.

    A unit is one document or, if there are more than 256 documents, several consecutive ones, so
    that there are 256 units. Rows and tokenizer do not change the units, so two models of one text
    have the same.

    Raises:
        UsageError: there are no rows, or the loss counts something other than targets, so bits per
            byte mean nothing.
    """
    if len(rows) == 0:
        raise UsageError("there is nothing to compare on: data.held_out is 0; give other text")
    units = np.array_split(np.arange(rows.documents), min(MOST_UNITS, rows.documents))
    unit_D = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
    owner_RT = rows.owners(np.arange(len(rows)))
    unit_RT = np.where(owner_RT < 0, -1, unit_D[owner_RT])
    bits = []
    sizes = []
    meter = Meter(progress, "unit", len(units))
    for unit in range(len(units)):
        sums = []
        counted = 0
        targets = 0
        size = 0
        indices = np.flatnonzero((unit_RT == unit).any(1))
        for begin in range(0, len(indices), ROWS):
            chosen = indices[begin : begin + ROWS]
            batch, targets_of, length = _of_unit(rows, chosen, unit_RT[chosen] == unit)
            total, count = engine.evaluate(batch)
            sums.append(torch.atleast_1d(total).double())
            counted = counted + int(torch.atleast_1d(count)[0])
            targets = targets + targets_of
            size = size + length
        if counted != targets:
            raise UsageError(
                "the loss counts something other than the rows' targets: its sum says nothing about bytes"
            )
        sum_N = torch.stack(sums).sum(0).cpu().numpy() if sums else np.zeros(1)
        bits.append(sum_N / math.log(2))
        sizes.append(size)
        meter.add(1)
    return Scores(np.stack(bits), np.array(sizes))


def difference(one: Scores, other: Scores) -> Mean:
    """Return one - other in bits per byte, for scores of one model each, paired by unit.

        d = sum(a - b) / sum(bytes)        standard error = sqrt(U / (U - 1) · sum(e^2)) / sum(bytes),
        e = (a - b) - d · bytes            (the ratio estimator: Cochran, Sampling Techniques, 1977, 6.4)

    Raises:
        UsageError: the units are not the same text.
    """
    if not np.array_equal(one.bytes_U, other.bytes_U):
        raise UsageError(
            "the two were scored on different text: their documents do not have the same bytes"
        )
    size = one.bytes_U.sum()
    apart_U = one.bits_UN[:, 0] - other.bits_UN[:, 0]
    value = float(apart_U.sum() / size)
    units = len(apart_U)
    rest_U = apart_U - value * one.bytes_U
    error = (
        math.sqrt(units / (units - 1) * float(rest_U @ rest_U)) / float(size) if units > 1 else None
    )
    return Mean(value, error, units)


def _of_unit(
    rows: Rows, indices_R: NDArray[np.int64], mine_RT: NDArray[np.bool_]
) -> tuple[Batch, int, int]:
    """Return ROWS rows with the targets at `mine_RT` alone, the number of targets, and the bytes of
    their text.
    """
    window = rows.window(indices_R)
    window["targets"] = np.where(mine_RT, window["targets"], IGNORE)
    empty = rows.empty(ROWS - len(indices_R))
    batch = {
        key: torch.from_numpy(np.concatenate([values, empty[key]]))
        for key, values in window.items()
    }
    return batch, int((window["targets"] != IGNORE).sum()), rows.bytes_of(window)
