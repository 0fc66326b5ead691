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

LARGEST_FACTOR = 1e6  # of the balance, whose gradient is fp32


def checked(config: LlamaConfig) -> dict[str, Any]:
    """Return the values of fields that follow from others, or have more than one spelling.

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
    plain = sorted({*config.mlp_only_layers} & {*range(config.num_hidden_layers)})
    found: dict[str, Any] = {"mlp_only_layers": tuple(plain)}
    if its.experts == "moe_intermediate_size":
        usual = -(-config.intermediate_size // config.num_experts_per_tok)
        found["moe_intermediate_size"] = config.moe_intermediate_size or usual
        check_positive_integer("moe_intermediate_size", found["moe_intermediate_size"])
    if its.divides:
        found["norm_topk_prob"] = True
    if its.experts == "moe_intermediate_size" and "mlp_only_layers" not in its.keys:
        found["intermediate_size"] = found["moe_intermediate_size"]  # no layer has the other
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
    """Return the keys of a config.json with its family's defaults filled in, as a `LlamaConfig` has
    them.

    Raises:
        InputRefused: a wrong value.
    """
    its = family(values["model_type"])
    found = dict[str, Any]()
    if its.experts:
        # If a file has both of these and the family knows both, transformers reads the one that it
        # has no default for.
        names = [
            name
            for name in ("num_experts", "num_local_experts")
            if name in its.keys and name in values
        ]
        number = min(names, key=lambda name: name in its.defaults)
        shared = [key for key in its.keys if key.startswith("shared_expert")]
        for key in (number, "num_experts_per_tok", its.experts, *shared):
            check_positive_integer(key, values[key])
            found[key] = values[key]
        found["num_experts"] = found.pop(number)
    if "mlp_only_layers" in its.keys:
        step = values.get("decoder_sparse_step", 1)
        listed = values.get("mlp_only_layers")
        listed = [] if listed is None else listed
        check_positive_integer("decoder_sparse_step", step)
        if not isinstance(listed, list) or any(
            isinstance(each, bool) or not isinstance(each, int) for each in listed
        ):
            raise InputRefused(
                f"mlp_only_layers = {listed!r}: expected a list of the numbers of layers"
            )
        plain = (
            layer for layer in range(layer_count(values)) if layer in listed or (layer + 1) % step
        )
        found["mlp_only_layers"] = tuple(plain)
    return found


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the values of keys that a config.json spells otherwise than a `LlamaConfig`."""
    keys = config.family.keys
    found = dict[str, Any]()
    if config.family.expert_bias:
        found["num_local_experts"] = config.num_experts
    if "use_sliding_window" in keys:
        found["use_sliding_window"] = config.sliding_window is not None
    if "mlp_only_layers" in keys:
        found |= {"mlp_only_layers": list(config.mlp_only_layers), "decoder_sparse_step": 1}
    return found


def balance_factor(config: LlamaConfig) -> float:
    """Return the factor of each mixture's balance in the loss, router_aux_loss_coef / mixtures; 0:
    there is none.
    """
    mixtures = sum(map(config.is_mixture, range(config.num_hidden_layers)))
    return (
        float(config.router_aux_loss_coef / mixtures)
        if config.output_router_logits and mixtures
        else 0.0
    )


def fresh(model_type: str, ffn: int) -> dict[str, Any]:
    """Return what a new model of a family has: 8 experts, of which a token's two are together as
    wide as `ffn`.

    Their balance, without which some are soon hardly used (docs/model.md), has the factor of arXiv
    2101.03961.
    """
    its = family(model_type)
    if not its.experts:
        return {}
    width = {} if its.experts == "moe_intermediate_size" else {its.experts: ffn // 2}
    balance = {"output_router_logits": True, "router_aux_loss_coef": 0.01}
    return {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": model_type != "olmoe",
        **width,
        **balance,
    }
