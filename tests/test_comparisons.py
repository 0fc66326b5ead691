"""Run: pytest tests/test_comparisons.py"""

from __future__ import annotations

import torch

from monograph.laws.comparisons import error_within, relative_error


def test_relative_error_is_measured_in_float64() -> None:
    one = torch.ones(1000, dtype=torch.float32)
    assert relative_error(one.double() + 1e-12, one) < 1.1e-12
    assert relative_error(1.5 * one, one) == 0.5
    assert relative_error(one, 0 * one) == one.double().norm().item()


def test_not_a_number_is_infinitely_wrong() -> None:
    one = torch.ones(3)
    assert relative_error(one * torch.nan, one) == float("inf")
    assert relative_error(one * torch.inf, one) == float("inf")
    assert not error_within(one * torch.nan, one, one.double())
    assert not error_within(one * torch.nan, one * torch.nan, one.double())


def test_the_bound_is_the_naive_paths_own_error() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 512, generator=generator) for _ in range(2))
    exact = left.double() @ right.double().T
    naive = (left.bfloat16() @ right.bfloat16().T).float()
    assert error_within(left @ right.T, naive, exact)
    assert not error_within(naive, left @ right.T, exact), "bf16 arithmetic passed for fp32"
    assert error_within(exact.float(), exact.float(), exact), "storing the exact result must pass"
