"""Begin a run with updates that are computed without a graph, while another process compiles the
step.

Where nothing is compiled yet, the compiler keeps one core busy for half a minute. A run that lasts
by the clock, whose number of updates nobody can repeat anyway, trains on the other cores meanwhile.
Once the compiled code is in the cache, the run takes it from there and saves its first checkpoint,
so that what is resumed has one kind of updates only.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from monograph.device import Device, clock, compiler_obstacle, default_device, describe
from monograph.loop import train
from monograph.loss import Batch
from monograph.planner import defaults
from monograph.predict.roofline import Calibration
from monograph.report.quantities import counted, duration
from monograph.run.folder import Run
from monograph.run.metrics_log import MetricsLog
from monograph.run.progress import Progress, silent
from monograph.run.recorded_state import MOST
from monograph.schedule import constant
from monograph.session.brief import CACHED_S, COMPILE_S, compiled_key
from monograph.session.plan import Length
from monograph.session.recorded import run_settings
from monograph.session.resolve import resolve
from monograph.session.rewind import windows
from monograph.session.session import Session
from monograph.session.setup import open_session, repeatable
from monograph.session.warmup import compile_step
from monograph.storage.cache_dir import (
    calibration_file,
    is_compiled,
    keep_compiled,
    mark_compiled,
    python_aside,
)
from monograph.storage.writing import temporary_folder, write_durably, writing

MARK = "eager"  # the entry of metrics.jsonl by which the rows of such updates are known
PROCESS_BYTES = 2**30  # of libraries, text and compiler, beside the tensors of a step
LONGEST_S = 600.0  # seconds after which the other process is not waited for
_CHILD = (
    "import sys; from monograph.session.eager_start import compile_run; compile_run(*sys.argv[1:])"
)


def pays(session: Session, key: str) -> bool:
    """Return whether updates without a graph are possible, and compiling the step of this key takes
    time.

    The clock decides on the run's length, a compiler runs on another core of this machine, the
    memory suffices for a second process with the model, a new one of this package, and this step
    was not compiled on this machine before.
    """
    plan = session.plan
    machine = describe()
    if plan.updates or plan.job.span.epochs or not session.world.alone:
        return False
    if plan.training.compile == "none" or not has_spare_core(machine):
        return False
    if (
        plan.job.recipe.code
        or plan.expected is None
        or plan.memory == "stream"
        or not session.task.is_foreseen
    ):
        return False
    fits = 2 * (plan.expected.peak_memory_bytes + PROCESS_BYTES) < machine.free_memory_bytes
    return fits and not is_compiled(key)


def has_spare_core(machine: Device) -> bool:
    """Return whether this machine compiles on a core while it trains on another."""
    return machine.type == "cpu" and machine.cores > 1 and not compiler_obstacle()


def begin(session: Session, window: Batch, progress: Progress, before: Callable[[], None]) -> bool:
    """Update without a graph until another process has compiled the step, if that `pays`; then
    compile it here, too.

    The second time takes a few seconds, as the compiled code is in the cache.

    Args:
        session: a session at its beginning.
        window: a window of it.
        progress: the display.
        before: called before the first update without a graph.

    Returns:
        Whether there were updates without a graph.
    """
    key = compiled_key(session, window)
    if early := pays(session, key):
        before()
        patient_s = patience_s(session)
        if not _update_eagerly(session, window, patient_s, progress):
            plan = session.plan
            plan = plan.having(replace(plan.training, compile="none"))
            session.complete(plan.noting({"train.compile": "none"}))
            session.task.leave_uncompiled()
            session.eager_reason = f"the compiler was not ready in {duration(patient_s)}"
    compile_step(session, window, progress)
    if not session.eager_reason:
        mark_compiled(key)
    return early


def patience_s(session: Session) -> float:
    """Return how long the other process is waited for: half of the time, if that of the whole run
    is limited.
    """
    return min(patience_for(session.plan.job.span.minutes), session.left_s / 2)


def patience_for(minutes: float, graphs: int = 1) -> float:
    """Return for how many seconds of updates another process may compile, so that a run takes as
    long as is said.

    A short training on a busy machine would be over before that pays.

    Args:
        minutes: the length of the training.
        graphs: the number of graphs that are compiled.
    """
    return min(LONGEST_S, max(60 * minutes, graphs * (COMPILE_S + CACHED_S)))


@contextmanager
def compiling(script: str, *arguments: str) -> Iterator[Callable[[], bool]]:
    """Have another process compile on one core while the block trains on the others; it ends with
    the block.

    Args:
        script: the program of the other process.
        arguments: its arguments.

    Yields:
        A function that returns whether the other process is over.
    """
    threads = torch.get_num_threads()
    compiler = python_aside(script, *arguments)
    torch.set_num_threads(max(1, threads - 1))
    try:
        yield lambda: compiler.poll() is not None
    finally:
        compiler.kill()
        torch.set_num_threads(threads)


def _update_eagerly(session: Session, window: Batch, patient_s: float, progress: Progress) -> bool:
    """Update until the other process has compiled the step; return False if the run goes on without
    that.

    A long training is worth compiling however long that takes.
    """
    engine, plan, task = session.engine, session.plan, session.task
    most = (
        task.most_updates(session.batches.rows_per_window, plan.training.optim.weight_decay) or MOST
    )
    likely = Length(_likely_updates(session))
    engine.step.schedule = constant(resolve(plan, describe(), likely).intervals.warmup_updates)
    log = MetricsLog(session.run, every=1)
    began = clock()
    spent_s = 0.0
    with temporary_folder() as folder:
        path = folder / "window.safetensors"
        with writing(folder):
            write_durably(path, save({name: tensor.clone() for name, tensor in window.items()}))
        with (
            compiling(_CHILD, str(session.run.folder), str(path)) as is_over,
            progress.stage("start", "training eagerly while the step compiles") as stage,
        ):
            for update in train(engine, windows(session), max(1, most // 2)):
                spent_s = clock() - began
                log.add(update, {"wall_s": spent_s, MARK: True, **task.figures(session.batches)})
                session.account(update.index + 1, **{MARK: True})
                stage.report("update", update.index + 1)
                if session.can_save and (is_over() or spent_s > patient_s):
                    break
            if not is_over():
                stage.report("waiting for the compiler after update", engine.index)
            # A short text is read often enough before.
            while not is_over() and clock() - began < patient_s:
                time.sleep(0.1)
            is_compiled_now = is_over()
            stage.result = f"{counted(engine.index, 'update')}, loss {log.last['train_loss']:.2f}"
    # They count as an earlier process's, which adds its seconds to the time that the settings
    # allow.
    session.elapsed_s = spent_s
    session.started_s = session.started_s + spent_s
    session.training_since_s = clock()
    return is_compiled_now or patient_s >= LONGEST_S


def _likely_updates(session: Session) -> int:
    """Return the number of updates that the run will have, by a prediction of their seconds."""
    plan = session.plan
    assert plan.expected
    seconds = plan.expected.update_s
    if session.model_config:
        known = Calibration(calibration_file())
        beside = plan.job.objective.seconds_beside(plan, session.model_config, describe(), known)
        seconds += beside[0] if beside else 0.0
    most = (
        session.task.most_updates(session.batches.rows_per_window, plan.training.optim.weight_decay)
        or MOST
    )
    return defaults.updates_for(defaults.UPDATES_SHARE * 60 * plan.job.span.minutes, seconds, most)


def compile_run(folder: str, window: str) -> None:
    """Compile the step of a run that is not begun yet, so that the process that trains it finds it
    in the cache.

    Args:
        folder: the run's folder.
        window: the file of a window, as making one may take answers and a judgement of them.
    """
    keep_compiled()
    repeatable(default_device())
    run = Run(Path(folder))
    progress = silent()
    plan = resolve(run_settings(run), describe())
    with closing(plan.job.objective.open_unjudged(plan, progress)) as task:
        session = open_session(run, plan, task, default_device(), progress)
        compile_step(session, load_file(window), progress)
