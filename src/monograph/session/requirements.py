"""Refuse settings that exclude one another or do not fit this machine or model.

What excludes what is a table of rules (`exclusions`), of which docs/support.md is made; the rest
are conditions that need the machine, the model's shape or the command.
"""

import math
from collections.abc import Iterator

import torch

from monograph.config import Settings
from monograph.device import Device
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError, join_with_or
from monograph.graph.lora import Lora, chosen_layers
from monograph.graph.precision import Precision
from monograph.model.adapter import is_adapter
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim.formats import FORMATS, rounding
from monograph.planner import Limits, defaults
from monograph.report.quantities import count, counted, gibibytes
from monograph.schedule import SCHEDULES
from monograph.session.by_key import by_field
from monograph.session.choices import (
    ADAPTED,
    FP8,
    NARROW,
    OFFLOADED,
    STREAMED,
    WHOLE,
    Chosen,
    Condition,
    Exclusion,
    refuse_excluded,
    without,
)
from monograph.session.job import Job
from monograph.session.objective import Objective
from monograph.session.objectives import (
    BY_RECORDS,
    OBJECTIVES,
    chosen_in,
    objective_of,
    with_records,
)
from monograph.session.plan import RunPlan, is_sharded
from monograph.storage.code import code_named

LEAST_BYTES = 2  # the least bytes of a parameter, its weight in 16 bits


# ── what does not go together ───────────────────────────────────────────────────────────────────

UNSHARDED = Condition(
    "train.parallel = {parallel}", lambda made: not is_sharded(made.parallel), "none or ddp"
)
SHARDED = Condition(
    "train.parallel = {parallel}", lambda made: is_sharded(made.parallel), "fsdp or hsdp"
)
SHARED = Condition(
    "train.parallel = {parallel}", lambda made: made.parallel != "none", "ddp, fsdp or hsdp"
)
HALVED = Condition("train.gather_dtype = bf16", lambda made: made.gather_dtype == "bf16")
NOT_IN_BF16 = Condition(
    "train.precision = {precision}",
    lambda made: made.precision not in ("auto", "bf16"),
    "fp32, fp16 or fp8",
)
WITHOUT_BF16 = Condition(
    "train.precision = {precision}", lambda made: made.precision in ("fp32", "fp16"), "fp32 or fp16"
)
RANKED = Condition("lora.rank", lambda made: made.rank is not None)
STATE = Condition(
    "optim.state = {state}",
    lambda made: not FORMATS[made.state].stochastic,
    " or ".join(rounding(stochastic=False)),
)
UNCLIPPED = Condition("optim.grad_clip = none", lambda made: made.grad_clip == "none")
SKIPPING = Condition("optim.skip_spikes = true", lambda made: made.skip_spikes is True)
STEADY = Condition(
    "optim.schedule = {schedule}",
    lambda made: not SCHEDULES[made.schedule].falls,
    join_with_or(name for name, schedule in SCHEDULES.items() if not schedule.falls),
)
FALLING = Condition("optim.min_lr_ratio", lambda made: made.min_lr_ratio is not None)
UNTRANSFERRED = Condition("optim.transfer = none", lambda made: made.transfer == "none")
BASED = Condition("optim.transfer_base", lambda made: made.transfer_base is not None)

_STAGED = "train.memory = stream brings one stage after another to the device: with it"
_IN_BF16 = "optim.master_weights = false keeps the weights in bf16"

# Of several, the first is said.
OF_THE_STEP = (
    Exclusion(
        OFFLOADED,
        WHOLE,
        "train.remat = offload crosses between graphs: with it train.compile is blocks or none",
    ),
    Exclusion(STREAMED, WHOLE, f"{_STAGED} train.compile is blocks or none, not whole"),
    Exclusion(
        STREAMED,
        OFFLOADED,
        f"{_STAGED} train.remat is none, full, pointwise or a number, not offload",
    ),
    Exclusion(
        ADAPTED,
        STREAMED,
        "train.memory = stream fetches weights that are trained: with lora.rank it is device",
    ),
    Exclusion(
        ADAPTED,
        FP8,
        "train.precision = fp8 is for weights that are trained: with lora.rank take bf16 or fp32",
    ),
    Exclusion(
        HALVED,
        UNSHARDED,
        "train.gather_dtype = bf16 is of weights that ranks share out: take fsdp or hsdp",
    ),
    without(HALVED, NOT_IN_BF16, "products read bf16 weights: take bf16"),
    without(HALVED, RANKED, "frozen weights stay as they are"),
    without(SHARED, NARROW, "gradients would be summed in bf16"),
    without(SHARDED, STREAMED, "a rank that streams has whole weights: take ddp"),
    without(SHARDED, WHOLE, "blocks are gathered one by one: take blocks or none"),
)
OF_THE_OPTIMIZER = (
    Exclusion(
        NARROW,
        STATE,
        f"{_IN_BF16}, and their moments: say optim.state = {' or '.join(rounding(stochastic=True))}, "
        "not {state}",
    ),
    Exclusion(
        NARROW,
        STREAMED,
        f"{_IN_BF16}, and train.memory = stream keeps them in full precision: leave one out",
    ),
    Exclusion(
        NARROW,
        WITHOUT_BF16,
        f"{_IN_BF16}, which train.precision = {{precision}} cannot use: take bf16 or fp8",
    ),
    Exclusion(
        SKIPPING,
        UNCLIPPED,
        "optim.skip_spikes = true is of gradients that are clipped: give optim.grad_clip a number",
    ),
    Exclusion(
        FALLING, STEADY, "optim.schedule = {schedule} never falls: leave optim.min_lr_ratio out"
    ),
    Exclusion(
        BASED,
        UNTRANSFERRED,
        "optim.transfer_base is of width transfer: say optim.transfer = width, too",
    ),
)


def exclusions() -> Iterator[Exclusion]:
    """Yield all pairs of choices that exclude one another, in the order in which they are refused."""
    yield from OF_THE_STEP
    for objective in OBJECTIVES:
        yield from excluded_by(objective)
    yield from OF_THE_OPTIMIZER


def excluded_by(objective: Objective) -> Iterator[Exclusion]:
    """Yield what does not go with an objective, which is taken as chosen."""
    chosen = Condition(objective.key, lambda made: True)
    for other, instead in objective.excluded:
        yield without(chosen, other, instead)


def choices_of(settings: Settings) -> Chosen:
    """Return what the settings choose, of what can exclude something else."""
    init = settings.model.init
    return Chosen(
        is_code=code_named(init) is not None,
        is_adapted=settings.lora.rank is not None or (init is not None and is_adapter(init)),
        **by_field(Chosen, settings.values()),
    )


def require_together(settings: Settings) -> None:
    """Refuse choices that exclude one another.

    Raises:
        UsageError: two choices exclude one another; the message names both.
    """
    choices = choices_of(settings)
    refuse_excluded(choices, OF_THE_STEP)
    objective = objective_of(settings)
    keys = [each.key for each in chosen_in(settings) if each.key]
    if len(keys) > 1:
        raise UsageError(
            f"{keys[1]} does not go with {keys[0]}: a run learns from one of both: leave one out"
        )
    refuse_excluded(choices, excluded_by(objective))
    objective.require_keys(settings)
    refuse_excluded(choices, OF_THE_OPTIMIZER)


def require_possible(settings: Settings, machine: Device) -> None:
    """Refuse a precision that this machine lacks and choices that exclude one another, before any
    text is read.

    Raises:
        UsageError: a choice is impossible; the message names another.
    """
    require_together(settings)
    # The base's best rate is unknown.
    if settings.optim.transfer != "none" and settings.optim.lr == "auto":
        raise UsageError(
            f"{settings.said('optim.transfer')} carries a learning rate that was found on a narrower model: give it "
            "as optim.lr (`monograph sweep` finds it)"
        )
    name = settings.train.precision
    obstacle = None if name == "auto" else Precision(name).obstacle(machine)
    if obstacle:
        instead = "fp16 or fp32" if name == "bf16" else defaults.precision(machine)
        raise UsageError(f"{settings.said('train.precision')}: {obstacle}; use {instead}")


def require_taught(objective: Objective, init: str | None) -> None:
    """Refuse to learn without a model where one is needed that was trained before.

    Raises:
        UsageError: there is none.
    """
    if objective.needs_model and init is None:
        raise UsageError(
            f"{objective.key}: a new model answers nothing: name one that was trained on text, by model.init or --from"
        )


def require_one_device(settings: Settings, command: str) -> None:
    """Refuse several devices for a command that knows only one.

    Raises:
        UsageError: `train.parallel` is on; the message names the command.
    """
    if settings.train.parallel != "none":
        raise UsageError(
            f"{settings.said('train.parallel')} is for `monograph train`; `monograph {command}` uses one device: "
            "leave it out, or add train.parallel=none"
        )


def require_texts(settings: Settings, command: str) -> None:
    """Refuse other records than texts for a command that knows only these.

    Raises:
        UsageError: a key asks for them, or they are found; the message names the command.
    """
    known = with_records(settings)
    objective = objective_of(known)
    if objective.is_of_texts:
        return
    key = objective.key
    origin = settings.origins.get(key, BY_RECORDS)
    remedy = (
        "leave it out" if key in settings.origins else f"its records are {objective.records(known)}"
    )
    only = f"is for `monograph train`; `monograph {command}` knows texts alone: {remedy}"
    raise UsageError(f"{origin}: {key} = {known.values()[key]} {only}")


def require_positions(length: int, config: LlamaConfig | None) -> None:
    """Refuse rows that are longer than a model has positions; None means that its shape is not
    known yet.

    Raises:
        InputRefused: the rows are longer; the message names both lengths.
    """
    positions = config.max_position_embeddings if config else math.inf
    if length > positions:
        raise InputRefused(
            f"data.sequence_length = {length} is longer than the model's max_position_embeddings = {positions}: "
            "shorten the rows"
        )


def require_targets(lora: Lora | None, config: LlamaConfig | None) -> None:
    """Refuse adapters' targets that a model does not have; None means that its shape is not known
    yet.

    A rank above the shorter side of every target W is refused, too, since B A then has more numbers
    than W for no gain.

    Raises:
        UsageError: the targets do not fit the model.
    """
    if lora is None or config is None:
        return
    with torch.device("meta"):
        layers = chosen_layers(Llama(config), lora)
    most = max(min(layer.weight.shape[-2:]) for layer in layers.values())
    if lora.rank > most:
        raise UsageError(
            f"lora.rank = {lora.rank}: these layers' weights have rank {most} at most; lower it"
        )


def require_room(job: Job, config: LlamaConfig, machine: Device, limits: Limits) -> None:
    """Refuse a new model whose weights alone exceed all available memory, before any part of it is
    built.

    Raises:
        OutOfDeviceMemory: it does; the message names the keys that shape the model and the bytes
            needed and available.
    """
    needed = LEAST_BYTES * config.parameter_count()
    device_bytes = 0 if limits.shared else machine.memory_bytes
    if job.recipe.init is None and needed > device_bytes + limits.host_bytes + limits.disk_bytes:
        raise OutOfDeviceMemory(
            f"{job.sizes_said}: {count(config.parameter_count())} parameters, whose weights alone are "
            f"{gibibytes(needed)} at {LEAST_BYTES} bytes each; {machine.name} has {gibibytes(machine.memory_bytes)}, "
            f"the host {gibibytes(limits.host_bytes)} and the disk {gibibytes(limits.disk_bytes)}: make it smaller"
        )


def notes_on(plan: RunPlan, machine: Device) -> Iterator[str]:
    """Yield a line for each setting whose effect may differ from what the user expects."""
    if plan.training.precision == "fp32" and machine.type == "cuda" and machine.has_bf16:
        yield "train.precision = fp32: products keep all digits, without tensor cores (no TF32); bf16 is much faster"
    given = plan.job.asked_tokens
    if given != plan.training.tokens_per_update:
        rows = f"{counted(plan.training.window_rows, 'row')} of data.sequence_length = {plan.training.length}"
        yield f"train.tokens_per_update = {given}: an update has {rows}, so {plan.training.tokens_per_update:,} tokens"
    micro_batch = plan.training.rows
    most = plan.training.window_rows
    if micro_batch > most:
        yield f"train.micro_batch = {micro_batch}: an update has {most} rows, so micro-batches of {most}"
