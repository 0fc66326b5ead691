"""Build attention masks of packed rows, windows and padding.

One rule says which positions a position attends to, for documents, windows and padding: position t sees position s if
s <= t, both have the same segment and, with a window of w, t - s < w. A mask is built once per forward pass and shared
by all blocks with the same window. Documents are contiguous, so distances in a row are distances in a document. Padding
is segment 0, a segment like any other: no document sees it, and each of its positions sees at least itself, so that no
row of a softmax is empty.

Shape suffixes: B batch, T positions, N blocks of positions; 1 broadcasts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from monograph.ops.attention import Impl, Mask

BLOCK = 128  # positions per side of a block: flex attention's own default
_LAST = 2**62  # above every document number; F.pad converts its value to a double, so 2^63 - 1 overflows (torch 2.13)


def attention_mask(
    segments_BT: Tensor | None, tokens_BT: Tensor, impl: Impl, window: int | None = None, captured: bool = False
) -> Mask:
    """Return the mask of a forward pass without a cache, in the form that `impl` reads.

    "auto" gives a block mask for flex attention in compiled graphs on a GPU, the only place where it is fused, and a
    dense boolean mask elsewhere. Without segments and without a window that is shorter than the row, only causality is
    left, which needs no mask (None).

    Args:
        segments_BT: document number of each position in its row, 0 on padding, int64; None: one document a row.
        tokens_BT: the tokens, for shape and device.
        impl: the attention implementation.
        window: number of positions that a query sees, its own the last of them; None: all up to its own.
        captured: whether the blocks, which read the mask, are compiled graphs of their own.
    """
    window = None if window is None or window >= tokens_BT.shape[1] else window
    if segments_BT is None and window is None and impl != "flex":
        return None
    captured = captured or torch.compiler.is_compiling()
    if impl == "flex" or (impl == "auto" and tokens_BT.is_cuda and captured):
        return block_mask(torch.ones_like(tokens_BT) if segments_BT is None else segments_BT, window)
    # Without segments, one mask serves all rows.
    return dense_mask(torch.ones_like(tokens_BT[:1]) if segments_BT is None else segments_BT, window)


def dense_mask(segments_BT: Tensor, window: int | None = None) -> Tensor:
    """Return a boolean mask [B, 1, T, T], True where a query (third axis) sees a key (last axis)."""
    seen_BTT = (segments_BT[:, :, None] == segments_BT[:, None, :]).tril()
    return (seen_BTT if window is None else seen_BTT.triu(1 - window))[:, None]


def block_mask(segments_BT: Tensor, window: int | None = None) -> BlockMask:
    """Return the mask for flex attention: the blocks of keys that each block of queries needs partly or in full.

    Two blocks can share a document only if their ranges of segment numbers overlap, so N ranges a row suffice, and the
    [T, T] mask is never built (building it can cost more than the attention: lightseekorg/TorchSpec issue 86). Ranges
    that overlap without a shared document only cost time, because the rule itself is evaluated in partial blocks.
    """
    length = segments_BT.shape[1]
    blocks = -(-length // BLOCK)
    # Padding ends a row. Numbered highest instead of 0, it keeps a row's numbers ascending, and so the ranges short.
    numbers_BT = torch.where(segments_BT == 0, _LAST, segments_BT)
    blocks_BNX = F.pad(numbers_BT, (0, blocks * BLOCK - length), value=_LAST).unflatten(1, (blocks, BLOCK))
    low_BN, high_BN = blocks_BNX.amin(dim=-1), blocks_BNX.amax(dim=-1)
    overlap_BNN = (low_BN[:, :, None] <= high_BN[:, None, :]) & (low_BN[:, None, :] <= high_BN[:, :, None])
    uniform_BN = low_BN == high_BN
    full_BNN = (overlap_BNN & uniform_BN[:, :, None] & uniform_BN[:, None, :]).tril(-1)
    if window is not None:
        # Between two blocks n apart, distances go from (n - 1) BLOCK + 1 to (n + 1) BLOCK - 1.
        overlap_BNN = overlap_BNN.triu(-((window + BLOCK - 2) // BLOCK))
        full_BNN = full_BNN.triu(1 - window // BLOCK)
    partial_BNN = overlap_BNN.tril() & ~full_BNN

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (segments_BT[row, query] == segments_BT[row, key])
        return seen if window is None else seen & (query - key < window)

    return BlockMask.from_kv_blocks(
        *_listed(partial_BNN), *_listed(full_BNN), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def _listed(needed_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Return flex attention's sparse form: the number of needed blocks, and all blocks' indices, needed ones first."""
    needed_B1NN = needed_BNN[:, None].to(torch.int32)
    order_B1NN = needed_B1NN.argsort(dim=-1, descending=True, stable=True)
    return needed_B1NN.sum(dim=-1, dtype=torch.int32), order_B1NN.to(torch.int32)
