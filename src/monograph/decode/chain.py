"""Turns logits into tokens on the device: edits, temperature and truncations in the chain's order,
then the draw.

Edits come before any filter: a bias for ids, a minimum of tokens, penalties for earlier ids. All
are pure functions of tensors with static shapes that never wait for the device, so they are the
same in eager mode, compiled, captured and replayed. Arithmetic is in fp32 for every dtype of the
model.

Shapes: B rows, V vocabulary, M ids that are listed for a row, padded with -1, T positions of a row,
N some tokens of each row.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.decode.candidates import Candidates, Truncation, everything, one_each
from monograph.decode.filters import FILTERS, log_total
from monograph.decode.knobs import EDITS, Chain
from monograph.decode.reproducible import greatest, greatest_sum, gumbel_noise_of, row_uniform
from monograph.decode.sampling import Sampling
from monograph.errors import UsageError

# The dtype of counts of ids. On a CPU Inductor vectorises int32 but not int16, with which every
# loop that was fused with the counts became scalar (dev/log.md).
COUNTS = torch.int32


def _add_at(logits_BV: Tensor, ids_BM: Tensor, values_BM: Tensor) -> Tensor:
    """Return logits[b, ids[b, m]] + values[b, m]; an id of -1 adds nothing, and -inf forbids the
    id.
    """
    # The length of a list is part of the graph, so lists are padded; padding adds 0 to id 0.
    listed_BM = ids_BM >= 0
    return logits_BV.scatter_add(
        -1, torch.where(listed_BM, ids_BM, 0), torch.where(listed_BM, values_BM, 0.0)
    )


def _forbid_until(
    logits_BV: Tensor, ids_BM: Tensor, generated_B1: Tensor, least_B1: Tensor
) -> Tensor:
    """Return logits that are -inf at the listed ids in rows that have drawn fewer than `least`
    tokens.
    """
    early_BM = (generated_B1 < least_B1).expand_as(ids_BM)
    return _add_at(
        logits_BV,
        ids_BM,
        torch.where(early_BM, -torch.inf, torch.zeros_like(ids_BM, dtype=torch.float32)),
    )


def repetition(logits_BV: Tensor, seen_BV: Tensor, penalty_B1: Tensor) -> Tensor:
    """Return x / r if x > 0 else x r for the ids seen before (Keskar et al. 2019, CTRL;
    transformers, llama.cpp).
    """
    return torch.where(
        seen_BV,
        torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1),
        logits_BV,
    )


def counted(
    logits_BV: Tensor, counts_BV: Tensor, frequency_B1: Tensor, presence_B1: Tensor
) -> Tensor:
    """Return x - count f - (count > 0) p, with the frequency and presence penalties f and p of
    OpenAI's API.
    """
    return (
        logits_BV - counts_BV.float() * frequency_B1 - torch.where(counts_BV > 0, presence_B1, 0.0)
    )


class Past(NamedTuple):
    """The ids that were written in each row, prompt and output, and what they repeat.

    Attributes:
        history_BT: int32, the id at each position.
        repeats_BT: int32, the length of the longest run of tokens without a breaker that ends both
            at the position and at the end of the text.
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
        longer_BT = torch.where(
            again_BT, torch.nn.functional.pad(self.repeats_BT[:, :-1], (1, 0)) + 1, 0
        )
        self.repeats_BT.copy_(torch.where(moved_B[:, None], longer_BT, self.repeats_BT))
        self.history_BT.scatter_(-1, position_B[:, None], token_B[:, None].to(torch.int32))

    def begin(self, row: int, prompt_ids: Sequence[int], breaker_V: Tensor | None) -> None:
        """Write a prompt to its row, in place."""
        ids_T = torch.tensor(prompt_ids)
        self.breaker_BV[row] = False if breaker_V is None else breaker_V
        broken = [] if breaker_V is None else breaker_V[ids_T].nonzero()[:, 0].tolist()
        # No repetition goes across a breaker, so none is longer than the ids since the last
        # breaker.
        since = len(prompt_ids) - 1 - (broken[-1] if broken else -1)
        self.history_BT[row, : len(prompt_ids)] = ids_T
        self.repeats_BT[row, : len(prompt_ids)] = torch.tensor(
            [min(length, since) for length in _repeats(prompt_ids)]
        )


@torch.library.custom_op("monograph::largest_at", mutates_args=())
def largest_at(values_BT: Tensor, ids_BT: Tensor, vocabulary: int) -> Tensor:
    """Return for each id the largest of its values, at least 0, [B, V]."""
    # This is a custom operator, since Inductor (torch 2.13) lets `scatter_reduce` write over zeros
    # that other kernels may have read before: logits that a top-k reads whole came out without the
    # penalty.
    return values_BT.new_zeros(values_BT.shape[0], vocabulary).scatter_reduce(
        -1, ids_BT, values_BT, "amax"
    )


@largest_at.register_fake
def _(values_BT: Tensor, ids_BT: Tensor, vocabulary: int) -> Tensor:
    return values_BT.new_empty(values_BT.shape[0], vocabulary)


def dry(logits_BV: Tensor, past: Past, position_B1: Tensor, knobs: Mapping[str, Tensor]) -> Tensor:
    """Return x - m b^(L - a) for ids that would continue a repetition of L >= a tokens (DRY, P. E.
    Weidmann 2024).

    L is the length of the longest end of the text that also stands right before an earlier place of
    the id. A sequence breaker is never penalised.

    Args:
        logits_BV: fp32.
        past: the ids that were written.
        position_B1: int64, the position of the token to be drawn.
        knobs: "dry_multiplier" m, "dry_base" b, "dry_allowed_length" a, "dry_penalty_last_n", [B,
            1] each.
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
    # The power is a product of squares in fp64, which rounds alike everywhere; no library promises
    # the bits of its pow.
    power_BT = torch.ones_like(exponent_BT, dtype=torch.float64)
    square_B1 = knobs["dry_base"].double()
    for bit in range(past.history_BT.shape[1].bit_length()):
        power_BT = torch.where((exponent_BT >> bit) & 1 == 1, power_BT * square_B1, power_BT)
        square_B1 = square_B1 * square_B1
    # The penalty stays finite, as an infinite one would forbid the id.
    penalty_BT = (knobs["dry_multiplier"].double() * power_BT).clamp(
        max=torch.finfo(torch.float32).max
    )
    penalty_BT = torch.where(counted_BT, penalty_BT.float(), 0.0)
    worst_BV = largest_at(penalty_BT, past.history_BT[:, 1:].long(), logits_BV.shape[-1])
    return torch.where(past.breaker_BV, logits_BV, logits_BV - worst_BV)


def _repeats(ids: Sequence[int]) -> list[int]:
    """Return the length of the longest run that ends at each position and at the end (Z-algorithm,
    backwards).
    """
    # Linear in the prompt's length, where comparing all pairs of positions would be quadratic.
    turned = ids[::-1]
    repeats = [0] * len(ids)
    left = right = 0
    for place in range(1, len(ids)):
        length = min(right - place, repeats[place - left]) if place < right else 0
        while place + length < len(ids) and turned[length] == turned[place + length]:
            length += 1
        repeats[place] = length
        if place + length > right:
            left = place
            right = place + length
    return repeats[::-1]


def breakers(texts: Sequence[str], pieces: Sequence[bytes]) -> Tensor:
    """Return which tokens contain one of the texts, bool [V].

    Raises:
        UsageError: a text is in no token, so it would have no effect.
    """
    # Half of a surrogate pair is in no token.
    wanted = [text.encode("utf-8", "surrogatepass") for text in texts]
    holds = [[text in bytes(piece) for piece in pieces] for text in wanted]
    for text, held in zip(texts, holds, strict=True):
        if not any(held):
            raise UsageError(
                f"dry_sequence_breakers: no token contains {text!r}; give a text that one token holds"
            )
    return torch.tensor(holds).any(0) if holds else torch.zeros(len(pieces), dtype=torch.bool)


def first_counts(
    sampling: Sampling, prompt_ids: Sequence[int], vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Return a row's counts before its first draw, and the counts of the prompt that penalties see;
    int32 [V] each.

    The first are zero, or with the scope "all" those of the prompt.
    """
    seen = prompt_ids[-sampling.penalty_last_n :] if sampling.penalty_last_n > 0 else prompt_ids
    prompt_V = torch.bincount(torch.tensor(seen, dtype=torch.int64), minlength=vocabulary).to(
        COUNTS
    )
    return prompt_V if sampling.penalty_scope == "all" else torch.zeros_like(prompt_V), prompt_V


def count_drawn(counts_BV: Tensor, token_B: Tensor, running_B: Tensor, times: int = 1) -> None:
    """Add the drawn tokens of the running rows to the counts, in place, each so many times."""
    # `index_put_`, because a captured `scatter_add_` copies all counts (dev/log.md).
    rows_B = torch.arange(len(token_B), device=token_B.device)
    counts_BV.index_put_((rows_B, token_B), times * running_B.to(counts_BV.dtype), accumulate=True)


# Statuses of a row's draw. All but OK stop the row; after OVERFLOW the host repeats the draw with
# "search".
OK = 0
NAN = 1
DEAD = 2
OVERFLOW = 3


class Rows(NamedTuple):
    """The options and the state of each row, which the sampler reads in addition to the logits.

    A tensor that no stage of the chain reads may be None.

    Attributes:
        seed_B: int64.
        position_B: int64, the absolute position of the token to be drawn.
        generated_B: int64, tokens drawn so far.
        knobs: by name, fp32 or int64 [B], lists of ids [B, M] (`new_knobs`).
        counts_BV: int32, how often each id was drawn, added to the counts of `first_counts`.
        prompt_BV: bool, whether an id is in the prompt; int32, how often, if penalties see a
            window.
        past: the ids that were written.
        mu_B: fp32, the surprise in bits that mirostat allows.
    """

    seed_B: Tensor
    position_B: Tensor
    generated_B: Tensor
    knobs: dict[str, Tensor]
    counts_BV: Tensor | None = None
    prompt_BV: Tensor | None = None
    past: Past | None = None
    mu_B: Tensor | None = None


class LogProbabilities(NamedTuple):
    """Natural logarithms of probabilities, fp32: of the chosen tokens, [B], and of the N likeliest
    with ids, [B, N].
    """

    chosen_B: Tensor
    ids_BN: Tensor
    values_BN: Tensor


class Drawn(NamedTuple):
    """The drawn tokens and how each draw ended.

    Attributes:
        token_B: int64, 0 where the status is not OK.
        status_B: int32. OK; NAN: a logit is NaN or +inf; DEAD: no token is allowed; OVERFLOW: the
            window did not hold all tokens that a filter keeps.
        logprobs: under the distribution drawn from, -inf where it has fewer tokens than are
            reported; None where the chain reports none.
    """

    token_B: Tensor
    status_B: Tensor
    logprobs: LogProbabilities | None = None


def sample(
    logits_BV: Tensor,
    rows: Rows,
    allowed_BV: Tensor | None,
    chain: Chain,
    truncation: Truncation = "window",
) -> Drawn:
    """Draw one token per row: argmax over the kept tokens of score + g, g = Gumbel noise of (seed,
    position, id).

    The argmax of scores with Gumbel noise is a draw from their softmax (Gumbel 1954; Maddison et
    al. 2014). A row with temperature 0 takes the argmax of its edited logits, the lowest id among
    equals.

    Args:
        logits_BV: [B, V], any float dtype.
        rows: the options and the state of each row.
        allowed_BV: [B, V] bool, tokens that a constraint allows; None: all.
        chain: the stages.
        truncation: how filters find their thresholds. "window" reads the likeliest tokens only and
            reports OVERFLOW where they are too few; "search" and "sort" read all tokens. Where the
            window is enough, all three give the same bits.
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
                *(
                    torch.where(greedy_B if a.ndim == 1 else greedy_B[:, None], a, b)
                    for a, b in pairs
                )
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
    # A list of ids has its own length for each graph; filters read only the numbers, one for each
    # row.
    knobs = {name: value[:, None] for name, value in rows.knobs.items() if value.ndim == 1}
    if "xtc" in chain.stages:
        # This number is none of the noise's, so it is independent of the token that is drawn.
        knobs["xtc_uniform"] = row_uniform(rows.seed_B, rows.position_B)[:, None]
    if rows.mu_B is not None:
        knobs["mu"] = rows.mu_B[:, None]
    candidates = everything(edited_BV, truncation, chain.few)
    for stage in chain.stages:
        if stage not in EDITS:
            before = candidates
            candidates = FILTERS[stage].apply(candidates, knobs)
            # `kept_at_most` has already raised top_k's k to min_keep; later stages read fewer
            # tokens.
            if "min_keep" in knobs and stage != "top_k" and not FILTERS[stage].is_temperature:
                candidates = _with_at_least(knobs["min_keep"], before, candidates)
    return candidates


def _with_at_least(least_B1: Tensor, before: Candidates, after: Candidates) -> Candidates:
    """Return the tokens that a filter left, or in rows with fewer than `least` the `least`
    likeliest before it.
    """
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
        logits_BV = _add_at(logits_BV, knobs["bias_ids"], knobs["bias_values"])
    # After bias, so that a bias cannot bring back a stop token.
    if "min_tokens" in chain.stages:
        logits_BV = _forbid_until(
            logits_BV, knobs["stop_ids"], rows.generated_B[:, None], knobs["min_tokens"][:, None]
        )
    if allowed_BV is not None:
        logits_BV = torch.where(allowed_BV, logits_BV, -torch.inf)
    if "repetition" in chain.stages:
        assert rows.counts_BV is not None and rows.prompt_BV is not None
        seen_BV = rows.prompt_BV.bool() | (rows.counts_BV > 0)
        logits_BV = repetition(logits_BV, seen_BV, knobs["repetition_penalty"][:, None])
    if "counted" in chain.stages:
        assert rows.counts_BV is not None
        frequency_B1, presence_B1 = (
            knobs["frequency_penalty"][:, None],
            knobs["presence_penalty"][:, None],
        )
        logits_BV = counted(logits_BV, rows.counts_BV, frequency_B1, presence_B1)
    if "dry" in chain.stages:
        assert rows.past is not None
        dry_knobs = {
            name: value[:, None] for name, value in knobs.items() if name.startswith("dry")
        }
        logits_BV = dry(logits_BV, rows.past, rows.position_B[:, None], dry_knobs)
    return logits_BV


def log_probabilities(logits_BV: Tensor, token_B: Tensor, n: int) -> LogProbabilities:
    """Return the log softmax of raw logits, without edits and temperature, of the tokens and the n
    likeliest; fp32.
    """
    values_BV = logits_BV.float().log_softmax(-1)
    likeliest = values_BV.topk(n, dim=-1)
    return LogProbabilities(
        values_BV.gather(-1, token_B[:, None])[:, 0], likeliest.indices, likeliest.values
    )


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
    return LogProbabilities(
        chosen_B, ids_BN, torch.nn.functional.pad(likeliest.values, (0, n - few), value=-torch.inf)
    )


def _of_one(token_B: Tensor, n: int) -> LogProbabilities:
    """Return log-probabilities under the distribution that gives the one token of each row the
    probability 1.
    """
    ids_BN = token_B[:, None].expand(-1, n)
    first_N = torch.arange(n, device=token_B.device) == 0
    chosen_B = torch.zeros_like(token_B, dtype=torch.float32)
    return LogProbabilities(chosen_B, ids_BN, torch.where(first_N, chosen_B[:, None], -torch.inf))
