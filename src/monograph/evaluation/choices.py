"""Scores continuations by their log-probability after a context, and answers multiple choice by
these scores.

Multiple choice is scored as in lm-evaluation-harness. Questions come in files of JSON lines; a
record has a question, its choices and the number of the right choice.

Shapes: B rows, T positions, N scored positions, C of them at once, D hidden size, V vocabulary.
"""

import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from monograph.data.forms import TEXT, RecordSettings
from monograph.data.kinds import sample
from monograph.data.progress import Meter, Progress
from monograph.data.records import Fault, Unusable, checked_text, json_objects
from monograph.data.sources import LINES, suffix_of
from monograph.errors import InputRefused, UsageError
from monograph.evaluation.significance import mean
from monograph.graph.precision import Precision
from monograph.model.llama import Llama
from monograph.storage.reading import is_file
from monograph.text.chat import chat_ids
from monograph.text.tokenizer import Tokenizer

BATCH_TOKENS = 8192  # most ids of a forward pass, padding included
LOGITS = 1 << 26  # most logits in memory at once: 256 MiB in fp32


class Continuation(NamedTuple):
    """Ids to score, and the context before them, which has at least one id."""

    context: Sequence[int]
    ids: Sequence[int]


class Score(NamedTuple):
    """The score that a model gives a continuation.

    Attributes:
        log_probability: the sum over its ids of ln p(id | all ids before).
        greedy: whether each of its ids is the likeliest at its place (the lowest id among equals).
    """

    log_probability: float
    greedy: bool


@torch.no_grad()
def score(
    model: Llama,
    asked: Sequence[Continuation],
    precision: Precision,
    *,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> list[Score]:
    """Score continuations; the scores have the order of `asked`.

        log_probability = sum over i of log_softmax(logits(context + ids[:i]))[ids[i]]

    One forward pass scores a whole continuation, and rows of similar length share one. They are
    padded on the right, where causal attention never looks, so neither batch nor padding changes a
    score beyond rounding. If context and continuation together are longer than the model's
    positions, the beginning of the context is left out, as in lm-evaluation-harness.

    Args:
        model: a language model; it is put into evaluation mode.
        asked: the continuations, of at least one id each.
        precision: compute precision of the forward pass; softmax and sums are in fp32 or wider.
        batch_tokens: most ids of a forward pass, padding included, unless one row alone has more.
        progress: called with ("continuation", continuations scored, all continuations).

    Raises:
        InputRefused: a continuation is longer than the model's positions.
    """
    model.eval()
    rows = [fitted(continuation, model.config.max_position_embeddings) for continuation in asked]
    scores: dict[int, Score] = {}
    meter = Meter(progress, "continuation", len(rows))
    with precision.context(model.lm_head.weight.device.type):
        for indices in _batches([len(row) for row, _ in rows], batch_tokens):
            scores |= zip(indices, _scored(model, [rows[index] for index in indices]), strict=True)
            meter.add(len(indices))
    return [scores[index] for index in range(len(rows))]


def fitted(asked: Continuation, longest: int) -> tuple[list[int], int]:
    """Return (the last `longest` + 1 ids of context and continuation, how many of them are the
    continuation's).

    Raises:
        InputRefused: the continuation does not fit.
    """
    if len(asked.ids) > longest:
        raise InputRefused(
            f"a continuation of {len(asked.ids)} tokens has no room in the model's {longest} positions: shorten it"
        )
    return [*asked.context, *asked.ids][-longest - 1 :], len(asked.ids)


class TokenScore(NamedTuple):
    """The score of one token.

    Attributes:
        log_probability: ln p(id | all ids before).
        likeliest: (id, ln p) of the likeliest ids at its place.
    """

    log_probability: float
    likeliest: list[tuple[int, float]]


@torch.no_grad()
def score_tokens(
    model: Llama, ids: Sequence[int], precision: Precision, likeliest: int
) -> list[TokenScore]:
    """Score each of a text's ids but the first, in one forward pass; see `score`.

    Args:
        model: a language model; it is put into evaluation mode.
        ids: at least two, at most one more than the model's positions.
        precision: see `score`.
        likeliest: how many of the likeliest ids are reported at each place.
    """
    device = model.eval().lm_head.weight.device
    with precision.context(device.type):
        hidden_ND = model(torch.tensor([list(ids[:-1])], device=device))[0]
        found = list[TokenScore]()
        pieces = max(1, -(-len(hidden_ND) * model.config.vocab_size // LOGITS))
        targets = torch.tensor(list(ids[1:]), device=device).tensor_split(pieces)
        for hidden_CD, targets_C in zip(hidden_ND.tensor_split(pieces), targets, strict=True):
            logits_CV = model.logits(hidden_CD)
            values_CV = logits_CV.to(
                torch.promote_types(logits_CV.dtype, torch.float32)
            ).log_softmax(-1)
            top = values_CV.topk(likeliest)
            columns = (values_CV.gather(-1, targets_C[:, None])[:, 0], top.indices, top.values)
            for value, at, most in zip(*(column.tolist() for column in columns), strict=True):
                found.append(TokenScore(value, list(zip(at, most, strict=True))))
    return found


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield groups of indices of at most `batch_tokens` padded ids, the longest first, so that
    memory fails early.
    """
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if group and lengths[group[0]] * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _scored(model: Llama, rows: Sequence[tuple[list[int], int]]) -> list[Score]:
    """Return the scores of rows that go through the model together."""
    device = model.lm_head.weight.device
    inputs = max(len(row) for row, _ in rows) - 1
    tokens_BT = torch.tensor(
        [row[:-1] + [0] * (inputs + 1 - len(row)) for row, _ in rows], device=device
    )
    targets_N = torch.tensor(
        [token for row, count in rows for token in row[-count:]], device=device
    )
    # Position i predicts id i + 1, so the predictions of a continuation end one position before its
    # last id.
    ends = [index * inputs + len(row) - 1 for index, (row, _) in enumerate(rows)]
    places = [
        place
        for end, (_, count) in zip(ends, rows, strict=True)
        for place in range(end - count, end)
    ]
    hidden_ND = model(tokens_BT).flatten(0, 1)[torch.tensor(places, device=device)]
    chosen_N, best_N = _log_probabilities(model, hidden_ND, targets_N)
    counts = [count for _, count in rows]
    sums = [float(chosen.double().sum()) for chosen in chosen_N.cpu().split(counts)]
    hits = [bool(hit.all()) for hit in (best_N == targets_N).cpu().split(counts)]
    return [Score(total, hit) for total, hit in zip(sums, hits, strict=True)]


def _log_probabilities(model: Llama, hidden_ND: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return each target's ln p, [N] in fp32 or wider, and the likeliest id at its place, with few
    logits at a time.
    """
    chosen, best = [], []
    pieces = max(1, -(-hidden_ND.shape[0] * model.config.vocab_size // LOGITS))
    for hidden_CD, targets_C in zip(
        hidden_ND.tensor_split(pieces), targets_N.tensor_split(pieces), strict=True
    ):
        logits_CV = model.logits(hidden_CD)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        chosen.append(-cross_entropy(logits_CV, targets_C, reduction="none"))
        best.append(logits_CV.argmax(-1))
    return torch.cat(chosen), torch.cat(best)


CHOICES = "choices"
# The keys of a record that may hold the question and the number of the answer; datasets name them
# differently.
QUESTION_KEYS = ("query", "question", "prompt")
ANSWER_KEYS = ("gold", "answer")


class Question(NamedTuple):
    """One question of multiple choice.

    Attributes:
        query: the whole text before an answer.
        choices: two or more answers.
        gold: the number of the right choice, from 0.
        where: "FILE:LINE", for messages.
    """

    query: str
    choices: tuple[str, ...]
    gold: int
    where: str


def hold_questions(places: Sequence[str], text_key: str | None, chat: bool = False) -> bool:
    """Return whether the files hold questions: JSON lines of which one of the first has `choices`,
    and none a text.

    Raises:
        UsageError: some files do and some do not; their scores cannot be compared. Or none do and
            `chat` is set, which is a way to ask questions.
        InputRefused: a file cannot be read.
    """
    holding = [
        place for place in places if _holds_questions(Path(os.path.expanduser(place)), text_key)
    ]
    if holding and len(holding) < len(places):
        other = next(place for place in places if place not in holding)
        raise UsageError(
            f"--data: {holding[0]} holds questions and {other} does not; evaluate them one by one"
        )
    if chat and not holding:
        raise UsageError("--chat is how questions are asked: give a file of them with --data")
    return bool(holding)


def read_questions(places: Sequence[str]) -> list[Question]:
    """Return the questions of files, in order.

    A record has its question under one of `QUESTION_KEYS`, its choices under "choices", and the
    number of the right choice under one of `ANSWER_KEYS`; other keys are ignored.

    Raises:
        InputRefused: a record is bad; the message has its file and line. It is not skipped, as the
            score would then be that of another set of questions.
    """
    questions = []
    for place in places:
        path = Path(os.path.expanduser(place))
        for line, record in json_objects(path):
            where = f"{path}:{line}"
            try:
                questions.append(_question(record, where))
            except Unusable as unusable:
                raise InputRefused(
                    f"{where}: {unusable}; correct this record or leave it out"
                ) from None
    return questions


def _holds_questions(path: Path, text_key: str | None) -> bool:
    if not is_file(path) or suffix_of(path) not in LINES:
        return False
    first = [record for _, record in sample(path, RecordSettings(text_key))]
    return any(CHOICES in record for record in first) and not any(
        (text_key or TEXT) in record for record in first
    )


def _question(record: dict[str, Any] | Fault, where: str) -> Question:
    """Return the question of a record; raise Unusable."""
    if isinstance(record, Fault):
        raise Unusable(*record)
    query_key = _only(record, QUESTION_KEYS)
    answer_key = _only(record, ANSWER_KEYS)
    query = checked_text(record[query_key], query_key)
    choices = record.get(CHOICES)
    gold = record[answer_key]
    if not isinstance(choices, list) or len(choices) < 2:
        raise Unusable("choices", f"{CHOICES!r} must be an array of two or more strings")
    choices = [
        checked_text(choice, f"{CHOICES}[{number}]") for number, choice in enumerate(choices)
    ]
    if not all(choice.strip() for choice in choices):
        raise Unusable("choices", f"{CHOICES!r} has an empty string")
    if not isinstance(gold, float) or gold not in range(len(choices)):
        expected = f"the number of the right choice, from 0 to {len(choices) - 1}"
        shown = f"{gold:g}" if isinstance(gold, float) else ascii(gold)[:40]
        raise Unusable("answer", f"{answer_key!r} must be {expected}, not {shown}")
    return Question(query, tuple(choices), int(gold), where)


def _only(record: dict[str, Any], keys: Sequence[str]) -> str:
    """Return the only one of the keys that a record has."""
    present = [key for key in keys if key in record]
    if len(present) != 1:
        found = " and ".join(present) or "none"
        raise Unusable("keys", f"has {found} of the keys {', '.join(keys)}; expected one of them")
    return present[0]


class Accuracy(NamedTuple):
    """Shares of questions that were answered right, with standard errors.

    A standard error is sqrt(sum of (x - mean)^2 / (n - 1) / n) over the n answers x, 1 for right
    and 0 for wrong; None for one question.

    Attributes:
        acc: the share if the answer is the choice of the largest log-probability.
        acc_stderr: the standard error of `acc`.
        acc_norm: the share if it is the choice of the largest log-probability per character, so
            that length does not decide.
        acc_norm_stderr: the standard error of `acc_norm`.
        acc_bytes: the same per byte of UTF-8, which is fairer if choices are in several scripts.
        acc_bytes_stderr: the standard error of `acc_bytes`.
        chance: the accuracy of guessing: the mean of 1 / number of choices.
        questions: the number n of questions.
        cut: the number of questions whose beginning did not fit the model's positions and was left
            out.
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


class ChoiceMarks(NamedTuple):
    """Marks of whether the choice that a model finds likeliest is right; the attributes are those
    of `Accuracy`.
    """

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
) -> tuple[list[ChoiceMarks], Accuracy]:
    """Answer questions by the log-probability of " " + choice after the question; the first of
    equal choices counts.

    Source: lm-evaluation-harness, task type `multiple_choice` with its `target_delimiter` " " and
    no examples; names and values are those of its metrics. `progress` is called as in `score`. With
    `chat` a question is a user's message in the model's own template, and a choice, without the
    space, begins the answer.

    Raises:
        InputRefused: there are no questions, a choice is longer than the model's positions, or the
            template is missing or does not render.
    """
    if not questions:
        raise InputRefused("there are no questions to answer; give a file with one record a line")
    encode = _chat_pairs if chat else _text_pairs
    asked = [encode(tokenizer, question) for question in questions]
    longest = model.config.max_position_embeddings
    for question, pairs in zip(questions, asked, strict=True):
        if (most := max(len(pair.ids) for pair in pairs)) > longest:
            raise InputRefused(
                f"{question.where}: a choice of {most} tokens, the model has {longest} positions; shorten it"
            )
    scores = iter(
        score(model, [pair for pairs in asked for pair in pairs], precision, progress=progress)
    )
    answers = [
        _answer(question, [next(scores).log_probability for _ in question.choices])
        for question in questions
    ]
    shares: list[float | None] = [
        number for right in zip(*answers, strict=True) for number in mean(right)[:2]
    ]
    chance = statistics.fmean(1 / len(question.choices) for question in questions)
    cut = sum(
        any(len(pair.context) + len(pair.ids) > longest + 1 for pair in pairs) for pairs in asked
    )
    return answers, Accuracy._make([*shares, chance, len(questions), cut])


def _text_pairs(tokenizer: Tokenizer, question: Question) -> list[Continuation]:
    return [encode_pair(tokenizer, question.query, f" {choice}") for choice in question.choices]


def _chat_pairs(tokenizer: Tokenizer, question: Question) -> list[Continuation]:
    prompt = chat_ids(
        tokenizer, [{"role": "user", "content": question.query}], add_generation_prompt=True
    )
    return [
        Continuation(list(prompt), tokenizer.encode_between(choice, prompt))
        for choice in question.choices
    ]


def _answer(question: Question, logs: Sequence[float]) -> ChoiceMarks:
    characters = [len(choice) for choice in question.choices]
    sizes = [len(c.encode()) for c in question.choices]
    normed = (
        [log / length for log, length in zip(logs, scores, strict=True)]
        for scores in (characters, sizes)
    )
    return ChoiceMarks._make(
        scores.index(max(scores)) == question.gold for scores in (list(logs), *normed)
    )


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Continuation:
    """Return the ids of a context, after the token that begins a document, and those of its
    continuation.

    White space at the end of the context goes to the continuation, as in lm-evaluation-harness,
    since a tokenizer joins it with the next word. If the tokenizer joins more of the two parts than
    that, each part is encoded alone.
    """
    words = context.rstrip()
    context, continuation = words, context[len(words) :] + continuation
    before, whole = tokenizer.encode_batch([context, context + continuation])
    if whole[: len(before)] == before and len(whole) > len(before):
        ids = whole[len(before) :]
    else:
        ids = tokenizer.encode(continuation, inside=bool(before))
    return Continuation([tokenizer.bos_id, *before], ids)
