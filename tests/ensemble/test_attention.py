"""Run: pytest tests/ensemble/test_attention.py (members' attention in one call is each member's
own)
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from monograph.ensemble.call import _attention_probabilities

MEMBERS = 3


def inputs(rows: tuple[int, ...], heads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(MEMBERS, *rows, 4, 5, 8), *[(MEMBERS, *rows, heads, 6, 8)] * 2]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("masked", ["not", "rows", "own"])
@pytest.mark.parametrize("shared", [(), (0,), (1, 2)], ids=["own", "query shared", "keys shared"])
@pytest.mark.parametrize("rows", [(), (2,), (2, 3)], ids=["heads", "rows", "more"])
def test_attention_folds_members_into_rows(rows, shared, masked):
    """As in a loop over members: whatever is shared, and wherever the members' axis is."""
    given = inputs(rows, heads=2)
    mask = {
        "not": None,
        "rows": torch.rand(5, 6) > 0.3,
        "own": torch.randn(MEMBERS, 4, 5, 6, dtype=torch.float64),
    }
    given = [tensor[0] if number in shared else tensor for number, tensor in enumerate(given)] + [
        mask[masked]
    ]
    axes = [None if number in shared else 0 for number in range(3)] + [
        0 if masked == "own" else None
    ]
    given[1] = given[1] if axes[1] is None else given[1].movedim(0, -1)
    axes[1] = None if axes[1] is None else -1

    def attend(query, key, value, mask):
        return torch.ops.monograph.attention_folding_members(
            query, key, value, mask, False, 0.3, True
        )

    found = torch.vmap(attend, in_dims=tuple(axes))(*given)
    for member in range(MEMBERS):
        own = [
            x if axis is None else x.select(axis, member)
            for x, axis in zip(given, axes, strict=True)
        ]
        expected = nn.functional.scaled_dot_product_attention(*own, scale=0.3, enable_gqa=True)
        assert torch.allclose(found[member], expected, rtol=0, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("gqa", [False, True])
@pytest.mark.parametrize("masked", ["causal", "bool", "numbers", "not"])
def test_attention_drops_its_own_probabilities(masked, gqa):
    """With dropout they are computed in memory; without any they are those of the fused kernel."""
    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2 if gqa else 4, 5, 8, dtype=torch.float64)
    mask = {"bool": torch.rand(5, 5) > 0.3, "numbers": torch.randn(5, 5, dtype=torch.float64)}.get(
        masked
    )
    options = {"is_causal": masked == "causal", "scale": 0.3, "enable_gqa": gqa}
    found = _attention_probabilities(query, key, mask, **options) @ value.repeat_interleave(
        2 if gqa else 1, -3
    )
    expected = nn.functional.scaled_dot_product_attention(query, key, value, mask, 0.0, **options)
    assert torch.allclose(found, expected, rtol=0, atol=1e-14, equal_nan=True)
