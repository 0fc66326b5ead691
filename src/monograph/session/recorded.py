"""Read the settings in a run's config.toml, check that they are unchanged, and resume or branch
from them.
"""

import hashlib
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from monograph.config import EXCLUSIVE, Settings, load
from monograph.config.keys import DataSection
from monograph.config.settings import CODE_KEYS, DEPENDENT_KEYS, RUN_SPECIFIC_KEYS
from monograph.config.sources import written_fingerprint
from monograph.errors import InputRefused, MonographError, UsageError
from monograph.planner import defaults
from monograph.report.quantities import counted
from monograph.run import recorded_state
from monograph.run.folder import Follower, Run
from monograph.run.recipe import names_run, resolve_tokenizer
from monograph.run.repository import FILES, fetch_if_on_hub
from monograph.run.run_index import update_of_checkpoint
from monograph.run.source import ModelSource
from monograph.run.trust import carries_mark, is_ours, require_trusted
from monograph.run.writing import Parent
from monograph.session.adapting import ADAPTER_KEYS
from monograph.session.new_tokens import tokens_of
from monograph.session.objectives import BY_RECORDS, OBJECTIVES, objective_of
from monograph.session.plan import is_sharded
from monograph.storage.code import HUB, digests
from monograph.storage.reading import (
    contents,
    entries,
    exists,
    is_file,
    is_folder,
    matching,
    resolved,
    without_links,
)
from monograph.terminal import shell_words


def run_settings(
    run: Run,
    *,
    runs: Collection[str] = CODE_KEYS,
    programs: Sequence[str] = (),
    recorded: str | None = None,
) -> Settings:
    """Return a run's settings; all code that reads a run's config.toml does so here.

    They vouch for the Python files that the caller may run.

    Args:
        run: the run.
        runs: the keys whose code the caller may run.
        programs: values that name code in a sweep's points, in addition to those of its
            config.toml; they may run, too.
        recorded: the fingerprint of the settings; None: that in the run's newest sound checkpoint.

    Raises:
        InputRefused: the file has changed since the run was begun, or it names code that this user
            does not trust.
        UsageError: the file is not a configuration, and no checkpoint records a fingerprint of it.
    """
    state = recorded_state.newest_state(run)
    expected = recorded or state.get("settings")
    try:
        settings = load(run.config, {}, {}, recorded=True)
    except UsageError as error:
        if expected is None:
            raise
        digest = (
            hashlib.sha256(text).hexdigest()
            if (text := contents(run.config)) is not None
            else "nothing"
        )
        raise _changed(run, expected, f"{digest} ({error})") from None
    if expected not in (None, settings.fingerprint, written_fingerprint(run.config)):
        raise _changed(run, expected, settings.fingerprint)
    running = [*(settings.values()[key] for key in runs), *programs]
    sha256 = state.get("recipe", {}).get("sha256")
    return settings.vouching(
        require_trusted(run.config, [*settings.programs, *programs], running, sha256)
    )


def settings_given(
    toml: Path | None,
    overrides: Mapping[str, Any],
    *,
    runs_code: bool,
    files: tuple[str, ...] = FILES,
    faults: Sequence[MonographError] = (),
) -> Settings:
    """Return the settings that a command line gives; with `runs_code` they vouch for the Python
    files that they name.

    Of a `model.init` of the Hub the given files are fetched. `faults` are what is wrong with other
    arguments.

    The user names a file by typing it, in the environment or in a TOML file of their own. What a
    TOML file of a run names is the run's.

    Raises:
        InputRefused: see `run_settings`.
        UsageError: see `monograph.config.load`.
    """
    vouched = _of_its_run(toml, [key for key in CODE_KEYS if runs_code and key not in overrides])
    is_of_run = toml is not None and carries_mark(toml)
    settings = fetched_model(load(toml, overrides, recorded=is_of_run, faults=faults), files)
    if not runs_code:
        return settings
    if vouched is None:
        return settings.vouching(digests(settings.programs))
    typed = [
        value
        for key, value in settings.values().items()
        if key in CODE_KEYS and not _is_from(toml, settings, key)
    ]
    if strange := [value for value in settings.programs if value not in {*vouched, *typed}]:
        raise InputRefused(
            f"{toml}: changed while it was read, and now names {strange[0]}; try again"
        )
    return settings.vouching({**digests(typed), **vouched})


def _is_from(toml: Path | None, settings: Settings, key: str) -> bool:
    """Return whether a value comes from the TOML file, whose name its origin then begins with."""
    return toml is not None and settings.origins.get(key, "").startswith(str(toml))


def _of_its_run(toml: Path | None, keys: Collection[str]) -> Mapping[str, str] | None:
    """Check a TOML file that the user named as a run's settings are checked, if a run wrote it or
    it is in its folder.

    Links are followed. A mark in the file counts even outside of a run's folder, since a stranger
    may have left out the files that make a folder a run. The line of `strange_text` is printed.

    Args:
        toml: the file; None: there is none.
        keys: the keys whose code may run.

    Returns:
        The digest of each Python file that may run, by the value that names it; None if it is no
        file of a run.

    Raises:
        InputRefused: see `run_settings`.
    """
    if toml is None or not is_file(toml):
        return None
    toml = resolved(toml)
    run = Run(toml.parent)
    if toml == run.config and (is_file(run.lock_file) or is_folder(run.checkpoints)):
        settings = run_settings(run, runs=keys)
        if warning := strange_text(run, settings.data.source, settings.programs):
            print("warning:", warning, file=sys.stderr)
        return settings.vouched
    if carries_mark(toml) or any(is_file(parent / "run.lock") for parent in toml.parents):
        settings = load(toml, {}, {}, recorded=True)
        return require_trusted(toml, settings.programs, [settings.values()[key] for key in keys])
    return None


def own_copies(data: DataSection, origins: Mapping[str, str]) -> dict[str, Any]:
    """Return `source` and `tokenizer` of [data] with files that are gone replaced by copies in the
    run's folder.

    A run keeps its tokenizer and the text that it read from standard input. It may have been moved
    since, as may the run from which it was begun.

    Args:
        data: the section [data].
        origins: the origins of its keys.
    """
    copies: dict[str, Any] = {}
    for key, value, name in (
        ("source", data.source, "stdin"),
        ("tokenizer", data.tokenizer, "tokenizer.json"),
    ):
        # The origin of a value is the file and the line, FILE:LINE.
        run = Run(Path(origins.get(f"data.{key}", "").rpartition(":")[0]).parent)
        items = [value] if isinstance(value, str) else value
        gone = [item for item in items if Path(item).name == name and not exists(item)]
        if gone and is_file(run.lock_file) and exists(run.folder / name):
            here = [str(run.folder / name) if item in gone else item for item in items]
            copies[key] = here[0] if isinstance(value, str) else here
    return copies


def fetched_model(settings: Settings, files: tuple[str, ...] = FILES) -> Settings:
    """Return the settings with a `model.init` of the Hub fetched: it is then the folder of one
    commit in the cache.

    Raises:
        UsageError, InputRefused, DiskFull: see `monograph.run.repository.fetch_if_on_hub`.
    """
    init = settings.model.init
    return (
        settings.resolve({"model.init": fetch_if_on_hub(init, files)}, init)
        if init and init.startswith(HUB)
        else settings
    )


def require_text(settings: Settings) -> None:
    """Refuse a run, a checkpoint or a model's folder as text to train on.

    Raises:
        UsageError: the source is one of these; the message says how to name it instead.
    """
    source = settings.data.source
    for place in [source] if isinstance(source, str) else source:
        folder = Path(os.path.expanduser(place))
        if is_file(folder / "run.lock") or update_of_checkpoint(folder) is not None:
            raise UsageError(
                f"{place} is a run, no text: give its config.toml, or model.init={place}"
            )
        if is_file(folder / "config.json") and entries(folder, "model"):
            raise UsageError(f"{place} is a model, no text: give it as model.init={place}")


def strange_text(run: Run, source: str | Sequence[str], programs: Sequence[str]) -> str:
    """Return a warning if another user's run names text outside of its own folder; otherwise an
    empty string.

    Args:
        run: the run.
        source: the text that its settings name.
        programs: the values of its settings that name code.
    """
    home = without_links(run.folder)
    places = [source] if isinstance(source, str) else source
    outside = [
        item
        for item in places
        if item != "stdlib" and _leads_out(Path(os.path.expanduser(item)), home)
    ]
    if not outside or is_ours(run.config, programs):
        return ""
    return f"{run.folder} was not begun here, and names text outside of it, which is read: {', '.join(outside)}"


def _leads_out(place: Path, home: Path) -> bool:
    """Return whether a file, a folder, a pattern or a link among its matches leads out of the
    folder `home`.
    """
    return any(
        home not in without_links(path).parents
        for path in [place, *matching(place), *matching(place / "**")]
    )


def _changed(run: Run, expected: str, found: str) -> InputRefused:
    return InputRefused(
        f"{run.config}: not what the run was begun with: expected content of sha256 {expected}, found {found}; "
        "put it back, and give other settings as KEY=VALUE to a new run with --from"
    )


def settings_of(run: Run, given: Settings) -> Settings:
    """Return the settings of a run to resume, with those given settings that a resumed run may
    change.

    Raises:
        UsageError: a given setting contradicts the run's.
        InputRefused: the run was stopped before its settings were written; or see `run_settings`.
    """
    if not run.has_begun and not entries(run.checkpoints):
        raise InputRefused(
            f"{run.folder} was stopped before it began: start it with `monograph train --out {shell_words(run.folder)}`"
        )
    # Rank 0 answers for all.
    own = run_settings(run, runs=() if isinstance(run, Follower) else CODE_KEYS)
    per_update = defaults.in_whole_rows(
        int(own.train.tokens_per_update), int(own.data.sequence_length)
    )
    for key, value in given.pinned().items():
        mine = own.values()[key]
        if (
            value in (mine, "auto")
            or (
                key == "train.tokens"
                and own.train.updates == defaults.updates_for_tokens(value, per_update)
            )
            # The minutes in a TOML file have become the run's updates.
            or (key == "train.minutes" and given.origins[key] != "command line")
        ):
            continue
        # An earlier version took unknown keys; others change the records' fingerprint.
        if key == "data.ignore_keys":
            own = own.resolve({key: value}, given.origins[key])
            continue
        # The updates stay the same.
        if key in ("train.memory", "train.parallel", "train.gather_dtype"):
            # A run that is streamed, or gathered block by block, has no graph of the whole step.
            split = (value == "stream" or is_sharded(str(value))) and own.train.compile == "whole"
            own = own.resolve(
                {key: value} | ({"train.compile": "blocks"} if split else {}), given.origins[key]
            )
            continue
        if key in EXCLUSIVE[0]:
            epochs, updates = own.train.epochs, own.train.updates
            mine = counted(epochs, "epoch") if epochs else counted(updates or 0, "update")
        raise UsageError(
            f"{key} = {given.as_written(key)} ({given.origins[key]}), but {run.folder} was started with {mine}; "
            f"leave it out, or start a new run with --from {shell_words(run.handle)}"
        )
    return own


def parent_named(name: str) -> Parent:
    """Return what RUN[@UPDATE] names.

    A run of the whole name is meant if there is one, such as a run called a@5 beside one called a.
    """
    run, _, update = name.rpartition("@")
    numbered = re.fullmatch("[0-9]{1,18}", update)
    if not run or _is_run(name) or (exists(name) and not numbered):
        parent = Run.open(name)
        return Parent(parent, parent.at_update)
    if not numbered:
        raise UsageError(
            f"--from {name}: expected RUN or RUN@UPDATE with a whole number after the @, not {update!r}"
        )
    parent = Run.open(run)
    if parent.at_update not in (None, int(update)):
        raise UsageError(
            f"--from {name}: {run} is the checkpoint of update {parent.at_update}; leave one of them out"
        )
    return Parent(parent, int(update))


def _is_run(name: str) -> bool:
    """Return whether a run or a sweep is there under a name, which may begin with `last`."""
    with suppress(InputRefused):
        Run.locate(name)
        return True
    return False


def model_given(settings: Settings, name: str | None) -> tuple[Settings, str | None]:
    """Return the settings and the run that `--from` names; a model's folder, which is no run,
    becomes model.init.

    Raises:
        UsageError: `--from` names a model's folder, and model.init is given, too.
    """
    if name is None or names_run(name) or not is_file(Path(name, "config.json")):
        return settings, name
    if settings.model.init:
        raise UsageError(
            f"--from {name} and model.init = {settings.model.init} both name a model; give one"
        )
    return settings.resolve({"model.init": name}, "--from"), None


def branched(parent: Run, given: Settings) -> Settings:
    """Return the settings of a new run: the given ones, and its parent's except those of
    `RUN_SPECIFIC_KEYS`.
    """
    if not parent.has_begun and not entries(parent.checkpoints):
        raise InputRefused(
            f"{parent.folder} was stopped before it began: nothing can start from it"
        )
    replaced = dict.fromkeys(CODE_KEYS, objective_of(given).is_named)
    replaced["model.init"] = given.model.init is not None
    own = run_settings(parent, runs=[key for key in CODE_KEYS if not replaced[key]])
    taken = _by_records(given, own)
    if added := [
        key for key in ADAPTER_KEYS if key in taken and given.values()[key] != own.values()[key]
    ]:
        raise UsageError(
            f"{given.origins[added[0]]}: {added[0]}: --from goes on with the weights that {parent.folder} trains and "
            f"their optimizer; for adapters on them start anew with model.init={parent.folder}"
        )
    for key in ("optim.transfer", "optim.transfer_base"):
        mine = own.values()[key]
        if key in taken and given.values()[key] != mine:
            raise UsageError(
                f"{given.said(key)}, but the weights of {parent.folder} were drawn with {mine}; leave it out"
            )
    if "data.tokenizer" in taken:
        source = ModelSource.open(str(parent.folder))
        tokenizer = resolve_tokenizer(given.data.tokenizer)
        tokens_of(given, source, tokenizer, is_adapted=False).require_no_new(str(parent.folder))
    taken -= {"optim.transfer", "optim.transfer_base"}
    taken |= {belonging for key in taken for belonging in DEPENDENT_KEYS.get(key, ())}
    closed = (
        {key for group in EXCLUSIVE if not taken.isdisjoint(group) for key in group}
        | taken
        | RUN_SPECIFIC_KEYS
    )
    if given.model.init:  # that model brings its own shape
        closed |= {key for key in own.values() if key.startswith("model.")}
    kept = {key: value for key, value in own.pinned().items() if key not in closed}
    kept |= {
        f"data.{key}": copy
        for key, copy in own_copies(own.data, own.origins).items()
        if f"data.{key}" in kept
    }
    if "data.tokenizer" not in taken:
        # A newly trained BPE would change the meaning of the ids.
        kept["data.tokenizer"] = str(parent.tokenizer)
        kept.pop("data.vocab_size", None)
    return given.resolve(kept, str(parent.config)).vouching({**own.vouched, **given.vouched})


def _by_records(given: Settings, own: Settings) -> set[str]:
    """Return the keys that a new run does not take from its parent: given ones, and those that its
    records decide.
    """
    taken = {*given.pinned()}
    objective = objective_of(given)
    if objective.is_named:  # what the parent learned from is over
        sections = {other.section for other in OBJECTIVES} - {objective.section}
        taken |= {key for key in own.values() if key.partition(".")[0] in sections}
    for other in (other for other in OBJECTIVES if other.by_records):
        is_by_records = given.origins.get(other.key) == BY_RECORDS  # for want of another
        if is_by_records and other.learns_alike(given.values()[other.key], own.values()[other.key]):
            taken -= {other.key}
        elif "data.source" in taken:
            taken |= {other.key}
    if objective.is_named and objective.is_own_length != objective_of(own).is_own_length:
        taken |= {"train.tokens_per_update"}
    return taken
