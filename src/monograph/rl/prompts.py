"""Read the records of a run on judged answers, and prompts, in two parts: to learn from, and held
out to measure on.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from monograph.data.conversations import chat_only, keyed_records, require_question, with_chat_keys
from monograph.data.forms import (
    ANYTHING,
    FUNCTIONS,
    INSTEAD,
    PROMPT,
    TEACHER_PROMPT,
    TEXT,
    Asked,
    RecordKeys,
)
from monograph.data.loss_mask import DAY
from monograph.data.messages import read_messages
from monograph.data.options import ReadingOptions
from monograph.data.progress import Progress
from monograph.data.records import EMPTY, KINDS, Fault, Unusable, few, json_objects, short, sound
from monograph.data.sources import LINES, Sources, find
from monograph.data.spelled import Spelled, texts_of
from monograph.data.tables import table_columns, table_objects
from monograph.errors import InputRefused, UsageError
from monograph.model.config import LlamaConfig
from monograph.rl.rewards import Reward, Taught
from monograph.storage.writing import temporary_folder
from monograph.text.chat import chat_ids, require_read, stop_ids, template_of
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


def own_tokenizer(reading: ReadingOptions, key: str) -> Tokenizer:
    """Return the tokenizer that a run's model has.

    Raises:
        UsageError: it would have to be trained; the message names `key`, which needs it.
    """
    own = parse(reading.tokenizer, reading.vocab_size)
    if not isinstance(own, Tokenizer):
        raise UsageError(
            f"data.tokenizer = {reading.tokenizer}: {key} needs a model's tokenizer: name one by model.init"
        )
    return own


def read_parts(
    reading: ReadingOptions,
    item: Callable[[str, Record], Any | Fault],
    needs: str,
    progress: Progress | None = None,
    keys: RecordKeys | None = None,
) -> Parts:
    """Read records from JSON lines or tables.

    Args:
        reading: how they are read.
        item: makes an item of (file and line, record), or says what is wrong with it.
        needs: says what a record must have, for messages.
        progress: see `monograph.data.progress`.
        keys: the keys that a record may have; None: any.

    Raises:
        InputRefused: a record is bad, and the message names its file and line; or nothing is left
            to learn from.
        UsageError: a source has a weight.
    """
    sides: tuple[list[Any], list[Any]] = ([], [])
    skipped: Counter[str] = Counter()
    with temporary_folder() as spool:
        sources = find(reading.source, spool, progress, reading.weights)
        for where, record in _records(sources, needs, keys):
            found = record if isinstance(record, Fault) else item(where, record)
            if not isinstance(found, Fault):
                sides[_is_held(found.text, reading.held_out)].append(found)
            elif not reading.skips_bad:
                raise InputRefused(f"{where}: {found.detail}; or set data.bad_records = skip")
            else:
                skipped[found.reason] += 1
    if not sides[0]:
        raise InputRefused(
            f"{sources.name}: no record is left to train on; give more of them, or lower data.held_out"
        )
    return Parts(sources, *sides, dict(skipped))


def _records(
    sources: Sources, needs: str, keys: RecordKeys | None
) -> Iterator[tuple[str, dict[str, Any] | Fault]]:
    """Yield (file and line, record or its fault)."""
    for file in sources.files:
        if file.weight != 1:
            raise UsageError(
                f"data.source: {file.path} has a weight, which texts alone may have: leave it out"
            )
        if not file.has_records:
            raise InputRefused(
                f"{file.path}: {needs}: expected a file .jsonl, .ndjson, .parquet or .arrow"
            )
        if keys is not None:
            records = keyed_records(file, keys)
        elif file.suffix in LINES:
            records = json_objects(file.path, exact=True)
        else:
            records = table_objects(file.path, table_columns(file.path))
        yield from ((f"{file.path}:{number}", record) for number, record in records)


def _is_held(text: str, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") < share * 2**48


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
        notes: lines for the user on the prompts.
    """

    name: str
    tokenizer: Tokenizer
    train: list[Prompt]
    held_out: list[Prompt]
    fingerprint: str
    chats: bool
    longest: int
    skipped: dict[str, int]
    notes: tuple[str, ...] = ()

    def ends(self, config: LlamaConfig) -> tuple[int, ...]:
        """Return the tokens that end an answer of a model."""
        return stop_ids(self.tokenizer, config.ends) if self.chats else (self.tokenizer.eos_id,)

    @property
    def vocab_size(self) -> int:
        """Return the number of the tokenizer's ids."""
        return self.tokenizer.vocab_size


def read_prompts(
    reading: ReadingOptions, *, room: int, reward: Reward, progress: Progress | None = None
) -> Prompts:
    """Read and tokenise prompts, from JSON lines or tables.

    A record's prompt is a text, which gets the token that begins a document before it and is
    continued as it is, or a list of messages, which the tokenizer's chat template renders up to
    where the answer begins.

    Args:
        reading: how they are read. Prompts are held out by their texts, so that equal ones stay
            together. They are under "prompt", or `text_key`.
        room: most tokens of a prompt.
        reward: says what else a record must have.
        progress: see `monograph.data.progress`.

    Raises:
        InputRefused: a record is bad or its prompt too long; see also `read_parts`.
        UsageError: the tokenizer would have to be trained, or a source has a weight.
    """
    own = own_tokenizer(reading, "rl.reward")
    key = PROMPT if reading.text_key in (None, TEXT) else reading.text_key
    asked = Asked.of(None, reading.ignore_keys)
    refuse = not reading.skips_bad

    dated = own.on(DAY)
    spelled = Spelled(own)

    def read(where: str, record: Record) -> Prompt | Fault:
        try:
            prompt = _prompt(
                record, key, where, dated, (room, _ROOM), isinstance(reward, Taught), asked
            )
        except Unusable as unusable:
            return unusable.fault
        except InputRefused as refused:
            raise InputRefused(f"{where}: {refused}") from None
        spelled.see(where, texts_of(record, key))
        return _rewarded(prompt, reward, refuse)

    parts = read_parts(reading, read, "rl.reward needs records with a prompt each", progress)
    decisive = [parts.sources.sha256, own.hash, key, room, reading.held_out, reading.bad_records]
    decisive += [asked.left_out] if asked.left_out else []
    chats, longest = _kind_and_longest([*parts.train, *parts.held_out], key)
    notes = spelled.notes()
    if chats and template_of(own).reads_the_date:
        decisive.append(DAY)
        notes = (*notes, f"the chat template reads the date; in all of these prompts it is {DAY}")
    fingerprint = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()
    return Prompts(
        parts.sources.name,
        own,
        parts.train,
        parts.held_out,
        fingerprint,
        chats,
        longest,
        parts.skipped,
        notes,
    )


def prompts_of(
    records: Iterable[Record], tokenizer: Tokenizer, reward: Reward, room: int
) -> Prompts:
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
    dated = tokenizer.on(DAY)
    most = room, "the model's positions less max_new_tokens: lower that"
    for number, record in enumerate(records, 1):
        where = f"record {number}"
        try:
            made.append(
                _prompt(record, PROMPT, where, dated, most, isinstance(reward, Taught), ANYTHING)
            )
        except (Unusable, InputRefused) as unusable:
            raise InputRefused(f"{where}: {unusable}") from None
        reward.require(record, where)
    if not made:
        raise InputRefused("there are no records: give some, each with a 'prompt'")
    return Prompts("records", tokenizer, made, [], "", *_kind_and_longest(made, PROMPT), {})


def _kind_and_longest(prompts: Sequence[Prompt], key: str) -> tuple[bool, int]:
    """Return whether some prompts are chats, and the tokens of the longest."""
    chats = any(not isinstance(prompt.record[key], str) for prompt in prompts)
    return chats, max(len(ids) for prompt in prompts for ids in (prompt.ids, prompt.teacher_ids))


FOR_REWARD = "name it in data.ignore_keys, if only the reward reads it"
_ROOM = "data.sequence_length less rl.max_new_tokens: raise one or lower the other"


def _prompt(
    record: Record,
    key: str,
    where: str,
    tokenizer: Tokenizer,
    room: tuple[int, str],
    taught: bool,
    asked: Asked,
) -> Prompt:
    given = asked.given(record)
    text, ids = _read(given, key, tokenizer, room)
    told = taught and TEACHER_PROMPT in given
    return Prompt(
        text, ids, record, where, _read(given, TEACHER_PROMPT, tokenizer, room)[1] if told else ()
    )


def _read(
    record: Record, key: str, tokenizer: Tokenizer, room: tuple[int, str]
) -> tuple[str, tuple[int, ...]]:
    """Return the text and the tokens of the prompt under a key; raise Unusable."""
    if key not in record:
        raise Unusable("no prompt", f"has no key {short(key)}; its keys are {few(list(record))}")
    value = record[key]
    _require_obeyed(record, is_chat=isinstance(value, list))
    if isinstance(value, list):
        messages = read_messages(value, key)
        require_question(messages, key)
        chat = with_chat_keys(messages, record)
        require_read(tokenizer, chat.template_variables)
        text = json.dumps(chat.messages, ensure_ascii=False)
        try:
            ids = chat_ids(
                tokenizer, chat.messages, add_generation_prompt=True, **chat.template_variables
            )
        except (Unread, Unspeakable) as refused:
            raise Unusable("refused by the chat template", str(refused)) from None
    elif isinstance(value, str):
        text = sound(value, key)
        ids = [tokenizer.bos_id, *tokenizer.encode(value)]
    else:
        raise Unusable(
            "no prompt", f"{short(key)} is {KINDS[type(value)]}, not a text or a list of messages"
        )
    most, meaning = room
    if len(ids) > most:
        raise Unusable(
            "too long", f"the {key} has {len(ids)} tokens, more than {most}, which is {meaning}"
        )
    return text, tuple(ids)


def _require_obeyed(record: Record, is_chat: bool) -> None:
    """Refuse keys that would say something about the prompt and cannot: all others are the
    reward's.
    """
    if record.get(FUNCTIONS) not in EMPTY:
        raise InputRefused(f"{short(FUNCTIONS)} is not read: {INSTEAD[FUNCTIONS]}, or {FOR_REWARD}")
    key = chat_only(record)
    if key is not None and not is_chat:
        raise InputRefused(
            f"{short(key)} is for chats, and the prompt is a text: give a list of messages, or {FOR_REWARD}"
        )


def _rewarded(prompt: Prompt, reward: Reward, refuse: bool) -> Prompt | Fault:
    try:
        reward.require(prompt.record, prompt.where)
    except InputRefused as refused:
        if refuse or not str(refused).startswith(prompt.where):  # the reward itself cannot be used
            raise
        return Fault("no answer", "")
    return prompt
