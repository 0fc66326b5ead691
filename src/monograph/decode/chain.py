"""Turns logits into tokens on the device: edits, temperature and truncations in the chain's order, then the draw.

All are pure functions of tensors with static shapes that never wait for the device, so they are the same in eager mode,
compiled, captured and replayed. Arithmetic is in fp32 for every dtype of the model.

Shapes: B rows, V vocabulary, N some tokens of each row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from monograph.decode import penalties
from monograph.decode.candidates import Candidates, Truncation, everything, one_each
from monograph.decode.filters import FILTERS, log_total
from monograph.decode.knobs import EDITS, Chain
from monograph.decode.reproducible import greatest, greatest_sum, gumbel_noise_of, row_uniform

# Statuses of a row's draw. All but OK stop the row; after OVERFLOW the host repeats the draw with "search".
OK, NAN, DEAD, OVERFLOW = 0, 1, 2, 3


class Rows(NamedTuple):
    """The options and the state of each row, which the sampler reads in addition to the logits.

    A tensor that no stage of the chain reads may be None.

    Attributes:
        seed_B: int64.
        position_B: int64, the absolute position of the token to be drawn.
        generated_B: int64, tokens drawn so far.
        knobs: by name, fp32 or int64 [B], lists of ids [B, M] (`new_knobs`).
        counts_BV: int32, how often each id was drawn, added to the counts of `first_counts`.
        prompt_BV: bool, whether an id is in the prompt; int32, how often, if penalties see a window.
        past: the ids that were written.
        mu_B: fp32, the surprise in bits that mirostat allows.
    """

    seed_B: Tensor
    position_B: Tensor
    generated_B: Tensor
    knobs: dict[str, Tensor]
    counts_BV: Tensor | None = None
    prompt_BV: Tensor | None = None
    past: penalties.Past | None = None
    mu_B: Tensor | None = None


class LogProbabilities(NamedTuple):
    """Natural logarithms of probabilities, fp32: of the chosen tokens, [B], and of the N likeliest with ids, [B, N]."""

    chosen_B: Tensor
    ids_BN: Tensor
    values_BN: Tensor


class Drawn(NamedTuple):
    """The drawn tokens and how each draw ended.

    Attributes:
        token_B: int64, 0 where the status is not OK.
        status_B: int32. OK; NAN: a logit is NaN or +inf; DEAD: no token is allowed; OVERFLOW: the window did not hold
            all tokens that a filter keeps.
        logprobs: under the distribution drawn from, -inf where it has fewer tokens than are reported; None where the
            chain reports none.
    """

    token_B: Tensor
    status_B: Tensor
    logprobs: LogProbabilities | None = None


def sample(
    logits_BV: Tensor, rows: Rows, allowed_BV: Tensor | None, chain: Chain, truncation: Truncation = "window"
) -> Drawn:
    """Draw one token per row: argmax over the kept tokens of score + g, g = Gumbel noise of (seed, position, id).

    The argmax of scores with Gumbel noise is a draw from their softmax (Gumbel 1954; Maddison et al. 2014). A row with
    temperature 0 takes the argmax of its edited logits, the lowest id among equals.

    Args:
        logits_BV: [B, V], any float dtype.
        rows: the options and the state of each row.
        allowed_BV: [B, V] bool, tokens that a constraint allows; None: all.
        chain: the stages.
        truncation: how filters find their thresholds. "window" reads the likeliest tokens only and reports OVERFLOW
            where they are too few; "search" and "sort" read all tokens. Where the window is enough, all three give the
            same bits.
    """
    raw_BV = logits_BV.float()
    # argmax ignores scores of -inf, so an edit that forbids a token needs no further mask.
    # A NaN or +inf makes the row's greatest NaN, also at a token that a mask forbids.
    edited_BV = torch.where(raw_BV < torch.inf, edited(raw_BV, rows, allowed_BV, chain), torch.nan)
    greatest_B1 = edited_BV.amax(-1, keepdim=True)
    held_B = torch.ones_like(rows.position_B, dtype=torch.bool)
    token_B = edited_BV.argmax(-1)
    # Only these need the probabilities that are drawn from.
    reports = (chain.logprobs is not None and chain.processed) or "mirostat" in chain.stages
    logprobs = _of_one(token_B, chain.logprobs or 0) if reports else None
    if chain.draws:
        greedy_B = rows.knobs["temperature"] <= 0
        candidates = narrowed(edited_BV, rows, chain, truncation)
        token_B = torch.where(greedy_B, token_B, _drawn_from(candidates, rows))
        # A greedy row ignores the filters, so none can have overflowed.
        held_B = candidates.held_B1[:, 0] | greedy_B
        if logprobs is not None:
            drawn = _processed(candidates, token_B, chain.logprobs or 0)
            # Both are computed and `where` picks, since the host may not decide by a tensor.
            pairs = zip(logprobs, drawn, strict=True)
            logprobs = LogProbabilities(
                *(torch.where(greedy_B if a.ndim == 1 else greedy_B[:, None], a, b) for a, b in pairs)
            )
    sound_B = greatest_B1[:, 0] < torch.inf
    # The gravest status is set last: a filter's answer means nothing in a row with a NaN.
    status_B = torch.where(held_B, OK, OVERFLOW)
    status_B = torch.where(greatest_B1[:, 0] == -torch.inf, DEAD, status_B)
    status_B = torch.where(sound_B, status_B, NAN).to(torch.int32)
    return Drawn(torch.where(status_B == OK, token_B, 0), status_B, logprobs)


def _drawn_from(candidates: Candidates, rows: Rows) -> Tensor:
    """Return the tokens with the greatest score plus noise, the lowest id among equals; [B]."""
    scores_BN, ids_BN = candidates.scores_BN, candidates.ids_BN
    if ids_BN is None:
        return greatest_sum(scores_BN, rows.seed_B, rows.position_B)
    return greatest(scores_BN + gumbel_noise_of(rows.seed_B, rows.position_B, ids_BN), ids_BN)


def narrowed(edited_BV: Tensor, rows: Rows, chain: Chain, truncation: Truncation) -> Candidates:
    """Apply the chain's temperature and truncations, in its order, to edited logits."""
    # A list of ids has its own length for each graph; filters read only the numbers, one for each row.
    knobs = {name: value[:, None] for name, value in rows.knobs.items() if value.ndim == 1}
    if "xtc" in chain.stages:
        # This number is none of the noise's, so it is independent of the token that is drawn.
        knobs["xtc_uniform"] = row_uniform(rows.seed_B, rows.position_B)[:, None]
    if rows.mu_B is not None:
        knobs["mu"] = rows.mu_B[:, None]
    candidates = everything(edited_BV, truncation, chain.few)
    for stage in chain.stages:
        if stage not in EDITS:
            before, candidates = candidates, FILTERS[stage](candidates, knobs)
            # `_top_k` in knobs.py has already raised top_k's k to min_keep; later stages read fewer tokens.
            if "min_keep" in knobs and stage != "top_k" and not stage.endswith("temperature"):
                candidates = _with_at_least(knobs["min_keep"], before, candidates)
    return candidates


def _with_at_least(least_B1: Tensor, before: Candidates, after: Candidates) -> Candidates:
    """Return the tokens that a filter left, or in rows with fewer than `least` the `least` likeliest before it."""
    least_B1 = least_B1.minimum(before.left())
    short_B1 = after.left() < least_B1
    kept = before.likeliest(one_each, least_B1.clamp(min=1), short_B1)
    return after._replace(
        scores_BN=torch.where(short_B1, kept.scores_BN, after.scores_BN),
        high_B1=torch.where(short_B1, kept.high_B1, after.high_B1),
        held_B1=torch.where(short_B1, kept.held_B1, after.held_B1),
    )


def edited(logits_BV: Tensor, rows: Rows, allowed_BV: Tensor | None, chain: Chain) -> Tensor:
    """Apply bias, minimum of tokens, the constraint's mask and penalties to logits; fp32."""
    # All edits come before any filter, since they change which token is likelier.
    knobs = rows.knobs
    if "bias" in chain.stages:
        logits_BV = penalties.add_at(logits_BV, knobs["bias_ids"], knobs["bias_values"])
    # After bias, so that a bias cannot bring back a stop token.
    if "min_tokens" in chain.stages:
        logits_BV = penalties.forbid_until(
            logits_BV, knobs["stop_ids"], rows.generated_B[:, None], knobs["min_tokens"][:, None]
        )
    if allowed_BV is not None:
        logits_BV = torch.where(allowed_BV, logits_BV, -torch.inf)
    if "repetition" in chain.stages:
        assert rows.counts_BV is not None and rows.prompt_BV is not None
        seen_BV = rows.prompt_BV.bool() | (rows.counts_BV > 0)
        logits_BV = penalties.repetition(logits_BV, seen_BV, knobs["repetition_penalty"][:, None])
    if "counted" in chain.stages:
        assert rows.counts_BV is not None
        frequency_B1, presence_B1 = knobs["frequency_penalty"][:, None], knobs["presence_penalty"][:, None]
        logits_BV = penalties.counted(logits_BV, rows.counts_BV, frequency_B1, presence_B1)
    if "dry" in chain.stages:
        assert rows.past is not None
        dry_knobs = {name: value[:, None] for name, value in knobs.items() if name.startswith("dry")}
        logits_BV = penalties.dry(logits_BV, rows.past, rows.position_B[:, None], dry_knobs)
    return logits_BV


def log_probabilities(logits_BV: Tensor, token_B: Tensor, n: int) -> LogProbabilities:
    """Return the log softmax of raw logits, without edits and temperature, of the tokens and the n likeliest; fp32."""
    values_BV = logits_BV.float().log_softmax(-1)
    likeliest = values_BV.topk(n, dim=-1)
    return LogProbabilities(values_BV.gather(-1, token_B[:, None])[:, 0], likeliest.indices, likeliest.values)


def _processed(candidates: Candidates, token_B: Tensor, n: int) -> LogProbabilities:
    """Return log-probabilities under the distribution that the candidates are drawn from."""
    ids_BN, high_B1 = candidates.ids_BN, candidates.high_B1
    values_BN = candidates.scores_BN - high_B1 - log_total(candidates)
    if ids_BN is None:
        chosen_B = values_BN.gather(-1, token_B[:, None])[:, 0]
    else:
        chosen_B = torch.where(ids_BN == token_B[:, None], values_BN, -torch.inf).amax(-1)
    # If `nearest` left fewer than n tokens, pad: a report always has n places.
    few = min(n, values_BN.shape[-1])
    likeliest = values_BN.topk(few, dim=-1)
    places_BN = likeliest.indices if ids_BN is None else ids_BN.gather(-1, likeliest.indices)
    # Padding has the probability 0, like a token that was dropped.
    ids_BN = torch.nn.functional.pad(places_BN, (0, n - few))
    return LogProbabilities(chosen_B, ids_BN, torch.nn.functional.pad(likeliest.values, (0, n - few), value=-torch.inf))


def _of_one(token_B: Tensor, n: int) -> LogProbabilities:
    """Return log-probabilities under the distribution that gives the one token of each row the probability 1."""
    ids_BN = token_B[:, None].expand(-1, n)
    first_N = torch.arange(n, device=token_B.device) == 0
    chosen_B = torch.zeros_like(token_B, dtype=torch.float32)
    return LogProbabilities(chosen_B, ids_BN, torch.where(first_N, chosen_B[:, None], -torch.inf))
