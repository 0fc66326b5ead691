"""`monograph plan`: predict which ways to train fit a device, how fast they are and why, without that device."""

import itertools
import json as jsonlib
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from monograph.config import Settings
from monograph.device import describe, named
from monograph.errors import UsageError
from monograph.model.config import LlamaConfig
from monograph.planner import Candidate, Limits, Plan, StreamCandidate, budget, streamed_or_resident
from monograph.planner.streaming import HOST_SHARE, describe_tiers, describe_way
from monograph.predict.estimate import trained_numbers
from monograph.predict.roofline import EFFICIENCIES, Calibration, peak_flops
from monograph.report.quantities import count, duration, gibibytes
from monograph.session.adapting import planned_tokens, token_notes
from monograph.session.reinforcing import bytes_beside, drawing_kind, drawing_time, with_records
from monograph.session.requirements import notes_on, require_one_device, require_possible, require_room
from monograph.session.resolve import request_of, resolve, shape_of, without
from monograph.storage.cache_dir import cache_root, calibration_file

_UNITS = {"mib": 2**20, "gib": 2**30, "tib": 2**40, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SMALLEST, _LARGEST = 2**26, 2**42
BAR = 60  # characters
_HEADS: tuple[str, ...] = (
    "micro-batch", "precision", "graph", "recomputed", "streamed", "memory", "tok/s", "MFU", "",
)  # fmt: skip
_SHADES = {
    "weights": "W", "gradients": "G", "moments": "M", "activations": "a", "loss head": "h", "workspace": "w",
    "slots": "s", "staging buffers": "t", "boundaries": "b",
}  # fmt: skip


def run(
    settings: Settings, *, device: str | None, device_memory: str | None, host_memory: str | None, json: bool
) -> None:
    """Print the chosen way, its memory by origin and the alternatives; with `json`, print them as one object too."""
    settings = with_records(settings)
    require_one_device(settings, "plan")
    memory_bytes = None if device_memory is None else memory_size("--device-memory", device_memory)
    target = describe() if device is None else named(device)
    if memory_bytes is not None:
        if memory_bytes > target.memory_bytes:
            raise UsageError(
                f"--device-memory {device_memory}: {target.name} has {gibibytes(target.memory_bytes)} in all"
            )
        target = replace(target, memory_bytes=memory_bytes, free_memory_bytes=memory_bytes)
    require_possible(settings, target)
    plan = resolve(settings, target, built=False)
    settings = plan.settings
    new, rows = planned_tokens(settings), shape_of(plan).vocab_size
    config = shape_of(plan, new)
    limits = Limits.here(target, budget(target), cache_root()[0])
    if host_memory is not None:
        limits = replace(limits, host_bytes=int(HOST_SHARE * memory_size("--host-memory", host_memory)))
    require_room(settings, config, target, limits)
    beside = bytes_beside(plan, config, target)
    target = without(target, sum(beside.values()))
    request = request_of(plan, config, target, new.trained(rows) if new else ())
    known = Calibration(calibration_file())
    peaks = peak_flops(target, request.precisions)
    memory = "device" if beside else settings.train.memory
    answer = streamed_or_resident(request, target, peaks, known, memory, limits)
    updates = plan.updates or None
    for line in (*notes_on(plan, target), *token_notes(settings, new, rows)):
        print(f"note     {line}")
    _show(answer, config, request.tokens_per_update, updates)
    more: dict[str, Any] = {}
    if beside:
        ratio = known.slowness(target, drawing_kind(plan))
        drawing = (ratio or 1.0) * drawing_time(plan, config, target)
        print("\nbeside  ", ", ".join(f"{name} {gibibytes(size)}" for name, size in beside.items()))
        source = "as earlier runs took it" if ratio else "by a closed form that no run here has corrected"
        print(f"drawing  at most {_short(drawing)} for the answers of an update, {source}")
        more = {"beside": _in_bytes(beside), "drawing_s": drawing, "drawing_calibrated": ratio is not None}
    if json:
        print(jsonlib.dumps(_object(answer, updates) | more))


def memory_size(flag: str, text: str) -> int:
    """Return the number of bytes that a text such as "24GiB" or "80 GB" means.

    Raises:
        UsageError: the text is not a number with a unit, or the size is not from 64 MiB to 4 TiB.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([mgt]i?b)", text.strip().lower())
    if match is None:
        raise UsageError(f"{flag} {text}: expected a number with its unit, such as 24GiB or 80GB")
    size_bytes = float(match[1]) * _UNITS[match[2]]
    if not _SMALLEST <= size_bytes <= _LARGEST:
        raise UsageError(f"{flag} {text}: expected from 64MiB to 4TiB")
    return int(size_bytes)


def _source_of_times(plan: Plan) -> str:
    if plan.calibrated:
        return "; time as earlier runs took it"
    known = plan.device.name in EFFICIENCIES or plan.device.type == "cpu"
    return "" if known else "; speed unverified: measured on no such card"


def _show(plan: Plan, config: LlamaConfig, tokens_per_update: int, updates: int | None) -> None:
    device = plan.device
    usable = f"{gibibytes(plan.budget_bytes)} usable{_source_of_times(plan)}"
    print(f"device   {device.name}, {gibibytes(device.free_memory_bytes)}, {usable}")
    work = plan.nearest.work if plan.candidates else None
    adapters = trained_numbers(work.config, work.lora, work.precision) if work and work.lora else 0
    more = f", {count(adapters)} more in adapters" if adapters else ""
    print(f"model    {count(config.parameter_count())} parameters{more}, updates of {tokens_per_update:,} tokens")
    if plan.chosen is None:
        print(f"plan     {plan.refusal}")
        if not plan.candidates:
            return
        best = plan.nearest
    else:
        best = plan.chosen
        use = "" if best.mfu is None else f", MFU {best.mfu:.0%}"
        print(f"plan     {count(best.tokens_per_s, 'tok/s')}{use}, {_short(best.update_s)} an update", end="")
        print(f", {duration(best.update_s * updates)} in all" if updates else "")
    if best.by_origin:
        print(f"memory   {_bar(best.by_origin, plan.budget_bytes)}")
        parts = (f"{_SHADES[name]} {name} {gibibytes(size)}" for name, size in best.by_origin.items())
        more = f" ({gibibytes(best.residual_bytes)} calibrated by earlier runs)" if best.residual_bytes else ""
        print(f"         {', '.join(parts)}{more}")
    if isinstance(best, StreamCandidate):
        for tier, text in describe_tiers(best):
            print(f"{tier:8} {text}")
    print()
    lines = [_HEADS, *(_line(candidate, chosen=candidate is plan.chosen) for candidate in plan.candidates)]
    if not any(isinstance(candidate, StreamCandidate) for candidate in plan.candidates):
        lines = [(*line[:4], *line[5:]) for line in lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    sys.stdout.flush()


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.0995 else duration(seconds)


def _line(candidate: Candidate, *, chosen: bool) -> tuple[str, ...]:
    work = candidate.work
    use = "" if candidate.mfu is None else f"{candidate.mfu:.0%}"
    return (
        str(work.rows), work.precision, work.compile, str(work.remat),
        describe_way(candidate) if isinstance(candidate, StreamCandidate) else "",
        ("" if candidate.by_origin else "~") + gibibytes(candidate.peak_memory_bytes),
        count(candidate.tokens_per_s), use, "chosen" if chosen else candidate.why,
    )  # fmt: skip


def _bar(by_origin: Mapping[str, int], limit: int) -> str:
    """Return a bar with each origin's share of the limit in letters, free memory as dots, any excess after its end."""
    total = max(limit, sum(by_origin.values()))
    edges = [*map(round, itertools.accumulate((BAR * size / total for size in by_origin.values()), initial=0.0))]
    cells = "".join(_SHADES[name] * (b - a) for name, a, b in zip(by_origin, edges, edges[1:], strict=False))
    end = round(BAR * limit / total)
    return f"[{cells[:end].ljust(end, '.')}]{cells[end:]}"


def _object(plan: Plan, updates: int | None) -> dict[str, Any]:
    return {
        "schema": "monograph.plan/1",
        "device": plan.device.name,
        "device_verified": plan.device.name in EFFICIENCIES,
        "calibrated": plan.calibrated,
        "budget_bytes": plan.budget_bytes,
        "chosen": None if plan.chosen is None else _entry(plan.chosen, updates),
        "refusal": None if plan.chosen else plan.refusal,
        "candidates": [_entry(candidate, updates) for candidate in plan.candidates],
    }


def _entry(candidate: Candidate, updates: int | None) -> dict[str, Any]:
    work = candidate.work
    origins = candidate.by_origin
    return {
        "memory": "stream" if isinstance(candidate, StreamCandidate) else "device",
        "micro_batch": work.rows,
        **{key: getattr(work, key) for key in ("remat", "precision", "compile")},
        "peak_memory_bytes": candidate.peak_memory_bytes,
        "memory_by_origin": None if origins is None else _in_bytes(origins),
        "calibrated_bytes": candidate.residual_bytes,
        "update_s": candidate.update_s,
        "wall_s": candidate.update_s * updates if updates else None,
        "tokens_per_s": candidate.tokens_per_s,
        "mfu": candidate.mfu,
        "why": candidate.why or None,
    } | (_stream_entry(candidate) if isinstance(candidate, StreamCandidate) else {})


def _in_bytes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return sizes under keys that end with their unit."""
    return {f"{name.replace(' ', '_')}_bytes": size for name, size in sizes.items()}


def _stream_entry(candidate: StreamCandidate) -> dict[str, Any]:
    placement = candidate.placement
    return {
        "placement": {
            **{key: getattr(placement, key) for key in ("when", "where", "offload", "blocks_per_stage")},
            "on_device_share": candidate.device_share,
            "on_disk": sorted(placement.on_disk),
        },
        "bytes_by_tier": {tier: _in_bytes(sizes) for tier, sizes in candidate.tiers.items()},
        "disk_moved_bytes": candidate.disk_moved_bytes,
        "bottleneck": candidate.bottleneck,
    }
