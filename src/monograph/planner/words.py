"""What a person is told of a way to stream, by `plan` and before a run."""

from __future__ import annotations

from collections.abc import Iterator

from monograph.measure.quantities import gibibytes
from monograph.planner.streaming import StreamCandidate


def way_said(candidate: StreamCandidate) -> str:
    """How stages are cut, and when and where they are updated."""
    placement = candidate.placement
    blocks = f"{placement.blocks_per_stage} block{'s' if placement.blocks_per_stage > 1 else ''} a stage"
    when = {"sweep": "in a sweep", "next forward": "before the next forward pass", "backward": "in the backward pass"}[
        placement.when
    ]
    where = "on the host " if placement.where == "host" else ""
    return f"{blocks}, updated {where}{when}{', boundaries on the host' if placement.offload else ''}"


def tiers_said(candidate: StreamCandidate) -> Iterator[tuple[str, str]]:
    """(label, text) of what lies on the host and in files, and of the way."""
    for tier in ("host", "disk"):
        if parts := candidate.tiers[tier]:
            each = ", ".join(f"{name} {gibibytes(size)}" for name, size in parts.items())
            moved = f"; {gibibytes(candidate.disk_moved_bytes)} an update to and fro" if tier == "disk" else ""
            yield tier, f"{gibibytes(candidate.total(tier))}: {each}{moved}"
    limit = f"; limited by {candidate.bottleneck}" if candidate.bottleneck else ""
    yield "stream", f"{way_said(candidate)}; {candidate.device_share:.0%} stay on the device{limit}"
