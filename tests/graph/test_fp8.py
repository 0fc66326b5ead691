# Run: pytest tests/graph/test_fp8.py [-m slow]
"""fp8 linear layers: their numbers and products against float64, what they leave alone, a short run
beside bf16.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batches import flat_gradient, large_batch_gradient, ragged, tiny_llama
from monograph.errors import UsageError
from monograph.graph import fp8
from monograph.graph.capture import compiled
from monograph.graph.fp8 import (
    BACKWARD_DTYPE,
    FORWARD_DTYPE,
    Float8Linear,
    fp8_linear,
    quantised_to_fp8,
)
from monograph.graph.precision import Precision
from monograph.laws.comparisons import relative_error
from monograph.optim import AdamW, hidden_matrices
from monograph.resident import Resident
from monograph.step import Step

# Relative, and the smallest number.
ULP = {FORWARD_DTYPE: (2.0**-3, 2.0**-9), BACKWARD_DTYPE: (2.0**-2, 2.0**-16)}


def drawn(*shape, decades=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * 10.0 ** (
        -decades * torch.rand(*shape, generator=generator)
    )


@given(seed=st.integers(0, 10**6), decades=st.integers(0, 8), exponent=st.integers(-90, 90))
@settings(max_examples=30)
@pytest.mark.parametrize("dtype", [FORWARD_DTYPE, BACKWARD_DTYPE], ids=str)
def test_numbers_are_the_nearest_under_a_scale_that_uses_the_range(dtype, seed, decades, exponent):
    values = drawn(100, decades=decades, seed=seed) * 2.0**exponent
    found, unit = quantised_to_fp8(values, dtype)
    table = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    table = table[table.isfinite()]
    scaled = values.double() / unit.double()
    assert torch.frexp(unit)[0] == 0.5, "a power of two"
    assert torch.finfo(dtype).max / 2 < scaled.abs().max() <= torch.finfo(dtype).max
    nearest = (scaled[:, None] - table).abs().amin(1)
    assert torch.equal((found.double() - scaled).abs(), nearest)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_zeros_stay_and_what_is_not_finite_makes_the_product_so(poison):
    found, unit = quantised_to_fp8(torch.zeros(4), FORWARD_DTYPE)
    assert not found.float().any() and unit.isfinite()
    x, weight = drawn(16, 16), drawn(32, 16)
    x[3, 2] = poison
    assert not fp8_linear(x, weight)[3].isfinite().any()


def rounding(values, dtype):
    """The most that `quantised_to_fp8` is off, element by element."""
    relative, smallest = ULP[dtype]
    _, unit = quantised_to_fp8(values, dtype)
    return torch.maximum(values.double().abs() * relative, smallest * unit.double()) / 2


@pytest.mark.parametrize("rows", [32, 33])
@pytest.mark.parametrize("decades", [0, 3])
def test_products_are_those_of_the_rounded_operands_and_near_the_exact_ones(rows, decades):
    x_MK, w_NK, dy_MN = (
        drawn(rows, 48, decades=decades),
        drawn(32, 48, seed=1),
        drawn(rows, 32, decades=decades, seed=2),
    )
    x_MK, w_NK, dy_MN = x_MK.bfloat16().requires_grad_(), w_NK.requires_grad_(), dy_MN.bfloat16()
    y_MN = fp8_linear(x_MK.view(rows, 1, 48), w_NK).view(rows, 32)
    y_MN.backward(dy_MN)
    assert (y_MN.dtype, x_MK.grad.dtype, w_NK.grad.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    x, w = x_MK.detach(), w_NK.detach()
    x8, w8, dy8 = (
        (q.double() * u.double())
        for q, u in (
            quantised_to_fp8(x, FORWARD_DTYPE),
            quantised_to_fp8(w, FORWARD_DTYPE),
            quantised_to_fp8(dy_MN, BACKWARD_DTYPE),
        )
    )
    for found, left, right, raw_left, raw_right, kind in (
        (y_MN, x8, w8.T, x, w.T, FORWARD_DTYPE),
        (x_MK.grad, dy8, w8, dy_MN, w, BACKWARD_DTYPE),
        (w_NK.grad, dy8.T, x8, dy_MN.T, x, BACKWARD_DTYPE),
    ):
        exact, size = left @ right, left.abs() @ right.abs()
        rounded = 2.0**-8 if found.dtype == torch.bfloat16 else 0.0
        assert (
            (found.double() - exact).abs()
            <= rounded * exact.abs() + left.shape[1] * 2.0**-23 * size
        ).all()
        off_left, off_right = rounding(raw_left, kind), rounding(raw_right, FORWARD_DTYPE)
        bound = (
            off_left @ raw_right.double().abs()
            + raw_left.double().abs() @ off_right
            + off_left @ off_right
        )
        error = (left @ right - raw_left.double() @ raw_right.double()).abs()
        assert (error <= bound * (1 + 1e-9)).all() and error.max() > 0.01 * bound.max()


def engine_of(name, micro_batch=4, **sizes):
    return Resident(
        tiny_llama(**sizes),
        optim=AdamW(lr=1e-2),
        precision=Precision(name),
        micro_batch=micro_batch,
    )


def test_linear_layers_of_blocks_and_nothing_else():
    engine = engine_of("fp8")
    kinds = {
        name: type(layer)
        for name, layer in engine.model.named_modules()
        if isinstance(layer, nn.Linear)
    }
    assert {name for name, kind in kinds.items() if kind is not Float8Linear} == {"lm_head"}
    assert list(engine.model.state_dict()) == list(tiny_llama().state_dict())
    assert all(
        p.dtype == torch.float32 and p.grad.dtype == torch.float32
        for p in engine.model.parameters()
    )
    assert torch.equal(engine.evaluate(ragged(4))[0], engine_of("bf16").evaluate(ragged(4))[0]), (
        "scored in bf16"
    )


def test_sides_that_are_no_multiple_of_16_stay_in_bf16_and_are_named():
    engine = engine_of("fp8", intermediate_size=40)
    assert len(engine.step.left_in_bf16) == 6 and all(
        ".mlp." in name for name in engine.step.left_in_bf16
    )
    engine.accumulate(ragged(4))
    assert float(engine.update().grad_norm) > 0
    odd = nn.Sequential(nn.Sequential(nn.Linear(16, 24, bias=False)))
    for module in (odd, nn.Linear(16, 16)):
        with pytest.raises(UsageError, match="no linear layer inside a block.*: use bf16"):
            fp8.convert_(module, hidden_matrices(module))
    biased = nn.Sequential(nn.Sequential(nn.Linear(16, 16)))
    assert fp8.convert_(biased, hidden_matrices(biased)) == []
    x = drawn(8, 16)
    plain = fp8_linear(x, biased[0][0].weight) + biased[0][0].bias.bfloat16()
    assert torch.equal(biased(x), plain)


def gradient(engine, batch):
    engine.accumulate(batch)
    return flat_gradient(engine.model)


@pytest.fixture(scope="module")
def eight():
    """A window, its gradient in float64, and the error of fp8 on the whole of it at once."""
    batch = ragged(8, seed=1)
    truth = large_batch_gradient(tiny_llama(torch.float64, num_hidden_layers=1), batch)
    error = relative_error(gradient(engine_of("fp8", 8, num_hidden_layers=1), batch), truth)
    bf16 = relative_error(gradient(engine_of("bf16", 8, num_hidden_layers=1), batch), truth)
    assert 3 * bf16 < error < 0.2, (bf16, error)
    return batch, truth, error


@pytest.mark.parametrize("size", [1, 3])
def test_any_split_is_as_close_as_the_large_batch(eight, size):
    batch, truth, error = eight
    assert (
        relative_error(gradient(engine_of("fp8", size, num_hidden_layers=1), batch), truth)
        <= 2 * error
    )


@pytest.mark.parametrize(
    "backend",
    ["eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor"))],
)
def test_captured_is_as_close_as_eager(eight, backend):
    batch, truth, error = eight
    engine = engine_of("fp8", 8, num_hidden_layers=1)
    engine.step.forward.function = compiled(engine.step.forward.function, backend)
    assert relative_error(gradient(engine, batch), truth) <= 2 * error


@pytest.mark.slow
def test_a_short_run_ends_where_bf16_s_does():
    """Memorising four rows for 30 updates: the last losses differ by less than seeds make them
    differ.
    """
    ends = {}
    for name, seed in (("fp8", 0), ("bf16", 0), ("bf16", 1), ("bf16", 2)):
        step = Step(
            tiny_llama(seed=seed), optim=AdamW(lr=1e-2), clip=1.0, precision=Precision(name)
        )
        losses = [float(step([ragged(4, seed=3)]).loss) for _ in range(30)]
        ends[name, seed] = sum(losses[-5:]) / 5
        print(name, seed, losses[0], ends[name, seed])
    assert ends["fp8", 0] < 0.7 * losses[0], "it must have learnt something"
    spread = max(ends["bf16", s] for s in range(3)) - min(ends["bf16", s] for s in range(3))
    assert abs(ends["fp8", 0] - ends["bf16", 0]) <= spread
