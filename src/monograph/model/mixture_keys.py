"""Read, check and write the keys of mixtures of experts in a config.json. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from monograph.errors import InputRefused
from monograph.model.families import family
from monograph.model.layer_kinds import layer_count
from monograph.model.scaling import check_positive_integer, check_positive_number

if TYPE_CHECKING:
    from monograph.model.config import LlamaConfig

# The largest factor of the balance, whose gradient is fp32.
LARGEST_FACTOR = 1e6


def checked(config: LlamaConfig) -> dict[str, Any]:
    """Return the fields of a configuration that are derived from others, or that have several forms.

    Raises:
        InputRefused: a value of the wrong type or out of range; the message names the key.
    """
    its = config.family
    if its.whole_heads and config.num_attention_heads * config.head_dim != config.hidden_size:
        raise InputRefused(
            f"head_dim = {config.head_dim}: expected hidden_size / num_attention_heads with model_type = "
            f"{config.model_type!r}"
        )
    if config.clip_qkv is not None:
        check_positive_number("clip_qkv", config.clip_qkv)
    if not its.experts:
        return {}
    _check_router(config)
    layers_without_mixture = {*config.mlp_only_layers} & {*range(config.num_hidden_layers)}
    found: dict[str, Any] = {"mlp_only_layers": tuple(sorted(layers_without_mixture))}
    if its.experts == "moe_intermediate_size":
        default_width = -(-config.intermediate_size // config.num_experts_per_tok)  # rounded up
        found["moe_intermediate_size"] = config.moe_intermediate_size or default_width
        check_positive_integer("moe_intermediate_size", found["moe_intermediate_size"])
    if its.divides:
        found["norm_topk_prob"] = True
    if its.experts == "moe_intermediate_size" and "mlp_only_layers" not in its.keys:
        # No layer has the intermediate_size, so all equal models get the same one.
        found["intermediate_size"] = found["moe_intermediate_size"]
    if "shared_expert_intermediate_size" in its.keys:
        width = config.shared_expert_intermediate_size or found["moe_intermediate_size"]
        found["shared_expert_intermediate_size"] = width
        check_positive_integer("shared_expert_intermediate_size", width)
    return found


def _check_router(config: LlamaConfig) -> None:
    for name in ("num_experts", "num_experts_per_tok"):
        check_positive_integer(name, getattr(config, name))
    factor = config.router_aux_loss_coef
    chosen = config.num_experts_per_tok
    if factor > LARGEST_FACTOR:
        raise InputRefused(
            f"router_aux_loss_coef = {factor}: expected a number from 0 to {LARGEST_FACTOR:g}"
        )
    if chosen > config.num_experts:
        raise InputRefused(
            f"num_experts_per_tok = {chosen}: expected at most the number of experts, {config.num_experts}"
        )


def from_hf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `LlamaConfig` that a config.json states about mixtures.

    Args:
        values: the content of the config.json, with its family's defaults filled in.

    Raises:
        InputRefused: a wrong value.
    """
    its = family(values["model_type"])
    found = dict[str, Any]()
    if its.experts:
        # If the family has both keys and the file has both, transformers reads the key without a
        # default.
        count_keys = [
            key for key in ("num_experts", "num_local_experts") if key in its.keys and key in values
        ]
        count_key = min(count_keys, key=lambda key: key in its.defaults)
        shared_keys = [key for key in its.keys if key.startswith("shared_expert")]
        for key in (count_key, "num_experts_per_tok", its.experts, *shared_keys):
            check_positive_integer(key, values[key])
            found[key] = values[key]
        found["num_experts"] = found.pop(count_key)
    if "mlp_only_layers" in its.keys:
        found["mlp_only_layers"] = _layers_without_mixture(values)
    return found


def _layers_without_mixture(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers without a mixture: those of mlp_only_layers, and all layers except every
    n-th, with n = decoder_sparse_step.
    """
    step = values.get("decoder_sparse_step", 1)
    listed = values.get("mlp_only_layers")
    if listed is None:
        listed = []
    check_positive_integer("decoder_sparse_step", step)
    if not isinstance(listed, list) or any(
        isinstance(layer, bool) or not isinstance(layer, int) for layer in listed
    ):
        raise InputRefused(
            f"mlp_only_layers = {listed!r}: expected a list of the numbers of layers"
        )
    layers = range(layer_count(values))
    return tuple(layer for layer in layers if layer in listed or (layer + 1) % step)


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the keys of a config.json that differ in name or form from fields of a `LlamaConfig`."""
    keys = config.family.keys
    found = dict[str, Any]()
    if config.family.expert_bias:
        found["num_local_experts"] = config.num_experts
    if "use_sliding_window" in keys:
        found["use_sliding_window"] = config.sliding_window is not None
    if "mlp_only_layers" in keys:
        found["mlp_only_layers"] = list(config.mlp_only_layers)
        found["decoder_sparse_step"] = 1
    return found


def balance_factor(config: LlamaConfig) -> float:
    """Return the factor of each mixture's balance in the loss, router_aux_loss_coef / mixtures.

    It is 0 if the balance does not train, or if no layer has a mixture.
    """
    mixtures = sum(map(config.is_mixture, range(config.num_hidden_layers)))
    if not config.output_router_logits or not mixtures:
        return 0.0
    return float(config.router_aux_loss_coef / mixtures)


def fresh(model_type: str, ffn: int) -> dict[str, Any]:
    """Return the keys of a new model's mixtures: 8 experts, of which each token uses two.

    The balance trains, because otherwise some experts are soon hardly used (docs/model.md). Its
    factor is that of arXiv 2101.03961.

    Args:
        model_type: the family; the result is {} if it has no mixtures.
        ffn: the width of the two experts of a token together.
    """
    its = family(model_type)
    if not its.experts:
        return {}
    values: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": its.new_divides,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.01,
    }
    # The default of moe_intermediate_size is already this width.
    if its.experts != "moe_intermediate_size":
        values[its.experts] = ffn // 2
    return values
