"""Multiple choice in files of JSON lines: a record is a question, its choices and the number of the right one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from monograph.data.records import Fault, checked, json_objects
from monograph.data.sources import LINES, kind_of
from monograph.errors import InputRefused, UsageError
from monograph.storage.reading import is_file

CHOICES = "choices"
# The names that data sets and lm-evaluation-harness have for the same two things.
QUESTION_KEYS = ("query", "question", "prompt")
ANSWER_KEYS = ("gold", "answer")

T = TypeVar("T")


class Question(NamedTuple):
    """One question.

    Attributes:
        query: all of the text that stands before an answer.
        choices: two or more answers.
        gold: the number of the right one, from 0.
        where: "FILE:LINE", for messages.
    """

    query: str
    choices: tuple[str, ...]
    gold: int
    where: str


def hold_questions(places: Sequence[str], text_key: str) -> bool:
    """Whether these paths are files of questions: of JSON lines, the first record with `choices` and without a text.

    Raises:
        UsageError: some are and some are not; their scores have nothing in common.
        InputRefused: a file cannot be read.
    """
    quizzes = [place for place in places if _holds_questions(Path(os.path.expanduser(place)), text_key)]
    if quizzes and len(quizzes) < len(places):
        other = next(place for place in places if place not in quizzes)
        raise UsageError(f"--data: {quizzes[0]} holds questions and {other} does not; evaluate them one by one")
    return bool(quizzes)


def read_questions(places: Sequence[str]) -> list[Question]:
    """The questions of files, in order.

    A record has its question under one of `QUESTION_KEYS`, its choices under "choices", and the number of the right one
    under one of `ANSWER_KEYS`; other keys are passed over.

    Raises:
        InputRefused: a bad record, by file and line: a score over the others would be another quiz's.
    """
    return [question for place in places for question in _questions(Path(os.path.expanduser(place)))]


def _holds_questions(path: Path, text_key: str) -> bool:
    if not is_file(path) or kind_of(path) not in LINES:
        return False
    _, first = next(json_objects(path), (0, {}))
    return not isinstance(first, Fault) and CHOICES in first and text_key not in first


class _Bad(Exception):
    """What is wrong with a record; completes "FILE:LINE: "."""


def _questions(path: Path) -> Iterator[Question]:
    for line, record in json_objects(path):
        where = f"{path}:{line}"
        try:
            yield _question(_sound(record), where)
        except _Bad as fault:
            raise InputRefused(f"{where}: {fault}; correct this record or leave it out") from None


def _question(record: dict[str, Any], where: str) -> Question:
    query_key, answer_key = _only(record, QUESTION_KEYS), _only(record, ANSWER_KEYS)
    query = _sound(checked(record[query_key], query_key))
    choices, gold = record.get(CHOICES), record[answer_key]
    if not isinstance(choices, list) or len(choices) < 2:
        raise _Bad(f"{CHOICES!r} must be an array of two or more strings")
    choices = [_sound(checked(choice, f"{CHOICES}[{number}]")) for number, choice in enumerate(choices)]
    if not all(choice.strip() for choice in choices):
        raise _Bad(f"{CHOICES!r} has an empty string")
    if not isinstance(gold, float) or gold not in range(len(choices)):
        expected = f"the number of the right choice, from 0 to {len(choices) - 1}"
        shown = f"{gold:g}" if isinstance(gold, float) else ascii(gold)[:40]
        raise _Bad(f"{answer_key!r} must be {expected}, not {shown}")
    return Question(query, tuple(choices), int(gold), where)


def _only(record: dict[str, Any], keys: Sequence[str]) -> str:
    """The one of the keys that a record has."""
    there = [key for key in keys if key in record]
    if len(there) != 1:
        raise _Bad(f"has {' and '.join(there) or 'none'} of the keys {', '.join(keys)}; expected one of them")
    return there[0]


def _sound(value: T | Fault) -> T:
    if isinstance(value, Fault):
        raise _Bad(value.detail)
    return value
