# Run: pytest tests/evaluation/test_questions.py
"""Files of questions: known by their keys, read by any of the names, a bad record refused by its
place.
"""

from __future__ import annotations

import gzip
import json

import pytest

from monograph.errors import InputRefused, UsageError
from monograph.evaluation.choices import Question, are_question_files, read_questions

GOOD = {"query": "2 + 2 =", "choices": ["3", "4"], "gold": 1}


def written(folder, *records, name="quiz.jsonl"):
    path = folder / name
    path.write_text(
        "".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in records)
    )
    return str(path)


@pytest.mark.parametrize("answer", ["gold", "answer"])
@pytest.mark.parametrize("query", ["query", "question", "prompt"])
def test_each_name_is_read_and_other_keys_are_passed_over(query, answer, tmp_path):
    path = written(
        tmp_path, {query: "2 + 2 =", "choices": ["3", "4"], answer: 1, "subject": "sums", "id": 7}
    )
    assert are_question_files([path], "text")
    assert read_questions([path]) == [Question("2 + 2 =", ("3", "4"), 1, f"{path}:1")]


def test_files_are_read_in_order_compressed_or_not(tmp_path):
    one, other = written(tmp_path, GOOD, "\n", GOOD), tmp_path / "more.ndjson.gz"
    other.write_bytes(gzip.compress(json.dumps(GOOD | {"gold": 0}).encode()))
    assert are_question_files([one, str(other)], "text")
    assert [(each.gold, each.where) for each in read_questions([one, str(other)])] == [
        (1, f"{one}:1"),
        (1, f"{one}:3"),
        (0, f"{other}:1"),
    ]


def test_what_is_no_file_of_questions(tmp_path):
    text = written(tmp_path, {"text": "a"}, name="text.jsonl")
    both = written(tmp_path, GOOD | {"text": "a"}, name="both.jsonl")
    plain, bad = (
        written(tmp_path, GOOD, name="quiz.txt"),
        written(tmp_path, "no json\n", name="bad.jsonl"),
    )
    for place in (
        text,
        both,
        plain,
        bad,
        str(tmp_path),
        str(tmp_path / "nothere.jsonl"),
        "stdlib",
        "-",
    ):
        assert not are_question_files([place], "text"), place
    assert not are_question_files([], "text")
    assert are_question_files([both], "content"), "what holds text is known by the run's key"


def test_questions_and_text_at_once_are_refused(tmp_path):
    quiz, text = written(tmp_path, GOOD), written(tmp_path, {"text": "a"}, name="text.jsonl")
    with pytest.raises(
        UsageError,
        match="quiz.jsonl holds questions and .*text.jsonl does not; evaluate them one by",
    ):
        are_question_files([quiz, text], "text")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ("{\n", "is not JSON"),
        ("[1]\n", "is an array, not an object"),
        (
            {"choices": ["a", "b"], "gold": 0},
            "has none of the keys query, question, prompt; expected one of them",
        ),
        (
            GOOD | {"prompt": "x"},
            "has query and prompt of the keys query, question, prompt; expected one",
        ),
        (
            {"query": "x", "choices": ["a", "b"]},
            "has none of the keys gold, answer; expected one of them",
        ),
        (GOOD | {"query": 5}, "'query' is a number, not a string"),
        (GOOD | {"choices": ["a"]}, "'choices' must be an array of two or more strings"),
        (
            GOOD | {"choices": {"text": ["a", "b"]}},
            "'choices' must be an array of two or more strings",
        ),
        (GOOD | {"choices": ["a", None]}, r"'choices\[1\]' is null, not a string"),
        (GOOD | {"choices": ["a", " "]}, "'choices' has an empty string"),
        (GOOD | {"gold": 2}, "'gold' must be the number of the right choice, from 0 to 1, not 2;"),
        (GOOD | {"gold": -1}, "from 0 to 1, not -1;"),
        (GOOD | {"gold": 0.5}, "from 0 to 1, not 0.5;"),
        (GOOD | {"gold": True}, "from 0 to 1, not True"),
        (GOOD | {"gold": "B"}, "from 0 to 1, not 'B'"),
    ],
)
def test_a_bad_record_is_refused_by_file_and_line(record, said, tmp_path):
    path = written(tmp_path, GOOD, record)
    with pytest.raises(
        InputRefused, match=f"quiz.jsonl:2: .*{said}.*correct this record or leave it out"
    ):
        read_questions([path])
