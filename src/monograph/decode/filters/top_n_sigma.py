"""Top-n-sigma (Tang et al. 2024, Top-nσ: Not All Logits Are You Need; maths as in llama.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from monograph.decode.candidates import Candidates


def top_n_sigma(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep x >= max - n s, s the population standard deviation of the finite scores that are left; n = 0 is off.

    The sums are fp64, so s is the same fp32 number but for a rare last bit, whatever the order of summation.
    """
    n_B1, left_BN = knobs["top_n_sigma"], candidates.scores_BN > -torch.inf
    count_B1 = left_BN.sum(-1, keepdim=True)
    mean_B1 = torch.where(left_BN, candidates.scores_BN.double(), 0.0).sum(-1, keepdim=True) / count_B1
    squares_BN = torch.where(left_BN, (candidates.scores_BN.double() - mean_B1).square(), 0.0)
    sigma_B1 = (squares_BN.sum(-1, keepdim=True) / count_B1).sqrt().float()
    return candidates.keep(candidates.scores_BN >= candidates.high_B1 - n_B1 * sigma_B1, n_B1 > 0)
