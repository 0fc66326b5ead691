"""Write a model as a GGUF file for llama.cpp and Ollama: configuration, tokenizer and weights in
one file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, written with the package `gguf`
(an extra). Comments on llama.cpp come from its src/models/ and are tested on it
(tests/laws/test_exported_is_original.py).

Shape suffixes: V vocabulary, D hidden size, F = head dimension / 2 frequencies, R rows, C columns
of a matrix.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from monograph.errors import InputRefused, UsageError
from monograph.extras import command_for
from monograph.graph.lora import Plain, plain_parameters
from monograph.graph.mmap_weights import kept_dtype
from monograph.model import gguf_layers, sampling_defaults
from monograph.model.config import LlamaConfig
from monograph.model.families import LlamaCpp, Norms
from monograph.model.files import new_folder, write_no_extras
from monograph.model.gguf_blocks import MIXTURES, choose_types, quantize
from monograph.model.gguf_words import add_tokenizer, modelfile
from monograph.model.layouts import JoinedRule
from monograph.model.llama import Llama
from monograph.model.rope import inverse_frequencies
from monograph.model.scaling import LINEAR, LinearScaling, Llama3Scaling, LongScaling, YarnScaling
from monograph.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

FILE = "model.gguf"
BLOCK = 32  # weights that share one scale in Q8_0
# gguf's name of the type of most matrices, by the name on the command line.
DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"} | MIXTURES
# llama_ftype.
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18, "bf16": 32}
# The dtype before conversion to a type, if not fp32.
_BEFORE = {"F16": torch.float16, "BF16": torch.bfloat16}
_OWN = {torch.float64: "f32", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}

_EVERY = 4  # It rotates all layers of a SmolLM3 but each fourth one.
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    **gguf_layers.EXPERT_NAMES,
}
_NORMS = Norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")  # mostly


def save_gguf(
    model: Llama,
    folder: str | Path,
    tokenizer: Tokenizer,
    dtype: str | None,
    warn: Callable[[str], None],
    write_extras: Callable[[Path], None] = write_no_extras,
) -> None:
    """Write a folder with model.gguf and a Modelfile for `ollama create`, whole or not at all.

    Matrices are stored as `dtype`, vectors (norms, biases) as f32, as llama.cpp requires, and
    routers as its own converter does. q8_0 stores 32 neighbours w of a row as a float16 scale d and
    integers q with w = d q and
    d = max|w| / 127, so that no weight is off by more than d / 2 and the rounding of d. In q4_k_m, q5_k_m and q6_k each
    matrix has the type and the bytes (`gguf_blocks`) that llama.cpp's own quantizer writes. Besides
    the model, one tensor at a time is in memory.

    Args:
        model: its weights may be on any device or in a mapped file; adapters are merged.
        folder: the folder to create; it may exist if it is empty.
        tokenizer: the model's; it is written into the file with its chat template.
        dtype: a name in `DTYPES`; None: the weights' own (f32 for float64).
        warn: called with each line that the user should read about what llama.cpp will do
            differently.
        write_extras: called with the temporary folder, to write further files before the folder gets
            its name.

    Raises:
        UsageError: the package is not installed.
        InputRefused: a feature that llama.cpp lacks or would read wrongly (a window, an unknown
            split pattern, too many stop tokens), weights that do not fit the dtype, or a folder
            that cannot be written.
        DiskFull: no space left; nothing of this export remains.
    """
    name = dtype or _OWN[kept_dtype(model.model.embed_tokens.weight)]
    gguf = import_gguf()
    config = model.config
    _check(config, name)
    _warn_of_positions(config, warn)
    tensors = [*named(plain_parameters(model), config)]
    tensors[:0] = [
        Plain(name, divisors, divisors.clone) for name, divisors in _rope_divisors(config).items()
    ]
    shapes = {tensor.name: tensor.like.shape for tensor in tensors}
    kinds = _kinds(shapes, name, config)
    with new_folder(Path(folder)) as new:
        writer = gguf.GGUFWriter(new / FILE, reader_of(config).name)
        _add_shape(gguf, writer, config)
        writer.add_file_type(_FILE_TYPES[name])
        if name.startswith("q"):
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        sampling_defaults.add_to_gguf(writer, model.sampling, _context(config))
        stops = add_tokenizer(writer, tokenizer, config, warn)
        write_tensors(gguf, writer, tensors, kinds)
        lines = [
            modelfile(FILE, tokenizer, stops),
            *sampling_defaults.modelfile_lines(model.sampling),
        ]
        (new / "Modelfile").write_text(
            "".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8"
        )
        write_extras(new)


def reader_of(config: LlamaConfig) -> LlamaCpp:
    """Return how llama.cpp reads a model's family.

    Raises:
        InputRefused: it does not know the family.
    """
    if config.family.llama_cpp is None:
        raise InputRefused(
            f"model_type = {config.model_type!r}: llama.cpp knows no such family; export it with --format hf"
        )
    return config.family.llama_cpp


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


def _check(config: LlamaConfig, dtype: str) -> None:
    """Refuse features that llama.cpp would silently ignore."""
    family = config.model_type
    its = reader_of(config)
    instead = "; export it with --format hf"
    _check_windows(config, instead)
    if config.family.others == LINEAR:
        gguf_layers.check_delta_nets(config, instead)
    layers = range(config.num_hidden_layers)
    unrotated = [layer for layer in layers if not config.rotates(layer)]
    if "no_rope_layers" in config.family.keys and unrotated != [*layers[_EVERY - 1 :: _EVERY]]:
        raise InputRefused(
            f"no_rope_layers: llama.cpp rotates all layers of a {family} but each {_EVERY}th{instead}"
        )
    if isinstance(config.rope_scaling, Llama3Scaling) and not its.has_divisors:
        raise InputRefused(
            f"rope_scaling = 'llama3' is not computed by llama.cpp for a {family}{instead}"
        )
    heads, width = config.num_attention_heads, config.head_dim
    if its.whole_heads and heads * width != config.hidden_size:
        raise InputRefused(
            f"head_dim = {width} and num_attention_heads = {heads}: llama.cpp loads a {family} only if their product "
            f"is hidden_size = {config.hidden_size}{instead}"
        )
    _check_scores(config, instead)
    gguf_layers.check_experts(config, its.divides, instead)
    if config.attention_bias and not its.biases:
        raise InputRefused(
            f"attention_bias = true is not computed by llama.cpp for a {family}{instead}"
        )
    if dtype.startswith("q"):
        inner = config.family.experts or "intermediate_size"
        widths = {
            key: getattr(config, key)
            for key in ("hidden_size", inner, "shared_expert_intermediate_size")
        }
        widths["num_attention_heads * head_dim"] = config.num_attention_heads * config.head_dim
        if config.family.others == LINEAR:
            values = config.linear_num_value_heads * config.linear_value_head_dim
            widths["linear_num_value_heads * linear_value_head_dim"] = values
        for key, width in widths.items():
            if width % BLOCK:
                raise InputRefused(
                    f"{key} = {width} is not a multiple of {BLOCK}, a block of {dtype}: use --dtype f16"
                )


def _check_scores(config: LlamaConfig, instead: str) -> None:
    if config.query_pre_attn_scalar:
        raise InputRefused(
            f"query_pre_attn_scalar = {config.query_pre_attn_scalar} is not head_dim = {config.head_dim}, as llama.cpp "
            f"takes it to be{instead}"
        )
    scaling = config.rope_scaling
    if isinstance(scaling, YarnScaling):
        usual = scaling.default_attention_factor(scaling.factor)
        truncates = scaling.truncate or not config.family.sinks  # see `_warn_of_positions`
        if (
            replace(
                scaling, attention_factor=usual, beta_fast=32.0, beta_slow=1.0, truncate=truncates
            )
            != scaling
        ):
            raise InputRefused(
                f"rope_scaling = 'yarn' with attention_factor = {scaling.attention_factor}, beta_fast = "
                f"{scaling.beta_fast}, beta_slow = {scaling.beta_slow}, truncate = {scaling.truncate}: llama.cpp "
                f"computes it with {usual:.4g}, 32, 1 and true{instead}"
            )


def _warn_of_positions(config: LlamaConfig, warn: Callable[[str], None]) -> None:
    scaling = config.rope_scaling
    if isinstance(scaling, YarnScaling) and not scaling.truncate:
        # All published gpt-oss are like that, and llama.cpp's own converter does not say it.
        warn(
            "rope_scaling.truncate = false: llama.cpp rotates as with true, so its answers will differ a little"
        )
    if isinstance(scaling, LongScaling) and scaling.max_position_embeddings > scaling.longest:
        warn(
            f"rope_scaling = 'longrope': with a context above {scaling.longest} llama.cpp takes long_factor for all "
            f"texts; start it with -c {scaling.longest} for the numbers of this model"
        )


def _check_windows(config: LlamaConfig, instead: str) -> None:
    window = config.sliding_window
    every = config.family.full_every
    layers = range(config.num_hidden_layers)
    if window is None:
        return
    if not every and window < _context(config):
        raise InputRefused(
            f"sliding_window = {window} is below max_position_embeddings = {_context(config)}, and "
            f"llama.cpp computes no window for a {config.model_type}{instead}"
        )
    # However long the window is, layers with one have a base of their own.
    base = reader_of(config).local_base or config.rope_theta
    whole = [layer for layer in layers if config.window(layer) is None]
    if every and (whole != [*layers[every - 1 :: every]] or config.rope(local=True)[0] != base):
        raise InputRefused(
            f"layer_types and rope_local_theta: llama.cpp computes a window and a base of {base:g} in all layers of a "
            f"{config.model_type} but each {every}th{instead}"
        )


def _context(config: LlamaConfig) -> int:
    """Return the length of the longest text that llama.cpp shall compute, which may be too long
    here.
    """
    return getattr(config.rope_scaling, "max_position_embeddings", config.max_position_embeddings)


def _add_shape(gguf: ModuleType, writer: GGUFWriter, config: LlamaConfig) -> None:
    writer.add_context_length(_context(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if isinstance(config.rope_scaling, LinearScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    if isinstance(config.rope_scaling, YarnScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(config.rope_scaling.original_max_position_embeddings)
    if isinstance(config.rope_scaling, LongScaling):
        writer.add_rope_scaling_orig_ctx_len(config.rope_scaling.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(config.rope_scaling.attention_factor)
    if config.family.full_every and (config.sliding_window is not None or config.family.sinks):
        # A gpt-oss must have one.
        writer.add_sliding_window(config.sliding_window or _context(config))
    if config.family.others == LINEAR:
        gguf_layers.add_delta_net_sizes(writer, config, reader_of(config).name)
    if config.family.experts:
        gguf_layers.add_expert_sizes(writer, config)
    if "logits_scaling" in config.family.keys:
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier or config.head_dim**-0.5)
        writer.add_logit_scale(config.logits_scaling)


def named(parameters: Iterable[Plain], config: LlamaConfig) -> Iterator[Plain]:
    """Yield a model's tensors with llama.cpp's names and its order of rows, in the order of the
    file.
    """
    its = reader_of(config)
    norms = _NORMS._replace(before_mlp=its.mlp_norm)
    inner_names = _INNER | {
        own: name for own, name in zip(config.family.norms, norms, strict=True) if own
    }
    for name, like, read in JoinedRule(config).written(parameters):
        module, _, suffix = name.rpartition(".")
        if suffix == "sinks":
            module = name
            suffix = "weight"
        layer, _, inner = module.removeprefix("model.layers.").partition(".")
        if inner.startswith("linear_attn"):
            changed = gguf_layers.convert_delta_net(
                name.partition("linear_attn.")[2], like, read, config
            )
            yield changed._replace(name=f"blk.{layer}.{changed.name}")
            continue
        if config.family.centred and like.ndim == 1 and suffix == "weight":
            read = _then(read, lambda weight: 1 + weight)
        if module in _OUTER:
            yield Plain(f"{_OUTER[module]}.{suffix}", like, read)
            if config.tie_word_embeddings and "embed" in module and its.own_head:
                yield Plain("output.weight", like, read)
            continue
        if inner in ("self_attn.q_proj", "self_attn.k_proj") and its.neighbouring:
            read = _then(read, functools.partial(neighbouring, head_dim=config.head_dim))
        if inner_names[inner] == gguf_layers.SHARED_GATE:  # one row there
            like = like[0]
            read = _then(read, lambda weight: weight[0])
        yield Plain(f"blk.{layer}.{inner_names[inner]}.{suffix}", like, read)


def _kinds(shapes: dict[str, torch.Size], dtype: str, config: LlamaConfig) -> dict[str, str]:
    """Return gguf's name of each tensor's type, by llama.cpp's name of the tensor."""
    columns = {name: shape[-1] for name, shape in shapes.items() if _is_matrix(name, shape)}
    matrices = (
        choose_types(columns, dtype, config)
        if dtype in MIXTURES
        else dict.fromkeys(columns, DTYPES[dtype])
    )
    return dict.fromkeys(shapes, "F32") | matrices


def _is_matrix(name: str, shape: torch.Size) -> bool:
    """Return whether llama.cpp reads a tensor in the file's dtype, by its name there; not biases, a
    router or a row.
    """
    kept = ("ssm_conv1d.weight", f"{gguf_layers.ROUTER}.weight", ".bias")
    return shape.numel() > shape[-1] and not name.endswith(kept)


def _then(read: Callable[[], Tensor], change: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    return lambda: change(read())


def neighbouring(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder a projection's rows so that the channels of a rotary pair are neighbours instead of
    halves of a head.

    Args:
        rows: [heads * head_dim, ...], a weight or a bias.
        head_dim: number of rows of a head.
    """
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(rows.shape)


def _rope_divisors(config: LlamaConfig) -> dict[str, Tensor]:
    """Return the divisors of the rotary frequencies, [F] each, the form in which llama.cpp reads
    some scalings.
    """
    scaling = config.rope_scaling
    if isinstance(scaling, LongScaling):
        factors = {"long": scaling.long_factor, "short": scaling.short_factor}
        return {f"rope_factors_{name}.weight": torch.tensor(each) for name, each in factors.items()}
    if not isinstance(scaling, Llama3Scaling):
        return {}
    unscaled = LlamaConfig.from_hf(config.to_hf() | {"rope_scaling": None})
    plain_F, scaled_F = (
        inverse_frequencies(c, torch.float64, torch.device("cpu")) for c in (unscaled, config)
    )
    return {"rope_freqs.weight": (plain_F / scaled_F).float()}


def write_tensors(
    gguf: ModuleType, writer: GGUFWriter, tensors: Sequence[Plain], kinds: dict[str, str]
) -> None:
    """Write a file's header and these tensors, each as the kind of its name, and close it."""
    for name, like, _ in tensors:
        stored = gguf.GGMLQuantizationType[kinds[name]]
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[stored]
        size = like.numel() // per_block * block_bytes
        writer.add_tensor_info(name, like.shape, None, size, raw_dtype=stored)  # type: ignore[arg-type]  # no dtype of numpy's
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        (file,) = writer.fout
        writer.write_padding(file, file.tell())
        for name, _, read in tensors:
            # Not by numpy's tofile as in the package, whose error does not say that the disk is
            # full.
            writer.write_padding(
                file, file.write(memoryview(_stored(gguf, name, read(), kinds[name])).cast("B"))
            )
    finally:
        writer.close()


def _stored(gguf: ModuleType, name: str, weight: Tensor, kind: str) -> Any:
    """Return the bytes of a tensor as a contiguous array."""
    before = _BEFORE.get(kind, torch.float32)
    cast = weight.to("cpu", before).contiguous()
    if weight.ndim == 1:
        return cast.numpy()
    # The scales of integers are float16; Q8_0's is max|w| / 127, those of others may be as large as a weight.
    largest = float(torch.stack(weight.aminmax()).abs().max()) / (127 if kind == "Q8_0" else 1)
    if not largest <= torch.finfo(torch.float16 if kind.startswith("Q") else before).max:
        raise InputRefused(
            f"{name}: a weight of {largest:.3g} does not fit {kind.lower()}: use --dtype f32 or bf16"
        )
    if kind == "BF16":
        return cast.view(torch.uint16).numpy()
    if kind.endswith("_K"):
        return quantize(cast.numpy(), kind)
    return gguf.quantize(cast.numpy(), gguf.GGMLQuantizationType[kind])
