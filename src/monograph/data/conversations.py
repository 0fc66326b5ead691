"""Read conversations from records in any of the common forms, and describe the faults of bad
records.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from monograph.data.forms import (
    CHAT_KEYS,
    COMPLETED_FORM,
    COMPLETION,
    DOCUMENTS,
    MESSAGES_FORM,
    PROMPT,
    SHARED_FORM,
    SYSTEM,
    TOOLS,
    VARIABLES,
    RecordKeys,
)
from monograph.data.messages import is_trained_on, message_of, read_messages, trainable_message
from monograph.data.records import (
    EMPTY_VALUES,
    JSON_TYPES,
    Fault,
    Record,
    Unusable,
    checked_text,
    json_objects,
    quote,
)
from monograph.data.sources import LINES, SourceFile, place_of
from monograph.data.tables import first_filled, table_columns, table_objects
from monograph.errors import InputRefused
from monograph.storage.reading import parse_json

MOST_MESSAGES = 1000  # each answer is rendered together with all messages before it
# The template gets these from elsewhere, or they name what renders it.
_NO_VARIABLES = frozenset(
    "self template tokenizer messages chats tools documents marker marks counts add_generation_prompt".split()
)


class Conversation(NamedTuple):
    """One record that holds a conversation.

    Attributes:
        messages: as `monograph.data.messages.message_of` returns them.
        tools: the tools that the assistant may call; None if the record names none.
        trained_from: index of the first message that may be trained on: the first after a prompt's
            messages, else 0.
        variables: further variables of the chat template.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    trained_from: int
    variables: Mapping[str, Any] = {}

    @property
    def answers(self) -> list[int]:
        """Return the indices of the messages that can be trained on."""
        numbers = range(self.trained_from, len(self.messages))
        return [number for number in numbers if is_trained_on(self.messages[number])]

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return everything that the chat template gets beside the messages."""
        return {**({TOOLS: self.tools} if self.tools else {}), **self.variables}

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Return the conversation that `conversation_text` wrote."""
        return cls(*json.loads(text))


def conversation_records(file: SourceFile, keys: RecordKeys) -> Iterator[Record]:
    """Yield (record number from 1, what `conversation_text` returns) for every record.

    Raises:
        InputRefused: a record has an unknown key.
    """
    for number, record in keyed_records(file, keys):
        yield number, record if isinstance(record, Fault) else conversation_text(record)


def keyed_records(
    file: SourceFile, keys: RecordKeys
) -> Iterator[tuple[int, dict[str, Any] | Fault]]:
    """Yield (record number from 1, the keys that say what is trained, or a fault) for every record
    of a file.

    Raises:
        InputRefused: a record has an unknown key, or the file cannot be read.
    """
    records = (
        json_objects(file.path, exact=True)
        if file.suffix in LINES
        else _keyed_rows(file.path, keys)
    )
    for number, record in records:
        if isinstance(record, Fault):
            yield number, record
            continue
        try:
            kept = keys.read(record)
        except Unusable as unusable:
            yield number, unusable.fault
        except InputRefused as refused:
            raise InputRefused(f"{place_of(file.path, number)}: {refused}") from None
        else:
            yield number, kept


def _keyed_rows(path: Path, keys: RecordKeys) -> Iterator[tuple[int, dict[str, Any] | Fault]]:
    """Yield the rows of a table with the columns that can say what is trained, and refuse unknown
    ones.
    """
    columns = table_columns(path)
    read = [name for name in columns if keys.is_read(name)]
    ignored = [name for name in columns if name not in read and keys.is_ignored(name)]
    for name in columns:
        row = None if name in read or name in ignored else first_filled(path, name)
        if row is not None:
            raise InputRefused(f"{place_of(path, row)}: {keys.unknown_column(name, columns)}")
    for number, record in table_objects(path, read):
        yield number, record
        keys.counts.update(ignored)


def conversation_text(record: Mapping[str, Any]) -> str | Fault:
    """Return a record's conversation as JSON, which `Conversation.of_text` reads, or the record's
    fault.

    Equal conversations have equal texts.
    """
    try:
        messages, tools, trained_from, variables = read_conversation(record)
        # Without variables it is the text by which earlier versions held conversations out.
        parts = [messages, tools, trained_from, *([variables] if variables else [])]
        text = json.dumps(parts, ensure_ascii=False)
        text.encode()
    except Unusable as unusable:
        return unusable.fault
    except UnicodeEncodeError:
        return Fault("lone surrogate", "has a lone surrogate")
    return text


def read_conversation(record: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a record.

    The messages are under "messages", or under "conversations" as {"from", "value"}, or under
    "prompt" and "completion": each of these is a text or a list of messages, and only the
    completion is trained on. `CHAT_KEYS` may stand beside them.

    Raises:
        Unusable: the record is bad.
    """
    trained_from = 0
    forms = [
        form
        for form in (MESSAGES_FORM, SHARED_FORM, COMPLETED_FORM)
        if all(key in record for key in form.needs)
    ]
    if not forms:
        raise Unusable(
            "no conversation",
            f"has none of the keys messages, conversations, {PROMPT} and {COMPLETION}",
        )
    form = next(iter(forms[0].needs))
    if form == PROMPT:
        prompt = _side(record, PROMPT, "user")
        completion = _side(record, COMPLETION, "assistant")
        messages = prompt + completion
        trained_from = len(prompt)
    else:
        messages = read_messages(record[form], form)
        require_copy(record.get(PROMPT), messages)
    if len(messages) > MOST_MESSAGES:
        raise Unusable("too long", f"has {len(messages):,} messages, more than {MOST_MESSAGES:,}")
    _require_order(
        messages, "message {} of 'prompt' and 'completion'" if form == PROMPT else form + "[{}]"
    )
    whole = with_chat_keys(messages, record)
    if trained_from:
        trained_from += len(whole.messages) - len(messages)
    conversation = whole._replace(trained_from=trained_from)
    if not conversation.answers:
        which = " with another weight than 0" if any(map(_speaks, messages[trained_from:])) else ""
        where = quote(COMPLETION if trained_from else form)
        raise Unusable("no answer", f"{where} has no message of an assistant{which}")
    return conversation


def with_chat_keys(messages: list[dict[str, Any]], record: Mapping[str, Any]) -> Conversation:
    """Return messages together with what a record's `CHAT_KEYS` say, all of them open to training.

    Raises:
        Unusable: the value of such a key is bad.
    """
    system = record.get(SYSTEM)
    if system is not None and checked_text(system, SYSTEM):
        if messages[0]["role"] == "system":
            raise Unusable(
                "two system messages",
                f"has {quote(SYSTEM)} and begins with a message of system: keep one",
            )
        messages = [{"role": "system", "content": system}, *messages]
    variables = dict(_variables(record.get(VARIABLES)))
    documents = _array(record.get(DOCUMENTS), DOCUMENTS)
    if documents:
        variables[DOCUMENTS] = documents
    return Conversation(messages, _array(record.get(TOOLS), TOOLS), 0, variables)


def require_copy(prompt: object, messages: Sequence[Mapping[str, Any]]) -> None:
    """Require that a prompt beside a whole chat is a part of it, since it is not trained on; None:
    there is none.

    Raises:
        Unusable: it is not.
    """
    if not prompt:
        return
    if isinstance(prompt, list):
        begin = read_messages(prompt, PROMPT)
        is_copy = list(messages[: len(begin)]) == begin
    else:
        said = [message.get("content") for message in messages if message["role"] == "user"]
        is_copy = prompt in said or any(
            isinstance(text, str) and text.strip() == str(prompt).strip() for text in said
        )
    if not is_copy:
        raise Unusable(
            "another prompt",
            f"{quote(PROMPT)} beside a whole chat, of which no message is a copy of it, would not be trained on: "
            "remove it, or name it in data.ignore_keys",
        )


def first_chat_only_key(record: Mapping[str, Any]) -> str | None:
    """Return the first key of a record that only a chat can have, or None."""
    return next((key for key in CHAT_KEYS if record.get(key) not in EMPTY_VALUES), None)


def _side(record: Mapping[str, Any], key: str, role: str) -> list[dict[str, Any]]:
    value = record[key]
    if not isinstance(value, str):
        return read_messages(value, key)
    return [
        trainable_message(
            message_of({"role": role, "content": value}, key, content_key=key), key, key
        )
    ]


def _from_json(value: object, key: str) -> Any:
    """Return a value, or what a text of JSON says, as tables often hold it."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value else None
    except (ValueError, RecursionError):
        raise Unusable(key, f"{quote(key)} is a text that is not JSON") from None


def _array(value: object, key: str) -> list[Any] | None:
    found = _from_json(value, key)
    if found is None or isinstance(found, list):
        return found or None
    raise Unusable(key, f"{quote(key)} is {JSON_TYPES[type(found)]}, not an array")


def _variables(value: object) -> dict[str, Any]:
    found = _from_json(value, VARIABLES)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise Unusable(VARIABLES, f"{quote(VARIABLES)} is {JSON_TYPES[type(found)]}, not an object")
    for name in found:
        if not name.isidentifier() or name in _NO_VARIABLES:
            raise Unusable(
                VARIABLES,
                f"{quote(VARIABLES)}: {quote(name)} cannot be a variable of the chat template",
            )
    return found


def _speaks(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "assistant")


# For each role, the roles that the message before may have; None stands for the beginning.
_BEFORE: dict[str, tuple[str | None, ...]] = {
    "system": (None,),
    "user": (None, "system", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def require_question(messages: Sequence[Mapping[str, Any]], key: str) -> None:
    """Require that messages are the beginning of a chat which an assistant goes on with.

    Raises:
        Unusable: roles are out of order, or the last message is not one of a user or a tool.
    """
    _require_order(messages, key + "[{}]")
    last = messages[-1]["role"]
    if last not in ("user", "tool"):
        raise Unusable(
            "no question",
            f"{key} ends with a message of {last}: an answer follows one of a user or of a tool",
        )


def _require_order(messages: Sequence[Mapping[str, Any]], place: str) -> None:
    """Require that roles take turns; `place` names a message by its number, for messages."""
    before: str | None = None
    for number, message in enumerate(messages):
        role = message["role"]
        asked = role != "tool" or before == "tool" or bool(messages[number - 1].get("tool_calls"))
        if before not in _BEFORE[role] or not asked:
            fault = f"follows {before}" if before else "begins"
            remedy = "" if asked else ", which called no tool"
            raise Unusable(
                "roles out of order",
                f"{place.format(number)}: roles out of order, {role} {fault}{remedy}",
            )
        before = role
