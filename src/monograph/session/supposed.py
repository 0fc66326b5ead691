"""Fill in what `monograph plan` is not given: weights that are not on this machine, and the sizes
with which a model is usually trained.

A run derives its sizes from its text and its time; a plan for another GPU has neither. `monograph
train` uses nothing of this file.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from monograph.config import Settings
from monograph.model.config import LlamaConfig
from monograph.model.families import DEFAULT_FAMILY
from monograph.planner import defaults
from monograph.report.quantities import binary
from monograph.run.recipe import ModelRecipe
from monograph.run.source import ModelSource
from monograph.session.objectives import objective_of
from monograph.storage.code import HUB

ORIGIN = "plan"


def shape_named(settings: Settings) -> LlamaConfig | None:
    """Return the shape that model.preset or the sizes in [model] give; None without them.

    A preset has the vocabulary of the published model.
    """
    model = settings.model
    if model.init is not None or (model.preset == "auto" and not model.hidden_size):
        return None
    recipe = ModelRecipe(
        None,
        model.preset,
        model.sizes(),
        settings.train.seed,
        family=model.family or DEFAULT_FAMILY,
    )
    if model.preset != "auto":
        return recipe.shape()
    return recipe.shape(vocab_size=defaults.DEFAULT.vocabulary)


@contextmanager
def standing_in(settings: Settings) -> Iterator[Settings]:
    """Yield settings in which model.init names a temporary folder with the shape's config.json.

    This is done if the settings give a shape and need the weights of an existing model, for
    adapters or answers. Other settings stay as they are.
    """
    shape = shape_named(settings)
    if shape is None or not (objective_of(settings).needs_model or settings.lora.rank is not None):
        yield settings
        return
    with TemporaryDirectory(prefix="monograph-plan-") as folder:
        Path(folder, "config.json").write_text(json.dumps(shape.to_hf()))
        without: dict[str, Any] = dict.fromkeys(
            f"model.{key}" for key in (*settings.model.sizes(), "family")
        )
        yield settings.resolve({**without, "model.init": folder}, ORIGIN)


def usual(settings: Settings) -> Settings:
    """Return the settings with defaults for an open length of rows, tokens of an update and
    vocabulary, by the size of the model.

    The settings of the default run, which name no model, stay as they are.
    """
    init = settings.model.init
    data = settings.data
    train = settings.train
    shape = shape_named(settings)
    chosen: dict[str, Any] = {}
    if shape is None and init is None:
        return settings  # the default run
    length = data.sequence_length
    given = None if train.tokens_per_update == "auto" else train.tokens_per_update
    if shape is None:
        source = ModelSource.open(str(init))
        adapted = settings.lora.rank is not None or source.adapter is not None
        rows = defaults.ADAPTED_ROWS if adapted else defaults.FINETUNED_ROWS
        most = defaults.sequence_length(False, source.positions, given)
        per_update = rows * (most if length == "auto" else int(length))
    else:
        most, per_update = defaults.usual_sizes(shape.parameter_count())
        most = min(most, shape.max_position_embeddings, given or most)
        if (
            "data.source" not in settings.origins
            and data.tokenizer == "auto"
            and data.vocab_size is None
        ):
            chosen["model.vocab_size"] = max(shape.vocab_size, settings.model.vocab_size or 0)
    if length == "auto":
        length = chosen["data.sequence_length"] = most
    if given is None and not objective_of(settings).is_own_length:
        chosen["train.tokens_per_update"] = max(per_update, int(length))
    return settings.resolve(chosen, ORIGIN)


def named_model(settings: Settings) -> str:
    """Return what a plan calls the model: its preset, its name on the Hub, or its folder's name."""
    model = settings.model
    if model.init is None:
        default = defaults.DEFAULT.preset if not model.hidden_size else "own sizes"
        return default if model.preset == "auto" else model.preset
    origin = settings.origins["model.init"]
    return origin.removeprefix(HUB) if origin.startswith(HUB) else Path(model.init).name


def supposed_in(settings: Settings) -> list[str]:
    """Return the sizes that `usual` filled in, as arguments of a command: KEY=VALUE."""
    origins = settings.origins
    keys = ("data.sequence_length", "train.tokens_per_update")
    return [f"{key}={binary(settings.values()[key])}" for key in keys if origins.get(key) == ORIGIN]
