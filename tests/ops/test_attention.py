# Run: pytest tests/ops/test_attention.py
"""Every attention implementation against the plain softmax in float64."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from monograph.laws.comparisons import error_within
from monograph.model.llama import block_mask, dense_mask
from monograph.ops.attention import attention
from monograph.ops.flex_options import flex_options

BATCH, HEADS, KV_HEADS, LENGTH, SIZE = 2, 4, 2, 150, 16
FLEX_UNFUSED = "ignore:flex_attention called without torch.compile:UserWarning"
VMAP_LOOP = "ignore:There is a performance drop because we have not yet implemented the batching rule:UserWarning"


def _heads(dtype, length=LENGTH, grad=False, device="cpu", size=SIZE):
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, heads, length, size) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    made = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
        for shape in shapes
    ]
    return [x.requires_grad_(grad) for x in made]


def _segments(length=LENGTH, device="cpu"):
    """One row of two documents and padding, one row that is padding altogether."""
    rows = torch.zeros(BATCH, length, dtype=torch.int64)
    rows[0, : length // 3], rows[0, length // 3 : -20] = 1, 2
    return rows.to(device)


def _run(impl, dtype, mask, backward=True, device="cpu", call=attention, length=LENGTH, size=SIZE):
    inputs = _heads(dtype, length, backward, device, size)
    out = call(*inputs, mask, impl)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=device).reshape(
        out.shape
    )
    return [out, *(torch.autograd.grad((out * weights).sum(), inputs) if backward else ())]


def test_the_reference_is_the_equation():
    query, key, value = _heads(torch.float64, length=7)
    out = attention(query, key, value, None, "reference")
    for head in range(HEADS):
        for t in range(7):
            keys = key[0, head // 2, : t + 1]
            shares = torch.softmax(keys @ query[0, head, t] / SIZE**0.5, dim=0)
            torch.testing.assert_close(
                out[0, head, t], shares @ value[0, head // 2, : t + 1], rtol=1e-13, atol=1e-13
            )


SINKS = torch.tensor([-2.0, 0.3, 1.5, 4.0], dtype=torch.float64)


def _with_sinks(impl, dtype, mask, device="cpu", call=attention):
    """The result and the gradients of heads and sinks."""
    inputs = [*_heads(dtype, grad=True, device=device), SINKS.to(device, dtype).requires_grad_()]
    out = call(*inputs[:3], mask, impl, sink_H=inputs[3])
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=device).reshape(
        out.shape
    )
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


def test_the_reference_with_sinks_is_the_equation():
    query, key, value = _heads(torch.float64, length=7)
    out = attention(query, key, value, None, "reference", sink_H=SINKS)
    for head in range(HEADS):
        for t in range(7):
            scores = key[0, head // 2, : t + 1] @ query[0, head, t] / SIZE**0.5
            shares = scores.exp() / (scores.exp().sum() + SINKS[head].exp())
            torch.testing.assert_close(
                out[0, head, t], shares @ value[0, head // 2, : t + 1], rtol=1e-13, atol=1e-13
            )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", ["sdpa", "blocks", "cached"])
def test_sinks_take_their_share_in_every_implementation(impl, dtype, masked):
    mask = dense_mask(_segments()) if masked else None
    exact = _with_sinks("reference", torch.float64, mask)
    ours = _with_sinks(impl, dtype, mask)
    if dtype == torch.float64:
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
        return
    for a, b, c in zip(ours, _with_sinks("reference", dtype, mask), exact, strict=True):
        # Kernels round the probabilities of bf16 heads, and torch's the sinks, too, times a power
        # of two.
        assert error_within(a, b, c, k=4)


def _textbook(query, key, value, mask, impl):
    """Attention as eager models of transformers write it: products in the heads' dtype, the softmax
    in fp32.
    """
    key, value = (heads.repeat_interleave(HEADS // KV_HEADS, dim=1) for heads in (key, value))
    scores = (
        (query @ key.transpose(-1, -2) * SIZE**-0.5)
        .float()
        .masked_fill(~mask, torch.finfo(torch.float32).min)
    )
    return scores.softmax(-1).to(query.dtype) @ value


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (None, torch.float32),
        (None, torch.bfloat16),
        ("aot_eager", torch.bfloat16),
        pytest.param("inductor", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("inductor", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_blocks_are_as_exact_as_the_textbook(dtype, backend):
    mask = dense_mask(_segments())
    call = (
        torch.compile(attention, fullgraph=True, dynamic=False, backend=backend)
        if backend
        else attention
    )
    ours, naive = _run("blocks", dtype, mask, call=call), _run("", dtype, mask, call=_textbook)
    for a, b, c in zip(ours, naive, _run("reference", torch.float64, mask), strict=True):
        assert error_within(a, b, c)


def test_a_captured_graph_takes_blocks_for_bf16_on_a_cpu(monkeypatch):
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    mask = dense_mask(_segments())
    ran = {dtype: _run("auto", dtype, mask)[0] for dtype in (torch.float32, torch.bfloat16)}
    assert torch.equal(ran[torch.bfloat16], _run("blocks", torch.bfloat16, mask)[0])
    assert torch.equal(ran[torch.float32], _run("sdpa", torch.float32, mask)[0])
    assert not torch.equal(ran[torch.bfloat16], _run("sdpa", torch.bfloat16, mask)[0]), (
        "another order of sums"
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sdpa_is_as_exact_as_the_reference(dtype, masked):
    mask = dense_mask(_segments()) if masked else None
    exact = _run("reference", torch.float64, mask)
    ours, naive = _run("sdpa", dtype, mask), _run("reference", dtype, mask)
    for a, b, c in zip(ours, naive, exact, strict=True):
        # In bf16 the kernel rounds the probabilities, which the reference keeps in fp32: then one
        # rounding is the unit.
        assert error_within(a, b, c, k=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_s_arithmetic_is_as_exact_as_the_reference(dtype):
    """Over two blocks of keys, with documents; LENGTH is no multiple of a block."""
    segments = _segments()
    for mask in (None, dense_mask(segments), dense_mask(torch.ones_like(segments), 40)):
        exact = _run("reference", torch.float64, mask)
        for a, b, c in zip(
            _run("cached", dtype, mask), _run("reference", dtype, mask), exact, strict=True
        ):
            assert error_within(a, b, c, k=4)


@pytest.mark.parametrize("impl", ["reference", "sdpa", "blocks", "cached"])
def test_no_mask_is_the_causal_mask(impl):
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for a, b in zip(
        _run(impl, torch.float64, None), _run(impl, torch.float64, causal), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("run", [_run, _with_sinks])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("impl", ["reference", "sdpa", "blocks", "cached"])
def test_a_query_that_sees_nothing_gets_zeros_and_passes_none_back(impl, dtype, run):
    mask = dense_mask(_segments())
    mask[1] = False
    mask[0, :, 5] = False
    out, *gradients = run(impl, dtype, mask)
    assert not out[1].any()
    assert not out[0, :, 5].any()
    for gradient in gradients:
        assert gradient.isfinite().all()
    for gradient_of_heads in gradients[:3]:
        assert not gradient_of_heads[1].any()


# The leading axes of masks that broadcast to [B, H, T, S]; one has other keys for each query head.
MASK_SHAPES = {
    "a key": (1, LENGTH),
    "a query": (LENGTH, 1),
    "a row": (BATCH, 1, LENGTH, LENGTH),
    "a head": (1, HEADS, LENGTH, LENGTH),
    "a row and head": (BATCH, HEADS, LENGTH, LENGTH),
}


@pytest.mark.parametrize("impl", ["sdpa", "cached"])  # "blocks" reads causal masks only
@pytest.mark.parametrize("shape", MASK_SHAPES.values(), ids=MASK_SHAPES.keys())
def test_a_mask_may_differ_by_each_axis(shape, impl):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    exact = _run("reference", torch.float64, mask)
    for ours, equation in zip(_run(impl, torch.float64, mask), exact, strict=True):
        torch.testing.assert_close(ours, equation, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["reference", "sdpa", "blocks", "cached"])
def test_a_causal_mask_may_differ_by_head(impl):
    windows = torch.tensor([3, 40, 100, LENGTH])[:, None, None]
    distances = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    mask = ((distances >= 0) & (distances < windows))[None]
    out = attention(*_heads(torch.float64), mask, impl)
    for head in range(HEADS):
        alone = attention(*_heads(torch.float64), mask[:, head : head + 1], "reference")
        torch.testing.assert_close(out[:, head], alone[:, head], rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings(FLEX_UNFUSED)
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_flex_forward_on_a_cpu(sinks):
    segments = _segments()

    def run(impl, dtype, mask):
        return attention(
            *_heads(dtype), mask, impl, sink_H=None if sinks is None else sinks.to(dtype)
        )

    ours = run("flex", torch.float32, block_mask(segments))
    naive, exact = (
        run("reference", dtype, dense_mask(segments)) for dtype in (torch.float32, torch.float64)
    )
    assert error_within(ours, naive, exact)


def test_a_mask_of_the_wrong_kind_is_refused():
    query, key, value = _heads(torch.float32)
    with pytest.raises(ValueError, match="not a BlockMask"):
        attention(query, key, value, block_mask(_segments()), "sdpa")
    with pytest.raises(ValueError, match="reads a BlockMask"):
        attention(query, key, value, dense_mask(_segments()), "flex")


@pytest.mark.filterwarnings(VMAP_LOOP)
@pytest.mark.parametrize("impl", ["reference", "sdpa", "blocks"])
def test_vmap_over_members_equals_each_member(impl):
    query, key, value = (torch.stack([x, -x, x * 2]) for x in _heads(torch.float64, length=24))
    mask = dense_mask(_segments(24))
    together = torch.func.vmap(lambda q, k, v: attention(q, k, v, mask, impl))(query, key, value)
    for member in range(3):
        alone = attention(query[member], key[member], value[member], mask, impl)
        torch.testing.assert_close(together[member], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("run", [_run, _with_sinks])
@pytest.mark.parametrize("impl", ["flex", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_documents_are_as_exact_as_the_reference(dtype, impl, run):
    torch.compiler.reset()  # a function is compiled eight times at most
    segments = _segments(device="cuda")
    dense = dense_mask(segments)
    fused = torch.compile(attention, fullgraph=True, dynamic=False) if impl == "flex" else attention
    ours = run(
        impl, dtype, block_mask(segments) if impl == "flex" else dense, device="cuda", call=fused
    )
    exact, naive = (run("reference", kind, dense, device="cuda") for kind in (torch.float64, dtype))
    for a, b, c in zip(ours, naive, exact, strict=True):
        assert error_within(a, b, c, k=4)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 256])
def test_on_a_gpu_long_documents_are_as_exact_as_the_reference(size, length=400):
    """Rows as a run has them, with the heads that have options of their own. The second document
    begins inside the first block and has blocks that are seen in full, so that a query's blocks
    with a border are not neighbours.
    """
    torch.compiler.reset()
    segments = torch.ones(BATCH, length, dtype=torch.int64, device="cuda")
    segments[0, 50:] = 2
    segments[1, 90:], segments[1, 390:] = 2, 0
    dense = dense_mask(segments)
    fused = torch.compile(attention, fullgraph=True, dynamic=False)
    shape = {"device": "cuda", "length": length, "size": size}
    ours = _run("flex", torch.bfloat16, block_mask(segments), call=fused, **shape)
    exact, naive = (
        _run("reference", kind, dense, **shape) for kind in (torch.float64, torch.bfloat16)
    )
    for a, b, c in zip(ours, naive, exact, strict=True):
        assert error_within(a, b, c, k=4)


@pytest.mark.parametrize(
    ("capability", "sizes"),
    [
        ((7, 5), set()),
        ((8, 0), {256}),
        ((8, 9), {256}),
        ((9, 0), {64}),
        ((10, 0), {64, 128, 256}),
        ((12, 0), {256}),
    ],
)
def test_only_tiles_known_to_be_worse_than_others_are_replaced_in_flex(
    capability, sizes, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    def has_own_tiles(dtype, size, device="cuda"):
        query = torch.empty(1, 1, 1, size, dtype=dtype, device=device)
        return len(flex_options(query)) > 1  # FORCE_USE_FLEX_ATTENTION is always there

    with FakeTensorMode():
        for size in (16, 64, 128, 192, 256):
            for dtype in (torch.float16, torch.bfloat16):
                assert has_own_tiles(dtype, size) == (size in sizes)
                assert not has_own_tiles(dtype, size, "cpu")
            assert not has_own_tiles(torch.float32, size)


@pytest.mark.gpu
def test_on_a_gpu_few_queries_without_gradients_take_no_kernel_for_decoding(length=127):
    """As in evaluation of short rows: for grouped heads torch would find none, and it may read
    queries wrongly.
    """
    segments = _segments(length, device="cuda")
    hidden = torch.randn(
        BATCH, length, 8 * SIZE, device="cuda", generator=torch.Generator("cuda").manual_seed(0)
    )

    def attended(hidden, mask, impl):
        heads = (hidden * 2).unflatten(-1, (8, SIZE)).transpose(1, 2)
        return attention(heads[:, :4], heads[:, 4:6], heads[:, 6:], mask, impl)

    with torch.no_grad():
        fused = torch.compile(attended, fullgraph=True, dynamic=False)(
            hidden, block_mask(segments), "flex"
        )
        exact, naive = (
            attended(hidden.to(kind), dense_mask(segments), "reference")
            for kind in (torch.float64, torch.float32)
        )
    assert error_within(fused, naive, exact, k=4)
