"""Numbers in fewer bits: stochastic rounding to bf16, halves of fp32, and blocks of 8-bit codes.

The forms of the optimizer's state that are made of them stand at the end. If ranks have rows of a
parameter each, the first block may begin with `before` elements of another rank, and the last block
may end with elements of another rank.

Shapes: N elements of a plane, K blocks of 256.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from monograph.ops.philox import LOW32, philox
from monograph.optim.state_format import MomentBuffer, PackingContext, StateFormat

BLOCK = 256
# A code is a root of the ratio of a value to its block's largest value, in this many steps: the
# square root for a signed value, the fourth root for a second moment. An update uses the square
# root of a second moment.
SIGNED_STEPS, SQUARE_STEPS = 127, 255


def noise(
    like_N: Tensor,
    seed: int,
    applied: Tensor,
    plane: int,
    start: int | Tensor = 0,
    count: int = 3,
) -> tuple[Tensor, ...]:
    """Return independent random words for each element of a plane.

    They are a function of (seed, update, plane, start + index).

    Args:
        like_N: a tensor of the plane's length, on its device.
        seed: the seed.
        applied: the number of the update, int64.
        plane: the number of the plane.
        start: the index of the first element in the whole plane.
        count: how many words, 4 at most.

    Returns:
        So many tensors [N], int64 in [0, 2^32).
    """
    # The index in the whole plane, so that chunks of a streamed plane and rows of a sharded one get
    # the same words.
    index_N = torch.arange(len(like_N), device=like_N.device) + start
    zero = torch.zeros_like(applied)
    counter = (index_N & LOW32, applied & LOW32, zero + plane, index_N >> 32)
    return philox(counter, (zero + (seed & LOW32), zero + (seed >> 32)))[:count]


def stochastic(values: Tensor, word: Tensor) -> Tensor:
    """Round to bf16, up or down, with probabilities for which the mean is the value.

    A value that bf16 holds is not changed.

        bits <- (bits + r) with the lower 16 bits cut off,   r = word mod 2^16

    Args:
        values: any shape; first rounded to fp32.
        word: random words, int64, of the same shape.

    Returns:
        bf16, one of the two neighbours of the value.
    """
    # The sum carries into bf16's last bit with the probability of rounding up. The number next to
    # infinity may become infinite, as in ordinary rounding.
    bits = values.to(torch.float32).view(torch.int32) + (word & 0xFFFF).to(torch.int32)
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)


def splittable(master: Tensor) -> Tensor:
    """Return the weights, of which `split` can store the rest in 16 bits.

        b <- b - 1 where the lower 17 bits of b are 0 1000 0000 0000 0000

    A weight halfway between two bf16 numbers that would be rounded down is moved towards zero by
    its last bit. Its rounding to bf16 stays the same, and `split` needs no 65,537th value of `lo`.
    One weight of 131,072 is moved, by 2^-24 of itself.

    Args:
        master: fp32, any shape.
    """
    bits = master.view(torch.int32)
    return (bits - ((bits & 0x1FFFF) == 0x8000).to(torch.int32)).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return a splittable fp32 tensor as (hi, lo).

        hi = (b + 0x7FFF + (bit 16 of b)) >> 16          lo = b - (hi << 16)         b the bits of the master

    hi is the rounding to bf16, ties to even; lo is the rest, int16. The largest finite numbers have
    hi = inf, so only the result of `join` tells whether a number is finite.
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


def rounded(values_N: Tensor, packing: PackingContext) -> tuple[Tensor]:
    """Return values rounded stochastically to bf16."""
    assert packing.word_N is not None
    return (stochastic(values_N, packing.word_N),)


def widened(tensors: Sequence[Tensor], packing: PackingContext) -> Tensor:
    """Return the values [N] of the only buffer, which any wider dtype holds."""
    return tensors[0]


def quantised(values_N: Tensor, packing: PackingContext) -> tuple[Tensor, Tensor]:
    """Return 8-bit codes of values in blocks of 256, an idea of Dettmers et al., arXiv 2110.02861.

        a = max |x| of the block
        signed (m):  c = sign(x) round(127 (|x| / a)^(1/2))         x' = sign(c) a (c / 127)^2
        else (v):    c = max(1, round(255 (x / a)^(1/4))), 0 of 0   x' = a (c / 255)^4

    Roots are used instead of a table, because they fuse into the update. Codes of v reach twice as
    many orders of magnitude down as codes of m, and are 0 only where v is 0. So the update
    m' / sqrt(v') stays bounded for an element whose gradient is tiny compared with its block's.

    Args:
        values_N: m or v; v is not negative.
        packing: whether the values are signed, and which elements of the blocks they are.

    Returns:
        The codes [N], int8 if signed, else uint8; and a, [K] fp32.
    """
    blocks_K256 = _blocks(values_N.to(torch.float32), packing.before)
    scale_K1 = blocks_K256.abs().amax(-1, keepdim=True)
    if packing.ends_2 is not None:
        scale_K1[0], scale_K1[-1] = packing.ends_2
    root_K256 = (blocks_K256.abs() / torch.where(scale_K1 > 0, scale_K1, 1.0)).sqrt()
    if packing.signed:
        codes = ((root_K256 * SIGNED_STEPS).round() * blocks_K256.sign()).to(torch.int8)
    else:
        # At least 1, because an element whose second moment rounded to 0 would be divided by eps
        # alone.
        steps = (root_K256.sqrt() * SQUARE_STEPS).round().clamp_min(1)
        codes = torch.where(blocks_K256 > 0, steps, 0.0).to(torch.uint8)
    return codes.view(-1)[packing.before : packing.before + len(values_N)], scale_K1.squeeze(-1)


def dequantised(tensors: Sequence[Tensor], packing: PackingContext) -> Tensor:
    """Return the values [N], fp32, that codes [N] and scales [K] stand for; see `quantised`."""
    codes_N, scale_K = tensors
    codes_K256 = _blocks(codes_N, packing.before).to(torch.float32)
    share = codes_K256 / (SIGNED_STEPS if packing.signed else SQUARE_STEPS)
    powers = share * share.abs() if packing.signed else share.square().square()
    return (powers * scale_K[:, None]).view(-1)[packing.before : packing.before + len(codes_N)]


def _blocks(values_N: Tensor, before: int) -> Tensor:
    """Return values as blocks [K, 256], with zeros for the elements of other ranks."""
    after = -(before + len(values_N)) % BLOCK
    return (F.pad(values_N, (before, after)) if before or after else values_N).view(-1, BLOCK)


# Right on average.
BF16 = StateFormat(
    (MomentBuffer("", torch.bfloat16),),
    eager_update_bytes=116,  # this many because random words are 8-byte integers
    pack=rounded,
    unpack=widened,
    stochastic=True,
)
# Codes, and the largest number of each block.
EIGHT_BIT = StateFormat(
    (
        MomentBuffer("", torch.int8, of_squares=torch.uint8),
        MomentBuffer("_scale", torch.float32, numbers_per_element=BLOCK),
    ),
    eager_update_bytes=36,
    pack=quantised,
    unpack=dequantised,
)
