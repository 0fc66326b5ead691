"""The keys of a chat's messages, and the form in which a chat template reads them.

`monograph.data.messages` reads messages from records and requests. Whether a key of a message has
an effect depends on the template, which is known only here. So keys that the template does not read
are refused here.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from monograph.errors import InputRefused
from monograph.storage.reading import parse_json
from monograph.text.template import ChatTemplate, Message

# What each key of a message does; documentation is made from it.
MESSAGE_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "role": "who speaks: system, user, assistant or tool",
        "content": 'what is said: a text, or a list of parts `{"type": "text", "text": ...}`, which are joined',
        "from": "ShareGPT's name of `role`: also human for user and gpt for assistant",
        "value": "ShareGPT's name of `content`",
        "name": "the speaker's name, for templates that write it",
        "tool_calls": "calls of tools by an assistant, each with a `function` that has a `name` and `arguments`",
        "tool_call_id": "the call that a tool answers, for templates that write it",
        "reasoning_content": "an assistant's thoughts before the content, for templates that write them",
        "thinking": "another name of `reasoning_content`",
        "reasoning": "another name of `reasoning_content`",
        "weight": "0: an assistant's message is context and not trained on; 1: it is",
        "train": "false: an assistant's message is context and not trained on; true: it is",
        "training": "another name of `train`",
    }
)
# Keys that describe a message and change nothing, unless a template reads them.
METADATA = frozenset(
    "id index turn timestamp created_at date source model lang language country meta metadata".split()
)
# The key of a message that is not trained on. After the message was read, the key's value is 0.
WEIGHT = "weight"
CALLS = "tool_calls"
# The keys of an assistant's thoughts. They name the same thing, and a template may read any one of them.
THOUGHTS = frozenset({"reasoning_content", "thinking", "reasoning"})
# Keys that may be there although the template does not read them.
_NEVER_REFUSED = frozenset({"role", "content", "name", "tool_call_id", *METADATA})


class UnreadKey(InputRefused):
    """A message has a key that the template does not read, so its value would be lost."""


def for_template(
    template: ChatTemplate,
    messages: Iterable[Message],
    counts: Counter[str] | None = None,
    **variables: object,
) -> list[dict[str, Any]]:
    """Return messages in the form in which a template reads them.

    The weight of a message is left out. If the template needs the arguments of a tool call as an
    object (`ChatTemplate.wants_objects`), and they are a text with the JSON of an object, they
    become that object.

    Args:
        template: the template.
        messages: the messages.
        counts: the counter to increase; None: nothing is counted. "unread KEY" counts the messages with a
            known key that the template does not read. "parsed" counts the arguments that became objects.
            "kept" counts the arguments that stayed texts although the template needs objects, because they
            are not the JSON of an object.
        variables: the template's other variables.

    Raises:
        UnreadKey: the template does not read an unknown key of a message, or tool calls.
    """
    counter = Counter[str]() if counts is None else counts
    converted = [_convert_message(template, message, counter) for message in messages]
    words = template.words
    for number, message in enumerate(converted):
        for key in message.keys() - words - {"role", "content"}:
            # If the template reads thoughts under another of their keys, `ChatTemplate` puts them there.
            if key in THOUGHTS and not THOUGHTS.isdisjoint(words):
                continue
            if key in _NEVER_REFUSED or key in THOUGHTS:
                counter[f"unread {key}"] += 1
                continue
            # A template may read all keys in a loop, without naming them. So it is tried out.
            if _has_effect(template, converted, number, key, variables):
                continue
            if key in MESSAGE_KEYS:
                raise UnreadKey(
                    f"message {number} has {key}, which the chat template does not read: they would be lost"
                )
            raise UnreadKey(
                f"message {number} has the key {ascii(key[:40])}, which the chat template does not read, and which "
                f"is none of {', '.join(MESSAGE_KEYS)}: it would be lost; leave it out"
            )
    return converted


def unread_notes(counts: Mapping[str, int]) -> list[str]:
    """Return lines for the user about the counts of `for_template`."""
    notes = []
    unread = [
        (key.removeprefix("unread "), count)
        for key, count in counts.items()
        if key.startswith("unread ")
    ]
    if unread:
        keys = ", ".join(f"{key} ({count:,})" for key, count in sorted(unread))
        notes.append(
            f"keys of messages that the chat template does not read, and which change nothing: {keys}"
        )
    if counts["parsed"]:
        notes.append(
            "the chat template writes a call's arguments from an object: "
            f"{counts['parsed']:,} texts of JSON became objects"
        )
    if counts["kept"]:
        notes.append(
            "the chat template writes a call's arguments from an object, but these are texts that are not a JSON "
            f"object, and are trained on as strings in quotes: {counts['kept']:,}"
        )
    return notes


def _convert_message(
    template: ChatTemplate, message: Message, counter: Counter[str]
) -> dict[str, Any]:
    """Return a message in the form in which the template reads it, see `for_template`."""
    if not isinstance(message, Mapping):
        raise InputRefused(
            f"a chat's message is {type(message).__name__}: expected an object with a role and a content"
        )
    converted = {
        key: value for key, value in message.items() if key != WEIGHT and value is not None
    }
    if isinstance(converted.get(CALLS), list):
        converted[CALLS] = [_convert_call(template, call, counter) for call in converted[CALLS]]
    return converted


def _convert_call(template: ChatTemplate, call: object, counter: Counter[str]) -> object:
    """Return a tool call, with its arguments as an object if the template needs that."""
    if not isinstance(call, dict):
        return call
    # Some records have the name and the arguments in the call itself.
    function = call.get("function", call)
    if not isinstance(function, dict):
        return call
    arguments_text = function.get("arguments")
    if not isinstance(arguments_text, str) or not template.wants_objects:
        return call
    try:
        arguments = parse_json(arguments_text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        counter["kept"] += 1
        return call
    counter["parsed"] += 1
    converted_function = {**function, "arguments": arguments}
    if function is call:
        return converted_function
    return {**call, "function": converted_function}


def _has_effect(
    template: ChatTemplate,
    messages: Sequence[Message],
    number: int,
    key: str,
    variables: Mapping[str, Any],
) -> bool:
    """Return whether the rendered text changes if message `number` loses `key`."""
    without_key = [dict(message) for message in messages]
    del without_key[number][key]
    return template.render(messages, **variables) != template.render(without_key, **variables)
