"""Read the messages of chats, for everyone who gets some: training, prompts to reward,
`generate --chat`, `serve`.

A message becomes an object in one form, whatever wrote it. A key whose value is null is the same as
a missing key, in the message, its parts and its calls, as transformers and tables have it; inside a
call's arguments a null is a value. Parts of content are joined. What would be trained or sent
otherwise than it says is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from monograph.data.records import JSON_TYPES, Unusable, checked_text, quote
from monograph.text.messages import CALLS, THOUGHTS, WEIGHT

ROLES = ("system", "user", "assistant", "tool")
# ShareGPT's form of messages has "from" and "value" instead of "role" and "content".
_SHARED_ROLES = {"human": "user", "gpt": "assistant"}
# Keys with which a message says something that is not read, with what to do instead. Empty ones are
# left out.
_NOT_READ = {
    "function_call": 'give it as "tool_calls": [{"type": "function", "function": {"name": ..., "arguments": ...}}]',
    "refusal": "write what is said as the content",
    "audio": "only text is read: leave the message out",
    "annotations": "leave them out",
}
_TEXTS = {"name", "tool_call_id", *THOUGHTS}
_SWITCHES = (WEIGHT, "train", "training")  # keys that say whether a message is trained on


def read_messages(value: object, key: str) -> list[dict[str, Any]]:
    """Return the messages under a record's key, each with a role and a content or calls that can be
    trained on.

    Raises:
        Unusable: there are none, or one is bad.
    """
    if not isinstance(value, list):
        raise Unusable(
            "no conversation",
            f"{quote(key)} is {JSON_TYPES[type(value)]}, not an array of messages",
        )
    if not value:
        raise Unusable("empty conversation", f"{quote(key)} is empty")
    return [
        spoken(message_of(message, f"{key}[{number}]"), f"{key}[{number}]")
        for number, message in enumerate(value)
    ]


def spoken(message: dict[str, Any], where: str, content_key: str | None = None) -> dict[str, Any]:
    """Return a message if its texts can be trained on.

    Args:
        message: as `message_of` returns it.
        where: the message's place in its record.
        content_key: the place of its content, if that is no key of the message.

    Raises:
        Unusable: a text has a NUL or a lone surrogate, or a user or an assistant says nothing.
    """
    content_key = content_key or f"{where}.content"
    for key in THOUGHTS & message.keys():
        checked_text(message[key], f"{where}.{key}")
    is_empty = "content" in message and not checked_text(message["content"], content_key).strip()
    if is_empty and CALLS not in message and message["role"] in ("user", "assistant"):
        raise Unusable("empty content", f"{content_key} is empty")
    return message


def message_of(
    value: object, where: str, roles: Sequence[str] | None = ROLES, content_key: str | None = None
) -> dict[str, Any]:
    """Return a message in its one form: a role, a content (a text) or calls of tools or both, and
    other keys.

    Args:
        value: what was given as a message.
        where: its place, for messages.
        roles: the roles that it may have; None: any.
        content_key: the place of its content, if that is no key of the message.

    Raises:
        Unusable: it is none.
    """
    content_key = content_key or f"{where}.content"
    if not isinstance(value, dict):
        raise Unusable(
            "no message",
            f"{where} is {JSON_TYPES[type(value)]}, not an object with a role and a content",
        )
    message = _without_nulls(value)
    role_key = "role"
    known = list(roles or ())
    if "role" not in message and "from" in message:
        role_key = "from"
        known = [*_SHARED_ROLES, *known]
        message = _from_shared(message)
    role = message.get("role")
    if not isinstance(role, str) or (roles is not None and role not in roles):
        found = f"is {quote(role) if isinstance(role, str) else JSON_TYPES[type(role)]}"
        expected = f"{', '.join(known[:-1])} or {known[-1]}" if known else "a text"
        raise Unusable("unknown role", f"{where}.{role_key} {found}: expected {expected}")
    _refuse_not_read(message, where)
    _read_switches(message, where)
    if CALLS in message:
        _read_calls(message, where)
    if "content" in message:
        message["content"] = _content(message["content"], content_key)
    elif CALLS not in message:
        raise Unusable("no content", f"{where} has no content")
    for key in _TEXTS & message.keys():
        if not isinstance(message[key], str):
            raise Unusable(
                "text is no string",
                f"{where}.{key} is {JSON_TYPES[type(message[key])]}, not a string",
            )
    return message


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if inner is not None}


def _from_shared(message: Mapping[str, Any]) -> dict[str, Any]:
    role = message["from"]
    role = _SHARED_ROLES.get(role, role) if isinstance(role, str) else role
    said = {"content": message["value"]} if "value" in message else {}
    rest = {key: part for key, part in message.items() if key not in ("from", "value")}
    return {"role": role, **said, **rest}


def _refuse_not_read(message: dict[str, Any], where: str) -> None:
    for key in _NOT_READ.keys() & message.keys():
        if message[key]:
            raise Unusable("a key that is not read", f"{where}.{key} is not read: {_NOT_READ[key]}")
        del message[key]


def _read_switches(message: dict[str, Any], where: str) -> None:
    """Replace the keys that say whether a message is trained on by the weight 0 if it is not."""
    said = {key: message.pop(key) for key in _SWITCHES if key in message}
    for key, value in said.items():
        if type(value) not in (bool, int, float) or value not in (0, 1):
            expected = "0 or 1" if key == WEIGHT else "true or false"
            found = value if type(value) in (int, float) else JSON_TYPES[type(value)]
            raise Unusable("weight", f"{where}.{key} is {found}: expected {expected}")
        if value and message["role"] != "assistant":
            detail = f"{where}.{key} asks to train on a message of {message['role']}, and only an assistant's are"
            raise Unusable("weight", f"{detail}: leave it out")
    if len({bool(value) for value in said.values()}) > 1:
        raise Unusable("weight", f"{where}: {' and '.join(said)} disagree")
    if said and not any(said.values()) and message["role"] == "assistant":
        message[WEIGHT] = 0


def _read_calls(message: dict[str, Any], where: str) -> None:
    """Leave out the nulls of a message's calls, and an empty list of them."""
    calls = message[CALLS]
    if calls == []:
        del message[CALLS]
        return
    message[CALLS] = [_call(call) for call in calls] if isinstance(calls, list) else None
    if message["role"] != "assistant" or not message[CALLS] or None in message[CALLS]:
        expected = "an array of objects that name a function each, of an assistant"
        raise Unusable("tool calls", f"{where}.{CALLS}: expected {expected}")


def _call(value: object) -> dict[str, Any] | None:
    """Return a call without its nulls, or None if it names no function."""
    if not isinstance(value, dict):
        return None
    call = _without_nulls(value)
    if isinstance(call.get("function"), dict):
        call["function"] = _without_nulls(call["function"])
    function = call.get("function", call)
    return call if isinstance(function, dict) and isinstance(function.get("name"), str) else None


def _content(value: object, key: str) -> str:
    """Return a content as one text; its parts are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise Unusable(
            "text is no string", f"{quote(key)} is {JSON_TYPES[type(value)]}, not a string"
        )
    return "".join(_part(part, f"{key}[{number}]") for number, part in enumerate(value))


def _part(value: object, where: str) -> str:
    part = _without_nulls(value) if isinstance(value, dict) else {}
    if (
        part.get("type") != "text"
        or not isinstance(part.get("text"), str)
        or part.keys() - {"type", "text"}
    ):
        kind = part.get("type")
        found = (
            f"a part of the type {quote(kind)}"
            if isinstance(kind, str) and kind != "text"
            else "another part"
        )
        raise Unusable(
            "no text", f'{where} is {found}: expected {{"type": "text", "text": ...}} alone'
        )
    return str(part["text"])


def is_trained_on(message: Mapping[str, Any]) -> bool:
    """Return whether a message that was read is an answer to train on."""
    return bool(message["role"] == "assistant" and message.get(WEIGHT, 1) != 0)
