"""`monograph train`: from text and time to a trained model, its figures and its checkpoints."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path

from monograph import __version__, checkpointing, compat
from monograph.config import Settings
from monograph.config.recorded import strange_text
from monograph.device import clock, default_device, describe
from monograph.distributed.checkpoint import newest
from monograph.distributed.world import World
from monograph.errors import Stopped, UsageError
from monograph.loop import train
from monograph.measure.quantities import counted
from monograph.run.folder import Run
from monograph.run.journal import Journal
from monograph.run.progress import Progress
from monograph.run.signals import StopSignal
from monograph.session import choices, ranks
from monograph.session.invocation import show
from monograph.session.planning import notes_on
from monograph.session.rewind import go_back, require_end, windows
from monograph.session.session import Session
from monograph.session.setup import open_corpus, open_session, repeatable, require_possible
from monograph.session.speed import measure_memory
from monograph.session.story import Story
from monograph.session.summary import finished, standard_json
from monograph.session.warming import prepare
from monograph.storage.cache_dir import keep_compiled
from monograph.storage.reading import entries, exists

CURVE_ROWS = 64  # held-out rows behind a point of the curve; the last point uses all


def run(settings: Settings, *, out: Path | None, resume: str | None, from_: str | None, json: bool) -> int:
    """Train, or go on training; see the command line's help."""
    if resume and out:
        raise UsageError(f"--out {out}: --resume goes on in the run's own folder; leave one of them out")
    settings, from_ = choices.model_given(settings, from_)
    if not (resume or from_):  # whose own settings say more
        require_possible(settings, describe())
    world = ranks.meet(settings, resumed=resume is not None)
    progress = ranks.progress_of(world)
    progress.header(f"monograph {__version__}   {describe().summary}{ranks.said(world)}")
    repeatable(default_device())
    keep_compiled()
    parent = choices.parent_named(from_) if from_ and world.leads else None
    folder, resumed = ranks.folder_of(world, out, resume)

    def unbegun() -> bool:
        return not resumed and not exists(folder.checkpoints)

    with folder.lock(new=not resumed), ranks.one_end(world, folder, unbegun):
        if resumed:
            if world.leads:
                checkpointing.remove_leftovers(folder.checkpoints)
            settings = choices.settings_of(folder, settings if resume else Settings())
            _warn_of_text(folder, settings, progress)
        elif parent:
            settings = choices.branched(parent[0], settings)
            choices.record_parent(folder, *parent)
            _warn_of_text(parent[0], settings, progress)
        summary = world.agreed(finished(folder) if resumed and world.leads else None)
        if summary:
            progress.line("done", f"{folder.folder} came to its end after {counted(summary['update'], 'update')}")
            if world.leads:
                show(progress, "next", "train", "--from", folder.handle)
        else:
            ranks.require_launched(settings, world.own)
            session = _open(folder, ranks.agreed(world, settings), world, progress)
            story = Story(session, progress)
            _loop(session, story, progress)
            measure_memory(session)
            summary = story.finish() if world.leads else {}
        world.leave()
    if json and world.leads:
        print(jsonlib.dumps(standard_json(summary)))
    return 0


def _warn_of_text(run: Run, settings: Settings, progress: Progress) -> None:
    if told := strange_text(run, settings):
        progress.line("warning", told)


def _open(folder: Run, settings: Settings, world: World, progress: Progress) -> Session:
    def warn(line: str) -> None:
        progress.line("warning", line)

    require_possible(settings, describe())
    settings = choices.sized(settings)
    for line in notes_on(settings):
        progress.line("note", line)
    if world.leads and not folder.begun:
        settings = choices.keeping_stdin(folder, settings, progress)
        choices.write_config(folder, settings)
    settings = ranks.agreed(world, settings)
    with world.first():
        text = open_corpus(settings, progress)
    session = open_session(folder, settings, text, default_device(), progress, world)
    if world.leads and not exists(folder.tokenizer):
        choices.write_tokenizer(folder, session.corpus.tokenizer)
    session.engine.announce = lambda line: progress.line("memory", line)
    session.engine.step.announce = lambda line: progress.line("note", line)
    if resumed := world.agreed(folder.metrics_offset > 0 or bool(entries(folder.checkpoints, "step-"))):
        session.restore(newest(world, folder.checkpoints, warn), progress)
        if world.leads and choices.mended_tokenizer(folder, session.corpus.tokenizer):
            progress.line("warning", f"{folder.tokenizer}: was damaged, and is written again")
        progress.line("resume", f"{folder.folder} from update {session.engine.index} of {session.updates}")
    elif parent := choices.recorded_parent(folder):
        session.branch(begun := newest(world, parent[0].checkpoints, warn, at=parent[1]))
        progress.line("from", f"weights and optimizer of {parent[0].folder} after update {begun.update}")
    prepare(session, progress)
    if not resumed:
        choices.fix_length(session, progress)
        if world.leads:
            choices.write_config(folder, session.settings)
        session.save()
    return session


def _loop(session: Session, story: Story, progress: Progress) -> None:
    engine, settings = session.engine, session.settings
    journal = Journal(session.run, every=1 if engine.step.device.type == "cpu" else 10)
    graphs = compat.captured_graphs()
    rate, session.training_since_s = 0.0, clock()
    with story.block() as block, StopSignal(lambda name: block.note(f"{name}: saving after this update")) as stop:
        if session.corpus.stats.conversations and not engine.index:
            story.evaluate(block, 0, limit=None)  # what the model knew before
        began, since = clock(), 0
        for update in train(engine, windows(session), session.updates):
            done, since = update.index + 1, since + 1
            last = done == session.updates
            story.recompiles = compat.captured_graphs() - graphs
            session.account(done)
            if journal.add(update, {"tokens_per_s": rate or None, "wall_s": session.spent_s}):
                rate = story.rate(since, clock() - began)
                loss, memory = journal.last["train_loss"], session.peak_memory_bytes
                block.update(done, loss=loss, tokens_per_s=rate, memory_bytes=memory, skipped=journal.skipped)
                since, began = 0, clock()
            stopping, asked, lost, skipping = session.world.any(
                stop.requested is not None, stop.save_requested, journal.is_lost, journal.streak > 0
            )
            # What was saved before updates are skipped is what a run goes back to.
            due = done % int(settings.train.save_every) == 0 and not skipping
            saving = due or stopping or asked or last
            if lost or (saving and session.non_finite()):
                journal = go_back(session, journal, progress)
                continue
            paused = clock()
            if done % int(settings.train.eval_every) == 0 and not last:
                journal.flush()
                story.evaluate(block, done, limit=CURVE_ROWS)
                story.keep_time(done)
            if done in story.sample_updates() and not last:
                journal.flush()
                story.sample(block, done)
            if saving:
                journal.flush()
                stop.save_requested = False
                session.save()
            began += clock() - paused
            if stopping and not last:
                again = ranks.again(session.world, session.run, settings)
                raise Stopped(f"saved at update {done}; continue: {again}")
            if last:  # earlier than planned if a cool-down was begun
                require_end(session, journal)
                break
        story.end(block)
