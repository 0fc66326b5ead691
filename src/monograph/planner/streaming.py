"""Search the ways to stream a model, given the memory of device and host, a disk, and the rates of
copies.

A streamed model's weights live on the host and come to the device in stages. The words (stage, slot,
resident, boundary) are those of `planner.placement_bytes`, which counts bytes. `planner.stream_time`
predicts times: in closed form for all ways, and by a clock, which simulates the engine, for a few.
"""

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from monograph.device import Device, compiler_obstacle, describe
from monograph.errors import OutOfDeviceMemory
from monograph.optim import formats
from monograph.planner.candidates import (
    ByPrecision,
    Candidate,
    PlanRequest,
    Way,
    slower_text,
    speed,
)
from monograph.planner.placement_bytes import BufferNames, Stages, StreamWay, Tiers, stages_of
from monograph.planner.stream_time import clock_timing, closed_form_seconds
from monograph.predict import roofline
from monograph.predict.footprint import Compile, Work
from monograph.predict.roofline import CPU_BYTES_PER_S, LINK_BYTES_PER_S, LINK_SHARE
from monograph.report.quantities import gibibytes
from monograph.storage.reading import free_bytes
from monograph.stream import Placement
from monograph.stream.clock import Link
from monograph.stream.frozen import FROZEN
from monograph.stream.placement import When, Where
from monograph.stream.store import GRADIENT, REST, WEIGHTS

HOST_SHARE = 0.9  # of a host's free memory, for pinned buffers
DISK_SHARE = 0.95  # of a disk's free space, for files
DISK_BYTES_PER_S = 2e9  # a solid-state disk's rate; no disk was measured


@dataclass(frozen=True)
class Limits:
    """The memory, the disk and the link that streaming may use.

    Attributes:
        device_bytes: bytes that tensors may take on the device.
        host_bytes: bytes that buffers may take in the host's memory.
        disk_bytes: bytes that files may take in the folder.
        link: the rates of copies.
        host_bytes_per_s: rate of the host's memory; if None, it is measured on first use.
        shared: whether device and host share one memory of `host_bytes`.
        folder: the folder for files; None: the system's folder for temporary files.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int = 0
    link: Link = field(
        default_factory=lambda: Link(LINK_SHARE * LINK_BYTES_PER_S, LINK_SHARE * LINK_BYTES_PER_S)
    )
    host_bytes_per_s: float | None = CPU_BYTES_PER_S
    shared: bool = False
    folder: Path | None = None

    @cached_property
    def host_rate(self) -> float:
        """Return the bytes/s of the host's memory."""
        return self.host_bytes_per_s or roofline.measured_memory_bytes_per_s()

    @classmethod
    def here(cls, device: Device, device_bytes: int, folder: Path | None = None) -> "Limits":
        """Return the limits of this machine, with `device_bytes` on the device."""
        host = describe(torch.device("cpu"))
        disk = free_bytes(folder or Path(tempfile.gettempdir()))
        if device.type == "cpu":
            rate = CPU_BYTES_PER_S
        else:
            rate = LINK_SHARE * (device.link_bytes_per_s or LINK_BYTES_PER_S)
        return cls(
            device_bytes,
            host_bytes=int(HOST_SHARE * host.free_memory_bytes),
            disk_bytes=int(DISK_SHARE * disk),
            link=Link(into=rate, out=rate, disk=DISK_BYTES_PER_S),
            host_bytes_per_s=None,
            shared=device.type == "cpu",
            folder=folder,
        )


BLOCKS_PER_STAGE = 1, 2, 4  # the numbers of blocks in a stage that are tried
# The clock times this many distinct candidates that update on the device, and as many that update
# on the host.
MAX_TIMED = 3
# The best candidates are traced one after another until one fits, but at most this many.
MAX_TRACES = 4
# The clock's lanes in words. A lane is something that does one thing at a time: the device, a link in
# one direction, the host, the disk.
LANES = {
    "compute": "computing",
    "in": "link to the device",
    "out": "link to the host",
    "host": "host",
    "disk": "disk",
}


# The origins of planes' bytes.
_PLANE_ORIGINS = ("weights", "gradients", "moments")


@dataclass(frozen=True)
class StreamCandidate(Candidate):
    """One way to stream, with its predicted memory and speed.

    Attributes:
        placement: the place of each buffer, the blocks of a stage, and when weights are updated.
        tiers: bytes by origin for the device, the host and the disk.
        bottleneck: the lane that is busy for longest, in words; None if the clock has not timed this
            candidate, so that its time is predicted in closed form.
        disk_moved_bytes: bytes to and from files in an update.
    """

    placement: Placement = field(default_factory=Placement)
    tiers: Tiers = field(default_factory=dict)
    bottleneck: str | None = None
    disk_moved_bytes: int = 0

    def total(self, tier: str) -> int:
        """Return the bytes of a tier: "device", "host" or "disk"."""
        return sum(self.tiers[tier].values())

    @property
    def device_share(self) -> float:
        """Return the share of all weights, gradients and moments that stays on the device."""
        plane_bytes = {
            tier: sum(by_origin.get(origin, 0) for origin in _PLANE_ORIGINS)
            for tier, by_origin in self.tiers.items()
        }
        return plane_bytes["device"] / max(1, sum(plane_bytes.values()))


def can_stream(training: Work) -> bool:
    """Return whether the weights of a training can be streamed.

    Streaming rounds no weights, and has no stage for a head for multi-token prediction. It runs each block
    twice, which must drop the same inputs of adapters, and hands on one tensor from block to block.
    """
    drops_inputs = training.lora is not None and training.lora.dropout > 0
    has_head = training.config.mtp_num_hidden_layers > 0
    is_possible = training.config.is_chain and not has_head
    return is_possible and training.quantize == "none" and not drops_inputs


def stream_candidates(
    request: PlanRequest, device: Device, limits: Limits, peak_flops: ByPrecision
) -> list[StreamCandidate]:
    """Return the ways to stream that fit, best first. All but the first have a reason why they were
    not chosen (`why`).

    Args:
        request: the training, and the choices that are open.
        device: the device to train on.
        limits: memory, disk and link.
        peak_flops: FLOP/s by precision.

    Raises:
        OutOfDeviceMemory: nothing fits; the message says which memory is too small, by how much,
            and what would fit.
    """
    fitting = _fitting_ways(request, device, limits)
    if not fitting:
        raise OutOfDeviceMemory(_refusal(request, device, limits))
    candidates = [
        _candidate(way, resident, device, limits, peak_flops) for way, resident in fitting
    ]
    # The way of each candidate, which `_with_trace` needs again.
    way_of = {(way.work, way.placement(resident)): way for way, resident in fitting}
    candidates.sort(key=lambda candidate: (candidate.update_s, candidate.peak_memory_bytes))
    distinct = _distinct(candidates)
    timed_count = Counter[Where]()
    for index, candidate in enumerate(distinct):
        where = candidate.placement.where
        if timed_count[where] < MAX_TIMED:
            timed_count[where] += 1
            distinct[index] = _time_by_clock(candidate, device, limits, peak_flops)
    ranked = sorted(distinct, key=_rank)
    best: StreamCandidate | None = None
    slower: list[StreamCandidate] = []
    too_large: list[StreamCandidate] = []
    for rank, candidate in enumerate(ranked):
        # Tracing only takes resident buffers away, so no candidate gets faster by it, and the rest
        # cannot be better than the best.
        if rank == MAX_TRACES or (best and best.update_s <= candidate.update_s):
            slower += ranked[rank:]
            break
        traced = _with_trace(
            way_of[candidate.work, candidate.placement], candidate, device, limits, peak_flops
        )
        if traced is None:
            too_large.append(replace(candidate, why="too large by its trace"))
        elif best is None:
            best = traced
        elif traced.update_s < best.update_s:
            slower.append(best)
            best = traced
        else:
            slower.append(traced)
    if best is None:
        raise OutOfDeviceMemory(_refusal(request, device, limits))
    slower = [
        replace(candidate, why=_why(candidate, best)) for candidate in sorted(slower, key=_rank)
    ]
    return [best, *slower, *too_large]


def _rank(candidate: StreamCandidate) -> tuple[bool, float]:
    """Return the key by which candidates are sorted, best first.

    Candidates that the clock has timed come first; only they have a bottleneck. The other times cannot
    be compared with theirs, because the closed form never gives more time than the clock.
    """
    return candidate.bottleneck is None, candidate.update_s


def _with_trace(
    way: StreamWay,
    candidate: StreamCandidate,
    device: Device,
    limits: Limits,
    peak_flops: ByPrecision,
) -> StreamCandidate | None:
    """Return the candidate with the traced bytes of its passes; None if it does not fit.

    If the passes need more bytes than was estimated, fewer buffers are resident, and the update takes
    longer.
    """
    placement = candidate.placement
    tiers = way.bytes_by_tier(_resident_of(way, placement), traced=True)
    # If device and host share one memory, no buffer is resident, so there cannot be fewer.
    if not limits.shared and "device" in _exceeded_tiers(tiers, limits):
        resident = way.resident_within(limits.device_bytes, traced=True)
        placement = way.placement(resident)
        tiers = way.bytes_by_tier(resident, traced=True)
    if _exceeded_tiers(tiers, limits):
        return None
    traced = replace(
        candidate,
        peak_memory_bytes=sum(tiers["device"].values()),
        by_origin=tiers["device"],
        placement=placement,
        tiers=tiers,
        disk_moved_bytes=_disk_moved_bytes(tiers),
    )
    if placement == candidate.placement:
        return traced
    return _time_by_clock(traced, device, limits, peak_flops)


def _resident_of(way: StreamWay, placement: Placement) -> list[BufferNames]:
    """Return the names of each stage's buffers that stay on the device."""
    return [
        frozenset(name for index, name in placement.on_device if index == stage)
        for stage in range(way.stages.count)
    ]


# ── the search ──────────────────────────────────────────────────────────────────────────────────


class FittingWay(NamedTuple):
    """A way to stream that fits the limits.

    Attributes:
        way: the way.
        resident: for each stage, the names of its buffers that stay on the device.
    """

    way: StreamWay
    resident: list[BufferNames]


def _fitting_ways(request: PlanRequest, device: Device, limits: Limits) -> list[FittingWay]:
    """Return all ways that fit. Moments are in files only if nothing fits otherwise."""
    all_ways = list(stream_ways(request, device))
    fitting = _select_fitting(all_ways, limits)
    # Adapters' moments are on the device. The frozen weights under them are not put into files, because
    # reading them twice in each update would take most of its time.
    if fitting or not limits.disk_bytes or request.training.lora:
        return fitting
    # If the moments in files are the first to become resident, an update is faster. If they are the
    # last, the host needs less memory.
    for files_first in (True, False):
        with_files = [
            replace(way, on_disk=_moments(way.stages), files_first=files_first) for way in all_ways
        ]
        fitting = _select_fitting(with_files, limits)
        if fitting:
            break
    return fitting


def _select_fitting(ways: Sequence[StreamWay], limits: Limits) -> list[FittingWay]:
    """Return the ways that fit, with as many resident buffers as the device has room for."""
    fitting = []
    for way in ways:
        if limits.shared:
            # Device and host share one memory, so a resident buffer would save nothing.
            resident = way.first_resident(0)
        else:
            resident = way.resident_within(limits.device_bytes)
        if not _exceeded_tiers(way.bytes_by_tier(resident), limits):
            fitting.append(FittingWay(way, resident))
    return fitting


def stream_ways(request: PlanRequest, device: Device) -> Iterator[StreamWay]:
    """Yield all ways to stream.

    Weights are updated in the backward pass only if gradients are not clipped, because their norm is
    not known before all gradients are.
    """
    training = request.training
    # An engine that streams never holds the whole step, so it compiles blocks. It offloads the
    # inputs of stages itself (`StreamWay.offload`).
    scope: Compile = "none" if request.scopes == ("none",) else "blocks"
    remats = [remat for remat in request.remats if remat != "offload"] or ["none"]
    update_times: list[When] = ["next forward", "sweep"]
    if training.clip is None:
        update_times.append("backward")
    if training.lora:
        # Adapters are on the device, so there is nothing to copy for their update, nor to hide.
        update_times = ["sweep"]
    times_and_places: list[tuple[When, Where]] = [(when, "device") for when in update_times]
    # The host updates weights only if the update is limited by the speed of its memory alone: in
    # compiled code, with exact moments, element by element. On the host a sweep equals "next forward".
    is_compiled = scope != "none" and compiler_obstacle() is None
    has_exact_moments = formats.FORMATS[training.optim.state].exact
    is_elementwise = not training.optim.updates_matrices
    can_update_on_host = device.type != "cpu" and training.lora is None
    if can_update_on_host and is_compiled and has_exact_moments and is_elementwise:
        times_and_places += [(when, "host") for when in update_times if when != "sweep"]
    for precision, blocks_per_stage in itertools.product(request.precisions, BLOCKS_PER_STAGE):
        if training.config.num_hidden_layers % blocks_per_stage:
            continue
        stages = stages_of(
            training.config, training.optim, precision, blocks_per_stage, training.lora
        )
        for rows, remat, (when, where), offload in itertools.product(
            request.micro_batches, remats, times_and_places, (False, True)
        ):
            yield StreamWay(
                work=request.work(Way(precision, scope, remat), rows, device),
                stages=stages,
                blocks_per_stage=blocks_per_stage,
                when=when,
                offload=offload,
                where=where,
            )


def _moments(stages: Stages) -> BufferNames:
    """Return the names of the optimizer's buffers."""
    return frozenset(stages.buffer_names) - {WEIGHTS, REST, GRADIENT, FROZEN}


def _exceeded_tiers(tiers: Tiers, limits: Limits) -> set[str]:
    """Return the tiers that are too small for these bytes."""
    needed = {tier: sum(by_origin.values()) for tier, by_origin in tiers.items()}
    if limits.shared:
        needed["host"] += needed["device"]  # they are one memory
    available = {
        "device": limits.device_bytes,
        "host": limits.host_bytes,
        "disk": limits.disk_bytes,
    }
    return {tier for tier in needed if needed[tier] > available[tier]}


# ── time ────────────────────────────────────────────────────────────────────────────────────────


def _candidate(
    way: StreamWay,
    resident: Sequence[BufferNames],
    device: Device,
    limits: Limits,
    peak_flops: ByPrecision,
) -> StreamCandidate:
    """Return the candidate of a way, with its time in closed form."""
    tiers = way.bytes_by_tier(resident)
    pass_times = roofline.pass_times(
        way.work, device, peak_flops[way.work.precision], limits.host_rate
    )
    update_s = closed_form_seconds(way, resident, pass_times, limits.link)
    tokens_per_s, mfu = speed(way.work, update_s, device)
    return StreamCandidate(
        way.work,
        peak_memory_bytes=sum(tiers["device"].values()),
        update_s=update_s,
        tokens_per_s=tokens_per_s,
        mfu=mfu,
        by_origin=tiers["device"],
        placement=way.placement(resident),
        tiers=tiers,
        disk_moved_bytes=_disk_moved_bytes(tiers),
    )


def _disk_moved_bytes(tiers: Tiers) -> int:
    """Return the bytes to and from files in an update, which reads and writes each file once."""
    return 2 * sum(tiers["disk"].values())


def _time_by_clock(
    candidate: StreamCandidate, device: Device, limits: Limits, peak_flops: ByPrecision
) -> StreamCandidate:
    """Return the candidate with its time by the clock."""
    work = candidate.work
    pass_times = roofline.pass_times(work, device, peak_flops[work.precision], limits.host_rate)
    timing = clock_timing(work, candidate.placement, pass_times, limits.link)
    tokens_per_s, mfu = speed(work, timing.update_s, device)
    return replace(
        candidate,
        update_s=timing.update_s,
        tokens_per_s=tokens_per_s,
        mfu=mfu,
        bottleneck=LANES[timing.bottleneck],
    )


# ── choice and messages ─────────────────────────────────────────────────────────────────────────


def _distinct(candidates: Sequence[StreamCandidate]) -> list[StreamCandidate]:
    """Return the first of each group of candidates that differ only in their micro-batch and
    recomputation.
    """
    first_of_group: dict[tuple[object, ...], StreamCandidate] = {}
    for candidate in candidates:
        placement = candidate.placement
        group = (
            candidate.work.precision,
            placement.when,
            placement.where,
            placement.offload,
            placement.blocks_per_stage,
        )
        first_of_group.setdefault(group, candidate)
    return list(first_of_group.values())


def _why(candidate: StreamCandidate, best: StreamCandidate) -> str:
    """Return why a candidate that may fit was not chosen."""
    ratio = candidate.update_s / best.update_s
    if ratio < 1.005 and not candidate.bottleneck:
        return "no faster than others by the closed form"
    return slower_text(ratio)


def _refusal(request: PlanRequest, device: Device, limits: Limits) -> str:
    """Return one line that says which memory is too small for every way, by how much, and what
    would fit.
    """
    tiers_of_ways = [
        way.bytes_by_tier(way.resident_within(limits.device_bytes))
        for way in stream_ways(request, device)
    ]
    smallest_on_device = min(tiers_of_ways, key=lambda tiers: sum(tiers["device"].values()))
    if "device" in _exceeded_tiers(smallest_on_device, limits):
        return _device_refusal(smallest_on_device["device"], device, limits)
    fitting_on_device = [
        tiers for tiers in tiers_of_ways if "device" not in _exceeded_tiers(tiers, limits)
    ]
    smallest_on_host = min(fitting_on_device, key=lambda tiers: sum(tiers["host"].values()))
    return _host_refusal(smallest_on_host, request, device, limits)


def _device_refusal(by_origin: Mapping[str, int], device: Device, limits: Limits) -> str:
    """Return one line that says that every way needs more memory than the device has.

    Args:
        by_origin: the bytes on the device, by origin, of the way that needs least.
        device: the device.
        limits: memory, disk and link.
    """
    needed = sum(by_origin.values())
    # These bytes grow with the tokens of an update.
    token_bytes = sum(by_origin[origin] for origin in ("boundaries", "activations", "workspace"))
    if needed - token_bytes < limits.device_bytes:
        remedy = "use a smaller train.tokens_per_update, data.sequence_length or model"
    else:
        remedy = "use a smaller model, or a device with more memory: its stages alone are too large"
    return (
        f"nothing fits {gibibytes(limits.device_bytes)} of {device.name}: streamed stage by stage it needs "
        f"{gibibytes(needed)} ({_amounts(by_origin)}); {remedy}"
    )


def _host_refusal(tiers: Tiers, request: PlanRequest, device: Device, limits: Limits) -> str:
    """Return one line that says that every way needs more memory than the host has.

    Args:
        tiers: the bytes by tier of the way that needs least on the host.
        request: the training, and the choices that are open.
        device: the device.
        limits: memory, disk and link.
    """
    host_bytes = dict(tiers["host"])
    device_bytes = sum(tiers["device"].values())
    device_text = ""
    if limits.shared:
        host_bytes["computing"] = device_bytes
    else:
        device_text = f" next to {gibibytes(device_bytes)} of {device.name}"
    needed = sum(host_bytes.values())
    too_little = (
        f"nothing fits: streamed, the host needs {gibibytes(needed)} ({_amounts(host_bytes)}){device_text}, and "
        f"{gibibytes(limits.host_bytes)} of it may be taken"
    )
    lora = request.training.lora
    if lora:
        narrower = "use a smaller model" if lora.base == "nf4" else "use lora.base = nf4"
        return f"{too_little}; {narrower}, or a host with more memory"
    moments = host_bytes.get("moments", 0)
    if moments > limits.disk_bytes:
        folder = limits.folder or tempfile.gettempdir()
        files = (
            f"in files moments need {gibibytes(moments)} of disk, and {gibibytes(limits.disk_bytes)} may be taken in "
            f"{folder}"
        )
    else:
        files = (
            f"with the moments in files it would be {gibibytes(needed - moments)}, still too much"
        )
    return f"{too_little}; {_remedy(request, device, limits)}; {files}"


def _amounts(by_origin: Mapping[str, int]) -> str:
    """Return the bytes of each origin as text: "weights 1.20 GiB, gradients ..."."""
    return ", ".join(f"{origin} {gibibytes(size)}" for origin, size in by_origin.items() if size)


def _remedy(request: PlanRequest, device: Device, limits: Limits) -> str:
    """Return a sentence on what would fit without files: an optimizer state of fewer bytes, fewer
    tokens in an update, or both.
    """
    state = request.training.optim.state
    narrower_states = formats.narrower(state)
    # A quarter of the rows, then a single one.
    fewer_rows = sorted({max(1, request.rows // 4), 1} - {request.rows}, reverse=True)
    # The changes to try: all narrower states with the given rows, then fewer rows with all states.
    changes = [(request.rows, narrower) for narrower in narrower_states]
    changes += itertools.product(fewer_rows, [state, *narrower_states])
    for rows, other_state in changes:
        tokens = request.training.length * rows
        other = request.with_tokens(tokens, request.training.length)
        optim = replace(request.training.optim, state=other_state)
        other = other.with_training(replace(other.training, optim=optim))
        if _fitting_ways(other, device, replace(limits, disk_bytes=0)):
            changed_keys = []
            if other_state != state:
                changed_keys.append(f"optim.state = {other_state}")
            if rows != request.rows:
                changed_keys.append(f"train.tokens_per_update = {tokens:,}")
            return " and ".join(changed_keys) + " would fit"
    if not narrower_states:
        return "no smaller train.tokens_per_update would fit"
    narrowest = narrower_states[-1]
    return f"neither optim.state = {narrowest} nor a smaller train.tokens_per_update would fit"


_WHEN = {
    "sweep": "in a sweep",
    "next forward": "before the next forward pass",
    "backward": "in the backward pass",
}


def describe_way(candidate: StreamCandidate) -> str:
    """Return in words how many blocks a stage has, and when and where stages are updated."""
    placement = candidate.placement
    blocks = (
        "1 block" if placement.blocks_per_stage == 1 else f"{placement.blocks_per_stage} blocks"
    )
    offloaded = ", boundaries on the host" if placement.offload else ""
    if candidate.work.lora:
        return f"{blocks} of frozen weights a stage{offloaded}"
    when = _WHEN[placement.when]
    where = "on the host " if placement.where == "host" else ""
    return f"{blocks} a stage, updated {where}{when}{offloaded}"


def describe_tiers(candidate: StreamCandidate) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for the bytes on the host, for those in files, and for the way."""
    for tier in ("host", "disk"):
        by_origin = candidate.tiers[tier]
        if not by_origin:
            continue
        amounts = ", ".join(f"{origin} {gibibytes(size)}" for origin, size in by_origin.items())
        moved = ""
        if tier == "disk":
            moved = f"; {gibibytes(candidate.disk_moved_bytes)} read and written per update"
        yield tier, f"{gibibytes(candidate.total(tier))}: {amounts}{moved}"
    limit = f"; limited by {candidate.bottleneck}" if candidate.bottleneck else ""
    yield (
        "stream",
        f"{describe_way(candidate)}; {candidate.device_share:.0%} stay on the device{limit}",
    )
