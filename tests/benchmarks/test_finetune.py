# Run: pytest tests/benchmarks/test_finetune.py [-m slow]
"""The instructions that a small model is taught: right, unseen where they are asked, and one token
a word.
"""

from __future__ import annotations

import json

import pytest

from monograph.text.tokenizer import Tokenizer
from scripts import smoke


def test_instructions(script, tmp_path):
    instructions = script("instructions")
    unseen = instructions.conversations(50, seed=12)
    questions = {chat[0]["content"] for chat in unseen}
    taught = instructions.conversations(2000, seed=11, unlike=questions)
    asked = [chat[0]["content"] for chat in taught]
    assert len(questions) == 50 and len(set(asked)) == 2000 and not questions & set(asked)
    for question, answer in ((chat[0]["content"], chat[1]["content"]) for chat in taught):
        order, words = question.split(": ")
        expected = {
            "Please repeat": words,
            "Say it backwards": " ".join(reversed(words.split())),
            "Write in code": " ".join(instructions.CODE[word] for word in words.split()),
        }
        assert answer == expected[order]
    assert sorted(instructions.CODE.values()) == sorted(instructions.WORDS)
    tokenizer = Tokenizer.from_file(instructions.tokenizer_folder(tmp_path / "tokenizer"))
    assert all(
        len(tokenizer.encode(f" {word}")) == len(tokenizer.encode(word)) == 1
        for word in instructions.WORDS
    )
    path = instructions.write_records(tmp_path / "chats.jsonl", "messages", taught[:3])
    assert [json.loads(line)["messages"] for line in path.read_text().splitlines()] == taught[:3]


@pytest.mark.slow
def test_finetune(script, monkeypatch, tmp_path):
    pytest.importorskip("xllamacpp")
    found = smoke(script("finetune"), monkeypatch, tmp_path / "found.json")
    assert [case["way"] for case in found["cases"]] == ["full", "lora"]
    for case in found["cases"]:
        assert case["asked"] == 4 and 0 <= case["agrees"] <= 1 and 0 <= case["exact"] <= 1
