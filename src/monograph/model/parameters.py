"""Say which parameters a model has, and each axis' key in its configuration. Needs no torch.

An axis is a key, or several that are multiplied or added: "num_attention_heads * head_dim".
"""

import math
from typing import Any

from monograph.model.families import Family

Axes = dict[str, tuple[str, ...]]


def layer_axes(config: Any, layer: int) -> Axes:
    """Return the axes of a block's parameters, by the parameters' names in the block."""
    axes: Axes = {f"{name}.weight": ("hidden_size",) for name in config.family.norms if name}
    axes |= _delta_net(config.family.by_key_head) if config.is_linear(layer) else _attention(config)
    if config.is_mixture(layer):
        return axes | _mixture(config.family)
    return axes | {
        "mlp.gate_proj.weight": ("intermediate_size", "hidden_size"),
        "mlp.up_proj.weight": ("intermediate_size", "hidden_size"),
        "mlp.down_proj.weight": ("hidden_size", "intermediate_size"),
    }


def _mixture(family: Family) -> Axes:
    width = family.experts
    inner = "shared_expert_intermediate_size"
    axes: Axes = {
        "mlp.gate.weight": ("num_experts", "hidden_size"),
        "mlp.experts.gate_proj.weight": ("num_experts", width, "hidden_size"),
        "mlp.experts.up_proj.weight": ("num_experts", width, "hidden_size"),
        "mlp.experts.down_proj.weight": ("num_experts", "hidden_size", width),
    }
    if family.expert_bias:
        axes |= {name.replace(".weight", ".bias"): sizes[:-1] for name, sizes in axes.items()}
    if inner in family.keys:
        axes |= {
            "mlp.shared_expert.gate_proj.weight": (inner, "hidden_size"),
            "mlp.shared_expert.up_proj.weight": (inner, "hidden_size"),
            "mlp.shared_expert.down_proj.weight": ("hidden_size", inner),
            "mlp.shared_expert_gate.weight": ("1", "hidden_size"),
        }
    return axes


def _attention(config: Any) -> Axes:
    query, key_value = "num_attention_heads * head_dim", "num_key_value_heads * head_dim"
    axes: Axes = {
        "self_attn.q_proj.weight": (f"2 * {query}" if config.family.gated else query, "hidden_size"),
        "self_attn.k_proj.weight": (key_value, "hidden_size"),
        "self_attn.v_proj.weight": (key_value, "hidden_size"),
        "self_attn.o_proj.weight": ("hidden_size", query),
    }
    if config.attention_bias or config.family.qkv_bias:
        axes |= {f"self_attn.{name}_proj.bias": axes[f"self_attn.{name}_proj.weight"][:1] for name in "qkv"}
    if config.attention_bias:
        axes["self_attn.o_proj.bias"] = ("hidden_size",)
    if config.family.qk_norm:
        of_all = config.family.qk_norm == "all"
        axes["self_attn.q_norm.weight"] = (query if of_all else "head_dim",)
        axes["self_attn.k_norm.weight"] = (key_value if of_all else "head_dim",)
    if config.family.sinks:
        axes["self_attn.sinks"] = ("num_attention_heads",)
    return axes


def _delta_net(by_key_head: bool) -> Axes:
    keys, values = "linear_num_key_heads * linear_key_head_dim", "linear_num_value_heads * linear_value_head_dim"
    mixed = f"2 * {keys} + {values}"
    heads = "linear_num_value_heads"
    projections = {
        "linear_attn.in_proj_qkv.weight": (mixed, "hidden_size"),
        "linear_attn.in_proj_z.weight": (values, "hidden_size"),
        "linear_attn.in_proj_b.weight": (heads, "hidden_size"),
        "linear_attn.in_proj_a.weight": (heads, "hidden_size"),
    }
    if by_key_head:
        projections = {
            "linear_attn.in_proj_qkvz.weight": (f"{mixed} + {values}", "hidden_size"),
            "linear_attn.in_proj_ba.weight": (f"2 * {heads}", "hidden_size"),
        }
    return projections | {
        "linear_attn.conv1d.weight": (mixed, "1", "linear_conv_kernel_dim"),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
        "linear_attn.norm.weight": ("linear_value_head_dim",),
        "linear_attn.out_proj.weight": ("hidden_size", values),
    }


def outer_axes(config: Any) -> Axes:
    """Return the axes of the parameters outside the blocks, by full name, without a tied head."""
    embedding = ("vocab_size", "hidden_size")
    head = {} if config.tie_word_embeddings else {"lm_head.weight": embedding}
    return {"model.embed_tokens.weight": embedding, "model.norm.weight": ("hidden_size",), **head}


def layer_shapes(config: Any, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a block's parameters, by their names in the block."""
    return {name: shape_of(config, axes) for name, axes in layer_axes(config, layer).items()}


def shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters by full name, without a tied head."""
    found = {name: shape_of(config, axes) for name, axes in outer_axes(config).items()}
    for layer in range(config.num_hidden_layers):
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config, layer).items()}
    return found


def block_matrices(config: Any, layer: int, most: int | None = None) -> list[tuple[int, ...]]:
    """Return the shapes of a block's matrices, those of each expert, or of `most` experts, included."""
    found = list[tuple[int, ...]]()
    for name, shape in layer_shapes(config, layer).items():
        stacks = 1 if len(shape) == 2 else most or shape[0]
        found += [shape[-2:]] * stacks if len(shape) > 1 and not name.endswith(".bias") else []
    return found


def matrices(config: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices of all blocks."""
    return [shape for layer in range(config.num_hidden_layers) for shape in block_matrices(config, layer)]


def block_multiplied(config: Any, layer: int) -> list[tuple[int, ...]]:
    """Return the shapes of a block's matrices that a token is multiplied with: of experts, those of its own."""
    return block_matrices(config, layer, config.num_experts_per_tok)


def multiplied(config: Any) -> list[tuple[int, ...]]:
    """Return the shapes of `block_multiplied` of all blocks."""
    return [shape for layer in range(config.num_hidden_layers) for shape in block_multiplied(config, layer)]


def shape_of(config: Any, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the sizes of axes."""
    return tuple(sum(_product(config, part) for part in axis.split(" + ")) for axis in axes)


def _product(config: Any, part: str) -> int:
    return math.prod(int(key) if key.isdigit() else getattr(config, key) for key in part.split(" * "))
