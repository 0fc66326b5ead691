"""Read the messages of chats into one form.

Training, prompts to reward, `generate --chat` and `serve` all read messages here. A message becomes
an object with a role, and with a content (one text), tool calls, or both:

- A key whose value is null is the same as a missing key, as in transformers and in tables. This holds
  for keys of the message, of its parts and of its calls. Inside the arguments of a call, a null is a
  value.
- If a content is a list of parts, their texts are joined.
- Some keys of other programs would change what is trained or sent, and are not read here. They are
  refused by name (`_REFUSED_KEYS`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from monograph.data.records import JSON_TYPES, Unusable, checked_text, quote
from monograph.text.messages import CALLS, THOUGHTS, WEIGHT

ROLES = ("system", "user", "assistant", "tool")
# ShareGPT's messages have "from" and "value" instead of "role" and "content", and these names of
# roles.
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# A message with one of these keys is refused, unless the value is empty. The values here say what
# to do instead.
_REFUSED_KEYS = {
    "function_call": 'give it as "tool_calls": [{"type": "function", "function": {"name": ..., "arguments": ...}}]',
    "refusal": "write what is said as the content",
    "audio": "only text is read: leave the message out",
    "annotations": "leave them out",
}
# Keys whose values must be texts.
_TEXT_KEYS = {"name", "tool_call_id", *THOUGHTS}
# Keys that say whether a message is trained on. `message_of` replaces them all by the key WEIGHT.
_TRAINING_KEYS = (WEIGHT, "train", "training")


def read_messages(value: object, key: str) -> list[dict[str, Any]]:
    """Return the messages under a key of a record.

    Args:
        value: what the record has under the key.
        key: the key, for error messages.

    Raises:
        Unusable: the value is not a list, or it is empty, or one of its messages is bad.
    """
    if not isinstance(value, list):
        raise Unusable(
            "no conversation",
            f"{quote(key)} is {JSON_TYPES[type(value)]}, not an array of messages",
        )
    if not value:
        raise Unusable("empty conversation", f"{quote(key)} is empty")
    return [
        checked_message(message_of(message, f"{key}[{number}]"), f"{key}[{number}]")
        for number, message in enumerate(value)
    ]


def checked_message(
    message: dict[str, Any], where: str, content_place: str | None = None
) -> dict[str, Any]:
    """Return the message, after checking that its texts can be trained on.

    Args:
        message: as `message_of` returns it.
        where: the message's place in its record, for error messages.
        content_place: the place of its content, for error messages; None: WHERE.content.

    Raises:
        Unusable: a text has a NUL or a lone surrogate, or a message of a user or an assistant has
            neither a content nor calls.
    """
    content_place = content_place or f"{where}.content"
    for key in THOUGHTS & message.keys():
        checked_text(message[key], f"{where}.{key}")
    is_empty = "content" in message and not checked_text(message["content"], content_place).strip()
    if is_empty and CALLS not in message and message["role"] in ("user", "assistant"):
        raise Unusable("empty content", f"{content_place} is empty")
    return message


def message_of(
    value: object, where: str, roles: Sequence[str] | None = ROLES, content_place: str | None = None
) -> dict[str, Any]:
    """Return a message in the form that the module's docstring describes.

    Args:
        value: the message as it was given.
        where: its place, for error messages.
        roles: the roles that it may have; None: any role.
        content_place: the place of its content, for error messages; None: WHERE.content.

    Raises:
        Unusable: the value is not a message.
    """
    content_place = content_place or f"{where}.content"
    if not isinstance(value, dict):
        raise Unusable(
            "no message",
            f"{where} is {JSON_TYPES[type(value)]}, not an object with a role and a content",
        )
    message = _without_nulls(value)
    role_key = "role"
    accepted_roles = list(roles or ())
    if "role" not in message and "from" in message:
        role_key = "from"
        accepted_roles = [*_SHAREGPT_ROLES, *accepted_roles]
        message = _from_sharegpt(message)
    role = message.get("role")
    if not isinstance(role, str) or (roles is not None and role not in roles):
        found = quote(role) if isinstance(role, str) else JSON_TYPES[type(role)]
        expected = "a text"
        if accepted_roles:
            expected = f"{', '.join(accepted_roles[:-1])} or {accepted_roles[-1]}"
        raise Unusable("unknown role", f"{where}.{role_key} is {found}: expected {expected}")
    _refuse_keys(message, where)
    _replace_training_keys(message, where)
    if CALLS in message:
        _clean_calls(message, where)
    if "content" in message:
        message["content"] = _content(message["content"], content_place)
    elif CALLS not in message:
        raise Unusable("no content", f"{where} has no content")
    for key in _TEXT_KEYS & message.keys():
        if not isinstance(message[key], str):
            raise Unusable(
                "text is no string",
                f"{where}.{key} is {JSON_TYPES[type(message[key])]}, not a string",
            )
    return message


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without the keys whose value is null."""
    return {key: inner for key, inner in value.items() if inner is not None}


def _from_sharegpt(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of ShareGPT's form with the usual keys and roles."""
    role = message["from"]
    if isinstance(role, str):
        role = _SHAREGPT_ROLES.get(role, role)
    renamed = {"role": role}
    if "value" in message:
        renamed["content"] = message["value"]
    # If the message also has "content", this is taken and not "value", because it is the usual key.
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {**renamed, **rest}


def _refuse_keys(message: dict[str, Any], where: str) -> None:
    """Refuse a message that has a key of `_REFUSED_KEYS`; delete such a key if its value is empty."""
    for key in _REFUSED_KEYS.keys() & message.keys():
        if message[key]:
            raise Unusable(
                "a key that is not read", f"{where}.{key} is not read: {_REFUSED_KEYS[key]}"
            )
        del message[key]


def _replace_training_keys(message: dict[str, Any], where: str) -> None:
    """Remove the keys that say whether a message is trained on.

    A message of an assistant that these keys exclude from training gets the weight 0 instead. All other
    messages of an assistant are trained on, and get no key.
    """
    values = {key: message.pop(key) for key in _TRAINING_KEYS if key in message}
    for key, value in values.items():
        # True is equal to 1 and False to 0.
        if type(value) not in (bool, int, float) or value not in (0, 1):
            expected = "0 or 1" if key == WEIGHT else "true or false"
            found = value if type(value) in (int, float) else JSON_TYPES[type(value)]
            raise Unusable("weight", f"{where}.{key} is {found}: expected {expected}")
        if value and message["role"] != "assistant":
            detail = f"{where}.{key} asks to train on a message of {message['role']}, and only an assistant's are"
            raise Unusable("weight", f"{detail}: leave it out")
    if len({bool(value) for value in values.values()}) > 1:
        raise Unusable("weight", f"{where}: {' and '.join(values)} disagree")
    is_excluded = bool(values) and not any(values.values())
    if is_excluded and message["role"] == "assistant":
        message[WEIGHT] = 0


def _clean_calls(message: dict[str, Any], where: str) -> None:
    """Remove the nulls from a message's tool calls, and the list of calls itself if it is empty."""
    value = message[CALLS]
    if value == []:
        del message[CALLS]
        return
    # `_clean_call` returns None for a call that names no function.
    calls = [_clean_call(call) for call in value] if isinstance(value, list) else []
    if message["role"] != "assistant" or not calls or None in calls:
        expected = "an array of objects that name a function each, of an assistant"
        raise Unusable("tool calls", f"{where}.{CALLS}: expected {expected}")
    message[CALLS] = calls


def _clean_call(value: object) -> dict[str, Any] | None:
    """Return a tool call without its nulls, or None if it does not name a function.

    The name is under "name", in the call itself or in the object that the call has under
    "function".
    """
    if not isinstance(value, dict):
        return None
    call = _without_nulls(value)
    if isinstance(call.get("function"), dict):
        call["function"] = _without_nulls(call["function"])
    function = call.get("function", call)
    has_name = isinstance(function, dict) and isinstance(function.get("name"), str)
    return call if has_name else None


def _content(value: object, where: str) -> str:
    """Return a message's content as one text. If it is a list of parts, their texts are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise Unusable(
            "text is no string", f"{quote(where)} is {JSON_TYPES[type(value)]}, not a string"
        )
    return "".join(_part_text(part, f"{where}[{number}]") for number, part in enumerate(value))


def _part_text(value: object, where: str) -> str:
    """Return the text of one part of a content, which must be {"type": "text", "text": ...}."""
    part = _without_nulls(value) if isinstance(value, dict) else {}
    kind = part.get("type")
    has_text = kind == "text" and isinstance(part.get("text"), str)
    has_other_keys = bool(part.keys() - {"type", "text"})
    if not has_text or has_other_keys:
        found = "another part"
        if isinstance(kind, str) and kind != "text":
            found = f"a part of the type {quote(kind)}"
        raise Unusable(
            "no text", f'{where} is {found}: expected {{"type": "text", "text": ...}} alone'
        )
    return str(part["text"])


def is_trained_on(message: Mapping[str, Any]) -> bool:
    """Return whether a message is trained on: an assistant's, unless its weight is 0.

    Args:
        message: as `message_of` returns it.
    """
    return bool(message["role"] == "assistant" and message.get(WEIGHT, 1) != 0)
