"""Turn a job into the plan of a run: the only place that decides an "auto" by the model's shape or
the device.

A value is decided as soon as its inputs are known: sizes from the job alone, so that impossible
ones are refused before any text is read; what fits the device from the model's shape; intervals
from the number of updates.
"""

from dataclasses import replace
from typing import Any

from monograph import planner
from monograph.config import Settings
from monograph.device import Device, compiler_obstacle, default_device
from monograph.errors import OutOfDeviceMemory, UsageError
from monograph.model import hub
from monograph.model.config import LlamaConfig
from monograph.optim import name_of
from monograph.planner import Candidate, Limits, Request, StreamCandidate, defaults
from monograph.predict.estimate import spared_bytes
from monograph.predict.footprint import Compile
from monograph.predict.roofline import Calibration
from monograph.session.door import fresh_fields, job_of
from monograph.session.job import Job
from monograph.session.new_tokens import NewTokens
from monograph.session.plan import Length, Plan, Shape, is_sharded, sharing
from monograph.session.record import ConfigRecord
from monograph.session.requirements import require_room
from monograph.storage.cache_dir import cache_root, calibration_file
from monograph.text.tokenizer import parse

# The policies among which the planner chooses for "auto"; a CPU has no other memory for the last,
# "offload".
REMATS = ("none", "pointwise", 0.5, 0.25, "full", "offload")
# Any rate will do, since only the order of candidates of one precision matters.
RANKING_FLOPS = 1e12


def resolve(
    given: Settings | ConfigRecord | Plan,
    machine: Device,
    *known: Shape | Length,
    built: bool = True,
) -> Plan:
    """Return the plan of a run, with every value decided whose inputs are known.

    Args:
        given: the run's settings, as they are given or recorded, or the plan that was made from
            them before.
        machine: the device that the run trains on.
        known: facts that are known now: the model's shape, the number of updates.
        built: whether the model will be built; if not, a folder with config.json and no weights
            will do.

    Raises:
        InputRefused: a model, a tokenizer or an adapter cannot be used.
        OutOfDeviceMemory: nothing fits according to the planner.
        UsageError: choices exclude one another.
    """
    settings = given.settings if isinstance(given, ConfigRecord) else given
    plan = (
        settings if isinstance(settings, Plan) else _sized(job_of(settings, built=built), machine)
    )
    for fact in known:
        plan = _fitted(plan, machine, fact) if isinstance(fact, Shape) else _lasting(plan, fact)
    return plan


# ── from the job alone ──────────────────────────────────────────────────────────────────────────


def _sized(job: Job, machine: Device) -> Plan:
    training = job.training
    if "precision" in job.open:
        training = replace(training, precision=defaults.precision(machine))
    plan = Plan(
        job,
        training,
        job.memory,
        job.open - {"precision"},
        job.intervals.of(job.updates),
        updates=job.updates,
    )
    judged = job.objective.judged(plan)
    return plan.having(
        replace(training, judged=judged, packed=job.reading.is_packed and judged != "exact")
    )


# ── from the model's shape ──────────────────────────────────────────────────────────────────────


def _fitted(plan: Plan, machine: Device, shape: Shape) -> Plan:
    """Fix micro-batch, recomputation and graph scope: as given, else as planned for a Llama, else
    all rows at once.

    The memory that a module other than a Llama needs is unknown. With several ranks, the share of
    one rank is planned.
    """
    job = plan.job
    config = shape.config
    share = -(-plan.training.window_rows // shape.ranks)
    if config:
        beside = job.objective.bytes_beside(plan, config, machine, shape.slots, shape.ranks)
        plan = replace(plan, beside=beside)
    expected: Candidate | None = None
    fixed: dict[str, Any] = {
        "micro_batch": share,
        "remat": "none",
        "compile": "whole",
        "memory": "device",
    }
    if shape.like:
        expected = shape.like.expected
        fixed = shape.like.choices
    elif config:
        expected = _planned(plan, config, machine, shape)
        # If nothing can be compiled, the plan is for eager steps; the scope stays, and `prepare`
        # prints the reason.
        holds = expected.work.compile
        holds = _scopes(plan.job.parallel, config)[0] if holds == "none" else holds
        fixed |= {"micro_batch": expected.work.rows, "remat": expected.work.remat, "compile": holds}
    if plan.memory == "stream" or isinstance(expected, StreamCandidate):
        fixed |= {"memory": "stream", "compile": "blocks"}
    # Tensors move between graphs.
    if plan.training.remat == "offload" or is_sharded(plan.job.parallel):
        fixed["compile"] = "blocks"
    fixed |= {key: value for key, value in plan.choices.items() if key not in plan.open}
    # Larger micro-batches would be partly empty.
    fixed["micro_batch"] = min(fixed["micro_batch"], plan.training.window_rows)
    optim = plan.training.optim
    if job.is_decay_open and not job.recipe.init:
        fields = fresh_fields(job.recipe, name_of(optim), _epochs(plan, expected, shape))
        optim = replace(optim, weight_decay=fields.get("weight_decay", optim.weight_decay))
    decided: dict[str, Any] = {
        "optim.name": name_of(optim),
        "train.precision": plan.training.precision,
    }
    decided["optim.weight_decay"] = optim.weight_decay
    if job.is_rate_open:
        decided["optim.lr"] = optim.lr
    transfer = job.transfer_to(None if job.recipe.init else config)
    training = replace(plan.training, lora=job.adapters(shape.tokens))
    return replace(
        plan.noting(decided | {f"train.{key}": value for key, value in fixed.items()}),
        training=replace(
            training.of(config, machine.type) if config else training,
            rows=min(fixed["micro_batch"], share),
            compile=fixed["compile"],
            remat=fixed["remat"],
            optim=transfer.optimizer(optim) if transfer else optim,
        ),
        memory=fixed["memory"],
        open=frozenset(),
        transfer=transfer,
        # What a rank that holds only some rows of each weight needs is unknown.
        expected=None if is_sharded(plan.job.parallel) else expected,
    )


def _epochs(plan: Plan, expected: Candidate | None, shape: Shape) -> int:
    """Return how often the text will be read, as far as that is known."""
    updates = plan.updates
    rows = plan.training.window_rows
    if expected and shape.per_epoch and shape.minutes and not updates:
        updates = defaults.likely_updates(shape.minutes, expected.update_s, shape.per_epoch, rows)
    return plan.job.span.epochs or (
        round(updates * rows / shape.per_epoch) if shape.per_epoch else 1
    )


def request_of(
    plan: Plan, config: LlamaConfig, machine: Device, tokens: tuple[int, ...] = ()
) -> Request:
    """Return the planner's input: what is given for training a model of this shape, and the choices
    that are open.

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
    transfer = job.transfer_to(None if job.recipe.init else config)
    optim = transfer.optimizer(given.optim) if transfer else given.optim
    training = replace(given, rows=given.window_rows, optim=optim, lora=job.adapters(tokens))
    remats = REMATS if machine.type == "cuda" else REMATS[:-1]
    return Request(
        training.of(config, machine.type),
        micro_batch=None if "micro_batch" in plan.open else given.rows,
        precisions=(given.precision,),
        scopes=_scopes(plan.job.parallel, config) if "compile" in plan.open else (given.compile,),
        remats=remats if "remat" in plan.open else (given.remat,),
    )


def _scopes(parallel: str, config: LlamaConfig) -> tuple[Compile, ...]:
    return ("blocks",) if is_sharded(parallel) else defaults.scopes(config.num_hidden_layers)


def without(machine: Device, taken_bytes: int) -> Device:
    """Return the device as it is with so much of its memory taken."""
    free_bytes, memory_bytes = (
        machine.free_memory_bytes - taken_bytes,
        machine.memory_bytes - taken_bytes,
    )
    return replace(machine, memory_bytes=memory_bytes, free_memory_bytes=free_bytes)


def _planned(plan: Plan, config: LlamaConfig, machine: Device, shape: Shape) -> Candidate:
    """Return the candidate that `monograph plan` would choose for one rank on this machine.

    What a run with rewards holds beside its step is taken off; for ranks see `spared_bytes`.

    Raises:
        OutOfDeviceMemory: nothing fits; the message names the nearest candidate and by how much it
            misses.
    """
    memory = plan.asked_memory
    objective = plan.job.objective
    if shape.slots:
        rows, length = objective.largest_window(plan, config, shape.slots)
        plan = plan.having(replace(plan.training, window_rows=rows, length=length))
    if objective.answers_on_device:
        machine = without(machine, sum(plan.beside.values()))
        memory = "device"
    if plan.job.parallel != "none":
        training = plan.training
        plan = plan.having(replace(training, window_rows=-(-training.window_rows // shape.ranks)))
        memory = "stream"
        if plan.memory != "stream":
            kept = (training.lora.base, training.precision) if training.lora else None
            shared = sharing(plan.job.parallel, shape.ranks)
            machine = without(
                machine, -spared_bytes(config.parameter_count(), plan.job.parallel, shared, kept)
            )
            memory = "device"
    request = request_of(plan, config, machine, shape.tokens)
    eager = request.scopes == ("none",) or (
        machine.type == "cpu" and compiler_obstacle() is not None
    )
    scopes: tuple[Compile, ...] = (
        ("none",) if eager else tuple(scope for scope in request.scopes if scope != "none")
    )
    rates = dict.fromkeys(request.precisions, RANKING_FLOPS)
    known = Calibration(calibration_file())
    limits = Limits.here(machine, planner.budget(machine), cache_root()[0])
    # At worst all ranks are on this machine.
    limits = replace(limits, host_bytes=limits.host_bytes // shape.ranks)
    require_room(plan.job, config, machine, limits)
    # A CPU has no other memory to stream from.
    memory = "device" if machine.type == "cpu" and memory == "auto" else memory
    answer = planner.streamed_or_resident(
        replace(request, scopes=scopes), machine, rates, known, memory, limits
    )
    too_large = answer.candidates and answer.nearest.peak_memory_bytes > machine.free_memory_bytes
    if not answer.candidates or (answer.chosen is None and too_large):
        raise OutOfDeviceMemory(answer.refusal)
    best = answer.nearest
    if isinstance(best, StreamCandidate):
        return replace(
            best, placement=replace(best.placement, device=default_device(), folder=limits.folder)
        )
    return best


# ── from the number of updates ──────────────────────────────────────────────────────────────────


def _lasting(plan: Plan, length: Length) -> Plan:
    intervals = plan.job.intervals.of(length.updates, length.evaluations)
    decided = {
        "optim.warmup_updates": intervals.warmup_updates,
        "train.eval_every": intervals.eval_every,
        "train.save_every": intervals.save_every,
    }
    decided |= {} if plan.job.span.epochs else {"train.updates": length.updates}
    return replace(plan.noting(decided), updates=length.updates, intervals=intervals)


# ── for a plan alone ────────────────────────────────────────────────────────────────────────────


def shape_of(plan: Plan, tokens: NewTokens | None = None) -> LlamaConfig:
    """Return the shape that a run's model will have, without reading text; a BPE is taken to reach
    its full size.

    Args:
        plan: the run's plan.
        tokens: the run's new tokens, if they are known.

    Raises:
        UsageError: the model is a user's module, a run or a weight file, whose shape only loading
            tells.
        InputRefused: the folder holds no model.
    """
    job = plan.job
    tokenizer = str(job.reading.tokenizer)
    if source := job.source:
        if not source.adapter and (source.code or source.is_weight_file or source.run):
            raise UsageError(
                f"model.init = {source.base}: a plan is made for a preset, sizes or a Hugging Face folder"
            )
        # Read again for its refusal.
        return with_rows(source.shape or hub.read_config(source.base), tokens)
    sizes: dict[str, Any] = {"max_position_embeddings": plan.training.length}
    if tokenizer == "bpe":
        sizes["vocab_size"] = parse(tokenizer, job.reading.vocab_size)
    elif tokenizer == "bytes":
        sizes["vocab_size"] = 259  # the bytes and three special tokens
    elif "vocab_size" not in job.recipe.sizes and job.recipe.preset == "auto":
        raise UsageError("model.vocab_size: give it, as a plan reads no tokenizer's file")
    return job.recipe.shape(**sizes)


def with_rows(config: LlamaConfig, tokens: NewTokens | None) -> LlamaConfig:
    """Return the shape with a row for each token."""
    rows = tokens.vocabulary.all if tokens and tokens.vocabulary else 0
    return replace(config, vocab_size=max(config.vocab_size, rows))
