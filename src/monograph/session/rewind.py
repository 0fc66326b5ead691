"""Handle a run in which many updates in a row are skipped: go back to a checkpoint and pass over the
rows that led to them, or end the run.

An update is *skipped* if its gradient is not finite or is a spike. The *streak* is the number of
updates, up to the last one, that were skipped in a row. *Rows* are rows of the text, counted from
the run's beginning; a *stretch* of them is a pair (begin, end). To go back is to *rewind*.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from monograph.data.batches import Batch
from monograph.device import clock
from monograph.distributed.checkpoint import load_newest
from monograph.errors import Diverged, InputRefused, NoValidCheckpoint
from monograph.graph import capture as graph
from monograph.report.quantities import counted
from monograph.run.metrics_log import MetricsLog
from monograph.run.progress import Progress
from monograph.session.session import Session

MAX_REWINDS = 3  # in a row; a fourth divergence is not caused by a few bad rows
# Two rewinds count as in a row if there are fewer updates than this between them.
IN_A_ROW_UPDATES = 100


def windows(session: Session) -> Iterator[Batch]:
    """Yield a session's windows from `session.batches`, which `go_back` may replace at any time.

    Raises:
        InputRefused: a reward failed; a checkpoint is written before this is raised.
    """
    while True:
        try:
            window = next(session.batches, None)
        except InputRefused:
            if session.task.saves_if_window_fails and session.engine.index:
                session.save()
            raise
        if window is None:
            return
        yield window


def go_back(session: Session, log: MetricsLog, progress: Progress) -> MetricsLog:
    """Restore the last checkpoint from before the skipped updates, and pass over the rows that led
    to them.

    The rows of the skipped updates are passed over, and the rows of the same number of updates
    before them, but no rows from before the checkpoint. The run's state records which rows are
    passed over. A row of metrics.jsonl records the rewind, after the row of the checkpoint's
    update. Source: PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1), where this was done
    by hand.

    Args:
        session: a session in which too many updates in a row were skipped, or whose weights became
            non-finite without an update.
        log: the log of these updates.
        progress: the display, which prints a warning.

    Returns:
        The log for the updates from now on.

    Raises:
        Diverged: the run has gone back `MAX_REWINDS` times in a row, or there is no such
            checkpoint; the message names the first value that is not finite.
    """
    log.flush()
    # Ranks other than 0 have not read the metrics from before a resume, so all take rank 0's
    # counts. Weights can become non-finite without a skipped update, so the streak is at least 1.
    last, streak = session.world.broadcast([log.last["update"], max(1, log.skipped_in_a_row)])
    earlier_stretches = session.batches.skip
    rows = session.batches.rows_per_window
    skipped_windows = math.ceil(streak / session.task.updates_per_window)
    end = session.batches.rows_consumed
    # The stretch has the windows of the skipped updates, and the same number of windows before
    # them.
    begin = end - 2 * skipped_windows * rows
    if rewinds_in_a_row([*earlier_stretches, (begin, end)], rows) > MAX_REWINDS:
        raise _diverged(session, log)
    try:
        checkpoint = load_newest(
            session.world, session.run.checkpoints, lambda line: None, until=last - streak
        )
    except NoValidCheckpoint:
        raise _diverged(session, log) from None
    # The checkpoint recorded less time as spent. The time since then is lost, but still counts.
    spent_s = session.spent_s
    session.restore(checkpoint, progress)
    session.elapsed_s = spent_s
    session.training_since_s = clock()
    # Open the windows at the checkpoint's position again, with the new stretch.
    arguments = session.batches.state()
    stretch = (max(arguments["rows"], begin), end)
    arguments["skip"] = (*earlier_stretches, stretch)
    session.batches.close()
    session.batches = session.open_batches(**arguments)
    session.run.log(
        {"update": checkpoint.update, "rewound_from": last, "passed_over_rows": stretch}
    )
    # The new state is saved immediately, so that a resumed run passes over the rows, too.
    session.save()
    passed_over = counted(stretch[1] - stretch[0], "row")
    progress.line(
        "warning",
        f"updates {last - streak + 1} to {last} were skipped: back to update {checkpoint.update}, "
        f"passing over {passed_over} of data",
    )
    return MetricsLog(session.run, log.every)


def rewinds_in_a_row(stretches: Sequence[tuple[int, int]], rows: int) -> int:
    """Return how many of the last rewinds were in a row.

    Args:
        stretches: the stretch of rows that each rewind passed over, as (begin, end); at least one.
        rows: rows of a window.
    """
    count = 1
    neighbours = [*itertools.pairwise(stretches)]
    for earlier, later in reversed(neighbours):
        _, earlier_end = earlier
        later_begin, _ = later
        if later_begin - earlier_end >= IN_A_ROW_UPDATES * rows:
            break
        count += 1
    return count


def require_end(session: Session, log: MetricsLog) -> None:
    """Refuse the end of a run whose last updates were skipped.

    Raises:
        Diverged: at least the second half of its updates were skipped. They were too few for
            `go_back`.
    """
    if 2 * log.skipped_in_a_row >= session.updates:
        raise _diverged(session, log)


def _diverged(session: Session, log: MetricsLog) -> Diverged:
    """Return the error that says where the run diverged."""
    rewinds = len(session.batches.skip)
    last = log.last
    earlier = f" although rows were passed over {counted(rewinds, 'time')}" if rewinds else ""
    is_finite = math.isfinite(last["train_loss"]) and math.isfinite(last["grad_norm"])
    reason = "spikes" if is_finite else "not finite"
    return Diverged(
        f"{counted(log.skipped_in_a_row, 'update')} in a row, up to {last['update']}, skipped as "
        f"{reason}{earlier}: {describe_non_finite(session)}; lower optim.lr, and look for bad data "
        "around there; the last checkpoint is sound"
    )


def describe_non_finite(session: Session) -> str:
    """Compute the last window again without graphs, and return a text that names the first value
    that is not finite.
    """
    if not session.world.alone:
        return "train in one process to see where"
    rows = session.batches.rows_per_window
    window = next(session.open_batches(session.batches.rows_consumed - rows))
    graph.uncapture(session.engine.step)
    micro_batch = session.engine.micro_batch or rows
    for first in range(0, rows, micro_batch):
        batch = {name: tensor[first : first + micro_batch] for name, tensor in window.items()}
        try:
            session.engine.trial(batch)  # refuses a value that is not finite, by its name
        except InputRefused as refusal:
            return str(refusal)
    return "computed again, all values are finite"
