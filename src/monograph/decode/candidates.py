"""The tokens that can still be drawn, and the one search that every truncation needs.

A token has two numbers: its edited logit, by which tokens are ranked, and its score, by which they
are weighed. A score is the distance to the largest logit over the temperature, so it rounds: two
logits that differ may have one score. A rank never depends on that. A token that a filter drops has
the score -inf, so one tensor holds the tokens that are left, tokens that are level stay or go
together, and no filter ever sorts or scatters. Where every request of a chain keeps a few of the
likeliest tokens only (`top_k`), the stages after that filter look at those few alone.

Shapes: B rows, V vocabulary, N scores of each row (all V, or the few that are left), W the window.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from monograph.decode.reproducible import weight
from monograph.ops.materialize import materialize

Truncation = Literal["window", "search", "sort"]

# How many of the nearest tokens "window" looks at.
WINDOW = 256
# How many tokens a group has where the window is looked for by the groups' maxima; 8 take as long,
# 32 half as long again (dev/log.md).
_GROUP = 16
# "search" fixes the bits of a distance from the top, two at a time; the first two are those of a
# signed number.
_SIGNED = 30
_DIGITS = range(30, -1, -2)


class Candidates(NamedTuple):
    """The tokens of each row's vocabulary that are left.

    Attributes:
        logits_BN: fp32, the edited logits, as they are; -inf where a token is not allowed.
        scores_BN: fp32, at most `high`; -inf where a token was dropped.
        ids_BN: int64, the tokens' ids; None: the whole vocabulary, in its order.
        high_B1: fp32, the score of the likeliest token that is left.
        held_B1: bool, False where the window was too small for a filter's answer.
        ranked_BW: int64, where the largest logits are, in descending order, once a filter asked for
            them; None in a search.
        truncation: how `reach` finds its answer.
        few: how many of the likeliest tokens are looked at once top-k is done; None: all.
    """

    logits_BN: Tensor
    scores_BN: Tensor
    ids_BN: Tensor | None
    high_B1: Tensor
    held_B1: Tensor
    ranked_BW: Tensor | None
    truncation: Truncation
    few: int | None

    def weigh(self, scores_BN: Tensor) -> Tensor:
        """Return fixed-point exp(score - high) of the tokens that are left, 0 of the others; int64
        [B, N].
        """
        return torch.where(
            scores_BN > -torch.inf, weight((scores_BN - self.high_B1).clamp(max=0)), 0
        )

    def total(self) -> Tensor:
        """Return the sum of all weights, int64 [B, 1]."""
        return self.weigh(self.scores_BN).sum(-1, keepdim=True)

    def left(self) -> Tensor:
        """Return how many tokens are left, int64 [B, 1]."""
        return one_each(self.scores_BN).sum(-1, keepdim=True)

    def keep(self, kept_BN: Tensor, used_B1: Tensor) -> Self:
        """Drop all other tokens in the rows that use the filter."""
        return self._replace(scores_BN=torch.where(kept_BN | ~used_B1, self.scores_BN, -torch.inf))

    def likeliest(
        self, weigh: Callable[[Tensor], Tensor], target_B1: Tensor, used_B1: Tensor
    ) -> Self:
        """Keep the largest logits that together weigh the target, and those level with the last."""
        ranked = self.ranked()
        radius_B1, held_B1 = reach(ranked, weigh, target_B1)
        return ranked.keep(self.logits_BN >= -radius_B1, used_B1).flag(held_B1, used_B1)

    def flag(self, held_B1: Tensor, used_B1: Tensor) -> Self:
        """Note where the window did not hold the answer of a filter that the row uses."""
        return self._replace(held_B1=self.held_B1 & (held_B1 | ~used_B1))

    def ranked(self) -> Self:
        """Add `ranked_BW`, for a filter that counts from the likeliest down; the next such filter
        uses it again.
        """
        if self.ranked_BW is not None or self.truncation == "search":
            return self
        return self._replace(
            ranked_BW=largest(self.logits_BN, _width(self.logits_BN, self.truncation))[1]
        )

    def nearest(self) -> Self:
        """Return only the `few` likeliest tokens, if this is not all; where more are kept `cut_off`
        says so.
        """
        # Only for "window": the two others are exact, so they look at every token.
        if self.few is None or self.truncation != "window" or self.few >= self.logits_BN.shape[-1]:
            return self
        logits_BW, ids_BW = largest(self.logits_BN, self.few)
        places_BW = torch.arange(self.few, device=ids_BW.device).expand_as(ids_BW)
        scores_BW = self.scores_BN.gather(-1, ids_BW)
        return self._replace(
            logits_BN=logits_BW, scores_BN=scores_BW, ids_BN=ids_BW, ranked_BW=places_BW
        )

    def cut_off(self) -> Tensor:
        """Return whether a token that `nearest` left out could be among those that are kept, bool
        [B, 1].

        The tokens that filters leave have no gaps in the order of the logits: there are more only
        if the last one that is looked at is kept, or none of them is.
        """
        if self.ids_BN is None:
            return torch.zeros_like(self.held_B1)
        least_B1 = self.logits_BN.amin(-1, keepdim=True)
        last_B1 = ((self.logits_BN == least_B1) & (self.scores_BN > -torch.inf)).any(
            -1, keepdim=True
        )
        return last_B1 | (self.left() == 0)


def one_each(scores_BN: Tensor) -> Tensor:
    """Return a weight of 1 for every token that is left, int64 [B, N]."""
    return (scores_BN > -torch.inf).long()


def everything(logits_BV: Tensor, truncation: Truncation, few: int | None = None) -> Candidates:
    """Return all tokens, with scores counted from the largest logit down."""
    greatest_B1 = logits_BV.amax(-1, keepdim=True)
    high_B1 = torch.zeros_like(greatest_B1)
    return Candidates(
        logits_BV, logits_BV - greatest_B1, None, high_B1, high_B1 == 0, None, truncation, few
    )


def reach(
    candidates: Candidates,
    weigh: Callable[[Tensor], Tensor],
    target_B1: Tensor,
    distance: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the radius in which tokens weigh the target: min{r: sum of weigh(s) over distance(s)
    <= r is >= target}.

    Top-k is reach with weights 1 and target k; top-p with probabilities; typical with another
    distance. Weights are integers, so the three ways to find the radius give the same bits.

    Args:
        candidates: the tokens.
        weigh: from scores [B, N] to int64 weights [B, N]; 0 for a token that does not count.
        target_B1: int64, at least 1 and at most the sum of all weights.
        distance: from scores to numbers; None: minus the logit.

    Returns:
        radius_B1 fp32, and held_B1 bool: False where the window's weight is less than the target.
    """
    scores_BN = candidates.scores_BN
    distance_BN = -candidates.logits_BN if distance is None else distance(scores_BN)
    if candidates.truncation == "search":
        # Else every pass of the search computes the exponentials again: three times the time
        # (dev/log.md).
        weight_BN = materialize(weigh(scores_BN))
        return _search(distance_BN, weight_BN, target_B1), torch.ones_like(
            target_B1, dtype=torch.bool
        )
    places_BW = candidates.ranked_BW
    # `ranked_BW` counts from the likeliest down, so it is of no use to another distance.
    if distance is not None:
        places_BW = distance_BN.topk(
            _width(scores_BN, candidates.truncation), largest=False
        ).indices
    assert places_BW is not None, (
        "a filter that counts from the likeliest down calls ranked() first"
    )
    reached_BW = weigh(scores_BN.gather(-1, places_BW)).cumsum(-1) >= target_B1
    distance_BW = distance_BN.gather(-1, places_BW)
    return torch.where(reached_BW, distance_BW, torch.inf).amin(-1, keepdim=True), reached_BW[
        :, -1:
    ]


def largest(scores_BV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the largest scores in descending order and their ids, [B, width] each."""
    rows, vocabulary = scores_BV.shape
    if vocabulary <= _GROUP * width:
        values_BW, ids_BW = scores_BV.topk(width)
        return values_BW, ids_BW
    if spare := -vocabulary % _GROUP:
        scores_BV = torch.nn.functional.pad(scores_BV, (0, spare), value=-torch.inf)
    # The largest scores lie in the `width` groups with the largest maxima, and to look for these
    # first takes half the time. Member m of group g is the id m * groups + g: neighbours as groups
    # take longer (dev/log.md).
    members_BMG = scores_BV.view(rows, _GROUP, -1)
    groups_BW = members_BMG.amax(1).topk(width, sorted=False).indices
    values_BW, places_BW = (
        members_BMG.gather(2, groups_BW[:, None].expand(-1, _GROUP, -1)).flatten(1).topk(width)
    )
    group_BW = groups_BW.gather(-1, places_BW % width)
    return values_BW, places_BW // width * members_BMG.shape[-1] + group_BW


def _width(scores_BN: Tensor, truncation: Truncation) -> int:
    return scores_BN.shape[-1] if truncation == "sort" else min(WINDOW, scores_BN.shape[-1])


def _search(distance_BV: Tensor, weight_BV: Tensor, target_B1: Tensor) -> Tensor:
    """Find the radius of `reach` over the whole vocabulary, on whole numbers that order as the
    floats do.
    """
    key_B1V = _ordered(distance_BV.view(torch.int32))[:, None]
    weight_B1V, target_B11 = weight_BV[:, None], target_B1[:, None]
    radius_B11 = torch.zeros_like(target_B11, dtype=torch.int32)
    # Two bits a pass: the vocabulary is read half as often as with one.
    for shift in _DIGITS:
        first = -2 if shift == _SIGNED else 0
        steps = torch.arange(first + 1, first + 4, dtype=torch.int32, device=distance_BV.device)
        pivot_BP1 = radius_B11 + (steps * (1 << shift))[:, None]
        below_BP1 = torch.where(key_B1V < pivot_BP1, weight_B1V, 0).sum(-1, keepdim=True)
        digit_B11 = (below_BP1 < target_B11).sum(1, keepdim=True, dtype=torch.int32)
        radius_B11 = radius_B11 + (digit_B11 + first) * (1 << shift)
    return _ordered(radius_B11[:, 0]).view(torch.float32)


def _ordered(bits: Tensor) -> Tensor:
    """Return the bits of a float as an int32 that orders as it does, and back; any shape."""
    # As integers, the bits of negative floats order backwards: all but the sign are turned.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
