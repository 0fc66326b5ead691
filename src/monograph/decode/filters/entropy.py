"""The entropy of what is left, by sums of integers, so that its bits do not depend on an order of summation."""

from __future__ import annotations

import torch
from torch import Tensor

from monograph.decode.candidates import Candidates
from monograph.decode.elementary import UNIT


def mean_surprise(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """E[y], y = high - x, under the probabilities of what is left, fp32 [B, 1]; and the sum of weights, int64 [B, 1].

    w y <= 1/e for w = exp(-y), so the products are summed in the weights' own fixed point.
    """
    weight_BN = candidates.weigh(candidates.scores_BN)
    below_BN = torch.where(weight_BN > 0, candidates.high_B1 - candidates.scores_BN, 0.0)
    moment_B1 = (weight_BN.double() * below_BN.double()).long().sum(-1, keepdim=True)
    total_B1 = weight_BN.sum(-1, keepdim=True)
    return (moment_B1.double() / total_B1.double()).float(), total_B1


def normalised_entropy(candidates: Candidates) -> Tensor:
    """H / ln n of the n tokens that are left, in [0, 1], fp64 [B, 1]; 0 for a single one."""
    mean_B1, total_B1 = mean_surprise(candidates)
    entropy_B1 = mean_B1.double() + (total_B1.double() / UNIT).log()
    left_B1 = candidates.left()
    return torch.where(left_B1 > 1, entropy_B1 / left_B1.clamp(min=2).double().log(), 0.0).clamp(0.0, 1.0)
