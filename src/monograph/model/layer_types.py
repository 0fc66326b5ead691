"""The kinds of a model's layers, by the words that `layer_types` of a config.json has for them.

`LAYER_TYPES` is the table of these kinds. A row has what is needed to check a configuration without
torch. Everything else about a kind is in the layer's class (a `monograph.model.mixer.Mixer`). The
row has only the name of this class and its module.

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
MAMBA = "mamba"  # a layer of Mamba 2
CONVOLUTION = "conv"  # a gated short convolution
PLAIN_MLP = "mlp"  # a feed-forward layer without a gate, which is its block's only layer
# The keys of a delta net's sizes.
DELTA_NET_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
# The keys of the sizes of a layer of Mamba 2.
MAMBA_SIZES = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
# The key of the size of a gated short convolution.
CONVOLUTION_SIZES = ("conv_L_cache",)
# A delta net divides each query and key by sqrt(its squared length + this number), as in transformers.
L2_NORM_EPS = 1e-6


def _no_sizes(config: LlamaConfig) -> dict[str, int]:
    """Return {}, for kinds of layers without sizes of their own."""
    return {}


class LayerType(NamedTuple):
    """A kind of layer.

    Attributes:
        home: the module and the name of the layer's class, as "module:name".
        attends: whether it is attention, and so may have a window and rotate queries and keys.
        size_keys: the keys of its own sizes. Only families with such layers have these keys.
        checked_sizes: a function that takes a configuration and returns the values of size_keys by
            their keys, with defaults in place of zeros. It raises InputRefused for a wrong value.
        new_norm_eps: rms_norm_eps of a new model that has such layers; None: the usual one.
    """

    home: str
    attends: bool = False
    size_keys: tuple[str, ...] = ()
    checked_sizes: Callable[[LlamaConfig], dict[str, int]] = _no_sizes
    new_norm_eps: float | None = None


def _delta_net_sizes(config: LlamaConfig) -> dict[str, int]:
    """Check the sizes of delta nets, and return them by their keys with defaults in place of zeros."""
    value_heads = config.linear_num_value_heads or max(1, config.hidden_size // config.head_dim)
    default_key_heads = value_heads
    # The loop below checks that the user's value is an integer. Until then it may be anything.
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


def _mamba_sizes(config: LlamaConfig) -> dict[str, int]:
    """Check the sizes of layers of Mamba 2, and return them by their keys with defaults in place of
    zeros.
    """
    for name in MAMBA_SIZES:
        if getattr(config, name) != 0:
            check_positive_integer(name, getattr(config, name))
    # By default all heads together are twice as wide as the residual stream. If the width of a head is not
    # given, it follows from the number of heads. If neither is given, a head is as wide as one of
    # attention, if that divides the default width.
    default_width = 2 * config.hidden_size
    head_dim = config.mamba_d_head
    if head_dim == 0 and config.mamba_n_heads:
        head_dim = max(1, default_width // config.mamba_n_heads)
    elif head_dim == 0 and default_width % config.head_dim == 0:
        head_dim = config.head_dim
    elif head_dim == 0:
        head_dim = config.hidden_size
    sizes = {
        "mamba_n_heads": config.mamba_n_heads or max(1, default_width // head_dim),
        "mamba_d_head": head_dim,
        "mamba_n_groups": config.mamba_n_groups or 1,
        "mamba_d_state": config.mamba_d_state or 128,
        "mamba_d_conv": config.mamba_d_conv or 4,
    }
    heads = sizes["mamba_n_heads"]
    groups = sizes["mamba_n_groups"]
    if heads % groups:
        raise InputRefused(
            f"mamba_n_heads = {heads} is not a multiple of mamba_n_groups = {groups}; change one"
        )
    width = heads * head_dim
    if width % config.hidden_size and not config.family.any_mamba_width:
        raise InputRefused(
            f"mamba_n_heads * mamba_d_head = {width} is not a multiple of hidden_size = {config.hidden_size}, as "
            "transformers wants it; change one"
        )
    return sizes


def _convolution_sizes(config: LlamaConfig) -> dict[str, int]:
    """Check the number of positions that a gated short convolution sees, and return it by its key,
    with the default in place of a zero.
    """
    positions = config.conv_L_cache or 3
    check_positive_integer("conv_L_cache", positions)
    return {"conv_L_cache": positions}


LAYER_TYPES = {
    FULL_ATTENTION: LayerType("monograph.model.layers:Attention", attends=True),
    SLIDING_ATTENTION: LayerType("monograph.model.layers:Attention", attends=True),
    LINEAR_ATTENTION: LayerType(
        "monograph.model.delta_net:GatedDeltaNet",
        size_keys=DELTA_NET_SIZES,
        checked_sizes=_delta_net_sizes,
        # llama.cpp uses one number both as the norms' epsilon and as L2_NORM_EPS. So a new model with
        # another epsilon could not be exported.
        new_norm_eps=L2_NORM_EPS,
    ),
    MAMBA: LayerType(
        "monograph.model.mamba:Mamba2",
        size_keys=MAMBA_SIZES,
        checked_sizes=_mamba_sizes,
    ),
    CONVOLUTION: LayerType(
        "monograph.model.short_conv:ShortConv",
        size_keys=CONVOLUTION_SIZES,
        checked_sizes=_convolution_sizes,
    ),
    PLAIN_MLP: LayerType("monograph.model.plain_mlp:PlainMLP"),
}
