"""What a language model thinks of a continuation: its log-probability after a context.

Shapes: B rows, T positions, N scored positions, C of them at once, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from monograph.data.progress import Meter, Progress
from monograph.errors import InputRefused
from monograph.graph.precision import Precision
from monograph.model.llama import Llama

BATCH_TOKENS = 8192
LOGITS = 1 << 26  # at most so many at once: 256 MiB in fp32


class Continuation(NamedTuple):
    """Ids to score after other ids; a context has at least one."""

    context: Sequence[int]
    ids: Sequence[int]


class Score(NamedTuple):
    """What the model gives a continuation.

    Attributes:
        log_probability: sum over its ids of ln p(id | everything before it).
        greedy: whether each of its ids is the likeliest one at its place (the lowest id among equals).
    """

    log_probability: float
    greedy: bool


@torch.no_grad()
def score(
    model: Llama,
    asked: Sequence[Continuation],
    precision: Precision,
    *,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> list[Score]:
    """Score continuations, in the order in which they were asked for.

        log_probability = sum over i of log_softmax(logits(context + ids[:i]))[ids[i]]

    One forward pass scores a whole continuation, and rows of similar length share one. They are filled up on the right,
    where causal attention never looks, so neither batch nor padding changes a score beyond rounding. Where context and
    continuation are longer than the model's positions, the context's beginning is left out, as lm-evaluation-harness
    does.

    Args:
        model: a language model; it is put into evaluation mode.
        asked: contexts of at least one id, continuations of at least one.
        precision: of the forward pass; softmax and sums are fp32 at least.
        batch_tokens: most ids of a forward pass, padding included, unless one row alone has more.
        progress: told how many are scored, ("continuation", done, all of them).

    Raises:
        InputRefused: a continuation is longer than the model's positions.
    """
    model.eval()
    longest = model.config.max_position_embeddings
    rows = [fitted(each, longest) for each in asked]
    found: dict[int, Score] = {}
    meter = Meter(progress, "continuation", len(rows))
    with precision.context(model.lm_head.weight.device.type):
        for indices in _batches([len(row) for row, _ in rows], batch_tokens):
            found |= zip(indices, _scored(model, [rows[index] for index in indices]), strict=True)
            meter.add(len(indices))
    return [found[index] for index in range(len(rows))]


def fitted(asked: Continuation, longest: int) -> tuple[list[int], int]:
    """(the last `longest` + 1 ids of context and continuation, how many of them are the continuation's).

    Raises:
        InputRefused: the continuation has no room.
    """
    if len(asked.ids) > longest:
        raise InputRefused(
            f"a continuation of {len(asked.ids)} tokens has no room in the model's {longest} positions: shorten it"
        )
    return [*asked.context, *asked.ids][-longest - 1 :], len(asked.ids)


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices in groups of at most `batch_tokens` once filled up, the longest first, so that memory fails early."""
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if group and lengths[group[0]] * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _scored(model: Llama, rows: Sequence[tuple[list[int], int]]) -> list[Score]:
    """Scores of rows that go through the model together."""
    device, inputs = model.lm_head.weight.device, max(len(row) for row, _ in rows) - 1
    tokens_BT = torch.tensor([row[:-1] + [0] * (inputs + 1 - len(row)) for row, _ in rows], device=device)
    targets_N = torch.tensor([token for row, count in rows for token in row[-count:]], device=device)
    # Position i predicts id i + 1, so a continuation's predictions end one before its last id.
    ends = [index * inputs + len(row) - 1 for index, (row, _) in enumerate(rows)]
    places = [place for end, (_, count) in zip(ends, rows, strict=True) for place in range(end - count, end)]
    hidden_ND = model(tokens_BT).flatten(0, 1)[torch.tensor(places, device=device)]
    chosen_N, best_N = _log_probabilities(model, hidden_ND, targets_N)
    counts = [count for _, count in rows]
    sums = [float(chosen.double().sum()) for chosen in chosen_N.cpu().split(counts)]
    hits = [bool(hit.all()) for hit in (best_N == targets_N).cpu().split(counts)]
    return [Score(total, hit) for total, hit in zip(sums, hits, strict=True)]


def _log_probabilities(model: Llama, hidden_ND: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Each target's ln p, [N] in fp32 at least, and the likeliest id there; the logits exist a few at a time."""
    chosen, best = [], []
    pieces = max(1, -(-hidden_ND.shape[0] * model.config.vocab_size // LOGITS))
    for hidden_CD, targets_C in zip(hidden_ND.tensor_split(pieces), targets_N.tensor_split(pieces), strict=True):
        logits_CV = model.logits(hidden_CD)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        chosen.append(-cross_entropy(logits_CV, targets_C, reduction="none"))
        best.append(logits_CV.argmax(-1))
    return torch.cat(chosen), torch.cat(best)
