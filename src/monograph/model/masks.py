"""Which positions a position attends to, built once per forward pass and shared by all blocks that see alike.

One rule covers documents, windows and padding: position t sees position s if s <= t, both carry the same segment number
and, with a window of w, t - s < w. A document lies in one piece, so distances in the row are distances in the document.
Padding is segment 0, a segment like any other: no document sees it, and each of its positions sees itself at least, so
that no row of a softmax is ever empty.

Shape suffixes: B batch, T positions, N blocks of positions; 1 broadcasts over heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from monograph.ops.attention import Impl, Mask

BLOCK = 128  # positions per side of a block: flex attention's own default
_LAST = 2**62  # above every document's number, and a double, as F.pad takes it: 2^63 - 1 wraps round in torch 2.13


def attention_mask(segments_BT: Tensor | None, tokens_BT: Tensor, impl: Impl, window: int | None = None) -> Mask:
    """The mask of a forward pass without a cache, in the form that `impl` reads.

    "auto" is flex attention inside a compiled graph on a GPU, for it is fused only there, and a dense boolean mask
    everywhere else. Without segments, and with a window that no row outgrows, there is only causality: a flag (None)
    that needs no mask at all.

    Args:
        segments_BT: document number of each position inside its row, 0 on padding, int64; None: one document a row.
        tokens_BT: gives shape and device.
        impl: the attention implementation.
        window: how many positions a query sees, its own the last of them; None: all up to its own.
    """
    window = None if window is None or window >= tokens_BT.shape[1] else window
    if segments_BT is None and window is None and impl != "flex":
        return None
    if impl == "flex" or (impl == "auto" and tokens_BT.is_cuda and torch.compiler.is_compiling()):
        return block_mask(torch.ones_like(tokens_BT) if segments_BT is None else segments_BT, window)
    # Without segments all rows are alike, and one mask serves them.
    return dense_mask(torch.ones_like(tokens_BT[:1]) if segments_BT is None else segments_BT, window)


def dense_mask(segments_BT: Tensor, window: int | None = None) -> Tensor:
    """The rule as a boolean tensor [B, 1, T, T], True where a query (third axis) sees a key (last axis)."""
    seen_BTT = (segments_BT[:, :, None] == segments_BT[:, None, :]).tril()
    return (seen_BTT if window is None else seen_BTT.triu(1 - window))[:, None]


def block_mask(segments_BT: Tensor, window: int | None = None) -> BlockMask:
    """The rule for flex attention: which blocks of keys a block of queries needs at all, and which of them in full.

    Two blocks can share a document only if their ranges of segment numbers overlap, so N numbers a row decide and the
    [T, T] mask is never built (building it can cost more than the attention: lightseekorg/TorchSpec issue 86). Ranges
    that overlap without a shared document only cost time: inside a block that is not full the rule itself decides.
    """
    length = segments_BT.shape[1]
    blocks = -(-length // BLOCK)
    # Padding ends a row: with the highest number there instead of 0, a row's numbers only grow and ranges stay short.
    numbers_BT = torch.where(segments_BT == 0, _LAST, segments_BT)
    blocks_BNX = F.pad(numbers_BT, (0, blocks * BLOCK - length), value=_LAST)
    blocks_BNX = blocks_BNX.unflatten(1, (blocks, BLOCK))
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
    """Flex attention's sparse form: how many blocks each block of queries needs, and all indices, needed ones first."""
    needed_B1NN = needed_BNN[:, None].to(torch.int32)
    order_B1NN = needed_B1NN.argsort(dim=-1, descending=True, stable=True)
    return needed_B1NN.sum(dim=-1, dtype=torch.int32), order_B1NN.to(torch.int32)
