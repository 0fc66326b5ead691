"""Read conversations from records in any of the common forms, which `monograph.data.forms`
declares.

A record is a line of a .jsonl file or a row of a table. Until a conversation becomes tokens, it is
treated as a text: the JSON that `conversation_text` writes. So damaged files, the split and duplicates
are handled by the same code for texts and for conversations.
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
    SHAREGPT_FORM,
    SYSTEM,
    TEMPLATE_VARIABLES,
    TOOLS,
    RecordKeys,
)
from monograph.data.messages import checked_message, is_trained_on, message_of, read_messages
from monograph.data.records import (
    EMPTY_VALUES,
    JSON_TYPES,
    Fault,
    NumberedText,
    Unusable,
    checked_text,
    json_objects,
    quote,
)
from monograph.data.sources import LINE_SUFFIXES, SourceFile, place_of
from monograph.data.tables import first_row_with_value, table_columns, table_objects
from monograph.errors import InputRefused
from monograph.storage.reading import parse_json

# The largest number of messages of a conversation. Each answer is rendered together with all messages
# before it, so the time grows with the square of the number of messages.
MAX_MESSAGES = 1000
# A record may give further variables to the chat template, but not with these names. They are taken by
# other variables of the template, or by arguments of the code that renders it.
_RESERVED_NAMES = frozenset(
    "self template tokenizer messages chats tools documents marker marks counts add_generation_prompt".split()
)


class Conversation(NamedTuple):
    """One record that holds a conversation.

    Attributes:
        messages: the messages, as `monograph.data.messages.message_of` returns them.
        tools: the tools that the assistant may call; None if the record names none.
        trained_from: index of the first message that may be trained on. In a record with "prompt"
            and "completion" it is the first message of the completion; in other records it is 0.
        variables: further variables of the chat template.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    trained_from: int
    variables: Mapping[str, Any] = {}

    @property
    def answer_indices(self) -> list[int]:
        """Return the indices of the messages that can be trained on."""
        indices = range(self.trained_from, len(self.messages))
        return [index for index in indices if is_trained_on(self.messages[index])]

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return everything that the chat template gets in addition to the messages."""
        tools = {TOOLS: [*map(_shown_tool, self.tools)]} if self.tools else {}
        return {**tools, **self.variables}

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Return the conversation whose text `conversation_text` has returned."""
        return cls(*json.loads(text))


def _shown_tool(tool: Any) -> Any:
    """Return a tool as the model sees it: without "strict", which clients write for the server.

    `serve` and `generate` do not show it either.
    """
    match tool:
        case {"function": {"strict": _, **function}}:
            return {**tool, "function": function}
    return tool


def conversation_records(file: SourceFile, keys: RecordKeys) -> Iterator[NumberedText]:
    """Yield (record number from 1, conversation as a text or a fault) for every record of a file.

    The text is what `conversation_text` returns.

    Raises:
        InputRefused: a record has an unknown key.
    """
    for number, record in keyed_records(file, keys):
        if isinstance(record, Fault):
            yield number, record
        else:
            yield number, conversation_text(record)


def keyed_records(
    file: SourceFile, keys: RecordKeys
) -> Iterator[tuple[int, dict[str, Any] | Fault]]:
    """Yield (record number from 1, record or fault) for every record of a file.

    Of each record, only the keys that say what is trained are kept.

    Args:
        file: the file.
        keys: chooses the keys of a record, and counts those that are ignored.

    Raises:
        InputRefused: a record has an unknown key, or the file cannot be read.
    """
    if file.suffix in LINE_SUFFIXES:
        records = json_objects(file.path, exact=True)
    else:
        records = _keyed_rows(file.path, keys)
    for number, record in records:
        if isinstance(record, Fault):
            yield number, record
            continue
        try:
            record_to_train = keys.read(record)
        except Unusable as unusable:
            yield number, unusable.fault
        except InputRefused as refused:
            raise InputRefused(f"{place_of(file.path, number)}: {refused}") from None
        else:
            yield number, record_to_train


def _keyed_rows(path: Path, keys: RecordKeys) -> Iterator[tuple[int, dict[str, Any] | Fault]]:
    """Yield (row number from 1, row or fault) for every row of a table.

    A row has only the columns that can say what is trained.

    Raises:
        InputRefused: a column is unknown, and has a value somewhere.
    """
    columns = table_columns(path)
    read_columns = [name for name in columns if keys.is_read(name)]
    ignored_columns = [
        name for name in columns if name not in read_columns and keys.is_ignored(name)
    ]
    for name in columns:
        if name in read_columns or name in ignored_columns:
            continue
        row = first_row_with_value(path, name)
        if row is not None:
            raise InputRefused(f"{place_of(path, row)}: {keys.unknown_column_error(name, columns)}")
    for number, record in table_objects(path, read_columns):
        yield number, record
        # Ignored columns are not read, so `keys.read` cannot count them in the record.
        keys.counts.update(ignored_columns)


def conversation_text(record: Mapping[str, Any]) -> str | Fault:
    """Return a record's conversation as JSON, or the record's fault.

    `Conversation.of_text` reads the JSON. Equal conversations have equal texts.
    """
    try:
        conversation = read_conversation(record)
        fields: list[Any] = [conversation.messages, conversation.tools, conversation.trained_from]
        # Variables are written only if there are some. The hash of this text decides whether the
        # conversation is held out. Earlier versions wrote no variables, and a conversation without
        # variables must stay on the same side of the split.
        if conversation.variables:
            fields.append(conversation.variables)
        text = json.dumps(fields, ensure_ascii=False)
        text.encode()  # This fails for a lone surrogate.
    except Unusable as unusable:
        return unusable.fault
    except UnicodeEncodeError:
        return Fault("lone surrogate", "has a lone surrogate")
    return text


def read_conversation(record: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a record.

    The messages are under "messages", or under "conversations" as {"from", "value"}, or under
    "prompt" and "completion". A prompt and a completion are each a text or a list of messages, and
    only the completion is trained on. The record may also have the keys of `CHAT_KEYS`.

    Raises:
        Unusable: the record is bad.
    """
    forms = [
        form
        for form in (MESSAGES_FORM, SHAREGPT_FORM, COMPLETED_FORM)
        if all(key in record for key in form.needs)
    ]
    if not forms:
        raise Unusable(
            "no conversation",
            f"has none of the keys messages, conversations, {PROMPT} and {COMPLETION}",
        )
    # There is only one form, because `RecordKeys.read` has refused records of several forms.
    form = forms[0]
    if form is COMPLETED_FORM:
        prompt = _side_messages(record, PROMPT, "user")
        completion = _side_messages(record, COMPLETION, "assistant")
        messages = prompt + completion
        trained_from = len(prompt)
        answers_key = COMPLETION
        place_pattern = "message {} of 'prompt' and 'completion'"
    else:
        key = next(iter(form.needs))
        messages = read_messages(record[key], key)
        require_copy(record.get(PROMPT), messages)
        trained_from = 0
        answers_key = key
        place_pattern = key + "[{}]"
    if len(messages) > MAX_MESSAGES:
        raise Unusable("too long", f"has {len(messages):,} messages, more than {MAX_MESSAGES:,}")
    _require_order(messages, place_pattern)
    conversation = with_chat_keys(messages, record)
    if trained_from:
        # If the record has "system", one message was inserted before the prompt's messages.
        inserted = len(conversation.messages) - len(messages)
        conversation = conversation._replace(trained_from=trained_from + inserted)
    if not conversation.answer_indices:
        has_untrained = any(message["role"] == "assistant" for message in messages[trained_from:])
        which = " with another weight than 0" if has_untrained else ""
        raise Unusable("no answer", f"{quote(answers_key)} has no message of an assistant{which}")
    return conversation


def with_chat_keys(messages: list[dict[str, Any]], record: Mapping[str, Any]) -> Conversation:
    """Return the conversation of these messages and of the record's values under `CHAT_KEYS`.

    Its `trained_from` is 0: every message of the assistant may be trained on.

    Raises:
        Unusable: the value of one of these keys is bad.
    """
    system = record.get(SYSTEM)
    if system is not None and checked_text(system, SYSTEM):
        if messages[0]["role"] == "system":
            raise Unusable(
                "two system messages",
                f"has {quote(SYSTEM)} and begins with a message of system: keep one",
            )
        messages = [{"role": "system", "content": system}, *messages]
    variables = dict(_variables(record.get(TEMPLATE_VARIABLES)))
    documents = _array(record.get(DOCUMENTS), DOCUMENTS)
    if documents:
        variables[DOCUMENTS] = documents
    return Conversation(messages, _array(record.get(TOOLS), TOOLS), 0, variables)


def require_copy(prompt: object, messages: Sequence[Mapping[str, Any]]) -> None:
    """Require that a prompt next to a whole chat is a part of the chat.

    Only the chat is trained on. So a prompt that is not a part of it would be lost silently.

    Args:
        prompt: what the record has under "prompt"; None or empty: there is nothing to compare.
        messages: the chat's messages.

    Raises:
        Unusable: the prompt is neither a copy of a user's message nor of the chat's first messages.
    """
    if not prompt:
        return
    if isinstance(prompt, list):
        prompt_messages = read_messages(prompt, PROMPT)
        is_copy = list(messages[: len(prompt_messages)]) == prompt_messages
    else:
        questions = [message.get("content") for message in messages if message["role"] == "user"]
        is_copy = prompt in questions or any(
            isinstance(question, str) and question.strip() == str(prompt).strip()
            for question in questions
        )
    if not is_copy:
        raise Unusable(
            "another prompt",
            f"{quote(PROMPT)} beside a whole chat, of which no message is a copy of it, would not be trained on: "
            "remove it, or name it in data.ignore_keys",
        )


def first_chat_only_key(record: Mapping[str, Any]) -> str | None:
    """Return the first key of a record that only a chat can have and that has a value, or None."""
    return next((key for key in CHAT_KEYS if record.get(key) not in EMPTY_VALUES), None)


def _side_messages(record: Mapping[str, Any], key: str, role: str) -> list[dict[str, Any]]:
    """Return the messages under "prompt" or "completion"; a text becomes one message of this role."""
    value = record[key]
    if not isinstance(value, str):
        return read_messages(value, key)
    message = message_of({"role": role, "content": value}, key, content_place=key)
    return [checked_message(message, key, content_place=key)]


def _from_json(value: object, key: str) -> Any:
    """Return the value in a text of JSON. Any other value is returned unchanged.

    Tables often store JSON as a text.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value else None
    except (ValueError, RecursionError):
        raise Unusable(key, f"{quote(key)} is a text that is not JSON") from None


def _array(value: object, key: str) -> list[Any] | None:
    """Return the list under a key, or None if it is missing or empty."""
    array = _from_json(value, key)
    if array is None or isinstance(array, list):
        return array or None
    raise Unusable(key, f"{quote(key)} is {JSON_TYPES[type(array)]}, not an array")


def _variables(value: object) -> dict[str, Any]:
    """Return the further variables of the chat template; {} if the key is missing."""
    variables = _from_json(value, TEMPLATE_VARIABLES)
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise Unusable(
            TEMPLATE_VARIABLES,
            f"{quote(TEMPLATE_VARIABLES)} is {JSON_TYPES[type(variables)]}, not an object",
        )
    for name in variables:
        if not name.isidentifier() or name in _RESERVED_NAMES:
            raise Unusable(
                TEMPLATE_VARIABLES,
                f"{quote(TEMPLATE_VARIABLES)}: {quote(name)} cannot be a variable of the chat template",
            )
    return variables


# For each role, the roles that the previous message may have; None stands for the beginning.
_PREVIOUS_ROLES: dict[str, tuple[str | None, ...]] = {
    "system": (None,),
    "user": (None, "system", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def require_question(messages: Sequence[Mapping[str, Any]], key: str) -> None:
    """Require that messages are the beginning of a chat which an assistant continues.

    Args:
        messages: the messages.
        key: the key of the record that has them, for error messages.

    Raises:
        Unusable: roles are out of order, or the last message is not one of a user or a tool.
    """
    _require_order(messages, place_pattern=key + "[{}]")
    last_role = messages[-1]["role"]
    if last_role not in ("user", "tool"):
        raise Unusable(
            "no question",
            f"{key} ends with a message of {last_role}: an answer follows one of a user or of a tool",
        )


def _require_order(messages: Sequence[Mapping[str, Any]], place_pattern: str) -> None:
    """Require that the roles of messages are in an order that `_PREVIOUS_ROLES` allows.

    Args:
        messages: the messages.
        place_pattern: a message's place for the error, with "{}" for its number.

    Raises:
        Unusable: the roles are in another order, or a tool's message follows a message of an assistant
            that called no tool.
    """
    previous: str | None = None  # the role of the previous message
    for number, message in enumerate(messages):
        role = message["role"]
        # A message of a tool answers a call in an assistant's message. Several messages of tools may
        # follow each other, because an assistant's message may have several calls. So only the first
        # of them must have a call directly before it.
        lacks_call = (
            role == "tool"
            and previous == "assistant"
            and not messages[number - 1].get("tool_calls")
        )
        if previous not in _PREVIOUS_ROLES[role] or lacks_call:
            fault = f"follows {previous}" if previous else "begins"
            detail = ", which called no tool" if lacks_call else ""
            raise Unusable(
                "roles out of order",
                f"{place_pattern.format(number)}: roles out of order, {role} {fault}{detail}",
            )
        previous = role
