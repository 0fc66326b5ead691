"""Read the values of a TOML file, each with its line and as it was written, and say what is wrong
with the file.
"""

import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from monograph.config.given import Given, raise_all
from monograph.config.keys import KEYS, SECTIONS, described
from monograph.config.lookup import example_of
from monograph.config.settings import toml_of
from monograph.config.toml_slips import explained
from monograph.config.unknown import require_known
from monograph.errors import UsageError, did_you_mean
from monograph.storage.reading import read_input

MOST_TOML_BYTES = 1 << 20
_HEADER = re.compile(r"\s*\[+\s*([\w.\"'-]+)\s*\]")
_LONGEST = 500  # characters of a value that is shown as it was written
_ENTRY = re.compile(r"\s*([\w.\"' -]+?)\s*=(.*)")


def from_toml(path: Path) -> dict[str, Given]:
    """Return the values in a TOML file by dotted key, not yet checked.

    Raises:
        UsageError: see `given_and_faults`.
    """
    given, faults = given_and_faults(path)
    raise_all(faults)
    return given


def given_and_faults(path: Path) -> tuple[dict[str, Given], list[UsageError]]:
    """Return the values in a TOML file by dotted key, not yet checked, and what is wrong with the
    file.

    That is: it cannot be read, is not TOML, has an unknown section or key, or a table in the place
    of a value.
    """
    try:
        text = _text(path)
        tables = tomllib.loads(text)
    except UsageError as error:
        return {}, [error]
    except tomllib.TOMLDecodeError as error:
        return {}, [UsageError(explained(path, text, str(error)))]
    except RecursionError:
        return {}, [UsageError(f"{path}: not read: it is nested too deeply")]
    # Of a key that is written in several lines the first counts.
    places = dict(reversed([*_places(text)]))
    given: dict[str, Given] = {}
    faults: list[UsageError] = []
    for section, table in tables.items():
        try:
            given |= _of_section(path, places, section, table, faults)
        except UsageError as error:
            faults.append(error)
    return given, faults


def _text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        UsageError: it cannot be read or is no UTF-8.
    """
    try:
        content = read_input(path, MOST_TOML_BYTES)
        if b"\0" in content:
            raise UsageError(
                f"{path}: not UTF-8 text (it has NUL bytes, as UTF-16 does): save it as UTF-8"
            )
        return content.decode("utf-8-sig")  # some editors begin it with a byte order mark
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _of_section(
    path: Path,
    places: dict[str, tuple[int, str]],
    section: str,
    table: Any,
    faults: list[UsageError],
) -> dict[str, Given]:
    """Return the values of a section; add what is wrong with its keys to `faults`.

    Raises:
        UsageError: it is no section, or no table.
    """
    origin = _origin(path, places, section)
    if section not in SECTIONS:
        if not isinstance(table, dict):
            require_known(section, origin)
        if not table:
            raise UsageError(
                f"{origin}: there is no section [{section}]{did_you_mean(section, SECTIONS)}"
            )
        first = next(iter(table))  # all of its keys are unknown: one says why
        require_known(f"{section}.{first}", _origin(path, places, f"{section}.{first}"))
    if not isinstance(table, dict):
        raise UsageError(_no_table(origin, section, table))
    given: dict[str, Given] = {}
    for name, value in table.items():
        key = f"{section}.{name}"
        origin = _origin(path, places, key)
        try:
            require_known(key, origin)
            if isinstance(value, dict):
                raise UsageError(_no_value(origin, key, value))
            given[key] = Given(
                value,
                origin,
                1,
                from_text=False,
                written=_written(value, places.get(key, (0, ""))[1]),
            )
        except UsageError as error:
            faults.append(error)
    return given


def _no_table(origin: str, section: str, value: object) -> str:
    """Return the message for a section that is given a value."""
    first = next(key for key in KEYS if key.startswith(f"{section}."))
    line = f"{first.partition('.')[2]} = {toml_of(example_of(first))}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"{origin}: [[{section}]] is a list of tables, and {section} is one section: write [{section}]"
    return (
        f"{origin}: {section} = {_shown(value)}: {section} is a section, not a key: "
        f"write its keys under a line [{section}], as in `{line}`; `monograph keys {section}` lists them"
    )


def _no_value(origin: str, key: str, table: dict[str, Any]) -> str:
    """Return the message for a key that is given a table."""
    section, _, name = key.partition(".")
    own = [inner for inner in table if f"{section}.{inner}" in KEYS]
    example = f"{name} = {toml_of(example_of(key))}"
    for inner in own:  # the keys of a section were written under one of them
        return f"{origin}: {key} is a key, not a section: write {inner} under [{section}]"
    return (
        f"{origin}: {key} is a key, not a section: write `{example}` under [{section}]; it takes "
        f"{described(key).expected}"
    )


def _shown(value: object) -> str:
    return "{...}" if isinstance(value, dict) else toml_of(value)


def _places(text: str) -> Iterator[tuple[str, tuple[int, str]]]:
    """Yield each dotted name that a line assigns or heads, with the line's number and the text
    after its `=`.
    """
    section = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if header := _HEADER.match(line):
            section = _plain(header[1])
            yield section, (number, "")
        elif entry := _ENTRY.match(line):
            name = ".".join(filter(None, (section, _plain(entry[1]))))
            yield name, (number, entry[2])
            # `train.seed = 1` opens the section, too.
            yield name.partition(".")[0], (number, "")


def _plain(name: str) -> str:
    return re.sub(r"[\"'\s]", "", name)


def _origin(path: Path, places: dict[str, tuple[int, str]], key: str) -> str:
    """Return `run.toml:7`, or `run.toml` if the key has no line of its own, as in an inline table."""
    number = places.get(key, (0, ""))[0]
    return f"{path}:{number}" if number else str(path)


def _written(value: object, after: str) -> str:
    """Return the part of a line after its `=` that is this value: without a comment; "" if it goes
    on elsewhere.
    """
    if len(after) > _LONGEST:
        return ""
    for end in (*(found.start() for found in re.finditer("#", after)), len(after)):
        with suppress(tomllib.TOMLDecodeError, RecursionError):
            if repr(tomllib.loads(f"value = {after[:end]}")["value"]) == repr(value):
                return after[:end].strip()
    return ""
