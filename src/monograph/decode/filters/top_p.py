"""Top-p, or nucleus (Holtzman et al. 2020, The Curious Case of Neural Text Degeneration)."""

from __future__ import annotations

from torch import Tensor

from monograph.decode.candidates import Candidates


def top_p(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep x if the tokens above it have together less than p of what is left, and always the likeliest.

    p >= 1 is off; p = 0 keeps the likeliest token and those level with it.
    """
    p_B1 = knobs["top_p"]
    target_B1 = (p_B1.double() * candidates.total().double()).ceil().long().clamp(min=1)
    return candidates.likeliest(candidates.weigh, target_B1, p_B1 < 1)
