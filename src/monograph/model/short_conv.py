"""Compute the gated short convolution of LFM2.

A layer multiplies its inputs by a gate, mixes each channel of the product over a few positions, and
multiplies the result by another gate. So a position reads only the K positions up to its own, and what
a layer keeps of a row's earlier tokens are K vectors, however long the text is.

Shape suffixes: B batch, T positions, D hidden size, K taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.lora_merge import UnreadTensor
from monograph.model.config import LlamaConfig
from monograph.model.layers import Linear
from monograph.model.mixer import (
    USE_HF,
    LayerCache,
    Mixer,
    VisiblePositions,
    require_both_kinds,
)
from monograph.model.recurrent import (
    CausalConv,
    InputState,
    empty_inputs,
    initial_vector,
    without_middle_axis,
)
from monograph.model.rope import CosSin
from monograph.ops.attention import Impl, Mask

if TYPE_CHECKING:
    from gguf import GGUFWriter

# llama.cpp's names of the tensors of a layer, by their names in the layer.
_LLAMA_CPP_NAMES = {
    "in_proj.weight": "shortconv.in_proj.weight",
    "conv.weight": "shortconv.conv.weight",
    "out_proj.weight": "shortconv.out_proj.weight",
}
# What a block keeps per token for the backward pass, in multiples of the hidden size, without its
# feed-forward layer, by traces of 4 shapes. An eager block that sees K positions keeps K more.
_KEPT_CAPTURED = 8
_KEPT_EAGER_FP32 = 11
_KEPT_EAGER = 17  # below fp32, with the fp32 copies of norms


class ShortConv(Mixer):
    """A layer out_proj(c * conv(b * x)), where b, c and x are projections of the hidden states.

    Source: Liquid AI, "LFM2 Technical Report", arXiv 2511.23404.
    """

    name = "conv"
    reads_segments = True
    gguf_adapters = True
    siblings = ()
    llama_cpp_fp32 = (_LLAMA_CPP_NAMES["conv.weight"],)

    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        super().__init__(config, impl)
        width = config.hidden_size
        # Modules are added in the order of the computation, so that parameters have this order, too.
        self.in_proj = Linear(width, 3 * width, bias=config.conv_bias)
        self.conv = CausalConv(width, config.conv_L_cache, bias=config.conv_bias, activation=None)
        self.out_proj = Linear(width, width, bias=config.conv_bias)

    def forward(
        self,
        hidden_BTD: Tensor,
        cos_sin_B1TF: CosSin | None,
        mask: Mask,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return out_proj(c * conv(b * x)); in_proj gives b, c and x, in this order.

        Args:
            hidden_BTD: the hidden states.
            cos_sin_B1TF: not used, because this layer does not rotate.
            mask: the document number of each position, [B, T]; None: each row is one document.
            cache: the block's view of a cache; None: the pass has no cache.
        """
        input_gate_BTD, output_gate_BTD, x_BTD = self.in_proj(hidden_BTD).chunk(3, dim=-1)
        gated_BTD = input_gate_BTD * x_BTD
        if cache is None:
            segments_BT = cast(Tensor | None, mask)
            mixed_BTD = self.conv(gated_BTD, segments_BT)
        else:
            mixed_BTD = self._cached(gated_BTD, cache)
        return self.out_proj(output_gate_BTD * mixed_BTD)

    def _cached(self, gated_BTD: Tensor, cache: LayerCache) -> Tensor:
        """Add the pass's tokens to the cached inputs, and return the convolution's outputs.

        `InputState.with_inputs` says which tokens change the state.
        """
        cache.cache.keep_call(lambda other: self._cached(gated_BTD, cache._replace(cache=other)))
        state = cast(InputState, cache.cache.recurrence(cache.layer_index))
        new = state.with_inputs(gated_BTD, cache.positions_BT)
        mixed_BTD = self.conv.convolve_inputs(new.convolved_BSC)
        state.store(new)
        return mixed_BTD

    @classmethod
    def initial_values(
        cls, name: str, shape: torch.Size, generator: torch.Generator
    ) -> Tensor | None:
        """Return the initial values of the convolution."""
        if len(shape) < 3:
            return None
        return initial_vector(name, shape, generator)

    @classmethod
    def recurrence(
        cls, config: LlamaConfig, rows: int, dtype: torch.dtype, device: torch.device
    ) -> InputState:
        """Return a state that includes no token and has no limit."""
        return empty_inputs((rows, config.conv_L_cache, config.hidden_size), dtype, device)

    @classmethod
    def training_flops(
        cls, config: LlamaConfig, layer: int, visible_positions: VisiblePositions
    ) -> float:
        """Return 6 · K · D FLOPs per token: each channel is a sum of K products."""
        return 6 * config.conv_L_cache * config.hidden_size

    @classmethod
    def decode_flops(cls, config: LlamaConfig, context: float) -> float:
        """Return 2 · K · D FLOPs, those of a token's convolution."""
        return 2 * config.conv_L_cache * config.hidden_size

    @classmethod
    def kept_numbers(cls, config: LlamaConfig, *, captured: bool, in_fp32: bool) -> float:
        """Return the numbers that a block keeps per token, without its feed-forward layer."""
        if captured:
            return _KEPT_CAPTURED * config.hidden_size
        kept = _KEPT_EAGER_FP32 if in_fp32 else _KEPT_EAGER
        return (kept + config.conv_L_cache) * config.hidden_size

    @classmethod
    def require_llama_cpp(cls, config: LlamaConfig) -> None:
        """Refuse layers that llama.cpp does not load."""
        require_both_kinds(config)
        if config.conv_bias:
            raise InputRefused(f"conv_bias = true is not computed by llama.cpp{USE_HF}")
        if config.conv_L_cache < 2:
            raise InputRefused(f"conv_L_cache = 1: llama.cpp loads 2 and more{USE_HF}")

    @classmethod
    def add_llama_cpp_sizes(
        cls, writer: GGUFWriter, config: LlamaConfig, architecture: str
    ) -> None:
        """Add the number of positions that the convolution sees."""
        writer.add_uint32(f"{architecture}.shortconv.l_cache", config.conv_L_cache)

    @classmethod
    def llama_cpp_tensor(
        cls, name: str, like: Tensor, read: Callable[[], Tensor], config: LlamaConfig
    ) -> UnreadTensor:
        """Return a tensor of the layer with llama.cpp's name and shape."""
        return UnreadTensor(
            _LLAMA_CPP_NAMES[name],
            without_middle_axis(like),
            lambda: without_middle_axis(read()),
        )
