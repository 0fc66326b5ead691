"""Load settings from a command's arguments, the environment, a TOML file and defaults.

Each value has its origin with it (`SourcedValue`). A *fault* is something wrong with a value or an
argument: faults are collected in a list, so that one error names all of them.
"""

import difflib
import glob
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from monograph.config.given import (
    COMMAND_LINE,
    COMMAND_LINE_RANK,
    ENVIRONMENT_RANK,
    SourcedValue,
    raise_all,
)
from monograph.config.keys import KEYS, SECTIONS, key_declaration
from monograph.config.recipes import recipes
from monograph.config.renamed import new_spelling
from monograph.config.settings import (
    CHANGEABLE_ON_RESUME,
    DEPENDENT_KEYS,
    EXCLUSIVE,
    Settings,
    build,
    checked_value,
    digest_of,
)
from monograph.config.toml_file import MAX_TOML_BYTES, toml_values_and_faults
from monograph.config.unknown import key_advice, require_known
from monograph.data import MAX_WEIGHT, MIN_WEIGHT
from monograph.errors import InputRefused, MonographError, UsageError, did_you_mean
from monograph.model.families import FAMILIES, PRESETS
from monograph.storage.code import HUB
from monograph.storage.reading import entries, exists, is_folder, matching, read_input
from monograph.terminal import shell_words

# The number in "books/@2".
_WEIGHT = r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?"
# {name of an environment variable: its key}: MONOGRAPH_OPTIM_LR is optim.lr.
_KEYS_OF_VARIABLES = {f"MONOGRAPH_{key.replace('.', '_').upper()}": key for key in KEYS}
_VARIABLE_PREFIXES = tuple(f"MONOGRAPH_{name.upper()}_" for name in SECTIONS)


def load(
    toml: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    recorded: bool = False,
    faults: Sequence[MonographError] = (),
) -> Settings:
    """Load settings: the command line overrides the environment, which overrides the TOML file.

    Args:
        toml: the TOML file; None for no file.
        overrides: the values of the command line, by dotted key. A `str` is read as text from a
            shell: "3e-4" is a number if the key takes numbers.
        environment: the variables of the environment; None for this process's.
        recorded: whether a run wrote the file. An earlier version may have written it, so its old
            spellings (`monograph.config.renamed`) are translated.
        faults: faults of the command line that are already known.

    Raises:
        UsageError: a section or key is unknown, a value has the wrong type, keys exclude each
            other, or the file is not TOML. The message names all faults.
        MonographError: `faults` are the only faults, and none of them is a UsageError. The error has
            the class of the first, such as InputRefused.
    """
    all_faults: list[UsageError] = []
    sourced: Mapping[str, SourcedValue] = {}
    if toml is not None:
        sourced, all_faults = toml_values_and_faults(toml)
    if recorded:
        sourced = _with_new_spellings(sourced)
    if environment is None:
        environment = os.environ
    sourced = _override(sourced, _from_environment(environment, all_faults))
    sourced = _override(sourced, _from_command_line(overrides or {}, all_faults))
    sourced = _drop_excluded(sourced, all_faults)
    values = dict[str, Any]()
    for key, entry in sourced.items():
        try:
            values[key] = checked_value(
                key, entry.value, entry.origin, from_text=entry.from_text, written=entry.written
            )
        except UsageError as fault:
            all_faults.append(fault)
    raise_all([*faults, *all_faults])
    origins = {key: entry.origin for key, entry in sourced.items()}
    # Values as a person wrote them, such as "1_000", for messages. A value that is a text, as from a
    # shell, is what the person wrote.
    written = {}
    for key, entry in sourced.items():
        if entry.written:
            written[key] = entry.written
        elif isinstance(entry.value, str):
            written[key] = entry.value
    return build(values, origins, written)


def _with_new_spellings(sourced: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """Return values in which old spellings are replaced by the keys that say the same now.

    An old spelling may set another key, too, as optim.name = "muon:8bit" sets optim.state. If that key
    also has a value of its own, before or after the old spelling, the old spelling counts.
    """
    result: dict[str, SourcedValue] = {}
    for key, entry in sourced.items():
        new_texts = new_spelling(key, entry.value)
        if new_texts is not None:
            for new_key, text in new_texts.items():
                # `written` is emptied, so that messages show the new text.
                result[new_key] = entry._replace(value=text, from_text=True, written="")
        elif key not in result:  # else an old spelling has set the key
            result[key] = entry
    return result


def written_fingerprint(toml: Path) -> str:
    """Return the fingerprint of a run's config.toml, as computed by the version that wrote the file.

    It is the digest of the file's own keys and spellings. `Settings.fingerprint` is the digest of
    the keys and spellings of this version.
    """
    tables = tomllib.loads(read_input(toml, MAX_TOML_BYTES).decode())
    # A resumed run may have other values of these keys, so the digest is computed with their defaults.
    # The default None stands for a key that is not in the file. An earlier version may lack a key.
    for key, default in CHANGEABLE_ON_RESUME.items():
        section, _, name = key.partition(".")
        table = tables.get(section, {})
        if default is None:
            table.pop(name, None)
        elif name in table:
            table[name] = default
    return digest_of(tables)


def _from_environment(
    environment: Mapping[str, str], faults: list[UsageError]
) -> dict[str, SourcedValue]:
    """Return the values of MONOGRAPH_ variables; append to `faults` for each that names no key."""
    sourced = {}
    for name, value in environment.items():
        if name in _KEYS_OF_VARIABLES:
            sourced[_KEYS_OF_VARIABLES[name]] = SourcedValue(
                value, name, ENVIRONMENT_RANK, from_text=True
            )
        elif name.startswith(_VARIABLE_PREFIXES):
            suggestion = did_you_mean(name, _KEYS_OF_VARIABLES)
            faults.append(UsageError(f"environment: {name} names no key{suggestion}"))
    return sourced


def _from_command_line(
    overrides: Mapping[str, Any], faults: list[UsageError]
) -> dict[str, SourcedValue]:
    """Return the values of the command line; append to `faults` for each unknown key."""
    sourced = {}
    for key, value in overrides.items():
        try:
            require_known(key, COMMAND_LINE, str(value))
        except UsageError as error:
            faults.append(error)
        else:
            sourced[key] = SourcedValue(
                value, COMMAND_LINE, COMMAND_LINE_RANK, from_text=isinstance(value, str)
            )
    return sourced


def _override(
    lower: Mapping[str, SourcedValue], higher: Mapping[str, SourcedValue]
) -> dict[str, SourcedValue]:
    """Return the values of `lower`, overridden by those of `higher`, which have a higher rank.

    A key such as prefer.gamma says something about the value of another key (`DEPENDENT_KEYS`),
    here about prefer.loss. So if `higher` has a different prefer.loss, the prefer.gamma of `lower` is
    dropped.
    """
    dropped: set[str] = set()
    for key, entry in higher.items():
        if key in lower and lower[key].value != entry.value:
            dropped.update(DEPENDENT_KEYS.get(key, ()))
    kept = {key: entry for key, entry in lower.items() if key not in dropped}
    return kept | dict(higher)


def _drop_excluded(
    sourced: Mapping[str, SourcedValue], faults: list[UsageError]
) -> dict[str, SourcedValue]:
    """Return the values with at most one key of each group of `EXCLUSIVE`.

    The key with the highest rank stays. If two keys of a group have the same rank, a fault is
    appended to `faults`.
    """
    dropped: set[str] = set()
    for group in EXCLUSIVE:
        by_rank = sorted(
            (key for key in group if key in sourced), key=lambda key: sourced[key].rank
        )
        if not by_rank:
            continue
        *others, winner = by_rank
        origin = sourced[winner].origin
        for key in others:
            dropped.add(key)
            if sourced[key].rank == sourced[winner].rank:
                message = f"{origin}: {key} and {winner} exclude each other; give one"
                faults.append(UsageError(message))
    return {key: value for key, value in sourced.items() if key not in dropped}


class Arguments(NamedTuple):
    """A command's arguments, sorted by what they are.

    Attributes:
        toml: the TOML file; None for no file.
        overrides: values by dotted key, which may be unknown. Paths are the value of `data.source`.
        faults: a fault for each argument that is neither a file, a key with its value nor a path.
    """

    toml: Path | None
    overrides: dict[str, Any]
    faults: list[MonographError]


def key_and_value(argument: str) -> tuple[str, str] | None:
    """Return KEY and VALUE of KEY=VALUE; None for other arguments, such as a path with an `=`."""
    key, equals, value = argument.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
        return None
    if key not in KEYS and exists(argument):  # it is a path
        return None
    return key, value


def classify(arguments: Iterable[str]) -> Arguments:
    """Sort arguments into a configuration (`x.toml`), overrides (`section.key=value`) and paths.

    A path names text to train on and may have a weight, as in `books/@2`. A path that contains `=`
    must be written `./a=b`.

    Faults are a UsageError for a second TOML file, for a key or text that is given twice, and for a key
    and its value in several arguments, such as `optim.lr = 3e-4`. They are an InputRefused for a path
    that does not exist and for a pattern that matches no file.
    """
    files: list[Path] = []
    overrides: dict[str, Any] = {}
    sources: list[str] = []
    faults: list[MonographError] = []
    for argument in _without_split_assignments(arguments, faults):
        pair = key_and_value(argument)
        if pair is not None:
            key, value = pair
            if key in overrides:
                fault = f"{key} is given twice, as {overrides[key]} and as {value}; give it once"
                faults.append(UsageError(f"{COMMAND_LINE}: {fault}"))
            overrides[key] = value
        elif argument.endswith(".toml") and exists(argument) and not is_folder(argument):
            files.append(Path(argument))
        else:
            try:
                _require_text(argument)
                sources.append(argument)
            except MonographError as fault_of_path:
                faults.append(fault_of_path)
    if len(files) > 1:
        fault = f"{files[0]} and {files[1]} are both configurations; give one"
        faults.append(UsageError(f"{COMMAND_LINE}: {fault}"))
    if sources:
        try:
            overrides |= _data_keys(sources, overrides)
        except UsageError as fault_of_paths:
            faults.append(fault_of_paths)
    toml = files[0] if files else None
    return Arguments(toml, overrides, faults)


def _without_split_assignments(
    arguments: Iterable[str], faults: list[MonographError]
) -> Iterator[str]:
    """Yield the arguments except split assignments, and append to `faults` for each of these.

    An assignment must be one word of the form KEY=VALUE. Split assignments are `optim.lr = 3e-4`,
    `optim.lr =3e-4`, `optim.lr= 3e-4`, `optim.lr 3e-4` and `optim.lr: 3e-4`. The word `optim.lr:3e-4`
    is treated like them.
    """
    remaining = [*arguments]
    while remaining:
        argument = remaining.pop(0)
        # Either a key alone, `optim.lr`, `optim.lr=` or `optim.lr:`, or a key with its value,
        # `optim.lr:3e-4`.
        match = re.fullmatch(
            r"(?P<alone>[a-z_.]+)(?P<sign>[=:]?)|(?P<key>[a-z_.]+):(?P<value>.+)", argument
        )
        if match is None:
            yield argument
            continue
        key = match["alone"] or match["key"]
        if key not in KEYS or exists(argument):
            yield argument
            continue
        value = match["value"] or ""
        has_sign = bool(match["sign"] or match["value"])
        if not has_sign:
            # The sign may be the next word, as in `optim.lr = 3e-4`. A further sign, as in
            # `optim.lr = == 3e-4`, is skipped, too.
            for sign in ("=", ":", "=="):
                if remaining and remaining[0] == sign:
                    remaining.pop(0)
        if not value and remaining and _may_be_value(remaining[0]):
            value = remaining.pop(0).lstrip("=")  # the sign is in this word in `optim.lr =3e-4`
        if value:
            advice = f"write {shell_words(f'{key}={value}')}"
        else:
            advice = f"it takes {key_declaration(key).expected}"
        faults.append(UsageError(f"{COMMAND_LINE}: {key} and its value are one word: {advice}"))


def _may_be_value(argument: str) -> bool:
    """Return whether an argument can be the value of the key before it: not KEY=VALUE or a path.

    It may begin with the sign, as the second word of `optim.lr =3e-4`.
    """
    return "=" not in argument.lstrip("=") and not exists(argument)


def _data_keys(sources: Sequence[str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of data.source and data.weights for paths among the arguments.

    Raises:
        UsageError: `overrides` has one of these keys, too, or a weight is out of range.
    """
    if "data.source" in overrides:
        message = f"data.source and {sources[0]} both name the data; give one"
        raise UsageError(f"{COMMAND_LINE}: {message}")
    pairs = [path_and_weight(source) for source in sources]
    paths = [path for path, _ in pairs]
    weights = [weight for _, weight in pairs]
    has_weights = any(weight != 1 for weight in weights)
    if "data.weights" in overrides and has_weights:
        message = f"data.weights and {sources[0]} both say weights; give one"
        raise UsageError(f"{COMMAND_LINE}: {message}")
    values: dict[str, Any] = {"data.source": paths[0] if len(paths) == 1 else paths}
    if has_weights:
        values["data.weights"] = weights
    return values


def path_and_weight(argument: str) -> tuple[str, float]:
    """Return (path, weight) of an argument: ("books/", 2.0) for "books/@2".

    The weight is 1 if the argument has none, or if the whole argument is the name of a file.

    Raises:
        UsageError: the weight is out of range.
    """
    path, _, number = argument.rpartition("@")
    if not path or not re.fullmatch(_WEIGHT, number) or exists(argument):
        return argument, 1.0
    weight = float(number)
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        bounds = f"a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        raise UsageError(
            f"{COMMAND_LINE}: {argument}: a weight is how often an epoch sees the text, {bounds}"
        )
    return path, weight


def _require_text(argument: str) -> None:
    """Refuse an argument that does not name text to train on.

    Raises:
        UsageError: the argument means something else, such as a preset; or its weight is out of
            range.
        InputRefused: no file or folder has this name.
    """
    path, _ = path_and_weight(argument)
    if argument.lower().endswith((".yaml", ".yml")) and exists(path):
        raise UsageError(
            f"{COMMAND_LINE}: {argument}: a configuration is a TOML file here: `monograph train "
            f"--print-config > run.toml` writes one; to train on its text: data.source={argument}"
        )
    # "stdlib" is Python's standard library, and "-" is stdin.
    if path in ("stdlib", "-") or path.startswith(HUB) or exists(path) or matching(path):
        return
    advice = _advice_for_no_path(argument)
    if advice:
        raise UsageError(f"{COMMAND_LINE}: {argument} is not a file; {advice}")
    if glob.has_magic(argument):
        raise InputRefused(f"{argument}: no file matches this pattern")
    parent, name = os.path.split(argument.rstrip("/"))
    # The list is empty if `parent` does not exist.
    siblings = [entry.name for entry in entries(parent or ".")]
    if name in siblings:
        raise InputRefused(f"{argument}: a link that leads to no file")
    similar_names = difflib.get_close_matches(name, siblings, n=1)
    is_owner_and_name = re.fullmatch(r"[A-Za-z][\w.-]*/[A-Za-z][\w.-]*", argument)
    suggestion = ""
    if similar_names:
        suggestion = f"; did you mean {os.path.join(parent, similar_names[0])}?"
    elif is_owner_and_name and not siblings:
        # There is no folder with the owner's name, or nothing is in it. So the Hub may be meant.
        suggestion = f"; of the Hub it is {HUB}{argument} for text, and model.init={HUB}{argument} for a model"
    raise InputRefused(f"{argument}: no such file or folder{suggestion}")


def _advice_for_no_path(argument: str) -> str:
    """Return what to type instead of an argument that is not a path; "" if unknown."""
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
    # Other programs have +key=value, --key=value and section/key=value.
    key = key.strip("+~- ").replace("/", ".")
    if equals and key in KEYS:
        return f"did you mean {shell_words(f'{key}={value.strip()}')}?"
    if equals and key_advice(key):
        return key_advice(key, value).strip("; ")  # the advice begins with "; "
    return ""
