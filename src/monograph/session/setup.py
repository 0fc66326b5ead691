"""Turn a plan into a session: build the model, decide what depends on its shape, make the engine.

A *hybrid* is a model of which some layers have linear attention instead of softmax attention.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from monograph.device import Device, describe
from monograph.distributed.engine import Replicated, Sharded, StepOptions, streamed_replica
from monograph.distributed.world import World
from monograph.engine import Engine
from monograph.errors import InputRefused, UsageError
from monograph.graph.lora import OptionalDevice
from monograph.graph.mmap_weights import materialize_
from monograph.graph.precision import Precision
from monograph.graph.remat import named
from monograph.loss import Loss, TokenLoss
from monograph.model.adapter import install_adapters
from monograph.model.config import LlamaConfig
from monograph.model.layer_types import LINEAR_ATTENTION
from monograph.model.llama import Llama
from monograph.resident import Resident
from monograph.run.folder import Run
from monograph.run.models import build
from monograph.run.progress import Progress
from monograph.run.recipe import ModelRecipe, add_missing_rows, digest, lora_record, require_base_of
from monograph.run.recorded_state import newest_state
from monograph.run.writing import recorded_parent
from monograph.session.new_tokens import token_notes
from monograph.session.objective import Task
from monograph.session.plan import RunPlan, Shape, is_sharded
from monograph.session.ranks import agreed
from monograph.session.requirements import require_positions
from monograph.session.resolve import resolve, with_rows
from monograph.session.session import Session, seed_all
from monograph.session.warmup import mixing_rows
from monograph.stream import Placement, Streamed


class BuiltRun(NamedTuple):
    """A model built from a plan, before it gets an engine.

    Attributes:
        plan: the plan. Every value is decided, except the number of updates and what depends on
            it.
        recipe: what the model was built from, as its checkpoints record it.
        model: the model, with its weights on the host or still in their files.
        loss: the model's loss.
        notes: lines about the model's tokens that the user should read.
    """

    plan: RunPlan
    recipe: ModelRecipe
    model: nn.Module
    loss: Loss
    notes: tuple[str, ...] = ()


def open_session(
    run: Run,
    plan: RunPlan,
    task: Task,
    device: torch.device,
    progress: Progress,
    world: World | None = None,
) -> Session:
    """Return a run's session at its beginning.

    With several ranks, rank 0 plans, and the others follow its plan.

    Args:
        run: the run's folder.
        plan: the run's plan so far.
        task: what the run learns from.
        device: the device to train on.
        progress: the display of the run.
        world: the ranks that train together; None for this process alone.
    """
    world = world or World()
    machine = describe()
    plan = _with_recorded_norm_eps(plan, run)
    if world.leads:
        minutes = plan.job.span.minutes
        built = build_run(plan, task, machine, device, world.size, minutes=minutes)
        agreed_plan(world, built.plan, machine)
    else:
        decided = _with_recorded_norm_eps(agreed_plan(world, plan, machine), run)
        built = build_run(decided, task, machine, device, world.size)
    for line in built.notes:
        progress.line("tokens", line)
    if rate := getattr(_shape(built.model), "attention_dropout", 0):
        progress.line(
            "note",
            f"attention_dropout = {rate} stays in config.json; nothing is dropped in training here",
        )
    source = built.plan.job.source
    if source and (names := source.left_out):
        progress.line("note", f"only the text model is trained: {names} are left out")
    if (
        isinstance(built.model, Llama)
        and built.model.balance_factor
        and not isinstance(built.loss, TokenLoss)
    ):
        progress.line(
            "note",
            "output_router_logits = true balances experts by texts; rewards and pairs train without it",
        )
    engine = make_engine(built, device, world)
    seed_all(built.plan.job.seed)
    return Session(run, built.plan, built.recipe, task, engine, world=world)


def agreed_plan(world: World, plan: RunPlan, machine: Device) -> RunPlan:
    """Return a plan with rank 0's values on all ranks; all of them call this.

    Rank 0 sends what its config.toml would say, and the others make a plan of it for their own
    device.
    """
    record = agreed(world, plan.record)
    return plan if world.leads else resolve(record, machine)


def _with_recorded_norm_eps(plan: RunPlan, run: Run) -> RunPlan:
    """Return the plan of a hybrid with the rms_norm_eps in a checkpoint of its run, or of the run's
    parent.

    Presets of hybrids had another rms_norm_eps in earlier versions, 1e-5, with which their runs
    continue. A plan of another model, or without a checkpoint, stays as it is.
    """
    recipe = plan.job.recipe
    if (
        recipe.init is not None
        or recipe.shape(vocab_size=1).family.other_layer_type != LINEAR_ATTENTION
    ):
        return plan
    state = newest_state(run)
    parent = recorded_parent(run)
    if parent and not state:
        state = newest_state(parent.run)
    shape = state.get("model_config")
    if shape is None:
        return plan
    recipe = recipe._replace(norm_eps=LlamaConfig.from_hf(shape).rms_norm_eps)
    return replace(plan, job=replace(plan.job, recipe=recipe))


def build_run(
    plan: RunPlan,
    task: Task,
    machine: Device,
    device: OptionalDevice = None,
    ranks: int = 1,
    like: RunPlan | None = None,
    minutes: float = 0,
) -> BuiltRun:
    """Build the model and decide the values that depend on its shape.

    Args:
        plan: the run's plan, from its settings alone.
        task: what the run learns from.
        machine: the device, for the planner.
        device: where the frozen weights go if there are adapters. Each is moved as soon as it is
            rounded to the dtype of `lora.base`, so the host need not hold a second copy of all.
            None leaves them on the host.
        ranks: number of processes that train the model together.
        like: the plan of another run of the same shape, whose choices this run takes; None lets the
            planner choose.
        minutes: the training time of a run by the clock; 0 if it is unknown (see `Shape`).

    Raises:
        OutOfDeviceMemory: nothing fits according to the plan; raised before anything is built if
            the shape is known.
        InputRefused: the model does not fit the text.
    """
    job = plan.job
    recipe = job.recipe
    text = task.data
    # A single file of weights has no config.json: its tensors give these sizes.
    if recipe.adapter or not (job.source and job.source.is_weight_file):
        sizes = {"vocab_size": text.vocab_size, "max_position_embeddings": plan.training.length}
        recipe = recipe._replace(sizes=sizes | recipe.sizes)
    new = job.tokens.compared(text.tokenizer)
    facts = ranks, like, task.slots(plan), task.per_epoch if task.repeats else 0, minutes
    # The shape of a preset or folder is known now, so that what does not fit is refused before the
    # model is built. The model of a Python function or a weight file has its shape only then.
    known_shape = job.source.shape if job.source else recipe.shape()
    if known_shape:
        tokens = new.trained(known_shape.vocab_size) if new else ()
        plan = resolve(plan, machine, Shape(with_rows(known_shape, new), tokens, *facts))
    model, loss = build(recipe)
    rows = model.config.vocab_size if isinstance(model, Llama) else 0
    tokens = new.trained(rows) if new else ()
    notes = token_notes(new, rows)
    if lora := job.adapters(tokens):
        recipe = recipe._replace(lora=lora_record(lora), base_sha256=digest(model))
    if new and new.vocabulary and isinstance(model, Llama):
        recipe = recipe._replace(
            vocabulary=add_missing_rows(model, new.vocabulary, str(recipe.init))
        )
    if config := _shape(model):
        _require_fit(config, text.vocab_size, plan.training.length)
    if not known_shape:
        plan = resolve(plan, machine, Shape(config, tokens, *facts))
    if plan.transfer:
        plan.transfer.initialise_(model)
    if lora:
        start = job.source.adapter if job.source else None
        if start:
            require_base_of(start, str(recipe.base_sha256))
        # With fsdp and hsdp the base stays on the host, because a device may have no room for all
        # of it.
        base_device = None if is_sharded(job.parallel) else device
        install_adapters(
            model,
            lora,
            seed=job.seed,
            start=start,
            precision=Precision(plan.training.precision),
            device=base_device,
        )
    return BuiltRun(plan, recipe, model, task.loss(plan, model) or loss, notes)


def _require_fit(config: LlamaConfig, vocab_size: int, length: int) -> None:
    """Refuse a model with fewer rows than tokens, or fewer positions than a row of text."""
    if config.vocab_size < vocab_size:
        raise InputRefused(
            f"model.vocab_size = {config.vocab_size} is smaller than the tokenizer's {vocab_size}: raise it"
        )
    require_positions(length, config)


def _shape(model: nn.Module) -> LlamaConfig | None:
    return model.config if isinstance(model, Llama) else None


def make_engine(built: BuiltRun, device: torch.device, world: World | None = None) -> Engine:
    """Return the engine for a model, with its weights on the device or streamed to it.

    Args:
        built: the model and its plan.
        device: the device to train on.
        world: the ranks that train together; None for this process alone.

    Raises:
        UsageError: there are several ranks without GPUs, and the model normalises over rows.
    """
    plan, model = built.plan, built.model
    training = plan.training
    if isinstance(model, Llama) and not isinstance(built.loss, TokenLoss):
        # The balancing loss weights experts by each token's share of the loss, which only
        # `TokenLoss` has.
        model.balance_factor = 0.0
    shared: StepOptions = {
        "loss": built.loss,
        "optim": training.optim,
        "clip": training.clip,
        "precision": Precision(training.precision),
        "remat": named(training.remat),
    }
    rows = training.rows
    world = None if plan.job.parallel == "none" else world
    batch_norms = mixing_rows(model) if world else []
    if batch_norms:
        if device.type != "cuda":
            raise UsageError(
                f"{batch_norms[0]} normalises over the rows of all ranks, which torch supports only on GPUs: "
                "take another norm, or train.parallel = none"
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if plan.memory == "stream":
        placement = plan.placement or Placement(device)
        if world:
            return streamed_replica(
                model, world=world, micro_batch=rows, placement=placement, **shared
            )
        return Streamed(model, micro_batch=rows, placement=placement, **shared)
    if world is None:
        # On a CPU, trained weights stay mapped to their file here: the engine copies them from
        # there into its flat buffers, so there is no second copy in memory.
        model = materialize_(model, device, trained=device.type != "cpu").to(device)
        return Resident(model, micro_batch=rows, **shared)
    if is_sharded(plan.job.parallel):
        return Sharded(
            model,
            world=world,
            micro_batch=rows,
            halved=plan.job.gather_dtype == "bf16",
            by_machine=plan.job.parallel == "hsdp",
            **shared,
        )
    return Replicated(
        materialize_(model, device).to(device), world=world, micro_batch=rows, **shared
    )


def repeatable(device: torch.device) -> None:
    """Put this process into torch's deterministic mode on a CPU, so that a resumed run has the same
    bits.

    On several CPU threads Inductor sums an embedding's gradient with atomic additions, whose order
    varies. In the deterministic mode it calls the ordered kernel instead, at no measurable cost
    (dev/log.md). On a GPU the mode makes training slower, so the user decides there.
    """
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        # The mode also fills new memory, which takes time and which nothing here needs. torch
        # replaces this module by a class, which type checkers do not see.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
