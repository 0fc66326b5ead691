"""Run: pytest tests/data/test_spelled.py (texts that spell special tokens: the letters stay, and
the user is told).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dialogues import said, speaking
from monograph.data.corpus import corpus
from monograph.data.options import ReadingOptions
from monograph.data.spelled import SpecialTokenSpellings
from monograph.rl.pairs import read_pairs
from monograph.rl.prompts import read_prompts
from monograph.rl.rewards import Reward

ASKED, ANSWER = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n", "so<|im_end|>"


def of_texts(path: Path, folder: Path) -> tuple[str, ...]:
    return corpus(
        path, tokenizer=str(folder), sequence_length=256, held_out=0, cache=folder / "cache"
    ).notes


def of_pairs(path: Path, folder: Path) -> tuple[str, ...]:
    return read_pairs(ReadingOptions(**reading(path, folder))).notes


def of_answers(path: Path, folder: Path) -> tuple[str, ...]:
    return read_pairs(ReadingOptions(**reading(path, folder)), labelled=True).notes


def of_prompts(path: Path, folder: Path) -> tuple[str, ...]:
    return read_prompts(ReadingOptions(**reading(path, folder)), room=200, reward=Reward()).notes


def reading(path: Path, folder: Path) -> dict[str, Any]:
    return {
        "source": str(path), "tokenizer": str(folder), "sequence_length": 512, "held_out": 0.0,
        "bad_records": "refuse", "text_key": "text",
    }  # fmt: skip


# What reads the records, a record of a chat that its template has rendered, and one without such
# letters.
READERS: list[tuple[Callable[[Path, Path], tuple[str, ...]], dict[str, Any], dict[str, Any]]] = [
    (of_texts, {"text": ASKED + ANSWER}, {"text": "why <|im_"}),
    (
        of_pairs,
        {"prompt": ASKED, "chosen": ANSWER, "rejected": "no"},
        {"chosen": "so", "rejected": "no"},
    ),
    (
        of_pairs,
        {"chosen": "no", "rejected": ANSWER},
        {"chosen": [*said("why", "so")], "rejected": [*said("why", "no")]},
    ),
    (
        of_answers,
        {"prompt": "why", "completion": ANSWER, "label": True},
        {"completion": "so", "label": True},
    ),
    (of_prompts, {"prompt": ASKED}, {"prompt": said(ASKED)}),
]


@pytest.mark.parametrize(("read", "spelling", "plain"), READERS)
def test_a_rendered_chat_in_a_text_is_told_of(
    read: Callable[[Path, Path], tuple[str, ...]],
    spelling: dict[str, Any],
    plain: dict[str, Any],
    tmp_path: Path,
) -> None:
    speaking(tmp_path, "chatml")
    path = tmp_path / "records.jsonl"
    # Answers with labels need one to another prompt.
    records = (
        [plain, spelling, spelling | {"prompt": "other"}]
        if "label" in spelling
        else [plain, spelling, spelling]
    )
    path.write_text("\n".join(map(json.dumps, records)))
    [note] = read(path, tmp_path)
    assert note.startswith("2 texts spell special tokens, as '<|im_") and f"in {path}:2: " in note
    assert "these are letters; give chats as messages" in note
    path.write_text(
        json.dumps(plain)
        + "\n"
        + json.dumps(plain | {"prompt": "other"} if "label" in plain else plain)
    )
    assert read(path, tmp_path) == ()


def test_a_long_text_counts_once_and_every_beginning_is_searched(tmp_path: Path) -> None:
    spellings = SpecialTokenSpellings(speaking(tmp_path, "chatml"))
    for part in ("<|im_end|>", "[/TOOL_RESULTS]", "<|nothing|> [INST] </s>"):
        spellings.count("book.txt", [part])
    assert spellings.notes()[0].startswith(
        "a text spells special tokens, as '<|im_end|>' in book.txt: "
    )
    spellings.count("other.txt", ["", "a[gMASK]b"])
    assert spellings.notes()[0].startswith("2 texts spell")
