"""Read pairs of answers, a chosen and a rejected one, and arrange them in rows to learn preferences
from.

Both answers of a pair, each after the prompt, stand in one row, so that a micro-batch never parts
them. Several pairs share a row, each answer as a document of its own (law 9). A single answer that
is labelled good or bad is paired with another record's answer to another prompt, written after its
own, which kto compares it with.

Shape suffixes: D pairs, R rows, T positions of a row.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monograph.data.completions import completed_row
from monograph.data.conversations import Conversation, chat_only, read_conversation, require_copy
from monograph.data.corpus import Corpus, stats_of
from monograph.data.forms import (
    ANYTHING,
    CHAT_KEYS,
    CHOSEN,
    COMPLETION,
    IGNORE_KEY,
    LABEL,
    MESSAGES,
    PROMPT,
    REJECTED,
    Asked,
    Kind,
    RecordKeys,
)
from monograph.data.kinds import kind_of_records
from monograph.data.loss_mask import Answering, Answers, Row
from monograph.data.messages import trained_on
from monograph.data.options import ReadingOptions
from monograph.data.progress import Progress
from monograph.data.records import KINDS, Fault, Unusable, few, short, sound
from monograph.data.rows import IGNORE, Int64, Rows
from monograph.data.sources import located
from monograph.data.spelled import Spelled, texts_of
from monograph.data.store import Side
from monograph.errors import InputRefused
from monograph.rl.prompts import Record, own_tokenizer, read_parts
from monograph.text.chat import require_read
from monograph.text.tokenizer import Tokenizer

# What a label may be: true, 1 and "true" are equal, and so are false, 0 and "false".
_LABELS = {True: 1, "true": 1, "True": 1, False: -1, "false": -1, "False": -1}


class Pair(NamedTuple):
    """Two answers to one prompt.

    Attributes:
        text: the prompt's text, or the JSON of a chat's messages.
        chosen: the tokens of the prompt and the better answer, of which those of the answer are
            scored.
        rejected: the same for the other.
        bytes: UTF-8 bytes of both answers.
        chat: whether the answers are messages of chats.
        label: 0 for pairs; for a single answer, `chosen`, with another prompt's as `rejected`, 1 if
            good and -1 if bad.
    """

    text: str
    chosen: Row
    rejected: Row
    bytes: int
    chat: bool
    label: int = 0


class PairRows(Rows):
    """Rows that hold whole pairs; each row of `Rows`' own plan has pairs as its documents.

    Attributes:
        answers: answers of all rows.
        labels: int64 [answers], each answer's label, 0 if it has none.
        most: most answers of a row.
        chats: whether the pairs are chats.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        name: str,
        tokenizer: Tokenizer,
        sequence_length: int,
        first: int,
    ):
        """Arrange pairs.

        Args:
            pairs: the pairs, each of at most `sequence_length` + 1 tokens.
            name: the source's name.
            tokenizer: the tokenizer of their tokens.
            sequence_length: T.
            first: the number of the first answer; answers are numbered from 1 over all rows of a
                run.
        """
        self._chosen_D = np.array([len(pair.chosen.ids) for pair in pairs], dtype=np.int64)
        self.answers = 2 * len(pairs)
        self._first = first
        self.chats = any(pair.chat for pair in pairs)
        self.labels = np.array(
            [label for pair in pairs for label in (pair.label, 0)], dtype=np.int64
        )
        super().__init__(_side(pairs, name), tokenizer, sequence_length, packed=True)
        self.most = 2 * int(np.diff(self._plan.offsets).max(initial=0))

    def window(self, indices_R: Int64) -> dict[str, Int64]:
        """Return the rows with these indices, as `Rows.window` does, with the two answers of a pair
        as two documents.

        Returns:
            also `answers`, int64 [R, T]: an answer's number at the position of its first target, 0
                elsewhere.
        """
        window = super().window(indices_R)
        pair_RT = self.owners(indices_R)
        inside_RT = pair_RT >= 0
        chosen_RT = self._chosen_D[pair_RT] if len(self._chosen_D) else np.zeros_like(pair_RT)
        second_RT = inside_RT & (window["positions"] >= chosen_RT)
        window["positions"] = window["positions"] - np.where(second_RT, chosen_RT, 0)
        window["segments"] = np.where(inside_RT, 2 * window["segments"] - 1 + second_RT, 0)
        target_RT = window["targets"] != IGNORE
        goes_on_RT = np.zeros_like(target_RT)
        goes_on_RT[:, 1:] = target_RT[:, :-1] & (
            window["segments"][:, 1:] == window["segments"][:, :-1]
        )
        number_RT = self._first + 2 * pair_RT + second_RT
        return window | {"answers": np.where(target_RT & ~goes_on_RT, number_RT, 0)}

    def empty(self, count: int) -> dict[str, Int64]:
        """Return `count` rows of padding, in the form of `window`."""
        return super().empty(count) | {
            "answers": np.zeros((count, self.sequence_length), dtype=np.int64)
        }


def _side(pairs: Sequence[Pair], name: str) -> Side:
    """Return the pairs as a side of which each pair is a document: one answer with its prompt after
    the other.
    """
    tokens = list[int]()
    starts = [0]
    spans = list[int]()
    for pair in pairs:
        for row in (pair.chosen, pair.rejected):
            spans += [len(tokens) + edge for span in row.spans for edge in span]
            tokens += row.ids
        starts.append(len(tokens))

    def array(values: Iterable[int]) -> NDArray[np.int64]:
        return np.array([*values], dtype=np.int64)

    return Side(
        tokens=array(tokens),
        starts=array(starts),
        records=array(range(1, len(pairs) + 1)),
        bytes=sum(pair.bytes for pair in pairs),
        files=(name,),
        first=array((0, len(pairs))),
        answers=array(spans),
    )


def loss_for(
    source: str | Sequence[str], asked: Asked = ANYTHING, skip_bad: bool = False
) -> str | None:
    """Return the usual loss for a source: dpo for pairs, kto for labelled answers, None for
    anything else.

    Raises:
        InputRefused, UsageError: as in `kind_of_records`, or nothing is there.
    """
    kind = kind_of_records(located(source), asked, skip_bad)
    return {Kind.PAIRS: "dpo", Kind.LABELLED: "kto"}.get(kind) if kind else None


def read_pairs(
    reading: ReadingOptions, *, labelled: bool = False, progress: Progress | None = None
) -> Corpus:
    """Read, tokenise and pack pairs, from JSON lines or tables.

    A record has "chosen" and "rejected". They are texts, and "prompt" is the text before both of
    them, or is missing. Or they are lists of messages, and "prompt" is a list of the messages
    before, or both are whole chats that differ in their last message alone; the tokenizer's chat
    template then renders them, and what it writes for the last message is the answer. With
    `labelled` a record has "completion", in the same forms, and "label", true or false.

    Args:
        reading: how they are read; rows are always packed. Pairs are held out by their prompts.
        labelled: whether records have single answers.
        progress: see `monograph.data.progress`.

    Raises:
        InputRefused: a record is bad, or a pair too long for a row; see also `read_parts`.
        UsageError: the tokenizer would have to be trained, or a source has a weight.
    """
    tokenizer = own_tokenizer(reading, "prefer.loss")
    length = int(reading.sequence_length)
    template: list[Answers] = []  # made when the first chat is read, as texts need no template
    keys = (COMPLETION,) if labelled else (CHOSEN, REJECTED)
    ignored = Asked.of(None, reading.ignore_keys)
    record_keys = RecordKeys(Kind.LABELLED if labelled else Kind.PAIRS, ignored, is_chosen=True)
    spelled = Spelled(tokenizer)
    repeating = list[str]()  # places of records whose answers begin with the prompt

    def rendered(conversation: Conversation) -> Row:
        if not template:
            template.append(
                Answers(tokenizer, Answering(every=False, truncate=False, longest=length))
            )
        require_read(tokenizer, conversation.template_variables)
        return template[0].rows(conversation)[0]

    def read(where: str, record: Record) -> Pair | Fault:
        try:
            chat = _are_chats(record, keys)
            answer = (
                functools.partial(_of_chat, rendered)
                if chat
                else functools.partial(_of_text, tokenizer)
            )
            pair = (_labelled if labelled else _pair)(record, answer, chat)
        except Unusable as unusable:
            return unusable.fault
        except InputRefused as refused:
            raise InputRefused(f"{where}: {refused}") from None
        if not chat:
            spelled.see(where, texts_of(record, PROMPT, *keys))
            prompt = record.get(PROMPT)
            if prompt and all(record[key].startswith(prompt) for key in keys):
                repeating.append(where)
        if (inputs := len(pair.chosen.ids) + len(pair.rejected.ids) - 1) <= length:
            return pair
        both = (
            "the answer and its prompt twice"
            if labelled
            else "the two answers, each after its prompt,"
        )
        return Fault(
            "too long",
            f"{both} take {inputs} tokens, more than data.sequence_length = {length}: raise it",
        )

    needs = " and ".join(repr(key) for key in ((COMPLETION, LABEL) if labelled else keys))
    parts = read_parts(
        reading, read, f"prefer.loss needs records with {needs}", progress, record_keys
    )
    sides = (parts.train, parts.held_out)
    if labelled:
        fixed: dict[str, Any] = {
            "length": length,
            "skipped": parts.skipped,
            "refuse": not reading.skips_bad,
        }
        sides = (
            _with_others(parts.train, parts.train, **fixed),
            _with_others(parts.held_out, parts.train, **fixed),
        )
        if not sides[0]:
            raise InputRefused(
                f"{parts.sources.name}: no answer has room beside one to another prompt: give more"
            )
    decisive = [
        parts.sources.sha256,
        tokenizer.hash,
        length,
        reading.held_out,
        reading.bad_records,
        keys[0],
    ]
    decisive += [ignored.left_out] if ignored.left_out else []
    digest = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()
    name = parts.sources.name
    train = PairRows(sides[0], name, tokenizer, length, 1)
    held = PairRows(sides[1], name, tokenizer, length, 1 + train.answers)
    stats = stats_of(len(parts.sources.files), parts.skipped, train, held)
    of_template = template[0].notes({}, "") if template else ()
    notes = (*record_keys.notes(), *of_template, *spelled.notes(), *_repeating_note(repeating))
    return Corpus(name, tokenizer, train, held, digest, stats, notes, Path())


def _repeating_note(places: Sequence[str]) -> tuple[str, ...]:
    """Return a line for the user on records whose answers begin with their prompt, or none."""
    if not places:
        return ()
    found = f"answers begin with their prompt in records: {len(places):,}, the first {places[0]}"
    return (f"{found}; the prompt is then trained on a second time: leave it out of the answers",)


def _are_chats(record: Record, keys: Sequence[str]) -> bool:
    """Return whether the answers under these keys are lists of messages, not texts; raise Unusable
    if neither.
    """
    for key in keys:
        if key not in record:
            other, loss = {CHOSEN: (LABEL, "kto"), COMPLETION: (REJECTED, "dpo")}.get(key, ("", ""))
            hint = f"; such a record is for prefer.loss = {loss}" if other in record else ""
            raise Unusable(
                "no pair", f"has no key {short(key)}; its keys are {few(list(record))}{hint}"
            )
        if not isinstance(record[key], str | list):
            raise Unusable(
                "no pair",
                f"{short(key)} is {KINDS[type(record[key])]}, not a text or a list of messages",
            )
    first, last = record[keys[0]], record[keys[-1]]
    both = " and ".join(map(short, keys))
    if type(first) is not type(last):
        raise Unusable("no pair", f"{both} are not both texts or both lists of messages")
    if len(keys) > 1 and first == last:
        raise Unusable("equal answers", f"{both} are equal: nothing is preferred")
    return isinstance(first, list)


# An answer of a record: the prompt as text, the tokens of both, and the answer's bytes.
_Answer = tuple[str, Row, int]


def _of_text(tokenizer: Tokenizer, record: Record, key: str) -> _Answer:
    asked = record.get(PROMPT, "")
    if isinstance(asked, list):
        message = f"{short(PROMPT)} is a list of messages, but the answers are texts: give lists of messages"
        raise Unusable("no pair", message)
    chats = chat_only(record)
    if chats is not None:
        raise InputRefused(
            f"{short(chats)} is for chats, and the answers are texts: remove it, or {IGNORE_KEY}"
        )
    prompt = _text(asked, PROMPT)
    answer = _text(record[key], key)
    return prompt, completed_row(tokenizer, prompt, answer), len(answer.encode())


def _text(value: object, key: str) -> str:
    found = sound(value, key)
    if not found and key != PROMPT:
        raise Unusable("empty answer", f"{short(key)} is empty")
    return found


def _of_chat(rendered: Callable[[Conversation], Row], record: Record, key: str) -> _Answer:
    prompt = record.get(PROMPT)
    before = prompt if isinstance(prompt, list) else []  # with a text, the answers are whole chats
    beside = {name: value for name, value in record.items() if name in CHAT_KEYS}
    conversation = read_conversation({MESSAGES: [*before, *record[key]], **beside})
    if isinstance(prompt, str):
        require_copy(prompt, conversation.messages)
    *asked, last = conversation.messages
    if last["role"] != "assistant":
        raise Unusable(
            "no answer", f"{short(key)} ends with a message of {last['role']}, not of an assistant"
        )
    if not trained_on(last):
        raise Unusable(
            "no answer",
            f"{short(key)} ends with a message of the weight 0: nothing of it would be learned",
        )
    size = len(last.get("content", "").encode())
    return json.dumps(asked, ensure_ascii=False), rendered(conversation), size


def _pair(record: Record, answer: Callable[[Record, str], _Answer], chat: bool) -> Pair:
    (asked, chosen, size), (other, rejected, more) = (
        answer(record, key) for key in (CHOSEN, REJECTED)
    )
    begins = [row.ids[: row.spans[0][0]] for row in (chosen, rejected)]
    if asked != other or begins[0] != begins[1]:
        raise Unusable(
            "differing prompts",
            f"{short(CHOSEN)} and {short(REJECTED)} differ before their last message",
        )
    if chosen.ids == rejected.ids:
        maker = "chat template" if chat else "tokenizer"
        both = f"{short(CHOSEN)} and {short(REJECTED)}"
        raise Unusable(
            "equal answers",
            f"the {maker} makes both answers, {both}, the same text: nothing is preferred",
        )
    return Pair(asked, chosen, rejected, size + more, chat)


def _labelled(record: Record, answer: Callable[[Record, str], _Answer], chat: bool) -> Pair:
    """Return an answer with its label, next to its prompt alone; see `_with_others`."""
    label = record.get(LABEL)
    if not isinstance(label, bool | int | float | str) or label not in _LABELS:
        shown = short(label) if isinstance(label, str) else KINDS[type(label)]
        shown = f"{label:g}" if isinstance(label, int | float) else shown
        found = (
            f"is {shown}" if LABEL in record else f"is missing; its keys are {few(list(record))}"
        )
        raise Unusable("no label", f"expected true or false under {short(LABEL)}, which {found}")
    asked, row, size = answer(record, COMPLETION)
    return Pair(asked, row, Row(row.ids[: row.spans[0][0] + 1], ()), size, chat, _LABELS[label])


def _with_others(
    pairs: Sequence[Pair],
    others: Sequence[Pair],
    length: int,
    skipped: dict[str, int],
    refuse: bool,
) -> list[Pair]:
    """Return labelled answers, each paired with one of the others, to another prompt and short
    enough.

    Answers to one prompt that follow one another get different ones, as far as there are so many.

    Raises:
        InputRefused: there is none, and `refuse` says that this is not to be counted in `skipped`.
    """
    made = []
    begins = [other.chosen.spans[0][0] for other in others]
    sizes = [len(other.chosen.ids) - begin for other, begin in zip(others, begins, strict=True)]
    after = _next_prompts(others)
    since = 0
    for number, pair in enumerate(pairs):
        since = since + 1 if number and pairs[number - 1].text == pair.text else 0
        begin = pair.chosen.spans[0][0]
        room = length + 1 - len(pair.chosen.ids) - begin
        first = after[number % len(others)] + since
        around = ((first + step) % len(others) for step in range(len(others)))
        index = next((i for i in around if sizes[i] <= room and others[i].text != pair.text), None)
        if index is None and refuse:
            raise InputRefused(
                "prefer.loss = kto compares an answer with those to other prompts, and none has room beside that to "
                f"{pair.text!r:.60}: give records of more prompts, raise data.sequence_length = {length}, or set "
                "data.bad_records = skip"
            )
        if index is None:
            skipped["no other answer has room"] = skipped.get("no other answer has room", 0) + 1
            continue
        other = others[index].chosen
        shift = begin - begins[index]
        spans = tuple((one + shift, end + shift) for one, end in other.spans)
        made.append(
            pair._replace(rejected=Row(pair.chosen.ids[:begin] + other.ids[begins[index] :], spans))
        )
    return made


def _next_prompts(pairs: Sequence[Pair]) -> list[int]:
    """Return for each pair the index of the next one with another prompt, or of the first."""
    after = [0] * len(pairs)
    for index in range(len(pairs) - 2, -1, -1):
        after[index] = index + 1 if pairs[index + 1].text != pairs[index].text else after[index + 1]
    return after
