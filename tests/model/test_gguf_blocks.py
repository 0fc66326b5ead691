# Run: pytest tests/model/test_gguf_blocks.py
"""GGUF files of k-quants have the types and the bytes of llama.cpp's own quantizer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llama_cpp import LlamaCpp
from monograph.model import gguf_blocks
from monograph.model.config import LlamaConfig
from monograph.model.gguf import FILE, save_gguf
from monograph.model.gguf_blocks import BLOCK, K_QUANTS, choose_types, quantize
from monograph.model.layer_types import FULL_ATTENTION, LINEAR_ATTENTION
from monograph.model.llama import Llama
from monograph.text.tokenizer import Tokenizer

gguf = pytest.importorskip(
    "gguf", reason="the package gguf is not installed: pip install -e '.[gguf]'"
)
QUANTIZED = gguf.GGMLQuantizationType
SMALL = LlamaConfig(
    vocab_size=259,
    hidden_size=256,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
# With experts, a shared one, a convolution, a head that is the embedding, and matrices of one row.
HYBRID = replace(
    SMALL,
    model_type="qwen3_5_moe_text",
    rms_norm_eps=1e-6,
    layer_types=(LINEAR_ATTENTION, FULL_ATTENTION),
    linear_num_key_heads=1,
    linear_num_value_heads=1,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    partial_rotary_factor=0.5,
    num_experts=3,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=32,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def theirs() -> Callable[[np.ndarray, str], np.ndarray]:
    """llama.cpp's own quantizer: from rows of fp32 and gguf's name of a type to the bytes of each
    block.
    """
    package = pytest.importorskip(
        "xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp"
    )
    (library,) = Path(package.__file__).parent.glob("xllamacpp*.so")
    quantize_chunk = ctypes.CDLL(str(library)).ggml_quantize_chunk
    whole, address = ctypes.c_int64, ctypes.c_void_p
    quantize_chunk.argtypes, quantize_chunk.restype = (
        [ctypes.c_int, address, address, *[whole] * 3, address],
        whole,
    )

    def bytes_of(rows: np.ndarray, kind: str) -> np.ndarray:
        number = QUANTIZED[kind]
        weights, size = gguf.GGML_QUANT_SIZES[number]
        stored = np.empty((rows.size // weights, size), np.uint8)
        count, width = rows.size // rows.shape[-1], rows.shape[-1]
        assert (
            quantize_chunk(number, rows.ctypes.data, stored.ctypes.data, 0, count, width, None)
            == stored.size
        )
        return stored

    return bytes_of


def hard_rows() -> np.ndarray:
    """Rows of 512 weights: of many scales from subnormal to large, of zeros, constants, outliers
    and mixed scales.
    """
    draw = np.random.default_rng(0)
    scales = 10.0 ** np.array(
        [-40, -30, -20, -16, -15, -14, -10, -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 4]
    )
    normal = draw.normal(size=(len(scales), 512)) * scales[:, None]
    same = np.repeat([[0.0], [1.0], [-1.0], [0.5], [-3e-5], [1e-7], [-1e-20]], 512, axis=1)
    outlier, far, half = (
        np.zeros((1, 512)),
        draw.normal(size=(4, 512)) * 0.02,
        draw.normal(size=(2, 512)),
    )
    outlier[:, 5], far[:, ::100], half[:, :256] = 3.0, 50.0, 0.0
    one_sided = draw.uniform(size=(4, 512)) * np.array([[1.0], [-1.0], [1.0], [1.0]]) + [
        [0.0],
        [0.0],
        [10.0],
        [-10.0],
    ]
    by_group = draw.normal(size=(8, 32, 16)) * 10.0 ** draw.uniform(-12, 2, size=(8, 32, 1))
    by_weight = draw.normal(size=(8, 512)) * 10.0 ** draw.uniform(-12, 2, size=(8, 512))
    integers, heavy = (
        draw.integers(-8, 8, size=(4, 512)),
        draw.standard_cauchy(size=(64, 512)).clip(-6e4, 6e4),
    )
    parts = (
        normal,
        same,
        outlier,
        far,
        half,
        one_sided,
        by_group.reshape(8, 512),
        by_weight,
        integers,
        heavy,
    )
    return np.concatenate(parts).astype(np.float32)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_the_bytes_of_a_row_are_llama_cpps(
    theirs: Callable, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = hard_rows()
    expected = theirs(rows, kind)
    # The last search has other blocks beside it than the first, and fewer; a row alone has none.
    for at_once in (3, 128):
        monkeypatch.setattr(gguf_blocks, "_BLOCKS_PER_PART", at_once)
        different = (
            (quantize(rows, kind) != expected).any(axis=1).reshape(len(rows), -1).any(axis=1)
        )
        assert not different.any(), np.flatnonzero(different)
    assert np.array_equal(quantize(rows[-1:, :BLOCK].copy(), kind), expected[-2:-1])


@pytest.mark.parametrize("dtype", K_QUANTS)
def test_the_bytes_of_a_file_are_llama_cpps_and_it_answers(
    tmp_path: Path, theirs: Callable, dtype: str
) -> None:
    """In rows of 256, 64 and 32; what llama.cpp does not quantise is the same as in an f32 file."""
    model, tokenizer = Llama(HYBRID), Tokenizer.bytes()
    files = {}
    for name in ("f32", dtype):
        save_gguf(model, tmp_path / name, tokenizer, name, lambda line: None)
        files[name] = gguf.GGUFReader(tmp_path / name / FILE)
    for exact, stored in zip(files["f32"].tensors, files[dtype].tensors, strict=True):
        kind = stored.tensor_type.name
        row = exact.n_elements == exact.shape[0]
        kept = row or exact.name.endswith(("ffn_gate_inp.weight", "ssm_conv1d.weight"))
        assert stored.name == exact.name and (kind == "F32") == kept
        expected = exact.data if kept else theirs(np.ascontiguousarray(exact.data), kind)
        assert stored.data.tobytes() == expected.tobytes(), stored.name
    fields = {name: field.contents() for name, field in files[dtype].fields.items()}
    assert fields["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{dtype.upper()}"]
    assert fields["general.quantization_version"] == gguf.GGML_QUANT_VERSION
    assert (
        len(LlamaCpp(tmp_path / dtype / FILE).greedy([0, *tokenizer.encode("the")], 4)["tokens"])
        > 0
    )


EIGHT = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
LETTERS = {"Q4_K": "4", "Q5_K": "5", "Q6_K": "6", "Q5_0": "a", "Q5_1": "b", "Q8_0": "8"}


def types(
    config: LlamaConfig, dtype: str, tied: bool = False, ffn: int = 256, values: str = "attn_v"
) -> str:
    """Letters of the chosen types: the embedding and the head; then each matrix of a layer, for all
    layers in turn.
    """
    inner = {
        "attn_q": 256,
        "attn_k": 256,
        values: 256,
        "attn_output": 256,
        "ffn_up": 256,
        "ffn_down": ffn,
    }
    layers = range(config.num_hidden_layers)
    groups = [
        ["token_embd", "output"][: 1 if tied else 2],
        *([f"blk.{i}.{name}" for i in layers] for name in inner),
    ]
    columns = {
        f"{name}.weight": inner[name.split(".")[-1]] if "blk" in name else 256
        for each in groups
        for name in each
    }
    kinds = choose_types(columns, dtype, config)
    return " ".join("".join(LETTERS[kinds[f"{name}.weight"]] for name in each) for each in groups)


@pytest.mark.parametrize(
    ("dtype", "changes", "how", "expected"),
    [
        ("q4_k_m", {}, {}, "46 444444444 444444444 644644666 444444444 444444444 644644666"),
        ("q5_k_m", {}, {}, "56 555555555 555555555 655655666 555555555 555555555 655655666"),
        ("q6_k", {}, {}, "66 666666666 666666666 666666666 666666666 666666666 666666666"),
        (
            "q4_k_m",
            {},
            {"tied": True, "ffn": 96},
            "6 444444444 444444444 644644666 444444444 444444444 8aa8aa888",
        ),
        (
            "q5_k_m",
            {},
            {"ffn": 96},
            "56 555555555 555555555 655655666 555555555 555555555 8bb8bb888",
        ),
        (
            "q4_k_m",
            {},
            {"values": "attn_qkv"},
            "46 444444444 444444444 644644666 444444444 444444444 644644666",
        ),
        ("q4_k_m", EIGHT, {}, "46 444444444 888888888 888888888 555555555 444444444 644644666"),
        ("q5_k_m", EIGHT, {}, "56 555555555 888888888 888888888 555555555 555555555 655655666"),
        ("q6_k", EIGHT, {}, "66 666666666 888888888 888888888 666666666 666666666 666666666"),
    ],
)
def test_each_matrix_has_the_type_that_llama_cpp_chooses(
    dtype: str, changes: dict, how: dict, expected: str
) -> None:
    """Written down from files of 9 layers that llama.cpp's `llama_model_quantize` (v0.5.0) wrote."""
    assert types(replace(SMALL, num_hidden_layers=9, **changes), dtype, **how) == expected


@pytest.mark.parametrize(
    ("family", "heads", "more"),
    [
        ("llama", 2, True),
        ("llama", 4, False),
        ("mistral", 2, True),
        ("qwen2", 4, True),
        ("qwen3", 2, False),
    ],
)
def test_values_of_70_billion_weights_take_five_bits(family: str, heads: int, more: bool) -> None:
    """Which llama.cpp takes a model of 80 layers for, in the architectures in which it knows one."""
    config = replace(SMALL, model_type=family, num_hidden_layers=80, num_key_value_heads=heads)
    values = types(config, "q4_k_m").split()[3]
    assert ("5" in values, "4" in values, values.count("6")) == (more, not more, 40)


def test_feed_forward_layers_are_counted_where_only_some_blocks_have_one():
    """As in llama.cpp's source: those of layers 1, 3, 5 and 7 are numbers 0 to 3 of 8."""
    config = LlamaConfig(
        model_type="nemotron_h",
        vocab_size=64,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        layer_types=("mamba", "mlp", "full_attention", "mlp") * 2,
    )
    row_lengths = {f"blk.{layer}.ffn_down.weight": 256 for layer in (1, 3, 5, 7)}
    kinds = choose_types(row_lengths, "q4_k_m", config)
    assert [*kinds.values()] == ["Q6_K", "Q4_K", "Q4_K", "Q6_K"]
