"""Run: pytest tests/decode/test_fast_sampler.py (needs a CUDA device)

The sampler's kernel gives the bits of `sample`, which computes here on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from monograph.decode.chain import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    OK,
    UNDECIDED,
    SamplerRows,
    edit_logits_or_nan,
    sample,
)
from monograph.decode.knobs import Chain, chain_of, knobs_of, new_knobs, write_rows
from monograph.decode.sampling import Sampling

pytestmark = pytest.mark.gpu
VOCABULARY = 4500  # two tiles, the second with few tokens
FILTERS: list[dict[str, Any]] = [
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"top_k": 1},
    {"top_k": 64, "top_p": 0.3},
    {"top_k": 20, "min_p": 0.2, "temperature": 1.7},
    {"top_k": 30, "top_p": 0.0},
    {"top_k": 30, "min_p": 1.0},
    {"temperature": 0.0},
    {"top_k": 7, "temperature": 1e-9},
]
CHAINS = {
    "greedy": [{"temperature": 0.0}] * len(FILTERS),
    "hf": FILTERS,
    "llama_cpp": [{"order": "llama_cpp", **each} for each in FILTERS],
    "temperature,top_k,min_p,top_p": [
        {"order": "temperature,top_k,min_p,top_p", **each} for each in FILTERS
    ],
}


def fast(chain: Chain, rows: SamplerRows, edited_BV: Tensor) -> Any:
    """Return what the kernel samples, whose counters must be zeros again."""
    from monograph.decode.fast_sampler import FastSampler  # imports Triton

    sampler = FastSampler(len(edited_BV), edited_BV.device)
    assert sampler.supports(chain, "window", edited_BV.shape[1])
    drawn = sampler.sample(edited_BV, rows, rows.position_B - 1, chain)
    assert not sampler._counters_B.any()
    return drawn


def rows_on(device: str, chain: Chain, options: list[Sampling], position: int) -> SamplerRows:
    """Return the rows of some requests, each with another seed of more than 32 bits."""
    knobs = new_knobs(chain, len(options), torch.device(device))
    for row, each in enumerate(options):
        write_rows(knobs, [row], [knobs_of(each, chain)])
    row_B = torch.arange(len(options), device=device)
    return SamplerRows(row_B * 12345678901234567 + 5, row_B + position, row_B * 0, knobs)


def logits(kind: str) -> Tensor:
    normal = 3 * torch.randn(len(FILTERS), VOCABULARY, generator=torch.Generator().manual_seed(0))
    if kind == "bf16":
        return normal.bfloat16().float()  # with ties
    if kind == "ties at the cut":
        return normal.round().clamp(max=6)  # of more tokens than are read
    if kind == "zeros":
        return torch.where(normal > 0, 0.0, -0.0)
    if kind == "not numbers":
        normal[0, VOCABULARY - 1] = torch.nan
        normal[1, 77] = torch.inf
        normal[2] = -torch.inf
        normal[3, 1:] = -torch.inf
        normal[6, 5] = torch.nan
    return normal


@pytest.mark.parametrize("kind", ["normal", "bf16", "ties at the cut", "zeros", "not numbers"])
@pytest.mark.parametrize("name", CHAINS)
def test_the_kernel_samples_what_the_chain_samples(name: str, kind: str) -> None:
    options = [Sampling(**each) for each in CHAINS[name]]
    chain = chain_of(options)
    logits_BV = logits(kind)
    statuses = set[int]()
    for position in (1, 2, (1 << 33) + 3):
        here, there = (rows_on(device, chain, options, position) for device in ("cpu", "cuda"))
        expected = sample(logits_BV, here, None, chain)
        found = fast(chain, there, edit_logits_or_nan(logits_BV.cuda(), there, None, chain))
        assert found.token_B.tolist() == expected.token_B.tolist()
        assert found.status_B.tolist() == expected.status_B.tolist()
        statuses |= set(found.status_B.tolist())
    if kind == "not numbers":
        assert {OK, NOT_FINITE, NOTHING_ALLOWED} <= statuses
    if kind == "ties at the cut" and name != "greedy":
        assert UNDECIDED in statuses, "more tokens than are read equal the last one that is kept"


def test_a_row_has_the_same_token_alone_and_among_others() -> None:
    options = [Sampling(**each) for each in FILTERS]
    chain = chain_of(options)
    logits_BV = logits("normal").cuda()
    rows = rows_on("cuda", chain, options, 9)
    tokens = fast(chain, rows, logits_BV).token_B.tolist()
    alone = [
        fast(
            chain,
            SamplerRows(
                rows.seed_B[row : row + 1],
                rows.position_B[row : row + 1],
                rows.generated_B[row : row + 1],
                {name: knob[row : row + 1] for name, knob in rows.knobs.items()},
            ),
            logits_BV[row : row + 1],
        ).token_B.item()
        for row in range(len(options))
    ]
    assert alone == tokens


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},  # all tokens
        {"top_k": 40, "typical_p": 0.9},
        {"top_k": 40, "min_keep": 2},
        {"top_k": 40, "mirostat_tau": 2.0},
        {"top_k": 40, "logprobs": 1},
        {"top_k": 40, "top_p": 0.9, "order": "top_p,top_k,temperature"},
    ],
    ids=str,
)
def test_a_chain_that_the_kernel_cannot_do_is_left_to_torch(options: dict[str, Any]) -> None:
    from monograph.decode.fast_sampler import FastSampler

    chain = chain_of([Sampling(**options)])
    assert not FastSampler.supports(chain, "window", VOCABULARY)


def test_a_search_over_all_tokens_is_left_to_torch() -> None:
    from monograph.decode.fast_sampler import FastSampler

    chain = chain_of([Sampling(top_k=40)])
    assert FastSampler.supports(chain, "window", VOCABULARY)
    assert not FastSampler.supports(chain, "search", VOCABULARY)
    assert not FastSampler.supports(chain, "window", 64), "as many as are read"
