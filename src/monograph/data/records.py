"""Read records, each of which is a document, from lines of JSON, and describe the faults of bad
records.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from monograph.data.reading import read_blocks
from monograph.storage.reading import KeyTwice, object_once

LONGEST_BYTES = 1 << 25  # of a record; parsing a line can take some twenty times its size in memory


class Fault(NamedTuple):
    """The fault of a bad record: `reason` is a key for counting, and `detail` follows "FILE:LINE: "
    in a message.
    """

    reason: str
    detail: str


class Unusable(Exception):
    """A record cannot be used: see `fault`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.fault = Fault(reason, detail)


Record = tuple[int, str | Fault]
EMPTY_VALUES: tuple[Any, ...] = (None, "", [], {})  # values under a key that say nothing

_TOO_LONG = Fault("too long", f"is longer than {LONGEST_BYTES >> 20} MiB")
JSON_TYPES: dict[type, str] = {
    dict: "an object",
    list: "an array",
    float: "a number",
    int: "a number",
    str: "a string",
    bool: "a boolean",
    type(None): "null",
}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


# Numbers become floats, as Python refuses to read integers of thousands of digits, and a record's
# text is no number.
_JSON = json.JSONDecoder(
    object_pairs_hook=object_once, parse_int=float, parse_constant=_no_constant
)
# For conversations, whose numbers are written again, as in the arguments of a tool call: 3 stays 3.
_EXACT = json.JSONDecoder(object_pairs_hook=object_once, parse_constant=_no_constant)


def json_lines(path: Path, key: str) -> Iterator[Record]:
    """Yield (line number from 1, text under `key`, or its fault) for every nonblank line; see
    `json_objects`.
    """
    for number, record in json_objects(path):
        if isinstance(record, Fault):
            yield number, record
        elif key not in record:
            keys = f"its keys are {list_names(list(record))}{_missing(record)}"
            yield number, Fault("no text", f"has no key {quote(key)}; {keys}")
        else:
            yield number, text_or_fault(record[key], key)


def _missing(record: Mapping[str, Any]) -> str:
    """Return a hint for a pair of answers, or a record that has only one of "prompt" and
    "completion", else "".
    """
    if "chosen" in record and "rejected" in record:
        return "; such pairs are for `monograph train` with prefer.loss"
    if "prompt" in record:
        return "; a conversation needs 'completion' with 'prompt', and prompts to reward need rl.reward"
    return "; a conversation needs 'prompt' with 'completion'" if "completion" in record else ""


def json_objects(path: Path, exact: bool = False) -> Iterator[tuple[int, dict[str, Any] | Fault]]:
    """Yield (line number from 1, object, or its fault) for every line that is not blank.

    Numbers become floats, or with `exact` ints and floats as they are written (up to 4,300 digits).
    A byte order mark at the beginning of the file is not part of its first line.

    Raises:
        Damaged: the file's compression is damaged.
        InputRefused: the file cannot be read.
    """
    for number, line in enumerate(_lines(path), 1):
        if line is None:
            yield number, _TOO_LONG
        elif not line.isspace() and line:
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            yield number, _parsed(line, _EXACT if exact else _JSON)


def text_or_fault(text: object, key: str) -> str | Fault:
    """Return `text` if it can be trained on or is empty, else its fault."""
    if not isinstance(text, str):
        return Fault("text is no string", f"{quote(key)} is {JSON_TYPES[type(text)]}, not a string")
    if "\0" in text:
        return Fault("NUL in the text", f"{quote(key)} has a NUL character at {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Fault(
            "lone surrogate", f"{quote(key)} has a lone surrogate at character {error.start}"
        )
    return text


def checked_text(text: object, key: str) -> str:
    """Return `text` if it can be trained on or is empty; raise Unusable with its fault."""
    found = text_or_fault(text, key)
    if isinstance(found, Fault):
        raise Unusable(*found)
    return found


def not_utf8(error: UnicodeDecodeError) -> Fault:
    """Return the fault of a record whose bytes are not UTF-8."""
    return Fault("not UTF-8", f"byte {error.start} is not UTF-8: 0x{error.object[error.start]:02x}")


def _parsed(line: bytes, decoder: json.JSONDecoder) -> dict[str, Any] | Fault:
    fault = Fault("not JSON", "is nested too deeply")
    try:
        record = decoder.decode(line.decode())
        if isinstance(record, dict):
            return record
        fault = Fault("not an object", f"is {JSON_TYPES[type(record)]}, not an object")
    except UnicodeDecodeError as error:
        fault = not_utf8(error)
    except KeyTwice as error:
        fault = Fault("a key twice", f"has the key {quote(str(error))} twice in one object")
    except json.JSONDecodeError as error:
        fault = Fault("not JSON", f"is not JSON: {error.msg}, at character {error.pos + 1}")
    except ValueError as error:
        fault = Fault("not JSON", f"is not JSON: {error}")
    except RecursionError:
        pass
    return fault


def quote(name: str) -> str:
    """Return a name from a file, shortened and safe to show: `ascii` escapes commands to a
    terminal.
    """
    return ascii(name if len(name) <= 40 else name[:40] + "...")


def list_names(names: list[str]) -> str:
    """Return the first six of these names in one text."""
    shown = ", ".join(map(quote, names[:6])) or "none"
    return shown + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _lines(path: Path) -> Iterator[bytes | None]:
    """Yield the lines without their line feeds; None for a line of more than LONGEST_BYTES, which
    is not kept.
    """
    parts: list[bytes] = []
    size = 0

    def line() -> bytes | None:
        return b"".join(parts) if size <= LONGEST_BYTES else None

    for block in read_blocks(path):
        *ends, rest = block.split(b"\n")
        for end in ends:
            size += len(end)
            parts.append(end)
            yield line()
            parts = []
            size = 0
        size += len(rest)
        parts = [*parts, rest] if size <= LONGEST_BYTES else []
    if size:
        yield line()
