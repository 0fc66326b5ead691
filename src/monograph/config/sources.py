"""Load settings from arguments, the environment, a TOML file and defaults; each value remembers its
origin.
"""

import difflib
import glob
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from monograph.config.given import COMMAND_LINE, Given, raise_all
from monograph.config.keys import KEYS, SECTIONS, described
from monograph.config.recipes import recipes
from monograph.config.renamed import translated
from monograph.config.settings import (
    ANYWHERE,
    BELONGS,
    EXCLUSIVE,
    Settings,
    build,
    check,
    digest_of,
)
from monograph.config.toml_file import MOST_TOML_BYTES, given_and_faults
from monograph.config.unknown import key_advice, require_known
from monograph.data import HEAVIEST, LIGHTEST
from monograph.errors import InputRefused, MonographError, UsageError, did_you_mean
from monograph.model.families import FAMILIES, PRESETS
from monograph.storage.code import HUB
from monograph.storage.reading import entries, exists, is_folder, matching, read_input
from monograph.terminal import shell_words

_WEIGHT = r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?"
_ENVIRONMENT = {f"MONOGRAPH_{key.replace('.', '_').upper()}": key for key in KEYS}
_ENVIRONMENT_PREFIXES = tuple(f"MONOGRAPH_{name.upper()}_" for name in SECTIONS)


def load(
    toml: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    recorded: bool = False,
    faults: Sequence[MonographError] = (),
) -> Settings:
    """Load settings from a TOML file, the environment (default: this process's) and overrides by
    dotted key.

    An override that is a `str` is read as text from a shell: "3e-4" is a number if the key takes
    numbers.

    Args:
        toml: the file.
        overrides: values by dotted key, which a person typed.
        environment: the variables of the environment.
        recorded: whether a run wrote the file, perhaps by an earlier version, whose spellings are
            then translated.
        faults: what else is wrong with the command line, to be said together with what is wrong
            here.

    Raises:
        UsageError: a section or key is unknown (the message names the nearest known one), a value
            has the wrong type, keys exclude each other, or the file is not TOML; all that is wrong
            is said at once.
        MonographError: the first of `faults`.
    """
    given, wrong = ({}, []) if toml is None else given_and_faults(toml)
    if recorded:
        given = _translated(given)
    given = _replaced(
        given, _from_environment(os.environ if environment is None else environment, wrong)
    )
    given = _replaced(given, _from_command_line(overrides or {}, wrong))
    in_force = _without_overruled(given, wrong)
    values = dict[str, Any]()
    for key, value in in_force.items():
        try:
            values[key] = check(
                key, value.value, value.origin, from_text=value.from_text, written=value.written
            )
        except UsageError as error:
            wrong.append(error)
    raise_all([*faults, *wrong])
    written = {key: value.written or value.value for key, value in in_force.items()}
    written = {key: text for key, text in written.items() if isinstance(text, str)}
    return build(values, {key: value.origin for key, value in in_force.items()}, written)


def _translated(given: Mapping[str, Given]) -> dict[str, Given]:
    """Return values with those that have an old spelling replaced by what they say."""
    found: dict[str, Given] = {}
    for key, value in given.items():
        now = translated(key, value.value)
        if now is None:
            found.setdefault(key, value)
        else:
            found |= {
                new: value._replace(value=said, from_text=True, written="")
                for new, said in now.items()
            }
    return found


def written_fingerprint(toml: Path) -> str:
    """Return the fingerprint that the version which wrote a run's config.toml took of it.

    It is that of the file's own keys and spellings, where `Settings.fingerprint` has those of this
    version.
    """
    tables = tomllib.loads(read_input(toml, MOST_TOML_BYTES).decode())
    for key, value in ANYWHERE.items():
        section, _, name = key.partition(".")
        table = tables.get(section, {})
        if value is None:
            table.pop(name, None)
        elif name in table:
            table[name] = value
    return digest_of(tables)


def _from_environment(environment: Mapping[str, str], faults: list[UsageError]) -> dict[str, Given]:
    """Return the values of the environment's variables; add those that name no key to `faults`."""
    given = {}
    for name, value in environment.items():
        if name in _ENVIRONMENT:
            given[_ENVIRONMENT[name]] = Given(value, name, 2, from_text=True)
        elif name.startswith(_ENVIRONMENT_PREFIXES):
            faults.append(
                UsageError(f"environment: {name} names no key{did_you_mean(name, _ENVIRONMENT)}")
            )
    return given


def _from_command_line(overrides: Mapping[str, Any], faults: list[UsageError]) -> dict[str, Given]:
    """Return the values of the command line; add unknown keys to `faults`."""
    given = {}
    for key, value in overrides.items():
        try:
            require_known(key, COMMAND_LINE, str(value))
        except UsageError as error:
            faults.append(error)
        else:
            given[key] = Given(value, COMMAND_LINE, 3, isinstance(value, str))
    return given


def _replaced(given: Mapping[str, Given], higher: Mapping[str, Given]) -> dict[str, Given]:
    """Return values with those of a higher rank in their place; what belongs to a value that gives
    way goes with it.
    """
    giving_way = {
        key for key, value in higher.items() if key in given and given[key].value != value.value
    }
    gone = {belonging for key in giving_way for belonging in BELONGS.get(key, ())}
    return {key: value for key, value in given.items() if key not in gone} | dict(higher)


def _without_overruled(given: Mapping[str, Given], faults: list[UsageError]) -> dict[str, Given]:
    """Return the values with at most one key of each exclusive group: the one given at the highest
    rank.

    Two of one rank are added to `faults`.
    """
    dropped: set[str] = set()
    for group in EXCLUSIVE:
        present = sorted((key for key in group if key in given), key=lambda key: given[key].rank)
        if not present:
            continue
        winner = present[-1]
        for key in present[:-1]:
            if given[key].rank == given[winner].rank:
                faults.append(
                    UsageError(
                        f"{given[winner].origin}: {key} and {winner} exclude each other; give one"
                    )
                )
        dropped.update(present[:-1])
    return {key: value for key, value in given.items() if key not in dropped}


class Arguments(NamedTuple):
    """A command's arguments.

    Attributes:
        toml: the TOML file.
        overrides: values by dotted key, also of keys that are not there; the data paths are
            `data.source`.
        faults: what is wrong with other arguments.
    """

    toml: Path | None
    overrides: dict[str, Any]
    faults: list[MonographError]


def key_and_value(argument: str) -> tuple[str, str] | None:
    """Return both parts of KEY=VALUE; None for other arguments, such as a path with an `=` in it."""
    key, equals, value = argument.partition("=")
    if equals and re.fullmatch(r"[A-Za-z_][\w.]*", key) and (key in KEYS or not exists(argument)):
        return key, value
    return None


def classify(arguments: Iterable[str]) -> Arguments:
    """Sort arguments: `x.toml` is the configuration, `section.key=value` an override, and the
    others are data.

    Data may have a weight, as in `books/@2`. A path that contains `=` is written `./a=b`.

    Faults are: there are two TOML files, a key or the data is given twice (UsageError), a path does
    not exist, or a pattern matches nothing (InputRefused).
    """
    files: list[Path] = []
    overrides: dict[str, Any] = {}
    sources: list[str] = []
    faults: list[MonographError] = []
    for argument in _whole(arguments, faults):
        if given := key_and_value(argument):
            key, value = given
            if key in overrides:
                said = f"{key} is given twice, as {overrides[key]} and as {value}; give it once"
                faults.append(UsageError(f"{COMMAND_LINE}: {said}"))
            overrides[key] = value
        elif argument.endswith(".toml") and exists(argument) and not is_folder(argument):
            files.append(Path(argument))
        else:
            try:
                sources.append(_source(argument))
            except MonographError as error:
                faults.append(error)
    if len(files) > 1:
        faults.append(
            UsageError(
                f"{COMMAND_LINE}: {files[0]} and {files[1]} are both configurations; give one"
            )
        )
    if sources:
        try:
            overrides |= _data(sources, overrides)
        except UsageError as error:
            faults.append(error)
    return Arguments(files[0] if files else None, overrides, faults)


def _whole(arguments: Iterable[str], faults: list[MonographError]) -> Iterator[str]:
    """Yield the arguments without keys that are apart from their values, as in `optim.lr = 3e-4`,
    which are faults.
    """
    left = [*arguments]
    while left:
        argument = left.pop(0)
        apart = re.fullmatch(r"([a-z_.]+)([=:]?)|([a-z_.]+):(.+)", argument)
        key = apart and (apart[1] or apart[3])
        if not apart or key not in KEYS or exists(argument):
            yield argument
            continue
        value = apart[4] or ""
        for sign in ("=", ":", "==") if not (apart[2] or value) else ():
            if left and left[0] == sign:
                left.pop(0)
        if not value and left and "=" not in left[0].lstrip("=") and not exists(left[0]):
            value = left.pop(0).lstrip("=")
        said = (
            f"write {shell_words(f'{key}={value}')}"
            if value
            else f"it takes {described(key).expected}"
        )
        faults.append(UsageError(f"{COMMAND_LINE}: {key} and its value are one word: {said}"))


def _data(sources: Sequence[str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that paths among the arguments stand for.

    Raises:
        UsageError: a key says the same, or a weight is out of range.
    """
    for key, what in (("data.source", "name the data"), ("data.weights", "say weights")):
        if key in overrides and (
            key == "data.source" or any(weighted(source)[1] != 1 for source in sources)
        ):
            raise UsageError(f"{COMMAND_LINE}: {key} and {sources[0]} both {what}; give one")
    places, weights = zip(*map(weighted, sources), strict=True)
    found: dict[str, Any] = {"data.source": places[0] if len(places) == 1 else list(places)}
    if any(weight != 1 for weight in weights):
        found["data.weights"] = list(weights)
    return found


def weighted(argument: str) -> tuple[str, float]:
    """Return ("books/", 2.0) for "books/@2"; the weight is 1 if none is given or a file has the
    whole name.

    Raises:
        UsageError: the weight is out of range.
    """
    place, _, number = argument.rpartition("@")
    if not place or not re.fullmatch(_WEIGHT, number) or exists(argument):
        return argument, 1.0
    weight = float(number)
    if not LIGHTEST <= weight <= HEAVIEST:
        bounds = f"a number from {LIGHTEST:g} to {HEAVIEST:g}"
        raise UsageError(
            f"{COMMAND_LINE}: {argument}: a weight is how often an epoch sees the text, {bounds}"
        )
    return place, weight


def _source(argument: str) -> str:
    """Return an argument that names text.

    Raises:
        UsageError: it is nothing, and means something else; or its weight is out of range.
        InputRefused: it is nothing.
    """
    place, _ = weighted(argument)
    if argument.lower().endswith((".yaml", ".yml")) and exists(place):
        writes = "`monograph train --print-config > run.toml` writes one"
        instead = f"{writes}; to train on its text: data.source={argument}"
        raise UsageError(
            f"{COMMAND_LINE}: {argument}: a configuration is a TOML file here: {instead}"
        )
    if place in ("stdlib", "-") or place.startswith(HUB) or exists(place) or matching(place):
        return argument
    if meaning := _no_place(argument):
        raise UsageError(f"{COMMAND_LINE}: {argument} is no file; {meaning}")
    if glob.has_magic(argument):
        raise InputRefused(f"{argument}: no file matches this pattern")
    parent, name = os.path.split(argument.rstrip("/"))
    siblings = [entry.name for entry in entries(parent or ".")]
    if name in siblings:
        raise InputRefused(f"{argument}: a link that leads to no file")
    near = difflib.get_close_matches(name, siblings, n=1)
    hint = f"; did you mean {os.path.join(parent, near[0])}?" if near else ""
    if not hint and re.fullmatch(r"[A-Za-z][\w.-]*/[A-Za-z][\w.-]*", argument) and not siblings:
        hint = f"; of the Hub it is {HUB}{argument} for text, and model.init={HUB}{argument} for a model"
    raise InputRefused(f"{argument}: no such file or folder{hint}")


def _no_place(argument: str) -> str:
    """Return what a person meant by an argument that is no file; "" if it may have been one."""
    if argument.lower() in PRESETS:
        return f"did you mean model.preset={argument.lower()}?"
    if argument.lower() in FAMILIES:
        return f"did you mean model.family={argument.lower()}?"
    if argument in [recipe.name for recipe in recipes()]:
        return f"did you mean --recipe {argument}?"
    if argument in SECTIONS:
        return f"it is a section of keys, which `monograph keys {argument}` lists"
    if re.fullmatch(r"[0-9.]+(e[-+]?[0-9]+)?", argument):
        return f"a number is a key's value, as in optim.lr={argument}; several are joined by commas"
    key, equals, value = argument.partition("=")
    key = key.strip("+~- ").replace("/", ".")
    if equals and (key in KEYS or key_advice(key)):
        return (
            f"did you mean {shell_words(f'{key}={value.strip()}')}?"
            if key in KEYS
            else key_advice(key, value).strip("; ")
        )
    return ""
