"""The key-value cache of a fixed size: slot s of a row holds keys and values of position s; rows advance independently.

Shapes: N blocks, B rows, K key-value heads, H query heads, C slots of a block, E head dimension, T positions of a
chunk, 1 broadcasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.device import sent
from monograph.model.config import LlamaConfig
from monograph.ops.attention import BLOCK, cached_attention


class KVCache:
    """Keys and values of several rows, two tensors for each layer, zero where nothing was written."""

    def __init__(
        self, keys: list[Tensor], values: list[Tensor], seen_blocks: int | None = None, least: int = 1
    ) -> None:
        """Take tensors [N, B, K, C, E], one for each layer; attention reads the first `seen_blocks` blocks, or all.

        See `cached_attention` for `least`.
        """
        self.keys, self.values, self.seen_blocks, self.least = keys, values, seen_blocks, least

    @classmethod
    def allocate(
        cls, config: LlamaConfig, rows: int, slots: int, dtype: torch.dtype, device: torch.device, block: int = BLOCK
    ) -> KVCache:
        """Allocate memory for at least `slots` positions of each row, in blocks of `block` slots."""
        # Blocks are the outer axis, so that the first blocks, all that short texts need, lie in one piece of memory.
        shape = (-(-slots // block), rows, config.num_key_value_heads, block, config.head_dim)
        # A tensor for each layer: a captured graph that writes into a part of a tensor copies all of it (docs/log.md).
        keys, values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)] for _ in range(2)
        )
        return cls(keys, values)

    @staticmethod
    def bytes_per_row(config: LlamaConfig, slots: int, dtype: torch.dtype, block: int = BLOCK) -> int:
        """Return how many bytes `allocate` takes for one row."""
        heads = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return 2 * heads * -(-slots // block) * block * dtype.itemsize

    @property
    def block(self) -> int:
        """The slots of a block, C."""
        return self.keys[0].shape[3]

    def visible(self, slots: int) -> int:
        """Return how many blocks to read for that many slots: a power of two, since each number has a graph."""
        return min(self.keys[0].shape[0], 1 << (-(-slots // self.block) - 1).bit_length())

    @property
    def sizes(self) -> list[int]:
        """All that `visible` returns."""
        blocks = self.keys[0].shape[0]
        return sorted({min(blocks, 1 << power) for power in range(blocks.bit_length() + 1)})

    def first(self, blocks: int) -> KVCache:
        """Return a cache in the same memory, in which attention reads the first `blocks` blocks only."""
        return KVCache(self.keys, self.values, blocks, self.least)

    def attend(
        self,
        layer_index: int,
        query_BHTE: Tensor,
        key_BKTE: Tensor,
        value_BKTE: Tensor,
        positions_BT: Tensor,
        window: int | None,
    ) -> Tensor:
        """Store new keys and values at their positions; return the attention of the queries (`cached_attention`)."""
        keys_NBKCE, values_NBKCE = self.keys[layer_index], self.values[layer_index]
        rows_B1 = torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]
        where = (positions_BT // self.block, rows_B1, slice(None), positions_BT % self.block)
        # Write to the whole tensor and read a slice of it: a captured write to a slice copies the cache (docs/log.md).
        keys_NBKCE[where] = key_BKTE.transpose(1, 2).to(keys_NBKCE.dtype)
        values_NBKCE[where] = value_BKTE.transpose(1, 2).to(values_NBKCE.dtype)
        seen = slice(self.seen_blocks)
        return cached_attention(query_BHTE, keys_NBKCE[seen], values_NBKCE[seen], positions_BT, window, self.least)

    def copy_rows(self, rows: Sequence[int], source: KVCache, its_rows: Sequence[int], slots: int) -> None:
        """Copy the first slots of rows of `source`, whose blocks are as long, to rows of this cache."""
        blocks, device = -(-slots // self.block), self.keys[0].device
        into, out_of = sent(rows, device), sent(its_rows, device)
        for to, of in zip((*self.keys, *self.values), (*source.keys, *source.values), strict=True):
            to[:blocks].index_copy_(1, into, of[:blocks].index_select(1, out_of))

    def clear(self, row: int | slice) -> None:
        """Set a row, or several, to zero, as is needed after numbers that are not finite."""
        # Attention weighs hidden slots with 0, and 0 times NaN is NaN.
        for tensor in (*self.keys, *self.values):
            tensor[:, row] = 0


class Slots(NamedTuple):
    """The form of a cache, on which the bits of what is read from it may depend.

    Attributes:
        most: positions of each row.
        block: slots of a block; fewer cost less for short texts.
        prompts: prompts that are read at once.
        least: see `cached_attention`. With SAME_ROWS all of a prompt is read before its first step, once for all rows
            that continue it, as the step would compute the same bits for its last token.
        longest: most tokens of a prompt; fewer cost less.
    """

    most: int
    block: int = BLOCK
    prompts: int = 1
    least: int = 1
    longest: int = BLOCK
