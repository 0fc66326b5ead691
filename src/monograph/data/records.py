"""Read records from lines of JSON, and describe what is wrong with bad ones."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from monograph.data.reading import decompressed_blocks
from monograph.storage.reading import KeyTwice, object_once

# The size of the largest record that is read. Parsing a line of JSON can take about twenty times
# its size in memory.
MAX_RECORD_BYTES = 1 << 25


class Fault(NamedTuple):
    """What is wrong with a bad record.

    Attributes:
        reason: the kind of fault; skipped records are counted by it.
        detail: the end of a message that begins with "FILE:LINE: ".
    """

    reason: str
    detail: str


class Unusable(Exception):
    """A record cannot be used, for the reason in `fault`. The reader may skip it and go on."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.fault = Fault(reason, detail)


# A record's number in its file, from 1, and the record's text, or its fault if it is bad.
NumberedText = tuple[int, str | Fault]
# The readers of conversations and of prompts treat a key with one of these values as if the record did
# not have the key. The readers of texts do not, because a text may be empty.
EMPTY_VALUES: tuple[Any, ...] = (None, "", [], {})

_TOO_LONG = Fault("too long", f"is longer than {MAX_RECORD_BYTES >> 20} MiB")
# What JSON calls the type of a Python value, for error messages.
JSON_TYPES: dict[type, str] = {
    dict: "an object",
    list: "an array",
    float: "a number",
    int: "a number",
    str: "a string",
    bool: "a boolean",
    type(None): "null",
}


def _refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python reads although JSON does not have them."""
    raise ValueError(f"{name} is not a JSON value")


# This decoder is for records of texts. Only the text of such a record is used, so its numbers do not
# matter. Integers are read as floats, because Python refuses to read an int of thousands of digits. Both
# decoders refuse an object that has a key twice (`object_once`).
_LENIENT_DECODER = json.JSONDecoder(
    object_pairs_hook=object_once, parse_int=float, parse_constant=_refuse_constant
)
# This decoder is for conversations. Their numbers are written into the text to train on, for
# example in the arguments of a tool call, where 3 must stay 3.
_EXACT_DECODER = json.JSONDecoder(object_pairs_hook=object_once, parse_constant=_refuse_constant)


def json_texts(path: Path, key: str) -> Iterator[NumberedText]:
    """Yield (line number from 1, text under `key` or a fault) for every line that is not blank.

    Raises:
        Damaged, InputRefused: as in `json_objects`.
    """
    for number, record in json_objects(path):
        if isinstance(record, Fault):
            yield number, record
        elif key not in record:
            keys = f"its keys are {list_names(list(record))}{_missing_key_hint(record)}"
            yield number, Fault("no text", f"has no key {quote(key)}; {keys}")
        else:
            yield number, text_or_fault(record[key], key)


def _missing_key_hint(record: Mapping[str, Any]) -> str:
    """Return a hint if a record without a text looks like another kind of record, and else ""."""
    if "chosen" in record and "rejected" in record:
        return "; such pairs are for `monograph train` with prefer.loss"
    if "prompt" in record:
        return "; a conversation needs 'completion' with 'prompt', and prompts to reward need rl.reward"
    if "completion" in record:
        return "; a conversation needs 'prompt' with 'completion'"
    return ""


def json_objects(path: Path, exact: bool = False) -> Iterator[tuple[int, dict[str, Any] | Fault]]:
    """Yield (line number from 1, object or fault) for every line that is not blank.

    A byte order mark at the beginning of the file is not part of its first line.

    Args:
        path: the file.
        exact: whether numbers are ints and floats as they are written, with up to 4,300 digits;
            otherwise all numbers become floats.

    Raises:
        Damaged: the file's compression is damaged.
        InputRefused: the file cannot be read.
    """
    decoder = _EXACT_DECODER if exact else _LENIENT_DECODER
    for number, line in enumerate(_lines(path), 1):
        if line is None:
            yield number, _TOO_LONG
            continue
        # A blank line is skipped. (`isspace` is false for an empty line.) A line that has only a byte order
        # mark is not blank. It is a fault, because it is not JSON. So the mark is removed only after this test.
        if not line or line.isspace():
            continue
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        yield number, _parse(line, decoder)


def text_or_fault(text: object, key: str) -> str | Fault:
    """Return `text` if it is valid, else its fault. A text may be empty, but not have a NUL.

    Args:
        text: the value of a record under a key; any JSON value.
        key: the key, for the message.
    """
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
    """Return `text` if it is valid, as in `text_or_fault`.

    Raises:
        Unusable: it has a fault.
    """
    checked = text_or_fault(text, key)
    if isinstance(checked, Fault):
        raise Unusable(checked.reason, checked.detail)
    return checked


def utf8_fault(error: UnicodeDecodeError) -> Fault:
    """Return the fault of a record whose bytes are not UTF-8."""
    return Fault("not UTF-8", f"byte {error.start} is not UTF-8: 0x{error.object[error.start]:02x}")


def _parse(line: bytes, decoder: json.JSONDecoder) -> dict[str, Any] | Fault:
    """Return the object in a line, or the line's fault."""
    try:
        record = decoder.decode(line.decode())
    except UnicodeDecodeError as error:
        fault = utf8_fault(error)
    except KeyTwice as error:
        fault = Fault("a key twice", f"has the key {quote(str(error))} twice in one object")
    except json.JSONDecodeError as error:
        fault = Fault("not JSON", f"is not JSON: {error.msg}, at character {error.pos + 1}")
    except ValueError as error:
        fault = Fault("not JSON", f"is not JSON: {error}")
    except RecursionError:
        fault = Fault("not JSON", "is nested too deeply")
    else:
        if isinstance(record, dict):
            return record
        fault = Fault("not an object", f"is {JSON_TYPES[type(record)]}, not an object")
    return fault


def quote(name: str) -> str:
    """Return a name from a file in quotes, cut to 40 characters.

    It is safe to show: `ascii` escapes the characters that a terminal would obey.
    """
    return ascii(name if len(name) <= 40 else name[:40] + "...")


def list_names(names: list[str]) -> str:
    """Return the first six names, quoted, and the number of the others, for a message."""
    shown = ", ".join(map(quote, names[:6])) or "none"
    if len(names) > 6:
        shown += f" and {len(names) - 6} more"
    return shown


def _lines(path: Path) -> Iterator[bytes | None]:
    """Yield the lines of a file without their line feeds.

    In place of a line of more than MAX_RECORD_BYTES, None is yielded. Such a line is not kept in memory.
    """
    line_parts: list[bytes] = []  # the parts of the line that is being read, one for each block
    line_bytes = 0  # the size of that line so far

    def complete_line() -> bytes | None:
        return b"".join(line_parts) if line_bytes <= MAX_RECORD_BYTES else None

    for block in decompressed_blocks(path):
        # Each part ends with a line feed and so completes a line, except the last part of the block, whose
        # line continues in the next block.
        *line_ends, unfinished_part = block.split(b"\n")
        for line_end in line_ends:
            line_bytes += len(line_end)
            line_parts.append(line_end)
            yield complete_line()
            line_parts = []
            line_bytes = 0
        line_bytes += len(unfinished_part)
        if line_bytes <= MAX_RECORD_BYTES:
            line_parts.append(unfinished_part)
        else:
            line_parts = []
    if line_bytes:
        yield complete_line()
