"""Read pairs of answers, a chosen and a rejected one, and arrange them in rows to learn preferences from.

Both answers of a pair, each after the prompt, stand in one row, so that a micro-batch never parts them. Several pairs
share a row, each answer as a document of its own (law 9).

Shape suffixes: D pairs, R rows, T positions of a row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monograph.data.conversations import Conversation, read_conversation
from monograph.data.corpus import Corpus, Stats
from monograph.data.loss_mask import Answering, Answers, Row
from monograph.data.progress import Progress
from monograph.data.records import KINDS, Fault, Unusable, checked, few, json_objects, short
from monograph.data.rows import IGNORE, Int64, Rows
from monograph.data.sources import LINES, TABLES, kind_of
from monograph.data.store import Side
from monograph.data.tables import table_columns
from monograph.errors import InputRefused
from monograph.rl.records import own_tokenizer, read_parts
from monograph.storage.reading import is_file
from monograph.text.tokenizer import Tokenizer

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"


class Pair(NamedTuple):
    """Two answers to one prompt.

    Attributes:
        text: the prompt's text, or the JSON of a chat's messages.
        chosen: the tokens of the prompt and the better answer, of which those of the answer are scored.
        rejected: the same for the other.
        bytes: UTF-8 bytes of both answers.
        chat: whether the answers are messages of chats.
    """

    text: str
    chosen: Row
    rejected: Row
    bytes: int
    chat: bool


class PairRows(Rows):
    """Rows that hold whole pairs; each row of `Rows`' own plan has pairs as its documents.

    Attributes:
        answers: answers of all rows.
        most: most answers of a row.
        chats: whether the pairs are chats.
    """

    def __init__(
        self, pairs: Sequence[Pair], name: str, tokenizer: Tokenizer, sequence_length: int, first: int
    ) -> None:
        """Arrange pairs.

        Args:
            pairs: the pairs, each of at most `sequence_length` + 1 tokens.
            name: the source's name.
            tokenizer: the tokenizer of their tokens.
            sequence_length: T.
            first: the number of the first answer; answers are numbered from 1 over all rows of a run.
        """
        self._chosen_D = np.array([len(pair.chosen.ids) for pair in pairs], dtype=np.int64)
        self.answers, self._first, self.chats = 2 * len(pairs), first, any(pair.chat for pair in pairs)
        super().__init__(_side(pairs, name), tokenizer, sequence_length, packed=True)
        self.most = 2 * int(np.diff(self._plan.offsets).max(initial=0))

    def window(self, indices_R: Int64) -> dict[str, Int64]:
        """Return the rows with these indices, as `Rows.window` does, with the two answers of a pair as two documents.

        Returns:
            also `answers`, int64 [R, T]: an answer's number at the position of its first target, 0 elsewhere.
        """
        window, pair_RT = super().window(indices_R), self.owners(indices_R)
        inside_RT = pair_RT >= 0
        chosen_RT = self._chosen_D[pair_RT] if len(self._chosen_D) else np.zeros_like(pair_RT)
        second_RT = inside_RT & (window["positions"] >= chosen_RT)
        window["positions"] = window["positions"] - np.where(second_RT, chosen_RT, 0)
        window["segments"] = np.where(inside_RT, 2 * window["segments"] - 1 + second_RT, 0)
        target_RT = window["targets"] != IGNORE
        goes_on_RT = np.zeros_like(target_RT)
        goes_on_RT[:, 1:] = target_RT[:, :-1] & (window["segments"][:, 1:] == window["segments"][:, :-1])
        number_RT = self._first + 2 * pair_RT + second_RT
        return window | {"answers": np.where(target_RT & ~goes_on_RT, number_RT, 0)}

    def empty(self, count: int) -> dict[str, Int64]:
        """Return `count` rows of padding, in the form of `window`."""
        return super().empty(count) | {"answers": np.zeros((count, self.sequence_length), dtype=np.int64)}


def _side(pairs: Sequence[Pair], name: str) -> Side:
    """Return the pairs as a side of which each pair is a document: one answer with its prompt after the other."""
    tokens, starts, spans = list[int](), [0], list[int]()
    for pair in pairs:
        for row in (pair.chosen, pair.rejected):
            spans += [len(tokens) + edge for span in row.spans for edge in span]
            tokens += row.ids
        starts.append(len(tokens))

    def array(values: Iterable[int]) -> NDArray[np.int64]:
        return np.array([*values], dtype=np.int64)

    return Side(
        tokens=array(tokens), starts=array(starts), records=array(range(1, len(pairs) + 1)),
        bytes=sum(pair.bytes for pair in pairs), files=(name,), first=array((0, len(pairs))), answers=array(spans),
    )  # fmt: skip


def hold_pairs(source: str | Sequence[str]) -> bool:
    """Return whether some file that is named here begins with a record of a pair.

    Raises:
        InputRefused: a file cannot be read.
    """
    return any(_begins(Path(name)) for name in ([source] if isinstance(source, str) else source))


def _begins(path: Path) -> bool:
    if kind_of(path) not in LINES | TABLES or not is_file(path):
        return False
    if kind_of(path) in TABLES:
        keys: Sequence[str] = table_columns(path)
    else:
        _, first = next(json_objects(path), (0, {}))
        keys = [] if isinstance(first, Fault) else list(first)
    return CHOSEN in keys and REJECTED in keys


def read_pairs(reading: Mapping[str, Any], *, progress: Progress | None = None) -> Corpus:
    """Read, tokenise and pack pairs, from JSON lines or tables.

    A record has "chosen" and "rejected". They are texts, and "prompt" is the text before both of them, or is missing.
    Or they are lists of messages, and "prompt" is a list of the messages before, or both are whole chats that differ
    in their last message alone; the tokenizer's chat template then renders them, and what it writes for the last
    message is the answer.

    Args:
        reading: `source`, `tokenizer`, `sequence_length`, `held_out` and `bad_records`, as `monograph.corpus` takes
            them. Pairs are held out by their prompts.
        progress: see `monograph.data.progress`.

    Raises:
        InputRefused: a record is bad, or a pair too long for a row; see also `read_parts`.
        UsageError: the tokenizer would have to be trained, or a source has a weight.
    """
    tokenizer, length = own_tokenizer(reading, "prefer.loss"), int(reading["sequence_length"])
    template: list[Answers] = []  # made when the first chat is read, as texts need no template

    def rendered(conversation: Conversation) -> Row:
        if not template:
            template.append(Answers(tokenizer, Answering(every=False, truncate=False, longest=length)))
        return template[0].rows(conversation)[0]

    def read(where: str, record: Mapping[str, Any]) -> Pair | Fault:
        try:
            pair = _chats(record, rendered) if isinstance(_both(record)[0], list) else _texts(record, tokenizer)
        except Unusable as unusable:
            return unusable.fault
        except InputRefused as refused:
            raise InputRefused(f"{where}: {refused}") from None
        inputs = len(pair.chosen.ids) + len(pair.rejected.ids) - 1
        if inputs > length:
            both = f"the two answers, each after its prompt, take {inputs} tokens"
            return Fault("too long", f"{both}, more than data.sequence_length = {length}: raise it")
        return pair

    parts = read_parts(reading, read, "prefer.loss needs records with 'chosen' and 'rejected'", progress)
    name = parts.sources.name
    train = PairRows(parts.train, name, tokenizer, length, 1)
    held = PairRows(parts.held_out, name, tokenizer, length, 1 + train.answers)
    decisive = [parts.sources.sha256, tokenizer.hash, length, reading["held_out"], reading["bad_records"], CHOSEN]
    stats = Stats(
        files=len(parts.sources.files), documents=len(parts.train) + len(parts.held_out),
        conversations=len(parts.train), bytes=train.bytes + held.bytes, tokens=train.tokens,
        trained_share=train.tokens / train.inputs, bytes_per_token=train.bytes / train.tokens,
        packed_share=train.filled, held_out_documents=len(parts.held_out), held_out_bytes=held.bytes,
        skipped=parts.skipped,
    )  # fmt: skip
    digest = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()
    return Corpus(name, tokenizer, train, held, digest, stats, (), Path())


def _both(record: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the two answers of a record, both texts or both lists."""
    for key in (CHOSEN, REJECTED):
        if key not in record:
            raise Unusable("no pair", f"has no key {short(key)}; its keys are {few(list(record))}")
        if not isinstance(record[key], str | list):
            raise Unusable("no pair", f"{short(key)} is {KINDS[type(record[key])]}, not a text or a list of messages")
    chosen, rejected = record[CHOSEN], record[REJECTED]
    if type(chosen) is not type(rejected):
        raise Unusable("no pair", f"{short(CHOSEN)} and {short(REJECTED)} are not both texts or both lists of messages")
    if chosen == rejected:
        raise Unusable("equal answers", f"{short(CHOSEN)} and {short(REJECTED)} are equal: nothing is preferred")
    return chosen, rejected


def _texts(record: Mapping[str, Any], tokenizer: Tokenizer) -> Pair:
    asked = record.get(PROMPT, "")
    if isinstance(asked, list):
        message = f"{short(PROMPT)} is a list of messages, but the answers are texts: give lists of messages"
        raise Unusable("no pair", message)
    prompt, *answers = (_text(value, key) for value, key in zip((asked, *_both(record)), _KEYS, strict=True))
    before = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    rows = []
    for answer in answers:
        ids = [*before, *tokenizer.encode(answer), tokenizer.eos_id]
        rows.append(Row(ids, ((len(before), len(ids)),)))
    return Pair(prompt, rows[0], rows[1], sum(len(answer.encode()) for answer in answers), False)


_KEYS = (PROMPT, CHOSEN, REJECTED)


def _text(value: Any, key: str) -> str:
    found = checked(value, key)
    if isinstance(found, Fault):
        raise Unusable(*found)
    if not found and key != PROMPT:
        raise Unusable("empty answer", f"{short(key)} is empty")
    return found


def _chats(record: Mapping[str, Any], rendered: Callable[[Conversation], Row]) -> Pair:
    prompt, tools = record.get(PROMPT), record.get("tools")
    before = prompt if isinstance(prompt, list) else []  # with a text, the answers are whole chats
    conversations = [
        read_conversation({"messages": [*before, *answer], **({"tools": tools} if tools else {})})
        for answer in _both(record)
    ]
    asked = [conversation.messages[:-1] for conversation in conversations]
    last = [conversation.messages[-1] for conversation in conversations]
    for key, message in zip((CHOSEN, REJECTED), last, strict=True):
        if message["role"] != "assistant":
            raise Unusable("no answer", f"{short(key)} ends with a message of {message['role']}, not of an assistant")
    chosen, rejected = (rendered(conversation) for conversation in conversations)
    begins = [row.ids[: row.spans[0][0]] for row in (chosen, rejected)]
    if asked[0] != asked[1] or begins[0] != begins[1]:
        raise Unusable("differing prompts", f"{short(CHOSEN)} and {short(REJECTED)} differ before their last message")
    size = sum(len(str(message.get("content") or "").encode()) for message in last)
    return Pair(json.dumps(asked[0], ensure_ascii=False), chosen, rejected, size, True)
