"""The key-value cache: fixed slots in blocks, slot s holds position s of its row; rows advance on their own.

Shapes: N blocks, B rows, K key-value heads, H query heads, C slots of a block, E head dimension, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monograph.model.config import LlamaConfig
from monograph.ops.cached_attention import BLOCK, cached_attention


class KVCache:
    """Keys and values of `rows` sequences, a tensor a layer, zero where nothing was written.

    Blocks are the outer axis, so that the first of them, all that a short sequence needs, lie in one piece. Layers are
    tensors of their own: a captured graph that writes into a part of a tensor copies all of it (docs/log.md).
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], looked_at: int | None = None) -> None:
        """Existing memory [N, B, K, C, E] of each layer, of which attention looks at the first blocks, None: at all."""
        self.keys, self.values, self.looked_at = keys, values, looked_at

    @classmethod
    def allocate(cls, config: LlamaConfig, rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        """Memory for at least `slots` positions of each row."""
        shape = (blocks_for(slots), rows, config.num_key_value_heads, BLOCK, config.head_dim)
        keys, values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)] for _ in range(2)
        )
        return cls(keys, values)

    @staticmethod
    def bytes_per_row(config: LlamaConfig, slots: int, dtype: torch.dtype) -> int:
        """What `allocate` takes for one row."""
        heads = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return 2 * heads * blocks_for(slots) * BLOCK * dtype.itemsize

    @property
    def blocks(self) -> int:
        """N."""
        return self.keys[0].shape[0]

    def first(self, blocks: int) -> KVCache:
        """The same memory, of which no more than the first blocks are looked at."""
        return KVCache(self.keys, self.values, blocks)

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
        keys_NBKCE, values_NBKCE = self.keys[layer_index], self.values[layer_index]
        rows_B1 = torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]
        where = (positions_BT // BLOCK, rows_B1, slice(None), positions_BT % BLOCK)
        keys_NBKCE[where] = key_BKTE.transpose(1, 2).to(keys_NBKCE.dtype)
        values_NBKCE[where] = value_BKTE.transpose(1, 2).to(values_NBKCE.dtype)
        seen = slice(self.looked_at)
        return cached_attention(query_BHTE, keys_NBKCE[seen], values_NBKCE[seen], positions_BT, window)

    def copy_row(self, row: int, source: KVCache, slots: int) -> None:
        """Make the first slots of a row those of the only row of `source`."""
        blocks = blocks_for(slots)
        for own, others in ((self.keys, source.keys), (self.values, source.values)):
            torch._foreach_copy_([each[:blocks, row] for each in own], [each[:blocks, 0] for each in others])

    def clear(self, row: int) -> None:
        """Forget a row. Needed after numbers that are not finite: hidden slots weigh 0, and 0 times NaN is NaN."""
        for tensor in (*self.keys, *self.values):
            tensor[:, row] = 0


def blocks_for(slots: int) -> int:
    """Blocks that hold so many slots."""
    return -(-slots // BLOCK)


def visible_blocks(slots: int, most: int) -> int:
    """Blocks to look at for so many slots: few different numbers, as a graph is captured for each."""
    needed = blocks_for(slots)
    return min(most, 1 << (needed - 1).bit_length())
