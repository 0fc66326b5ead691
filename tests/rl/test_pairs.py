"""Run: pytest tests/rl/test_pairs.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dialogues import said, speaking
from monograph.data.corpus import Corpus
from monograph.errors import InputRefused, UsageError
from monograph.rl.pairs import PairRows, hold_pairs, read_pairs
from monograph.text.tokenizer import Tokenizer


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def read(source: Path, **more: Any) -> Corpus:
    usual = {"tokenizer": "bytes", "sequence_length": 64, "held_out": 0.0, "bad_records": "refuse"}
    return read_pairs({"source": str(source), **usual, **more})


def documents(rows: PairRows) -> list[tuple[int, list[int], list[int]]]:
    """(number, inputs, targets that count) of each answer, read from the windows, in the order of the numbers."""
    found = []
    window = rows.window(np.arange(len(rows)))
    for row in range(len(rows)):
        for segment in range(1, int(window["segments"][row].max()) + 1):
            mine = window["segments"][row] == segment
            positions, numbers = window["positions"][row][mine], window["answers"][row][mine]
            assert positions.tolist() == list(range(mine.sum())) and (numbers > 0).sum() == 1
            targets = window["targets"][row][mine]
            assert targets[numbers > 0][0] != -100 and (targets[: numbers.argmax()] == -100).all()
            kept = [int(target) for target in targets if target != -100]
            found.append((int(numbers.max()), window["tokens"][row][mine].tolist(), kept))
    return sorted(found)


def test_texts_follow_their_prompt_as_they_are_and_each_answer_is_a_document(tmp_path: Path) -> None:
    records = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "no"} for n in range(6)]
    pairs = read(write(tmp_path / "p.jsonl", *records, {"chosen": "a", "rejected": "b"}))
    assert isinstance(pairs.train, PairRows)
    tokenizer, expected = Tokenizer.bytes(), []
    for record in [*records, {"prompt": "", "chosen": "a", "rejected": "b"}]:
        for key in ("chosen", "rejected"):
            begin, answer = [tokenizer.bos_id, *tokenizer.encode(record["prompt"])], tokenizer.encode(record[key])
            expected.append((1 + len(expected), [*begin, *answer], [*answer, tokenizer.eos_id]))
    found = documents(pairs.train)
    # The last token of a chosen answer is an input without a target, as its pair is one stretch of tokens.
    for (number, inputs, targets), (true_number, true_inputs, true_targets) in zip(found, expected, strict=True):
        assert (number, targets) == (true_number, true_targets)
        assert inputs == (true_inputs if number % 2 == 0 else [*true_inputs, tokenizer.eos_id])
    assert pairs.train.most >= 4 and pairs.train.answers == 14 and not pairs.train.chats
    assert pairs.stats.conversations == 7 and pairs.train.empty(2)["answers"].shape == (2, 64)


def test_chats_are_rendered_by_the_template_and_the_last_message_is_the_answer(tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path, "chatml")
    asked, good, bad = said("Is it?"), {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}
    whole = {"prompt": "Is it?", "chosen": [*asked, good], "rejected": [*asked, bad]}
    parted = {"prompt": asked, "chosen": [good], "rejected": [bad]}
    both = read(write(tmp_path / "p.jsonl", whole, parted), tokenizer=str(tmp_path), sequence_length=128)
    assert isinstance(both.train, PairRows) and both.train.chats
    one, two, *others = documents(both.train)
    assert [each[1:] for each in others] == [one[1:], two[1:]]
    assert tokenizer.decode(one[2]).startswith("yes") and tokenizer.decode(two[2]).startswith("no")
    assert tokenizer.decode(one[1]).count("Is it?") == 1


def test_equal_prompts_are_on_one_side_and_answers_are_numbered_over_both(tmp_path: Path) -> None:
    records = [{"prompt": f"{n % 50}", "chosen": f"a{n}", "rejected": f"b{n}"} for n in range(100)]
    pairs = read(write(tmp_path / "p.jsonl", *records), held_out=0.3)
    assert isinstance(pairs.train, PairRows) and isinstance(pairs.held_out, PairRows)
    train, held = documents(pairs.train), documents(pairs.held_out)
    assert [each[0] for each in (*train, *held)] == list(range(1, 201)) and 20 <= len(held) <= 110
    prompts = [
        {tuple(each[1][: len(each[1]) - len(each[2]) + 1]) for each in side if each[0] % 2 == 0}
        for side in (train, held)
    ]
    assert not prompts[0] & prompts[1]


GOOD = {"prompt": "x", "chosen": "a", "rejected": "b"}
FAULTS: list[tuple[Any, str]] = [
    ({"prompt": "x", "chosen": "a"}, "has no key 'rejected'; its keys are 'prompt', 'chosen'"),
    ({"prompt": "x", "chosen": "a", "rejected": 3}, "'rejected' is a number, not a text or a list of messages"),
    ({"prompt": "x", "chosen": "a", "rejected": said("y")}, "are not both texts or both lists"),
    ({"prompt": "x", "chosen": "a", "rejected": "a"}, "'chosen' and 'rejected' are equal: nothing is preferred"),
    ({"prompt": "x", "chosen": "", "rejected": "a"}, "'chosen' is empty"),
    (
        {"prompt": said("y"), "chosen": "b", "rejected": "a"},
        "'prompt' is a list of messages, but the answers are texts",
    ),
    ({"prompt": "x", "chosen": "a" * 40, "rejected": "a" * 41}, "take 86 tokens, more than data.sequence_length = 64"),
    ({"chosen": said("q", "a"), "rejected": said("r", "a b")}, "differ before their last message"),
    ({"chosen": said("q", "a"), "rejected": said("q")}, "has no message of an assistant"),
    ({"chosen": said("q", "a", "r"), "rejected": said("q", "b", "r")}, "ends with a message of user"),
    ({"chosen": [], "rejected": said("q", "a")}, "'messages' is empty"),
    ({"prompt": 3, "chosen": "a", "rejected": "b"}, "'prompt' is a number"),
    ({"prompt": "x\0", "chosen": "a", "rejected": "b"}, "has a NUL character"),
]


@pytest.mark.parametrize(("record", "part"), FAULTS, ids=[part for _, part in FAULTS])
def test_a_bad_pair_is_refused_with_its_line_or_counted(record: Any, part: str, tmp_path: Path) -> None:
    speaking(tmp_path, "chatml")
    path = write(tmp_path / "p.jsonl", GOOD, record)
    with pytest.raises(InputRefused, match="p.jsonl:2: ") as raised:
        read(path, tokenizer=str(tmp_path))
    assert part in str(raised.value) and "data.bad_records = skip" in str(raised.value)
    skipped = read(path, tokenizer=str(tmp_path), bad_records="skip")
    assert sum(skipped.skipped.values()) == 1 and skipped.train.documents == 1


def test_what_cannot_hold_pairs_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", GOOD)
    with pytest.raises(UsageError, match="prefer.loss needs a model's tokenizer"):
        read(path, tokenizer="bpe:300")
    with pytest.raises(InputRefused, match="no record is left to train on"):
        read(path, held_out=1.0)
    chats = write(tmp_path / "chats.jsonl", {"chosen": said("q", "a"), "rejected": said("q", "b")})
    with pytest.raises(InputRefused, match="chats.jsonl:1: .*chat template"):
        read(chats)


def test_records_of_pairs_are_recognised(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", GOOD)
    assert hold_pairs(str(path)) and hold_pairs([str(tmp_path), str(path)])
    for other in ({"text": "x"}, {"prompt": "x", "chosen": "a"}, ["x"]):
        assert not hold_pairs(str(write(tmp_path / "q.jsonl", other)))
    assert not hold_pairs(["stdlib", "-", str(tmp_path / "nothing.jsonl"), str(tmp_path)])
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({key: [value] for key, value in GOOD.items()}), tmp_path / "p.parquet")
    assert hold_pairs(str(tmp_path / "p.parquet")) and read(tmp_path / "p.parquet").train.documents == 1
