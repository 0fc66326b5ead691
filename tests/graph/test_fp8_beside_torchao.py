# Run: pytest tests/graph/test_fp8_beside_torchao.py (needs torchao)
"""fp8 linear layers beside torchao's float8 training: the same numbers and scales in bits, products
but for the order.

torchao is asked for what ours is: one scale for a tensor, found anew at each call and rounded to a
power of two, e4m3 forward and e5m2 backward. Its layer gets the same numbers in fp32, which bf16
holds exactly, so that its products are not rounded to bf16 at their end.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from monograph.graph.fp8 import BACKWARD_DTYPE, FORWARD_DTYPE, fp8_linear, quantised_to_fp8

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own kernels, which are for GPUs
    pytest.importorskip("torchao", reason="torchao is not installed: the extra `dev` has it")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

# Relative, and the smallest number.
ULP = {FORWARD_DTYPE: (2.0**-3, 2.0**-9), BACKWARD_DTYPE: (2.0**-2, 2.0**-16)}


@pytest.fixture(autouse=True)
def _inductor_stays_as_it_is(monkeypatch):
    """Converting a module also rewrites how Inductor writes minima for a GPU, which no other test
    asked for.
    """
    monkeypatch.setattr("torchao.float8._inductor_patch._PATCHED", True)


def drawn(*shape, decades=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * 10.0 ** (
        -decades * torch.rand(*shape, generator=generator)
    )


def torchao_cast(values, dtype, powers=True):
    plain = ScaledMMConfig(True, False, False, False)
    found = hp_tensor_to_float8_dynamic(
        values, dtype, LinearMMConfig(plain, plain, plain), round_scales_to_power_of_2=powers
    )
    return found._data, found._scale


@given(
    seed=st.integers(0, 10**6),
    decades=st.integers(0, 8),
    exponent=st.integers(-30, 90),
    wide=st.booleans(),
)
@settings(max_examples=60)
@pytest.mark.parametrize("dtype", [FORWARD_DTYPE, BACKWARD_DTYPE], ids=str)
def test_numbers_and_scales_are_equal_in_bits(dtype, seed, decades, exponent, wide):
    values = drawn(64, 48, decades=decades, seed=seed) * 2.0**exponent
    values = values if wide else values.bfloat16()
    ours, unit = quantised_to_fp8(values, dtype)
    theirs, scale = torchao_cast(values, dtype)
    assert torch.equal(unit.reciprocal(), scale) and unit * scale == 1.0
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("dtype", [FORWARD_DTYPE, BACKWARD_DTYPE], ids=str)
def test_its_scales_that_are_no_powers_of_two_are_less_than_twice_ours(dtype):
    """So that ours give up less than a bit of the smallest numbers, and all numbers differ by two
    roundings.
    """
    relative, smallest = ULP[dtype]
    for seed in range(50):
        values = drawn(64, 48, decades=6, seed=seed)
        ours, unit = quantised_to_fp8(values, dtype)
        theirs, scale = torchao_cast(values, dtype, powers=False)
        assert 1.0 <= scale * unit < 2.0
        off = (ours.double() * unit.double() - theirs.double() / scale.double()).abs()
        assert (
            off <= torch.maximum(relative * values.double().abs(), smallest * unit.double())
        ).all()


def test_where_the_casts_differ():
    """A largest element below 1e-12 it scales as if it were that; a logarithm in fp32 can round up
    to the next.
    """
    tiny = drawn(16, 16) * 2.0**-60
    (ours, unit), (theirs, scale) = (
        quantised_to_fp8(tiny, FORWARD_DTYPE),
        torchao_cast(tiny, FORWARD_DTYPE),
    )
    assert (
        ours.float().abs().max() > 224 and scale == 2.0**48 and theirs.float().abs().max() < 2.0**-8
    )
    above = torch.tensor(448.0 / 1024).nextafter(torch.tensor(1.0)).reshape(1, 1)
    (ours, unit), (theirs, scale) = (
        quantised_to_fp8(above, FORWARD_DTYPE),
        torchao_cast(above, FORWARD_DTYPE),
    )
    assert unit.reciprocal() == 512 and scale == 1024 and above * scale > 448, (
        "it saturates by 1 part in 10^7"
    )
    assert ours.float() * unit == theirs.float() / scale == 448.0 / 1024


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_makes_both_products_so(poison):
    x, weight = drawn(16, 16), drawn(32, 16)
    x[3, 2] = poison
    theirs = layer_of(weight, emulate=True)(x)
    assert not fp8_linear(x, weight)[3].isfinite().any() and not theirs[3].isfinite().any()


def layer_of(weight_NK, emulate):
    outputs, inputs = weight_NK.shape
    config = Float8LinearConfig(
        round_scales_to_power_of_2=True, emulate=emulate, pad_inner_dim=True
    )
    layer = convert_to_float8_training(
        nn.Sequential(nn.Linear(inputs, outputs, bias=False)), config=config
    )[0]
    layer.weight = nn.Parameter(weight_NK.clone())
    return layer


@pytest.mark.parametrize("rows", [32, 33])
@pytest.mark.parametrize("decades", [0, 3])
@pytest.mark.parametrize("emulate", [True, False])
def test_layers_are_equal_but_for_the_order_of_sums_and_the_rounding_at_the_end(
    rows, decades, emulate
):
    x_MK, w_NK = drawn(rows, 48, decades=decades).bfloat16(), drawn(32, 48, seed=1)
    dy_MN = drawn(rows, 32, decades=decades, seed=2).bfloat16()
    ours_x, ours_w = x_MK.clone().requires_grad_(), w_NK.clone().requires_grad_()
    ours_y = fp8_linear(ours_x, ours_w)
    ours_y.backward(dy_MN)
    layer = layer_of(w_NK, emulate)
    their_x = x_MK.float().requires_grad_()
    their_y = layer(their_x)
    their_y.backward(dy_MN.float())
    x8, w8, dy8 = (
        found.double() * unit.double()
        for found, unit in (
            quantised_to_fp8(x_MK, FORWARD_DTYPE),
            quantised_to_fp8(w_NK, FORWARD_DTYPE),
            quantised_to_fp8(dy_MN, BACKWARD_DTYPE),
        )
    )
    for ours, theirs, left, right in (
        (ours_y, their_y, x8, w8.T),
        (ours_x.grad, their_x.grad, dy8, w8),
        (ours_w.grad, layer.weight.grad, dy8.T, x8),
    ):
        # Two sums of as many terms in fp32, each in an order of its own, and ours rounded to bf16
        # where it is bf16.
        at_the_end = 2.0**-8 * theirs.double().abs() if ours.dtype == torch.bfloat16 else 0.0
        bound = 2 * left.shape[1] * 2.0**-24 * (left.abs() @ right.abs()) + at_the_end
        assert ((ours.double() - theirs.double()).abs() <= bound).all()
