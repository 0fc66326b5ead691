"""Handle a run that computes nothing finite any more: go back and pass over the rows, or end it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from monograph.data.batches import Batch
from monograph.device import clock
from monograph.distributed.checkpoint import newest
from monograph.errors import Diverged, InputRefused, NoValidCheckpoint
from monograph.graph import capture as graph
from monograph.report.quantities import counted
from monograph.run.metrics_log import MetricsLog
from monograph.run.progress import Progress
from monograph.session.session import Session

MOST = 3  # times in a row that a run goes back; a fourth divergence is no accident of its data
BETWEEN = 100  # two rewinds with at least so many updates made between them are not in a row


def windows(session: Session) -> Iterator[Batch]:
    """Yield a session's windows, from wherever it stands when the next one is asked for."""
    while (window := next(session.batches, None)) is not None:
        yield window


def go_back(session: Session, log: MetricsLog, progress: Progress) -> MetricsLog:
    """Take up the last checkpoint from before the non-finite updates, and pass over the rows that led to them.

    The rows of those updates and of as many before them are passed over, except rows that the checkpoint had seen. The
    run's state holds them from then on. The metrics go on from the checkpoint's, after a row that records the rewind.
    Source: PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1) went back and passed over rows by hand.

    Args:
        session: a session whose last updates changed nothing, too many of them for an accident, or whose weights became
            infinite by something other than an update.
        log: the log of these updates.
        progress: receives the line that reports it.

    Returns:
        The log for the updates from now on.

    Raises:
        Diverged: the run went back `MOST` times in a row, or there is no such checkpoint; says what is not finite.
    """
    log.flush()
    # A rank that took part in a resume has not seen the updates before it.
    last, streak = session.world.agreed([log.last["update"], max(1, log.streak)])
    skip, end, rows = session.batches.skip, session.batches.rows_consumed, session.batches.rows_per_window
    led_there = end - 2 * streak * rows
    if in_a_row([*skip, (led_there, end)], rows) > MOST:
        raise _diverged(session, log)
    try:
        sound = newest(session.world, session.run.checkpoints, lambda line: None, until=last - streak)
    except NoValidCheckpoint:
        raise _diverged(session, log) from None
    spent_s = session.spent_s
    session.restore(sound, progress)
    session.elapsed_s, session.training_since_s = spent_s, clock()
    position = session.batches.state()
    stretch = (max(position["rows"], led_there), end)
    session.batches.close()
    session.batches = session.open_batches(**{**position, "skip": (*skip, stretch)})
    session.run.log({"update": sound.update, "rewound_from": last, "passed_over_rows": stretch})
    session.save()
    passed = counted(stretch[1] - stretch[0], "row")
    told = f"updates {last - streak + 1} to {last} were skipped: back to update {sound.update}, passing over {passed}"
    progress.line("warning", told)
    return MetricsLog(session.run, log.every)


def in_a_row(stretches: Sequence[tuple[int, int]], rows: int) -> int:
    """Count the last stretches of rows that follow one another with fewer than `BETWEEN` updates between them."""
    pairs = zip(stretches[::-1], stretches[-2::-1], strict=False)
    return 1 + sum(1 for _ in itertools.takewhile(lambda pair: pair[0][0] - pair[1][1] < BETWEEN * rows, pairs))


def require_end(session: Session, log: MetricsLog) -> None:
    """Refuse the end of a run that has stopped learning.

    Raises:
        Diverged: at least the second half of its updates were skipped, but too few of them for `go_back`.
    """
    if 2 * log.streak >= session.updates:
        raise _diverged(session, log)


def _diverged(session: Session, log: MetricsLog) -> Diverged:
    times, last = len(session.batches.skip), log.last
    past = f", rows passed over {counted(times, 'time')} before" if times else ""
    finite = math.isfinite(last["train_loss"]) and math.isfinite(last["grad_norm"])
    return Diverged(
        f"{counted(log.streak, 'update')} in a row, up to {last['update']}, skipped as "
        f"{'spikes' if finite else 'not finite'}{past}: {autopsy(session)}; lower optim.lr, and look for bad data "
        "around there; the last checkpoint is sound"
    )


def autopsy(session: Session) -> str:
    """Compute the last window once more without a graph, and return in words what is not finite."""
    if not session.world.alone:
        return "one process alone would say where"
    rows = session.batches.rows_per_window
    window = next(session.open_batches(session.batches.rows_consumed - rows))
    graph.release(session.engine.step)
    size = session.engine.micro_batch or rows
    for begin in range(0, rows, size):
        try:
            session.engine.trial({name: tensor[begin : begin + size] for name, tensor in window.items()})
        except InputRefused as refusal:
            return str(refusal)
    return "computed once more, they are finite"
