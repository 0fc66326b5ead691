"""Run: pytest tests/laws/test_head_drafts.py

Law 7, with drafts of the model's own head for multi-token prediction: the text is the text without them,
and what is proposed is what the head's equation gives for the text so far.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batches import tiny_llama
from laws.test_drafted_is_undrafted import (
    SLOTS,
    TOKENIZER,
    WINDOWED,
    assert_equal,
    requests,
    written,
)
from monograph.decode import draft_head
from monograph.decode.cache import CacheSizes
from monograph.decode.completion import generate
from monograph.decode.draft import DRAFT_TOKENS
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.request import Pace, Request
from monograph.decode.sampling import Sampling
from monograph.decode.step import Status
from monograph.errors import UsageError
from monograph.laws.comparisons import relative_error
from monograph.model.llama import Llama


def with_head(**sizes: Any) -> Llama:
    """A model whose likeliest tokens are far likelier than the others, as its head's are. The head often
    proposes what the model writes, since both write the last token again most of the time.
    """
    sizes = {"num_hidden_layers": 1, **sizes}
    model = tiny_llama(
        torch.float64, vocab_size=TOKENIZER.vocab_size, mtp_num_hidden_layers=1, **sizes
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(4)
        # Mostly the half of the embedding, which is the first.
        assert model.mtp is not None
        width = model.config.hidden_size
        model.mtp.fc.weight[:, :width] += 2 * torch.eye(width, dtype=torch.float64)
        model.lm_head.weight.add_(2 * model.model.embed_tokens.weight)
    return model


# Logits of proposals, by the seed of the text, the position of its last token, and the proposal's index.
Proposals = dict[tuple[int, int, int], torch.Tensor]


def slow_proposals(
    model: Llama, prompt: tuple[int, ...], count: int, tokens: int, seed: int
) -> tuple[Proposals, list[int]]:
    """What is proposed in each pass of a text of likeliest tokens, from full passes without a cache, and
    how many tokens each pass gives. A text that ends in a pass ends it, too.
    """
    text = [*prompt]
    end = len(prompt) + count
    by_pass: Proposals = {}
    passes = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return model.logits(hidden)[: TOKENIZER.vocab_size].detach()

    while len(text) < end:
        proposed: list[int] = []
        hidden = model(torch.tensor([text[:-1]]))
        for index in range(tokens):
            following = torch.tensor([[*text[1:], *proposed]])
            ahead = model.predict_ahead(hidden, following)[:, -1:]
            of_proposal = logits(ahead[0, 0])
            by_pass[seed, len(text) - 1, index] = of_proposal
            proposed.append(int(of_proposal.argmax()))
            hidden = torch.cat([hidden, ahead], dim=1)
        given = 0
        while len(text) < end:
            token = int(logits(model(torch.tensor([text]))[0, -1]).argmax())
            text.append(token)
            given += 1
            if given > tokens or proposed[given - 1] != token:
                break
        passes.append(given)
    return by_pass, passes


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, marks=pytest.mark.slow, id="all positions"),
        pytest.param(WINDOWED, id="a window"),
    ],
)
def test_a_text_with_the_head_s_drafts_is_the_text_without(
    rows: int, sizes: dict[str, Any]
) -> None:
    model = with_head(num_hidden_layers=2, **sizes)
    expected, _ = written(model, rows, requests())
    for tokens, pace in ((DRAFT_TOKENS, 1), (1, 7), (3, 16)):
        found, generator = written(
            model, rows, requests(), draft="mtp", draft_tokens=tokens, pace=pace
        )
        assert_equal(found, expected)
        assert 1 <= generator.drafted_tokens / generator.drafted_passes <= 1 + tokens


PROMPTS = [(65, 66), (70, 71, 72, 73, 74, 75, 76, 77), (9, 8, 7), tuple(range(65, 86))]


def recorded_proposals(monkeypatch: pytest.MonkeyPatch, rows: int) -> Proposals:
    """What a generator proposes from now on, while it does."""
    found: Proposals = {}
    sample_proposal = draft_head.sample_proposal

    def recorded(logits_BV: torch.Tensor, state: Any, index: int, *more: Any) -> torch.Tensor:
        for row in range(rows):
            if int(state.status_B[row]) == Status.RUNNING:
                key = int(state.seed_B[row]), int(state.position_B[row]), index
                found[key] = logits_BV[row].detach().clone()
        return sample_proposal(logits_BV, state, index, *more)

    monkeypatch.setattr(draft_head, "sample_proposal", recorded)
    return found


def drafting_itself(model: Llama, rows: int, tokens: int, **options: Any) -> Generator:
    return Generator(
        model,
        chain_of([Sampling(0)]),
        rows=rows,
        slots=CacheSizes(SLOTS, block=8),  # short blocks, so that a prompt has several chunks
        vocabulary=TOKENIZER.vocab_size,
        draft="mtp",
        draft_tokens=tokens,
        **options,
    )


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tokens", [1, 3])
def test_what_is_proposed_is_what_the_head_predicts(
    rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its cache, its hidden states or its positions would not be those of the text."""
    model = with_head()
    expected: Proposals = {}
    passes: list[int] = []
    for seed, prompt in enumerate(PROMPTS):
        of_text, of_passes = slow_proposals(model, prompt, 24, tokens, seed)
        expected |= of_text
        passes += of_passes
    assert {1, 1 + tokens} <= set(passes), "proposals are right at times"
    found = recorded_proposals(monkeypatch, rows)
    asked = [Request(prompt, Sampling(0, seed=seed), 24) for seed, prompt in enumerate(PROMPTS)]
    generator = drafting_itself(model, rows, tokens)
    monkeypatch.setattr(Generator, "_drafts_pause", lambda _: False)  # it never gives up
    for request in asked:
        generator.submit(request)
    list(generator.run())
    assert found.keys() == expected.keys()
    for key, of_proposal in found.items():
        assert relative_error(of_proposal, expected[key]) <= 1e-9, key
    assert generator.drafted_passes == len(passes)
    assert generator.drafted_tokens == sum(passes)


def proposals_after(first: Request | None, monkeypatch: pytest.MonkeyPatch) -> Proposals:
    """What is proposed for a prompt of one token in a row in which another text was before."""
    model = with_head()
    generator = drafting_itself(model, 1, 1)
    monkeypatch.setattr(Generator, "_drafts_pause", lambda _: False)  # it never gives up
    if first is not None:
        embedding = model.model.embed_tokens.weight.data
        kept = embedding.clone()
        embedding[NOT_FINITE] = torch.nan
        generator.submit(first)
        list(generator.run())
        embedding.copy_(kept)
    found = recorded_proposals(monkeypatch, 1)
    generator.submit(Request((65,), Sampling(0, seed=1), 30))
    list(generator.run())
    monkeypatch.undo()
    return found


NOT_FINITE = 100  # a token
LONG = tuple(range(65, 95))


@pytest.mark.parametrize("max_chunks", [None, 1])
def test_after_a_pause_the_head_knows_the_text(
    monkeypatch: pytest.MonkeyPatch, max_chunks: int | None
) -> None:
    """What it proposes is what its equation gives, whatever was written without it."""
    model = with_head()
    found = recorded_proposals(monkeypatch, 2)
    generator = drafting_itself(model, 2, 1, pace=Pace(2, 2, max_chunks))
    pauses = False
    monkeypatch.setattr(Generator, "_drafts_pause", lambda _: pauses)
    texts = {}
    for seed, prompt in enumerate(PROMPTS[:2]):
        texts[generator.submit(Request(prompt, Sampling(0, seed=seed), 30))] = [*prompt]
    blocks = 0
    while generator.busy:
        for event in generator.advance():
            texts[event.number] += event.token_ids
        blocks += 1
        pauses = blocks % 5 in (2, 3)
    assert len(found) > 10 and {seed for seed, _, _ in found} == {0, 1}
    for (seed, position, _), of_proposal in found.items():
        text = [*texts.values()][seed]
        hidden = model(torch.tensor([text[:position]]))
        following = torch.tensor([text[1 : position + 1]])
        of_text = model.logits(model.predict_ahead(hidden, following)[0, -1])
        expected = of_text[: TOKENIZER.vocab_size].detach()
        assert relative_error(of_proposal, expected) <= 1e-9, (seed, position)


@pytest.mark.parametrize("prompt", [LONG, (*LONG, NOT_FINITE, 65)], ids=["finite", "not finite"])
def test_what_is_proposed_does_not_depend_on_the_text_before(
    prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on its last hidden state, nor on its keys and values, even if they are not finite."""
    expected = proposals_after(None, monkeypatch)
    found = proposals_after(Request(prompt, Sampling(0, seed=9), 5), monkeypatch)
    assert found.keys() == expected.keys()
    for key in expected:
        assert torch.equal(found[key], expected[key]), key


@pytest.mark.parametrize(
    "fault", ["hidden states one too far", "tokens one too far", "no rereading"]
)
def test_a_fault_of_the_head_s_state_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text stays what it is, but other proposals are right."""
    take = draft_head.HeadDrafter.after_pass

    def faulty(self: Any, position_B: Any, state: Any, next_BS: Any, hidden_BSD: Any) -> None:
        if fault == "hidden states one too far":
            hidden_BSD = hidden_BSD.roll(-1, dims=1)
        elif fault == "tokens one too far":
            next_BS = next_BS.roll(-1, dims=1)
        take(self, position_B, state, next_BS, hidden_BSD)
        if fault == "no rereading":
            last = (self.count_B - 1).clamp(min=0)
            each = torch.arange(len(last))
            self.hidden_BSD[:, 0] = self.hidden_BSD[each, last]
            self.next_BS[:, 0] = self.next_BS[each, last]
            self.first_B += last
            self.count_B.fill_(1)

    monkeypatch.setattr(draft_head.HeadDrafter, "after_pass", faulty)
    with pytest.raises(AssertionError):
        test_what_is_proposed_is_what_the_head_predicts(3, 3, monkeypatch)


def test_a_model_without_the_head_is_refused() -> None:
    model = tiny_llama(torch.float64, vocab_size=TOKENIZER.vocab_size)
    with pytest.raises(
        UsageError, match="draft = mtp: the model has no head for multi-token prediction"
    ):
        written(model, 1, requests(), draft="mtp")
    with pytest.raises(UsageError, match="draft_tokens = 17: expected 1 to 16"):
        written(with_head(), 1, requests(), draft="mtp", draft_tokens=17)


def test_the_name_of_a_draft_is_refused_where_its_model_is_expected() -> None:
    model = tiny_llama(vocab_size=TOKENIZER.vocab_size)
    with pytest.raises(UsageError, match="^draft = 'runs/small': expected a model, .* or 'mtp'$"):
        generate(model, TOKENIZER, ["a"], max_tokens=1, draft="runs/small")  # type: ignore[arg-type]
