# Run: pytest tests/model/test_rope.py
"""Rotary positions: the frequencies of the papers, a rotation that keeps lengths and sees
differences only.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from monograph.laws.comparisons import relative_error
from monograph.model.config import LlamaConfig
from monograph.model.rope import cos_sin, inverse_frequencies, rotate
from monograph.model.scaling import LinearScaling, Llama3Scaling
from reference.llama import _frequency

PLAIN = LlamaConfig.preset("nano")
SCALED = replace(
    PLAIN,
    head_dim=64,
    rope_theta=5e5,
    rope_scaling=Llama3Scaling(original_max_position_embeddings=512),
)
LINEAR = replace(PLAIN, rope_scaling=LinearScaling(3.0))
CPU = torch.device("cpu")


@pytest.mark.parametrize("config", [PLAIN, SCALED, LINEAR, LlamaConfig.preset("1b")])
def test_frequencies_are_those_of_the_oracle(config):
    rope = config.head_dim, config.rope_theta, config.rope_scaling
    expected = torch.tensor(
        [_frequency(pair, *rope) for pair in range(config.head_dim // 2)], dtype=torch.float64
    )
    torch.testing.assert_close(
        inverse_frequencies(config, torch.float64, CPU), expected, rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("config", [PLAIN, SCALED, LINEAR, LlamaConfig.preset("1b")])
def test_fp32_frequencies_are_those_of_transformers_to_the_bit(config):
    from transformers import LlamaConfig as TheirConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(TheirConfig(**config.to_hf())).inv_freq
    assert torch.equal(inverse_frequencies(config, torch.float32, CPU), theirs)


@pytest.mark.parametrize("config", [PLAIN, SCALED])
def test_scores_depend_on_differences_of_positions_only(config):
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 9, config.head_dim, generator=generator, dtype=torch.float64)

    def scores(offset):
        angles = cos_sin(torch.arange(9)[None] + offset, config, torch.float64)
        return rotate(query, angles) @ rotate(key, angles).transpose(-1, -2)

    torch.testing.assert_close(scores(0), scores(1000), rtol=1e-10, atol=1e-10)
    assert (scores(0) - query @ key.transpose(-1, -2)).abs().max() > 0.1


def test_rotation_keeps_lengths_and_position_zero():
    heads = torch.randn(2, 3, 5, PLAIN.head_dim, dtype=torch.float64)
    turned = rotate(heads, cos_sin(torch.arange(5)[None], PLAIN, torch.float64))
    torch.testing.assert_close(turned.norm(dim=-1), heads.norm(dim=-1), rtol=1e-13, atol=0)
    assert torch.equal(turned[:, :, 0], heads[:, :, 0])


def test_bf16_heads_are_turned_in_fp32_and_rounded_once():
    heads = torch.randn(
        1, 2, 2000, PLAIN.head_dim, generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    positions = torch.arange(2000)[None]
    exact = rotate(heads.double(), cos_sin(positions, PLAIN, torch.float64))
    turned = rotate(heads, cos_sin(positions, PLAIN, torch.float32))
    assert turned.dtype == torch.bfloat16
    assert relative_error(turned, exact) < 1.05 * relative_error(exact.bfloat16(), exact)


@pytest.mark.parametrize("rotated", [PLAIN.head_dim, PLAIN.head_dim // 2])
def test_neighbours_are_turned_as_halves_of_the_reordered_head(rotated):
    heads = torch.randn(2, 3, 5, PLAIN.head_dim, dtype=torch.float64)
    angles = cos_sin(torch.arange(5)[None], replace(PLAIN, head_dim=rotated), torch.float64)
    places = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, PLAIN.head_dim)]
    turned = rotate(heads, angles, interleaved=True)
    assert torch.equal(turned[..., places], rotate(heads[..., places], angles))
