"""Decide whether a run is so brief that it is not compiled: its updates would take less time than
compiling.

A *run by the clock* has a time (`train.minutes`) instead of a number of updates.
"""

import math
from contextlib import closing
from dataclasses import replace

import torch

from monograph import __version__
from monograph.device import clock, describe, synchronize
from monograph.loss import Batch, fill_of
from monograph.planner import defaults
from monograph.report.quantities import duration
from monograph.session.session import Session
from monograph.storage.cache_dir import is_compiled

# The shortest time to compile a step that is not in the cache, on all machines that were measured
# (benchmarks/start.py).
MIN_COMPILE_S = 20.0
COMPILE_S = 60.0  # the usual time to compile a step that is not in the cache
CACHED_S = 12.0  # the usual time to load a compiled step from the cache
# With train.wall_minutes, a step is compiled only if the time left is at least this multiple of the
# time to compile.
MIN_TIME_OVER_COMPILE_TIME = 2.0


def compiled_key(session: Session, window: Batch) -> str:
    """Return a text that identifies the compiled step of a run; runs with the same text share it.

    Args:
        session: the run.
        window: a window of it, whose shapes the step is compiled for.
    """
    plan = session.plan
    machine = (describe().name, torch.get_num_threads())
    engine = session.engine
    # If the loss says what an empty row contains, every micro-batch is padded to `micro_batch`
    # rows, so the compiled step does not depend on the number of rows of a window. Windows
    # of answers differ in that number.
    depends_on_rows = engine.micro_batch is None or fill_of(engine.step.loss, window) is None
    first_axis = 0 if depends_on_rows else 1
    shapes = {name: list(tensor.shape[first_axis:]) for name, tensor in sorted(window.items())}
    training = plan.training
    # Seed and rate are not constants of the compiled code, so two runs may differ in them.
    optimizer = replace(training.optim, seed=0, lr=1.0)
    options = (
        training.precision,
        training.quantize,
        training.remat,
        training.compile,
        engine.micro_batch,
        optimizer,
        training.clip,
    )
    # The keys of an objective's own section may be constants of its loss.
    objective = plan.job.objective if plan.job.objective.section else None
    versions = (torch.__version__, __version__)
    return repr((machine, *versions, session.model_config, shapes, options, objective))


def updates_given(session: Session) -> int:
    """Return the number of updates that the settings give or their epochs contain; 0 for a run by
    the clock.
    """
    plan = session.plan
    task = session.task
    epochs = plan.job.span.epochs
    if plan.updates or not epochs:
        return plan.updates
    records = epochs * task.records_per_epoch
    windows = -(-records // session.batches.rows_per_window)  # rounded up
    return windows * task.updates_per_window


def why_uncompiled(session: Session, window: Batch, opening_s: float) -> str:
    """Return why a run is not worth compiling; "" if it is.

    A run is not compiled if its updates take less time than compiling would. A run without a
    compiler needs another plan, so its session is opened again, and this time is added. A run is
    not compiled if

        run by the clock:             opening + training < MIN_COMPILE_S
        run of a number of updates:   opening + training < COMPILE_S (CACHED_S for a cached step)

    The limit of a run by the clock is lower, since it makes updates while another process compiles
    (`session.eager_start`), and so loses little by compiling. Other runs wait for the compiler.

    With train.wall_minutes, a run is also not compiled if compiling would take a large share of the
    time left.

    Args:
        session: a session at its beginning, after one trial step.
        window: a window of it.
        opening_s: the seconds in which the session was opened.
    """
    plan = session.plan
    if plan.training.compile == "none" or plan.memory == "stream" or not session.world.alone:
        return ""
    compiling_s = CACHED_S if is_compiled(compiled_key(session, window)) else COMPILE_S
    if session.left_s < MIN_TIME_OVER_COMPILE_TIME * compiling_s:
        return "compiling would take much of the time that train.wall_minutes allows"
    given_updates = updates_given(session)
    if given_updates:
        limit_s = compiling_s
        training_s = math.inf  # not limited by a time
        max_updates = given_updates
    else:
        limit_s = MIN_COMPILE_S
        training_s = 60 * plan.job.span.minutes
        # A short text may end a run before its time is over. 0 means that it does not.
        rows = session.batches.rows_per_window
        max_updates = session.task.max_updates(rows, plan.training.optim.weight_decay) or 0
    if opening_s >= limit_s:
        return ""
    # An update is timed only if the minutes alone do not decide.
    if max_updates and training_s >= limit_s:
        training_s = min(training_s, max_updates * _time_one_update(session))
    if opening_s + training_s >= limit_s:
        return ""
    return f"it takes about {duration(training_s)}, less than compiling"


def _time_one_update(session: Session) -> float:
    """Time one update without a graph, and return its seconds, including its share of the time to
    make a window, such as sampling answers.

    Neither the model nor the session is changed.
    """
    engine = session.engine
    with (
        session.undisturbed(),
        engine.step.counters_kept(),
        closing(session.open_batches(0)) as batches,
    ):
        began = clock()
        window = next(batches)
        window_s = clock() - began
        began = clock()
        engine.rehearse(window)
        synchronize(engine.step.device)
        step_s = clock() - began
    return window_s / session.task.updates_per_window + step_s


def expected_whole_s(session: Session, window: Batch, since_s: float) -> float:
    """Estimate the seconds that a run by the clock takes in all, from the start of the program to
    the end of the report.

    Args:
        session: the session at its beginning.
        window: a window of it.
        since_s: the time of `clock` at which the program was started.
    """
    plan = session.plan
    compiling_s = 0.0
    if plan.training.compile != "none":
        compiling_s = CACHED_S
        if not is_compiled(compiled_key(session, window)):
            compiling_s += COMPILE_S
    training_s = min(60 * plan.job.span.minutes, max(0.0, session.left_s - compiling_s))
    return clock() - since_s + compiling_s + training_s + defaults.END_S
