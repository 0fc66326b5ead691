"""Find the keys that a person means by a word: a section, a key, a part of its name, or another
program's name.
"""

import re
from typing import Any, NamedTuple

from monograph.config.elsewhere import ELSEWHERE
from monograph.config.keys import KEYS, SECTIONS, described
from monograph.config.settings import toml_of
from monograph.errors import UsageError, did_you_mean


class Found(NamedTuple):
    """What a word stands for.

    Attributes:
        keys: the keys, in the order of the configuration.
        advice: how the same is had where no key says it, or what else to know; each by another
            program's name.
    """

    keys: tuple[str, ...]
    advice: dict[str, str]


def keys_named(word: str) -> Found:
    """Return the keys that a word stands for.

    Raises:
        UsageError: there are none; the message names the nearest ones.
    """
    word = word.strip().lower().partition("=")[0]
    if word in KEYS:
        return Found((word,), {})
    section = word.strip("[].")
    if section in SECTIONS:
        return Found(tuple(key for key in KEYS if key.startswith(f"{section}.")), {})
    name = word.rpartition(".")[2].replace("-", "_").strip("_")
    alike = {other: said for other, said in ELSEWHERE.items() if name and name in other}
    exact = {name: ELSEWHERE[name]} if name in ELSEWHERE else {}
    named = {key for key in KEYS if name and name in key.partition(".")[2]}
    if exact or any(key.endswith(f".{name}") for key in named):
        alike = exact
    for said in alike.values():
        named |= set(keys_in(said))
    if not named and not alike:
        near = (
            did_you_mean(name, (*KEYS, *ELSEWHERE)) or f"; the sections are {', '.join(SECTIONS)}"
        )
        raise UsageError(f"no key is called {word}{near}")
    advice = {other: said for other, said in alike.items() if said not in KEYS}
    return Found(tuple(key for key in KEYS if key in named), advice)


def keys_in(text: str) -> list[str]:
    """Return the keys that a sentence names."""
    return [word for word in re.findall(r"[a-z]+\.[a-z_]+", text) if word in KEYS]


def names_elsewhere(key: str) -> list[str]:
    """Return what other programs call a key."""
    return [name for name, said in ELSEWHERE.items() if said == key or f"{key}=" in said]


def example_of(key: str) -> Any:
    """Return a value that somebody might set."""
    said = described(key)
    return said.default if said.example is None else said.example


def typed(value: object) -> str:
    """Return a value as a person types it on a command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return toml_of(value)
