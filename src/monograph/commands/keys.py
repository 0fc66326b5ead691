"""`monograph keys`: explain the keys of a configuration."""

import json as jsonlib
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from monograph.config.keys import KEYS, SECTIONS, Key, key_declaration
from monograph.config.lookup import KeyMatches, example_of, keys_named, names_elsewhere, typed
from monograph.config.settings import toml_of
from monograph.terminal import is_terminal, shell_words

WIDTH = 100  # of lines where there is no terminal


def run(word: str | None, *, json: bool) -> None:
    """Print the keys that a word stands for, or all; see the command line's help."""
    found = KeyMatches(KEYS, {}) if word is None else keys_named(word)
    if json:
        print(
            jsonlib.dumps(
                {"schema": "monograph.keys/1", "keys": [_entry(key) for key in found.keys]}
            )
        )
        return
    width = min(shutil.get_terminal_size().columns, WIDTH) if is_terminal(sys.stdout) else WIDTH
    lines = (
        [*_explained(found.keys[0], width)]
        if len(found.keys) == 1
        else [*_tables(found.keys, width)]
    )
    lines += _advice(found.advice, width)
    if len(found.keys) > 1:
        lines += [
            "",
            "`monograph keys KEY` explains one, with the values that it takes and an example.",
        ]
    print("\n".join(lines).strip("\n"))


def _explained(key: str, width: int) -> Iterator[str]:
    """Yield the lines about one key."""
    said = key_declaration(key)
    section, _, name = key.partition(".")
    example = toml_of(example_of(key))
    yield key
    yield from _indented(said.meaning.removesuffix(f" auto: {said.auto}."), width)
    yield ""
    yield from _values(said, width)
    rows = {"default": _default(key)}
    if said.auto:
        rows["auto"] = said.auto
    if called := names_elsewhere(key):
        rows["elsewhere"] = ", ".join(called)
    rows["example"] = shell_words(f"{key}={typed(example_of(key))}")
    rows["in a file"] = f"[{section}]"
    for head, text in rows.items():
        yield from _row(head, text, width)
    yield f"{'':<13}{name} = {example}"


def _row(head: str, text: str, width: int, indent: int = 13) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"  {head:<11}",
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )


def _values(said: Key, width: int) -> Iterator[str]:
    """Yield what a key takes, and what each word among it stands for."""
    yield from _row("values", said.expected, width)
    widest = max(map(len, said.choices), default=0)
    for word, meaning in said.choices.items():
        yield from _row("", f"{word:<{widest}}  {meaning}", width, 15 + widest)


def _tables(keys: tuple[str, ...], width: int) -> Iterator[str]:
    """Yield a table of keys for each section that has some of them."""
    for section, fields in SECTIONS.items():
        own = [key for key in keys if key.startswith(f"{section}.")]
        if not own:
            continue
        yield ""
        yield f"[{section}]"
        if len(own) == len(fields.model_fields):
            yield from textwrap.wrap(fields.about(), width)
        for key in own:
            yield f"  {key}   (default: {_default(key)})"
            yield from _indented(key_declaration(key).meaning, width, 6)


def _advice(advice: dict[str, str], width: int) -> Iterator[str]:
    if advice:
        yield ""
    for name, said in advice.items():
        yield from textwrap.wrap(f"{name}: {said}", width, break_on_hyphens=False)


def _indented(text: str, width: int, by: int = 2) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=" " * by, subsequent_indent=" " * by, break_on_hyphens=False
    )


def _default(key: str) -> str:
    """Return what applies where a key is not set, in words or as a value."""
    said = key_declaration(key)
    if said.default is None:
        return said.otherwise or "not set"
    return typed(said.default)


def _entry(key: str) -> dict[str, Any]:
    said = key_declaration(key)
    return {
        "key": key,
        "meaning": said.meaning,
        "values": said.expected,
        "choices": dict(said.choices),
        "default": said.default,
        "default_in_words": said.otherwise or None,
        "auto": said.auto or None,
        "example": example_of(key),
        "elsewhere": names_elsewhere(key),
    }
