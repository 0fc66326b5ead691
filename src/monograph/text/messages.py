"""The keys of a chat's messages, and the form in which a chat template reads them.

`monograph.data.messages` reads messages from records and requests. Whether a key of a message has
an effect depends on the template. So unknown keys are refused here, where the template is known,
unless it reads them.
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
# The key that a message has after it was read, if it is not trained on; its value is 0.
WEIGHT = "weight"
CALLS = "tool_calls"
THOUGHTS = frozenset({"reasoning_content", "thinking", "reasoning"})
# Keys that may be there although the template does not read them.
_ALWAYS = frozenset({"role", "content", "name", "tool_call_id", *METADATA})


class Unread(InputRefused):
    """A part of a chat would be lost, because the template does not read it."""


def for_template(
    template: ChatTemplate,
    messages: Iterable[Message],
    counts: Counter[str] | None = None,
    **variables: object,
) -> list[dict[str, Any]]:
    """Return messages as a template reads them.

    The weight of a message is left out. The arguments of a tool call, if they are the text of a
    JSON object, become this object if the template needs it (`ChatTemplate.wants_objects`).

    Args:
        template: the template.
        messages: the messages.
        counts: is increased by the number of messages with each known key that the template does
            not read ("unread KEY"), by the number of arguments that became objects ("parsed"), and
            by the number of arguments that are not the text of an object ("kept"); None: nothing is
            counted.
        variables: the template's other variables.

    Raises:
        Unread: the template does not read an unknown key of a message, or tool calls.
    """
    counted = Counter[str]() if counts is None else counts
    read = [_read_message(template, message, counted) for message in messages]
    words = template.words
    for number, message in enumerate(read):
        for key in message.keys() - words - {"role", "content"}:
            # A template that reads one name of the thoughts gets them by this name.
            if key in THOUGHTS and not THOUGHTS.isdisjoint(words):
                continue
            if key in _ALWAYS or key in THOUGHTS:
                counted[f"unread {key}"] += 1
                continue
            # A template may read all keys without naming them, so it is tried out.
            if _has_effect(template, read, number, key, variables):
                continue
            if key in MESSAGE_KEYS:
                raise Unread(
                    f"message {number} has {key}, which the chat template does not read: they would be lost"
                )
            raise Unread(
                f"message {number} has the key {ascii(key[:40])}, which the chat template does not read, and which "
                f"is none of {', '.join(MESSAGE_KEYS)}: it would be lost; leave it out"
            )
    return read


def unread_notes(counts: Mapping[str, int]) -> list[str]:
    """Return lines for the user on what `for_template` counted."""
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


def _read_message(
    template: ChatTemplate, message: Message, counted: Counter[str]
) -> dict[str, Any]:
    """Return a message as the template reads it."""
    if not isinstance(message, Mapping):
        raise InputRefused(
            f"a chat's message is {type(message).__name__}: expected an object with a role and a content"
        )
    read = {key: value for key, value in message.items() if key != WEIGHT and value is not None}
    if isinstance(read.get(CALLS), list):
        read[CALLS] = [_read_call(template, call, counted) for call in read[CALLS]]
    return read


def _read_call(template: ChatTemplate, call: object, counted: Counter[str]) -> object:
    """Return a tool call as the template reads it: with arguments as an object if it needs that."""
    if not isinstance(call, dict):
        return call
    # Some records have the name and the arguments in the call itself.
    function = call.get("function", call)
    if not isinstance(function, dict):
        return call
    text = function.get("arguments")
    if not isinstance(text, str) or not template.wants_objects:
        return call
    try:
        arguments = parse_json(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        counted["kept"] += 1
        return call
    counted["parsed"] += 1
    read_function = {**function, "arguments": arguments}
    return read_function if function is call else {**call, "function": read_function}


def _has_effect(
    template: ChatTemplate,
    messages: Sequence[Message],
    number: int,
    key: str,
    variables: Mapping[str, Any],
) -> bool:
    """Return whether `key` of message `number` changes the rendered text."""
    without_key = [dict(message) for message in messages]
    del without_key[number][key]
    return template.render(messages, **variables) != template.render(without_key, **variables)
