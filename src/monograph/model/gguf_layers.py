"""Give mixtures of experts and gated delta nets the names, sizes and order that llama.cpp reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.lora import Plain
from monograph.model.config import LlamaConfig
from monograph.model.layer_kinds import LENGTH_EPS
from monograph.model.scaling import FULL, LINEAR

if TYPE_CHECKING:
    from gguf import GGUFWriter

_DELTA_NET_NAMES = {
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


def check_delta_nets(config: LlamaConfig, instead: str) -> None:
    """Refuse what llama.cpp reads wrongly, or does not load."""
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    if key != value:
        raise InputRefused(
            f"linear_key_head_dim = {key} and linear_value_head_dim = {value} are one size in llama.cpp{instead}"
        )
    if config.rms_norm_eps != LENGTH_EPS:
        raise InputRefused(
            f"rms_norm_eps = {config.rms_norm_eps:g}: llama.cpp adds it to the lengths of a delta net's keys, too, "
            f"where the model adds {LENGTH_EPS:g}{instead}"
        )
    layers = range(config.num_hidden_layers)
    if len({config.is_linear(layer) for layer in layers}) < 2:
        kind = LINEAR if config.is_linear(0) else FULL
        raise InputRefused(
            f"layer_types: llama.cpp loads a {config.model_type} only with layers of both kinds, not with "
            f"{kind!r} alone{instead}"
        )


def add_delta_net_sizes(writer: GGUFWriter, config: LlamaConfig, architecture: str) -> None:
    """Write the sizes of the delta nets, and which layers they are."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    linear = [config.is_linear(layer) for layer in range(config.num_hidden_layers)]
    writer.add_array(f"{architecture}.attention.recurrent_layers", linear)
    if config.family.by_key_head:
        return
    # Pair i belongs to section i % 3, while i is below three times the section's size; a pair of
    # none is not rotated. The three sections are the coordinates of a picture, which are one
    # position in a text.
    pairs = config.rotary_dim // 2
    writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])


def converted(name: str, like: Tensor, read: Callable[[], Tensor], config: LlamaConfig) -> Plain:
    """Return a tensor of a delta net, by its name in the layer, with llama.cpp's name and order.

    There the first value heads of all key heads come first, then the second ones, unless
    projections are ordered by key heads. The decay is stored as -exp(A_log).
    """
    before = (
        2 * config.linear_num_key_heads * config.linear_key_head_dim if name in _WITH_KEYS else 0
    )

    def change(tensor: Tensor) -> Tensor:
        tensor = -tensor.exp() if name == "A_log" else tensor
        if name == "norm.weight" or config.family.by_key_head:
            return tensor
        axis = int(name == "out_proj.weight")
        of_keys, of_values = tensor.tensor_split([before], dim=axis)
        width = of_values.shape[axis] // config.linear_num_value_heads  # of a head
        heads = of_values.unflatten(axis, (config.linear_num_key_heads, -1, width))
        return torch.cat(
            [of_keys, heads.transpose(axis, axis + 1).flatten(axis, axis + 2)], dim=axis
        )

    # The convolution's middle axis has one entry.
    return Plain(_DELTA_NET_NAMES[name], _flat(like), lambda: _flat(change(read())))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.squeeze(1) if tensor.ndim == 3 else tensor


ROUTER, SHARED_GATE = "ffn_gate_inp", "ffn_gate_inp_shexp"
EXPERT_NAMES = {
    "mlp.gate": ROUTER,
    "mlp.router": ROUTER,
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": SHARED_GATE,
}


def check_experts(config: LlamaConfig, divides: bool, instead: str) -> None:
    """Refuse what llama.cpp computes otherwise, or does not load."""
    if not config.family.experts:
        return
    computed = {
        "norm_topk_prob": divides,
        "mlp_only_layers": (),
        "clip_qkv": None,
    }
    if config.family.expert_bias:
        computed["attention_bias"] = True
    if config.family.whole_heads:
        computed["num_key_value_heads"] = config.num_attention_heads
    for key, value in computed.items():
        if getattr(config, key) != value:
            actual = f"{key} = {getattr(config, key)}"
            raise InputRefused(
                f"{actual}: llama.cpp computes {config.model_type} with {value}{instead}"
            )


def add_expert_sizes(writer: GGUFWriter, config: LlamaConfig) -> None:
    """Write how many experts there are, how many compute a token, and how wide they are."""
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(getattr(config, config.family.experts))
    if config.shared_expert_intermediate_size:
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
