"""Models by name: build one from settings, load one from a run, a Hugging Face folder or a weight file."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from monograph import checkpointing
from monograph.checkpointing import Checkpoint
from monograph.data.tokenizer import Tokenizer
from monograph.errors import InputRefused
from monograph.graph.inspect import unique_state
from monograph.loss import Loss, token_loss
from monograph.model import hub, torch_file
from monograph.model.config import WEIGHT_FILES, LlamaConfig
from monograph.model.llama import Llama
from monograph.run.folder import Run

if TYPE_CHECKING:
    from torch import Tensor

SHAPE_OF_SIZES = "micro"  # whose rope, head and initialisation a shape given by its sizes alone has


class Recipe(NamedTuple):
    """What a module is built from, as a checkpoint records it.

    Attributes:
        init: None for a fresh Llama; "file.py:function" for any module; else a Hugging Face folder, a file of
            torch.save or a run to start from.
        preset: the shape of a fresh Llama by name; "auto": `sizes` give it whole.
        sizes: sizes by their Hugging Face names, over the preset's; offered to `function`; what a file of torch.save
            leaves open.
        seed: of fresh weights; torch's generator is seeded with it, and `function` gets it if it takes a `seed`.
        sha256: of the file that holds the function, None where there is none.
    """

    init: str | None
    preset: str
    sizes: dict[str, Any]
    seed: int
    sha256: str | None = None

    @classmethod
    def recorded(cls, saved: Mapping[str, Any]) -> Recipe:
        """The recipe that a checkpoint recorded; raises KeyError where it lacks an entry."""
        return cls(*(saved[name] for name in cls._fields))

    @property
    def file(self) -> Path | None:
        """The Python file that builds the module, if one does."""
        file = (self.init or "").partition(":")[0]
        return Path(file) if file.endswith(".py") and file != self.init else None

    def checked(self) -> Recipe:
        """This recipe with the digest of its file; fails early on what can be seen before any text is read.

        Raises:
            InputRefused: sizes that do not fit together, or a folder or file that cannot be used.
        """
        if self.file:
            return self._replace(sha256=hashlib.sha256(_source(self)).hexdigest())
        if self.init is None:
            self.shape(vocab_size=1)
        elif is_weight_file(self.init):
            torch_file.read(Path(self.init), self.sizes)
        elif run_named(self.init) is None:
            hub.read_headers_of(self.init)
        return self

    def shape(self, **defaults: Any) -> LlamaConfig:
        """The shape of a fresh Llama; `defaults` are sizes where the recipe leaves them open."""
        sizes = defaults | self.sizes
        if self.preset != "auto":
            return LlamaConfig.preset(self.preset, **sizes)
        # As many key-value heads as heads, and a feed-forward layer of 8/3 of the width, as in the first Llama.
        wide = -(-8 * sizes["hidden_size"] // 3 // 8) * 8
        return LlamaConfig.preset(SHAPE_OF_SIZES, **({"num_key_value_heads": 0, "intermediate_size": wide} | sizes))


class Trained(NamedTuple):
    """A run's newest model: module, loss, tokenizer, the state beside the weights, and whether these are averaged."""

    model: nn.Module
    loss: Loss
    tokenizer: Tokenizer
    state: Mapping[str, Any]
    averaged: bool


def build(recipe: Recipe) -> tuple[nn.Module, Loss]:
    """The module a run starts from, with fp32 weights where they come from a folder, and its loss.

    Raises:
        InputRefused: the folder or file cannot be used, or the sizes do not fit together.
    """
    # A function that takes no seed draws its weights from torch's own generator.
    torch.manual_seed(recipe.seed)
    if recipe.init is None:
        return Llama(recipe.shape(), seed=recipe.seed), token_loss
    if recipe.file:
        return _from_file(recipe, recipe.file)
    if recipe.init.endswith(".py"):
        raise InputRefused(f"model.init = {recipe.init}: name the function that builds the module, {recipe.init}:NAME")
    return _load(recipe.init, lambda line: None, torch.float32, recipe.sizes), token_loss


def load(folder: str | Path, warn: Callable[[str], None] = lambda line: None) -> tuple[Llama, Tokenizer]:
    """A language model and its tokenizer, from a run ("last", a run's folder), a Hugging Face folder or a weight file.

    Of a run the newest checkpoint that passes verification is taken, and where the run kept an average of its weights
    (`optim.ema`) the average. A file of torch.save has its tokenizer.json beside it. Nothing is fetched from the
    network.

    Raises:
        InputRefused: none of these, or damaged; names what is wrong.
        NoValidCheckpoint: a run without one.
    """
    model, run = _load(folder, warn, None, {}), run_named(folder)
    return model, own_tokenizer(run) if run else Tokenizer.from_file(tokenizer_of(folder))


def _load(
    folder: str | Path, warn: Callable[[str], None], dtype: torch.dtype | None, sizes: Mapping[str, Any]
) -> Llama:
    if run := run_named(folder):
        checkpoint = checkpointing.newest(run.checkpoints, warn)
        config = checkpoint.state["model_config"]
        if config is None:
            init = checkpoint.state["recipe"]["init"]
            raise InputRefused(
                f"{run.folder} holds a module of its own ({init}), not a Llama: "
                "`monograph evaluate` scores it, and Python loads it"
            )
        model = Llama(LlamaConfig.from_hf(config))
        load_weights(model, {**checkpoint.model, **averages(checkpoint)})
        return model
    if is_weight_file(folder):
        shape, tensors = torch_file.read(Path(folder), sizes)
        own = {name: tensor.to(dtype or tensor.dtype, copy=True) for name, tensor in tensors.items()}
        return hub.assembled(shape, own, Path(folder))
    if not Path(folder).exists():
        raise InputRefused(f"{folder}: no such folder; expected a run (`last` is the newest) or a Hugging Face folder")
    return hub.load_model(folder, dtype)


def load_trained(run: Run, warn: Callable[[str], None]) -> Trained:
    """A run's newest sound model of any kind; a module of its own is built anew by its file.

    Raises:
        InputRefused: the file changed since, or what it builds does not take the weights.
        NoValidCheckpoint: a run without one.
    """
    checkpoint = checkpointing.newest(run.checkpoints, warn)
    recipe = Recipe.recorded(checkpoint.state["recipe"])
    if recipe.file:
        require_same_file(recipe, run)
        model, loss = build(recipe)
    else:
        model, loss = Llama(LlamaConfig.from_hf(checkpoint.state["model_config"])), token_loss
    average = averages(checkpoint)
    load_weights(model, {**checkpoint.model, **average})
    return Trained(model, loss, own_tokenizer(run), checkpoint.state, bool(average))


def averages(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The averaged weights of a run that kept an average, by the parameters' names; of another run none."""
    kept = [name for name in checkpoint.optimizer if name.startswith("ema.")]
    return {name.removeprefix("ema."): checkpoint.optimizer[name] for name in kept}


def own_tokenizer(run: Run) -> Tokenizer:
    """A run's tokenizer; raises InputRefused, with where to find another copy, if its file is damaged."""
    try:
        return Tokenizer.from_file(run.tokenizer)
    except InputRefused as error:
        fault = str(error).rpartition("; ")[0]
        copy = f"the folder that `monograph data build {run.config}` prints has a copy"
        raise InputRefused(f"{fault}; put it back: {copy}") from None


def require_same_file(recipe: Recipe, run: Run) -> None:
    """The file that built a run's module must still be what it was.

    Raises:
        InputRefused: it is not, or cannot be read.
    """
    if recipe.file and recipe.checked().sha256 != recipe.sha256:
        raise InputRefused(
            f"{recipe.file}: not the file that {run.folder} was trained with: put it back, "
            "or start a new run from this one with --from"
        )


def run_named(folder: str | Path) -> Run | None:
    """The run of that name, or None for a folder that is no run."""
    path = Path(folder)
    return Run.open(folder) if path.parts[:1] == ("last",) or (path / "run.lock").is_file() else None


def is_weight_file(name: str | Path) -> bool:
    """Whether that names a file of torch.save, there or not, and neither a run nor a folder."""
    return str(name).endswith(WEIGHT_FILES) and not Path(name).is_dir()


def tokenizer_of(folder: str | Path) -> Path:
    """The tokenizer.json of a run or of a Hugging Face folder, or beside a weight file.

    Raises:
        InputRefused: there is none.
    """
    run = run_named(folder)
    path = run.tokenizer if run else hub.tokenizer_file(Path(folder).parent if is_weight_file(folder) else folder)
    if path is None or not path.is_file():
        raise InputRefused(
            f"{folder}: there is no tokenizer.json; put the model's beside its weights, "
            "or to train on it name it as data.tokenizer"
        )
    return path


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into a module, by name; tied weights are stored once.

    Raises:
        InputRefused: a tensor is missing, left over or has another shape.
    """
    own = unique_state(model)
    if odd := sorted(own.keys() ^ tensors.keys()):
        raise InputRefused(f"the saved model does not fit: {odd[0]} is {'missing' if odd[0] in own else 'unknown'}")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise InputRefused(
                f"the saved model does not fit: {name} is {list(tensors[name].shape)}, not {list(tensor.shape)}"
            )
        tensor.detach().copy_(tensors[name])


def _source(recipe: Recipe) -> bytes:
    try:
        return Path(recipe.file or "").read_bytes()
    except OSError as error:
        raise InputRefused(
            f"model.init = {recipe.init!r}: {recipe.file} cannot be read ({error.strerror}); "
            f"it is looked for from {Path.cwd()}"
        ) from None


def _from_file(recipe: Recipe, file: Path) -> tuple[nn.Module, Loss]:
    where, function_name = f"model.init = {recipe.init!r}", (recipe.init or "").partition(":")[2]
    _source(recipe)
    # Dataclasses and Dynamo look a class's module up in sys.modules, where the file's own name may be taken.
    folder, digest = str(file.resolve().parent), hashlib.sha256(str(file.resolve()).encode()).hexdigest()
    name = f"monograph_init_{digest[:8]}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if folder not in sys.path:
        sys.path.append(folder)  # so that it finds its neighbours, as it does when Python runs it
    try:
        spec.loader.exec_module(module)
        function = getattr(module, function_name, None)
        if not callable(function):
            raise InputRefused(f"{where}: {file} has no function {function_name!r}")
        takes = inspect.signature(function).parameters
        offered = {"seed": recipe.seed, **recipe.sizes}
        built = function(**{key: value for key, value in offered.items() if key in takes})
    except InputRefused:
        raise
    except (Exception, SystemExit) as error:
        raise InputRefused(f"{where}: {file} failed: {type(error).__name__}: {error}") from error
    if not isinstance(built, nn.Module):
        raise InputRefused(f"{where}: it returned {type(built).__name__}, expected an nn.Module")
    if empty := [name for name, parameter in built.named_parameters() if parameter.is_meta]:
        raise InputRefused(f"{where}: {empty[0]} is on the meta device, without numbers: build the module on the CPU")
    if not hasattr(module, "loss") and not hasattr(built, "lm_head"):
        raise InputRefused(
            f"{where}: {file} has no loss(model, batch) -> (sum, count), and a {type(built).__name__} has no lm_head, "
            "which the loss of tokens needs: add one of them"
        )
    return built, getattr(module, "loss", token_loss)
