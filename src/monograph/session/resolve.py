"""Turn a job into the plan of a run. This is the only place that decides an "auto" by the model's
shape or the device.

A value is decided as soon as its inputs are known, so that impossible values are refused before any
text is read:

- from the job alone: precision and sizes;
- from the model's shape: what fits the device;
- from the number of updates: intervals.

A *candidate* is a combination of micro-batch, recomputation, graph scope and memory that the
planner considers, with its predicted memory and time. The *graph scope* is what one compiled graph
holds (train.compile). A choice is *open* if the settings leave it to the planner by "auto". *Width
transfer* carries a learning rate from a narrow model to a wide one (`monograph.transfer`).
"""

import math
from dataclasses import replace
from typing import Any

from monograph import planner
from monograph.config import Settings
from monograph.device import Device, compiler_obstacle, default_device
from monograph.errors import OutOfDeviceMemory, UsageError
from monograph.model import hub
from monograph.model.config import LlamaConfig
from monograph.model.gguf import require_blocks
from monograph.optim import name_of
from monograph.planner import Candidate, Limits, PlanRequest, StreamCandidate, defaults
from monograph.predict.estimate import spared_bytes
from monograph.predict.footprint import Compile
from monograph.predict.roofline import Calibration
from monograph.session.door import fields_for_new_model, job_of
from monograph.session.job import Job
from monograph.session.new_tokens import NewTokens
from monograph.session.plan import Length, RunPlan, Shape, is_sharded, ranks_that_share
from monograph.session.record import ConfigRecord
from monograph.session.requirements import require_room_for_weights
from monograph.storage.cache_dir import cache_root, calibration_file
from monograph.text.tokenizer import parse_setting

# The values of train.remat among which the planner chooses for "auto".
REMATS = ("none", "pointwise", 0.5, 0.25, "full", "offload")
# The device's assumed FLOP/s. Any number will do: it is the same for all candidates, which have one
# precision, and only their order matters.
RANKING_FLOPS = 1e12


def resolve(
    given: Settings | ConfigRecord | RunPlan,
    machine: Device,
    *facts: Shape | Length,
    will_build: bool = True,
) -> RunPlan:
    """Return the plan of a run, with every value decided whose inputs are known.

    Args:
        given: the run's settings, as they are given or recorded; or a plan that was made from them
            earlier.
        machine: the device that the run trains on.
        facts: what is known now: the model's shape, the number of updates.
        will_build: whether the model will be built; if False, model.init may be a folder with
            config.json and no weights.

    Raises:
        InputRefused: a model, a tokenizer or an adapter cannot be used.
        OutOfDeviceMemory: nothing fits according to the planner.
        UsageError: choices exclude one another.
    """
    if isinstance(given, RunPlan):
        plan = given
    elif isinstance(given, ConfigRecord):
        plan = _plan_from_job(job_of(given.settings, will_build=will_build), machine)
    else:
        plan = _plan_from_job(job_of(given, will_build=will_build), machine)
    for fact in facts:
        if isinstance(fact, Shape):
            plan = _with_shape(plan, machine, fact)
        else:
            plan = _with_length(plan, fact)
    return plan


# ── from the job alone ──────────────────────────────────────────────────────────────────────────


def _plan_from_job(job: Job, machine: Device) -> RunPlan:
    """Return the first plan of a job, with the precision decided."""
    training = job.training
    if "precision" in job.open_choices:
        training = replace(training, precision=defaults.precision(machine))
    plan = RunPlan(
        job=job,
        training=training,
        memory=job.memory,
        open_choices=job.open_choices - {"precision"},
        intervals=job.intervals.of(job.updates),
        updates=job.updates,
    )
    answer_scoring = job.objective.answer_scoring(plan)
    # If the loss computes the log-probabilities of answers exactly as sampling did, each answer has
    # its own row (`Training.answer_scoring`).
    packed = job.reading.is_packed and answer_scoring != "exact"
    return plan.with_training(replace(training, answer_scoring=answer_scoring, packed=packed))


# ── from the model's shape ──────────────────────────────────────────────────────────────────────


def _with_shape(plan: RunPlan, machine: Device, shape: Shape) -> RunPlan:
    """Return the plan with micro-batch, recomputation, graph scope and memory decided.

    Given values stay. For a `Llama` the planner chooses the others. The memory of any other module
    is unknown, so its micro-batch has all rows. With several ranks, the work of one rank is planned.
    """
    job = plan.job
    config = shape.config
    rank_rows = math.ceil(plan.training.window_rows / shape.ranks)
    if config:
        require_blocks(config, plan.training.quantize)
        extra_bytes = job.objective.extra_bytes(plan, config, machine, shape.slots, shape.ranks)
        plan = replace(plan, extra_bytes=extra_bytes)
    expected: Candidate | None = None
    # The values of train.micro_batch, train.remat, train.compile and train.memory. Each of the next
    # blocks overrides the ones before it.
    choices: dict[str, Any] = {
        "micro_batch": rank_rows,
        "remat": "none",
        "compile": "whole",
        "memory": "device",
    }
    if shape.like:
        # Another run of this shape was planned already.
        expected = shape.like.expected
        choices = shape.like.choices
    elif config:
        expected = _chosen_candidate(plan, config, machine, shape)
        # On a machine without a compiler the candidate is eager. The run still gets a scope that
        # compiles: `warmup.compile_step` then finds no compiler, and prints the reason.
        scope = expected.work.compile
        if scope == "none":
            scope = _scopes(plan.job.parallel, config)[0]
        choices |= {
            "micro_batch": expected.work.rows,
            "remat": expected.work.remat,
            "compile": scope,
        }
    if plan.memory == "stream" or isinstance(expected, StreamCandidate):
        choices |= {"memory": "stream", "compile": "blocks"}
    # Offloading and sharding move tensors between two blocks, which cannot be done inside of a
    # graph.
    if plan.training.remat == "offload" or is_sharded(plan.job.parallel):
        choices["compile"] = "blocks"
    # The values that the settings give come last, so they always stay.
    choices |= {key: value for key, value in plan.choices.items() if key not in plan.open_choices}
    # A larger micro-batch would be partly empty.
    choices["micro_batch"] = min(choices["micro_batch"], plan.training.window_rows)
    optim = plan.training.optim
    # The default weight decay of a new model depends on how often its text is read.
    if job.is_decay_open and not job.recipe.init:
        fields = fields_for_new_model(job.recipe, name_of(optim), _epochs(plan, expected, shape))
        optim = replace(optim, weight_decay=fields.get("weight_decay", optim.weight_decay))
    decided: dict[str, Any] = {
        "optim.name": name_of(optim),
        "train.precision": plan.training.precision,
        "optim.weight_decay": optim.weight_decay,
    }
    if job.is_lr_open:
        decided["optim.lr"] = optim.lr
    decided |= {f"train.{key}": value for key, value in choices.items()}
    # Width transfer is for new models: if the settings ask for it, `transfer_to` refuses None.
    config_of_new = None if job.recipe.init else config
    transfer = job.transfer_to(config_of_new)
    training = replace(plan.training, lora=job.adapters(shape.tokens))
    if config:
        # This makes a `Work`, from which memory and time can be predicted.
        training = training.of(config, machine.type)
    training = replace(
        training,
        rows=min(choices["micro_batch"], rank_rows),
        compile=choices["compile"],
        remat=choices["remat"],
        optim=transfer.optimizer(optim) if transfer else optim,
    )
    return replace(
        plan.with_decided_values(decided),
        training=training,
        memory=choices["memory"],
        open_choices=frozenset(),
        transfer=transfer,
        # The planner cannot predict a rank that holds only some rows of each weight.
        expected=None if is_sharded(plan.job.parallel) else expected,
    )


def _epochs(plan: RunPlan, expected: Candidate | None, shape: Shape) -> int:
    """Return the number of times that the text will be read; 1 if the text's length is unknown.

    It is an estimate for a run whose length is a time.
    """
    if plan.job.span.epochs:
        return plan.job.span.epochs
    if not shape.records_per_epoch:
        return 1
    updates = plan.updates
    rows_per_update = plan.training.window_rows
    if expected and shape.minutes and not updates:
        updates = defaults.likely_updates(
            shape.minutes, expected.update_s, shape.records_per_epoch, rows_per_update
        )
    return round(updates * rows_per_update / shape.records_per_epoch)


def request_of(
    plan: RunPlan, config: LlamaConfig, machine: Device, tokens: tuple[int, ...] = ()
) -> PlanRequest:
    """Return the planner's input: how a model of this shape is trained, and the choices that are
    open.

    Args:
        plan: the run's plan, from its settings alone.
        config: the model's shape.
        machine: the device to train on.
        tokens: ids of the tokens whose rows are trained together with adapters.

    Raises:
        UsageError: width transfer does not go with this shape.
    """
    job = plan.job
    given = plan.training
    # Width transfer is for new models: if the settings ask for it, `transfer_to` refuses None.
    config_of_new = None if job.recipe.init else config
    transfer = job.transfer_to(config_of_new)
    optim = transfer.optimizer(given.optim) if transfer else given.optim
    training = replace(given, rows=given.window_rows, optim=optim, lora=job.adapters(tokens))
    # A value that the settings give is the only one that the planner may choose.
    micro_batch: int | None = given.rows
    if "micro_batch" in plan.open_choices:
        micro_batch = None
    scopes: tuple[Compile, ...] = (given.compile,)
    if "compile" in plan.open_choices:
        scopes = _scopes(job.parallel, config)
    remats: tuple[str | float, ...] = (given.remat,)
    if "remat" in plan.open_choices:
        # A CPU has no other memory to offload to.
        has_host_memory = machine.type == "cuda"
        remats = tuple(remat for remat in REMATS if remat != "offload" or has_host_memory)
    return PlanRequest(
        training.of(config, machine.type),
        micro_batch=micro_batch,
        precisions=(given.precision,),
        scopes=scopes,
        remats=remats,
    )


def _scopes(parallel: str, config: LlamaConfig) -> tuple[Compile, ...]:
    """Return the values of train.compile among which the planner chooses.

    Args:
        parallel: `train.parallel`. Sharded weights are gathered between two blocks.
        config: the model's shape.
    """
    if is_sharded(parallel):
        return ("blocks",)
    return defaults.scopes(config.num_hidden_layers)


def with_less_memory(machine: Device, taken_bytes: int) -> Device:
    """Return the device with `taken_bytes` less memory; with more if they are negative."""
    return replace(
        machine,
        memory_bytes=machine.memory_bytes - taken_bytes,
        free_memory_bytes=machine.free_memory_bytes - taken_bytes,
    )


def _chosen_candidate(
    plan: RunPlan, config: LlamaConfig, machine: Device, shape: Shape
) -> Candidate:
    """Return the candidate that `monograph plan` would choose for one rank on this machine.

    The planner knows one device that makes all updates alone. So the device's memory is changed for
    it: the bytes that sampling needs (`Objective.extra_bytes`) are subtracted, and with several
    ranks, the bytes that a rank saves are added (`spared_bytes`).

    Raises:
        OutOfDeviceMemory: nothing fits; the message names the nearest candidate and the missing
            bytes.
    """
    memory = plan.requested_memory
    objective = plan.job.objective
    if shape.slots:
        window = objective.largest_window(plan, config, shape.slots)
        training = replace(plan.training, window_rows=window.rows, length=window.length)
        plan = plan.with_training(training)
    if objective.samples_answers:
        machine = with_less_memory(machine, sum(plan.extra_bytes.values()))
    if not objective.can_stream:
        memory = "device"
    if plan.job.parallel != "none":
        training = plan.training
        rank_rows = math.ceil(training.window_rows / shape.ranks)
        plan = plan.with_training(replace(training, window_rows=rank_rows))
        # Several ranks stream only if the settings ask for it.
        memory = plan.memory
        if memory == "device":
            # With adapters, the base is frozen: its format and precision say how large it is.
            frozen_base = None
            if training.lora:
                frozen_base = (training.lora.base, training.precision)
            sharing_ranks = ranks_that_share(plan.job.parallel, shape.ranks)
            parameters = config.parameter_count()
            spared = spared_bytes(parameters, plan.job.parallel, sharing_ranks, frozen_base)
            machine = with_less_memory(machine, -spared)
    request = request_of(plan, config, machine, shape.tokens)
    has_compiler = machine.type != "cpu" or compiler_obstacle() is None
    compiled_scopes = tuple(scope for scope in request.scopes if scope != "none")
    # An eager step is planned only if nothing can or may be compiled.
    scopes: tuple[Compile, ...] = ("none",)
    if has_compiler and compiled_scopes:
        scopes = compiled_scopes
    flops_per_s = dict.fromkeys(request.precisions, RANKING_FLOPS)
    calibration = Calibration(calibration_file())
    cache_folder, _ = cache_root()
    limits = Limits.here(machine, planner.budget(machine), cache_folder)
    # All ranks may be on this machine, so each gets only its share of the host's memory.
    limits = replace(limits, host_bytes=limits.host_bytes // shape.ranks)
    require_room_for_weights(plan.job, config, machine, limits)
    # A CPU has no other memory to stream from.
    if machine.type == "cpu" and memory == "auto":
        memory = "device"
    answer = planner.streamed_or_resident(
        replace(request, scopes=scopes), machine, flops_per_s, calibration, memory, limits
    )
    if not answer.candidates:
        raise OutOfDeviceMemory(answer.refusal)
    # The planner keeps some memory free. If no candidate leaves that much (none is `chosen`), the
    # one with the smallest peak (`nearest`) is still tried, unless it exceeds even the free memory.
    best = answer.nearest
    if answer.chosen is None and best.peak_memory_bytes > machine.free_memory_bytes:
        raise OutOfDeviceMemory(answer.refusal)
    if isinstance(best, StreamCandidate):
        # The planner's placement is for any device of this kind.
        placement = replace(best.placement, device=default_device(), folder=limits.folder)
        return replace(best, placement=placement)
    return best


# ── from the number of updates ──────────────────────────────────────────────────────────────────


def _with_length(plan: RunPlan, length: Length) -> RunPlan:
    """Return the plan with the number of updates, and the intervals that depend on it."""
    intervals = plan.job.intervals.of(length.updates, length.evaluations)
    decided = {
        "optim.warmup_updates": intervals.warmup_updates,
        "train.eval_every": intervals.eval_every,
        "train.save_every": intervals.save_every,
    }
    # train.epochs and train.updates exclude one another in config.toml.
    if not plan.job.span.epochs:
        decided["train.updates"] = length.updates
    return replace(plan.with_decided_values(decided), updates=length.updates, intervals=intervals)


# ── for a plan alone ────────────────────────────────────────────────────────────────────────────


def shape_of(plan: RunPlan, tokens: NewTokens | None = None) -> LlamaConfig:
    """Return the shape that a run's model will have, without reading text.

    A BPE tokenizer that is still to be trained is assumed to reach its full size.

    Args:
        plan: the run's plan.
        tokens: the run's new tokens; None if they are unknown.

    Raises:
        UsageError: the model is a user's module, a run or a weight file, whose shape is known only
            once it is loaded.
        InputRefused: the folder has no model.
    """
    job = plan.job
    tokenizer = str(job.reading.tokenizer)
    if source := job.source:
        # An adapter is not refused here: the config.json of its base is read below.
        needs_loading = source.code or source.is_weight_file or source.run
        if needs_loading and not source.adapter:
            raise UsageError(
                f"model.init = {source.base}: a plan is made for a preset, sizes or a Hugging Face folder"
            )
        # If there is no shape, the folder's config.json cannot be used. Reading it raises an error
        # with the reason.
        return with_rows(source.shape or hub.read_config(source.base), tokens)
    sizes: dict[str, Any] = {"max_position_embeddings": plan.training.length}
    if tokenizer == "bpe":
        sizes["vocab_size"] = parse_setting(tokenizer, job.reading.vocab_size)
    elif tokenizer == "bytes":
        sizes["vocab_size"] = 259  # the bytes and three special tokens
    elif "vocab_size" not in job.recipe.sizes and job.recipe.preset == "auto":
        raise UsageError("model.vocab_size: give it, as a plan reads no tokenizer's file")
    return job.recipe.shape(**sizes)


def with_rows(config: LlamaConfig, tokens: NewTokens | None) -> LlamaConfig:
    """Return the shape with an embedding row for each token of the run's tokenizer.

    Args:
        config: the shape of the model before it gets rows for new tokens.
        tokens: the run's new tokens; None if they are unknown, or for a new model.
    """
    # Without sizes, the model is a Python function's, whose rows are not changed.
    if tokens is None or tokens.sizes is None:
        return config
    return replace(config, vocab_size=max(config.vocab_size, tokens.sizes.run))
