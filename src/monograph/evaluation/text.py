"""Score a model by loss, perplexity and bits per byte on text that it was not trained on.

`by_document` scores documents separately, so that two models with different tokenizers can be
compared document by document. An engine is a model with its training step, or several models that are
trained together, its *members*, which it scores at once.

Shape suffixes: D documents, U units (consecutive whole documents), R rows, T positions, N members.
"""

import math
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monograph.data.progress import Meter, ProgressCallback
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
            if the count that the loss returns is not the number of the rows' targets, because its sum
            then says nothing about bytes.
        perplexity: exp(loss), per token.
        tokens: the number of targets, or the sum of their weights if the loss weights them,
            rounded.
        bytes: bytes of the targets' text. A document's end is a target of 0 bytes.
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
    progress: ProgressCallback | None = None,
) -> Evaluation:
    """Score rows.

        loss          = sum over targets of -ln p(target) / number of targets
        bits per byte = sum over targets of -log2 p(target) / bytes of their text

    A document longer than a row is scored in pieces. The context of a piece does not include the
    previous piece.

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
    progress: ProgressCallback | None = None,
) -> list[Evaluation]:
    """Score rows by every member of an engine, see `evaluate`. A single model counts as one member.

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
    count = len(rows.evenly_spaced(limit))
    sums = []
    meter = Meter(progress, "row", count)
    for batch in rows.batches_in_order(batch_rows, limit):
        sums.append(engine.evaluate(batch))
        # The last batch may be padded with empty rows.
        meter.add(min(batch_rows, count - meter.done))
    totals_N = torch.stack([torch.atleast_1d(total).double() for total, _ in sums]).sum(0).tolist()
    counts_N = torch.stack([torch.atleast_1d(count) for _, count in sums]).sum(0).tolist()
    targets, size_bytes = rows.count_targets(limit)
    return [
        _evaluation(total, counted, targets, size_bytes)
        for total, counted in zip(totals_N, counts_N, strict=True)
    ]


def _evaluation(total: float, counted: float, targets: int, size_bytes: int) -> Evaluation:
    """Return a member's scores.

    Args:
        total: the sum of the losses, in nats.
        counted: the sum of the counts that the loss returned.
        targets: the number of targets in the rows.
        size_bytes: the bytes of the targets' text.
    """
    loss = total / (counted or 1.0)  # 0 if there are no targets
    bits_per_byte = None
    if counted == targets:
        bits_per_byte = total / math.log(2) / size_bytes
    perplexity = math.exp(min(loss, 700.0))  # a higher loss would overflow
    return Evaluation(
        loss=loss,
        bits_per_byte=bits_per_byte,
        perplexity=perplexity,
        tokens=round(counted),
        bytes=size_bytes,
    )


# More units would hardly narrow an error bar, and each costs at least one forward pass.
MOST_UNITS = 256
# The number of rows of a forward pass of `by_document`.
ROWS_PER_PASS = 8


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


def by_document(engine: Evaluates, rows: Rows, progress: ProgressCallback | None = None) -> Scores:
    """Score each document separately.

    A unit is one document. If there are more than 256 documents, a unit is several consecutive
    documents, so that there are 256 units. Units depend neither on rows nor on the tokenizer, so two
    models have the same units of one text. A row may have documents of several units. It is then scored
    once for each of them, each time with the targets of this unit alone.

    Args:
        engine: an engine.
        rows: the documents in rows.
        progress: called with ("unit", units done, all units).

    Raises:
        UsageError: there are no rows, or the loss counts something other than targets, so bits per
            byte mean nothing.
    """
    if len(rows) == 0:
        raise UsageError("there is nothing to compare on: data.held_out is 0; give other text")
    units = np.array_split(np.arange(rows.documents), min(MOST_UNITS, rows.documents))
    unit_D = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
    # The document and the unit at each position; -1 at padding.
    document_RT = rows.document_indices(np.arange(len(rows)))
    unit_RT = np.where(document_RT < 0, -1, unit_D[document_RT])
    bits = []
    unit_bytes = []
    meter = Meter(progress, "unit", len(units))
    for unit in range(len(units)):
        losses = []
        counted = 0
        targets = 0
        size_bytes = 0
        indices = np.flatnonzero((unit_RT == unit).any(1))
        for begin in range(0, len(indices), ROWS_PER_PASS):
            indices_R = indices[begin : begin + ROWS_PER_PASS]
            batch, batch_targets, batch_bytes = _unit_batch(
                rows, indices_R, unit_RT[indices_R] == unit
            )
            total, count = engine.evaluate(batch)
            losses.append(torch.atleast_1d(total).double())
            counted += int(torch.atleast_1d(count)[0])  # all members count the same targets
            targets += batch_targets
            size_bytes += batch_bytes
        if counted != targets:
            raise UsageError(
                "the loss counts something other than the rows' targets: its sum says nothing about bytes"
            )
        # A unit without targets has no batch.
        loss_N = torch.stack(losses).sum(0).cpu().numpy() if losses else np.zeros(1)
        bits.append(loss_N / math.log(2))
        unit_bytes.append(size_bytes)
        meter.add(1)
    return Scores(np.stack(bits), np.array(unit_bytes))


def difference(scores: Scores, minus: Scores) -> Mean:
    """Return the difference scores - minus of two models in bits per byte, paired by unit.

    With a and b the bits of the two models for a unit, the ratio estimator (Cochran, Sampling
    Techniques, 1977, 6.4) is:

        d = sum(a - b) / sum(bytes)
        e = (a - b) - d · bytes
        standard error = sqrt(U / (U - 1) · sum(e^2)) / sum(bytes)

    Raises:
        UsageError: the units are not the same text.
    """
    if not np.array_equal(scores.bytes_U, minus.bytes_U):
        raise UsageError(
            "the two were scored on different text: their documents do not have the same bytes"
        )
    total_bytes = scores.bytes_U.sum()
    difference_U = scores.bits_UN[:, 0] - minus.bits_UN[:, 0]
    value = float(difference_U.sum() / total_bytes)
    units = len(difference_U)
    residual_U = difference_U - value * scores.bytes_U
    standard_error = None
    if units > 1:
        variance = units / (units - 1) * float(residual_U @ residual_U)
        standard_error = math.sqrt(variance) / float(total_bytes)
    return Mean(value=value, standard_error=standard_error, n=units)


def _unit_batch(
    rows: Rows, indices_R: NDArray[np.int64], in_unit_RT: NDArray[np.bool_]
) -> tuple[Batch, int, int]:
    """Return a batch of rows with the targets of one unit, the number of these targets, and the
    bytes of their text.

    Args:
        rows: all rows.
        indices_R: the rows to return. The batch is padded with empty rows to ROWS_PER_PASS.
        in_unit_RT: which of their targets belong to the unit.
    """
    window = rows.window(indices_R)
    window["targets"] = np.where(in_unit_RT, window["targets"], IGNORE)
    empty = rows.empty(ROWS_PER_PASS - len(indices_R))
    batch = {
        key: torch.from_numpy(np.concatenate([values, empty[key]]))
        for key, values in window.items()
    }
    return batch, int((window["targets"] != IGNORE).sum()), rows.bytes_of(window)
