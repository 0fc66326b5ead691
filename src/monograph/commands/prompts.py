"""What `monograph generate` is told beside the model: prompts, sampling options, a schema. Each refused in one line."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from monograph.config.nearest import did_you_mean
from monograph.data.files import json_fault, parse_json
from monograph.decode import Sampling
from monograph.errors import InputRefused, UsageError
from monograph.files import open_input, readable

Message = dict[str, Any]
_FLAGS = ("stop", "max_tokens", "n", "chat", "choice", "regex", "json_schema", "prompts", "json")
_PIECE_BYTES = 1 << 20
LARGEST_SCHEMA_BYTES, LARGEST_PROMPTS_BYTES = 1 << 20, 1 << 28
_PIPES = Path("/dev/fd")  # where a shell puts its <(command)


def sampling_of(numbers: dict[str, Any], pairs: Sequence[str]) -> Sampling:
    """`Sampling` of the flags and of --sampler KEY=VALUE.

    Raises:
        UsageError: an unknown key, one that is given twice or has a flag of its own, or a value that it cannot have.
    """
    kinds = {name: type(value) if value is not None else int for name, value in vars(Sampling()).items()}
    keys = [name for name in kinds if name not in (*numbers, "logit_bias")]
    values = dict(numbers)
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if key in numbers or key in _FLAGS:
            raise UsageError(f"--sampler {pair}: it has a flag of its own, --{key.replace('_', '-')}")
        if key == "logit_bias":
            raise UsageError(f"--sampler {pair}: biases are given in Python, mono.Sampling(logit_bias={{id: bias}})")
        if key not in keys:
            hint = did_you_mean(key, keys) or f"; expected one of {', '.join(keys)}"
            raise UsageError(f"--sampler {pair}: there is no option {key}{hint}")
        if not equals:
            raise UsageError(f"--sampler {pair}: expected a value, {key}=VALUE")
        if key in values:
            raise UsageError(f"--sampler {pair}: {key} is given twice")
        try:
            values[key] = kinds[key](text)
        except ValueError:
            expected = "a whole number" if kinds[key] is int else "a number"
            raise UsageError(f"--sampler {pair}: expected {expected}") from None
    return Sampling(**values)


def prompts_of(path: Path, chat: bool) -> Iterator[str | list[Message]]:
    """Prompts of a file: one a line, or of JSON lines the key `prompt`, or in a chat `messages`.

    Raises:
        InputRefused: it cannot be read, or a line has no prompt.
    """
    lines = _text_of(path, "--prompts", LARGEST_PROMPTS_BYTES).splitlines()
    messages_too = ', or "messages", a list of objects with "role" and "content", texts'
    expected = 'expected an object with "prompt", a text' + (messages_too if chat else "")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield line
            continue
        try:
            record = parse_json(line)
        except (ValueError, RecursionError) as error:
            raise InputRefused(f"{path}:{number}: no JSON: {json_fault(error)}; {expected}") from None
        record = record if isinstance(record, dict) else {}
        prompt, messages = record.get("prompt"), record.get("messages")
        if chat and isinstance(messages, list) and messages and all(map(_is_message, messages)):
            yield messages
        elif isinstance(prompt, str):
            yield prompt
        else:
            raise InputRefused(f"{path}:{number}: {expected}")


def schema_text(path: Path) -> str:
    """A JSON schema's file.

    Raises:
        InputRefused: it cannot be read, is larger than 1 MiB, or is not UTF-8.
    """
    return _text_of(path, "--json-schema", LARGEST_SCHEMA_BYTES)


def _is_message(value: Any) -> bool:
    """A role and what it says: a text, or the parts or calls that some templates know instead."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list) or "tool_calls" in value


def _text_of(path: Path, flag: str, most_bytes: int) -> str:
    """A file's text, that of standard input for "-".

    Raises:
        InputRefused: it cannot be read, is larger, or is not UTF-8.
    """
    try:
        if path == Path("-"):
            content = _at_most(sys.stdin.buffer, most_bytes + 1)
        else:
            with readable(path), path.open("rb") if path.parent == _PIPES else open_input(path) as file:
                content = _at_most(file, most_bytes + 1)
    except OSError as error:
        raise InputRefused(f"{flag} {path}: cannot be read: {error.strerror}") from None
    if len(content) > most_bytes:
        raise InputRefused(f"{flag} {path}: is larger than {most_bytes / 2**20:,.0f} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputRefused(f"{flag} {path}: byte {error.start} (line {line}) is not UTF-8; convert it") from None


def _at_most(file: BinaryIO, most_bytes: int) -> bytes:
    """So many bytes or a little more; `read` would take memory for all that there could be."""
    pieces = iter(lambda: file.read(_PIECE_BYTES), b"")
    return b"".join(itertools.islice(pieces, -(-most_bytes // _PIECE_BYTES)))
