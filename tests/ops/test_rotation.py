"""Run: pytest tests/ops/test_rotation.py

Heads that an operator of a compiled step rotates, and their gradients, are as exact as those that
PyTorch's operators rotate.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monograph.graph.capture import compiled
from monograph.laws.comparisons import error_within
from monograph.model.rope import rotate
from monograph.ops.rotation import can_rotate_heads, rotate_heads

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Rows, positions, heads, channels; sizes that are no powers of two among them.
SHAPES = [(2, 5, 3, 8), (1, 7, 8, 64), (3, 4, 1, 24)]


def inputs(shape: tuple[int, int, int, int], table_rows: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """The output of a product in fp64, of which the heads are the first columns; the angles' cosine
    and sine; and the number of these columns.
    """
    rows, positions, heads, channels = shape
    generator = torch.Generator().manual_seed(heads)
    product = torch.randn(rows, positions, heads * channels + 16, generator=generator).double()
    angles = 10 * torch.rand(table_rows, positions, channels // 2, generator=generator).double()
    return product, angles.cos(), angles.sin(), heads * channels


def by_reference(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tables = cos.unsqueeze(1), sin.unsqueeze(1)
    return rotate(heads.transpose(1, 2), tables, "cpu").transpose(1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("shares_table", [False, True])
def test_heads_and_their_gradients_are_as_exact_as_by_operators(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, shares_table: bool
) -> None:
    product, cos, sin, columns = inputs(shape, 1 if shares_table else shape[0])
    weights = torch.linspace(-1, 1, columns).view(shape[2], shape[3]).double()

    def found(dtype: torch.dtype, device: str, turn) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        rounded = product.to(torch_dtype).to(device, dtype).requires_grad_()
        wide = torch.promote_types(dtype, torch.float32)
        tables = cos.float().to(device, wide), sin.float().to(device, wide)
        heads = rounded[..., :columns].unflatten(-1, (shape[2], shape[3]))
        rotated = turn(heads, *tables)
        (rotated * weights.to(device, dtype)).sum().backward()
        assert rounded.grad is not None
        return rotated.detach().cpu(), rounded.grad.cpu()

    torch_dtype = dtype
    ours = found(dtype, device, rotate_heads)
    naive = found(dtype, "cpu", by_reference)
    exact = found(torch.float64, "cpu", by_reference)
    for mine, theirs, true in zip(ours, naive, exact, strict=True):
        assert mine.shape == true.shape and error_within(mine, theirs, true)


def test_what_the_kernel_cannot_compute_is_left_to_operators() -> None:
    heads, angles = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1)
    assert can_rotate_heads(heads, angles) and can_rotate_heads(heads.bfloat16(), angles)
    assert not can_rotate_heads(heads.double(), angles)
    assert not can_rotate_heads(heads, angles.double())


@pytest.mark.parametrize(
    ("of_product", "needs_gradient"), [(True, True), (False, True), (True, False)]
)
def test_only_a_step_s_projections_have_the_kernel(of_product: bool, needs_gradient: bool) -> None:
    heads = torch.randn(1, 2, 3, 8, requires_grad=needs_gradient)
    angles = torch.rand(1, 1, 3, 4)
    seen: list[bool] = []

    def turn(heads: Tensor) -> Tensor:
        return rotate(heads, (angles.cos(), angles.sin()), "cuda", of_product=of_product)

    def backend(graph, example):  # type: ignore[no-untyped-def]
        seen.append("rotate_heads" in str(graph.graph))
        return graph

    with torch.set_grad_enabled(needs_gradient):
        rotated = compiled(turn, backend)(heads)  # type: ignore[arg-type]
    assert seen == [of_product and needs_gradient]
    torch.testing.assert_close(rotated, rotate(heads, (angles.cos(), angles.sin())))


@pytest.mark.parametrize("device", DEVICES)
def test_no_heads_are_rotated_to_none(device: str) -> None:
    """A rank may have no row of a window."""
    heads, angles = torch.empty(0, 5, 3, 8), torch.empty(1, 5, 4)
    rotated = rotate_heads(heads.to(device), angles.to(device), angles.to(device))
    assert rotated.shape == heads.shape
