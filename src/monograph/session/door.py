"""Read a run's settings, once: `job_of` turns them into a `Job`. Code that gets the job never sees
the settings.

What the settings name is looked up here: `last`, a run in place of a model or a tokenizer, an
adapter's base, copies of files that are gone. Each "auto" that needs neither the text nor the
model's shape nor the device is decided here, too.
"""

from pathlib import Path
from typing import Any, NamedTuple

from monograph.config import DEFAULT_MINUTES, Settings
from monograph.data.options import ReadingOptions
from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.model.families import DEFAULT_FAMILY
from monograph.model.files import has_weights
from monograph.optim import OPTIMIZERS
from monograph.planner import defaults
from monograph.predict.footprint import Training
from monograph.run.recipe import ModelRecipe, tokenizer_named
from monograph.run.source import ModelSource, checked_recipe
from monograph.session.adapting import fixed_lora, lora_of, rates
from monograph.session.by_key import by_field
from monograph.session.job import AskedIntervals, AskedLength, AskedTransfer, Job, OpenChoice
from monograph.session.new_tokens import tokens_of
from monograph.session.objective import Objective
from monograph.session.objectives import opened
from monograph.session.record import ORIGIN, ConfigRecord
from monograph.session.recorded import own_copies
from monograph.session.requirements import require_positions, require_targets
from monograph.step import Clip
from monograph.storage.reading import is_file
from monograph.transfer import WidthTransfer

WIDTH = "width"
# The share of the peak learning rate at which the schedule ends, if optim.min_lr_ratio is not given.
FINAL = 0.05


def job_of(settings: Settings, *, built: bool = True) -> Job:
    """Return what the settings of a run ask for.

    Args:
        settings: the run's settings.
        built: whether the model will be built; if False, model.init may be a folder with config.json
            and no weights.

    Raises:
        InputRefused: a model, a tokenizer or an adapter cannot be used.
        UsageError: choices exclude one another.
    """
    init = settings.model.init
    shape_alone = not built and init is not None and is_file(Path(init, "config.json"))
    span = _span(settings)
    intervals = _intervals(settings)
    transfer = transfer_asked(settings)
    # From here on, `settings` has the values that were looked up.
    settings, objective, recipe, source, rule = _look_up(settings, transfer, shape_alone)
    shape = source.shape if source else None
    optim = settings.optim
    train = settings.train
    length = int(settings.data.sequence_length)
    per_update = defaults.in_whole_rows(int(train.tokens_per_update), length)
    lora = lora_of(settings)
    tokens = tokens_of(settings, source, settings.data.tokenizer, is_adapted=lora is not None)
    usual_rate = objective.rate_share * _usual_rate(recipe, source, rule, lora is not None)
    fields = rates(optim.lr, settings.lora.lr_ratio, usual_rate) | fresh_fields(recipe, rule)
    if optim.weight_decay != "auto":
        fields["weight_decay"] = optim.weight_decay
    asked: dict[OpenChoice, Any] = {
        "micro_batch": train.micro_batch,
        "precision": train.precision,
        "compile": train.compile,
        "remat": train.remat,
        "memory": train.memory,
    }
    is_open = frozenset(choice for choice, value in asked.items() if value == "auto")
    given: dict[str, Any] = {
        choice: value for choice, value in asked.items() if choice not in {*is_open, "memory"}
    }
    window_rows = per_update // length
    training = Training(
        rows=given.pop("micro_batch", window_rows),
        window_rows=window_rows,
        length=length,
        optim=OPTIMIZERS[rule](
            state=optim.state,
            master_weights=optim.master_weights,
            seed=recipe.seed,
            betas=optim.betas,
            eps=optim.eps,
            ema=None if optim.ema == "none" else optim.ema,
            **fields,
        ),
        clip=_clip(optim.grad_clip, optim.skip_spikes, objective.finds_spikes),
        lora=lora,
        **given,
    )
    job = Job(
        record=ConfigRecord(settings),
        objective=objective,
        source=source,
        recipe=recipe,
        sizes_said=_said(settings.pinned(), "model"),
        reading=ReadingOptions(
            **(settings.data.model_dump() | own_copies(settings.data, settings.origins))
        ),
        tokens=tokens,
        transfer=transfer and transfer._replace(base=optim.transfer_base),
        training=training,
        memory="device" if train.memory == "auto" else train.memory,
        open=is_open,
        is_rate_open=optim.lr == "auto",
        is_decay_open=optim.weight_decay == "auto",
        final=FINAL if optim.min_lr_ratio is None else optim.min_lr_ratio,
        asked_tokens=int(train.tokens_per_update),
        updates=span.updates
        or (defaults.updates_of(span.tokens, per_update) if span.tokens else 0),
        span=span,
        intervals=intervals,
        **by_field(Job, settings.values()),
    )
    if not shape_alone:
        tokens.require()
    require_targets(lora, shape)
    require_positions(length, shape)
    return job


def _span(settings: Settings) -> AskedLength:
    """Return how long the run lasts.

    If train.wall_minutes are given without train.minutes, training may fill all of them.
    """
    train = settings.train
    minutes = train.minutes or DEFAULT_MINUTES
    is_timed = "train.minutes" in settings.origins
    if train.wall_minutes is not None and not is_timed:
        minutes = train.wall_minutes
    return AskedLength(
        updates=train.updates or 0,
        tokens=train.tokens or 0,
        epochs=train.epochs,
        minutes=minutes,
        wall_minutes=train.wall_minutes,
        is_timed=is_timed,
    )


def _intervals(settings: Settings) -> AskedIntervals:
    warmup, train = settings.optim.warmup_updates, settings.train
    return AskedIntervals(
        warmup_updates=None if warmup == "auto" else warmup,
        eval_every=None if train.eval_every == "auto" else train.eval_every,
        save_every=None if train.save_every == "auto" else train.save_every,
    )


class _Found(NamedTuple):
    """What the settings name, looked up.

    Attributes:
        settings: the settings with the values that were looked up or decided.
        objective: the way to learn, with its own keys decided.
        recipe: the checked recipe.
        source: the model that the run starts from; None for a new one.
        optimizer: the optimizer's name in `OPTIMIZERS`.
    """

    settings: Settings
    objective: Objective
    recipe: ModelRecipe
    source: ModelSource | None
    optimizer: str


def _look_up(settings: Settings, transfer: AskedTransfer | None, shape_alone: bool) -> _Found:
    """Open the model that `model.init` names; decide betas, eps, preset, lengths, tokenizer,
    adapters and the base of a width transfer.

    Args:
        settings: the run's settings.
        transfer: the width transfer that they ask for; None without.
        shape_alone: whether only the shape of `model.init` is needed, not its weights.
    """
    model = settings.model
    source = ModelSource.open(model.init) if model.init else None
    chosen: dict[str, Any] = {}
    optimizer: str = settings.optim.name
    if optimizer == "auto":
        optimizer = defaults.optimizer(fresh=model.init is None)
    # An optimizer's own defaults may differ from the keys'.
    kind = OPTIMIZERS[optimizer]
    if "optim.betas" not in settings.origins and settings.optim.betas != kind.betas:
        chosen["optim.betas"] = kind.betas
    if "optim.eps" not in settings.origins and settings.optim.eps != kind.eps:
        chosen["optim.eps"] = kind.eps
    length, per_update = settings.data.sequence_length, settings.train.tokens_per_update
    if length == "auto":
        positions = source.positions if source else model.max_position_embeddings
        given = None if per_update == "auto" else per_update
        length = defaults.sequence_length(model.init is None, positions, given)
        chosen["data.sequence_length"] = length
    if source and source.recorded_name != source.name:
        chosen["model.init"] = source.recorded_name
    if model.preset == "auto" and model.init is None and not model.hidden_size:
        chosen["model.preset"] = defaults.DEFAULT.preset
    preset = str(chosen.get("model.preset", model.preset))
    chosen |= fixed_lora(settings, source)
    objective, values = opened(settings, length)
    chosen |= values
    family = model.family or DEFAULT_FAMILY
    recipe = ModelRecipe(
        model.init,
        preset,
        model.sizes(),
        settings.train.seed,
        family=family,
        vouched=settings.vouched,
    )
    recipe = (
        recipe
        if shape_alone and not has_weights(Path(str(model.init)))
        else checked_recipe(recipe, source)
    )
    if transfer:
        rule = transfer.of(None if model.init else recipe.shape(vocab_size=1))
        chosen["optim.transfer_base"] = rule.base.hidden_size
    if (named := tokenizer_named(settings.data.tokenizer)) != settings.data.tokenizer:
        chosen["data.tokenizer"] = named
    if settings.data.tokenizer == "auto" and not shape_alone:
        chosen["data.tokenizer"] = (
            "bpe" if source is None or recipe.code else _own_tokenizer(source)
        )
    if (
        chosen.get("data.tokenizer", settings.data.tokenizer) == "bpe"
        and settings.data.vocab_size is None
    ):
        chosen["data.vocab_size"] = defaults.DEFAULT.vocabulary
    if per_update == "auto" and not objective.is_own_length:
        usual = max(defaults.DEFAULT.tokens_per_update, length)
        chosen["train.tokens_per_update"] = defaults.in_whole_rows(usual, length)
    settings = settings.resolve(chosen, ORIGIN)
    if source is None:
        return _Found(settings, objective, recipe, None, optimizer)
    # Until here errors name the model as the user did; from here on it has the recorded name.
    source = source.renamed(str(settings.model.init))
    recipe = recipe._replace(init=source.base, adapter=source.name if source.adapter else None)
    return _Found(settings, objective, recipe, source, optimizer)


def _own_tokenizer(source: ModelSource) -> str:
    """Return the tokenizer.json of the model that a run starts from.

    Raises:
        InputRefused: the model has none.
    """
    try:
        return source.tokenizer
    except InputRefused as error:
        raise InputRefused(f"{error}, or name one as data.tokenizer") from None


def _said(values: dict[str, Any], section: str) -> str:
    """Return the keys of a section with their values, as an error shows them."""
    return ", ".join(
        f"{key} = {value}" for key, value in values.items() if key.startswith(f"{section}.")
    )


def transfer_asked(settings: Settings) -> AskedTransfer | None:
    """Return the width transfer that the settings ask for; None without."""
    optim = settings.optim
    if optim.transfer == "none":
        return None
    return AskedTransfer(optim.transfer_base, settings.said("optim.transfer"), settings.model.init)


def transfer_of(settings: Settings, config: LlamaConfig | None) -> WidthTransfer | None:
    """Return the rule that carries rates to a model of this shape; None without width transfer.

    Args:
        settings: the run's settings.
        config: the model's shape; None if it is not a `Llama` with new random weights.

    Raises:
        UsageError: see `AskedTransfer.of`.
    """
    asked = transfer_asked(settings)
    return asked.of(config) if asked else None


def fresh_fields(recipe: ModelRecipe, rule: str, epochs: int = 1) -> dict[str, Any]:
    """Return the optimizer's fields with other defaults for a new model than its class has.

    Args:
        recipe: the model's recipe.
        rule: the optimizer's name in `OPTIMIZERS`.
        epochs: the number of times that the text will be read.
    """
    return {} if recipe.init else defaults.tuned_fields(recipe.preset, recipe.family, rule, epochs)


def _usual_rate(
    recipe: ModelRecipe, source: ModelSource | None, rule: str, is_adapted: bool
) -> float:
    """Return the default peak learning rate of an optimizer."""
    if not is_adapted and recipe.init is None and recipe.preset != "auto":
        return defaults.known_learning_rate(recipe.preset, rule)
    rate = defaults.UNKNOWN_RATE
    if is_adapted:
        rate = defaults.FINETUNING_RATES["adapters"]
    elif source and not source.code and not source.run:
        rate = defaults.FINETUNING_RATES["all"]
    return rate * OPTIMIZERS[rule].rate_factor


def _clip(norm: float | str, skip_spikes: bool | str, finds_spikes: bool) -> Clip | None:
    """Return the clipping; None if gradients are not clipped.

    Args:
        norm: optim.grad_clip.
        skip_spikes: optim.skip_spikes.
        finds_spikes: whether "auto" skips spikes.
    """
    if norm == "none":
        return None
    if skip_spikes == "auto":
        skip_spikes = finds_spikes
    return Clip(float(norm), skip_spikes=bool(skip_spikes))
