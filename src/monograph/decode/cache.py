"""Caches of keys and values.

Slot s of a row holds the key and the value of position s. A block is a number of consecutive slots. A
layer without attention has a recurrence instead, whose size does not depend on the number of
positions.

`monograph.decode.prompt_reader` fills a cache with prompts, and decode steps add a position to each
row.

Shapes: N blocks, B rows, K key-value heads, H query heads, C slots of a block, E head dimension, T
positions of a pass; 1 an axis of length 1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from monograph.device import tensor_on
from monograph.model.config import LlamaConfig
from monograph.model.mixer import Cache, Recurrence, mixer_of
from monograph.ops.attention import BLOCK, Heads, cached_attention

if TYPE_CHECKING:
    from monograph.decode.fast_attention import FastAttention


class KVCache:
    """Keys and values of several rows, two tensors for each layer, and recurrences.

    Slots that have not been written are zero. The attributes are the arguments of the constructor.
    """

    def __init__(
        self,
        keys: list[Tensor],
        values: list[Tensor],
        recurrences: Mapping[int, Recurrence],
        seen_blocks: int | None = None,
        pads_products: bool = False,
        kernels: "FastAttention | None" = None,
        one_query_at_a_time: bool = False,
    ) -> None:
        """Take the tensors.

        Args:
            keys: [N, B, K, C, E] for each layer; K is 0 for a layer without attention.
            values: the same for values.
            recurrences: the recurrence of each layer without attention, by the layer's index.
            seen_blocks: how many blocks attention reads, from the first on; None: all blocks.
            pads_products: see `cached_attention`.
            kernels: the kernels that compute attention where they can; `cached_attention` computes
                the rest, or all if this is None.
            one_query_at_a_time: whether the queries of a row are computed one after another, so that each
                gets the bits of a step, which has a single query.
        """
        self.keys = keys
        self.values = values
        self.recurrences = recurrences
        self.seen_blocks = seen_blocks
        self.pads_products = pads_products
        self.kernels = kernels
        self.one_query_at_a_time = one_query_at_a_time
        # The calls of a trial pass (`trial`); None: passes of this cache are no trials.
        self._kept_calls: list[Callable[[Cache], object]] | None = None

    @classmethod
    def allocate(
        cls,
        config: LlamaConfig,
        rows: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        block: int = BLOCK,
    ) -> Self:
        """Allocate memory for at least `slots` positions of each row, in blocks of `block` slots."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        recurrences: dict[int, Recurrence] = {}
        for layer in range(config.num_hidden_layers):
            mixer = mixer_of(config, layer)
            of_layer = config.of_layer(layer)
            # A layer that takes its keys and values from another one shares that one's tensors. It writes the
            # same numbers to them again.
            source = config.keys_layer(layer)
            if source != layer:
                keys.append(keys[source])
                values.append(values[source])
                continue
            # Blocks are the outer axis, so that the first blocks, which are all that short texts need, are
            # contiguous. Each layer has its own tensor, since a captured graph that writes to a part of a
            # tensor copies all of it (dev/log.md).
            shape = (
                math.ceil(slots / block),
                rows,
                mixer.key_value_heads(of_layer),
                block,
                of_layer.head_dim,
            )
            keys.append(torch.zeros(shape, dtype=dtype, device=device))
            values.append(torch.zeros(shape, dtype=dtype, device=device))
            recurrence = mixer.recurrence(config, rows, dtype, device)
            if recurrence is not None:
                recurrences[layer] = recurrence
        return cls(keys, values, recurrences)

    @classmethod
    def bytes_per_row(
        cls, config: LlamaConfig, slots: int, dtype: torch.dtype, block: int = BLOCK
    ) -> int:
        """Return the number of bytes that `allocate` takes for one row."""
        cache = cls.allocate(config, 1, slots, dtype, torch.device("meta"), block)
        return sum(
            tensor.nbytes for tensor in (*cache.position_tensors(), *cache.recurrence_tensors())
        )

    @property
    def block(self) -> int:
        """The slots of a block, C."""
        return self.keys[0].shape[3]

    @property
    def slots(self) -> int:
        """The slots of a row, in whole blocks."""
        return self.keys[0].shape[0] * self.block

    def block_count_for(self, slots: int) -> int:
        """Return how many blocks attention reads if this number of first slots is used.

        It is rounded up to a power of two, or to all blocks, since each different number needs a graph
        of its own.
        """
        needed_blocks = math.ceil(slots / self.block)
        power_of_two = 1 << (needed_blocks - 1).bit_length()
        return min(self.keys[0].shape[0], power_of_two)

    @property
    def block_counts(self) -> list[int]:
        """All numbers that `block_count_for` can return."""
        blocks = self.keys[0].shape[0]
        return sorted({min(blocks, 1 << power) for power in range(blocks.bit_length() + 1)})

    def with_first_blocks(self, blocks: int) -> Self:
        """Return a cache of the same tensors, in which attention reads only the first blocks."""
        return type(self)(
            self.keys,
            self.values,
            self.recurrences,
            blocks,
            self.pads_products,
            self.kernels,
            self.one_query_at_a_time,
        )

    def attend(
        self,
        layer_index: int,
        heads: Heads,
        positions_BT: Tensor,
        window: int | None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """Store new keys and values at their positions, and return the attention of the queries.

        Args:
            layer_index: the layer.
            heads: the new queries, keys and values.
            positions_BT: their positions.
            window: see `cached_attention`.
            sink_H: see `cached_attention`.
        """
        queries = positions_BT.shape[1]
        if self.one_query_at_a_time and queries > 1:
            # A query sees no position after its own, so the later keys need not be written yet.
            mixed: list[Tensor] = []
            for place in range(queries):
                one = slice(place, place + 1)
                query, key, value = (each[:, :, one] for each in heads)
                mixed.append(
                    self.attend(
                        layer_index, (query, key, value), positions_BT[:, one], window, sink_H
                    )
                )
            return torch.cat(mixed, dim=2)
        query_BHTE, key_BKTE, value_BKTE = heads
        keys_NBKCE = self.keys[layer_index]
        values_NBKCE = self.values[layer_index]
        # With `pads_products`, texts must have the bits of `cached_attention`, which kernels do not give.
        kernels = None if self.pads_products else self.kernels
        # The kernels return None for heads that they cannot compute. `step` also writes the new keys and
        # values, but `chunk` reads them from the cache.
        if kernels is not None and positions_BT.shape[1] == 1:
            mixed_BHTE = kernels.step(
                heads,
                keys_NBKCE,
                values_NBKCE,
                positions_BT[:, 0],
                self.seen_blocks or len(keys_NBKCE),
                window,
                sink_H,
            )
            if mixed_BHTE is not None:
                return mixed_BHTE
        rows_B1 = torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]
        # The block, the row, all heads, and the slot in the block.
        index = (positions_BT // self.block, rows_B1, slice(None), positions_BT % self.block)
        # The write is to the whole tensor and not to a slice, since a captured write to a slice copies
        # the cache (dev/log.md).
        # What such an index selects is [B, T, K, E].
        keys_NBKCE[index] = key_BKTE.transpose(1, 2).to(keys_NBKCE.dtype)
        values_NBKCE[index] = value_BKTE.transpose(1, 2).to(values_NBKCE.dtype)
        seen_keys_NBKCE = keys_NBKCE[: self.seen_blocks]
        seen_values_NBKCE = values_NBKCE[: self.seen_blocks]
        if kernels is not None and positions_BT.shape[1] > 1:
            mixed_BHTE = kernels.chunk(
                query_BHTE, seen_keys_NBKCE, seen_values_NBKCE, positions_BT, window, sink_H
            )
            if mixed_BHTE is not None:
                return mixed_BHTE
        return cached_attention(
            query_BHTE,
            seen_keys_NBKCE,
            seen_values_NBKCE,
            positions_BT,
            window,
            self.pads_products,
            sink_H,
        )

    def position_tensors(self) -> list[Tensor]:
        """Return all tensors of keys and values; one that several layers share is there once."""
        return [*{id(tensor): tensor for tensor in (*self.keys, *self.values)}.values()]

    def trial(self) -> Self:
        """Return a cache for a pass of which only some tokens may count later.

        It shares keys and values, since later tokens overwrite those of tokens that do not count. Its
        recurrences are copies, and `count_tokens` of this cache lets the tokens that count change the
        recurrences themselves.
        """
        trial = self._with_recurrences(
            {layer: recurrence.copied() for layer, recurrence in self.recurrences.items()}
        )
        trial._kept_calls = []
        return trial

    def count_tokens(self, trial: Self, limit_B: Tensor) -> None:
        """Let the tokens of a trial pass change the recurrences, those at positions below `limit_B`, [B]."""
        limited = self._with_recurrences(
            {layer: recurrence.limited(limit_B) for layer, recurrence in self.recurrences.items()}
        )
        for call in trial._kept_calls or []:
            call(limited)

    def _with_recurrences(self, recurrences: Mapping[int, Recurrence]) -> Self:
        """Return a cache with the same keys and values, and other recurrences."""
        changed = self.with_first_blocks(self.seen_blocks or len(self.keys[0]))
        changed.recurrences = recurrences
        return changed

    def keep_call(self, call: Callable[[Cache], object]) -> None:
        """Keep a call of a trial pass; see `monograph.model.mixer.Cache`."""
        if self._kept_calls is not None:
            self._kept_calls.append(call)

    def recurrence(self, layer_index: int) -> Recurrence:
        """Return the recurrence of a layer without attention."""
        return self.recurrences[layer_index]

    def reset_recurrences(self, limits: Sequence[int]) -> None:
        """Reset all recurrences; those of row i take in at most limits[i] tokens."""
        for tensor in self.recurrence_tensors():
            tensor.zero_()
        self.limit_recurrences(limits)

    def limit_recurrences(self, limits: Sequence[int]) -> None:
        """Let the recurrences of row i take in at most limits[i] tokens, counted from the text's start."""
        for recurrence in self.recurrences.values():
            recurrence.limit_B[: len(limits)] = tensor_on(limits, recurrence.limit_B.device)

    def recurrence_tensors(self) -> list[Tensor]:
        """Return the tensors of all recurrences without `limit_B`, [rows, ...] each."""
        tensors: list[Tensor] = []
        for recurrence in self.recurrences.values():
            tensors += recurrence.tensors()
        return tensors

    def copy_rows(
        self, rows: Sequence[int], source: Self, source_rows: Sequence[int], slots: int
    ) -> None:
        """Copy rows of another cache: keys and values of the first slots, and recurrences.

        Args:
            rows: the rows to write to.
            source: the other cache, whose blocks have the same length.
            source_rows: the rows to read.
            slots: how many first slots are copied, rounded up to whole blocks.
        """
        self.copy_keys(rows, source, source_rows, slots)
        to_rows = tensor_on(rows, self.keys[0].device)
        from_rows = tensor_on(source_rows, self.keys[0].device)
        for target, origin in zip(
            self.recurrence_tensors(), source.recurrence_tensors(), strict=True
        ):
            target.index_copy_(0, to_rows, origin.index_select(0, from_rows))

    def copy_keys(
        self, rows: Sequence[int], source: Self, source_rows: Sequence[int], slots: int
    ) -> None:
        """Copy keys and values as `copy_rows` does, without recurrences."""
        blocks = math.ceil(slots / self.block)
        device = self.keys[0].device
        to_rows = tensor_on(rows, device)
        from_rows = tensor_on(source_rows, device)
        tensors = zip(self.position_tensors(), source.position_tensors(), strict=True)
        for target, origin in tensors:
            target[:blocks].index_copy_(1, to_rows, origin[:blocks].index_select(1, from_rows))

    def clear(self, row: int | slice) -> None:
        """Set one or several rows to zero. This is needed after numbers that are not finite."""
        # Attention multiplies the values of slots that it does not see by 0, and 0 times NaN is NaN.
        for tensor in self.position_tensors():
            tensor[:, row] = 0
        for tensor in self.recurrence_tensors():
            tensor[row] = 0


class CacheSizes(NamedTuple):
    """The sizes of a cache. The bits of attention may depend on these sizes.

    Attributes:
        per_row: the number of positions of each row.
        block: slots of a block; short texts take less time with short blocks.
        prompts_at_once: the number of prompts that are read at the same time.
        pads_products: whether matrix products are padded with rows of zeros, so that a text gets the
            same bits in single steps as in one pass over the whole text; see `cached_attention`. The
            reader of prompts then also reads the last token of a prompt, once for all rows that
            continue the prompt. Otherwise the first step would read it in each of these rows.
        longest_prompt: the maximum number of tokens of a prompt. With a smaller maximum, passes over
            prompts take less time.
    """

    per_row: int
    block: int = BLOCK
    prompts_at_once: int = 1
    pads_products: bool = False
    longest_prompt: int = BLOCK
