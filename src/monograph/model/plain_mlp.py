"""A feed-forward layer without a gate, in the place of attention.

The blocks of some families have only one layer each: either one that mixes positions, or this one.

Shape suffixes: B batch, T positions, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from monograph.graph.lora_merge import UnreadTensor
from monograph.model.config import LlamaConfig
from monograph.model.layers import Linear
from monograph.model.mixer import LayerCache, Mixer, VisiblePositions
from monograph.model.rope import CosSin
from monograph.ops.attention import Impl, Mask

# llama.cpp's names of the tensors of a layer, by their names in the layer.
_LLAMA_CPP_NAMES = {"up_proj.weight": "ffn_up.weight", "down_proj.weight": "ffn_down.weight"}


class PlainMLP(Mixer):
    """A feed-forward layer, down(relu(up x)^2), as the only layer of a block.

    It computes each position alone. It has the interface of a mixer because it is in a mixer's place.

    Source: So et al., "Primer: Searching for Efficient Transformers", arXiv 2109.08668.
    """

    name = "plain_mlp"
    # It reads no mask, so none is made for it.
    reads_segments = True
    siblings = ()

    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        super().__init__(config, impl)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_BTD: Tensor,
        cos_sin_B1TF: CosSin | None,
        mask: Mask,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return down(relu(up x)^2). Only the input is read."""
        return self.down_proj(F.relu(self.up_proj(hidden_BTD)).square())

    @classmethod
    def training_flops(
        cls, config: LlamaConfig, layer: int, visible_positions: VisiblePositions
    ) -> float:
        """Return 0, because the layer computes little apart from its matrices."""
        return 0.0

    @classmethod
    def kept_numbers(cls, config: LlamaConfig, *, captured: bool, in_fp32: bool) -> float:
        """Return the numbers that a block keeps per token: the input, its norm, and the inner channels
        before and after the activation. Without a compiled graph, relu's result is kept, too, and below
        fp32 the norm's fp32 copies.
        """
        if captured:
            return 2 * config.hidden_size + 2 * config.intermediate_size
        copies = 3 if in_fp32 else 5
        return copies * config.hidden_size + 3 * config.intermediate_size

    @classmethod
    def inner_width(cls, config: LlamaConfig) -> int:
        """Return the inner width."""
        return config.intermediate_size

    @classmethod
    def llama_cpp_row_lengths(cls, config: LlamaConfig) -> Mapping[str, int]:
        """Return the inner width."""
        return {"intermediate_size": config.intermediate_size}

    @classmethod
    def llama_cpp_tensor(
        cls, name: str, like: Tensor, read: Callable[[], Tensor], config: LlamaConfig
    ) -> UnreadTensor:
        """Return a tensor of the layer with llama.cpp's name."""
        return UnreadTensor(_LLAMA_CPP_NAMES[name], like, read)
