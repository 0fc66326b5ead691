"""The cache of a fixed size: slot s of a row holds keys and values of position s; rows advance independently.

A layer without attention has a recurrence instead, of one size for any number of positions.

Shapes: N blocks, B rows, K key-value heads, H query heads, C slots of a block, E head dimension, T positions of a
chunk, 1 broadcasts.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from monograph.device import sent
from monograph.model.config import LlamaConfig
from monograph.model.layers import Recurrence
from monograph.ops.attention import BLOCK, Heads, cached_attention


class KVCache:
    """Keys and values of several rows, two tensors for each layer, zero where nothing was written; and recurrences."""

    def __init__(
        self,
        keys: list[Tensor],
        values: list[Tensor],
        recurrences: Mapping[int, Recurrence],
        seen_blocks: int | None = None,
        least: int = 1,
    ) -> None:
        """Take the memory.

        Args:
            keys: [N, B, K, C, E] for each layer; a layer without attention has no heads.
            values: the same for values.
            recurrences: those of the layers without attention.
            seen_blocks: how many blocks attention reads, the first ones; None: all.
            least: see `cached_attention`.
        """
        self.keys, self.values, self.recurrences = keys, values, recurrences
        self.seen_blocks, self.least = seen_blocks, least

    @classmethod
    def allocate(
        cls, config: LlamaConfig, rows: int, slots: int, dtype: torch.dtype, device: torch.device, block: int = BLOCK
    ) -> Self:
        """Allocate memory for at least `slots` positions of each row, in blocks of `block` slots."""
        # Blocks are the outer axis, so that the first blocks, all that short texts need, lie in one piece of memory.
        linear = [config.is_linear(layer) for layer in range(config.num_hidden_layers)]
        heads = [0 if is_linear else config.num_key_value_heads for is_linear in linear]
        shapes = [(-(-slots // block), rows, each, block, config.head_dim) for each in heads]
        # A tensor for each layer: a captured graph that writes into a part of a tensor copies all of it (docs/log.md).
        keys, values = ([torch.zeros(shape, dtype=dtype, device=device) for shape in shapes] for _ in range(2))
        size, wide_size, count = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_num_value_heads
        inputs = config.linear_conv_kernel_dim, 2 * config.linear_num_key_heads * size + count * wide_size
        state = count, size, wide_size
        wide = torch.promote_types(dtype, torch.float32)
        recurrences = {
            layer: Recurrence(
                torch.zeros(rows, *inputs, dtype=dtype, device=device),
                torch.zeros(rows, *state, dtype=wide, device=device),
                torch.zeros(rows, dtype=torch.int64, device=device),
                torch.full((rows,), torch.iinfo(torch.int64).max, device=device),
            )
            for layer in range(len(linear))
            if linear[layer]
        }
        return cls(keys, values, recurrences)

    @classmethod
    def bytes_per_row(cls, config: LlamaConfig, slots: int, dtype: torch.dtype, block: int = BLOCK) -> int:
        """Return how many bytes `allocate` takes for one row."""
        cache = cls.allocate(config, 1, slots, dtype, torch.device("meta"), block)
        return sum(tensor.nbytes for tensor in (*cache.keys, *cache.values, *cache.carried()))

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

    def first(self, blocks: int) -> Self:
        """Return a cache in the same memory, in which attention reads the first `blocks` blocks only."""
        return type(self)(self.keys, self.values, self.recurrences, blocks, self.least)

    def attend(
        self, layer_index: int, heads: Heads, positions_BT: Tensor, window: int | None, sink_H: Tensor | None = None
    ) -> Tensor:
        """Store new keys and values at their positions; return the attention of the queries (`cached_attention`)."""
        query_BHTE, key_BKTE, value_BKTE = heads
        keys_NBKCE, values_NBKCE = self.keys[layer_index], self.values[layer_index]
        rows_B1 = torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]
        where = (positions_BT // self.block, rows_B1, slice(None), positions_BT % self.block)
        # Write to the whole tensor and read a slice of it: a captured write to a slice copies the cache (docs/log.md).
        keys_NBKCE[where] = key_BKTE.transpose(1, 2).to(keys_NBKCE.dtype)
        values_NBKCE[where] = value_BKTE.transpose(1, 2).to(values_NBKCE.dtype)
        seen = slice(self.seen_blocks)
        keys_NBKCE, values_NBKCE = keys_NBKCE[seen], values_NBKCE[seen]
        return cached_attention(query_BHTE, keys_NBKCE, values_NBKCE, positions_BT, window, self.least, sink_H)

    def recurrence(self, layer_index: int) -> Recurrence:
        """Return what a layer without attention has taken of each row."""
        return self.recurrences[layer_index]

    def begin(self, limits: Sequence[int]) -> None:
        """Begin the recurrences of the first rows again, of which so many tokens each may be taken."""
        for tensor in self.carried():
            tensor.zero_()
        for recurrence in self.recurrences.values():
            recurrence.limit_B[: len(limits)] = sent(limits, recurrence.limit_B.device)

    def carried(self) -> list[Tensor]:
        """Return what recurrences have taken, tensors with a row for each of the cache's."""
        return [tensor for recurrence in self.recurrences.values() for tensor in recurrence[:3]]

    def copy_rows(self, rows: Sequence[int], source: Self, its_rows: Sequence[int], slots: int) -> None:
        """Copy rows of `source`, whose blocks are as long, to rows of this cache: the first slots, and recurrences."""
        self.copy_keys(rows, source, its_rows, slots)
        into, out_of = sent(rows, self.keys[0].device), sent(its_rows, self.keys[0].device)
        for to, of in zip(self.carried(), source.carried(), strict=True):
            to.index_copy_(0, into, of.index_select(0, out_of))

    def copy_keys(self, rows: Sequence[int], source: Self, its_rows: Sequence[int], slots: int) -> None:
        """Do the same without recurrences."""
        blocks, device = -(-slots // self.block), self.keys[0].device
        into, out_of = sent(rows, device), sent(its_rows, device)
        for to, of in zip((*self.keys, *self.values), (*source.keys, *source.values), strict=True):
            to[:blocks].index_copy_(1, into, of[:blocks].index_select(1, out_of))

    def clear(self, row: int | slice) -> None:
        """Set a row, or several, to zero, as is needed after numbers that are not finite."""
        # Attention weighs hidden slots with 0, and 0 times NaN is NaN.
        for tensor in (*self.keys, *self.values):
            tensor[:, row] = 0
        for tensor in self.carried():
            tensor[row] = 0


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
