"""The key-value cache: fixed slots, slot s holds position s.

Shapes: L layers, B rows, K key-value heads, T new positions, S slots, E head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monograph.model.config import LlamaConfig


class KVCache:
    """Keys and values of `slots` positions for `rows` sequences that advance together.

    Slots that were not written yet hold zeros; the model's mask (slot <= position) hides them.
    """

    def __init__(self, config: LlamaConfig, rows: int, slots: int, dtype: torch.dtype, device: torch.device):
        """Allocate [L, B, K, S, E] twice, zero."""
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, slots, config.head_dim)
        self.keys_LBKSE = torch.zeros(shape, dtype=dtype, device=device)
        self.values_LBKSE = torch.zeros_like(self.keys_LBKSE)

    def update(
        self, layer_index: int, key_BKTE: Tensor, value_BKTE: Tensor, positions_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values at their positions (the same in every row); return all slots of the layer."""
        keys_BKSE, values_BKSE = self.keys_LBKSE[layer_index], self.values_LBKSE[layer_index]
        keys_BKSE.index_copy_(2, positions_BT[0], key_BKTE.to(keys_BKSE.dtype))
        values_BKSE.index_copy_(2, positions_BT[0], value_BKTE.to(values_BKSE.dtype))
        return keys_BKSE, values_BKSE
