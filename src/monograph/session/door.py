"""Read a run's settings, once: `job_of` turns them into a `Job`, below which no settings are seen.

What they name is found here: `last`, a run in the place of a model or a tokenizer, an adapter's base, copies of files
that are gone. So is each "auto" for which neither the text nor the model's shape nor the device has to be known.
"""

from pathlib import Path
from typing import Any, NamedTuple

from monograph.config import DEFAULT_MINUTES, Settings
from monograph.errors import InputRefused
from monograph.model.adapter import is_adapter, read_adapter, resolved_base
from monograph.model.config import LlamaConfig
from monograph.model.families import FIRST_FAMILY
from monograph.model.files import has_weights
from monograph.optim import OPTIMIZERS, Optimizer
from monograph.planner import defaults
from monograph.run.models import positions_of
from monograph.run.recipe import Recipe, run_named, shape_in, tokenizer_named, tokenizer_of
from monograph.session.adapting import fixed_lora, lora_of, rates, tokens_of
from monograph.session.job import AskedTransfer, Intervals, Job, Span
from monograph.session.objectives import objective_of, objective_values
from monograph.session.record import ORIGIN, Record
from monograph.session.recorded import own_copies
from monograph.session.requirements import require_positions, require_targets
from monograph.step import Clip
from monograph.storage.code import folder_named
from monograph.storage.reading import is_file
from monograph.transfer import WidthTransfer

WIDTH = "width"
FINAL = 0.05  # share of the peak learning rate that the schedule falls to if optim.min_lr_ratio says nothing


def job_of(settings: Settings, *, built: bool = True) -> Job:
    """Return what the settings of a run ask for.

    Args:
        settings: the run's settings.
        built: whether the model will be built; if not, a folder with config.json and no weights will do.

    Raises:
        InputRefused: a model, a tokenizer or an adapter cannot be used.
        UsageError: choices exclude one another.
    """
    shape_alone = not built and settings.model.init is not None and is_file(Path(settings.model.init, "config.json"))
    found = _found(settings, shape_alone)
    settings, recipe = found.settings, found.recipe
    lora = lora_of(settings)
    objective = objective_of(settings).read(settings)
    train = settings.train
    length = int(settings.data.sequence_length)
    asked_tokens = int(train.tokens_per_update)
    per_update = defaults.in_whole_rows(asked_tokens, length)
    optim = _optimizer(settings, recipe, is_adapted=lora is not None, judges=objective.judges)
    final = settings.optim.min_lr_ratio
    tokens = tokens_of(settings)
    job = Job(
        record=Record(settings),
        objective=objective,
        recipe=recipe,
        sizes_said=_sizes_said(settings),
        reading=settings.data.model_dump() | own_copies(settings),
        tokens=tokens,
        lora=lora,
        transfer=transfer_asked(settings),
        optim=optim.optimizer,
        is_rate_open=optim.is_rate_open,
        is_decay_open=optim.is_decay_open,
        clip=_clip(settings, finds_spikes=objective.finds_spikes),
        schedule_name=settings.optim.schedule,
        final=FINAL if final is None else final,
        asked_tokens=asked_tokens,
        tokens_per_update=per_update,
        span=_span(settings, per_update),
        intervals=_intervals(settings),
        keep=train.keep,
        precision=train.precision,
        parallel=train.parallel,
        gather_dtype=train.gather_dtype,
        micro_batch=0 if train.micro_batch == "auto" else train.micro_batch,
        compile=train.compile,
        remat=train.remat,
        memory=train.memory,
    )
    if not shape_alone:
        tokens.require()
    require_targets(lora, found.shape)
    require_positions(length, found.shape)
    return job


class _Found(NamedTuple):
    """The settings with what they name found, the recipe, and the model's shape: None if only building tells it."""

    settings: Settings
    recipe: Recipe
    shape: LlamaConfig | None


def _found(settings: Settings, shape_alone: bool) -> _Found:
    """Decide preset, lengths, tokenizer and adapters, and find what `model.init` names."""
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
        return _Found(settings, recipe._replace(init=resolved_base(read_adapter(init)), adapter=init), shape)
    return _Found(settings, recipe._replace(init=init), shape)


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


def _sizes_said(settings: Settings) -> str:
    """Return the keys that shape the model, with their values, as an error shows them."""
    return ", ".join(f"{key} = {value}" for key, value in settings.pinned().items() if key.startswith("model."))


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
        config: the model's shape; None if it is not a Llama whose weights are drawn here.

    Raises:
        UsageError: transfer is asked for another kind of model, or the width does not keep the shape's ratios.
    """
    asked = transfer_asked(settings)
    return asked.of(config) if asked else None


class _AskedOptimizer(NamedTuple):
    """An optimizer, and whether its rate and its weight decay are usual values that may change."""

    optimizer: Optimizer
    is_rate_open: bool
    is_decay_open: bool


def _optimizer(settings: Settings, recipe: Recipe, *, is_adapted: bool, judges: bool) -> _AskedOptimizer:
    """Return the optimizer, without the changes of width transfer."""
    optim = settings.optim
    name: str = optim.name
    if name == "auto":
        name = defaults.optimizer(fresh=recipe.init is None)
    usual = _usual_rate(recipe, name, is_adapted) * (defaults.JUDGED_SHARE if judges else 1)
    fields = rates(optim.lr, settings.lora.lr_ratio, usual) | fresh_fields(recipe, name)
    is_decay_open = optim.weight_decay == "auto"
    if not is_decay_open:
        fields = {**fields, "weight_decay": optim.weight_decay}
    made = OPTIMIZERS[name](
        state=optim.state,
        master_weights=optim.master_weights,
        seed=recipe.seed,
        betas=optim.betas,
        eps=optim.eps,
        ema=None if optim.ema == "none" else optim.ema,
        **fields,
    )
    return _AskedOptimizer(made, optim.lr == "auto", is_decay_open)


def fresh_fields(recipe: Recipe, rule: str, epochs: int = 1) -> dict[str, Any]:
    """Return the fields in which the optimizer of a new model differs from its class's defaults."""
    return {} if recipe.init else defaults.muon_fields(recipe.preset, recipe.family, rule, epochs)


def _usual_rate(recipe: Recipe, rule: str, is_adapted: bool) -> float:
    """Return the default peak learning rate of an optimizer."""
    if not is_adapted and recipe.init is None and recipe.preset != "auto":
        return defaults.known_learning_rate(recipe.preset, rule)
    rate = defaults.UNKNOWN_RATE
    if is_adapted:
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


def _span(settings: Settings, tokens_per_update: int) -> Span:
    """Return how long the run lasts; if only the whole time is limited, training may fill it."""
    train = settings.train
    whole = train.wall_minutes
    minutes = train.minutes or DEFAULT_MINUTES
    is_timed = "train.minutes" in settings.origins
    if whole is not None and not is_timed:
        minutes = whole
    by_tokens = defaults.updates_of(train.tokens, tokens_per_update) if train.tokens else 0
    return Span(train.updates or by_tokens, train.epochs, minutes, whole, is_timed)


def _intervals(settings: Settings) -> Intervals:
    warmup, train = settings.optim.warmup_updates, settings.train
    return Intervals(
        warmup_updates=None if warmup == "auto" else warmup,
        eval_every=None if train.eval_every == "auto" else train.eval_every,
        save_every=None if train.save_every == "auto" else train.save_every,
    )
