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

WIDTH = 100  # columns of lines where there is no terminal
LABEL_WIDTH = 13  # columns before the texts about one key


def run(word: str | None, *, json: bool) -> None:
    """Print the keys that a word stands for, or all; see the command line's help."""
    matches = KeyMatches(KEYS, {}) if word is None else keys_named(word)
    if json:
        entries = {"schema": "monograph.keys/1", "keys": [_json_entry(key) for key in matches.keys]}
        print(jsonlib.dumps(entries))
        return
    width = WIDTH
    if is_terminal(sys.stdout):
        width = min(shutil.get_terminal_size().columns, WIDTH)
    lines = list[str]()
    if len(matches.keys) == 1:
        lines += _explain(matches.keys[0], width)
    else:
        lines += _list_by_section(matches.keys, width)
    lines += _advice_lines(matches.advice, width)
    if len(matches.keys) > 1:
        lines += [
            "",
            "`monograph keys KEY` explains one, with the values that it takes and an example.",
        ]
    print("\n".join(lines).strip("\n"))


def _explain(key: str, width: int) -> Iterator[str]:
    """Yield the lines about one key: its meaning, its values, and how to set it."""
    declaration = key_declaration(key)
    section, _, name = key.partition(".")
    yield key
    # A meaning ends with what "auto" stands for, which has a line of its own here.
    meaning = declaration.meaning.removesuffix(f" auto: {declaration.auto}.")
    yield from _indented(meaning, width)
    yield ""
    yield from _value_lines(declaration, width)
    yield from _labelled("default", _default_text(key), width)
    if declaration.auto:
        yield from _labelled("auto", declaration.auto, width)
    other_names = names_elsewhere(key)
    if other_names:
        yield from _labelled("elsewhere", ", ".join(other_names), width)
    example = example_of(key)
    yield from _labelled("example", shell_words(f"{key}={typed(example)}"), width)
    yield from _labelled("in a file", f"[{section}]", width)
    yield f"{'':<{LABEL_WIDTH}}{name} = {toml_of(example)}"


def _labelled(label: str, text: str, width: int, indent: int = LABEL_WIDTH) -> list[str]:
    """Return a text after its label, wrapped.

    Args:
        label: the label; "" for none.
        text: the text.
        width: columns of a line.
        indent: columns before the second and later lines.
    """
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"  {label}".ljust(LABEL_WIDTH),
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )


def _value_lines(declaration: Key, width: int) -> Iterator[str]:
    """Yield which values a key takes, and what each word among them stands for."""
    yield from _labelled("values", declaration.expected, width)
    word_width = max(map(len, declaration.choices), default=0)
    # The meaning stands two columns after the longest word.
    meaning_indent = LABEL_WIDTH + word_width + 2
    for word, meaning in declaration.choices.items():
        text = f"{word:<{word_width}}  {meaning}"
        yield from _labelled("", text, width, meaning_indent)


def _list_by_section(keys: tuple[str, ...], width: int) -> Iterator[str]:
    """Yield the keys with their defaults and meanings, under the names of their sections."""
    for section, fields in SECTIONS.items():
        keys_of_section = [key for key in keys if key.startswith(f"{section}.")]
        if not keys_of_section:
            continue
        yield ""
        yield f"[{section}]"
        if len(keys_of_section) == len(fields.model_fields):  # the whole section is listed
            yield from textwrap.wrap(fields.about(), width)
        for key in keys_of_section:
            yield f"  {key}   (default: {_default_text(key)})"
            yield from _indented(key_declaration(key).meaning, width, 6)


def _advice_lines(advice: dict[str, str], width: int) -> Iterator[str]:
    """Yield a sentence for each name that another program has for a key: what to set here instead."""
    if advice:
        yield ""
    for name, sentence in advice.items():
        yield from textwrap.wrap(f"{name}: {sentence}", width, break_on_hyphens=False)


def _indented(text: str, width: int, columns: int = 2) -> list[str]:
    """Return a text wrapped into lines of `width` columns, of which the first `columns` are empty."""
    indent = " " * columns
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _default_text(key: str) -> str:
    """Return what applies where a key is not set, in words or as a value."""
    declaration = key_declaration(key)
    if declaration.default is None:
        return declaration.otherwise or "not set"
    return typed(declaration.default)


def _json_entry(key: str) -> dict[str, Any]:
    """Return what is known about a key as a JSON object."""
    declaration = key_declaration(key)
    return {
        "key": key,
        "meaning": declaration.meaning,
        "values": declaration.expected,
        "choices": dict(declaration.choices),
        "default": declaration.default,
        "default_in_words": declaration.otherwise or None,
        "auto": declaration.auto or None,
        "example": example_of(key),
        "elsewhere": names_elsewhere(key),
    }
