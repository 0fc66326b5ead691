"""The tokens that may still be sampled, and `find_radius`, which finds where a filter cuts.

A filter, such as top-p, drops tokens of a row before one is sampled. A chain
(`monograph.decode.knobs`) is the list of filters and other stages that the rows need.

A token has a logit, which the stages before the filters have edited, and a score, which is the
difference of this logit to the largest one, divided by the temperature. The logit gives the token's
rank, and exp(score) its weight. Scores are rounded, so two different logits may have the same score,
but a rank never depends on rounding. Tokens with equal logits are kept or dropped together.

A token that a filter drops gets the score -inf, so a filter does not have to move the other tokens.

A filter keeps the tokens within a radius: those whose distance is at most the radius. A token's
distance is minus its logit, unless the filter passes another distance to `find_radius`. So by
default the radius is minus the smallest logit that is kept.

If every request of a chain has a small `top_k`, top-k and the stages after it read only the
`likeliest_count` likeliest tokens.

Shapes: B rows, V vocabulary, N tokens of each row (all V, or the `likeliest_count` likeliest), W
tokens of the window, G groups, M members of a group, P pivots; 1 an axis of length 1.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from monograph.decode.reproducible import weight
from monograph.ops.materialize import materialize

# How `find_radius` finds the radius. All three ways give the same bits, except in rows for which the
# window is too small.
# "window": from the WINDOW tokens with the smallest distances. It is the fastest. In a row whose
#     window is too small, `sufficed_B1` becomes False, and the host repeats the row's step with
#     "search".
# "search": by a search over the bits of the radius. It reads all tokens and is exact.
# "sort": from all tokens in the order of their distances. It is exact and obvious, for tests.
Truncation = Literal["window", "search", "sort"]

WINDOW = 256
# The size of the groups by whose maxima `largest_values` finds the window. A size of 8 is as fast, and 32
# takes 1.5 times as long (dev/log.md).
_GROUP = 16
# "search" finds the 32 bits of the radius from the highest bit down, two at a time. These are the
# positions of the lower bit of each pair. The first pair has the sign.
_SHIFTS = range(30, -1, -2)
_SIGN_SHIFT = 30


class Candidates(NamedTuple):
    """The tokens that filters have left in each row. A dropped token stays, with the score -inf.

    Attributes:
        logits_BN: fp32, the edited logits; -inf where a token is not allowed. Filters do not change
            them.
        scores_BN: fp32, at most `max_score_B1`; -inf where a token was dropped.
        ids_BN: int64, the tokens' ids; None: the tokens are the whole vocabulary, in its order.
        max_score_B1: fp32, the score of the likeliest token that is left.
        sufficed_B1: bool, False where the window was too small for a filter. The row's result is
            then not used.
        ranked_BW: int64, the indices (in 0 to N - 1) of the largest logits, in descending order; None
            before a filter needs them. "search" never needs them.
        truncation: how `find_radius` finds the radius.
        likeliest_count: the number of likeliest tokens that top-k and the stages after it read;
            None: all tokens.
    """

    logits_BN: Tensor
    scores_BN: Tensor
    ids_BN: Tensor | None
    max_score_B1: Tensor
    sufficed_B1: Tensor
    ranked_BW: Tensor | None
    truncation: Truncation
    likeliest_count: int | None

    def weigh(self, scores_BN: Tensor) -> Tensor:
        """Return fixed-point exp(score - max_score), and 0 for dropped tokens; int64 [B, N]."""
        # `weight` needs numbers of at most 0, and callers may pass any scores.
        weight_BN = weight((scores_BN - self.max_score_B1).clamp(max=0))
        return torch.where(scores_BN > -torch.inf, weight_BN, 0)

    def total_weight(self) -> Tensor:
        """Return the sum of all weights, int64 [B, 1]."""
        return self.weigh(self.scores_BN).sum(-1, keepdim=True)

    def count_left(self) -> Tensor:
        """Return the number of tokens that are left, int64 [B, 1]."""
        return unit_weights(self.scores_BN).sum(-1, keepdim=True)

    def keep(self, is_kept_BN: Tensor, is_used_B1: Tensor) -> Self:
        """Drop the tokens that are not in `is_kept_BN`, in the rows that use the filter."""
        scores_BN = torch.where(is_kept_BN | ~is_used_B1, self.scores_BN, -torch.inf)
        return self._replace(scores_BN=scores_BN)

    def keep_likeliest(
        self, weigh: Callable[[Tensor], Tensor], target_B1: Tensor, is_used_B1: Tensor
    ) -> Self:
        """Keep the likeliest tokens that together have the target weight.

        Tokens with the same logit as the last of them are kept, too.

        Args:
            weigh: see `find_radius`.
            target_B1: see `find_radius`.
            is_used_B1: bool, the rows that use the filter.
        """
        ranked = self.with_ranking()
        radius_B1, sufficed_B1 = find_radius(ranked, weigh, target_B1)
        # The distance is minus the logit.
        kept = ranked.keep(self.logits_BN >= -radius_B1, is_used_B1)
        return kept.combine_sufficed(sufficed_B1, is_used_B1)

    def combine_sufficed(self, sufficed_B1: Tensor, is_used_B1: Tensor) -> Self:
        """Set the attribute `sufficed_B1` to False in rows whose filter had too small a window.

        Args:
            sufficed_B1: bool, the rows in which the filter's window sufficed.
            is_used_B1: bool, the rows that use the filter.
        """
        return self._replace(sufficed_B1=self.sufficed_B1 & (sufficed_B1 | ~is_used_B1))

    def with_ranking(self) -> Self:
        """Compute `ranked_BW`, which a filter with the default distance needs, except for "search"."""
        if self.ranked_BW is not None or self.truncation == "search":
            return self
        _, ranked_BW = largest_values(
            self.logits_BN, _window_width(self.logits_BN, self.truncation)
        )
        return self._replace(ranked_BW=ranked_BW)

    def shorten(self) -> Self:
        """Return only the `likeliest_count` likeliest tokens, or all if there are no more than that.

        `may_miss_tokens` tells in which rows a filter might keep a token that is left out here.
        """
        count = self.likeliest_count
        # The exact ways, "search" and "sort", read all tokens.
        if count is None or self.truncation != "window" or count >= self.logits_BN.shape[-1]:
            return self
        logits_BN, ids_BN = largest_values(self.logits_BN, count)
        # `largest_values` returns the tokens by rank, so the ranking is 0, 1, 2, ...
        ranked_BN = torch.arange(count, device=ids_BN.device).expand_as(ids_BN)
        return self._replace(
            logits_BN=logits_BN,
            scores_BN=self.scores_BN.gather(-1, ids_BN),
            ids_BN=ids_BN,
            ranked_BW=ranked_BN,
        )

    def may_miss_tokens(self) -> Tensor:
        """Return whether a filter might keep a token that `shorten` left out, bool [B, 1].

        The tokens that a filter keeps are consecutive in the order of the logits, and the tokens that
        were left out come after all those that are here. So if a filter keeps some of the tokens here,
        but drops the least likely of them, it would also drop those that were left out.
        """
        if self.ids_BN is None:
            return torch.zeros_like(self.sufficed_B1)
        smallest_B1 = self.logits_BN.amin(-1, keepdim=True)
        is_smallest_BN = self.logits_BN == smallest_B1
        keeps_smallest_B1 = (is_smallest_BN & (self.scores_BN > -torch.inf)).any(-1, keepdim=True)
        return keeps_smallest_B1 | (self.count_left() == 0)


def unit_weights(scores_BN: Tensor) -> Tensor:
    """Return the weight 1 for each token that is left, and 0 for dropped ones; int64 [B, N]."""
    return (scores_BN > -torch.inf).long()


def all_candidates(
    logits_BV: Tensor, truncation: Truncation, likeliest_count: int | None = None
) -> Candidates:
    """Return the whole vocabulary, before any filter and at temperature 1.

    Args:
        logits_BV: fp32, the edited logits.
        truncation: see `Candidates`.
        likeliest_count: see `Candidates`.
    """
    largest_B1 = logits_BV.amax(-1, keepdim=True)
    max_score_B1 = torch.zeros_like(largest_B1)
    return Candidates(
        logits_BN=logits_BV,
        scores_BN=logits_BV - largest_B1,
        ids_BN=None,
        max_score_B1=max_score_B1,
        sufficed_B1=torch.ones_like(max_score_B1, dtype=torch.bool),
        ranked_BW=None,
        truncation=truncation,
        likeliest_count=likeliest_count,
    )


def find_radius(
    candidates: Candidates,
    weigh: Callable[[Tensor], Tensor],
    target_B1: Tensor,
    distance: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the smallest radius within which the tokens have the target weight.

        radius = min{r: sum of weigh(s) over tokens with distance(s) <= r  >=  target}

    For top-k, each weight is 1 and the target is k. For top-p, the weights are in proportion to the
    probabilities, and the target is p times the total weight. Typical sampling has a distance of its
    own. Weights are integers, so their sums do not depend on the order, and the three truncations
    give the same bits.

    Args:
        candidates: the tokens.
        weigh: returns int64 weights [B, N] of scores [B, N]; 0 for a token that does not count.
        target_B1: int64, at least 1 and at most the sum of all weights.
        distance: returns the distances [B, N] of scores [B, N]; None: the distance is minus the
            logit.

    Returns:
        radius_B1: fp32.
        sufficed_B1: bool, False where the tokens of the window have less than the target weight.
    """
    scores_BN = candidates.scores_BN
    distance_BN = -candidates.logits_BN if distance is None else distance(scores_BN)
    if candidates.truncation == "search":
        # `materialize` writes the weights to memory. Otherwise Inductor computes the exponentials
        # again in every pass of the search, which takes three times as long (dev/log.md).
        weight_BN = materialize(weigh(scores_BN))
        radius_B1 = _search(distance_BN, weight_BN, target_B1)
        return radius_B1, torch.ones_like(target_B1, dtype=torch.bool)
    # The indices of the window's tokens, from the smallest distance up.
    if distance is None:
        assert candidates.ranked_BW is not None, "call with_ranking() first"
        nearest_BW = candidates.ranked_BW
    else:
        width = _window_width(scores_BN, candidates.truncation)
        nearest_BW = distance_BN.topk(width, largest=False).indices
    weight_within_BW = weigh(scores_BN.gather(-1, nearest_BW)).cumsum(-1)
    is_reached_BW = weight_within_BW >= target_B1
    distance_BW = distance_BN.gather(-1, nearest_BW)
    radius_B1 = torch.where(is_reached_BW, distance_BW, torch.inf).amin(-1, keepdim=True)
    return radius_B1, is_reached_BW[:, -1:]


def largest_values(values_BV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the `width` largest values in descending order, and their ids, [B, width] each.

    The values are cut into groups. The `width` groups with the largest maxima contain the largest
    values, and finding these groups first takes half the time of a top-k over all values.
    """
    rows, vocabulary = values_BV.shape
    # If there are no more than `width` groups, all would be chosen, and groups would save nothing.
    if vocabulary <= _GROUP * width:
        values_BW, ids_BW = values_BV.topk(width)
        return values_BW, ids_BW
    # How many values are added so that the groups have the same size.
    padding = -vocabulary % _GROUP
    if padding:
        values_BV = torch.nn.functional.pad(values_BV, (0, padding), value=-torch.inf)
    # Member m of group g has the id m * groups + g, because groups of neighbouring ids are slower
    # (dev/log.md).
    grouped_BMG = values_BV.view(rows, _GROUP, -1)
    group_max_BW, chosen_groups_BW = grouped_BMG.amax(1).topk(width, sorted=False)
    chosen_BMW = grouped_BMG.gather(2, chosen_groups_BW[:, None].expand(-1, _GROUP, -1))
    values_BW, index_BW = chosen_BMW.flatten(1).topk(width)
    # An index is into the flattened [_GROUP, width]: index = member * width + place of the chosen group.
    member_BW = index_BW // width
    group_BW = chosen_groups_BW.gather(-1, index_BW % width)
    ids_BW = member_BW * grouped_BMG.shape[-1] + group_BW
    if not padding:
        return values_BW, ids_BW
    # In a row with fewer than `width` values above -inf, padding may be among the largest values, but
    # its ids do not exist. Fewer than `width` values above -inf lie in the `width` chosen groups, so at
    # least one of the groups has only -inf, and the group with the smallest maximum is such a group.
    # Padding is replaced by the first member of this group. Its id is the group's number, which exists,
    # and its value is -inf as well.
    spare_id_B1 = chosen_groups_BW.gather(-1, group_max_BW.argmin(-1, keepdim=True))
    return values_BW, torch.where(ids_BW < vocabulary, ids_BW, spare_id_B1)


def _window_width(scores_BN: Tensor, truncation: Truncation) -> int:
    """Return the number of tokens that are ranked: all for "sort", at most WINDOW for "window"."""
    return scores_BN.shape[-1] if truncation == "sort" else min(WINDOW, scores_BN.shape[-1])


def _search(distance_BV: Tensor, weight_BV: Tensor, target_B1: Tensor) -> Tensor:
    """Return the radius of `find_radius`, found bit by bit over the whole vocabulary; fp32 [B, 1].

    The radius is the smallest r at which the tokens at distances of at most r reach the target weight. So
    it is also the largest r at which the tokens at distances below r do not reach it. Therefore r can be
    found from its highest bit down: a bit is set if the tokens at distances below the resulting number
    still do not reach the target weight. The search is over int32 numbers that have the order of the
    floats.
    """
    key_B1V = _ordered(distance_BV.view(torch.int32))[:, None]
    weight_B1V = weight_BV[:, None]
    target_B11 = target_B1[:, None]
    radius_B11 = torch.zeros_like(target_B11, dtype=torch.int32)
    # Before each pass, `radius_B11` has the bits found so far, and zeros below them. A pass finds two
    # bits, so the vocabulary is read half as often as with one bit.
    for shift in _SHIFTS:
        # The two bits as a number: 0 to 3. For the first pair, which has the sign, it is -2 to 1. The three
        # numbers above the lowest are tried as pivots.
        lowest = -2 if shift == _SIGN_SHIFT else 0
        tried_P = torch.arange(lowest + 1, lowest + 4, dtype=torch.int32, device=distance_BV.device)
        pivot_BP1 = radius_B11 + (tried_P * (1 << shift))[:, None]
        weight_below_BP1 = torch.where(key_B1V < pivot_BP1, weight_B1V, 0).sum(-1, keepdim=True)
        # A pivot is low enough if the weight below it does not reach the target. The pivots increase, so
        # the low enough ones come first. The last of them has the two bits: `lowest` plus their number.
        low_enough_B11 = (weight_below_BP1 < target_B11).sum(1, keepdim=True, dtype=torch.int32)
        radius_B11 = radius_B11 + (low_enough_B11 + lowest) * (1 << shift)
    return _ordered(radius_B11[:, 0]).view(torch.float32)


def _ordered(bits: Tensor) -> Tensor:
    """Return the bits of floats as int32 with the order of the floats; its own inverse, any shape."""
    # The bits of negative floats have the reverse order, so all of them but the sign are inverted.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
