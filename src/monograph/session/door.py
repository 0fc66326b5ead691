"""Turn a run's settings into a `Job`. This is the only place that does so, and code that gets the
job never sees the settings.

What the settings name is looked up here. For instance, a setting may name the `last` run, or a run where
a model or a tokenizer is expected. Each "auto" that needs neither the text nor the model's shape nor the
device is decided here, too.

*Width transfer* carries a learning rate from a narrow model to a wide one (`monograph.transfer`).
"""

from pathlib import Path
from typing import Any, NamedTuple

from monograph.config import DEFAULT_MINUTES, Settings
from monograph.data.options import ReadingOptions
from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.model.families import DEFAULT_FAMILY
from monograph.model.files import has_weights
from monograph.model.gguf import require_blocks
from monograph.optim import OPTIMIZERS
from monograph.planner import defaults
from monograph.predict.footprint import Training
from monograph.run.recipe import ModelRecipe, resolve_tokenizer
from monograph.run.source import ModelSource, checked_recipe
from monograph.session.adapting import adapter_values, lora_of, rate_fields
from monograph.session.by_key import values_by_field
from monograph.session.job import (
    Job,
    OpenChoice,
    RequestedIntervals,
    RequestedLength,
    RequestedTransfer,
)
from monograph.session.new_tokens import token_source_of
from monograph.session.objective import Objective
from monograph.session.objectives import decided_objective
from monograph.session.record import ORIGIN, ConfigRecord
from monograph.session.recorded import copies_of_missing_files
from monograph.session.requirements import (
    require_adapter_targets,
    require_positions,
    require_stages,
)
from monograph.step import Clip
from monograph.storage.reading import is_file
from monograph.transfer import WidthTransfer

WIDTH_TRANSFER = "width"  # the value of optim.transfer that asks for width transfer
DEFAULT_MIN_LR_RATIO = 0.05  # the default of optim.min_lr_ratio


def job_of(settings: Settings, *, will_build: bool = True) -> Job:
    """Return what the settings of a run ask for.

    Args:
        settings: the run's settings.
        will_build: whether the model will be built; if False, model.init may be a folder with
            config.json and no weights.

    Raises:
        InputRefused: a model, a tokenizer or an adapter cannot be used.
        UsageError: choices exclude one another.
    """
    init = settings.model.init
    needs_shape_only = not will_build and init is not None and is_file(Path(init, "config.json"))
    # These are about what the user gave, so they come before `_look_up` adds values.
    span = _span(settings)
    intervals = _intervals(settings)
    transfer = requested_transfer(settings)
    # From here on, `settings` has the values that were looked up.
    settings, objective, recipe, source, optimizer_name = _look_up(
        settings, transfer, needs_shape_only
    )
    if transfer:
        # `_look_up` has decided the base if the user gave none.
        transfer = transfer._replace(base=settings.optim.transfer_base)
    shape = source.shape if source else None
    optim = settings.optim
    train = settings.train
    length = int(settings.data.sequence_length)
    tokens_per_update = defaults.in_whole_rows(int(train.tokens_per_update), length)
    lora = lora_of(settings)
    tokens = token_source_of(settings, source, settings.data.tokenizer, is_adapted=lora is not None)
    default_lr = objective.lr_share * _default_lr(
        recipe, source, optimizer_name, is_adapted=lora is not None
    )
    optimizer_fields = rate_fields(optim.lr, settings.lora.lr_ratio, default_lr)
    optimizer_fields |= fields_for_new_model(recipe, optimizer_name)
    if optim.weight_decay != "auto":
        optimizer_fields["weight_decay"] = optim.weight_decay
    choices: dict[OpenChoice, Any] = {
        "micro_batch": train.micro_batch,
        "precision": train.precision,
        "compile": train.compile,
        "remat": train.remat,
        "memory": train.memory,
    }
    open_choices = frozenset(choice for choice, value in choices.items() if value == "auto")
    window_rows = tokens_per_update // length
    # Choices that are open get the defaults of `Training`.
    given_choices: dict[str, Any] = {
        choice: choices[choice]
        for choice in ("precision", "compile", "remat")
        if choice not in open_choices
    }
    training = Training(
        rows=window_rows if train.micro_batch == "auto" else train.micro_batch,
        window_rows=window_rows,
        length=length,
        optim=OPTIMIZERS[optimizer_name](
            state=optim.state,
            master_weights=optim.master_weights,
            seed=recipe.seed,
            betas=optim.betas,
            eps=optim.eps,
            ema=None if optim.ema == "none" else optim.ema,
            **optimizer_fields,
        ),
        clip=_clip(optim.grad_clip, optim.skip_spikes, objective.skips_spikes),
        lora=lora,
        quantize=train.quantize,
        **given_choices,
    )
    data = settings.data.model_dump() | copies_of_missing_files(settings.data, settings.origins)
    updates = span.updates
    if not updates and span.tokens:
        updates = defaults.updates_for_tokens(span.tokens, tokens_per_update)
    job = Job(
        record=ConfigRecord(settings),
        objective=objective,
        source=source,
        recipe=recipe,
        sizes_text=_section_text(settings.given_values(), "model"),
        reading=ReadingOptions(**data),
        tokens=tokens,
        transfer=transfer,
        training=training,
        memory="device" if train.memory == "auto" else train.memory,
        open_choices=open_choices,
        is_lr_open=optim.lr == "auto",
        is_decay_open=optim.weight_decay == "auto",
        final_lr_share=DEFAULT_MIN_LR_RATIO if optim.min_lr_ratio is None else optim.min_lr_ratio,
        given_tokens_per_update=int(train.tokens_per_update),
        updates=updates,
        span=span,
        intervals=intervals,
        **values_by_field(Job, settings.values()),
    )
    if not needs_shape_only:
        tokens.require_fit()
    require_adapter_targets(lora, shape)
    require_positions(length, shape)
    require_stages(train.memory, shape)
    if shape is not None:
        require_blocks(shape, training.quantize)
    return job


def _span(settings: Settings) -> RequestedLength:
    """Return how long the run lasts, as the settings say it.

    If train.wall_minutes is given without train.minutes, training may take all of that time.
    """
    train = settings.train
    minutes = train.minutes or DEFAULT_MINUTES
    is_timed = "train.minutes" in settings.origins
    if train.wall_minutes is not None and not is_timed:
        minutes = train.wall_minutes
    return RequestedLength(
        updates=train.updates or 0,
        tokens=train.tokens or 0,
        epochs=train.epochs,
        minutes=minutes,
        wall_minutes=train.wall_minutes,
        is_timed=is_timed,
    )


def _intervals(settings: Settings) -> RequestedIntervals:
    """Return the intervals that the settings give."""
    optim = settings.optim
    train = settings.train
    return RequestedIntervals(
        warmup_updates=None if optim.warmup_updates == "auto" else optim.warmup_updates,
        eval_every=None if train.eval_every == "auto" else train.eval_every,
        save_every=None if train.save_every == "auto" else train.save_every,
    )


class _LookedUp(NamedTuple):
    """The result of `_look_up`.

    Attributes:
        settings: the settings with the values that were looked up or decided.
        objective: the way to learn, with the values of its own keys.
        recipe: the checked recipe.
        source: the model that the run starts from; None for a new one.
        optimizer_name: the optimizer's name in `OPTIMIZERS`.
    """

    settings: Settings
    objective: Objective
    recipe: ModelRecipe
    source: ModelSource | None
    optimizer_name: str


def _look_up(
    settings: Settings, transfer: RequestedTransfer | None, needs_shape_only: bool
) -> _LookedUp:
    """Open the model that `model.init` names; decide betas, eps, preset, lengths, tokenizer,
    adapters and the base of a width transfer.

    Args:
        settings: the run's settings.
        transfer: the width transfer that they ask for; None without.
        needs_shape_only: whether only the shape of `model.init` is needed, not its weights.
    """
    model = settings.model
    data = settings.data
    source = None
    if model.init:
        source = ModelSource.open(model.init, mtp=bool(model.mtp_num_hidden_layers))
    decided: dict[str, Any] = {}
    optimizer_name: str = settings.optim.name
    if optimizer_name == "auto":
        optimizer_name = defaults.optimizer(fresh=model.init is None)
    # The defaults of this optimizer may differ from the defaults of the keys.
    optimizer = OPTIMIZERS[optimizer_name]
    if "optim.betas" not in settings.origins and settings.optim.betas != optimizer.betas:
        decided["optim.betas"] = optimizer.betas
    if "optim.eps" not in settings.origins and settings.optim.eps != optimizer.eps:
        decided["optim.eps"] = optimizer.eps
    length = data.sequence_length
    tokens_per_update = settings.train.tokens_per_update
    if length == "auto":
        positions = source.positions if source else model.max_position_embeddings
        given_tokens = None if tokens_per_update == "auto" else tokens_per_update
        length = defaults.sequence_length(model.init is None, positions, given_tokens)
        decided["data.sequence_length"] = length
    if source and source.recorded_name != source.name:
        decided["model.init"] = source.recorded_name
    if model.preset == "auto" and model.init is None and not model.hidden_size:
        decided["model.preset"] = defaults.DEFAULT.preset
    decided |= adapter_values(settings, source)
    objective, objective_values = decided_objective(settings, length)
    decided |= objective_values
    recipe = ModelRecipe(
        model.init,
        str(decided.get("model.preset", model.preset)),
        model.sizes(),
        settings.train.seed,
        family=model.family or DEFAULT_FAMILY,
        vouched=settings.vouched,
    )
    # If only the shape is needed, the folder that `model.init` names may lack weights. Then it
    # cannot be checked.
    if not needs_shape_only or has_weights(Path(str(model.init))):
        recipe = checked_recipe(recipe, source)
    if transfer:
        # The size of the vocabulary is not known yet, and does not matter for the widths. A model
        # that `model.init` names is not new: given None for its shape, `of` raises the error that
        # says so.
        shape = None if model.init else recipe.shape(vocab_size=1)
        decided["optim.transfer_base"] = transfer.of(shape).base.hidden_size
    tokenizer = resolve_tokenizer(data.tokenizer)
    if data.tokenizer == "auto" and not needs_shape_only:
        if source is None or recipe.code:
            tokenizer = "bpe"
        else:
            tokenizer = _own_tokenizer(source)
    if tokenizer != data.tokenizer:
        decided["data.tokenizer"] = tokenizer
    if tokenizer == "bpe" and data.vocab_size is None:
        decided["data.vocab_size"] = defaults.DEFAULT.vocabulary
    # An objective with its own update size has decided it in `objective_values`.
    if tokens_per_update == "auto" and not objective.has_own_update_size:
        default_tokens = max(defaults.DEFAULT.tokens_per_update, length)
        decided["train.tokens_per_update"] = defaults.in_whole_rows(default_tokens, length)
    settings = settings.resolve(decided, ORIGIN)
    if source is None:
        return _LookedUp(settings, objective, recipe, None, optimizer_name)
    # Until here errors name the model as the user did; from here on it has the recorded name.
    source = source.renamed(str(settings.model.init))
    # For an adapter, `init` of the recipe is the adapter's base, and the model's name is the adapter.
    recipe = recipe._replace(init=source.base, adapter=source.name if source.adapter else None)
    return _LookedUp(settings, objective, recipe, source, optimizer_name)


def _own_tokenizer(source: ModelSource) -> str:
    """Return the tokenizer.json of the model that a run starts from.

    Raises:
        InputRefused: the model has none.
    """
    try:
        return source.tokenizer
    except InputRefused as error:
        raise InputRefused(f"{error}, or name one as data.tokenizer") from None


def _section_text(values: dict[str, Any], section: str) -> str:
    """Return the keys of a section with their values, as an error shows them.

    Args:
        values: the values by key.
        section: the section's name.
    """
    return ", ".join(
        f"{key} = {value}" for key, value in values.items() if key.startswith(f"{section}.")
    )


def requested_transfer(settings: Settings) -> RequestedTransfer | None:
    """Return the width transfer that the settings ask for; None without."""
    optim = settings.optim
    if optim.transfer == "none":
        return None
    return RequestedTransfer(
        optim.transfer_base, settings.quoted("optim.transfer"), settings.model.init
    )


def transfer_of(settings: Settings, config: LlamaConfig | None) -> WidthTransfer | None:
    """Return the rule that carries rates to a model of this shape; None without width transfer.

    Args:
        settings: the run's settings.
        config: the model's shape; None if it is not a `Llama` with new random weights.

    Raises:
        UsageError: see `RequestedTransfer.of`.
    """
    transfer = requested_transfer(settings)
    return transfer.of(config) if transfer else None


def fields_for_new_model(
    recipe: ModelRecipe, optimizer_name: str, epochs: int = 1
) -> dict[str, Any]:
    """Return the values that an optimizer's fields have by default for a new model, where they differ
    from the defaults of the optimizer's class; {} if the model is not new.

    Args:
        recipe: the model's recipe.
        optimizer_name: the optimizer's name in `OPTIMIZERS`.
        epochs: the number of times that the text will be read.
    """
    if recipe.init:
        return {}
    return defaults.tuned_fields(recipe.preset, recipe.family, optimizer_name, epochs)


def _default_lr(
    recipe: ModelRecipe, source: ModelSource | None, optimizer_name: str, *, is_adapted: bool
) -> float:
    """Return the default peak learning rate for texts.

    Args:
        recipe: the model's recipe.
        source: the model that the run starts from; None for a new one.
        optimizer_name: the optimizer's name in `OPTIMIZERS`.
        is_adapted: whether new adapters are trained.
    """
    if not is_adapted and recipe.init is None and recipe.preset != "auto":
        return defaults.known_learning_rate(recipe.preset, optimizer_name)
    if is_adapted:
        rate = defaults.FINETUNING_RATES["adapters"]
    elif source and not source.code and not source.run:
        rate = defaults.FINETUNING_RATES["all"]
    else:
        # The model is the user's code, another run's, or a new one without a preset.
        rate = defaults.UNKNOWN_RATE
    return rate * OPTIMIZERS[optimizer_name].rate_factor


def _clip(norm: float | str, skip_spikes: bool | str, skips_by_default: bool) -> Clip | None:
    """Return the clipping; None if gradients are not clipped.

    Args:
        norm: optim.grad_clip.
        skip_spikes: optim.skip_spikes.
        skips_by_default: whether "auto" means True.
    """
    if norm == "none":
        return None
    if skip_spikes == "auto":
        skip_spikes = skips_by_default
    return Clip(float(norm), skip_spikes=bool(skip_spikes))
