"""The key-value cache of a fixed size: slot s of a row holds keys and values of position s; rows advance independently.

Prompts are read one at a time, in chunks of a fixed size at fixed positions, into a cache with one row, so that a
prompt's keys and values depend on the prompt alone. The first decode step reads the prompt's last token.

Shapes: N blocks, B rows, K key-value heads, H query heads, C slots of a block, E head dimension, T positions of a
chunk, 1 the only row of the cache that prompts are read into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.attention import BLOCK, cached_attention

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class KVCache:
    """Keys and values of several rows, two tensors for each layer, zero where nothing was written."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], seen_blocks: int | None = None) -> None:
        """Take tensors [N, B, K, C, E], one for each layer; attention reads the first `seen_blocks` blocks, or all."""
        self.keys, self.values, self.seen_blocks = keys, values, seen_blocks

    @classmethod
    def allocate(cls, config: LlamaConfig, rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        """Allocate memory for at least `slots` positions of each row."""
        # Blocks are the outer axis, so that the first blocks, all that short texts need, lie in one piece of memory.
        shape = (blocks_for(slots), rows, config.num_key_value_heads, BLOCK, config.head_dim)
        # A tensor for each layer: a captured graph that writes into a part of a tensor copies all of it (docs/log.md).
        keys, values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)] for _ in range(2)
        )
        return cls(keys, values)

    @staticmethod
    def bytes_per_row(config: LlamaConfig, slots: int, dtype: torch.dtype) -> int:
        """Return how many bytes `allocate` takes for one row."""
        heads = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return 2 * heads * blocks_for(slots) * BLOCK * dtype.itemsize

    @property
    def blocks(self) -> int:
        """The number of blocks, N."""
        return self.keys[0].shape[0]

    def first(self, blocks: int) -> KVCache:
        """Return a cache in the same memory, in which attention reads the first `blocks` blocks only."""
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
        """Store new keys and values at their positions; return the attention of the queries (`cached_attention`)."""
        keys_NBKCE, values_NBKCE = self.keys[layer_index], self.values[layer_index]
        rows_B1 = torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]
        where = (positions_BT // BLOCK, rows_B1, slice(None), positions_BT % BLOCK)
        # Write to the whole tensor and read a slice of it: a captured write to a slice copies the cache (docs/log.md).
        keys_NBKCE[where] = key_BKTE.transpose(1, 2).to(keys_NBKCE.dtype)
        values_NBKCE[where] = value_BKTE.transpose(1, 2).to(values_NBKCE.dtype)
        seen = slice(self.seen_blocks)
        return cached_attention(query_BHTE, keys_NBKCE[seen], values_NBKCE[seen], positions_BT, window)

    def copy_row(self, row: int, source: KVCache, slots: int) -> None:
        """Copy the first slots of `source`, which has one row, to a row of this cache."""
        blocks = blocks_for(slots)
        for targets, sources in ((self.keys, source.keys), (self.values, source.values)):
            torch._foreach_copy_([cache[:blocks, row] for cache in targets], [cache[:blocks, 0] for cache in sources])

    def clear(self, row: int) -> None:
        """Set a row to zero, as is needed after numbers that are not finite."""
        # Attention weighs hidden slots with 0, and 0 times NaN is NaN.
        for tensor in (*self.keys, *self.values):
            tensor[:, row] = 0


def blocks_for(slots: int) -> int:
    """Return how many blocks hold that many slots."""
    return -(-slots // BLOCK)


def visible_blocks(slots: int, most: int) -> int:
    """Return how many blocks to read for that many slots: a power of two, since a graph is captured for each number."""
    return min(most, 1 << (blocks_for(slots) - 1).bit_length())


class Reader:
    """Reads prompts into a cache with one row, which holds the prompt that was read last."""

    def __init__(self, model: Llama, slots: int, chunk: int, wrap: Wrap) -> None:
        """Allocate a cache with one row.

        Args:
            model: the language model, in evaluation mode.
            slots: length of the longest prompt.
            chunk: tokens read at once, a power of two up to the cache's block.
            wrap: a function that compiles another, or returns it unchanged.
        """
        weight = model.lm_head.weight
        self.model, self.chunk, self.device = model, chunk, weight.device
        self.cache = KVCache.allocate(model.config, 1, slots, weight.dtype, weight.device)
        self._pass = wrap(self._read_chunk)
        self._held: tuple[int, ...] = ()

    def read(self, prompt: Sequence[int]) -> KVCache:
        """Return the cache with keys and values of all tokens but the last; the prompt read last is not read again."""
        tokens = tuple(prompt[:-1])
        if tokens != self._held:
            self._held = ()  # an interrupt may come before all is read
            # With fixed chunks at fixed positions a prompt's numbers depend on it alone, and few graphs are captured.
            padded = torch.zeros(-(-len(tokens) // self.chunk) * self.chunk, dtype=torch.int64)
            padded[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            for begin in range(0, len(tokens), self.chunk):
                chunk_1T = padded[None, begin : begin + self.chunk].to(self.device)
                start = torch.full((1, 1), begin, device=self.device)
                self._pass(chunk_1T, start, visible_blocks(begin + self.chunk, self.cache.blocks))
            self._held = tokens
        return self.cache

    def forget(self) -> None:
        """Clear the cache: it may hold numbers that are not finite."""
        self.cache.clear(0)
        self._held = ()

    @torch.no_grad()
    def _read_chunk(self, tokens_1T: Tensor, start_11: Tensor, blocks: int) -> None:
        positions_1T = start_11 + torch.arange(tokens_1T.shape[1], device=self.device)
        self.model(tokens_1T, positions=positions_1T, cache=self.cache.first(blocks))
