"""Run: make gpu-less ARGS=tests/pretended_gpu/test_operators.py (numbers of the pretended card are
the CPU's)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CARD = torch.device("cuda", 0)


def inputs(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


# By what they do to shapes, strides, dtypes and memory.
OPERATORS: dict[str, Callable[..., Any]] = {
    "product": lambda a, b: a @ b.t(),
    "broadcast and a number": lambda a, b: a.unsqueeze(1) * 2 + b,
    "a number that becomes a tensor": lambda a, b: a.view(torch.int32) & 255,
    "reduction with a dtype": lambda a, b: a.sum(-1, dtype=torch.float64),
    "several results": lambda a, b: a.topk(2),
    "in place through a view": lambda a, b: (a[1:, ::2].add_(1), a)[1],
    "out made larger": lambda a, b: (
        torch.arange(7, device=a.device) + torch.eye(7, device=a.device)
    ),
    "a shape that depends on numbers": lambda a, b: (a[a > 0], (a > 0).nonzero()),
    "indices": lambda a, b: a.index_select(0, torch.tensor([2, 0], device=a.device)).scatter_add(
        1, torch.zeros(2, 1, dtype=torch.int64, device=a.device), b[:2, :1]
    ),
    "strides": lambda a, b: a.t().contiguous().as_strided((2, 2), (1, 3)).clone(),
    "foreach": lambda a, b: torch._foreach_mul([a, b], 2.0),
    "casts": lambda a, b: a.to(torch.bfloat16).to(torch.float64) + a.half(),
    "norm": lambda a, b: F.layer_norm(a, a.shape[-1:]) + F.softmax(b[:3], -1),
    "statistics that are written": lambda a, b: (
        F.batch_norm(
            a,
            running := torch.zeros(4, device=a.device),
            torch.ones(4, device=a.device),
            training=True,
        ),
        running,
    ),
    "loss": lambda a, b: F.cross_entropy(
        a, torch.tensor([0, -100, 3], device=a.device), reduction="sum"
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_the_cpu_s_bits(name: str) -> None:
    expected = OPERATORS[name](*inputs((3, 4), (5, 4)))
    found = OPERATORS[name](*(tensor.to(CARD) for tensor in inputs((3, 4), (5, 4))))
    for one, other in zip(
        torch.utils._pytree.tree_leaves(expected),
        torch.utils._pytree.tree_leaves(found),
        strict=True,
    ):
        assert other.device == CARD and other.dtype == one.dtype and other.stride() == one.stride()
        assert torch.equal(one, other.cpu())


def test_a_product_may_be_wider_than_its_factors() -> None:
    left, right = (tensor.bfloat16() for tensor in inputs((3, 4), (4, 5)))
    found = torch.mm(left.to(CARD), right.to(CARD), out_dtype=torch.float32)
    assert torch.equal(found.cpu(), (left.double() @ right.double()).float())


def test_a_module_and_its_gradients() -> None:
    def learned(device: torch.device | str) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 1)).to(
            device
        )
        module(inputs((3, 4))[0].to(device)).square().mean().backward()
        return [
            parameter.grad.cpu() for parameter in module.parameters() if parameter.grad is not None
        ]

    assert all(
        torch.equal(one, other) for one, other in zip(learned("cpu"), learned(CARD), strict=True)
    )


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_and_its_gradients_are_those_of_the_equations(backend: str) -> None:
    """Against fp64, as exact as the rounding of bf16 lets the results be."""
    query, key, value = inputs((2, 4, 6, 16), (2, 2, 6, 16), (2, 2, 6, 16), dtype=torch.bfloat16)

    def attended(device: torch.device | str, dtype: torch.dtype) -> list[Tensor]:
        given = [tensor.to(device, dtype).requires_grad_() for tensor in (query, key, value)]
        heads = [given[0], *(tensor.repeat_interleave(2, 1) for tensor in given[1:])]
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        out.sum().backward()
        return [out, *(tensor.grad for tensor in given)]  # type: ignore[list-item]

    expected = attended("cpu", torch.float64)
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        found = attended(CARD, torch.bfloat16)
    for one, other in zip(expected, found, strict=True):
        # Half a unit in the last place of bf16; keys and values are summed over the heads that
        # share them by autograd.
        assert torch.allclose(one, other.cpu().double(), rtol=2**-8 * 3, atol=2**-8)


def test_the_seed_and_the_offset_of_the_card_decide_what_is_drawn() -> None:
    def drawn() -> list[Tensor]:
        return [torch.rand(8, device=CARD).cpu(), F.dropout(torch.ones(64, device=CARD), 0.5).cpu()]

    torch.cuda.manual_seed(3)
    first, state = drawn(), torch.cuda.get_rng_state()
    second = drawn()
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    torch.cuda.set_rng_state(state)
    assert all(torch.equal(one, other) for one, other in zip(second, drawn(), strict=True))
    on_host = torch.get_rng_state()
    drawn()
    assert torch.equal(on_host, torch.get_rng_state())


def test_products_of_fp8_are_rounded_to_bf16_once() -> None:
    left, right = (
        torch.randn(32, 64).to(torch.float8_e4m3fn),
        torch.randn(48, 64).to(torch.float8_e4m3fn).t(),
    )
    given = [each.to(CARD) for each in (left, right, torch.tensor(0.5), torch.tensor(4.0))]
    found = torch._scaled_mm(*given, out_dtype=torch.bfloat16)
    exact = (left.double() @ right.double()) * 2
    # Half a unit in the last place of bf16, and sums in fp32 of products of up to 4 x 4.
    torch.testing.assert_close(
        found.cpu().double(), exact, rtol=2**-8 + 2**-20, atol=64 * 16 * 2**-24
    )


def test_an_operator_without_numbers_says_its_name() -> None:
    with pytest.raises(
        NotImplementedError, match="aten::_convert_weight_to_int4pack has no numbers"
    ):
        torch._convert_weight_to_int4pack(torch.ones(16, 32, dtype=torch.uint8, device=CARD), 2)


def test_tensors_of_two_devices_are_refused() -> None:
    """As on a card, where a number and indices may come from the host."""
    ours, theirs = torch.ones(3, device="cuda"), torch.ones(3)
    for mixed in (
        lambda: ours * theirs,
        lambda: torch.cat([ours, theirs]),
        lambda: theirs.add_(ours),
    ):
        with pytest.raises(RuntimeError, match="on one device"):
            mixed()
    assert (ours * torch.tensor(2.0))[torch.tensor([0, 2])].tolist() == [2, 2]
