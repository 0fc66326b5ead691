"""Decide that a run is not compiled because its updates take less time than compiling would."""

from contextlib import closing

from monograph.device import clock, synchronize
from monograph.rl.prompts import Prompts
from monograph.rl.rollouts import Rollouts
from monograph.session.session import Session

# On every machine that was measured, compiling a step that is not in the cache takes longer (benchmarks/start.py).
LEAST_COMPILE_S = 20.0


def updates_given(session: Session) -> int:
    """Return the number of updates that the settings give, or the epochs contain; 0 for a run by the clock."""
    plan, text, rows = session.plan, session.corpus, session.batches.rows_per_window
    if plan.updates or not plan.epochs:
        return plan.updates
    per_epoch = len(text.train) if isinstance(text, Prompts) else text.train.per_epoch
    each = session.drawer.options.updates if isinstance(text, Prompts) else 1  # of a window's rows
    return -(-plan.epochs * per_epoch // rows) * each


def uncompiled_s(session: Session, opening_s: float) -> float | None:
    """Return the seconds that a brief run takes without compiling; None for a run that is worth compiling.

    The seconds are those of opening the run again, for which `opening_s` is known, and of its updates: the time that
    the clock gives, or as many times one update as there are.

    Args:
        session: a session at its beginning, with one trial step done.
        opening_s: seconds that opening it took.
    """
    plan = session.plan
    if plan.compile == "none" or plan.memory == "stream" or not session.world.alone:
        return None
    updates = updates_given(session)
    if not updates:
        seconds = opening_s + 60 * plan.minutes
        return seconds if seconds < LEAST_COMPILE_S else None
    if opening_s >= LEAST_COMPILE_S:
        return None
    seconds = opening_s + updates * _update_s(session)
    return seconds if seconds < LEAST_COMPILE_S else None


def _update_s(session: Session) -> float:
    """Return the seconds of one update without a graph, drawing of answers included; nothing changes by it."""
    engine = session.engine
    with session.undisturbed(), engine.step.counters_kept(), closing(session.open_batches(0)) as batches:
        began = clock()
        window = next(batches)
        drawn_s = clock() - began
        began = clock()
        engine.rehearse(window)
        synchronize(engine.step.device)
        learned_s = clock() - began
    each = session.drawer.options.updates if isinstance(batches, Rollouts) else 1  # of which one draws
    return drawn_s / each + learned_s
