"""Write settings as a commented TOML file.

The file has every key with its meaning, the values that it accepts, and its origin, such as
"command line".
"""

import textwrap
from collections.abc import Iterator

from monograph.config.keys import SECTIONS, key_declaration
from monograph.config.settings import EXCLUSIVE, Settings, toml_of
from monograph.terminal import one_line

TEXT = "## "  # the beginning of a line of text
# The beginning of the line of a key that is not set. If a person removes it, the line sets the key.
UNSET = "# "
WIDTH = 120  # the longest line, in columns
ORIGIN_COLUMN = 48  # the column at which the comment with a key's origin begins
_HEAD = (
    "Every key of a run: its meaning, the values that it accepts, and where its value comes from.",
    'A line "# KEY = VALUE" is a key that is not set, with its default or an example: remove the "# " to set it.',
    "To use this file: monograph train FILE.toml",
)


def commented(settings: Settings) -> str:
    """Return a TOML text that loads as these settings; keys that are not set are comments.

    A line is longer than WIDTH only if a value that was set needs that.
    """
    return "\n".join(_lines(settings)) + "\n"


def _lines(settings: Settings) -> Iterator[str]:
    values = settings.values()
    for line in _HEAD:
        yield TEXT + line
    for name, section in SECTIONS.items():
        yield ""
        yield f"[{name}]"
        yield from _text(section.about())
        for field in section.model_fields:
            key = f"{name}.{field}"
            declaration = key_declaration(key)
            yield ""
            yield from _text(declaration.meaning)
            yield from _text(f"Accepts: {declaration.expected}.")
            for word, meaning in declaration.choices.items():
                yield from _text(f"{word}: {meaning}")
            if key in settings.origins and values[key] is not None:
                assignment = f"{field} = {toml_of(values[key])}"
                yield from _set_key(assignment, one_line(settings.origins[key]))
            else:
                value = declaration.default
                if value is None:
                    value = declaration.example
                assignment = f"{UNSET}{field} = {toml_of(value)}"
                yield f"{assignment:<{ORIGIN_COLUMN}}# {_reason_unset(key, settings)}"


def _text(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=TEXT, subsequent_indent=TEXT, break_on_hyphens=False
    )


def _set_key(assignment: str, origin: str) -> Iterator[str]:
    """Yield the line of a key that is set, with its origin as a comment.

    If both do not fit in one line, the origin has a line of its own.
    """
    line = f"{assignment:<{ORIGIN_COLUMN}}# {origin}"
    if len(line) <= WIDTH:
        yield line
    else:
        yield from _text(f"From: {origin}")
        yield assignment


def _reason_unset(key: str, settings: Settings) -> str:
    """Return why a key is not set, and whether its line shows the default or an example."""
    for group in EXCLUSIVE:
        if key not in group:
            continue
        for other in group:
            if other in settings.origins:
                return f"not set, as {other} is"
    declaration = key_declaration(key)
    if declaration.default is not None:
        return "default"
    if declaration.otherwise:
        return f"example; default: {declaration.otherwise}"
    return "example; not set"
