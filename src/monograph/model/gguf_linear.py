"""Give the layers of a gated delta net the names, sizes and order that llama.cpp reads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.lora import Plain
from monograph.model.config import LlamaConfig

ARCHITECTURES = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}
POST_NORM = "post_attention_norm"  # there the name of the norm before the feed-forward layer
_NAMES = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_qkvz.weight": "ssm_in.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
_WITH_KEYS = ("in_proj_qkv.weight", "conv1d.weight")


def check(config: LlamaConfig, instead: str) -> None:
    """Refuse what llama.cpp reads wrongly."""
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    if key != value:
        raise InputRefused(
            f"linear_key_head_dim = {key} and linear_value_head_dim = {value} are one size in llama.cpp{instead}"
        )


def add_sizes(writer: Any, config: LlamaConfig) -> None:
    """Write the sizes of the delta nets, and which layers they are."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    linear = [config.is_linear(layer) for layer in range(config.num_hidden_layers)]
    writer.add_array(f"{ARCHITECTURES[config.model_type]}.attention.recurrent_layers", linear)
    if config.family.by_key_head:
        return
    # A text has one position where a picture has three, so it matters only that the parts have the right sum.
    pairs = config.rotary_dim // 2
    writer.add_rope_dimension_sections([pairs - pairs // 3 * 2, pairs // 3, pairs // 3, 0])


def converted(name: str, like: Tensor, read: Callable[[], Tensor], config: LlamaConfig) -> Plain:
    """Return a tensor of a delta net, by its name in the layer, with llama.cpp's name and order.

    There the first value heads of all key heads come first, then the second ones, unless projections are ordered by key
    heads. The decay is stored as -exp(A_log).
    """
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim if name in _WITH_KEYS else 0

    def change(tensor: Tensor) -> Tensor:
        tensor = -tensor.exp() if name == "A_log" else tensor
        if name == "norm.weight" or config.family.by_key_head:
            return tensor
        axis = int(name == "out_proj.weight")
        of_keys, of_values = tensor.tensor_split([before], dim=axis)
        width = of_values.shape[axis] // config.linear_num_value_heads  # of a head
        heads = of_values.unflatten(axis, (config.linear_num_key_heads, -1, width))
        return torch.cat([of_keys, heads.transpose(axis, axis + 1).flatten(axis, axis + 2)], dim=axis)

    # The convolution's middle axis has one entry.
    return Plain(_NAMES[name], _flat(like), lambda: _flat(change(read())))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.squeeze(1) if tensor.ndim == 3 else tensor
