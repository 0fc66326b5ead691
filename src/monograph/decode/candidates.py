"""The tokens that can still be drawn, as an interval of scores, and the one search that every truncation needs.

All filters here keep the tokens whose score lies in some interval (only XTC and typical have an upper end), and a
temperature keeps the order of scores. So two numbers per row say which tokens are left, ties stay or go together, and
no filter ever sorts or scatters. Where every request of a chain keeps a few of the likeliest tokens only (`top_k`),
what comes after that filter looks at those few alone.

Shapes: B rows, V vocabulary, N scores of each row (all V, or the few that are left), W the window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from monograph.decode.elementary import weight

Truncation = Literal["window", "search", "sort"]

# How many of the nearest tokens "window" looks at.
WINDOW = 256
# Of how many tokens a group has one maximum, where the window is looked for by groups.
_GROUP = 16
# "search" fixes the bits of a non-negative float from the top: one bit, then two at a time.
_DIGITS = ((30, 2), *((shift, 4) for shift in range(28, -1, -2)))


class Candidates(NamedTuple):
    """What is left of each row's vocabulary: the tokens with low <= score <= high.

    Attributes:
        scores_BN: fp32, at most 0; the likeliest token has 0, a token that is not allowed has -inf.
        ids_BN: int64, whose scores they are; None: all of the vocabulary's, in its order.
        low_B1: fp32.
        high_B1: fp32, the score of the likeliest token that is left.
        held_B1: bool, False where the window was too small for a filter's answer.
        ranked_BW: the largest scores in descending order, once a filter asked for them; None in a search.
        truncation: how `reach` finds its answer.
        few: how many of the likeliest tokens are looked at once top-k is done; None: all.
    """

    scores_BN: Tensor
    ids_BN: Tensor | None
    low_B1: Tensor
    high_B1: Tensor
    held_B1: Tensor
    ranked_BW: Tensor | None
    truncation: Truncation
    few: int | None

    def contains(self, scores_BN: Tensor) -> Tensor:
        """Whether tokens of these scores are left, bool [B, N]."""
        return (scores_BN >= self.low_B1) & (scores_BN <= self.high_B1) & (scores_BN > -torch.inf)

    def weigh(self, scores_BN: Tensor) -> Tensor:
        """Fixed-point exp(score - high) of the tokens that are left, 0 of the others; int64 [B, N]."""
        return torch.where(self.contains(scores_BN), weight((scores_BN - self.high_B1).clamp(max=0)), 0)

    def raise_low(self, low_B1: Tensor, used_B1: Tensor) -> Candidates:
        """Drop the scores below `low_B1` in the rows that use the filter."""
        return self._replace(low_B1=torch.where(used_B1, torch.maximum(self.low_B1, low_B1), self.low_B1))

    def flag(self, held_B1: Tensor, used_B1: Tensor) -> Candidates:
        """Note where the window did not hold the answer of a filter that the row uses."""
        return self._replace(held_B1=self.held_B1 & (held_B1 | ~used_B1))

    def ranked(self) -> Candidates:
        """With `ranked_BW`, for a filter that counts from the likeliest down; the next such filter finds it there."""
        if self.ranked_BW is not None or self.truncation == "search":
            return self
        return self._replace(ranked_BW=largest(self.scores_BN, _width(self.scores_BN, self.truncation))[0])

    def nearest(self) -> Candidates:
        """Only the `few` likeliest tokens, if this is not all; where more are kept `cut_off` says so."""
        if self.few is None or self.truncation != "window" or self.few >= self.scores_BN.shape[-1]:
            return self
        scores_BW, ids_BW = largest(self.scores_BN, self.few)
        return self._replace(scores_BN=scores_BW, ids_BN=ids_BW, ranked_BW=scores_BW)

    def cut_off(self) -> Tensor:
        """Whether a token that `nearest` left out could be among those that are kept, bool [B, 1]."""
        if self.ids_BN is None:
            return torch.zeros_like(self.held_B1)
        least_B1 = self.scores_BN.amin(-1, keepdim=True)
        return (least_B1 >= self.low_B1) & (least_B1 > -torch.inf)

    def masked(self) -> Tensor:
        """The scores, -inf where a token is dropped; [B, N]."""
        return torch.where(self.contains(self.scores_BN), self.scores_BN, -torch.inf)


def everything(scores_BV: Tensor, truncation: Truncation, few: int | None = None) -> Candidates:
    """All tokens of rows whose largest score is 0."""
    ends_B1 = torch.zeros_like(scores_BV[:, :1])
    return Candidates(scores_BV, None, ends_B1 - torch.inf, ends_B1, ends_B1 == 0, None, truncation, few)


def reach(
    candidates: Candidates,
    weigh: Callable[[Tensor], Tensor],
    target_B1: Tensor,
    distance: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The radius within which tokens weigh the target: min{r: sum of weigh(s) over distance(s) <= r is >= target}.

    Top-k is reach with weights 1 and target k; top-p with probabilities; typical with another distance. Weights are
    integers, so the three ways to find the radius give the same bits.

    Args:
        candidates: the tokens.
        weigh: from scores [B, N] to int64 weights [B, N]; 0 for a token that does not count.
        target_B1: int64, at least 1 and at most the sum of all weights.
        distance: from scores to numbers >= 0; None: minus the score.

    Returns:
        radius_B1 fp32, and held_B1 bool: False where the window's weight is less than the target.
    """
    scores_BN = candidates.scores_BN
    if candidates.truncation == "search":
        distance_BN = -scores_BN if distance is None else distance(scores_BN)
        return _search(distance_BN, weigh(scores_BN), target_B1), torch.ones_like(target_B1, dtype=torch.bool)
    if distance is None:
        scores_BW = candidates.ranked_BW
        assert scores_BW is not None, "a filter that counts from the likeliest down calls ranked() first"
        distance_BW = -scores_BW
    else:
        width = _width(scores_BN, candidates.truncation)
        distance_BW, ids_BW = distance(scores_BN).topk(width, largest=False)
        scores_BW = scores_BN.gather(-1, ids_BW)
    reached_BW = weigh(scores_BW).cumsum(-1) >= target_B1
    return torch.where(reached_BW, distance_BW, torch.inf).amin(-1, keepdim=True), reached_BW[:, -1:]


def largest(scores_BV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The largest scores in descending order and whose they are, [B, width] each.

    They all lie in the `width` groups with the largest maxima, so a large vocabulary is searched for groups first.
    """
    rows, vocabulary = scores_BV.shape
    if vocabulary <= _GROUP * width:
        values_BW, ids_BW = scores_BV.topk(width)
        return values_BW, ids_BW
    if spare := -vocabulary % _GROUP:
        scores_BV = torch.nn.functional.pad(scores_BV, (0, spare), value=-torch.inf)
    # Member m of group g is the id m * groups + g.
    members_BMG = scores_BV.view(rows, _GROUP, -1)
    groups_BW = members_BMG.amax(1).topk(width, sorted=False).indices
    values_BW, places_BW = members_BMG.gather(2, groups_BW[:, None].expand(-1, _GROUP, -1)).flatten(1).topk(width)
    group_BW = groups_BW.gather(-1, places_BW % width)
    return values_BW, places_BW // width * members_BMG.shape[-1] + group_BW


def _width(scores_BN: Tensor, truncation: Truncation) -> int:
    return scores_BN.shape[-1] if truncation == "sort" else min(WINDOW, scores_BN.shape[-1])


def _search(distance_BV: Tensor, weight_BV: Tensor, target_B1: Tensor) -> Tensor:
    """`reach` over the whole vocabulary: the bits of non-negative floats order as the floats do."""
    bits_B1V = distance_BV.abs().view(torch.int32)[:, None]
    weight_B1V, target_B11 = weight_BV[:, None], target_B1[:, None]
    radius_B11 = torch.zeros_like(target_B11, dtype=torch.int32)
    for shift, ways in _DIGITS:
        steps = torch.arange(1, ways, dtype=torch.int32, device=distance_BV.device)
        pivot_BP1 = radius_B11 + (steps << shift)[:, None]
        below_BP1 = torch.where(bits_B1V < pivot_BP1, weight_B1V, 0).sum(-1, keepdim=True)
        digit_B11 = (below_BP1 < target_B11).sum(1, keepdim=True, dtype=torch.int32)
        radius_B11 = radius_B11 + (digit_B11 << shift)
    return radius_B11[:, 0].view(torch.float32)
