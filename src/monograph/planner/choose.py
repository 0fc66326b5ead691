"""Which micro-batch, recomputation, compile scope and precision a run gets, and why each other combination lost.

The search is in closed form; the winner's memory is then traced (`measure.footprint`), and where the trace finds that
it does not fit after all, the next one's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from monograph.device import Device
from monograph.errors import UsageError
from monograph.measure.calibration import Calibration
from monograph.measure.estimate import estimate_bytes
from monograph.measure.flops import flops_per_token, mfu
from monograph.measure.footprint import Compile, Footprint, Work, footprint
from monograph.measure.quantities import gibibytes
from monograph.measure.roofline import update_time
from monograph.model.config import LlamaConfig
from monograph.optim import AdamW, Optimizer

# Of a card's memory, what tensors may have: the rest is lost between them. The context is outside of the allocator.
FILLED, CONTEXT_BYTES = 0.97, 600 * 2**20
# Of a host's free memory: the process has libraries and text to hold, and is not alone.
FILLED_HOST = 0.5
# The closed form has been seen to be wrong by so much: nearer to the limit than this a candidate is traced.
DOUBT = 2.0
MOST_TRACES = 4
Ways = tuple[str, Compile, str | float]  # precision, compile scope, recomputation


@dataclass(frozen=True)
class Asked:
    """What is to be trained, and what of the way is given.

    Attributes:
        config: the model's shape.
        length: tokens of a row.
        tokens_per_update: what no choice changes.
        optim: the optimizer.
        optimizer: its name; it decides the bytes of its state.
        micro_batch: rows, None if the plan chooses.
        precisions: what may be chosen, best first; likewise the rest.
        scopes: of "whole", "blocks" and "none".
        remats: of "none", "pointwise", shares, "full" and "offload".
        packed: whether rows hold several documents.
        clip: the largest norm of the gradient.
    """

    config: LlamaConfig
    length: int
    tokens_per_update: int
    optim: Optimizer = field(default_factory=AdamW)
    optimizer: str = "adamw"
    micro_batch: int | None = None
    precisions: tuple[str, ...] = ("fp32",)
    scopes: tuple[Compile, ...] = ("whole", "blocks", "none")
    remats: tuple[str | float, ...] = ("none", "pointwise", "full")
    packed: bool = True
    clip: float | None = 1.0

    @property
    def rows(self) -> int:
        """Rows of an update."""
        return max(1, self.tokens_per_update // self.length)


@dataclass(frozen=True)
class Candidate:
    """One way to train, and what is expected of it.

    Attributes:
        work: micro-batch, precision, compile scope and recomputation.
        peak_memory_bytes: predicted.
        update_s: seconds of an update, predicted.
        tokens_per_s: likewise.
        mfu: of the datasheet's rate, None on a device without one.
        by_origin: the peak in parts, where it was traced.
        why: it was not chosen; empty for the one that was.
    """

    work: Work
    peak_memory_bytes: int
    update_s: float
    tokens_per_s: float
    mfu: float | None
    by_origin: Mapping[str, int] | None = None
    why: str = ""


@dataclass(frozen=True)
class Plan:
    """A choice.

    Attributes:
        device: what it is for.
        budget_bytes: what tensors may take there.
        chosen: None if nothing fits.
        candidates: all, the chosen one or else the nearest first.
        calibrated: whether their times are as earlier runs on the device took them.
    """

    device: Device
    budget_bytes: int
    chosen: Candidate | None
    candidates: list[Candidate]
    calibrated: bool = False

    @property
    def nearest(self) -> Candidate:
        """The chosen one, or the one that misses by least."""
        return self.candidates[0]

    @property
    def refusal(self) -> str:
        """One line: what would fit if there were more memory, and how much more."""
        best, short = self.nearest, self.nearest.peak_memory_bytes - self.budget_bytes
        return (
            f"nothing fits {gibibytes(self.budget_bytes)} of {self.device.name}: the nearest, {described(best.work)}, "
            f"needs {gibibytes(best.peak_memory_bytes)}, {gibibytes(short)} more; use a smaller model or "
            "sequence_length, or a device with more memory"
        )


def budget(device: Device) -> int:
    """Bytes that tensors may take.

    Raises:
        UsageError: the device has none to give.
    """
    free = device.free_memory_bytes
    found = int(FILLED * (free - CONTEXT_BYTES) if device.type == "cuda" else FILLED_HOST * free)
    if found <= 0:
        raise UsageError(f"{gibibytes(free)} of memory leaves nothing for tensors: give more, such as 24GiB")
    return found


def plan(asked: Asked, device: Device, peak_flops: Mapping[str, float], calibration: Calibration | None = None) -> Plan:
    """The fastest combination that fits, numerics as asked.

    Args:
        asked: what is to be trained.
        device: where.
        peak_flops: FLOP/s by precision: the datasheet's, or of a CPU measured ones.
        calibration: what earlier runs on the device took.

    Raises:
        UsageError: the device has no memory to give.
    """
    limit = budget(device)
    known = {each: calibration.slowness(device, each) for each in asked.precisions} if calibration else {}
    slowness = {precision: ratio for precision, ratio in known.items() if ratio}
    corrections: dict[Ways, float] = {}
    for attempt in range(MOST_TRACES):
        found = [
            each
            for policy in _ways(asked)
            for each in _of_policy(asked, policy, device, limit, corrections.get(policy, 1.0), peak_flops, slowness)
        ]
        fitting = [each for each in found if each.peak_memory_bytes <= limit]
        last = attempt == MOST_TRACES - 1  # if what seemed to fit did not, so often, then what needs the least
        best = min(fitting, key=lambda each: each.update_s) if fitting and not last else min(found, key=_memory)
        if fitting and best.peak_memory_bytes * DOUBT <= limit:
            break
        truth = footprint(best.work)
        key = best.work.precision, best.work.compile, best.work.remat
        corrections[key] = truth.peak_bytes / _closed_form(asked, best.work)
        if last or (truth.peak_bytes <= limit) == bool(fitting):
            best = _traced(found, best, truth)
            break
    chosen = best if best.peak_memory_bytes <= limit else None
    rest = sorted((each for each in found if each is not best), key=lambda each: each.update_s)
    first = replace(best, why="" if chosen else _too_large(best, limit))
    others = [replace(each, why=_why(each, best, limit)) for each in rest]
    return Plan(device, limit, chosen and first, [first, *others], best.work.precision in slowness)


def _ways(asked: Asked) -> list[Ways]:
    """All combinations, but with something recomputed only in smaller graphs if there is a choice.

    In what order one graph of the whole step then computes is not predicted well; offloading crosses between graphs.
    """
    every = itertools.product(asked.precisions, asked.scopes, asked.remats)
    in_whole = {"none"} if len(asked.scopes) > 1 else {*asked.remats} - {"offload"}
    return [way for way in every if way[1] != "whole" or way[2] in in_whole]


_RECOMPUTED = {
    "none": "nothing recomputed",
    "pointwise": "all but products recomputed",
    "full": "blocks recomputed",
    "offload": "blocks recomputed from inputs on the host",
}


def described(work: Work) -> str:
    """A combination in words."""
    graph = {"whole": "the step in one graph", "blocks": "a graph per block", "none": "no graph"}[work.compile]
    recomputed = _RECOMPUTED.get(str(work.remat)) or f"recomputed but for {work.remat:.0%} of the activations"
    return f"micro-batches of {work.rows}, {work.precision}, {graph}, {recomputed}"


def _of_policy(
    asked: Asked,
    policy: Ways,
    device: Device,
    limit: int,
    correction: float,
    peaks: Mapping[str, float],
    slowness: Mapping[str, float],
) -> list[Candidate]:
    """The largest micro-batch that fits and the next larger one, or the smallest if none fits."""
    sizes = [size for size in range(1, asked.rows + 1) if asked.rows % size == 0]
    if asked.micro_batch is not None:
        sizes = [min(asked.micro_batch, asked.rows)]
    works = [_work(asked, policy, size, device) for size in sizes]
    needed = [int(correction * _closed_form(asked, work)) for work in works]
    fits = sum(each <= limit for each in needed)
    shown = range(max(0, fits - 1), min(len(works), fits + 1))
    times = slowness.get(policy[0], 1.0)
    return [_timed(works[index], needed[index], device, peaks, times) for index in shown]


def _work(asked: Asked, policy: Ways, rows: int, device: Device) -> Work:
    precision, scope, remat = policy
    return Work(
        asked.config, rows, asked.length, asked.optim, precision, scope, remat, asked.rows, asked.packed, asked.clip,
        device.type,
    )  # fmt: skip


def _closed_form(asked: Asked, work: Work) -> int:
    return estimate_bytes(work, asked.optimizer, asked.optim.ema is not None)


def _timed(work: Work, needed: int, device: Device, peaks: Mapping[str, float], slowness: float) -> Candidate:
    seconds = slowness * update_time(work, device, peaks[work.precision]).total_s
    rate = work.window_rows * work.length / seconds
    datasheet = device.peak_flops.get(work.precision)
    share = mfu(rate, flops_per_token(work.config, work.length), datasheet) if datasheet else None
    return Candidate(work, needed, seconds, rate, share)


def _traced(found: list[Candidate], best: Candidate, truth: Footprint) -> Candidate:
    traced = replace(best, peak_memory_bytes=truth.peak_bytes, by_origin=truth.by_origin)
    found[found.index(best)] = traced
    return traced


def _memory(candidate: Candidate) -> int:
    return candidate.peak_memory_bytes


def _why(candidate: Candidate, best: Candidate, limit: int) -> str:
    if candidate.peak_memory_bytes > limit:
        return _too_large(candidate, limit)
    slower = candidate.update_s / best.update_s - 1
    return "no faster" if slower < 0.005 else f"{slower:.0%} slower"


def _too_large(candidate: Candidate, limit: int) -> str:
    return f"{gibibytes(candidate.peak_memory_bytes - limit)} too large"
