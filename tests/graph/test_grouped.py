"""Run: pytest tests/graph/test_grouped.py    Grouped products are each row's product with its group's matrix."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import tiny_llama
from monograph import device
from monograph.graph import grouped, grouped_batches, grouped_blocks
from monograph.graph.grouped import grouped_linear
from monograph.laws.comparisons import error_within
from monograph.ops.fused_gradients import FusedGradient, fused_gradients
from waits import no_waits

SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=6)  # of groups, some of them empty


def drawn(sizes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((sum(sizes), 5), (len(sizes), 3, 5), (sum(sizes), 3))
    rows, weight, grad = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return (
        rows.requires_grad_(),
        weight.requires_grad_(),
        grad,
        torch.tensor(sizes).cumsum(0, dtype=torch.int32),
    )


def row_by_row(rows, weight, ends):
    groups = (ends <= torch.arange(len(rows))[:, None]).sum(1)
    return torch.stack(
        [weight[group] @ row for row, group in zip(rows, groups.tolist(), strict=True)]
    )


@settings(max_examples=20)
@given(sizes=SIZES.filter(any), seed=st.integers(0, 99))
def test_values_and_gradients_are_those_of_each_row_alone(sizes, seed):
    rows, weight, grad, ends = drawn(sizes, seed)
    ours, plain = grouped_linear(rows, weight, ends), row_by_row(rows, weight, ends)
    found, expected = (torch.autograd.grad(out, (rows, weight), grad) for out in (ours, plain))
    for mine, its in zip((ours, *found), (plain, *expected), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


def test_a_frozen_matrix_gets_no_gradient_and_no_rows_are_allowed():
    rows, weight, grad, ends = drawn([2, 0, 3])
    grouped_linear(rows, weight.requires_grad_(False), ends).backward(grad)
    assert weight.grad is None and rows.grad is not None
    nothing = drawn([0, 0])
    assert grouped_linear(nothing[0], nothing[1], nothing[3]).shape == (0, 3)


def test_one_graph_serves_however_rows_are_grouped():
    compiled = torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")
    for sizes in ([2, 0, 3], [5, 0, 0], [0, 1, 4]):
        rows, weight, grad, ends = drawn(sizes)
        out = compiled(rows, weight, ends)
        assert torch.equal(out, grouped_linear(rows, weight, ends))
        found, expected = (
            torch.autograd.grad(each, (rows, weight), grad)
            for each in (out, grouped_linear(rows, weight, ends))
        )
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("shared", [None, 0, 1])
def test_members_under_vmap_have_the_bits_that_they_have_alone(shared):
    members = [drawn(sizes, seed) for seed, sizes in enumerate(([2, 0, 3], [1, 4, 0], [0, 0, 5]))]
    stacks = [
        torch.stack(tensors).detach().requires_grad_(number < 2)
        for number, tensors in enumerate(zip(*members, strict=True))
    ]
    stacks = [
        stack[0].detach().requires_grad_() if number == shared else stack
        for number, stack in enumerate(stacks)
    ]
    rows, weight, grad, ends = stacks
    dims = tuple(None if number == shared else 0 for number in (0, 1, 3))
    out = torch.vmap(grouped_linear, in_dims=dims)(rows, weight, ends)
    found = torch.autograd.grad(out, (rows, weight), grad)
    sums = [torch.zeros_like(rows), torch.zeros_like(weight)]
    for number, (own_rows, own_weight, _, own_ends) in enumerate(members):
        own = [
            members[0][0] if shared == 0 else own_rows,
            members[0][1] if shared == 1 else own_weight,
        ]
        alone = grouped_linear(*own, own_ends)
        assert torch.equal(out[number], alone)
        for at, gradient in enumerate(torch.autograd.grad(alone, own, grad[number])):
            (sums[at] if at == shared else sums[at][number]).add_(gradient)
    assert all(torch.allclose(mine, its, rtol=1e-12) for mine, its in zip(found, sums, strict=True))


def test_fused_matrices_add_their_gradients_to_the_total():
    rows, weight, grad, ends = drawn([2, 0, 3], dtype=torch.float32)
    expected = torch.autograd.grad(grouped_linear(rows, weight, ends), (rows, weight), grad)
    weight.fused_gradient = FusedGradient(weight.detach(), torch.ones_like(weight))
    with fused_gradients():
        found = torch.autograd.grad(grouped_linear(rows, weight, ends), (rows,), grad)
    assert torch.equal(found[0], expected[0]) and torch.equal(
        weight.fused_gradient.total, 1 + expected[1]
    )


def test_autocast_rounds_rows_and_matrices():
    rows, weight, grad, ends = drawn([2, 0, 3], dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = grouped_linear(rows, weight, ends)
    assert torch.equal(out, grouped_linear(rows.bfloat16(), weight.bfloat16(), ends))
    assert [g.dtype for g in torch.autograd.grad(out, (rows, weight), grad.bfloat16())] == [
        torch.float32
    ] * 2


@pytest.mark.skipif(
    "avx512f" not in device.cpu_model()[1], reason="no AVX-512, for which the products are written"
)
@pytest.mark.parametrize("threads", [1, 3])
def test_our_own_products_are_as_exact_as_the_librarys_and_a_row_has_the_same_bits_in_any_group(
    threads, monkeypatch
):
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([1, 1, 402, 430], dtype=torch.int32)
    rows, weight = (
        torch.randn(430, 131, generator=generator),
        torch.randn(4, 45, 131, generator=generator),
    )
    grad = torch.randn(430, 45, generator=generator)
    before, found = torch.get_num_threads(), {}
    try:
        torch.set_num_threads(threads)
        for own in (True, False):
            monkeypatch.setattr(grouped, "_uses_own_code", lambda _, own=own: own)
            found[own] = (
                grouped.product(rows, weight, ends), grouped.product(grad, weight.mT, ends),
                grouped._outer(grad, rows, ends),
            )  # fmt: skip
    finally:
        torch.set_num_threads(before)
    exact = (
        row_by_row(rows.double(), weight.double(), ends),
        row_by_row(grad.double(), weight.double().mT, ends),
    )
    parts = [each.double().tensor_split(ends[:-1].long()) for each in (grad, rows)]
    outer = torch.stack([one.T @ other for one, other in zip(*parts, strict=True)])
    for mine, naive, true in zip(found[True], found[False], (*exact, outer), strict=True):
        assert error_within(mine, naive, true)
    monkeypatch.setattr(grouped, "_uses_own_code", lambda _: True)
    alone = grouped.product(rows[[77]], weight[[2]], torch.tensor([1], dtype=torch.int32))
    assert torch.equal(alone[0], found[True][0][77])


def test_torchs_grouped_products_are_called_as_a_gpu_calls_them():
    sizes = [3, 0, 1, 5]
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    rows, weight, grad = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((9, 16), (4, 24, 16), (9, 24))
    )
    assert torch.equal(
        grouped._product_by_torch(rows, weight, ends), grouped.product(rows, weight, ends)
    )
    assert torch.equal(
        grouped._product_by_torch(grad, weight.mT, ends), grouped.product(grad, weight.mT, ends)
    )
    assert torch.equal(grouped._outer_by_torch(grad, rows, ends), grouped._outer(grad, rows, ends))


@settings(max_examples=20)
@given(sizes=SIZES.filter(any), seed=st.integers(0, 99), most=st.sampled_from([1, 40, 2**27]))
def test_products_in_blocks_and_in_one_batch_are_those_of_a_loop(sizes, seed, most):
    rows, weight, grad, ends = drawn(sizes, seed)
    expected = grouped.product(rows, weight, ends), grouped._outer(grad, rows, ends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_blocks, "MAX_COPIED_ELEMENTS", most)
        patch.setattr(grouped_blocks, "MIN_BLOCK_ROWS", 2)
        patch.setattr(grouped_batches, "MIN_MEAN_ROWS", 2)
        patch.setattr(grouped_batches, "CAPACITY_UNIT", 2)
        for way in (grouped_blocks, grouped_batches):
            for mine, its in zip(
                (way.product(rows, weight, ends), way.outer(grad, rows, ends)),
                expected,
                strict=True,
            ):
                torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)
    grouped_batches._batch.cache_clear()


def test_a_row_in_16_bits_has_the_same_bits_in_one_batch_and_alone(monkeypatch):
    rows, weight, grad, ends = drawn([200, 0, 3, 20, 1], dtype=torch.float32)
    found = {}
    for batched in (True, False):
        if not batched:
            monkeypatch.setattr(grouped, "_uses_batches", lambda *_: False)
        narrow = [each.detach().bfloat16() for each in (rows, weight, grad)]
        found[batched] = (
            grouped.product(*narrow[:2], ends),
            grouped._outer(narrow[2], narrow[0], ends),
        )
    assert torch.equal(found[True][0], found[False][0])
    exact = grouped._outer(narrow[2].double(), narrow[0].double(), ends)
    assert error_within(found[True][1], found[False][1], exact)


def test_products_in_16_bits_have_no_new_shape_when_rows_move_between_groups(monkeypatch):
    shapes = set()
    batched, single = torch.Tensor.__matmul__, torch.mm
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: shapes.add((*a.shape, *b.shape)) or batched(a, b)
    )
    monkeypatch.setattr(
        torch, "mm", lambda a, b, **out: shapes.add((*a.shape, *b.shape)) or single(a, b, **out)
    )
    known = None
    for sizes in ([60, 40, 4], [36, 34, 34], [30, 41, 33], [52, 0, 52]):
        rows, weight, grad, ends = drawn(sizes, dtype=torch.bfloat16)
        grouped.product(rows.detach(), weight.detach(), ends)
        grouped._outer(grad, rows.detach(), ends)
        known = known or set(shapes)
    assert shapes == known


@pytest.mark.parametrize(
    ("rows", "blocks"), [(8, 8), (4096, 4096 // 32 + 64), (2**16, 2**16 // 128 + 64)]
)
def test_there_are_few_blocks_and_their_number_does_not_depend_on_the_groups(rows, blocks):
    for ends in (torch.full((64,), rows), torch.arange(1, 65) * rows // 64):
        made = grouped_blocks._blocks(ends, rows)
        assert len(made.group_B) <= blocks and made.has_row_BC.sum() == rows


@pytest.mark.gpu
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32])
def test_on_a_gpu_a_mixture_waits_for_nothing_and_is_as_exact_as_its_dense_way(narrow):
    sizes = {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    }
    made = tiny_llama(hidden_size=64, **sizes).model.layers[0].mlp
    hidden, found = torch.randn(2, 40, 64), {}
    for way, dtype in (("grouped", narrow), ("dense", narrow), ("dense", torch.float64)):
        each, leaf = (
            copy.deepcopy(made).to("cuda", dtype),
            hidden.to("cuda", dtype).requires_grad_(),
        )
        each.impl = way
        each(leaf).sum().backward()  # so that lazy initialisation is over
        with no_waits() if way == "grouped" else contextlib.nullcontext():
            out = each(leaf)
            gradients = torch.autograd.grad(
                out, (leaf, *each.experts.parameters()), torch.ones_like(out)
            )
        found[way, dtype] = [tensor.cpu() for tensor in (out, *gradients)]
    ours, naive, exact = found.values()
    assert all(error_within(*three, k=4) for three in zip(ours, naive, exact, strict=True))
