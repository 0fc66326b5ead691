"""A mixer, as somebody would add it: what a file of `monograph.model` would have, such as
`delta_net.py`. Tests add its row of `monograph.model.layer_types`.

Shape suffixes: B batch, T positions, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from monograph.model.config import LlamaConfig
from monograph.model.layers import Linear
from monograph.model.mixer import LayerCache, Mixer, VisiblePositions
from monograph.model.rope import CosSin
from monograph.ops.attention import Impl, Mask


class MeanState(NamedTuple):
    """The sum of the values of each row's tokens, their number, and the largest number."""

    sum_BD: Tensor
    count_B: Tensor
    limit_B: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.sum_BD, self.count_B]


class Mean(Mixer):
    """out_proj(the mean of in_proj(x) over the positions of the document so far)."""

    name = "mean"
    reads_segments = True
    siblings = ()

    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        super().__init__(config, impl)
        self.in_proj = Linear(config.hidden_size, config.hidden_size, bias=False)
        self.out_proj = Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_BTD: Tensor,
        cos_sin_B1TF: CosSin | None,
        mask: Mask,
        cache: LayerCache | None = None,
    ) -> Tensor:
        values_BTD = self.in_proj(hidden_BTD)
        if cache is not None:
            return self.out_proj(self._cached(values_BTD, cache))
        segments_BT = cast(Tensor | None, mask)
        if segments_BT is None:
            segments_BT = values_BTD.new_zeros(values_BTD.shape[:2])
        seen_BTT = (segments_BT[:, :, None] == segments_BT[:, None, :]).tril()
        shares_BTT = seen_BTT / seen_BTT.sum(-1, keepdim=True)
        return self.out_proj(shares_BTT.to(values_BTD.dtype) @ values_BTD)

    def _cached(self, values_BTD: Tensor, cache: LayerCache) -> Tensor:
        state = cast(MeanState, cache.cache.recurrence(cache.layer_index))
        is_new_BT = (cache.positions_BT >= state.count_B[:, None]) & (
            cache.positions_BT < state.limit_B[:, None]
        )
        counts_BT = state.count_B[:, None] + is_new_BT.cumsum(1)
        new_BTD = torch.where(is_new_BT[..., None], values_BTD, 0.0)
        sums_BTD = state.sum_BD[:, None] + new_BTD.cumsum(1)
        state.sum_BD.copy_(sums_BTD[:, -1])
        state.count_B.copy_(counts_BT[:, -1])
        return sums_BTD / counts_BT.clamp(min=1)[..., None]

    @classmethod
    def recurrence(
        cls, config: LlamaConfig, rows: int, dtype: torch.dtype, device: torch.device
    ) -> MeanState:
        return MeanState(
            torch.zeros(rows, config.hidden_size, dtype=dtype, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.full((rows,), torch.iinfo(torch.int64).max, device=device),
        )

    @classmethod
    def training_flops(
        cls, config: LlamaConfig, layer: int, visible_positions: VisiblePositions
    ) -> float:
        return 3 * config.hidden_size
