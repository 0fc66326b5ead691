"""Run: pytest tests/ops/test_rotation.py

Heads that operators of a compiled step rotate, and their gradients, are as exact as those that
PyTorch's operators rotate.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monograph.graph.capture import compiled
from monograph.laws.comparisons import error_within
from monograph.model.rope import rotate, rotate_heads
from monograph.ops.rotation import can_rotate_projections, rotate_projections

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Rows, positions, heads, key-value heads, channels; sizes that are no powers of two among them.
SHAPES = [(2, 5, 3, 3, 8), (1, 7, 8, 2, 64), (3, 4, 3, 1, 24)]
Shape = tuple[int, int, int, int, int]


def inputs(shape: Shape, table_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The common product of queries, keys and values in fp64; the angles' cosine and sine."""
    rows, positions, heads, key_heads, channels = shape
    generator = torch.Generator().manual_seed(heads)
    width = (heads + 2 * key_heads) * channels
    product = torch.randn(rows, positions, width, generator=generator).double()
    angles = 10 * torch.rand(table_rows, positions, channels // 2, generator=generator).double()
    return product, angles.cos(), angles.sin()


def by_reference(*arguments: Tensor) -> tuple[Tensor, ...]:
    *projections, cos, sin = arguments
    tables = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = rotate_heads(*projections, 2 * cos.shape[-1], tables, "cpu")
    return tuple(heads.transpose(1, 2) for heads in rotated)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("shares_table", [False, True])
def test_heads_and_their_gradients_are_as_exact_as_by_operators(
    shape: Shape, dtype: torch.dtype, device: str, shares_table: bool
) -> None:
    _, _, heads, key_heads, channels = shape
    product, cos, sin = inputs(shape, 1 if shares_table else shape[0])
    sizes = [heads * channels, key_heads * channels, key_heads * channels]

    def found(dtype: torch.dtype, device: str, turn) -> list[Tensor]:  # type: ignore[no-untyped-def]
        rounded = product.to(torch_dtype).to(device, dtype).requires_grad_()
        wide = torch.promote_types(dtype, torch.float32)
        tables = cos.float().to(device, wide), sin.float().to(device, wide)
        rotated = turn(*rounded.split(sizes, -1), *tables)
        # Attention reads heads by heads, and so do the gradients' strides differ.
        by_heads = [each.transpose(1, 2).flatten() for each in rotated]
        weights = (torch.linspace(-1, 1, len(each)).to(device, dtype) for each in by_heads)
        sum(
            (each * weight).sum() for each, weight in zip(by_heads, weights, strict=True)
        ).backward()
        assert rounded.grad is not None
        return [each.detach().cpu() for each in (*rotated, rounded.grad)]

    torch_dtype = dtype
    ours = found(dtype, device, rotate_projections)
    naive = found(dtype, "cpu", by_reference)
    exact = found(torch.float64, "cpu", by_reference)
    for mine, theirs, true in zip(ours, naive, exact, strict=True):
        assert mine.shape == true.shape and error_within(mine, theirs, true)


def test_what_the_kernels_cannot_compute_is_left_to_operators() -> None:
    heads, angles = torch.zeros(1, 1, 2), torch.zeros(1, 1, 1)
    assert can_rotate_projections(heads, angles)
    assert can_rotate_projections(heads.bfloat16(), angles)
    assert not can_rotate_projections(heads.double(), angles)
    assert not can_rotate_projections(heads, angles.double())


@pytest.mark.parametrize(
    ("rotated_channels", "needs_gradient", "device_type"),
    [(8, True, "cuda"), (4, True, "cuda"), (8, False, "cuda"), (8, True, "cpu")],
)
def test_only_a_gpu_s_step_has_the_kernels(
    rotated_channels: int, needs_gradient: bool, device_type: str
) -> None:
    product = torch.randn(1, 3, 4 * 8, requires_grad=needs_gradient)
    angles = torch.rand(1, 1, 3, rotated_channels // 2)
    tables = angles.cos(), angles.sin()
    seen: list[bool] = []

    def turn(product: Tensor) -> tuple[Tensor, ...]:
        return rotate_heads(*product.split([16, 8, 8], -1), 8, tables, device_type)

    def backend(graph, example):  # type: ignore[no-untyped-def]
        seen.append("monograph.rotate" in graph.print_readable(print_output=False))
        return graph

    with torch.set_grad_enabled(needs_gradient):
        rotated = compiled(turn, backend)(product)  # type: ignore[arg-type]
    assert seen == [rotated_channels == 8 and needs_gradient and device_type == "cuda"]
    query, key, value = (
        each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in product.split([16, 8, 8], -1)
    )
    expected = rotate(query, tables, "cpu"), rotate(key, tables, "cpu"), value
    for mine, theirs in zip(rotated, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_are_rotated_to_none(device: str) -> None:
    """A rank may have no row of a window."""
    projections = [torch.empty(0, 5, channels, device=device) for channels in (24, 8, 8)]
    angles = torch.empty(1, 5, 4, device=device)
    query, key, value = rotate_projections(*projections, angles, angles)
    assert query.shape == (0, 5, 3, 8)
    assert key.shape == value.shape == (0, 5, 1, 8)


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_are_rotated_to_none_and_neither_have_gradients(device: str) -> None:
    """A rank may have no row of a window."""
    product = torch.empty(0, 5, 5 * 8, device=device, requires_grad=True)
    angles = torch.rand(1, 5, 4, device=device)
    query, key, value = rotate_projections(*product.split([24, 8, 8], -1), angles, angles)
    assert (query.shape, key.shape, value.shape) == ((0, 5, 3, 8), (0, 5, 1, 8), (0, 5, 1, 8))
    (query.sum() + key.sum() + value.sum()).backward()
    assert product.grad is not None and product.grad.shape == product.shape
