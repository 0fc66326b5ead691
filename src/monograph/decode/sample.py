"""From logits to a token id: temperature, top-k, and a draw that is a function of (seed, row, step) alone.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from monograph.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token (the lowest id among equals).
        top_k: only the k likeliest tokens (and those level with the k-th) can be drawn; None: all.
        seed: names the draws; a row's draws depend on nothing else, so its text does not depend on its batch.
    """

    temperature: float = 0.8
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values outside their range."""
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"temperature = {self.temperature}: expected a number, 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k = {self.top_k}: expected 1 or more, or none")


def filtered(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities up to a constant after temperature and top-k, fp32: -inf where a token cannot be drawn."""
    logits_BV = logits_BV.float()
    # From the largest down: a temperature near 0 then makes -inf of the others, never +inf of several.
    scores_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores_BV.shape[-1]:
        least_B1 = scores_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < least_B1, -torch.inf)
    return scores_BV


def sample(logits_BV: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> Tensor:
    """Draw one id per row by the Gumbel-max trick: argmax(scores + g), g = -ln(-ln u), u uniform (Gumbel 1954).

    Args:
        logits_BV: [B, V], any float dtype.
        sampling: the choice.
        generators: one per row, advanced by one draw of V numbers.

    Returns:
        [B] int64.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    scores_BV = filtered(logits_BV, sampling)
    # -ln u is drawn as an exponential, which is never 0, so the noise is finite.
    noise_BV = torch.stack([torch.empty(scores_BV.shape[-1]).exponential_(generator=g) for g in generators])
    return (scores_BV - noise_BV.to(scores_BV.device).log()).argmax(-1)


def row_generators(sampling: Sampling, rows: int) -> list[torch.Generator]:
    """The generators of rows 0 .. rows - 1, on the CPU, so that every device draws alike."""
    return [torch.Generator().manual_seed((sampling.seed * 1_000_003 + row) % 2**63) for row in range(rows)]
