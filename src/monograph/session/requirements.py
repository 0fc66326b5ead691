"""Refuse settings that exclude one another or do not fit this machine or model.

`exclusions` is the table of keys whose values exclude one another, from which docs/support.md is
made. The `require_` functions refuse what depends on the machine, the model's shape or the command.
"""

from collections.abc import Callable, Iterator

import torch

from monograph.config import Settings
from monograph.device import Device
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError, join_with_or
from monograph.graph.lora import Lora, chosen_layers
from monograph.graph.precision import Precision
from monograph.model.adapter import is_adapter
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim.formats import FORMATS, format_names
from monograph.planner import Limits, defaults
from monograph.report.quantities import count, counted, gibibytes
from monograph.schedule import SCHEDULES
from monograph.session.by_key import values_by_field
from monograph.session.choices import (
    ADAPTED,
    COMPILED_WHOLE,
    FP8,
    FP8_HEAD,
    MODEL_FROM_CODE,
    MTP,
    NO_MASTER_WEIGHTS,
    QUANTIZED,
    REMAT_OFFLOADED,
    STREAMED,
    Choices,
    Condition,
    Exclusion,
    excludes,
    refuse_excluded,
)
from monograph.session.job import Job
from monograph.session.objective import Objective
from monograph.session.objectives import (
    BY_RECORDS,
    OBJECTIVES,
    chosen_objectives,
    objective_of,
    with_records,
)
from monograph.session.plan import RunPlan, is_sharded
from monograph.storage.code import code_named

# ── choices that do not go together ─────────────────────────────────────────────────────────────

NOT_SHARDED = Condition(
    "train.parallel = {parallel}", lambda choices: not is_sharded(choices.parallel), "none or ddp"
)
SHARDED = Condition(
    "train.parallel = {parallel}", lambda choices: is_sharded(choices.parallel), "fsdp or hsdp"
)
IN_PARALLEL = Condition(
    "train.parallel = {parallel}", lambda choices: choices.parallel != "none", "ddp, fsdp or hsdp"
)
GATHERED_IN_BF16 = Condition(
    "train.gather_dtype = bf16", lambda choices: choices.gather_dtype == "bf16"
)
PRECISION_OTHER_THAN_BF16 = Condition(
    "train.precision = {precision}",
    lambda choices: choices.precision not in ("auto", "bf16"),
    "fp32, fp16, fp8 or fp8_head",
)
PRECISION_WITHOUT_BF16_WEIGHTS = Condition(
    "train.precision = {precision}",
    lambda choices: choices.precision in ("fp32", "fp16"),
    "fp32 or fp16",
)
AVERAGED = Condition("optim.ema", lambda choices: choices.ema != "none")
LORA_RANK_GIVEN = Condition("lora.rank", lambda choices: choices.rank is not None)
INPUTS_DROPPED = Condition(
    "lora.dropout = {dropout}", lambda choices: bool(choices.dropout), "a number above 0"
)
STREAMED_BASE = Condition(
    "lora.rank with train.memory = stream",
    lambda choices: choices.is_adapted and choices.memory == "stream",
)
NOT_STOCHASTIC_STATE = Condition(
    "optim.state = {state}",
    lambda choices: not FORMATS[choices.state].stochastic,
    " or ".join(format_names(stochastic=False)),
)
NOT_CLIPPED = Condition("optim.grad_clip = none", lambda choices: choices.grad_clip == "none")
# `skip_spikes` may also be "auto", which excludes nothing.
SPIKES_SKIPPED = Condition("optim.skip_spikes = true", lambda choices: choices.skip_spikes is True)
SCHEDULE_WITHOUT_DECAY = Condition(
    "optim.schedule = {schedule}",
    lambda choices: not SCHEDULES[choices.schedule].falls,
    join_with_or(name for name, schedule in SCHEDULES.items() if not schedule.falls),
)
MIN_LR_RATIO_GIVEN = Condition(
    "optim.min_lr_ratio", lambda choices: choices.min_lr_ratio is not None
)
NO_MTP = Condition("model.mtp_num_hidden_layers = 0", lambda choices: not choices.mtp)
MTP_WEIGHT_GIVEN = Condition("train.mtp_weight", lambda choices: choices.mtp_weight is not None)
TRANSFER = Condition("optim.transfer = width", lambda choices: choices.transfer == "width")
NO_TRANSFER = Condition("optim.transfer = none", lambda choices: choices.transfer == "none")
TRANSFER_BASE_GIVEN = Condition(
    "optim.transfer_base", lambda choices: choices.transfer_base is not None
)

# The beginnings of several messages.
_STAGED = "train.memory = stream brings one stage after another to the device: with it"
_IN_BF16 = "optim.master_weights = false keeps the weights in bf16"

# In the messages, a field of `Choices` in braces stands for its value (in an f-string the braces are
# doubled). If several rules of a table apply, the first one is reported.
STEP_EXCLUSIONS = (
    Exclusion(
        REMAT_OFFLOADED,
        COMPILED_WHOLE,
        "train.remat = offload crosses between graphs: with it train.compile is blocks or none",
    ),
    Exclusion(STREAMED, COMPILED_WHOLE, f"{_STAGED} train.compile is blocks or none, not whole"),
    Exclusion(
        STREAMED,
        REMAT_OFFLOADED,
        f"{_STAGED} train.remat is none, full, pointwise or a number, not offload",
    ),
    Exclusion(
        STREAMED,
        INPUTS_DROPPED,
        "train.memory = stream runs each block twice, and lora.dropout = {dropout} would drop other inputs the second "
        "time: say lora.dropout = 0",
    ),
    Exclusion(
        ADAPTED,
        FP8,
        "train.precision = {precision} is for weights that are trained: with lora.rank take bf16 or fp32",
    ),
    excludes(FP8_HEAD, STREAMED, "it was not tried: take bf16 or fp8"),
    excludes(FP8_HEAD, IN_PARALLEL, "it was not tried: take bf16 or fp8"),
    excludes(FP8_HEAD, MODEL_FROM_CODE, "only Monograph's own loss has these products: take bf16"),
    Exclusion(
        ADAPTED,
        QUANTIZED,
        "train.quantize = {quantize} is for weights that are trained: with lora.rank take lora.base = int8 or nf4",
    ),
    excludes(QUANTIZED, STREAMED, "whole weights are rounded after an update: take device"),
    excludes(QUANTIZED, IN_PARALLEL, "it was not tried: leave one out"),
    excludes(QUANTIZED, MODEL_FROM_CODE, "there is no GGUF file of such a model: leave it out"),
    excludes(QUANTIZED, FP8, "products would round the weights again: take bf16 or fp32"),
    Exclusion(
        GATHERED_IN_BF16,
        NOT_SHARDED,
        "train.gather_dtype = bf16 is for weights that are shared out among ranks: take fsdp or hsdp",
    ),
    excludes(GATHERED_IN_BF16, PRECISION_OTHER_THAN_BF16, "products read bf16 weights: take bf16"),
    excludes(GATHERED_IN_BF16, LORA_RANK_GIVEN, "frozen weights stay as they are"),
    excludes(IN_PARALLEL, NO_MASTER_WEIGHTS, "gradients would be summed in bf16"),
    excludes(STREAMED_BASE, IN_PARALLEL, "it was not tried: take none"),
    excludes(SHARDED, STREAMED, "a rank that streams has whole weights: take ddp"),
    excludes(SHARDED, COMPILED_WHOLE, "blocks are gathered one by one: take blocks or none"),
    excludes(MTP, MODEL_FROM_CODE, "the function builds the whole model: leave it out"),
    excludes(MTP, STREAMED, "its head is in no stage: take device"),
    excludes(MTP, ADAPTED, "the head is trained with all weights: leave one out"),
    excludes(MTP, FP8, "it was not tried: take bf16"),
    excludes(MTP, QUANTIZED, "it was not tried: leave one out"),
    excludes(MTP, TRANSFER, "no rule carries the head's rate to another width: leave one out"),
    Exclusion(
        MTP_WEIGHT_GIVEN,
        NO_MTP,
        "train.mtp_weight is for a head that is trained: give model.mtp_num_hidden_layers = 1, too",
    ),
)
OPTIMIZER_EXCLUSIONS = (
    Exclusion(
        NO_MASTER_WEIGHTS,
        NOT_STOCHASTIC_STATE,
        f"{_IN_BF16}, and their moments: say optim.state = {' or '.join(format_names(stochastic=True))}, "
        "not {state}",
    ),
    Exclusion(
        NO_MASTER_WEIGHTS,
        STREAMED,
        f"{_IN_BF16}, and train.memory = stream keeps them in full precision: leave one out",
    ),
    Exclusion(
        NO_MASTER_WEIGHTS,
        PRECISION_WITHOUT_BF16_WEIGHTS,
        f"{_IN_BF16}, which train.precision = {{precision}} cannot use: take bf16 or fp8",
    ),
    excludes(QUANTIZED, NO_MASTER_WEIGHTS, "small updates of rounded weights would be lost"),
    excludes(QUANTIZED, AVERAGED, "a mean of rounded weights is not rounded: leave one out"),
    Exclusion(
        SPIKES_SKIPPED,
        NOT_CLIPPED,
        "optim.skip_spikes = true needs gradients that are clipped: give optim.grad_clip a number",
    ),
    Exclusion(
        MIN_LR_RATIO_GIVEN,
        SCHEDULE_WITHOUT_DECAY,
        "optim.schedule = {schedule} never falls: leave optim.min_lr_ratio out",
    ),
    Exclusion(
        TRANSFER_BASE_GIVEN,
        NO_TRANSFER,
        "optim.transfer_base belongs to width transfer: give optim.transfer = width, too",
    ),
)


def exclusions() -> Iterator[Exclusion]:
    """Yield all rules, in the order in which they are checked."""
    yield from STEP_EXCLUSIONS
    for objective in OBJECTIVES:
        yield from exclusions_of(objective)
    yield from OPTIMIZER_EXCLUSIONS


def exclusions_of(objective: Objective) -> Iterator[Exclusion]:
    """Yield the rules on what does not go with an objective. The caller must check them only if the
    settings choose it.
    """
    is_chosen = Condition(objective.key, lambda choices: True)
    for other, remedy in objective.excluded:
        yield excludes(is_chosen, other, remedy)


def choices_of(settings: Settings) -> Choices:
    """Return those values of the settings on which the rules depend."""
    init = settings.model.init
    begins_from_adapter = init is not None and is_adapter(init)
    return Choices(
        is_code=code_named(init) is not None,
        is_adapted=settings.lora.rank is not None or begins_from_adapter,
        **values_by_field(Choices, settings.values()),
    )


def require_compatible(settings: Settings) -> None:
    """Refuse settings with values that exclude one another.

    Raises:
        UsageError: two values exclude one another; the message names both.
    """
    choices = choices_of(settings)
    refuse_excluded(choices, STEP_EXCLUSIONS)
    objective = objective_of(settings)
    objective_keys = [each.key for each in chosen_objectives(settings) if each.has_key]
    if len(objective_keys) > 1:
        raise UsageError(
            f"{objective_keys[1]} does not go with {objective_keys[0]}: a run learns from one of both: leave one out"
        )
    refuse_excluded(choices, exclusions_of(objective))
    objective.require_keys(settings)
    refuse_excluded(choices, OPTIMIZER_EXCLUSIONS)


def require_possible(settings: Settings, machine: Device) -> None:
    """Refuse settings that exclude one another, and a precision that this machine lacks.

    This is called before any text is read.

    Raises:
        UsageError: a value is impossible; the message names another.
    """
    require_compatible(settings)
    # Width transfer needs the best rate of a narrower model. The default rate is not that.
    if settings.optim.transfer != "none" and settings.optim.lr == "auto":
        raise UsageError(
            f"{settings.quoted('optim.transfer')} carries a learning rate that was found on a narrower model: give it "
            "as optim.lr (`monograph sweep` finds it)"
        )
    precision = settings.train.precision
    obstacle = None if precision == "auto" else Precision(precision).obstacle(machine)
    if obstacle:
        remedy = "fp16 or fp32" if precision == "bf16" else defaults.precision(machine)
        raise UsageError(f"{settings.quoted('train.precision')}: {obstacle}; use {remedy}")


def require_trained_model(objective: Objective, init: str | None) -> None:
    """Refuse to train a new model with an objective that needs a trained one.

    Args:
        objective: what the model learns from.
        init: model.init; None for a new model.

    Raises:
        UsageError: the objective needs a trained model, and there is none.
    """
    if objective.needs_model and init is None:
        raise UsageError(
            f"{objective.key}: a new model answers nothing: name one that was trained on text, by model.init or --from"
        )


def require_one_device(settings: Settings, command: str) -> None:
    """Refuse `train.parallel` for a command that uses only one device.

    Raises:
        UsageError: `train.parallel` is on; the message names the command.
    """
    if settings.train.parallel != "none":
        raise UsageError(
            f"{settings.quoted('train.parallel')} is for `monograph train`; `monograph {command}` uses one device: "
            "leave it out, or add train.parallel=none"
        )


def require_texts(settings: Settings, command: str) -> None:
    """Refuse records other than texts, such as pairs of answers, for a command that knows only
    texts.

    Raises:
        UsageError: a key chooses such records, or data.source has them; the message names the
            command.
    """
    _require_objective(settings, command, "texts alone", lambda objective: objective.is_of_texts)


def require_swept(settings: Settings) -> None:
    """Refuse records from which the runs of a sweep cannot learn.

    Raises:
        UsageError: a key chooses such records, or data.source has them.
    """
    _require_objective(
        settings, "sweep", "texts, preferences and rewards", lambda objective: objective.sweeps
    )


def _require_objective(
    settings: Settings, command: str, known: str, is_known: Callable[[Objective], bool]
) -> None:
    """Refuse an objective that a command does not know.

    Args:
        settings: the settings.
        command: the command.
        known: what it knows, for the message.
        is_known: whether it knows an objective.
    """
    # If no key chooses what the run learns from, the form of the records does.
    settings_by_records = with_records(settings)
    objective = objective_of(settings_by_records)
    if is_known(objective):
        return
    key = objective.key
    if key in settings.origins:
        origin = settings.origins[key]
        remedy = "leave it out"
    else:
        origin = BY_RECORDS
        remedy = f"its records are {objective.records_noun(settings_by_records)}"
    value = settings_by_records.values()[key]
    raise UsageError(
        f"{origin}: {key} = {value} is for `monograph train`; `monograph {command}` knows {known}: {remedy}"
    )


def require_positions(length: int, config: LlamaConfig | None) -> None:
    """Refuse rows that are longer than a model has positions.

    Args:
        length: tokens of a row.
        config: the model's shape; None if it is not known yet.

    Raises:
        InputRefused: the rows are longer; the message names both lengths.
    """
    if config is None:
        return
    positions = config.max_position_embeddings
    if length > positions:
        raise InputRefused(
            f"data.sequence_length = {length} is longer than the model's max_position_embeddings = {positions}: "
            "shorten the rows"
        )


def require_stages(memory: str, config: LlamaConfig | None) -> None:
    """Refuse to stream a model whose blocks read more than the result of the block before.

    Args:
        memory: train.memory.
        config: the model's shape; None if it is not known yet.

    Raises:
        InputRefused: the model cannot be streamed; the message names what its blocks read.
    """
    if config is None or config.is_chain or memory != "stream":
        return
    key = "num_kv_shared_layers" if config.num_kv_shared_layers else "hidden_size_per_layer_input"
    raise InputRefused(
        f"train.memory = stream runs a model block by block, and blocks of this {config.model_type} read what others "
        f"computed ({key} = {getattr(config, key)}): take device"
    )


def require_adapter_targets(lora: Lora | None, config: LlamaConfig | None) -> None:
    """Refuse adapters for layers that the model does not have, or with a rank that is too high.

    The adapter of a weight W is the product B A. If its rank is above the shorter side of W, the
    adapter has more numbers than W for no gain. This is refused if it holds for every layer.

    Args:
        lora: the options of the adapters; None without adapters.
        config: the model's shape; None if it is not known yet.

    Raises:
        UsageError: the adapters do not fit the model.
    """
    if lora is None or config is None:
        return
    with torch.device("meta"):  # shapes without memory
        layers = chosen_layers(Llama(config), lora)
    max_rank = max(min(layer.weight.shape[-2:]) for layer in layers.values())
    if lora.rank > max_rank:
        raise UsageError(
            f"lora.rank = {lora.rank}: these layers' weights have rank {max_rank} at most; lower it"
        )


MIN_BYTES_PER_PARAMETER = 2  # a weight in 16 bits


def require_room_for_weights(
    job: Job, config: LlamaConfig, machine: Device, limits: Limits
) -> None:
    """Refuse a new model whose weights alone exceed all available memory, before any part of it is
    built.

    Args:
        job: what the run is to do.
        config: the model's shape.
        machine: the device.
        limits: the memory of the host and the disk, to which weights can be streamed.

    Raises:
        OutOfDeviceMemory: there is no room; the message names the keys that shape the model and the
            bytes needed and available.
    """
    if job.recipe.init is not None:
        return
    needed_bytes = MIN_BYTES_PER_PARAMETER * config.parameter_count()
    # If the device's memory is the host's, `host_bytes` already count it.
    device_bytes = 0 if limits.shared else machine.memory_bytes
    if needed_bytes > device_bytes + limits.host_bytes + limits.disk_bytes:
        raise OutOfDeviceMemory(
            f"{job.sizes_text}: {count(config.parameter_count())} parameters, whose weights alone are "
            f"{gibibytes(needed_bytes)} at {MIN_BYTES_PER_PARAMETER} bytes each; {machine.name} has "
            f"{gibibytes(machine.memory_bytes)}, the host {gibibytes(limits.host_bytes)} and the disk "
            f"{gibibytes(limits.disk_bytes)}: make it smaller"
        )


def notes_on(plan: RunPlan, machine: Device) -> Iterator[str]:
    """Yield a line for each setting whose effect may differ from what the user expects."""
    if plan.training.precision == "fp32" and machine.type == "cuda" and machine.has_bf16:
        yield "train.precision = fp32: products keep all digits, without tensor cores (no TF32); bf16 is much faster"
    training = plan.training
    given_tokens = plan.job.given_tokens_per_update
    if given_tokens != training.tokens_per_update:
        rows = f"{counted(training.window_rows, 'row')} of data.sequence_length = {training.length}"
        yield (
            f"train.tokens_per_update = {given_tokens}: an update has {rows}, "
            f"so {training.tokens_per_update:,} tokens"
        )
    micro_batch = training.rows
    window_rows = training.window_rows
    if micro_batch > window_rows:
        yield (
            f"train.micro_batch = {micro_batch}: an update has {window_rows} rows, "
            f"so micro-batches of {window_rows}"
        )
