"""Run: pytest tests/decode/test_candidates.py"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from monograph.decode.candidates import WINDOW, all_candidates, find_radius, largest_values


def last_of_ties(values: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
    """Top-k that takes those of equal values which have the highest indices, as it may."""
    order = values.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :k]
    indices = values.shape[-1] - 1 - order
    return torch.return_types.topk((values.gather(-1, indices), indices))


@pytest.mark.parametrize("takes_last", [False, True])
@pytest.mark.parametrize("vocabulary", [1, 300, 4096, 4097, 5003, 8192])
def test_the_largest_by_groups_are_the_largest(
    vocabulary: int, takes_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ties, with rows of which little is left, and with a vocabulary that groups do not
    divide.
    """
    if takes_last:
        monkeypatch.setattr(Tensor, "topk", last_of_ties)
    scores_BV = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    scores_BV[1] = scores_BV[1].round()
    scores_BV[2] = 0.0
    scores_BV[3, 5:] = -torch.inf
    scores_BV[4] = scores_BV[4].sort().values
    width = min(WINDOW, vocabulary)
    values_BW, ids_BW = largest_values(scores_BV, width)
    assert torch.equal(values_BW, scores_BV.sort(descending=True).values[:, :width])
    assert torch.equal(scores_BV.gather(-1, ids_BW), values_BW)
    is_finite_BW = values_BW > -torch.inf
    assert all(
        len(set(ids[finite].tolist())) == int(finite.sum())
        for ids, finite in zip(ids_BW, is_finite_BW, strict=True)
    )


@pytest.mark.parametrize("truncation", ["window", "search", "sort"])
@pytest.mark.parametrize("target", [1, 2, 7, 1000])
def test_reach_is_the_smallest_radius_by_trying_all(truncation: str, target: int) -> None:
    generator = torch.Generator().manual_seed(target)
    scores_BV = -torch.randint(0, 6, (20, 15), generator=generator) / 4.0
    scores_BV[:, 0] = 0.0

    def weigh(scores_BN: torch.Tensor) -> torch.Tensor:
        return (8 + 4 * scores_BN).long() * 20

    candidates = all_candidates(scores_BV, truncation).with_ranking()  # type: ignore[arg-type]
    for distance in (None, lambda scores_BN: (scores_BN + 0.5).abs()):
        distance_BV = (distance or torch.neg)(scores_BV)
        radius_B1, sufficed_B1 = find_radius(
            candidates, weigh, torch.full((20, 1), target), distance
        )
        for row in range(20):
            inside = [
                r
                for r in distance_BV[row]
                if weigh(scores_BV[row])[distance_BV[row] <= r].sum() >= target
            ]
            assert sufficed_B1[row] and radius_B1[row, 0] == min(inside)
