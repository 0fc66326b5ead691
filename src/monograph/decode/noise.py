"""The randomness of a draw: a pure function of (seed, position, vocabulary id), by a counter-based generator.

No generator object, no state, nothing on the host: replaying a graph replays the draws, and a row's numbers do not
know which slot it has, who is beside it, or which filters are on.

Shapes: B rows, V vocabulary, N some ids of each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monograph.decode.elementary import log, log1p_negative
from monograph.ops.philox import LOW32, Words, philox

# The fourth word of the counter: what the number is for.
_GUMBEL, _ROW, _CONTINUATION = 0, 1, 2


def uniform(word: Tensor) -> Tensor:
    """The number min((word + 1/2) 2^-32, 1 - 2^-24), fp32: never 0 and never 1, however the word rounds to fp32."""
    return ((word.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(word: Tensor) -> Tensor:
    """-ln(-ln(1 - u)), fp32, finite for every word; the large values, which win, come from the u that fp32 resolves."""
    return -log(-log1p_negative(uniform(word)))


def gumbel_noise(seed_B: Tensor, position_B: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise (Gumbel 1954) for the token at a position, one number per vocabulary id.

    Id v has word v mod 4 of the counter (v // 4, position, 0): one Philox for four ids.

    Args:
        seed_B: [B] int64, 0 or more.
        position_B: [B] int64, 0 or more, the absolute position of the token to be drawn.
        vocabulary: V.

    Returns:
        [B, V] fp32.
    """
    fours = torch.arange(-(-vocabulary // 4), device=seed_B.device)
    words = torch.stack(_words(seed_B[:, None], position_B[:, None], fours, _GUMBEL), -1)
    return gumbel(words.flatten(1)[:, :vocabulary])


def gumbel_noise_of(seed_B: Tensor, position_B: Tensor, ids_BN: Tensor) -> Tensor:
    """`gumbel_noise` of these ids alone, int64 [B, N]: the same bits, [B, N] fp32."""
    words = _words(seed_B[:, None], position_B[:, None], ids_BN >> 2, _GUMBEL)
    chosen_BN = words[0]
    for number, word in enumerate(words[1:], 1):
        chosen_BN = torch.where((ids_BN & 3) == number, word, chosen_BN)
    return gumbel(chosen_BN)


def row_uniform(seed_B: Tensor, position_B: Tensor) -> Tensor:
    """One uniform number per row and position, [B] fp32, independent of the noise."""
    return uniform(_words(seed_B, position_B, torch.zeros_like(seed_B), _ROW)[0])


def continuation_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th of several continuations of one prompt: 63 bits of Philox(seed, index)."""
    words = _words(torch.tensor(seed), torch.tensor(0), torch.tensor(index), _CONTINUATION)
    return (int(words[0]) << 31) | (int(words[1]) >> 1)


def _words(seed: Tensor, position: Tensor, index: Tensor, purpose: int) -> Words:
    counter = (index, position & LOW32, position >> 32, torch.full_like(position, purpose))
    return philox(counter, (seed & LOW32, seed >> 32))
