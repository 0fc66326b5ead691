"""Top-k (Fan et al. 2018, Hierarchical Neural Story Generation)."""

from __future__ import annotations

from torch import Tensor

from monograph.decode.candidates import Candidates, reach


def top_k(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep x >= the k-th largest score: k tokens, and those level with the last.

    k = 0 and k >= V are off; of fewer than k tokens all are kept.
    """
    k_B1, vocabulary = knobs["top_k"], candidates.scores_BN.shape[-1]
    used_B1 = (k_B1 > 0) & (k_B1 < vocabulary)
    candidates = candidates.nearest().ranked()

    def one_each(scores_BN: Tensor) -> Tensor:
        return candidates.contains(scores_BN).long()

    left_B1 = one_each(candidates.scores_BN).sum(-1, keepdim=True)
    radius_B1, held_B1 = reach(candidates, one_each, k_B1.clamp(min=1).minimum(left_B1))
    kept = candidates.raise_low(-radius_B1, used_B1).flag(held_B1, used_B1)
    return kept._replace(held_B1=kept.held_B1 & ~kept.cut_off())
