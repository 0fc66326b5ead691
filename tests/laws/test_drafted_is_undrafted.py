"""Run: pytest tests/laws/test_drafted_is_undrafted.py

Law 7, with drafts: a text that is written with a draft model is the text without it. In float64 no two
scores are so near that rounding could change a token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from batches import tiny_llama
from monograph.automata import constraint, stop_strings
from monograph.decode.draft import DRAFT_TOKENS, MAX_LOST_STEPS
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.request import Request
from monograph.decode.sampling import Sampling
from monograph.errors import UsageError
from monograph.model.layer_types import FULL_ATTENTION, LINEAR_ATTENTION, SLIDING_ATTENTION
from monograph.model.llama import Llama
from monograph.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.bytes()
SLOTS = 60
OPTIONS = [
    Sampling(0, seed=1),
    Sampling(1.0, seed=2),
    Sampling(0.8, top_k=5, top_p=0.9, seed=3, logprobs=2),
    Sampling(0.7, repetition_penalty=1.3, frequency_penalty=0.4, penalty_last_n=6, seed=4),
    Sampling(1.2, mirostat_tau=3.0, dry_multiplier=0.8, seed=5),
    Sampling(1.0, temperature_range=0.5, min_tokens=9, seed=6),
]
WINDOWED: dict[str, Any] = {
    "model_type": "qwen3",
    "sliding_window": 8,
    "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION),
}


def sharp(seed: int, **sizes: Any) -> Llama:
    """A model whose likeliest tokens are far likelier than the others."""
    model = tiny_llama(torch.float64, seed=seed, vocab_size=TOKENIZER.vocab_size, **sizes)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(4)
    return model


def requests() -> list[Request]:
    """Texts with all kinds of options, some of which end early."""
    words = stop_strings(["ab", "\x01"], TOKENIZER.pieces)
    digits = constraint("regex", "[0-9]{3,20}", TOKENIZER.pieces, [TOKENIZER.eos_id])
    prompts = [(65,), (65, 66), (70, 71, 72, 73, 74, 75, 76, 77), tuple(range(65, 90))]
    found = [
        Request(prompts[i % 4], options, 20 + i, stop_ids=(TOKENIZER.eos_id, 7))
        for i, options in enumerate(OPTIONS)
    ]
    found.append(found[1]._replace(stop_automaton=words, max_tokens=50))
    found.append(found[0]._replace(constraint=digits))
    found.append(found[1]._replace(constraint=digits, prompt_ids=prompts[3]))
    return found


def written(
    model: Llama, rows: int, asked: list[Request], **options: Any
) -> tuple[list[Any], Generator]:
    """What is written after each request: tokens, end and log-probabilities."""
    automata = {id(each): each for request in asked for each in
                (request.constraint, request.stop_automaton) if each is not None}  # fmt: skip
    chain = chain_of([request.sampling for request in asked], 2)
    generator = Generator(
        model,
        chain,
        rows=rows,
        slots=SLOTS,
        vocabulary=TOKENIZER.vocab_size,
        automata=list(automata.values()),
        **options,
    )
    texts: dict[int, list[Any]] = {generator.submit(each): [[], None, []] for each in asked}
    for event in generator.run():
        tokens, _, reports = texts[event.number]
        tokens += event.token_ids
        reports += [value for report in event.logprobs for value in report.likeliest]
        reports += [(-1, report.processed_drawn) for report in event.logprobs]
        texts[event.number][1] = event.finish
    return list(texts.values()), generator


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[:2] == theirs[:2]
        # A pass over several tokens rounds otherwise than a step, and the report is in fp32.
        assert [i for i, _ in sorted(mine[2])] == [i for i, _ in sorted(theirs[2])]
        assert sum(v for _, v in mine[2]) == pytest.approx(sum(v for _, v in theirs[2]), abs=1e-4)


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("sizes", [{}, WINDOWED], ids=["all positions", "a window"])
def test_a_text_with_drafts_is_the_text_without(rows: int, sizes: dict[str, Any]) -> None:
    model = sharp(0, **sizes)
    draft = sharp(1, num_hidden_layers=1)
    # Drafts that are right mostly, never, and hardly ever.
    draft.load_state_dict(model.state_dict(), strict=False)
    expected, _ = written(model, rows, requests())
    assert len({end for _, end, _ in expected}) == 2
    for proposes, tokens in ((draft, DRAFT_TOKENS), (model, 1), (sharp(2), 3)):
        found, generator = written(model, rows, requests(), draft=proposes, draft_tokens=tokens)
        assert_equal(found, expected)
        assert generator.drafted_passes


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    """Else its cache, its noise or its positions would not be those of the text."""
    model = sharp(0)
    asked = [Request((65, 66 + i), Sampling(1.0, seed=i), 5 * (DRAFT_TOKENS + 1)) for i in range(6)]
    _, generator = written(model, 4, asked, draft=model)
    assert generator.drafted_tokens == generator.drafted_passes * (DRAFT_TOKENS + 1)


def test_drafts_that_do_not_pay_end_early_in_a_row_alone() -> None:
    asked = [replace_seed(requests()[1], seed)._replace(max_tokens=40) for seed in range(2)]
    model = sharp(0)
    found, generator = written(model, 1, asked, draft=sharp(1))
    assert generator.drafter is not None
    # The first tokens may be right by chance.
    assert generator.drafted_passes * (generator.drafter.cost - 1) < 3 * MAX_LOST_STEPS * len(asked)
    assert generator.drafted_tokens < sum(len(tokens) for tokens, _, _ in found) / 2
    expected, _ = written(model, 1, asked)
    assert_equal(found, expected)


def replace_seed(request: Request, seed: int) -> Request:
    return request._replace(sampling=replace(request.sampling, seed=seed), stop_ids=())


def test_a_draft_that_cannot_be_used_is_refused() -> None:
    model = sharp(0)
    recurrent = tiny_llama(
        vocab_size=TOKENIZER.vocab_size,
        model_type="qwen3_5_text",
        layer_types=(LINEAR_ATTENTION, FULL_ATTENTION),
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    with pytest.raises(UsageError, match="the draft model has recurrent layers"):
        written(model, 1, requests(), draft=recurrent.double())
    with pytest.raises(UsageError, match="the model has recurrent layers"):
        written(recurrent.double(), 1, requests(), draft=model)
    with pytest.raises(UsageError, match="has 40 positions, but texts may have 60"):
        written(model, 1, requests(), draft=sharp(0, max_position_embeddings=40))
