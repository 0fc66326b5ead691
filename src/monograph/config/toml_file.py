"""Read the values of a TOML file, each with its line and the text that a person wrote.

A *fault* is something that is wrong with the file. Faults are collected, so that one error names
all of them.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from monograph.config.given import TOML_RANK, SourcedValue, raise_all
from monograph.config.keys import KEYS, SECTIONS, key_declaration
from monograph.config.lookup import example_of
from monograph.config.settings import toml_of
from monograph.config.toml_slips import toml_error_message
from monograph.config.unknown import require_known
from monograph.errors import UsageError, did_you_mean
from monograph.storage.reading import read_input

MAX_TOML_BYTES = 1 << 20
# A line with more characters after its `=` is not searched for the end of the value.
MAX_WRITTEN = 500
_HEADER = re.compile(r"\s*\[+\s*([\w.\"'-]+)\s*\]")  # [NAME] or [[NAME]]
_ENTRY = re.compile(r"\s*([\w.\"' -]+?)\s*=(.*)")  # NAME = TEXT


class _Line(NamedTuple):
    """The line of a section or a key.

    Attributes:
        number: its number, from 1.
        text: the text after its `=`; "" for a section.
    """

    number: int
    text: str


def toml_values(path: Path) -> dict[str, SourcedValue]:
    """Return the values in a TOML file by dotted key, not yet checked.

    Raises:
        UsageError: the file has one of the faults of `toml_values_and_faults`.
    """
    values, faults = toml_values_and_faults(path)
    raise_all(faults)
    return values


def toml_values_and_faults(path: Path) -> tuple[dict[str, SourcedValue], list[UsageError]]:
    """Return the values in a TOML file by dotted key, not yet checked, and the file's faults.

    There is a fault if the file cannot be read or is not TOML, and for each unknown section or key,
    each table that should be a value, and each value that should be a table.
    """
    try:
        text = _read_text(path)
        tables = tomllib.loads(text)
    except UsageError as error:
        return {}, [error]
    except tomllib.TOMLDecodeError as error:
        return {}, [UsageError(toml_error_message(path, text, str(error)))]
    except RecursionError:
        return {}, [UsageError(f"{path}: not read: it is nested too deeply")]
    # A section may be mentioned in several lines, and its first line is shown. A dict keeps the
    # last item of a key, hence `reversed`.
    lines = dict(reversed([*_lines_by_name(text)]))
    values: dict[str, SourcedValue] = {}
    faults: list[UsageError] = []
    for section, table in tables.items():
        try:
            values |= _values_of_section(path, lines, section, table, faults)
        except UsageError as error:
            faults.append(error)
    return values, faults


def _read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        UsageError: the file cannot be read, or is not UTF-8.
    """
    try:
        content = read_input(path, MAX_TOML_BYTES)
        if b"\0" in content:
            raise UsageError(
                f"{path}: not UTF-8 text (it has NUL bytes, as UTF-16 does): save it as UTF-8"
            )
        return content.decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _values_of_section(
    path: Path,
    lines: Mapping[str, _Line],
    section: str,
    table: Any,
    faults: list[UsageError],
) -> dict[str, SourcedValue]:
    """Return the values of a section; append to `faults` for each key that is wrong.

    Args:
        path: the file.
        lines: the lines of sections and keys by dotted name.
        section: the section's name.
        table: what tomllib has read under this name.
        faults: the faults so far.

    Raises:
        UsageError: there is no such section, or it is not a table.
    """
    origin = _origin(path, lines, section)
    if section not in SECTIONS:
        if not isinstance(table, dict):
            # The name is that of a key outside of any section, which is refused.
            require_known(section, origin)
        if not table:
            raise UsageError(
                f"{origin}: there is no section [{section}]{did_you_mean(section, SECTIONS)}"
            )
        # All keys of an unknown section are unknown. The message about the first one says so.
        first_key = f"{section}.{next(iter(table))}"
        require_known(first_key, _origin(path, lines, first_key))
    if not isinstance(table, dict):
        raise UsageError(_not_a_table_message(origin, section, table))
    values: dict[str, SourcedValue] = {}
    for name, value in table.items():
        key = f"{section}.{name}"
        origin = _origin(path, lines, key)
        try:
            require_known(key, origin)
            if isinstance(value, dict):
                raise UsageError(_not_a_value_message(origin, key, value))
            written = _written_value(value, lines[key].text) if key in lines else ""
            values[key] = SourcedValue(
                value, origin, rank=TOML_RANK, from_text=False, written=written
            )
        except UsageError as error:
            faults.append(error)
    return values


def _not_a_table_message(origin: str, section: str, value: object) -> str:
    """Return the message for a section that the file assigns a value to."""
    first_key = next(key for key in KEYS if key.startswith(f"{section}."))
    example = f"{first_key.partition('.')[2]} = {toml_of(example_of(first_key))}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"{origin}: [[{section}]] is a list of tables, and {section} is one section: write [{section}]"
    shown_value = "{...}" if isinstance(value, dict) else toml_of(value)
    return (
        f"{origin}: {section} = {shown_value}: {section} is a section, not a key: "
        f"write its keys under a line [{section}], as in `{example}`; `monograph keys {section}` lists them"
    )


def _not_a_value_message(origin: str, key: str, table: dict[str, Any]) -> str:
    """Return the message for a key that the file uses as a section."""
    section, _, name = key.partition(".")
    # For example a file with [train.seed] above the other keys of [train].
    keys_of_section = [inner for inner in table if f"{section}.{inner}" in KEYS]
    if keys_of_section:
        return (
            f"{origin}: {key} is a key, not a section: write {keys_of_section[0]} under [{section}]"
        )
    example = f"{name} = {toml_of(example_of(key))}"
    return (
        f"{origin}: {key} is a key, not a section: write `{example}` under [{section}]; it takes "
        f"{key_declaration(key).expected}"
    )


def _lines_by_name(text: str) -> Iterator[tuple[str, _Line]]:
    """Yield (dotted name, line) for each section that a line begins, and each key that it assigns."""
    section = ""
    for number, line in enumerate(text.split("\n"), start=1):
        header = _HEADER.match(line)
        entry = _ENTRY.match(line)
        if header:
            section = _without_quotes(header[1])
            yield section, _Line(number, "")
        elif entry:
            name = _without_quotes(entry[1])
            if section:
                name = f"{section}.{name}"
            yield name, _Line(number, entry[2])
            # `train.seed = 1` before any header is a line of the section "train", too.
            yield name.partition(".")[0], _Line(number, "")


def _without_quotes(name: str) -> str:
    return re.sub(r"[\"'\s]", "", name)


def _origin(path: Path, lines: Mapping[str, _Line], name: str) -> str:
    """Return `run.toml:7`, or `run.toml` for a key without a line, as in an inline table."""
    return f"{path}:{lines[name].number}" if name in lines else str(path)


def _written_value(value: object, text: str) -> str:
    """Return the part of a line that is the value, without a comment.

    The result is "" if the value continues in the next line, or if the text has more than
    `MAX_WRITTEN` characters.

    Args:
        value: the value, as tomllib has parsed it.
        text: the line after its `=`.
    """
    if len(text) > MAX_WRITTEN:
        return ""
    # A # begins a comment unless it is inside a string. So the text is cut at each one, until what is left
    # is the value. `repr` tells true from 1, and 1 from 1.0.
    comment_starts = [match.start() for match in re.finditer("#", text)]
    for end in (*comment_starts, len(text)):
        with suppress(tomllib.TOMLDecodeError, RecursionError):
            if repr(tomllib.loads(f"value = {text[:end]}")["value"]) == repr(value):
                return text[:end].strip()
    return ""
