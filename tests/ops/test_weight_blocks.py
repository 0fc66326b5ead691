"""Run: pytest tests/ops/test_weight_blocks.py

Weights that are rounded to blocks are the numbers that a GGUF file of them holds, also if a compiler
computes them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.test_gguf_blocks import hard_rows, theirs  # noqa: F401 - `theirs` is a fixture
from monograph.ops.weight_blocks import BLOCK, BLOCK_FORMATS, _round_to_fp16, round_to_blocks

gguf = pytest.importorskip(
    "gguf", reason="the package gguf is not installed: pip install -e '.[gguf]'"
)
FORMATS = pytest.mark.parametrize("block_format", BLOCK_FORMATS)


def of_a_file(weights: Tensor, block_format: str) -> Tensor:
    """Weights as they are read from a file, by the package that writes and reads it."""
    kind = gguf.GGMLQuantizationType[block_format]
    with np.errstate(all="ignore"):  # scales below the smallest number of fp16
        return torch.from_numpy(gguf.dequantize(gguf.quantize(weights.numpy(), kind), kind))


@FORMATS
def test_weights_are_those_of_a_file(block_format: str) -> None:
    rows = torch.from_numpy(hard_rows())
    assert torch.equal(round_to_blocks(rows, block_format), of_a_file(rows, block_format))


@FORMATS
def test_weights_are_those_of_llama_cpps_own_quantizer(theirs, block_format: str) -> None:  # noqa: F811
    rows = hard_rows()
    kind = gguf.GGMLQuantizationType[block_format]
    read = gguf.dequantize(theirs(rows, block_format), kind).reshape(rows.shape)
    rounded = round_to_blocks(torch.from_numpy(rows), block_format).numpy()
    # Its compiler may fuse a product and a sum, which moves a weight halfway between two integers.
    assert np.mean(rounded != read) < 1e-3


@FORMATS
@given(seed=st.integers(0, 10**6), exponent=st.integers(-30, 12), decades=st.integers(0, 6))
@settings(max_examples=40, deadline=None)
def test_rounding_twice_is_rounding_once(
    block_format: str, seed: int, exponent: int, decades: int
) -> None:
    """So a file of rounded weights holds these weights. Quotients may also be off by a bit, as on a GPU."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(8, 2 * BLOCK, generator=generator) * 2.0**exponent
    weights *= 10.0 ** (-decades * torch.rand(8, 1, generator=generator))
    rounded = round_to_blocks(weights, block_format)
    assert torch.equal(round_to_blocks(rounded, block_format), rounded)
    assert torch.equal(of_a_file(rounded, block_format), rounded)
    off_by_a_bit = torch.nextafter(weights, torch.full_like(weights, float("inf")))
    rounded = round_to_blocks(off_by_a_bit, block_format)
    assert torch.equal(of_a_file(rounded, block_format), rounded)


@FORMATS
def test_a_compiler_computes_the_same_bits(block_format: str) -> None:
    """Inductor would remove a conversion to fp16 and back, and with it the rounding of the scale."""
    weights = torch.from_numpy(hard_rows())[:64]
    compiled = torch.compile(round_to_blocks, fullgraph=True)
    assert torch.equal(compiled(weights, block_format), round_to_blocks(weights, block_format))


@FORMATS
@pytest.mark.gpu
def test_a_gpu_computes_numbers_of_a_file(block_format: str) -> None:
    """Its quotients may have another last bit, and it may fuse a product and a sum. A few weights are then
    rounded to the neighbouring number, but to one that the file holds.
    """
    weights = torch.randn(64, 2 * BLOCK, generator=torch.Generator().manual_seed(0)).cuda()
    for function in (round_to_blocks, torch.compile(round_to_blocks, fullgraph=True)):
        found = function(weights, block_format).cpu()
        assert torch.equal(of_a_file(found, block_format), found)
        expected = round_to_blocks(weights.cpu(), block_format)
        assert float((found != expected).float().mean()) < 0.01


def test_scales_are_rounded_as_fp16_rounds() -> None:
    """All positive numbers of fp16, the numbers halfway between neighbours, and those next to these."""
    halves = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
    middles = (halves[1:] + halves[:-1]) / 2
    infinity = torch.tensor(float("inf"))
    values = torch.cat([halves, middles, middles.nextafter(infinity), middles.nextafter(-infinity)])
    for signed in (values, -values):
        assert torch.equal(_round_to_fp16(signed), signed.half().float())


@FORMATS
def test_blocks_are_along_the_last_axis_and_the_dtype_stays(block_format: str) -> None:
    weights = torch.randn(3, 4, 2 * BLOCK, dtype=torch.float64)
    rounded = round_to_blocks(weights, block_format)
    assert rounded.shape == weights.shape and rounded.dtype == weights.dtype
    of_rows = [round_to_blocks(row, block_format) for row in weights.reshape(-1, BLOCK)]
    assert torch.equal(rounded, torch.stack(of_rows).view_as(weights))
