"""Write a plan as about one screen of text, and as a JSON object.

A way is a combination of settings with which the run could be trained. The planner has a `Candidate`
for each way, and all ways train the same model. A remedy is a change of the run's settings: with it
the run fits the device or is faster, but trains another model or trains it differently.

A streamed way keeps most weights in the host's memory, and moves them through the device in stages,
which are groups of the model's blocks. A resident way keeps all weights on the device.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from monograph.planner import Candidate, Plan, PlanRequest, StreamCandidate
from monograph.planner.candidates import describe_work
from monograph.planner.remedies import Remedy
from monograph.planner.streaming import describe_tiers, describe_way
from monograph.predict.estimate import trained_numbers
from monograph.predict.roofline import EFFICIENCIES
from monograph.report.quantities import count, counted, duration, gibibytes

COLUMNS = 100  # the longest line of text
BAR = 60  # characters in the bar of memory
# The largest number of rows in the tables of ways and of remedies.
MOST_WAYS = 5
MOST_REMEDIES = 6
# The same for ways if the screen also has remedies and the lines about a streamed plan, so that it is not
# longer than a terminal.
MOST_WAYS_BESIDE = 2
# If the text's length is unknown, the time for this many tokens is printed.
SAMPLE_TOKENS = 1_000_000
_HEADS: tuple[str, ...] = (
    "rows at once",
    "graph",  # `Work.compile`: which part of the step is a compiled graph
    "recomputed",
    "streamed",
    "memory",
    "tok/s",
    "MFU",  # model FLOPs utilization: the model's FLOP/s, as a share of those in the device's datasheet
    "",  # "chosen", or why the way was not chosen
)
# The letter in the bar for each origin of bytes, which is what the memory is used for.
_LETTERS = {
    "weights": "W",
    "gradients": "G",
    "moments": "M",
    "activations": "a",
    "loss head": "h",
    "workspace": "w",
    # The last three exist only in streamed ways.
    "slots": "s",  # for the weights and gradients of the stages that are on the device at the moment
    "staging buffers": "t",  # for the pieces that the device updates at the moment
    "boundaries": "b",  # the tensors that pass from one stage to the next
}
# How frozen weights are stored, by `Lora.base`. "auto" stores them in as many bits as the computation has:
# 16, or 32 with fp32, which `_model_text` looks at.
_FROZEN_STORAGE = {"auto": "in 16 bits", "int8": "in 8 bits", "nf4": "in 4 bits"}


class ShownLength(NamedTuple):
    """The length of a run.

    Attributes:
        updates: number of updates; None if unknown.
        tokens: number of tokens; None if unknown.
        why: the reason for this length; "" for none.
    """

    updates: int | None = None
    tokens: int | None = None
    why: str = ""


class AnswerSampling(NamedTuple):
    """The sampling of answers in a run with rewards. The screen and --json call it drawing.

    Attributes:
        seconds: the time to sample the answers of one update.
        calibrated: whether `seconds` was corrected by the times of earlier runs.
        other_bytes: {purpose: bytes} of the memory that the training step cannot use, because
            sampling needs it, or the reference model or the teacher if there is one.
    """

    seconds: float
    calibrated: bool
    other_bytes: Mapping[str, int]


def screen(
    plan: Plan,
    model: str,
    request: PlanRequest,
    length: ShownLength,
    sampling: AnswerSampling | None,
    remedies: Sequence[Remedy],
    supposed: Sequence[str],
) -> Iterator[str]:
    """Yield the lines of the screen.

    Args:
        plan: the plan.
        model: the model's name.
        request: what was planned.
        length: the run's length.
        sampling: the sampling of answers; None for a run without rewards.
        remedies: changes with which the run would fit or be faster.
        supposed: settings that the user left open, with the values that the plan supposes, as
            arguments of `train`.
    """
    device = plan.device
    # The planner was told that the device has less memory, because sampling needs a part of it. This
    # line shows the memory of the whole device.
    other_bytes = sampling.other_bytes if sampling else {}
    free = gibibytes(device.free_memory_bytes + sum(other_bytes.values()))
    yield f"device   {device.name}, {free}, {gibibytes(plan.budget_bytes)} usable{_source_of_times(plan)}"
    if other_bytes:
        sizes = ", ".join(f"{name} {gibibytes(size)}" for name, size in other_bytes.items())
        yield f"         beside {sizes}"
    yield f"model    {_model_text(model, request)}"
    usual = ", as usual for this size" if supposed else ""
    rows = f"{counted(request.rows, 'row')} of {request.training.length:,} tokens{usual}"
    yield f"update   {request.tokens_per_update:,} tokens: {rows}"
    if sampling:
        # The plan is for the longest rows that a prompt and its answer can have.
        yield "         rows as long as a prompt with its answer may be; shorter ones need less of all"
    if supposed:
        yield f"         add to train: {' '.join(supposed)}"
    yield from _choice_lines(plan, length)
    if sampling:
        if sampling.calibrated:
            source = "as earlier runs took it"
        else:
            source = "by a formula that no run here has corrected"
        time_text = _short_duration(sampling.seconds)
        yield f"drawing  at most {time_text} for the answers of an update, {source}"
    if plan.chosen:
        yield ""
        is_full = bool(remedies) and isinstance(plan.chosen, StreamCandidate)
        yield from _way_rows(plan, MOST_WAYS_BESIDE if is_full else MOST_WAYS)
    if remedies:
        yield ""
        yield from _remedy_rows(plan, remedies)


def _source_of_times(plan: Plan) -> str:
    """Return the words that say where the plan's times come from; "" if no words are needed.

    A plan's times are those of earlier runs on the device, or computed from the FLOP/s that the
    device reaches in measurements, or else from the FLOP/s of its datasheet.
    """
    if plan.calibrated:
        return "; time as earlier runs took it"
    # `EFFICIENCIES` has the cards that were measured. A CPU has no datasheet: this machine's own CPU
    # was measured for the plan.
    is_measured = plan.device.name in EFFICIENCIES or plan.device.type == "cpu"
    return "" if is_measured else "; speed by datasheet"


def _model_text(model: str, request: PlanRequest) -> str:
    """Return the model's name, the size of its vocabulary, and its number of parameters.

    With LoRA, the text also says how the frozen weights are stored, and how many parameters the adapters
    have.
    """
    config = request.training.config
    lora = request.training.lora
    size = f"{count(config.parameter_count())} parameters"
    if lora is None:
        return f"{model}, vocabulary {config.vocab_size:,}: {size}"
    precision = request.precisions[0]  # the first is the best
    adapter_parameters = count(trained_numbers(config, lora, precision))
    is_32_bit = lora.base == "auto" and precision == "fp32"
    frozen = "in 32 bits" if is_32_bit else _FROZEN_STORAGE[lora.base]
    return f"{model}, vocabulary {config.vocab_size:,}: {size} frozen {frozen}; adapters {adapter_parameters}"


def _choice_lines(plan: Plan, length: ShownLength) -> Iterator[str]:
    """Yield the lines about the chosen way or, if no way fits, about the one that needs least memory."""
    if not plan.candidates:
        yield f"plan     {plan.refusal}"
        return
    best = plan.nearest  # the way that these lines are about
    if plan.chosen is None:
        excess = gibibytes(best.peak_memory_bytes - plan.budget_bytes)
        yield f"plan     does not fit: {excess} too large in the way that needs least,"
        yield f"         {describe_work(best.work)}"
    else:
        if isinstance(best, StreamCandidate):
            yield "plan     fits, streamed: the weights wait in the host's memory,"
            yield f"         {describe_work(best.work)}"
        else:
            yield f"plan     fits, {describe_work(best.work)}"
        mfu = "" if best.mfu is None else f", MFU {best.mfu:.0%}"
        yield f"speed    {count(best.tokens_per_s, 'tok/s')}{mfu}, {_short_duration(best.update_s)} an update"
        yield f"time     {_run_time(best, length)}"
    if best.by_origin:
        yield f"memory   {_bar(best.by_origin, plan.budget_bytes)} {gibibytes(best.peak_memory_bytes)}"
        origins = [
            f"{_LETTERS[name]} {name.removesuffix(' buffers')} {size / 2**30:.2f}"
            for name, size in best.by_origin.items()
            if size
        ]
        residual = ""
        if best.residual_bytes:
            # Bytes that earlier runs on this device needed beyond those in a trace of the step.
            residual = f" ({gibibytes(best.residual_bytes)} calibrated by earlier runs)"
        parts = f"{', '.join(origins)}{residual}"
        yield from textwrap.wrap(
            parts, COLUMNS, initial_indent="   GiB   ", subsequent_indent=" " * 9
        )
    if isinstance(best, StreamCandidate):
        # The texts are about the bytes in the host's memory, the bytes in files, and how these move. A text
        # has one or two parts, and each part takes a line.
        for label, text in describe_tiers(best):
            first_part, _, second_part = text.partition("; ")
            yield f"{label:8} {first_part}"
            if second_part:
                yield f"         {second_part}"


def _run_time(best: Candidate, length: ShownLength) -> str:
    """Return the time of the whole run or, if its length is unknown, of SAMPLE_TOKENS."""
    if length.updates and length.tokens:
        why = f" ({length.why})" if length.why else ""
        run_time = _long_duration(best.update_s * length.updates)
        return f"{run_time} for {count(length.tokens)} tokens in {counted(length.updates, 'update')}{why}"
    return f"{duration(SAMPLE_TOKENS / best.tokens_per_s)} for each {count(SAMPLE_TOKENS)} tokens of text"


def _long_duration(seconds: float) -> str:
    """Return a length of time. From two days on it is in days and hours."""
    days, rest = divmod(round(seconds / 3600), 24)
    return f"{days:,} days {rest} h" if days >= 2 else duration(seconds)


def _short_duration(seconds: float) -> str:
    """Return a length of time, in milliseconds below 0.1 s."""
    # The limit is a little below 0.1 s, so that no time is rounded to "100 ms": it is "0.1 s" instead.
    return f"{1000 * seconds:.3g} ms" if seconds < 0.0995 else duration(seconds)


def _way_rows(plan: Plan, most: int) -> Iterator[str]:
    """Yield the table of the first `most` ways. The column "streamed" is left out if it is empty."""
    shown = _without_other_graphs(plan.candidates)[:most]
    rows = [_way_row(candidate, chosen=candidate is plan.chosen) for candidate in shown]
    lines = [_HEADS, *rows]
    if not any(isinstance(candidate, StreamCandidate) for candidate in shown):
        column = _HEADS.index("streamed")
        lines = [(*line[:column], *line[column + 1 :]) for line in lines]
    yield from _table(lines)
    hidden = len(plan.candidates) - len(shown)
    if hidden:
        yield f"and {hidden} slower or larger {'way' if hidden == 1 else 'ways'} (--json lists all)"


def _without_other_graphs(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates without those that differ from an earlier one only in their graph
    (`Work.compile`).
    """
    kept: dict[Any, Candidate] = {}  # by everything but the graph
    for candidate in candidates:
        streaming = describe_way(candidate) if isinstance(candidate, StreamCandidate) else ""
        all_but_graph = (candidate.work.rows, candidate.work.remat, streaming)
        kept.setdefault(all_but_graph, candidate)
    return [*kept.values()]


def _way_row(candidate: Candidate, *, chosen: bool) -> tuple[str, ...]:
    """Return the cells of a way, in the order of `_HEADS`."""
    work = candidate.work
    # A candidate whose step was traced has the bytes of each origin. For another one, the peak is
    # estimated by a formula.
    is_estimate = not candidate.by_origin
    memory = gibibytes(candidate.peak_memory_bytes)
    return (
        str(work.rows),
        work.compile,
        str(work.remat),
        _streamed(candidate) if isinstance(candidate, StreamCandidate) else "",
        f"~{memory}" if is_estimate else memory,
        count(candidate.tokens_per_s),
        "" if candidate.mfu is None else f"{candidate.mfu:.0%}",
        "chosen" if chosen else candidate.why,
    )


def _streamed(candidate: StreamCandidate) -> str:
    """Return in a few words how a model is streamed, such as "2 blocks, sweep, host".

    The words are the blocks of a stage, and when and where their weights are updated; or, if the weights
    are frozen, where the stages' inputs wait if not on the device. `describe_way` says the same in more
    words.
    """
    placement = candidate.placement
    blocks = counted(placement.blocks_per_stage, "block")
    if candidate.work.lora:
        return f"{blocks}, offloaded" if placement.offload else blocks
    return f"{blocks}, {placement.when}, {placement.where}"


def _remedy_rows(plan: Plan, remedies: Sequence[Remedy]) -> Iterator[str]:
    """Yield the table of changes with which the run fits or is faster."""
    first_head = "what would fit" if plan.chosen is None else "what else fits"
    rows = [
        (
            remedy.arguments,
            f"~{gibibytes(remedy.best.peak_memory_bytes)}",  # always an estimate
            count(remedy.best.tokens_per_s),
            remedy.cost,
        )
        for remedy in remedies[:MOST_REMEDIES]
    ]
    yield from _table([(first_head, "memory", "tok/s", "what it costs"), *rows])


def _table(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield lines of cells as text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _bar(by_origin: Mapping[str, int], limit: int) -> str:
    """Return a bar of the memory, such as "[WWGGaa....]".

    Each origin's bytes are letters, and free memory is dots. Bytes above the limit are letters after
    the closing bracket.

    Args:
        by_origin: {origin: bytes}.
        limit: the bytes that may be used.
    """
    total = max(limit, sum(by_origin.values()))
    letters = ""
    shown_bytes = 0
    for name, size in by_origin.items():
        shown_bytes += size
        # The sum is rounded rather than each length, so that rounding errors do not add up.
        end = round(BAR * shown_bytes / total)
        letters += _LETTERS[name] * (end - len(letters))
    end_of_limit = round(BAR * limit / total)
    return f"[{letters[:end_of_limit].ljust(end_of_limit, '.')}]{letters[end_of_limit:]}"


def as_object(
    plan: Plan, length: ShownLength, sampling: AnswerSampling | None, remedies: Sequence[Remedy]
) -> dict[str, Any]:
    """Return the plan as the object that --json prints; the arguments are those of `screen`."""
    updates = length.updates
    entries: dict[str, Any] = {
        "schema": "monograph.plan/1",
        "device": plan.device.name,
        "device_verified": plan.device.name in EFFICIENCIES,
        "calibrated": plan.calibrated,
        "budget_bytes": plan.budget_bytes,
        "updates": updates,
        "tokens": length.tokens,
        "chosen": None if plan.chosen is None else _candidate_object(plan.chosen, updates),
        "refusal": None if plan.chosen else plan.refusal,
        "candidates": [_candidate_object(candidate, updates) for candidate in plan.candidates],
        "changes": [
            {"change": remedy.arguments, "cost": remedy.cost}
            | _candidate_object(remedy.best, updates)
            for remedy in remedies
        ],
    }
    if sampling:
        entries["beside"] = _in_bytes(sampling.other_bytes)
        entries["drawing_s"] = sampling.seconds
        entries["drawing_calibrated"] = sampling.calibrated
    return entries


def _candidate_object(candidate: Candidate, updates: int | None) -> dict[str, Any]:
    """Return a way as JSON values.

    Args:
        candidate: the way.
        updates: the run's number of updates; None if unknown.
    """
    work = candidate.work
    origins = candidate.by_origin
    values = {
        "memory": "stream" if isinstance(candidate, StreamCandidate) else "device",
        "micro_batch": work.rows,  # the rows that the model computes at once
        **{key: getattr(work, key) for key in ("remat", "precision", "compile")},
        "peak_memory_bytes": candidate.peak_memory_bytes,
        "memory_by_origin": None if origins is None else _in_bytes(origins),
        "calibrated_bytes": candidate.residual_bytes,
        "update_s": candidate.update_s,
        "wall_s": candidate.update_s * updates if updates else None,
        "tokens_per_s": candidate.tokens_per_s,
        "mfu": candidate.mfu,
        "why": candidate.why or None,
    }
    if isinstance(candidate, StreamCandidate):
        values |= _stream_entry(candidate)
    return values


def _in_bytes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return sizes in bytes under keys that end with "_bytes"."""
    return {f"{name.replace(' ', '_')}_bytes": size for name, size in sizes.items()}


def _stream_entry(candidate: StreamCandidate) -> dict[str, Any]:
    """Return the values that only a streamed way has."""
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
