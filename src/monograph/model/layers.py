"""The layers in a block of the decoder: norms, attention and gated feed-forward layers.

Shape suffixes: B batch, T positions, D hidden size, H query heads, K key-value heads, E head
dimension, F rotated pairs of a head, X any number of channels; 1 an axis of length 1.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.graph.balance import Balance
from monograph.model.config import LlamaConfig
from monograph.model.families import Family
from monograph.model.feed_forward import FeedForward
from monograph.model.mixer import KeysAndValues, LayerCache, Mixer, VisiblePositions
from monograph.model.rope import CosSin, rotate, rotate_heads
from monograph.ops.attention import AttentionKernel, Heads, Impl, Mask, attention
from monograph.ops.rms_norm import rms_norm


class Linear(nn.Linear):
    """A linear layer whose weights `Llama` initialises."""

    def reset_parameters(self) -> None:
        """Do nothing, because nn.Linear's own method would advance the global random state."""


class RMSNorm(nn.Module):
    """A layer that applies `rms_norm` with a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise over the last axis."""
        return rms_norm(hidden, self.weight, self.eps)


class UnweightedRMSNorm(nn.Module):
    """A layer that divides by the root mean square, y = x / sqrt(mean(x^2) + eps)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise over the last axis."""
        return rms_norm(hidden, None, self.eps)


class Scale(nn.Module):
    """A layer that multiplies by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden: Tensor) -> Tensor:
        """Return factor * hidden."""
        return hidden * self.factor


def make_scale(factor: float) -> nn.Module:
    """Return a layer that multiplies by `factor`; the identity if the factor is 1."""
    return nn.Identity() if factor == 1 else Scale(factor)


class CentredRMSNorm(RMSNorm):
    """A layer that applies `rms_norm` with 1 + its weight, so that weights are centred at 0."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise over the last axis."""
        return rms_norm(hidden, 1 + self.weight, self.eps)


def make_norm(config: LlamaConfig, size: int) -> RMSNorm:
    """Return a norm over `size` channels, of the class that the model's family has."""
    norm_class = CentredRMSNorm if config.family.centred_norms else RMSNorm
    return norm_class(size, config.rms_norm_eps)


class Attention(Mixer):
    """Grouped-query self-attention with rotary positions.

    Some families also have biases, norms of queries, keys or values, gates, or sinks. With gates, the
    query projection gives for each head its query and then its gate, which have the same width.

    Where `values_are_keys`, there is no v_proj: values are what k_proj gives, before the norm and the
    rotation of keys. Where `takes_keys`, there are neither k_proj nor v_proj: the layer attends to the keys
    and values of an earlier layer.
    """

    name = "self_attn"
    gguf_adapters = True
    siblings: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        """Add the parameters of a layer, given the configuration of the layer
        (`LlamaConfig.of_layer`).
        """
        super().__init__(config, impl)
        query_width = config.num_attention_heads * config.head_dim
        key_value_width = config.num_key_value_heads * config.head_dim
        qkv_bias = config.attention_bias or config.family.qkv_bias
        self.is_gated = config.family.gated_attention
        query_and_gate_width = 2 * query_width if self.is_gated else query_width
        self.q_proj = Linear(config.hidden_size, query_and_gate_width, bias=qkv_bias)
        self.takes_keys = config.num_kv_shared_layers > 0
        # Whether a later layer takes the keys and values of this one; its block sets it.
        self.gives_keys = False
        self.values_are_keys = config.attention_k_eq_v
        if self.takes_keys:
            self.siblings = ("q_proj",)
        else:
            self.k_proj = Linear(config.hidden_size, key_value_width, bias=qkv_bias)
            if self.values_are_keys:
                self.siblings = ("q_proj", "k_proj")
            else:
                self.v_proj = Linear(config.hidden_size, key_value_width, bias=qkv_bias)
        output_bias = config.attention_bias and config.family.output_bias
        self.o_proj = Linear(query_width, config.hidden_size, bias=output_bias)
        # True: queries and keys are normalised over all heads together. False: over each head, or not at
        # all.
        self.norms_over_all_heads = config.family.qk_norm == "all"
        self.q_norm: nn.Module
        self.k_norm: nn.Module
        if self.norms_over_all_heads:
            self.q_norm = make_norm(config, query_width)
            self.k_norm = make_norm(config, key_value_width)
        elif config.family.qk_norm == "heads":
            self.q_norm = make_norm(config, config.head_dim)
            self.k_norm = (
                make_norm(config, config.head_dim) if not self.takes_keys else nn.Identity()
            )
        else:
            self.q_norm = nn.Identity()
            self.k_norm = nn.Identity()
        self.v_norm: nn.Module = nn.Identity()
        if config.family.value_norm:
            self.v_norm = UnweightedRMSNorm(config.rms_norm_eps)
        self.sinks = (
            nn.Parameter(torch.empty(config.num_attention_heads))
            if config.family.attention_sinks
            else None
        )
        self.interleaved_rotary = config.family.interleaved_rotary
        self.clip = config.clip_qkv
        self.scale_query = make_scale(config.query_scale)
        self.head_dim = config.head_dim
        self.kernel: AttentionKernel = "torch"
        # The type of the device for which `rotate` chooses operators; "": the device of the input.
        self.device_type = ""

    # Only this mixer can give keys and values to another layer.
    def forward(  # type: ignore[override]
        self,
        hidden_BTD: Tensor,
        cos_sin_B1TF: CosSin | None,
        mask: Mask,
        cache: LayerCache | None = None,
        taken: KeysAndValues | None = None,
    ) -> Tensor | tuple[Tensor, KeysAndValues]:
        """Return o_proj(attention(rotate(q_norm(q_proj x)), rotate(k_norm(k_proj x)), v_proj x)).

        With gates, attention's result is multiplied by sigmoid(gate) before o_proj. In some families the
        values are normalised, too.

        Args:
            hidden_BTD: x.
            cos_sin_B1TF: cosine and sine of the positions; None: queries and keys are not rotated.
            mask: the result of `monograph.model.llama.attention_mask`. It is not read if there is a
                cache.
            cache: the block's view of a cache; None: the pass has no cache.
            taken: the keys and values of the layer from which this one takes them; None: it has its own.

        Returns:
            The result, [B, T, D]; with `gives_keys` also the keys and values of the pass's tokens.
        """
        query_BTX = self.q_proj(hidden_BTD)
        if self.is_gated:
            # q_proj's channels are head by head, each head's query before its gate.
            query_and_gate_BTH2E = query_BTX.unflatten(-1, (-1, 2, self.head_dim))
            query_BTHE, gate_BTHE = query_and_gate_BTH2E.unbind(-2)
            query_BTX = query_BTHE.flatten(2)
            gate_BTX = gate_BTHE.flatten(2)
        if taken is None:
            key_BTX = self.k_proj(hidden_BTD)
            value_BTX = key_BTX if self.values_are_keys else self.v_proj(hidden_BTD)
            heads = self._heads(query_BTX, key_BTX, value_BTX, cos_sin_B1TF)
        else:
            heads = self._query_heads(query_BTX, cos_sin_B1TF), *taken
        if cache is None:
            mixed_BHTE = attention(*heads, mask, self.impl, self.kernel, self.sinks)
        else:
            mixed_BHTE = cache.cache.attend(
                cache.layer_index, heads, cache.positions_BT, cache.window, self.sinks
            )
        mixed_BTX = mixed_BHTE.transpose(1, 2).flatten(2)
        if self.is_gated:
            mixed_BTX = mixed_BTX * gate_BTX.sigmoid()
        result_BTD = self.o_proj(mixed_BTX)
        if self.gives_keys:
            return result_BTD, KeysAndValues(*heads[1:])
        return result_BTD

    def _heads(
        self, query_BTX: Tensor, key_BTX: Tensor, value_BTX: Tensor, cos_sin_B1TF: CosSin | None
    ) -> Heads:
        """Return queries, keys and values as attention takes them: normalised, rotated and scaled.

        The arguments are what the projections give; see `forward`.
        """
        if self.norms_over_all_heads:
            query_BTX = self.q_norm(query_BTX)
            key_BTX = self.k_norm(key_BTX)
        if self.clip is not None:
            query_BTX, key_BTX, value_BTX = (
                each_BTX.clamp(-self.clip, self.clip)
                for each_BTX in (query_BTX, key_BTX, value_BTX)
            )
        # If there is neither a norm nor a clamp between projection and rotation, and pairs are in the two
        # halves of a head, `rotate_heads` may rotate by kernels of its own. Otherwise the rotation is
        # written in torch's operators, which a compiler fuses with what is computed before it.
        rotates_projections = (
            isinstance(self.q_norm, nn.Identity)
            and self.clip is None
            and not self.interleaved_rotary
        )
        if cos_sin_B1TF is not None and rotates_projections:
            query_BHTE, key_BKTE, value_BKTE = rotate_heads(
                query_BTX, key_BTX, value_BTX, self.head_dim, cos_sin_B1TF, self.device_type
            )
        else:
            query_BHTE, key_BKTE, value_BKTE = (
                each_BTX.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                for each_BTX in (query_BTX, key_BTX, value_BTX)
            )
            if not self.norms_over_all_heads:
                query_BHTE = self.q_norm(query_BHTE)
                key_BKTE = self.k_norm(key_BKTE)
                value_BKTE = self.v_norm(value_BKTE)
            if cos_sin_B1TF is not None:
                query_BHTE, key_BKTE = (
                    rotate(
                        each, cos_sin_B1TF, self.device_type, interleaved=self.interleaved_rotary
                    )
                    for each in (query_BHTE, key_BKTE)
                )
        return self.scale_query(query_BHTE), key_BKTE, value_BKTE

    def _query_heads(self, query_BTX: Tensor, cos_sin_B1TF: CosSin | None) -> Tensor:
        """Return the queries of a layer that takes its keys, as `_heads` does."""
        query_BHTE = self.q_norm(query_BTX.unflatten(-1, (-1, self.head_dim)).transpose(1, 2))
        if cos_sin_B1TF is not None:
            query_BHTE = rotate(
                query_BHTE, cos_sin_B1TF, self.device_type, interleaved=self.interleaved_rotary
            )
        return self.scale_query(query_BHTE)

    def use_attention(self, impl: Impl, kernel: AttentionKernel, device_type: str) -> None:
        """Set the implementation, the kernel and the device; see `Llama.use_attention`."""
        self.impl = impl
        self.kernel = kernel
        self.device_type = device_type

    @classmethod
    def key_value_heads(cls, config: LlamaConfig) -> int:
        """Return the number of heads of keys and values."""
        return config.num_key_value_heads

    @classmethod
    def training_flops(
        cls, config: LlamaConfig, layer: int, visible_positions: VisiblePositions
    ) -> float:
        """Return 12 · d_attn · P FLOPs per token that attends to P positions on average.

        d_attn is the width of all heads together.
        """
        positions = visible_positions(config.window(layer))
        return 12 * config.num_attention_heads * config.of_layer(layer).head_dim * positions

    @classmethod
    def decode_flops(cls, config: LlamaConfig, context: float) -> float:
        """Return 4 · d_attn · context FLOPs, where d_attn is the width of all heads together."""
        return 4 * config.num_attention_heads * config.head_dim * context


ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}
# The constants of gpt-oss' gating (`_clamped_gating`).
_STEEPNESS = 1.702  # factor in the sigmoid
_LIMIT = 7.0  # largest gate, and largest absolute value of up


def gating(family: Family) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function with which a family's gated layers combine their projections gate and up.

    It is act(gate) * up, except in gpt-oss (`_clamped_gating`).
    """
    if family.clamped_gating:
        return _clamped_gating
    _, activation = family.activation
    return functools.partial(_activation_gating, ACTIVATIONS[activation])


def _activation_gating(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """Return act(gate) * up."""
    return act(gate) * up


def _clamped_gating(gate: Tensor, up: Tensor) -> Tensor:
    """Return g sigmoid(1.702 g) (u + 1) with g = min(gate, 7) and u = max(-7, min(up, 7))."""
    gate = gate.clamp(max=_LIMIT)
    up = up.clamp(-_LIMIT, _LIMIT)
    return (up + 1) * (gate * (gate * _STEEPNESS).sigmoid())


class MLP(FeedForward):
    """A gated layer, down(act(gate x) * up x).

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.

    Args:
        config: the shape of the model.
        width_key: the key of `config` that is the layer's inner width.
    """

    siblings = ("gate_proj", "up_proj")
    gguf_adapters = True
    llama_cpp_names = MappingProxyType(
        {
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            "mlp.gate_up_proj": "ffn_up",
        }
    )

    def __init__(self, config: LlamaConfig, width_key: str = "intermediate_size") -> None:
        super().__init__()
        width = getattr(config, width_key)
        self.gate_proj = Linear(config.hidden_size, width, bias=False)
        self.up_proj = Linear(config.hidden_size, width, bias=False)
        self.down_proj = Linear(width, config.hidden_size, bias=False)
        self.combine = gating(config.family)

    def forward(self, hidden_BTD: Tensor, balance: Balance | None = None) -> Tensor:
        """Map [B, T, D] to [B, T, D]. `balance` is not read, because the layer has no experts."""
        return self.down_proj(self.combine(self.gate_proj(hidden_BTD), self.up_proj(hidden_BTD)))

    @classmethod
    def inner_numbers(cls, config: LlamaConfig) -> int:
        """Return the inner width."""
        return config.intermediate_size

    @classmethod
    def llama_cpp_row_lengths(cls, config: LlamaConfig) -> Mapping[str, int]:
        """Return the inner width."""
        return {"intermediate_size": config.intermediate_size}
