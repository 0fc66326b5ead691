"""The key-value cache: fixed slots in blocks, slot s holds position s of its row; each row advances by itself.

Prompts are read one at a time, in chunks of a fixed size at fixed positions, into a cache with one row, so that a
prompt's keys and values depend on the prompt alone. Its last token is left to the first decode step.

Shapes: N blocks, B rows, K key-value heads, H query heads, C slots of a block, E head dimension, T positions (of a
chunk); 1 is the row of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.cached_attention import BLOCK, cached_attention


class KVCache:
    """Keys and values of `rows` sequences, one tensor for each layer, zero where nothing was written."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], looked_at: int | None = None) -> None:
        """Take memory [N, B, K, C, E] for each layer; attention looks at its first `looked_at` blocks, None: at all."""
        self.keys, self.values, self.looked_at = keys, values, looked_at

    @classmethod
    def allocate(cls, config: LlamaConfig, rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        """Allocate memory for at least `slots` positions of each row."""
        # Blocks are the outer axis, so that the first of them, all that a short sequence needs, lie in one piece.
        shape = (blocks_for(slots), rows, config.num_key_value_heads, BLOCK, config.head_dim)
        # A tensor for each layer: a captured graph that writes into a part of a tensor copies all of it (docs/log.md).
        keys, values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)] for _ in range(2)
        )
        return cls(keys, values)

    @staticmethod
    def bytes_per_row(config: LlamaConfig, slots: int, dtype: torch.dtype) -> int:
        """Return the bytes that `allocate` takes for one row."""
        heads = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return 2 * heads * blocks_for(slots) * BLOCK * dtype.itemsize

    @property
    def blocks(self) -> int:
        """Return N."""
        return self.keys[0].shape[0]

    def first(self, blocks: int) -> KVCache:
        """Return a cache in the same memory, of which no more than the first blocks are looked at."""
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
        """Store new keys and values at their positions; return what the queries there see (`cached_attention`)."""
        keys_NBKCE, values_NBKCE = self.keys[layer_index], self.values[layer_index]
        rows_B1 = torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]
        where = (positions_BT // BLOCK, rows_B1, slice(None), positions_BT % BLOCK)
        # Written whole and read by a slice: written through a slice, the whole cache would be copied (docs/log.md).
        keys_NBKCE[where] = key_BKTE.transpose(1, 2).to(keys_NBKCE.dtype)
        values_NBKCE[where] = value_BKTE.transpose(1, 2).to(values_NBKCE.dtype)
        seen = slice(self.looked_at)
        return cached_attention(query_BHTE, keys_NBKCE[seen], values_NBKCE[seen], positions_BT, window)

    def copy_row(self, row: int, source: KVCache, slots: int) -> None:
        """Copy the first slots of the only row of `source` to a row."""
        blocks = blocks_for(slots)
        for own, others in ((self.keys, source.keys), (self.values, source.values)):
            torch._foreach_copy_([cache[:blocks, row] for cache in own], [cache[:blocks, 0] for cache in others])

    def clear(self, row: int) -> None:
        """Forget a row, as is needed after numbers that are not finite."""
        # Hidden slots weigh 0, and 0 times NaN is NaN.
        for tensor in (*self.keys, *self.values):
            tensor[:, row] = 0


def blocks_for(slots: int) -> int:
    """Return how many blocks hold so many slots."""
    return -(-slots // BLOCK)


def visible_blocks(slots: int, most: int) -> int:
    """Return how many blocks to look at for so many slots."""
    needed = blocks_for(slots)
    # Powers of two, since a graph is captured for each number.
    return min(most, 1 << (needed - 1).bit_length())


class Reader:
    """A cache that holds the prompt read last."""

    def __init__(self, model: Llama, slots: int, chunk: int, wrap: Callable[[Callable], Callable]) -> None:  # type: ignore[type-arg]
        """Allocate a cache with one row.

        Args:
            model: the language model, in evaluation mode.
            slots: length of the longest prompt.
            chunk: tokens read at once, a power of two up to the cache's block.
            wrap: compiles a function, or returns it as it is.
        """
        weight = model.lm_head.weight
        self.model, self.chunk, self.device = model, chunk, weight.device
        self.cache = KVCache.allocate(model.config, 1, slots, weight.dtype, weight.device)
        self._pass = wrap(self._read_chunk)
        self._held: tuple[int, ...] = ()

    def read(self, prompt: Sequence[int]) -> KVCache:
        """Return the cache with keys and values of all tokens but the last; the last prompt is not read again."""
        tokens = tuple(prompt[:-1])
        if tokens != self._held:
            self._held = ()  # until all is read, as an interrupt may come in between
            # Fixed chunks at fixed positions: a prompt's numbers depend on it alone, and the graphs are few.
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
