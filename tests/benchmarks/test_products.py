"""Run: pytest tests/benchmarks/test_products.py

What counts matrix products counts those in fp8 apart.
"""

from __future__ import annotations

import torch

from monograph import compat


def test_products_in_fp8_are_counted_apart(script) -> None:  # type: ignore[no-untyped-def]
    left, right = torch.randn(32, 48), torch.randn(64, 48)
    unit = torch.ones(())
    eighths = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
    pretended = script("pretended")
    with pretended.Products() as products:
        left @ right.T
    assert (products.flops, products.fp8_flops) == (2 * 32 * 48 * 64, 0)
    # A CPU computes it by a product of wider numbers, which is seen, too; a card does not.
    with pretended.Products() as products:
        compat.scaled_mm(*eighths, unit, unit, torch.bfloat16)
    assert products.fp8_flops == 2 * 32 * 48 * 64


def test_documents_of_a_packed_window_are_its_pieces(script) -> None:  # type: ignore[no-untyped-def]
    steps = script("steps")
    shape = steps.SMOKE["nano"]
    window = steps.packed_window(shape, torch.device("cpu"))
    pieces = steps.piece_lengths(window)
    seen = (window["positions"] + 1).double().mean().item()
    assert pieces.visible_positions() == seen
    del window["positions"]
    assert steps.piece_lengths(window).visible_positions() == (shape.length + 1) / 2
