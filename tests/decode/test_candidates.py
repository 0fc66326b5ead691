"""Run: pytest tests/decode/test_candidates.py"""

from __future__ import annotations

import pytest
import torch

from monograph.decode.candidates import WINDOW, everything, largest, reach


@pytest.mark.parametrize("vocabulary", [1, 300, 4096, 4097, 5003, 8192])
def test_the_largest_by_groups_are_the_largest(vocabulary: int) -> None:
    """With ties, with rows of which little is left, and with a vocabulary that groups do not
    divide.
    """
    scores_BV = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    scores_BV[1] = scores_BV[1].round()
    scores_BV[2] = 0.0
    scores_BV[3, 5:] = -torch.inf
    scores_BV[4] = scores_BV[4].sort().values
    width = min(WINDOW, vocabulary)
    values_BW, ids_BW = largest(scores_BV, width)
    assert torch.equal(values_BW, scores_BV.sort(descending=True).values[:, :width])
    inside_BW = (values_BW > -torch.inf) & (ids_BW < vocabulary)
    assert torch.equal(
        scores_BV.gather(-1, ids_BW.clamp(max=vocabulary - 1))[inside_BW], values_BW[inside_BW]
    )
    assert (inside_BW | (values_BW == -torch.inf)).all() and all(
        len(set(row.tolist())) == width for row in ids_BW
    )


@pytest.mark.parametrize("truncation", ["window", "search", "sort"])
@pytest.mark.parametrize("target", [1, 2, 7, 1000])
def test_reach_is_the_smallest_radius_by_trying_all(truncation: str, target: int) -> None:
    generator = torch.Generator().manual_seed(target)
    scores_BV = -torch.randint(0, 6, (20, 15), generator=generator) / 4.0
    scores_BV[:, 0] = 0.0

    def weigh(scores_BN: torch.Tensor) -> torch.Tensor:
        return (8 + 4 * scores_BN).long() * 20

    candidates = everything(scores_BV, truncation).ranked()  # type: ignore[arg-type]
    for distance in (None, lambda scores_BN: (scores_BN + 0.5).abs()):
        distance_BV = (distance or torch.neg)(scores_BV)
        radius_B1, sufficed_B1 = reach(candidates, weigh, torch.full((20, 1), target), distance)
        for row in range(20):
            inside = [
                r
                for r in distance_BV[row]
                if weigh(scores_BV[row])[distance_BV[row] <= r].sum() >= target
            ]
            assert sufficed_B1[row] and radius_B1[row, 0] == min(inside)
