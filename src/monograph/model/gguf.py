"""Write a model as a GGUF file for llama.cpp and Ollama: configuration, tokenizer and weights in one file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, written with the package `gguf` (an extra). Comments
on llama.cpp come from its src/models/ and are tested on it (tests/laws/test_exported_is_original.py).

llama.cpp does not read a tokenizer's split pattern but has its own list of them, by name. A wrong name loads silently
and tokenises differently, so a name is written only for patterns whose tokens were compared on ten thousand strings
(the same test). For a SentencePiece-style tokenizer it reads a score per token instead of merges, which is equivalent
if every way to join two tokens into a third is a merge, as in published files.

Shape suffixes: V vocabulary, D hidden size, F = head dimension / 2 frequencies, R rows, C columns of a matrix.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from monograph.errors import InputRefused, UsageError
from monograph.graph.lora import Plain, plain_parameters
from monograph.graph.mmap_weights import kept_dtype
from monograph.model.config import LlamaConfig
from monograph.model.families import LinearScaling, Llama3Scaling
from monograph.model.files import new_folder
from monograph.model.llama import Llama
from monograph.model.modelfile import modelfile
from monograph.model.rope import inverse_frequencies
from monograph.text.chat import end_of_turn, stop_ids
from monograph.text.tokenizer import Tokenizer
from monograph.text.tokenizer_file import KNOWN_PATTERNS

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # llama.h, llama_token_type

# llama.cpp's name by (split pattern, whether a word that is a token is taken before any merge). Qwen's tokenizer also
# normalises text (NFC), which llama.cpp leaves to the caller.
_SPLITS = {
    ("qwen2", False): "qwen2",
    ("qwen3.5", False): "qwen35",
    ("llama3", True): "llama-bpe",
    ("llama3", False): "smaug-bpe",
}
# Texts of tokens at which llama.cpp always stops (src/llama-vocab.cpp).
_ALWAYS_STOP = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "</s>", "<|end_of_text|>")
)


def add_words(writer: Any, tokenizer: Tokenizer, config: LlamaConfig, warn: Callable[[str], None]) -> tuple[int, ...]:
    """Add a tokenizer to a file that is being written.

    Args:
        writer: a GGUFWriter.
        tokenizer: the tokenizer, with its chat template if it has one.
        config: the model's; rows without a token are named as unused, and its own end-of-text ids are kept.
        warn: called with each line that the user should read.

    Returns:
        The ids that end a text.

    Raises:
        InputRefused: a split pattern or a set of stop tokens that llama.cpp lacks, or a tokenizer that changes
            text in a way that llama.cpp does not.
    """
    content = json.loads(tokenizer.to_json())
    if notes := tokenizer.notes:
        raise InputRefused(f"{notes[0]}; llama.cpp would read other tokens without a word: export with --format hf")
    tokens, types = _tokens(content, config.vocab_size)
    if content["decoder"]["type"] == "ByteLevel":
        pre = pre_tokenizer(content)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        # llama.cpp needs at least one merge; no word contains these two tokens, so this one never applies.
        merges = content["model"]["merges"] or [[tokens[tokenizer.bos_id], tokens[tokenizer.eos_id]]]
        writer.add_token_merges([" ".join(pair) for pair in merges])
    else:
        scores = _scores(content, tokens)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(tokenizer.space_first)
        unknown = content["model"]["unk_token"]
        for row, token in enumerate(tokens):
            if types[row] == _NORMAL and len(tokenizer.pieces[row]) == 1 and len(token) == 6:  # such as <0x0A>
                types[row] = _BYTE
            elif token == unknown:
                types[row] = _UNKNOWN
        if unknown:
            writer.add_unk_token_id(tokens.index(unknown))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    if tokenizer.pad_id != tokenizer.eos_id:
        writer.add_pad_token_id(tokenizer.pad_id)
    writer.add_add_bos_token(_begins_with_bos(tokenizer, content, tokens[tokenizer.bos_id], warn))
    stops = stop_ids(tokenizer, config.ends)
    _add_stops(writer, tokenizer, stops, tokens, warn)
    if template := tokenizer.config.template:
        writer.add_chat_template(template.source)
    if "NFC" in json.dumps(content["normalizer"]):
        warn("the tokenizer composes characters (NFC) and llama.cpp does not: give it composed text, as most text is")
    return stops


def pre_tokenizer(content: dict[str, Any]) -> str:
    """Return llama.cpp's name of the split pattern of a verified tokenizer.json.

    Raises:
        InputRefused: llama.cpp has no name for it, or only one that tokenises differently.
    """
    part, whole_words = content["pre_tokenizer"], content["model"]["ignore_merges"]
    steps = part["pretokenizers"] if part["type"] == "Sequence" else [part]
    if [step["type"] for step in steps] == ["ByteLevel"] and steps[0].get("use_regex", True) and not whole_words:
        return "gpt-2"
    if [step["type"] for step in steps] == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        name = next(name for name, pattern in KNOWN_PATTERNS.items() if steps[0]["pattern"] == {"Regex": pattern})
        if known := _SPLITS.get((name, whole_words)):
            return known
    shown = ", ".join(step["type"] for step in steps)
    raise InputRefused(
        f"the tokenizer's way of splitting text ({shown}{', ignore_merges' * whole_words}) is not known to be one of "
        "llama.cpp's, which would then read other tokens without a word; export with --format hf"
    )


def _scores(content: dict[str, Any], tokens: list[str]) -> list[float]:
    """Return each token's score, minus the rank of its merge; llama.cpp joins the pair with the highest score first.

    Raises:
        InputRefused: llama.cpp would join other tokens, or in another order, or put spaces elsewhere.
    """
    instead = "; llama.cpp would read other tokens without a word: export with --format hf"
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    rank_of: dict[str, int] = {}
    last = ""
    for rank, (left, right) in enumerate(merges):
        if left + right != last and left + right in rank_of:
            raise InputRefused(f"the merges of token {left + right!r} do not follow one another{instead}")
        rank_of.setdefault(last := left + right, rank)
    known = {tuple(pair) for pair in merges}
    for token in tokens:
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair[0] in vocab and pair[1] in vocab and token in vocab and pair not in known:
                raise InputRefused(f"{pair[0]!r} and {pair[1]!r} are tokens, as their join is, but no merge{instead}")
    steps = content["pre_tokenizer"]["pretokenizers"] if content["pre_tokenizer"] else []
    if [step for step in steps if step["type"] != "Split"]:
        raise InputRefused(f"the tokenizer splits text before it joins ({steps[0]['type']}){instead}")
    for token in content["added_tokens"]:
        if token["special"] and (token["normalized"] or token["lstrip"] or token["rstrip"]):
            raise InputRefused(f"the spaces next to the special token {token['content']!r} are not text{instead}")
    return [-float(rank_of.get(token, len(merges))) for token in tokens]


def _tokens(content: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Return the texts and the types of the tokens of all rows."""
    text_of = {index: text for text, index in content["model"]["vocab"].items()}
    kind_of = dict.fromkeys(text_of, _NORMAL)
    for token in content["added_tokens"]:
        text_of[token["id"]] = token["content"]
        kind_of[token["id"]] = _CONTROL if token["special"] else _USER_DEFINED
    tokens = [text_of.get(row, f"[UNUSED{row}]") for row in range(rows)]
    return tokens, [kind_of.get(row, _UNUSED) for row in range(rows)]


def _begins_with_bos(tokenizer: Tokenizer, content: dict[str, Any], bos: str, warn: Callable[[str], None]) -> bool:
    """Return whether llama.cpp shall put the beginning-of-text token before texts; a chat template, if any, decides."""
    part = content["post_processor"] or {}
    steps = part.get("processors", [part])
    added = any(step.get("single", [{}])[:1] == [{"SpecialToken": {"id": bos, "type_id": 0}}] for step in steps)
    if tokenizer.config.template is None:
        return added
    written = tokenizer.config.template.render([{"role": "user", "content": "."}]).startswith(bos)
    if added and not written:
        warn(
            f"the chat template does not begin with {bos}, so llama.cpp will put it before no text, plain text neither"
        )
    return written


def _add_stops(
    writer: Any, tokenizer: Tokenizer, stops: tuple[int, ...], tokens: list[str], warn: Callable[[str], None]
) -> None:
    """Add the stop tokens: a file can name three, and llama.cpp knows some others by their texts."""
    others = [stop for stop in stops if stop != tokenizer.eos_id and tokens[stop] not in _ALWAYS_STOP]
    if len(others) > 2:
        raise InputRefused(
            f"{len(stops)} tokens end a text ({', '.join(tokens[stop] for stop in stops)}), and a GGUF file can name "
            "three; leave those that the model does not write out of eos_token_id in generation_config.json"
        )
    for add, stop in zip((writer.add_eot_token_id, writer.add_eom_token_id), others, strict=False):
        add(stop)
    if tokenizer.config.template and end_of_turn(tokenizer) is None:
        warn("the chat template ends an answer with no special token, so llama.cpp will not know where an answer ends")
    for token in _ALWAYS_STOP & set(tokens):
        if tokens.index(token) not in stops:
            warn(f"llama.cpp stops at {token}, which does not end a text of this model by its configuration")


FILE = "model.gguf"
BLOCK = 32  # weights that share one scale in Q8_0
# gguf's name of a type and the dtype before conversion to it, by the name on the command line.
DTYPES = {
    "f32": ("F32", torch.float32),
    "f16": ("F16", torch.float16),
    "bf16": ("BF16", torch.bfloat16),
    "q8_0": ("Q8_0", torch.float32),
}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # llama.h, llama_ftype
_OWN = {torch.float64: "f32", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}

# llama.cpp loads a Mistral as a "llama", whose rotary pairs are neighbouring channels; here they are halves of a head.
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

    Matrices are stored as `dtype`, vectors (norms, biases) as f32, as llama.cpp requires. q8_0 stores 32 neighbours w
    of a row as a float16 scale d and integers q with w = d q and d = max|w| / 127, so that no weight is off by more
    than d / 2 and the rounding of d. Besides the model, one tensor at a time is in memory.

    Args:
        model: its weights may be on any device or in a mapped file; adapters are merged.
        folder: the folder to create; it may exist if it is empty.
        tokenizer: the model's; it is written into the file with its chat template.
        dtype: a name in `DTYPES`; None: the weights' own (f32 for float64).
        warn: called with each line that the user should read about what llama.cpp will do differently.

    Raises:
        UsageError: the package is not installed.
        InputRefused: a feature that llama.cpp lacks or would read wrongly (a window, an unknown split pattern, too many
            stop tokens), weights that do not fit the dtype, or a folder that cannot be written.
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
    """Return the package `gguf`; raise UsageError if it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError:
        raise UsageError("--format gguf needs the package gguf: pip install 'monograph[gguf]'") from None


def _check(config: LlamaConfig, dtype: str) -> None:
    """Refuse features that llama.cpp would silently ignore."""
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
    """Yield every tensor once, with llama.cpp's name, in the order of the file; they are not converted yet."""
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
    """Reorder a projection's rows so that the channels of a rotary pair are neighbours instead of halves of a head.

    Args:
        rows: [heads * head_dim, ...], a weight or a bias.
        head_dim: number of rows of a head.
    """
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(rows.shape)


def _rope_divisors(config: LlamaConfig) -> Tensor:
    """Return the divisor of each rotary frequency, [F], the form in which llama.cpp reads Llama 3's scaling."""
    unscaled = LlamaConfig.from_hf(config.to_hf() | {"rope_scaling": None})
    plain_F, scaled_F = (inverse_frequencies(c, torch.float64, torch.device("cpu")) for c in (unscaled, config))
    return (plain_F / scaled_F).float()


def _write(gguf: Any, writer: Any, model: Llama, dtype: str) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    for name, _, read in _tensors(model):
        # Not by numpy's tofile as in the package, whose error does not say that the disk is full.
        writer.write_padding(file, file.write(memoryview(_stored(gguf, name, read(), dtype)).cast("B")))


def _stored(gguf: Any, name: str, weight: Tensor, dtype: str) -> Any:
    """Return the bytes of a tensor as a contiguous array."""
    if weight.ndim != 2:
        return weight.float().cpu().contiguous().numpy()
    weight_RC, (kind, before) = weight, DTYPES[dtype]
    cast_RC = weight_RC.to("cpu", before).contiguous()
    # Q8_0's scale, max|w| / 127, is a float16.
    largest = float(torch.stack(weight_RC.aminmax()).abs().max()) / (127 if kind == "Q8_0" else 1)
    if not largest <= torch.finfo(torch.float16 if kind == "Q8_0" else before).max:
        raise InputRefused(f"{name}: a weight of {largest:.3g} does not fit {dtype}: use --dtype f32 or bf16")
    if kind == "BF16":
        return cast_RC.view(torch.uint16).numpy()
    return gguf.quantize(cast_RC.numpy(), getattr(gguf.GGMLQuantizationType, kind))
