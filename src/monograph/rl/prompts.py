"""Read the records of a run on rewards or preferences (`read_items`), and the prompts of a run on
rewards (`read_prompts`).

The records are split in two parts: one to train on, and one that is held out to evaluate on.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from monograph.data.conversations import (
    first_chat_only_key,
    keyed_records,
    require_question,
    with_chat_keys,
)
from monograph.data.forms import (
    CHAT_KEYS,
    DEFAULT_SETTINGS,
    FUNCTIONS,
    PROMPT,
    REMEDIES,
    TEACHER_PROMPT,
    TEXT,
    TOOLS,
    RecordKeys,
    RecordSettings,
)
from monograph.data.loss_mask import TEMPLATE_DATE
from monograph.data.messages import read_messages
from monograph.data.options import ReadingOptions
from monograph.data.progress import ProgressCallback
from monograph.data.records import (
    EMPTY_VALUES,
    JSON_TYPES,
    Fault,
    Unusable,
    checked_text,
    json_objects,
    list_names,
    quote,
)
from monograph.data.sources import LINE_SUFFIXES, Sources, find_sources
from monograph.data.spelled import SpecialTokenSpellings, text_values
from monograph.data.tables import table_columns, table_objects
from monograph.errors import InputRefused, UsageError
from monograph.model.config import LlamaConfig
from monograph.rl.environments import TOOLS_NEED_A_CHAT, Environments
from monograph.rl.rewards import Reward, TeacherReward
from monograph.storage.writing import temporary_folder
from monograph.text.chat import chat_ids, require_variables_read, stop_ids, template_of
from monograph.text.messages import UnreadKey
from monograph.text.template import TemplateRefusal
from monograph.text.tokenizer import Tokenizer, parse_setting

# A record as it was read.
JsonRecord = Mapping[str, Any]
# The number of an episode that is opened to learn its prompt, and not sampled. Sampled episodes are numbered
# from 0.
_OPENED_EPISODE = -1
# The end of a message about a key that a run on rewards does not read.
_OR_IGNORE_IT = "name it in data.ignore_keys, if only the reward reads it"


class SplitItems(NamedTuple):
    """The items of all records, in two parts.

    An item is what the caller of `read_items` makes of a record, such as a `Prompt`. It has the
    attribute `text`, whose hash usually decides whether the item is held out.

    Attributes:
        sources: the files.
        train: the items to train on, at least one.
        held_out: the items to evaluate on.
        skipped: {reason: count} of the records that were skipped.
    """

    sources: Sources
    train: list[Any]
    held_out: list[Any]
    skipped: dict[str, int]


def model_tokenizer(reading: ReadingOptions, key: str) -> Tokenizer:
    """Return the tokenizer of a run's model, which exists before the records are read.

    Args:
        reading: how records are read.
        key: the key that needs the tokenizer, for messages.

    Raises:
        UsageError: the tokenizer would have to be trained.
    """
    tokenizer = parse_setting(reading.tokenizer, reading.vocab_size)
    if not isinstance(tokenizer, Tokenizer):
        raise UsageError(
            f"data.tokenizer = {reading.tokenizer}: {key} needs a model's tokenizer: name one by model.init"
        )
    return tokenizer


def read_items(
    reading: ReadingOptions,
    make_item: Callable[[str, JsonRecord], Any | Fault],
    needs: str,
    progress: ProgressCallback | None = None,
    keys: RecordKeys | None = None,
    splits_by_record: bool = False,
) -> SplitItems:
    """Read records from JSON lines or tables, and make an item of each.

    Args:
        reading: how records are read.
        make_item: returns the item (see `SplitItems`) of (the record's file and line, the record); or
            the fault of a record that can be skipped.
        needs: what a record must have, for messages.
        progress: see `monograph.data.progress`.
        keys: the keys that a record may have; None: any.
        splits_by_record: whether a hash of the whole record decides if it is held out, instead of a hash
            of the item's text.

    Raises:
        InputRefused: a record is bad, and the message names its file and line; or no record is left
            to train on.
        UsageError: a source has a weight.
    """
    train = list[Any]()
    held_out = list[Any]()
    skipped: Counter[str] = Counter()
    with temporary_folder() as spool:
        sources = find_sources(reading.source, spool, progress, reading.weights)
        for where, record in _records(sources, needs, keys):
            result = record if isinstance(record, Fault) else make_item(where, record)
            if isinstance(result, Fault):
                if not reading.skips_bad:
                    raise InputRefused(f"{where}: {result.detail}; or set data.bad_records = skip")
                skipped[result.reason] += 1
                continue
            text = json.dumps(record, sort_keys=True) if splits_by_record else result.text
            side = held_out if _is_held_out(text, reading.held_out) else train
            side.append(result)
    if not train:
        raise InputRefused(
            f"{sources.name}: no record is left to train on; give more records, or lower data.held_out"
        )
    return SplitItems(sources, train, held_out, dict(skipped))


def _records(
    sources: Sources, needs: str, keys: RecordKeys | None
) -> Iterator[tuple[str, dict[str, Any] | Fault]]:
    """Yield (the record's file and line, the record or its fault) for every record."""
    for file in sources.files:
        if file.weight != 1:
            raise UsageError(
                f"data.source: {file.path} has a weight, which only texts may have: leave it out"
            )
        if not file.has_records:
            raise InputRefused(
                f"{file.path}: {needs}: expected a file .jsonl, .ndjson, .parquet or .arrow"
            )
        if keys is not None:
            records = keyed_records(file, keys)
        elif file.suffix in LINE_SUFFIXES:
            records = json_objects(file.path, exact=True)
        else:
            records = table_objects(file.path, table_columns(file.path))
        yield from ((f"{file.path}:{number}", record) for number, record in records)


def _is_held_out(text: str, share: float) -> bool:
    """Return whether a text is held out; about this share of all texts are.

    A hash of the text decides, so that equal texts are in the same part.
    """
    digest = hashlib.sha256(text.encode()).digest()
    # Six bytes are a whole number below 2^48.
    return int.from_bytes(digest[:6], "big") < share * 2**48


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
        text: the prompt as rewards get it: a text, or the JSON of a chat's messages.
        ids: the prompt's tokens, at least one.
        record: the whole record, which rewards read.
        where: the record's file and line, for messages.
        teacher_ids: the tokens that a teacher reads instead of `ids`; empty: it reads `ids`.
        is_chat: whether the prompt is messages of a chat.
        chat_keys: with an environment, the record's values for the chat template.
    """

    text: str
    ids: tuple[int, ...]
    record: JsonRecord
    where: str
    teacher_ids: tuple[int, ...] = ()
    is_chat: bool = False
    chat_keys: JsonRecord = MappingProxyType({})


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run.

    Attributes:
        name: the source as the user gave it.
        tokenizer: the model's tokenizer.
        train: the prompts to train on.
        held_out: the prompts to evaluate on; empty if none are held out.
        fingerprint: hex sha256 of everything on which the prompts and their order depend.
        has_chats: whether prompts are messages of chats; otherwise they are texts.
        longest: the number of tokens of the longest prompt, including the teacher's prompts.
        skipped: {reason: count} of the records that were skipped.
        notes: lines for the user.
    """

    name: str
    tokenizer: Tokenizer
    train: list[Prompt]
    held_out: list[Prompt]
    fingerprint: str
    has_chats: bool
    longest: int
    skipped: dict[str, int]
    notes: tuple[str, ...] = ()

    def end_ids(self, config: LlamaConfig) -> tuple[int, ...]:
        """Return the ids that end an answer of the model with this configuration."""
        if self.has_chats:
            return stop_ids(self.tokenizer, config.eos_token_ids)
        return (self.tokenizer.eos_id,)

    @property
    def vocab_size(self) -> int:
        """Return the number of ids of the tokenizer."""
        return self.tokenizer.vocab_size


def read_prompts(
    reading: ReadingOptions, *, room: int, reward: Reward, progress: ProgressCallback | None = None
) -> Prompts:
    """Read and tokenise prompts, from JSON lines or tables.

    A prompt is a text, or a list of messages. The tokenizer's BOS token is put before a text. The
    tokenizer's chat template renders messages up to where the answer begins.

    Args:
        reading: how records are read. Equal prompts are held out together. A record has its prompt
            under `text_key`, or under "prompt" if `text_key` is not given or is its default,
            "text".
        room: the maximum number of tokens of a prompt.
        reward: the reward, which checks that a record has what it reads.
        progress: see `monograph.data.progress`.

    Raises:
        InputRefused: a record is bad or its prompt is too long; see also `read_items`.
        UsageError: the tokenizer would have to be trained, or a source has a weight.
    """
    tokenizer = model_tokenizer(reading, "rl.reward")
    key = PROMPT if reading.text_key in (None, TEXT) else reading.text_key
    record_settings = RecordSettings.of(text_key=None, ignore_keys=reading.ignore_keys)
    prompt_settings = _PromptSettings(
        key=key,
        tokenizer=tokenizer.with_date(TEMPLATE_DATE),
        room=_Room(
            room, "data.sequence_length less rl.max_new_tokens: raise one or lower the other"
        ),
        for_teacher=isinstance(reward, TeacherReward),
        record_settings=record_settings,
        environments=reward.environments,
    )
    spellings = SpecialTokenSpellings(tokenizer)

    def read_prompt(where: str, record: JsonRecord) -> Prompt | Fault:
        """Return the prompt of a record, or the record's fault."""
        kept = _kept_keys(record, where, prompt_settings)
        try:
            prompt = _prompt(record, kept, where, prompt_settings)
        except Unusable as unusable:  # only this record is bad, and it may be skipped
            return unusable.fault
        except InputRefused as refused:  # probably all records have this problem: never skipped
            raise InputRefused(f"{where}: {refused}") from None
        spellings.count(where, text_values(record, key))
        return _check_for_reward(prompt, reward, refuse_bad=not reading.skips_bad)

    prompts = read_items(
        reading,
        read_prompt,
        "rl.reward needs records with a prompt each",
        progress,
        # The text of an item is the opening of its environment, which many records may share.
        splits_by_record=reward.environments is not None,
    )
    # Everything on which the prompts and their order depend.
    identity = [
        prompts.sources.sha256,
        tokenizer.hash,
        key,
        room,
        reading.held_out,
        reading.bad_records,
    ]
    # The keys are added only if there are some. So all other fingerprints are those of earlier versions.
    if record_settings.ignored_training_keys:
        identity.append(record_settings.ignored_training_keys)
    has_chats, longest = _kind_and_longest([*prompts.train, *prompts.held_out])
    notes = spellings.notes()
    if has_chats and template_of(tokenizer).reads_the_date:
        identity.append(TEMPLATE_DATE)
        notes = (
            *notes,
            f"the chat template reads the date; in all of these prompts it is {TEMPLATE_DATE}",
        )
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return Prompts(
        name=prompts.sources.name,
        tokenizer=tokenizer,
        train=prompts.train,
        held_out=prompts.held_out,
        fingerprint=fingerprint,
        has_chats=has_chats,
        longest=longest,
        skipped=prompts.skipped,
        notes=notes,
    )


def prompts_of(
    records: Iterable[JsonRecord], tokenizer: Tokenizer, reward: Reward, room: int
) -> Prompts:
    """Return the prompts of records; none is held out.

    Args:
        records: records as `read_prompts` reads them from files, at least one.
        tokenizer: the model's tokenizer.
        reward: the reward, which checks that a record has what it reads.
        room: the maximum number of tokens of a prompt.

    Raises:
        InputRefused: there is no record, or a record is bad; the message has its number, from 1.
    """
    prompts = list[Prompt]()
    prompt_settings = _PromptSettings(
        key=PROMPT,
        tokenizer=tokenizer.with_date(TEMPLATE_DATE),
        room=_Room(room, "the model's positions less max_new_tokens: lower that"),
        for_teacher=isinstance(reward, TeacherReward),
        record_settings=DEFAULT_SETTINGS,
        environments=reward.environments,
    )
    for number, record in enumerate(records, 1):
        where = f"record {number}"
        kept = _kept_keys(record, where, prompt_settings)
        try:
            prompts.append(_prompt(record, kept, where, prompt_settings))
        except (Unusable, InputRefused) as error:
            raise InputRefused(f"{where}: {error}") from None
        reward.require(record, where)
    if not prompts:
        raise InputRefused("there are no records: give some, each with a 'prompt'")
    has_chats, longest = _kind_and_longest(prompts)
    return Prompts(
        name="records",
        tokenizer=tokenizer,
        train=prompts,
        held_out=[],
        fingerprint="",
        has_chats=has_chats,
        longest=longest,
        skipped={},
    )


def _kind_and_longest(prompts: Sequence[Prompt]) -> tuple[bool, int]:
    """Return whether any prompt is a chat, and the number of tokens of the longest prompt."""
    has_chats = any(prompt.is_chat for prompt in prompts)
    lengths = [len(ids) for prompt in prompts for ids in (prompt.ids, prompt.teacher_ids)]
    return has_chats, max(lengths)


class _Room(NamedTuple):
    """The maximum number of tokens of a prompt.

    Attributes:
        tokens: the number.
        meaning: where the number comes from and what to do about it, for messages.
    """

    tokens: int
    meaning: str


class _PromptSettings(NamedTuple):
    """How the prompt of a record is read.

    Attributes:
        key: the key of the prompt.
        tokenizer: the tokenizer, whose template reads the date `TEMPLATE_DATE`.
        room: the maximum number of tokens.
        for_teacher: whether the prompt for a teacher is read, too.
        record_settings: the settings that name the keys to ignore.
        environments: the environments that open each episode with a prompt; None: the record has its
            prompt.
    """

    key: str
    tokenizer: Tokenizer
    room: _Room
    for_teacher: bool
    record_settings: RecordSettings
    environments: Environments | None


def _kept_keys(record: JsonRecord, where: str, settings: _PromptSettings) -> JsonRecord:
    """Return a record without the keys that are ignored.

    If there are environments, the opening of one is its prompt.

    Raises:
        InputRefused: the environment fails; the message has the record's place.
    """
    kept = settings.record_settings.drop_ignored(record)
    if settings.environments is None:
        return kept
    return {**kept, **_opened(record, where, settings.key, settings.environments)}


def _prompt(record: JsonRecord, kept: JsonRecord, where: str, settings: _PromptSettings) -> Prompt:
    """Return the prompt of a record.

    Args:
        record: the whole record, which the prompt keeps for the reward.
        kept: the result of `_kept_keys`, in which the prompt is read.
        where: the record's place.
        settings: how the prompt is read.

    Raises:
        Unusable: the record has no usable prompt.
        InputRefused: the record has a key that asks for something this run cannot do; see
            `_require_supported_keys`.
    """
    text, ids = _text_and_ids(kept, settings.key, settings)
    teacher_ids: tuple[int, ...] = ()
    if settings.for_teacher and TEACHER_PROMPT in kept:
        _, teacher_ids = _text_and_ids(kept, TEACHER_PROMPT, settings)
    is_chat = isinstance(kept[settings.key], list)
    chat_keys: JsonRecord = {}
    if settings.environments is not None:
        chat_keys = {key: kept[key] for key in CHAT_KEYS if key in kept}
    return Prompt(text, ids, record, where, teacher_ids, is_chat, chat_keys)


def _opened(record: JsonRecord, where: str, key: str, environments: Environments) -> dict[str, Any]:
    """Return the opening of an environment as the prompt of a record, and the environment's tools, by
    their keys.

    Each episode of the record is opened again when it is sampled. This first opening says how long
    openings are, and one that cannot be read is refused before training begins.

    Raises:
        InputRefused: the environment fails.
    """
    opening = environments.reset(_OPENED_EPISODE, 0, record, where).result()
    environments.end(_OPENED_EPISODE)
    if environments.tools is None:
        return {key: opening}
    if isinstance(opening, str):
        raise InputRefused(f"{where}: {TOOLS_NEED_A_CHAT}")
    return {key: opening, TOOLS: environments.tools}


def _text_and_ids(
    record: JsonRecord, key: str, settings: _PromptSettings
) -> tuple[str, tuple[int, ...]]:
    """Return (`Prompt.text`, `Prompt.ids`) of the prompt under a key.

    Raises:
        Unusable, InputRefused: as in `_prompt`.
    """
    tokenizer = settings.tokenizer
    if key not in record:
        raise Unusable(
            "no prompt", f"has no key {quote(key)}; its keys are {list_names(list(record))}"
        )
    value = record[key]
    _require_supported_keys(record, is_chat=isinstance(value, list))
    if isinstance(value, list):
        messages = read_messages(value, key)
        require_question(messages, key)
        chat = with_chat_keys(messages, record)
        require_variables_read(tokenizer, chat.template_variables)
        text = json.dumps(chat.messages, ensure_ascii=False)
        try:
            ids = chat_ids(
                tokenizer, chat.messages, add_generation_prompt=True, **chat.template_variables
            )
        except (UnreadKey, TemplateRefusal) as refused:
            raise Unusable("refused by the chat template", str(refused)) from None
    elif isinstance(value, str):
        text = checked_text(value, key)
        ids = [tokenizer.bos_id, *tokenizer.encode(value)]
    else:
        raise Unusable(
            "no prompt",
            f"{quote(key)} is {JSON_TYPES[type(value)]}, not a text or a list of messages",
        )
    room = settings.room
    if len(ids) > room.tokens:
        raise Unusable(
            "too long",
            f"the {key} has {len(ids)} tokens, more than {room.tokens}, which is {room.meaning}",
        )
    return text, tuple(ids)


def _require_supported_keys(record: JsonRecord, is_chat: bool) -> None:
    """Refuse keys that ask for something this run cannot do.

    These are "functions", and the keys of chats in a record whose prompt is a text. All other keys
    are for the reward.
    """
    if record.get(FUNCTIONS) not in EMPTY_VALUES:
        raise InputRefused(
            f"{quote(FUNCTIONS)} is not read: {REMEDIES[FUNCTIONS]}, or {_OR_IGNORE_IT}"
        )
    key = first_chat_only_key(record)
    if key is not None and not is_chat:
        raise InputRefused(
            f"{quote(key)} is for chats, and the prompt is a text: give a list of messages, or {_OR_IGNORE_IT}"
        )


def _check_for_reward(prompt: Prompt, reward: Reward, refuse_bad: bool) -> Prompt | Fault:
    """Return the prompt, or a fault if its record lacks what the reward reads.

    Raises:
        InputRefused: the reward cannot be used, or the record is bad and `refuse_bad` is set.
    """
    try:
        reward.require(prompt.record, prompt.where)
    except InputRefused as error:
        # A message that does not begin with the record's place is about the reward itself.
        if refuse_bad or not str(error).startswith(prompt.where):
            raise
        # The record is skipped, so the detail of its fault is not shown.
        return Fault("no answer", "")
    return prompt
