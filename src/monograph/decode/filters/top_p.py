"""Top-p, or nucleus (Holtzman et al. 2020, The Curious Case of Neural Text Degeneration)."""

from __future__ import annotations

from torch import Tensor

from monograph.decode.candidates import Candidates, reach


def top_p(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep x if the tokens above it have together less than p of what is left, and always the likeliest.

    p >= 1 is off; p = 0 keeps the likeliest token and those level with it.
    """
    p_B1, total_B1 = knobs["top_p"], candidates.weigh(candidates.scores_BN).sum(-1, keepdim=True)
    used_B1 = p_B1 < 1
    target_B1 = (p_B1.double() * total_B1.double()).ceil().long().clamp(min=1)
    candidates = candidates.ranked()
    radius_B1, held_B1 = reach(candidates, candidates.weigh, target_B1)
    return candidates.raise_low(-radius_B1, used_B1).flag(held_B1, used_B1)
