"""Decide that a run is not compiled because its updates take less time than compiling would."""

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

# On every machine that was measured, compiling a step that is not in the cache takes longer
# (benchmarks/start.py).
LEAST_COMPILE_S = 20.0
# What it usually takes there, and if it is in the cache; a run whose whole time is limited takes
# SHARE times that.
COMPILE_S = 60.0
CACHED_S = 12.0
SHARE = 2.0


def compiled_key(session: Session, window: Batch) -> str:
    """Return a text that differs wherever the compiled step of a run would differ."""
    plan = session.plan
    machine = (describe().name, torch.get_num_threads())
    engine = session.engine
    # A loss that says what an empty row holds has windows of all sizes filled up; those of answers
    # have many sizes.
    own_rows = engine.micro_batch is None or fill_of(engine.step.loss, window) is None
    shapes = {
        name: list(tensor.shape[0 if own_rows else 1 :]) for name, tensor in sorted(window.items())
    }
    training = plan.training
    # At most the rounding of narrow states depends on them.
    rule = replace(training.optim, seed=0, lr=1.0)
    way = (
        training.precision,
        training.remat,
        training.compile,
        engine.micro_batch,
        rule,
        training.clip,
    )
    objective = plan.job.objective if plan.job.objective.section else None
    return repr(
        (machine, torch.__version__, __version__, session.model_config, shapes, way, objective)
    )


def updates_given(session: Session) -> int:
    """Return the number of updates that the settings give, or the epochs contain; 0 for a run by
    the clock.
    """
    plan = session.plan
    task = session.task
    rows = session.batches.rows_per_window
    if plan.updates or not plan.job.span.epochs:
        return plan.updates
    return -(-plan.job.span.epochs * task.per_epoch // rows) * task.updates_per_window


def why_uncompiled(session: Session, window: Batch, opening_s: float) -> str:
    """Return why a run is not worth compiling; "" if it is.

    That is so if opening it again, for which `opening_s` is known, and its updates take less time
    than compiling would: the time that the clock gives, or as many times one update as there are. A
    run by the clock makes updates while another process compiles (`session.eager_start`), so that
    is the least that compiling takes; one of so many updates waits for it, and it is what compiling
    usually takes. A run whose whole time is limited is not compiled, either, if that would take a
    large share of it.

    Args:
        session: a session at its beginning, with one trial step done.
        window: a window of it.
        opening_s: seconds that opening it took.
    """
    plan = session.plan
    if plan.training.compile == "none" or plan.memory == "stream" or not session.world.alone:
        return ""
    compiling_s = CACHED_S if is_compiled(compiled_key(session, window)) else COMPILE_S
    if session.left_s < SHARE * compiling_s:
        return "compiling would take much of the time that train.wall_minutes allows"
    updates = updates_given(session)
    least_s = compiling_s if updates else LEAST_COMPILE_S
    if opening_s >= least_s:
        return ""
    training_s = math.inf if updates else 60 * plan.job.span.minutes
    if not updates:  # a short text ends a run before its time does
        updates = (
            session.task.most_updates(
                session.batches.rows_per_window, plan.training.optim.weight_decay
            )
            or 0
        )
    if updates and training_s >= least_s:
        training_s = min(training_s, updates * _update_s(session))
    if opening_s + training_s >= least_s:
        return ""
    return f"it takes about {duration(training_s)}, less than compiling"


def _update_s(session: Session) -> float:
    """Return the seconds of one update without a graph, drawing of answers included; nothing
    changes by it.
    """
    engine = session.engine
    with (
        session.undisturbed(),
        engine.step.counters_kept(),
        closing(session.open_batches(0)) as batches,
    ):
        began = clock()
        window = next(batches)
        drawn_s = clock() - began
        began = clock()
        engine.rehearse(window)
        synchronize(engine.step.device)
        learned_s = clock() - began
    return drawn_s / session.task.updates_per_window + learned_s


def expected_whole_s(session: Session, window: Batch, since_s: float) -> float:
    """Return the seconds that a run by the clock will take in all, preparation and compiling
    counted.

    Args:
        session: the session at its beginning.
        window: a window of it.
        since_s: the time of `clock` at which the run was asked for.
    """
    plan = session.plan
    compiling_s = 0.0
    if plan.training.compile != "none":
        compiling_s = CACHED_S
        if not is_compiled(compiled_key(session, window)):
            compiling_s += COMPILE_S
    training_s = min(60 * plan.job.span.minutes, max(0.0, session.left_s - compiling_s))
    return clock() - since_s + compiling_s + training_s + defaults.END_S
