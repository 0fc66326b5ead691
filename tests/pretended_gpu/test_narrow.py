"""Run: make gpu-less ARGS=tests/pretended_gpu/test_narrow.py (narrow floats in interpreted kernels)"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def multiplied(a, b, result, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None] * N, tl.arange(0, N)[None, :]
    at = tl.program_id(0) * N * N + rows + columns
    product = tl.dot(tl.load(a + at), tl.trans(tl.load(b + at)))
    tl.store(result + at, product)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float32,
        torch.int8,
    ],
)
def test_products_of_blocks_are_exact_before_they_are_rounded(dtype: torch.dtype) -> None:
    """Small whole numbers have exact products in every type; each program has its own."""
    a, b = (
        torch.randint(-3, 4, (3, 16, 16), generator=torch.Generator().manual_seed(s))
        for s in (0, 1)
    )
    wide = torch.int32 if dtype == torch.int8 else torch.float32
    result = torch.zeros(3, 16, 16, dtype=wide, device="cuda")
    multiplied[(3,)](a.to(dtype).cuda(), b.to(dtype).cuda(), result, 16)
    assert result.cpu().equal((a @ b.mT).to(wide))


@triton.jit
def summed(x, result, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(result + at, value * value + value + 0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_operation_is_rounded(dtype: torch.dtype) -> None:
    """A constant too."""
    x = torch.randn(256, generator=torch.Generator().manual_seed(0)).to(dtype)
    result = torch.zeros_like(x).cuda()
    summed[(1,)](x.cuda(), result, 256)
    assert result.cpu().equal(x * x + x + torch.tensor(0.1, dtype=dtype))


@triton.jit
def cast(x, result, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    if TWICE:
        value = value.to(tl.float32)
    tl.store(result + at, value.to(result.dtype.element_ty))


def bits(tensor: Tensor) -> Tensor:
    """Those of a tensor's numbers; all that are none are one."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return torch.where(tensor.isnan(), -1, tensor.view(whole).long())


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_casts_have_the_bits_of_torch(dtype: torch.dtype) -> None:
    """There and back, all numbers of a type; and into it numbers of all sizes, also halfway between
    two.
    """
    count = 2 ** (8 * dtype.itemsize)
    every = torch.arange(count).to({1: torch.uint8, 2: torch.int16}[dtype.itemsize]).view(dtype)
    back = torch.zeros_like(every).cuda()
    cast[(count // 256,)](every.cuda(), back, 256, True)
    finite = every.float().isfinite()
    assert bits(back.cpu().float())[finite].equal(bits(every.float())[finite])
    assert back.cpu().float()[~finite & ~every.float().isnan()].abs().eq(largest(dtype)).all()

    numbers = every.float()[finite].sort().values
    halfway = (numbers[1:].double() + numbers[:-1].double()).div(2).float()
    random = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -9, 2, 4096
    )
    wide = torch.cat([halfway, random])[: (len(halfway) + 4096) // 256 * 256]
    narrow = torch.zeros(len(wide), dtype=dtype, device="cuda")
    cast[(len(wide) // 256,)](wide.cuda(), narrow, 256, False)
    assert bits(narrow.cpu().float()).equal(bits(wide.to(dtype).float()))


def largest(dtype: torch.dtype) -> float:
    """What a number becomes that is too large: in fp8 the largest, as PTX says."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else float("inf")


def test_too_large_numbers_in_fp8_are_the_largest() -> None:
    wide = torch.tensor([1e9, -1e9, float("inf"), float("nan")])
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        narrow = torch.zeros(4, dtype=dtype, device="cuda")
        cast[(1,)](wide.cuda(), narrow, 4, False)
        top = torch.finfo(dtype).max
        assert (
            narrow.cpu().float()[:3].tolist() == [top, -top, top]
            and narrow.cpu().float()[3].isnan()
        )
