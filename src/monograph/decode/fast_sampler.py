"""Sample tokens by one Triton kernel, on a GPU.

The kernel computes what `monograph.decode.chain.sample` computes from edited logits, in the same
bits, for the chains of stages that it `supports`: greedy ones, and those whose temperature, top-k,
top-p and min-p read only the few likeliest tokens. PyTorch's operators need eight launches for one
row, and thirty for 64 rows, most of them to sort the likeliest tokens.

A row's logits are cut into tiles, and tiles into groups of a few tokens. Each program finds the largest
logit of each group of its tile. The program of a row that finishes last reads these maxima. The W groups
with the largest maxima contain the row's W likeliest tokens: each of these groups has a token that is
likelier than every token of the other groups. So the program reads only the tokens of these groups,
sorts those that may be among the W likeliest, applies the filters and samples.

To find the W groups, the program does not sort all groups. It searches for a logit that the maxima of at
least W groups reach, but not of many more (`_narrow`), and takes the groups that reach it. It finds the
W tokens among those of these groups in the same way. If too many reach the logit because they are equal,
those with the lowest ids are taken, which count as the likeliest.

The result does not depend on the order in which programs finish: tokens are ordered by logit and
then by id, weights are summed as integers, and every other operation is one that IEEE 754 rounds
correctly (`monograph.decode.reproducible`). A fused multiply-add rounds differently than a product and
a sum, so the compiler must not use it (`enable_fp_fusion`).

Tokens are sorted by keys. A token's key is an int64: its upper half has the order of the logits, and its
lower half the reverse order of the ids.

Shapes: B rows, V vocabulary, T tokens of a tile, P groups of a tile, G tokens of a group, A groups
of a row, C tokens of the groups that are read, S tokens that are sorted, W likeliest tokens; N any of
A or C. In kernels, tensors without a suffix have the shape [W].
"""

from math import isqrt
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from monograph.decode import reproducible
from monograph.decode.candidates import Truncation
from monograph.decode.chain import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    OK,
    UNDECIDED,
    SampledTokens,
    SamplerRows,
)
from monograph.decode.filters import MIN_TEMPERATURE
from monograph.decode.knobs import EDITS, Chain

# T, the number of tokens of a program. Fewer than MANY_ROWS rows have small tiles, so that there are
# enough programs for all multiprocessors.
SMALL_TILE = 1024
LARGE_TILE = 4096
MANY_ROWS = 8
# How many groups may be read, and how many tokens may be sorted, in multiples of W. The more there may be,
# the sooner `_narrow` finds a logit that not too many reach.
GROUPS_READ_PER_LIKELIEST = 1
TOKENS_SORTED_PER_LIKELIEST = 2
# G. With smaller groups, the program that finishes last reads more maxima and fewer tokens.
MIN_GROUP, MAX_GROUP = 8, 32
WARPS = 8

# The stages that the kernel has, by number; 0 is none.
_STAGE_NUMBERS: Final = {"temperature": 1, "top_k": 2, "top_p": 3, "min_p": 4}
# The number of stages for which the kernel has arguments.
_MAX_STAGES: Final = len(_STAGE_NUMBERS)

_NO_TOKEN = tl.constexpr(-(1 << 63))  # the smallest key
_LOW32 = tl.constexpr(0xFFFFFFFF)
# `_ordered` of -inf.
_LOWEST = tl.constexpr(-0x7F800001)
# A smaller number than that, which stands where there is no token.
_BELOW_ALL = tl.constexpr(-(1 << 31))
# The first logits that `_narrow` tries are below the largest one by these differences.
_NEAR = tl.constexpr(32.0)
_FAR = tl.constexpr(1024.0)
# From this step on, `_narrow` halves the bits of the interval, and not its length.
_BITS_STEP = tl.constexpr(19)
# `_places` has two counts in one int32. The one in the lower 22 bits may be as large as the vocabulary;
# the one above them is less than W.
_PLACE_BITS = tl.constexpr(22)
_PLACE_MASK = tl.constexpr((1 << 22) - 1)
_OK, _NOT_FINITE, _NOTHING_ALLOWED, _UNDECIDED = map(
    tl.constexpr, (OK, NOT_FINITE, NOTHING_ALLOWED, UNDECIDED)
)
_UNIT = tl.constexpr(float(reproducible.UNIT))
_LN2_HIGH = tl.constexpr(reproducible.LN2_HIGH)
_LN2_LOW = tl.constexpr(reproducible.LN2_LOW)
_ROOT_HALF = tl.constexpr(reproducible.ROOT_HALF)
_EXP = tl.constexpr(reproducible.EXP)
_EXP_DEGREE = tl.constexpr(len(reproducible.EXP) - 1)
_LOG = tl.constexpr(reproducible.LOG)
_LOG_DEGREE = tl.constexpr(len(reproducible.LOG) - 1)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
# If this number is added to a small number and subtracted again, the small number is rounded to the
# nearest integer, and a half to the even one, as `torch.round` does.
_ROUNDING = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _ordered(logit):
    """Return int32 numbers that have the order of the logits."""
    # 0 and -0 are equal as logits, and so must be their numbers.
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit_of(ordered):
    """Return the logits of `_ordered`'s numbers."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key(logit, token):
    """Return the keys of tokens; see the module's docstring."""
    return (_ordered(logit).to(tl.int64) << 32) | (_LOW32 - token.to(tl.int64))


@triton.jit
def _logit(key):
    """Return the logits of keys."""
    return _logit_of((key >> 32).to(tl.int32))


@triton.jit
def _ordered_tokens(logit, is_token):
    """Return `_ordered` of tokens' logits for a search: at least _LOWEST, and _BELOW_ALL for no token."""
    return tl.where(is_token, tl.maximum(_ordered(logit), _LOWEST), _BELOW_ALL)


@triton.jit
def _narrow(ordered_N, low, high, count, needed, ROOM: tl.constexpr):
    """Narrow an interval that contains the number of rank `needed` (1: the largest).

    It is narrowed until at most ROOM numbers reach its lower end, or until it has a single value, which
    more numbers than that have.

    Args:
        ordered_N: the numbers, see `_ordered_tokens`.
        low: a number that at least `needed` of them reach.
        high: the largest of them.
        count: how many of them reach `low`.
        needed: the rank, at least 1 and at most ROOM.
        ROOM: how many may reach the lower end.

    Returns:
        the ends of the narrowed interval, `low` and `high`, the number of entries above `high`, which is
        below `needed`, and the number of entries that reach `low`.
    """
    largest = _logit_of(high)
    # Zeros of the type of `count`, since a variable of a loop keeps its type.
    above = count * 0
    step = count * 0
    while (count > ROOM) & (low < high):
        # The first guess is a little below the largest logit, since most rows have their likeliest tokens
        # there; the second is further below. The third is just above -inf: it finds out whether a row has
        # too few allowed tokens. Every later guess is the middle between the two logits.
        guess = (_logit_of(low) + _logit_of(high)) * 0.5
        guess = tl.where(step == 0, largest - _NEAR, guess)
        guess = tl.where(step == 1, largest - _FAR, guess)
        middle = tl.where(step == 2, _LOWEST + 1, _ordered(guess))
        # Halving the distance of two logits may take many steps, for instance if it is infinite. So
        # after a while, or if a guess is not in the interval, the middle of the two int32 numbers is taken,
        # rounded up: this halving ends after 32 steps.
        is_usable = (middle > low) & (middle <= high) & (step < _BITS_STEP)
        middle = tl.where(is_usable, middle, (low | high) - ((low ^ high) >> 1))
        reached = tl.sum((ordered_N >= middle).to(tl.int32), 0)
        suffices = reached >= needed
        low = tl.where(suffices, middle, low)
        count = tl.where(suffices, reached, count)
        high = tl.where(suffices, high, middle - 1)
        above = tl.where(suffices, above, reached)
        step += 1
    return low, high, above, count


@triton.jit
def _places(ordered_N, low, high, above, ROOM: tl.constexpr):
    """Return which numbers are kept, and the place of each among those that are kept, in their order.

    All numbers above `high` are kept (see `_narrow`). Of those in the interval, the first are kept, up to
    ROOM numbers in all.
    """
    is_above_N = ordered_N > high
    is_within_N = (ordered_N >= low) & (ordered_N <= high)
    counts_N = tl.cumsum((is_above_N.to(tl.int32) << _PLACE_BITS) + is_within_N.to(tl.int32), 0)
    within_N = counts_N & _PLACE_MASK
    room = ROOM - above
    is_kept_N = is_above_N | (is_within_N & (within_N <= room))
    # The place of a kept number is the count of kept numbers up to it, minus 1.
    above_N = counts_N >> _PLACE_BITS
    return is_kept_N, above_N + tl.minimum(within_N, room) - 1


@triton.jit
def _likeliest_keys(
    logits,
    maxima,
    V,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    READ: tl.constexpr,
    SORTED: tl.constexpr,
    W: tl.constexpr,
):
    """Return the keys of a row's W likeliest tokens in descending order.

    `maxima` points to the row's maxima of groups. They are followed by memory for the ids of READ groups
    and of SORTED tokens, which only this program of the row uses.
    """
    group_A = tl.arange(0, ALL)
    # `.cg` bypasses the L1 cache, since other multiprocessors wrote these numbers.
    maximum_A = tl.load(
        maxima + group_A, mask=group_A < GROUPS, other=_BELOW_ALL, cache_modifier=".cg"
    )
    largest = tl.max(maximum_A, 0)
    groups = (V + G - 1) // G
    lowest = largest * 0 + _LOWEST  # of the type of `largest`; all groups reach it
    low, high, above, count = _narrow(
        maximum_A, lowest, largest, groups, tl.minimum(groups, W), READ
    )
    is_kept_A, place_A = _places(maximum_A, low, high, above, READ)
    read_groups = maxima + GROUPS
    tl.store(read_groups + place_A, group_A, mask=is_kept_A)
    tl.debug_barrier()  # all threads write before others read
    index_C = tl.arange(0, READ * G)
    is_read_C = index_C // G < count
    group_C = tl.load(read_groups + index_C // G, mask=is_read_C, other=0)
    # The ids ascend, since the groups do. So of several tokens with equal logits, `_places` keeps those with
    # the lowest ids, which count as the likeliest.
    token_C = group_C * G + index_C % G
    is_token_C = is_read_C & (token_C < V)
    logit_C = tl.load(logits + token_C, mask=is_token_C, other=0.0)
    ordered_C = _ordered_tokens(logit_C, is_token_C)
    # At least W tokens reach `low`: the maxima of W groups do. If there are fewer than W groups, `low` is
    # the lowest number, which all tokens reach.
    count = tl.sum((ordered_C >= low).to(tl.int32), 0)
    low, high, above, count = _narrow(ordered_C, low, largest, count, W, SORTED)
    is_kept_C, place_C = _places(ordered_C, low, high, above, SORTED)
    sorted_tokens = read_groups + READ
    tl.store(sorted_tokens + place_C, token_C, mask=is_kept_C)
    tl.debug_barrier()
    place_S = tl.arange(0, SORTED)
    is_token_S = place_S < count
    token_S = tl.load(sorted_tokens + place_S, mask=is_token_S, other=0)
    logit_S = tl.load(logits + token_S, mask=is_token_S, other=0.0)
    key_S = tl.where(is_token_S, _key(logit_S, token_S), _NO_TOKEN)
    return tl.topk(key_S, W)


@triton.jit
def _polynomial(x, coefficients: tl.constexpr, DEGREE: tl.constexpr):
    """Return the value of a polynomial at x; its highest power has the first coefficient."""
    value = x * coefficients[0]
    for place in tl.static_range(1, DEGREE):
        value = (value + coefficients[place]) * x
    return value + coefficients[DEGREE]


@triton.jit
def _weight(x):
    """Return exp(x) as a fixed-point integer; see `monograph.decode.reproducible.weight`."""
    x = tl.maximum(x, -60.0)
    halvings = (x * -1.44269504088896341 + _ROUNDING) - _ROUNDING
    rest = (x + halvings * _LN2_HIGH) + halvings * _LN2_LOW
    power = (_polynomial(rest, _EXP, _EXP_DEGREE) * (rest * rest) + rest + 1) * _UNIT
    return power.to(tl.int64) >> tl.minimum(tl.maximum(halvings.to(tl.int64), 0), 62)


@triton.jit
def _log_of(fraction, exponent):
    """Return ln((1 + fraction) 2^exponent)."""
    square = fraction * fraction
    power = exponent.to(tl.float32)
    correction = (
        _polynomial(fraction, _LOG, _LOG_DEGREE) * fraction * square
        + power * _LN2_LOW
        - 0.5 * square
    )
    return fraction + correction + power * _LN2_HIGH


@triton.jit
def _exponent(x):
    """Return k, where x = m 2^k with m in [sqrt(1/2), sqrt 2)."""
    return (x.to(tl.int32, bitcast=True) - _ROOT_HALF) >> 23


@triton.jit
def _mantissa(x, exponent):
    """Return m, see `_exponent`."""
    return (x.to(tl.int32, bitcast=True) - (exponent << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _gumbel_noise(seed, position, token):
    """Return the noise of tokens; see `monograph.decode.reproducible.gumbel_noise`."""
    index = (token >> 2).to(tl.uint32)
    zero = tl.zeros_like(index)
    words = tl.philox(
        seed,
        index,
        zero + (position & _LOW32).to(tl.uint32),
        zero + (position >> 32).to(tl.uint32),
        zero,
    )
    which = token & 3
    word = tl.where(which == 0, words[0], words[1])
    word = tl.where(which == 2, words[2], word)
    word = tl.where(which == 3, words[3], word)
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # ln(1 - u), which keeps all digits of a small u.
    exponent = _exponent(1 - uniform)
    fraction = tl.where(exponent == 0, -uniform, _mantissa(1 - uniform, exponent) - 1)
    exponential = -_log_of(fraction, exponent)
    exponent = _exponent(exponential)
    return -_log_of(_mantissa(exponential, exponent) - 1, exponent)


@triton.jit
def _kept_by_target(logit, is_reached):
    """Return which tokens a filter keeps: those down to the first at which the target weight is reached.

    Tokens with the same logit as this token are kept, too. `is_reached` is true for this token and all
    later ones.
    """
    return logit >= tl.max(tl.where(is_reached, logit, float("-inf")), 0)


@triton.jit
def _apply_stage(STAGE: tl.constexpr, logit, score, max_score, sufficed, knob, V):
    """Return the scores, the largest one, and whether the tokens have sufficed, after a stage.

    See the functions of the same names in `monograph.decode.filters`; `knob` is the number that the
    stage reads.
    """
    negative_infinity: tl.constexpr = float("-inf")
    if STAGE == 1:  # temperature
        score = tl.math.div_rn(
            score - max_score, tl.zeros_like(score) + tl.maximum(knob, _MIN_TEMPERATURE)
        )
        max_score = max_score * 0
    if STAGE == 2:  # top_k
        is_left = (score > negative_infinity).to(tl.int64)
        target = tl.maximum(tl.minimum(knob, tl.sum(is_left, 0)), 1)
        is_kept = _kept_by_target(logit, tl.cumsum(is_left, 0) >= target)
        is_used = (knob > 0) & (knob < V)
        score = tl.where(is_kept | (is_used == 0), score, negative_infinity)
        # See `Candidates.may_miss_tokens`.
        is_smallest = logit == tl.min(logit, 0)
        keeps_smallest = tl.max((is_smallest & (score > negative_infinity)).to(tl.int32), 0)
        has_none = tl.max((score > negative_infinity).to(tl.int32), 0) == 0
        sufficed = sufficed & (keeps_smallest == 0) & (has_none == 0)
    if STAGE == 3:  # top_p
        weight = tl.where(score > negative_infinity, _weight(tl.minimum(score - max_score, 0.0)), 0)
        share = knob.to(tl.float64) * tl.sum(weight, 0).to(tl.float64)
        target = tl.maximum(tl.ceil(share).to(tl.int64), 1)
        is_reached = tl.cumsum(weight, 0) >= target
        is_used = knob < 1
        is_kept = _kept_by_target(logit, is_reached)
        score = tl.where(is_kept | (is_used == 0), score, negative_infinity)
        sufficed = sufficed & ((tl.max(is_reached.to(tl.int32), 0) == 1) | (is_used == 0))
    if STAGE == 4:  # min_p, whose number is ln p
        is_kept = (score >= max_score + knob) | (knob == negative_infinity)
        score = tl.where(is_kept, score, negative_infinity)
    return score, max_score, sufficed


@triton.jit
def _sample(
    logits,
    seeds,
    last_positions,
    temperatures,
    knobs_0,
    knobs_1,
    knobs_2,
    knobs_3,
    scratch,
    counters,
    tokens,
    statuses,
    V,
    row_stride,
    STAGE_0: tl.constexpr,
    STAGE_1: tl.constexpr,
    STAGE_2: tl.constexpr,
    STAGE_3: tl.constexpr,
    RANDOM: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    G: tl.constexpr,
    ALL: tl.constexpr,
    READ: tl.constexpr,
    SORTED: tl.constexpr,
    W: tl.constexpr,
):
    """Find the maxima of a tile's groups; the row's program that finishes last samples the row's token.

    If no row samples at random (RANDOM is false), each tile is a single group, and its maximum is a key,
    so the largest key of a row has the row's token. ALL is the number of groups of a row, rounded up to a
    power of two. `sample_few` passes the arguments.
    """
    row, tile = tl.program_id(0), tl.program_id(1)
    row_logits = logits + row.to(tl.int64) * row_stride
    GROUPS: tl.constexpr = TILES * (TILE // G)
    # Memory for the row's maxima, the groups that are read and the tokens that are sorted.
    row_scratch = scratch + row * (GROUPS + READ + SORTED)
    if RANDOM:
        group_P = tile * (TILE // G) + tl.arange(0, TILE // G)
        token_PG = group_P[:, None] * G + tl.arange(0, G)[None, :]
        is_token_PG = token_PG < V
        logit_PG = tl.load(row_logits + token_PG, mask=is_token_PG, other=0.0)
        tl.store(row_scratch + group_P, tl.max(_ordered_tokens(logit_PG, is_token_PG), 1))
    else:
        token_T = tile * TILE + tl.arange(0, TILE)
        logit_T = tl.load(row_logits + token_T, mask=token_T < V, other=0.0)
        key_T = tl.where(token_T < V, _key(logit_T, token_T), _NO_TOKEN)
        tl.store(row_scratch + tile, tl.max(key_T, 0))
    tl.debug_barrier()  # all threads of the program write before it is counted
    finished_before = tl.atomic_add(counters + row, 1, sem="acq_rel", scope="gpu")
    if finished_before == TILES - 1:
        tl.store(counters + row, 0)  # for the next launch
        if RANDOM:
            key = _likeliest_keys(
                row_logits,
                row_scratch,
                V,
                G,
                GROUPS,
                ALL,
                READ,
                SORTED,
                W,
            )
        else:
            tile_A = tl.arange(0, ALL)
            key = tl.load(
                row_scratch + tile_A, mask=tile_A < TILES, other=_NO_TOKEN, cache_modifier=".cg"
            )
        first_key = tl.max(key, 0)
        largest = _logit(first_key)
        chosen = _LOW32 - (first_key & _LOW32)
        sufficed = row >= 0  # always true; a Python bool could not be changed by `_apply_stage`
        if RANDOM:
            logit = _logit(key)
            token = _LOW32 - (key & _LOW32)
            score = logit - largest
            max_score = largest * 0
            if STAGE_0:
                knob = tl.load(knobs_0 + row)
                score, max_score, sufficed = _apply_stage(
                    STAGE_0, logit, score, max_score, sufficed, knob, V
                )
            if STAGE_1:
                knob = tl.load(knobs_1 + row)
                score, max_score, sufficed = _apply_stage(
                    STAGE_1, logit, score, max_score, sufficed, knob, V
                )
            if STAGE_2:
                knob = tl.load(knobs_2 + row)
                score, max_score, sufficed = _apply_stage(
                    STAGE_2, logit, score, max_score, sufficed, knob, V
                )
            if STAGE_3:
                knob = tl.load(knobs_3 + row)
                score, max_score, sufficed = _apply_stage(
                    STAGE_3, logit, score, max_score, sufficed, knob, V
                )
            position = tl.load(last_positions + row) + 1
            value = score + _gumbel_noise(tl.load(seeds + row), position, token)
            is_largest = value == tl.max(value, 0)
            sampled = tl.min(tl.where(is_largest, token, _LOW32), 0)
            is_greedy = tl.load(temperatures + row) <= 0
            chosen = tl.where(is_greedy, chosen, sampled)
            # A greedy row ignores the filters.
            sufficed = sufficed | is_greedy
        status = tl.where(sufficed, _OK, _UNDECIDED)
        status = tl.where(largest == float("-inf"), _NOTHING_ALLOWED, status)
        status = tl.where(largest < float("inf"), status, _NOT_FINITE)
        tl.store(tokens + row, tl.where(status == _OK, chosen, 0))
        tl.store(statuses + row, status)


def _stages_after_edits(chain: Chain) -> list[str]:
    """Return a chain's stages after the edits of the logits, in order."""
    return [name for name in chain.stages if name not in EDITS]


class FastSampler:
    """The kernel for a number of rows."""

    def __init__(self, rows: int, device: torch.device) -> None:
        """Allocate counters, by which the kernel's programs know which of them is the last of its row."""
        # They are zero before and after each launch.
        self._counters_B = torch.zeros(rows, dtype=torch.int32, device=device)

    @staticmethod
    def supports(chain: Chain, truncation: Truncation, vocabulary: int) -> bool:
        """Return whether the kernel can do all that a chain does after the edits of the logits."""
        if truncation != "window" or (chain.logprobs is not None and chain.reports_processed):
            return False
        if "min_keep" in chain.stages or "mirostat" in chain.stages:
            return False
        if not chain.samples_at_random:
            return True
        if chain.likeliest_count is None or chain.likeliest_count >= vocabulary:
            return False
        stages = _stages_after_edits(chain)
        if any(name not in _STAGE_NUMBERS for name in stages):
            return False
        # A filter before top-k would need all tokens. A temperature does not, since it changes each score
        # by itself.
        return set(stages[: stages.index("top_k")]) <= {"temperature"}

    def sample(
        self, edited_BV: Tensor, rows: SamplerRows, last_position_B: Tensor, chain: Chain
    ) -> SampledTokens:
        """Return one token per row; see `monograph.decode.chain.sample`.

        Args:
            edited_BV: fp32, the edited logits, contiguous; NaN where one is NaN or +inf.
            rows: the seeds and the options of each row.
            last_position_B: the position of the token before the one that is sampled. The kernel adds
                the 1, because adding it here would take a launch.
            chain: a chain that this kernel supports.
        """
        stages = _stages_after_edits(chain) if chain.samples_at_random else []
        # The stages whose number is not a knob of the same name.
        knob_names = {"min_p": "log_min_p"}
        token_B, status_B = torch.ops.monograph.sample_few(
            edited_BV,
            rows.seed_B,
            last_position_B,
            self._counters_B,
            [_STAGE_NUMBERS[name] for name in stages],
            [rows.knobs[knob_names.get(name, name)] for name in stages],
            rows.knobs["temperature"] if chain.samples_at_random else None,
            chain.likeliest_count or 1,
        )
        return SampledTokens(token_B, status_B)


def _group_size(vocabulary: int, groups_read: int) -> int:
    """Return G such that about as many maxima are read (V / G) as tokens (G * groups_read)."""
    group: int = triton.next_power_of_2(isqrt(vocabulary // groups_read))
    return min(max(MIN_GROUP, group), MAX_GROUP)


@torch.library.custom_op("monograph::sample_few", mutates_args=("counters_B",))
def sample_few(
    edited_BV: Tensor,
    seed_B: Tensor,
    last_position_B: Tensor,
    counters_B: Tensor,
    stages: list[int],
    knobs: list[Tensor],
    temperature_B: Tensor | None,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Return the sampled tokens, int64 [B], and the statuses, int32 [B].

    Args:
        edited_BV: fp32, contiguous.
        seed_B: int64.
        last_position_B: int64, the position of the token before the one that is sampled.
        counters_B: int32 zeros, which are zeros again afterwards.
        stages: the stages in their order, by `_STAGE_NUMBERS`.
        knobs: the knob of each stage, fp32 or int64 [B].
        temperature_B: fp32; a row with 0 takes its likeliest token. None: all rows do.
        width: W, how many of the likeliest tokens are read; a power of two. Not used if temperature_B is
            None.
    """
    rows, vocabulary = edited_BV.shape
    is_random = temperature_B is not None
    tile = min(
        SMALL_TILE if rows < MANY_ROWS else LARGE_TILE,
        max(MAX_GROUP, triton.next_power_of_2(vocabulary)),
    )
    tiles = triton.cdiv(vocabulary, tile)
    groups_read = GROUPS_READ_PER_LIKELIEST * width
    tokens_sorted = TOKENS_SORTED_PER_LIKELIEST * width
    group = _group_size(vocabulary, groups_read) if is_random else tile
    groups = tiles * (tile // group)
    scratch_dtype = torch.int32 if is_random else torch.int64
    scratch = edited_BV.new_empty(
        rows * (groups + groups_read + tokens_sorted), dtype=scratch_dtype
    )
    token_B = edited_BV.new_empty(rows, dtype=torch.int64)
    status_B = edited_BV.new_empty(rows, dtype=torch.int32)
    # The kernel does not read the arguments of stages that are not used, so any tensor serves for them.
    unused = _MAX_STAGES - len(stages)
    _sample[(rows, tiles)](
        edited_BV,
        seed_B,
        last_position_B,
        temperature_B if is_random else seed_B,
        *knobs,
        *([seed_B] * unused),
        scratch,
        counters_B,
        token_B,
        status_B,
        vocabulary,
        edited_BV.stride(0),
        *stages,
        *([0] * unused),
        RANDOM=is_random,
        TILE=tile,
        TILES=tiles,
        G=group,
        ALL=triton.next_power_of_2(groups),
        READ=groups_read,
        SORTED=tokens_sorted,
        W=width,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return token_B, status_B


@sample_few.register_fake
def _(
    edited_BV: Tensor,
    seed_B: Tensor,
    last_position_B: Tensor,
    counters_B: Tensor,
    stages: list[int],
    knobs: list[Tensor],
    temperature_B: Tensor | None,
    width: int,
) -> tuple[Tensor, Tensor]:
    rows = len(edited_BV)
    token_B = edited_BV.new_empty(rows, dtype=torch.int64)
    return token_B, edited_BV.new_empty(rows, dtype=torch.int32)
