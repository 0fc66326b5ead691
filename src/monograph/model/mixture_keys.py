"""Read, check and write the keys of mixtures of experts in a config.json.

The *balance* is a loss that grows as experts are used unevenly (`monograph.graph.balance`). The module
needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from monograph.errors import InputRefused
from monograph.model.checks import check_positive_integer, check_positive_number
from monograph.model.families import find_family
from monograph.model.layer_keys import layer_count

if TYPE_CHECKING:
    from monograph.model.config import LlamaConfig

# The largest router_aux_loss_coef. A much larger one would overflow the gradient of the balance, which
# is in fp32.
MAX_BALANCE_FACTOR = 1e6
# The sizes of experts, which are 0 in a model without experts.
_EXPERT_SIZES = (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def check_and_derive(config: LlamaConfig) -> dict[str, Any]:
    """Check a configuration's keys of mixtures, and return the fields that change.

    A field changes if its default is derived from other fields, or if several of its values mean the
    same and one of them stands for all.

    Raises:
        InputRefused: a value of the wrong type or out of range; the message names the key.
    """
    family = config.family
    heads_width = config.num_attention_heads * config.head_dim
    if family.head_dim_is_derived and heads_width != config.hidden_size:
        raise InputRefused(
            f"head_dim = {config.head_dim}: expected hidden_size / num_attention_heads with model_type = "
            f"{config.model_type!r}"
        )
    if config.clip_qkv is not None:
        check_positive_number("clip_qkv", config.clip_qkv)
    if not family.expert_width_key:
        return {}
    if family.may_lack_experts and config.num_experts == 0:
        return dict.fromkeys(_EXPERT_SIZES, 0) | {"norm_topk_prob": False}
    _check_router(config)
    layers_without_mixture = set(config.mlp_only_layers) & set(range(config.num_hidden_layers))
    changed: dict[str, Any] = {"mlp_only_layers": tuple(sorted(layers_without_mixture))}
    if family.expert_width_key == "moe_intermediate_size":
        default_width = -(-config.intermediate_size // config.num_experts_per_tok)  # rounded up
        changed["moe_intermediate_size"] = config.moe_intermediate_size or default_width
        check_positive_integer("moe_intermediate_size", changed["moe_intermediate_size"])
    if family.always_norm_topk_prob:
        changed["norm_topk_prob"] = True
    # A family without the key mlp_only_layers has a mixture in each layer. Unless a gated layer is beside
    # it, no layer has the width intermediate_size. All values of it mean the same, and one is chosen.
    no_layer_has_mlp = (
        "mlp_only_layers" not in family.optional_keys and not family.mixture_beside_mlp
    )
    if family.expert_width_key == "moe_intermediate_size" and no_layer_has_mlp:
        changed["intermediate_size"] = changed["moe_intermediate_size"]
    if "shared_expert_intermediate_size" in family.optional_keys:
        width = config.shared_expert_intermediate_size or changed["moe_intermediate_size"]
        changed["shared_expert_intermediate_size"] = width
        check_positive_integer("shared_expert_intermediate_size", width)
    return changed


def _check_router(config: LlamaConfig) -> None:
    """Refuse wrong numbers of experts, and a wrong factor of the balance."""
    for name in ("num_experts", "num_experts_per_tok"):
        check_positive_integer(name, getattr(config, name))
    factor = config.router_aux_loss_coef
    chosen = config.num_experts_per_tok
    if factor > MAX_BALANCE_FACTOR:
        raise InputRefused(
            f"router_aux_loss_coef = {factor}: expected a number from 0 to {MAX_BALANCE_FACTOR:g}"
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
    family = find_family(values["model_type"])
    fields = dict[str, Any]()
    lacks_experts = family.may_lack_experts and values["num_experts"] == 0
    if family.expert_width_key and not lacks_experts:
        # A family may have two keys for the number of experts. If the file has both, transformers
        # reads the one for which it has no default.
        count_keys = [
            key
            for key in ("num_experts", "num_local_experts")
            if key in family.optional_keys and key in values
        ]
        without_default = [key for key in count_keys if key not in family.defaults]
        count_key = without_default[0] if without_default else count_keys[0]
        check_positive_integer(count_key, values[count_key])
        fields["num_experts"] = values[count_key]
        shared_keys = [key for key in family.optional_keys if key.startswith("shared_expert")]
        for key in ("num_experts_per_tok", family.expert_width_key, *shared_keys):
            check_positive_integer(key, values[key])
            fields[key] = values[key]
    if "mlp_only_layers" in family.optional_keys:
        fields["mlp_only_layers"] = _layers_without_mixture(values)
    return fields


def _layers_without_mixture(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers without a mixture.

    They are the layers of mlp_only_layers and, with n = decoder_sparse_step, all layers except every
    n-th.
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
    optional_keys = config.family.optional_keys
    values = dict[str, Any]()
    if config.family.expert_bias:
        # This is gpt-oss. Its files have the number of experts only under this key.
        values["num_local_experts"] = config.num_experts
    if "use_sliding_window" in optional_keys:
        values["use_sliding_window"] = config.sliding_window is not None
    if "mlp_only_layers" in optional_keys:
        values["mlp_only_layers"] = list(config.mlp_only_layers)
        values["decoder_sparse_step"] = 1
    return values


def balance_factor(config: LlamaConfig) -> float:
    """Return the factor of each mixture's balance in the loss.

    It is router_aux_loss_coef divided by the number of mixtures, and 0 if the balance is not part of
    the loss (output_router_logits = false) or if no layer has a mixture.
    """
    mixtures = sum(map(config.is_mixture, range(config.num_hidden_layers)))
    if not config.output_router_logits or not mixtures:
        return 0.0
    return float(config.router_aux_loss_coef / mixtures)


def new_model_keys(model_type: str, ffn_width: int) -> dict[str, Any]:
    """Return the keys of a new model's mixtures, which have 8 experts, two for each token.

    The balance is part of the loss, because without it some experts are hardly used after a short time
    (docs/model.md). Its factor is that of arXiv 2101.03961.

    Args:
        model_type: the family; the result is {} if it has no mixtures, or may lack experts.
        ffn_width: the width of the two experts of a token together.
    """
    family = find_family(model_type)
    if not family.expert_width_key or family.may_lack_experts:
        return {}
    keys: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": family.new_norm_topk_prob,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.01,
    }
    # `check_and_derive` gives this width to moe_intermediate_size.
    if family.expert_width_key != "moe_intermediate_size":
        keys[family.expert_width_key] = ffn_width // 2
    return keys
