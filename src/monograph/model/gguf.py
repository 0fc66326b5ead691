"""Write a model as a GGUF file for llama.cpp and Ollama: configuration, tokenizer and weights in
one file.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes the format. The package `gguf`,
which is an optional dependency, writes it. What comments say about llama.cpp is from its src/models/,
and tests/laws/test_exported_is_original.py checks it.

llama.cpp computes each family in one way, and a file can change only some numbers of it. A model whose
configuration asks for anything else is refused, because llama.cpp would load its file without an error
and compute something else.

Shape suffix: F = rotated channels of a head / 2, the frequencies.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from monograph.errors import InputRefused, UsageError, join_with_or
from monograph.extras import command_for
from monograph.graph.lora_merge import UnreadTensor, plain_parameters
from monograph.graph.mmap_weights import kept_dtype
from monograph.model import sampling_defaults
from monograph.model.config import LlamaConfig
from monograph.model.families import LlamaCppSupport, NormNames
from monograph.model.files import new_folder, write_no_extras
from monograph.model.gguf_blocks import K_QUANTS, choose_types, quantize
from monograph.model.gguf_words import add_tokenizer, modelfile
from monograph.model.layers import Attention
from monograph.model.layouts import JoinedLayersRule
from monograph.model.llama import Llama, feed_forward_of_family, kinds_of_family
from monograph.model.mixer import USE_HF, Mixer, mixer_of, mixers_of_family
from monograph.model.mtp import MTP_PREFIX
from monograph.model.rope import inverse_frequencies
from monograph.model.scaling import (
    GrowingYarnScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    YarnScaling,
)
from monograph.ops import weight_blocks
from monograph.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

FILE = "model.gguf"
# The dtypes of a file, by their names on the command line. The value is gguf's name of the type that
# most matrices of such a file have; a file has tensors of several types.
DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"} | K_QUANTS
# The dtype of a file that holds exactly the weights of a model, by the value of the key `train.quantize` with
# which the model was trained.
TRAINED_DTYPES = {"int4": "q4_0", "int8": "q8_0"}
# The number of a file's dtype in llama.cpp's enum `llama_ftype`.
_FILE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q8_0": 7,
    "q4_k_m": 15,
    "q5_k_m": 17,
    "q6_k": 18,
    "bf16": 32,
}
# By how much a block's scale is below its largest weight, by the type. It is at least 1 in types that are
# not listed.
_SCALE_DIVISORS = {"Q4_0": 8, "Q8_0": 127}
# The dtype to which a tensor is cast before it is written or quantised, by its type in the file. For types
# that are not listed it is fp32.
_CAST_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
# The file's dtype if the user gives none, by the dtype of the weights.
_DEFAULT_DTYPES = {
    torch.float64: "f32",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
}

_USE_F16 = ": use --dtype f16"

# llama.cpp rotates queries and keys in all layers of a SmolLM3 but every fourth one.
_SMOLLM3_INTERVAL = 4
# llama.cpp's names of the layers outside of the blocks, without the final norm, whose name differs by
# family.
_OUTER_NAMES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
# Its names of the layers of a head for multi-token prediction outside of the head's block, which follows the
# blocks of the model.
_MTP_NAMES = {
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "shared_head_norm",
}
_MTP_LAYER = f"{MTP_PREFIX}layers.0."
# The divisor of the frequency of a pair of channels that is not rotated. llama.cpp's own converter writes the
# same number.
_NOT_ROTATED = 1e30
# llama.cpp's names of the layers of attention, by their names in a block.
_BLOCK_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "self_attn.qkv_proj": "attn_qkv",
    "layer_scalar": "layer_output_scale",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}


def save_gguf(
    model: Llama,
    folder: str | Path,
    tokenizer: Tokenizer,
    dtype: str | None,
    warn: Callable[[str], None],
    write_extras: Callable[[Path], None] = write_no_extras,
) -> None:
    """Write a folder with model.gguf and a Modelfile for `ollama create`, whole or not at all.

    Matrices are stored as `dtype`. Vectors, such as norms and biases, are stored as f32, because
    llama.cpp requires it. Routers of mixtures are stored as f32, too, as llama.cpp's own converter
    does. q8_0 stores 32 consecutive weights w of a row as a float16 scale d = max|w| / 127 and
    integers q, so that w is about d q. The error of a weight is at most d / 2, plus the rounding of d.
    q4_0 stores them as a float16 scale and integers of 4 bits (`monograph.ops.weight_blocks`), but the
    head as q8_0. In q4_k_m, q5_k_m and q6_k each matrix has the type and the bytes that llama.cpp's own quantizer
    writes (`gguf_blocks`). Besides the model, one tensor at a time is in memory.

    Args:
        model: the model. Its weights may be on any device or in a mapped file. Adapters are merged
            into the weights that are written.
        folder: the folder to create; it may exist if it is empty.
        tokenizer: the model's tokenizer, which is written into the file with its chat template.
        dtype: a name in `DTYPES`; None: the dtype of the weights (f32 for float64).
        warn: called with each line that the user should read about what llama.cpp will do
            differently.
        write_extras: called with the temporary folder, to write further files before the folder gets
            its name.

    Raises:
        UsageError: the package `gguf` is not installed.
        InputRefused: llama.cpp lacks a feature of the model or would read it wrongly (a window, an
            unknown split pattern, too many stop tokens), weights do not fit the dtype, or the folder
            cannot be written.
        DiskFull: no space left; nothing of this export remains.
    """
    if dtype is None:
        dtype = _DEFAULT_DTYPES[kept_dtype(model.model.embed_tokens.weight)]
    gguf = import_gguf()
    config = model.config
    _check_supported(config, dtype)
    _warn_of_positions(config, warn)
    if config.time_step_min > 0:
        # This is not an error, because all published models have such a limit, and llama.cpp's own converter
        # writes files of them without a warning.
        warn(
            f"time_step_min = {config.time_step_min}: llama.cpp takes shorter time steps as they are, so its "
            "answers will differ a little"
        )
    divisors = [
        UnreadTensor(name, like=divisor_F, read=divisor_F.clone)
        for name, divisor_F in _rope_divisors(config).items()
    ]
    parameters = [*plain_parameters(model)]
    if config.mtp_num_hidden_layers and not _writes_mtp(config):
        parameters = [each for each in parameters if not each.name.startswith(MTP_PREFIX)]
        warn(
            f"{MTP_PREFIX}* (multi-token prediction) is left out, as llama.cpp knows no such head of a "
            f"{config.model_type}: --format hf keeps it"
        )
    tensors = [*divisors, *llama_cpp_tensors(parameters, config)]
    for layer in range(config.num_hidden_layers):
        for tensor in mixer_of(config, layer).more_llama_cpp_tensors(config):
            tensors.append(tensor._replace(name=f"blk.{layer}.{tensor.name}"))
    shapes = {tensor.name: tensor.like.shape for tensor in tensors}
    types = _choose_tensor_types(shapes, dtype, config)
    with new_folder(Path(folder)) as new:
        writer = gguf.GGUFWriter(new / FILE, llama_cpp_support(config).name)
        _add_shape(gguf, writer, config)
        writer.add_file_type(_FILE_TYPES[dtype])
        if dtype.startswith("q"):  # the quantised dtypes
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        sampling_defaults.add_to_gguf(writer, model.sampling, _context_length(config))
        stops = add_tokenizer(writer, tokenizer, config, warn)
        write_gguf_file(gguf, writer, tensors, types)
        lines = [
            modelfile(FILE, tokenizer, stops),
            *sampling_defaults.modelfile_lines(model.sampling),
        ]
        (new / "Modelfile").write_text(
            "".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8"
        )
        write_extras(new)


def llama_cpp_support(config: LlamaConfig) -> LlamaCppSupport:
    """Return how llama.cpp computes the models of a configuration's family.

    Raises:
        InputRefused: llama.cpp does not know the family.
    """
    support = config.family.llama_cpp
    if support is None:
        raise InputRefused(
            f"model_type = {config.model_type!r}: llama.cpp knows no such family; export it with --format hf"
        )
    if _mixers(config) != [Attention] or not support.attention_alone:
        return support
    return support._replace(name=support.attention_alone, kv_heads_by_layer=False)


def _writes_mtp(config: LlamaConfig) -> bool:
    """Return whether a file of the model has its head for multi-token prediction."""
    return config.mtp_num_hidden_layers > 0 and llama_cpp_support(config).has_mtp


def _mixers(config: LlamaConfig) -> list[type[Mixer]]:
    """Return the classes of the mixers that a file describes.

    These are all classes that the family has. There is one exception: if all layers of the model are
    attention without experts, llama.cpp may have another architecture for it, with attention as the only
    class (`LlamaCppSupport.attention_alone`).
    """
    support = config.family.llama_cpp
    is_attention_alone = all(
        mixer_of(config, layer) is Attention for layer in range(config.num_hidden_layers)
    )
    if support and support.attention_alone and is_attention_alone and not config.num_experts:
        return [Attention]
    return mixers_of_family(config)


def import_gguf() -> ModuleType:
    """Import the package `gguf`, and return it.

    Raises:
        UsageError: the package is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError:
        raise UsageError(
            f"--format gguf needs the package gguf: {command_for('gguf', 'gguf')}"
        ) from None


def _check_supported(config: LlamaConfig, dtype: str) -> None:
    """Refuse features that llama.cpp does not compute. It would load most of them without an error."""
    model_type = config.model_type
    llama_cpp = llama_cpp_support(config)
    _check_windows(config)
    for mixer in _mixers(config):
        mixer.require_llama_cpp(config)
    _check_unrotated_layers(config)
    _check_shared_keys(config)
    if isinstance(config.rope_scaling, Llama3Scaling) and not llama_cpp.reads_rope_divisors:
        raise InputRefused(
            f"rope_scaling = 'llama3' is not computed by llama.cpp for a {model_type}{USE_HF}"
        )
    heads = config.num_attention_heads
    width = config.head_dim
    if llama_cpp.head_dim_is_derived and heads * width != config.hidden_size:
        raise InputRefused(
            f"head_dim = {width} and num_attention_heads = {heads}: llama.cpp loads a {model_type} only if their "
            f"product is hidden_size = {config.hidden_size}{USE_HF}"
        )
    if llama_cpp.needs_tied_head and not config.tie_word_embeddings:
        raise InputRefused(
            f"tie_word_embeddings = false is not computed by llama.cpp for a {model_type}{USE_HF}"
        )
    _check_score_scale(config)
    feed_forward_of_family(config).require_llama_cpp(config, llama_cpp)
    if config.attention_bias and not llama_cpp.computes_attention_bias:
        raise InputRefused(
            f"attention_bias = true is not computed by llama.cpp for a {model_type}{USE_HF}"
        )
    if dtype.startswith("q"):
        _check_row_lengths(config, dtype)


def _check_unrotated_layers(config: LlamaConfig) -> None:
    """Refuse a SmolLM3 unless exactly every fourth layer does not rotate queries and keys."""
    if "no_rope_layers" not in config.family.optional_keys:
        return
    layers = range(config.num_hidden_layers)
    unrotated = [layer for layer in layers if not config.rotates(layer)]
    every_fourth = [*layers[_SMOLLM3_INTERVAL - 1 :: _SMOLLM3_INTERVAL]]
    if unrotated != every_fourth:
        raise InputRefused(
            f"no_rope_layers: llama.cpp rotates all layers of a {config.model_type} but each "
            f"{_SMOLLM3_INTERVAL}th{USE_HF}"
        )


def _check_shared_keys(config: LlamaConfig) -> None:
    """Refuse layers that take their keys from other layers than those from which llama.cpp takes them.

    It takes them from the last layer with keys of its own, and for layers with a window from the one
    before that.
    """
    own = config.num_hidden_layers - config.num_kv_shared_layers
    for layer in range(own, config.num_hidden_layers):
        source = own - 1 if config.window(layer) is None else own - 2
        if config.keys_layer(layer) != source:
            raise InputRefused(
                f"num_kv_shared_layers = {config.num_kv_shared_layers}: layer {layer} takes its keys from layer "
                f"{config.keys_layer(layer)}, and llama.cpp takes them from layer {source}{USE_HF}"
            )


def _check_row_lengths(config: LlamaConfig, dtype: str) -> None:
    """Refuse a model with matrices whose rows cannot be cut into blocks of 32 weights.

    A block is the group of weights that share a scale. It has 32 weights in Q8_0 and Q4_0, and 256 in the types
    of q4_k_m, q5_k_m and q6_k. If a row cannot be cut into blocks of 256, `choose_types` chooses other
    types for its matrix, whose blocks have 32 weights. So every quantised dtype needs blocks of 32.
    """
    row_lengths = {"hidden_size": config.hidden_size}
    row_lengths |= feed_forward_of_family(config).llama_cpp_row_lengths(config)
    row_lengths["num_attention_heads * head_dim"] = config.num_attention_heads * config.head_dim
    if config.global_head_dim:
        width = config.num_attention_heads * config.global_head_dim
        row_lengths["num_attention_heads * global_head_dim"] = width
    if config.hidden_size_per_layer_input:
        row_lengths["hidden_size_per_layer_input"] = config.hidden_size_per_layer_input
    for mixer in _mixers(config):
        row_lengths |= mixer.llama_cpp_row_lengths(config)
    for key, length in row_lengths.items():
        if length % weight_blocks.BLOCK:
            raise InputRefused(
                f"{key} = {length} is not a multiple of {weight_blocks.BLOCK}, a block of {dtype}{_USE_F16}"
            )


def _check_score_scale(config: LlamaConfig) -> None:
    """Refuse a model whose attention scores have a factor that llama.cpp does not compute."""
    if config.query_pre_attn_scalar:  # 0 means head_dim
        raise InputRefused(
            f"query_pre_attn_scalar = {config.query_pre_attn_scalar} is not head_dim = {config.head_dim}, as llama.cpp "
            f"takes it to be{USE_HF}"
        )
    scaling = config.rope_scaling
    if not isinstance(scaling, YarnScaling):
        return
    default_factor = scaling.default_attention_factor(scaling.factor)
    # llama.cpp computes yarn only with truncate = true. gpt-oss, the family with sinks, is accepted with
    # false, too: the difference is small, and `_warn_of_positions` warns of it.
    accepted_truncate = scaling.truncate if config.family.attention_sinks else True
    # The only values of the other keys that llama.cpp computes.
    accepted = replace(
        scaling,
        attention_factor=default_factor,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=accepted_truncate,
    )
    if llama_cpp_support(config).reads_yarn_keys:
        accepted = replace(scaling, truncate=True)
        if scaling.attention_factor != 1:
            accepted = replace(accepted, attention_factor=default_factor)
    if scaling != accepted:
        raise InputRefused(
            f"rope_scaling = 'yarn' with attention_factor = {scaling.attention_factor}, beta_fast = "
            f"{scaling.beta_fast}, beta_slow = {scaling.beta_slow}, truncate = {scaling.truncate}: llama.cpp "
            f"computes it with {default_factor:.4g}, 32, 1 and true{USE_HF}"
        )


def _warn_of_positions(config: LlamaConfig, warn: Callable[[str], None]) -> None:
    """Warn of rotary positions that llama.cpp computes a little differently."""
    scaling = config.rope_scaling
    if isinstance(scaling, YarnScaling) and not scaling.truncate:
        # This is not an error, because all published gpt-oss models have truncate = false, and llama.cpp's own
        # converter writes files of them without a warning.
        warn(
            "rope_scaling.truncate = false: llama.cpp rotates as with true, so its answers will differ a little"
        )
    if isinstance(scaling, LongScaling) and scaling.max_position_embeddings > scaling.longest:
        warn(
            f"rope_scaling = 'longrope': with a context above {scaling.longest} llama.cpp takes long_factor for all "
            f"texts; start it with -c {scaling.longest} for the numbers of this model"
        )


def _check_windows(config: LlamaConfig) -> None:
    """Refuse a model whose windows differ from those that llama.cpp computes: if other layers have a
    window, or if layers with a window have another rotary base.
    """
    window = config.sliding_window
    every = config.family.full_attention_every
    only_with = llama_cpp_support(config).layers_with_windows
    if only_with and (window is not None) != (config.num_hidden_layers == only_with):
        raise InputRefused(
            f"sliding_window = {window}: llama.cpp computes windows in a {config.model_type} if it has {only_with} "
            f"layers, and only then{USE_HF}"
        )
    if llama_cpp_support(config).windows_by_layer:
        if window is None:
            raise InputRefused(
                f"layer_types: llama.cpp loads a {config.model_type} only if some layer has a window{USE_HF}"
            )
        return
    if window is None:
        return
    if not every:
        if window < _context_length(config):
            raise InputRefused(
                f"sliding_window = {window} is below max_position_embeddings = {_context_length(config)}, and "
                f"llama.cpp computes no window for a {config.model_type}{USE_HF}"
            )
        return
    layers = range(config.num_hidden_layers)
    without_window = [layer for layer in layers if config.window(layer) is None]
    # The base of the rotary positions in layers with a window. Unlike the window itself, it matters even
    # if the window is longer than all texts.
    local_theta, _ = config.theta_and_scaling(local=True)
    llama_cpp_theta = llama_cpp_support(config).local_rope_theta or config.rope_theta
    without_window_in_llama_cpp = [*layers[every - 1 :: every]]
    if without_window != without_window_in_llama_cpp or local_theta != llama_cpp_theta:
        raise InputRefused(
            f"layer_types and rope_local_theta: llama.cpp computes a window and a base of {llama_cpp_theta:g} in all "
            f"layers of a {config.model_type} but each {every}th{USE_HF}"
        )


def _context_length(config: LlamaConfig) -> int:
    """Return the number of tokens of the longest text that a file says the model can compute.

    This may be more than this package computes, because llama.cpp uses LongRoPE's long_factor for longer
    texts, and lets queries grow in them (`LongScaling.longest`, `GrowingYarnScaling.longest`).
    """
    if isinstance(config.rope_scaling, LongScaling | GrowingYarnScaling):
        return config.rope_scaling.max_position_embeddings
    return config.max_position_embeddings


def _add_shape(gguf: ModuleType, writer: GGUFWriter, config: LlamaConfig) -> None:
    """Write a configuration's sizes and constants into a file's header."""
    writer.add_context_length(_context_length(config))
    writer.add_embedding_length(config.hidden_size)
    # To llama.cpp a head for multi-token prediction is the last block.
    mtp_layers = int(_writes_mtp(config))
    writer.add_block_count(config.num_hidden_layers + mtp_layers)
    if mtp_layers:
        writer.add_nextn_predict_layers(mtp_layers)
    mixers = [mixer_of(config, layer) for layer in range(config.num_hidden_layers)]
    if config.use_double_wide_mlp:
        layers = range(config.num_hidden_layers)
        widths = [config.of_layer(layer).intermediate_size for layer in layers]
        writer.add_feed_forward_length(widths)
    elif config.family.has_feed_forward:
        writer.add_feed_forward_length(config.intermediate_size)
    else:
        writer.add_feed_forward_length([mixer.inner_width(config) for mixer in mixers])
    writer.add_head_count(config.num_attention_heads)
    llama_cpp = llama_cpp_support(config)
    if llama_cpp.kv_heads_by_layer:
        writer.add_head_count_kv(
            [mixer.key_value_heads(config.of_layer(layer)) for layer, mixer in enumerate(mixers)]
        )
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    # Where layers have heads of several widths, these are for layers without a window, as the last one.
    of_layer = config.of_layer(config.num_hidden_layers - 1)
    writer.add_key_length(of_layer.head_dim)
    writer.add_value_length(of_layer.head_dim)
    writer.add_rope_dimension_count(of_layer.rotary_dim)
    writer.add_rope_freq_base(config.rope_theta)
    if llama_cpp.windows_by_layer:
        _add_windows_by_layer(writer, config)
    if llama_cpp.rotation_is_a_key:
        # Despite its name, llama.cpp reads in this key whether queries and keys are rotated.
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if llama_cpp.needs_layer_norm_eps:
        writer.add_layer_norm_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.num_kv_shared_layers:
        writer.add_shared_kv_layers(config.num_kv_shared_layers)
    if isinstance(config.rope_scaling, LinearScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    if isinstance(config.rope_scaling, YarnScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(config.rope_scaling.original_max_position_embeddings)
        if llama_cpp.reads_yarn_keys:
            writer.add_rope_scaling_yarn_beta_fast(config.rope_scaling.beta_fast)
            writer.add_rope_scaling_yarn_beta_slow(config.rope_scaling.beta_slow)
            # With 1 llama.cpp does not scale scores, as with the keys mscale = mscale_all_dim = 1 of a config.json.
            # With 0 it scales them by YaRN's default factor.
            writer.add_rope_scaling_yarn_log_mul(float(config.rope_scaling.attention_factor == 1))
    if isinstance(config.rope_scaling, GrowingYarnScaling):
        writer.add_attn_temperature_scale(config.rope_scaling.llama_4_scaling_beta)
    if isinstance(config.rope_scaling, LongScaling):
        writer.add_rope_scaling_orig_ctx_len(config.rope_scaling.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(config.rope_scaling.attention_factor)
    # llama.cpp does not load a gpt-oss without a window. So if the model has none, a window as long as the
    # longest text is written, which changes nothing.
    writes_window = config.sliding_window is not None or config.family.attention_sinks
    if config.family.full_attention_every and writes_window and not llama_cpp.windows_by_layer:
        writer.add_sliding_window(config.sliding_window or _context_length(config))
    for mixer in _mixers(config):
        mixer.add_llama_cpp_sizes(writer, config, llama_cpp.name)
    feed_forward_of_family(config).add_llama_cpp_sizes(writer, config)
    if "logits_scaling" in config.family.optional_keys:
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier or config.head_dim**-0.5)
        writer.add_logit_scale(config.logits_scaling)


def _add_windows_by_layer(writer: GGUFWriter, config: LlamaConfig) -> None:
    """Write which layers have a window, and what the heads of these layers are like."""
    layers = range(config.num_hidden_layers)
    writer.add_sliding_window_pattern([config.window(layer) is not None for layer in layers])
    assert config.sliding_window is not None  # `_check_windows` refuses a model without windows
    writer.add_sliding_window(config.sliding_window)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count_swa(config.rotary_dim)
    local_theta, _ = config.theta_and_scaling(local=True)
    writer.add_rope_freq_base_swa(local_theta)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    # Without this key llama.cpp takes a cap of 30, and 0 is none.
    writer.add_final_logit_softcapping(config.final_logit_softcapping or 0.0)


def _convert_by_mixer(
    name: str, like: Tensor, read: Callable[[], Tensor], config: LlamaConfig
) -> UnreadTensor | None:
    """Return a mixer's tensor as the mixer's class converts it (`Mixer.llama_cpp_tensor`).

    The result is None if the tensor is in no mixer, or if the class leaves it to `llama_cpp_tensors`.
    """
    for mixer in mixers_of_family(config):
        _, separator, name_in_layer = name.partition(f".{mixer.name}.")
        is_in_mixer = bool(separator)
        if is_in_mixer:
            return mixer.llama_cpp_tensor(name_in_layer, like, read, config)
    return None


def llama_cpp_tensors(
    parameters: Iterable[UnreadTensor], config: LlamaConfig
) -> Iterator[UnreadTensor]:
    """Yield a model's tensors with llama.cpp's names and its order of rows.

    Args:
        parameters: the model's parameters, in the order of the model.
        config: the model's configuration.
    """
    llama_cpp = llama_cpp_support(config)
    norm_names = NormNames(
        before_attention="attn_norm",
        after_attention="post_attention_norm",
        before_mlp=llama_cpp.norm_before_mlp,
        after_mlp="post_ffw_norm",
    )
    feed_forward = feed_forward_of_family(config)
    # llama.cpp's names of the norms in a block, by the family's names. A family lacks some norms.
    norm_name_by_own_name = {
        own_name: name
        for own_name, name in zip(config.family.norm_names, norm_names, strict=True)
        if own_name is not None
    }
    mtp_block = f"blk.{config.num_hidden_layers}"
    outer_names = {
        **_OUTER_NAMES,
        "model.norm": llama_cpp.final_norm,
        **{f"{MTP_PREFIX}{own}": f"{mtp_block}.nextn.{name}" for own, name in _MTP_NAMES.items()},
    }
    block_names = {**_BLOCK_NAMES, **feed_forward.llama_cpp_names, **norm_name_by_own_name}
    if llama_cpp.joined_layers:
        parameters = JoinedLayersRule(config).to_files(parameters)
    for name, like, read in parameters:
        if name.startswith(_MTP_LAYER):
            name = f"model.layers.{config.num_hidden_layers}.{name.removeprefix(_MTP_LAYER)}"
        # In the name model.layers.3.self_attn.q_proj.weight, the module is model.layers.3.self_attn.q_proj,
        # the suffix is weight, the layer is 3, and `inner`, the module's name in its block, is
        # self_attn.q_proj.
        module, _, suffix = name.rpartition(".")
        if suffix in ("sinks", "layer_scalar"):
            # These are named self_attn.sinks and layer_scalar, without ".weight". llama.cpp's names have it.
            module = name
            suffix = "weight"
        elif suffix == "per_expert_scale":
            # llama.cpp multiplies the outputs of the experts by it.
            module = name
            suffix = "scale"
        layer, _, inner = module.removeprefix("model.layers.").partition(".")
        converted = _convert_by_mixer(name, like, read, config)
        if converted is not None:
            yield converted._replace(name=f"blk.{layer}.{converted.name}")
            continue
        is_norm = like.ndim == 1 and suffix == "weight"
        if config.family.centred_norms and is_norm:
            # Such a norm multiplies by 1 + weight. llama.cpp multiplies by the number in the file.
            read = _read_and_change(read, lambda weight: 1 + weight)
        if module in outer_names:
            if module == "model.embed_tokens_per_layer":
                # llama.cpp wants as many rows as there are tokens.
                like = like[: config.vocab_size]
                read = _read_and_change(read, lambda table: table[: config.vocab_size])
            yield UnreadTensor(f"{outer_names[module]}.{suffix}", like, read)
            is_embedding = module == "model.embed_tokens"
            if is_embedding and config.tie_word_embeddings and llama_cpp.needs_output_head:
                yield UnreadTensor("output.weight", like, read)
            continue
        is_rotated = inner in ("self_attn.q_proj", "self_attn.k_proj")
        if is_rotated and llama_cpp.interleaved_rotary and not config.family.interleaved_rotary:
            read = _read_and_change(
                read,
                functools.partial(
                    interleave_rotary_pairs,
                    head_dim=config.head_dim,
                    rotary_dim=config.rotary_dim,
                ),
            )
        if block_names[inner] in feed_forward.llama_cpp_vectors:
            # llama.cpp reads this matrix of one row as a vector.
            like = like[0]
            read = _read_and_change(read, lambda weight: weight[0])
        yield UnreadTensor(f"blk.{layer}.{block_names[inner]}.{suffix}", like, read)


def _read_and_change(
    read: Callable[[], Tensor], change: Callable[[Tensor], Tensor]
) -> Callable[[], Tensor]:
    """Return a function that reads a tensor and then changes it."""
    return lambda: change(read())


def _choose_tensor_types(
    shapes: dict[str, torch.Size], dtype: str, config: LlamaConfig
) -> dict[str, str]:
    """Return gguf's name of each tensor's type.

    Args:
        shapes: the tensors' shapes by llama.cpp's names, in the order of the file.
        dtype: the file's dtype.
        config: the model's configuration.
    """
    fp32_endings = [end for kind in kinds_of_family(config) for end in kind.llama_cpp_fp32]
    # Matrices are stored in the file's dtype. Vectors, routers and convolutions are in fp32. A tensor
    # with only one row is a vector. The biases of experts have several rows, but are vectors, too.
    row_lengths = {
        name: shape[-1]
        for name, shape in shapes.items()
        if shape.numel() > shape[-1] and not name.endswith((".bias", *fp32_endings))
    }
    if dtype in K_QUANTS:
        matrix_types = choose_types(row_lengths, dtype, config)
    else:
        matrix_types = dict.fromkeys(row_lengths, DTYPES[dtype])
    if dtype == "q4_0":
        # llama.cpp's own quantizer stores the head as Q6_K, whose scales it searches for. Q8_0 loses less, and
        # its rounding is an equation that training can compute after each update. If the head is tied to the
        # embedding, both are one parameter.
        head_names = {"output.weight"}
        if config.tie_word_embeddings:
            head_names.add("token_embd.weight")
        matrix_types |= dict.fromkeys(head_names & row_lengths.keys(), "Q8_0")
    return dict.fromkeys(shapes, "F32") | matrix_types


def require_blocks(config: LlamaConfig, quantize: str) -> None:
    """Refuse to train a model with `block_formats` if no GGUF file can have its weights.

    Args:
        config: the model's shape.
        quantize: a key of `TRAINED_DTYPES`, or "none", which rounds nothing.

    Raises:
        InputRefused: there is no file of such a model in this dtype, or it has other blocks of 32 weights.
    """
    if quantize == "none":
        return
    said = f"train.quantize = {quantize} rounds weights to those of a GGUF file"
    try:
        _check_supported(config, TRAINED_DTYPES[quantize])
    except InputRefused as error:
        fault = str(error).removesuffix(USE_HF).removesuffix(_USE_F16)
        raise InputRefused(f"{said}, and there is none of this model: {fault}") from None
    for mixer in _mixers(config):
        if not mixer.keeps_blocks(config, weight_blocks.BLOCK):
            raise InputRefused(
                f"{said}, which would have other blocks of {weight_blocks.BLOCK} weights of this "
                f"{config.model_type}: leave it out"
            )


def block_formats(model: nn.Module, quantize: str) -> dict[str, str]:
    """Return the formats of `monograph.ops.weight_blocks` to which training rounds parameters, by name.

    They are the types that the parameters have in a file of the dtype `TRAINED_DTYPES[quantize]`.
    Parameters that the file has in fp32 are left out. The file then holds the same numbers as the model:
    its order of weights takes no weight to another block if `require_blocks` accepts the model.

    Args:
        model: a `Llama`, which may be on the meta device; any module for "none".
        quantize: a key of `TRAINED_DTYPES`, or "none", which rounds nothing.

    Raises:
        InputRefused: parts of a parameter have different types in the file.
        UsageError: `quantize` is another text.
    """
    if quantize == "none":
        return {}
    if quantize not in TRAINED_DTYPES:
        raise UsageError(
            f"quantize = {quantize!r}: expected {join_with_or(['none', *TRAINED_DTYPES])}"
        )
    assert isinstance(model, Llama)
    config = model.config
    # Which parameters a tensor of the file is made of is seen by reading it. Meta tensors have no numbers,
    # so this takes no time.
    names_read = list[str]()

    def unread(name: str, parameter: Tensor) -> UnreadTensor:
        like = torch.empty(parameter.shape, dtype=kept_dtype(parameter), device="meta")

        def read() -> Tensor:
            names_read.append(name)
            return like

        return UnreadTensor(name, like, read)

    parameters = [unread(name, parameter) for name, parameter in model.named_parameters()]
    tensors = [*llama_cpp_tensors(parameters, config)]
    shapes = {tensor.name: tensor.like.shape for tensor in tensors}
    types = _choose_tensor_types(shapes, TRAINED_DTYPES[quantize], config)
    types_of_parts: dict[str, set[str]] = {}
    for tensor in tensors:
        names_read.clear()
        tensor.read()
        for name in names_read:
            types_of_parts.setdefault(name, set()).add(types[tensor.name])
    formats = {}
    for name, part_types in types_of_parts.items():
        if len(part_types) > 1:
            raise InputRefused(
                f"train.quantize = {quantize}: parts of {name} have the types {join_with_or(sorted(part_types))} in a "
                "GGUF file: leave it out"
            )
        (block_format,) = part_types
        if block_format in weight_blocks.BLOCK_FORMATS:
            formats[name] = block_format
    return formats


def interleave_rotary_pairs(rows: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Reorder a projection's rows so that the two channels of a rotary pair are neighbours.

    In this package, they are at the same place in the two halves of a head's rotated channels.

    Args:
        rows: [heads * head_dim, ...], a weight or a bias.
        head_dim: number of rows of a head.
        rotary_dim: number of a head's rows that are rotated. These are its first ones.
    """
    heads = rows.unflatten(0, (-1, head_dim))
    rotated = heads[:, :rotary_dim].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([rotated, heads[:, rotary_dim:]], dim=1).flatten(0, 1)


def _rope_divisors(config: LlamaConfig) -> dict[str, Tensor]:
    """Return the numbers by which llama.cpp divides the rotary frequencies, as tensors [F] by its names.

    llama.cpp reads the scalings "llama3", "longrope" and "proportional" from such tensors. For other
    scalings, which it reads from the header, the result is {}.
    """
    scaling = config.rope_scaling
    if llama_cpp_support(config).windows_by_layer:
        # Such an architecture has the tensor in any case. Its numbers are for layers without a window.
        config = config.of_layer(config.num_hidden_layers - 1)
        divisors_F = torch.full((config.rotary_dim // 2,), _NOT_ROTATED)
        rotated_pairs = config.rotary_dim // 2
        factor = 1.0
        if isinstance(scaling, ProportionalScaling):
            rotated_pairs = scaling.rotated_pairs(config.rotary_dim)
            factor = scaling.factor
        divisors_F[:rotated_pairs] = factor
        return {"rope_freqs.weight": divisors_F}
    if isinstance(scaling, LongScaling):
        return {
            "rope_factors_long.weight": torch.tensor(scaling.long_factor),
            "rope_factors_short.weight": torch.tensor(scaling.short_factor),
        }
    if not isinstance(scaling, Llama3Scaling):
        return {}
    unscaled_config = replace(config, rope_scaling=None)
    cpu = torch.device("cpu")
    unscaled_F = inverse_frequencies(unscaled_config, torch.float64, cpu)
    scaled_F = inverse_frequencies(config, torch.float64, cpu)
    return {"rope_freqs.weight": (unscaled_F / scaled_F).float()}


def write_gguf_file(
    gguf: ModuleType, writer: GGUFWriter, tensors: Sequence[UnreadTensor], types: dict[str, str]
) -> None:
    """Write a file's header and tensors, and close the file.

    Args:
        gguf: the package.
        writer: the file's writer. It has all keys of the header, and no tensors yet.
        tensors: the tensors.
        types: gguf's name of each tensor's type, by the tensor's name.
    """
    for name, like, _ in tensors:
        tensor_type = gguf.GGMLQuantizationType[types[name]]
        block_weights, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
        tensor_bytes = like.numel() // block_weights * block_bytes
        no_dtype: Any = None  # numpy's dtype; `raw_dtype` says all that is needed
        writer.add_tensor_info(name, like.shape, no_dtype, tensor_bytes, raw_dtype=tensor_type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        (file,) = writer.fout
        writer.write_padding(file, file.tell())
        for name, _, read in tensors:
            # The bytes are written here and not by the package, because it calls numpy's tofile, whose
            # error does not say that the disk is full.
            encoded = _encode(gguf, name, read(), types[name])
            written_bytes = file.write(memoryview(encoded).cast("B"))
            writer.write_padding(file, written_bytes)
    finally:
        writer.close()


def _encode(gguf: ModuleType, name: str, weight: Tensor, tensor_type: str) -> Any:
    """Return the bytes of a tensor in the file, as a contiguous array.

    Raises:
        InputRefused: a weight, or the scale of a block, is too large for the type.
    """
    cast_dtype = _CAST_DTYPES.get(tensor_type, torch.float32)
    cast_weight = weight.to("cpu", cast_dtype).contiguous()
    if weight.ndim == 1:
        return cast_weight.numpy()
    largest_weight = float(torch.stack(weight.aminmax()).abs().max())
    # Quantised types, whose names begin with Q, store scales in float16. Types that are not quantised store
    # the weights themselves.
    largest_stored = largest_weight / _SCALE_DIVISORS.get(tensor_type, 1)
    stored_dtype = torch.float16 if tensor_type.startswith("Q") else cast_dtype
    fits = largest_stored <= torch.finfo(stored_dtype).max  # False for a NaN
    if not fits:
        raise InputRefused(
            f"{name}: a weight of {largest_weight:.3g} does not fit {tensor_type.lower()}: use --dtype f32 or bf16"
        )
    if tensor_type == "BF16":
        return cast_weight.view(torch.uint16).numpy()
    if tensor_type.endswith("_K"):
        return quantize(cast_weight.numpy(), tensor_type)
    # The reciprocal of a scale overflows if all weights of its block are tiny. The scale is then stored as 0.
    with np.errstate(all="ignore"):
        return gguf.quantize(cast_weight.numpy(), gguf.GGMLQuantizationType[tensor_type])
