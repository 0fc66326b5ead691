"""Run: pytest tests/laws/test_a_row_is_alone.py    (filters through Inductor: -m slow)

Law 7, second half: a row's token depends on its logits, its options, its seed and its position
alone.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from batches import tiny_llama
from monograph.decode import Sampling as GeneratorSampling
from monograph.decode import generate
from monograph.decode.chain import OK, UNDECIDED, SampledTokens, apply_filters, sample
from monograph.decode.knobs import Chain, chain_of
from monograph.decode.sampling import Sampling
from monograph.graph.capture import compiled
from monograph.text.tokenizer import Tokenizer
from sampled import TRUNCATIONS, left, rows_of, scattered, some_logits

REQUESTS = [
    Sampling(0.9, seed=1),
    Sampling(0.8, top_k=40, top_p=0.95, min_p=0.05, seed=2),
    Sampling(0, seed=3),
    Sampling(1.1, typical_p=0.6, min_keep=3, seed=4),
    Sampling(
        0.9, seed=1, frequency_penalty=0.5, repetition_penalty=1.3, penalty_last_n=4, top_a=0.1
    ),
    Sampling(1.0, xtc_probability=0.5, top_n_sigma=1.5, epsilon_cutoff=0.001, seed=2**40),
    Sampling(1.0, temperature_range=0.5, logit_bias={3: 1.5, 4: -math.inf}, seed=6),
    Sampling(1.5, top_p=0.7, mirostat_tau=3.0, dry_multiplier=0.8, eta_cutoff=0.01, seed=7),
]


# All of them keep a few tokens or draw none: what comes after top-k looks at those alone.
SHORT = [
    Sampling(0.8, top_k=40, top_p=0.95, min_p=0.05, seed=2),
    Sampling(0, seed=3),
    Sampling(1.1, top_k=3, typical_p=0.6, seed=4),
    Sampling(0.9, top_k=25, frequency_penalty=0.5, repetition_penalty=1.3, seed=1),
    Sampling(1.0, top_k=1, eta_cutoff=0.001, seed=5),
    Sampling(1.0, top_k=30, xtc_probability=0.5, top_n_sigma=1.5, seed=2**40),
    Sampling(1.0, top_k=8, temperature_range=0.5, logit_bias={3: 1.5, 4: -math.inf}, seed=6),
    Sampling(1.5, top_k=40, top_p=0.7, mirostat_tau=3.0, dry_multiplier=0.8, seed=7),
]
BATCHES = pytest.mark.parametrize("requests", [REQUESTS, SHORT], ids=["all lengths", "short"])


def drawn_rows(
    logits_BV: Tensor,
    requests: list[Sampling],
    which: list[int],
    chain: Chain,
    truncation: str,
    run: Any = sample,
) -> Tensor:
    rows = rows_of([requests[i] for i in which], logits_BV.shape[1], chain)
    token_B, status_B, _ = run(logits_BV[which], rows, None, chain, truncation)
    assert (status_B == OK).all()
    return token_B


@BATCHES
@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("vocabulary", [pytest.param(2003, marks=pytest.mark.slow), 259, 61])
def test_a_row_s_token_does_not_depend_on_its_batch(
    requests: list[Sampling], truncation: str, vocabulary: int
) -> None:
    logits_BV, everyone = some_logits(5, len(requests), vocabulary), list(range(len(requests)))
    chain = chain_of(requests)
    together = drawn_rows(logits_BV, requests, everyone, chain, truncation)
    for row in everyone:
        alone = drawn_rows(logits_BV, requests, [row], chain_of([requests[row]]), truncation)
        assert alone[0] == together[row], f"row {row} alone, in a chain of its own stages"
        assert drawn_rows(logits_BV, requests, [row], chain, truncation)[0] == together[row], (
            f"row {row} alone"
        )
    order = [3, 7, 0, 1, 6, 2, 5, 4]
    assert torch.equal(drawn_rows(logits_BV, requests, order, chain, truncation), together[order])


@pytest.mark.parametrize("order", ["hf", "llama_cpp"])
@pytest.mark.parametrize(
    "vocabulary", [61, 64, 65, 2003, pytest.param(5000, marks=pytest.mark.slow)]
)
def test_looking_at_few_tokens_draws_what_looking_at_all_does(vocabulary: int, order: str) -> None:
    """The same chain twice, once with the number of tokens that it may look at, over many rows of
    its requests.
    """
    requests = [replace(SHORT[i % len(SHORT)], seed=i, order=order) for i in range(64)]  # type: ignore[arg-type]
    chain, logits_BV = chain_of(requests), some_logits(8, 64, vocabulary)
    assert chain.likeliest_count == 128
    everyone, all_looked_at = list(range(64)), replace(chain, likeliest_count=None)
    few = drawn_rows(logits_BV, requests, everyone, chain, "window")
    assert torch.equal(few, drawn_rows(logits_BV, requests, everyone, all_looked_at, "search"))
    assert len(set(few.tolist())) > 20


def test_few_tokens_that_may_not_hold_all_those_level_with_the_last_say_so() -> None:
    """Logits in steps, as bf16 has them: a row is decided where what is left out is below the last
    that is kept.
    """
    requests = [Sampling(1.0, top_k=20, seed=i) for i in range(100)]
    chain, logits_BV = chain_of(requests), 3 * (some_logits(9, 100, 2003) / 3.07).round()
    rows = rows_of(requests, 2003, chain)
    few, exact = (
        sample(logits_BV, rows, None, chain, truncation) for truncation in ("window", "search")
    )
    kept_B = (logits_BV >= logits_BV.sort(descending=True).values[:, 19:20]).sum(-1)
    assert (
        torch.equal(few.status_B == UNDECIDED, kept_B >= chain.likeliest_count)
        and 5 < (kept_B >= chain.likeliest_count).sum() < 95
    )
    decided_B = few.status_B == OK
    assert (
        torch.equal(few.token_B[decided_B], exact.token_B[decided_B])
        and (exact.status_B == OK).all()
    )


def test_the_scores_have_the_same_bits_whatever_the_mates_switch_on() -> None:
    """Stronger than equal tokens: what is drawn from is the same to the last bit."""
    logits_1V = some_logits(6, 1, 61)
    for options in REQUESTS[:2] + REQUESTS[3:4]:
        own = left(logits_1V, options)[0][0]
        chain = chain_of([options, *REQUESTS])
        rows = rows_of([options, *REQUESTS], 61, chain)
        scores_BV = (logits_1V - logits_1V.amax()).expand(len(REQUESTS) + 1, -1)
        assert torch.equal(
            scattered(apply_filters(scores_BV, rows, chain, "window"), scores_BV)[0], own
        )


@pytest.mark.parametrize(
    ("requests", "backend", "truncation"),
    [
        pytest.param(SHORT, "aot_eager", "window", marks=pytest.mark.slow),
        pytest.param(
            [Sampling(0.9, top_p=0.9, min_keep=2, seed=1), REQUESTS[2]],
            "aot_eager",
            "search",
            marks=pytest.mark.slow,
        ),  # by day test_schedule_changes_nothing.py traces a chain with filters
        # What draws: noise, and the likeliest of a greedy row.
        (REQUESTS[::2][:2], "eager", "window"),
        pytest.param(REQUESTS[::2][:2], "inductor", "window", marks=pytest.mark.slow),
        *(
            pytest.param(requests, backend, truncation, marks=pytest.mark.slow)
            for requests in (REQUESTS, SHORT)
            for backend, truncation in (("aot_eager", "search"), ("inductor", "window"))
        ),
    ],
)
def test_a_graph_draws_the_tokens_that_the_functions_draw(
    requests: list[Sampling], backend: str, truncation: str
) -> None:
    """One full graph for any requests of a chain: other options do not make another one."""
    chain, vocabulary, everyone = chain_of(requests), 259, list(range(len(requests)))
    run = compiled(sample, backend=backend)  # type: ignore[arg-type]
    before = counters["stats"]["unique_graphs"]
    for seed, order in itertools.product(range(3), (everyone, everyone[::-1])):
        logits_BV = some_logits(seed, len(requests), vocabulary)
        expected = drawn_rows(logits_BV, requests, order, chain, truncation)
        assert torch.equal(drawn_rows(logits_BV, requests, order, chain, truncation, run), expected)
    assert counters["stats"]["unique_graphs"] - before == 1


class NoReads(TorchDispatchMode):
    """Refuses what would make the host wait for a device: reading a value, or a shape that depends
    on one.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func.overloadpacket not in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
        ), func
        return func(*args, **(kwargs or {}))


@BATCHES
@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_nothing_is_read_on_the_host(requests: list[Sampling], truncation: str) -> None:
    chain, logits_BV = chain_of(requests), some_logits(0, len(requests), 300)
    rows, allowed_BV = (
        rows_of(requests, 300, chain),
        torch.ones(len(requests), 300, dtype=torch.bool),
    )
    with NoReads():
        found: SampledTokens = sample(logits_BV, rows, allowed_BV, chain, truncation)  # type: ignore[arg-type]
    assert (found.status_B == OK).all()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoReads():
        int(found.token_B[0])


def test_a_text_does_not_depend_on_its_batch() -> None:
    """In a model's own arithmetic: the first of n continuations, and prompts alone or one after
    another.
    """
    model, tokenizer, sampling = (
        tiny_llama(vocab_size=259),
        Tokenizer.bytes(),
        GeneratorSampling(1.0, seed=5),
    )

    def written(prompts: list[str], n: int) -> list[list[int]]:
        return [
            c.token_ids for c in generate(model, tokenizer, prompts, sampling, max_tokens=12, n=n)
        ]

    assert written(["ab"], 5)[0] == written(["ab"], 1)[0]
    assert written(["ab", "c"], 1) == written(["ab"], 1) + written(["c"], 1)
    assert len({tuple(ids) for ids in written(["ab"], 5)}) == 5, "different rows, different draws"
