# Run: pytest tests/ops/test_rms_norm.py
"""RMSNorm against its equation and against torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from monograph.laws.comparisons import error_within, relative_error
from monograph.ops.rms_norm import rms_norm


def _inputs(dtype, size=48):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, size, generator=generator, dtype=torch.float64) * 3
    weight = torch.randn(size, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype)


def test_float64_stays_float64_to_the_last_digit():
    hidden, weight = _inputs(torch.float64)
    by_hand = torch.stack(
        [row / (row.dot(row) / len(row) + 1e-5).sqrt() * weight for row in hidden.flatten(0, 1)]
    )
    out = rms_norm(hidden, weight, 1e-5)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out.flatten(0, 1), by_hand, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_exact_as_torch_in_low_precision(dtype):
    hidden, weight = _inputs(dtype)
    exact = rms_norm(hidden.double(), weight.double(), 1e-5)
    assert error_within(
        rms_norm(hidden, weight, 1e-5), F.rms_norm(hidden, (48,), weight, 1e-5), exact
    )


def test_bf16_is_normalised_in_fp32_and_rounded_once():
    hidden, weight = _inputs(torch.bfloat16, size=4096)
    exact = rms_norm(hidden.double(), weight.double(), 1e-5)
    once_rounded = relative_error(exact.to(torch.bfloat16), exact)
    assert relative_error(rms_norm(hidden, weight, 1e-5), exact) < 1.05 * once_rounded


def test_eps_keeps_a_zero_vector_finite():
    out = rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5)
    assert torch.equal(out, torch.zeros(2, 8))


def test_gradients():
    hidden, weight = (x.requires_grad_() for x in _inputs(torch.float64, size=6))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (hidden, weight))
