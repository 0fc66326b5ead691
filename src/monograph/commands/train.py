"""`monograph train`: from text and time to a trained model, its figures and its checkpoints."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path

from monograph import __version__, checkpointing, compat, planner
from monograph.config import Settings
from monograph.config import load as load_settings
from monograph.data.corpus import corpus as open_corpus
from monograph.device import Device, clock, default_device, describe, measured_matmul_flops
from monograph.errors import Stopped, UsageError
from monograph.graph.precision import DTYPES
from monograph.loop import train
from monograph.measure.memory import peak_memory_bytes
from monograph.measure.quantities import count, duration
from monograph.run.folder import Run
from monograph.run.journal import Journal
from monograph.run.progress import Progress
from monograph.run.signals import StopSignal
from monograph.session.setup import Session, calibrate, open_session, prepare
from monograph.session.story import Story

CURVE_ROWS = 64  # held-out rows behind a point of the curve; the last point uses all
EVALUATIONS, CHECKPOINTS = 12, 6  # of a run, where the settings leave it open


def run(settings: Settings, *, out: Path | None, resume: str | None, from_: str | None, json: bool) -> int:
    """Train, or go on training; see the command line's help."""
    progress = Progress()
    machine = describe()
    progress.header(f"monograph {__version__}   {machine.summary}")
    folder = Run.open(resume) if resume else Run.create(out)
    with folder.lock():
        if resume:
            settings = _of_the_run(folder, settings)
        else:
            folder.config.write_text(settings.to_toml())
        session = _open(folder, settings, progress, resume=_has_checkpoint(folder), from_=from_)
        if session.engine.index >= session.updates:
            progress.line(
                "done",
                f"{folder.folder} has all its {session.updates} updates; train on from it with --from {folder.handle}",
            )
            return 0
        story = Story(session, progress)
        _loop(session, story, progress)
        summary = story.finish()
    if json:
        print(jsonlib.dumps(summary))
    return 0


def _open(folder: Run, settings: Settings, progress: Progress, *, resume: bool, from_: str | None) -> Session:
    device, machine = default_device(), describe()
    settings, rate_note = _sized(settings, machine)
    if rate_note:
        progress.line("size", rate_note)
    with progress.stage("data", _source(settings)) as stage:
        data = settings.data
        corpus = open_corpus(
            data.source,
            tokenizer=data.tokenizer,
            sequence_length=data.sequence_length,
            packing=data.packing,
            held_out=data.held_out,
            text_key=data.text_key,
            progress=stage.report,
        )
        stats = corpus.stats
        stage.result = f"{stats.files} files, {stats.bytes / 1e6:.1f} MB"
    for line in corpus.notes:
        progress.line("note", line)
    progress.line(
        "tokens",
        f"{count(stats.tokens)} of {corpus.vocab_size:,} kinds, {stats.bytes_per_token:.2f} bytes each, "
        f"packed {stats.packed_share:.1%}; "
        f"held out: {stats.held_out_files} files, {stats.held_out_bytes / 1e6:.2f} MB",
    )
    session = open_session(folder, settings, corpus, device, machine)
    if not folder.tokenizer.exists():
        corpus.tokenizer.save(folder.tokenizer)
    if resume:
        session.restore(checkpointing.newest(folder.checkpoints, lambda line: progress.line("warning", line)))
        progress.line("resume", f"{folder.folder} from update {session.engine.index} of {session.updates}")
    elif from_:
        name, _, update = from_.partition("@")
        parent = Run.open(name)
        at = int(update) if update else None
        session.adopt(checkpointing.newest(parent.checkpoints, lambda line: progress.line("warning", line), at=at))
        progress.line("from", f"weights and optimizer of {from_}")
    session.engine.announce = lambda line: progress.line("memory", line)
    prepare(session, progress)
    if not resume:
        _fix_length(session, progress)
        folder.config.write_text(session.settings.to_toml())
        session.save()
    return session


def _loop(session: Session, story: Story, progress: Progress) -> None:
    engine, settings = session.engine, session.settings
    journal = Journal(session.run, every=1 if engine.step.device.type == "cpu" else 10)
    graphs = compat.captured_graphs()
    rate, session.training_since_s = 0.0, clock()
    with StopSignal() as stop, story.block() as block:
        began, since = clock(), 0
        for update in train(engine, session.batches, session.updates):
            done, since = update.index + 1, since + 1
            last = done == session.updates
            story.recompiles = compat.captured_graphs() - graphs
            if journal.add(update, {"tokens_per_s": rate or None, "wall_s": session.spent_s}):
                rate = story.rate(since, clock() - began)
                memory = peak_memory_bytes(engine.step.device)
                block.update(
                    done,
                    loss=journal.last["train_loss"],
                    tokens_per_s=rate,
                    memory_bytes=memory,
                    skipped=journal.skipped,
                )
                since, began = 0, clock()
            if done % int(settings.train.eval_every) == 0 and not last:
                journal.flush()
                story.evaluate(block, done, limit=CURVE_ROWS)
                story.keep_time(done)
                began = clock()
            if done in story.sample_updates() and not last:
                journal.flush()
                story.sample(block, done)
                began = clock()
            if done % int(settings.train.save_every) == 0 or stop.requested or stop.save_requested or last:
                journal.flush()
                stop.save_requested = False
                session.save()
                began = clock()
            if stop.requested and not last:
                raise Stopped(f"saved at update {done}; continue: monograph train --resume {session.run.handle}")
        journal.flush()
        story.end(block)


def _sized(settings: Settings, machine: Device) -> tuple[Settings, str | None]:
    """Fix preset, tokenizer and tokens per update where the settings leave them open; and a line on the choice."""
    chosen: dict[str, object] = {}
    note = None
    rung = next((r for r in planner.LADDER if r.preset == settings.model.preset), planner.LADDER[0])
    if settings.model.preset == "auto" and settings.model.init is None:
        dtype = DTYPES[planner.precision(machine) if settings.train.precision == "auto" else settings.train.precision]
        default = settings.train.minutes or 3.0
        size = planner.size(measured_matmul_flops(default_device(), dtype), default)
        rung, note = size.rung, f"{size.rung.preset}: {size.reason}"
        chosen["model.preset"] = rung.preset
        if settings.train.minutes and "train.minutes" not in settings.origins:
            chosen["train.minutes"] = size.minutes
    if settings.data.tokenizer == "auto":
        chosen["data.tokenizer"] = f"bpe:{rung.vocabulary}"
    if settings.train.tokens_per_update == "auto":
        chosen["train.tokens_per_update"] = max(rung.tokens_per_update, settings.data.sequence_length)
    return settings.resolve(chosen, "plan"), note


def _fix_length(session: Session, progress: Progress) -> None:
    """Turn minutes, tokens or epochs into updates, once; and what follows from their number."""
    train, rows = session.settings.train, session.batches.rows_per_window
    per_epoch = -(-len(session.corpus.train) // rows)
    if train.updates:
        updates = train.updates
    elif train.tokens:
        updates = max(1, round(train.tokens / int(train.tokens_per_update)))
    elif train.epochs:
        updates = -(-train.epochs * len(session.corpus.train) // rows)
    else:
        with progress.stage("calibrate", "a few updates, thrown away") as stage:
            seconds = calibrate(session)
            stage.result = f"{seconds * 1000:.0f} ms each"
        session.budget_s = 60 * (train.minutes or 3.0)
        # Evaluations, samples and checkpoints take their share of the time.
        updates = planner.updates_for(0.9 * session.budget_s, seconds, planner.MOST_EPOCHS * per_epoch)
    fixed: dict[str, object] = {
        "optim.warmup_updates": planner.warmup(updates) if session.settings.optim.warmup_updates == "auto" else None,
        "train.eval_every": planner.interval(updates, EVALUATIONS) if train.eval_every == "auto" else None,
        "train.save_every": planner.interval(updates, CHECKPOINTS) if train.save_every == "auto" else None,
    }
    if not train.epochs:
        fixed["train.updates"] = updates
    session.settings = session.settings.resolve({k: v for k, v in fixed.items() if v is not None}, "plan")
    session.length = updates
    session.engine.step.schedule = session.schedule()
    tokens = updates * int(session.settings.train.tokens_per_update)
    progress.line(
        "plan",
        f"{count(session.params)} parameters, {updates:,} updates of {int(session.settings.train.tokens_per_update):,} tokens "
        f"= {count(tokens)}, "
        f"{rows} rows of {session.settings.data.sequence_length}, {session.settings.train.precision}"
        + (f", about {duration(session.budget_s)}" if session.budget_s else ""),
    )


def _of_the_run(folder: Run, given: Settings) -> Settings:
    """The run's own settings; what the command line adds to `--resume` must not contradict them."""
    own = load_settings(folder.config, {}, {})
    for key, value in given.pinned().items():
        if own.values()[key] != value:
            raise UsageError(
                f"{key} = {value} ({given.origins[key]}), but {folder.folder} was started with {own.values()[key]}; "
                f"leave it out, or start a new run with --from {folder.handle}"
            )
    return own


def _has_checkpoint(folder: Run) -> bool:
    return folder.checkpoints.is_dir() and any(folder.checkpoints.glob("step-*"))


def _source(settings: Settings) -> str:
    source = settings.data.source
    if source == "stdlib":
        return "Python's standard library"
    return source if isinstance(source, str) else f"{len(source)} sources, {source[0]} first"
