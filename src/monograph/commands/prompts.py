"""What `monograph generate` is told beside the model: prompts, sampling options, a schema. Each refused in one line."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from monograph.config.nearest import did_you_mean
from monograph.decode import Sampling
from monograph.errors import InputRefused, UsageError
from monograph.storage.reading import json_fault, open_input, parse_json, readable

Message = dict[str, Any]
_FLAGS = ("stop", "max_tokens", "n", "chat", "choice", "regex", "json_schema", "prompts", "json")
_PIECE_BYTES = 1 << 20
_EXPECTED = {int: "a whole number", float: "a number", str: "a text"}
_KINDS = {name: type(value) if value is not None else int for name, value in vars(Sampling()).items()}
LARGEST_SCHEMA_BYTES, LARGEST_PROMPTS_BYTES = 1 << 20, 1 << 28
_PIPES = Path("/dev/fd")  # where a shell puts its <(command)


def sampling_of(numbers: dict[str, Any], pairs: Sequence[str]) -> Sampling:
    """`Sampling` of the flags and of --sampler KEY=VALUE; what is neither a number nor a text is JSON.

    Raises:
        UsageError: an unknown key, one that is given twice or has a flag of its own, or a value that it cannot have.
    """
    values = dict(numbers)
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if key in numbers or key in _FLAGS:
            raise UsageError(f"--sampler {pair}: it has a flag of its own, --{key.replace('_', '-')}")
        if key not in _KINDS:
            raise UsageError(f"--sampler {pair}: there is no option {_unknown(key, set(_KINDS) - set(numbers))}")
        if not equals:
            raise UsageError(f"--sampler {pair}: expected a value, {key}=VALUE")
        if key in values:
            raise UsageError(f"--sampler {pair}: {key} is given twice")
        try:
            values[key] = _KINDS[key](text) if _KINDS[key] in _EXPECTED else parse_json(text)
        except (ValueError, RecursionError) as error:
            what = f'JSON: {{"ID": BIAS, ...}} or ["TEXT", ...] ({json_fault(error)})'
            raise UsageError(f"--sampler {pair}: expected {_EXPECTED.get(_KINDS[key], what)}") from None
    return _sampling(Sampling(), values)


def prompts_of(
    path: Path, chat: bool, sampling: Sampling, vocabulary: int
) -> Iterator[tuple[str | list[Message], Sampling]]:
    """Prompts of a file: one a line, or of JSON lines the key `prompt`, or in a chat `messages`.

    JSON lines are a file called so, and what begins with an object that has one of these keys.

    The other keys of a record are options of `Sampling`, in place of those of the command line; all but `order`, which
    all texts share.

    Raises:
        InputRefused: it cannot be read, or a line has no prompt, a key that nobody reads, or a value that cannot be.
    """
    lines = _text_of(path, "--prompts", LARGEST_PROMPTS_BYTES).splitlines()
    messages_too = ', or "messages", a list of objects with "role" and "content", texts'
    expected = 'expected an object with "prompt", a text' + (messages_too if chat else "")
    records = path.suffix == ".jsonl" or _is_record(next(filter(str.strip, lines), ""))
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not records:
            yield line, sampling
            continue
        try:
            record = parse_json(line)
        except (ValueError, RecursionError) as error:
            raise InputRefused(f"{path}:{number}: no JSON: {json_fault(error)}; {expected}") from None
        options = dict(record) if isinstance(record, dict) else {}
        prompt, messages = options.pop("prompt", None), options.pop("messages", None) if chat else None
        if not (messages and isinstance(messages, list) and all(map(_is_message, messages))):
            messages = None
        if messages is None and not isinstance(prompt, str):
            raise InputRefused(f"{path}:{number}: {expected}")
        known = {"prompt", *(["messages"] if chat else []), *_KINDS} - {"order"}
        if unknown := options.keys() - known:
            raise InputRefused(f"{path}:{number}: there is no key {_unknown(min(unknown), known)}")
        try:
            own = _sampling(sampling, options)
            own.check_vocabulary(vocabulary)
        except UsageError as error:
            raise InputRefused(f"{path}:{number}: {error}") from None
        yield messages or prompt, own


def _is_record(line: str) -> bool:
    with suppress(ValueError, RecursionError):
        found = parse_json(line)
        return isinstance(found, dict) and not found.keys().isdisjoint(("prompt", "messages"))
    return False


def _sampling(first: Sampling, values: dict[str, Any]) -> Sampling:
    """Options with others put in, of which `logit_bias` has the keys of JSON, texts."""
    bias = values.get("logit_bias")
    if isinstance(bias, dict):
        ids = {int(key) if re.fullmatch("[0-9]{1,18}", key) else key: value for key, value in bias.items()}
        values = {**values, "logit_bias": ids}
    return replace(first, **values)


def _unknown(key: str, known: Iterable[str]) -> str:
    return key + (did_you_mean(key, known) or f"; expected one of {', '.join(sorted(known))}")


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
