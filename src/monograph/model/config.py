"""Describe the shape of a model by checked sizes with their Hugging Face names, and by presets.

The module needs no torch.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from monograph.errors import InputRefused
from monograph.model import families, layer_keys, mixture_keys, scaling
from monograph.model.checks import check_positive_integer, check_positive_number, check_token_id
from monograph.model.families import DEFAULT_FAMILY, PRESET_EXTRAS, PRESETS, Family
from monograph.model.layer_types import (
    FULL_ATTENTION,
    LAYER_TYPES,
    SLIDING_ATTENTION,
    LayerType,
)
from monograph.model.scaling import Scaling

# The ends of names of files that torch.save writes. They are here, not in `torch_file` which reads such
# files, because importing this module does not import torch.
TORCH_FILE_SUFFIXES = (".pth", ".pt")
# The sizes that every config.json must have.
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# The sizes that every model has, whole numbers above 0. They are in the order of `PRESETS`.
_SIZES = (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of a model, by their Hugging Face names.

    A family is all models of one model_type. A family has only some of the fields
    (`monograph.model.families`). The other fields must keep their defaults. Where a line below has
    "0: ...", 0 stands for that value.

    Attributes:
        model_type: the family, a name in `monograph.model.families.FAMILIES`; exports keep it.
        vocab_size: rows of the embedding and of the head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated layer.
        num_hidden_layers: number of blocks.
        num_attention_heads: number of query heads; must divide hidden_size, except in families with
            a head_dim.
        num_key_value_heads: number of key-value heads; must divide num_attention_heads. 0: as many
            as query heads.
        head_dim: width of a head, even. 0: hidden_size / num_attention_heads.
        max_position_embeddings: longest sequence, tokens.
        rms_norm_eps: number added to the mean square in every norm.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: the scaling of the wavelengths, or None.
        rope_local_theta: base of the wavelengths in layers with a window, which then have no
            scaling. None: these layers have the base and the scaling of the others.
        partial_rotary_factor: share of a head's channels that are rotated. These are its first ones.
        tie_word_embeddings: whether the head is the embedding matrix.
        attention_bias: whether all four projections of attention have biases.
        sliding_window: number of positions that a query sees in layers with a window: its own and
            the ones directly before it. None: no layer has a window.
        layer_types: for each layer, "full_attention" (no window), "sliding_attention" (with a window)
            "linear_attention" (a gated delta net), "mamba" (a layer of Mamba 2), "conv" (a gated
            short convolution) or "mlp" (a feed-forward layer without a gate, which is its block's only
            layer). (): all layers have attention, with a window if sliding_window is set.
        linear_num_key_heads: number of key heads of a delta net; must divide
            linear_num_value_heads. 0: half of linear_num_value_heads if that is even, or else all of
            it.
        linear_num_value_heads: number of value heads of a delta net. 0: hidden_size / head_dim.
        linear_key_head_dim: width of a delta net's key head. 0: head_dim.
        linear_value_head_dim: width of a delta net's value head. 0: head_dim.
        linear_conv_kernel_dim: number of positions that a delta net's convolution sees. 0: 4.
        mamba_n_heads: number of heads of a layer of Mamba 2. mamba_n_heads * mamba_d_head must be a
            multiple of hidden_size. 0: the number for which this product is twice hidden_size.
        mamba_d_head: width of a head of Mamba 2. 0: 2 * hidden_size / mamba_n_heads. If both are 0, it
            is head_dim if that divides 2 * hidden_size, or else hidden_size.
        mamba_n_groups: number of groups of heads that have the same keys and queries; must divide
            mamba_n_heads. 0: 1.
        mamba_d_state: width of a key of Mamba 2. 0: 128.
        mamba_d_conv: number of positions that the convolution of Mamba 2 sees. 0: 4.
        mamba_conv_bias: whether this convolution has a bias.
        mamba_proj_bias: whether the two projections of Mamba 2 have biases.
        time_step_min: the least time step of Mamba 2.
        conv_L_cache: number of positions that a gated short convolution sees. 0: 3.
        conv_bias: whether the three layers of a gated short convolution have biases.
        position_embedding_type: "rope", or "nope" if no layer rotates queries and keys.
        no_rope_layers: 1 for each layer that rotates queries and keys, 0 for each layer that does
            not, which is the reverse of what the name says. (): all layers rotate.
        embedding_multiplier: factor of the embedded tokens.
        residual_multiplier: factor of each branch before it is added to the residual stream.
        attention_multiplier: factor of attention's scores. None: 1 / sqrt(head_dim).
        query_pre_attn_scalar: number by whose root attention's scores are divided. 0: head_dim.
        global_head_dim: width of a head in layers without a window. 0: head_dim.
        num_global_key_value_heads: number of key-value heads in layers without a window, if they have
            attention_k_eq_v. 0: num_key_value_heads.
        attention_k_eq_v: whether layers without a window have no projection of values, and take the
            key projection's result, before its norm and rotation, instead.
        num_kv_shared_layers: number of layers at the end that have no keys and values of their own, and
            attend to those of the last layer before them with the same layer type.
        use_double_wide_mlp: whether the feed-forward layers of these layers are twice as wide.
        hidden_size_per_layer_input: width of what each layer gets of the embedded tokens
            (`monograph.model.layer_inputs`). 0: layers get nothing of them.
        vocab_size_per_layer_input: rows of the table of these inputs. 0: vocab_size.
        final_logit_softcapping: cap of the logits (`monograph.ops.logit_cap`), or None.
        logits_scaling: divisor of the logits. The decoder divides the final hidden states by it.
        num_experts: number of experts of a mixture, in families with mixtures. 0: a model of a family
            with experts that may lack them has none, and the next fields are 0 or false.
        num_experts_per_tok: number of experts that compute a token. They are the experts with the
            highest probabilities.
        norm_topk_prob: whether the probabilities of a token's experts, which are the weights of their
            results, are divided by their sum.
        output_router_logits: whether training adds the balance to the loss. The balance is a loss
            that grows as experts are used unevenly (`monograph.graph.balance`).
        router_aux_loss_coef: factor of the balance.
        moe_intermediate_size: width of an expert. 0: intermediate_size / num_experts_per_tok,
            rounded up. In families without this key the width is intermediate_size.
        shared_expert_intermediate_size: width of a shared expert, in families that have one. 0: the
            width of the other experts.
        mlp_only_layers: indices of layers without a mixture, whose feed-forward layer is a gated
            layer.
        clip_qkv: largest absolute value of queries, keys and values before the rotation, or None.
        initializer_range: standard deviation of the initial weights, see `Llama`.
        mtp_num_hidden_layers: number of layers for multi-token prediction: 1 if the model has a head
            that predicts the token after the next one (`monograph.model.mtp`), or 0.
        attention_dropout: transformers' rate of dropout in training, which is kept for exports and
            not applied here.
        pad_token_id: id whose embedding row gets no gradient from look-ups, or None. A negative
            value counts from the end of the vocabulary and is replaced by the id.
        bos_token_id: id that begins a document, or None.
        eos_token_id: id or ids that end a document, or None.

    Raises:
        InputRefused: a value of the wrong type or out of range, or heads that do not divide; the
            message names the key.
    """

    model_type: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: Scaling | None = None
    rope_local_theta: float | None = None
    partial_rotary_factor: float = 1.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    mamba_n_heads: int = 0
    mamba_d_head: int = 0
    mamba_n_groups: int = 0
    mamba_d_state: int = 0
    mamba_d_conv: int = 0
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_min: float = 0.0
    conv_L_cache: int = 0
    conv_bias: bool = False
    position_embedding_type: str = "rope"
    no_rope_layers: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    query_pre_attn_scalar: int = 0
    global_head_dim: int = 0
    num_global_key_value_heads: int = 0
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    final_logit_softcapping: float | None = None
    logits_scaling: float = 1.0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    mlp_only_layers: tuple[int, ...] = ()
    clip_qkv: float | None = None
    initializer_range: float = 0.02
    mtp_num_hidden_layers: int = 0
    attention_dropout: float = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_numbers()
        self._check_flags()
        self._check_multiple("num_attention_heads", "num_key_value_heads")
        for name in ("attention_dropout", "router_aux_loss_coef", "time_step_min"):
            if getattr(self, name) != 0:
                check_positive_number(name, getattr(self, name))
        self._check_head()
        self._check_rotation()
        self._check_scaling()
        self._check_fields_of_family()
        self._check_mtp()
        self._check_layers()
        self._unify_equal_values()
        # The fields of mixtures and of the family's recurrent layers. Zeros are replaced by defaults.
        derived = {
            **mixture_keys.check_and_derive(self),
            **self.family.other_layers.checked_sizes(self),
        }
        for name, value in derived.items():
            self._set(name, value)
        self._check_token_ids()

    def _set(self, name: str, value: object) -> None:
        """Set a field. The dataclass is frozen, so only `object.__setattr__` can do this."""
        object.__setattr__(self, name, value)

    def _check_sizes(self) -> None:
        """Check the sizes that all families have, and replace sizes of 0 by their defaults."""
        for name in _REQUIRED:
            check_positive_integer(name, getattr(self, name))
        if self.head_dim == 0 or self.family.heads_divide_hidden_size:
            self._check_multiple("hidden_size", "num_attention_heads")
        if self.num_key_value_heads == 0:
            self._set("num_key_value_heads", self.num_attention_heads)
        if self.head_dim == 0:
            self._set("head_dim", self.hidden_size // self.num_attention_heads)
        for name in _SIZES:
            check_positive_integer(name, getattr(self, name))

    def _check_multiple(self, name: str, divisor_name: str) -> None:
        """Refuse a field that is not a multiple of another one."""
        size = getattr(self, name)
        divisor = getattr(self, divisor_name)
        if size % divisor:
            raise InputRefused(
                f"{name} = {size} is not a multiple of {divisor_name} = {divisor}; change one"
            )

    def _check_numbers(self) -> None:
        """Check the fields that are positive numbers."""
        for name in (
            "rms_norm_eps",
            "rope_theta",
            "initializer_range",
            "rope_local_theta",
            "final_logit_softcapping",
            *families.MULTIPLIERS,
        ):
            value = getattr(self, name)
            default = getattr(LlamaConfig, name)  # a dataclass has its defaults as class attributes
            may_be_none = default is None
            if value is None and may_be_none:
                continue
            check_positive_number(name, value)
        for name in (
            "query_pre_attn_scalar",
            "global_head_dim",
            "num_global_key_value_heads",
            "num_kv_shared_layers",
            "hidden_size_per_layer_input",
            "vocab_size_per_layer_input",
        ):
            if getattr(self, name) != 0:
                check_positive_integer(name, getattr(self, name))
        if self.initializer_range > 1:
            raise InputRefused(
                f"initializer_range = {self.initializer_range}: expected at most 1, transformers' limit"
            )

    def _check_flags(self) -> None:
        """Check the fields that are true or false."""
        for name in (
            "tie_word_embeddings",
            "attention_bias",
            "attention_k_eq_v",
            "use_double_wide_mlp",
            "norm_topk_prob",
            "output_router_logits",
            "mamba_conv_bias",
            "mamba_proj_bias",
            "conv_bias",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InputRefused(f"{name} = {getattr(self, name)!r}: expected true or false")

    def _check_head(self) -> None:
        """Refuse a tied head in families that have none."""
        if self.tie_word_embeddings and not self.family.may_tie:
            raise InputRefused(
                f"tie_word_embeddings = true is not supported with model_type = {self.model_type!r}"
            )

    def _check_rotation(self) -> None:
        """Check that heads and their rotated channels can be divided into pairs."""
        if self.head_dim % 2:
            raise InputRefused(
                f"head_dim = {self.head_dim} is odd, and rotary embedding rotates pairs of channels; change it, or the "
                f"numbers that it comes from, hidden_size = {self.hidden_size} and num_attention_heads = "
                f"{self.num_attention_heads}"
            )
        if self.global_head_dim % 2:
            raise InputRefused(
                f"global_head_dim = {self.global_head_dim} is odd, and rotary embedding rotates pairs of channels; "
                "change it"
            )
        check_positive_number("partial_rotary_factor", self.partial_rotary_factor)
        if self.partial_rotary_factor > 1 or self.rotary_dim % 2 or self.rotary_dim == 0:
            raise InputRefused(
                f"partial_rotary_factor = {self.partial_rotary_factor} of head_dim = {self.head_dim}: expected an even "
                "number of channels above 0, because rotary embedding rotates pairs of channels"
            )

    def _check_scaling(self) -> None:
        """Check that the family has this scaling of rotary positions, and that it fits the other fields."""
        if self.rope_scaling is None:
            return
        unsupported_key = ""
        if scaling.rope_type(self.rope_scaling) not in self.family.rope_types:
            unsupported_key = "rope_scaling"
        # In some families, rope_parameters has two tables: one for layers with a window, and one for the
        # others. There transformers does not read `truncate` from a table, so it always truncates.
        truncates = getattr(self.rope_scaling, "truncate", True)
        if self.family.default_local_theta is not None and not truncates:
            unsupported_key = "rope_scaling.truncate = false"
        if unsupported_key:
            raise InputRefused(
                f"{unsupported_key} is not supported with model_type = {self.model_type!r}"
            )
        if isinstance(self.rope_scaling, scaling.YarnScaling) and self.rope_theta <= 1:
            raise InputRefused(
                f"rope_theta = {self.rope_theta}: expected a number above 1 with yarn's rope_scaling"
            )
        if isinstance(self.rope_scaling, scaling.LongScaling):
            self.rope_scaling.check_pairs(self.rotary_dim // 2)

    def _check_fields_of_family(self) -> None:
        """Refuse values of fields that the family does not have."""
        for name in sorted(_fields_of_others(self.family)):
            default = getattr(type(self), name)
            if getattr(self, name) != default:
                raise InputRefused(f"{name} is not supported with model_type = {self.model_type!r}")

    def _check_mtp(self) -> None:
        """Check the number of layers for multi-token prediction."""
        layers = self.mtp_num_hidden_layers
        if isinstance(layers, bool) or layers not in (0, 1):
            raise InputRefused(f"mtp_num_hidden_layers = {layers!r}: expected 0 or 1")
        has_other_blocks = self.hidden_size_per_layer_input or self.num_kv_shared_layers
        if layers and (has_other_blocks or not self.family.has_feed_forward):
            raise InputRefused(
                f"mtp_num_hidden_layers = 1 is not supported with model_type = {self.model_type!r}: leave it out"
            )

    def _check_layers(self) -> None:
        """Check the fields that have a value for each layer, and the window that they refer to."""
        layers = self.num_hidden_layers
        if self.sliding_window is not None:
            check_positive_integer("sliding_window", self.sliding_window)
        other_type = self.family.other_layer_type
        known = (FULL_ATTENTION, other_type, *self.family.more_layer_types)
        unknown = [kind for kind in self.layer_types if kind not in known]
        if unknown:
            expected = " or ".join(map(repr, known))
            raise InputRefused(f"layer_types has {unknown[0]!r}: expected {expected}")
        if self.layer_types and len(self.layer_types) != layers:
            raise InputRefused(
                f"layer_types has {len(self.layer_types)} entries, but num_hidden_layers = {layers}"
            )
        if self.family.last_layer_is_full and self.window(layers - 1) is not None:
            raise InputRefused(
                f"layer_types: the last layer of a {self.model_type} must be {FULL_ATTENTION!r}"
            )
        if SLIDING_ATTENTION in self.layer_types and self.sliding_window is None:
            raise InputRefused(
                f"layer_types has {SLIDING_ATTENTION!r}, but no sliding_window is set"
            )
        has_windows = not self.layer_types or SLIDING_ATTENTION in self.layer_types
        if self.family.rotates_in_windows and self.sliding_window is not None and not has_windows:
            raise InputRefused(
                f"sliding_window = {self.sliding_window}: no layer has a window, so none would rotate "
                "queries and keys, which is not supported; write sliding_window = null"
            )
        if self.num_global_key_value_heads and not self.attention_k_eq_v:
            raise InputRefused(
                f"num_global_key_value_heads = {self.num_global_key_value_heads} needs attention_k_eq_v = true"
            )
        if self.num_global_key_value_heads:
            self._check_multiple("num_attention_heads", "num_global_key_value_heads")
        self._check_shared_keys()
        self._check_layer_inputs()
        rotations = list(self.no_rope_layers)
        are_flags = all(value in (0, 1) for value in rotations)
        if rotations and not (len(rotations) == layers and are_flags):
            raise InputRefused(
                f"no_rope_layers = {rotations}: expected 0 or 1 for each of {layers} layers"
            )

    def _check_shared_keys(self) -> None:
        """Check that each layer without keys and values of its own finds a layer to take them from."""
        shared = self.num_kv_shared_layers
        if not shared:
            return
        own = self.num_hidden_layers - shared
        if own < 1:
            raise InputRefused(
                f"num_kv_shared_layers = {shared}: expected fewer than num_hidden_layers = {self.num_hidden_layers}"
            )
        sources = {self._layer_name(layer) for layer in range(own)}
        for layer in range(own, self.num_hidden_layers):
            if self._layer_name(layer) not in sources:
                raise InputRefused(
                    f"num_kv_shared_layers = {shared}: layer {layer} has {self._layer_name(layer)!r}, and none of the "
                    f"first {own} layers has it, so that there are no keys and values to share"
                )

    def _check_layer_inputs(self) -> None:
        """Check that each token has a row in the table of the layers' inputs."""
        rows = self.vocab_size_per_layer_input
        if rows and not self.hidden_size_per_layer_input:
            raise InputRefused(
                f"vocab_size_per_layer_input = {rows} needs hidden_size_per_layer_input"
            )
        if rows and rows < self.vocab_size:
            raise InputRefused(
                f"vocab_size_per_layer_input = {rows} is less than vocab_size = {self.vocab_size}, so that some tokens "
                "would have no input for layers"
            )

    def _unify_equal_values(self) -> None:
        """Give values with the same meaning one form, so that equal models have equal
        configurations.
        """
        if self.layer_types and SLIDING_ATTENTION not in self.layer_types:
            self._set("sliding_window", None)  # because no layer has a window
        if len(set(self.layer_types)) == 1 and self.layer_type(0).attends:
            self._set("layer_types", ())  # sliding_window says whether the layers have a window
        if all(self.no_rope_layers):
            self._set("no_rope_layers", ())
        is_scaled = self.rope_scaling is not None
        has_one_theta = self.rope_local_theta in (None, self.rope_theta)
        family_has_local_theta = "rope_local_theta" in self.family.optional_keys
        if self.sliding_window is None or (has_one_theta and not is_scaled):
            # All layers have the same rotary positions.
            self._set("rope_local_theta", None)
        elif family_has_local_theta and self.rope_local_theta is None:
            # There is a scaling, which in these families does not hold for layers with a window. A
            # rope_local_theta says just that, so these layers get one, with the base of the others.
            self._set("rope_local_theta", self.rope_theta)
        if self.attention_multiplier == self.head_dim**-0.5:
            self._set("attention_multiplier", None)
        if self.query_pre_attn_scalar == self.head_dim:
            self._set("query_pre_attn_scalar", 0)
        if self.global_head_dim == self.head_dim:
            self._set("global_head_dim", 0)
        if self.num_global_key_value_heads == self.num_key_value_heads:
            self._set("num_global_key_value_heads", 0)
        if self.vocab_size_per_layer_input == self.vocab_size:
            self._set("vocab_size_per_layer_input", 0)
        if not self.num_kv_shared_layers:
            self._set("use_double_wide_mlp", False)

    def _check_token_ids(self) -> None:
        """Check the ids, and replace a pad_token_id that counts from the end."""
        if self.bos_token_id is not None:
            check_token_id("bos_token_id", self.bos_token_id)
        for token_id in self.eos_token_ids:
            check_token_id("eos_token_id", token_id)
        pad = self.pad_token_id
        size = self.vocab_size
        if pad is None:
            return
        if isinstance(pad, bool) or not isinstance(pad, int) or not -size <= pad < size:
            raise InputRefused(
                f"pad_token_id = {pad!r}: expected null or a token id below vocab_size = {size}"
            )
        self._set("pad_token_id", pad % size)

    @classmethod
    def preset(cls, name: str, *, family: str = DEFAULT_FAMILY, **overrides: Any) -> Self:
        """Return the configuration of a preset, with some of its values replaced.

        | name | parameters | vocabulary | layers | hidden | ffn | heads x dim | kv heads | head | positions |
        |---|---|---|---|---|---|---|---|---|---|
        | nano | 131,392 | 512 | 2 | 64 | 192 | 2 x 32 | 1 | tied | 2,048 |
        | micro | 2,361,024 | 4,096 | 4 | 192 | 512 | 6 x 32 | 2 | tied | 2,048 |
        | 124m | 123,587,328 | 50,304 | 12 | 768 | 2,048 | 6 x 128 | 6 | tied | 2,048 |
        | llama-179m | 179,448,576 | 50,000 | 12 | 768 | 3,072 | 12 x 64 | 3 | untied | 2,048 |
        | 1b | 1,235,814,400 | 128,256 | 16 | 2,048 | 8,192 | 32 x 64 | 8 | tied | 131,072 |
        | 8b | 8,030,261,248 | 128,256 | 32 | 4,096 | 14,336 | 32 x 128 | 8 | untied | 131,072 |

        For nano, micro and 124m, callers usually replace vocab_size by the size of their tokenizer.
        124m has the size of GPT-2 small, but heads of 128 channels, because GPU attention is fastest
        with them.
        llama-179m is from A. Tam, "Pretraining a Llama Model on Your Local GPU" (Machine Learning
        Mastery). 1b and 8b are Llama-3.2-1B and Llama-3.1-8B.

        The initializer_range of nano and micro is sqrt(2 / (5 hidden_size)) (Nguyen and Salazar,
        arXiv 1910.05895). 0.02 is small for their width: with it, micro was 0.1 bits per byte worse
        after 200 updates. A preset's initializer_range is for its own width. At another hidden_size
        it changes as 1 / sqrt(hidden_size), unless it is replaced, too.

        Args:
            name: the preset.
            family: the family of the model, such as "olmo2". The model has the preset's sizes, and
                the windows and the layers without rotation of the family. In a family with mixtures,
                a mixture has 8 experts and each token uses two of them. These two together are as
                wide as the preset's ffn, and output_router_logits is true.
            overrides: the values to replace.

        Raises:
            InputRefused: no such preset, family or key, or values that do not fit together.
        """
        if name not in PRESETS:
            raise InputRefused(f"preset = {name!r}: expected one of {', '.join(PRESETS)}")
        # A preset has no values for the last two names of `_SIZES`, head_dim and max_position_embeddings.
        sizes = dict(zip(_SIZES, PRESETS[name], strict=False))
        if family != DEFAULT_FAMILY:
            layers = overrides.get("num_hidden_layers", sizes["num_hidden_layers"])
            layer_values = layer_keys.new_model_keys(family, layers)
            mixture_values = mixture_keys.new_model_keys(family, sizes["intermediate_size"])
            overrides = layer_values | mixture_values | overrides
        unknown = sorted(set(overrides) - {field.name for field in fields(cls)})
        if unknown:
            raise InputRefused(
                f"unknown key {unknown[0]!r}: the sizes of a Llama are {', '.join(_SIZES)}"
            )
        values = {**sizes, **PRESET_EXTRAS[name]}
        unchanged = cls(**values)
        config = cls(**{**values, **overrides})
        if config.hidden_size == unchanged.hidden_size or "initializer_range" in overrides:
            return config
        width_ratio = unchanged.hidden_size / config.hidden_size
        return replace(
            config, initializer_range=unchanged.initializer_range * math.sqrt(width_ratio)
        )

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration that a config.json of transformers 4 or 5 states.

        Args:
            values: the content of the config.json.

        Raises:
            InputRefused: another architecture, a variant that `Llama` does not compute, or a wrong
                or missing value.
        """
        defaults: Mapping[str, Any] = {}
        if values.get("model_type"):  # if not, the loop below refuses the file
            defaults = families.find_family(values["model_type"]).defaults
        for key in ("model_type", *_REQUIRED):
            if values.get(key, defaults.get(key)) is None:
                raise InputRefused(f"the key {key} is missing")
        for key in families.NON_NULL_KEYS:
            if key in values and values[key] is None:
                raise InputRefused(
                    f"{key} = null: expected a number; leave the key out for transformers' default"
                )
        family = families.find_family(values["model_type"])
        families.check_supported(values)
        if family.own_keys is not None:
            values = family.own_keys.from_hf({**family.defaults, **values})
        # In transformers, rope_parameters = null means the default, as if the key were left out.
        in_file = {
            key: value
            for key, value in values.items()
            if value is not None or key != "rope_parameters"
        }
        # The default epsilon is that of transformers, which differs from this class's.
        values = {"rms_norm_eps": 1e-6, **family.defaults, **in_file}
        # Some of these fields are set again below, because files may have them in another form.
        names = {field.name for field in fields(cls)} - _fields_of_others(family)
        config_fields: dict[str, Any] = {
            name: values[name] for name in names if values.get(name) is not None
        }
        # In this class a size of 0 stands for a default. In a file it is an error.
        for key in sorted(config_fields.keys() & _SIZES):
            check_positive_integer(key, config_fields[key])
        if isinstance(values.get("eos_token_id"), list):
            config_fields["eos_token_id"] = tuple(values["eos_token_id"])
        rope = scaling.from_hf(
            values, family.default_local_theta, family.optional_keys, family.rope_types
        )
        if isinstance(rope.scaling, scaling.LongScaling | scaling.GrowingYarnScaling):
            config_fields["max_position_embeddings"] = rope.scaling.longest
        config_fields["rope_theta"] = rope.theta
        config_fields["rope_scaling"] = rope.scaling
        config_fields["rope_local_theta"] = rope.local_theta
        config_fields["partial_rotary_factor"] = rope.partial_rotary_factor
        window, layer_types = layer_keys.windows_from_hf(values)
        config_fields["sliding_window"] = window
        config_fields["layer_types"] = layer_types
        config_fields["no_rope_layers"] = layer_keys.rotations_from_hf(values)
        config_fields |= mixture_keys.from_hf(values)
        return cls(**config_fields)

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a config.json that transformers 4 and 5 and other programs read."""
        family = self.family
        layers = range(self.num_hidden_layers)
        left_out = _fields_of_others(family) | {"rope_local_theta"}
        if not self.mtp_num_hidden_layers:
            left_out.add("mtp_num_hidden_layers")
        if family.own_keys is not None:
            left_out |= {*family.own_keys.NOT_IN_FILES}
        values = {key: value for key, value in asdict(self).items() if key not in left_out}
        values |= scaling.to_hf(self)
        if "query_pre_attn_scalar" in family.optional_keys:
            values["query_pre_attn_scalar"] = self.query_pre_attn_scalar or self.head_dim
        if "attention_multiplier" in family.optional_keys:
            values["attention_multiplier"] = self.attention_multiplier or self.head_dim**-0.5
        if isinstance(self.eos_token_id, tuple):
            values["eos_token_id"] = list(self.eos_token_id)
        has_windows = [self.window(layer) is not None for layer in layers]
        if "layer_types" in families.keys_in_files(family):
            types = list(self.layer_types)
            if not types:
                types = [SLIDING_ATTENTION if each else FULL_ATTENTION for each in has_windows]
            values["layer_types"] = types
        has_rule = family.full_attention_every and "sliding_window" in family.optional_keys
        if has_rule and not family.rotates_in_windows:
            # transformers does not allow sliding_window = null in these families.
            values["sliding_window"] = self.sliding_window or family.defaults["sliding_window"]
        if "sliding_window" in family.optional_keys and "layer_types" in family.optional_keys:
            # These two keys are for programs that do not know layer_types. max_window_layers is the number
            # of layers before the first one with a window.
            values["use_sliding_window"] = self.sliding_window is not None
            values["max_window_layers"] = (
                has_windows.index(True) if any(has_windows) else self.num_hidden_layers
            )
        values |= mixture_keys.to_hf(self)
        if family.own_keys is not None:
            values |= family.own_keys.to_hf(self)
        if "no_rope_layers" in family.optional_keys:
            values["no_rope_layers"] = [int(self.rotates(layer)) for layer in layers]
        activation_key, activation = family.activation
        return {
            "architectures": [family.architecture],
            activation_key: activation,
            "mlp_bias": False,
            **values,
        }

    @property
    def family(self) -> Family:
        """Return the properties that distinguish models of this `model_type`."""
        return families.find_family(self.model_type)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids that end a document."""
        ids = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
        return tuple(token_id for token_id in ids if token_id is not None)

    def window(self, layer: int) -> int | None:
        """Return the number of positions that a layer's query sees: its own and those directly before.

        None means that a query sees all positions up to its own.
        """
        if self.layer_types and self.layer_types[layer] != SLIDING_ATTENTION:
            return None
        return self.sliding_window

    def layer_type(self, layer: int) -> LayerType:
        """Return the kind of a layer. Attention with and without a window is the same kind; `window`
        distinguishes them.
        """
        if not self.layer_types:
            return LAYER_TYPES[FULL_ATTENTION]
        return LAYER_TYPES[self.layer_types[layer]]

    def shortened(self, layers: int, *, first: int = 0) -> Self:
        """Return the configuration of a model with only some layers of this one.

        Args:
            layers: how many layers it has.
            first: the index of the first of them.

        It is not checked, because the last layer of some families must be of one kind.
        """
        return self._changed(
            num_hidden_layers=layers,
            layer_types=self.layer_types[first : first + layers],
            no_rope_layers=self.no_rope_layers[first : first + layers],
            mlp_only_layers=tuple(
                layer - first for layer in self.mlp_only_layers if 0 <= layer - first < layers
            ),
        )

    def of_layer(self, layer: int) -> Self:
        """Return the configuration in which the fields that differ between layers are those of a layer:
        `head_dim`, `num_key_value_heads`, `attention_k_eq_v` and `intermediate_size`.

        Its `num_kv_shared_layers` is 1 if the layer takes its keys and values from another one, or 0. In
        most families it is this configuration, because all layers are alike in these.
        """
        own: dict[str, Any] = {}
        if self.global_head_dim or self.num_global_key_value_heads or self.attention_k_eq_v:
            own = {"attention_k_eq_v": False}
            if self.window(layer) is None:
                own = {
                    "head_dim": self.global_head_dim or self.head_dim,
                    "num_key_value_heads": self.num_global_key_value_heads
                    or self.num_key_value_heads,
                }
            own |= {"global_head_dim": 0, "num_global_key_value_heads": 0}
        if self.num_kv_shared_layers:
            takes_keys = self.keys_layer(layer) != layer
            is_wide = takes_keys and self.use_double_wide_mlp
            own |= {
                "num_kv_shared_layers": int(takes_keys),
                "use_double_wide_mlp": False,
                "intermediate_size": self.intermediate_size * (2 if is_wide else 1),
            }
        return self._changed(**own) if own else self

    @property
    def is_chain(self) -> bool:
        """Return whether a block computes with its parameters and the result of the block before, and
        with nothing else that has a gradient. Only then can blocks be streamed one by one.
        """
        return not (self.num_kv_shared_layers or self.hidden_size_per_layer_input)

    def keys_layer(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends to: its own index, or that of an earlier
        layer (`num_kv_shared_layers`).
        """
        if layer < self.num_hidden_layers - self.num_kv_shared_layers:
            return layer
        return self._last_with_keys(self._layer_name(layer))

    def gives_keys(self, layer: int) -> bool:
        """Return whether a later layer attends to the keys and values of a layer."""
        if not self.num_kv_shared_layers:
            return False
        kind = self._layer_name(layer)
        first_without = self.num_hidden_layers - self.num_kv_shared_layers
        takers = range(first_without, self.num_hidden_layers)
        is_taken = any(self._layer_name(taker) == kind for taker in takers)
        return is_taken and self._last_with_keys(kind) == layer

    def _last_with_keys(self, kind: str) -> int:
        """Return the last layer of a kind that has keys and values of its own."""
        with_keys = range(self.num_hidden_layers - self.num_kv_shared_layers)
        # From the end, since a file may have thousands of layers, and the last ones are asked for.
        return next(layer for layer in reversed(with_keys) if self._layer_name(layer) == kind)

    def _layer_name(self, layer: int) -> str:
        """Return the name of a layer's kind in `layer_types`."""
        if self.layer_types:
            return self.layer_types[layer]
        return FULL_ATTENTION if self.sliding_window is None else SLIDING_ATTENTION

    def _changed(self, **values: Any) -> Self:
        """Return a copy with other values, which are not checked."""
        changed = copy.copy(self)
        for name, value in values.items():
            changed._set(name, value)
        return changed

    def of_mtp_layer(self) -> Self:
        """Return the configuration of a model whose only layer is the one for multi-token prediction.

        That layer attends to all positions up to its own, unless all layers of the model have a window.
        In a model with mixtures of experts, it has a mixture.
        """
        # Not checked, as the caller may ask for the shapes of a model that no file may have
        # (`monograph.model.parameters.axis_keys`).
        config = self._changed(
            num_hidden_layers=1, mtp_num_hidden_layers=0, no_rope_layers=(), mlp_only_layers=()
        )
        if not self.layer_types:
            return config
        return config._changed(layer_types=(), sliding_window=None, rope_local_theta=None)

    def is_mixture(self, layer: int) -> bool:
        """Return whether a layer's feed-forward layer is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.mlp_only_layers

    @property
    def joined_layers(self) -> Mapping[str, tuple[str, ...]]:
        """Return the layers of a block that are one layer in the files (`Family.joined_layers`)."""
        if not self.num_experts:
            return self.family.joined_layers
        return {**self.family.joined_layers, **self.family.joined_in_mixtures}

    @property
    def renamed_layers(self) -> Mapping[str, str]:
        """Return the layers of a block that have another name in the files, as {name in the decoder:
        name in the files}. It is empty for a family whose layers have other names in transformers
        than in files.
        """
        if self.family.file_prefix:
            return {}
        return {parts[0]: name for name, parts in self.joined_layers.items() if len(parts) == 1}

    def rotates(self, layer: int) -> bool:
        """Return whether a layer rotates queries and keys by their positions."""
        if not self.layer_type(layer).attends or self.family.never_rotates:
            return False
        if self.position_embedding_type == "nope":
            return False
        if self.family.rotates_in_windows and self.sliding_window is not None:
            return self.window(layer) is not None
        return not self.no_rope_layers or self.no_rope_layers[layer] == 1

    @property
    def rotary_dim(self) -> int:
        """Return the number of a head's channels that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def has_local_theta(self, layer: int) -> bool:
        """Return whether a layer's rotary positions have the base rope_local_theta.

        Only layers with a window can have it.
        """
        return self.rope_local_theta is not None and self.window(layer) is not None

    def theta_and_scaling(self, local: bool) -> tuple[float, Scaling | None]:
        """Return the base and the scaling of a layer's rotary positions.

        Args:
            local: True for a layer with a window, False for another.
        """
        if local and self.rope_local_theta is not None:
            return self.rope_local_theta, None
        return self.rope_theta, self.rope_scaling

    @property
    def query_scale(self) -> float:
        """Return the factor by which queries are multiplied before attention.

        Attention divides scores by sqrt(head_dim). With this factor they have instead the factor
        attention_multiplier, or are divided by sqrt(query_pre_attn_scalar), or, in some families, by
        nothing. Where layers have heads of several widths, ask the configuration of the layer
        (`of_layer`).
        """
        if self.family.unscaled_scores:
            return math.sqrt(self.head_dim)
        if self.query_pre_attn_scalar:
            return math.sqrt(self.head_dim / self.query_pre_attn_scalar)
        if self.attention_multiplier is None:
            return 1.0
        return self.attention_multiplier * math.sqrt(self.head_dim)

    @property
    def embedding_scale(self) -> float:
        """Return the factor of embedded tokens."""
        if self.family.embedding_scaled:
            return math.sqrt(self.hidden_size)
        return self.embedding_multiplier

    def parameter_count(self) -> int:
        """Return the number of parameters. A tied head and the embedding count once."""
        # Imported here, because `parameters` builds modules and so imports torch.
        from monograph.model import parameters

        return sum(map(math.prod, parameters.parameter_shapes(self).values()))


def _fields_of_others(family: Family) -> set[str]:
    """Return the names of fields that this family does not have, but some other families have."""
    return families.FIELDS_OF_SOME_FAMILIES - {*family.optional_keys}
