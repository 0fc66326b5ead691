"""Score continuations by their log-probability after a context, and answer multiple-choice
questions by these scores.

Multiple choice is scored as in lm-evaluation-harness. Questions come in files of JSON lines. A
record has a question, its choices and the number of the right choice.

Shapes: B rows, T positions, N scored positions, C scored positions that are computed at once, D hidden
size, V vocabulary.
"""

import math
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from monograph.data.forms import TEXT, RecordSettings
from monograph.data.kinds import sample_records
from monograph.data.progress import Meter, ProgressCallback
from monograph.data.records import Fault, Unusable, checked_text, json_objects
from monograph.data.sources import LINE_SUFFIXES, suffix_of
from monograph.errors import InputRefused, UsageError
from monograph.evaluation.significance import mean
from monograph.graph.precision import Precision
from monograph.model.llama import Llama
from monograph.storage.reading import is_file
from monograph.text.chat import chat_ids
from monograph.text.tokenizer import Tokenizer

BATCH_TOKENS = 8192  # maximum of ids of a forward pass, padding included
LOGITS = 1 << 26  # maximum of logits in memory at once: 256 MiB in fp32


class TextContinuation(NamedTuple):
    """Ids to score after a context.

    Attributes:
        context: the ids of the context, at least one.
        ids: the ids to score, at least one.
    """

    context: Sequence[int]
    ids: Sequence[int]


class Score(NamedTuple):
    """The score that a model gives a continuation.

    Attributes:
        log_probability: the sum over its ids of ln p(id | all ids before).
        greedy: whether each of its ids is the likeliest at its position (of equally likely ids, the
            lowest one).
    """

    log_probability: float
    greedy: bool


@torch.no_grad()
def score(
    model: Llama,
    continuations: Sequence[TextContinuation],
    precision: Precision,
    *,
    batch_tokens: int = BATCH_TOKENS,
    progress: ProgressCallback | None = None,
) -> list[Score]:
    """Score continuations, and return the scores in the same order.

        log_probability = sum over i of log_softmax(logits(context + ids[:i]))[ids[i]]

    One forward pass scores whole continuations of similar length. Rows are padded on the right,
    where causal attention never looks, so neither batch nor padding changes a score beyond
    rounding. If context and continuation together are longer than the model's positions, the
    beginning of the context is left out, as in lm-evaluation-harness.

    Args:
        model: a language model; it is put into evaluation mode.
        continuations: the continuations.
        precision: compute precision of the forward pass; softmax and sums are in fp32 or wider.
        batch_tokens: maximum of ids of a forward pass, padding included, unless one row alone has
            more.
        progress: called with ("continuation", continuations scored, all continuations).

    Raises:
        InputRefused: a continuation is longer than the model's positions.
    """
    model.eval()
    positions = model.config.max_position_embeddings
    rows = [_row_of(continuation, positions) for continuation in continuations]
    scores: dict[int, Score] = {}
    meter = Meter(progress, "continuation", len(rows))
    with precision.context(model.lm_head.weight.device.type):
        for indices in _batch_indices([len(row.ids) for row in rows], batch_tokens):
            batch_scores = _score_rows(model, [rows[index] for index in indices])
            scores.update(zip(indices, batch_scores, strict=True))
            meter.add(len(indices))
    return [scores[index] for index in range(len(rows))]


class _Row(NamedTuple):
    """A context and a continuation in one row.

    Attributes:
        ids: the ids of both.
        scored: how many of the last ids are the continuation's.
    """

    ids: list[int]
    scored: int


def _row_of(continuation: TextContinuation, positions: int) -> _Row:
    """Return a continuation's row, shortened to the model's positions.

    Raises:
        InputRefused: the continuation alone does not fit.
    """
    if len(continuation.ids) > positions:
        raise InputRefused(
            f"a continuation of {len(continuation.ids)} tokens has no room in the model's {positions} positions: "
            "shorten it"
        )
    # The model does not read the last id, so there is room for one more.
    ids = [*continuation.context, *continuation.ids][-positions - 1 :]
    return _Row(ids, len(continuation.ids))


class TokenScore(NamedTuple):
    """The score of one token.

    Attributes:
        log_probability: ln p(id | all ids before).
        likeliest: (id, ln p) of the likeliest ids at its position.
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
        likeliest: how many of the likeliest ids are reported at each position.
    """
    device = model.eval().lm_head.weight.device
    scores = list[TokenScore]()
    with precision.context(device.type):
        hidden_ND = model(torch.tensor([list(ids[:-1])], device=device))[0]
        targets_N = torch.tensor(list(ids[1:]), device=device)
        for logits_CV, targets_C in _logits_in_pieces(model, hidden_ND, targets_N):
            log_p_CV = logits_CV.log_softmax(-1)
            target_log_p_C = log_p_CV.gather(-1, targets_C[:, None])[:, 0]
            top = log_p_CV.topk(likeliest)
            for log_p, top_ids, top_log_p in zip(
                target_log_p_C.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
            ):
                ids_and_log_p = list(zip(top_ids, top_log_p, strict=True))
                scores.append(TokenScore(log_p, ids_and_log_p))
    return scores


def _batch_indices(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of the rows of each batch.

    The longest rows come first, so that a lack of memory shows in the first batch.

    Args:
        lengths: the rows' lengths.
        batch_tokens: see `score`.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True):
        # The first row of a batch is its longest.
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _score_rows(model: Llama, rows: Sequence[_Row]) -> list[Score]:
    """Return the scores of rows that go through the model together."""
    device = model.lm_head.weight.device
    length = max(len(row.ids) for row in rows) - 1  # the model does not read the last id
    padded = [row.ids[:-1] + [0] * (length + 1 - len(row.ids)) for row in rows]
    tokens_BT = torch.tensor(padded, device=device)
    targets = [token for row in rows for token in row.ids[-row.scored :]]
    targets_N = torch.tensor(targets, device=device)
    # The positions that predict the targets, as indices into the positions of all rows, B * T.
    predicting: list[int] = []
    for index, row in enumerate(rows):
        # A position predicts the next id, so the predictions end one position before the last id.
        end = index * length + len(row.ids) - 1
        predicting += range(end - row.scored, end)
    hidden_ND = model(tokens_BT).flatten(0, 1)[torch.tensor(predicting, device=device)]
    target_log_p_N, likeliest_N = _log_probabilities(model, hidden_ND, targets_N)
    counts = [row.scored for row in rows]
    log_p_of_rows = target_log_p_N.cpu().split(counts)
    hits_of_rows = (likeliest_N == targets_N).cpu().split(counts)
    return [
        Score(log_probability=float(log_p.double().sum()), greedy=bool(hits.all()))
        for log_p, hits in zip(log_p_of_rows, hits_of_rows, strict=True)
    ]


def _log_probabilities(model: Llama, hidden_ND: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return each target's ln p, [N] in fp32 or wider, and the likeliest ids, [N]."""
    target_log_p = []
    likeliest = []
    for logits_CV, targets_C in _logits_in_pieces(model, hidden_ND, targets_N):
        target_log_p.append(-cross_entropy(logits_CV, targets_C, reduction="none"))
        likeliest.append(logits_CV.argmax(-1))
    return torch.cat(target_log_p), torch.cat(likeliest)


def _logits_in_pieces(
    model: Llama, hidden_ND: Tensor, targets_N: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits [C, V] in fp32 or wider and their targets [C], piece by piece, so that at most
    LOGITS logits are in memory.
    """
    pieces = max(1, math.ceil(hidden_ND.shape[0] * model.config.vocab_size / LOGITS))
    for hidden_CD, targets_C in zip(
        hidden_ND.tensor_split(pieces), targets_N.tensor_split(pieces), strict=True
    ):
        logits_CV = model.logits(hidden_CD)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        yield logits_CV, targets_C


CHOICES = "choices"
# The keys of a record that may hold the question and the number of the answer; datasets name them
# differently.
QUESTION_KEYS = ("query", "question", "prompt")
ANSWER_KEYS = ("gold", "answer")


class Question(NamedTuple):
    """A multiple-choice question.

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


def are_question_files(places: Sequence[str], text_key: str | None, chat: bool = False) -> bool:
    """Return whether the files hold questions.

    A file holds questions if it has JSON lines, and among its first records there is one with the key
    `choices` and none with a text.

    Args:
        places: the files.
        text_key: the key of a record's text; None: "text".
        chat: whether the questions are to be asked as in a chat.

    Raises:
        UsageError: some files hold questions and some do not, so that their scores cannot be
            compared; or no file does although `chat` is set.
        InputRefused: a file cannot be read.
    """
    with_questions = []
    others = []
    for place in places:
        if _holds_questions(Path(os.path.expanduser(place)), text_key):
            with_questions.append(place)
        else:
            others.append(place)
    if with_questions and others:
        raise UsageError(
            f"--data: {with_questions[0]} holds questions and {others[0]} does not; evaluate them one by one"
        )
    if chat and not with_questions:
        raise UsageError("--chat is how questions are asked: give a file of them with --data")
    return bool(with_questions)


def read_questions(places: Sequence[str]) -> list[Question]:
    """Return the questions of files, in order.

    A record has its question under one of `QUESTION_KEYS`, its choices under "choices", and the
    number of the right choice under one of `ANSWER_KEYS`; other keys are ignored.

    Raises:
        InputRefused: a record is bad; the message has its file and line. A bad record is not
            skipped, because the score would then be of other questions.
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
    """Return whether a file holds questions, see `are_question_files`."""
    if not is_file(path) or suffix_of(path) not in LINE_SUFFIXES:
        return False
    first_records = [record for _, record in sample_records(path, RecordSettings(text_key))]
    any_choices = any(CHOICES in record for record in first_records)
    any_text = any((text_key or TEXT) in record for record in first_records)
    return any_choices and not any_text


def _question(record: dict[str, Any] | Fault, where: str) -> Question:
    """Return the question of a record.

    Raises:
        Unusable: the record is bad.
    """
    if isinstance(record, Fault):
        raise Unusable(*record)
    query_key = _only_key(record, QUESTION_KEYS)
    answer_key = _only_key(record, ANSWER_KEYS)
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
    # `json_objects` reads all numbers as floats. A float that is in a range is a whole number.
    if not isinstance(gold, float) or gold not in range(len(choices)):
        expected = f"the number of the right choice, from 0 to {len(choices) - 1}"
        shown = f"{gold:g}" if isinstance(gold, float) else ascii(gold)[:40]
        raise Unusable("answer", f"{answer_key!r} must be {expected}, not {shown}")
    return Question(query, tuple(choices), gold=int(gold), where=where)


def _only_key(record: dict[str, Any], keys: Sequence[str]) -> str:
    """Return the key that a record has; it must have exactly one of them.

    Raises:
        Unusable: it has none or several of them.
    """
    present = [key for key in keys if key in record]
    if len(present) != 1:
        found = " and ".join(present) or "none"
        raise Unusable("keys", f"has {found} of the keys {', '.join(keys)}; expected one of them")
    return present[0]


class Accuracy(NamedTuple):
    """Shares of questions that were answered right, with standard errors.

    There are three ways to choose an answer, and each has a share of its own. With x = 1 for a right
    answer and x = 0 for a wrong one, a standard error is sqrt(sum of (x - mean)^2 / (n - 1) / n) over
    the n answers. It is None for one question.

    Attributes:
        acc: the answer is the choice of the largest log-probability.
        acc_stderr: the standard error of `acc`.
        acc_norm: the answer is the choice of the largest log-probability per character, so that length
            does not decide.
        acc_norm_stderr: the standard error of `acc_norm`.
        acc_bytes: the answer is the choice of the largest log-probability per byte of UTF-8. This is
            fairer if choices are in several scripts.
        acc_bytes_stderr: the standard error of `acc_bytes`.
        chance: the accuracy of guessing: the mean of 1 / number of choices.
        questions: the number n of questions.
        cut: the number of questions that are too long for the model's positions. Their beginning was
            left out.
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
    """Whether a model's answer to a question is right, for each way to choose the answer; see
    `Accuracy`.
    """

    acc: bool
    acc_norm: bool
    acc_bytes: bool


def choose(
    model: Llama,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    precision: Precision,
    progress: ProgressCallback | None = None,
    chat: bool = False,
) -> tuple[list[ChoiceMarks], Accuracy]:
    """Answer questions by the log-probability of " " + choice after the question.

    Of choices with equal log-probabilities the first one is the answer. Source:
    lm-evaluation-harness, task type `multiple_choice` with its `target_delimiter` " " and no
    examples. The metrics have its names and values.

    Args:
        model: a language model; it is put into evaluation mode.
        tokenizer: its tokenizer.
        questions: the questions.
        precision: see `score`.
        progress: see `score`.
        chat: whether a question is a user's message in the model's own template. Then a choice,
            without the space, begins the model's answer.

    Raises:
        InputRefused: there are no questions, a choice is longer than the model's positions, or the
            template is missing or does not render.
    """
    if not questions:
        raise InputRefused("there are no questions to answer; give a file with one record a line")
    encode = _chat_continuations if chat else _text_continuations
    encoded = [encode(tokenizer, question) for question in questions]
    positions = model.config.max_position_embeddings
    cut = 0
    for question, continuations in zip(questions, encoded, strict=True):
        longest_choice = max(len(each.ids) for each in continuations)
        if longest_choice > positions:
            raise InputRefused(
                f"{question.where}: a choice of {longest_choice} tokens, the model has {positions} positions; "
                "shorten it"
            )
        longest_row = max(len(each.context) + len(each.ids) for each in continuations)
        if longest_row > positions + 1:  # the model does not read the last id
            cut += 1
    all_continuations = [each for continuations in encoded for each in continuations]
    scores = iter(score(model, all_continuations, precision, progress=progress))
    marks = []
    for question in questions:
        log_probabilities = [next(scores).log_probability for _ in question.choices]
        marks.append(_mark(question, log_probabilities))
    acc = mean([each.acc for each in marks])
    acc_norm = mean([each.acc_norm for each in marks])
    acc_bytes = mean([each.acc_bytes for each in marks])
    accuracy = Accuracy(
        acc=acc.value,
        acc_stderr=acc.standard_error,
        acc_norm=acc_norm.value,
        acc_norm_stderr=acc_norm.standard_error,
        acc_bytes=acc_bytes.value,
        acc_bytes_stderr=acc_bytes.standard_error,
        chance=statistics.fmean(1 / len(question.choices) for question in questions),
        questions=len(questions),
        cut=cut,
    )
    return marks, accuracy


def _text_continuations(tokenizer: Tokenizer, question: Question) -> list[TextContinuation]:
    """Return each choice, after a space, as the continuation of the question."""
    return [encode_pair(tokenizer, question.query, f" {choice}") for choice in question.choices]


def _chat_continuations(tokenizer: Tokenizer, question: Question) -> list[TextContinuation]:
    """Return each choice as the beginning of an assistant's answer to the question in a chat."""
    messages = [{"role": "user", "content": question.query}]
    prompt = chat_ids(tokenizer, messages, add_generation_prompt=True)
    return [
        TextContinuation(list(prompt), tokenizer.encode_between(choice, prompt))
        for choice in question.choices
    ]


def _mark(question: Question, log_probabilities: Sequence[float]) -> ChoiceMarks:
    """Return whether the answers are right, given each choice's log-probability."""
    per_character = []
    per_byte = []
    for choice, log_probability in zip(question.choices, log_probabilities, strict=True):
        per_character.append(log_probability / len(choice))
        per_byte.append(log_probability / len(choice.encode()))

    def is_right(scores: Sequence[float]) -> bool:
        return scores.index(max(scores)) == question.gold

    return ChoiceMarks(
        acc=is_right(log_probabilities),
        acc_norm=is_right(per_character),
        acc_bytes=is_right(per_byte),
    )


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> TextContinuation:
    """Encode a context, after the token that begins a document, and its continuation.

    White space at the end of the context becomes a part of the continuation, as in
    lm-evaluation-harness, since a tokenizer joins it with the next word. If the tokenizer joins
    more of the context with the continuation, the two are encoded separately.
    """
    stripped = context.rstrip()
    white_space = context[len(stripped) :]
    continuation = white_space + continuation
    context_ids, all_ids = tokenizer.encode_batch([stripped, stripped + continuation])
    begins_with_context = all_ids[: len(context_ids)] == context_ids
    if begins_with_context and len(all_ids) > len(context_ids):
        ids = all_ids[len(context_ids) :]
    else:
        # `inside` says that other text precedes what is encoded.
        ids = tokenizer.encode(continuation, inside=bool(context_ids))
    return TextContinuation([tokenizer.bos_id, *context_ids], ids)
