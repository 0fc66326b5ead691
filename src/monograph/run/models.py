"""Build the model that a run starts from, load a model by its name, and save one for other tools.

A weight file is a file of torch.save. An adapter's base is the model that it was trained on. To
merge an adapter means to add the product of its two matrices to the base's weights, and to remove
the adapter. `init` is the name of the model that a run starts from (the key `model.init`).
"""

import hashlib
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from monograph.checkpointing import Checkpoint
from monograph.errors import InputRefused, UsageError, Warn
from monograph.graph.frozen import FrozenWeight
from monograph.graph.inspect import unwrapped, write_tensor
from monograph.graph.lora import adapt, checkpoint_state
from monograph.graph.lora_merge import merge
from monograph.graph.mmap_weights import mapped, materialize_, require_finite
from monograph.graph.precision import Precision
from monograph.graph.shared_base import copy_with_shared_base
from monograph.loss import Loss, token_loss
from monograph.model import adapter, hub, torch_file, whole_folder
from monograph.model.adapter import PeftAdapters
from monograph.model.config import LlamaConfig
from monograph.model.exports import find_export
from monograph.model.files import write_no_extras
from monograph.model.gguf import TRAINED_DTYPES
from monograph.model.llama import Llama
from monograph.model.vocabulary import set_new_rows
from monograph.run import recorded_state
from monograph.run.folder import Run, no_folder
from monograph.run.recipe import (
    ModelRecipe,
    add_missing_rows,
    build_from_file,
    compare_tokenizers,
    find_run,
    find_tokenizer,
    have_one_base,
    is_weight_file,
    module_digest,
    no_tokenizer_error,
    recorded_lora,
    require_base_of_adapter,
    require_base_of_run,
    require_same_file,
    require_tokenizer,
)
from monograph.run.repository import FILES, fetch_if_on_hub
from monograph.run.source import ModelSource
from monograph.run.trust import require_trusted
from monograph.storage.reading import contents, exists
from monograph.terminal import shell_words
from monograph.text import tokenizer_config
from monograph.text.tokenizer import Tokenizer
from monograph.text.tokenizer_file import MAX_FILE_BYTES


class Trained(NamedTuple):
    """A run's newest model.

    Attributes:
        model: the module.
        loss: the run's loss.
        tokenizer: the run's tokenizer.
        state: the state of the checkpoint from which the model was loaded.
        averaged: whether `model` has averaged weights (`optim.ema`).
    """

    model: nn.Module
    loss: Loss
    tokenizer: Tokenizer
    state: Mapping[str, Any]
    averaged: bool

    @property
    def recipe(self) -> ModelRecipe:
        """Return what the model was built from."""
        return ModelRecipe.recorded(self.state["recipe"])


def build(recipe: ModelRecipe) -> tuple[nn.Module, Loss]:
    """Build the module that a run starts from, and return it with its loss.

    Weights that come from a folder or a file are not read yet (`monograph.graph.mmap_weights`). Some are
    read later straight into the flat buffers of the optimizer, and the rest by `materialize_`. A weight
    becomes fp32 when it is read. Only a weight that was frozen before it is read may be stored in fewer
    bits.

    Raises:
        InputRefused: the folder or file cannot be used, or the sizes do not fit together.
    """
    # A Python function that builds a module and takes no seed draws from torch's global generator.
    torch.manual_seed(recipe.seed)
    if recipe.init is None:
        return Llama(recipe.shape(), seed=recipe.seed), token_loss
    if recipe.code:
        return build_from_file(recipe, recipe.code)
    if recipe.init.endswith(".py"):
        raise InputRefused(
            f"model.init = {recipe.init}: name the function that builds the module, {recipe.init}:NAME"
        )
    model = _load_unmerged(
        recipe.init, _no_warning, torch.float32, recipe.sizes, mtp=recipe.trains_mtp
    )
    if not recipe.trains_mtp:
        model.remove_mtp_()  # a run may have it
    return _merge_adapters(model), token_loss


def _no_warning(line: str) -> None:
    """Ignore a warning. When a base is loaded, only errors are reported."""


def _warn_in_python(line: str) -> None:
    """Warn the program that called `load`."""
    warnings.warn(line, stacklevel=2)


def load(
    folder: str | Path, warn: Warn = _warn_in_python, *, mtp: bool = False
) -> tuple[Llama, Tokenizer | None]:
    """Load a language model and its tokenizer by name.

    A run's model is that of its newest valid checkpoint, or of the checkpoint whose folder is
    named. Its weights are averaged if the run kept an average (`optim.ema`).

    Args:
        folder: a run, a checkpoint of one, "last", a Hugging Face folder, an adapter, a weight file
            or hf://OWNER/NAME. Only the last of these uses the network
            (`monograph.run.repository.fetch_if_on_hub`).
        warn: called with each line that the user should read; by default it becomes a warning of
            Python's.
        mtp: whether the model of a Hugging Face folder shall have the folder's head for multi-token
            prediction (`monograph.model.mtp`). The model of a run has it if it was trained.

    Returns:
        The model and its tokenizer. The tokenizer of a weight file is the tokenizer.json next to
        it. The tokenizer is None if there is no tokenizer.json.

    Raises:
        InputRefused: the name is none of these, or a file is damaged.
        NoValidCheckpoint: the run has no valid checkpoint.
    """
    folder = fetch_if_on_hub(folder)
    run = find_run(folder)
    if run:
        model, tokenizer, _ = load_run(run, warn)
        return model, tokenizer
    unmerged = _load_unmerged(folder, warn, dtype=None, sizes={}, mtp=mtp)
    model = materialize_(_merge_adapters(unmerged))  # reads weights that are still in their files
    require_all_finite(model, folder)  # not needed for a run, which saves only finite weights
    path = find_tokenizer(folder)
    return model, Tokenizer.from_file(path) if path else None


def load_with_tokenizer(
    folder: str | Path, warn: Warn = _warn_in_python, *, mtp: bool = False
) -> tuple[Llama, Tokenizer]:
    """Load a language model that must have a tokenizer; see `load`.

    Raises:
        InputRefused: there is no tokenizer.json, or any reason of `load`.
        NoValidCheckpoint: the run has no valid checkpoint.
    """
    folder = fetch_if_on_hub(folder)
    model, tokenizer = load(folder, warn, mtp=mtp)
    if tokenizer is None:
        raise no_tokenizer_error(folder)
    return model, tokenizer


def load_run(run: Run, warn: Warn = lambda line: None) -> tuple[Llama, Tokenizer, int]:
    """Load a run's model and its tokenizer, and return them with the update of the checkpoint."""
    checkpoint = recorded_state.load_newest(run, warn)
    unmerged, _ = _load_run_unmerged(run, checkpoint, dtype=None)
    model = materialize_(_merge_adapters(unmerged))
    return model, load_tokenizer(run, checkpoint.state), checkpoint.update


def require_all_finite(model: nn.Module, folder: str | Path) -> None:
    """Require finite weights.

    Raises:
        InputRefused: a weight has a NaN or an infinity; the message names `folder` and the weight.
    """
    for name, weight in model.named_parameters():
        require_finite(weight, f"{folder}: {name}")


def load_to_export(
    folder: str | Path, warn: Warn = lambda line: None
) -> tuple[Llama, Tokenizer, PeftAdapters | None]:
    """Load a model for `save`, with weights still in their files and adapters unmerged.

    Args:
        folder: the model's name; see `load`.
        warn: called with each line that the user should read.

    Returns:
        The model, its tokenizer, and a copy of the adapters that a run has trained. The copy is
        None if there are no such adapters, or if PEFT's format cannot express them.

    Raises:
        InputRefused, NoValidCheckpoint: see `load`.
    """
    run = find_run(folder)
    if run is None:
        return (
            _load_unmerged(folder, warn, dtype=None, sizes={}),
            Tokenizer.from_file(require_tokenizer(folder)),
            None,
        )
    checkpoint = recorded_state.load_newest(run, warn)
    model, base_shape = _load_run_unmerged(run, checkpoint, dtype=None)
    recipe = ModelRecipe.recorded(checkpoint.state["recipe"])
    tokenizer = load_tokenizer(run, checkpoint.state)
    if recipe.lora is None:
        return model, tokenizer, None
    try:
        adapters = adapter.pack_adapters(
            model, recorded_lora(recipe.lora), str(recipe.init), base_shape
        )
    except InputRefused as error:
        warn(f"{error}: the model is written merged, without a folder of its adapters")
        return model, tokenizer, None
    base_record = {**adapters.base, "weights_sha256": str(recipe.base_sha256)}
    # Without new tokens, adapters need no tokenizer next to them: their base has it.
    own_tokenizer = tokenizer if recipe.vocabulary else None
    return model, tokenizer, adapters._replace(base=base_record, tokenizer=own_tokenizer)


def trained_dtype(name: str | Path) -> str | None:
    """Return the dtype of the GGUF file that holds exactly the weights of a run.

    None: the name is not that of a run, or the run was trained without `train.quantize`.

    Raises:
        InputRefused, NoValidCheckpoint: the run's checkpoint cannot be read.
    """
    run = find_run(name)
    if run is None:
        return None
    quantize = recorded_state.newest_state(run).get("quantize")
    return TRAINED_DTYPES[quantize] if quantize in TRAINED_DTYPES else None


def origin_of(name: str | Path) -> ModelSource | None:
    """Return the model from which a run's training began; None if it is a new one.

    The way leads through all runs before it. A model that is not a run is its own origin. Its head for
    multi-token prediction counts as read if the run trains it.

    Raises:
        InputRefused, NoValidCheckpoint: a run or an adapter on the way cannot be read.
    """
    source = ModelSource.open(str(name))
    trains_mtp = False
    if source.run is not None:
        state = recorded_state.newest_state(source.run)
        trains_mtp = ModelRecipe.recorded(state["recipe"]).trains_mtp
    while source.run is not None:
        init = recorded_state.newest_state(source.run)["recipe"]["init"]
        if init is None:
            return None
        source = ModelSource.open(init, mtp=trains_mtp)
    return source


def original_folder(name: str) -> str:
    """Return the folder of a whole model, into a copy of which a text model will be put.

    Args:
        name: the folder, or hf://OWNER/NAME, of which all files are fetched that are copied.

    Raises:
        InputRefused: it is not a Hugging Face folder; see also `fetch_if_on_hub`.
    """
    folder = str(fetch_if_on_hub(name, (*FILES, *whole_folder.FILES)))
    source = ModelSource.open(folder)
    if source.adapter is not None or source.shape is None:
        raise InputRefused(
            f"--original {name}: expected a Hugging Face folder with config.json and weights"
        )
    return folder


def _load_run_unmerged(
    run: Run, checkpoint: Checkpoint, dtype: torch.dtype | None
) -> tuple[Llama, LlamaConfig]:
    """Load a run's model, with its adapters unmerged.

    Args:
        run: the run.
        checkpoint: the checkpoint from which to load.
        dtype: the dtype in which the base of adapters is loaded; None for the dtype in which the
            adapters can be merged into it. Without adapters the model is in fp32.

    Returns:
        The model, and the shape of its base before rows for new tokens were added. Without adapters
        this shape is the model's own.

    Raises:
        InputRefused: the model is not a Llama, or the base cannot be used.
    """
    if checkpoint.state["model_config"] is None:
        init = checkpoint.state["recipe"]["init"]
        raise InputRefused(
            f"{run.folder} holds a module of its own ({init}), not a Llama: "
            "`monograph evaluate` scores it, and Python loads it"
        )
    recipe = ModelRecipe.recorded(checkpoint.state["recipe"])
    # Without adapters the checkpoint has all weights. With adapters it has only those of the adapters, and
    # the base is loaded by its name. A base that a Python file built cannot be loaded so, and the file is
    # not run here: `_restore_llama` then refuses the run, as it finds no weights of the base.
    if recipe.lora is None or recipe.code:
        model = _restore_llama(run, checkpoint)
        model.sampling = checkpoint.state.get("sampling") or {}
        return model, model.config
    assert recipe.init is not None  # `recorded_state` requires a base of adapters
    base_dtype = dtype or _dtype_to_merge_in(recipe.init)
    model = _load_base(recipe.init, _no_warning, base_dtype, recipe.sizes)
    base_shape = model.config
    require_base_of_run(module_digest(model), recipe.base_sha256, recipe.init, run.folder)
    if recipe.vocabulary:
        set_new_rows(model, *recipe.vocabulary)  # gives the model a new config
    # "auto" keeps the base's weights unchanged, even if the run trained with them in 4 or 8 bits.
    adapt(model, recorded_lora(recipe.lora | {"base": "auto"}))
    load_weights(model, weights_of(checkpoint))
    # An older checkpoint does not record `sampling`; the model then keeps its base's.
    if "sampling" in checkpoint.state:
        model.sampling = checkpoint.state["sampling"] or {}
    return model, base_shape


def _restore_llama(run: Run, checkpoint: Checkpoint) -> Llama:
    """Return the Llama whose weights are all in a checkpoint.

    Tensors in fp32 are not copied: the model uses those of `checkpoint`.
    """
    config = LlamaConfig.from_hf(checkpoint.state["model_config"])
    weights = {name: tensor.float() for name, tensor in weights_of(checkpoint).items()}
    hub.check_tensors(weights, config, run.checkpoints, "state.json")
    return hub.assemble(config, weights, run.folder)


def _merge_adapters(model: Llama) -> Llama:
    """Merge a model's adapters, make all its weights trainable, and return the model."""
    merge(model)
    return model.requires_grad_(True)


def _dtype_to_merge_in(init: str) -> torch.dtype | None:
    """Return the dtype in which to load a base for adapters; None for the stored dtype.

    It is fp32 for a run, and for a Hugging Face folder whose tensors have several dtypes.
    """
    if find_run(init):
        # The run may have adapters itself. If they were merged in fewer bits, the weights would differ
        # from those on which the new adapters were trained.
        return torch.float32
    if is_weight_file(init):
        return None
    _, tensors = hub.read_checked_headers(init)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    return torch.float32 if len(dtypes) > 1 else None


def _load_base(name: str, warn: Warn, dtype: torch.dtype | None, sizes: Mapping[str, Any]) -> Llama:
    """Load the base of adapters: one model, without a head for multi-token prediction, which a run may have,
    since adapters change the hidden states that the head was trained on.

    The arguments and errors are those of `_load_unmerged`.
    """
    model = _merge_adapters(_load_unmerged(name, warn, dtype, sizes))
    model.remove_mtp_()
    return model


def _load_unmerged(
    folder: str | Path,
    warn: Warn,
    dtype: torch.dtype | None,
    sizes: Mapping[str, Any],
    mtp: bool = False,
) -> Llama:
    """Load a model with its adapters unmerged. Its weights may still be in their files.

    Args:
        folder: the model's name; see `load`.
        warn: called with each line that the user should read.
        dtype: the dtype of the weights; None for the stored dtype.
        sizes: sizes that a weight file does not record.
        mtp: see `load`.

    Raises:
        InputRefused, NoValidCheckpoint: see `load`.
    """
    run = find_run(folder)
    if run:
        model, _ = _load_run_unmerged(run, recorded_state.load_newest(run, warn), dtype)
        return model
    if adapter.is_adapter(folder):
        stored = adapter.read_adapter(folder)
        base = adapter.resolved_base(stored)
        model = _load_base(base, warn, dtype or _dtype_to_merge_in(base), sizes)
        stored.require_base_shape(model.config)
        # Only if a digest is recorded, because `module_digest` reads all weights.
        if stored.weights_sha256:
            require_base_of_adapter(stored, module_digest(model))
        file = hub.tokenizer_file(folder)
        if file:
            tokenizer_sizes = compare_tokenizers(Tokenizer.from_file(file), base, str(file))
            add_missing_rows(model, tokenizer_sizes, base)
        adapter.install_adapters(model, stored.lora_on(model.config), start=stored)
        return model
    if is_weight_file(folder):
        shape, tensors = torch_file.read(Path(folder), sizes)
        weights = {name: mapped(tensor, dtype or tensor.dtype) for name, tensor in tensors.items()}
        return hub.assemble(shape, weights, Path(folder))
    if not exists(folder):
        raise InputRefused(no_folder(folder))
    assumption = hub.assumption(folder)
    if assumption:
        warn(assumption)
    model = hub.mapped_model(folder, dtype, mtp)
    few_bits = hub.read_few_bits(folder, model.config)
    if few_bits:
        warn(f"{folder}: stored as {few_bits.label}, read as {few_bits.dtype.lower()}")
    return model


def load_trained(
    run: Run,
    warn: Warn,
    precision: Precision | None = None,
    code_values: Collection[str] = (),
    other: Trained | None = None,
) -> Trained:
    """Load a run's newest model of any kind. Its Python file, if there is one, builds the module.

    Args:
        run: the run.
        warn: called with each line that the user should read.
        precision: the precision in which a model with adapters will compute. If it has 16 bits, the
            base is stored in 16 bits.
        code_values: every value of the run's settings that may name code, such as
            FILE.py:FUNCTION. They are needed to check whether the run is this user's
            (`monograph.run.trust`).
        other: the model of another run, already loaded in the same precision. If both are adapters on
            one base, the base is not loaded again, and both models have the same frozen tensors.

    Raises:
        InputRefused: the Python file has changed or is not trusted, or the saved weights do not fit
            its module.
        NoValidCheckpoint: the run has no valid checkpoint.
    """
    checkpoint = recorded_state.load_newest(run, warn)
    recipe = ModelRecipe.recorded(checkpoint.state["recipe"])
    loss: Loss = token_loss
    # A module of a Python file, and a model with adapters, are built again, because the checkpoint does not
    # have all that they need. The base of adapters may come from a Python file, too.
    is_built_again = bool(recipe.code or recipe.lora)
    if is_built_again:
        vouched = require_trusted(
            run.config, code_values, [recipe.init], {recipe.init: recipe.sha256}
        )
        recipe = recipe._replace(vouched=vouched)
        require_same_file(recipe, run)
    if other is not None and have_one_base(recipe, other.recipe):
        loss = other.loss
        # The seed does not matter: new adapters draw their weights from it, and `load_weights` replaces them.
        model = copy_with_shared_base(other.model, recorded_lora(recipe.lora or {}), seed=0)
        load_weights(model, weights_of(checkpoint))
    elif is_built_again:
        model, loss = build(recipe)
        if recipe.lora:
            require_base_of_run(module_digest(model), recipe.base_sha256, recipe.init, run.folder)
            if recipe.vocabulary and isinstance(model, Llama):
                set_new_rows(model, *recipe.vocabulary)
            adapter.install_adapters(model, recorded_lora(recipe.lora), precision=precision)
        load_weights(model, weights_of(checkpoint))
        materialize_(model)
    else:
        model = _restore_llama(run, checkpoint)
    return Trained(
        model,
        loss,
        load_tokenizer(run, checkpoint.state),
        checkpoint.state,
        averaged=bool(averages(checkpoint)),
    )


def weights_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return a checkpoint's tensors of the model by name, averaged if the run kept an average."""
    averaged = averages(checkpoint)
    tensors = {}
    for name in checkpoint.model:
        tensors[name] = averaged[name] if name in averaged else checkpoint.model[name]
    return tensors


def averages(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return a checkpoint's averaged weights by the names of the parameters; empty without
    `optim.ema`.
    """
    names = [name for name in checkpoint.optimizer if name.startswith("ema.")]
    return {name.removeprefix("ema."): checkpoint.optimizer[name] for name in names}


def load_tokenizer(run: Run, state: Mapping[str, Any]) -> Tokenizer:
    """Read a run's tokenizer, and require that its files are unchanged.

    Args:
        run: the run.
        state: the state of the run's checkpoint, which records the digests of the tokenizer and of
            the files next to it; empty if there is no checkpoint.

    Raises:
        InputRefused: a file is damaged or was replaced; the message says where to find a copy.
    """
    recorded_digest = state.get("tokenizer")
    other_digests = state.get("tokenizer_files")  # of the files next to tokenizer.json
    try:
        # The recorded digest is that of the text without its last line end. A file with this digest
        # is as the run wrote it, so it need not pass the checks of a file from elsewhere.
        content = contents(run.tokenizer, MAX_FILE_BYTES) or b""
        is_unchanged = hashlib.sha256(content.rstrip()).hexdigest() == recorded_digest
        tokenizer = Tokenizer.from_file(run.tokenizer, trusted=is_unchanged)
        if recorded_digest not in (None, tokenizer.digest):
            raise InputRefused(
                f"{run.tokenizer}: expected content of sha256 {recorded_digest}, found {tokenizer.digest}"
            )
    except InputRefused as error:
        # The advice of this error, after "; ", is for a file from elsewhere. It is replaced by advice for a
        # file of a run.
        fault = str(error).rpartition("; ")[0] or str(error)
        remedy = (
            f"the folder that `monograph data build {shell_words(run.config)}` prints has a copy"
        )
        raise InputRefused(f"{fault}; put it back: {remedy}") from None
    if other_digests is None:  # no checkpoint, or one from before these files were recorded
        return tokenizer
    # The user may add other files to the folder, for example a chat template. But a tokenizer_config.json
    # that was added changes the tokenizer, so it is compared even if none is recorded.
    for name in sorted({*other_digests, tokenizer_config.CONFIG}):
        expected = other_digests.get(name, "nothing")
        actual = tokenizer.config.digests.get(name, "nothing")
        if expected != actual:
            raise InputRefused(
                f"{run.folder / name}: expected content of sha256 {expected}, found {actual}; put it back as the run "
                "wrote it: a branch or an export of the run has it, too"
            )
    return tokenizer


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into a module.

    Args:
        model: the module.
        tensors: the tensors by their names in the module's state. Tied weights have one tensor.

    Raises:
        InputRefused: a tensor is missing, unknown or of another shape.
    """
    targets = checkpoint_state(model)
    unmatched = sorted(targets.keys() ^ tensors.keys())
    if unmatched:
        fault = "missing" if unmatched[0] in targets else "unknown"
        raise InputRefused(f"the saved model does not fit: {unmatched[0]} is {fault}")
    for name, target in targets.items():
        if target.shape != tensors[name].shape:
            raise InputRefused(
                f"the saved model does not fit: {name} is {list(tensors[name].shape)}, not {list(target.shape)}"
            )
    for name, target in targets.items():
        write_tensor(target.detach(), tensors[name])


def save(
    model: Llama,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    format: str = "hf",
    dtype: str | None = None,
    warn: Warn = lambda line: None,
    write_extras: Callable[[Path], None] = write_no_extras,
) -> None:
    """Write a model into a new folder, for other tools, in one of the formats of
    `monograph.model.exports`.

    Args:
        model: the model.
        folder: the folder, which must be new or empty.
        tokenizer: the model's tokenizer; needed for "gguf", and left out of "hf" if None.
        format: a name of `monograph.model.exports.EXPORTS`, such as "hf" for a Hugging Face folder or
            "gguf" for llama.cpp.
        dtype: the dtype of the weights in "gguf"; None for its default.
        warn: called with each line that the user should read.
        write_extras: a function that writes further files. It is called with a temporary folder,
            which is renamed to `folder` after the call.

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
            "the model has weights in 8 or 4 bits: call monograph.graph.lora_merge.merge(model) before save"
        )
    if not isinstance(model, Llama):
        raise UsageError(
            f"save writes a language model of this package, not a {type(model).__name__}"
        )
    export.write(model, Path(folder), tokenizer, dtype, warn, write_extras)
