"""A few updates of an engine under torch's profiler: where their time went, the floor, and what to change."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from monograph.device import clock, compiler_obstacle, describe, measured_matmul_flops, synchronize
from monograph.errors import UsageError
from monograph.measure import trace
from monograph.measure.bottleneck import Machine, Situation, Verdict, undisturbed, verdict
from monograph.measure.calibration import measured_memory_bytes_per_s
from monograph.measure.intervals import Spent, spent
from monograph.model.llama import Llama
from monograph.resident import Resident

UPDATES, WARM = 3, 2
MEASURED = 9  # updates that nobody watches; their lower quartile counts
_ALLOCATES = ("empty", "new_empty", "resize_", "set_")


@dataclass(frozen=True)
class Profile:
    """Where an update's time went.

    Attributes:
        update_s: seconds of an update that no profiler watched, the lower quartile of a few.
        watched_s: the same under the profiler.
        updates: how many were watched.
        micro_steps: of an update.
        machine: what the device was measured at.
        verdict: of one update, its seconds adding up to `update_s`.
        named: share of the time whose part is known, 0 to 1.
        trace: the Chrome trace.
    """

    update_s: float
    watched_s: float
    updates: int
    micro_steps: int
    machine: Machine
    verdict: Verdict
    named: float
    trace: Path


def profile(
    engine: Resident, windows: Iterable[Any], file: str | Path, *, packed: float = 1.0, used: float = 1.0
) -> Profile:
    """Train a few updates, some of them watched, and say where their time goes.

    Args:
        engine: ready to train, and captured if it is to be; its weights and counters change as in any training.
        windows: of rows, `WARM + MEASURED + UPDATES` of them.
        file: the Chrome trace to write, `*.json`.
        used: share of the rows' positions that hold tokens.
        packed: what that share would be with the rows packed.

    Raises:
        UsageError: the windows end too early.
    """
    file = Path(file)
    windows = iter(windows)
    first = _next(windows)
    rows = next(iter(first.values())).shape[0]
    steps = -(-rows // (engine.micro_batch or rows))
    _each(engine, chain([first], windows), WARM)
    times = sorted(_each(engine, windows, MEASURED))
    update_s = times[len(times) // 4]
    device = engine.step.device
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=activities, record_shapes=True) as watched, _spans(engine):
        watched_s = sum(_each(engine, windows, UPDATES)) / UPDATES
    watched.export_chrome_trace(str(file))
    timeline = trace.read(json.loads(file.read_text()), has_kernel, _head_rows(engine), isinstance(engine.model, Llama))
    machine = _machine(engine)
    situation = _situation(engine, machine, steps, used, packed)
    found = undisturbed(_per_update(spent(timeline)), update_s)
    judged = verdict(found, timeline.kernels, machine, situation)
    return Profile(
        update_s, watched_s, UPDATES, steps, machine, judged, 1 - found.share("other"), file
    )


def _each(engine: Resident, windows: Iterator[Any], count: int) -> list[float]:
    """Seconds of so many updates, one by one."""
    times = []
    for _ in range(count):
        began = clock()
        with record_function(trace.STEP):
            with record_function(trace.DATA):
                window = _next(windows)
            engine.accumulate(window)
            with record_function(trace.UPDATE):
                engine.update()
            synchronize(engine.step.device)
        times.append(clock() - began)
    return times


def _next(windows: Iterator[Any]) -> Any:
    window = next(windows, None)
    if window is None:
        raise UsageError(f"a profile takes {WARM + MEASURED + UPDATES} updates: give more text, or more epochs")
    return window


@contextmanager
def _spans(engine: Resident) -> Iterator[None]:
    """In the block the loss's head has a span of its own, where it is a function that something outside calls.

    Inside one graph of the whole step there is nothing to call.
    """
    step = engine.step
    head: Callable[..., Any] | None = getattr(step.loss, "head", None)
    if head is None or step.scope == "whole":
        yield
        return
    kept, spanned = step.loss, copy.copy(step.loss)

    @functools.wraps(head)
    def watched(*arguments: Any, **keywords: Any) -> Any:
        with record_function(trace.HEAD):
            return head(*arguments, **keywords)

    spanned.head = watched  # type: ignore[attr-defined]
    step.loss = spanned
    try:
        yield
    finally:
        step.loss = kept


@functools.cache
def has_kernel(name: str) -> bool:
    """Whether an operator computes something itself: it is no view, allocates not only, and calls not only others."""
    room, _, operator = name.rpartition("::")
    packet = getattr(getattr(torch.ops, room, None), operator, None) if room.isidentifier() else None
    if packet is None or operator.startswith(_ALLOCATES):
        return False
    overload = getattr(packet, packet.overloads()[0])
    if overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return False
    returns = overload._schema.returns
    is_view = bool(returns) and all(each.alias_info and not each.alias_info.is_write for each in returns)
    return not is_view


def _head_rows(engine: Resident) -> int | None:
    """The vocabulary of a Llama, if no other side of a product is as long."""
    if not isinstance(engine.model, Llama):
        return None
    rows, others = engine.model.config.vocab_size, set[int]()
    for name, parameter in engine.model.named_parameters():
        if not name.endswith(("lm_head.weight", "embed_tokens.weight")):
            others |= {*parameter.shape}
    return None if rows in others | {engine.model.config.hidden_size} else rows


def _per_update(found: Spent) -> Spent:
    return Spent(
        {part: seconds / UPDATES for part, seconds in found.parts.items()},
        {cause: seconds / UPDATES for cause, seconds in found.gaps.items()},
    )


def _machine(engine: Resident) -> Machine:
    device, dtype = engine.step.device, engine.step.precision.dtype
    known = describe(device).bandwidth_bytes_per_s  # of a card: the datasheet's, as nothing here measures it
    return Machine(measured_matmul_flops(device, dtype), known or measured_memory_bytes_per_s())


def _situation(engine: Resident, machine: Machine, micro_steps: int, used: float, packed: float) -> Situation:
    step, device = engine.step, engine.step.device
    faster = 1.0
    if step.precision.name == "fp32" and describe(device).has_bf16:
        faster = measured_matmul_flops(device, torch.bfloat16) / machine.matmul_flops
    can_compile = device.type == "cuda" or compiler_obstacle() is None
    return Situation(step.scope != "none", can_compile, micro_steps, faster, used, packed)
