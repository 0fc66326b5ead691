"""The key-value cache of a fixed size: slot s of a row holds keys and values of position s; rows advance independently.

Prompts are read in chunks of a fixed size at fixed positions, by passes of a fixed number of rows (one, unless a caller
wants more), so that a prompt's keys and values depend on the prompt alone. The first decode step reads its last token,
unless the reader does (`Slots.least`).

Shapes: N blocks, B rows, K key-value heads, H query heads, C slots of a block, E head dimension, T positions of a
chunk, 1 broadcasts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.device import sent
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.attention import BLOCK, SAME_ROWS, cached_attention

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


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


class Reader:
    """Reads prompts, one or several at once, into a cache that holds those that were read last.

    Attributes:
        whole: whether the last token is read, too.
        last_RD: then its final hidden state in each row; R are the rows of the reader's cache.
    """

    def __init__(self, model: Llama, slots: Slots, chunk: int, wrap: Wrap) -> None:
        """Allocate a cache with a row for each of the prompts that are read at once.

        Args:
            model: the language model, in evaluation mode.
            slots: its form; no prompt is longer than its positions.
            chunk: tokens read at once, a power of two up to the cache's block.
            wrap: a function that compiles another, or returns it unchanged.
        """
        weight = model.lm_head.weight
        self.model, self.chunk, self.rows, self.device = model, chunk, slots.prompts, weight.device
        self.cache = KVCache.allocate(model.config, self.rows, slots.most, weight.dtype, weight.device, slots.block)
        self.cache.least, self.whole = slots.least, slots.least >= SAME_ROWS
        self.last_RD = weight.new_zeros(self.rows, model.config.hidden_size)
        self._pass = wrap(self._read_chunk)
        self._held: dict[tuple[int, ...], int] = {}

    def read(self, prompts: Iterable[Sequence[int]], further: Iterable[Sequence[int]] = ()) -> list[int]:
        """Return the rows of the cache with the first of these prompts, without their last tokens unless `whole`.

        Those that are held are not read again. If the first has to be read, so are as many of the others, and then of
        the further ones, as fit. The list ends before the first prompt that is not held then.
        """
        end = None if self.whole else -1
        wanted = [tuple(prompt[:end]) for prompt in prompts]
        if wanted[0] not in self._held:
            self._held = {}  # an interrupt may come before all is read
            later = (tuple(prompt[:end]) for prompt in further)
            self._held = self._read(list(itertools.islice(dict.fromkeys((*wanted, *later)), self.rows)))
        return [self._held[tokens] for tokens in itertools.takewhile(self._held.__contains__, wanted)]

    def _read(self, prompts: list[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
        # With fixed chunks at fixed positions a prompt's numbers depend on it alone, and few graphs are captured.
        longest = max(map(len, prompts))
        padded = torch.zeros(self.rows, -(-longest // self.chunk) * self.chunk, dtype=torch.int64)
        for row, tokens in enumerate(prompts):
            padded[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        for begin in range(0, longest, self.chunk):
            chunk_BT = padded[:, begin : begin + self.chunk].to(self.device)
            start = torch.full((1, 1), begin, device=self.device)
            hidden_BTD = self._pass(chunk_BT, start, self.cache.visible(begin + self.chunk))
            if self.whole:
                ends = {row: len(tokens) - 1 - begin for row, tokens in enumerate(prompts)}
                ends = {row: at for row, at in ends.items() if 0 <= at < self.chunk}
                self.last_RD[list(ends)] = hidden_BTD[list(ends), list(ends.values())].to(self.last_RD.dtype)
        return {tokens: row for row, tokens in enumerate(prompts)}

    def forget(self) -> None:
        """Clear the cache: it may hold numbers that are not finite."""
        self.cache.clear(slice(None))
        self._held = {}

    @torch.no_grad()
    def _read_chunk(self, tokens_BT: Tensor, start_11: Tensor, blocks: int) -> Tensor | None:
        positions_1T = start_11 + torch.arange(tokens_BT.shape[1], device=self.device)
        hidden_BTD = self.model(tokens_BT, positions=positions_1T.expand_as(tokens_BT), cache=self.cache.first(blocks))
        # A compiled pass that returns nothing leaves out what follows the last keys and values.
        return hidden_BTD if self.whole else None
