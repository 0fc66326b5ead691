"""Run: pytest tests/evaluation/test_continuations.py"""

from __future__ import annotations

import random

import pytest
import torch

from batches import VOCABULARY, tiny_llama
from monograph.errors import InputRefused
from monograph.evaluation import choices
from monograph.evaluation.choices import TextContinuation, score
from monograph.graph.precision import Precision
from monograph.laws.comparisons import error_within
from monograph.model.llama import Llama

FP32 = Precision("fp32")


def pairs(count: int = 17, seed: int = 0) -> list[TextContinuation]:
    """Contexts and continuations of very different lengths, some with one id."""
    draws = random.Random(seed)

    def ids(most: int) -> list[int]:
        return [
            draws.randrange(VOCABULARY) for _ in range(draws.choice([1, 2, draws.randint(1, most)]))
        ]

    return [TextContinuation(ids(30), ids(20)) for _ in range(count)]


@torch.no_grad()
def one_by_one(
    model: Llama, asked: list[TextContinuation], precision: Precision = FP32
) -> torch.Tensor:
    """The obvious way: the whole text through the model, all its log-probabilities, those of the
    continuation added.
    """
    sums = []
    for context, ids in asked:
        with precision.context("cpu"):
            logits_TV = model.logits(model(torch.tensor([[*context, *ids]])))[0]
        log_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)).log_softmax(-1)
        sums.append(sum(log_TV[len(context) + i - 1, token] for i, token in enumerate(ids)))
    return torch.stack(sums)


def log_probabilities(
    found: list[choices.Score], dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    return torch.tensor([each.log_probability for each in found], dtype=dtype)


@pytest.mark.parametrize("batch_tokens", [1, 70, 10**6])
def test_scores_are_those_of_a_full_forward_of_each_alone(batch_tokens: int) -> None:
    model, asked = tiny_llama(torch.float64), pairs()
    found = log_probabilities(score(model, asked, FP32, batch_tokens=batch_tokens))
    torch.testing.assert_close(found, one_by_one(model, asked), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_batches_and_padding_add_no_error(precision: str) -> None:
    model, asked = tiny_llama(initializer_range=0.3), pairs(40)
    exact = one_by_one(tiny_llama(torch.float64, initializer_range=0.3), asked)
    found = log_probabilities(score(model, asked, Precision(precision)), torch.float32)
    assert error_within(found, one_by_one(model, asked, Precision(precision)), exact)


def test_logits_come_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = tiny_llama(torch.float64), pairs()
    most, logits = [], model.logits
    monkeypatch.setattr(
        model, "logits", lambda hidden: (most.append(hidden.shape[0]), logits(hidden))[1]
    )
    whole = score(model, asked, FP32)
    assert max(most) == sum(len(each.ids) for each in asked)
    most.clear()
    monkeypatch.setattr(choices, "LOGITS", 5 * VOCABULARY)
    pieces = score(model, asked, FP32)
    assert max(most) <= 5
    torch.testing.assert_close(
        log_probabilities(pieces), log_probabilities(whole), rtol=1e-12, atol=0.0
    )
    assert [each.greedy for each in pieces] == [each.greedy for each in whole]


def test_a_continuation_is_greedy_if_each_of_its_ids_is_the_likeliest() -> None:
    model, ids = tiny_llama(initializer_range=0.3), [7, 8]
    for _ in range(5):
        ids.append(int(model.logits(model(torch.tensor([ids])))[0, -1].argmax()))
    greedy = TextContinuation(ids[:2], ids[2:])
    last_off = TextContinuation(ids[:2], [*ids[2:-1], (ids[-1] + 1) % VOCABULARY])
    assert [each.greedy for each in score(model, [last_off, greedy], FP32)] == [False, True]


def test_what_has_no_room_is_left_out_at_the_beginning() -> None:
    model = tiny_llama(torch.float64, max_position_embeddings=16)
    draws = random.Random(1)
    context, ids = (
        [draws.randrange(VOCABULARY) for _ in range(30)],
        [draws.randrange(VOCABULARY) for _ in range(5)],
    )
    cut = TextContinuation(context[-12:], ids)  # 16 inputs: the last id is only predicted
    assert score(model, [TextContinuation(context, ids)], FP32) == score(model, [cut], FP32)
    assert score(model, [TextContinuation(context, ids)], FP32) != score(
        model, [TextContinuation(context[-11:], ids)], FP32
    )


def test_a_continuation_without_room_is_refused() -> None:
    model = tiny_llama(max_position_embeddings=16)
    assert len(score(model, [TextContinuation([1], [2] * 16)], FP32)) == 1
    with pytest.raises(
        InputRefused, match="a continuation of 17 tokens has no room in the model's 16 positions"
    ):
        score(model, [TextContinuation([1], [2] * 17)], FP32)


def test_nothing_asked_nothing_scored() -> None:
    assert score(tiny_llama(), [], FP32) == []
