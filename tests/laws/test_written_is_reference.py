"""Run: pytest tests/laws/test_written_is_reference.py    (compiled by Inductor: -m slow)

Law 7 where rows remember: at every step of a running generator a row's penalties, repetitions,
mirostat's number and log-probabilities are what the float64 reference says of the row's own text.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import tiny_llama
from monograph.decode import Sampling, generate, step
from monograph.decode.chain import SampledTokens, SamplerRows, edit_logits
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.reproducible import row_uniform
from monograph.decode.request import LogProbability, Request
from monograph.laws.comparisons import error_within
from monograph.laws.reference_sampler import probabilities
from monograph.text.tokenizer import Tokenizer
from reference.sampler import edited

VOCABULARY, BREAKERS = 11, (4, 7)
DRY: dict[str, Any] = {"dry_multiplier": 0.7, "dry_base": 1.4, "dry_allowed_length": 1}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.3},
    "all text": {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "top_k": 7,
    },
    "last 3 of the output": {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.9,
        "penalty_last_n": 3,
    },
    "last 6": {
        "frequency_penalty": -0.4,
        "presence_penalty": 0.3,
        "penalty_last_n": 6,
        "penalty_scope": "all",
    },
    "last 40": {
        "repetition_penalty": 0.7,
        "penalty_last_n": 40,
        "penalty_scope": "all",
        "presence_penalty": 1.0,
    },
    "none": {"repetition_penalty": 3.0, "frequency_penalty": 2.0, "penalty_last_n": 0},
    "dry": DRY,
    "dry, last 9": DRY | {"dry_penalty_last_n": 9, "dry_allowed_length": 0, "dry_multiplier": 0.3},
    "dry, last 4": DRY | {"dry_penalty_last_n": 4},
    "dry, none": DRY | {"dry_penalty_last_n": 0},
    "dry, steep": DRY | {"dry_base": 1e6, "dry_allowed_length": 2, "top_p": 0.9},
    "mirostat": {"mirostat_tau": 1.8, "mirostat_eta": 0.4},
    "mirostat, low": {"mirostat_tau": 0.5, "mirostat_eta": 1.0, "min_keep": 2, "temperature": 1.5},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.1, "top_a": 0.02},
}
PROMPTS = [(1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2), (5,), (1, 4, 2, 3, 1, 4, 2), (2, 1) * 4]
STEPS = 12


class Watched:
    """`step.sample` that notes, by seed and position, what each row's chain saw."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], tuple[Tensor, Tensor, float]] = {}
        self.sample = step.sample

    def __call__(
        self,
        logits_BV: Tensor,
        rows: SamplerRows,
        allowed_BV: Tensor | None,
        chain: Any,
        truncation: Any,
    ) -> SampledTokens:
        edited_BV = edit_logits(logits_BV.float(), rows, allowed_BV, chain)
        mu_B = torch.zeros(len(logits_BV)) if rows.mu_B is None else rows.mu_B.clone()
        for row, key in enumerate(zip(rows.seed_B.tolist(), rows.position_B.tolist(), strict=True)):
            self.seen.setdefault(key, (logits_BV[row].clone(), edited_BV[row], float(mu_B[row])))
        return self.sample(logits_BV, rows, allowed_BV, chain, truncation)


def requests(every: bool) -> list[Request]:
    """Each prompt with each kind, or with every second one in turn."""
    breaker_V = torch.zeros(VOCABULARY, dtype=torch.bool)
    breaker_V[list(BREAKERS)] = True
    kinds = [Sampling(**{"temperature": 1.2, "logprobs": 5, **kind}) for kind in KINDS.values()]
    return [
        Request(prompt, replace(kind, seed=17 * index + number), STEPS, breaker_V=breaker_V)
        for index, prompt in enumerate(PROMPTS)
        for number, kind in enumerate(kinds)
        if every or (index + number) % 2 == 0
    ]


def written(block: int, every: bool) -> list[tuple[Request, list[int], list[LogProbability]]]:
    """All requests in a few rows, so that each row is taken again and again."""
    model, asked = tiny_llama(vocab_size=VOCABULARY), requests(every)
    chain = chain_of([request.sampling for request in asked])
    machine = Generator(model, chain, rows=8, slots=32, vocabulary=VOCABULARY, pace=block)
    found: dict[int, tuple[Request, list[int], list[LogProbability]]] = {
        machine.submit(request): (request, [], []) for request in asked
    }
    for event in machine.run():
        found[event.number][1].extend(event.token_ids)
        found[event.number][2].extend(event.logprobs)
    return list(found.values())


@pytest.mark.parametrize(
    ("block", "every"),
    [(7, False), *(pytest.param(block, True, marks=pytest.mark.slow) for block in (1, 7))],
)
def test_every_step_is_the_reference_s(
    block: int, every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    monkeypatch.setattr(step, "sample", watched)
    penalised = 0
    for request, output, reports in written(block, every):
        options, mu = request.sampling, 2 * request.sampling.mirostat_tau
        assert len(output) == len(reports) == STEPS
        for index, (token, report) in enumerate(zip(output, reports, strict=True)):
            raw_V, ours_V, our_mu = watched.seen[options.seed, len(request.prompt_ids) + index]
            told = (options, request.prompt_ids, output[:index], BREAKERS)
            exact_V, naive_V = (
                edited(raw_V.double(), *told),
                edited(raw_V, *told),
            )
            assert error_within(ours_V, naive_V, exact_V, k=4)
            penalised += bool((exact_V != raw_V.double()).any())
            if options.mirostat_tau:
                assert our_mu == pytest.approx(mu, abs=1e-4)
            uniform = float(
                row_uniform(
                    torch.tensor([options.seed]), torch.tensor([len(request.prompt_ids) + index])
                )
            )
            p_V = probabilities(ours_V.double(), options, uniform, our_mu)
            assert_reported(report, raw_V.double().log_softmax(0), p_V.log(), token)
            mu -= options.mirostat_eta * (-math.log2(float(p_V[token])) - options.mirostat_tau)
    assert penalised > (150 if every else 75)


def assert_reported(report: LogProbability, raw_V: Tensor, processed_V: Tensor, token: int) -> None:
    """A token's two log-probabilities and the likeliest ones' are these; what could not be drawn is
    not reported.
    """
    assert report.drawn == pytest.approx(float(raw_V[token]), abs=1e-5)
    assert report.processed_drawn == pytest.approx(float(processed_V[token]), abs=1e-5)
    for pairs, expected_V in ((report.likeliest, raw_V), (report.processed_likeliest, processed_V)):
        best = expected_V[expected_V > -torch.inf].sort(descending=True).values[:5]
        assert [value for _, value in pairs] == pytest.approx(best.tolist(), abs=1e-5)
        assert [float(expected_V[index]) for index, _ in pairs] == pytest.approx(
            best.tolist(), abs=1e-5
        )


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_text_does_not_depend_on_what_its_mates_remember(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt alone, in a chain of its own stages, and beside all others, by `generate` with
    one sampling each.
    """
    model, tokenizer = tiny_llama(vocab_size=259), Tokenizer.bytes()
    monkeypatch.setattr("monograph.decode.completion.MAX_ROWS", {"cpu": 3})
    if compiled:
        monkeypatch.setattr("monograph.decode.completion.WORTH_COMPILING", {"cpu": 1})
    samplings = [Sampling(seed=index, **kind) for index, kind in enumerate(KINDS.values())]
    prompts = [f"aaab: {'ab' * index}" for index in range(len(samplings))]
    together = [str(each) for each in generate(model, tokenizer, prompts, samplings, max_tokens=16)]
    some = range(0, len(prompts), 6 if compiled else 2)
    monkeypatch.setattr("monograph.decode.completion.WORTH_COMPILING", {"cpu": 10**9})
    alone = {
        index: str(
            next(
                iter(generate(model, tokenizer, [prompts[index]], samplings[index], max_tokens=16))
            )
        )
        for index in some
    }
    assert alone == {index: together[index] for index in some}
