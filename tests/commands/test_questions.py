"""Run: pytest tests/commands/test_questions.py (multiple choice on the command line)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batches import tiny_llama
from commands.forked import CommandServer
from commands.inputs import OWN, SLOW, over
from monograph.run.models import save
from monograph.text.tokenizer import Tokenizer

QUIZ = [
    {"question": "alpha beta", "choices": ["gamma", "delta delta"], "answer": 0},
    {"question": "beta", "choices": ["alpha", "gamma", "δ"], "answer": 2},
]


@pytest.fixture
def quiz(here: Path) -> Path:
    """A folder with a model and a quiz."""
    save(tiny_llama(vocab_size=259), here / "model", Tokenizer.bytes())
    (here / "quiz.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUIZ))
    return here


def test_a_quiz_is_answered_beside_chance(server: CommandServer, quiz: Path) -> None:
    done = server.run(quiz, "evaluate", "model", "--data", "quiz.jsonl", "--json")
    line, last = done.out.splitlines()
    assert (
        done.code == 0 and done.err == "" and line.startswith("acc 0.") or line.startswith("acc 1.")
    ), done.err
    assert line.endswith("guessing 0.4167; 2 questions of quiz.jsonl") and line.count(" ± ") == 3
    found = json.loads(last)
    assert found["questions"] == 2 and found["chance"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert found["acc"] in (0, 0.5, 1) and found["bits_per_byte"] is found["tokens"] is None
    text = json.loads(
        server.run(quiz, "evaluate", "model", "--data", "texts", "--json").out.splitlines()[-1]
    )
    assert text.keys() == found.keys() and text["acc"] is None and text["bits_per_byte"] > 0


def test_what_cannot_be_answered_is_said_in_one_line(server: CommandServer, quiz: Path) -> None:
    (quiz / "bad.jsonl").write_text(
        json.dumps(QUIZ[0]) + "\n" + json.dumps(QUIZ[0] | {"answer": 9}) + "\n"
    )
    done = server.run(quiz, "evaluate", "model", "--data", "bad.jsonl")
    assert done.code == 3 and "bad.jsonl:2: 'answer' must be" in done.err.splitlines()[-1]
    done = server.run(quiz, "evaluate", "model", "--data", "quiz.jsonl", "--data", "texts")
    assert done.code == 2 and "texts does not; evaluate them one by one" in done.err
    (quiz / "long.jsonl").write_text(json.dumps(QUIZ[0] | {"question": "alpha " * 40}))
    done = server.run(quiz, "evaluate", "model", "--data", "long.jsonl")
    assert done.code == 0 and "1 question did not fit the model's positions" in done.err


def test_a_module_of_its_own_has_no_answers(server: CommandServer, quiz: Path) -> None:
    (quiz / "slow.py").write_text(SLOW)
    own = over(OWN, "train.updates=1", "model.init=slow.py:build")
    assert server.run(quiz, "train", *own, "--out", "run", figures=0).code == 0
    done = server.run(quiz, "evaluate", "run", "--data", "quiz.jsonl")
    assert done.code == 3 and "run holds a module of its own" in done.err
