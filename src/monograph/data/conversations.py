"""Read conversations from records in any of the common forms, and describe the faults of bad records."""

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from monograph.data.records import KINDS, Fault, Record, Unusable, json_objects, short, sound
from monograph.data.sources import LINES, SourceFile
from monograph.data.tables import table_columns, table_objects
from monograph.errors import UsageError
from monograph.storage.reading import parse_json

ROLES = ("system", "user", "assistant", "tool")
MOST_MESSAGES = 1000  # each answer is rendered together with all messages before it
# The keys by which a conversation is recognised, in the order in which they are tried.
MESSAGES, SHARED, PROMPT, COMPLETION, TOOLS = "messages", "conversations", "prompt", "completion", "tools"
_ASKED = (MESSAGES, SHARED, PROMPT)  # if data.text_key is one of these, records are read as conversations
# ShareGPT's form of messages has "from" and "value" instead of "role" and "content".
_SHARED_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ROLES}


class Conversation(NamedTuple):
    """One record that holds a conversation.

    Attributes:
        messages: each is {"role": one of ROLES, "content": a text or None}, with any other keys that a template reads.
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
        return [number for number in numbers if self.messages[number]["role"] == "assistant"]

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
        raise Unusable("no answer", f"{short(COMPLETION if trained_from else form)} has no message of an assistant")
    return conversation


def _form(record: Container[str]) -> str | None:
    there = [key for key in (MESSAGES, SHARED) if key in record]
    return there[0] if there else PROMPT if PROMPT in record and COMPLETION in record else None


def _side(record: Mapping[str, Any], key: str, role: str) -> list[dict[str, Any]]:
    value = record[key]
    return (
        [_message({"role": role, "content": value}, key, key)] if isinstance(value, str) else read_messages(value, key)
    )


def read_messages(value: Any, key: str) -> list[dict[str, Any]]:
    """Return the messages under a record's key, each with a role and a content.

    Raises:
        Unusable: there are none, or one is bad.
    """
    if not isinstance(value, list):
        raise Unusable("no conversation", f"{short(key)} is {KINDS[type(value)]}, not an array of messages")
    if not value:
        raise Unusable("empty conversation", f"{short(key)} is empty")
    return [_message(message, f"{key}[{number}]") for number, message in enumerate(value)]


def _message(value: Any, where: str, content_key: str | None = None) -> dict[str, Any]:
    content_key = content_key or f"{where}.content"
    if not isinstance(value, dict):
        raise Unusable("no message", f"{where} is {KINDS[type(value)]}, not an object with a role and a content")
    role_key, roles = "role", list(ROLES)
    if "role" not in value and "from" in value:
        role_key, roles = "from", ["human", "gpt", *ROLES]
        rest = {key: part for key, part in value.items() if key not in ("from", "value")}
        role = value["from"]
        role = _SHARED_ROLES.get(role, role) if isinstance(role, str) else role
        value = {"role": role, "content": value.get("value"), **rest}
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        found = f"is {short(role) if isinstance(role, str) else KINDS[type(role)]}"
        raise Unusable("unknown role", f"{where}.{role_key} {found}: expected {', '.join(roles[:-1])} or {roles[-1]}")
    if (calls := value.get("tool_calls")) is not None and (role != "assistant" or not _are_calls(calls)):
        expected = "an array of objects that name a function each, of an assistant"
        raise Unusable("tool calls", f"{where}.tool_calls: expected {expected}")
    if content is None and calls:
        return dict(value)
    if content is None:
        raise Unusable("no content", f"{where} has no content")
    if not sound(content, content_key).strip() and not calls and role in ("user", "assistant"):
        raise Unusable("empty content", f"{content_key} is empty")
    return dict(value)


def _are_calls(calls: Any) -> bool:
    def named(call: Any) -> bool:
        function = call.get("function", call) if isinstance(call, dict) else None
        return isinstance(function, dict) and isinstance(function.get("name"), str)

    return isinstance(calls, list) and bool(calls) and all(map(named, calls))


def _tools(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        try:
            value = parse_json(value) if value else None
        except (ValueError, RecursionError):
            raise Unusable("tools", "'tools' is a text that is not JSON") from None
    if value is None or isinstance(value, list):
        return value or None
    raise Unusable("tools", f"'tools' is {KINDS[type(value)]}, not an array")


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
