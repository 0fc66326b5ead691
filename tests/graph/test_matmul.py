# Run: pytest tests/graph/test_matmul.py
"""Captured fp32 products by oneDNN equal MKL's, and graphs ask for them exactly where they are worth it."""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config
import torch._inductor.config

from monograph import compat, device
from monograph.graph import matmul
from monograph.graph.capture import compiled
from numerics import error_within

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@needs_onednn
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (33, 17, 5), (512, 64, 192), (64, 512, 100)])
def test_onednn_is_as_exact_as_the_reference(sizes, turned):
    torch.manual_seed(0)
    rows, summed, columns = sizes
    left = torch.randn(summed, rows).T if turned[0] else torch.randn(rows, summed)
    right = torch.randn(columns, summed).T if turned[1] else torch.randn(summed, columns)
    product = compat.onednn_matmul(left, right)
    assert product.is_contiguous() and product.shape == (rows, columns)
    assert error_within(product, left @ right, left.double() @ right.double())


@needs_onednn
def test_captured_gradients_are_as_exact_as_eager_ones(monkeypatch):
    monkeypatch.setattr(matmul, "mkl_is_slow", lambda: True)
    taken, rewrite = [], matmul.rewrite

    def counting(graph):
        rewrite(graph)
        taken.append(len(graph.find_nodes(op="call_function", target=torch.ops.monograph.matmul.default)))

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
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        captured = gradients(compiled(loss))
    eager = gradients(loss)
    assert taken == [1, 2]  # forward, and the backward's two
    assert error_within(captured, eager, gradients(loss, torch.float64))


@pytest.mark.parametrize(
    ("sizes", "dtype", "taken"),
    [
        ((256, 256, 256), torch.float32, 1),
        ((256, 255, 256), torch.float32, 0),
        ((256, 256, 256), torch.float64, 0),
        ((256, 256, 256), torch.bfloat16, 0),
    ],
    ids=["large", "small", "fp64", "bf16"],
)
def test_only_large_fp32_products_are_taken(sizes, dtype, taken):
    rows, summed, columns = sizes
    traced = torch.fx.experimental.proxy_tensor.make_fx(torch.mm)(
        torch.ones(rows, summed, dtype=dtype), torch.ones(summed, columns, dtype=dtype)
    )
    for node in traced.graph.nodes:
        node.meta["val"] = node.meta.get("val", node.meta.get("tensor_meta"))
    matmul.rewrite(traced.graph)
    assert len(traced.graph.find_nodes(op="call_function", target=torch.ops.monograph.matmul.default)) == taken


@pytest.mark.parametrize(
    ("processor", "slow"),
    [
        ("vendor_id : AuthenticAMD\nmodel name : AMD EPYC\nflags : fpu avx2 avx512f\n", True),
        ("vendor_id : AuthenticAMD\nmodel name : AMD EPYC\nflags : fpu avx2\n", False),
        ("vendor_id : GenuineIntel\nmodel name : Intel Xeon\nflags : fpu avx2 avx512f\n", False),
        ("", False),
    ],
    ids=["amd-avx512", "amd-avx2", "intel", "no-cpuinfo"],
)
def test_mkl_is_slow_on_amd_with_avx512(processor, slow, monkeypatch):
    monkeypatch.setattr(device, "_read", lambda path: processor)
    assert device.mkl_is_slow() == (slow and torch.backends.mkl.is_available())
    if not slow:
        monkeypatch.setattr(matmul, "mkl_is_slow", device.mkl_is_slow)
        assert matmul.passes() is None
