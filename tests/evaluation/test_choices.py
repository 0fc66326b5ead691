"""Run: pytest tests/evaluation/test_choices.py"""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from batches import tiny_llama
from dialogues import speaking
from monograph.errors import InputRefused
from monograph.evaluation.choices import Accuracy, Question, choose, encode_pair
from monograph.graph.precision import Precision
from monograph.model.llama import Llama
from monograph.text.chat import chat_ids
from monograph.text.tokenizer import Tokenizer

FP32, BYTES = Precision("fp32"), Tokenizer.bytes()


def model(**sizes: int) -> Llama:
    return tiny_llama(
        torch.float64, vocab_size=259, max_position_embeddings=96, initializer_range=0.3, **sizes
    )


def questions(count: int = 60, seed: int = 0) -> list[Question]:
    """Choices whose lengths differ, in characters, and in bytes otherwise than in characters."""
    draws = random.Random(seed)

    def words(alphabet: str, most: int) -> str:
        return "".join(draws.choice(alphabet) for _ in range(draws.randint(1, most)))

    def choices() -> tuple[str, ...]:
        return tuple(
            words(draws.choice(["abc", "éß", "語文"]), 9) for _ in range(draws.choice([2, 4]))
        )

    made = [(words("abc ", 20).strip() + "?", choices()) for _ in range(count)]
    return [
        Question(query, each, draws.randrange(len(each)), f"q:{i}")
        for i, (query, each) in enumerate(made)
    ]


@torch.no_grad()
def by_hand(net: Llama, asked: list[Question]) -> dict[str, list[float]]:
    """lm-evaluation-harness's equations (its task type multiple_choice), one forward pass for each
    choice.
    """
    right: dict[str, list[float]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
    for query, choices, gold, _ in asked:
        context, logs = [BYTES.bos_id, *BYTES.encode(query)], []
        for choice in choices:
            ids = BYTES.encode(" " + choice)
            log_TV = net.logits(net(torch.tensor([context + ids])))[0].log_softmax(-1)
            logs.append(
                sum(float(log_TV[len(context) + i - 1, token]) for i, token in enumerate(ids))
            )
        right["acc"].append(float(np.argmax(logs) == gold))
        right["acc_norm"].append(
            float(np.argmax(np.array(logs) / [len(c) for c in choices]) == gold)
        )
        right["acc_bytes"].append(
            float(np.argmax(np.array(logs) / [len(c.encode()) for c in choices]) == gold)
        )
    return right


def test_answers_and_errors_are_those_of_the_equations() -> None:
    net, asked = model(), questions()
    expected, found = by_hand(net, asked), choose(net, BYTES, asked, FP32)[1]
    assert len({tuple(answers) for answers in expected.values()}) == 3, (
        "questions that tell the three apart"
    )
    for name, answers in expected.items():
        assert getattr(found, name) == pytest.approx(np.mean(answers), rel=1e-12)
        deviation = np.std(answers, ddof=1) / math.sqrt(len(answers))
        assert getattr(found, f"{name}_stderr") == pytest.approx(deviation, rel=1e-12)
    assert found.questions == 60 and found.cut == 0
    assert found.chance == pytest.approx(np.mean([1 / len(each.choices) for each in asked]))


def test_of_equals_the_first_choice_is_the_answer() -> None:
    asked = [Question("a", ("b", "b", "b"), gold, "q:1") for gold in (0, 1, 2)]
    assert [choose(model(), BYTES, [each], FP32)[1].acc for each in asked] == [1.0, 0.0, 0.0]


def test_one_question_has_no_standard_error() -> None:
    found = choose(model(), BYTES, questions(1), FP32)[1]
    assert (found.acc_stderr, found.acc_norm_stderr, found.acc_bytes_stderr) == (None, None, None)
    assert isinstance(found, Accuracy) and found.acc in (0.0, 1.0)


def test_long_questions_are_cut_and_counted_and_long_choices_refused() -> None:
    short, long = Question("a", ("b", "c"), 0, "q:1"), Question("a" * 200, ("b", "c"), 0, "q:2")
    assert choose(model(), BYTES, [short, long], FP32)[1].cut == 1
    # 1 + 94 ids, then " b": 97 of which the last is only predicted.
    assert choose(model(), BYTES, [Question("a" * 94, ("b", "c"), 0, "q:3")], FP32)[1].cut == 0
    assert choose(model(), BYTES, [Question("a" * 95, ("b", "c"), 0, "q:3")], FP32)[1].cut == 1
    with pytest.raises(
        InputRefused, match="q:4: a choice of 101 tokens, the model has 96 positions"
    ):
        choose(model(), BYTES, [Question("a", ("b", "c" * 100), 0, "q:4")], FP32)
    with pytest.raises(InputRefused, match="no questions"):
        choose(model(), BYTES, [], FP32)


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("abcd", " abcd"),
        ("abcd ", "abcd"),
        ("abcd \n", " ab"),
        ("ab", "cd"),
        ("", "abcd"),
        (" ", "abcd"),
    ],
)
def test_a_pair_is_its_text_after_the_beginning_of_a_document(
    context: str, continuation: str
) -> None:
    tokenizer = Tokenizer.train_bpe(["abcd abcd ab cd abcd"] * 9, 300)
    assert len(tokenizer.encode("abcd")) == 1, "so that ab, cd is joined"
    before, ids = encode_pair(tokenizer, context, continuation)
    assert before[0] == tokenizer.bos_id and tokenizer.bos_id not in before[1:] and ids
    assert tokenizer.decode(before) == context.rstrip()
    assert tokenizer.decode([*before, *ids]) == context + continuation
    if context + continuation != "abcd" or not context:
        assert [*before[1:], *ids] == tokenizer.encode(context + continuation), (
            "as the text is encoded whole"
        )


@torch.no_grad()
def test_a_chat_asks_by_the_template_what_inference_would_send(tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path, "chatml")
    net = tiny_llama(torch.float64, vocab_size=tokenizer.vocab_size, initializer_range=0.3)
    asked = [Question("why <|im_end|> so", ("so", "thus what", "why"), 1, "q:1")]
    prompt = chat_ids(
        tokenizer, [{"role": "user", "content": asked[0].query}], add_generation_prompt=True
    )
    logs = []
    for choice in asked[0].choices:
        ids = tokenizer.encode(choice)
        log_TV = net.logits(net(torch.tensor([prompt + ids])))[0].log_softmax(-1)
        logs.append(sum(float(log_TV[len(prompt) + i - 1, token]) for i, token in enumerate(ids)))
    expected = int(np.argmax(logs))
    for gold in range(3):
        [answer], _ = choose(net, tokenizer, [asked[0]._replace(gold=gold)], FP32, chat=True)
        assert answer.acc == (gold == expected)
    with pytest.raises(InputRefused, match="no chat template"):
        choose(model(), BYTES, asked, FP32, chat=True)
