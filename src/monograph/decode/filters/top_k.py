"""Top-k (Fan et al. 2018, Hierarchical Neural Story Generation)."""

from __future__ import annotations

from torch import Tensor

from monograph.decode.candidates import Candidates, reach


def top_k(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep x >= the k-th largest score: k tokens, and those level with the last.

    k = 0 and k >= V are off; of fewer than k tokens all are kept.
    """

    def one_each(scores_BN: Tensor) -> Tensor:
        return candidates.contains(scores_BN).long()

    k_B1, left_B1 = knobs["top_k"], one_each(candidates.scores_BV).sum(-1, keepdim=True)
    used_B1 = (k_B1 > 0) & (k_B1 < candidates.scores_BV.shape[-1])
    candidates = candidates.ranked()
    radius_B1, held_B1 = reach(candidates, one_each, k_B1.clamp(min=1).minimum(left_B1))
    return candidates.raise_low(-radius_B1, used_B1).flag(held_B1, used_B1)
