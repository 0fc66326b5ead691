"""Top-k (Fan et al. 2018, Hierarchical Neural Story Generation)."""

from __future__ import annotations

from torch import Tensor

from monograph.decode.candidates import Candidates, one_each


def top_k(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep the tokens of the k largest logits, and those level with the last.

    k = 0 and k >= V are off; of fewer than k tokens all are kept.
    """
    k_B1, vocabulary = knobs["top_k"], candidates.logits_BN.shape[-1]
    used_B1 = (k_B1 > 0) & (k_B1 < vocabulary)
    near = candidates.nearest()
    kept = near.likeliest(one_each, k_B1.minimum(near.left()).clamp(min=1), used_B1)
    return kept._replace(held_B1=kept.held_B1 & ~kept.cut_off())
