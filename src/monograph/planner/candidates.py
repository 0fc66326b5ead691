"""List the ways in which a run could be trained, with the memory and time of each in closed form."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from monograph.device import Device
from monograph.predict.estimate import estimate_bytes, trained_adapters
from monograph.predict.footprint import Compile, Work
from monograph.predict.roofline import flops_per_token, mfu, update_time

ByDtype = Mapping[str, float]  # numbers by the name of a precision
Ways = tuple[str, Compile, str | float]  # precision, compile scope, recomputation


@dataclass(frozen=True)
class Request:
    """A request for a plan: the training, and the choices that are open.

    Attributes:
        training: what no choice changes, with all rows of an update at once; a way replaces the
            rest of it.
        micro_batch: rows of a micro-batch; None if the plan chooses.
        precisions: the choices, best first.
        scopes: choices among "whole", "blocks" and "none", best first.
        remats: choices among "none", "pointwise", shares, "full" and "offload", best first.
    """

    training: Work
    micro_batch: int | None = None
    precisions: tuple[str, ...] = ("fp32",)
    scopes: tuple[Compile, ...] = ("whole", "blocks", "none")
    remats: tuple[str | float, ...] = ("none", "pointwise", "full")

    @property
    def rows(self) -> int:
        """Return the rows of an update."""
        return self.training.window_rows

    @property
    def tokens_per_update(self) -> int:
        """Return the tokens of an update, which no choice changes."""
        return self.rows * self.training.length

    @property
    def micro_batches(self) -> list[int]:
        """Return the possible rows of a micro-batch: the number asked for, or all that divide the
        rows of an update.
        """
        if self.micro_batch is not None:
            return [min(self.micro_batch, self.rows)]
        small = [size for size in range(1, math.isqrt(self.rows) + 1) if self.rows % size == 0]
        return sorted({*small, *(self.rows // size for size in small)})

    def having(self, training: Work) -> "Request":
        """Return the request for another training, with the same choices open."""
        return replace(self, training=training)

    def of_tokens(self, tokens_per_update: int, length: int) -> "Request":
        """Return the request for updates of so many tokens, in whole rows of `length` and in one
        row at least.
        """
        rows = max(1, tokens_per_update // length)
        return self.having(replace(self.training, rows=rows, window_rows=rows, length=length))

    def work(self, way: Ways, rows: int, device: Device) -> Work:
        """Return one way to train with micro-batches of `rows`."""
        precision, scope, remat = way
        return replace(
            self.training,
            rows=rows,
            precision=precision,
            compile=scope,
            remat=remat,
            device_type=device.type,
        )


@dataclass(frozen=True)
class Candidate:
    """One way to train, with its predicted memory and speed.

    Attributes:
        work: micro-batch, precision, compile scope and recomputation.
        peak_memory_bytes: predicted bytes at the peak.
        update_s: predicted seconds of an update.
        tokens_per_s: predicted tokens per second.
        mfu: share of the datasheet's FLOP/s; None on a device without a datasheet.
        by_origin: bytes at the peak by origin; None if it was not traced.
        residual_bytes: the part of the workspace that earlier runs on the device took beyond their
            traces.
        why: why it was not chosen; empty for the chosen one.
    """

    work: Work
    peak_memory_bytes: int
    update_s: float
    tokens_per_s: float
    mfu: float | None
    by_origin: Mapping[str, int] | None = None
    residual_bytes: int = 0
    why: str = ""

    @property
    def traced(self) -> Mapping[str, int] | None:
        """Return `by_origin` as it was traced, without the residual bytes."""
        if not (self.by_origin and self.residual_bytes):
            return self.by_origin
        return {**self.by_origin, "workspace": self.by_origin["workspace"] - self.residual_bytes}

    def of_trace(self, by_origin: Mapping[str, int], residual_bytes: int) -> "Candidate":
        """Return the candidate with the traced memory `by_origin`, and `residual_bytes` added to
        its workspace.
        """
        if residual_bytes:
            by_origin = {**by_origin, "workspace": by_origin["workspace"] + residual_bytes}
        needed = sum(by_origin.values())
        return replace(
            self, peak_memory_bytes=needed, by_origin=by_origin, residual_bytes=residual_bytes
        )


def ways(request: Request) -> list[Ways]:
    """Return all combinations, except recomputation in one graph of the whole step if there is a
    choice of scopes.

    The order in which such a graph computes is hard to predict. Offloading is impossible in it, as
    it happens between graphs.
    """
    every = itertools.product(request.precisions, request.scopes, request.remats)
    in_whole = {"none"} if len(request.scopes) > 1 else {*request.remats} - {"offload"}
    return [way for way in every if way[1] != "whole" or way[2] in in_whole]


_RECOMPUTED = {
    "none": "nothing recomputed",
    "pointwise": "all but products recomputed",
    "full": "blocks recomputed",
    "offload": "blocks recomputed, inputs on the host",
}


def described(work: Work) -> str:
    """Describe a combination in words."""
    graph = {"whole": "the step in one graph", "blocks": "a graph per block", "none": "no graph"}[
        work.compile
    ]
    recomputed = (
        _RECOMPUTED.get(str(work.remat))
        or f"recomputed but for {work.remat:.0%} of the activations"
    )
    return f"micro-batches of {work.rows}, {work.precision}, {graph}, {recomputed}"


def of_way(
    request: Request,
    way: Ways,
    device: Device,
    limit: int,
    correction: float,
    peaks: ByDtype,
    slowness: ByDtype,
) -> list[Candidate]:
    """Return candidates for one combination: the largest micro-batch that fits and the next larger
    one.

    If none fits, it is the smallest micro-batch.

    Args:
        request: the request.
        way: the combination.
        device: the device that it is for.
        limit: bytes that tensors may take there.
        correction: ratio of this combination's traced peak to its closed form; 1 if it was not
            traced.
        peaks: FLOP/s by precision.
        slowness: ratio of measured to predicted time by precision, where earlier runs measured one.
    """
    works = [request.work(way, size, device) for size in request.micro_batches]
    needed = [int(correction * estimate_bytes(work)) for work in works]
    fits = sum(bytes_needed <= limit for bytes_needed in needed)
    shown = range(max(0, fits - 1), min(len(works), fits + 1))
    return [
        _timed(works[index], needed[index], device, peaks, slowness.get(way[0], 1.0))
        for index in shown
    ]


def _timed(work: Work, needed: int, device: Device, peaks: ByDtype, slowness: float) -> Candidate:
    seconds = slowness * update_time(work, device, peaks[work.precision]).total_s
    return Candidate(work, needed, seconds, *speed(work, seconds, device))


def slower(ratio: float) -> str:
    """Return in words how long a way takes, by the ratio to the best one's time: 1.21 -> "21%
    slower".
    """
    if ratio < 1.005:
        return "no faster"
    return f"{ratio - 1:.0%} slower" if ratio < 1.995 else f"takes {ratio:.1f}x as long"


def speed(work: Work, update_s: float, device: Device) -> tuple[float, float | None]:
    """Return tokens per second, and the share of the datasheet's FLOP/s; None on a device without a
    datasheet.
    """
    rate = work.window_rows * work.length / update_s
    datasheet = device.peak_flops.get(work.precision)
    flops = flops_per_token(work.config, work.length, trained_adapters(work))
    return rate, mfu(rate, flops, datasheet) if datasheet else None
