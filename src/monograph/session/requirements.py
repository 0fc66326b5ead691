"""Refuse settings that exclude one another or do not fit this machine or model."""

import math
from collections.abc import Iterator

import torch

from monograph.config import Settings
from monograph.device import Device
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.graph.lora import Lora, chosen_layers
from monograph.graph.precision import Precision
from monograph.model.adapter import is_adapter
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.planner import Limits, defaults
from monograph.report.quantities import count, counted, gibibytes
from monograph.session.job import Job
from monograph.session.objective import refuse_first
from monograph.session.objectives import objective_of, require_one
from monograph.session.objectives.preferences import with_records
from monograph.session.plan import Plan, is_sharded

LEAST_BYTES = 2  # the least bytes of a parameter, its weight in 16 bits


def require_possible(settings: Settings, machine: Device) -> None:
    """Refuse a precision that this machine lacks and choices that exclude one another, before any text is read.

    Raises:
        UsageError: a choice is impossible; the message names another.
    """
    require_together(settings)
    if settings.optim.transfer != "none" and settings.optim.lr == "auto":  # the base's best rate is unknown
        raise UsageError(
            f"{settings.said('optim.transfer')} carries a learning rate that was found on a narrower model: give it "
            "as optim.lr (`monograph sweep` finds it)"
        )
    name = settings.train.precision
    obstacle = None if name == "auto" else Precision(name).obstacle(machine)
    if obstacle:
        instead = "fp16 or fp32" if name == "bf16" else defaults.precision(machine)
        raise UsageError(f"{settings.said('train.precision')}: {obstacle}; use {instead}")


def require_together(settings: Settings) -> None:
    """Refuse choices that exclude one another.

    Raises:
        UsageError: two choices exclude one another; the message names both.
    """
    train = settings.train
    if (train.remat, train.compile) == ("offload", "whole"):
        raise UsageError("train.remat = offload crosses between graphs: with it train.compile is blocks or none")
    if train.memory == "stream":
        staged = "train.memory = stream brings one stage after another to the device: with it"
        if train.compile == "whole":
            raise UsageError(f"{staged} train.compile is blocks or none, not whole")
        if train.remat == "offload":
            raise UsageError(f"{staged} train.remat is none, full, pointwise or a number, not offload")
    require_with_lora(settings)
    require_with_ranks(settings)
    require_one(settings)
    _require_optim(settings)


def _require_optim(settings: Settings) -> None:
    """Refuse choices of [optim] that exclude one another, or choices of [train].

    Raises:
        UsageError: two choices exclude one another; the message names both.
    """
    optim = settings.optim
    train = settings.train
    if not optim.master_weights:
        narrow = "optim.master_weights = false keeps the weights in bf16"
        if optim.state != "bf16":
            raise UsageError(f"{narrow}, and their moments: say optim.state = bf16, not {optim.state}")
        if train.memory == "stream":
            raise UsageError(f"{narrow}, and train.memory = stream keeps them in full precision: leave one out")
        if train.precision in ("fp32", "fp16"):
            raise UsageError(f"{narrow}, which train.precision = {train.precision} cannot use: take bf16 or fp8")
    if optim.skip_spikes is True and optim.grad_clip == "none":
        raise UsageError("optim.skip_spikes = true is of gradients that are clipped: give optim.grad_clip a number")
    if optim.min_lr_ratio is not None and optim.schedule == "constant":
        raise UsageError("optim.schedule = constant never falls: leave optim.min_lr_ratio out")
    if optim.transfer_base is not None and optim.transfer == "none":
        raise UsageError("optim.transfer_base is of width transfer: say optim.transfer = width, too")


def require_with_ranks(settings: Settings) -> None:
    """Refuse choices that do not go with `train.parallel`.

    Raises:
        UsageError: two choices exclude one another; the message names both.
    """
    train = settings.train
    halved = train.gather_dtype == "bf16"
    if halved and not is_sharded(train.parallel):
        raise UsageError("train.gather_dtype = bf16 is of weights that ranks share out: take fsdp or hsdp")
    if train.parallel == "none":
        return
    excluded = {
        "optim.master_weights = false": (not settings.optim.master_weights, "gradients would be summed in bf16"),
    }
    if is_sharded(train.parallel):
        if halved and train.precision not in ("auto", "bf16"):
            raise UsageError(
                f"train.gather_dtype = bf16 does not go with train.precision = {train.precision}: products read bf16 "
                "weights: take bf16"
            )
        if halved and settings.lora.rank is not None:
            raise UsageError("train.gather_dtype = bf16 does not go with lora.rank: frozen weights stay as they are")
        excluded |= {
            "train.memory = stream": (train.memory == "stream", "a rank that streams has whole weights: take ddp"),
            "train.compile = whole": (train.compile == "whole", "blocks are gathered one by one: take blocks or none"),
        }
    refuse_first(f"train.parallel = {train.parallel}", excluded)


def require_with_lora(settings: Settings) -> None:
    """Refuse choices that do not go with adapters.

    Raises:
        UsageError: two choices exclude one another; the message names both.
    """
    if settings.lora.rank is None and not (settings.model.init and is_adapter(settings.model.init)):
        return
    train = settings.train
    if train.memory == "stream":
        raise UsageError("train.memory = stream fetches weights that are trained: with lora.rank it is device")
    if train.precision == "fp8":
        raise UsageError("train.precision = fp8 is for weights that are trained: with lora.rank take bf16 or fp32")


def require_taught(settings: Settings) -> None:
    """Refuse to learn from judged answers without a model that answers.

    Raises:
        UsageError: there is none.
    """
    objective = objective_of(settings)
    if objective.judges and settings.model.init is None:
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
    """Refuse rewards and preferences for a command that knows only texts.

    Raises:
        UsageError: `rl.reward` is given, or `prefer.loss`, or the records are pairs; the message names the command.
    """
    known = with_records(settings)
    objective = objective_of(known)
    if not objective.judges:
        return
    key = objective.key
    origin = settings.origins.get(key, "data.source")
    remedy = "leave it out" if key in settings.origins else f"its records are {objective.records(known)}"
    only = f"is for `monograph train`; `monograph {command}` knows texts alone: {remedy}"
    raise UsageError(f"{origin}: {key} = {known.values()[key]} {only}")


def require_positions(length: int, config: LlamaConfig | None) -> None:
    """Refuse rows that are longer than a model has positions; None means that its shape is not known yet.

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
    """Refuse adapters' targets that a model does not have; None means that its shape is not known yet.

    A rank above the shorter side of every target W is refused, too, since B A then has more numbers than W for no gain.

    Raises:
        UsageError: the targets do not fit the model.
    """
    if lora is None or config is None:
        return
    with torch.device("meta"):
        layers = chosen_layers(Llama(config), lora)
    most = max(min(layer.weight.shape[-2:]) for layer in layers.values())
    if lora.rank > most:
        raise UsageError(f"lora.rank = {lora.rank}: these layers' weights have rank {most} at most; lower it")


def require_room(job: Job, config: LlamaConfig, machine: Device, limits: Limits) -> None:
    """Refuse a new model whose weights alone exceed all available memory, before any part of it is built.

    Raises:
        OutOfDeviceMemory: it does; the message names the keys that shape the model and the bytes needed and available.
    """
    needed = LEAST_BYTES * config.parameter_count()
    device_bytes = 0 if limits.shared else machine.memory_bytes
    if job.recipe.init is None and needed > device_bytes + limits.host_bytes + limits.disk_bytes:
        raise OutOfDeviceMemory(
            f"{job.sizes_said}: {count(config.parameter_count())} parameters, whose weights alone are "
            f"{gibibytes(needed)} at {LEAST_BYTES} bytes each; {machine.name} has {gibibytes(machine.memory_bytes)}, "
            f"the host {gibibytes(limits.host_bytes)} and the disk {gibibytes(limits.disk_bytes)}: make it smaller"
        )


def notes_on(plan: Plan, machine: Device) -> Iterator[str]:
    """Yield a line for each setting whose effect may differ from what the user expects."""
    if plan.precision == "fp32" and machine.type == "cuda" and machine.has_bf16:
        yield "train.precision = fp32: products keep all digits, without tensor cores (no TF32); bf16 is much faster"
    given = plan.job.asked_tokens
    if given != plan.tokens_per_update:
        rows = f"{counted(plan.rows, 'row')} of data.sequence_length = {plan.sequence_length}"
        yield f"train.tokens_per_update = {given}: an update has {rows}, so {plan.tokens_per_update:,} tokens"
    if plan.micro_batch > plan.rows:
        yield f"train.micro_batch = {plan.micro_batch}: an update has {plan.rows} rows, so micro-batches of {plan.rows}"
