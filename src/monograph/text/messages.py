"""The keys of a chat's messages, and the form in which a chat template reads them.

`monograph.data.messages` reads messages from records and requests. What a template makes of a key
is known only where the template is, so a key that no table here has is refused here, unless this
template reads it.
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
WEIGHT = "weight"  # 0 in a message that was read; left out where it is 1
CALLS = "tool_calls"
THOUGHTS = frozenset({"reasoning_content", "thinking", "reasoning"})
_ALWAYS = frozenset({"role", "content", "name", "tool_call_id", *METADATA})


class Unread(InputRefused):
    """A chat has something that its template does not read, so that it would be lost."""


def for_template(
    template: ChatTemplate,
    messages: Iterable[Message],
    counts: Counter[str] | None = None,
    **variables: object,
) -> list[dict[str, Any]]:
    """Return messages as a template reads them.

    The weight of a message is left out. If a call's arguments are a text of JSON and this template
    writes a text as a string inside JSON, so that it would be escaped twice, they become the
    object.

    Args:
        template: the template.
        messages: the messages.
        counts: gets the number of messages with each key that is left aside ("unread KEY"), and of
            arguments that became objects ("parsed") or are the text of none ("kept").
        variables: the template's other variables.

    Raises:
        Unread: a message has an unknown key, or calls, and the template does not read them.
    """
    counted = Counter[str]() if counts is None else counts
    read = [_read(template, message, counted) for message in messages]
    words = template.words
    for number, message in enumerate(read):
        for key in message.keys() - words - {"role", "content"}:
            if key in THOUGHTS and not THOUGHTS.isdisjoint(words):
                continue
            if key in _ALWAYS or key in THOUGHTS:
                counted[f"unread {key}"] += 1
            elif not _changes(template, read, number, key, variables):
                known = ", ".join(MESSAGE_KEYS)
                raise Unread(
                    f"message {number} has the key {ascii(key[:40])}, which the chat template does not read, and which "
                    f"is none of {known}: it would be lost; leave it out"
                    if key not in MESSAGE_KEYS
                    else f"message {number} has {key}, which the chat template does not read: they would be lost"
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
        count = f"{counts['parsed']:,}"
        notes.append(
            f"the chat template writes a call's arguments from an object: {count} texts of JSON became objects"
        )
    if counts["kept"]:
        notes.append(
            "the chat template writes a call's arguments from an object, but these are texts that are no JSON object, "
            f"and are trained on as strings in quotes: {counts['kept']:,}"
        )
    return notes


def _read(template: ChatTemplate, message: Message, counted: Counter[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputRefused(
            f"a chat's message is {type(message).__name__}: expected an object with a role and a content"
        )
    read = {key: value for key, value in message.items() if key != WEIGHT and value is not None}
    if isinstance(read.get(CALLS), list):
        read[CALLS] = [_call(template, call, counted) for call in read[CALLS]]
    return read


def _call(template: ChatTemplate, call: object, counted: Counter[str]) -> object:
    """Return a call of a function, with its arguments as an object where the template wants that."""
    if not isinstance(call, dict):
        return call
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
    parsed = {**function, "arguments": arguments}
    return {**call, "function": parsed} if function is not call else parsed


def _changes(
    template: ChatTemplate,
    messages: Sequence[Message],
    number: int,
    key: str,
    variables: Mapping[str, Any],
) -> bool:
    """Return whether a key of a message changes what the template writes."""
    without = [dict(message) for message in messages]
    del without[number][key]
    return template.render(messages, **variables) != template.render(without, **variables)
