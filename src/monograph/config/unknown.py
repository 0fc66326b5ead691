"""Answer a key that is not there: with the key that was meant, and with its value where that has
one.
"""

import re
import shlex
from contextlib import suppress

from monograph.config.elsewhere import ELSEWHERE, VALUES
from monograph.config.keys import KEYS, SECTIONS, described
from monograph.config.lookup import example_of, typed
from monograph.config.settings import as_typed, check, in_toml
from monograph.errors import UsageError, did_you_mean


def require_known(key: str, origin: str, value: str | None = None) -> None:
    """Refuse an unknown key.

    Args:
        key: the key.
        origin: where it was written.
        value: what was typed as its value; None: it was written in a file, where the value stays as
            it is.

    Raises:
        UsageError: the key is unknown; the message names the nearest known one.
    """
    if key not in KEYS:
        raise UsageError(f"{origin}: there is no key {key}{meant(key, value) or _known_keys(key)}")


def meant(name: str, value: str | None = None) -> str:
    """Return the end of a message about an unknown key or option: what to say instead; "" if
    nothing is alike.

    Args:
        name: its name, with or without a section.
        value: its value; None: the value is said elsewhere; "": there is none.
    """
    section, _, short = name.lower().rpartition(".")
    if own := _of_section(section, short, value):
        return _question(own, value)
    if said := ELSEWHERE.get(short):
        if said in KEYS:
            return _question([said], value)
        return f"; {said if value is not None else _for_file(said)}"
    if same := [key for key in KEYS if key.endswith(f".{short}")]:
        return _question(same, value)
    near = did_you_mean(name, KEYS).removeprefix("; did you mean ").removesuffix("?")
    return _question([near], value) if near else ""


def _of_section(section: str, short: str, value: str | None) -> list[str]:
    """Return the keys of a section, if that is there, whose names have all words of another name
    and take its value.

    One word, such as lr, says too little.
    """
    words = set(short.split("_"))
    fields = SECTIONS[section].model_fields if section in SECTIONS and len(words) > 1 else ()
    keys = [f"{section}.{field}" for field in fields if words <= set(field.split("_"))]
    return [key for key in keys if value is None or takes(key, value)]


def _question(keys: list[str], value: str | None) -> str:
    """Ask whether one of some keys was meant, each with the value if it takes that, or else with
    what it takes.
    """
    if value is None:
        return f"; did you mean {' or '.join(keys)}?"
    if fitting := [key for key in keys if takes(key, value)]:
        return f"; did you mean {' or '.join(as_typed({key: value}) for key in fitting)}?"
    for key in keys:
        if said := VALUES.get(key, {}).get(value.lower()):
            return f"; did you mean {as_typed({key: said})}?" if takes(key, said) else f"; {said}"
    key = keys[0]
    example = as_typed({key: typed(example_of(key))})
    return f"; did you mean {key}? It takes {described(key).expected}, as in {example}"


def _for_file(said: str) -> str:
    """Return a sentence with its keys and values as a file has them."""
    assignment = r"(?:[a-z]+\.[a-z_]+)=(?:'[^']*'|\S+?)"

    def assigned(found: re.Match[str]) -> str:
        return in_toml(dict(word.split("=", 1) for word in shlex.split(found[0])))

    return re.sub(rf"(?<!train ){assignment}(?: {assignment})*(?=[,;:]?(?:\s|$))", assigned, said)


def takes(key: str, text: str) -> bool:
    """Return whether a text is a value of a key, or what a sweep may vary it by."""
    if re.match("(log|lin):", text):
        return True
    return all(_is_value(key, each) for each in text.split(",")) or _is_value(key, text)


def _is_value(key: str, text: str) -> bool:
    with suppress(UsageError):
        check(key, text, "", from_text=True)
        return True
    return False


def _known_keys(key: str) -> str:
    section = key.partition(".")[0]
    if section in SECTIONS:
        return f"; [{section}] has {', '.join(SECTIONS[section].model_fields)}"
    return f"; the sections are {', '.join(SECTIONS)}"
