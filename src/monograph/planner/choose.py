"""Choose micro-batch, recomputation, compile scope and precision of a run, and say why each other combination lost.

The search uses a closed form (`planner.candidates`). Then the winner's memory is traced (`predict.footprint`), and if
it does not fit, that of the next candidate. If nothing fits, the plan shows the candidate that needs least.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

from monograph.device import Device
from monograph.errors import OutOfDeviceMemory, UsageError
from monograph.planner.candidates import ByDtype, Candidate, Request, Ways, closed_form, described, of_way, ways
from monograph.planner.streaming import Limits, streamed
from monograph.predict.footprint import Work, footprint
from monograph.predict.roofline import Calibration
from monograph.report.quantities import gibibytes

# The share of a card's memory that tensors may take, as gaps between them take some; and the bytes of the CUDA context.
FILLED, CONTEXT_BYTES = 0.97, 600 * 2**20
# The share of a host's free memory that tensors may take: the process also holds libraries and text, and other
# programs run.
FILLED_HOST = 0.5
# The closed form has been wrong by this factor, so a candidate closer to the limit is traced.
DOUBT = 2.0
MOST_TRACES = 4
# An untraced candidate that may need less than the best traced one, but by less than this factor, is not traced.
NEAR = 1.01


@dataclass(frozen=True)
class Plan:
    """A choice among the candidates.

    Attributes:
        device: the device that it is for.
        budget_bytes: bytes that tensors may take there.
        chosen: the choice; None if nothing fits.
        candidates: all candidates; the first is the chosen one, or else the one that comes nearest.
        calibrated: whether times are corrected by those of earlier runs on the device.
        not_streamed: why streaming does not fit either; empty where it was not tried.
    """

    device: Device
    budget_bytes: int
    chosen: Candidate | None
    candidates: list[Candidate]
    calibrated: bool = False
    not_streamed: str = ""

    @property
    def nearest(self) -> Candidate:
        """Return the chosen candidate, or the one that exceeds the memory by least."""
        return self.candidates[0]

    @property
    def refusal(self) -> str:
        """Return one line that says which way comes nearest, and how much more memory it needs."""
        if not self.candidates:
            return self.not_streamed
        best, short = self.nearest, self.nearest.peak_memory_bytes - self.budget_bytes
        return (
            f"nothing fits {gibibytes(self.budget_bytes)} of {self.device.name}: the nearest, {described(best.work)}, "
            f"needs {gibibytes(best.peak_memory_bytes)}, {gibibytes(short)} more; use a smaller model or "
            "sequence_length, or a device with more memory"
            f"{'; train.memory = stream: ' if self.not_streamed else ''}{self.not_streamed}"
        )


def budget(device: Device) -> int:
    """Return the bytes that tensors may take on a device.

    Raises:
        UsageError: the device has no memory left.
    """
    free = device.free_memory_bytes
    usable = int(FILLED * (free - CONTEXT_BYTES) if device.type == "cuda" else FILLED_HOST * free)
    if usable <= 0:
        raise UsageError(f"{gibibytes(free)} of memory leaves nothing for tensors: give more, such as 24GiB")
    return usable


def plan(request: Request, device: Device, peak_flops: ByDtype, calibration: Calibration | None = None) -> Plan:
    """Return the fastest combination that fits and has the numerics asked for.

    Args:
        request: the training, and the choices that are open.
        device: the device to train on.
        peak_flops: FLOP/s by precision, from the datasheet, or measured for a CPU.
        calibration: time and memory of earlier runs on the device.

    Raises:
        UsageError: the device has no memory left.
    """
    limit = budget(device)
    known = {name: calibration.slowness(device, name) for name in request.precisions} if calibration else {}
    slowness = {precision: ratio for precision, ratio in known.items() if ratio}
    corrections: dict[Ways, float] = {}
    traced: dict[Work, Candidate] = {}

    def candidates(limit: int) -> list[Candidate]:
        each_way = (
            of_way(request, way, device, limit, corrections.get(way, 1.0), peak_flops, slowness)
            for way in ways(request)
        )
        return [traced.get(candidate.work, candidate) for of_one in each_way for candidate in of_one]

    while True:
        tried = candidates(limit)
        if len(traced) == MOST_TRACES:
            best = _wanted([*traced.values()], traced, limit)
            break
        best = _wanted(tried, traced, limit)
        if best.work in traced or best.peak_memory_bytes * DOUBT <= limit:
            break
        if len(traced) == MOST_TRACES - 1:  # the last trace is for the smallest micro-batch that needs least
            smallest = sorted(candidates(0), key=lambda candidate: closed_form(request, candidate.work))
            best = next((candidate for candidate in smallest if candidate.work not in traced), best)
        by_origin = footprint(best.work).by_origin
        residual = calibration.residual(device, best.work, by_origin) if calibration else 0
        truth = traced[best.work] = best.of_trace(by_origin, residual)
        way = best.work.precision, best.work.compile, best.work.remat
        corrections[way] = truth.peak_memory_bytes / closed_form(request, best.work)
    fits = best.peak_memory_bytes <= limit
    rest = sorted((one for one in tried if one.work != best.work), key=attrgetter("update_s"))
    first = replace(best, why="" if fits else _too_large(best, limit))
    others = [replace(candidate, why=_why(candidate, best, limit)) for candidate in rest]
    return Plan(device, limit, first if fits else None, [first, *others], best.work.precision in slowness)


def _wanted(tried: list[Candidate], traced: Mapping[Work, Candidate], limit: int) -> Candidate:
    """Return the fastest candidate that fits.

    If none fits, return the one that needs least, or the best traced one if that needs hardly more.
    """
    if fitting := [candidate for candidate in tried if candidate.peak_memory_bytes <= limit]:
        return min(fitting, key=lambda candidate: candidate.update_s)
    memory = attrgetter("peak_memory_bytes")
    least = min(tried, key=memory)
    near_bytes = NEAR * least.peak_memory_bytes
    near = [candidate for candidate in traced.values() if candidate.peak_memory_bytes <= near_bytes]
    return min(near, key=memory, default=least)


def _why(candidate: Candidate, best: Candidate, limit: int) -> str:
    if candidate.peak_memory_bytes > limit:
        return _too_large(candidate, limit)
    slower = candidate.update_s / best.update_s - 1
    if slower < -0.005:
        return "not certain to fit"
    return "no faster" if slower < 0.005 else f"{slower:.0%} slower"


def _too_large(candidate: Candidate, limit: int) -> str:
    return f"{gibibytes(candidate.peak_memory_bytes - limit)} too large"


def streamed_or_resident(
    request: Request,
    device: Device,
    peak_flops: ByDtype,
    calibration: Calibration | None = None,
    memory: Literal["auto", "device", "stream"] = "auto",
    limits: Limits | None = None,
) -> Plan:
    """Return the fastest way that fits, with the weights on the device or streamed to it.

    Args:
        request: the training, and the choices that are open.
        device: the device to train on.
        peak_flops: FLOP/s by precision.
        calibration: time and memory of earlier runs on the device; it does not cover streamed runs.
        memory: where weights may live; with "auto" they are streamed only if nothing else fits.
        limits: memory, disk and link for streaming; by default this machine's.

    Raises:
        UsageError: the device has no memory left.
    """
    streams = memory == "stream"
    resident = Plan(device, budget(device), None, []) if streams else plan(request, device, peak_flops, calibration)
    resident_only = request.scopes == ("whole",) or request.remats == ("offload",) or request.lora is not None
    if memory == "device" or resident.chosen or resident_only:
        return resident
    try:
        ways = streamed(request, device, limits or Limits.here(device, resident.budget_bytes), peak_flops)
    except OutOfDeviceMemory as refused:
        return replace(resident, not_streamed=str(refused))
    return replace(resident, chosen=ways[0], candidates=[*ways, *resident.candidates], calibrated=False)
