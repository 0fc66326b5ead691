"""Run: pytest tests/ops/test_gated_heads_kernels.py (needs a CUDA device)

Heads with gates are prepared, and multiplied by their gates, as exactly as by torch's operators; a row
has the same bits alone as among others.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monograph.laws.comparisons import error_within
from monograph.model.rope import rotate
from monograph.ops.rms_norm import rms_norm

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
ROWS, HEADS, KEY_HEADS, EPS = 5, 6, 2, 1e-6


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Case:
    """The projections of some tokens, their angles, and the weights of two centred norms."""

    def __init__(self, dtype: torch.dtype, head_dim: int, rotated: int):
        self.head_dim, self.rotated = head_dim, rotated
        self.projected = normal(ROWS, 2 * (HEADS + KEY_HEADS) * head_dim, seed=0).to(dtype)
        self.gains = (0.2 * normal(2, head_dim, seed=1)).to(dtype)
        angles = torch.arange(ROWS)[:, None] * 7.3 ** -torch.arange(rotated // 2).double()
        self.cos, self.sin = angles.cos(), angles.sin()

    def prepared(self, wide: torch.dtype) -> Tensor:
        sizes = [2 * HEADS * self.head_dim, *2 * [KEY_HEADS * self.head_dim]]
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim))
            for part in self.projected.to(wide).split(sizes, -1)
        )
        narrow = torch.promote_types(wide, torch.float32)
        angles = [each[:, None, None].to(narrow) for each in (self.cos, self.sin)]
        q, k = (
            rms_norm(x, 1 + gain.to(wide), EPS)
            for x, gain in zip((q[:, ::2], k), self.gains, strict=True)
        )
        if self.rotated:
            q, k = (rotate(x[:, :, None], (angles[0], angles[1]))[:, :, 0] for x in (q, k))
        return torch.cat([q, k, v], 1).flatten(1)

    def by_kernel(self, rows: list[int]) -> Tensor:
        from monograph.ops.decode_kernels import Norm  # imports Triton
        from monograph.ops.gated_heads_kernels import prepare_heads

        q_gain, k_gain = self.gains.cuda()
        norms = Norm(q_gain, EPS, True), Norm(k_gain, EPS, True)
        angles = [
            each[rows].float().cuda() if self.rotated else None for each in (self.cos, self.sin)
        ]
        return prepare_heads(self.projected[rows].cuda(), norms, *angles, HEADS, KEY_HEADS).cpu()


@DTYPES
@pytest.mark.parametrize(("head_dim", "rotated"), [(32, 8), (48, 48), (16, 0)])
def test_heads_are_prepared_as_exactly_as_by_torch(
    head_dim: int, rotated: int, dtype: torch.dtype
) -> None:
    case = Case(dtype, head_dim, rotated)
    found = case.by_kernel(list(range(ROWS)))
    assert error_within(found, case.prepared(dtype), case.prepared(torch.float64))
    values = KEY_HEADS * head_dim
    assert torch.equal(found[:, -values:], case.projected[:, -values:])
    for rows in ([3], [4, 0, 2]):
        assert torch.equal(case.by_kernel(rows), found[rows])


@DTYPES
def test_each_head_is_multiplied_by_the_sigmoid_of_its_gate(dtype: torch.dtype) -> None:
    from monograph.ops.gated_heads_kernels import multiply_by_gate, multiply_by_gates

    case = Case(dtype, 48, 0)
    mixed = normal(ROWS, HEADS * 48, seed=2).to(dtype)

    def by_torch(wide: torch.dtype) -> Tensor:
        heads = case.projected.to(wide).unflatten(-1, (-1, 48))
        return mixed.to(wide) * heads[:, 1 : 2 * HEADS : 2].flatten(1).sigmoid()

    found = multiply_by_gates(mixed.cuda(), case.projected.cuda(), HEADS).cpu()
    assert error_within(found, by_torch(dtype), by_torch(torch.float64))
    gate = case.projected[:, :1].contiguous()
    found = multiply_by_gate(mixed.cuda(), gate.cuda()).cpu()
    naive, exact = (mixed.to(wide) * gate.to(wide).sigmoid() for wide in (dtype, torch.float64))
    assert error_within(found, naive, exact)
