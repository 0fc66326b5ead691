"""`monograph train`: turn text and time into a trained model, its figures and its checkpoints."""

import json as jsonlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from monograph import checkpointing, compat
from monograph.config import Settings
from monograph.data.corpus import Corpus
from monograph.data.sources import spooled_stdin
from monograph.device import clock, default_device, describe
from monograph.distributed.checkpoint import newest
from monograph.distributed.world import World
from monograph.errors import Stopped, UsageError
from monograph.loop import train
from monograph.loss import Batch
from monograph.planner import defaults
from monograph.report.quantities import counted, duration
from monograph.rl.prompts import Prompts
from monograph.rl.rewards import Reward
from monograph.run import writing
from monograph.run.folder import Run, standard_json
from monograph.run.metrics_log import MetricsLog
from monograph.run.progress import Progress, silent
from monograph.run.signals import StopSignal
from monograph.run.started import note_start
from monograph.session import eager_start, ranks, recorded
from monograph.session.brief import expected_whole_s, updates_given, why_uncompiled
from monograph.session.plan import Plan
from monograph.session.preferring import keep_first_weights, open_pairs, score_with_first_weights
from monograph.session.ranks import show
from monograph.session.recorded import strange_text
from monograph.session.reinforcing import open_prompts, reward_in, with_records
from monograph.session.reporting import Reporter, finished
from monograph.session.requirements import notes_on, require_possible, require_taught
from monograph.session.resolve import ORIGIN, resolve
from monograph.session.rewind import go_back, require_end, windows
from monograph.session.session import Session
from monograph.session.setup import open_corpus, open_session, repeatable
from monograph.session.warmup import compile_step, fix_length, measure_memory, remember_drawing, try_step
from monograph.storage.cache_dir import keep_compiled
from monograph.storage.reading import exists

SHOWN = ("reward", "accuracy", "margin")  # what says more than the loss, in runs that have it
SHOWN_S = 1.0  # after so long, the numbers of the last updates are read; this waits for the device


class Started(NamedTuple):
    """When the program was started, as a time of `clock`, and the seconds that it took until it began with the run."""

    at_s: float
    took_s: float


def run(
    settings: Settings,
    *,
    out: Path | None,
    resume: str | None,
    from_: str | None,
    json: bool,
    asked_s: float | None = None,
) -> None:
    """Train, or resume training; see the command line's help.

    `asked_s` is the time of `clock` at which the program was started; None: now.
    """
    if resume and out:
        raise UsageError(f"--out {out}: --resume goes on in the run's own folder; leave one of them out")
    asked_s = clock() if asked_s is None else asked_s
    started = Started(asked_s, clock() - asked_s)
    keep_compiled()  # before torch._dynamo is imported, which sets its own cache path in the environment
    settings, from_ = recorded.model_given(settings, from_)
    settings = with_records(settings)
    if not (resume or from_):  # otherwise settings recorded by a run come first; `_open` checks the result
        require_possible(settings, describe())
        require_taught(settings)
    world = ranks.meet(settings, resumed=resume is not None)
    progress = ranks.progress_of(world)
    repeatable(default_device())
    parent = recorded.parent_named(from_) if from_ and world.leads else None
    folder, resumed = ranks.folder_of(world, out, resume)
    with (
        folder.lock(new=not resumed),
        ranks.one_end(world, folder, unbegun=lambda: not resumed and not exists(folder.checkpoints)) as retry_rows,
    ):
        if resumed:
            if world.leads:
                checkpointing.remove_leftovers(folder.checkpoints)
            settings = recorded.settings_of(folder, settings if resume else Settings())
            _warn_of_text(folder, settings, progress)
        elif parent:
            settings = recorded.branched(parent[0], settings)
            writing.record_parent(folder, *parent)
            _warn_of_text(parent[0], settings, progress)
        summary = world.agreed(finished(folder) if resumed and world.leads else None)
        if summary:
            progress.line("done", f"{folder.folder} has already finished, after {counted(summary['update'], 'update')}")
            if world.leads:
                show(progress, "next", "train", "--from", folder.handle)
        else:
            ranks.require_launched(settings, world.own)
            settings = ranks.agreed(world, settings)
            with reward_in(settings) as reward:
                session = _open(folder, settings, world, progress, reward, retry_rows, started)
                report = Reporter(session, progress)
                _loop(session, report, progress)
                measure_memory(session)
                remember_drawing(session)
                summary = report.finish() if world.leads else {}
        world.leave()
    if json and world.leads:
        print(jsonlib.dumps(standard_json(summary)))


def _warn_of_text(run: Run, settings: Settings, progress: Progress) -> None:
    if warning := strange_text(run, settings):
        progress.line("warning", warning)


def _open(
    folder: Run,
    settings: Settings,
    world: World,
    progress: Progress,
    reward: Reward | None,
    retry_rows: int,
    started: Started,
) -> Session:
    machine = describe()
    require_possible(settings, machine)
    plan = resolve(settings, machine)
    for line in notes_on(plan, machine):
        progress.line("note", line)
    if world.leads and not folder.begun:
        plan = _keeping_stdin(folder, plan, progress)
        recorded.write_config(folder, plan.settings)
    if world.leads:
        note_start(folder)
    settings = ranks.agreed(world, plan.settings)
    plan = plan if world.leads else resolve(settings, machine)
    with world.first():
        if reward:
            text: Corpus | Prompts = open_prompts(plan, reward, progress)
        else:
            text = open_pairs(plan, progress) if plan.preference else open_corpus(plan.reading, progress)
    opened = partial(_opened, folder, text=text, world=world, reward=reward, retry_rows=retry_rows)
    began = clock()
    session, resumed, window = opened(plan, progress=progress)
    if plan.wall_minutes and not resumed:
        session.ends_s = started.at_s + 60 * plan.wall_minutes
        session.end_s = defaults.end_s(started.took_s, 60 * plan.wall_minutes)
    why = ""
    if plan.compile == "auto" and not resumed:
        why = why_uncompiled(session, window, clock() - began)
    if why:
        session.batches.close()
        ends = session.ends_s, session.end_s
        # Where nothing is compiled, the planner chooses otherwise, and answers are drawn otherwise.
        plan = resolve(plan.settings.resolve({"train.compile": "none"}, ORIGIN), machine)
        session, _, window = opened(plan, progress=silent())
        (session.ends_s, session.end_s), session.eager_reason = ends, why
    if not (resumed or updates_given(session)):
        progress.line("time", _times(session, window, started.at_s))
    early = False
    if resumed:
        compile_step(session, window, progress)
    else:
        early = eager_start.begin(session, window, progress, partial(_score_untrained, session, progress))
    if not early:
        score_with_first_weights(session, resumed, progress)
    if not resumed:
        fix_length(session, progress)
        if world.leads:
            recorded.write_config(folder, session.plan.settings)
        session.save()
    return session


def _score_untrained(session: Session, progress: Progress) -> None:
    """Score the weights before the first update, which comes before the step is compiled."""
    score_with_first_weights(session, False, progress)
    report = Reporter(session, silent())
    if report.scores_untrained:  # the run's own block, which begins later, shows it
        report.evaluate(report.block(), 0, limit=None, **{eager_start.MARK: True})


def _times(session: Session, window: Batch, asked_s: float) -> str:
    """Return how long a run by the clock trains, and how long it will take in all."""
    plan = session.plan
    whole = f"about {duration(expected_whole_s(session, window, asked_s))} in all"
    if plan.wall_minutes is not None:
        whole = f"at most {duration(60 * plan.wall_minutes)} in all"
    parts = "preparation and report" if plan.compile == "none" else "preparation, compiling and report"
    training_s = min(60 * plan.minutes, session.left_s)
    if not training_s:
        return f"preparation left nothing of {duration(60 * (plan.wall_minutes or 0))}: one update, then the report"
    return f"{duration(training_s)} of training, {whole} with {parts}"


def _opened(
    folder: Run,
    plan: Plan,
    text: Corpus | Prompts,
    world: World,
    reward: Reward | None,
    retry_rows: int,
    progress: Progress,
) -> tuple[Session, bool, Batch]:
    """Open the session at its beginning or where it stopped; return it, whether it resumes, and a window it tried."""
    session = open_session(folder, plan, text, default_device(), progress, world, reward)
    if world.leads and not exists(folder.tokenizer):
        writing.write_tokenizer(folder, session.corpus.tokenizer)
    session.engine.announce = partial(progress.line, "memory")
    session.engine.step.announce = partial(progress.line, "note")
    resumed = _taken_up(session, progress)
    if retry_rows:
        session.engine.micro_batch = min(session.engine.micro_batch or retry_rows, retry_rows)
        smaller = f"micro_batch is now {session.engine.micro_batch}, the update stays the same"
        progress.line("memory", f"the attempt before ran out of memory: {smaller}")
    keep_first_weights(session, resumed)
    return session, resumed, try_step(session, progress)


def _taken_up(session: Session, progress: Progress) -> bool:
    """Resume from the run's newest checkpoint, or begin from another run's weights; return whether the run resumes."""
    world, folder, warn = session.world, session.run, partial(progress.line, "warning")
    saved = bool(checkpointing.candidates(folder.checkpoints))
    if world.agreed(saved or any(eager_start.MARK not in row for row in folder.rows())):
        session.restore(newest(world, folder.checkpoints, warn), progress)
        if world.leads and writing.mended_tokenizer(folder, session.corpus.tokenizer):
            warn(f"{folder.tokenizer}: was damaged, and is written again")
        progress.line("resume", f"{folder.folder} from update {session.engine.index} of {session.updates}")
        return True
    folder.truncate_metrics(0)  # of a process that was stopped before its first checkpoint
    if parent := writing.recorded_parent(folder):
        begun = newest(world, parent[0].checkpoints, warn, at=parent[1])
        session.branch(begun, parent[0])
        progress.line("from", f"weights and optimizer of {parent[0].folder} after update {begun.update}")
    return False


def _keeping_stdin(run: Run, plan: Plan, progress: Progress) -> Plan:
    """Keep the text of standard input in the run's folder, where resume, evaluation and branches read it again."""
    source = plan.reading["source"]
    named = [source] if isinstance(source, str) else source
    if "-" not in named:
        return plan
    with progress.stage("text", "standard input") as stage:
        kept = str(spooled_stdin(run.folder, stage.report))
        stage.result = f"kept as {kept}"
    source = [kept if name == "-" else name for name in named]
    settings = plan.settings.resolve({"data.source": source}, "plan")
    return replace(plan, settings=settings, reading={**plan.reading, "source": source})


def _loop(session: Session, report: Reporter, progress: Progress) -> None:
    engine, plan = session.engine, session.plan
    # Reading an update's numbers waits for a GPU to finish it, as drawing answers from its weights does anyway.
    log = MetricsLog(session.run, every=1 if session.judges or engine.step.device.type == "cpu" else 10)
    graphs = compat.captured_graphs()
    check_every = defaults.interval(session.updates, defaults.EVALUATIONS)  # whether the time suffices
    session.training_since_s = clock()
    with report.block() as block, StopSignal(lambda name: block.note(f"{name}: saving after this update")) as stop:
        if not engine.index and report.scores_untrained:
            report.evaluate(block, 0, limit=None)
        began, since, waiting, score = clock(), 0, False, ""
        for update in train(engine, windows(session), session.updates):
            done, since = update.index + 1, since + 1
            last = done == session.updates
            report.recompiles = compat.captured_graphs() - graphs
            session.account(done)
            written = log.add(update, {**report.read, "wall_s": session.spent_s, **session.judged()})
            if written or last or clock() - began > SHOWN_S:
                log.flush()
                rate = report.rate(since, clock() - began, log.last)
                loss, memory = log.last["train_loss"], session.peak_memory_bytes
                score = "   ".join(f"{name} {log.last[name]:.3f}" for name in SHOWN if name in log.last) or score
                figures = {"loss": loss, "score": score, "skipped": log.skipped}
                block.update(done, tokens_per_s=rate, memory_bytes=memory, **figures)
                since, began = 0, clock()
            stopping, asked, lost, skipping = session.world.any(
                stop.requested is not None, stop.save_requested, log.is_lost, log.streak > 0
            )
            # No checkpoint is due while updates are skipped, so that `go_back` finds one from before them.
            due = waiting or done % plan.save_every == 0
            saving = last or (session.is_between_draws and ((due and not skipping) or stopping or asked))
            waiting = due and not session.is_between_draws
            if lost or (saving and session.non_finite()):
                log = go_back(session, log, progress)
                continue
            paused = clock()
            if done % plan.eval_every == 0 and not last:
                log.flush()
                report.evaluate(block, done, limit=defaults.CURVE_ROWS)
            if (session.ends_s is not None or done % min(plan.eval_every, check_every) == 0) and not last:
                report.keep_time(done)
                block.ends_at(session.updates)
            if done in report.sample_updates() and not last and session.world.agreed(report.deadline.samples_midway):
                log.flush()
                report.sample(block, done)
            if saving:
                log.flush()
                stop.save_requested = False
                session.save()
            if session.world.leads:
                report.page.refresh()
            began += clock() - paused
            if stopping and saving and not last:
                if session.world.leads:
                    report.page.write("stopped")
                again = ranks.again(session.world, session.run, plan.parallel)
                raise Stopped(f"saved at update {done}; continue: {again}")
            if last:  # earlier than planned if a cool-down was begun
                require_end(session, log)
                break
        report.end(block)
