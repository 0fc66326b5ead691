"""From logits to a token, on the device: edits, temperature and truncations in the chain's order, the draw.

Pure functions of tensors with static shapes, no wait for the device: the same in eager mode, compiled, captured and
replayed. All arithmetic is fp32, whatever the model's dtype.

Shapes: B rows, V vocabulary, N some tokens of each row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from monograph.decode import penalties
from monograph.decode.candidates import Candidates, Truncation, everything
from monograph.decode.filters import FILTERS
from monograph.decode.knobs import EDITS, Chain
from monograph.decode.noise import gumbel_noise, gumbel_noise_of, row_uniform

# What became of a row's draw. All but OK stop the row, and OVERFLOW asks for the same draw by "search".
OK, NAN, DEAD, OVERFLOW = 0, 1, 2, 3


class Rows(NamedTuple):
    """What the sampler knows of each row beside its logits.

    Attributes:
        seed_B: int64.
        position_B: int64, the absolute position of the token to be drawn.
        generated_B: int64, tokens drawn so far.
        knobs: by name, fp32 or int64 [B], lists of ids [B, M] (`new_knobs`).
        counts_BV: int32, how often each id was drawn; begins as `first_counts` says. None where the chain reads none.
        prompt_BV: bool, the ids of the prompt. None likewise.
    """

    seed_B: Tensor
    position_B: Tensor
    generated_B: Tensor
    knobs: dict[str, Tensor]
    counts_BV: Tensor | None = None
    prompt_BV: Tensor | None = None


class Drawn(NamedTuple):
    """The tokens, int64 [B] (0 where the status is not OK), and what became of each draw, int32 [B].

    NAN: a logit is NaN or +inf. DEAD: no token is allowed. OVERFLOW: the window did not hold what a filter keeps.
    """

    token_B: Tensor
    status_B: Tensor


class LogProbabilities(NamedTuple):
    """Natural logarithms under the model's raw logits: of the chosen token [B], and of the likeliest, [B, N] each."""

    chosen_B: Tensor
    ids_BN: Tensor
    values_BN: Tensor


def sample(
    logits_BV: Tensor, rows: Rows, allowed_BV: Tensor | None, chain: Chain, truncation: Truncation = "window"
) -> Drawn:
    """Draw one token per row: argmax over the kept tokens of score + g, g = Gumbel noise of (seed, position, id).

    The argmax of scores with Gumbel noise is a draw from their softmax (Gumbel 1954; Maddison et al. 2014). A row with
    temperature 0 takes the argmax of its edited logits, the lowest id among equals.

    Args:
        logits_BV: [B, V], any float dtype.
        rows: the rows' numbers and state.
        allowed_BV: [B, V] bool, tokens that a constraint allows; None: all.
        chain: the stages.
        truncation: how filters find their thresholds. "window" looks at the likeliest tokens and says so where they are
            too few; "search" and "sort" look at all. The same bits where the window holds.

    Returns:
        Tokens and statuses.
    """
    raw_BV = logits_BV.float()
    edited_BV = edited(raw_BV, rows, allowed_BV, chain)
    greatest_B1 = edited_BV.amax(-1, keepdim=True)
    held_B = torch.ones_like(rows.position_B, dtype=torch.bool)
    token_B = edited_BV.argmax(-1)
    if chain.draws:
        greedy_B = rows.knobs["temperature"] <= 0
        candidates = narrowed(edited_BV - greatest_B1, rows, chain, truncation)
        token_B = torch.where(greedy_B, token_B, _drawn_from(candidates, rows))
        held_B = candidates.held_B1[:, 0] | greedy_B
    # A comparison with NaN is false, so each of these is false for a row that has one.
    sound_B = (raw_BV.amax(-1) < torch.inf) & (greatest_B1[:, 0] < torch.inf)
    status_B = torch.where(held_B, OK, OVERFLOW)
    status_B = torch.where(greatest_B1[:, 0] == -torch.inf, DEAD, status_B)
    status_B = torch.where(sound_B, status_B, NAN).to(torch.int32)
    return Drawn(torch.where(status_B == OK, token_B, 0), status_B)


def _drawn_from(candidates: Candidates, rows: Rows) -> Tensor:
    """The token of the greatest score with noise, the lowest id among equals; [B]."""
    scores_BN, ids_BN = candidates.masked(), candidates.ids_BN
    if ids_BN is None:
        return (scores_BN + gumbel_noise(rows.seed_B, rows.position_B, scores_BN.shape[-1])).argmax(-1)
    noisy_BN = scores_BN + gumbel_noise_of(rows.seed_B, rows.position_B, ids_BN)
    greatest_B1 = noisy_BN.amax(-1, keepdim=True)
    return torch.where(noisy_BN == greatest_B1, ids_BN, ids_BN.amax(-1, keepdim=True)).amin(-1)


def narrowed(scores_BV: Tensor, rows: Rows, chain: Chain, truncation: Truncation) -> Candidates:
    """What is left of scores whose largest is 0 after the chain's temperature and truncations, in its order."""
    knobs = {name: value[:, None] for name, value in rows.knobs.items() if value.ndim == 1}
    if "xtc" in chain.stages:
        knobs["xtc_uniform"] = row_uniform(rows.seed_B, rows.position_B)[:, None]
    candidates = everything(scores_BV, truncation, chain.few)
    for stage in chain.stages:
        if stage not in EDITS:
            candidates = FILTERS[stage](candidates, knobs)
    return candidates


def edited(logits_BV: Tensor, rows: Rows, allowed_BV: Tensor | None, chain: Chain) -> Tensor:
    """Bias, minimum of tokens, the constraint's mask, penalties; fp32."""
    knobs = rows.knobs
    if "bias" in chain.stages:
        logits_BV = penalties.add_at(logits_BV, knobs["bias_ids"], knobs["bias_values"])
    if "min_tokens" in chain.stages:
        logits_BV = penalties.forbid_until(
            logits_BV, knobs["stop_ids"], rows.generated_B[:, None], knobs["min_tokens"][:, None]
        )
    if allowed_BV is not None:
        logits_BV = torch.where(allowed_BV, logits_BV, -torch.inf)
    if "repetition" in chain.stages:
        assert rows.counts_BV is not None and rows.prompt_BV is not None
        seen_BV = rows.prompt_BV | (rows.counts_BV > 0)
        logits_BV = penalties.repetition(logits_BV, seen_BV, knobs["repetition_penalty"][:, None])
    if "counted" in chain.stages:
        assert rows.counts_BV is not None
        frequency_B1, presence_B1 = knobs["frequency_penalty"][:, None], knobs["presence_penalty"][:, None]
        logits_BV = penalties.counted(logits_BV, rows.counts_BV, frequency_B1, presence_B1)
    return logits_BV


def log_probabilities(logits_BV: Tensor, token_B: Tensor, n: int) -> LogProbabilities:
    """Log softmax of the raw logits (no edit, no temperature), fp32: of the tokens and of the n likeliest."""
    values_BV = logits_BV.float().log_softmax(-1)
    likeliest = values_BV.topk(n, dim=-1)
    return LogProbabilities(values_BV.gather(-1, token_B[:, None])[:, 0], likeliest.indices, likeliest.values)
