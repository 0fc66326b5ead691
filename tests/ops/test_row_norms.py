"""Run: pytest tests/ops/test_row_norms.py (norms of W + B A without B A are those of the sum)."""

from __future__ import annotations

import pytest
import torch

from monograph.laws.comparisons import relative_error
from monograph.ops.row_norms import row_norms, sum_row_norms


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
def test_the_norms_of_a_sum(dtype, bound, spread):
    generator = torch.Generator().manual_seed(0)
    W, A, B = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((48, 32), (4, 32), (48, 4))
    )
    B *= spread
    found, expected = sum_row_norms(row_norms(W), A @ W.mT, A, B), row_norms(W + B @ A)
    assert found.dtype == dtype and relative_error(found, expected) <= bound
    if not spread:
        assert torch.equal(found, row_norms(W))
