"""Find the keys that a word stands for.

The word is a section, a key, a part of a key's name, or the name of the key in another program.
"""

import re
from typing import Any, NamedTuple

from monograph.config.elsewhere import ELSEWHERE
from monograph.config.keys import KEYS, SECTIONS, key_declaration
from monograph.config.settings import toml_of
from monograph.errors import UsageError, did_you_mean


class KeyMatches(NamedTuple):
    """The keys that a word stands for.

    Attributes:
        keys: the keys, in the order of the configuration.
        advice: {a name in another program: a sentence that says what to do here}, for names that do
            not stand for a single key.
    """

    keys: tuple[str, ...]
    advice: dict[str, str]


def keys_named(word: str) -> KeyMatches:
    """Return the keys that a word stands for.

    Raises:
        UsageError: the word stands for no key; the message suggests a similar name.
    """
    word = word.strip().lower().partition("=")[0]
    if word in KEYS:
        return KeyMatches((word,), {})
    section = word.strip("[].")
    if section in SECTIONS:
        return KeyMatches(tuple(key for key in KEYS if key.startswith(f"{section}.")), {})
    name = word.rpartition(".")[2].replace("-", "_").strip("_")
    keys = {key for key in KEYS if name and name in key.partition(".")[2]}
    # `ELSEWHERE` maps another program's name to a key or a sentence. If the word is a whole name, here or in
    # another program, then only this name counts. Otherwise all names count that contain the word.
    is_name_elsewhere = name in ELSEWHERE
    is_name_here = any(key.endswith(f".{name}") for key in keys)
    if is_name_elsewhere:
        elsewhere = {name: ELSEWHERE[name]}
    elif is_name_here or not name:
        elsewhere = {}
    else:
        elsewhere = {other: text for other, text in ELSEWHERE.items() if name in other}
    for text in elsewhere.values():
        keys |= set(keys_in(text))
    if not keys and not elsewhere:
        suggestion = did_you_mean(name, (*KEYS, *ELSEWHERE))
        if not suggestion:
            suggestion = f"; the sections are {', '.join(SECTIONS)}"
        raise UsageError(f"no key is called {word}{suggestion}")
    advice = {other: text for other, text in elsewhere.items() if text not in KEYS}
    return KeyMatches(tuple(key for key in KEYS if key in keys), advice)


def keys_in(text: str) -> list[str]:
    """Return the keys that a text names, in the order of the text."""
    return [word for word in re.findall(r"[a-z]+\.[a-z_]+", text) if word in KEYS]


def names_elsewhere(key: str) -> list[str]:
    """Return the names that other programs have for a key, or for one of its values."""
    return [name for name, text in ELSEWHERE.items() if text == key or f"{key}=" in text]


def example_of(key: str) -> Any:
    """Return an example of a key's value: its declared example, or else its default."""
    declaration = key_declaration(key)
    return declaration.default if declaration.example is None else declaration.example


def typed(value: object) -> str:
    """Return a value as a person types it on a command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return toml_of(value)
