"""Build a model from settings, or load one by name from a run, a Hugging Face folder or a weight
file.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from monograph.checkpointing import Checkpoint
from monograph.errors import InputRefused, UsageError, Warn
from monograph.graph.frozen import FrozenWeight
from monograph.graph.inspect import unwrapped, write
from monograph.graph.lora import adapt, kept_state, merge
from monograph.graph.mmap_weights import mapped, materialize_, require_finite
from monograph.graph.precision import Precision
from monograph.loss import Loss, token_loss
from monograph.model import adapter, hub, torch_file
from monograph.model.adapter import PeftAdapters
from monograph.model.config import LlamaConfig
from monograph.model.exports import find_export
from monograph.model.files import write_no_extras
from monograph.model.llama import Llama
from monograph.model.vocabulary import extend
from monograph.run import recorded_state
from monograph.run.folder import Run, no_folder
from monograph.run.recipe import (
    Recipe,
    compared,
    digest,
    extended,
    from_file,
    is_weight_file,
    lora_of,
    require_base,
    require_base_of,
    require_same_file,
    run_named,
    tokenizer_in,
    tokenizer_of,
    without_tokenizer,
)
from monograph.run.repository import fetched
from monograph.run.source import ModelSource
from monograph.run.trust import require_trusted
from monograph.storage.reading import contents, exists
from monograph.terminal import shell_words
from monograph.text import tokenizer_config
from monograph.text.tokenizer import Tokenizer
from monograph.text.tokenizer_file import MAX_FILE_BYTES


class Trained(NamedTuple):
    """A run's newest model with its loss, tokenizer and checkpoint's state, and whether its weights
    are averaged.
    """

    model: nn.Module
    loss: Loss
    tokenizer: Tokenizer
    state: Mapping[str, Any]
    averaged: bool


def build(recipe: Recipe) -> tuple[nn.Module, Loss]:
    """Return the module that a run starts from, and its loss.

    Weights of a folder or file are mapped as fp32 (`monograph.graph.mmap_weights`); `materialize_`
    later reads those that no plane has read, which are narrower or quantised by then.

    Raises:
        InputRefused: the folder or file cannot be used, or the sizes do not fit together.
    """
    # A function that takes no seed draws its weights from torch's global generator.
    torch.manual_seed(recipe.seed)
    if recipe.init is None:
        return Llama(recipe.shape(), seed=recipe.seed), token_loss
    if recipe.code:
        return from_file(recipe, recipe.code)
    if recipe.init.endswith(".py"):
        raise InputRefused(
            f"model.init = {recipe.init}: name the function that builds the module, {recipe.init}:NAME"
        )
    return _merged(_load(recipe.init, lambda line: None, torch.float32, recipe.sizes)), token_loss


def load(folder: str | Path, warn: Warn = lambda line: None) -> tuple[Llama, Tokenizer | None]:
    """Load a language model and its tokenizer from a run ("last" or a folder), a Hugging Face
    folder or a weight file.

    The tokenizer is None if a folder has none; `monograph.save` and what reads or writes text then
    need another. The model of a run is its newest checkpoint that passes verification, or the
    checkpoint whose folder is named, with averaged weights if the run kept an average
    (`optim.ema`). The tokenizer.json of a weight file is in its folder. Only for the name
    hf://OWNER/NAME is the network asked, see `monograph.run.repository.fetched`.

    Raises:
        InputRefused: the name is none of these, or the files are damaged; the message says what is
            wrong.
        NoValidCheckpoint: the run has no valid checkpoint.
    """
    folder = fetched(folder)
    run = run_named(folder)
    if run:
        return load_run(run, warn)[:2]
    model = materialize_(_merged(_load(folder, warn, None, {})))
    require_all_finite(model, folder)  # a run saves only finite weights
    path = tokenizer_in(folder)
    return model, Tokenizer.from_file(path) if path else None


def load_with_tokenizer(
    folder: str | Path, warn: Warn = lambda line: None
) -> tuple[Llama, Tokenizer]:
    """Load a language model and its tokenizer, for what reads or writes text; see `load`.

    Raises:
        InputRefused: there is no tokenizer.json; see also `load`.
    """
    folder = fetched(folder)
    model, tokenizer = load(folder, warn)
    if tokenizer is None:
        raise without_tokenizer(folder)
    return model, tokenizer


def load_run(run: Run, warn: Warn = lambda line: None) -> tuple[Llama, Tokenizer, int]:
    """Load a run's newest sound model, its tokenizer and the update after which it was saved; see
    `load`.
    """
    checkpoint = recorded_state.newest(run, warn)
    model = materialize_(_merged(_of_run(run, checkpoint, None)[0]))
    return model, own_tokenizer(run, checkpoint.state), checkpoint.update


def require_all_finite(model: nn.Module, folder: str | Path) -> None:
    """Refuse a model with NaN or an infinity in a weight; raises InputRefused, which names the
    first such weight.
    """
    for name, weight in model.named_parameters():
        require_finite(weight, f"{folder}: {name}")


def load_to_export(
    folder: str | Path, warn: Warn = lambda line: None
) -> tuple[Llama, Tokenizer, PeftAdapters | None]:
    """Load a model for `save`, with weights still in their files and adapters unmerged, and a run's
    trained adapters.

    Raises:
        InputRefused, NoValidCheckpoint: see `load`.
    """
    run = run_named(folder)
    if run is None:
        if names := ModelSource.open(str(folder)).left_out:
            warn(f"{folder}: only the text model is written: {names} are left out")
        return _load(folder, warn, None, {}), Tokenizer.from_file(tokenizer_of(folder)), None
    checkpoint = recorded_state.newest(run, warn)
    model, base = _of_run(run, checkpoint, None)
    recipe = Recipe.recorded(checkpoint.state["recipe"])
    tokenizer = own_tokenizer(run, checkpoint.state)
    stored = None
    if recipe.lora:
        try:
            stored = adapter.pack_adapters(model, lora_of(recipe.lora), str(recipe.init), base)
        except InputRefused as error:
            warn(f"{error}: the model is written merged, without a folder of its adapters")
            return model, tokenizer, None
        base_of = {**stored.base, "weights_sha256": str(recipe.base_sha256)}
        stored = stored._replace(base=base_of, tokenizer=tokenizer if recipe.vocabulary else None)
    return model, tokenizer, stored


def _of_run(
    run: Run, checkpoint: Checkpoint, dtype: torch.dtype | None
) -> tuple[Llama, LlamaConfig]:
    """Return a run's model, with its adapters unmerged if it has any, and the shape of the stored
    base.
    """
    if checkpoint.state["model_config"] is None:
        init = checkpoint.state["recipe"]["init"]
        raise InputRefused(
            f"{run.folder} holds a module of its own ({init}), not a Llama: "
            "`monograph evaluate` scores it, and Python loads it"
        )
    recipe = Recipe.recorded(checkpoint.state["recipe"])
    if recipe.lora is None or recipe.code:
        model = _restored(run, checkpoint)
        model.sampling = checkpoint.state.get("sampling") or {}
        return model, model.config
    assert recipe.init is not None
    model = _merged(
        _load(recipe.init, lambda line: None, dtype or _one_dtype(recipe.init), recipe.sizes)
    )
    base = model.config
    require_base(digest(model), recipe.base_sha256, recipe.init, run.folder)
    if recipe.vocabulary:
        extend(model, *recipe.vocabulary)
    adapt(model, lora_of(recipe.lora | {"base": "auto"}))
    load_weights(model, weights_of(checkpoint))
    if "sampling" in checkpoint.state:  # an older run's are those that its base has now
        model.sampling = checkpoint.state["sampling"] or {}
    return model, base


def _restored(run: Run, checkpoint: Checkpoint) -> Llama:
    """Return the Llama that a checkpoint holds whole, with its own tensors rather than copies."""
    config = LlamaConfig.from_hf(checkpoint.state["model_config"])
    weights = {name: tensor.float() for name, tensor in weights_of(checkpoint).items()}
    hub.check_tensors(weights, config, run.checkpoints, "state.json")
    return hub.assembled(config, weights, run.folder)


def _merged(model: Llama) -> Llama:
    """Return the model with its adapters merged and all weights trainable."""
    merge(model)
    return model.requires_grad_(True)


def _one_dtype(init: str) -> torch.dtype | None:
    """Return None if a model's weights are stored in one dtype, else fp32, as for a run."""
    if run_named(init):
        return torch.float32  # merged in fewer bits, its adapters would give other weights
    if is_weight_file(init):
        return None
    return (
        torch.float32
        if len({tensor.dtype for tensor in hub.read_headers_of(init)[1].values()}) > 1
        else None
    )


def _load(
    folder: str | Path, warn: Warn, dtype: torch.dtype | None, sizes: Mapping[str, Any]
) -> Llama:
    """Return a model whose weights may still be in their files, and whose adapters are not merged
    yet.
    """
    if run := run_named(folder):
        return _of_run(run, recorded_state.newest(run, warn), dtype)[0]
    if adapter.is_adapter(folder):
        stored = adapter.read_adapter(folder)
        base = adapter.resolved_base(stored)
        model = _merged(_load(base, warn, dtype or _one_dtype(base), sizes))
        stored.require(model.config)
        if stored.weights_sha256:
            require_base_of(stored, digest(model))
        if file := hub.tokenizer_file(folder):
            extended(model, compared(Tokenizer.from_file(file), base, str(file)), base)
        adapter.install_adapters(model, stored.lora, start=stored)
        return model
    if is_weight_file(folder):
        shape, tensors = torch_file.read(Path(folder), sizes)
        own = {name: mapped(tensor, dtype or tensor.dtype) for name, tensor in tensors.items()}
        return hub.assembled(shape, own, Path(folder))
    if not exists(folder):
        raise InputRefused(no_folder(folder))
    return hub.mapped_model(folder, dtype)


def load_trained(
    run: Run, warn: Warn, precision: Precision | None = None, named: Collection[str] = ()
) -> Trained:
    """Load a run's newest sound model of any kind; a module from a Python file is built again by
    that file.

    Args:
        run: the run.
        warn: called with each line that the user should read.
        precision: the precision in which a model with adapters will compute; a base in a 16-bit
            precision is kept in 16 bits.
        named: every value of the run's settings that may name code, which its mark covers.

    Raises:
        InputRefused: the Python file has changed or is not trusted, or its module does not fit the
            weights.
        NoValidCheckpoint: the run has no valid checkpoint.
    """
    checkpoint = recorded_state.newest(run, warn)
    recipe = Recipe.recorded(checkpoint.state["recipe"])
    loss: Loss = token_loss
    if recipe.code or recipe.lora:
        recipe = recipe._replace(
            vouched=require_trusted(run.config, named, [recipe.init], recipe.sha256)
        )
        require_same_file(recipe, run)
        model, loss = build(recipe)
        if recipe.lora:
            require_base(digest(model), recipe.base_sha256, recipe.init, run.folder)
            if recipe.vocabulary and isinstance(model, Llama):
                extend(model, *recipe.vocabulary)
            adapter.install_adapters(model, lora_of(recipe.lora), precision=precision)
        load_weights(model, weights_of(checkpoint))
        materialize_(model)
    else:
        model = _restored(run, checkpoint)
    return Trained(
        model,
        loss,
        own_tokenizer(run, checkpoint.state),
        checkpoint.state,
        bool(averages(checkpoint)),
    )


def weights_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return a checkpoint's tensors of the model by name, averaged if the run kept an average."""
    average = averages(checkpoint)
    return {
        name: average[name] if name in average else checkpoint.model[name]
        for name in checkpoint.model
    }


def averages(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the averaged weights by the parameters' names; an empty mapping for a run that kept no
    average.
    """
    kept = [name for name in checkpoint.optimizer if name.startswith("ema.")]
    return {name.removeprefix("ema."): checkpoint.optimizer[name] for name in kept}


def own_tokenizer(run: Run, state: Mapping[str, Any]) -> Tokenizer:
    """Return a run's tokenizer.

    Args:
        run: the run.
        state: the state of the run's checkpoint, which records the digests of the tokenizer and of
            the files next to it; empty if there is no checkpoint. The user may add a chat template
            to a run without one.

    Raises:
        InputRefused: a file is damaged or was replaced; the message says where to find a copy.
    """
    recorded = state.get("tokenizer")
    recorded_files = state.get("tokenizer_files")
    try:
        own = (
            hashlib.sha256((contents(run.tokenizer, MAX_FILE_BYTES) or b"").rstrip()).hexdigest()
            == recorded
        )
        tokenizer = Tokenizer.from_file(run.tokenizer, trusted=own)
        if recorded not in (None, tokenizer.digest):
            raise InputRefused(
                f"{run.tokenizer}: expected content of sha256 {recorded}, found {tokenizer.digest}"
            )
    except InputRefused as error:
        fault = str(error).rpartition("; ")[0] or str(error)
        copy = f"the folder that `monograph data build {shell_words(run.config)}` prints has a copy"
        raise InputRefused(f"{fault}; put it back: {copy}") from None
    if recorded_files is None:  # no checkpoint, or one from before these files were recorded
        return tokenizer
    for name in sorted({*recorded_files, tokenizer_config.CONFIG}):
        expected, there = (
            files.get(name, "nothing") for files in (recorded_files, tokenizer.config.digests)
        )
        if expected != there:
            raise InputRefused(
                f"{run.folder / name}: expected content of sha256 {expected}, found {there}; put it back as the run "
                "wrote it: a branch or an export of the run has it, too"
            )
    return tokenizer


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into a module by name; tied weights are stored once.

    Raises:
        InputRefused: a tensor is missing, left over or of another shape.
    """
    own = kept_state(model)
    if odd := sorted(own.keys() ^ tensors.keys()):
        raise InputRefused(
            f"the saved model does not fit: {odd[0]} is {'missing' if odd[0] in own else 'unknown'}"
        )
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise InputRefused(
                f"the saved model does not fit: {name} is {list(tensors[name].shape)}, not {list(tensor.shape)}"
            )
    for name, tensor in own.items():
        write(tensor.detach(), tensors[name])


def save(
    model: Llama,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    format: str = "hf",
    dtype: str | None = None,
    warn: Warn = lambda line: None,
    beside: Callable[[Path], None] = write_no_extras,
) -> None:
    """Write a model for other tools in one of the formats of `monograph.model.exports`.

    `beside` writes what belongs beside the model into the folder before it gets its name.

    Raises:
        UsageError: an unknown format or dtype, a missing package, or a module that is not a Llama
            in full precision.
        InputRefused: the folder is not empty, or the format cannot express the model.
        DiskFull: there is no space left; nothing of this export remains.
    """
    export = find_export(format, dtype)
    model = unwrapped(model)
    if any(isinstance(part, FrozenWeight) for part in model.modules()):
        raise UsageError(
            "the model has weights in 8 or 4 bits: monograph.graph.lora.merge(model) first"
        )
    if not isinstance(model, Llama):
        raise UsageError(
            f"save writes a language model of this package, not a {type(model).__name__}"
        )
    export.write(model, Path(folder), tokenizer, dtype, warn, beside)
