"""Edits of logits before any filter: a bias for ids, a minimum of tokens, penalties for earlier ids.

Shapes: B rows, V vocabulary, M ids that are listed for a row, padded with -1, T positions of a row.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.decode.sampling import Sampling
from monograph.errors import UsageError

# The dtype of counts of ids. On a CPU Inductor vectorises int32 but not int16, with which every loop that was fused
# with the counts became scalar (docs/log.md).
COUNTS = torch.int32


def add_at(logits_BV: Tensor, ids_BM: Tensor, values_BM: Tensor) -> Tensor:
    """Return logits[b, ids[b, m]] + values[b, m]; an id of -1 adds nothing, and -inf forbids the id."""
    # The length of a list is part of the graph, so lists are padded; padding adds 0 to id 0.
    listed_BM = ids_BM >= 0
    return logits_BV.scatter_add(-1, torch.where(listed_BM, ids_BM, 0), torch.where(listed_BM, values_BM, 0.0))


def forbid_until(logits_BV: Tensor, ids_BM: Tensor, generated_B1: Tensor, least_B1: Tensor) -> Tensor:
    """Return logits that are -inf at the listed ids in rows that have drawn fewer than `least` tokens."""
    early_BM = (generated_B1 < least_B1).expand_as(ids_BM)
    return add_at(logits_BV, ids_BM, torch.where(early_BM, -torch.inf, torch.zeros_like(ids_BM, dtype=torch.float32)))


def repetition(logits_BV: Tensor, seen_BV: Tensor, penalty_B1: Tensor) -> Tensor:
    """Return x / r if x > 0 else x r for the ids seen before (Keskar et al. 2019, CTRL; transformers, llama.cpp)."""
    return torch.where(seen_BV, torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1), logits_BV)


def counted(logits_BV: Tensor, counts_BV: Tensor, frequency_B1: Tensor, presence_B1: Tensor) -> Tensor:
    """Return x - count f - (count > 0) p, with the frequency and presence penalties f and p of OpenAI's API."""
    return logits_BV - counts_BV.float() * frequency_B1 - torch.where(counts_BV > 0, presence_B1, 0.0)


class Past(NamedTuple):
    """The ids that were written in each row, prompt and output, and what they repeat.

    Attributes:
        history_BT: int32, the id at each position.
        repeats_BT: int32, the length of the longest run of tokens without a breaker that ends both at the position and
            at the end of the text.
        breaker_BV: bool, the ids that no repetition goes across.
    """

    history_BT: Tensor
    repeats_BT: Tensor
    breaker_BV: Tensor

    def add(self, token_B: Tensor, position_B: Tensor, moved_B: Tensor) -> None:
        """Add the tokens drawn at these positions, in place; only rows in `moved_B` change."""
        # A position's length follows from its left neighbour's, so no repetition is searched.
        places_T = torch.arange(self.history_BT.shape[1], device=token_B.device)
        again_BT = (self.history_BT == token_B[:, None]) & (places_T < position_B[:, None])
        again_BT &= ~self.breaker_BV.gather(-1, token_B[:, None])
        longer_BT = torch.where(again_BT, torch.nn.functional.pad(self.repeats_BT[:, :-1], (1, 0)) + 1, 0)
        self.repeats_BT.copy_(torch.where(moved_B[:, None], longer_BT, self.repeats_BT))
        self.history_BT.scatter_(-1, position_B[:, None], token_B[:, None].to(torch.int32))

    def begin(self, row: int, prompt_ids: Sequence[int], breaker_V: Tensor | None) -> None:
        """Write a prompt to its row, in place."""
        ids_T = torch.tensor(prompt_ids)
        self.breaker_BV[row] = False if breaker_V is None else breaker_V
        broken = [] if breaker_V is None else breaker_V[ids_T].nonzero()[:, 0].tolist()
        # No repetition goes across a breaker, so none is longer than the ids since the last breaker.
        since = len(prompt_ids) - 1 - (broken[-1] if broken else -1)
        self.history_BT[row, : len(prompt_ids)] = ids_T
        self.repeats_BT[row, : len(prompt_ids)] = torch.tensor([min(length, since) for length in _repeats(prompt_ids)])


@torch.library.custom_op("monograph::largest_at", mutates_args=())
def largest_at(values_BT: Tensor, ids_BT: Tensor, vocabulary: int) -> Tensor:
    """Return for each id the largest of its values, at least 0, [B, V]."""
    # This is a custom operator, since Inductor (torch 2.13) lets `scatter_reduce` write over zeros that other kernels
    # may have read before: logits that a top-k reads whole came out without the penalty.
    return values_BT.new_zeros(values_BT.shape[0], vocabulary).scatter_reduce(-1, ids_BT, values_BT, "amax")


@largest_at.register_fake
def _(values_BT: Tensor, ids_BT: Tensor, vocabulary: int) -> Tensor:
    return values_BT.new_empty(values_BT.shape[0], vocabulary)


def dry(logits_BV: Tensor, past: Past, position_B1: Tensor, knobs: Mapping[str, Tensor]) -> Tensor:
    """Return x - m b^(L - a) for ids that would continue a repetition of L >= a tokens (DRY, P. E. Weidmann 2024).

    L is the length of the longest end of the text that also stands right before an earlier place of the id. A sequence
    breaker is never penalised.

    Args:
        logits_BV: fp32.
        past: the ids that were written.
        position_B1: int64, the position of the token to be drawn.
        knobs: "dry_multiplier" m, "dry_base" b, "dry_allowed_length" a, "dry_penalty_last_n", [B, 1] each.
    """
    allowed_B1, last_n_B1 = knobs["dry_allowed_length"], knobs["dry_penalty_last_n"]
    # The last position has no token after it, so it begins no repetition.
    places_T = torch.arange(past.history_BT.shape[1] - 1, device=logits_BV.device)
    start_B1 = torch.where(last_n_B1 < 0, 0, (position_B1 - last_n_B1).clamp(min=0))
    # A repetition may not reach back beyond the window.
    length_BT = past.repeats_BT[:, :-1].long().minimum(places_T - start_B1 + 1)
    counted_BT = (length_BT >= allowed_B1) & (places_T >= start_B1) & (places_T < position_B1 - 1)
    counted_BT &= knobs["dry_multiplier"] > 0
    exponent_BT = (length_BT - allowed_B1).clamp(min=0)
    # The power is a product of squares in fp64, which rounds alike everywhere; no library promises the bits of its pow.
    power_BT, square_B1 = torch.ones_like(exponent_BT, dtype=torch.float64), knobs["dry_base"].double()
    for bit in range(past.history_BT.shape[1].bit_length()):
        power_BT = torch.where((exponent_BT >> bit) & 1 == 1, power_BT * square_B1, power_BT)
        square_B1 = square_B1 * square_B1
    # The penalty stays finite, as an infinite one would forbid the id.
    penalty_BT = (knobs["dry_multiplier"].double() * power_BT).clamp(max=torch.finfo(torch.float32).max)
    penalty_BT = torch.where(counted_BT, penalty_BT.float(), 0.0)
    worst_BV = largest_at(penalty_BT, past.history_BT[:, 1:].long(), logits_BV.shape[-1])
    return torch.where(past.breaker_BV, logits_BV, logits_BV - worst_BV)


def _repeats(ids: Sequence[int]) -> list[int]:
    """Return the length of the longest run that ends at each position and at the end (Z-algorithm, backwards)."""
    # Linear in the prompt's length, where comparing all pairs of positions would be quadratic.
    turned, repeats = ids[::-1], [0] * len(ids)
    left = right = 0
    for place in range(1, len(ids)):
        length = min(right - place, repeats[place - left]) if place < right else 0
        while place + length < len(ids) and turned[length] == turned[place + length]:
            length += 1
        repeats[place] = length
        if place + length > right:
            left, right = place, place + length
    return repeats[::-1]


def breakers(texts: Sequence[str], pieces: Sequence[bytes]) -> Tensor:
    """Return which tokens contain one of the texts, bool [V].

    Raises:
        UsageError: a text is in no token, so it would have no effect.
    """
    wanted = [text.encode("utf-8", "surrogatepass") for text in texts]  # half of a surrogate pair is in no token
    holds = [[text in bytes(piece) for piece in pieces] for text in wanted]
    for text, held in zip(texts, holds, strict=True):
        if not any(held):
            raise UsageError(f"dry_sequence_breakers: no token contains {text!r}; give a text that one token holds")
    return torch.tensor(holds).any(0) if holds else torch.zeros(len(pieces), dtype=torch.bool)


def first_counts(sampling: Sampling, prompt_ids: Sequence[int], vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return a row's counts before its first draw, and the counts of the prompt that penalties see; int32 [V] each.

    The first are zero, or with the scope "all" those of the prompt.
    """
    seen = prompt_ids[-sampling.penalty_last_n :] if sampling.penalty_last_n > 0 else prompt_ids
    prompt_V = torch.bincount(torch.tensor(seen, dtype=torch.int64), minlength=vocabulary).to(COUNTS)
    return prompt_V if sampling.penalty_scope == "all" else torch.zeros_like(prompt_V), prompt_V


def count_drawn(counts_BV: Tensor, token_B: Tensor, running_B: Tensor, times: int = 1) -> None:
    """Add the drawn tokens of the running rows to the counts, in place, each so many times."""
    # `index_put_`, because a captured `scatter_add_` copies all counts (docs/log.md).
    rows_B = torch.arange(len(token_B), device=token_B.device)
    counts_BV.index_put_((rows_B, token_B), times * running_B.to(counts_BV.dtype), accumulate=True)
