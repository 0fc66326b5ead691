"""Search the ways to stream a model, given the memory of device and host, a disk, and the rates of
copies.
"""

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from monograph.device import Device, compiler_obstacle, describe
from monograph.errors import OutOfDeviceMemory
from monograph.optim import formats
from monograph.planner.candidates import ByDtype, Candidate, Request, slower, speed
from monograph.planner.placement_bytes import Names, Stages, StreamWay, Tiers, stages_of
from monograph.planner.stream_time import closed_form, timing
from monograph.predict import roofline
from monograph.predict.footprint import Compile
from monograph.predict.roofline import CPU_BYTES_PER_S, LINK_BYTES_PER_S, LINK_SHARE
from monograph.report.quantities import gibibytes
from monograph.storage.reading import free_bytes
from monograph.stream import Placement
from monograph.stream.clock import Link
from monograph.stream.placement import When, Where
from monograph.stream.store import GRADIENT, REST, WEIGHTS

# The shares of a host's free memory for pinned buffers, and of a disk's free space for files.
HOST_SHARE, DISK_SHARE = 0.9, 0.95
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
        folder: the folder for files; None for the system's folder for temporary files.
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
        rate = (
            CPU_BYTES_PER_S
            if device.type == "cpu"
            else LINK_SHARE * (device.link_bytes_per_s or LINK_BYTES_PER_S)
        )
        link = Link(rate, rate, DISK_BYTES_PER_S)
        host_bytes = int(HOST_SHARE * host.free_memory_bytes)
        disk_bytes = int(DISK_SHARE * disk)
        return cls(device_bytes, host_bytes, disk_bytes, link, None, device.type == "cpu", folder)


BLOCKS_PER_STAGE = 1, 2, 4
# The clock times this many distinct candidates for updates on the device, and as many for those on
# the host.
TIMED = 3
LANES = {
    "compute": "computing",
    "in": "link to the device",
    "out": "link to the host",
    "host": "host",
    "disk": "disk",
}


@dataclass(frozen=True)
class StreamCandidate(Candidate):
    """One way to stream, with its predicted memory and speed.

    Attributes:
        placement: the place of each buffer, the blocks of a stage, and when weights are updated.
        tiers: bytes by origin for the device, the host and the disk.
        bottleneck: the lane that is busy for longest, in words; None if the clock did not time the
            candidate.
        disk_moved_bytes: bytes to and from files in an update.
    """

    placement: Placement = field(default_factory=Placement)
    tiers: Tiers = field(default_factory=dict)
    bottleneck: str | None = None
    disk_moved_bytes: int = 0

    def total(self, tier: str) -> int:
        """Return the bytes of a tier."""
        return sum(self.tiers[tier].values())

    @property
    def device_share(self) -> float:
        """Return the share of all weights, gradients and moments that stays on the device."""
        planes = {
            tier: sum(v for k, v in of.items() if k in _PLANES) for tier, of in self.tiers.items()
        }
        return planes["device"] / max(1, sum(planes.values()))


_PLANES = ("weights", "gradients", "moments")


def streamed(
    request: Request, device: Device, limits: Limits, peak_flops: ByDtype
) -> list[StreamCandidate]:
    """Return the ways to stream that fit, best first; all but the first say why they were not
    chosen.

    Raises:
        OutOfDeviceMemory: nothing fits; the message says which memory is too small, by how much,
            and what would fit.
    """
    if not (fitting := _fitting(request, device, limits)):
        raise OutOfDeviceMemory(_refusal(request, device, limits))
    candidates = [
        _candidate(way, resident, device, limits, peak_flops) for way, resident in fitting
    ]
    candidates.sort(key=lambda candidate: (candidate.update_s, candidate.peak_memory_bytes))
    distinct = _distinct(candidates)
    seen = Counter[Where]()
    for index, candidate in enumerate(distinct):
        seen[candidate.placement.where] += 1
        if seen[candidate.placement.where] <= TIMED:
            distinct[index] = _timed(candidate, device, limits, peak_flops)
    # Candidates timed by the clock come first, as a closed form is never longer than its time.
    best, *others = sorted(
        distinct, key=lambda candidate: (candidate.bottleneck is None, candidate.update_s)
    )
    return [best, *(replace(candidate, why=_why(candidate, best)) for candidate in others)]


# ── the search ──────────────────────────────────────────────────────────────────────────────────

Fitting = list[tuple[StreamWay, list[Names]]]


def _fitting(request: Request, device: Device, limits: Limits) -> Fitting:
    """Return all ways that fit, with their resident buffers; moments lie in files only if nothing
    fits otherwise.
    """
    every = list(ways(request, device))
    fitting = _that_fit(every, limits)
    for files_first in (True, False):
        if fitting or not limits.disk_bytes:
            break
        in_files = [
            replace(way, on_disk=_moments(way.stages), files_first=files_first) for way in every
        ]
        fitting = _that_fit(in_files, limits)
    return fitting


def _that_fit(every: Sequence[StreamWay], limits: Limits) -> Fitting:
    # If device and host share one memory, nothing is gained by keeping a buffer on the device.
    filled = [
        (way, way.resident(0) if limits.shared else way.filled(limits.device_bytes))
        for way in every
    ]
    return [(way, resident) for way, resident in filled if not _short(way.tiers(resident), limits)]


def ways(request: Request, device: Device) -> Iterator[StreamWay]:
    """Yield all combinations; those that update weights in the backward pass only without clipping."""
    layers = request.training.config.num_hidden_layers
    sizes = request.micro_batches
    scope: Compile = "none" if request.scopes == ("none",) else "blocks"
    remats = [remat_of for remat_of in request.remats if remat_of != "offload"] or ["none"]
    whens: list[When] = ["next forward", "sweep"]
    if request.training.clip is None:
        whens.append("backward")
    updates: list[tuple[When, Where]] = [(when, "device") for when in whens]
    # On the host a sweep equals updating before the next forward pass, and only an update element
    # by element of exact moments is limited by the memory's speed there.
    captured = scope != "none" and compiler_obstacle() is None
    light = (
        formats.FORMATS[request.training.optim.state].exact
        and not request.training.optim.updates_matrices
    )
    if device.type != "cpu" and captured and light:
        updates += [(when, "host") for when in whens if when != "sweep"]
    for precision, per_stage in itertools.product(request.precisions, BLOCKS_PER_STAGE):
        if layers % per_stage:
            continue
        stages = stages_of(request.training.config, request.training.optim, precision, per_stage)
        for rows, remat, (when, where), offload in itertools.product(
            sizes, remats, updates, (False, True)
        ):
            yield StreamWay(
                request.work((precision, scope, remat), rows, device),
                stages,
                per_stage,
                when,
                offload,
                where,
            )


def _moments(stages: Stages) -> Names:
    return frozenset(stages.names) - {WEIGHTS, REST, GRADIENT}


def _short(tiers: Tiers, limits: Limits) -> dict[str, int]:
    """Return by how many bytes each tier is too small."""
    needed = {tier: sum(of.values()) for tier, of in tiers.items()}
    if limits.shared:
        needed["host"] += needed["device"]
    given = {"device": limits.device_bytes, "host": limits.host_bytes, "disk": limits.disk_bytes}
    return {tier: needed[tier] - given[tier] for tier in needed if needed[tier] > given[tier]}


# ── time ────────────────────────────────────────────────────────────────────────────────────────


def _candidate(
    way: StreamWay, resident: Sequence[Names], device: Device, limits: Limits, peak_flops: ByDtype
) -> StreamCandidate:
    """Return the candidate of a way, with its time in closed form."""
    tiers = way.tiers(resident)
    times = roofline.pass_times(way.work, device, peak_flops[way.work.precision], limits.host_rate)
    seconds = closed_form(way, resident, times, limits.link)
    return StreamCandidate(
        way.work,
        sum(tiers["device"].values()),
        seconds,
        *speed(way.work, seconds, device),
        tiers["device"],
        placement=way.placement(resident),
        tiers=tiers,
        disk_moved_bytes=2 * sum(tiers["disk"].values()),
    )


def _timed(
    candidate: StreamCandidate, device: Device, limits: Limits, peak_flops: ByDtype
) -> StreamCandidate:
    """Return the candidate with its time by the clock."""
    work = candidate.work
    times = roofline.pass_times(work, device, peak_flops[work.precision], limits.host_rate)
    timed = timing(work, candidate.placement, times, limits.link)
    rate, share = speed(work, timed.update_s, device)
    return replace(
        candidate,
        update_s=timed.update_s,
        tokens_per_s=rate,
        mfu=share,
        bottleneck=LANES[timed.bottleneck],
    )


# ── choice and messages ─────────────────────────────────────────────────────────────────────────


def _distinct(candidates: Sequence[StreamCandidate]) -> list[StreamCandidate]:
    """Return the first of each group of candidates that differ only in their micro-batch and
    recomputation.
    """
    first: dict[tuple[object, ...], StreamCandidate] = {}
    for candidate in candidates:
        place = candidate.placement
        key = (
            candidate.work.precision,
            place.when,
            place.where,
            place.offload,
            place.blocks_per_stage,
        )
        first.setdefault(key, candidate)
    return list(first.values())


def _why(candidate: StreamCandidate, best: StreamCandidate) -> str:
    ratio = candidate.update_s / best.update_s
    if ratio < 1.005 and not candidate.bottleneck:
        return "no faster than others by the closed form"
    return slower(ratio)


def _refusal(request: Request, device: Device, limits: Limits) -> str:
    every = [(way, way.tiers(way.filled(limits.device_bytes))) for way in ways(request, device)]
    least = min((tiers for _, tiers in every), key=lambda tiers: sum(tiers["device"].values()))
    if "device" in _short(least, limits):
        parts = ", ".join(
            f"{name} {gibibytes(size)}" for name, size in least["device"].items() if size
        )
        needed = sum(least["device"].values())
        of_tokens = sum(
            least["device"][name] for name in ("boundaries", "activations", "workspace")
        )
        remedy = "model, or a device with more memory: its stages alone are too large"
        if needed - of_tokens < limits.device_bytes:
            remedy = "train.tokens_per_update, data.sequence_length or model"
        return (
            f"nothing fits {gibibytes(limits.device_bytes)} of {device.name}: streamed stage by stage it needs "
            f"{gibibytes(needed)} ({parts}); use a smaller {remedy}"
        )
    held = [(way, tiers) for way, tiers in every if "device" not in _short(tiers, limits)]
    way, least = min(held, key=lambda pair: sum(pair[1]["host"].values()))
    there = dict(least["host"])
    computing = sum(least["device"].values())
    if limits.shared:
        there["computing"] = computing
    parts = ", ".join(f"{name} {gibibytes(size)}" for name, size in there.items() if size)
    in_addition = "" if limits.shared else f" next to {gibibytes(computing)} of {device.name}"
    moments = there.get("moments", 0)
    folder = limits.folder or tempfile.gettempdir()
    files = f"with the moments in files it would be {gibibytes(sum(there.values()) - moments)}, still too much"
    if moments > limits.disk_bytes:
        files = (
            f"in files moments need {gibibytes(moments)} of disk, and {gibibytes(limits.disk_bytes)} may be taken in "
            f"{folder}"
        )
    return (
        f"nothing fits: streamed, the host needs {gibibytes(sum(there.values()))} ({parts}){in_addition}, and "
        f"{gibibytes(limits.host_bytes)} of it may be taken; {_remedy(request, device, limits)}; {files}"
    )


def _remedy(request: Request, device: Device, limits: Limits) -> str:
    """Return a sentence on what would fit: an optimizer state of fewer bytes, or fewer tokens in an
    update.
    """
    narrow = formats.narrower(request.training.optim.state)
    fewer_rows = sorted({max(1, request.rows // 4), 1} - {request.rows}, reverse=True)
    for tokens in (
        request.tokens_per_update,
        *(request.training.length * rows for rows in fewer_rows),
    ):
        for state in (
            narrow
            if tokens == request.tokens_per_update
            else [request.training.optim.state, *narrow]
        ):
            other = request.of_tokens(tokens, request.training.length)
            optim = replace(request.training.optim, state=state)
            other = other.having(replace(other.training, optim=optim))
            if _fitting(other, device, replace(limits, disk_bytes=0)):
                fewer = (
                    ""
                    if tokens == request.tokens_per_update
                    else f"train.tokens_per_update = {tokens:,}"
                )
                narrower = "" if state == request.training.optim.state else f"optim.state = {state}"
                return " and ".join(filter(None, (narrower, fewer))) + " would fit"
    if not narrow:
        return "no smaller train.tokens_per_update would fit"
    return f"neither optim.state = {narrow[-1]} nor a smaller train.tokens_per_update would fit"


def describe_way(candidate: StreamCandidate) -> str:
    """Return in words how many blocks a stage has, and when and where stages are updated."""
    placement = candidate.placement
    blocks = (
        f"{placement.blocks_per_stage} block{'s' if placement.blocks_per_stage > 1 else ''} a stage"
    )
    words = {
        "sweep": "in a sweep",
        "next forward": "before the next forward pass",
        "backward": "in the backward pass",
    }
    when = words[placement.when]
    where = "on the host " if placement.where == "host" else ""
    return (
        f"{blocks}, updated {where}{when}{', boundaries on the host' if placement.offload else ''}"
    )


def describe_tiers(candidate: StreamCandidate) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for the bytes on the host, for those in files, and for the way."""
    for tier in ("host", "disk"):
        if parts := candidate.tiers[tier]:
            amounts = ", ".join(f"{name} {gibibytes(size)}" for name, size in parts.items())
            moved = (
                f"; {gibibytes(candidate.disk_moved_bytes)} an update to and fro"
                if tier == "disk"
                else ""
            )
            yield tier, f"{gibibytes(candidate.total(tier))}: {amounts}{moved}"
    limit = f"; limited by {candidate.bottleneck}" if candidate.bottleneck else ""
    yield (
        "stream",
        f"{describe_way(candidate)}; {candidate.device_share:.0%} stay on the device{limit}",
    )
