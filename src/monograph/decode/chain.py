"""The sampler on the device: it edits logits, applies temperature and filters in the chain's order,
and samples a token.

A chain is the list of the stages that some requests need (`monograph.decode.knobs`). Its knobs are
the numbers that the stages read for each row. The edits are the stages before the temperature and the
filters: a bias for ids, a minimum number of tokens, a constraint, and penalties for earlier ids.

All stages are pure functions of tensors with static shapes, and never wait for the device. So a row
gets the same token whether the sampler runs eagerly, compiled, captured or replayed. Arithmetic is in
fp32 for every dtype of the model.

Shapes: B rows, V vocabulary, M listed ids of a row, padded with -1, T positions of a row; in
`Candidates`, N the tokens that a filter reads; in `LogProbabilities`, N the likeliest tokens that are
reported; 1 an axis of length 1.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.decode.candidates import Candidates, Truncation, all_candidates, unit_weights
from monograph.decode.filters import FILTERS, log_total
from monograph.decode.knobs import EDITS, Chain
from monograph.decode.reproducible import argmax_id, argmax_with_noise, gumbel_noise_of, row_uniform
from monograph.decode.sampling import Sampling
from monograph.errors import UsageError

# The dtype of counts of ids. On a CPU Inductor does not vectorise int16, nor any loop that it fuses
# with such counts (dev/log.md).
COUNT_DTYPE = torch.int32


def _add_at(logits_BV: Tensor, ids_BM: Tensor, values_BM: Tensor) -> Tensor:
    """Return the logits of each row with its values added at its ids; -inf forbids an id."""
    # The graph is made for one length of lists, so shorter ones are padded with the id -1. For such an
    # entry, 0 is added to the logit of id 0.
    is_listed_BM = ids_BM >= 0
    return logits_BV.scatter_add(
        -1, torch.where(is_listed_BM, ids_BM, 0), torch.where(is_listed_BM, values_BM, 0.0)
    )


def _forbid_until(
    logits_BV: Tensor, ids_BM: Tensor, generated_B1: Tensor, min_tokens_B1: Tensor
) -> Tensor:
    """Forbid the listed ids in rows that have sampled fewer than `min_tokens` tokens."""
    is_early_BM = (generated_B1 < min_tokens_B1).expand_as(ids_BM)
    zeros_BM = torch.zeros_like(ids_BM, dtype=torch.float32)
    return _add_at(logits_BV, ids_BM, torch.where(is_early_BM, -torch.inf, zeros_BM))


def penalise_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty_B1: Tensor) -> Tensor:
    """Return x / r if x > 0, else x r, for the ids in `seen_BV`, and x for all others.

    x is a logit, and r the penalty. The source is Keskar et al. 2019, CTRL; transformers and
    llama.cpp do the same.
    """
    penalised_BV = torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    return torch.where(seen_BV, penalised_BV, logits_BV)


def penalise_frequency_and_presence(
    logits_BV: Tensor, counts_BV: Tensor, frequency_B1: Tensor, presence_B1: Tensor
) -> Tensor:
    """Return x - count f - (count > 0) p.

    x is a logit, and f and p are the frequency and the presence penalty of OpenAI's API.
    """
    frequency_BV = counts_BV.float() * frequency_B1
    presence_BV = torch.where(counts_BV > 0, presence_B1, 0.0)
    return logits_BV - frequency_BV - presence_BV


class Past(NamedTuple):
    """The ids of each row's text, which is prompt and output, and their repetitions.

    A repetition is a sequence of tokens that ends the text and is also found earlier in it, such as
    "ab" in the text "abcab", whose earlier "ab" ends at position 1. The next token continues it if it
    is the token after that earlier position, here "c".

    Attributes:
        history_BT: int32, the id at each position.
        repeats_BT: int32, for each position before the text's last token, the length of the longest
            repetition whose earlier place ends there; 0: none. For "abcab" it is 0, 2, 0, 0.
        breaker_BV: bool, the sequence breakers: tokens that no repetition contains.
    """

    history_BT: Tensor
    repeats_BT: Tensor
    breaker_BV: Tensor

    def add(self, token_B: Tensor, position_B: Tensor, sampled_B: Tensor) -> None:
        """Add the tokens at these positions, in place, in the rows of `sampled_B`.

        Args:
            token_B: int64, the rows' last tokens.
            position_B: int64, their positions.
            sampled_B: bool, the rows that sampled a token in this step. The texts of the others do
                not change.
        """
        positions_T = torch.arange(self.history_BT.shape[1], device=token_B.device)
        is_same_BT = (self.history_BT == token_B[:, None]) & (positions_T < position_B[:, None])
        is_same_BT &= ~self.breaker_BV.gather(-1, token_B[:, None])
        # The new token ends a repetition at each position t with the same token:
        # repeats[t] = old repeats[t - 1] + 1. At all other positions no repetition ends any more.
        previous_BT = torch.nn.functional.pad(self.repeats_BT[:, :-1], (1, 0))
        repeats_BT = torch.where(is_same_BT, previous_BT + 1, 0)
        self.repeats_BT.copy_(torch.where(sampled_B[:, None], repeats_BT, self.repeats_BT))
        # This needs no `where`. In a row that has sampled nothing, it writes the last token to the
        # position where it already is. In a free row, it writes to the first or the last position,
        # which the next request writes before it reads it.
        self.history_BT.scatter_(-1, position_B[:, None], token_B[:, None].to(torch.int32))

    def write_prompt(self, row: int, prompt_ids: Sequence[int], breaker_V: Tensor | None) -> None:
        """Write a prompt to its row, in place.

        Args:
            row: the row.
            prompt_ids: the prompt.
            breaker_V: bool, the sequence breakers; None: no breakers.
        """
        ids_T = torch.tensor(prompt_ids)
        self.breaker_BV[row] = False if breaker_V is None else breaker_V
        last_breaker = -1
        if breaker_V is not None:
            breaker_positions = breaker_V[ids_T].nonzero()[:, 0].tolist()
            last_breaker = breaker_positions[-1] if breaker_positions else -1
        # No repetition is longer than the number of ids after the last breaker.
        longest = len(prompt_ids) - 1 - last_breaker
        repeats = [min(length, longest) for length in _repetition_lengths(prompt_ids)]
        self.history_BT[row, : len(prompt_ids)] = ids_T
        self.repeats_BT[row, : len(prompt_ids)] = torch.tensor(repeats)


def _repetition_lengths(ids: Sequence[int]) -> list[int]:
    """Return the lengths of repetitions (`Past.repeats_BT`), without regard to sequence breakers.

    For each position this is the length of the longest sequence that ends both there and at the end of
    `ids`; it is 0 for the last position. This is the Z-algorithm on the reversed ids, whose time is
    proportional to their number.
    """
    reverse = ids[::-1]
    lengths = [0] * len(ids)
    # The match that reaches furthest right: reverse[left:right] equals the beginning of `reverse`.
    left = 0
    right = 0
    for start in range(1, len(ids)):
        length = 0
        if start < right:
            # Inside the match, reverse[start:right] equals reverse[start - left : right - left]. So
            # `start` has the length that was found at `start - left`, as far as the match reaches.
            length = min(right - start, lengths[start - left])
        while start + length < len(ids) and reverse[length] == reverse[start + length]:
            length += 1
        lengths[start] = length
        if start + length > right:
            left = start
            right = start + length
    return lengths[::-1]


@torch.library.custom_op("monograph::largest_at", mutates_args=())
def largest_at(values_BT: Tensor, ids_BT: Tensor, vocabulary: int) -> Tensor:
    """Return for each id the largest of its values, but at least 0; [B, V].

    Args:
        values_BT: the values, one for each position.
        ids_BT: int64, the id at each position.
        vocabulary: V.
    """
    # This is a custom operator because of a fault of Inductor (torch 2.13). In a graph, `scatter_reduce`
    # may write to the zeros only after other kernels have read them: a top-k over all tokens then read
    # logits without the penalty.
    return values_BT.new_zeros(values_BT.shape[0], vocabulary).scatter_reduce(
        -1, ids_BT, values_BT, "amax"
    )


@largest_at.register_fake
def _(values_BT: Tensor, ids_BT: Tensor, vocabulary: int) -> Tensor:
    return values_BT.new_empty(values_BT.shape[0], vocabulary)


def penalise_dry(
    logits_BV: Tensor, past: Past, position_B1: Tensor, knobs: Mapping[str, Tensor]
) -> Tensor:
    """Return x - m b^(L - a) for ids that would continue a repetition of L >= a tokens, else x.

    This is DRY (P. E. Weidmann 2024). x is a logit, L is the length of the longest repetition that
    the id would continue (`Past`), and m, b and a are the knobs below. A sequence breaker has no
    penalty.

    Args:
        logits_BV: fp32.
        past: the ids of prompt and output.
        position_B1: int64, the position of the token to be sampled.
        knobs: "dry_multiplier" m, "dry_base" b, "dry_allowed_length" a, and "dry_penalty_last_n",
            the number of last tokens in which repetitions are searched; [B, 1] each.
    """
    allowed_length_B1 = knobs["dry_allowed_length"]
    last_n_B1 = knobs["dry_penalty_last_n"]
    # The positions at which the earlier place of a repetition may end. The buffer's last position is
    # left out, since the id at the next position is read below.
    positions_T = torch.arange(past.history_BT.shape[1] - 1, device=logits_BV.device)
    window_begin_B1 = torch.where(last_n_B1 < 0, 0, (position_B1 - last_n_B1).clamp(min=0))
    # A repetition does not begin before the window.
    length_BT = past.repeats_BT[:, :-1].long().minimum(positions_T - window_begin_B1 + 1)
    is_long_enough_BT = length_BT >= allowed_length_B1
    # The earlier place ends before the text's last token, which is at `position_B1` - 1.
    is_in_window_BT = (positions_T >= window_begin_B1) & (positions_T < position_B1 - 1)
    is_penalised_BT = is_long_enough_BT & is_in_window_BT
    is_penalised_BT &= knobs["dry_multiplier"] > 0
    exponent_BT = (length_BT - allowed_length_B1).clamp(min=0)
    # The power is computed by repeated squaring in fp64. It has the same bits on every device, while
    # the pow of libraries does not.
    power_BT = torch.ones_like(exponent_BT, dtype=torch.float64)
    square_B1 = knobs["dry_base"].double()
    for bit in range(past.history_BT.shape[1].bit_length()):
        power_BT = torch.where((exponent_BT >> bit) & 1 == 1, power_BT * square_B1, power_BT)
        square_B1 = square_B1 * square_B1
    # The penalty must stay finite, since an infinite one would forbid the id.
    penalty_BT = (knobs["dry_multiplier"].double() * power_BT).clamp(
        max=torch.finfo(torch.float32).max
    )
    penalty_BT = torch.where(is_penalised_BT, penalty_BT.float(), 0.0)
    # The penalty of a position is for the id at the next position, which would continue the repetition.
    penalty_BV = largest_at(penalty_BT, past.history_BT[:, 1:].long(), logits_BV.shape[-1])
    return torch.where(past.breaker_BV, logits_BV, logits_BV - penalty_BV)


def breakers(texts: Sequence[str], pieces: Sequence[bytes]) -> Tensor:
    """Return which tokens contain one of the texts, bool [V].

    Raises:
        UsageError: a text is in no token, so it would have no effect.
    """
    if not texts:
        return torch.zeros(len(pieces), dtype=torch.bool)
    # Half of a surrogate pair cannot be encoded as UTF-8. With "surrogatepass" it becomes bytes all the
    # same, and is refused below like any other text that no token contains.
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    is_in_piece = [[text in piece for piece in pieces] for text in encoded]
    for text, is_in_each in zip(texts, is_in_piece, strict=True):
        if not any(is_in_each):
            raise UsageError(
                f"dry_sequence_breakers: no token contains {text!r}; give a text that one token holds"
            )
    return torch.tensor(is_in_piece).any(0)


def first_counts(
    sampling: Sampling, prompt_ids: Sequence[int], vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Return a row's counts of ids before its first token is sampled.

    Returns:
        counts_V: int32 [V], the counts that the frequency and presence penalties read: zeros, or with
            the scope "all" the same as `prompt_V`.
        prompt_V: int32 [V], how often each id is in the prompt, or in its last `penalty_last_n` ids.
    """
    window_ids = prompt_ids
    if sampling.penalty_last_n > 0:
        window_ids = prompt_ids[-sampling.penalty_last_n :]
    ids = torch.tensor(window_ids, dtype=torch.int64)
    prompt_V = torch.bincount(ids, minlength=vocabulary).to(COUNT_DTYPE)
    counts_V = prompt_V if sampling.penalty_scope == "all" else torch.zeros_like(prompt_V)
    return counts_V, prompt_V


def add_to_counts(counts_BV: Tensor, token_B: Tensor, is_used_B: Tensor, amount: int = 1) -> None:
    """Add an amount to the count of each row's token, in place, in the rows of `is_used_B`."""
    # `index_put_` is used because a captured `scatter_add_` copies all counts (dev/log.md).
    rows_B = torch.arange(len(token_B), device=token_B.device)
    counts_BV.index_put_((rows_B, token_B), amount * is_used_B.to(counts_BV.dtype), accumulate=True)


# The statuses of a row after sampling; see `SampledTokens`. After a status other than OK, a row samples
# no further token. After UNDECIDED, the host repeats the row's step with filters that read all tokens
# and not only the likeliest ones, which takes longer (`truncation` of `sample`).
OK = 0
NOT_FINITE = 1
NOTHING_ALLOWED = 2
UNDECIDED = 3


class SamplerRows(NamedTuple):
    """The options and the state of each row, which the sampler reads in addition to the logits.

    A tensor that no stage of the chain reads may be None.

    Attributes:
        seed_B: int64, the seed of the random numbers.
        position_B: int64, the absolute position of the token to be sampled.
        generated_B: int64, the number of sampled tokens.
        knobs: the numbers of the stages by name, fp32 or int64 [B], or lists of ids and biases
            [B, M] (`new_knobs`).
        counts_BV: int32, `counts_V` of `first_counts` plus how often each id was sampled.
        prompt_BV: bool, whether an id is in the prompt; or int32, if requests may have the stage
            "last_n" (`State.allocate`): how often it is in the part of the prompt that penalties
            still see, which becomes shorter with each token (`State.uncount_leaving_token`).
        past: the ids of prompt and output, and their repetitions.
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
    """Natural logarithms of probabilities.

    Attributes:
        chosen_B: fp32, those of the sampled tokens.
        ids_BN: int64, the ids of the N likeliest tokens, the likeliest first.
        values_BN: fp32, those of the N likeliest tokens.
    """

    chosen_B: Tensor
    ids_BN: Tensor
    values_BN: Tensor


class SampledTokens(NamedTuple):
    """A sampled token of each row.

    Attributes:
        token_B: int64, 0 where the status is not OK.
        status_B: int32. OK; NOT_FINITE: a logit is NaN or +inf; NOTHING_ALLOWED: no token is allowed;
            UNDECIDED: the window, which is the likeliest tokens that filters read, did not hold all
            tokens that a filter keeps.
        logprobs: log-probabilities under the distribution that is sampled from. If that has fewer
            than N tokens, the places after them have -inf. None if the chain does not need them.
    """

    token_B: Tensor
    status_B: Tensor
    logprobs: LogProbabilities | None = None


def sample(
    logits_BV: Tensor,
    rows: SamplerRows,
    allowed_BV: Tensor | None,
    chain: Chain,
    truncation: Truncation = "window",
) -> SampledTokens:
    """Sample one token per row.

    The token is the argmax over the kept tokens of score + g, where g is Gumbel noise, a function of
    (seed, position, id). This samples from the softmax of the scores (Gumbel 1954; Maddison et al.
    2014). A row with temperature 0 takes the argmax of its edited logits. Of equal maxima, the one
    with the lowest id is taken.

    Args:
        logits_BV: [B, V], any float dtype.
        rows: the options and the state of each row.
        allowed_BV: [B, V] bool, the tokens that a constraint allows; None: all tokens.
        chain: the stages.
        truncation: how filters find their thresholds. "window" reads only the likeliest tokens, and
            gives the status UNDECIDED if they are too few; "search" and "sort" read all tokens. If
            the window suffices, all three give the same bits.
    """
    edited_BV = edit_logits_or_nan(logits_BV, rows, allowed_BV, chain)
    largest_B1 = edited_BV.amax(-1, keepdim=True)
    # Whether the window of likeliest tokens sufficed. Without filters there is no window.
    window_sufficed_B = torch.ones_like(rows.position_B, dtype=torch.bool)
    token_B = edited_BV.argmax(-1)
    # Log-probabilities under the distribution that is sampled from are needed only for a report of
    # them, and by mirostat.
    is_reported = chain.logprobs is not None and chain.reports_processed
    logprobs = None
    if is_reported or "mirostat" in chain.stages:
        # These are right for greedy rows, whose token has the probability 1.
        logprobs = _log_probabilities_of_certain_token(token_B, chain.logprobs or 0)
    if chain.samples_at_random:
        is_greedy_B = rows.knobs["temperature"] <= 0
        candidates = apply_filters(edited_BV, rows, chain, truncation)
        token_B = torch.where(is_greedy_B, token_B, _sampled_from(candidates, rows))
        # A greedy row ignores the filters, so it does not matter whether their window sufficed.
        window_sufficed_B = candidates.sufficed_B1[:, 0] | is_greedy_B
        if logprobs is not None:
            greedy = logprobs
            random = _log_probabilities_after_filters(candidates, token_B, chain.logprobs or 0)
            # Both are computed for all rows, since the host does not know which rows are greedy.
            is_greedy_B1 = is_greedy_B[:, None]
            logprobs = LogProbabilities(
                chosen_B=torch.where(is_greedy_B, greedy.chosen_B, random.chosen_B),
                ids_BN=torch.where(is_greedy_B1, greedy.ids_BN, random.ids_BN),
                values_BN=torch.where(is_greedy_B1, greedy.values_BN, random.values_BN),
            )
    largest_B = largest_B1[:, 0]
    # NOT_FINITE is set last, since the other statuses mean nothing in a row with a NaN. The comparison
    # is false for NaN.
    status_B = torch.where(window_sufficed_B, OK, UNDECIDED)
    status_B = torch.where(largest_B == -torch.inf, NOTHING_ALLOWED, status_B)
    status_B = torch.where(largest_B < torch.inf, status_B, NOT_FINITE).to(torch.int32)
    return SampledTokens(torch.where(status_B == OK, token_B, 0), status_B, logprobs)


def _sampled_from(candidates: Candidates, rows: SamplerRows) -> Tensor:
    """Return each row's token with the largest score plus noise, the lowest id of equal ones; [B]."""
    scores_BN = candidates.scores_BN
    ids_BN = candidates.ids_BN
    if ids_BN is None:
        return argmax_with_noise(scores_BN, rows.seed_B, rows.position_B)
    return argmax_id(scores_BN + gumbel_noise_of(rows.seed_B, rows.position_B, ids_BN), ids_BN)


def apply_filters(
    edited_BV: Tensor, rows: SamplerRows, chain: Chain, truncation: Truncation
) -> Candidates:
    """Apply the chain's temperature and filters, in its order, to edited logits."""
    # Filters read only the knobs with one number for each row, not the lists of ids.
    knobs = {name: value[:, None] for name, value in rows.knobs.items() if value.ndim == 1}
    if "xtc" in chain.stages:
        # This number is independent of the noise, and so of the sampled token.
        knobs["xtc_uniform"] = row_uniform(rows.seed_B, rows.position_B)[:, None]
    if rows.mu_B is not None:
        knobs["mu"] = rows.mu_B[:, None]
    # Top-k and the stages after it read only the `likeliest_count` likeliest tokens. (How many tokens are
    # reported is another number, `chain.logprobs`.)
    candidates = all_candidates(edited_BV, truncation, chain.likeliest_count)
    for stage in chain.stages:
        if stage in EDITS:
            continue
        before = candidates
        candidates = FILTERS[stage].apply(candidates, knobs)
        # top_k needs no help, since it keeps at least min_keep tokens itself (`top_k_of`). It could get
        # none either: it may shorten the tensors of `candidates` to the likeliest tokens, and their
        # shape then differs from that of `before`.
        drops_tokens = not FILTERS[stage].is_temperature
        if "min_keep" in knobs and drops_tokens and stage != "top_k":
            candidates = _with_at_least(knobs["min_keep"], before, candidates)
    return candidates


def _with_at_least(min_keep_B1: Tensor, before: Candidates, after: Candidates) -> Candidates:
    """Return the tokens that a filter left, but at least `min_keep` of those before it.

    In a row with too few, the filter is undone, and the `min_keep` likeliest tokens are kept instead, or
    all tokens if there are fewer.

    Args:
        min_keep_B1: int64.
        before: the tokens before the filter.
        after: the tokens after the filter.
    """
    min_keep_B1 = min_keep_B1.minimum(before.count_left())
    too_few_B1 = after.count_left() < min_keep_B1
    # Each token has the weight 1, so the target weight is a number of tokens. `find_radius` needs at least
    # 1, also in a row that has no token left. The result of such a row is not used.
    kept = before.keep_likeliest(
        unit_weights, target_B1=min_keep_B1.clamp(min=1), is_used_B1=too_few_B1
    )
    return after._replace(
        scores_BN=torch.where(too_few_B1, kept.scores_BN, after.scores_BN),
        max_score_B1=torch.where(too_few_B1, kept.max_score_B1, after.max_score_B1),
        sufficed_B1=torch.where(too_few_B1, kept.sufficed_B1, after.sufficed_B1),
    )


def edit_logits_or_nan(
    logits_BV: Tensor, rows: SamplerRows, allowed_BV: Tensor | None, chain: Chain
) -> Tensor:
    """Return `edit_logits`, but NaN where a logit is NaN or +inf; fp32.

    A forbidden token is -inf. A bad logit becomes NaN even if its token is forbidden, so that the row's
    maximum is NaN and the row is stopped.
    """
    raw_BV = logits_BV.float()
    return torch.where(raw_BV < torch.inf, edit_logits(raw_BV, rows, allowed_BV, chain), torch.nan)


def edit_logits(
    logits_BV: Tensor, rows: SamplerRows, allowed_BV: Tensor | None, chain: Chain
) -> Tensor:
    """Return logits after bias, minimum number of tokens, the constraint's mask and penalties; fp32."""
    knobs = rows.knobs
    if "bias" in chain.stages:
        logits_BV = _add_at(logits_BV, knobs["bias_ids"], knobs["bias_values"])
    # This adds -inf to the logits of stop tokens. Since biases are finite or -inf, the sum is -inf
    # whatever the bias.
    if "min_tokens" in chain.stages:
        logits_BV = _forbid_until(
            logits_BV, knobs["stop_ids"], rows.generated_B[:, None], knobs["min_tokens"][:, None]
        )
    if allowed_BV is not None:
        logits_BV = torch.where(allowed_BV, logits_BV, -torch.inf)
    if "repetition" in chain.stages:
        assert rows.counts_BV is not None and rows.prompt_BV is not None
        seen_BV = rows.prompt_BV.bool() | (rows.counts_BV > 0)
        logits_BV = penalise_repetition(logits_BV, seen_BV, knobs["repetition_penalty"][:, None])
    if "frequency_presence" in chain.stages:
        assert rows.counts_BV is not None
        frequency_B1 = knobs["frequency_penalty"][:, None]
        presence_B1 = knobs["presence_penalty"][:, None]
        logits_BV = penalise_frequency_and_presence(
            logits_BV, rows.counts_BV, frequency_B1, presence_B1
        )
    if "dry" in chain.stages:
        assert rows.past is not None
        dry_knobs = {
            name: value[:, None] for name, value in knobs.items() if name.startswith("dry")
        }
        logits_BV = penalise_dry(logits_BV, rows.past, rows.position_B[:, None], dry_knobs)
    return logits_BV


def log_probabilities(logits_BV: Tensor, token_B: Tensor, n: int) -> LogProbabilities:
    """Return log softmax of the raw logits, fp32, of the given tokens and of the n likeliest."""
    values_BV = logits_BV.float().log_softmax(-1)
    likeliest = values_BV.topk(n, dim=-1)
    return LogProbabilities(
        values_BV.gather(-1, token_B[:, None])[:, 0], likeliest.indices, likeliest.values
    )


def _log_probabilities_after_filters(
    candidates: Candidates, token_B: Tensor, n: int
) -> LogProbabilities:
    """Return log-probabilities under the softmax of the candidates' scores."""
    ids_BN = candidates.ids_BN
    # ln p = x - m - ln S, where `log_total` is ln S, and S is the sum of exp(x - m).
    values_BN = candidates.scores_BN - candidates.max_score_B1 - log_total(candidates)
    if ids_BN is None:
        chosen_B = values_BN.gather(-1, token_B[:, None])[:, 0]
    else:
        chosen_B = torch.where(ids_BN == token_B[:, None], values_BN, -torch.inf).amax(-1)
    available = min(n, values_BN.shape[-1])
    likeliest = values_BN.topk(available, dim=-1)
    likeliest_ids_BN = likeliest.indices
    if ids_BN is not None:
        likeliest_ids_BN = ids_BN.gather(-1, likeliest.indices)
    # `top_k` may have left fewer than n candidates (`Candidates.shorten`). Padding has the
    # probability 0, like a dropped token.
    padding = (0, n - available)
    return LogProbabilities(
        chosen_B,
        torch.nn.functional.pad(likeliest_ids_BN, padding),
        torch.nn.functional.pad(likeliest.values, padding, value=-torch.inf),
    )


def _log_probabilities_of_certain_token(token_B: Tensor, n: int) -> LogProbabilities:
    """Return the log-probabilities of rows whose token is certain: 0 for it, and -inf for n - 1 others."""
    # The others have the probability 0, so it does not matter which tokens they are. All places have the
    # id of the certain token here.
    ids_BN = token_B[:, None].expand(-1, n)
    first_N = torch.arange(n, device=token_B.device) == 0
    chosen_B = torch.zeros_like(token_B, dtype=torch.float32)
    return LogProbabilities(chosen_B, ids_BN, torch.where(first_N, chosen_B[:, None], -torch.inf))
