"""Suggest the key that a person meant by a name that is not a key."""

import re
import shlex
from contextlib import suppress

from monograph.config.elsewhere import ELSEWHERE, VALUES
from monograph.config.keys import KEYS, SECTIONS, key_declaration
from monograph.config.lookup import example_of, typed
from monograph.config.settings import as_typed, checked_value, in_toml
from monograph.errors import UsageError, did_you_mean


def require_known(key: str, origin: str, value: str | None = None) -> None:
    """Refuse an unknown key.

    Args:
        key: the key.
        origin: where it was written.
        value: the value that was typed; None for a key in a file, where the value need not be
            repeated.

    Raises:
        UsageError: the key is unknown; the message suggests a key.
    """
    if key not in KEYS:
        advice = key_advice(key, value) or _list_keys(key)
        raise UsageError(f"{origin}: there is no key {key}{advice}")


def key_advice(name: str, value: str | None = None) -> str:
    """Return the end of a message about an unknown key or option: what to type instead.

    Args:
        name: the unknown name, with or without a section.
        value: the value that was typed; "" if there was none; None: the advice does not repeat the
            value.

    Returns:
        The advice, which begins with "; ", or "" if no key has a similar name or meaning.
    """
    section, _, short_name = name.lower().rpartition(".")
    keys = _keys_with_words(section, short_name, value)
    if keys:
        return _suggest(keys, value)
    # The entry for another program's name is a key, or a sentence that says what to do.
    replacement = ELSEWHERE.get(short_name)
    if replacement in KEYS:
        return _suggest([replacement], value)
    if replacement:
        if value is None:  # the name is in a file
            replacement = _with_toml_assignments(replacement)
        return f"; {replacement}"
    keys = [key for key in KEYS if key.endswith(f".{short_name}")]
    if keys:
        return _suggest(keys, value)
    # Only the key is taken from the question that `did_you_mean` returns.
    similar_key = did_you_mean(name, KEYS).removeprefix("; did you mean ").removesuffix("?")
    return _suggest([similar_key], value) if similar_key else ""


def _keys_with_words(section: str, short_name: str, value: str | None) -> list[str]:
    """Return the keys of a section whose names have all words of `short_name`.

    Keys that do not accept the value are left out. An unknown section has no keys, and neither has
    a name of one word, such as lr, since it would fit too many keys.
    """
    words = set(short_name.split("_"))
    if section not in SECTIONS or len(words) == 1:
        return []
    fields = SECTIONS[section].model_fields
    keys = [f"{section}.{field}" for field in fields if words <= set(field.split("_"))]
    return [key for key in keys if value is None or accepts(key, value)]


def _suggest(keys: list[str], value: str | None) -> str:
    """Return the question whether one of some keys was meant.

    The keys that accept the value are shown with it. If none accepts it, the first key is shown
    with the values that it accepts.
    """
    if value is None:
        return f"; did you mean {' or '.join(keys)}?"
    accepting_keys = [key for key in keys if accepts(key, value)]
    if accepting_keys:
        assignments = [as_typed({key: value}) for key in accepting_keys]
        return f"; did you mean {' or '.join(assignments)}?"
    for key in keys:
        replacement = VALUES.get(key, {}).get(value.lower())
        if not replacement:
            continue
        if accepts(key, replacement):
            return f"; did you mean {as_typed({key: replacement})}?"
        return f"; {replacement}"
    key = keys[0]
    example = as_typed({key: typed(example_of(key))})
    return f"; did you mean {key}? It takes {key_declaration(key).expected}, as in {example}"


def _with_toml_assignments(sentence: str) -> str:
    """Return a sentence of `ELSEWHERE` with each KEY=VALUE as a line of a TOML file.

    An assignment after "train ", as in `monograph train KEY=VALUE`, stays as it is.
    """
    assignment = r"(?:[a-z]+\.[a-z_]+)=(?:'[^']*'|\S+?)"
    # Without \b, the "rain.parallel" of "train train.parallel=ddp" would match.
    assignments = rf"(?<!train )\b{assignment}(?: {assignment})*(?=[,;:]?(?:\s|$))"

    def as_lines(match: re.Match[str]) -> str:
        return in_toml(dict(word.split("=", 1) for word in shlex.split(match[0])))

    return re.sub(assignments, as_lines, sentence)


def accepts(key: str, text: str) -> bool:
    """Return whether a text is a value of a key, or an axis over which a sweep varies the key."""
    if re.match("(log|lin):", text):
        return True
    are_values = all(_is_value(key, part) for part in text.split(","))
    # The whole text may be a value although its parts are not: a text may have commas.
    return are_values or _is_value(key, text)


def _is_value(key: str, text: str) -> bool:
    with suppress(UsageError):
        checked_value(key, text, "", from_text=True)
        return True
    return False


def _list_keys(key: str) -> str:
    """Return the keys of a key's section, or all sections if that section is unknown."""
    section = key.partition(".")[0]
    if section in SECTIONS:
        return f"; [{section}] has {', '.join(SECTIONS[section].model_fields)}"
    return f"; the sections are {', '.join(SECTIONS)}"
