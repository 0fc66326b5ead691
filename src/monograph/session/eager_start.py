"""Begin a run with *eager* updates, which are computed without a compiled graph, while another
process compiles the step.

Compiling a step that is not in the cache keeps one core busy for half a minute. Meanwhile a run by
the clock (one with `train.minutes` instead of a number of updates) trains on the other cores. Its
number of updates differs from machine to machine anyway, so the run does not become less
repeatable. Once the compiled code is in the cache, the run loads it and saves its first checkpoint.
So all updates of a resumed run are compiled.
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
from monograph.run.recorded_state import MAX_COUNT
from monograph.schedule import constant
from monograph.session.brief import CACHED_S, COMPILE_S, compiled_key
from monograph.session.measured_memory import log_memory
from monograph.session.plan import Length
from monograph.session.recorded import run_settings
from monograph.session.resolve import resolve
from monograph.session.rewind import windows
from monograph.session.session import Session
from monograph.session.setup import make_repeatable, open_session
from monograph.session.warmup import compile_step
from monograph.storage.cache_dir import (
    calibration_file,
    is_compiled,
    keep_compiled,
    mark_compiled,
    start_python,
)
from monograph.storage.writing import cache_errors_explained, temporary_folder, write_durably

EAGER_KEY = "eager"  # rows of metrics.jsonl that come from eager updates have this key
# Bytes of libraries, text and compiler in a process, in addition to the tensors of a step.
PROCESS_BYTES = 2**30
MAX_PATIENCE_S = 600.0  # no run waits longer for the other process
# The program of the other process; its arguments are those of `compile_run`.
_COMPILE_SCRIPT = (
    "import sys; from monograph.session.eager_start import compile_run; compile_run(*sys.argv[1:])"
)


def should_begin_eagerly(session: Session, key: str) -> bool:
    """Return whether a run should begin with eager updates.

    It should if all of this is true:

    - it is a run by the clock, of one process;
    - a compiler can run on another core of this machine;
    - the model is one of this package, and there is memory for a second process with it;
    - the step is not in the cache yet.

    Args:
        session: a session at its beginning.
        key: the step's key (`brief.compiled_key`).
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
        or not session.task.is_fully_planned
    ):
        return False
    two_processes_bytes = 2 * (plan.expected.peak_memory_bytes + PROCESS_BYTES)
    return two_processes_bytes < machine.free_memory_bytes and not is_compiled(key)


def has_spare_core(machine: Device) -> bool:
    """Return whether this machine can compile on one core while it trains on another."""
    return machine.type == "cpu" and machine.cores > 1 and not compiler_obstacle()


def begin(
    session: Session,
    window: Batch,
    progress: Progress,
    before_first_update: Callable[[], None],
) -> bool:
    """Make eager updates until another process has compiled the step, then compile it here.

    Eager updates are made only if `should_begin_eagerly` says so. After eager updates, compiling
    here takes a few seconds, because the compiled code is in the cache.

    Args:
        session: a session at its beginning.
        window: a window of it.
        progress: the display.
        before_first_update: called before the first eager update.

    Returns:
        Whether there were eager updates.
    """
    key = compiled_key(session, window)
    updates_eagerly = should_begin_eagerly(session, key)
    if updates_eagerly:
        before_first_update()
        max_wait_s = patience_s(session)
        if not _update_eagerly(session, window, max_wait_s, progress):
            # All further updates are eager, too.
            plan = session.plan
            plan = plan.with_training(replace(plan.training, compile="none"))
            session.set_plan(plan.with_decided_values({"train.compile": "none"}))
            session.task.stop_compiling()
            session.eager_reason = f"the compiler was not ready in {duration(max_wait_s)}"
    # This compiles nothing if there is an `eager_reason`.
    compile_step(session, window, progress)
    if not session.eager_reason:
        mark_compiled(key)
    return updates_eagerly


def patience_s(session: Session) -> float:
    """Return the maximum seconds that the run waits for the other process.

    With train.wall_minutes it is at most half of the time left.
    """
    return min(patience_for(session.plan.job.span.minutes), session.left_s / 2)


def patience_for(minutes: float, graphs: int = 1) -> float:
    """Return the maximum seconds that a run waits for the other process.

    This is the length of the training, but at least the usual time to compile. So the whole run
    does not take much longer than its display announced.

    Args:
        minutes: the length of the training.
        graphs: the number of graphs that are compiled.
    """
    return min(MAX_PATIENCE_S, max(60 * minutes, graphs * (COMPILE_S + CACHED_S)))


@contextmanager
def compiling(script: str, *arguments: str) -> Iterator[Callable[[], bool]]:
    """Run another process that compiles on one core, while the `with` block trains on the others.

    In the block, torch uses one thread less. The process is killed when the block ends.

    Args:
        script: the Python code of the process.
        arguments: its arguments.

    Yields:
        A function that returns whether the process has ended.
    """
    threads = torch.get_num_threads()
    compiler = start_python(script, *arguments)
    torch.set_num_threads(max(1, threads - 1))
    try:
        yield lambda: compiler.poll() is not None
    finally:
        compiler.kill()
        torch.set_num_threads(threads)


def _update_eagerly(session: Session, window: Batch, max_wait_s: float, progress: Progress) -> bool:
    """Make eager updates until the other process has compiled the step.

    Args:
        session: a session at its beginning.
        window: a window of it, for which the other process compiles.
        max_wait_s: the maximum seconds to wait for the other process.
        progress: the display.

    Returns:
        Whether to compile the step here: if the other process has ended, and also if `max_wait_s`
        is `MAX_PATIENCE_S`, since such a long training is worth compiling anyway.
    """
    engine = session.engine
    task = session.task
    # The length of the run is not decided yet. So the warm-up that suits the likely length is
    # taken.
    likely_length = Length(_likely_updates(session))
    likely_plan = resolve(session.plan, describe(), likely_length)
    engine.step.schedule = constant(likely_plan.intervals.warmup_updates)
    # A short text limits the number of updates. Half of them are left for the compiled step.
    max_eager_updates = max(1, _max_updates(session) // 2)
    log = MetricsLog(session.run, every=1)
    began = clock()
    spent_s = 0.0
    with temporary_folder() as folder:
        window_file = folder / "window.safetensors"
        with cache_errors_explained(folder):
            # Safetensors cannot store views, and the tensors of a window may be views.
            tensors = {name: tensor.clone() for name, tensor in window.items()}
            write_durably(window_file, save(tensors))
        arguments = str(session.run.folder), str(window_file)
        with (
            compiling(_COMPILE_SCRIPT, *arguments) as has_compiler_ended,
            progress.stage("start", "training eagerly while the step compiles") as stage,
        ):
            for update in train(engine, windows(session), max_eager_updates):
                spent_s = clock() - began
                log.add(
                    update, {"wall_s": spent_s, EAGER_KEY: True, **task.figures(session.batches)}
                )
                log_memory(session, update.index + 1, **{EAGER_KEY: True})
                stage.report("update", update.index + 1)
                if session.can_save and (has_compiler_ended() or spent_s > max_wait_s):
                    break
            if not has_compiler_ended():
                stage.report("waiting for the compiler after update", engine.index)
            # After `max_eager_updates`, the run waits without training.
            while not has_compiler_ended() and clock() - began < max_wait_s:
                time.sleep(0.1)
            is_compiled_now = has_compiler_ended()
            stage.result = f"{counted(engine.index, 'update')}, loss {log.last['train_loss']:.2f}"
    # The eager updates count like those of an earlier process of the run: their seconds are in
    # `elapsed_s`, and this process trains from now on. `Reporter` adds `elapsed_s` to the time since
    # `started_s`, so that time must not contain them too.
    session.elapsed_s = spent_s
    session.started_s += spent_s
    session.training_since_s = clock()
    return is_compiled_now or max_wait_s >= MAX_PATIENCE_S


def _max_updates(session: Session) -> int:
    """Return the maximum number of updates of the run, which a short text limits; if nothing limits
    it, the largest number that a checkpoint can record.
    """
    rows = session.batches.rows_per_window
    return session.task.max_updates(rows, session.plan.training.optim.weight_decay) or MAX_COUNT


def _likely_updates(session: Session) -> int:
    """Return the number of updates that the run will have if they take as long as the planner
    predicts.
    """
    plan = session.plan
    assert plan.expected
    update_s = plan.expected.update_s
    if session.model_config:
        calibration = Calibration(calibration_file())
        extra = plan.job.objective.extra_time(plan, session.model_config, describe(), calibration)
        if extra:
            update_s += extra.seconds
    updates_s = defaults.UPDATES_SHARE * 60 * plan.job.span.minutes
    return defaults.updates_in_time(updates_s, update_s, _max_updates(session))


def compile_run(run_folder: str, window_file: str) -> None:
    """Compile a run's step into the cache, where the process that trains the run finds it.

    Args:
        run_folder: the run's folder, without a checkpoint.
        window_file: the file of a window. It is read rather than made, since making one may need
            answers and their rewards.
    """
    keep_compiled()
    make_repeatable(default_device())
    run = Run(Path(run_folder))
    progress = silent()
    plan = resolve(run_settings(run), describe())
    with closing(plan.job.objective.open_without_judging(plan, progress)) as task:
        session = open_session(run, plan, task, default_device(), progress)
        compile_step(session, load_file(window_file), progress)
