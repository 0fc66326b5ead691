"""The key-value cache: fixed slots in blocks, slot s holds position s of its row; rows advance on their own.

Shapes: L layers, N blocks, B rows, K key-value heads, H query heads, C slots of a block, E head dimension, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monograph.model.config import LlamaConfig
from monograph.ops.cached_attention import BLOCK, cached_attention


class KVCache:
    """Keys and values of `rows` sequences, zero where nothing was written.

    Blocks are the outer axis, so that the first of them, all that a short sequence needs, lie in one piece.
    """

    def __init__(self, keys_LNBKCE: Tensor, values_LNBKCE: Tensor) -> None:
        """A view of existing memory; see `allocate`."""
        self.keys_LNBKCE, self.values_LNBKCE = keys_LNBKCE, values_LNBKCE

    @classmethod
    def allocate(cls, config: LlamaConfig, rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        """Memory for at least `slots` positions of each row."""
        heads, size = config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, blocks_for(slots), rows, heads, BLOCK, size)
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    @staticmethod
    def bytes_per_row(config: LlamaConfig, slots: int, dtype: torch.dtype) -> int:
        """What `allocate` takes for one row."""
        heads = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return 2 * heads * blocks_for(slots) * BLOCK * dtype.itemsize

    @property
    def blocks(self) -> int:
        """N."""
        return self.keys_LNBKCE.shape[1]

    def first(self, blocks: int) -> KVCache:
        """The first blocks, sharing memory."""
        return KVCache(self.keys_LNBKCE[:, :blocks], self.values_LNBKCE[:, :blocks])

    def attend(
        self,
        layer_index: int,
        query_BHTE: Tensor,
        key_BKTE: Tensor,
        value_BKTE: Tensor,
        positions_BT: Tensor,
        window: int | None,
    ) -> Tensor:
        """Store new keys and values at their positions; what the queries there see (`cached_attention`)."""
        keys_NBKCE, values_NBKCE = self.keys_LNBKCE[layer_index], self.values_LNBKCE[layer_index]
        rows_B1 = torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]
        where = (positions_BT // BLOCK, rows_B1, slice(None), positions_BT % BLOCK)
        keys_NBKCE[where] = key_BKTE.transpose(1, 2).to(keys_NBKCE.dtype)
        values_NBKCE[where] = value_BKTE.transpose(1, 2).to(values_NBKCE.dtype)
        return cached_attention(query_BHTE, keys_NBKCE, values_NBKCE, positions_BT, window)

    def copy_row(self, row: int, source: KVCache, slots: int) -> None:
        """Make the first slots of a row those of the only row of `source`."""
        blocks = blocks_for(slots)
        self.keys_LNBKCE[:, :blocks, row] = source.keys_LNBKCE[:, :blocks, 0]
        self.values_LNBKCE[:, :blocks, row] = source.values_LNBKCE[:, :blocks, 0]

    def clear(self, row: int) -> None:
        """Forget a row. Needed after numbers that are not finite: hidden slots weigh 0, and 0 times NaN is NaN."""
        self.keys_LNBKCE[:, :, row] = 0
        self.values_LNBKCE[:, :, row] = 0


def blocks_for(slots: int) -> int:
    """Blocks that hold so many slots."""
    return -(-slots // BLOCK)


def visible_blocks(slots: int, most: int) -> int:
    """Blocks to look at for so many slots: few different numbers, as a graph is captured for each."""
    needed = blocks_for(slots)
    return min(most, 1 << (needed - 1).bit_length())
