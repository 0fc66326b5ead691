"""Multiple choice: which answer a model finds likeliest, as lm-evaluation-harness scores it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from monograph.data.progress import Progress
from monograph.data.questions import Question
from monograph.errors import InputRefused
from monograph.evaluation.continuations import Continuation, score
from monograph.graph.precision import Precision
from monograph.model.llama import Llama
from monograph.text.chat import chat_ids
from monograph.text.tokenizer import Tokenizer


class Accuracy(NamedTuple):
    """Shares of questions that were answered right, with standard errors.

    A standard error is sqrt(sum of (x - mean)^2 / (n - 1) / n) over the n answers x, 1 for right and 0 for wrong; None
    for one question.

    Attributes:
        acc: the answer is the choice of the largest log-probability.
        acc_stderr: its standard error.
        acc_norm: the answer is the choice of the largest log-probability per character, so that length does not decide.
        acc_norm_stderr: its standard error.
        acc_bytes: the same per byte of UTF-8, which is fairer where choices are in several scripts.
        acc_bytes_stderr: its standard error.
        chance: what guessing would reach: the mean of 1 / number of choices.
        questions: n.
        cut: questions whose beginning had no room in the model's positions and was left out.
    """

    acc: float
    acc_stderr: float | None
    acc_norm: float
    acc_norm_stderr: float | None
    acc_bytes: float
    acc_bytes_stderr: float | None
    chance: float
    questions: int
    cut: int


class Answer(NamedTuple):
    """Whether the choice that a model finds likeliest is the right one; the attributes are those of `Accuracy`."""

    acc: bool
    acc_norm: bool
    acc_bytes: bool


def choose(
    model: Llama,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    precision: Precision,
    progress: Progress | None = None,
    chat: bool = False,
) -> tuple[list[Answer], Accuracy]:
    """Answer questions by the log-probability of " " + choice after the question; of equals the first choice counts.

    Source: lm-evaluation-harness, task type `multiple_choice` with its `target_delimiter` " " and no examples; names
    and values are those of its metrics. `progress` is told how many choices are scored. With `chat` a question is a
    user's message in the model's own template, and a choice stands, without the space, where the answer begins.

    Raises:
        InputRefused: no questions, a choice that is longer than the model's positions, or a template that is missing or
            does not render.
    """
    if not questions:
        raise InputRefused("there are no questions to answer; give a file with one record a line")
    encode = _chat_pairs if chat else _text_pairs
    asked = [encode(tokenizer, each) for each in questions]
    longest = model.config.max_position_embeddings
    for each, pairs in zip(questions, asked, strict=True):
        if (most := max(len(pair.ids) for pair in pairs)) > longest:
            raise InputRefused(
                f"{each.where}: a choice of {most} tokens, the model has {longest} positions; shorten it"
            )
    scores = iter(score(model, [pair for pairs in asked for pair in pairs], precision, progress=progress))
    answers = [_answer(each, [next(scores).log_probability for _ in each.choices]) for each in questions]
    shares: list[Any] = [
        value for right in zip(*answers, strict=True) for value in (statistics.fmean(right), _error(right))
    ]
    chance = statistics.fmean(1 / len(each.choices) for each in questions)
    cut = sum(any(len(pair.context) + len(pair.ids) > longest + 1 for pair in pairs) for pairs in asked)
    return answers, Accuracy._make([*shares, chance, len(questions), cut])


def _text_pairs(tokenizer: Tokenizer, question: Question) -> list[Continuation]:
    return [encode_pair(tokenizer, question.query, f" {choice}") for choice in question.choices]


def _chat_pairs(tokenizer: Tokenizer, question: Question) -> list[Continuation]:
    message = {"role": "user", "content": question.query}
    prompt = chat_ids(tokenizer, [message], add_generation_prompt=True)
    return [Continuation(list(prompt), tokenizer.encode_between(choice, prompt)) for choice in question.choices]


def _answer(question: Question, logs: Sequence[float]) -> Answer:
    characters, sizes = [len(choice) for choice in question.choices], [len(c.encode()) for c in question.choices]
    normed = ([log / length for log, length in zip(logs, each, strict=True)] for each in (characters, sizes))
    return Answer._make(each.index(max(each)) == question.gold for each in (list(logs), *normed))


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Continuation:
    """Ids of a text's two parts, the first after the token that begins a document.

    White space at the end of the context belongs to the continuation, as in lm-evaluation-harness: a tokenizer joins it
    with the word that follows. Where it joins more than that, the parts are encoded each alone.
    """
    words = context.rstrip()
    context, continuation = words, context[len(words) :] + continuation
    before, whole = tokenizer.encode_batch([context, context + continuation])
    if whole[: len(before)] == before and len(whole) > len(before):
        ids = whole[len(before) :]
    else:
        ids = tokenizer.encode(continuation, inside=bool(before))
    return Continuation([tokenizer.bos_id, *before], ids)


def _error(answers: Sequence[bool]) -> float | None:
    return statistics.stdev(map(float, answers)) / math.sqrt(len(answers)) if len(answers) > 1 else None
