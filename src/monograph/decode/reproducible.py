"""The noise of sampling, and an exp and a log whose bits depend on their arguments alone.

The exp of a library may give other bits inside a graph than outside, or in the vectorised part of a
loop than in its remainder. A token could then depend on the other rows of its batch. Here every
operation is one that IEEE 754 rounds correctly, and weights are integers, whose sum does not depend
on the order. The polynomials and the two-part ln 2 are those of Cephes (S. Moshier,
netlib.org/cephes, expf and logf).

The noise is a pure function of (seed, position, vocabulary id) by a counter-based generator, without
state and without the host. So a replayed graph samples the same tokens, and a row's noise does not
depend on the row's index, on other rows or on the filters.

Shapes: B rows, V vocabulary, N some ids of each row, P positions.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from monograph.ops.philox import LOW32, Words, philox

# ln 2 = LN2_HIGH + LN2_LOW. LN2_HIGH has few digits, so its products with small integers are exact.
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
# The bits of sqrt(1/2). If these are subtracted from the bits of x, the exponent bits of the difference
# are the k of x = m 2^k, with m in [sqrt(1/2), sqrt 2).
ROOT_HALF = 0x3F3504F3
_MANTISSA_BITS = 23
# The coefficients of the polynomials for log and exp, the highest power first.
LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)

# The weight 1, which the likeliest token has, is the integer UNIT. A sum of up to 2^20 - 1 weights
# stays below 2^63. Rounding changes a weight by at most 2^-43. Over a vocabulary of 2^17 that is 2^-26,
# less than the rounding of fp32.
UNIT_BITS = 43
UNIT = 1 << UNIT_BITS


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive, normal fp32 numbers; any shape."""
    mantissa, exponent = _split(x)
    return _log(mantissa - 1, exponent)


def log1p_negative(u: Tensor) -> Tensor:
    """Return ln(1 - u) of fp32 numbers in [0, 1), with a small relative error even near 0."""
    mantissa, exponent = _split(1 - u)
    # 1 - u loses digits of a small u. Where the exponent is 0, mantissa - 1 is replaced by -u, which
    # has all digits.
    return _log(torch.where(exponent == 0, -u, mantissa - 1), exponent)


def weight(x: Tensor) -> Tensor:
    """Return exp(x) of x <= 0 as a fixed-point integer.

    It is round(2^43 exp r) >> h, where x = r - h ln 2 and |r| <= ln 2 / 2: exp(x) is exp(r), halved h times.

    Args:
        x: fp32, -inf allowed.

    Returns:
        int64 in [0, 2^43]: exactly 2^43 at 0, and 0 below about -30.
    """
    # The weight of -60 is 0 already. The clamp makes -inf finite.
    x = x.clamp(min=-60.0)
    halvings = (x * -1.44269504088896341).round()
    rest = (x + halvings * LN2_HIGH) + halvings * LN2_LOW
    # `rest` is r, and exp r is a polynomial.
    power = (_horner(EXP, rest) * (rest * rest) + rest + 1) * float(UNIT)
    # A NaN becomes an arbitrary integer, since its row is stopped anyway. The clamp keeps the shift
    # defined even then.
    return power.to(torch.int64) >> halvings.to(torch.int64).clamp(0, 62)


def _horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Return the value of a polynomial at x."""
    value = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        # In place, so that no step allocates memory.
        value = value.add_(coefficient).mul_(x)
    return value.add_(coefficients[-1])


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (m, k) with x = m 2^k, m in [sqrt(1/2), sqrt 2)."""
    bits = x.view(torch.int32)
    exponent = (bits - ROOT_HALF) >> _MANTISSA_BITS
    return (bits - (exponent << _MANTISSA_BITS)).view(torch.float32), exponent


def _log(fraction: Tensor, exponent: Tensor) -> Tensor:
    """Return ln((1 + fraction) 2^exponent)."""
    square = fraction * fraction
    exponent = exponent.float()
    correction = _horner(LOG, fraction) * fraction * square + exponent * LN2_LOW - 0.5 * square
    return fraction + correction + exponent * LN2_HIGH


# How many tokens `argmax_with_noise` compares exactly in eager mode.
_CONTENDERS = 4
# Philox turns a seed and a counter of four words into four random words. The fourth word of the counter
# is the purpose of the random numbers.
_GUMBEL = 0
_ROW = 1
_CONTINUATION = 2
_ROLLOUT = 3


def uniform(word: Tensor) -> Tensor:
    """Return min((word + 1/2) 2^-32, 1 - 2^-24), fp32, which is neither 0 nor 1 after rounding."""
    return ((word.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(word: Tensor) -> Tensor:
    """Return the Gumbel number -ln(-ln(1 - u)), u = uniform(word), fp32; it is finite.

    Large values decide which token is sampled. They come from small u, where fp32 is dense.
    """
    return -log(-log1p_negative(uniform(word)))


def gumbel_noise(seed_B: Tensor, position_B: Tensor, vocabulary: int) -> Tensor:
    """Return standard Gumbel noise (Gumbel 1954) for the choice of a token, a number for each id.

    The noise of id v is made of word v mod 4 of Philox(seed, v // 4, position), so one call of Philox
    serves four ids.

    Args:
        seed_B: [B] int64, 0 or more.
        position_B: [B] int64, 0 or more, the absolute position of the token to be sampled.
        vocabulary: V.

    Returns:
        [B, V] fp32.
    """
    return gumbel(_gumbel_words(seed_B, position_B, vocabulary))


def _gumbel_words(seed_B: Tensor, position_B: Tensor, vocabulary: int) -> Tensor:
    """Return the random word of each id; see `gumbel_noise`."""
    # One call of Philox for each id would take 1.7 times as long (dev/log.md).
    calls = torch.arange(math.ceil(vocabulary / 4), device=seed_B.device)
    words = torch.stack(_words(seed_B[:, None], position_B[:, None], calls, _GUMBEL), -1)
    return words.flatten(1)[:, :vocabulary]


def argmax_with_noise(scores_BV: Tensor, seed_B: Tensor, position_B: Tensor) -> Tensor:
    """Return the ids with the largest score plus noise, the lowest of equal ones; int64 [B].

    In eager mode each operation reads and writes memory. So the _CONTENDERS tokens with the largest
    sums are first found with torch's logarithms, which take a tenth of the operations, and only these
    are compared exactly. The error of torch's logarithms is at most 1e-5, so the right token is missed
    only if _CONTENDERS others are that close to it.
    """
    words_BV = _gumbel_words(seed_B, position_B, scores_BV.shape[-1])
    if torch.compiler.is_compiling():
        return (scores_BV + gumbel(words_BV)).argmax(-1)
    approximate_BV = scores_BV - (-torch.log1p(-uniform(words_BV))).log()
    ids_BN = approximate_BV.topk(min(_CONTENDERS, scores_BV.shape[-1])).indices
    return argmax_id(scores_BV.gather(-1, ids_BN) + gumbel(words_BV.gather(-1, ids_BN)), ids_BN)


def argmax_id(values_BN: Tensor, ids_BN: Tensor) -> Tensor:
    """Return the id of each row's largest value, the lowest of equal ones, for ids in any order; [B]."""
    is_largest_BN = values_BN == values_BN.amax(-1, keepdim=True)
    highest_id_B1 = ids_BN.amax(-1, keepdim=True)
    return torch.where(is_largest_BN, ids_BN, highest_id_B1).amin(-1)


def gumbel_noise_of(seed_B: Tensor, position_B: Tensor, ids_BN: Tensor) -> Tensor:
    """Return the noise of some ids, int64 [B, N], with the bits of `gumbel_noise`; [B, N] fp32."""
    # Word v mod 4 of call v // 4, as in `gumbel_noise`.
    words = _words(seed_B[:, None], position_B[:, None], ids_BN >> 2, _GUMBEL)
    chosen_BN = words[0]
    for number, word in enumerate(words[1:], 1):
        chosen_BN = torch.where((ids_BN & 3) == number, word, chosen_BN)
    return gumbel(chosen_BN)


def row_uniform(seed_B: Tensor, position_B: Tensor) -> Tensor:
    """Return one number in (0, 1) for each row's position, [B] fp32, independent of the noise."""
    return uniform(_words(seed_B, position_B, torch.zeros_like(seed_B), _ROW)[0])


def continuation_seed(seed: int, index: int) -> int:
    """Return the seed of continuation `index` of a prompt: 63 bits of Philox(seed, index)."""
    words = _words(torch.tensor(seed), torch.tensor(0), torch.tensor(index), _CONTINUATION)
    return int(_seeds(words))


def rollout_seeds(seed: int, positions: Sequence[int], group: int) -> list[int]:
    """Return the seeds of the answers to several prompts, prompt by prompt.

    A seed is 63 bits of Philox(seed, position, answer).

    Args:
        seed: the run's seed.
        positions: a number for each prompt, such as its place in the run's order of prompts.
        group: the number of answers to each prompt.
    """
    position_P1 = torch.tensor(positions)[:, None]
    answers = torch.arange(group).expand(len(positions), group)
    words = _words(torch.tensor(seed), position_P1, answers, _ROLLOUT)
    return _seeds(words).flatten().tolist()


def _seeds(words: Words) -> Tensor:
    """Return seeds made of the first two words. A seed is an int64 of at least 0, so it has 63 bits."""
    return (words[0] << 31) | (words[1] >> 1)


def _words(seed: Tensor, position: Tensor, index: Tensor, purpose: int) -> Words:
    """Return four random words, each in an int64, of shapes that broadcast together."""
    counter = (index, position & LOW32, position >> 32, torch.full_like(position, purpose))
    return philox(counter, (seed & LOW32, seed >> 32))
