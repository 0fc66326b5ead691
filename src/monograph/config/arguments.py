"""What each argument of a command is: a TOML file, a `key=value` pair, or text to train on."""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, get_args

from monograph.config.keys import KEYS, ModelSection
from monograph.config.sources import COMMAND_LINE, require_known
from monograph.data.places import HUB
from monograph.data.sources import weighted
from monograph.errors import InputRefused, UsageError
from monograph.storage.reading import entries, exists, is_folder, matching

_PRESETS = get_args(ModelSection.model_fields["preset"].annotation)


class Arguments(NamedTuple):
    """The arguments of a command, sorted; `overrides` is by dotted key, data paths among them as `data.source`."""

    toml: Path | None
    overrides: dict[str, Any]


def classify(arguments: Iterable[str]) -> Arguments:
    """Sorts arguments, in any order: `x.toml` is the configuration, `section.key=value` an override, the rest data.

    A path that contains `=` is written `./a=b`.

    Raises:
        UsageError: two TOML files, an unknown key, a key or the data given twice.
        InputRefused: a path that does not exist or a pattern that matches nothing.
    """
    files: list[Path] = []
    overrides: dict[str, Any] = {}
    sources: list[str] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key in KEYS:
            if key in overrides:
                raise UsageError(f"{COMMAND_LINE}: {key} is given twice, as {overrides[key]} and as {value}")
            overrides[key] = value
        elif argument.endswith(".toml") and exists(argument) and not is_folder(argument):
            files.append(Path(argument))
        else:
            if equals and re.fullmatch(r"[A-Za-z_][\w.]*", key) and not exists(argument):
                require_known(key, COMMAND_LINE)
            sources.append(_source(argument))
    if len(files) > 1:
        raise UsageError(f"{COMMAND_LINE}: {files[0]} and {files[1]} are both configurations; give one")
    if sources:
        if "data.source" in overrides:
            raise UsageError(f"{COMMAND_LINE}: data.source and {sources[0]} both name the data; give one")
        overrides["data.source"] = sources[0] if len(sources) == 1 else sources
    return Arguments(files[0] if files else None, overrides)


def _source(argument: str) -> str:
    place, _ = weighted(argument)
    if place in ("stdlib", "-") or place.startswith(HUB) or exists(place) or matching(place):
        return argument
    if argument in _PRESETS:
        raise UsageError(f"{COMMAND_LINE}: {argument} is no file; did you mean model.preset={argument}?")
    if glob.has_magic(argument):
        raise InputRefused(f"{argument}: no file matches this pattern")
    parent, name = os.path.split(argument.rstrip("/"))
    siblings = [each.name for each in entries(parent or ".")]
    near = difflib.get_close_matches(name, siblings, n=1)
    hint = f"; did you mean {os.path.join(parent, near[0])}?" if near else ""
    raise InputRefused(f"{argument}: no such file or folder{hint}")
