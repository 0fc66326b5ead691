"""Log the measured memory of a run's updates, and store it for later plans."""

from typing import Any

from monograph.device import describe
from monograph.graph.capture import is_replayed
from monograph.graph.remat import policy_named
from monograph.predict.roofline import Calibration
from monograph.profiling.memory import ledger, peak_memory_bytes
from monograph.session.session import Session
from monograph.storage.cache_dir import calibration_file
from monograph.stream import Streamed


def log_memory(session: Session, update: int, **entries_of_row: object) -> None:
    """After the first update, store the measured peak for later plans; after the second one, log the
    planned and the measured memory by what it is for.

    After other updates nothing happens, since they need the same memory.

    Args:
        session: the run.
        update: the number of updates done.
        entries_of_row: further entries of the row in metrics.jsonl.
    """
    # After the first update nothing was evaluated or sampled yet, so the peak is the update's.
    if update == 1:
        _store_peak_memory(session)
    if update == 2:
        planned = session.plan.expected.by_origin if session.plan.expected else None
        if isinstance(session.engine, Streamed):
            entries: dict[str, Any] = session.engine.ledger()
        else:
            step = session.engine.step
            entries = ledger(step.planes, planned, step.device)
        session.run.log({"update": update, "memory": entries, **entries_of_row})


def _store_peak_memory(session: Session) -> None:
    """Store a GPU's measured peak in the calibration, together with the peak that the plan predicted
    by tracing, so that later plans can correct theirs.

    Nothing is stored if another step ran than was planned, or if micro-steps are replayed: a CUDA
    graph has a memory pool that the plan does not count.
    """
    step = session.engine.step
    planned = session.plan.expected
    if planned is None or planned.traced is None or step.device.type != "cuda" or is_replayed(step):
        return
    # DDP adds buffers that the plan does not count.
    if not (session.world.alone and session.task.is_fully_planned):
        return
    work = planned.work
    planned_step = (work.rows, work.compile, policy_named(work.remat))
    if (session.engine.micro_batch, step.scope, step.remat) != planned_step:
        return
    measured_bytes = peak_memory_bytes(step.device)
    Calibration(calibration_file()).note_memory(
        describe(step.device), work, planned.traced, measured_bytes
    )
