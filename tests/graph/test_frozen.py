# Run: pytest tests/graph/test_frozen.py
"""Frozen linear layers in 8 and 4 bits: their numbers, their products there and back, what is kept,
one graph.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from monograph.graph.capture import compiled
from monograph.graph.frozen import NF4, Int8Linear, NF4Linear, parameter_count
from monograph.laws.comparisons import error_within, relative_error
from monograph.profiling.memory import LiveBytes

KINDS = (Int8Linear, NF4Linear)
# Bytes of a number: codes and, of each block, row or group, the scale.
BYTES = {
    Int8Linear: lambda n, k: n * k + 4 * n,
    NF4Linear: lambda n, k: n * k // 2 + n * k // 64 + n * k // 4096 + 4,
}


def drawn(*shape, decades=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * 10.0 ** (
        -decades * torch.rand(*shape, generator=generator)
    )


def frozen(kind, weight_NK, bias=None):
    outputs, inputs = weight_NK.shape
    layer = nn.Linear(inputs, outputs, bias=bias is not None)
    if bias is not None:
        layer.bias.data = bias
    layer.__class__ = kind
    layer.freeze(weight_NK)
    return layer


@given(
    seed=st.integers(0, 10**6),
    decades=st.integers(0, 6),
    n=st.integers(1, 40),
    k=st.integers(1, 90),
)
@settings(max_examples=40)
def test_int8_is_the_nearest_step_of_its_row(seed, decades, n, k):
    weight = drawn(n, k, decades=decades, seed=seed)
    layer = frozen(Int8Linear, weight)
    half = weight.abs().amax(1, keepdim=True) / 127.5 / 2
    assert ((layer.dense() - weight).abs() <= half * (1 + 1e-5) + 1e-7).all()
    assert layer.codes.shape == weight.shape and "weight" not in layer.state_dict()


@given(
    seed=st.integers(0, 10**6),
    decades=st.integers(0, 6),
    n=st.integers(1, 40),
    k=st.integers(1, 90),
)
@settings(max_examples=40)
def test_nf4_is_the_nearest_level_of_its_block(seed, decades, n, k):
    weight = drawn(n, k, decades=decades, seed=seed)
    layer = frozen(NF4Linear, weight)
    blocks = nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    exact = blocks.abs().amax(1)
    codes = torch.stack([layer.codes >> 4, layer.codes & 15], -1).flatten()[: weight.numel()]
    shares = (blocks / exact.clamp_min(1e-30)[:, None]).flatten()[: weight.numel()]
    distance = (shares[:, None] - torch.tensor(NF4)).abs()
    chosen = distance.gather(1, codes.long()[:, None])[:, 0]
    assert (chosen <= distance.amin(1) + 1e-6).all()
    assert layer.dense().shape == weight.shape and layer(torch.eye(k)).T.equal(layer.dense() + 0)
    # Scales are kept to half a step of their group, which is 1 / 128 of the largest distance from
    # the mean.
    scale = layer.levels / layer.steps.repeat_interleave(256)[: len(layer.levels)] + layer.mean
    assert (
        (scale - exact).abs()
        <= 1.001 / layer.steps.repeat_interleave(256)[: len(exact)] + 1e-6 * exact.max()
    ).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_dense_weight_there_and_back(kind, dtype, bias):
    weight, x, dy = (
        drawn(24, 40),
        drawn(2, 7, 40, seed=1).to(dtype),
        drawn(2, 7, 24, seed=2).to(dtype),
    )
    layer = frozen(kind, weight, drawn(24, seed=3) if bias else None)
    dense = layer.dense()
    outcomes = []
    for wide in (False, True):
        kind_of = torch.float64 if wide else dtype
        xs = x.to(kind_of, copy=True).requires_grad_()
        plain = nn.functional.linear(
            xs, dense.to(kind_of), layer.bias.to(kind_of) if bias else None
        )
        plain.backward(dy.to(kind_of))
        outcomes.append((plain, xs.grad))
    mine = x.clone().requires_grad_()
    y = layer(mine)
    y.backward(dy)
    assert (y.dtype, mine.grad.dtype) == (dtype, dtype)
    for ours, naive, exact in zip((y, mine.grad), *outcomes, strict=True):
        # The scales are fp32: in fp64 they are what the weight is exact to.
        assert error_within(ours, naive, exact) or relative_error(ours, exact) < 2e-7


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_rounds_the_input_as_it_does_for_any_layer(kind):
    layer, x = frozen(kind, drawn(24, 40)), drawn(5, 40, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), layer(x.bfloat16())) and layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_codes_and_nothing_dense_is_kept_for_the_backward_pass(kind):
    n, k = 512, 512
    layer = frozen(kind, drawn(n, k))
    assert sum(p.nbytes for p in layer.parameters()) == BYTES[kind](n, k)
    assert not any(p.requires_grad for p in layer.parameters())
    x = drawn(2, k).requires_grad_()
    layer(x).sum().backward()
    with LiveBytes() as live:
        y = layer(x)
    assert live.kept_bytes <= y.nbytes + 256 < n * k
    y.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_gives_the_same(kind):
    layer, x, dy = frozen(kind, drawn(24, 40)), drawn(5, 40, seed=1), drawn(5, 24, seed=2)
    results = []
    for call in (layer, compiled(layer.forward, "aot_eager")):
        mine = x.clone().requires_grad_()
        y = call(mine)
        y.backward(dy)
        results.append((y, mine.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.slow
def test_a_graph_keeps_nothing_dense_for_its_backward_pass():
    layers = nn.Sequential(
        *(frozen(KINDS[seed % 2], drawn(512, 512, seed=seed)) for seed in range(4))
    )
    dense_bytes = 512 * 512 * 2

    def product(x):
        return layers(x).float().sum()

    x = drawn(4, 512).bfloat16().requires_grad_()
    captured = compiled(product)
    captured(x).backward()
    with LiveBytes() as live:
        captured(x).backward()
    # The one that is being read and the next one, instead of four.
    assert dense_bytes < live.peak_bytes < 2.5 * dense_bytes
    found, x.grad = x.grad, None
    product(x).backward()
    product(x).backward()
    assert relative_error(found, x.grad) < 2**-7


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind):
    weight = drawn(3, 70)
    weight[1] = 0
    assert not frozen(kind, torch.zeros(3, 70)).dense().any()
    assert frozen(kind, weight).dense().isfinite().all()


# ---- beside torchao ------------------------------------------------------------------------------


@pytest.fixture
def torchao():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its kernels, which are for GPUs
        pytest.importorskip("torchao", reason="torchao is not installed: the extra `dev` has it")
        from torchao.quantization import PerRow
        from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor
    return PerRow, Int8Tensor, NF4Tensor


@pytest.mark.parametrize("decades", [0, 3])
def test_numbers_are_torchaos_bits(torchao, decades):
    per_row, int8, nf4 = torchao
    weight = drawn(256, 256, decades=decades)
    ours, theirs = frozen(Int8Linear, weight), int8.from_hp(weight, per_row())
    assert torch.equal(ours.codes, theirs.qdata) and torch.equal(ours.scales, theirs.scale[:, 0])
    assert torch.equal(ours.dense(), theirs.dequantize())
    ours, theirs = frozen(NF4Linear, weight), nf4.from_tensor(weight, 64, 256)
    assert torch.equal(ours.levels, theirs.quantized_scalers) and torch.equal(
        ours.steps, theirs.quantization_factor
    )
    # In the middle between two levels either is the nearest.
    codes, others = (
        torch.stack([each >> 4, each & 15]).int() for each in (ours.codes, theirs.quantized_data)
    )
    assert ((codes - others).abs() <= 1).all() and (codes != others).float().mean() < 1e-4
    torch.testing.assert_close(ours.dense()[codes.T.reshape(256, 256) == others.T.reshape(256, 256)],
                               theirs.get_original_weight()[codes.T.reshape(256, 256) == others.T.reshape(256, 256)],
                               rtol=0, atol=0)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_the_weight_it_stands_for(kind):
    """A base in 4 bits is no smaller model: its packed codes and scales are no parameters that
    anybody counts.
    """
    layer, beside = frozen(kind, drawn(8, 66), drawn(8)), nn.Linear(3, 8)
    tied = nn.ModuleList([layer, beside, beside])
    assert parameter_count(tied) == 8 * 66 + 8 + 3 * 8 + 8
