"""Run a few updates under torch's profiler, and say where their time went, how short it could be
and what to change.

`profile` runs some updates to warm up, times updates without the profiler, profiles a few more,
reads their trace (`monograph.profiling.trace`), and finds the bottleneck
(`monograph.profiling.bottleneck`). For that it needs the device's rates (`machine_of`), which are
measured on products and copies, except for the bandwidth of a card.
"""

import copy
import functools
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from monograph.graph.compilable import has_head
from monograph.graph.matmul import mkl_is_slow, onednn
from monograph.loss import Batch
from monograph.model.llama import Llama
from monograph.predict.roofline import measured_memory_bytes_per_s
from monograph.profiling import trace
from monograph.profiling.bottleneck import Machine, Situation, Verdict, verdict
from monograph.profiling.intervals import Kernel, Operands, Part, estimate_update
from monograph.step import parts
from monograph.storage.reading import is_folder

# A product is timed with several pairs of operands in turn. Together they have this number of bytes, so
# that the operands of a call are not in the caches.
COLD_BYTES = 2**26
# Seconds in bf16 / seconds in fp32, by part. The ratio of the optimizer is for its elementwise work; its
# products have the ratio of other products. On a CPU, compiled code converts each number to fp32 and back
# (docs/profile.md). Other devices compute with 16-bit numbers directly.
BF16_RATIOS_ON_CPU: Mapping[Part, float] = {"attention": 0.65, "elementwise": 1.1, "optimizer": 1.7}
BF16_RATIOS_ELSEWHERE: Mapping[Part, float] = {"elementwise": 0.5, "optimizer": 1.0}
# How many shapes of products are timed in bf16: those that take the most time.
TIMED_SHAPES = 12
WARMUP_UPDATES = 2  # updates before anything is measured
PROFILED_UPDATES = 3
# Updates are profiled up to MAX_ATTEMPTS times, until they take less than MAX_SLOWDOWN times their
# unprofiled time.
MAX_ATTEMPTS = 3
MAX_SLOWDOWN = 1.1
TIMED_UPDATES = 9  # without the profiler; the lower quartile of their times counts
# The fewest windows that `profile` needs, one for each update. The 1 is an update that is profiled but not
# timed.
MIN_WINDOWS = WARMUP_UPDATES + TIMED_UPDATES + 1 + PROFILED_UPDATES
# The number of operators in a round that measures the profiler's cost per event.
EVENTS_PER_ROUND = 1000
# The number of rounds of a measurement; the quickest round counts.
ROUNDS = 3
# The beginnings of the names of operators that only allocate memory.
_ALLOCATING = ("empty", "new_empty", "resize_", "set_")


def machine_of(engine: Engine) -> Machine:
    """Return the rates of the engine's device in the engine's dtype."""
    device = engine.step.device
    # The bandwidth of a card is taken from its datasheet; only that of the host is measured.
    datasheet_rate = describe(device).bandwidth_bytes_per_s
    return Machine(
        matmul_flops=measured_matmul_flops(device, engine.step.precision.dtype),
        copy_bytes_per_s=datasheet_rate or measured_memory_bytes_per_s(),
    )


def situation_of(
    engine: Engine, kernels: Sequence[Kernel], micro_steps: int, used: float, packed: float
) -> Situation:
    """Return how the engine is set up.

    Args:
        engine: the engine.
        kernels: its profiled kernels; the longest products are timed again in bf16.
        micro_steps: the number of micro-batches of an update.
        used: the share of positions that hold tokens.
        packed: the share of positions that would hold tokens if rows were packed.
    """
    step = engine.step
    device = step.device
    captured = step.scope != "none"
    bf16_ratios: dict[Part, float] = {}  # seconds in bf16 / seconds in fp32
    # bf16 does not help an eager step: casting the weights in each micro-batch takes about as long
    # as bf16 saves.
    if step.precision.name == "fp32" and captured and describe(device).has_bf16:
        product_ratio = _bf16_ratio(device, kernels)
        bf16_ratios = dict.fromkeys(("matmul", "loss head", "attention"), product_ratio)
        bf16_ratios |= BF16_RATIOS_ON_CPU if device.type == "cpu" else BF16_RATIOS_ELSEWHERE
    return Situation(
        captured=captured,
        can_compile=device.type == "cuda" or compiler_obstacle() is None,
        micro_steps=micro_steps,
        bf16=bf16_ratios,
        used=used,
        packed=packed,
    )


def _bf16_ratio(device: torch.device, kernels: Sequence[Kernel]) -> float:
    """Return the seconds in bf16 / the seconds in fp32 of the products that take the most time."""
    # For each pair of operands (their shapes and strides), the seconds of each profiled product.
    seconds: defaultdict[Operands, list[float]] = defaultdict(list)
    for kernel in kernels:
        if kernel.part in ("matmul", "loss head") and kernel.operands and kernel.flops:
            seconds[kernel.operands].append(kernel.seconds)
    longest = sorted(seconds, key=lambda operands: -sum(seconds[operands]))[:TIMED_SHAPES]

    def total_s(dtype: torch.dtype) -> float:
        """Return the seconds of as many products as were profiled, in this dtype."""
        return sum(
            len(seconds[operands]) * _product_s(device, dtype, operands) for operands in longest
        )

    fp32_s = total_s(torch.float32)
    bf16_s = total_s(torch.bfloat16)
    return bf16_s / fp32_s if fp32_s else 1.0


def _product_s(device: torch.device, dtype: torch.dtype, operands: Operands) -> float:
    """Time one product, with operands that are not in the caches."""
    # The extent of each operand: the number of elements from its first to its last one in memory.
    extents = [
        1 + sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True))
        for shape, strides in operands
    ]
    count = COLD_BYTES // (sum(extents) * dtype.itemsize)
    count = min(64, max(2, count))
    pairs = []
    for _ in range(count):
        pair = [
            torch.ones(size, device=device, dtype=dtype).as_strided(shape, strides)
            for size, (shape, strides) in zip(extents, operands, strict=True)
        ]
        pairs.append(pair)
    # A captured step multiplies fp32 matrices with oneDNN on a CPU on which MKL is slow.
    first_shape, _ = operands[0]
    is_fp32_on_cpu = device.type == "cpu" and dtype == torch.float32
    by_onednn = is_fp32_on_cpu and len(first_shape) == 2 and mkl_is_slow()
    multiply = onednn if by_onednn else torch.matmul
    times = []
    for _ in range(ROUNDS):
        began = clock()
        for left, right in pairs:
            multiply(left, right)
        synchronize(device)
        times.append((clock() - began) / count)
    return min(times)


@dataclass(frozen=True)
class Profile:
    """The result of profiling a few updates.

    Attributes:
        update_s: seconds of an unprofiled update, the lower quartile of a few.
        profiled_s: seconds of a profiled update, on average.
        updates: the number of profiled updates.
        micro_steps: the number of micro-batches of an update.
        machine: the measured rates of the device.
        verdict: the bottleneck of an unprofiled update, with seconds that add up to `update_s`.
        trace: the file with the Chrome trace.
    """

    update_s: float
    profiled_s: float
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
        engine: the engine, captured or not; its weights and counters change as in any training.
        windows: the rows of at least `MIN_WINDOWS` updates, one window for each.
        file: the Chrome trace to write, `*.json`.
        packed: the share of positions that would hold tokens if rows were packed.
        used: the share of positions that hold tokens.

    Raises:
        UsageError: the engine or the windows have another type, or there are too few windows.
        InputRefused: the trace's folder does not exist.
        DiskFull: the trace could not be written.
    """
    file = Path(file)
    if not is_folder(file.parent):
        raise InputRefused(f"{file.parent}: no such folder for the trace; make it, or name another")
    quiet_profiler()
    windows = iter(windows)
    first = _next_window(windows)
    # An engine whose stages are updated in turn does not time the parts of an update.
    is_timed = isinstance(engine, Engine) and not engine.step.parameters.staged
    if not is_timed or not isinstance(first, Mapping):
        raise UsageError(
            f"profile({type(engine).__name__}, windows of {type(first).__name__}): expected a mono.Resident, which "
            "splits windows itself, and windows that are one mapping of names to tensors [rows, ...] each"
        )
    rows, *row_shape = next(iter(first.values())).shape
    micro_batch = engine.micro_batch or rows
    micro_steps = math.ceil(rows / micro_batch)
    _time_updates(engine, chain([first], windows), WARMUP_UPDATES)
    times = sorted(_time_updates(engine, windows, TIMED_UPDATES))  # by the whole update's seconds
    measured = times[len(times) // 4]  # the lower quartile
    profiler, profiled_s = _profile_updates(engine, windows, measured.update_s)
    timeline = trace.read_trace(
        _export_trace(profiler, file),
        has_kernel,
        vocabulary=_identifying_vocabulary(engine, micro_batch * math.prod(row_shape)),
        heads_are_batched=isinstance(engine.model, Llama),
    )
    spent = estimate_update(
        timeline,
        event_s=_event_s(),
        update_s=measured.update_s,
        optimizer_s=measured.optimizer_s,
        overlaps=engine.step.device.type != "cpu",
    )
    machine = machine_of(engine)
    situation = situation_of(engine, timeline.kernels, micro_steps, used=used, packed=packed)
    return Profile(
        update_s=measured.update_s,
        profiled_s=profiled_s,
        updates=PROFILED_UPDATES,
        micro_steps=micro_steps,
        machine=machine,
        verdict=verdict(spent, timeline.kernels, machine, situation),
        trace=file,
    )


class _Times(NamedTuple):
    """The seconds of an update.

    Attributes:
        update_s: seconds of the whole update.
        optimizer_s: seconds of the optimizer in it.
    """

    update_s: float
    optimizer_s: float


def _profile_updates(
    engine: Engine, windows: Iterator[Batch], update_s: float
) -> tuple[torch.profiler.profile, float]:
    """Profile PROFILED_UPDATES updates, and do so again if the profiler slows them down much.

    The memory that the profiler itself takes can make the allocator return an eager update's memory to the
    system, and get it back page by page, which takes long.

    Args:
        engine: the engine.
        windows: the rows of updates. If they run out after the first attempt, there is no other attempt.
        update_s: seconds of an unprofiled update.

    Returns:
        The profiler under which updates took the shortest time, and this time in seconds.
    """
    activities = [ProfilerActivity.CPU]
    if engine.step.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    attempts: list[tuple[torch.profiler.profile, float]] = []
    for _ in range(MAX_ATTEMPTS):
        profiler = torch.profiler.profile(
            activities=activities, record_shapes=True, acc_events=True
        )
        try:
            with record_cpu_kernels(), profiler, _head_span(engine):
                parse_no_events(profiler)  # only the exported trace is needed
                # The first update under a profiler takes longer, so it is not timed.
                _update(engine, _next_window(windows))
                times = _time_updates(engine, windows, PROFILED_UPDATES)
        except UsageError:  # there are no more windows
            if not attempts:
                raise
            break
        profiled_s = sum(update.update_s for update in times) / PROFILED_UPDATES
        attempts.append((profiler, profiled_s))
        if profiled_s < MAX_SLOWDOWN * update_s:
            break
    return min(attempts, key=lambda attempt: attempt[1])  # by `profiled_s`


def _export_trace(profiler: torch.profiler.profile, file: Path) -> dict[str, Any]:
    """Write a profiler's trace, and return its content.

    Torch writes it to a temporary file first, because torch neither reports a failed write nor
    escapes the file's name.
    """
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(temporary))
        try:
            content: dict[str, Any] = json.loads(temporary.read_text())
            content["traceName"] = str(file)  # torch has written the temporary file's name
            file.write_text(json.dumps(content))
        except (OSError, ValueError):
            file.unlink(missing_ok=True)
            raise DiskFull(
                f"{file}: the trace could not be written whole; free some space, or name another folder"
            ) from None
    return content


def _time_updates(engine: Engine, windows: Iterator[Batch], count: int) -> list[_Times]:
    """Run `count` updates, and return the seconds of each."""
    times = []
    for _ in range(count):
        began = clock()
        with record_function(trace.STEP):
            with record_function(trace.DATA):
                window = _next_window(windows)
            optimizer_s = _update(engine, window)
        times.append(_Times(clock() - began, optimizer_s))
    return times


def _update(engine: Engine, window: Batch) -> float:
    """Run an update, and return the seconds of the optimizer in it."""
    engine.accumulate(window)
    with record_function(trace.UPDATE):
        update = engine.update()
    synchronize(engine.step.device)
    return parts.seconds(update.marks)[f"{parts.OPTIMIZER}_s"]


def _next_window(windows: Iterator[Batch]) -> Batch:
    """Return the rows of the next update; raises UsageError if there are none."""
    window = next(windows, None)
    if window is None:
        raise UsageError(
            f"too few windows: a profile takes {MIN_WINDOWS} updates; give more text, or more epochs"
        )
    return window


@contextmanager
def _head_span(engine: Engine) -> Iterator[None]:
    """Within the block, record a span around each call of the loss's head.

    If the whole step is one graph, it has no such call, and nothing is recorded.
    """
    step = engine.step
    original_loss = step.loss
    if not has_head(original_loss) or step.scope == "whole":
        yield
        return
    head = original_loss.head
    loss_with_span = copy.copy(original_loss)

    @functools.wraps(head)
    def head_in_span(*arguments: object, **keywords: object) -> Any:
        with record_function(trace.HEAD):
            return head(*arguments, **keywords)

    loss_with_span.head = head_in_span
    step.loss = loss_with_span
    try:
        yield
    finally:
        step.loss = original_loss


@functools.cache
def has_kernel(name: str) -> bool:
    """Return whether an operator computes something itself.

    Operators that make a view, allocate, or only call other operators do not.
    """
    namespace, _, operator = name.rpartition("::")
    packet = None  # torch's object for an operator with all its overloads
    if namespace.isidentifier():
        packet = getattr(getattr(torch.ops, namespace, None), operator, None)
    if packet is None or name in trace.PRODUCT_CALLERS or operator.startswith(_ALLOCATING):
        return False
    overload = getattr(packet, packet.overloads()[0])
    # Operators with a kernel for this key only call other operators.
    composite_key = torch._C.DispatchKey.CompositeImplicitAutograd
    if overload.has_kernel_for_dispatch_key(composite_key):
        return False
    returns = overload._schema.returns
    # All results of a view are aliases of an input that is not written.
    is_view = bool(returns) and all(
        value.alias_info and not value.alias_info.is_write for value in returns
    )
    return not is_view


def _identifying_vocabulary(engine: Engine, tokens: int) -> int | None:
    """Return the size of the vocabulary, if it identifies the products of a Llama's head.

    This is needed if the whole step is one graph, in which no spans are recorded.

    Args:
        engine: the engine.
        tokens: the number of tokens in a micro-batch.

    Returns:
        The size; None if another side of a product has it as well, or if it is not needed.
    """
    if not isinstance(engine.model, Llama) or engine.step.scope != "whole":
        return None
    other_sides = {engine.model.config.hidden_size, tokens}
    for name, parameter in engine.model.named_parameters():
        if not name.endswith(("lm_head.weight", "embed_tokens.weight")):
            other_sides |= {*parameter.shape}
    vocabulary = engine.model.config.vocab_size
    return None if vocabulary in other_sides else vocabulary


def _event_s() -> float:
    """Measure the profiler's seconds per recorded operator.

    Many tiny operators run with the profiler and without it. The quickest round of each kind counts.
    """
    one = torch.zeros(1)
    # The seconds of rounds, by whether the profiler ran.
    times = dict[bool, list[float]]({False: [], True: []})
    for profiled in (False, True) * ROUNDS:
        profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True
        )
        with profiler if profiled else nullcontext():
            if profiled:
                parse_no_events(profiler)
            # The first operator under a profiler takes longer.
            torch.neg(one)
            began = clock()
            for _ in range(EVENTS_PER_ROUND):
                torch.neg(one)
            times[profiled].append(clock() - began)
    return max(0.0, min(times[True]) - min(times[False])) / EVENTS_PER_ROUND
