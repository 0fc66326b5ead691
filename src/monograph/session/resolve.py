"""Turn the settings into the plan of a run: `resolve` is the only place that decides an "auto".

A value is decided as soon as its inputs are known: sizes from the settings alone, so that impossible ones are
refused before any text is read; what fits the device from the model's shape; intervals from the number of updates.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from monograph import planner
from monograph.config import DEFAULT_MINUTES, Settings
from monograph.device import Device, compiler_obstacle, default_device
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.model import hub
from monograph.model.adapter import is_adapter, read_adapter, resolved_base
from monograph.model.config import LlamaConfig
from monograph.model.families import FIRST_FAMILY
from monograph.model.files import has_weights
from monograph.optim import OPTIMIZERS, Optimizer, name_of
from monograph.planner import Candidate, Limits, Request, StreamCandidate, defaults
from monograph.predict.estimate import spared_bytes
from monograph.predict.footprint import Compile, Training
from monograph.predict.roofline import Calibration
from monograph.run.models import positions_of
from monograph.run.recipe import Recipe, is_weight_file, run_named, shape_in, tokenizer_named, tokenizer_of
from monograph.session.adapting import NewTokens, fixed_lora, lora_of, rates, require_tokens
from monograph.session.objectives import objective_of, objective_values
from monograph.session.plan import Choice, Length, Plan, Shape, is_sharded, sharing
from monograph.session.recorded import own_copies
from monograph.session.requirements import require_positions, require_room, require_targets, require_together
from monograph.step import Clip
from monograph.storage.cache_dir import cache_root, calibration_file
from monograph.storage.code import folder_named
from monograph.storage.reading import is_file
from monograph.text.tokenizer import parse
from monograph.transfer import WidthTransfer, narrowed

ORIGIN = "plan"  # the origin of a value that is decided here
WIDTH = "width"
# The policies among which the planner chooses for "auto"; a CPU has no other memory for the last, "offload".
REMATS = ("none", "pointwise", 0.5, 0.25, "full", "offload")
RANKING_FLOPS = 1e12  # any rate will do, since only the order of candidates of one precision matters
FINAL = 0.05  # share of the peak learning rate that the schedule falls to if optim.min_lr_ratio says nothing


def resolve(given: Settings | Plan, machine: Device, *known: Shape | Length, built: bool = True) -> Plan:
    """Return the plan of a run, with every value decided whose inputs are known.

    Args:
        given: the run's settings, or the plan that was made from them before.
        machine: the device that the run trains on.
        known: facts that are known now: the model's shape, the number of updates.
        built: whether the model will be built; if not, a folder with config.json and no weights will do.

    Raises:
        InputRefused: a model, a tokenizer or an adapter cannot be used.
        OutOfDeviceMemory: nothing fits according to the planner.
        UsageError: choices exclude one another.
    """
    plan = given if isinstance(given, Plan) else _sized(given, machine, built)
    for fact in known:
        plan = _fitted(plan, machine, fact) if isinstance(fact, Shape) else _lasting(plan, fact)
    return plan


# ── from the settings alone ─────────────────────────────────────────────────────────────────────


def _sized(settings: Settings, machine: Device, built: bool) -> Plan:
    shape_alone = not built and settings.model.init is not None and is_file(Path(settings.model.init, "config.json"))
    settings, recipe, shape = _with_model(settings, shape_alone)
    length = int(settings.data.sequence_length)
    train = settings.train
    lora = lora_of(settings)
    name: str = settings.optim.name
    if name == "auto":
        name = defaults.optimizer(fresh=recipe.init is None)
    objective = objective_of(settings)
    optim = _optimizer(settings, recipe, name, adapted=lora is not None, judged=objective.judges)
    final = settings.optim.min_lr_ratio
    per_update = defaults.in_whole_rows(int(train.tokens_per_update), length)
    updates = train.updates or (defaults.updates_of(train.tokens, per_update) if train.tokens else 0)
    given: dict[Choice, Any] = {
        "micro_batch": train.micro_batch,
        "compile": train.compile,
        "remat": train.remat,
        "memory": train.memory,
    }
    chosen = {choice: value for choice, value in given.items() if value != "auto"}
    training = Training(
        rows=chosen.pop("micro_batch", per_update // length),
        window_rows=per_update // length,
        length=length,
        optim=optim,
        clip=_clip(settings, finds_spikes=objective.finds_spikes),
        precision=defaults.precision(machine) if train.precision == "auto" else train.precision,
        lora=lora,
    )
    plan = Plan(
        settings=settings,
        recipe=recipe,
        reading=settings.data.model_dump() | own_copies(settings),
        seed=recipe.seed,
        training=training,
        **_times(settings),
        epochs=train.epochs,
        schedule_name=settings.optim.schedule,
        final=FINAL if final is None else final,
        parallel=train.parallel,
        gather_dtype=train.gather_dtype,
        memory=chosen.pop("memory", "device"),
        open=frozenset(choice for choice, value in given.items() if value == "auto"),
        updates=updates,
        **_intervals(settings, Length(updates)),
    ).training_with(**chosen)
    judged = objective.judged(plan)
    plan = plan.training_with(judged=judged, packed=settings.data.packing == "packed" and judged != "exact")
    if not shape_alone:
        require_tokens(settings)
    require_targets(lora, shape)
    require_positions(length, shape)
    return plan


def _times(settings: Settings) -> dict[str, Any]:
    """Return the minutes of training and of the whole run; if only the whole is limited, training may fill it."""
    whole = settings.train.wall_minutes
    minutes = settings.train.minutes or DEFAULT_MINUTES
    if whole is not None and "train.minutes" not in settings.origins:
        minutes = whole
    return {"minutes": minutes, "wall_minutes": whole}


def _with_model(settings: Settings, shape_alone: bool) -> tuple[Settings, Recipe, LlamaConfig | None]:
    """Return the settings with preset, lengths, tokenizer and adapters decided, the recipe, and the shape.

    The shape is None for a new model, or if only building the model tells it.
    """
    model = settings.model
    chosen: dict[str, Any] = {}
    length, per_update = settings.data.sequence_length, settings.train.tokens_per_update
    if length == "auto":
        positions = positions_of(model.init) if model.init else model.max_position_embeddings
        given = None if per_update == "auto" else per_update
        length = defaults.sequence_length(model.init is None, positions, given)
        chosen["data.sequence_length"] = length
    if model.init and (other := run_named(model.init)):  # record its path: `last` will soon name the new run
        chosen["model.init"] = folder_named(other.named)
    if model.preset == "auto" and model.init is None and not model.hidden_size:
        chosen["model.preset"] = defaults.DEFAULT.preset
    preset = str(chosen.get("model.preset", model.preset))
    chosen |= fixed_lora(settings) | objective_values(settings, length)
    family = model.family or FIRST_FAMILY
    recipe = Recipe(model.init, preset, model.sizes(), settings.train.seed, family=family, vouched=settings.vouched)
    recipe = recipe if shape_alone and not has_weights(Path(str(model.init))) else recipe.checked()
    transfer = transfer_of(settings, None if model.init else recipe.shape(vocab_size=1))
    if transfer:
        chosen["optim.transfer_base"] = transfer.base.hidden_size
    if (named := tokenizer_named(settings.data.tokenizer)) != settings.data.tokenizer:
        chosen["data.tokenizer"] = named
    if settings.data.tokenizer == "auto" and not shape_alone:
        chosen["data.tokenizer"] = (None if recipe.code else _own_tokenizer(model.init)) or "bpe"
    if chosen.get("data.tokenizer", settings.data.tokenizer) == "bpe" and settings.data.vocab_size is None:
        chosen["data.vocab_size"] = defaults.DEFAULT.vocabulary
    if per_update == "auto" and not objective_of(settings).is_own_length:
        usual = max(defaults.DEFAULT.tokens_per_update, length)
        chosen["train.tokens_per_update"] = defaults.in_whole_rows(usual, length)
    settings = settings.resolve(chosen, ORIGIN)
    shape = shape_in(recipe.init) if recipe.init else None
    init = settings.model.init  # a run records its full path; an error shows it as it was typed
    if init and is_adapter(init):
        return settings, recipe._replace(init=resolved_base(read_adapter(init)), adapter=init), shape
    return settings, recipe._replace(init=init), shape


def _own_tokenizer(init: str | None) -> str | None:
    """Return the tokenizer.json of the model that a run starts from; None for a new model.

    Of an adapter it is the adapter's own, which may have more tokens than its base, and a chat template.

    Raises:
        InputRefused: the model has none.
    """
    if not init:
        return None
    try:
        return str(tokenizer_of(init))
    except InputRefused as error:
        raise InputRefused(f"{error}, or name one as data.tokenizer") from None


def transfer_of(settings: Settings, config: LlamaConfig | None) -> WidthTransfer | None:
    """Return the rule that carries rates to a model of this shape; None without width transfer.

    Args:
        settings: the run's settings.
        config: the model's shape; None if it is not a Llama whose weights are drawn here.

    Raises:
        UsageError: transfer is asked for another kind of model, or the width does not keep the shape's ratios.
    """
    if settings.optim.transfer == "none":
        return None
    if config is None:
        raise UsageError(
            f"{settings.said('optim.transfer')} is a rule for a model whose weights are drawn here, by preset or "
            f"sizes, not for model.init = {settings.model.init}; leave it at none"
        )
    try:
        return WidthTransfer(config, narrowed(config, settings.optim.transfer_base))
    except UsageError as error:
        raise UsageError(f"{settings.said('optim.transfer')}: {error}") from None


def _optimizer(settings: Settings, recipe: Recipe, name: str, *, adapted: bool, judged: bool) -> Optimizer:
    """Return the optimizer, without the changes of width transfer."""
    optim = settings.optim
    usual = _usual_rate(recipe, name, adapted) * (defaults.JUDGED_SHARE if judged else 1)
    fields = rates(settings, usual) | _fresh_fields(recipe, name)
    if optim.weight_decay != "auto":
        fields = {**fields, "weight_decay": optim.weight_decay}
    return OPTIMIZERS[name](
        state=optim.state,
        master_weights=optim.master_weights,
        seed=recipe.seed,
        betas=optim.betas,
        eps=optim.eps,
        ema=None if optim.ema == "none" else optim.ema,
        **fields,
    )


def _fresh_fields(recipe: Recipe, rule: str, epochs: int = 1) -> dict[str, Any]:
    """Return the fields in which the optimizer of a new model differs from its class's defaults."""
    return {} if recipe.init else defaults.muon_fields(recipe.preset, recipe.family, rule, epochs)


def _usual_rate(recipe: Recipe, rule: str, adapted: bool) -> float:
    """Return the default peak learning rate of an optimizer."""
    if not adapted and recipe.init is None and recipe.preset != "auto":
        return defaults.known_learning_rate(recipe.preset, rule)
    rate = defaults.UNKNOWN_RATE
    if adapted:
        rate = defaults.FINETUNING_RATES["adapters"]
    elif recipe.init is not None and not recipe.code and not run_named(recipe.init):
        rate = defaults.FINETUNING_RATES["all"]
    return rate * OPTIMIZERS[rule].rate_factor


def _clip(settings: Settings, finds_spikes: bool) -> Clip | None:
    """Return the clipping; None if gradients are not clipped."""
    norm = settings.optim.grad_clip
    if norm == "none":
        return None
    skip = settings.optim.skip_spikes
    return Clip(norm, skip_spikes=finds_spikes if skip == "auto" else skip)


# ── from the model's shape ──────────────────────────────────────────────────────────────────────


def _fitted(plan: Plan, machine: Device, shape: Shape) -> Plan:
    """Fix micro-batch, recomputation and graph scope: as given, else as planned for a Llama, else all rows at once.

    The memory that a module other than a Llama needs is unknown. With several ranks, the share of one rank is planned.
    """
    settings = plan.settings
    config = shape.config
    share = -(-plan.training.window_rows // shape.ranks)
    if config:
        beside = objective_of(settings).bytes_beside(plan, config, machine, shape.slots, shape.ranks)
        plan = replace(plan, beside=beside)
    expected: Candidate | None = None
    fixed: dict[str, Any] = {"micro_batch": share, "remat": "none", "compile": "whole", "memory": "device"}
    if shape.like:
        expected = shape.like.expected
        fixed = shape.like.choices
    elif config:
        expected = _planned(plan, config, machine, shape)
        # If nothing can be compiled, the plan is for eager steps; the scope stays, and `prepare` prints the reason.
        holds = expected.work.compile
        holds = _scopes(plan.parallel, config)[0] if holds == "none" else holds
        fixed |= {"micro_batch": expected.work.rows, "remat": expected.work.remat, "compile": holds}
    if plan.memory == "stream" or isinstance(expected, StreamCandidate):
        fixed |= {"memory": "stream", "compile": "blocks"}
    if plan.training.remat == "offload" or is_sharded(plan.parallel):  # tensors move between graphs
        fixed["compile"] = "blocks"
    fixed |= {key: value for key, value in plan.choices.items() if key not in plan.open}
    # Larger micro-batches would be partly empty.
    fixed["micro_batch"] = min(fixed["micro_batch"], plan.training.window_rows)
    optim = plan.training.optim
    if settings.optim.weight_decay == "auto" and not plan.recipe.init:
        fields = _fresh_fields(plan.recipe, name_of(optim), _epochs(plan, expected, shape))
        optim = replace(optim, weight_decay=fields.get("weight_decay", optim.weight_decay))
    recorded: dict[str, Any] = {"optim.name": name_of(optim), "train.precision": plan.training.precision}
    recorded["optim.weight_decay"] = optim.weight_decay
    if settings.optim.lr == "auto":
        recorded["optim.lr"] = optim.lr
    transfer = transfer_of(settings, None if plan.recipe.init else config)
    training = _adapted(plan.training, shape.tokens)
    return replace(
        plan,
        settings=settings.resolve(recorded | {f"train.{key}": value for key, value in fixed.items()}, ORIGIN),
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
        expected=None if is_sharded(plan.parallel) else expected,
    )


def _adapted(training: Training, tokens: tuple[int, ...]) -> Training:
    """Return the training with the ids of the tokens whose rows are trained together with its adapters, if it has any.

    They are known only once the model's shape is.
    """
    return replace(training, lora=replace(training.lora, tokens=tokens)) if training.lora else training


def _epochs(plan: Plan, expected: Candidate | None, shape: Shape) -> int:
    """Return how often the text will be read, as far as that is known."""
    updates = plan.updates
    rows = plan.training.window_rows
    if expected and shape.per_epoch and shape.minutes and not updates:
        updates = defaults.likely_updates(shape.minutes, expected.update_s, shape.per_epoch, rows)
    return plan.epochs or (round(updates * rows / shape.per_epoch) if shape.per_epoch else 1)


def request_of(plan: Plan, config: LlamaConfig, machine: Device, tokens: tuple[int, ...] = ()) -> Request:
    """Return the planner's input: what is given for training a model of this shape, and the choices that are open.

    Args:
        plan: the run's plan, from its settings alone.
        config: the model's shape.
        machine: the device to train on.
        tokens: ids of the tokens whose rows are trained together with adapters.

    Raises:
        UsageError: choices exclude one another.
    """
    require_together(plan.settings)
    given = plan.training
    transfer = transfer_of(plan.settings, None if plan.recipe.init else config)
    optim = transfer.optimizer(given.optim) if transfer else given.optim
    training = replace(_adapted(given, tokens), rows=given.window_rows, optim=optim).of(config, machine.type)
    remats = REMATS if machine.type == "cuda" else REMATS[:-1]
    return Request(
        training,
        micro_batch=None if "micro_batch" in plan.open else given.rows,
        precisions=(given.precision,),
        scopes=_scopes(plan.parallel, config) if "compile" in plan.open else (given.compile,),
        remats=remats if "remat" in plan.open else (given.remat,),
    )


def _scopes(parallel: str, config: LlamaConfig) -> tuple[Compile, ...]:
    return ("blocks",) if is_sharded(parallel) else defaults.scopes(config.num_hidden_layers)


def without(machine: Device, taken_bytes: int) -> Device:
    """Return the device as it is with so much of its memory taken."""
    free_bytes, memory_bytes = machine.free_memory_bytes - taken_bytes, machine.memory_bytes - taken_bytes
    return replace(machine, memory_bytes=memory_bytes, free_memory_bytes=free_bytes)


def _planned(plan: Plan, config: LlamaConfig, machine: Device, shape: Shape) -> Candidate:
    """Return the candidate that `monograph plan` would choose for one rank on this machine.

    What a run with rewards holds beside its step is taken off; for ranks see `spared_bytes`.

    Raises:
        OutOfDeviceMemory: nothing fits; the message names the nearest candidate and by how much it misses.
    """
    memory: Literal["auto", "device", "stream"] = "auto" if "memory" in plan.open else plan.memory
    if shape.slots:
        rows, length = objective_of(plan.settings).largest_window(plan, config, shape.slots)
        plan = plan.training_with(window_rows=rows, length=length)
    if objective_of(plan.settings).answers_on_device:
        machine = without(machine, sum(plan.beside.values()))
        memory = "device"
    if plan.parallel != "none":
        training = plan.training
        plan = plan.training_with(window_rows=-(-training.window_rows // shape.ranks))
        memory = "stream"
        if plan.memory != "stream":
            kept = (training.lora.base, training.precision) if training.lora else None
            shared = sharing(plan.parallel, shape.ranks)
            machine = without(machine, -spared_bytes(config.parameter_count(), plan.parallel, shared, kept))
            memory = "device"
    request = request_of(plan, config, machine, shape.tokens)
    eager = request.scopes == ("none",) or (machine.type == "cpu" and compiler_obstacle() is not None)
    scopes: tuple[Compile, ...] = ("none",) if eager else tuple(scope for scope in request.scopes if scope != "none")
    rates = dict.fromkeys(request.precisions, RANKING_FLOPS)
    known = Calibration(calibration_file())
    limits = Limits.here(machine, planner.budget(machine), cache_root()[0])
    limits = replace(limits, host_bytes=limits.host_bytes // shape.ranks)  # at worst all ranks are on this machine
    require_room(plan.settings, config, machine, limits)
    # A CPU has no other memory to stream from.
    memory = "device" if machine.type == "cpu" and memory == "auto" else memory
    answer = planner.streamed_or_resident(replace(request, scopes=scopes), machine, rates, known, memory, limits)
    too_large = answer.candidates and answer.nearest.peak_memory_bytes > machine.free_memory_bytes
    if not answer.candidates or (answer.chosen is None and too_large):
        raise OutOfDeviceMemory(answer.refusal)
    best = answer.nearest
    if isinstance(best, StreamCandidate):
        return replace(best, placement=replace(best.placement, device=default_device(), folder=limits.folder))
    return best


# ── from the number of updates ──────────────────────────────────────────────────────────────────


def _lasting(plan: Plan, length: Length) -> Plan:
    fixed = _intervals(plan.settings, length)
    recorded = {f"{'optim' if key == 'warmup_updates' else 'train'}.{key}": value for key, value in fixed.items()}
    recorded |= {} if plan.epochs else {"train.updates": length.updates}
    return replace(plan, settings=plan.settings.resolve(recorded, ORIGIN), updates=length.updates, **fixed)


def _intervals(settings: Settings, length: Length) -> dict[str, Any]:
    """Return the number of updates of the warm-up, between evaluations and between checkpoints."""
    warmup, train = settings.optim.warmup_updates, settings.train
    checkpoints = defaults.interval(length.updates, defaults.CHECKPOINTS)
    evaluations = defaults.interval(length.updates, length.evaluations)
    return {
        "warmup_updates": defaults.warmup(length.updates) if warmup == "auto" else warmup,
        "eval_every": evaluations if train.eval_every == "auto" else train.eval_every,
        "save_every": checkpoints if train.save_every == "auto" else train.save_every,
    }


# ── for a plan alone ────────────────────────────────────────────────────────────────────────────


def shape_of(plan: Plan, tokens: NewTokens | None = None) -> LlamaConfig:
    """Return the shape that a run's model will have, without reading text; a BPE is taken to reach its full size.

    Args:
        plan: the run's plan.
        tokens: the run's new tokens, if they are known.

    Raises:
        UsageError: the model is a user's module, a run or a weight file, whose shape only loading tells.
        InputRefused: the folder holds no model.
    """
    recipe = plan.recipe
    tokenizer = str(plan.reading["tokenizer"])
    if init := recipe.init:
        if not recipe.adapter and (recipe.code or is_weight_file(init) or run_named(init)):
            raise UsageError(f"model.init = {init}: a plan is made for a preset, sizes or a Hugging Face folder")
        return with_rows(hub.read_config(init), tokens)
    sizes: dict[str, Any] = {"max_position_embeddings": plan.training.length}
    if tokenizer == "bpe":
        sizes["vocab_size"] = parse(tokenizer, plan.reading["vocab_size"])
    elif tokenizer == "bytes":
        sizes["vocab_size"] = 259  # the bytes and three special tokens
    elif "vocab_size" not in recipe.sizes and recipe.preset == "auto":
        raise UsageError("model.vocab_size: give it, as a plan reads no tokenizer's file")
    return recipe.shape(**sizes)


def with_rows(config: LlamaConfig, tokens: NewTokens | None) -> LlamaConfig:
    """Return the shape with a row for each token."""
    rows = tokens.vocabulary.all if tokens and tokens.vocabulary else 0
    return replace(config, vocab_size=max(config.vocab_size, rows))
