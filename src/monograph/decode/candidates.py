"""The tokens that filters have left, and `reach`, which finds where a filter cuts.

A filter, such as top-p, drops tokens of a row before one is sampled. A chain
(`monograph.decode.knobs`) is the list of filters and other stages that the rows need.

A token has two numbers. Its edited logit gives its rank. Its score is the difference to the largest
logit, divided by the temperature, and gives its weight. Scores are rounded, so two different logits
may have the same score, but a rank never depends on rounding. Tokens with equal logits are kept or
dropped together.

A token that a filter drops gets the score -inf, so a filter does not have to move the other tokens.

A filter keeps the tokens within a radius: those whose distance is at most the radius. A token's
distance is minus its logit, unless the filter passes another distance to `reach`.

If every request of a chain has a small `top_k`, top-k and the stages after it read only the
`likeliest_count` likeliest tokens.

Shapes: B rows, V vocabulary, N tokens of each row (all V, or the `likeliest_count` likeliest), W
tokens of the window, G groups, M members of a group, P pivots.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from monograph.decode.reproducible import weight
from monograph.ops.materialize import materialize

# How `reach` finds the radius. If the window suffices, all three give the same bits.
# "window": from the WINDOW tokens with the smallest distances. It is the fastest, but in some rows
#     the window does not suffice. Then `sufficed_B1` is False, and the host repeats the step of the
#     row with "search".
# "search": by a search over the bits of the radius. It reads all tokens and is exact.
# "sort": from all tokens in the order of their distances. It is exact and obvious, for tests.
Truncation = Literal["window", "search", "sort"]

WINDOW = 256
# The size of the groups by whose maxima `largest` finds the window. A size of 8 is as fast, and 32
# takes 1.5 times as long (dev/log.md).
_GROUP = 16
# "search" finds the 32 bits of the radius from the highest bit down, two at a time. These are the
# positions of the lower bit of each pair. The first pair has the sign.
_SHIFTS = range(30, -1, -2)
_SIGN_SHIFT = 30


class Candidates(NamedTuple):
    """The tokens that filters have left in each row.

    Attributes:
        logits_BN: fp32, the edited logits; -inf where a token is not allowed. Filters do not change
            them.
        scores_BN: fp32, at most `high_B1`; -inf where a token was dropped.
        ids_BN: int64, the tokens' ids; None: the whole vocabulary, in its order.
        high_B1: fp32, the score of the likeliest token that is left.
        sufficed_B1: bool, False where the window was too small for the result of a filter.
        ranked_BW: int64, the indices of the largest logits, in descending order; None before a
            filter needs them. "search" never needs them.
        truncation: how `reach` finds the radius.
        likeliest_count: the number of likeliest tokens that top-k and the stages after it read;
            None: all tokens.
    """

    logits_BN: Tensor
    scores_BN: Tensor
    ids_BN: Tensor | None
    high_B1: Tensor
    sufficed_B1: Tensor
    ranked_BW: Tensor | None
    truncation: Truncation
    likeliest_count: int | None

    def weigh(self, scores_BN: Tensor) -> Tensor:
        """Return fixed-point exp(score - high), and 0 for dropped tokens; int64 [B, N]."""
        # `weight` needs numbers of at most 0, and callers may pass any scores.
        weight_BN = weight((scores_BN - self.high_B1).clamp(max=0))
        return torch.where(scores_BN > -torch.inf, weight_BN, 0)

    def total(self) -> Tensor:
        """Return the sum of all weights, int64 [B, 1]."""
        return self.weigh(self.scores_BN).sum(-1, keepdim=True)

    def count_left(self) -> Tensor:
        """Return the number of tokens that are left, int64 [B, 1]."""
        return one_each(self.scores_BN).sum(-1, keepdim=True)

    def keep(self, kept_BN: Tensor, used_B1: Tensor) -> Self:
        """Drop the tokens that are not in `kept_BN`, in the rows that use the filter."""
        return self._replace(scores_BN=torch.where(kept_BN | ~used_B1, self.scores_BN, -torch.inf))

    def likeliest(
        self, weigh: Callable[[Tensor], Tensor], target_B1: Tensor, used_B1: Tensor
    ) -> Self:
        """Keep the likeliest tokens that together have the target weight.

        Tokens with the same logit as the last of them are kept, too.

        Args:
            weigh: see `reach`.
            target_B1: see `reach`.
            used_B1: the rows that use the filter.
        """
        ranked = self.ranked()
        radius_B1, sufficed_B1 = reach(ranked, weigh, target_B1)
        # The distance is minus the logit.
        kept = ranked.keep(self.logits_BN >= -radius_B1, used_B1)
        return kept.combine_sufficed(sufficed_B1, used_B1)

    def combine_sufficed(self, sufficed_B1: Tensor, used_B1: Tensor) -> Self:
        """Clear the attribute `sufficed_B1` where a filter is used and its window did not suffice.

        Args:
            sufficed_B1: where the filter's window sufficed.
            used_B1: the rows that use the filter.
        """
        return self._replace(sufficed_B1=self.sufficed_B1 & (sufficed_B1 | ~used_B1))

    def ranked(self) -> Self:
        """Add `ranked_BW`, for a filter that counts from the likeliest token down.

        "search" does not need `ranked_BW`.
        """
        if self.ranked_BW is not None or self.truncation == "search":
            return self
        _, ranked_BW = largest(self.logits_BN, _width(self.logits_BN, self.truncation))
        return self._replace(ranked_BW=ranked_BW)

    def shortened(self) -> Self:
        """Return the `likeliest_count` likeliest tokens, or all if there are no more than that.

        `may_miss_tokens` tells in which rows a filter might keep a token that is left out here.
        """
        count = self.likeliest_count
        # "search" and "sort" are exact, so they read all tokens.
        if count is None or self.truncation != "window" or count >= self.logits_BN.shape[-1]:
            return self
        logits_BW, ids_BW = largest(self.logits_BN, count)
        scores_BW = self.scores_BN.gather(-1, ids_BW)
        # `largest` returns the tokens in the order of their ranks.
        ranked_BW = torch.arange(count, device=ids_BW.device).expand_as(ids_BW)
        return self._replace(
            logits_BN=logits_BW, scores_BN=scores_BW, ids_BN=ids_BW, ranked_BW=ranked_BW
        )

    def may_miss_tokens(self) -> Tensor:
        """Return whether a filter might keep a token that `shortened` left out, bool [B, 1].

        The tokens that filters keep are consecutive in the order of the logits. A filter can keep a
        token that was left out only if it keeps the last token here, or none of the tokens here.
        """
        if self.ids_BN is None:
            return torch.zeros_like(self.sufficed_B1)
        smallest_B1 = self.logits_BN.amin(-1, keepdim=True)
        is_last_BN = self.logits_BN == smallest_B1
        keeps_last_B1 = (is_last_BN & (self.scores_BN > -torch.inf)).any(-1, keepdim=True)
        return keeps_last_B1 | (self.count_left() == 0)


def one_each(scores_BN: Tensor) -> Tensor:
    """Return a weight of 1 for every token that is left, and 0 for dropped ones, int64 [B, N]."""
    return (scores_BN > -torch.inf).long()


def everything(
    logits_BV: Tensor, truncation: Truncation, likeliest_count: int | None = None
) -> Candidates:
    """Return all tokens. A score is the difference to the largest logit.

    Args:
        logits_BV: fp32, the edited logits.
        truncation: see `Candidates`.
        likeliest_count: see `Candidates`.
    """
    largest_B1 = logits_BV.amax(-1, keepdim=True)
    high_B1 = torch.zeros_like(largest_B1)
    return Candidates(
        logits_BN=logits_BV,
        scores_BN=logits_BV - largest_B1,
        ids_BN=None,
        high_B1=high_B1,
        sufficed_B1=torch.ones_like(high_B1, dtype=torch.bool),
        ranked_BW=None,
        truncation=truncation,
        likeliest_count=likeliest_count,
    )


def reach(
    candidates: Candidates,
    weigh: Callable[[Tensor], Tensor],
    target_B1: Tensor,
    distance: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the smallest radius within which the tokens have the target weight.

        radius = min{r: sum of weigh(s) over tokens with distance(s) <= r  >=  target}

    For top-k, each weight is 1 and the target is k. For top-p, the weights are probabilities. For
    typical sampling, the distance is not minus the logit. Sums of weights are sums of integers,
    which do not depend on their order, so the three truncations give the same bits.

    Args:
        candidates: the tokens.
        weigh: returns int64 weights [B, N] of scores [B, N]; 0 for a token that does not count.
        target_B1: int64, at least 1 and at most the sum of all weights.
        distance: returns the distances of scores; None: the distance is minus the logit.

    Returns:
        radius_B1: fp32.
        sufficed_B1: bool, False where the window's weight is less than the target.
    """
    scores_BN = candidates.scores_BN
    distance_BN = -candidates.logits_BN if distance is None else distance(scores_BN)
    if candidates.truncation == "search":
        # `materialize` writes the weights to memory. Otherwise Inductor computes the exponentials
        # again in every pass of the search, which takes three times as long (dev/log.md).
        weight_BN = materialize(weigh(scores_BN))
        radius_B1 = _search(distance_BN, weight_BN, target_B1)
        return radius_B1, torch.ones_like(target_B1, dtype=torch.bool)
    nearest_BW = candidates.ranked_BW
    # `ranked_BW` has the order of minus the logit, which another distance does not have.
    if distance is not None:
        width = _width(scores_BN, candidates.truncation)
        nearest_BW = distance_BN.topk(width, largest=False).indices
    assert nearest_BW is not None, (
        "a filter that counts from the likeliest down calls ranked() first"
    )
    reached_BW = weigh(scores_BN.gather(-1, nearest_BW)).cumsum(-1) >= target_B1
    distance_BW = distance_BN.gather(-1, nearest_BW)
    radius_B1 = torch.where(reached_BW, distance_BW, torch.inf).amin(-1, keepdim=True)
    return radius_B1, reached_BW[:, -1:]


def largest(values_BV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the largest values in descending order and their ids, [B, width] each."""
    rows, vocabulary = values_BV.shape
    # There are at most `width` groups, so all of them would be chosen.
    if vocabulary <= _GROUP * width:
        values_BW, ids_BW = values_BV.topk(width)
        return values_BW, ids_BW
    padding = -vocabulary % _GROUP
    if padding:
        values_BV = torch.nn.functional.pad(values_BV, (0, padding), value=-torch.inf)
    # The `width` groups with the largest maxima contain the largest values. Finding these groups
    # first takes half the time of a top-k over all values. Member m of group g has the id
    # m * groups + g, because groups of neighbouring ids are slower (dev/log.md).
    members_BMG = values_BV.view(rows, _GROUP, -1)
    greatest_BW, groups_BW = members_BMG.amax(1).topk(width, sorted=False)
    of_groups_BMW = members_BMG.gather(2, groups_BW[:, None].expand(-1, _GROUP, -1))
    values_BW, index_BW = of_groups_BMW.flatten(1).topk(width)
    member_BW = index_BW // width
    group_BW = groups_BW.gather(-1, index_BW % width)
    ids_BW = member_BW * members_BMG.shape[-1] + group_BW
    # Padding is among the largest only where less than `width` values are above -inf. Then the last of
    # the groups has none of them, and its first member takes the padding's place.
    last_B1 = groups_BW.gather(-1, greatest_BW.argmin(-1, keepdim=True))
    return values_BW, torch.where(ids_BW < vocabulary, ids_BW, last_B1)


def _width(scores_BN: Tensor, truncation: Truncation) -> int:
    """Return the number of tokens that a truncation ranks: all for "sort", else WINDOW."""
    return scores_BN.shape[-1] if truncation == "sort" else min(WINDOW, scores_BN.shape[-1])


def _search(distance_BV: Tensor, weight_BV: Tensor, target_B1: Tensor) -> Tensor:
    """Return the radius of `reach` over the whole vocabulary; fp32 [B, 1].

    `reach` defines the radius as the smallest r for which the tokens with distances up to r have the
    target weight. The same r is the largest one for which the tokens with distances below r have
    less than the target. The second form suits a search that sets bits from the highest one down: a
    bit is set if the weight below the larger number is still less than the target. The search is
    over integers that have the order of the floats.
    """
    key_B1V = _ordered(distance_BV.view(torch.int32))[:, None]
    weight_B1V = weight_BV[:, None]
    target_B11 = target_B1[:, None]
    radius_B11 = torch.zeros_like(target_B11, dtype=torch.int32)
    # Before each pass, `radius_B11` has the bits found so far, and zeros below them. A pass finds two
    # bits, so the vocabulary is read half as often as with one bit.
    for shift in _SHIFTS:
        # The two bits as a number: -2 to 1 for the pair with the sign, and 0 to 3 for the others.
        lowest = -2 if shift == _SIGN_SHIFT else 0
        steps_P = torch.arange(lowest + 1, lowest + 4, dtype=torch.int32, device=distance_BV.device)
        pivot_BP1 = radius_B11 + (steps_P * (1 << shift))[:, None]
        below_BP1 = torch.where(key_B1V < pivot_BP1, weight_B1V, 0).sum(-1, keepdim=True)
        # The lowest number always fits. Each pivot, one step larger than the one before, fits if the
        # weight below it is less than the target. So the number is `lowest` plus the pivots that fit.
        fitting_B11 = (below_BP1 < target_B11).sum(1, keepdim=True, dtype=torch.int32)
        radius_B11 = radius_B11 + (fitting_B11 + lowest) * (1 << shift)
    return _ordered(radius_B11[:, 0]).view(torch.float32)


def _ordered(bits: Tensor) -> Tensor:
    """Return the bits of floats as int32 with the order of the floats; its own inverse, any shape."""
    # The bits of negative floats have the reverse order, so all of them but the sign are inverted.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
