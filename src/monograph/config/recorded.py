"""The settings that a run's config.toml holds: as its checkpoints recorded them, and with code that may run."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from monograph import checkpointing
from monograph.checkpointing import CheckpointDamaged
from monograph.config.settings import Settings
from monograph.config.sources import load
from monograph.data.sources import weighted
from monograph.errors import InputRefused, UsageError
from monograph.run.folder import Run
from monograph.run.register import checkpoint_named
from monograph.run.trust import carries_mark, is_ours, require_trusted
from monograph.storage.reading import contents, entries, is_file, is_folder, resolved


def run_settings(
    run: Run, *, runs_code: bool = True, inits: Sequence[str] = (), recorded: str | None = None
) -> Settings:
    """The settings of a run; whatever reads its config.toml reads it here.

    Args:
        run: its folder.
        runs_code: whether what is made of the settings may run the Python file that they name.
        inits: values of model.init that a sweep names beside those of its config.toml.
        recorded: the fingerprint of the settings, where no checkpoint of the run says it.

    Raises:
        InputRefused: the file is not what the run was begun with, or it names code that nobody here vouches for.
        UsageError: it is no configuration, and no checkpoint says what it was.
    """
    state = _state(run)
    expected = recorded or state.get("settings")
    try:
        found = load(run.config, {}, {})
    except UsageError as error:
        if expected is None:
            raise
        there = hashlib.sha256(text).hexdigest() if (text := contents(run.config)) is not None else "nothing"
        raise _changed(run, expected, f"{there} ({error})") from None
    if expected is not None and not found.has_fingerprint(expected):
        raise _changed(run, expected, found.fingerprint)
    if runs_code:
        recipe = state.get("recipe")
        trained_with = recipe.get("sha256") if isinstance(recipe, dict) else None
        require_trusted(run.config, [found.model.init, *inits], trained_with)
    return found


def hold_to_its_run(toml: Path | None, *, runs_code: bool) -> None:
    """Hold a TOML file that a person named to the rules of the run that wrote it, or in whose folder it lies.

    A link is what it leads to; and a stranger may leave out what makes a folder a run. What `strange_text` says of it
    is printed.

    Raises:
        InputRefused: as `run_settings`.
    """
    if toml is None or not is_file(toml):
        return
    toml = resolved(toml)
    run = Run(toml.parent)
    if toml == run.config and (is_file(run.lock_file) or is_folder(run.checkpoints)):
        if told := strange_text(run, run_settings(run, runs_code=runs_code)):
            print("warning:", told, file=sys.stderr)
    elif runs_code and (carries_mark(toml) or any(is_file(parent / "run.lock") for parent in toml.parents)):
        require_trusted(toml, [load(toml, {}, {}).model.init])


def require_text(settings: Settings) -> None:
    """Refuse a run, one of its checkpoints or a model's folder where text is meant: none of their files is text.

    Raises:
        UsageError: with the settings that name it.
    """
    source = settings.data.source
    for place in [source] if isinstance(source, str) else source:
        folder = Path(os.path.expanduser(place))
        if is_file(folder / "run.lock") or checkpoint_named(folder) is not None:
            raise UsageError(f"{place} is a run, no text: give its config.toml, or model.init={place}")
        if is_file(folder / "config.json") and entries(folder, "model"):
            raise UsageError(f"{place} is a model, no text: give it as model.init={place}")


def strange_text(run: Run, settings: Settings) -> str:
    """A line on the text outside of its folder that a run names which this user did not write here; of others empty."""
    source, home = settings.data.source, run.folder.resolve()
    places = [weighted(each)[0] for each in ([source] if isinstance(source, str) else source)]
    beyond = [
        each for each in places if each != "stdlib" and home not in Path(os.path.expanduser(each)).resolve().parents
    ]
    if not beyond or is_ours(run.config, [settings.model.init]):
        return ""
    return f"{run.folder} was not begun here, and names text outside of it, which is read: {', '.join(beyond)}"


def _state(run: Run) -> dict[str, Any]:
    """The state of the newest checkpoint of which it is sound; nothing of a run without one."""
    for folder in reversed(entries(run.checkpoints, "step-")):
        with suppress(CheckpointDamaged):
            return checkpointing.load_state(folder)
    return {}


def _changed(run: Run, expected: str, found: str) -> InputRefused:
    return InputRefused(
        f"{run.config}: not what the run was begun with: expected content of sha256 {expected}, found {found}; "
        "put it back, and give other settings as KEY=VALUE to a new run with --from"
    )
