"""Run: make gpu-less ARGS=tests/pretended_gpu/test_interpreted.py (Inductor's kernels, interpreted)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pretended_gpu import interpreted


@triton.jit
def increased(x, by, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + by)


def test_a_launch_says_what_runs_later_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers and addresses are those of the launch, the memory's are those of the moment at
    which it runs.
    """
    works: list[Any] = []
    monkeypatch.setattr(interpreted, "_launch", works.append)
    interpreted.runs.clear()
    x = torch.zeros(32, device="cuda")
    by = 2
    increased[lambda arguments: (32 // arguments["BLOCK"],)](x, by, BLOCK=8)
    by, kept, x = 3, x, torch.ones(32, device="cuda")
    assert not interpreted.runs and not kept.any()
    for done in (1, 2, 3):
        works[0]()
        assert kept.tolist() == [2.0 * done] * 32
    kept.fill_(10)
    works[0]()
    assert kept.tolist() == [12.0] * 32 and x.tolist() == [1.0] * 32
    assert interpreted.runs == {"increased": 4}


def test_a_kernel_that_fails_says_which() -> None:
    with pytest.raises(AttributeError) as failed:
        increased[(1,)](None, 1, 4)
    assert failed.value.__notes__ == ["in the Triton kernel increased, programs [0] of (1, 1, 1)"]


def test_an_address_outside_of_all_memory_is_an_error() -> None:
    """On a card it may also be none: that memory can be another tensor's."""
    x = torch.zeros(32, device="cuda")
    beyond = torch.cuda.memory_snapshot()[0]["total_size"] // 4
    with pytest.raises(RuntimeError, match="an illegal memory access was encountered"):
        increased[(beyond // 8 + 1,)](x, 1, 8)
    increased[(4,)](torch.zeros(32).pin_memory(), 1, 8)
    with pytest.raises(RuntimeError, match="an illegal memory access was encountered"):
        increased[(4,)](torch.zeros(32), 1, 8)


# ── what Inductor makes of torch's functions ────────────────────────────────────────────────────


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(1))


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "pointwise": (
        lambda x, y: F.silu(x) * y + x.tanh() / (1 + y * y),
        (normal(40, 70), normal(40, 70, seed=1)),
    ),
    "functions": (
        lambda x: x.sin() + x.exp() + x.abs().log1p() + x.atan() + x.erf() + x.sigmoid(),
        (normal(3, 333),),
    ),
    "transposed": (lambda x, y: x.T.contiguous() + y, (normal(33, 70), normal(70, 33, seed=1))),
    "long sums": (
        lambda x: (x.square().sum(-1), x.mean(0), x.amax(-1), x.var(-1)),
        (normal(5, 5000),),
    ),
    "short sums": (
        lambda x: (x.square().sum(-1), x.amin(-1), x.std(-1), x.logsumexp(-1)),
        (normal(70, 60),),
    ),
    "all": (lambda x: (x.sum(), x.max(), x.norm(), (x > 5).any(), x.argmax()), (normal(300, 500),)),
    "softmax": (lambda x: torch.softmax(2 * x, -1), (normal(50, 200),)),
    "long softmax": (lambda x: torch.log_softmax(x, -1), (normal(3, 6000),)),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (90,), w, b),
        (normal(40, 90), normal(90), normal(90, seed=1)),
    ),
    "rms norm": (lambda x, w: F.rms_norm(x, (90,), w), (normal(40, 90), normal(90, seed=1))),
    "cross-entropy": (
        lambda x, t: F.cross_entropy(x, t, ignore_index=3),
        (normal(60, 101), tokens(60, below=101)),
    ),
    "embedding": (lambda w, t: F.embedding(t, w) * 3, (normal(11, 24), tokens(4, 30, below=11))),
    "scattered": (
        lambda x, t: x.new_zeros(7, 20).index_add(0, t, x),
        (normal(100, 20), tokens(100, below=7)),
    ),
    "sorted": (lambda x: x.sort(dim=-1, stable=True).values * 2, (normal(9, 60),)),
    "an update": (
        lambda p, m, v: torch.addcdiv(p, m, v.abs().sqrt() + 1, value=-0.1),
        tuple(map(normal, (99,) * 3)),
    ),
}
DTYPES = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("name", "dtype"),
    # A card's atomic additions are rounded each time, those of the CPU's kernels once.
    [
        (name, dtype)
        for name in FUNCTIONS
        for dtype in DTYPES
        if name != "scattered" or dtype == torch.float32
    ],
    ids=str,
)
def test_compiled_functions_are_as_exact_as_eager_ones(name: str, dtype: torch.dtype) -> None:
    """Values and gradients, against the same inputs in fp64."""
    function, arguments = FUNCTIONS[name]
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in arguments]
    exact = with_gradients(function, [x.double() if x.is_floating_point() else x for x in inputs])
    eager = with_gradients(function, inputs)
    compiled = with_gradients(
        torch.compile(function, fullgraph=True, dynamic=False), [x.cuda() for x in inputs]
    )
    for wanted, usual, got in zip(exact, eager, compiled, strict=True):
        assert got.dtype == usual.dtype and got.shape == usual.shape
        assert as_exact(got, usual, wanted) if usual.is_floating_point() else got.equal(usual)


def as_exact(got: Tensor, usual: Tensor, wanted: Tensor) -> bool:
    """Whether an error is at most twice that of torch's CPU kernels in the same dtype, which round
    in another order.

    It is that of all numbers together. The error of a single one can be 0 by chance, so that one
    unit is added.
    """
    unit = wanted.abs().item() * torch.finfo(got.dtype).eps if got.numel() == 1 else 0.0
    return bool((got.double() - wanted).norm() <= 2 * (usual.double() - wanted).norm() + unit)


def with_gradients(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """A function's values, and the gradients for small whole numbers as those of the values."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    values = function(*leaves)
    values = values if isinstance(values, tuple) else (values,)
    real = [value for value in values if value.requires_grad]
    weights = [(torch.arange(value.numel()) % 7 - 3).view(value.shape).to(value) for value in real]
    grads = torch.autograd.grad(real, [x for x in leaves if x.requires_grad], weights)
    return [value.detach().cpu() for value in (*values, *grads)]


def test_a_compiled_running_sum() -> None:
    """In one program, or in many of which each hands its sum to the next, as Inductor sees fit."""
    x = torch.randint(-9, 9, (20_000,), generator=torch.Generator().manual_seed(0))
    assert torch.compile(lambda x: x.cumsum(0))(x.cuda()).cpu().equal(x.cumsum(0))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.uint8,
    ],
    ids=str,
)
def test_compiled_casts_have_the_bits_of_eager_ones(dtype: torch.dtype) -> None:
    x = 20 * normal(1000).abs() * (1 if dtype == torch.uint8 else normal(1000, seed=1).sign())
    narrow = torch.compile(lambda x: x.to(dtype))(x.cuda())
    assert narrow.cpu().float().equal(x.to(dtype).float())
    assert torch.compile(lambda x: x.float() + 1)(narrow).cpu().equal(x.to(dtype).float() + 1)


def test_a_compiled_dropout_drops_the_same_again() -> None:
    """The gradient is 0 where the value is. Half are kept within 5 deviations; another seed keeps
    others.
    """
    function, kept = torch.compile(lambda x: F.dropout(x, 0.5)), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        x = torch.ones(10_000, device="cuda", requires_grad=True)
        value = function(x)
        (grad,) = torch.autograd.grad(value.sum(), x)
        assert set(value.tolist()) == {0.0, 2.0} and grad.tolist() == value.tolist()
        kept.append(value.detach().cpu())
    assert kept[0].equal(kept[1]) and not kept[0].equal(kept[2])
    assert abs((kept[0] > 0).sum() - 5000) < 5 * 50


@pytest.mark.parametrize("length", [40, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flex_attention_of_packed_rows(dtype: torch.dtype, length: int) -> None:
    """Forward and backward, with more heads of queries than of keys.

    Short rows take the kernel that is meant for decoding; long ones have blocks that are left out,
    and full ones.
    """
    segments = (torch.arange(length) >= length // 3).long()
    q, k, v = (normal(2, heads, length, 16, seed=heads).to(dtype) for heads in (4, 2, 2))

    def seen(b: Tensor, h: Tensor, at: Tensor, other: Tensor) -> Tensor:
        return (at >= other) & (segments[at] == segments[other])

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(length)
        return F.scaled_dot_product_attention(
            q, k, v, seen(at, at, at[:, None], at), enable_gqa=True
        )

    exact = with_gradients(eager, [q.double(), k.double(), v.double()])
    usual = with_gradients(eager, [q, k, v])
    segments = segments.cuda()
    mask = create_block_mask(seen, None, None, length, length, device="cuda")
    flex = torch.compile(
        lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=True), dynamic=False
    )
    interpreted.runs.clear()
    compiled = with_gradients(flex, [q.cuda(), k.cuda(), v.cuda()])
    assert sum("flex_attention" in name for name in interpreted.runs) >= 2
    for wanted, rounded, got in zip(exact, usual, compiled, strict=True):
        assert as_exact(got, rounded, wanted)
