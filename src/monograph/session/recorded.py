"""Read the settings in a run's config.toml, check that they are unchanged, and derive from them the
settings of a resumed run or of a new run that begins from the recorded one.

A setting may name code, a function in a Python file, by a value such as FILE.py:FUNCTION. The result
of each function has such files in `Settings.vouched` only if they may run (`monograph.run.trust`).

The *fingerprint* of settings is a hash of their values. Each checkpoint records it, so that a changed
config.toml is noticed.
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
from monograph.session.new_tokens import token_source_of
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
    code_keys: Collection[str] = CODE_KEYS,
    sweep_programs: Sequence[str] = (),
    fingerprint: str | None = None,
) -> Settings:
    """Return the settings in a run's config.toml, after checking that the file is unchanged.

    All code that reads a run's config.toml does so by this function.

    Args:
        run: the run.
        code_keys: the keys whose code the caller may run.
        sweep_programs: the values that name code in a sweep's points, which config.toml does not
            have. The caller may run this code, too.
        fingerprint: the fingerprint that the settings must have; None means the one that the run's
            newest valid checkpoint records.

    Raises:
        InputRefused: the file has changed since the run was begun, or it names code that this user
            does not trust.
        UsageError: the file is not a configuration, and no checkpoint records a fingerprint of it.
    """
    state = recorded_state.newest_state(run)
    expected = fingerprint or state.get("settings")
    try:
        # Nothing overrides the file: no value of a command line, no variable of the environment.
        settings = load(run.config, {}, {}, recorded=True)
    except UsageError as error:
        if expected is None:
            raise
        # A checkpoint shows that the file was a configuration once, so it has changed.
        content = contents(run.config)
        found = "nothing" if content is None else hashlib.sha256(content).hexdigest()
        raise _changed_settings_error(run, expected, f"{found} ({error})") from None
    # An earlier version computed the fingerprint from the keys and the spellings that it wrote.
    if expected not in (None, settings.fingerprint, written_fingerprint(run.config)):
        raise _changed_settings_error(run, expected, settings.fingerprint)
    all_programs = [*settings.programs, *sweep_programs]
    values = settings.values()
    programs_to_run = [*(values[key] for key in code_keys), *sweep_programs]
    recipe = state.get("recipe", {})
    recorded_digests = {recipe.get("init"): recipe.get("sha256")}
    vouched = require_trusted(run.config, all_programs, programs_to_run, recorded_digests)
    return settings.vouching(vouched)


def _changed_settings_error(run: Run, expected: str, found: str) -> InputRefused:
    """Return the error that config.toml has changed.

    Args:
        run: the run.
        expected: the fingerprint that its checkpoint records.
        found: the present fingerprint, or a digest of the file and what is wrong with it.
    """
    return InputRefused(
        f"{run.config}: not what the run was begun with: expected content of sha256 {expected}, found {found}; "
        "put it back, and give other settings as KEY=VALUE to a new run with --from"
    )


def command_line_settings(
    toml: Path | None,
    overrides: Mapping[str, Any],
    *,
    runs_code: bool,
    files: tuple[str, ...] = FILES,
    faults: Sequence[MonographError] = (),
) -> Settings:
    """Return the settings that a command line gives, after downloading a `model.init` of the Hub.

    Code may run if the user named it: on the command line, in the environment or in a TOML file of
    their own. Code that is named in the TOML file of a run may run only if that run is trusted
    (`monograph.run.trust`).

    Args:
        toml: the TOML file that the command line names; None without one.
        overrides: the values that the command line gives, by key.
        runs_code: whether the command runs code that the settings name.
        files: patterns of the files to download from the Hub.
        faults: errors in other arguments, which are reported together with those in the settings.

    Raises:
        InputRefused: see `run_settings`.
        UsageError: see `monograph.config.load`.
    """
    code_keys_of_toml = [key for key in CODE_KEYS if runs_code and key not in overrides]
    vouched_by_run = _vouched_by_run(toml, code_keys_of_toml)
    has_mark = toml is not None and carries_mark(toml)
    settings = with_fetched_model(load(toml, overrides, recorded=has_mark, faults=faults), files)
    if not runs_code:
        return settings
    if vouched_by_run is None:
        # No run wrote the file, so the user named everything.
        return settings.vouching(digests(settings.programs))
    named_by_user = [
        value
        for key, value in settings.values().items()
        if key in CODE_KEYS and not _is_from_toml(toml, settings, key)
    ]
    # The file was read twice. Code that only the second reading found was not checked.
    checked = {*vouched_by_run, *named_by_user}
    unknown = [value for value in settings.programs if value not in checked]
    if unknown:
        raise InputRefused(
            f"{toml}: changed while it was read, and now names {unknown[0]}; try again"
        )
    return settings.vouching({**digests(named_by_user), **vouched_by_run})


def _is_from_toml(toml: Path | None, settings: Settings, key: str) -> bool:
    """Return whether a value comes from the TOML file; its origin is then FILE:LINE."""
    return toml is not None and settings.origins.get(key, "").startswith(str(toml))


def _vouched_by_run(toml: Path | None, code_keys: Collection[str]) -> Mapping[str, str] | None:
    """Check the settings of the run that wrote a TOML file, and return the digests of the Python
    files that may run.

    A run wrote the file if it is in a run's folder, once links are followed, or has a mark
    (`monograph.run.trust`). A mark counts even outside of a run's folder, since a stranger may have
    left out the files that make a folder a run. The warning of `foreign_text_warning` is printed.

    Args:
        toml: the TOML file that the user named; None without one.
        code_keys: the keys whose code the command runs.

    Returns:
        The digest of each Python file by the value that names it; None if no run wrote the file.

    Raises:
        InputRefused: see `run_settings`.
    """
    if toml is None or not is_file(toml):
        return None
    toml = resolved(toml)
    run = Run(toml.parent)
    is_folder_of_run = is_file(run.lock_file) or is_folder(run.checkpoints)
    if toml == run.config and is_folder_of_run:
        settings = run_settings(run, code_keys=code_keys)
        if warning := foreign_text_warning(run, settings.data.source, settings.programs):
            print("warning:", warning, file=sys.stderr)
        return settings.vouched
    # The file may also be another one than config.toml, or in a folder without checkpoints. Then
    # nothing records a fingerprint, and only its code is checked.
    if carries_mark(toml) or any(is_file(parent / "run.lock") for parent in toml.parents):
        settings = load(toml, {}, {}, recorded=True)
        programs_to_run = [settings.values()[key] for key in code_keys]
        return require_trusted(toml, settings.programs, programs_to_run)
    return None


def with_fetched_model(settings: Settings, files: tuple[str, ...] = FILES) -> Settings:
    """Download a `model.init` of the Hub, and return the settings with the folder of the download.

    The folder is in the Hub's cache, and has the files of one commit.

    Raises:
        UsageError, InputRefused, DiskFull: see `monograph.run.repository.fetch_if_on_hub`.
    """
    init = settings.model.init
    if init and init.startswith(HUB):
        return settings.resolve({"model.init": fetch_if_on_hub(init, files)}, init)
    return settings


def copies_of_missing_files(data: DataSection, origins: Mapping[str, str]) -> dict[str, Any]:
    """Return new values for `source` and `tokenizer` of [data] if they name files that are gone.

    A run keeps copies of its tokenizer and of the text that it read from standard input. If the run
    or its parent was moved, the recorded paths no longer lead to these copies. The new values name
    the copies in the folder of the config.toml from which the old values come.

    Args:
        data: the section [data].
        origins: the origins of its keys.

    Returns:
        The new values by their names in [data]; a value whose files are all there is left out.
    """
    new_values: dict[str, Any] = {}
    for key, value, copy_name in (
        ("source", data.source, "stdin"),
        ("tokenizer", data.tokenizer, "tokenizer.json"),
    ):
        # The origin of a value of a TOML file is FILE:LINE.
        toml = Path(origins.get(f"data.{key}", "").rpartition(":")[0])
        run = Run(toml.parent)
        copy = run.folder / copy_name
        paths = [value] if isinstance(value, str) else value
        gone = [path for path in paths if Path(path).name == copy_name and not exists(path)]
        if gone and is_file(run.lock_file) and exists(copy):
            new_paths = [str(copy) if path in gone else path for path in paths]
            new_values[key] = new_paths[0] if isinstance(value, str) else new_paths
    return new_values


def refuse_model_as_text(settings: Settings) -> None:
    """Refuse a `data.source` that is a run, a checkpoint or a model's folder, not text.

    Raises:
        UsageError: the source is one of these; the message says how to name it instead.
    """
    source = settings.data.source
    for place in [source] if isinstance(source, str) else source:
        folder = Path(os.path.expanduser(place))
        if is_file(folder / "run.lock") or update_of_checkpoint(folder) is not None:
            raise UsageError(
                f"{place} is a run, not text: give its config.toml, or model.init={place}"
            )
        if is_file(folder / "config.json") and entries(folder, "model"):
            raise UsageError(f"{place} is a model, not text: give it as model.init={place}")


def foreign_text_warning(run: Run, source: str | Sequence[str], programs: Sequence[str]) -> str:
    """Return a warning if a run of another user names text outside of the run's folder; "" if not.

    A stranger's config.toml could name any file of this user. The model would then learn its text.

    Args:
        run: the run.
        source: the text that its settings name.
        programs: the values of its settings that name code.
    """
    home = without_links(run.folder)
    places = [source] if isinstance(source, str) else source
    outside = [
        place
        for place in places
        if place != "stdlib" and _leads_outside(Path(os.path.expanduser(place)), home)
    ]
    if not outside or is_ours(run.config, programs):
        return ""
    return f"{run.folder} was not begun here, and names text outside of it, which is read: {', '.join(outside)}"


def _leads_outside(place: Path, home: Path) -> bool:
    """Return whether a path leads outside of the folder `home` once links are followed.

    A pattern leads outside if a file that matches it does; a folder, if a file in it does.
    """
    paths = [place, *matching(place), *matching(place / "**")]
    return any(home not in without_links(path).parents for path in paths)


# ── the settings of a resumed run ───────────────────────────────────────────────────────────────


def settings_to_resume(run: Run, given: Settings) -> Settings:
    """Return the settings with which a run is resumed: the recorded ones, changed by the given ones
    where a resumed run may change them.

    Args:
        run: the run.
        given: the settings that the command line, the environment or a TOML file gives.

    Raises:
        UsageError: a given setting contradicts the run's.
        InputRefused: the run was stopped before its settings were written; or see `run_settings`.
    """
    if not run.has_begun and not entries(run.checkpoints):
        raise InputRefused(
            f"{run.folder} was stopped before it began: start it with `monograph train --out {shell_words(run.folder)}`"
        )
    # Rank 0 checks for all ranks that the code may run.
    code_keys = () if isinstance(run, Follower) else CODE_KEYS
    settings = run_settings(run, code_keys=code_keys)
    tokens_per_update = defaults.in_whole_rows(
        int(settings.train.tokens_per_update), int(settings.data.sequence_length)
    )
    for key, value in given.given_values().items():
        origin = given.origins[key]
        if value in (settings.values()[key], "auto"):
            continue
        # A run records its length as train.updates, whichever key the user gave.
        if (
            key == "train.tokens"
            and defaults.updates_for_tokens(value, tokens_per_update) == settings.train.updates
        ):
            continue
        # A time in a TOML file or the environment is meant for new runs. One that is given together
        # with --resume is meant for this run, and is refused below.
        if key == "train.minutes" and origin != "command line":
            continue
        # An earlier version accepted unknown keys of records. This one refuses them unless
        # data.ignore_keys names them. If it names a key that the run has read, the records change,
        # and so does their fingerprint.
        if key == "data.ignore_keys":
            settings = settings.resolve({key: value}, origin)
            continue
        # These keys do not change what an update computes.
        if key in ("train.memory", "train.parallel", "train.gather_dtype"):
            changes = {key: value}
            # A model that is streamed or gathered block by block has no graph of the whole step.
            is_by_blocks = value == "stream" or is_sharded(str(value))
            if is_by_blocks and settings.train.compile == "whole":
                changes["train.compile"] = "blocks"
            settings = settings.resolve(changes, origin)
            continue
        # The first group of keys that exclude one another has those that give a run's length.
        keys_of_length = EXCLUSIVE[0]
        if key not in keys_of_length:
            recorded = settings.values()[key]
        elif settings.train.epochs:
            recorded = counted(settings.train.epochs, "epoch")
        else:
            recorded = counted(settings.train.updates or 0, "update")
        raise UsageError(
            f"{key} = {given.as_written(key)} ({origin}), but {run.folder} was started with {recorded}; "
            f"leave it out, or start a new run with --from {shell_words(run.handle)}"
        )
    return settings


# ── the settings of a run that begins from another one ──────────────────────────────────────────


def parent_named(name: str) -> Parent:
    """Return the run, and perhaps the update, that RUN[@UPDATE] names.

    A run's name may itself contain an @. So a run called a@5 is meant by a@5, even if there is a
    run called a, too.
    """
    run_name, _, update = name.rpartition("@")
    is_number = re.fullmatch("[0-9]{1,18}", update) is not None
    # `rpartition` leaves `run_name` empty if there is no @.
    has_no_at = not run_name
    is_path_with_at = exists(name) and not is_number
    if has_no_at or is_path_with_at or _can_be_located(name):
        parent = Run.open(name)
        return Parent(parent, parent.at_update)
    if not is_number:
        raise UsageError(
            f"--from {name}: expected RUN or RUN@UPDATE with a whole number after the @, not {update!r}"
        )
    parent = Run.open(run_name)
    if parent.at_update not in (None, int(update)):
        raise UsageError(
            f"--from {name}: {run_name} is the checkpoint of update {parent.at_update}; leave one of them out"
        )
    return Parent(parent, int(update))


def _can_be_located(name: str) -> bool:
    """Return whether a name, which may begin with `last`, leads to an existing run or sweep."""
    with suppress(InputRefused):
        Run.locate(name)
        return True
    return False


def with_folder_as_init(settings: Settings, from_: str | None) -> tuple[Settings, str | None]:
    """Replace a `--from` that names a model's folder, not a run, by `model.init`.

    Returns:
        The settings, and what remains of `--from`: the run that it names, or None.

    Raises:
        UsageError: `--from` names a model's folder, and model.init is given, too.
    """
    if from_ is None or names_run(from_) or not is_file(Path(from_, "config.json")):
        return settings, from_
    if settings.model.init:
        raise UsageError(
            f"--from {from_} and model.init = {settings.model.init} both name a model; give one"
        )
    return settings.resolve({"model.init": from_}, "--from"), None


def settings_from_parent(parent: Run, given: Settings) -> Settings:
    """Return the settings of a new run that begins from `parent`: the given ones, and the parent's
    for keys that are not given.

    The keys of `RUN_SPECIFIC_KEYS`, such as the length of the run, are never the parent's.

    Raises:
        InputRefused: the parent was stopped before its settings were written; or see
            `run_settings`.
        UsageError: a given value does not fit the parent's weights or optimizer state.
    """
    if not parent.has_begun and not entries(parent.checkpoints):
        raise InputRefused(
            f"{parent.folder} was stopped before it began: nothing can start from it"
        )
    # Where the new run has a value of its own, the parent's code is not run, and need not be
    # trusted. A new run that chooses a way to learn replaces all code of the parent except its
    # model's.
    is_replaced = dict.fromkeys(CODE_KEYS, objective_of(given).has_key)
    is_replaced["model.init"] = given.model.init is not None
    code_keys = [key for key in CODE_KEYS if not is_replaced[key]]
    parent_settings = run_settings(parent, code_keys=code_keys)
    new_keys = _keys_of_the_new_run(given, parent_settings)
    _require_same_weights(parent, parent_settings, given, new_keys)
    # `_require_same_weights` has found that given values of these keys equal the parent's. So they
    # count as inherited.
    new_keys -= {"optim.transfer", "optim.transfer_base"}
    # A key that says something about the value of a new key is not the parent's either.
    for key in tuple(new_keys):
        new_keys.update(DEPENDENT_KEYS.get(key, ()))
    not_inherited = new_keys | RUN_SPECIFIC_KEYS
    for group in EXCLUSIVE:
        if not new_keys.isdisjoint(group):
            not_inherited |= set(group)
    if given.model.init:  # that model has its own shape
        not_inherited |= {key for key in parent_settings.values() if key.startswith("model.")}
    inherited = {
        key: value
        for key, value in parent_settings.given_values().items()
        if key not in not_inherited
    }
    copies = copies_of_missing_files(parent_settings.data, parent_settings.origins)
    for name, value in copies.items():
        if f"data.{name}" in inherited:
            inherited[f"data.{name}"] = value
    if "data.tokenizer" not in new_keys:
        # The parent may have trained a BPE tokenizer on its text. A tokenizer that is trained on
        # the new run's text would give the ids another meaning. So the new run reads the tokenizer
        # in the parent's folder.
        inherited["data.tokenizer"] = str(parent.tokenizer)
        inherited.pop("data.vocab_size", None)
    settings = given.resolve(inherited, str(parent.config))
    return settings.vouching({**parent_settings.vouched, **given.vouched})


def _require_same_weights(
    parent: Run, parent_settings: Settings, given: Settings, new_keys: Collection[str]
) -> None:
    """Refuse given values that do not fit the weights and the optimizer state of the parent.

    Args:
        parent: the run whose weights the new run begins from.
        parent_settings: its settings.
        given: the given settings.
        new_keys: the keys that the new run does not take from its parent.

    Raises:
        InputRefused: the tokenizer differs from the parent's.
        UsageError: other adapters, another width transfer or new tokens are given.
    """
    given_values = given.values()
    parent_values = parent_settings.values()

    def differs(key: str) -> bool:
        return key in new_keys and given_values[key] != parent_values[key]

    changed = [key for key in ADAPTER_KEYS if differs(key)]
    if changed:
        raise UsageError(
            f"{given.origins[changed[0]]}: {changed[0]}: --from goes on with the weights that {parent.folder} trains "
            f"and their optimizer; for adapters on them start anew with model.init={parent.folder}"
        )
    for key in ("optim.transfer", "optim.transfer_base"):
        if differs(key):
            raise UsageError(
                f"{given.quoted(key)}, but the weights of {parent.folder} were drawn with {parent_values[key]}; "
                "leave it out"
            )
    if "data.tokenizer" in new_keys:
        source = ModelSource.open(str(parent.folder))
        tokenizer = resolve_tokenizer(given.data.tokenizer)
        token_source_of(given, source, tokenizer, is_adapted=False).require_no_new(
            str(parent.folder)
        )


def _keys_of_the_new_run(given: Settings, parent_settings: Settings) -> set[str]:
    """Return the keys whose values a new run does not take from its parent.

    These are the given keys, and keys that no longer fit because the new run has another way to
    learn or other records.
    """
    new_keys = set(given.given_values())
    given_values = given.values()
    parent_values = parent_settings.values()
    chosen = objective_of(given)
    if chosen.has_key:
        # If the parent learned in another way, the keys of that way no longer apply.
        other_sections = {other.section for other in OBJECTIVES} - {chosen.section}
        new_keys |= {key for key in parent_values if key.partition(".")[0] in other_sections}
    for objective in OBJECTIVES:
        if not objective.records_can_choose:
            continue
        key = objective.key
        # If no given key chose the way to learn, the form of the records did, and this key has its
        # default value. The parent's value is better if it needs the same kind of records.
        was_chosen_by_records = given.origins.get(key) == BY_RECORDS
        if was_chosen_by_records and objective.needs_same_records(
            given_values[key], parent_values[key]
        ):
            new_keys.discard(key)
        elif "data.source" in new_keys:
            # The parent's value may not fit the new records.
            new_keys.add(key)
    # If only one of the two ways to learn has a key of its own for the size of an update, the
    # parent's train.tokens_per_update does not suit the new run.
    parent_objective = objective_of(parent_settings)
    if chosen.has_key and chosen.has_own_update_size != parent_objective.has_own_update_size:
        new_keys.add("train.tokens_per_update")
    return new_keys
