# Run: pytest tests/ops/test_token_rows.py
"""Trained rows of a frozen table: lookups, products and the loss beside a copy of the table with
the rows in it.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from monograph.laws.comparisons import error_within
from monograph.ops.cross_entropy import linear_cross_entropy
from monograph.ops.token_rows import (
    ReplacementRows,
    embedding_with_rows,
    linear_with_rows,
    with_replaced_rows,
)
from monograph.profiling.memory import LiveBytes

N, D, V, INDEX = 37, 16, 101, (3, 50, 100)
CAPTURES = [
    None,
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor")),
]
CAPTURES_OF_THE_LOSS = [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def rows_of(weight: Tensor, spread: float) -> ReplacementRows:
    """Rows that are the table's own, and `spread` away from them."""
    index = torch.tensor(INDEX)
    noise = (
        torch.randn(len(INDEX), D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        * spread
    )
    wide = torch.promote_types(weight.dtype, torch.float32)
    values = (weight[index].double() + noise).to(wide).requires_grad_()
    slots = torch.full((V,), -1).index_copy(0, index, torch.arange(len(INDEX)))
    return ReplacementRows(values, index, slots)


def inputs(dtype=torch.float32, spread=0.5) -> tuple[Tensor, Tensor, Tensor, ReplacementRows]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(V, (N,), generator=generator)
    targets[::3] = torch.tensor(INDEX).repeat(9)[: len(targets[::3])]
    targets[::7] = -100
    return hidden.requires_grad_(), weight, targets, rows_of(weight, spread)


def as_double(hidden, weight, targets, rows):
    double = rows._replace(values_KD=rows.values_KD.detach().double().requires_grad_())
    return hidden.detach().double().requires_grad_(), weight.double(), targets, double


def loss_of(hidden, weight, targets, rows, **options):
    return linear_cross_entropy(hidden, weight, targets, rows=rows, **options)


def run(function, hidden, weight, targets, rows, **options):
    loss, count = function(hidden, weight, targets, rows, **options)
    return [loss.detach(), *torch.autograd.grad(loss / count, (hidden, rows.values_KD))]


@pytest.mark.parametrize("capture", CAPTURES_OF_THE_LOSS)
@pytest.mark.parametrize(
    ("dtype", "chunks"),
    [
        (torch.bfloat16, 4),
        *(pytest.param(torch.float32, chunks, marks=pytest.mark.slow) for chunks in (1, 4)),
    ],
    ids=str,
)
def test_the_loss_is_within_the_dense_path_s_own_error(dtype, chunks, capture):
    args = inputs(dtype)
    torch.compiler.reset()
    function = (
        loss_of if capture is None else torch.compile(loss_of, fullgraph=True, backend=capture)
    )
    ours, naive = run(function, *args, chunks=chunks), run(loss_of, *args, impl="reference")
    exact = run(loss_of, *as_double(*args), impl="reference")
    for mine, theirs, truth in zip(ours, naive, exact, strict=True):
        assert error_within(mine, theirs, truth)
    with torch.no_grad():
        assert error_within(loss_of(*args, chunks=chunks)[0], naive[0], exact[0])


def test_gradcheck():
    hidden, weight, targets, rows = as_double(*inputs())

    def loss(hidden, values):
        return loss_of(hidden, weight, targets[:6], rows._replace(values_KD=values), chunks=3)[0]

    assert torch.autograd.gradcheck(loss, (hidden.detach()[:6].requires_grad_(), rows.values_KD))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_are_the_tables_own_leave_every_bit(dtype):
    hidden, weight, targets, rows = inputs(dtype, spread=0.0)
    loss, _ = linear_cross_entropy(hidden, weight, targets, chunks=3)
    (grad,) = torch.autograd.grad(loss, hidden)
    found, _ = linear_cross_entropy(hidden, weight, targets, chunks=3, rows=rows)
    assert torch.equal(found, loss) and torch.equal(torch.autograd.grad(found, hidden)[0], grad)
    assert torch.equal(linear_with_rows(hidden, weight, rows), hidden @ weight.T)
    assert torch.equal(
        embedding_with_rows(targets.clamp_min(0), weight, rows), weight[targets.clamp_min(0)]
    )


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.float32, torch.float64)),
    ],
)
def test_a_lookup_is_one_in_the_table_with_the_rows_in_it(dtype, capture):
    torch.compiler.reset()
    _, weight, targets, rows = inputs(dtype)
    tokens, cotangent = targets.clamp_min(0).view(1, -1), torch.randn(1, N, D, dtype=dtype)

    def gradient(function, cotangent, weight, rows):
        found = function(tokens, weight, rows)
        return found, *torch.autograd.grad((found * cotangent).sum(), rows.values_KD)

    ours = gradient(
        embedding_with_rows
        if capture is None
        else torch.compile(embedding_with_rows, backend=capture),
        cotangent,
        weight,
        rows,
    )
    in_copy = lambda tokens, weight, rows: F.embedding(tokens, with_replaced_rows(weight, rows))  # noqa: E731
    naive = gradient(in_copy, cotangent, weight, rows)
    exact = gradient(
        embedding_with_rows,
        cotangent.double(),
        *as_double(rows.values_KD, weight, targets, rows)[1::2],
    )
    assert torch.equal(ours[0], naive[0]) and error_within(ours[1], naive[1], exact[1])


def test_a_product_is_one_with_the_table_with_the_rows_in_it():
    hidden, weight, _, rows = as_double(*inputs())
    torch.testing.assert_close(
        linear_with_rows(hidden, weight, rows),
        hidden @ with_replaced_rows(weight, rows).T,
        rtol=1e-13,
        atol=1e-13,
    )


def test_members_of_a_batch_have_rows_of_their_own():
    """Under vmap, as an ensemble calls it, with gradients taken outside and inside of the
    transform.
    """
    hidden, weight, targets, rows = as_double(*inputs())
    values = torch.stack([rows.values_KD.detach(), 2 * rows.values_KD.detach()]).requires_grad_()

    def loss(values_KD):
        embedded = embedding_with_rows(
            targets.clamp_min(0), weight, rows._replace(values_KD=values_KD)
        )
        return loss_of(
            hidden.detach() + embedded,
            weight,
            targets,
            rows._replace(values_KD=values_KD),
            chunks=2,
        )[0]

    together = torch.vmap(loss)(values)
    (grads,) = torch.autograd.grad(together.sum(), values)
    inside = torch.vmap(torch.func.grad(loss))(values.detach())
    for number in range(2):
        alone = values[number].detach().requires_grad_()
        expected = loss(alone)
        torch.testing.assert_close(together[number], expected, rtol=1e-12, atol=0)
        (grad,) = torch.autograd.grad(expected, alone)
        torch.testing.assert_close(grads[number], grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(inside[number], grad, rtol=1e-12, atol=1e-12)


def test_no_second_table_and_no_gradient_of_its_size():
    size, width = 20_000, 64
    weight, hidden = torch.randn(size, width), torch.randn(8, width, requires_grad=True)
    index = torch.tensor([1, size - 1])
    slots = torch.full((size,), -1).index_copy(0, index, torch.arange(2))
    rows = ReplacementRows(weight[index].clone().requires_grad_(), index, slots)
    targets = torch.tensor([0, 1, 2, 3, 4, 5, 6, size - 1])
    with LiveBytes() as live:
        loss, _ = loss_of(hidden, weight, targets, rows, chunks=1)
        (loss + embedding_with_rows(targets, weight, rows).sum()).backward()
    assert live.peak_bytes < weight.nbytes
