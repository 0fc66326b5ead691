# Run: pytest tests/graph/test_matmul.py
"""Captured fp32 products by our own code and by oneDNN equal MKL's, and graphs ask for each where
it is fastest.
"""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from monograph import compat, device
from monograph.graph import matmul
from monograph.graph.capture import compiled
from monograph.laws.comparisons import error_within

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)


needs_avx512 = pytest.mark.skipif("avx512f" not in device.cpu_model()[1], reason="no AVX-512")
WAYS = [
    pytest.param(matmul.onednn, marks=needs_onednn),
    pytest.param(matmul.native, marks=needs_avx512),
]


def pair(rows, summed, columns, turned=(False, False)):
    torch.manual_seed(0)
    left = torch.randn(summed, rows).T if turned[0] else torch.randn(rows, summed)
    right = torch.randn(columns, summed).T if turned[1] else torch.randn(summed, columns)
    return left, right


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (33, 17, 5), (512, 64, 192), (64, 512, 100), (15, 300, 1030)]
)
def test_a_product_is_as_exact_as_the_reference(way, sizes, turned):
    left, right = pair(*sizes, turned)
    product = way(left, right)
    assert product.is_contiguous() and product.shape == sizes[::2]
    assert error_within(product, left @ right, left.double() @ right.double())


@needs_avx512
def test_our_product_reads_any_strides_and_writes_nothing_else():
    left, right = pair(40, 131, 45)
    wide = torch.full((left.shape[0] * 3, left.shape[1] * 2), float("nan"))
    wide[::3, ::2] = left
    deep = torch.full((right.shape[0] * 2, right.shape[1] + 7), float("nan"))
    deep[::2, 3:-4] = right
    around = torch.full((42, 45), 7.0)
    matmul.native_out(wide[::3, ::2], deep[::2, 3:-4], out=around[1:-1])
    assert torch.equal(around[1:-1], matmul.native(left, right))
    assert bool((around[0] == 7).all()) and bool((around[-1] == 7).all())


@needs_avx512
def test_our_product_is_the_same_bits_on_several_threads():
    # More than 2^21 multiplications, and no rows that threads could share equally.
    left, right = pair(161, 128, 160)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = matmul.native(left, right)
        torch.set_num_threads(3)
        assert torch.equal(matmul.native(left, right), alone)
    finally:
        torch.set_num_threads(threads)


@needs_onednn
def test_a_row_of_a_fast_product_is_alone_or_mkl_computes_it(monkeypatch):
    """torch 2.11's oneDNN rounds a row of 8 otherwise than one of 32."""
    monkeypatch.setattr(matmul, "mkl_is_slow", lambda: True)
    left, right = pair(64, 512, 256)
    every = matmul.linear(left, right.T.contiguous())
    if not compat.onednn_rows_are_alone():
        assert torch.equal(every, torch.nn.functional.linear(left, right.T.contiguous()))
        return
    for rows in (2, 3, 8, 12, 32):
        assert torch.equal(matmul.linear(left[:rows], right.T.contiguous()), every[:rows])


@needs_onednn
@needs_avx512
@pytest.mark.parametrize("name", ["small_matmul", "onednn_matmul"])
def test_captured_gradients_are_as_exact_as_eager_ones(name, monkeypatch):
    target = getattr(torch.ops.monograph, name).default
    monkeypatch.setattr(matmul, "ONEDNN_FROM", 2**27 if name == "small_matmul" else 2**18)
    monkeypatch.setattr(matmul, "mkl_is_slow", lambda: True)
    taken, rewrite = [], matmul.rewrite

    def counting(graph):
        rewrite(graph)
        taken.append(len(graph.find_nodes(op="call_function", target=target)))

    monkeypatch.setattr(matmul, "rewrite", counting)
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, 256), torch.randn(128, 256)

    def gradients(run, dtype=torch.float32):
        pair = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight)]
        run(*pair).backward()
        return torch.cat([tensor.grad.flatten() for tensor in pair])

    def loss(x, w):
        return (x @ w.T).square().sum()

    # A graph from a cache is not rewritten again.
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        captured = gradients(compiled(loss))
    eager = gradients(loss)
    assert taken == [1, 2]  # forward, and the backward's two
    assert error_within(captured, eager, gradients(loss, torch.float64))


@pytest.mark.parametrize(
    ("sizes", "dtype", "chosen"),
    [
        ((512, 512, 512), torch.float32, "onednn_matmul"),
        ((512, 511, 512), torch.float32, "small_matmul"),
        ((64, 64, 64), torch.float32, "small_matmul"),
        ((64, 63, 64), torch.float32, None),
        ((31, 512, 512), torch.float32, None),
        ((512, 512, 31), torch.float32, None),
        ((512, 512, 512), torch.float64, None),
        ((512, 512, 512), torch.bfloat16, None),
    ],
    ids=["large", "small", "smallest", "tiny", "few-rows", "few-columns", "fp64", "bf16"],
)
def test_where_mkl_is_slow_each_size_goes_to_the_fastest(sizes, dtype, chosen, monkeypatch):
    monkeypatch.setattr(matmul, "mkl_is_slow", lambda: True)
    rows, summed, columns = sizes
    with FakeTensorMode():
        traced = make_fx(torch.mm)(
            torch.ones(rows, summed, dtype=dtype), torch.ones(summed, columns, dtype=dtype)
        )
    matmul.rewrite(traced.graph)
    target = getattr(torch.ops.monograph, chosen).default if chosen else torch.ops.aten.mm.default
    assert len(traced.graph.find_nodes(op="call_function", target=target)) == 1


@needs_onednn
@pytest.mark.parametrize("slow", [True, False], ids=["slow", "fast"])
def test_mkl_is_slow_where_it_was_once_measured_so(slow, monkeypatch, tmp_path):
    monkeypatch.setenv("MONOGRAPH_HOME", str(tmp_path))
    monkeypatch.setattr(matmul, "cpu_model", lambda: ("some CPU", {"avx512f"}))
    monkeypatch.setattr(matmul, "SLOW_MKL_RATIO", 0.0 if slow else float("inf"))
    assert matmul.mkl_is_slow.__wrapped__() == slow
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda: not slow)
    assert matmul.mkl_is_slow.__wrapped__() == slow, (
        "a second measurement could change the bits of a resumed run"
    )
    monkeypatch.setattr(matmul, "cpu_model", lambda: ("another CPU", {"avx512f"}))
    assert matmul.mkl_is_slow.__wrapped__() != slow
    monkeypatch.setattr(matmul, "cpu_model", lambda: ("another CPU", {"avx2"}))
    assert not matmul.mkl_is_slow.__wrapped__()


def test_where_mkl_is_fast_it_computes_all_products(monkeypatch):
    monkeypatch.setattr(matmul, "mkl_is_slow", lambda: False)
    product = make_fx(torch.bmm)(torch.ones(3, 64, 64), torch.ones(3, 64, 64)).graph
    matmul.rewrite(product)
    assert len(product.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)) == 1


def stacks(sizes, turned=(False, False), batch=5):
    rows, summed, columns = sizes
    torch.manual_seed(0)
    left = torch.randn(batch, summed, rows).mT if turned[0] else torch.randn(batch, rows, summed)
    right = (
        torch.randn(batch, columns, summed).mT if turned[1] else torch.randn(batch, summed, columns)
    )
    return left, right


@needs_avx512
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (33, 17, 5), (32, 64, 128), (64, 512, 100)])
def test_batched_products_are_as_exact_as_the_reference(sizes, turned):
    left, right = stacks(sizes, turned)
    product = matmul.native(left, right)
    assert product.is_contiguous()
    assert error_within(product, left @ right, left.double() @ right.double())
    shared = left[:1].expand_as(left)
    assert error_within(
        matmul.native(shared, right), shared @ right, shared.double() @ right.double()
    )


@needs_avx512
def test_batched_products_are_the_same_bits_on_several_threads():
    left, right = stacks((64, 64, 128), batch=7)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = matmul.native(left, right)
        torch.set_num_threads(3)
        assert torch.equal(matmul.native(left, right), alone)
    finally:
        torch.set_num_threads(threads)
    assert all(
        torch.equal(matmul.native(*pair), each)
        for *pair, each in zip(left, right, alone, strict=True)
    )


def test_a_batched_product_that_is_only_read_turned_round_is_computed_so():
    def turned(left, right):
        return torch.bmm(left, right).permute(0, 2, 1)

    def read_both_ways(left, right):
        product = torch.bmm(left, right)
        return product, product.permute(0, 2, 1)

    left, right = stacks((33, 64, 40))
    for function, of_bmm in ((turned, True), (read_both_ways, False)):
        traced = make_fx(function)(left, right)
        matmul._compute_transposed(
            traced.graph,
            traced.graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default)[-1],
        )
        traced.recompile()
        output = traced.graph.output_node().args[0]
        assert output.target is torch.ops.aten.bmm.default if of_bmm else len(output) == 2
        found, expected = traced(left, right), function(left, right)
        if of_bmm:
            assert found.is_contiguous()
        else:
            found, expected = found[1], expected[1]
        exact = (left.double() @ right.double()).mT
        assert error_within(found.contiguous(), expected.contiguous(), exact.contiguous())


def test_machines_with_another_answer_have_other_keys_in_the_cache(monkeypatch):
    """Such a graph calls functions that are registered only where MKL is slow."""
    keys = set()
    for is_slow in (True, False):
        monkeypatch.setattr(matmul, "mkl_is_slow", lambda answer=is_slow: answer)
        keys.add(matmul.inductor_options()["post_grad_custom_post_pass"].uuid())
    assert len(keys) == 2
