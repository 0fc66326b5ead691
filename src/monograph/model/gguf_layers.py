"""Give mixtures of experts and gated delta nets the names, sizes and order that llama.cpp reads.

`monograph.model.gguf` writes a file, and calls the functions here for these two kinds of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.lora import Plain
from monograph.model.config import LlamaConfig
from monograph.model.layer_keys import L2_NORM_EPS
from monograph.model.layer_types import FULL_ATTENTION, LINEAR_ATTENTION

if TYPE_CHECKING:
    from gguf import GGUFWriter

# The end of errors about models that llama.cpp does not compute.
USE_HF = "; export it with --format hf"
# llama.cpp's names of the tensors of a delta net, by their names in the layer.
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
# Tensors of a delta net whose first rows belong to queries and keys.
_WITH_QUERIES_AND_KEYS = ("in_proj_qkv.weight", "conv1d.weight")


def check_delta_nets(config: LlamaConfig) -> None:
    """Refuse delta nets that llama.cpp computes differently or does not load.

    Raises:
        InputRefused: the configuration has such delta nets.
    """
    key_size = config.linear_key_head_dim
    value_size = config.linear_value_head_dim
    if key_size != value_size:
        raise InputRefused(
            f"linear_key_head_dim = {key_size} and linear_value_head_dim = {value_size} are one size in llama.cpp"
            f"{USE_HF}"
        )
    if config.rms_norm_eps != L2_NORM_EPS:
        raise InputRefused(
            f"rms_norm_eps = {config.rms_norm_eps:g}: llama.cpp adds it to the lengths of a delta net's keys, too, "
            f"where the model adds {L2_NORM_EPS:g}{USE_HF}"
        )
    layers = range(config.num_hidden_layers)
    has_both_kinds = len({config.is_delta_net(layer) for layer in layers}) == 2
    if not has_both_kinds:
        kind = LINEAR_ATTENTION if config.is_delta_net(0) else FULL_ATTENTION
        raise InputRefused(
            f"layer_types: llama.cpp loads a {config.model_type} only with layers of both kinds, not with "
            f"{kind!r} alone{USE_HF}"
        )


def add_delta_net_sizes(writer: GGUFWriter, config: LlamaConfig, architecture: str) -> None:
    """Add the sizes of the delta nets to a file, and which layers are delta nets."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    are_delta_nets = [config.is_delta_net(layer) for layer in range(config.num_hidden_layers)]
    writer.add_array(f"{architecture}.attention.recurrent_layers", are_delta_nets)
    if config.family.projections_by_key_head:
        return
    # The other families, Qwen 3.5, have models that see pictures. There the rotary pairs are divided
    # into three sections, one for each coordinate of a position in a picture. In a text the three
    # coordinates are equal. llama.cpp puts pair i into section i % 3 if i is below three times the
    # section's size, and does not rotate a pair without a section. These sizes give each pair a
    # section.
    pairs = config.rotary_dim // 2
    writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])


def convert_delta_net(
    name: str, like: Tensor, read: Callable[[], Tensor], config: LlamaConfig
) -> Plain:
    """Return a tensor of a delta net with llama.cpp's name, order and values.

    Each key head has several value heads. Monograph lists all value heads of the first key head, then
    all of the second, and so on. llama.cpp lists the first value head of every key head, then the
    second of every key head, and so on. If the family orders its projections by key heads
    (`projections_by_key_head`), llama.cpp has the same order as Monograph. Instead of A_log,
    llama.cpp stores -exp(A_log).

    Args:
        name: the tensor's name in the layer.
        like: a meta tensor of the tensor's shape and dtype.
        read: returns the tensor.
        config: the model's configuration.
    """
    query_key_rows = 0
    if name in _WITH_QUERIES_AND_KEYS:
        query_key_rows = 2 * config.linear_num_key_heads * config.linear_key_head_dim

    def change(tensor: Tensor) -> Tensor:
        if name == "A_log":
            tensor = -tensor.exp()
        # All heads share the norm's weight, so it has no order.
        if name == "norm.weight" or config.family.projections_by_key_head:
            return tensor
        # The output projection has the heads in its columns, all others have them in their rows.
        axis = 1 if name == "out_proj.weight" else 0
        queries_and_keys, values = tensor.tensor_split([query_key_rows], dim=axis)
        head_width = values.shape[axis] // config.linear_num_value_heads
        # The axis becomes [key head, value head of the key head, width], and these are reordered to
        # [value head of the key head, key head, width].
        heads = values.unflatten(axis, (config.linear_num_key_heads, -1, head_width))
        reordered = heads.transpose(axis, axis + 1).flatten(axis, axis + 2)
        return torch.cat([queries_and_keys, reordered], dim=axis)

    return Plain(
        _DELTA_NET_NAMES[name],
        _without_middle_axis(like),
        lambda: _without_middle_axis(change(read())),
    )


def _without_middle_axis(tensor: Tensor) -> Tensor:
    """Return a convolution's weight [C, 1, K] as [C, K], and any other tensor unchanged."""
    return tensor.squeeze(1) if tensor.ndim == 3 else tensor


# llama.cpp's names of the parts of a mixture of experts, by their names in a block.
ROUTER = "ffn_gate_inp"
SHARED_GATE = "ffn_gate_inp_shexp"
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


def check_experts(config: LlamaConfig, norm_topk_prob: bool) -> None:
    """Refuse mixtures that llama.cpp computes differently or does not load.

    Args:
        config: the model's configuration.
        norm_topk_prob: whether llama.cpp divides the weights of a token's experts by their sum.

    Raises:
        InputRefused: the configuration has such mixtures.
    """
    if not config.family.expert_width_key:
        return
    # The values with which llama.cpp computes the family, whatever the configuration says.
    computed = {
        "norm_topk_prob": norm_topk_prob,
        "mlp_only_layers": (),
        "clip_qkv": None,
    }
    if config.family.expert_bias:
        computed["attention_bias"] = True
    if config.family.head_dim_is_derived:
        computed["num_key_value_heads"] = config.num_attention_heads
    for key, computed_value in computed.items():
        value = getattr(config, key)
        if value != computed_value:
            raise InputRefused(
                f"{key} = {value}: llama.cpp computes {config.model_type} with {computed_value}{USE_HF}"
            )


def add_expert_sizes(writer: GGUFWriter, config: LlamaConfig) -> None:
    """Add to a file how many experts there are, how many compute a token, and how wide they are."""
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(getattr(config, config.family.expert_width_key))
    if config.shared_expert_intermediate_size:
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
