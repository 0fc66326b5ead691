"""Fill in what `monograph plan` is not given: weights that are not on this machine, and the sizes
with which a model is usually trained.

A run derives its sizes from its text and its time, but a plan for another GPU has neither. Only
`monograph plan` uses this file.
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

ORIGIN = "plan"  # the origin of the values that are filled in


def given_shape(settings: Settings) -> LlamaConfig | None:
    """Return the model's shape that model.preset or the sizes in [model] give; None without them.

    A preset has the vocabulary of the published model.
    """
    model = settings.model
    gives_shape = model.preset != "auto" or bool(model.hidden_size)
    if model.init is not None or not gives_shape:
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
def with_shape_folder(settings: Settings) -> Iterator[Settings]:
    """Replace a given shape by a temporary folder with its config.json, if an existing model is
    needed for adapters or sampled answers.

    Yields:
        The settings in which model.init names the folder; the same settings if nothing is replaced.
    """
    shape = given_shape(settings)
    needs_model = objective_of(settings).needs_model or settings.lora.rank is not None
    if shape is None or not needs_model:
        yield settings
        return
    with TemporaryDirectory(prefix="monograph-plan-") as folder:
        Path(folder, "config.json").write_text(json.dumps(shape.to_hf()))
        # The sizes are in the folder now, so their keys are unset.
        keys = [f"model.{key}" for key in (*settings.model.sizes(), "family")]
        values: dict[str, Any] = dict.fromkeys(keys, None)
        values["model.init"] = folder
        yield settings.resolve(values, ORIGIN)


def with_usual_sizes(settings: Settings) -> Settings:
    """Return the settings with values for the length of rows, the tokens of an update and the
    vocabulary, where they are not given. With these values, models of this size are usually
    trained.

    The settings of the default run, which name no model, are not changed.
    """
    init = settings.model.init
    data = settings.data
    train = settings.train
    shape = given_shape(settings)
    values: dict[str, Any] = {}
    if shape is None and init is None:
        return settings  # the default run
    given_length = data.sequence_length
    given_tokens = None if train.tokens_per_update == "auto" else train.tokens_per_update
    if shape is None:
        # The model is an existing one, which is finetuned.
        source = ModelSource.open(str(init))
        is_adapted = settings.lora.rank is not None or source.adapter is not None
        rows = defaults.ADAPTED_ROWS if is_adapted else defaults.FINETUNED_ROWS
        usual_length = defaults.sequence_length(False, source.positions, given_tokens)
        length = usual_length if given_length == "auto" else int(given_length)
        usual_tokens = rows * length
    else:
        usual_length, usual_tokens = defaults.usual_sizes(shape.parameter_count())
        usual_length = min(usual_length, shape.max_position_embeddings)
        if given_tokens:  # a row must not be longer than an update
            usual_length = min(usual_length, given_tokens)
        # Without a text or a tokenizer, the model has the vocabulary of its shape.
        has_no_vocabulary = (
            "data.source" not in settings.origins
            and data.tokenizer == "auto"
            and data.vocab_size is None
        )
        if has_no_vocabulary:
            values["model.vocab_size"] = max(shape.vocab_size, settings.model.vocab_size or 0)
    length = usual_length if given_length == "auto" else int(given_length)
    if given_length == "auto":
        values["data.sequence_length"] = length
    if given_tokens is None and not objective_of(settings).has_own_update_size:
        values["train.tokens_per_update"] = max(usual_tokens, length)
    return settings.resolve(values, ORIGIN)


def model_text(settings: Settings) -> str:
    """Return what a plan calls the model: its preset, its name on the Hub, or its folder's name."""
    model = settings.model
    if model.init is None:
        if model.preset != "auto":
            return str(model.preset)
        return "own sizes" if model.hidden_size else defaults.DEFAULT.preset
    # The origin of a model that was downloaded from the Hub is its name there.
    origin = settings.origins["model.init"]
    return origin.removeprefix(HUB) if origin.startswith(HUB) else Path(model.init).name


def assumed_sizes(settings: Settings) -> list[str]:
    """Return the sizes that `with_usual_sizes` filled in, as arguments of a command: KEY=VALUE."""
    origins = settings.origins
    keys = ("data.sequence_length", "train.tokens_per_update")
    return [f"{key}={binary(settings.values()[key])}" for key in keys if origins.get(key) == ORIGIN]
