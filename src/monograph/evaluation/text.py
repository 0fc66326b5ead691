"""How good a model is: loss, perplexity and bits per byte on text that it was not trained on."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from monograph.data.progress import Meter, Progress
from monograph.data.rows import Rows
from monograph.errors import UsageError
from monograph.loss import Batch


class Evaluates(Protocol):
    """An engine, or anything else that can score a batch."""

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sum of losses in nats, number of targets), without gradients; of N members [N] each."""
        ...


class Evaluation(NamedTuple):
    """Scores over a set of rows.

    Attributes:
        loss: nats per target.
        bits_per_byte: nats over ln 2, per byte of text that the targets stand for; comparable across tokenizers. None
            where the loss counts something other than the rows' targets, so that its sum says nothing about bytes.
        perplexity: exp(loss), per token.
        tokens: what the loss counted: targets, or the sum of their weights, rounded.
        bytes: bytes of text that they stand for; the end of a document is a target of no bytes.
    """

    loss: float
    bits_per_byte: float | None
    perplexity: float
    tokens: int
    bytes: int


def evaluate(
    engine: Evaluates, rows: Rows, *, batch_rows: int = 16, limit: int | None = None, progress: Progress | None = None
) -> Evaluation:
    """Score rows.

        loss = sum over targets of -ln p(target) / targets        bits per byte = sum of -log2 p(target) / bytes

    A document longer than a row is scored in pieces, each with no context from the piece before it.

    Args:
        engine: what scores a batch.
        rows: a split of a corpus, such as `corpus.held_out`.
        batch_rows: rows scored at once; it changes no result beyond rounding.
        limit: score only this many rows, evenly spaced; None: all.
        progress: told how many rows are done, ("row", done, all of them).

    Raises:
        UsageError: there are no rows, or an engine of several members.
    """
    found = evaluate_members(engine, rows, batch_rows=batch_rows, limit=limit, progress=progress)
    if len(found) > 1:
        raise UsageError(f"an engine of {len(found)} members has as many results: monograph.compare(engine, rows)")
    return found[0]


def evaluate_members(
    engine: Evaluates, rows: Rows, *, batch_rows: int = 16, limit: int | None = None, progress: Progress | None = None
) -> list[Evaluation]:
    """Score rows by every member of an engine; one of one model has one. See `evaluate`.

    Raises:
        UsageError: there are no rows.
    """
    if len(rows) == 0:
        raise UsageError("there is nothing to evaluate on: data.held_out is 0; give other text (--data)")
    meter, sums = Meter(progress, "row", len(rows.spread(limit))), []
    for batch in rows.in_order(batch_rows, limit):
        sums.append(engine.evaluate(batch))
        meter.add(batch_rows)
    totals_N = torch.stack([torch.atleast_1d(s[0]).double() for s in sums]).sum(0).tolist()
    counts_N = torch.stack([torch.atleast_1d(s[1]) for s in sums]).sum(0).tolist()
    coverage = rows.coverage(limit)
    return [_evaluation(total, counted, *coverage) for total, counted in zip(totals_N, counts_N, strict=True)]


def _evaluation(total: float, counted: float, targets: int, size: int) -> Evaluation:
    loss = total / (counted or 1.0)
    bits = total / math.log(2) / size if counted == targets else None
    return Evaluation(loss, bits, math.exp(min(loss, 700.0)), round(counted), size)
