"""Load settings from arguments, the environment, a TOML file and defaults; each value remembers its origin."""

import difflib
import glob
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from monograph.config.elsewhere import as_here
from monograph.config.keys import KEYS, SECTIONS
from monograph.config.renamed import translated
from monograph.config.settings import ANYWHERE, BELONGS, EXCLUSIVE, Settings, build, check, digest_of
from monograph.data import HEAVIEST, LIGHTEST
from monograph.errors import InputRefused, UsageError, did_you_mean
from monograph.model.families import PRESETS
from monograph.storage.code import HUB
from monograph.storage.reading import entries, exists, is_folder, matching, read_input

COMMAND_LINE = "command line"
MOST_TOML_BYTES = 1 << 20
MOST_FAULTS = 5  # that one error names
_WEIGHT = r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?"
_ENVIRONMENT = {f"MONOGRAPH_{key.replace('.', '_').upper()}": key for key in KEYS}
_ENVIRONMENT_PREFIXES = tuple(f"MONOGRAPH_{name.upper()}_" for name in SECTIONS)


class Given(NamedTuple):
    """A value with its origin.

    Attributes:
        value: the value.
        origin: the origin, for messages.
        rank: 1 (TOML), 2 (environment) or 3 (command line); of keys that exclude each other the highest counts.
        from_text: whether a number may be given as text.
    """

    value: Any
    origin: str
    rank: int
    from_text: bool


def load(
    toml: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    recorded: bool = False,
) -> Settings:
    """Load settings from a TOML file, the environment (default: this process's) and overrides by dotted key.

    An override that is a `str` is read as text from a shell: "3e-4" is a number if the key takes numbers.

    Args:
        toml: the file.
        overrides: values by dotted key, which a person typed.
        environment: the variables of the environment.
        recorded: whether a run wrote the file, perhaps by an earlier version, whose spellings are then translated.

    Raises:
        UsageError: a section or key is unknown (the message names the nearest known one), a value has the wrong type,
            keys exclude each other, or the file is not TOML.
    """
    given = {} if toml is None else from_toml(toml)
    if recorded:
        given = _translated(given)
    given = _replaced(given, _from_environment(os.environ if environment is None else environment))
    given = _replaced(given, _from_command_line(overrides or {}))
    in_force = _without_overruled(given)
    values, wrong = dict[str, Any](), list[UsageError]()
    for key, value in in_force.items():
        try:
            values[key] = check(key, value.value, value.origin, from_text=value.from_text)
        except UsageError as error:
            wrong.append(error)
    _raise_all(wrong)
    return build(values, {key: value.origin for key, value in in_force.items()})


def require_known(key: str, origin: str) -> None:
    """Refuse an unknown key.

    Raises:
        UsageError: the key is unknown; the message names the nearest known one.
    """
    if key in KEYS:
        return
    hint = as_here(key, KEYS) or did_you_mean(key, KEYS) or _known_keys(key)
    raise UsageError(f"{origin}: there is no key {key}{hint}")


def _known_keys(key: str) -> str:
    section = key.partition(".")[0]
    if section in SECTIONS:
        return f"; [{section}] has {', '.join(SECTIONS[section].model_fields)}"
    return f"; the sections are {', '.join(SECTIONS)}"


def from_toml(path: Path) -> dict[str, Given]:
    """Return the values in a TOML file by dotted key, not yet checked.

    Raises:
        UsageError: the file cannot be read, is not TOML, or has an unknown section or key.
    """
    try:
        content = read_input(path, MOST_TOML_BYTES)
        if b"\0" in content:
            raise UsageError(f"{path}: not UTF-8 text (it has NUL bytes, as UTF-16 does): save it as UTF-8")
        text = content.decode("utf-8-sig")  # some editors begin it with a byte order mark
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
    except RecursionError:
        raise UsageError(f"{path}: not read: it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    given: dict[str, Given] = {}
    unknown: list[UsageError] = []
    for section, table in tables.items():
        if not isinstance(table, dict):
            unknown += _unknown(section, _origin(path, text, "", section))
        elif section not in SECTIONS and not table:
            unknown.append(UsageError(f"{path}: there is no section [{section}]{did_you_mean(section, SECTIONS)}"))
        elif section not in SECTIONS:  # all of its keys are unknown: one says why
            first = next(iter(table))
            unknown += _unknown(f"{section}.{first}", _origin(path, text, section, first))
        else:
            for key, value in table.items():
                origin = _origin(path, text, section, key)
                unknown += _unknown(f"{section}.{key}", origin)
                given[f"{section}.{key}"] = Given(value, origin, 1, from_text=False)
    _raise_all(unknown)
    return given


def _unknown(key: str, origin: str) -> list[UsageError]:
    """Return the error for a key if it is unknown."""
    try:
        require_known(key, origin)
    except UsageError as error:
        return [error]
    return []


def _raise_all(faults: Sequence[UsageError]) -> None:
    """Raise one error that says what several say, so that a person corrects all at once."""
    if not faults:
        return
    lines = [str(fault) for fault in faults[:MOST_FAULTS]]
    if len(faults) > MOST_FAULTS:
        lines.append(f"{len(faults) - MOST_FAULTS} more like these")
    raise UsageError("; also ".join(lines))


def _translated(given: Mapping[str, Given]) -> dict[str, Given]:
    """Return values with those that have an old spelling replaced by what they say."""
    found: dict[str, Given] = {}
    for key, value in given.items():
        now = translated(key, value.value)
        if now is None:
            found.setdefault(key, value)
        else:
            found |= {new: value._replace(value=said) for new, said in now.items()}
    return found


def written_fingerprint(toml: Path) -> str:
    """Return the fingerprint that the version which wrote a run's config.toml took of it.

    It is that of the file's own keys and spellings, where `Settings.fingerprint` has those of this version.
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


def _origin(path: Path, text: str, section: str, key: str) -> str:
    """Return `run.toml:7`, or `run.toml` if the key has no line of its own, as in an inline table."""
    current = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            current = header[1]
        elif entry := re.match(r"\s*([\w.\"' -]+?)\s*=", line):
            name = entry[1].replace('"', "").replace("'", "").replace(" ", "")
            if ".".join(filter(None, (current, name))) == ".".join(filter(None, (section, key))):
                return f"{path}:{number}"
    return str(path)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Given]:
    given = {}
    for name, value in environment.items():
        if name in _ENVIRONMENT:
            given[_ENVIRONMENT[name]] = Given(value, name, 2, from_text=True)
        elif name.startswith(_ENVIRONMENT_PREFIXES):
            raise UsageError(f"environment: {name} names no key{did_you_mean(name, _ENVIRONMENT)}")
    return given


def _from_command_line(overrides: Mapping[str, Any]) -> dict[str, Given]:
    given = {}
    for key, value in overrides.items():
        require_known(key, COMMAND_LINE)
        given[key] = Given(value, COMMAND_LINE, 3, isinstance(value, str))
    return given


def _replaced(given: Mapping[str, Given], higher: Mapping[str, Given]) -> dict[str, Given]:
    """Return values with those of a higher rank in their place; what belongs to a value that gives way goes with it."""
    giving_way = {key for key, value in higher.items() if key in given and given[key].value != value.value}
    gone = {belonging for key in giving_way for belonging in BELONGS.get(key, ())}
    return {key: value for key, value in given.items() if key not in gone} | dict(higher)


def _without_overruled(given: Mapping[str, Given]) -> dict[str, Given]:
    """Return the values with at most one key of each exclusive group: the one given at the highest rank."""
    dropped: set[str] = set()
    for group in EXCLUSIVE:
        present = sorted((key for key in group if key in given), key=lambda key: given[key].rank)
        if not present:
            continue
        winner = present[-1]
        for key in present[:-1]:
            if given[key].rank == given[winner].rank:
                raise UsageError(f"{given[winner].origin}: {key} and {winner} exclude each other; give one")
        dropped.update(present[:-1])
    return {key: value for key, value in given.items() if key not in dropped}


class Arguments(NamedTuple):
    """A command's arguments: the TOML file, and overrides by dotted key, with the data paths as `data.source`."""

    toml: Path | None
    overrides: dict[str, Any]


def classify(arguments: Iterable[str]) -> Arguments:
    """Sort arguments: `x.toml` is the configuration, `section.key=value` an override, and the others are data.

    Data may have a weight, as in `books/@2`. A path that contains `=` is written `./a=b`.

    Raises:
        UsageError: there are two TOML files, a key is unknown, or a key or the data is given twice.
        InputRefused: a path does not exist, or a pattern matches nothing.
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
        places, weights = zip(*map(weighted, sources), strict=True)
        overrides["data.source"] = places[0] if len(places) == 1 else list(places)
        if any(weight != 1 for weight in weights):
            if "data.weights" in overrides:
                raise UsageError(f"{COMMAND_LINE}: data.weights and {sources[0]} both say weights; give one")
            overrides["data.weights"] = list(weights)
    return Arguments(files[0] if files else None, overrides)


def weighted(argument: str) -> tuple[str, float]:
    """Return ("books/", 2.0) for "books/@2"; the weight is 1 if none is given or a file has the whole name.

    Raises:
        UsageError: the weight is out of range.
    """
    place, _, number = argument.rpartition("@")
    if not place or not re.fullmatch(_WEIGHT, number) or exists(argument):
        return argument, 1.0
    weight = float(number)
    if not LIGHTEST <= weight <= HEAVIEST:
        bounds = f"a number from {LIGHTEST:g} to {HEAVIEST:g}"
        raise UsageError(f"{COMMAND_LINE}: {argument}: a weight is how often an epoch sees the text, {bounds}")
    return place, weight


def _source(argument: str) -> str:
    place, _ = weighted(argument)
    if place in ("stdlib", "-") or place.startswith(HUB) or exists(place) or matching(place):
        return argument
    if argument in PRESETS:
        raise UsageError(f"{COMMAND_LINE}: {argument} is no file; did you mean model.preset={argument}?")
    if glob.has_magic(argument):
        raise InputRefused(f"{argument}: no file matches this pattern")
    parent, name = os.path.split(argument.rstrip("/"))
    siblings = [entry.name for entry in entries(parent or ".")]
    if name in siblings:
        raise InputRefused(f"{argument}: a link that leads to no file")
    near = difflib.get_close_matches(name, siblings, n=1)
    hint = f"; did you mean {os.path.join(parent, near[0])}?" if near else ""
    raise InputRefused(f"{argument}: no such file or folder{hint}")
