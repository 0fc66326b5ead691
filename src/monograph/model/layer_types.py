"""The kinds of a model's layers, by the words that `layer_types` of a config.json has for them.

`LAYER_TYPES` is the table of these kinds. Its rows have what a configuration asks, which needs no
torch. Everything else is said by a layer's class, which the row names (`monograph.model.mixer`).

To add a kind, write its class in a file such as `monograph/model/delta_net.py`, and its row here. If
it has sizes of its own, they are fields of `LlamaConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from monograph.errors import InputRefused
from monograph.model.checks import check_positive_integer

if TYPE_CHECKING:
    from monograph.model.config import LlamaConfig

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"  # attention with a window
LINEAR_ATTENTION = "linear_attention"  # a gated delta net
# The keys of a delta net's sizes.
DELTA_NET_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
# A delta net divides each query and key by sqrt(its squared length + this number), as in transformers.
L2_NORM_EPS = 1e-6


def _no_sizes(config: LlamaConfig) -> dict[str, int]:
    return {}


class LayerType(NamedTuple):
    """A kind of layer.

    Attributes:
        home: where the class of its mixer is, "module:name".
        attends: whether it is attention, and so may have a window and rotate queries and keys.
        size_keys: the keys of its sizes, which only families with such layers have.
        checked_sizes: returns these sizes of a configuration by their keys, where defaults replace
            sizes of 0, or raises InputRefused.
        new_norm_eps: rms_norm_eps of a new model that has such layers; None: the usual one.
    """

    home: str
    attends: bool = False
    size_keys: tuple[str, ...] = ()
    checked_sizes: Callable[[LlamaConfig], dict[str, int]] = _no_sizes
    new_norm_eps: float | None = None


def _delta_net_sizes(config: LlamaConfig) -> dict[str, int]:
    value_heads = config.linear_num_value_heads or max(1, config.hidden_size // config.head_dim)
    default_key_heads = value_heads
    # The type of the user's value is not checked before the loop below.
    if isinstance(value_heads, int) and value_heads % 2 == 0:
        default_key_heads = value_heads // 2
    sizes = {
        "linear_num_key_heads": config.linear_num_key_heads or default_key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": config.linear_key_head_dim or config.head_dim,
        "linear_value_head_dim": config.linear_value_head_dim or config.head_dim,
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim or 4,
    }
    for name, size in sizes.items():
        check_positive_integer(name, size)
    key_heads = sizes["linear_num_key_heads"]
    if value_heads % key_heads:
        raise InputRefused(
            f"linear_num_value_heads = {value_heads} is not a multiple of linear_num_key_heads = {key_heads}; "
            "change one"
        )
    return sizes


LAYER_TYPES = {
    FULL_ATTENTION: LayerType("monograph.model.layers:Attention", attends=True),
    SLIDING_ATTENTION: LayerType("monograph.model.layers:Attention", attends=True),
    LINEAR_ATTENTION: LayerType(
        "monograph.model.delta_net:GatedDeltaNet",
        size_keys=DELTA_NET_SIZES,
        checked_sizes=_delta_net_sizes,
        # llama.cpp has one number for the norms' epsilon and for L2_NORM_EPS, so a new model could
        # not be exported with another epsilon.
        new_norm_eps=L2_NORM_EPS,
    ),
}
