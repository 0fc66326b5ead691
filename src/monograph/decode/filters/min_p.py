"""Min-p (Nguyen et al. 2024, Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs)."""

from __future__ import annotations

from torch import Tensor

from monograph.decode.candidates import Candidates


def min_p(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep x >= max + ln p, which is: a probability of at least p times the likeliest token's.

    p = 0 is off (ln p = -inf); p = 1 keeps the likeliest token and those level with it.
    """
    log_p_B1 = knobs["log_min_p"]
    return candidates.keep(candidates.scores_BN >= candidates.high_B1 + log_p_B1, log_p_B1 > -float("inf"))
