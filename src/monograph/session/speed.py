"""What an update takes on this machine, in seconds and bytes: measured on a few that are thrown away."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from torch import Tensor

from monograph.device import clock, describe, synchronize
from monograph.distributed.world import World
from monograph.measure.calibration import Calibration, peak_flops
from monograph.measure.footprint import Work
from monograph.measure.memory import LiveBytes, peak_memory_bytes
from monograph.model.llama import Llama
from monograph.resident import Resident
from monograph.run.adapters import lora_of
from monograph.session.planning import asked_of
from monograph.session.session import Session
from monograph.storage.cache_dir import calibration_file
from monograph.stream import Streamed

CALIBRATION_S = 3.0  # long enough that a moment of other work on the machine is not taken for its speed


def calibrate(session: Session) -> float:
    """Seconds that an update of the session takes; see `seconds_per_update`."""
    engine, window = session.engine, next(session.open_batches(0))

    with session.undisturbed():
        return float(session.world.agreed(seconds_per_update(engine, lambda: engine.rehearse(window), session.world)))


def seconds_per_update(engine: Resident, update: Callable[[], object], world: World | None = None) -> float:
    """Seconds that an update takes where nothing disturbs it: the lower quartile of a few that are thrown away.

    A run that is planned too long cools down in time (`Story.keep_time`); one planned too short would waste its time.

    Args:
        engine: whose counters stay as they are.
        update: makes one that changes no weight, such as one without targets, which the device refuses and computes all
            the same.
        world: the ranks that update together, of which rank 0 says how often.
    """
    times: list[float] = []
    world = world or World()
    with engine.step.counters_kept():
        while world.agreed(len(times) < 3 or (sum(times) < CALIBRATION_S and len(times) < 50)):
            synchronize(engine.step.device)
            began = clock()
            update()
            synchronize(engine.step.device)
            times.append(clock() - began)
    return sorted(times)[len(times) // 4]


def measure_memory(session: Session) -> None:
    """Note what an update needs on a CPU, where nothing counts it while the run goes on.

    After the run, since an update more before it would be one more in which memory can run out; and what goes wrong in
    it costs the figure alone.
    """
    if session.engine.step.device.type != "cuda":
        with suppress(Exception):
            session.peak_bytes = peak_bytes(session)


def peak_bytes(session: Session) -> int:
    """Bytes of tensors at the peak of an update: weights, gradients, optimizer state, activations and the window.

    On a GPU torch's allocator has counted them since it was last told to begin anew. On a CPU its events are recorded
    in an update of two micro-batches, which is thrown away: libraries and the compiler, which take hundreds of MB of
    the process, would hide what a technique saves.
    """
    engine = session.engine
    if engine.step.device.type == "cuda":
        return peak_memory_bytes(engine.step.device)
    batches = session.open_batches(0)
    window = next(batches)
    batches.close()
    rows = 2 * (engine.micro_batch or session.batches.rows_per_window)
    with session.undisturbed(), engine.step.counters_kept(), LiveBytes() as live:
        engine.rehearse({name: tensor[:rows] for name, tensor in window.items()})
    if isinstance(engine, Streamed):
        return live.peak_bytes + sum(engine.ledger()["device"].values())
    flat = [each for plane in engine.step.planes for each in (plane.param, plane.grad, *plane.state.values())]
    frozen = [each for each in engine.model.parameters() if not each.requires_grad]
    return live.peak_bytes + _bytes([*frozen, *engine.model.buffers(), *flat, *window.values()])


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def remember(session: Session, seconds: float) -> None:
    """Keep what an update takes on this machine, so that the next plan knows it."""
    engine, settings = session.engine, session.settings
    if not isinstance(engine.model, Llama) or isinstance(engine, Streamed) or not session.world.alone:
        return
    machine, rows = describe(), session.batches.rows_per_window
    tokens = lora_of(session.recipe.lora).tokens if session.recipe.lora else ()
    asked = asked_of(settings, engine.model.config, machine, tokens)
    work = Work(
        asked.config, engine.micro_batch or rows, asked.length, asked.optim, asked.precisions[0], engine.step.scope,
        asked.remats[0], rows, asked.packed, asked.clip, machine.type, asked.lora,
    )  # fmt: skip
    rate = peak_flops(machine, asked.precisions)[work.precision]
    Calibration(calibration_file()).note(machine, work, seconds, rate)
