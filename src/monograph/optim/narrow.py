"""Numbers in fewer bits: stochastic rounding to bf16, halves of fp32, and blocks of 8-bit codes.

Shapes: N elements of a plane, K blocks of 256. Where ranks have rows of a parameter, the first
block may have `before` elements that are another rank's, and the last one may end in another rank's
rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from monograph.ops.philox import LOW32, philox

BLOCK = 256
# A code is a root of a value's share of its block's largest value, in this many steps: the square
# root for a signed value, and the fourth root for a second moment, whose own square root is what an
# update uses.
SIGNED_STEPS, SQUARE_STEPS = 127, 255
Noise = tuple[Tensor, Tensor, Tensor]


def noise(like_N: Tensor, seed: int, applied: Tensor, plane: int, start: int | Tensor = 0) -> Noise:
    """Return three independent random words [N], int64 in [0, 2^32), by (seed, update, plane, start
    + index).
    """
    # The index is that in the whole plane, so that chunks of a streamed plane and rows of a sharded
    # one draw the same.
    index_N = torch.arange(len(like_N), device=like_N.device) + start
    zero = torch.zeros_like(applied)
    counter = (index_N & LOW32, applied & LOW32, zero + plane, index_N >> 32)
    return philox(counter, (zero + (seed & LOW32), zero + (seed >> 32)))[:3]


def stochastic(values: Tensor, word: Tensor) -> Tensor:
    """Round to bf16, up or down with probabilities by which the mean is the value; a bf16 value
    stays.

        bits <- (bits + r) with the lower 16 bits cut off,   r = word mod 2^16

    Args:
        values: any shape; first rounded to fp32.
        word: random, int64, same shape.

    Returns:
        bf16, one of the two neighbours of the value.
    """
    # The sum of the lower bits carries into bf16's last bit with the probability of rounding up. A
    # number next to infinity becomes infinite, as in ordinary rounding.
    bits = values.to(torch.float32).view(torch.int32) + (word & 0xFFFF).to(torch.int32)
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)


def splittable(master: Tensor) -> Tensor:
    """Return the weights; those halfway between two bf16 numbers are moved towards zero by their
    last bit.

        b <- b - 1 where the lower 17 bits of b are 0 1000 0000 0000 0000

    Only weights that would be rounded down are moved, so their rounding to bf16 stays the same, and
    `split` needs no 65,537th value of `lo`. One weight of 131,072 is moved, by 2^-24 of itself.

    Args:
        master: fp32, any shape.
    """
    bits = master.view(torch.int32)
    return (bits - ((bits & 0x1FFFF) == 0x8000).to(torch.int32)).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return a splittable fp32 tensor as (hi, lo): hi is its rounding to bf16, ties to even; lo is
    the rest, int16.

        hi = (b + 0x7FFF + (bit 16 of b)) >> 16          lo = b - (hi << 16)         b the bits of the master

    The largest finite numbers have hi = inf, so only the result of `join` tells whether a number is
    finite.
    """
    bits = master.view(torch.int32)
    hi = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return hi.to(torch.int16).view(torch.bfloat16), (bits - (hi << 16)).to(torch.int16)


def split_(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Write the halves of `split` into `hi` and `lo`."""
    for target, source in zip((hi, lo), split(master), strict=True):
        target.copy_(source)


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """Return the fp32 tensor that `split` was given, bit for bit."""
    return ((hi.view(torch.int16).to(torch.int32) << 16) + lo).view(torch.float32)


def quantised(
    values_N: Tensor, signed: bool, before: int = 0, ends_2: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return 8-bit codes of values, block by block of 256, after the idea of Dettmers et al. 2022
    (arXiv 2110.02861).

        a = max |x| of the block
        signed (m):  c = sign(x) round(127 (|x| / a)^(1/2))         x' = sign(c) a (c / 127)^2
        else (v):    c = max(1, round(255 (x / a)^(1/4))), 0 of 0   x' = a (c / 255)^4

    Roots take the place of a table, as they fuse into the update. Codes of v reach twice as many
    orders of magnitude down as those of m and are 0 only where v is 0, so the update m' / sqrt(v')
    stays bounded for an element whose gradient is tiny compared with its block's.

    Args:
        values_N: [N]; v is not negative.
        signed: true for m, false for v.
        before: elements of the first block that are missing here.
        ends_2: a of the first and the last block, if their other elements are missing here; None:
            no other counts.

    Returns:
        Codes [N], int8 for signed, else uint8; a [K], fp32.
    """
    blocks_K256 = _blocks(values_N.to(torch.float32), before)
    scale_K1 = blocks_K256.abs().amax(-1, keepdim=True)
    if ends_2 is not None:
        scale_K1[0], scale_K1[-1] = ends_2
    root_K256 = (blocks_K256.abs() / torch.where(scale_K1 > 0, scale_K1, 1.0)).sqrt()
    if signed:
        codes = ((root_K256 * SIGNED_STEPS).round() * blocks_K256.sign()).to(torch.int8)
    else:
        # A code is at least 1, or an element whose second moment rounds to 0 would be divided by
        # eps alone.
        steps = (root_K256.sqrt() * SQUARE_STEPS).round().clamp_min(1)
        codes = torch.where(blocks_K256 > 0, steps, 0.0).to(torch.uint8)
    return codes.view(-1)[before : before + len(values_N)], scale_K1.squeeze(-1)


def dequantised(codes_N: Tensor, scale_K: Tensor, before: int = 0) -> Tensor:
    """Return the values [N], fp32, that codes stand for; see `quantised`."""
    codes_K256 = _blocks(codes_N, before).to(torch.float32)
    share = codes_K256 / (SIGNED_STEPS if codes_N.dtype == torch.int8 else SQUARE_STEPS)
    powers = share * share.abs() if codes_N.dtype == torch.int8 else share.square().square()
    return (powers * scale_K[:, None]).view(-1)[before : before + len(codes_N)]


def block_count(values_N: Tensor, before: int = 0) -> int:
    """Return in how many blocks a tensor [N] lies, K."""
    return -(-(before + len(values_N)) // BLOCK)


def _blocks(values_N: Tensor, before: int) -> Tensor:
    """Return values as blocks [K, 256], zeros in the place of those that are missing here."""
    after = -(before + len(values_N)) % BLOCK
    return (F.pad(values_N, (before, after)) if before or after else values_N).view(-1, BLOCK)
