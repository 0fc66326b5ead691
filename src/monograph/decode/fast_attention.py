"""Attention to a cache by Triton kernels, on a GPU, for every family whose layers have attention.

A step of decoding has one new position per row. Its attention is one launch, which also writes the
new keys and values (`monograph.ops.decode_kernels.attend`); with five blocks of cache, PyTorch's
operators would need nine launches. A chunk of a prompt has several new positions. Its attention is one
launch after its keys and values have been written (`monograph.ops.cached_attention_kernel`).

Shapes: B rows, H query heads, K key-value heads, T new positions, E head dimension, N blocks of the
cache, C slots of a block, X = (H + 2 K) E.
"""

import torch
from torch import Tensor

from monograph.ops.attention import Heads
from monograph.ops.cached_attention_kernel import SLOTS, attend_cache
from monograph.ops.decode_kernels import ROWS, attend, attend_fits

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The smallest head that `step` computes, in channels. Its kernel multiplies each half of a head by itself,
# and a matrix product needs at least `ROWS` = 16 channels.
_MIN_HEAD_OF_STEP = 2 * ROWS
_MAX_HEAD = 256


class FastAttention:
    """The kernels for the rows of one cache."""

    def __init__(self, rows: int, key_heads: int, device: torch.device) -> None:
        """Allocate a counter for each row and key-value head.

        The programs of a kernel that share a row and a head count up its counter, so that the last one
        knows that it is the last.
        """
        # They are zero before and after each launch. All layers share them, because they run one after
        # another.
        self._counters_BK = torch.zeros(rows, key_heads, dtype=torch.int32, device=device)

    def step(
        self,
        heads: Heads,
        keys_NBKCE: Tensor,
        values_NBKCE: Tensor,
        position_B: Tensor,
        blocks: int,
        window: int | None,
        sink_H: Tensor | None,
    ) -> Tensor | None:
        """Write one new key and value per row, and return the attention of the new queries.

        Args:
            heads: the new queries [B, H, 1, E], keys and values [B, K, 1, E], rotated.
            keys_NBKCE: the whole cache of a layer, written in place.
            values_NBKCE: likewise.
            position_B: the new positions, int64.
            blocks: how many blocks attention reads, from the first on.
            window: see `cached_attention`.
            sink_H: see `cached_attention`.

        Returns:
            [B, H, 1, E]; None: the kernel cannot compute these heads, and has written nothing.
        """
        query_BH1E, key_BK1E, _ = heads
        head_dim = query_BH1E.shape[-1]
        if head_dim < _MIN_HEAD_OF_STEP or not _can_attend(query_BH1E, keys_NBKCE):
            return None
        slots = keys_NBKCE.shape[3]
        if not attend_fits(keys_NBKCE.device, slots, head_dim, keys_NBKCE.dtype):
            return None
        if key_BK1E.dtype != keys_NBKCE.dtype or self._counters_BK.shape[1] != key_BK1E.shape[1]:
            return None
        projections_BX = torch.cat(heads, dim=1).flatten(1)
        output: Tensor = attend(
            projections_BX,
            keys_NBKCE,
            values_NBKCE,
            position_B,
            self._counters_BK,
            blocks,
            query_BH1E.shape[1],
            head_dim**-0.5,
            sink_H=sink_H,
            window=window,
        )
        return output.view(query_BH1E.shape)

    def chunk(
        self,
        query_BHTE: Tensor,
        keys_NBKCE: Tensor,
        values_NBKCE: Tensor,
        positions_BT: Tensor,
        window: int | None,
        sink_H: Tensor | None,
    ) -> Tensor | None:
        """Return the attention of several queries per row, whose keys and values are in the cache.

        Args:
            query_BHTE: the queries.
            keys_NBKCE: the blocks of a layer's cache that are read.
            values_NBKCE: likewise.
            positions_BT: the queries' positions, int64.
            window: see `cached_attention`.
            sink_H: see `cached_attention`.

        Returns:
            [B, H, T, E]; None: the kernel cannot compute these heads.
        """
        if not _can_attend(query_BHTE, keys_NBKCE):
            return None
        output_BTHE: Tensor = attend_cache(
            query_BHTE, keys_NBKCE, values_NBKCE, positions_BT, window, sink_H
        )
        return output_BTHE.transpose(1, 2)


def _can_attend(query_BHTE: Tensor, keys_NBKCE: Tensor) -> bool:
    """Return whether the kernels support the device, the dtype and the sizes."""
    head_dim = query_BHTE.shape[-1]
    slots = keys_NBKCE.shape[3]
    # Under autocast, queries may have another dtype than the cache.
    supports_dtype = query_BHTE.dtype in _DTYPES and query_BHTE.dtype == keys_NBKCE.dtype
    supports_device = torch.cuda.get_device_capability(query_BHTE.device) >= (8, 0)
    supports_head = ROWS <= head_dim <= _MAX_HEAD and _is_power_of_two(head_dim)
    supports_block = slots >= SLOTS and _is_power_of_two(slots)
    return supports_dtype and supports_device and supports_head and supports_block


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
