"""XTC, "exclude top choices" (P. E. Weidmann 2024, oobabooga/text-generation-webui#6335; maths as in llama.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from monograph.decode.candidates import Candidates


def xtc(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """With a given probability: of the tokens of at least the threshold's probability keep the least likely only.

    Tokens level with that one stay; a threshold above 0.5 is off, as two tokens cannot both reach it. "xtc_uniform" is
    a number of the row's (seed, position) apart from its noise (`noise.row_uniform`).
    """
    used_B1 = (knobs["xtc_uniform"] < knobs["xtc_probability"]) & (knobs["xtc_threshold"] <= 0.5)
    weight_BN = candidates.weigh(candidates.scores_BN)
    least_B1 = (knobs["xtc_threshold"].double() * weight_BN.sum(-1, keepdim=True).double()).ceil().long().clamp(min=1)
    high_B1 = torch.where(weight_BN >= least_B1, candidates.scores_BN, torch.inf).amin(-1, keepdim=True)
    kept_BN = candidates.scores_BN <= high_B1
    if "min_keep" in knobs:
        used_B1 &= (kept_BN & (candidates.scores_BN > -torch.inf)).sum(-1, keepdim=True) >= knobs["min_keep"]
    kept = candidates.keep(kept_BN, used_B1)
    return kept._replace(high_B1=torch.where(used_B1, candidates.high_B1.minimum(high_B1), candidates.high_B1))
