"""A model as a GGUF file, which llama.cpp and Ollama run: configuration, tokenizer and weights in one file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, written with the package `gguf` (an extra). What is
said of llama.cpp here was read in its src/models/ and tried on it (tests/laws/test_exported_is_original.py).

Shape suffixes: V vocabulary, D hidden size, F = head dimension / 2 frequencies, R rows, C columns of a matrix.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from monograph.errors import InputRefused, UsageError
from monograph.graph.merging import Plain, plain_parameters
from monograph.graph.windows import kept_dtype
from monograph.model.config import Llama3Scaling, LlamaConfig
from monograph.model.files import new_folder
from monograph.model.gguf_words import add_words
from monograph.model.llama import Llama
from monograph.model.modelfile import modelfile
from monograph.model.rope import inverse_frequencies
from monograph.model.scaling import LinearScaling
from monograph.text.tokenizer import Tokenizer

FILE = "model.gguf"
BLOCK = 32  # weights that share one scale in Q8_0
# What weights are stored as, by the name on the command line: the type's name in the package, the dtype before it.
DTYPES = {
    "f32": ("F32", torch.float32),
    "f16": ("F16", torch.float16),
    "bf16": ("BF16", torch.bfloat16),
    "q8_0": ("Q8_0", torch.float32),
}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # llama.h, llama_ftype
_OWN = {torch.float64: "f32", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}

# A Mistral is llama.cpp's "llama" too. Its rotary pairs are neighbours, here they are halves of a head.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def save_gguf(
    model: Llama, folder: str | Path, tokenizer: Tokenizer, dtype: str | None, warn: Callable[[str], None]
) -> None:
    """Write a folder with model.gguf and a Modelfile for `ollama create`, whole or not at all.

    Matrices are stored as `dtype`, vectors (norms, biases) as f32, as llama.cpp wants them. q8_0 holds 32 neighbours w
    of a row as a float16 scale d and whole numbers q with w = d q and d = max|w| / 127, so no weight is off by more
    than d / 2 and the rounding of d. Beside the model, one tensor at a time is in memory.

    Args:
        model: its weights may be on any device, and lie in a file still; adapters are merged.
        folder: to be created; may exist if it is empty.
        tokenizer: of the model; goes into the file with its chat template.
        dtype: a name in `DTYPES`; None: the weights' own (f32 for float64).
        warn: called with each line that a person should read about what llama.cpp will do differently.

    Raises:
        UsageError: the package is not installed.
        InputRefused: what llama.cpp does not compute or would read wrongly (a window, a split pattern that it has not,
            more stop tokens than it knows), weights that do not fit the dtype, or a folder that cannot be written.
        DiskFull: no space left; nothing of this export remains.
    """
    name = dtype or _OWN[kept_dtype(model.model.embed_tokens.weight)]
    gguf, config = package(), model.config
    _check(config, name)
    kind = getattr(gguf.GGMLQuantizationType, DTYPES[name][0])
    with new_folder(Path(folder)) as new:
        writer = gguf.GGUFWriter(new / FILE, _ARCHITECTURES[config.model_type])
        _add_shape(gguf, writer, config)
        writer.add_file_type(_FILE_TYPES[kind.name])
        if kind.name == "Q8_0":
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        stops = add_words(writer, tokenizer, config, warn)
        for tensor, like, _ in _tensors(model):
            stored = kind if like.ndim == 2 else gguf.GGMLQuantizationType.F32
            per_block, block_bytes = gguf.GGML_QUANT_SIZES[stored]
            writer.add_tensor_info(tensor, like.shape, None, like.numel() // per_block * block_bytes, raw_dtype=stored)
        try:
            _write(gguf, writer, model, name)
        finally:
            writer.close()
        (new / "Modelfile").write_text(modelfile(FILE, tokenizer, stops), encoding="utf-8")


def package() -> Any:
    """The package `gguf`; raises UsageError where it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError:
        raise UsageError("--format gguf needs the package gguf: pip install 'monograph[gguf]'") from None


def _check(config: LlamaConfig, dtype: str) -> None:
    """Refuse what llama.cpp would leave out without a word."""
    family, positions = config.model_type, config.max_position_embeddings
    instead = "; export it with --format hf"
    if config.sliding_window is not None and config.sliding_window < positions:
        raise InputRefused(
            f"sliding_window = {config.sliding_window} is below max_position_embeddings = {positions}, and llama.cpp "
            f"computes no window for a {family}{instead}"
        )
    if isinstance(config.rope_scaling, Llama3Scaling) and _ARCHITECTURES[family] != "llama":
        raise InputRefused(f"rope_scaling = 'llama3' is not computed by llama.cpp for a {family}{instead}")
    if config.attention_bias and family == "qwen3":
        raise InputRefused(f"attention_bias = true is not computed by llama.cpp for a {family}{instead}")
    if dtype == "q8_0":
        widths = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
        widths["num_attention_heads * head_dim"] = config.num_attention_heads * config.head_dim
        for key, width in widths.items():
            if width % BLOCK:
                raise InputRefused(f"{key} = {width} is not a multiple of {BLOCK}, the block of q8_0: use --dtype f16")


def _add_shape(gguf: Any, writer: Any, config: LlamaConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if isinstance(config.rope_scaling, LinearScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)


def _tensors(model: Llama) -> Iterator[Plain]:
    """Every tensor once, by llama.cpp's name, in the order of the file; not converted yet."""
    config = model.config
    if isinstance(config.rope_scaling, Llama3Scaling):
        divisors = _rope_divisors(config)
        yield Plain("rope_freqs.weight", divisors, lambda: divisors)
    for name, like, read in plain_parameters(model):
        module, _, suffix = name.rpartition(".")
        if module in _OUTER:
            yield Plain(f"{_OUTER[module]}.{suffix}", like, read)
            continue
        layer, _, inner = module.removeprefix("model.layers.").partition(".")
        if inner in ("self_attn.q_proj", "self_attn.k_proj") and _ARCHITECTURES[config.model_type] == "llama":
            read = functools.partial(_turned, read, config.head_dim)
        yield Plain(f"blk.{layer}.{_INNER[inner]}.{suffix}", like, read)


def _turned(read: Callable[[], Tensor], head_dim: int) -> Tensor:
    return neighbouring(read(), head_dim)


def neighbouring(rows: Tensor, head_dim: int) -> Tensor:
    """The rows of a projection to heads, so ordered that rotary pairs are neighbours instead of halves of the head.

    Args:
        rows: [heads * head_dim, ...], a weight or a bias.
        head_dim: rows of a head.
    """
    halves = rows.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).reshape(rows.shape)


def _rope_divisors(config: LlamaConfig) -> Tensor:
    """What llama.cpp divides each rotary frequency by, [F]: it knows Llama 3's stretching as its result only."""
    unscaled = LlamaConfig.from_hf(config.to_hf() | {"rope_scaling": None})
    plain_F, scaled_F = (inverse_frequencies(each, torch.float64, torch.device("cpu")) for each in (unscaled, config))
    return (plain_F / scaled_F).float()


def _write(gguf: Any, writer: Any, model: Llama, dtype: str) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    for name, _, read in _tensors(model):
        # Not the package's own way, numpy's tofile, which hides why it cannot write: a full disk must be told apart.
        writer.write_padding(file, file.write(memoryview(_stored(gguf, name, read(), dtype)).cast("B")))


def _stored(gguf: Any, name: str, weight: Tensor, dtype: str) -> Any:
    """The bytes of a tensor as a contiguous array."""
    if weight.ndim != 2:
        return weight.float().cpu().contiguous().numpy()
    weight_RC, (kind, before) = weight, DTYPES[dtype]
    cast_RC = weight_RC.to("cpu", before).contiguous()
    # Q8_0's scales are float16, too.
    largest = float(torch.stack(weight_RC.aminmax()).abs().max()) / (127 if kind == "Q8_0" else 1)
    if not largest <= torch.finfo(torch.float16 if kind == "Q8_0" else before).max:
        raise InputRefused(f"{name}: a weight of {largest:.3g} does not fit {dtype}: use --dtype f32 or bf16")
    if kind == "BF16":
        return cast_RC.view(torch.uint16).numpy()
    return gguf.quantize(cast_RC.numpy(), getattr(gguf.GGMLQuantizationType, kind))
