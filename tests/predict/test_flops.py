"""Run: pytest tests/predict/test_flops.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import monograph
from monograph.data.piece_lengths import PieceLengths
from monograph.model.config import LlamaConfig
from monograph.model.parameters import (
    block_active_matrix_shapes,
    block_matrix_shapes,
    block_shapes,
)
from monograph.predict.roofline import flops_per_token, matmul_parameters, mfu, training_flops


def config(**sizes: Any) -> LlamaConfig:
    base: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # Heads · head_dim differs from hidden_size, so that one cannot stand in for the other.
        "head_dim": 16,
    }
    return LlamaConfig(**{**base, **sizes})


def test_public_name_is_the_function_whatever_is_imported() -> None:
    assert monograph.flops is flops_per_token


def test_matmul_parameters_are_all_but_the_input_embedding_and_the_norms() -> None:
    untied, tied = config(tie_word_embeddings=False), config(tie_word_embeddings=True)
    norms = (2 * 3 + 1) * 32
    assert matmul_parameters(untied) == untied.parameter_count() - 96 * 32 - norms
    assert matmul_parameters(tied) == tied.parameter_count() - norms
    assert matmul_parameters(tied) == matmul_parameters(untied)


def test_of_a_mixture_the_experts_of_a_token_count() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    mixed = config(model_type="qwen3_moe", mlp_only_layers=(1,), **experts)
    layers = 2 * (8 * 32 + 3 * 2 * 32 * 24) + 3 * 32 * 80
    assert matmul_parameters(mixed) == matmul_parameters(config()) - 3 * 3 * 32 * 80 + layers


def test_of_a_hybrid_mixture_s_convolution_every_channel_counts() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    delta_net = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "layer_types": ("linear_attention", "linear_attention", "full_attention"),
    }
    mixed = config(model_type="qwen3_next", **experts, **delta_net)
    shapes = block_shapes(mixed, 0)
    stacks = [shape for name, shape in shapes.items() if ".experts." in name]
    assert any("conv1d" in name for name in shapes)
    of_all = sum(map(math.prod, block_matrix_shapes(mixed, 0)))
    of_a_token = sum(map(math.prod, block_active_matrix_shapes(mixed, 0)))
    assert of_all - of_a_token == sum(math.prod(shape) * (8 - 2) // 8 for shape in stacks)


def test_count_is_what_torch_counts_for_the_same_products() -> None:
    """Forward and backward of every product of one row, run on tensors without data; attention is
    counted in full.

    torch counts scores and mixing over all T x T pairs of positions, also those that are hidden.
    """
    shape, T = config(), 64
    d, query, key_value, hidden = shape.hidden_size, 4 * 16, 2 * 16, shape.intermediate_size

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, device="meta", requires_grad=True)

    with FlopCounterMode(display=False) as counter:
        total = torch.zeros((), device="meta")
        for _ in range(shape.num_hidden_layers):
            x = torch.empty(T, d, device="meta", requires_grad=True)
            q = (x @ weight(d, query)).view(T, 4, 16).transpose(0, 1)
            k, v = (
                (x @ weight(d, key_value)).view(T, 2, 16).transpose(0, 1).repeat_interleave(2, 0)
                for _ in range(2)
            )
            mixed = (q @ k.transpose(1, 2)) @ v
            gated = (x @ weight(d, hidden)) * (x @ weight(d, hidden))
            total = total + (mixed.transpose(0, 1).reshape(T, query) @ weight(query, d)).sum()
            total = total + (gated @ weight(hidden, d)).sum()
        x = torch.empty(T, d, device="meta", requires_grad=True)
        (total + (x @ weight(d, shape.vocab_size)).sum()).backward()
    # The pairs that causal attention hides: T (T - 1) / 2 of T x T.
    hidden_pairs = T * (T - 1) // 2
    attention_of_hidden = 12 * shape.num_hidden_layers * query * hidden_pairs
    assert counter.get_total_flops() == T * flops_per_token(shape, T) + attention_of_hidden


def test_an_8b_model_at_8192_tokens_costs_what_is_published() -> None:
    """Llama 3 8B: 7.505e9 matrix parameters, 32 layers of width 4096: 6 · 7.505 + 6 · 32 · 4096 ·
    8192 / 1e9 = 51.5.
    """
    assert round(flops_per_token(LlamaConfig.preset("8b"), 8192) / 1e9, 1) == 51.5


@pytest.mark.parametrize("window", [1, 7, 63, 64, 100])
def test_a_window_costs_what_its_positions_are(window: int) -> None:
    """Per layer and pair of positions 12 d_attn."""
    T, width = 64, 4 * 16
    sliding = config(
        model_type="qwen3",
        sliding_window=window,
        layer_types=("sliding_attention",) + ("full_attention",) * 2,
    )
    pairs = sum(min(t + 1, window) for t in range(T))
    full = T * (T + 1) // 2
    saved = T * (flops_per_token(config(model_type="qwen3"), T) - flops_per_token(sliding, T))
    assert saved == pytest.approx(12 * width * (full - pairs))
    assert (saved == 0) == (window >= T)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=6),
    st.none() | st.integers(1, 45),
)
def test_a_token_attends_to_its_own_piece_only(
    pieces: list[tuple[int, int]], window: int | None
) -> None:
    """Against a mask of all pairs of a row of pieces, with every pair looked at."""
    lengths = [length for length, times in pieces for _ in range(times)]
    segments = [index for index, length in enumerate(lengths) for _ in range(length)]
    seen = sum(
        segments[query] == segments[key] and key <= query and query - key < (window or math.inf)
        for query in range(len(segments))
        for key in range(len(segments))
    )
    found = PieceLengths.of_pieces(np.array(lengths)).visible_positions(window)
    assert found == pytest.approx(seen / len(segments))


def test_pieces_that_are_visited_more_often_count_more_often() -> None:
    twice_long = PieceLengths((2, 5), (1.0, 2.0))
    assert twice_long.visible_positions() == pytest.approx((3 + 2 * 15) / (2 + 2 * 5))
    assert PieceLengths((), ()).visible_positions() == 0.0


def test_packed_documents_cost_less_than_whole_rows_by_the_pairs_between_them() -> None:
    """Two documents of 20 and 44 tokens in rows of 64: 20 x 44 pairs fewer."""
    T, width, layers = 64, 4 * 16, 3
    packed = flops_per_token(config(), PieceLengths((20, 44), (1.0, 1.0)))
    saved = T * (flops_per_token(config(), T) - packed)
    assert saved == pytest.approx(12 * layers * width * 20 * 44)


def test_biases_and_norms_of_heads_are_no_matrices() -> None:
    for family in ("mistral", "qwen2", "qwen3"):
        assert matmul_parameters(config(model_type=family)) == matmul_parameters(config())


@given(st.integers(1, 10**9), st.integers(1, 10**4), st.lists(st.integers(1, 10**5), max_size=20))
def test_cost_is_linear_in_the_positions_that_are_seen(
    parameters: int, width: int, seen: list[int]
) -> None:
    assert training_flops(parameters, width, []) == 6 * parameters
    found = training_flops(parameters, width, seen) - training_flops(parameters, width, [])
    assert found == 12 * width * sum(seen)


def test_mfu_is_a_fraction_of_the_peak() -> None:
    assert mfu(13_818, 43.0e9, 989e12) == 13_818 * 43.0e9 / 989e12
