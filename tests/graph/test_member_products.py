# Run: pytest tests/graph/test_member_products.py
"""Products of many members with one frozen weight: the numbers of each member alone, and no more
passes than products.

Shapes: M members, L rows, K inputs, N outputs, R rank.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from monograph.graph.frozen import Int8Linear, NF4Linear
from monograph.graph.member_products import adapted_product
from monograph.laws.comparisons import error_within, relative_error

M, L, K, N, R = 3, 10, 64, 48, 4
CLASSES = {"dense": nn.Linear, "int8": Int8Linear, "nf4": NF4Linear}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def stored(kind: str) -> tuple[torch.Tensor, ...]:
    if kind == "dense":
        return (nn.Parameter(drawn(N, K), requires_grad=False),)
    layer = nn.Linear(K, N, bias=False)
    layer.__class__ = CLASSES[kind]
    layer.freeze(drawn(N, K))
    return layer.stored_tensors()


def dense(kind: str) -> torch.Tensor:
    tensors = stored(kind)
    if kind == "dense":
        return tensors[0]
    if kind == "int8":
        codes, scales = tensors
        return codes.double() * scales.double()[:, None]
    layer = nn.Linear(K, N, bias=False)
    layer.__class__ = NF4Linear
    layer.freeze(drawn(N, K))
    return layer.dense().double()


def gradients(output, inputs, grad):
    needed = [each for each in inputs if each.requires_grad]
    return output.detach(), *torch.autograd.grad(output, needed, grad)


def run(function, dtype, has_same_rows, trains_rows=True):
    rows = (2, L, K) if has_same_rows else (M, 2, L, K)
    x = drawn(*rows, seed=1).to(dtype).requires_grad_(trains_rows)
    A = drawn(M, R, K, seed=2).to(dtype).requires_grad_()
    B = drawn(M, N, R, seed=3).to(dtype).requires_grad_()
    return gradients(function(x, A, B), (x, A, B), drawn(M, 2, L, N, seed=4).to(dtype))


def plain(weight):
    def function(x, A, B):
        each_A, each_B = A[:, None], B[:, None]
        return x @ weight.to(x.dtype).mT + (x @ each_A.mT) @ each_B.mT

    return function


def together(tensors, has_same_rows):
    in_dims = (None if has_same_rows else 0, 0, 0)

    def function(x, A, B):
        return torch.vmap(lambda x, A, B: adapted_product(x, A, B, tensors), in_dims)(x, A, B)

    return function


@pytest.mark.parametrize("trains_rows", [True, False])
@pytest.mark.parametrize("has_same_rows", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_products_of_members_are_those_of_each_alone(kind, has_same_rows, trains_rows):
    way = has_same_rows, trains_rows
    found = run(together(stored(kind), has_same_rows), torch.float64, *way)
    expected = run(plain(dense(kind)), torch.float64, *way)
    assert len(found) == len(expected) == 3 + trains_rows
    for each, other in zip(found, expected, strict=True):
        assert relative_error(each, other) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CLASSES)
def test_are_within_the_error_of_plain_products(kind, dtype):
    exact = run(plain(dense(kind)), torch.float64, False)
    naive = run(plain(dense(kind)), dtype, False)
    for each, other, right in zip(
        run(together(stored(kind), False), dtype, False), naive, exact, strict=True
    ):
        assert error_within(each, other, right)


def test_one_set_of_adapters_without_a_transform():
    found = run(
        lambda x, A, B: torch.stack(
            [adapted_product(x[m], A[m], B[m], stored("int8")) for m in range(M)]
        ),
        torch.float64,
        False,
    )
    for each, other in zip(found, run(plain(dense("int8")), torch.float64, False), strict=True):
        assert relative_error(each, other) < 1e-12


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.made = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_nothing_but_products_passes_over_the_members_rows():
    with Calls() as calls:
        run(together(stored("dense"), False), torch.float64, False)
    # Forward and backward: the base's product; A's and B's; B's sum, and A's into the gradient of x.
    assert calls.made["mm"] == 2
    assert calls.made["bmm"] == 4
    assert calls.made["baddbmm_"] == 2
    assert not {"add", "mul", "clone", "add_"} & set(calls.made)


def test_a_weight_of_each_member_is_refused():
    x, A, B = drawn(M, L, K), drawn(M, R, K), drawn(M, N, R)
    with pytest.raises(RuntimeError, match="must be one for all"):
        torch.vmap(lambda x, A, B, W: adapted_product(x, A, B, [W]))(x, A, B, drawn(M, N, K))
