"""Measure what replaying a captured micro-step saves over calling it, on one engine, for
`train.py`.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import harness
import torch
from systems import Shape, engine_of, random_rows

from monograph.device import clock, default_device, synchronize
from monograph.graph.capture import is_replayed, replayed
from monograph.graph.replay import CudaGraphs, Recorder
from monograph.loss import Batch
from monograph.profiling.memory import peak_memory_bytes, reset_peak_memory
from monograph.resident import Resident


def replay(shape: Shape, args: Namespace) -> dict[str, Any]:
    """Time rounds of updates called and replayed, interleaved; `by_itself`: whether the engine
    would replay here.
    """
    device = default_device()
    rows = random_rows(shape).to(device)
    window = {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}
    began = clock()
    engine = engine_of(shape)
    build_s, began = clock() - began, clock()
    by_itself, engine.step.recorder = engine.step.recorder, None
    if obstacle := engine.capture(window):
        raise SystemExit(f"train.py: the step cannot be captured: {obstacle}")
    compile_s = clock() - began
    found = compared(engine, window, [by_itself, CudaGraphs(device)], args)
    return found | {"compile_s": compile_s, "build_s": build_s}


def compared(
    engine: Resident, window: Batch, recorders: list[Recorder | None], args: Namespace
) -> dict[str, Any]:
    """Seconds per update of both ways, the ratio round by round, and each way's peak memory.

    Args:
        engine: captured without a recorder.
        window: of every update.
        recorders: the engine's own, and one that captures in any case.
        args: `rounds` and `round_s`.
    """
    step, device = engine.step, engine.step.device
    ways = {"called": step.micro_step}
    peaks = {"called": peak_of(engine, window)}
    for recorder in recorders:
        step.recorder, step.micro_step = recorder, ways["called"]
        step.micro_step = ways["replayed"] = replayed(step)
        peaks["replayed"] = peak_of(engine, window)
        by_itself = is_replayed(step) and recorder is recorders[0]
        if is_replayed(step):
            break
    if not is_replayed(step):
        raise SystemExit("train.py: the micro-step cannot be captured")

    def updates(way: str, count: int) -> float:
        step.micro_step = ways[way]
        for _ in range(count):
            engine.accumulate(window)
            loss = engine.update().loss
        return float(loss)

    updates("called", 1)
    count = max(1, round(args.round_s / harness.timed(lambda: updates("called", 1), device).wall_s))
    cases = {way: (lambda way=way: updates(way, count)) for way in ways}
    times = harness.interleaved(cases, args.rounds, device)
    with harness.HostSyncs(device) as syncs:
        engine.accumulate(window)
        engine.update()
    return {
        "seconds_per_update": harness.spread([each.wall_s / count for each in times["replayed"]]),
        "called_seconds_per_update": harness.spread(
            [each.wall_s / count for each in times["called"]]
        ),
        "speedup": harness.ratios(times["called"], times["replayed"])["wall"],
        "by_itself": by_itself,
        "peak_memory_bytes": peaks["replayed"],
        "called_peak_memory_bytes": peaks["called"],
        "host_syncs": syncs.counts,
        "mean_loss": updates("replayed", 1),
    }


def peak_of(engine: Resident, window: Batch) -> int:
    """Return the peak memory of an update, after one that warms up."""
    device = engine.step.device
    for _ in range(2):
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        reset_peak_memory(device)
        engine.accumulate(window)
        engine.update()
    synchronize(device)
    return peak_memory_bytes(device)
