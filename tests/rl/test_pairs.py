"""Run: pytest tests/rl/test_pairs.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dialogues import said, speaking
from monograph.data.corpus import Corpus
from monograph.data.options import ReadingOptions
from monograph.data.piece_lengths import PieceLengths
from monograph.errors import InputRefused, UsageError
from monograph.rl.pairs import PairRows, loss_for, read_pairs
from monograph.text.tokenizer import Tokenizer


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def read(source: Path, labelled: bool = False, **more: Any) -> Corpus:
    usual: dict[str, Any] = {"tokenizer": "bytes", "sequence_length": 64, "held_out": 0.0}
    return read_pairs(ReadingOptions(str(source), **{**usual, **more}), labelled=labelled)


def documents(rows: PairRows) -> list[tuple[int, list[int], list[int]]]:
    """(number, inputs, targets that count) of each answer, read from the windows, in the order of
    the numbers.
    """
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


def test_texts_follow_their_prompt_as_they_are_and_each_answer_is_a_document(
    tmp_path: Path,
) -> None:
    records = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "no"} for n in range(6)]
    pairs = read(write(tmp_path / "p.jsonl", *records, {"chosen": "a", "rejected": "b"}))
    assert isinstance(pairs.train, PairRows)
    tokenizer, expected = Tokenizer.bytes(), []
    for record in [*records, {"prompt": "", "chosen": "a", "rejected": "b"}]:
        for key in ("chosen", "rejected"):
            begin, answer = (
                [tokenizer.bos_id, *tokenizer.encode(record["prompt"])],
                tokenizer.encode(record[key]),
            )
            expected.append((1 + len(expected), [*begin, *answer], [*answer, tokenizer.eos_id]))
    found = documents(pairs.train)
    # The last token of a chosen answer is an input without a target, as its pair is one stretch of
    # tokens.
    for (number, inputs, targets), (true_number, true_inputs, true_targets) in zip(
        found, expected, strict=True
    ):
        assert (number, targets) == (true_number, true_targets)
        assert inputs == (true_inputs if number % 2 == 0 else [*true_inputs, tokenizer.eos_id])
    assert (
        pairs.train.max_row_answers >= 4 and pairs.train.answers == 14 and not pairs.train.has_chats
    )
    assert pairs.stats.conversations == 7 and pairs.train.empty(2)["answers"].shape == (2, 64)


def test_each_answer_is_a_piece_of_its_own(tmp_path: Path) -> None:
    records = [
        {"prompt": "?" * n, "chosen": "yes" * (1 + n % 3), "rejected": "no"} for n in range(9)
    ]
    pairs = read(write(tmp_path / "p.jsonl", *records))
    assert isinstance(pairs.train, PairRows)
    lengths = [len(inputs) for _, inputs, _ in documents(pairs.train)]
    assert pairs.train.piece_lengths == PieceLengths.of_pieces(np.array(lengths))


def test_answers_that_repeat_their_prompt_are_told_of(tmp_path: Path) -> None:
    whole = {"prompt": "Is it? ", "chosen": "Is it? yes", "rejected": "Is it? no"}
    parted = {"prompt": "Is it? ", "chosen": "yes", "rejected": "Is it? no"}
    [note] = read(write(tmp_path / "p.jsonl", parted, whole)).notes
    assert note.startswith(
        f"answers begin with their prompt in records: 1, the first {tmp_path / 'p.jsonl'}:2;"
    )
    assert not read(write(tmp_path / "q.jsonl", parted)).notes


def test_chats_are_rendered_by_the_template_and_the_last_message_is_the_answer(
    tmp_path: Path,
) -> None:
    tokenizer = speaking(tmp_path, "chatml")
    asked, good, bad = (
        said("Is it?"),
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": "no"},
    )
    whole = {"prompt": "Is it?", "chosen": [*asked, good], "rejected": [*asked, bad]}
    parted = {"prompt": asked, "chosen": [good], "rejected": [bad]}
    both = read(
        write(tmp_path / "p.jsonl", whole, parted), tokenizer=str(tmp_path), sequence_length=128
    )
    assert isinstance(both.train, PairRows) and both.train.has_chats
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
    ({"completion": "x", "label": True}, "'label'; such a record is for prefer.loss = kto"),
    ({"prompt": "x", "chosen": "a"}, "has no key 'rejected'; its keys are 'prompt', 'chosen'"),
    (
        {"prompt": "x", "chosen": "a", "rejected": 3},
        "'rejected' is a number, not a text or a list of messages",
    ),
    ({"prompt": "x", "chosen": "a", "rejected": said("y")}, "are not both texts or both lists"),
    (
        {"prompt": "x", "chosen": "a", "rejected": "a"},
        "'chosen' and 'rejected' are equal: nothing is preferred",
    ),
    ({"prompt": "x", "chosen": "", "rejected": "a"}, "'chosen' is empty"),
    (
        {"prompt": said("y"), "chosen": "b", "rejected": "a"},
        "'prompt' is a list of messages, but the answers are texts",
    ),
    (
        {"prompt": "x", "chosen": "a" * 40, "rejected": "a" * 41},
        "take 86 tokens, more than data.sequence_length = 64",
    ),
    ({"chosen": said("q", "a"), "rejected": said("r", "a b")}, "differ before their last message"),
    ({"chosen": said("q", "a"), "rejected": said("q")}, "has no message of an assistant"),
    (
        {"chosen": said("q", "a", "r"), "rejected": said("q", "b", "r")},
        "ends with a message of user",
    ),
    ({"chosen": [], "rejected": said("q", "a")}, "'messages' is empty"),
    ({"prompt": 3, "chosen": "a", "rejected": "b"}, "'prompt' is a number"),
    ({"prompt": "x\0", "chosen": "a", "rejected": "b"}, "has a NUL character"),
]


@pytest.mark.parametrize(("record", "part"), FAULTS, ids=[part for _, part in FAULTS])
def test_a_bad_pair_is_refused_with_its_line_or_counted(
    record: Any, part: str, tmp_path: Path
) -> None:
    speaking(tmp_path, "chatml")
    path = write(tmp_path / "p.jsonl", GOOD, record)
    with pytest.raises(InputRefused, match="p.jsonl:2: ") as raised:
        read(path, tokenizer=str(tmp_path))
    assert part in str(raised.value) and "data.bad_records = skip" in str(raised.value)
    skipped = read(path, tokenizer=str(tmp_path), bad_records="skip")
    assert sum(skipped.skipped.values()) == 1 and skipped.train.documents == 1


def test_a_pair_that_the_template_or_the_tokenizer_makes_equal_is_refused_with_its_line(
    tmp_path: Path,
) -> None:
    speaking(tmp_path, "llama-3")  # it trims what is said
    chats = {"prompt": said("q"), "chosen": [{"role": "assistant", "content": "yes"}]}
    path = write(
        tmp_path / "p.jsonl",
        GOOD,
        chats | {"rejected": [{"role": "assistant", "content": " yes\n"}]},
    )
    with pytest.raises(
        InputRefused, match="p.jsonl:2: the chat template makes both answers, .*, the same text"
    ):
        read(path, tokenizer=str(tmp_path), sequence_length=256)
    assert read(path, tokenizer=str(tmp_path), sequence_length=256, bad_records="skip").skipped == {
        "equal answers": 1
    }
    content = json.loads(Tokenizer.train_bpe(["the answer"], 300).to_json())
    Tokenizer(content | {"normalizer": {"type": "NFC"}}, "x").save(tmp_path / "nfc.json")
    path = write(tmp_path / "p.jsonl", {"chosen": "\u00e9", "rejected": "e\u0301"})
    with pytest.raises(
        InputRefused, match="p.jsonl:1: the tokenizer makes both answers, .*, the same text"
    ):
        read(path, tokenizer=str(tmp_path / "nfc.json"))


def test_what_cannot_hold_pairs_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", GOOD)
    with pytest.raises(UsageError, match="prefer.loss needs a model's tokenizer"):
        read(path, tokenizer="bpe", vocab_size=300)
    with pytest.raises(InputRefused, match="no record is left to train on"):
        read(path, held_out=1.0)
    chats = write(tmp_path / "chats.jsonl", {"chosen": said("q", "a"), "rejected": said("q", "b")})
    with pytest.raises(InputRefused, match="chats.jsonl:1: .*chat template"):
        read(chats)


def test_a_labelled_answer_is_beside_the_next_one_to_another_prompt_that_has_room(
    tmp_path: Path,
) -> None:
    answers = [("x", "a"), ("x", "b"), ("y", "c" * 24), ("zz", "d"), ("x", "e" * 23)]
    records = [{"prompt": p, "completion": c, "label": c in "ad"} for p, c in answers]
    labelled = read(write(tmp_path / "p.jsonl", *records), labelled=True, sequence_length=36)
    assert isinstance(labelled.train, PairRows) and labelled.train.labels.tolist() == [
        1,
        0,
        -1,
        0,
        -1,
        0,
        1,
        0,
        -1,
        0,
    ]
    tokenizer, others = Tokenizer.bytes(), ["c" * 24, "d", "d", "e" * 23, "d"]
    for (prompt, completion), other, number in zip(answers, others, range(0, 10, 2), strict=True):
        one, two = documents(labelled.train)[number : number + 2]
        assert tokenizer.decode(one[2]) == completion and tokenizer.decode(two[2]) == other
        assert tokenizer.decode(two[1]) == prompt + other, "after its own prompt"
    alone = write(tmp_path / "p.jsonl", *records[:2])
    with pytest.raises(
        InputRefused, match="none has room beside that to 'x': give records of more prompts"
    ):
        read(alone, labelled=True)
    with pytest.raises(InputRefused, match="no answer has room beside one to another prompt"):
        read(alone, labelled=True, bad_records="skip")
    skipped = read(write(tmp_path / "p.jsonl", *records, {"prompt": "w" * 16, "completion": "v", "label": True}),
                   labelled=True, sequence_length=36, bad_records="skip")  # fmt: skip
    assert skipped.skipped == {"no other answer has room": 1} and skipped.train.documents == 5


def test_labelled_chats_are_read_and_held_out_ones_are_beside_those_that_are_learned_from(
    tmp_path: Path,
) -> None:
    tokenizer = speaking(tmp_path, "chatml")
    answers = [[{"role": "assistant", "content": word}] for word in ("yes", "no", "maybe", "never")]
    records = [
        {"prompt": said(f"{n}?"), "completion": answers[n % 4], "label": n % 3 == 0}
        for n in range(12)
    ]
    chats = read(
        write(tmp_path / "p.jsonl", *records),
        labelled=True,
        tokenizer=str(tmp_path),
        sequence_length=200,
        held_out=0.2,
    )
    assert (
        isinstance(chats.train, PairRows)
        and isinstance(chats.held_out, PairRows)
        and chats.train.has_chats
    )
    learned = {tokenizer.decode(one[2]) for one in documents(chats.train)[::2]}
    held = documents(chats.held_out)
    assert held and {tokenizer.decode(one[2]) for one in held[1::2]} <= learned


@pytest.mark.parametrize(
    ("record", "part"),
    [
        (
            {"prompt": "x", "completion": "a"},
            "expected true or false under 'label', which is missing; its keys are",
        ),
        (
            {"prompt": "x", "completion": "a", "label": 2},
            "expected true or false under 'label', which is 2",
        ),
        (
            {"prompt": "x", "completion": "a", "label": "no"},
            "expected true or false under 'label', which is 'no'",
        ),
        (
            {"prompt": "x", "completion": "a", "label": []},
            "expected true or false under 'label', which is an array",
        ),
        ({"prompt": "x", "label": True}, "has no key 'completion'"),
        ({"chosen": "x", "rejected": "y"}, "'rejected'; such a record is for prefer.loss = dpo"),
        (
            {"prompt": "x" * 40, "completion": "a" * 9, "label": True},
            "the answer and its prompt twice take 92 tokens",
        ),
    ],
)
def test_a_bad_labelled_answer_is_refused_with_its_line(
    record: Any, part: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "y", "completion": "b", "label": False}, record)
    with pytest.raises(InputRefused, match="p.jsonl:2: ") as raised:
        read(path, labelled=True)
    assert part in str(raised.value)


def test_records_of_judged_answers_are_recognised(tmp_path: Path) -> None:
    labelled = {"prompt": "x", "completion": "a", "label": True}
    assert loss_for(str(write(tmp_path / "l.jsonl", labelled))) == "kto"
    assert (
        loss_for(str(write(tmp_path / "l.jsonl", {"completion": "a", "label": None, "text": "b"})))
        is None
    )
    (tmp_path / "l.jsonl").unlink()
    path = write(tmp_path / "p.jsonl", GOOD)
    assert loss_for(str(path)) == loss_for([str(tmp_path), str(path)]) == "dpo"
    for other in ({"text": "x"}, {"prompt": "x", "chosen": "a"}, ["x"]):
        assert not loss_for(str(write(tmp_path / "q.jsonl", other)))
    assert not loss_for(["stdlib", "-"])
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pa.table({key: [value] for key, value in GOOD.items()}), tmp_path / "p.parquet"
    )
    parquet.write_table(
        pa.table({key: [value] for key, value in labelled.items()}), tmp_path / "l.parquet"
    )
    assert loss_for(str(tmp_path / "l.parquet")) == "kto"
    assert (
        loss_for(str(tmp_path / "p.parquet")) == "dpo"
        and read(tmp_path / "p.parquet").train.documents == 1
    )
