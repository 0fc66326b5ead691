"""Run: pytest tests/decode/test_chain.py    (every edge case of the sampler)"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from monograph.decode.candidates import Candidates
from monograph.decode.chain import (
    COUNT_DTYPE,
    NOT_FINITE,
    NOTHING_ALLOWED,
    OK,
    UNDECIDED,
    SamplerRows,
    _log_probabilities_after_filters,
    add_to_counts,
    apply_filters,
    edit_logits,
    first_counts,
    log_probabilities,
    sample,
)
from monograph.decode.knobs import chain_of, knobs_of, new_knobs, write_rows
from monograph.decode.sampling import Sampling
from monograph.graph.capture import compiled
from sampled import TRUNCATIONS, rows_of, scattered

INF, NAN_LOGIT = math.inf, math.nan


def kept(logits: list[float], truncation: str = "sort", **options: Any) -> list[int]:
    """Ids that can be drawn."""
    sampling = Sampling(**{"temperature": 1.0, **options})
    scores_1V = torch.tensor([logits]) - max(logits)
    rows = rows_of([sampling], len(logits))
    candidates = apply_filters(scores_1V, rows, chain_of([sampling]), truncation)  # type: ignore[arg-type]
    return (scattered(candidates, scores_1V)[0] > -INF).nonzero()[:, 0].tolist()


EQUAL = [1.0, 3.0, 3.0, 2.0]
KEPT = [
    ({"top_k": 1}, EQUAL, [1, 2]),  # the k-th and those level with it
    ({"top_k": 3}, EQUAL, [1, 2, 3]),
    ({"top_k": 4}, EQUAL, [0, 1, 2, 3]),
    ({"top_k": 99}, EQUAL, [0, 1, 2, 3]),
    ({"top_k": 3}, [0.0, -INF, 1.0, -INF, -INF], [0, 2]),  # fewer than k are left
    ({"top_p": 0.0}, EQUAL, [1, 2]),
    ({"top_p": 1.0}, EQUAL, [0, 1, 2, 3]),
    ({"top_p": 0.5}, [0.0, 0.0, 0.0, 0.0], [0, 1, 2, 3]),  # level tokens stay or go together
    ({"top_p": 0.5}, [math.log(0.6), math.log(0.3), math.log(0.1)], [0]),
    ({"top_p": 0.7}, [math.log(0.6), math.log(0.3), math.log(0.1)], [0, 1]),
    # Of what top-k leaves.
    ({"top_p": 0.55, "top_k": 2}, [math.log(0.4), math.log(0.1), math.log(0.5)], [2]),
    ({"min_p": 0.0}, [0.0, -80.0], [0, 1]),
    ({"min_p": 1.0}, EQUAL, [1, 2]),
    ({"min_p": 0.5}, [0.0, math.log(0.49), math.log(0.51)], [0, 2]),
    ({"typical_p": 1.0}, EQUAL, [0, 1, 2, 3]),
    # Ln 1/p - H: -0.34, 0.17, 0.58.
    ({"typical_p": 0.0}, [math.log(0.5), math.log(0.3), math.log(0.2)], [1]),
    ({"top_n_sigma": 0.0}, [0.0, -99.0], [0, 1]),
    ({"top_n_sigma": 1.0}, [0.0, -1.0, -2.0, -3.0, -INF], [0, 1]),  # sigma = sqrt(5 / 4)
    (
        {"xtc_probability": 1.0, "xtc_threshold": 0.25},
        [math.log(0.5), math.log(0.3), math.log(0.2)],
        [1, 2],
    ),
    (
        {"xtc_probability": 1.0, "xtc_threshold": 0.15},
        [math.log(0.5), math.log(0.4), math.log(0.1)],
        [1, 2],
    ),
    (
        {"xtc_probability": 1.0, "xtc_threshold": 0.45},
        [math.log(0.5), math.log(0.4), math.log(0.1)],
        [0, 1, 2],
    ),
    ({"xtc_probability": 1.0, "xtc_threshold": 0.51}, [5.0, 0.0], [0, 1]),  # off
    ({"xtc_probability": 0.0, "xtc_threshold": 0.1}, [0.0, 0.0, -1.0], [0, 1, 2]),
    ({"temperature": 1e6, "top_p": 0.99}, EQUAL, [0, 1, 2, 3]),
    ({"top_k": 1}, [5.0], [0]),
    ({"temperature_range": 0.5}, [5.0], [0]),
    ({"temperature_range": 0.5}, [5.0, -INF], [0]),
]


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize(("options", "logits", "expected"), KEPT)
def test_what_is_kept(
    options: dict[str, Any], logits: list[float], expected: list[int], truncation: str
) -> None:
    assert kept(logits, truncation, **options) == expected


def drawn(
    logits: list[list[float]], *samplings: Sampling, allowed: Tensor | None = None, **state: Any
) -> Any:
    logits_BV = torch.tensor(logits)
    rows = rows_of(samplings, logits_BV.shape[1])._replace(**state)
    return sample(logits_BV, rows, allowed, chain_of(samplings))


def test_order_is_data_and_changes_the_support() -> None:
    logits, options = [0.0, -1.0, -2.0, -3.0], {"temperature": 2.0, "top_p": 0.8}
    assert kept(logits, **options) == [0, 1, 2] and kept(logits, **options, order="llama_cpp") == [
        0,
        1,
    ]


def test_temperature_0_is_the_first_of_the_likeliest_whatever_the_filters_say() -> None:
    greedy = Sampling(0, top_k=1, min_p=1.0, xtc_probability=1.0, typical_p=0.1, seed=9)
    alone, with_mates = (
        drawn([EQUAL], greedy),
        drawn([EQUAL] * 2, greedy, Sampling(1.0, typical_p=0.1, top_k=1)),
    )
    assert (
        alone.token_B.tolist() == [1]
        and with_mates.token_B[0] == 1
        and with_mates.status_B[0] == OK
    )
    # It is the argmax after the penalties: id 0 is in the prompt and 3 / 2 < 2.
    assert drawn([[3.0, 2.0]], Sampling(0, repetition_penalty=2.0)).token_B.tolist() == [1]


@pytest.mark.parametrize(
    "sampling", [Sampling(0), Sampling(1.0), Sampling(1.0, top_k=2, top_p=0.9, typical_p=0.9)]
)
def test_a_row_that_cannot_be_drawn_says_so_and_leaves_its_mates_alone(sampling: Sampling) -> None:
    good = [0.5, 0.1, 9.0]
    broken = [[NAN_LOGIT, 0.0, 0.0], [0.0, INF, 0.0], [-INF] * 3, good, [-INF, -INF, 0.0]]
    found = drawn(broken, *[sampling] * 5)
    assert (
        found.status_B.tolist() == [NOT_FINITE, NOT_FINITE, NOTHING_ALLOWED, OK, OK]
        and found.status_B.dtype == torch.int32
    )
    assert found.token_B[:3].tolist() == [0, 0, 0] and found.token_B[4] == 2
    assert found.token_B[3] == drawn([good], sampling).token_B[0]


def test_a_nan_behind_a_mask_is_still_reported() -> None:
    allowed = torch.tensor([[True, False]])
    assert drawn([[0.0, NAN_LOGIT]], Sampling(0), allowed=allowed).status_B.tolist() == [NOT_FINITE]


def test_a_mask_allows_its_tokens_only() -> None:
    allowed = torch.tensor([[False, True, False, True], [False] * 4])
    found = drawn(
        [[9.0, 0.0, 9.0, 0.0]] * 2, Sampling(1.0, top_k=2), Sampling(1.0, top_k=2), allowed=allowed
    )
    assert found.status_B.tolist() == [OK, NOTHING_ALLOWED] and int(found.token_B[0]) in (1, 3)


def test_a_window_that_is_too_small_says_so() -> None:
    flat, peaked = [0.0] * 600, [50.0] + [0.0] * 599
    samplings = [
        Sampling(1.0, top_p=0.9),
        Sampling(1.0, top_p=0.9),
        Sampling(1.0),
        Sampling(0, top_p=0.9),
    ]
    falling = [-0.001 * i for i in range(600)]
    found = drawn([falling, peaked, flat, falling], *samplings)
    assert found.status_B.tolist() == [UNDECIDED, OK, OK, OK], (
        "a row that does not filter, or is greedy, has no need"
    )
    logits_BV = torch.tensor([falling])
    rows, chain = rows_of(samplings[:1], 600), chain_of(samplings[:1])
    again = [sample(logits_BV, rows, None, chain, truncation) for truncation in ("search", "sort")]
    assert again[0].status_B.tolist() == again[1].status_B.tolist() == [OK]
    assert again[0].token_B == again[1].token_B


def test_repetition_penalty_divides_what_is_positive_and_multiplies_what_is_not() -> None:
    """At 0 and at -inf it changes nothing; ids of the prompt (0, 3) and ids that were drawn (4) are
    meant.
    """
    counts = torch.tensor([[0, 0, 0, 0, 2, 0]], dtype=COUNT_DTYPE)
    options = Sampling(0, repetition_penalty=4.0)

    def best(logits: list[float]) -> tuple[int, int]:
        found = drawn([logits], options, counts_BV=counts)
        return int(found.token_B[0]), int(found.status_B[0])

    assert best([3.9, 1.0, 0.5, 0.0, 3.8, 0.0]) == (1, OK)
    assert best([-1.0, -3.9, -INF, -2.0, -INF, -INF]) == (1, OK)
    assert best([0.0, -0.1, -INF, -INF, -INF, -INF]) == (0, OK)
    assert best([-INF] * 6) == (0, NOTHING_ALLOWED)


def test_frequency_counts_and_presence_does_not() -> None:
    counts = torch.tensor([[3, 1, 0]], dtype=COUNT_DTYPE)
    assert drawn(
        [[3.5, 1.9, 1.0]], Sampling(0, frequency_penalty=1.0), counts_BV=counts
    ).token_B.tolist() == [2]
    assert drawn(
        [[3.5, 1.9, 1.0]], Sampling(0, presence_penalty=1.0), counts_BV=counts
    ).token_B.tolist() == [0]
    assert drawn(
        [[0.0, 0.0, 0.5]], Sampling(0, frequency_penalty=-1.0), counts_BV=counts
    ).token_B.tolist() == [0]


def test_the_scope_says_whether_the_prompt_counts() -> None:
    prompt = [2, 2, 5]
    assert [each.tolist() for each in first_counts(Sampling(), prompt, 6)] == [
        [0] * 6,
        [0, 0, 2, 0, 0, 1],
    ]
    assert first_counts(Sampling(penalty_scope="all"), prompt, 6)[0].tolist() == [0, 0, 2, 0, 0, 1]
    assert first_counts(Sampling(penalty_scope="all"), [1] * 40_000, 2)[0].tolist() == [0, 40_000]
    counts = torch.tensor([[0, 1], [3, 0], [0, 5]], dtype=COUNT_DTYPE)
    add_to_counts(counts, torch.tensor([1, 0, 1]), torch.tensor([True, True, False]))
    assert counts.tolist() == [[0, 2], [4, 0], [0, 5]]


def test_biases_are_added_and_padding_adds_nothing() -> None:
    requests = [
        Sampling(0, logit_bias={2: 5.0}),
        Sampling(0, logit_bias={0: -INF, 1: -INF, 2: 0.5}),
        Sampling(0),
    ]
    assert drawn([[4.0, 3.0, 0.0]] * 3, *requests).token_B.tolist() == [2, 2, 0]
    everything = Sampling(1.0, logit_bias=dict.fromkeys(range(3), -INF))
    assert drawn([[4.0, 3.0, 0.0]], everything).status_B.tolist() == [NOTHING_ALLOWED]


def test_stop_tokens_wait_for_min_tokens() -> None:
    patient = Sampling(0, min_tokens=3)
    chain = chain_of([patient], stop_ids=2)
    knobs = new_knobs(chain, 4, torch.device("cpu"))
    for row in range(3):
        write_rows(knobs, [row], [knobs_of(patient, chain, [0, 2])])
    rows = rows_of([Sampling(0)] * 4, 3)._replace(
        knobs=knobs, generated_B=torch.tensor([0, 2, 3, 0])
    )
    found = sample(torch.tensor([[9.0, 1.0, 8.0]] * 4), rows, None, chain)
    assert found.token_B.tolist() == [1, 1, 0, 0], (
        "too early twice, then not; the last row has no minimum"
    )


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-40}, {"temperature": 1e-6, "temperature_range": 1e-6}]
)
def test_a_temperature_near_0_draws_from_the_likeliest(options: dict[str, float]) -> None:
    """At an entropy near 0 the moving temperature is its lower end, here 0."""
    found = drawn(
        [[1.0, 3.0, 3.0, 2.0]] * 40, *[Sampling(**options, seed=seed) for seed in range(40)]
    )
    assert set(found.token_B.tolist()) == {1, 2} and not found.status_B.any()


def test_all_arithmetic_is_fp32() -> None:
    """Logits of 16 bits draw as the fp32 numbers that they are."""
    logits_BV = torch.randn(20, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    options = [Sampling(0.7, top_p=0.9, seed=seed) for seed in range(20)]
    rows, chain = rows_of(options, 50), chain_of(options)
    tokens = [
        sample(logits, rows, None, chain).token_B for logits in (logits_BV, logits_BV.float())
    ]
    assert torch.equal(*tokens)


def test_log_probabilities_are_the_raw_ones() -> None:
    logits_BV = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    found = log_probabilities(logits_BV.bfloat16(), torch.tensor([4, 0, 8]), 2)
    exact_BV = logits_BV.bfloat16().double().log_softmax(-1)
    torch.testing.assert_close(
        found.chosen_B.double(), exact_BV[[0, 1, 2], [4, 0, 8]], rtol=1e-6, atol=1e-6
    )
    assert (
        torch.equal(found.ids_BN, exact_BV.topk(2).indices)
        and found.values_BN.dtype == torch.float32
    )


@pytest.mark.parametrize("n", [2, 5])
def test_processed_log_probabilities_of_some_tokens_are_those_of_all(n: int) -> None:
    """Whether the candidates are the whole vocabulary or three of it; places that nothing is left
    for have none.
    """
    scores_BV = torch.full((2, 9), -torch.inf)
    ids_BN, scores_BN = (
        torch.tensor([[7, 2, 5], [0, 8, 3]]),
        torch.tensor([[0.0, -1.5, -3.0], [-0.5, 0.0, -2.0]]),
    )
    scores_BV.scatter_(-1, ids_BN, scores_BN)
    token_B, max_score_B1, sufficed_B1 = (
        torch.tensor([5, 0]),
        torch.zeros(2, 1),
        torch.ones(2, 1, dtype=torch.bool),
    )
    some = Candidates(
        scores_BN, scores_BN, ids_BN, max_score_B1, sufficed_B1, None, "nearest", None
    )
    every = Candidates(scores_BV, scores_BV, None, max_score_B1, sufficed_B1, None, "nearest", None)
    found, expected = (
        _log_probabilities_after_filters(some, token_B, n),
        _log_probabilities_after_filters(every, token_B, n),
    )
    assert torch.equal(found.chosen_B, expected.chosen_B) and torch.equal(
        found.values_BN, expected.values_BN
    )
    left_BN = found.values_BN > -torch.inf
    assert (
        torch.equal(found.ids_BN[left_BN], expected.ids_BN[left_BN])
        and left_BN.sum(-1).tolist() == [min(n, 3)] * 2
    )
    exact_BN = scores_BN.double().log_softmax(-1)
    torch.testing.assert_close(
        found.chosen_B.double(), exact_BN[[0, 1], [2, 0]], rtol=1e-5, atol=1e-5
    )


def test_the_codes_of_rows_are_different() -> None:
    assert len({OK, NOT_FINITE, NOTHING_ALLOWED, UNDECIDED}) == 4


@pytest.mark.slow
def test_a_graph_that_needs_the_edited_logits_whole_has_them_with_their_penalties() -> None:
    """Compiled by Inductor: an operator that writes in place between the kernels may come after who
    reads it.
    """
    counts = {"repetition_penalty": 1.4, "frequency_penalty": 0.2, "penalty_last_n": 3}
    options = Sampling(1.2, dry_multiplier=0.3, dry_allowed_length=0, logit_bias={3: 0.5}, **counts)
    logits_BV = torch.randn(8, 11, generator=torch.Generator().manual_seed(0))
    rows, chain = rows_of([options] * 8, 11), chain_of([options])

    def largest_edited(logits_BV: Tensor, rows: SamplerRows) -> Tensor:
        return edit_logits(logits_BV, rows, None, chain).topk(11).values

    expected_BV = largest_edited(logits_BV, rows)
    assert not torch.equal(expected_BV, logits_BV.sort(descending=True).values)
    assert torch.equal(compiled(largest_edited)(logits_BV, rows), expected_BV)
