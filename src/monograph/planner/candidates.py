"""List the ways in which a run could be trained, with the memory and time of each in closed form.

The weights stay on the device here; `planner.streaming` lists the ways in which they are streamed.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from monograph.device import Device
from monograph.graph.precision import Precision
from monograph.predict.estimate import active_adapter_parameters, estimate_bytes
from monograph.predict.footprint import Compile, Work
from monograph.predict.roofline import flops_per_token, mfu, update_time

ByPrecision = Mapping[str, float]  # by the name of a precision, such as "bf16"


class Way(NamedTuple):
    """A way to train: one combination of the open choices, apart from the micro-batch.

    Attributes:
        precision: "fp32", "bf16" and so on.
        scope: "whole": the step is one compiled graph. "blocks": each block is one. "none": nothing is
            compiled.
        remat: what the backward pass recomputes. "none": nothing. "pointwise": all but the results of
            matrix products. A number from 0 to 1: all but this share of the activations. "full": each
            block, from its input. "offload": the same, with the inputs kept on the host.
    """

    precision: str
    scope: Compile
    remat: str | float


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan: the training, and the choices that are open.

    Attributes:
        training: the training, with all rows of an update in one micro-batch. The method `work` returns
            it with a micro-batch and a way filled in.
        micro_batch: rows of a micro-batch; None if the plan chooses.
        precisions: the possible values of `Way.precision`, best first.
        scopes: the possible values of `Way.scope`, best first.
        remats: the possible values of `Way.remat`, best first.
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
        """Return the possible rows of a micro-batch: the requested number, or all divisors of the
        rows of an update.
        """
        if self.micro_batch is not None:
            return [min(self.micro_batch, self.rows)]
        small_divisors = [
            size for size in range(1, math.isqrt(self.rows) + 1) if self.rows % size == 0
        ]
        return sorted({*small_divisors, *(self.rows // size for size in small_divisors)})

    def with_training(self, training: Work) -> "PlanRequest":
        """Return the request for another training, with the same choices open."""
        return replace(self, training=training)

    def with_tokens(self, tokens_per_update: int, length: int) -> "PlanRequest":
        """Return the request for updates of other sizes.

        Args:
            tokens_per_update: tokens of an update, rounded down to whole rows, but at least one
                row.
            length: tokens of a row.
        """
        rows = max(1, tokens_per_update // length)
        return self.with_training(
            replace(self.training, rows=rows, window_rows=rows, length=length)
        )

    def work(self, way: Way, rows: int, device: Device) -> Work:
        """Return the training with one way, in micro-batches of `rows`."""
        return replace(
            self.training,
            rows=rows,
            precision=way.precision,
            compile=way.scope,
            remat=way.remat,
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
        by_origin: bytes at the peak by origin; None if the peak was not traced.
        residual_bytes: bytes that were added to the traced workspace, because earlier runs on the
            device took more than their traces said.
        why: why it was not chosen; "" for the chosen one.
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
        if not self.by_origin or not self.residual_bytes:
            return self.by_origin
        return {**self.by_origin, "workspace": self.by_origin["workspace"] - self.residual_bytes}

    def with_trace(self, by_origin: Mapping[str, int], residual_bytes: int) -> "Candidate":
        """Return the candidate with the traced memory `by_origin`, and `residual_bytes` added to
        its workspace.
        """
        if residual_bytes:
            by_origin = {**by_origin, "workspace": by_origin["workspace"] + residual_bytes}
        needed = sum(by_origin.values())
        return replace(
            self, peak_memory_bytes=needed, by_origin=by_origin, residual_bytes=residual_bytes
        )


def resident_ways(request: PlanRequest) -> list[Way]:
    """Return the ways to train with the weights on the device.

    These are all combinations, with exceptions for one graph of the whole step. Such a graph never
    offloads, because offloading happens between graphs. And if other scopes are possible, it
    recomputes nothing, because the order in which it would recompute is hard to predict.
    """
    remats_in_whole: set[str | float] = {"none"}
    if len(request.scopes) == 1:
        remats_in_whole = {*request.remats} - {"offload"}
    combinations = itertools.product(request.precisions, request.scopes, request.remats)
    return [
        Way(precision, scope, remat)
        for precision, scope, remat in combinations
        if scope != "whole" or remat in remats_in_whole
    ]


_GRAPHS = {
    "whole": "the step in one graph",
    "blocks": "a graph per block",
    "none": "no graph",
}
_RECOMPUTED = {
    "none": "nothing recomputed",
    "pointwise": "all but products recomputed",
    "full": "blocks recomputed",
    "offload": "blocks recomputed, inputs on the host",
}


def describe_work(work: Work) -> str:
    """Describe a combination in words."""
    graph = _GRAPHS[work.compile]
    recomputed = _RECOMPUTED.get(str(work.remat))
    if recomputed is None:
        recomputed = f"recomputed but for {work.remat:.0%} of the activations"
    return f"micro-batches of {work.rows}, {work.precision}, {graph}, {recomputed}"


def way_candidates(
    request: PlanRequest,
    way: Way,
    device: Device,
    limit: int,
    correction: float,
    peak_flops: ByPrecision,
    slowness: ByPrecision,
) -> list[Candidate]:
    """Return the candidates of one way: the largest micro-batch that fits, and the next larger one.

    If no micro-batch fits, the smallest one is the only candidate.

    Args:
        request: the request.
        way: the way.
        device: the device to train on.
        limit: bytes that tensors may take there.
        correction: ratio of this way's traced peak to its closed form; 1 if it was not traced.
        peak_flops: FLOP/s by precision.
        slowness: ratio of measured to predicted time, for precisions that earlier runs measured.
    """
    works = [request.work(way, size, device) for size in request.micro_batches]
    needed_bytes = [int(correction * estimate_bytes(work)) for work in works]
    # Micro-batches are sorted by size, so those that fit come first.
    fitting_count = sum(needed <= limit for needed in needed_bytes)
    # The indices of the last one that fits and of the one after it, as far as these exist.
    shown = range(max(0, fitting_count - 1), min(len(works), fitting_count + 1))
    return [
        _candidate(
            works[index], needed_bytes[index], device, peak_flops, slowness.get(way.precision, 1.0)
        )
        for index in shown
    ]


def _candidate(
    work: Work, needed_bytes: int, device: Device, peak_flops: ByPrecision, slowness: float
) -> Candidate:
    update_s = slowness * update_time(work, device, peak_flops[work.precision]).total_s
    tokens_per_s, model_flops_share = speed(work, update_s, device)
    return Candidate(
        work,
        peak_memory_bytes=needed_bytes,
        update_s=update_s,
        tokens_per_s=tokens_per_s,
        mfu=model_flops_share,
    )


def slower_text(ratio: float) -> str:
    """Return in words how much slower a way is than the best one.

    Args:
        ratio: the way's time divided by the best way's. 1.21 gives "21% slower".
    """
    if ratio < 1.005:
        return "no faster"
    if ratio < 1.995:
        return f"{ratio - 1:.0%} slower"
    return f"takes {ratio:.1f}x as long"


def speed(work: Work, update_s: float, device: Device) -> tuple[float, float | None]:
    """Return the tokens per second and the MFU of an update that takes `update_s`. The MFU is None on
    a device without a datasheet.

    A plan reads no text, so FLOPs are counted as if each row had one document.
    """
    tokens_per_s = work.window_rows * work.length / update_s
    peak_flops = device.peak_flops.get(Precision(work.precision).datasheet_name)
    if not peak_flops:
        return tokens_per_s, None
    flops = flops_per_token(work.config, work.length, active_adapter_parameters(work))
    return tokens_per_s, mfu(tokens_per_s, flops, peak_flops)
