"""What a run's settings leave open, decided once; and which settings a resumed or branched run has."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from monograph import planner
from monograph.config import Settings
from monograph.config.keys import DEFAULT_MINUTES
from monograph.config.recorded import run_settings
from monograph.config.settings import EXCLUSIVE
from monograph.data.places import spooled_stdin
from monograph.errors import DiskFull, InputRefused, UsageError
from monograph.measure.quantities import count, counted, duration
from monograph.model.files import has_weights
from monograph.run.folder import Run
from monograph.run.follower import Follower
from monograph.run.progress import Progress
from monograph.run.recipe import Recipe, names_run, run_named, shape_in
from monograph.run.register import SWEEP
from monograph.run.trust import marked
from monograph.run.vocabulary import tokenizer_of
from monograph.session.adapting import KEYS, adapter_params, fixed_lora, require_targets
from monograph.session.planning import require_positions
from monograph.session.session import Session
from monograph.session.speed import calibrate, remember
from monograph.session.tokens import require_no_new, require_tokens
from monograph.session.width import fixed_transfer, same_transfer
from monograph.storage.reading import contents, entries, exists, is_file, parse_json
from monograph.terminal import shell_words
from monograph.text import tokenizer_config
from monograph.text.tokenizer import Tokenizer

EVALUATIONS, CHECKPOINTS = 12, 6  # of a run, where the settings leave it open
# A branched run has its parent's settings but for these: how long, what follows from that, and by how many processes.
_OF_ONE_RUN = {*EXCLUSIVE[0], "train.eval_every", "train.save_every", "optim.warmup_updates", "train.parallel"}


def sized(settings: Settings, *, built: bool = True) -> Settings:
    """Fix preset, tokenizer and tokens per update where the settings leave them open, and which run `last` is.

    Args:
        settings: of a run.
        built: whether its model will be built; if not, a folder that holds config.json and no weights will do.

    Raises:
        InputRefused: a model that cannot be built, before any text is read.
    """
    model, chosen = settings.model, dict[str, object]()
    if model.init and (other := run_named(model.init)):  # as soon as this run has begun, `last` is itself
        chosen["model.init"] = str(other.named)
    if model.preset == "auto" and model.init is None and not model.hidden_size:
        chosen["model.preset"] = planner.DEFAULT.preset
    preset = str(chosen.get("model.preset", model.preset))
    chosen |= fixed_lora(settings)
    recipe = Recipe(model.init, preset, model.sizes(), settings.train.seed)
    shape_alone = not built and model.init is not None and is_file(Path(model.init, "config.json"))
    recipe = recipe if shape_alone and not has_weights(Path(str(model.init))) else recipe.checked()
    if settings.optim.transfer != "none":
        drawn = None if model.init else recipe.shape(vocab_size=1)
        chosen["optim.transfer"] = fixed_transfer(settings, drawn)
    if settings.data.tokenizer == "auto" and not shape_alone:
        own = str(tokenizer_of(model.init)) if model.init and not recipe.file else None
        chosen["data.tokenizer"] = own or f"bpe:{planner.DEFAULT.vocabulary}"
    if settings.train.tokens_per_update == "auto":
        chosen["train.tokens_per_update"] = max(planner.DEFAULT.tokens_per_update, settings.data.sequence_length)
    fixed = settings.resolve(chosen, "plan")
    if not shape_alone:
        require_tokens(fixed)
    shape = shape_in(recipe.init) if recipe.init else None
    require_targets(fixed, shape)
    require_positions(fixed, shape)
    return fixed


def keeping_stdin(run: Run, settings: Settings, progress: Progress) -> Settings:
    """Keep the text of standard input in the run's folder: resume, evaluation and branches read it there again."""
    source = settings.data.source
    named = [source] if isinstance(source, str) else source
    if "-" not in named:
        return settings
    with progress.stage("text", "standard input") as stage:
        kept = str(spooled_stdin(run.folder, stage.report))
        stage.result = f"kept as {kept}"
    return settings.resolve({"data.source": [kept if name == "-" else name for name in named]}, "plan")


def fix_length(session: Session, progress: Progress) -> None:
    """Turn minutes, tokens or epochs into updates, once; and what follows from their number."""
    train, rows, lasting = session.settings.train, session.batches.rows_per_window, ""
    if train.updates:
        updates = train.updates
    elif train.tokens:
        updates = _updates_of(train.tokens, session.settings)
    elif train.epochs:
        updates = -(-train.epochs * session.corpus.train.per_epoch // rows)
    else:
        with progress.stage("calibrate", "a few updates, thrown away") as stage:
            seconds = calibrate(session)
            stage.result = f"{seconds * 1000:.0f} ms each"
        remember(session, seconds)
        minutes = train.minutes or DEFAULT_MINUTES
        asked = "train.minutes" in session.settings.origins
        session.budget_s = 60 * minutes if asked else planner.default_seconds(minutes, seconds)
        if session.budget_s > 60 * minutes:
            longer = duration(session.budget_s)
            progress.line("time", f"{longer} instead of {minutes:g} min: what a good first model needs on this machine")
        updates = planner.updates_for(planner.UPDATES_SHARE * session.budget_s, seconds, most_updates(session))
        lasting = f", about {duration(session.budget_s)}"
        if updates >= most_updates(session):
            lasting = f", {planner.MOST_EPOCHS} epochs and no more, about {duration(seconds * updates)}"
    session.settings = of_length(session.settings, updates)
    session.length = updates
    session.engine.step.schedule = session.schedule()
    per_update = int(session.settings.train.tokens_per_update)
    adapters = f" of which {count(adapter_params(session))} are trained" if session.recipe.lora else ""
    progress.line(
        "plan",
        f"{count(session.params)} parameters{adapters}, {counted(updates, 'update')} of {per_update:,} tokens = "
        f"{count(updates * per_update)}, {counted(rows, 'row')} of {session.settings.data.sequence_length}, "
        f"{session.settings.train.precision}{lasting}",
    )
    if isinstance(session.planned, planner.StreamCandidate):
        for label, said in planner.tiers_said(session.planned):
            progress.line(label, said)


def most_updates(session: Session) -> int:
    """What minutes may become at most: a text is not read more often, however much time there is."""
    return planner.MOST_EPOCHS * -(-session.corpus.train.per_epoch // session.batches.rows_per_window)


def of_length(settings: Settings, updates: int, evaluations: int = EVALUATIONS) -> Settings:
    """The settings of a run of so many updates: with warm-up, evaluations and checkpoints to match."""
    train, warmup = settings.train, settings.optim.warmup_updates
    fixed: dict[str, object] = {
        "optim.warmup_updates": planner.warmup(updates) if warmup == "auto" else None,
        "train.eval_every": planner.interval(updates, evaluations) if train.eval_every == "auto" else None,
        "train.save_every": planner.interval(updates, CHECKPOINTS) if train.save_every == "auto" else None,
        "train.updates": None if train.epochs else updates,
    }
    return settings.resolve({key: value for key, value in fixed.items() if value is not None}, "plan")


def settings_of(run: Run, given: Settings) -> Settings:
    """The run's own settings; what the command line adds to `--resume` must not contradict them.

    Raises:
        UsageError: it does.
        InputRefused: the run was stopped before its settings were written; or as `run_settings`.
    """
    if not run.begun and not entries(run.checkpoints):
        raise InputRefused(
            f"{run.folder} was stopped before it began: start it with `monograph train --out {shell_words(run.folder)}`"
        )
    own = run_settings(run, runs_code=not isinstance(run, Follower))  # rank 0 answers for all
    for key, value in given.pinned().items():
        mine = own.values()[key]
        if value in (mine, "auto"):
            continue
        if key == "train.memory":
            own = own.resolve(_moved(str(value), own), given.origins[key])
            continue
        if key == "train.parallel":  # the same updates by more ranks or fewer
            own = own.resolve({key: value}, given.origins[key])
            continue
        if key == "optim.transfer" and same_transfer(value, mine):
            continue
        if key == "train.tokens" and _updates_of(int(value), own) == own.train.updates:
            continue
        if key == "train.minutes" and given.origins[key] != "command line":
            continue  # what the file of settings asked for became updates, once
        if key in EXCLUSIVE[0]:
            epochs, updates = own.train.epochs, own.train.updates
            mine = counted(epochs, "epoch") if epochs else counted(updates or 0, "update")
        raise UsageError(
            f"{key} = {value} ({given.origins[key]}), but {run.folder} was started with {mine}; "
            f"leave it out, or start a new run with --from {shell_words(run.handle)}"
        )
    return own


def _moved(memory: str, own: Settings) -> dict[str, Any]:
    """What changes where a run goes on with its weights elsewhere; a stream has no graph of the whole step."""
    whole = memory == "stream" and own.train.compile == "whole"
    return {"train.memory": memory} | ({"train.compile": "blocks"} if whole else {})


def parent_named(name: str) -> tuple[Run, int | None]:
    """The run, and the update if one is given, that RUN[@UPDATE] names."""
    run, _, update = name.rpartition("@")
    if run and not update.isdecimal() and not exists(name):
        raise UsageError(f"--from {name}: expected RUN or RUN@UPDATE with a whole number after the @, not {update!r}")
    parent = Run.open(run if run and update.isdecimal() else name)
    return parent, int(update) if run and update.isdecimal() else parent.at


def model_given(settings: Settings, name: str | None) -> tuple[Settings, str | None]:
    """The settings, and the run that `--from` names: a model's folder that is no run is model.init, with no optimizer.

    Raises:
        UsageError: model.init is given, too.
    """
    if name is None or names_run(name) or not is_file(Path(name, "config.json")):
        return settings, name
    if settings.model.init:
        raise UsageError(f"--from {name} and model.init = {settings.model.init} both name a model; give one")
    return settings.resolve({"model.init": name}, "--from"), None


def branched(parent: Run, given: Settings) -> Settings:
    """What a new run takes over from its parent: everything that was not given, but for the length of the run."""
    if not parent.begun and not entries(parent.checkpoints):
        raise InputRefused(f"{parent.folder} was stopped before it began: nothing can start from it")
    own = run_settings(parent, runs_code=given.model.init is None)
    taken = {*given.pinned()}
    if added := [key for key in KEYS if key in taken and given.values()[key] != own.values()[key]]:
        raise UsageError(
            f"{given.origins[added[0]]}: {added[0]}: --from goes on with the weights that {parent.folder} trains and "
            f"their optimizer; for adapters beside them start anew with model.init={parent.folder}"
        )
    if "optim.transfer" in taken and not same_transfer(given.optim.transfer, own.optim.transfer):
        origin = given.origins["optim.transfer"]
        raise UsageError(
            f"{origin}: optim.transfer = {given.optim.transfer}, but the weights of {parent.folder} were drawn with "
            f"{own.optim.transfer}; leave it out"
        )
    if "data.tokenizer" in taken:
        require_no_new(given, str(parent.folder))
    taken -= {"optim.transfer"}
    closed = {key for group in EXCLUSIVE if not taken.isdisjoint(group) for key in group} | taken | _OF_ONE_RUN
    if given.model.init:  # brings its own shape
        closed |= {key for key in own.values() if key.startswith("model.")}
    kept = {key: value for key, value in own.pinned().items() if key not in closed}
    if "data.tokenizer" not in taken:
        kept["data.tokenizer"] = str(parent.tokenizer)  # a BPE that is trained anew would give the ids other meanings
    return given.resolve(kept, str(parent.config))


def write_config(run: Run, settings: Settings, inits: Sequence[str] = ()) -> None:
    """Write config.toml so that it is the former one or this one, whole, whatever happens; with this user's mark.

    Args:
        run: its folder.
        settings: of the run, or of a sweep.
        inits: values of model.init that a sweep varies.
    """
    write_whole(run.config, marked(settings.to_toml(), [settings.model.init, *inits]))


def write_tokenizer(run: Run, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json and what belongs beside it, each whole or not at all, itself last."""
    for name, text in tokenizer.config.files().items():
        write_whole(run.folder / name, text)
    write_whole(run.tokenizer, tokenizer.to_json() + "\n")


def mended_tokenizer(run: Run, tokenizer: Tokenizer) -> bool:
    """Write the tokenizer of a run's text again where the run's own file is not it; whether that was so."""
    with suppress(InputRefused):
        if Tokenizer.from_file(run.tokenizer).digest == tokenizer.digest:
            return False
    write_tokenizer(run, tokenizer)
    return True


def record_parent(run: Run, parent: Run, at: int | None) -> None:
    """Write down where a run branches from, for a process that goes on before its first checkpoint."""
    write_whole(run.parent_file, json.dumps({"run": str(parent.folder.resolve()), "update": at}))


def recorded_parent(run: Run) -> tuple[Run, int | None] | None:
    """What `record_parent` wrote down, None for a run that branches from none; raises InputRefused if it is damaged."""
    content = contents(run.parent_file)
    if content is None:
        return None
    try:
        record = parse_json(content)
        return Run(Path(record["run"])), record["update"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise InputRefused(f"{run.parent_file}: damaged; put it back, or start the run anew with --from") from None


def discard(run: Run) -> None:
    """Remove a new run that never began, so that `last` still names the last one that did."""
    beside = [run.folder / name for name in (*tokenizer_config.NAMES, "stdin", SWEEP)]
    written = [run.config, run.parent_file, run.tokenizer, *beside, run.lock_file]
    for path in [*written, *(each for each in entries(run.folder) if each.suffix == ".partial")]:
        path.unlink(missing_ok=True)
    if not entries(run.folder):
        run.folder.rmdir()


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is the former one or this one, whole, whatever happens; raises DiskFull."""
    partial = path.with_suffix(".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise DiskFull(f"{path}: cannot be written: {error.strerror}; what was there before is untouched") from error


def _updates_of(tokens: int, settings: Settings) -> int:
    return max(1, round(tokens / int(settings.train.tokens_per_update)))
