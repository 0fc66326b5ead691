"""Read the records of a run on judged answers, and prompts, in two parts: to learn from, and held out to measure on."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from monograph.data.messages import read_messages
from monograph.data.progress import Progress
from monograph.data.records import KINDS, Fault, Unusable, few, json_objects, short, sound
from monograph.data.sources import LINES, Sources, find
from monograph.data.tables import table_columns, table_objects
from monograph.errors import InputRefused, UsageError
from monograph.model.config import LlamaConfig
from monograph.rl.rewards import Reward, Taught
from monograph.storage.writing import temporary_folder
from monograph.text.chat import chat_ids, stop_ids
from monograph.text.messages import Unread
from monograph.text.template import Unspeakable
from monograph.text.tokenizer import Tokenizer, parse

Record = Mapping[str, Any]  # a record as it was read


class Parts(NamedTuple):
    """The items of all records.

    Attributes:
        sources: the files.
        train: the items to learn from, at least one.
        held_out: the items to measure on.
        skipped: {reason: count} of the records that were skipped.
    """

    sources: Sources
    train: list[Any]
    held_out: list[Any]
    skipped: dict[str, int]


def own_tokenizer(reading: Mapping[str, Any], key: str) -> Tokenizer:
    """Return the tokenizer that a run's model has.

    Raises:
        UsageError: it would have to be trained; the message names `key`, which needs it.
    """
    own = parse(reading["tokenizer"])
    if not isinstance(own, Tokenizer):
        raise UsageError(
            f"data.tokenizer = {reading['tokenizer']}: {key} needs a model's tokenizer: name one by model.init"
        )
    return own


def read_parts(
    reading: Mapping[str, Any], item: Callable[[str, Record], Any | Fault], needs: str, progress: Progress | None = None
) -> Parts:
    """Read records from JSON lines or tables.

    Args:
        reading: `source`, `held_out` and `bad_records`, as `monograph.corpus` takes them.
        item: makes an item of (file and line, record), or says what is wrong with it.
        needs: says what a record must have, for messages.
        progress: see `monograph.data.progress`.

    Raises:
        InputRefused: a record is bad, and the message names its file and line; or nothing is left to learn from.
        UsageError: a source has a weight.
    """
    sides: tuple[list[Any], list[Any]] = ([], [])
    skipped: Counter[str] = Counter()
    with temporary_folder() as spool:
        sources = find(reading["source"], spool, progress)
        for where, record in _records(sources, needs):
            found = record if isinstance(record, Fault) else item(where, record)
            if not isinstance(found, Fault):
                sides[_is_held(found.text, reading["held_out"])].append(found)
            elif reading["bad_records"] == "refuse":
                raise InputRefused(f"{where}: {found.detail}; or set data.bad_records = skip")
            else:
                skipped[found.reason] += 1
    if not sides[0]:
        raise InputRefused(f"{sources.name}: no record is left to train on; give more of them, or lower data.held_out")
    return Parts(sources, *sides, dict(skipped))


def _records(sources: Sources, needs: str) -> Iterator[tuple[str, dict[str, Any] | Fault]]:
    """Yield (file and line, record or its fault)."""
    for file in sources.files:
        if file.weight != 1:
            raise UsageError(f"data.source: {file.path} has a weight, which texts alone may have: leave it out")
        if not file.has_records:
            raise InputRefused(f"{file.path}: {needs}: expected a file .jsonl, .ndjson, .parquet or .arrow")
        lines = file.suffix in LINES
        records = json_objects(file.path, exact=True) if lines else table_objects(file.path, table_columns(file.path))
        yield from ((f"{file.path}:{number}", record) for number, record in records)


def _is_held(text: str, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") < share * 2**48


PROMPT = "prompt"
TEACHER_PROMPT = "teacher_prompt"  # of a record: what a teacher reads in place of the prompt


class Prompt(NamedTuple):
    """A text to answer.

    Attributes:
        text: the prompt as rewards get it: a text, or the JSON of a chat's messages.
        ids: its tokens, at least one.
        record: the whole record, from which a reward reads what is right.
        where: the record's file and line, for messages.
        teacher_ids: the tokens that a teacher reads in place of the prompt; empty: the same.
    """

    text: str
    ids: tuple[int, ...]
    record: Record
    where: str
    teacher_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run.

    Attributes:
        name: the source as it was given.
        tokenizer: the model's tokenizer.
        train: prompts to draw answers to.
        held_out: prompts to measure on; empty if none were held out.
        fingerprint: hex sha256 of everything on which the prompts and their order depend.
        chats: whether prompts are messages of a chat, not texts.
        longest: tokens of the longest prompt, a teacher's included.
        skipped: {reason: count} of the records that were skipped.
    """

    name: str
    tokenizer: Tokenizer
    train: list[Prompt]
    held_out: list[Prompt]
    fingerprint: str
    chats: bool
    longest: int
    skipped: dict[str, int]

    def ends(self, config: LlamaConfig) -> tuple[int, ...]:
        """Return the tokens that end an answer of a model."""
        return stop_ids(self.tokenizer, config.ends) if self.chats else (self.tokenizer.eos_id,)

    @property
    def vocab_size(self) -> int:
        """Return the number of the tokenizer's ids."""
        return self.tokenizer.vocab_size


def read_prompts(reading: Mapping[str, Any], *, room: int, reward: Reward, progress: Progress | None = None) -> Prompts:
    """Read and tokenise prompts, from JSON lines or tables.

    A record's prompt is a text, which gets the token that begins a document before it and is continued as it is, or a
    list of messages, which the tokenizer's chat template renders up to where the answer begins.

    Args:
        reading: `source`, `tokenizer`, `held_out`, `text_key` and `bad_records`, as `monograph.corpus` takes them.
            Prompts are held out by their texts, so that equal ones stay together. They are under "prompt", or
            `text_key`.
        room: most tokens of a prompt.
        reward: says what else a record must have.
        progress: see `monograph.data.progress`.

    Raises:
        InputRefused: a record is bad or its prompt too long; see also `read_parts`.
        UsageError: the tokenizer would have to be trained, or a source has a weight.
    """
    own = own_tokenizer(reading, "rl.reward")
    key = PROMPT if reading["text_key"] == "text" else reading["text_key"]
    refuse = reading["bad_records"] == "refuse"

    def read(where: str, record: Record) -> Prompt | Fault:
        try:
            prompt = _prompt(record, key, where, own, (room, _ROOM), isinstance(reward, Taught))
        except Unusable as unusable:
            return unusable.fault
        except InputRefused as refused:
            raise InputRefused(f"{where}: {refused}") from None
        return _rewarded(prompt, reward, refuse)

    parts = read_parts(reading, read, "rl.reward needs records with a prompt each", progress)
    decisive = [parts.sources.sha256, own.hash, key, room, reading["held_out"], reading["bad_records"]]
    fingerprint = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()
    chats, longest = _kind_and_longest([*parts.train, *parts.held_out], key)
    return Prompts(parts.sources.name, own, parts.train, parts.held_out, fingerprint, chats, longest, parts.skipped)


def prompts_of(records: Iterable[Record], tokenizer: Tokenizer, reward: Reward, room: int) -> Prompts:
    """Return records as prompts, none of them held out.

    Args:
        records: as `read_prompts` reads them from files, at least one.
        tokenizer: the model's.
        reward: says what else a record must have.
        room: most tokens of a prompt.

    Raises:
        InputRefused: there is no record, or one is bad; the message has its number, from 1.
    """
    made = list[Prompt]()
    most = room, "the model's positions less max_new_tokens: lower that"
    for number, record in enumerate(records, 1):
        where = f"record {number}"
        try:
            made.append(_prompt(record, PROMPT, where, tokenizer, most, isinstance(reward, Taught)))
        except Unusable as unusable:
            raise InputRefused(f"{where}: {unusable}") from None
        reward.require(record, where)
    if not made:
        raise InputRefused("there are no records: give some, each with a 'prompt'")
    return Prompts("records", tokenizer, made, [], "", *_kind_and_longest(made, PROMPT), {})


def _kind_and_longest(prompts: Sequence[Prompt], key: str) -> tuple[bool, int]:
    """Return whether some prompts are chats, and the tokens of the longest."""
    chats = any(not isinstance(prompt.record[key], str) for prompt in prompts)
    return chats, max(len(ids) for prompt in prompts for ids in (prompt.ids, prompt.teacher_ids))


_ROOM = "data.sequence_length less rl.max_new_tokens: raise one or lower the other"


def _prompt(record: Record, key: str, where: str, tokenizer: Tokenizer, room: tuple[int, str], taught: bool) -> Prompt:
    text, ids = _read(record, key, tokenizer, room)
    told = taught and TEACHER_PROMPT in record
    return Prompt(text, ids, record, where, _read(record, TEACHER_PROMPT, tokenizer, room)[1] if told else ())


def _read(record: Record, key: str, tokenizer: Tokenizer, room: tuple[int, str]) -> tuple[str, tuple[int, ...]]:
    """Return the text and the tokens of the prompt under a key; raise Unusable."""
    if key not in record:
        raise Unusable("no prompt", f"has no key {short(key)}; its keys are {few(list(record))}")
    value = record[key]
    if isinstance(value, list):
        messages = read_messages(value, key)
        try:
            text, ids = json.dumps(messages, ensure_ascii=False), chat_ids(tokenizer, messages, True)
        except (Unread, Unspeakable) as refused:
            raise Unusable("refused by the chat template", str(refused)) from None
    elif isinstance(value, str):
        text, ids = sound(value, key), [tokenizer.bos_id, *tokenizer.encode(value)]
    else:
        raise Unusable("no prompt", f"{short(key)} is {KINDS[type(value)]}, not a text or a list of messages")
    most, meaning = room
    if len(ids) > most:
        raise Unusable("too long", f"the {key} has {len(ids)} tokens, more than {most}, which is {meaning}")
    return text, tuple(ids)


def _rewarded(prompt: Prompt, reward: Reward, refuse: bool) -> Prompt | Fault:
    try:
        reward.require(prompt.record, prompt.where)
    except InputRefused as refused:
        if refuse or not str(refused).startswith(prompt.where):  # the reward itself cannot be used
            raise
        return Fault("no answer", "")
    return prompt
