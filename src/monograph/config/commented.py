"""Write settings as a commented configuration: each key with its meaning, the values it accepts and
its origin.
"""

import textwrap
from collections.abc import Iterator

from monograph.config.keys import SECTIONS, described
from monograph.config.settings import EXCLUSIVE, Settings, toml_of
from monograph.terminal import one_line

# A text begins with TEXT and a key that is not set with UNSET, so that removing UNSET sets the key.
TEXT, UNSET = "## ", "# "
WIDTH, ORIGIN_COLUMN = 120, 48
_HEAD = (
    "Every key of a run: its meaning, the values that it accepts, and where its value comes from.",
    'A line "# KEY = VALUE" is a key that is not set, with its default or an example: remove the "# " to set it.',
    "To use this file: monograph train FILE.toml",
)


def commented(settings: Settings) -> str:
    """Return the TOML text that loads as these settings and has every key, as a comment if it is
    not set.

    No line is longer than WIDTH unless a value that was given is.
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
            said = described(key)
            yield ""
            yield from _text(said.meaning)
            yield from _text(f"Accepts: {said.expected}.")
            for word, stands_for in said.choices.items():
                yield from _text(f"{word}: {stands_for}")
            if key in settings.origins and values[key] is not None:
                yield from _given(
                    f"{field} = {toml_of(values[key])}", one_line(settings.origins[key])
                )
            else:
                shown = said.example if said.default is None else said.default
                yield f"{UNSET + f'{field} = {toml_of(shown)}':<{ORIGIN_COLUMN}}# {_absence(key, settings)}"


def _text(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=TEXT, subsequent_indent=TEXT, break_on_hyphens=False
    )


def _given(assignment: str, origin: str) -> Iterator[str]:
    """Yield the line of a key that is set, with its origin, which has a line of its own if both do
    not fit in one.
    """
    line = f"{assignment:<{ORIGIN_COLUMN}}# {origin}"
    if len(line) <= WIDTH:
        yield line
    else:
        yield from _text(f"From: {origin}")
        yield assignment


def _absence(key: str, settings: Settings) -> str:
    """Return what applies to a key that is not set."""
    others = [
        other for group in EXCLUSIVE if key in group for other in group if other in settings.origins
    ]
    if others:
        return f"not set, as {others[0]} is"
    said = described(key)
    if said.default is not None:
        return "default"
    return f"example; default: {said.otherwise}" if said.otherwise else "example; not set"
