"""Run: pytest tests/ensemble/test_functions.py

The functions that stand in for torch's where torch has no batched form, each compared with torch's
for one member.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from monograph.ensemble import call
from monograph.ensemble.call import CannotBatch


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("padding", [None, 0, 2, -1, -5])
def test_an_embedding_and_its_gradient(padding: int | None) -> None:
    ids, weights = (
        torch.tensor([[0, 2, 4], [1, 2, 0]]),
        [drawn(5, 3).requires_grad_() for _ in range(2)],
    )
    ours, theirs = call._embedding(ids, weights[0], padding), F.embedding(ids, weights[1], padding)
    assert torch.equal(ours, theirs)
    for rows in (ours, theirs):
        (rows * drawn(2, 3, 3, seed=1)).sum().backward()
    assert torch.equal(weights[0].grad, weights[1].grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_norm", "scale_grad_by_freq"])
def test_an_embedding_that_counts_all_members_tokens_is_refused_by_name(name: str) -> None:
    with pytest.raises(CannotBatch, match=f"it has {name}, which would count"):
        call._embedding(torch.tensor([1]), drawn(5, 3), **{name: 1.0})  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{}, {"p": 1.0}, {"dim": 0}, {"eps": 10.0}])
def test_a_normalised_vector(given: dict[str, Any]) -> None:
    rows, out = (
        torch.cat([drawn(2, 4), torch.full((1, 4), 1e-9, dtype=torch.float64)]),
        torch.empty(3, 4).double(),
    )
    assert torch.equal(call._normalize(rows, **given), F.normalize(rows, **given))
    assert call._normalize(rows, out=out, **given) is out and torch.equal(
        out, F.normalize(rows, **given)
    )


@pytest.mark.parametrize("dim", [None, 0, 1, 2, -1])
def test_a_weight_norm(dim: int | None) -> None:
    direction = drawn(2, 3, 4)
    norm = drawn(
        *(
            [1] * 3
            if dim == -1
            else [size if at == (dim or 0) else 1 for at, size in enumerate((2, 3, 4))]
        )
    )
    ours = call._weight_norm(direction, norm, **({} if dim is None else {"dim": dim}))
    torch.testing.assert_close(
        ours, torch._weight_norm(direction, norm, dim or 0), rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("kept", [1, 2, 4])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "added"])
def test_probabilities_times_values_are_attention(mask: str, kept: int) -> None:
    """With grouped heads and a scale of its own; rows, heads and tokens are of different sizes."""
    query, key, value = (
        drawn(3, 4, 5, 2),
        drawn(3, kept, 5, 2, seed=1),
        drawn(3, kept, 5, 2, seed=2),
    )
    seen = {"bool": torch.ones(5, 5).tril().bool(), "added": drawn(5, 5, seed=3)}.get(mask)
    theirs = F.scaled_dot_product_attention(
        query, key, value, seen, is_causal=mask == "causal", scale=0.3, enable_gqa=True
    )
    ours = call._attention_probabilities(query, key, seen, mask == "causal", 0.3, True)
    ours = ours @ value.repeat_interleave(4 // kept, dim=-3)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)
    plain = call._attention_probabilities(query, query, None, False, None, False)
    torch.testing.assert_close(
        plain, (query @ query.mT / math.sqrt(2)).softmax(-1), rtol=1e-14, atol=0
    )
