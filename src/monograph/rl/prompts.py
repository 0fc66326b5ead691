"""Read the prompts of a run from records, in two parts: one to draw answers to, and one held out to measure on."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from monograph.data.conversations import read_messages
from monograph.data.progress import Progress
from monograph.data.records import KINDS, Fault, Unusable, few, short, sound
from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.rl.records import Record, own_tokenizer, read_parts
from monograph.rl.rewards import Reward, Taught
from monograph.text.chat import chat_ids, stop_ids
from monograph.text.tokenizer import Tokenizer

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
        text, ids = json.dumps(value, ensure_ascii=False), chat_ids(tokenizer, messages, add_generation_prompt=True)
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
