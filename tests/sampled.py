"""What the sampler's tests share: rows of requests, what a chain leaves of their logits, the
chi-square of draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monograph.decode.candidates import Candidates
from monograph.decode.chain import COUNT_DTYPE, Past, SamplerRows, apply_filters
from monograph.decode.knobs import Chain, chain_of, knobs_of, new_knobs, write_rows
from monograph.decode.sampling import Sampling

TRUNCATIONS = ("window", "search", "sort")


def rows_of(
    samplings: Sequence[Sampling], vocabulary: int, chain: Chain | None = None, position: int = 7
) -> SamplerRows:
    """One row per request, nothing drawn yet; the prompt holds every third id."""
    chain, count = chain or chain_of(samplings), len(samplings)
    knobs = new_knobs(chain, count, torch.device("cpu"))
    for row, sampling in enumerate(samplings):
        write_rows(knobs, [row], [knobs_of(sampling, chain)])
    prompt_BV = (torch.arange(vocabulary) % 3 == 0).expand(count, -1)
    zero_B = torch.zeros(count, dtype=torch.int64)
    seed_B = torch.tensor([sampling.seed for sampling in samplings])
    counts_BV = torch.zeros(count, vocabulary, dtype=COUNT_DTYPE)
    mu_B = torch.tensor([2.0 * sampling.mirostat_tau for sampling in samplings])
    past = None
    if chain.has("last_n", "dry"):
        empty_BT = torch.zeros(count, position + 1, dtype=torch.int32)
        past = Past(empty_BT, empty_BT.clone(), torch.zeros_like(prompt_BV).contiguous())
        for row in range(count):
            past.write_prompt(row, ([0, 3, 6] * position)[:position], None)
    return SamplerRows(seed_B, zero_B + position, zero_B, knobs, counts_BV, prompt_BV, past, mu_B)


def many_rows(
    sampling: Sampling, vocabulary: int, seed_B: Tensor, position_B: Tensor
) -> SamplerRows:
    """One request's numbers in many rows of these seeds and positions."""
    one, count = rows_of([sampling], vocabulary), len(seed_B)
    knobs = {name: value.expand(count, *value.shape[1:]) for name, value in one.knobs.items()}
    return SamplerRows(seed_B, position_B, torch.zeros_like(seed_B), knobs)


def some_logits(seed: int, rows: int, vocabulary: int) -> Tensor:
    return 2.5 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def scattered(candidates: Candidates, like_BV: Tensor) -> Tensor:
    """The scores that are left at their ids, -inf at all others, [B, V]."""
    masked_BN, ids_BN = candidates.scores_BN, candidates.ids_BN
    if ids_BN is None:
        return masked_BN
    return torch.full_like(like_BV, -torch.inf).scatter(-1, ids_BN, masked_BN)


def left(
    logits_BV: Tensor, options: Sampling, truncation: str = "sort", position: int = 7
) -> tuple[Tensor, Tensor]:
    """Scores after the chain, -inf where a token is dropped, [B, V]; and where the window held them
    all, [B].
    """
    rows = rows_of([options] * len(logits_BV), logits_BV.shape[1], position=position)
    candidates = apply_filters(logits_BV, rows, chain_of([options]), truncation)  # type: ignore[arg-type]
    return scattered(candidates, logits_BV), candidates.sufficed_B1[:, 0]


def chi_square_p(counts: Tensor, expected: Tensor, constraints: int = 1) -> float:
    """The p-value of Pearson's statistic; cells below 5 are pooled."""
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum().double()
    freedom = max(1, len(expected) - constraints)
    return float(
        torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2)
    )
