"""Handle a run whose updates are skipped one after another: go back and pass over the rows, or end
it.
"""

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

MOST = 3  # rewinds in a row; a fourth divergence is not due to a few bad rows
BETWEEN = 100  # two rewinds with at least this many updates between them are not in a row


def windows(session: Session) -> Iterator[Batch]:
    """Yield a session's windows from `session.batches`, which `go_back` replaces meanwhile.

    Raises:
        InputRefused: a reward failed; what was learned until then is saved before.
    """
    while True:
        try:
            window = next(session.batches, None)
        except InputRefused:
            if session.task.saves_if_refused and session.engine.index:
                session.save()
            raise
        if window is None:
            return
        yield window


def go_back(session: Session, log: MetricsLog, progress: Progress) -> MetricsLog:
    """Restore the last checkpoint from before the skipped updates, and pass over the rows that led
    to them.

    The rows of those updates and of as many before them are passed over, except rows that the
    checkpoint had seen. The run's state records the rows that are passed over. The metrics go on
    from the checkpoint's, after a row that records the rewind. Source: PaLM (Chowdhery et al. 2022,
    arXiv 2204.02311, section 5.1) went back and skipped rows by hand.

    Args:
        session: a session of which too many of the last updates were skipped, or whose weights
            became non-finite by something other than an update.
        log: the log of these updates.
        progress: the display that prints a line on it.

    Returns:
        The log for the updates from now on.

    Raises:
        Diverged: the run went back `MOST` times in a row, or there is no such checkpoint; the
            message names the first value that is not finite.
    """
    log.flush()
    # Ranks other than 0 have not read the metrics from before a resume, so rank 0's counts hold for
    # all.
    last, streak = session.world.agreed([log.last["update"], max(1, log.streak)])
    skip = session.batches.skip
    end = session.batches.rows_consumed
    rows = session.batches.rows_per_window
    led_there = end - 2 * -(-streak // session.task.updates_per_window) * rows
    if in_a_row([*skip, (led_there, end)], rows) > MOST:
        raise _diverged(session, log)
    try:
        sound = newest(
            session.world, session.run.checkpoints, lambda line: None, until=last - streak
        )
    except NoValidCheckpoint:
        raise _diverged(session, log) from None
    spent_s = session.spent_s
    session.restore(sound, progress)
    session.elapsed_s = spent_s
    session.training_since_s = clock()
    position = session.batches.state()
    stretch = (max(position["rows"], led_there), end)
    session.batches.close()
    session.batches = session.open_batches(**{**position, "skip": (*skip, stretch)})
    session.run.log({"update": sound.update, "rewound_from": last, "passed_over_rows": stretch})
    session.save()
    passed = counted(stretch[1] - stretch[0], "row")
    skipped = f"updates {last - streak + 1} to {last} were skipped"
    line = f"{skipped}: back to update {sound.update}, skipping {passed} of data"
    progress.line("warning", line)
    return MetricsLog(session.run, log.every)


def in_a_row(stretches: Sequence[tuple[int, int]], rows: int) -> int:
    """Return how many of the last stretches of rows have fewer than `BETWEEN` updates from one to
    the next.
    """
    pairs = zip(stretches[::-1], stretches[-2::-1], strict=False)
    return 1 + sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0][0] - pair[1][1] < BETWEEN * rows, pairs)
    )


def require_end(session: Session, log: MetricsLog) -> None:
    """Refuse the end of a run that has stopped learning.

    Raises:
        Diverged: at least the second half of its updates were skipped, but too few of them for
            `go_back`.
    """
    if 2 * log.streak >= session.updates:
        raise _diverged(session, log)


def _diverged(session: Session, log: MetricsLog) -> Diverged:
    times = len(session.batches.skip)
    last = log.last
    past = f", rows passed over {counted(times, 'time')} before" if times else ""
    finite = math.isfinite(last["train_loss"]) and math.isfinite(last["grad_norm"])
    return Diverged(
        f"{counted(log.streak, 'update')} in a row, up to {last['update']}, skipped as "
        f"{'spikes' if finite else 'not finite'}{past}: {autopsy(session)}; lower optim.lr, and look for bad data "
        "around there; the last checkpoint is sound"
    )


def autopsy(session: Session) -> str:
    """Compute the last window again without graphs, and return a text that says what is not finite."""
    if not session.world.alone:
        return "one process alone would say where"
    rows = session.batches.rows_per_window
    window = next(session.open_batches(session.batches.rows_consumed - rows))
    graph.release(session.engine.step)
    size = session.engine.micro_batch or rows
    for begin in range(0, rows, size):
        try:
            session.engine.trial(
                {name: tensor[begin : begin + size] for name, tensor in window.items()}
            )
        except InputRefused as refusal:
            return str(refusal)
    return "computed once more, they are finite"
