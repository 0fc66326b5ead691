"""Turn a plan into a session: build the model, decide what depends on its shape, make the engine.

A *hybrid* is a model of which some layers have linear attention instead of softmax attention.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from monograph.device import Device, describe
from monograph.distributed.engine import Replicated, Sharded, StepOptions, streamed_replica
from monograph.distributed.world import World
from monograph.engine import Engine
from monograph.errors import InputRefused, UsageError
from monograph.graph.lora import adapted_layers
from monograph.graph.lora_base import OptionalDevice
from monograph.graph.mmap_weights import materialize_
from monograph.graph.precision import Precision
from monograph.graph.remat import policy_named
from monograph.graph.shared_base import copy_with_shared_base
from monograph.loss import Loss, TokenLoss
from monograph.model.adapter import install_adapters
from monograph.model.config import LlamaConfig
from monograph.model.gguf import block_formats
from monograph.model.hub import FewBits
from monograph.model.llama import Llama
from monograph.resident import Resident
from monograph.run.folder import Run
from monograph.run.models import build
from monograph.run.progress import Progress
from monograph.run.recipe import (
    ModelRecipe,
    add_missing_rows,
    lora_record,
    module_digest,
    recorded_lora,
    require_base_of_adapter,
)
from monograph.run.recorded_state import newest_state
from monograph.run.writing import recorded_parent
from monograph.session.new_tokens import token_notes
from monograph.session.objective import Task
from monograph.session.plan import RunPlan, Shape, is_sharded
from monograph.session.random_state import seed_all
from monograph.session.ranks import agreed_record
from monograph.session.requirements import require_positions
from monograph.session.resolve import resolve, with_rows
from monograph.session.session import Session
from monograph.session.warmup import batch_norm_layers
from monograph.stream import Placement, Streamed
from monograph.stream.store import adapters_on_device


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
        agreed_plan(world, built.plan, machine)  # sends the decided plan to the other ranks
    else:
        # The others wait for rank 0's plan, in which nothing is left to decide. It is sent as a
        # config.toml, which does not have the recorded rms_norm_eps.
        decided = agreed_plan(world, plan, machine)
        decided = _with_recorded_norm_eps(decided, run)
        built = build_run(decided, task, machine, device, world.size)
    _print_notes(built, progress)
    engine = make_engine(built, device, world)
    # Training draws the same random numbers, whatever building the model has drawn.
    seed_all(built.plan.job.seed)
    return Session(run, built.plan, built.recipe, task, engine, world=world)


def _print_notes(built: BuiltRun, progress: Progress) -> None:
    """Print what the user may not expect of the model."""
    for line in built.notes:
        progress.line("tokens", line)
    config = _llama_config(built.model)
    if config and config.attention_dropout:
        progress.line(
            "note",
            f"attention_dropout = {config.attention_dropout} stays in config.json; nothing is dropped in training here",
        )
    source = built.plan.job.source
    if source and source.assumption:
        progress.line("note", source.assumption)
    few_bits = source.few_bits if source else None
    if few_bits:
        lora = built.plan.training.lora
        progress.line("note", _use_of_few_bits(few_bits, lora.base if lora else None))
    left_out = source.left_out if source else ""
    if left_out:
        progress.line("note", f"only the text model is trained: {left_out} are left out")
    if (
        isinstance(built.model, Llama)
        and built.model.balance_factor
        and not isinstance(built.loss, TokenLoss)
    ):
        progress.line(
            "note",
            "output_router_logits = true balances experts only when texts are learned; rewards and pairs train "
            "without this balance",
        )


def _use_of_few_bits(stored: FewBits, base: str | None) -> str:
    """Return a line that says what becomes of weights that a folder has in 4 or 8 bits.

    Args:
        stored: the form in which the folder has them.
        base: lora.base; None without adapters.
    """
    dtype = stored.dtype.lower()
    if base is None:
        return f"the weights are stored as {stored.label}: all are trained, from their values in {dtype}"
    if base == stored.base != "auto":
        dense = (
            f"; {len(stored.dense)} layers that are in 16 bits there stay so"
            if stored.dense
            else ""
        )
        return f"the base keeps the codes of {stored.label} as they are{dense}"
    hint = (
        f"; lora.base = {stored.base} keeps its codes as they are" if stored.base != "auto" else ""
    )
    if base == "auto":
        return f"the base is stored as {stored.label}, and read as {dtype}{hint}"
    return f"the base is stored as {stored.label}, and rounded again to {base}{hint}"


def agreed_plan(world: World, plan: RunPlan, machine: Device) -> RunPlan:
    """Return rank 0's plan on all ranks, which must all call this.

    Rank 0 sends the content of its config.toml, and the others make a plan from it for their own
    device.
    """
    record = agreed_record(world, plan.record)
    return plan if world.leads else resolve(record, machine)


def _with_recorded_norm_eps(plan: RunPlan, run: Run) -> RunPlan:
    """Return the plan of a hybrid with the rms_norm_eps that a checkpoint of its run, or of the
    run's parent, records.

    In earlier versions, presets of hybrids had another rms_norm_eps, 1e-5. Runs from then continue
    with it. The plan of another model, or of a run without a checkpoint, is not changed.
    """
    recipe = plan.job.recipe
    if not _is_new_hybrid(recipe):
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


def _is_new_hybrid(recipe: ModelRecipe) -> bool:
    """Return whether a recipe makes a new hybrid; False if `init` names a model."""
    if recipe.init is not None:
        return False
    # Only the family is needed, which does not depend on the size of the vocabulary. Only families
    # of hybrids with linear attention have a `new_norm_eps`.
    family = recipe.shape(vocab_size=1).family
    return family.other_layers.new_norm_eps is not None


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
        device: where the frozen weights go if there are adapters. Each weight is moved as soon as
            it is rounded to the dtype of `lora.base`, so the host never holds two copies of all
            weights. None leaves them on the host.
        ranks: number of processes that train the model together.
        like: the plan of another run of the same shape, whose choices this run takes; None lets the
            planner choose.
        minutes: the training time of a run whose length is a time; 0 if it is unknown (see
            `Shape`).

    Raises:
        OutOfDeviceMemory: nothing fits according to the plan; raised before anything is built if
            the shape is known.
        InputRefused: the model does not fit the text.
    """
    job = plan.job
    recipe = job.recipe
    records = task.data
    # The size of the vocabulary and the number of positions come from the text, if the recipe does not have
    # them. They are not filled in for a single file of weights, whose tensors give them. If such a file is
    # the base of an adapter, the recipe has them, and the tensors must agree.
    is_weight_file = job.source is not None and job.source.is_weight_file
    if recipe.adapter or not is_weight_file:
        sizes = {"vocab_size": records.vocab_size, "max_position_embeddings": plan.training.length}
        recipe = recipe._replace(sizes=sizes | recipe.sizes)
    new_tokens = job.tokens.compare(records.tokenizer)
    # Returns the `Shape` of a model, given its config and the ids of the tokens that are trained.
    make_shape = partial(
        Shape,
        ranks=ranks,
        like=like,
        slots=task.slots(plan),
        records_per_epoch=task.records_per_epoch if task.epochs_repeat else 0,
        minutes=minutes,
    )
    # The shape of a preset or folder is already known. So a model that does not fit is refused
    # before it is built. The shape of a model from a Python function or a weight file is known only
    # after that.
    known_config = job.source.shape if job.source else recipe.shape()
    if known_config:
        trained_tokens = new_tokens.trained_ids(known_config.vocab_size) if new_tokens else ()
        shape = make_shape(with_rows(known_config, new_tokens), trained_tokens)
        plan = resolve(plan, machine, shape)
    model, loss = build(recipe)
    # The ids of the new tokens depend on the rows of the embedding. If the config was known, they
    # are the same as above. In a module that is not a Llama no token is new, so the number of rows
    # does not matter.
    rows = model.config.vocab_size if isinstance(model, Llama) else 0
    trained_tokens = new_tokens.trained_ids(rows) if new_tokens else ()
    notes = token_notes(new_tokens, rows)
    lora = job.adapters(trained_tokens)
    if lora:
        recipe = recipe._replace(lora=lora_record(lora), base_sha256=module_digest(model))
    # The model may have fewer rows for tokens than the tokenizer has ids.
    if new_tokens and new_tokens.sizes and isinstance(model, Llama):
        vocabulary = add_missing_rows(model, new_tokens.sizes, str(recipe.init))
        recipe = recipe._replace(vocabulary=vocabulary)
    config = _llama_config(model)
    if config:
        _require_fit(config, records.vocab_size, plan.training.length)
    if not known_config:
        # `add_missing_rows` has given the model its rows. If the module is not a Llama, `config` is
        # None: the shape stays unknown.
        plan = resolve(plan, machine, make_shape(config, trained_tokens))
    if plan.transfer:
        plan.transfer.initialise_(model)
    if lora:
        stored_adapter = job.source.adapter if job.source else None
        if stored_adapter:
            require_base_of_adapter(stored_adapter, str(recipe.base_sha256))
        # With fsdp and hsdp, and if it is streamed, the base stays on the host, because a device may
        # have no room for all of it.
        stays_on_host = is_sharded(job.parallel) or plan.memory == "stream"
        base_device = None if stays_on_host else device
        install_adapters(
            model,
            lora,
            seed=job.seed,
            start=stored_adapter,
            precision=Precision(plan.training.precision),
            device=base_device,
        )
    task_loss = task.loss(plan, model)
    return BuiltRun(plan, recipe, model, task_loss or loss, notes)


def build_on_base_of(other: BuiltRun, plan: RunPlan, task: Task, machine: Device) -> BuiltRun:
    """Build a run's model with its own adapters on the base of another run, which both then share.

    Args:
        other: the other run, whose adapters were not trained yet. It has the same base, tokens and
            targets. What the planner chose for the other run holds for this run, too.
        plan: the run's plan, from its settings alone.
        task: what the run learns from.
        machine: the device, for the planner.
    """
    tokens = recorded_lora(other.recipe.lora).tokens if other.recipe.lora else ()
    lora = plan.job.adapters(tokens)
    if lora is None:
        raise ValueError("a run without adapters cannot share a base")
    shape = Shape(
        _llama_config(other.model),
        tokens,
        like=other.plan,
        slots=task.slots(plan),
        records_per_epoch=task.records_per_epoch if task.epochs_repeat else 0,
    )
    plan = resolve(plan, machine, shape)
    # Adapters that continue stored ones begin with their values, others with values by the seed.
    starts_new = plan.job.source is None or plan.job.source.adapter is None
    model = copy_with_shared_base(other.model, lora, plan.job.seed if starts_new else None)
    recipe = other.recipe._replace(lora=lora_record(lora), seed=plan.job.recipe.seed)
    return BuiltRun(plan, recipe, model, task.loss(plan, model) or other.loss, other.notes)


def _require_fit(config: LlamaConfig, vocab_size: int, length: int) -> None:
    """Refuse a model with fewer embedding rows than tokens, or fewer positions than a row of text.

    Args:
        config: the model's shape.
        vocab_size: the number of the tokenizer's ids.
        length: tokens of a row of text.
    """
    if config.vocab_size < vocab_size:
        raise InputRefused(
            f"model.vocab_size = {config.vocab_size} is smaller than the tokenizer's {vocab_size}: raise it"
        )
    require_positions(length, config)


def _llama_config(model: nn.Module) -> LlamaConfig | None:
    """Return the model's shape; None if it is not a Llama."""
    return model.config if isinstance(model, Llama) else None


def stop_balancing_(model: nn.Module, loss: Loss) -> None:
    """Let a model train without balancing its experts, unless its loss is the one for texts.

    Balancing gives each token the weight of its share of the loss, which only `TokenLoss` has.
    """
    if isinstance(model, Llama) and not isinstance(loss, TokenLoss):
        model.balance_factor = 0.0


def make_engine(built: BuiltRun, device: torch.device, world: World | None = None) -> Engine:
    """Return the engine for a model, with its weights on the device or streamed to it.

    Args:
        built: the model and its plan.
        device: the device to train on.
        world: the ranks that train together; None for this process alone.

    Raises:
        UsageError: there are several ranks without GPUs, and the model normalises over rows.
    """
    plan = built.plan
    model = built.model
    training = plan.training
    stop_balancing_(model, built.loss)
    step_options: StepOptions = {
        "loss": built.loss,
        "optim": training.optim,
        "clip": training.clip,
        "precision": Precision(training.precision),
        "remat": policy_named(training.remat),
    }
    micro_batch = training.rows
    # Without train.parallel the world is this process alone, whose engine sums nothing over ranks.
    world = None if plan.job.parallel == "none" else world
    batch_norms = batch_norm_layers(model) if world else []
    if batch_norms:
        if device.type != "cuda":
            raise UsageError(
                f"{batch_norms[0]} normalises over the rows of all ranks, which torch supports only on GPUs: "
                "take another norm, or train.parallel = none"
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if plan.memory == "stream":
        # Without a planner's placement, such as for a user's own module, all weights wait on the host.
        placement = plan.placement
        if placement is None:
            placement = Placement(device)
            if adapted_layers(model):
                placement = adapters_on_device(model, placement)
        if world:
            return streamed_replica(
                model, world=world, micro_batch=micro_batch, placement=placement, **step_options
            )
        return Streamed(model, micro_batch=micro_batch, placement=placement, **step_options)
    if world is None:
        # On a CPU only the frozen weights are copied into memory here. The trained ones stay mapped
        # to their file, from which the engine copies them into its flat buffers, so there is no
        # second copy in memory. On a GPU all are copied to the device first.
        copies_trained = device.type != "cpu"
        model = materialize_(model, device, trained=copies_trained).to(device)
        # On a GPU in 16 bits, the engine keeps rounded copies of the weights. Those of a `Llama` are made in
        # the update. A user's own module could write its weights through `.data`, which torch's version
        # counters do not notice, so its copies are made anew for each window.
        return Resident(
            model,
            micro_batch=micro_batch,
            rounds_in_update=isinstance(model, Llama),
            block_formats=block_formats(model, training.quantize),
            **step_options,
        )
    if is_sharded(plan.job.parallel):
        return Sharded(
            model,
            world=world,
            micro_batch=micro_batch,
            gathers_bf16=plan.job.gather_dtype == "bf16",
            by_machine=plan.job.parallel == "hsdp",
            **step_options,
        )
    # Here all weights are copied on a CPU, too, before the engine copies them into its buffers.
    model = materialize_(model, device).to(device)
    return Replicated(model, world=world, micro_batch=micro_batch, **step_options)


def make_repeatable(device: torch.device) -> None:
    """On a CPU, put this process into torch's deterministic mode, so that a resumed run has the same
    bits.

    With several CPU threads, Inductor sums an embedding's gradient by atomic additions, whose order
    varies. In the deterministic mode it calls the ordered kernel instead, at no measurable cost
    (dev/log.md). On a GPU the mode makes training slower, so only the user turns it on.
    """
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        # The mode also fills new memory, which takes time and which nothing here needs. torch
        # replaces this module by a class, which type checkers do not see.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
