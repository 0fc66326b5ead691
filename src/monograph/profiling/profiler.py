"""Run a few updates under torch's profiler, and say where their time went, how short it could be
and what to change.

The device's rates are measured on its own matrix products and copies.
"""

import copy
import functools
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, record_function

from monograph.compat import parse_no_events, quiet_profiler, record_cpu_kernels
from monograph.device import clock, compiler_obstacle, describe, measured_matmul_flops, synchronize
from monograph.engine import Engine
from monograph.errors import DiskFull, InputRefused, UsageError
from monograph.graph.matmul import mkl_is_slow, onednn
from monograph.loss import Batch
from monograph.model.llama import Llama
from monograph.predict.roofline import measured_memory_bytes_per_s
from monograph.profiling import trace
from monograph.profiling.bottleneck import Machine, Situation, Verdict, verdict
from monograph.profiling.intervals import Kernel, Operands, Part, unwatched
from monograph.storage.reading import is_folder

# Operands of this many bytes in all take turns, so that they are not in the caches.
COLD_BYTES = 2**26
# Seconds in bf16 over seconds in fp32, without an optimizer's products. On a CPU, compiled code
# converts each number twice (docs/profile.md); other devices compute with 16-bit numbers as they
# are.
BF16_ON_CPU: Mapping[Part, float] = {"attention": 0.65, "elementwise": 1.1, "optimizer": 1.7}
BF16: Mapping[Part, float] = {"elementwise": 0.5, "optimizer": 1.0}
KINDS = 12  # this many shapes of products are timed in bf16: those that take longest
ROUNDS = 3  # rounds of timing a product; the quickest counts


def machine_of(engine: Engine) -> Machine:
    """Return the rates of the engine's device in the engine's dtype."""
    device, dtype = engine.step.device, engine.step.precision.dtype
    # A card's from its datasheet, as only the host's is measured here.
    known = describe(device).bandwidth_bytes_per_s
    return Machine(measured_matmul_flops(device, dtype), known or measured_memory_bytes_per_s())


def situation_of(
    engine: Engine, kernels: Sequence[Kernel], micro_steps: int, used: float, packed: float
) -> Situation:
    """Return how the engine is set up, and the ratio of its products' time in bf16 to that in fp32."""
    step, device = engine.step, engine.step.device
    narrow: dict[Part, float] = {}
    # An eager step casts its weights in each micro-step, which costs about as much as bf16 saves.
    if step.precision.name == "fp32" and step.scope != "none" and describe(device).has_bf16:
        products = _in_bf16(device, kernels)
        narrow = {"matmul": products, "loss head": products, "attention": products}
        narrow |= BF16_ON_CPU if device.type == "cpu" else BF16
    can_compile = device.type == "cuda" or compiler_obstacle() is None
    return Situation(step.scope != "none", can_compile, micro_steps, narrow, used, packed)


def _in_bf16(device: torch.device, kernels: Sequence[Kernel]) -> float:
    """Return the seconds in bf16 over those in fp32 for the run's longest products, outside the
    caches.
    """
    taken: defaultdict[Operands, list[float]] = defaultdict(list)
    for kernel in kernels:
        if kernel.part in ("matmul", "loss head") and kernel.operands and kernel.flops:
            taken[kernel.operands].append(kernel.seconds)
    dearest = sorted(taken, key=lambda kind: -sum(taken[kind]))[:KINDS]
    wide, narrow = (
        sum(len(taken[kind]) * _product_s(device, dtype, kind) for kind in dearest)
        for dtype in (torch.float32, torch.bfloat16)
    )
    return narrow / wide if wide else 1.0


def _product_s(device: torch.device, dtype: torch.dtype, operands: Operands) -> float:
    """Return the seconds of one product: the mean of the quickest of a few rounds over several
    operands.
    """
    sizes = [
        1 + sum((side - 1) * stride for side, stride in zip(*operand, strict=True))
        for operand in operands
    ]
    count = min(64, max(2, COLD_BYTES // (sum(sizes) * dtype.itemsize)))
    pairs = list(zip(sizes, operands, strict=True))
    ones = functools.partial(torch.ones, device=device, dtype=dtype)
    given = [[ones(size).as_strided(*operand) for size, operand in pairs] for _ in range(count)]
    # Multiply as a captured step does.
    by_onednn = (
        device.type == "cpu"
        and dtype == torch.float32
        and len(operands[0][0]) == 2
        and mkl_is_slow()
    )
    multiply = onednn if by_onednn else torch.matmul
    times = []
    for _ in range(ROUNDS):
        began = clock()
        for left, right in given:
            multiply(left, right)
        synchronize(device)
        times.append((clock() - began) / count)
    return min(times)


UPDATES, WARM = 3, 2  # updates of a profile, and updates before anything is measured
# Operators in a round, and rounds, with which the profiler's cost per event is measured.
EVENTS, ROUNDS = 1000, 3
# Updates are profiled up to WATCHES times, until one takes less than UNDISTURBED times its
# unprofiled time.
WATCHES, UNDISTURBED = 3, 1.1
MEASURED = 9  # unprofiled updates; their lower quartile counts
NEEDED = WARM + MEASURED + 1 + UPDATES
_ALLOCATES = ("empty", "new_empty", "resize_", "set_")


@dataclass(frozen=True)
class Profile:
    """The result of profiling a few updates.

    Attributes:
        update_s: seconds of an unprofiled update, the lower quartile of a few.
        watched_s: seconds of an update under the profiler.
        updates: the number of profiled updates.
        micro_steps: the number of micro-steps of an update.
        machine: the measured rates of the device.
        verdict: the verdict on one update, whose seconds add up to `update_s`.
        trace: the file with the Chrome trace.
    """

    update_s: float
    watched_s: float
    updates: int
    micro_steps: int
    machine: Machine
    verdict: Verdict
    trace: Path


def profile(
    engine: Engine,
    windows: Iterable[Batch],
    file: str | Path,
    *,
    packed: float = 1.0,
    used: float = 1.0,
) -> Profile:
    """Train a few updates, some of them profiled, and report where their time goes.

    Args:
        engine: ready to train, and captured if wanted; its weights and counters change as in any
            training.
        windows: at least `NEEDED` windows of rows.
        file: the Chrome trace to write, `*.json`.
        used: share of the rows' positions that hold tokens.
        packed: that share with the rows packed.

    Raises:
        UsageError: the engine or the windows are of another kind, or the windows end too early.
        InputRefused: the trace's folder does not exist.
        DiskFull: the trace could not be written.
    """
    file = Path(file)
    if not is_folder(file.parent):
        raise InputRefused(f"{file.parent}: no such folder for the trace; make it, or name another")
    quiet_profiler()
    windows = iter(windows)
    first = _next(windows)
    if not isinstance(engine, Engine) or not isinstance(first, Mapping):
        raise UsageError(
            f"profile({type(engine).__name__}, windows of {type(first).__name__}): expected a mono.Resident, which "
            "splits windows itself, and windows that are one mapping of names to tensors [rows, ...] each"
        )
    rows, *of_row = next(iter(first.values())).shape
    micro = engine.micro_batch or rows
    _each(engine, chain([first], windows), WARM)
    times = sorted(_each(engine, windows, MEASURED))
    measured = times[len(times) // 4]
    watched, watched_s = _watched(engine, windows, measured.whole_s)
    events = _exported(watched, file)
    of_head = _head_rows(engine, micro * math.prod(of_row))
    timeline = trace.read(events, has_kernel, of_head, isinstance(engine.model, Llama))
    overlaps = engine.step.device.type != "cpu"
    unwatched_spent = unwatched(
        timeline, _event_s(), measured.whole_s, measured.optimizer_s, overlaps
    )
    machine = machine_of(engine)
    steps = -(-rows // micro)
    situation = situation_of(engine, timeline.kernels, steps, used, packed)
    judged = verdict(unwatched_spent, timeline.kernels, machine, situation)
    return Profile(measured.whole_s, watched_s, UPDATES, steps, machine, judged, file)


class _Times(NamedTuple):
    """The seconds of a whole update, and of the optimizer in it."""

    whole_s: float
    optimizer_s: float


def _watched(
    engine: Engine, windows: Iterator[Batch], update_s: float
) -> tuple[torch.profiler.profile, float]:
    """Profile some updates a few times; return the profile that disturbed least, and the seconds of
    an update in it.

    The profiler's own memory can make the allocator return an eager update's memory to the system
    and fetch it again page by page, which takes long.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (
        engine.step.device.type == "cuda"
    )
    tries: list[tuple[torch.profiler.profile, float]] = []
    for _ in range(WATCHES):
        watching = torch.profiler.profile(
            activities=activities, record_shapes=True, acc_events=True
        )
        try:
            with record_cpu_kernels(), watching, _spans(engine):
                parse_no_events(watching)
                _update(engine, _next(windows))  # the first profiled one takes longer
                times = _each(engine, windows, UPDATES)
            tries.append((watching, sum(step.whole_s for step in times) / UPDATES))
        except UsageError:  # no more windows
            if not tries:
                raise
            break
        if tries[-1][1] < UNDISTURBED * update_s:
            break
    return min(tries, key=lambda step: step[1])


def _exported(watched: torch.profiler.profile, file: Path) -> dict[str, Any]:
    """Write the trace, and return it.

    Torch writes it to a temporary file first, as torch neither reports a failed write nor escapes
    the file's name.
    """
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "trace.json")
        watched.export_chrome_trace(str(plain))
        try:
            trace: dict[str, Any] = json.loads(plain.read_text()) | {"traceName": str(file)}
            file.write_text(json.dumps(trace))
        except (OSError, ValueError):
            file.unlink(missing_ok=True)
            raise DiskFull(
                f"{file}: the trace could not be written whole; free some space, or name another folder"
            ) from None
    return trace


def _each(engine: Engine, windows: Iterator[Batch], count: int) -> list[_Times]:
    """Run `count` updates, and return the seconds of each."""
    times = []
    for _ in range(count):
        began = clock()
        with record_function(trace.STEP):
            with record_function(trace.DATA):
                window = _next(windows)
            optimizer_s = _update(engine, window)
        times.append(_Times(clock() - began, optimizer_s))
    return times


def _update(engine: Engine, window: Batch) -> float:
    """Run an update, and return the seconds from the optimizer's beginning to the end."""
    engine.accumulate(window)
    began = clock()
    with record_function(trace.UPDATE):
        engine.update()
    synchronize(engine.step.device)
    return clock() - began


def _next(windows: Iterator[Batch]) -> Batch:
    if (window := next(windows, None)) is None:
        raise UsageError(
            f"too few windows: a profile takes {NEEDED} updates; give more text, or more epochs"
        )
    return window


@contextmanager
def _spans(engine: Engine) -> Iterator[None]:
    """In the block, give the loss's head its own span, where the step calls the head as a function.

    In one graph of the whole step there is no such call.
    """
    step = engine.step
    head: Callable[..., Any] | None = getattr(step.loss, "head", None)
    if head is None or step.scope == "whole":
        yield
        return
    kept = step.loss
    spanned = copy.copy(step.loss)

    @functools.wraps(head)
    def watched(*arguments: object, **keywords: object) -> Any:
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
    """Return whether an operator computes something itself instead of making a view, allocating or
    calling others.
    """
    room, _, operator = name.rpartition("::")
    packet = (
        getattr(getattr(torch.ops, room, None), operator, None) if room.isidentifier() else None
    )
    if packet is None or name == trace.ADDED or operator.startswith(_ALLOCATES):
        return False
    overload = getattr(packet, packet.overloads()[0])
    if overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return False
    returns = overload._schema.returns
    return not returns or not all(
        value.alias_info and not value.alias_info.is_write for value in returns
    )


def _head_rows(engine: Engine, tokens: int) -> int | None:
    """Return the size of the vocabulary if a side of this length identifies the head's products,
    else None.

    This is needed in one graph of a whole step of a Llama, which has no spans. Another side may be
    as long: one of a weight, or the `tokens` of a micro-step.
    """
    if not isinstance(engine.model, Llama) or engine.step.scope != "whole":
        return None
    others = {engine.model.config.hidden_size, tokens}
    for name, parameter in engine.model.named_parameters():
        if not name.endswith(("lm_head.weight", "embed_tokens.weight")):
            others |= {*parameter.shape}
    rows = engine.model.config.vocab_size
    return None if rows in others else rows


def _event_s() -> float:
    """Return the profiler's seconds per recorded operator.

    Many tiny operators are run with and without the profiler; the quickest round of each counts.
    """
    one = torch.zeros(1)
    times = dict[bool, list[float]]({False: [], True: []})
    for watched in (False, True) * ROUNDS:
        watching = torch.profiler.profile(
            activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True
        )
        with watching if watched else nullcontext():
            if watched:
                parse_no_events(watching)
            torch.neg(one)
            began = clock()
            for _ in range(EVENTS):
                torch.neg(one)
            times[watched].append(clock() - began)
    return max(0.0, min(times[True]) - min(times[False])) / EVENTS
