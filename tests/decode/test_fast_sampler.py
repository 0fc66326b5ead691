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
from monograph.decode.reproducible import gumbel_noise_of
from monograph.decode.sampling import Sampling

pytestmark = pytest.mark.gpu
VOCABULARY = 4500  # several tiles, the last with few tokens
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


# By kind: what a search for the likeliest tokens may stumble over. With `few` finite logits, it has
# fewer than it needs.
HARD = [
    "normal", "bf16", "ties", "equal", "zeros", "neighbours", "ascending", "few", "enough", "far", "huge", "wide",
    "negative", "late", "spread",
]  # fmt: skip


def hard_logits(kind: str, vocabulary: int, width: int) -> Tensor:
    normal_V = 0.1 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    id_V = torch.arange(vocabulary)
    scattered_V = (id_V * 7919) % vocabulary
    return {
        "normal": normal_V,
        "bf16": normal_V.bfloat16().float(),
        "ties": (normal_V * 5).round(),
        "equal": torch.full((vocabulary,), 2.5),
        "zeros": torch.where(normal_V > 0, 0.0, -0.0),
        "neighbours": normal_V + 3.0 * ((id_V - vocabulary // 2).abs() < width),
        "ascending": id_V / vocabulary,
        "few": torch.where(scattered_V < width - 1, normal_V, -torch.inf),
        "enough": torch.where(scattered_V < width, normal_V, -torch.inf),
        "far": torch.where(id_V == vocabulary // 3, 0.0, normal_V - 1e4),
        "huge": 1e37 * (normal_V - 10),
        "wide": torch.where(scattered_V < width - 3, normal_V, -1e30 * normal_V.abs()),
        "negative": normal_V - 50,
        "late": (id_V >= vocabulary - width // 2).float(),  # after more ties than are sorted
        "spread": (id_V % 32 == 0).float(),  # ties in different groups
    }[kind]


@pytest.mark.parametrize(
    ("vocabulary", "width"),
    [(65, 64), (200, 128), (1025, 128), (257, 256), (20001, 64)],
)
@pytest.mark.parametrize("kind", HARD)
def test_exactly_the_likeliest_tokens_are_sampled(kind: str, vocabulary: int, width: int) -> None:
    """Without filters, any of the likeliest tokens may be sampled, and no other.

    Of many seeds, those are taken with which the last one is sampled, or with which the next one would
    be if it were one of them.
    """
    import monograph.decode.fast_sampler  # registers the operator

    assert monograph.decode.fast_sampler
    logit_V = hard_logits(kind, vocabulary, width)
    # Equal logits keep the order of their ids.
    ranked_W1 = logit_V.sort(descending=True, stable=True).indices[: width + 1]
    score_W1 = logit_V[ranked_W1] - logit_V.max()
    seed_S = torch.arange(3000)
    position = 11
    noise_SW1 = gumbel_noise_of(seed_S, seed_S * 0 + position, ranked_W1.expand(3000, -1))
    value_SW1 = score_W1 + noise_SW1
    chosen_S = value_SW1[:, :width].argmax(1)
    is_last_S = chosen_S == width - 1
    is_next_S = value_SW1.argmax(1) == width
    can_be_last = bool(score_W1[width - 1] > -1)
    assert not can_be_last or is_last_S.any()
    seed_B = torch.cat([seed_S[is_last_S][:3], seed_S[is_next_S][:4], seed_S[:3]])
    row_B = torch.zeros_like(seed_B, device="cuda")
    counters_B = row_B.int()
    token_B, status_B = torch.ops.monograph.sample_few(
        logit_V.cuda().repeat(len(seed_B), 1),
        seed_B.cuda(),
        row_B + position - 1,
        counters_B,
        [],
        [],
        row_B.float() + 1,
        width,
    )
    assert token_B.tolist() == ranked_W1[chosen_S[seed_B]].tolist()
    assert status_B.tolist() == [OK] * len(seed_B)
    assert not counters_B.any()


@pytest.mark.parametrize("vocabulary", [1, 2, 31, 1025, 5001])
def test_a_greedy_row_takes_the_first_of_equal_tokens(vocabulary: int) -> None:
    chain = chain_of([Sampling(temperature=0.0)])
    rows = rows_on("cuda", chain, [Sampling(temperature=0.0)] * 3, 1)
    logits_BV = torch.zeros(3, vocabulary, device="cuda")
    logits_BV[1, vocabulary - 1] = 1
    logits_BV[2, vocabulary // 2 :] = 1
    expected = [0, vocabulary - 1, vocabulary // 2]
    assert fast(chain, rows, logits_BV).token_B.tolist() == expected


@pytest.mark.parametrize("rows", [1, 16])
def test_many_rows_take_larger_tiles(rows: int) -> None:
    options = [Sampling(top_k=100, top_p=0.9)] * rows
    chain = chain_of(options)
    logits_BV = logits("bf16")[:1].repeat(rows, 2)[:, :-1]
    here, there = (rows_on(device, chain, options, 5) for device in ("cpu", "cuda"))
    expected = sample(logits_BV, here, None, chain)
    found = fast(chain, there, logits_BV.cuda())
    assert found.token_B.tolist() == expected.token_B.tolist()
    assert found.status_B.tolist() == expected.status_B.tolist()
