"""Keep numbers in fewer bits: bf16 with stochastic rounding, fp32 in two halves, and 8-bit codes.

At the end of the file are the formats in which an optimizer can keep its moments: bf16 and 8-bit codes.
A plane is a flat buffer of parameters (`monograph.optim.planes`). The 8-bit codes of 256 consecutive
elements, a block, share a scale.

Shapes: N elements of a plane, K blocks of 256.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from monograph.ops.philox import LOW32, philox
from monograph.optim.state_format import MomentBuffer, PackingContext, StateFormat

BLOCK = 256  # elements whose 8-bit codes share a scale
# An AND with it sets the lower 16 of 32 bits to 0. It is negative because the bits are those of an int32.
_UPPER_HALF = -0x10000


def random_words(
    like_N: Tensor,
    seed: int,
    update: Tensor,
    plane: int,
    start: int | Tensor = 0,
    count: int = 3,
) -> tuple[Tensor, ...]:
    """Return independent random words for each element of a plane.

    A word is a function of the seed, the update, the plane and the element's index in the whole plane.

    Args:
        like_N: a tensor of the plane's length, on its device.
        seed: the seed.
        update: the number of the update, an int64 scalar.
        plane: the number of the plane.
        start: the index of the first element in the whole plane.
        count: how many words each element gets, 4 at most.

    Returns:
        `count` tensors [N], int64 in [0, 2^32).
    """
    # The index is that in the whole plane, so that a chunk of a streamed plane, and a rank's rows of a
    # sharded plane, get the same words as the whole plane gets in one process.
    index_N = torch.arange(len(like_N), device=like_N.device) + start
    # `philox` takes tensors. The sum of an integer and this zero is a tensor.
    zero = torch.zeros_like(update)
    # Philox maps a counter of four 32-bit words, under a key of two, to four random words.
    counter = (index_N & LOW32, update & LOW32, zero + plane, index_N >> 32)
    return philox(counter, (zero + (seed & LOW32), zero + (seed >> 32)))[:count]


def round_stochastically(values: Tensor, word: Tensor) -> Tensor:
    """Round to bf16, up or down at random, so that the mean of the results is the value.

    A value that is a bf16 number does not change.

        bits <- (bits + r) with the lower 16 bits set to 0,   r = word mod 2^16

    Args:
        values: any shape; first rounded to fp32.
        word: random words, int64, of the same shape.

    Returns:
        bf16, one of the two neighbours of the value.
    """
    # The sum carries into the last bit of bf16 with the right probability of rounding up. The largest
    # numbers may become infinite, as in ordinary rounding.
    bits = values.to(torch.float32).view(torch.int32) + (word & 0xFFFF).to(torch.int32)
    return (bits & _UPPER_HALF).view(torch.float32).to(torch.bfloat16)


def splittable(master: Tensor) -> Tensor:
    """Return weights that `split` can store in two halves of 16 bits. A few weights change a little.

        b <- b - 1 where the lower 17 bits of b are 0 1000 0000 0000 0000,   b the bits of a weight

    `split` stores the difference of a weight's bits from their rounding to bf16 as an int16, which ends
    at 0x7FFF. A weight halfway between two bf16 numbers is rounded to the even one. If that is the upper one,
    the difference is -0x8000, which fits. If it is the lower one, the difference is 0x8000, which does
    not fit; these are the weights with the bits above. One step towards zero makes the difference 0x7FFF
    and does not change the rounding. One weight of 131,072 is moved, by about 2^-24 of itself.

    Args:
        master: fp32, any shape.
    """
    bits = master.view(torch.int32)
    return (bits - ((bits & 0x1FFFF) == 0x8000).to(torch.int32)).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor that `splittable` has returned as two halves of 16 bits, (hi, lo).

        hi = (b + 0x7FFF + (bit 16 of b)) >> 16          lo = b - (hi << 16)         b the bits of a weight

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


def pack_bf16(values_N: Tensor, packing: PackingContext) -> tuple[Tensor]:
    """Return a moment's values rounded stochastically to bf16."""
    assert packing.word_N is not None
    return (round_stochastically(values_N, packing.word_N),)


def unpack_bf16(tensors: Sequence[Tensor], packing: PackingContext) -> Tensor:
    """Return a moment's values [N] in bf16, as they are in its only buffer."""
    return tensors[0]


# The largest 8-bit codes, which stand for the largest value of a block; see the formulas of `pack_8bit`.
SIGNED_STEPS = 127  # int8, for values with a sign
SQUARE_STEPS = 255  # uint8, for second moments, which are means of squares


def pack_8bit(values_N: Tensor, packing: PackingContext) -> tuple[Tensor, Tensor]:
    """Return 8-bit codes of a moment's values, and a scale for each block of 256.

        a = max |x| of the block
        signed (m):  c = sign(x) round(127 (|x| / a)^(1/2))                    x' = sign(c) a (c / 127)^2
        else (v):    c = max(1, round(255 (x / a)^(1/4))), but 0 where x = 0   x' = a (c / 255)^4

    x' is the number for which a code stands. The idea is that of Dettmers et al., arXiv 2110.02861.
    They look codes up in a table. Here codes are computed by roots, which a compiler can fuse with the
    update.

    An update divides m' by sqrt(v'). If v' became 0 for an element whose gradient is tiny compared with
    others in its block, the quotient would be huge. So v' is 0 only where v is 0. The root of v is the
    fourth, because v is a mean of squares: if m is 10^-3 of its block's largest number, v is about
    10^-6 of its own.

    Args:
        values_N: m or v; v is not negative.
        packing: whether the values are signed, and which elements of their blocks they are.

    Returns:
        The codes [N], int8 if signed, else uint8; and a, [K] fp32.
    """
    blocks_K256 = _blocks(values_N.to(torch.float32), packing.block_offset)
    scale_K1 = blocks_K256.abs().amax(-1, keepdim=True)
    if packing.edge_maxima_2 is not None:
        # Other ranks have parts of the first or of the last block. These are the largest magnitudes of
        # the two blocks over all ranks, so that all ranks use the same scales.
        scale_K1[0], scale_K1[-1] = packing.edge_maxima_2
    root_K256 = (blocks_K256.abs() / torch.where(scale_K1 > 0, scale_K1, 1.0)).sqrt()
    if packing.signed:
        codes = ((root_K256 * SIGNED_STEPS).round() * blocks_K256.sign()).to(torch.int8)
    else:
        # At least 1. If a second moment became 0, the element's update would be divided by eps alone.
        steps = (root_K256.sqrt() * SQUARE_STEPS).round().clamp_min(1)
        codes = torch.where(blocks_K256 > 0, steps, 0.0).to(torch.uint8)
    own_elements = slice(packing.block_offset, packing.block_offset + len(values_N))
    return codes.view(-1)[own_elements], scale_K1.squeeze(-1)


def unpack_8bit(tensors: Sequence[Tensor], packing: PackingContext) -> Tensor:
    """Return the values [N], fp32, that codes [N] and scales [K] stand for; see `pack_8bit`."""
    codes_N, scale_K = tensors
    codes_K256 = _blocks(codes_N, packing.block_offset).to(torch.float32)
    if packing.signed:
        root_K256 = codes_K256 / SIGNED_STEPS
        ratio_K256 = root_K256 * root_K256.abs()
    else:
        root_K256 = codes_K256 / SQUARE_STEPS
        ratio_K256 = root_K256.square().square()
    values = (ratio_K256 * scale_K[:, None]).view(-1)
    own_elements = slice(packing.block_offset, packing.block_offset + len(codes_N))
    return values[own_elements]


def _blocks(values_N: Tensor, block_offset: int) -> Tensor:
    """Return values as blocks [K, 256], with zeros for the elements of other ranks.

    If ranks (the processes of distributed training) share out the rows of a parameter, a rank may have
    only a part of its first block and of its last block.

    Args:
        values_N: this rank's values.
        block_offset: the number of elements of the first block that other ranks have.
    """
    missing_at_end = -(block_offset + len(values_N)) % BLOCK
    if block_offset or missing_at_end:
        values_N = F.pad(values_N, (block_offset, missing_at_end))
    return values_N.view(-1, BLOCK)


# `eager_update_bytes` is temporary memory for each number of a plane (`StateFormat`). It is the 28 bytes of
# seven fp32 copies, and what the tensors of `pack` and `unpack` add to them.

# Moments are rounded up or down at random, so that the mean of the rounded numbers is right.
BF16 = StateFormat(
    (MomentBuffer(suffix="", dtype=torch.bfloat16),),
    eager_update_bytes=116,  # most of them are for random words, which are integers of 8 bytes
    pack=pack_bf16,
    unpack=unpack_bf16,
    stochastic=True,
)
# The buffers are the codes, and a scale for each block, which is the block's largest magnitude.
EIGHT_BIT = StateFormat(
    (
        MomentBuffer(suffix="", dtype=torch.int8, nonnegative_dtype=torch.uint8),
        MomentBuffer(suffix="_scale", dtype=torch.float32, numbers_per_element=BLOCK),
    ),
    eager_update_bytes=36,
    pack=pack_8bit,
    unpack=unpack_8bit,
)
