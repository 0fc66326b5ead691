"""Write a plan for people, in about one screen, and for programs, as an object."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from monograph.planner import Candidate, Plan, Request, StreamCandidate
from monograph.planner.candidates import describe_work
from monograph.planner.remedies import Remedy
from monograph.planner.streaming import describe_tiers, describe_way
from monograph.predict.estimate import trained_numbers
from monograph.predict.roofline import EFFICIENCIES
from monograph.report.quantities import count, counted, duration, gibibytes

BAR = 60  # characters
MOST_WAYS, MOST_CHANGES = 5, 6  # rows of a table
SAMPLE_TOKENS = 1_000_000  # whose time is given where the text's length is unknown
_HEADS: tuple[str, ...] = (
    "rows at once",
    "graph",
    "recomputed",
    "streamed",
    "memory",
    "tok/s",
    "MFU",
    "",
)
_SHADES = {
    "weights": "W",
    "gradients": "G",
    "moments": "M",
    "activations": "a",
    "loss head": "h",
    "workspace": "w",
    "slots": "s",
    "staging buffers": "t",
    "boundaries": "b",
}
_FROZEN = {"auto": "in 16 bits", "int8": "in 8 bits", "nf4": "in 4 bits"}


class Length(NamedTuple):
    """How long a run is: its updates, its tokens, and why so many; None if nothing tells."""

    updates: int | None = None
    tokens: int | None = None
    why: str = ""


class Drawing(NamedTuple):
    """The answers of a run with rewards.

    Attributes:
        seconds: seconds of drawing those of an update.
        calibrated: whether earlier runs corrected the seconds.
        beside: bytes beside the step, by origin.
    """

    seconds: float
    calibrated: bool
    beside: Mapping[str, int]


def screen(
    plan: Plan,
    model: str,
    request: Request,
    length: Length,
    drawing: Drawing | None,
    changes: Sequence[Remedy],
    supposed: Sequence[str],
) -> Iterator[str]:
    """Yield the lines."""
    device = plan.device
    # The planner is told of a card that is smaller by what stands beside the step.
    beside = drawing.beside if drawing else {}
    free = gibibytes(device.free_memory_bytes + sum(beside.values()))
    yield f"device   {device.name}, {free}, {gibibytes(plan.budget_bytes)} usable{_source_of_times(plan)}"
    if beside:
        sizes = ", ".join(f"{name} {gibibytes(size)}" for name, size in beside.items())
        yield f"         beside {sizes}"
    yield f"model    {_model(model, plan, request)}"
    usual = ", as usual for this size" if supposed else ""
    rows = f"{counted(request.rows, 'row')} of {request.training.length:,} tokens{usual}"
    yield f"update   {request.tokens_per_update:,} tokens: {rows}"
    if drawing:
        yield "         rows as long as a prompt with its answer may be; shorter ones need less of all"
    if supposed:
        yield f"         add to train: {' '.join(supposed)}"
    yield from _chosen(plan, length)
    if drawing:
        source = (
            "as earlier runs took it"
            if drawing.calibrated
            else "by a formula that no run here has corrected"
        )
        yield f"drawing  at most {_short(drawing.seconds)} for the answers of an update, {source}"
    if plan.chosen:
        yield ""
        yield from _ways(plan)
    if changes:
        yield ""
        yield from _changes(plan, changes)


def _source_of_times(plan: Plan) -> str:
    if plan.calibrated:
        return "; time as earlier runs took it"
    known = plan.device.name in EFFICIENCIES or plan.device.type == "cpu"
    return "" if known else "; speed by datasheet"


def _model(model: str, plan: Plan, request: Request) -> str:
    config, lora = request.training.config, request.training.lora
    size = f"{count(config.parameter_count())} parameters"
    if lora is None:
        return f"{model}, vocabulary {config.vocab_size:,}: {size}"
    precision = request.precisions[0]
    adapters = count(trained_numbers(config, lora, precision))
    frozen = "in 32 bits" if (lora.base, precision) == ("auto", "fp32") else _FROZEN[lora.base]
    return f"{model}, vocabulary {config.vocab_size:,}: {size} frozen {frozen}; adapters {adapters}"


def _chosen(plan: Plan, length: Length) -> Iterator[str]:
    """Yield the choice with its time and its memory; or why there is none."""
    if not plan.candidates:
        yield f"plan     {plan.refusal}"
        return
    best = plan.nearest
    if plan.chosen is None:
        short = gibibytes(best.peak_memory_bytes - plan.budget_bytes)
        yield f"plan     does not fit: {short} too large in the way that needs least,"
        yield f"         {describe_work(best.work)}"
    else:
        if isinstance(best, StreamCandidate):
            yield "plan     fits, streamed: the weights wait in the host's memory,"
            yield f"         {describe_work(best.work)}"
        else:
            yield f"plan     fits, {describe_work(best.work)}"
        use = "" if best.mfu is None else f", MFU {best.mfu:.0%}"
        yield f"speed    {count(best.tokens_per_s, 'tok/s')}{use}, {_short(best.update_s)} an update"
        yield f"time     {_time(best, length)}"
    if best.by_origin:
        yield f"memory   {_bar(best.by_origin, plan.budget_bytes)} {gibibytes(best.peak_memory_bytes)}"
        parts = (
            f"{_SHADES[name]} {name.removesuffix(' buffers')} {size / 2**30:.2f}"
            for name, size in best.by_origin.items()
            if size
        )
        more = (
            f" ({gibibytes(best.residual_bytes)} calibrated by earlier runs)"
            if best.residual_bytes
            else ""
        )
        yield f"   GiB   {', '.join(parts)}{more}"
    if isinstance(best, StreamCandidate):
        for tier, text in describe_tiers(best):
            first, _, rest = text.partition("; ")
            yield f"{tier:8} {first}"
            if rest:
                yield f"         {rest}"


def _time(best: Candidate, length: Length) -> str:
    if length.updates and length.tokens:
        why = f" ({length.why})" if length.why else ""
        whole = _long(best.update_s * length.updates)
        return (
            f"{whole} for {count(length.tokens)} tokens in {counted(length.updates, 'update')}{why}"
        )
    return f"{duration(SAMPLE_TOKENS / best.tokens_per_s)} for each {count(SAMPLE_TOKENS)} tokens of text"


def _long(seconds: float) -> str:
    """Return a length of time, in days from two days on."""
    days, rest = divmod(round(seconds / 3600), 24)
    return f"{days:,} days {rest} h" if days >= 2 else duration(seconds)


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.0995 else duration(seconds)


def _ways(plan: Plan) -> Iterator[str]:
    """Yield the table of ways to train with the same result, the first few."""
    shown = _worth_a_line(plan.candidates)[:MOST_WAYS]
    lines = [_HEADS, *(_line(candidate, chosen=candidate is plan.chosen) for candidate in shown)]
    if not any(isinstance(candidate, StreamCandidate) for candidate in shown):
        lines = [(*line[:3], *line[4:]) for line in lines]
    yield from _table(lines)
    if more := len(plan.candidates) - len(shown):
        yield f"and {more} slower or larger {'way' if more == 1 else 'ways'} (--json lists all)"


def _worth_a_line(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates without those that differ from an earlier one in their graph alone."""
    first: dict[Any, Candidate] = {}
    for candidate in candidates:
        way = describe_way(candidate) if isinstance(candidate, StreamCandidate) else ""
        first.setdefault((candidate.work.rows, candidate.work.remat, way), candidate)
    return [*first.values()]


def _line(candidate: Candidate, *, chosen: bool) -> tuple[str, ...]:
    work = candidate.work
    use = "" if candidate.mfu is None else f"{candidate.mfu:.0%}"
    return (
        str(work.rows),
        work.compile,
        str(work.remat),
        _streamed(candidate) if isinstance(candidate, StreamCandidate) else "",
        ("" if candidate.by_origin else "~") + gibibytes(candidate.peak_memory_bytes),
        count(candidate.tokens_per_s),
        use,
        "chosen" if chosen else candidate.why,
    )


def _streamed(candidate: StreamCandidate) -> str:
    """Return in a few words how a model is streamed; `describe_way` says it in full."""
    placement = candidate.placement
    where = "host" if placement.where == "host" else "device"
    return f"{counted(placement.blocks_per_stage, 'block')}, {placement.when}, {where}"


def _changes(plan: Plan, changes: Sequence[Remedy]) -> Iterator[str]:
    """Yield the table of changes with which it fits, or is faster."""
    head = "what would fit" if plan.chosen is None else "what else fits"
    rows = [
        (
            change.change,
            f"~{gibibytes(change.best.peak_memory_bytes)}",
            count(change.best.tokens_per_s),
            change.cost,
        )
        for change in changes[:MOST_CHANGES]
    ]
    yield from _table([(head, "memory", "tok/s", "what it costs"), *rows])


def _table(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        yield "  ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        ).rstrip()


def _bar(by_origin: Mapping[str, int], limit: int) -> str:
    """Return a bar with each origin's share of the limit in letters, free memory as dots, any
    excess after its end.
    """
    total = max(limit, sum(by_origin.values()))
    edges = [
        *map(
            round,
            itertools.accumulate((BAR * size / total for size in by_origin.values()), initial=0.0),
        )
    ]
    cells = "".join(
        _SHADES[name] * (b - a) for name, a, b in zip(by_origin, edges, edges[1:], strict=False)
    )
    end = round(BAR * limit / total)
    return f"[{cells[:end].ljust(end, '.')}]{cells[end:]}"


def as_object(
    plan: Plan, length: Length, drawing: Drawing | None, changes: Sequence[Remedy]
) -> dict[str, Any]:
    """Return the plan as JSON values."""
    updates = length.updates
    found: dict[str, Any] = {
        "schema": "monograph.plan/1",
        "device": plan.device.name,
        "device_verified": plan.device.name in EFFICIENCIES,
        "calibrated": plan.calibrated,
        "budget_bytes": plan.budget_bytes,
        "updates": updates,
        "tokens": length.tokens,
        "chosen": None if plan.chosen is None else _entry(plan.chosen, updates),
        "refusal": None if plan.chosen else plan.refusal,
        "candidates": [_entry(candidate, updates) for candidate in plan.candidates],
        "changes": [
            {"change": change.change, "cost": change.cost} | _entry(change.best, updates)
            for change in changes
        ],
    }
    if drawing:
        found["beside"] = _in_bytes(drawing.beside)
        found["drawing_s"] = drawing.seconds
        found["drawing_calibrated"] = drawing.calibrated
    return found


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
            **{
                key: getattr(placement, key)
                for key in ("when", "where", "offload", "blocks_per_stage")
            },
            "on_device_share": candidate.device_share,
            "on_disk": sorted(placement.on_disk),
        },
        "bytes_by_tier": {tier: _in_bytes(sizes) for tier, sizes in candidate.tiers.items()},
        "disk_moved_bytes": candidate.disk_moved_bytes,
        "bottleneck": candidate.bottleneck,
    }
