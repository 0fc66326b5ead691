"""Read conversations from records in any of the common forms, and describe the faults of bad records."""

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from monograph.data.messages import message_of, read_messages, spoken, trained_on
from monograph.data.records import KINDS, Fault, Record, Unusable, json_objects, short
from monograph.data.sources import LINES, SourceFile
from monograph.data.tables import table_columns, table_objects
from monograph.errors import UsageError
from monograph.storage.reading import parse_json

MOST_MESSAGES = 1000  # each answer is rendered together with all messages before it
# The keys by which a conversation is recognised, in the order in which they are tried.
MESSAGES, SHARED, PROMPT, COMPLETION, TOOLS = "messages", "conversations", "prompt", "completion", "tools"
_ASKED = (MESSAGES, SHARED, PROMPT)  # if data.text_key is one of these, records are read as conversations


class Conversation(NamedTuple):
    """One record that holds a conversation.

    Attributes:
        messages: as `monograph.data.messages.message_of` returns them.
        tools: the tools that the assistant may call; None if the record names none.
        trained_from: index of the first message that may be trained on: the first after a prompt's messages, else 0.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    trained_from: int

    @property
    def answers(self) -> list[int]:
        """Return the indices of the messages that can be trained on."""
        numbers = range(self.trained_from, len(self.messages))
        return [number for number in numbers if trained_on(self.messages[number])]

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Return the conversation that `conversation_text` wrote."""
        return cls(*json.loads(text))


def hold_conversations(files: Sequence[SourceFile], key: str) -> bool:
    """Return whether these files hold conversations: each file's first record is one, and has no text under `key`.

    Raises:
        UsageError: some files hold conversations and some do not.
        InputRefused: a file cannot be read.
    """
    holding = [file for file in files if file.has_records and _begins(file, key)]
    if holding and len(holding) < len(files):
        other = next(file for file in files if file not in holding)
        raise UsageError(f"data.source: {holding[0].path} holds conversations and {other.path} does not; give one kind")
    return bool(holding)


def _begins(file: SourceFile, key: str) -> bool:
    if file.suffix in LINES:
        _, first = next(json_objects(file.path), (0, {}))
        keys = [] if isinstance(first, Fault) else list(first)
    else:
        keys = table_columns(file.path)
    return (key in _ASKED or key not in keys) and _form(keys) is not None


def conversation_records(file: SourceFile) -> Iterator[Record]:
    """Yield (record number from 1, what `conversation_text` returns) for every record."""
    keys = (*_ASKED, COMPLETION, TOOLS)
    records = json_objects(file.path, exact=True) if file.suffix in LINES else table_objects(file.path, keys)
    yield from ((number, each if isinstance(each, Fault) else conversation_text(each)) for number, each in records)


def conversation_text(record: Mapping[str, Any]) -> str | Fault:
    """Return a record's conversation as JSON, which `Conversation.of_text` reads, or the record's fault.

    Equal conversations have equal texts.
    """
    try:
        text = json.dumps(read_conversation(record), ensure_ascii=False)
        text.encode()
    except Unusable as unusable:
        return unusable.fault
    except UnicodeEncodeError:
        return Fault("lone surrogate", "has a lone surrogate")
    return text


def read_conversation(record: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a record.

    The messages are under "messages", or under "conversations" as {"from", "value"}, or under "prompt" and
    "completion": each of these is a text or a list of messages, and only the completion is trained on. "tools" is an
    array, or a text with an array in JSON.

    Raises:
        Unusable: the record is bad.
    """
    if (form := _form(record)) is None:
        raise Unusable("no conversation", f"has none of the keys {MESSAGES}, {SHARED}, {PROMPT} and {COMPLETION}")
    trained_from = 0
    if form == PROMPT:
        prompt, completion = _side(record, PROMPT, "user"), _side(record, COMPLETION, "assistant")
        messages, trained_from = prompt + completion, len(prompt)
    else:
        messages = read_messages(record[form], form)
    if len(messages) > MOST_MESSAGES:
        raise Unusable("too long", f"has {len(messages):,} messages, more than {MOST_MESSAGES:,}")
    _require_order(messages, form)
    conversation = Conversation(messages, _tools(record.get(TOOLS)), trained_from)
    if not conversation.answers:
        which = " with another weight than 0" if any(map(_speaks, messages[trained_from:])) else ""
        where = short(COMPLETION if trained_from else form)
        raise Unusable("no answer", f"{where} has no message of an assistant{which}")
    return conversation


def _form(record: Container[str]) -> str | None:
    there = [key for key in (MESSAGES, SHARED) if key in record]
    return there[0] if there else PROMPT if PROMPT in record and COMPLETION in record else None


def _side(record: Mapping[str, Any], key: str, role: str) -> list[dict[str, Any]]:
    value = record[key]
    if not isinstance(value, str):
        return read_messages(value, key)
    return [spoken(message_of({"role": role, "content": value}, key, content_key=key), key, key)]


def _tools(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        try:
            value = parse_json(value) if value else None
        except (ValueError, RecursionError):
            raise Unusable("tools", "'tools' is a text that is not JSON") from None
    if value is None or isinstance(value, list):
        return value or None
    raise Unusable("tools", f"'tools' is {KINDS[type(value)]}, not an array")


def _speaks(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "assistant")


# For each role, the roles that the message before may have; None stands for the beginning.
_BEFORE: dict[str, tuple[str | None, ...]] = {
    "system": (None,),
    "user": (None, "system", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def _require_order(messages: Sequence[Mapping[str, Any]], form: str) -> None:
    before: str | None = None
    for number, message in enumerate(messages):
        role = message["role"]
        asked = role != "tool" or before == "tool" or bool(messages[number - 1].get("tool_calls"))
        if before not in _BEFORE[role] or not asked:
            where = f"message {number} of 'prompt' and 'completion'" if form == PROMPT else f"{form}[{number}]"
            place = f"follows {before}" if before else "begins"
            remedy = "" if asked else ", which called no tool"
            raise Unusable("roles out of order", f"{where}: roles out of order, {role} {place}{remedy}")
        before = role
