"""Moments in 4 bits, as somebody would add them: what a file of `monograph.optim` would have, such as
`narrow.py`. Tests add its row of `monograph.optim_table`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from monograph.optim.state_format import MomentBuffer, PackingContext, StateFormat

BLOCK = 64


def packed(values_N: Tensor, packing: PackingContext) -> tuple[Tensor, Tensor]:
    """Return two codes to a byte, and the largest number of each block.

    Of signed numbers a code is the rounded root of a number's share of the largest, in 7 steps; of
    others the fourth root in 15 steps, rounded up, as no second moment may become 0.
    """
    after = -(packing.block_offset + packing.size) % BLOCK
    blocks_KB = F.pad(values_N.to(torch.float32), (packing.block_offset, after)).view(-1, BLOCK)
    largest_K1 = blocks_KB.abs().amax(-1, keepdim=True)
    if packing.edge_maxima_2 is not None:
        largest_K1[0], largest_K1[-1] = packing.edge_maxima_2
    root_KB = (blocks_KB.abs() / torch.where(largest_K1 > 0, largest_K1, 1.0)).sqrt()
    if packing.signed:
        codes = (root_KB * 7).round() * blocks_KB.sign()
    else:
        codes = (root_KB.sqrt() * 15).ceil()
    low, high = (codes.to(torch.int32) & 15).view(-1, 2).unbind(-1)
    pairs = (low | high << 4).to(torch.uint8)
    return pairs[
        packing.block_offset // 2 : -(-(packing.block_offset + packing.size) // 2)
    ], largest_K1.squeeze(-1)


def unpacked(tensors: Sequence[Tensor], packing: PackingContext) -> Tensor:
    pairs, largest_K = tensors
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).view(-1)[: packing.size].to(torch.int32)
    if packing.signed:
        codes = (codes ^ 8) - 8  # the fourth bit is the sign's
    share = codes / (7 if packing.signed else 15)
    share = share * share.abs() if packing.signed else share.square().square()
    after = -(packing.block_offset + packing.size) % BLOCK
    share_KB = F.pad(share, (packing.block_offset, after)).view(-1, BLOCK)
    return (share_KB * largest_K[:, None]).view(-1)[
        packing.block_offset : packing.block_offset + packing.size
    ]


FOUR_BITS = StateFormat(
    (
        MomentBuffer("", torch.uint8, numbers_per_element=2),
        MomentBuffer("_scale", torch.float32, numbers_per_element=BLOCK),
    ),
    eager_update_bytes=40,
    pack=packed,
    unpack=unpacked,
)
