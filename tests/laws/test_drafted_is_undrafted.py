"""Run: pytest tests/laws/test_drafted_is_undrafted.py

Law 7, with drafts: a text that is written with a draft model is the text without it. In float64 no two
scores are so near that rounding could change a token.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from batches import tiny_llama
from far_sighted import far_sighted
from monograph.automata import constraint, stop_strings
from monograph.decode.cache import CacheSizes
from monograph.decode.draft import DRAFT_TOKENS
from monograph.decode.draft_budget import MAX_LOST_STEPS
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.prompt_reader import PromptReader
from monograph.decode.request import Pace, Request
from monograph.decode.sampling import Sampling
from monograph.decode.step import DecodeStep
from monograph.errors import UsageError
from monograph.model.layer_types import (
    CONVOLUTION,
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    MAMBA,
    SLIDING_ATTENTION,
)
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
        for report in event.logprobs:
            reports += [*report.likeliest, (-1, report.processed_drawn)]
        texts[event.number][1] = event.finish
    return list(texts.values()), generator


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[:2] == theirs[:2]
        # A pass over several tokens rounds otherwise than a step, and the report is in fp32.
        assert [token for token, _ in mine[2]] == [token for token, _ in theirs[2]]
        values = [value for _, value in theirs[2]]
        assert [value for _, value in mine[2]] == pytest.approx(values, abs=1e-5)


# By day a model with both kinds of layers, whose rows are at different positions.
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, marks=pytest.mark.slow, id="all positions"),
        pytest.param(WINDOWED, id="a window"),
    ],
)
def test_a_text_with_drafts_is_the_text_without(rows: int, sizes: dict[str, Any]) -> None:
    model = sharp(0, **sizes)
    draft = sharp(1, num_hidden_layers=1)
    # Drafts that are right mostly, never, and hardly ever.
    draft.load_state_dict(model.state_dict(), strict=False)
    expected, _ = written(model, rows, requests())
    assert len({end for _, end, _ in expected}) == 2
    for proposes, tokens, pace in ((draft, DRAFT_TOKENS, 1), (model, 1, 7), (sharp(2), 3, 16)):
        found, generator = written(
            model, rows, requests(), draft=proposes, draft_tokens=tokens, pace=pace
        )
        assert_equal(found, expected)
        assert 1 <= generator.drafted_tokens / generator.drafted_passes <= 1 + tokens


RECURRENT: dict[str, dict[str, Any]] = {
    "delta net": {"model_type": "qwen3_5_text", "layer_types": (LINEAR_ATTENTION, FULL_ATTENTION)},
    "mamba": {"model_type": "granitemoehybrid", "layer_types": (MAMBA, FULL_ATTENTION), "mamba_d_state": 8},
    "convolution": {"model_type": "lfm2", "layer_types": (CONVOLUTION, FULL_ATTENTION)},
}  # fmt: skip


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_state_takes_in_the_accepted_tokens_alone(kind: str) -> None:
    """Rows accept different numbers of tokens, end, and are begun again."""
    model = sharp(0, **RECURRENT[kind])
    expected, _ = written(model, 3, requests())
    drafts = ((sharp(1), DRAFT_TOKENS, 1), (sharp(2), 1, 7))
    for proposes, tokens, pace in drafts:
        found, generator = written(
            model, 3, requests(), draft=proposes, draft_tokens=tokens, pace=pace
        )
        assert_equal(found, expected)
        assert generator.drafted_passes < generator.drafted_tokens


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
    # A pass with a draft as large as the model loses as much as may be lost. One more may be under way by
    # then, and a first token may be right by chance.
    assert generator.drafter.cost - 1 > MAX_LOST_STEPS
    assert generator.drafted_passes <= 3 * len(asked)
    assert generator.drafted_tokens < sum(len(tokens) for tokens, _, _ in found) / 2
    expected, _ = written(model, 1, asked)
    assert_equal(found, expected)


def replace_seed(request: Request, seed: int) -> Request:
    return request._replace(sampling=replace(request.sampling, seed=seed), stop_ids=())


def test_passes_after_the_end_of_a_text_do_not_count() -> None:
    model = sharp(0)
    request = Request((65,), Sampling(0), 40)
    [[tokens, _, _]], _ = written(model, 1, [request])
    [[first, end, _]], generator = written(
        model, 1, [request._replace(stop_ids=(tokens[0],))], draft=sharp(1), pace=16
    )
    assert (first, end) == (tokens[:1], "stop")
    assert generator.drafted_passes == generator.drafted_tokens == 1


def test_a_row_freed_of_a_text_gets_the_next_one_s_drafts() -> None:
    """Over several blocks of a windowed draft's cache, which a free row must not fill with NaN."""
    model = sharp(0, max_position_embeddings=200)
    draft = sharp(0, max_position_embeddings=200, **WINDOWED)
    request = Request((65, 66), Sampling(0), 100)
    generator = Generator(
        model,
        chain_of([request.sampling]),
        rows=2,
        slots=CacheSizes(120, block=16),
        vocabulary=TOKENIZER.vocab_size,
        draft=draft,
    )
    passes = list[int]()
    for texts in (2, 1):  # the second time one row stays free
        before = generator.drafted_passes
        for _ in range(texts):
            generator.submit(request)
        list(generator.run())
        passes.append((generator.drafted_passes - before) // texts)
    generator.submit(request._replace(max_tokens=20))
    list(generator.run())
    for _ in range(2):
        generator.submit(request)
    before = generator.drafted_passes
    list(generator.run())
    passes.append((generator.drafted_passes - before) // 2)
    assert len(set(passes)) == 1


def test_an_error_while_a_draft_reads_costs_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    request = requests()[0]
    generator = Generator(
        sharp(0), chain_of([request.sampling], 2), rows=1, slots=SLOTS,
        vocabulary=TOKENIZER.vocab_size, draft=sharp(1),
    )  # fmt: skip
    assert generator.drafter is not None

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    generator.submit(request)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(generator.drafter, "begin", fail)
        generator.advance()
    assert sum(len(event.token_ids) for event in generator.run()) > 0


def sampled(generator: Generator) -> dict[int, list[int]]:
    """The tokens of all requests by their numbers."""
    texts = dict[int, list[int]]()
    for event in generator.run():
        texts.setdefault(event.number, []).extend(event.token_ids)
    return texts


def proposing_for_itself(model: Llama, rows: int, **options: Any) -> Generator:
    return Generator(
        model,
        chain_of([Sampling(1.0)]),
        rows=rows,
        slots=SLOTS,
        vocabulary=TOKENIZER.vocab_size,
        draft=model,
        **options,
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_text"])
def test_no_trial_is_made_of_experts_whose_rows_depend_on_the_tokens(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    generator = proposing_for_itself(sharp(0, model_type=family, **experts), rows=2)
    monkeypatch.setattr(
        "monograph.decode.draft._read_proposed", lambda *_: pytest.fail("a trial was made")
    )
    generator.settle_drafts()
    assert generator.drafts == "always"


# How it reads behind, alone: test_after_a_pause_a_draft_knows_the_text.
@pytest.mark.parametrize("reads_behind", [pytest.param(False, marks=pytest.mark.slow), True])
def test_several_rows_switch_drafts_off_and_on(
    monkeypatch: pytest.MonkeyPatch, reads_behind: bool
) -> None:
    """Neither changes a text. After a pause, the draft model knows what was written meanwhile."""
    monkeypatch.setattr("monograph.decode.draft_budget.FORGIVEN_BY_STEP", 0.3)
    monkeypatch.setattr("monograph.decode.draft.cost_of_pass", lambda *_: 3.0)
    # In float64 it makes no difference.
    monkeypatch.setattr(Generator, "_pass_rounds_as_steps", lambda _: True)
    model = sharp(0)
    draft = sharp(1, num_hidden_layers=1)
    draft.load_state_dict(model.state_dict(), strict=False)
    asked = requests() + [replace_seed(requests()[1], seed) for seed in range(20, 30)]
    expected, _ = written(model, 4, asked)
    monkeypatch.setattr(
        Generator, "reads_behind", property(lambda _: reads_behind, lambda *_: None), raising=False
    )
    kinds = list[bool]()
    prepare = Generator._prepare_drafts
    monkeypatch.setattr(
        Generator, "_prepare_drafts", lambda self: kinds.append(prepare(self)) or kinds[-1]
    )
    found, generator = written(model, 4, asked, draft=draft, pace=Pace(4, 2, 1))
    assert_equal(found, expected)
    assert generator.drafts == "while they pay"
    switches = sum(before != after for before, after in zip(kinds, kinds[1:], strict=False))
    assert switches >= 4


@pytest.mark.parametrize("reads_behind", [False, True])
@pytest.mark.parametrize("max_chunks", [None, 1])
def test_after_a_pause_a_draft_knows_the_text(
    monkeypatch: pytest.MonkeyPatch, reads_behind: bool, max_chunks: int | None
) -> None:
    """Proposals of a model for itself are right again, whatever it did not read at the time."""
    model = far_sighted(vocab_size=TOKENIZER.vocab_size)
    model.lm_head.weight.data *= 4
    generator = proposing_for_itself(model, 2, pace=Pace(2, 2, max_chunks))
    generator.reads_behind = reads_behind
    pauses = False
    monkeypatch.setattr(Generator, "_drafts_pause", lambda _: pauses)
    for seed in range(2):
        generator.submit(Request((65, 66 + seed), Sampling(1.0, seed=seed), 55))
    blocks = 0
    while generator.busy:
        generator.advance()
        blocks += 1
        pauses = blocks % 5 in (2, 3)
    passes, tokens = generator.drafted_passes, generator.drafted_tokens
    assert 20 < tokens < 100
    # The last pass of a text may end before all proposals are used.
    assert tokens > (passes - 2) * (DRAFT_TOKENS + 1)


def test_a_continued_row_reads_only_what_is_new_in_the_draft_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = proposing_for_itself(sharp(0), 2)
    assert generator.drafter is not None
    begins = list[int]()
    read_pass = PromptReader._read_pass

    def noted(self: PromptReader, prompts: Any, firsts: Any, count: int) -> None:
        if self is generator.drafter.reader:  # type: ignore[union-attr]
            begins.extend(firsts)
        read_pass(self, prompts, firsts, count)

    monkeypatch.setattr(PromptReader, "_read_pass", noted)
    prompt = tuple(range(60, 80))
    first = generator.submit(Request(prompt, Sampling(1.0), 11, keeps_row=True))
    text = prompt + tuple(sampled(generator)[first])
    assert begins == [0]
    continued = Request((*text, 90, 91, 92), Sampling(1.0), 15, continues=first)
    second = generator.submit(continued)
    before = generator.drafted_passes
    tokens = sampled(generator)[second]
    # The last token but one may not have been read in a pass.
    assert begins == [0, len(text) - 2]
    assert generator.drafted_passes - before == math.ceil(len(tokens) / (DRAFT_TOKENS + 1))
    fresh = proposing_for_itself(sharp(0), 2)
    again = fresh.submit(continued._replace(continues=None))
    assert sampled(fresh)[again] == tokens


def test_the_chunks_of_a_draft_count_in_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running texts wait for no more chunks between two blocks, and prompts are read all the same."""
    model = sharp(0, max_position_embeddings=300)
    generator = Generator(
        model, chain_of([Sampling(1.0)]), rows=2, slots=300, vocabulary=TOKENIZER.vocab_size,
        draft=model, pace=Pace(1, 1, 2),
    )  # fmt: skip
    chunks = 0
    read_pass = PromptReader._read_pass

    def counted(self: PromptReader, *arguments: Any) -> None:
        nonlocal chunks
        chunks += 1
        read_pass(self, *arguments)

    monkeypatch.setattr(PromptReader, "_read_pass", counted)
    generator.submit(Request((65,), Sampling(1.0), 200))
    generator.advance()
    generator.submit(Request(tuple(range(250)), Sampling(1.0), 20))
    most = 0
    while generator.busy:
        chunks = 0
        generator.advance()
        most = max(most, chunks)
    assert most == 2
    assert generator.drafted_tokens > 4 * generator.drafted_passes


def test_prompts_that_begin_alike_are_read_once_by_the_draft() -> None:
    model = sharp(0, max_position_embeddings=300)
    generator = Generator(
        model, chain_of([Sampling(1.0)]), rows=2, slots=300, vocabulary=TOKENIZER.vocab_size, draft=model
    )  # fmt: skip
    assert generator.drafter is not None
    reader = generator.drafter.reader
    prompt = tuple(range(200))
    copied = list[int]()
    copy = reader.copy_first_chunks
    reader.copy_first_chunks = lambda *given: copied.append(copy(*given)) or copied[-1]  # type: ignore
    for end in (10, 11, 12):
        generator.submit(Request((*prompt, end, end), Sampling(1.0), 20))
        sampled(generator)
    assert copied == [0, generator.reused // 2, generator.reused // 2] and copied[1] > 100
    assert generator.drafted_tokens == generator.drafted_passes * (DRAFT_TOKENS + 1)


def test_a_block_has_passes_for_the_time_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monograph.decode.draft.cost_of_pass", lambda *_: 2.0)
    generator = proposing_for_itself(sharp(0), 2, pace=Pace(8, 8, None))
    passes = list[int]()
    read_block = generator._read_block

    def noted(block: Any) -> Any:
        passes.append(block.lines // block.lines_of_step)
        return read_block(block)

    monkeypatch.setattr(generator, "_read_block", noted)
    generator.submit(Request((65,), Sampling(1.0), 43))
    [text] = sampled(generator).values()
    # 43 tokens need nine passes of five; a block of eight steps has four.
    assert passes == [4, 4, 1] and len(text) == 43


@pytest.mark.parametrize("rows", [2, 4])
def test_where_passes_round_as_steps_drafts_change_no_bit(rows: int) -> None:
    """In fp32, log-probabilities included; else drafts of several rows are not switched off."""
    model = sharp(0).float()
    asked = [replace_seed(requests()[2], seed) for seed in range(8)]
    reports = list[Any]()
    for draft in (None, model):
        generator = Generator(
            model, chain_of([asked[0].sampling]), rows=rows, slots=SLOTS, vocabulary=TOKENIZER.vocab_size,
            draft=draft,
        )  # fmt: skip
        generator.settle_drafts()
        for request in asked:
            generator.submit(request)
        reports.append(sorted(generator.run(), key=lambda event: event.number))
        if generator.drafts == "always":
            pytest.skip("on this machine a pass of these sizes rounds otherwise")
    joined = [{}, {}]  # type: list[dict[int, list[Any]]]
    for texts, events in zip(joined, reports, strict=True):
        for event in events:
            texts.setdefault(event.number, []).extend([*event.token_ids, *event.logprobs])
    flat = [{number: sorted(map(str, each)) for number, each in texts.items()} for texts in joined]
    assert flat[0] == flat[1]


def test_drafts_are_not_switched_off_between_texts_if_that_would_round_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits_of_proposed = DecodeStep.logits_of_proposed
    monkeypatch.setattr(
        DecodeStep,
        "logits_of_proposed",
        lambda *given: logits_of_proposed(*given) * (1 + 1e-15),
    )
    asked = requests()[:4]
    _, generator = written(sharp(0), 4, asked, draft=sharp(2))
    assert generator.drafts == "always"
    generator = proposing_for_itself(sharp(0), 4)
    generator.settle_drafts()
    assert generator.drafts == "always"
    # A rehearsal decides, by its count alone.
    rehearsal = [Request((65,), Sampling(1.0, seed=row), 30) for row in range(4)]
    for cost, drafts in ((5.5, "never"), (3.0, "always")):
        generator = proposing_for_itself(sharp(0), 4)
        generator.settle_drafts()
        assert generator.drafter is not None
        generator.drafter.cost = cost
        generator.rehearse_drafts(rehearsal)
        assert generator.drafts == drafts and generator.drafted_passes == 0


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
    with pytest.raises(UsageError, match="has 100 tokens, and the model's tokenizer 259"):
        written(model, 1, requests(), draft=tiny_llama(vocab_size=100))
    with pytest.raises(UsageError, match="draft_tokens = 17: expected 1 to 16"):
        written(model, 1, requests(), draft=model, draft_tokens=17)
    with pytest.raises(UsageError, match="has 40 positions, but texts may have 60"):
        written(model, 1, requests(), draft=sharp(0, max_position_embeddings=40))
