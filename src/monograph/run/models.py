"""Models by name: build one from settings, load one from a run or a Hugging Face folder, save one."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from monograph import checkpointing
from monograph.data.tokenizer import Tokenizer
from monograph.errors import InputRefused, UsageError
from monograph.loss import Loss, token_loss
from monograph.model import hub
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.run.folder import Run

if TYPE_CHECKING:
    from torch import Tensor


def build(name: str | None, preset: str, sizes: dict[str, Any], seed: int) -> tuple[nn.Module, Loss]:
    """The module a run starts from, and its loss.

    Args:
        name: None for a fresh Llama; "file.py:function" for any module; else a Hugging Face folder or a run to start
            from.
        preset: the shape of a fresh Llama.
        sizes: its sizes by Hugging Face names, over the preset's.
        seed: of a fresh Llama's weights; passed to `function` if it takes a `seed`.

    Raises:
        InputRefused: the folder or file cannot be used, or the sizes do not fit together.
    """
    if name is None:
        return Llama(LlamaConfig.preset(preset, **sizes), seed=seed), token_loss
    if ":" in name and name.partition(":")[0].endswith(".py"):
        return _from_file(name, {"seed": seed, **sizes})
    return load(name)[0], token_loss


def load(folder: str | Path, warn: Callable[[str], None] = lambda line: None) -> tuple[Llama, Tokenizer]:
    """A language model and its tokenizer, from a run ("last", a run's folder) or a Hugging Face folder.

    Of a run the newest checkpoint that passes verification is taken. Nothing is fetched from the network.

    Raises:
        InputRefused: neither a run nor a folder with a Llama and a tokenizer, or damaged; names what is wrong.
        NoValidCheckpoint: a run without one.
    """
    path = Path(folder)
    if path.parts[:1] == ("last",) or (path / "run.lock").is_file():
        run = Run.open(folder)
        checkpoint = checkpointing.newest(run.checkpoints, warn)
        config = checkpoint.state.get("model_config")
        if config is None:
            raise InputRefused(
                f"{run.folder} holds a module of its own ({checkpoint.state.get('model_init')}), not a Llama"
            )
        model = Llama(LlamaConfig.from_hf(config))
        load_weights(model, checkpoint.model)
        return model, Tokenizer.from_file(run.tokenizer)
    tokenizer = hub.tokenizer_file(path)
    if tokenizer is None:
        raise InputRefused(f"{path}: there is no tokenizer.json; put the model's beside its weights")
    return hub.load_model(path), Tokenizer.from_file(tokenizer)


def save(model: Llama, folder: str | Path, tokenizer: Tokenizer | None = None, format: str = "hf") -> None:
    """Write a model for other tools; see `monograph.model.hub.save_model`.

    Raises:
        UsageError: a format other than "hf".
        InputRefused: the folder exists and holds something.
    """
    if format != "hf":
        raise UsageError(f"format {format!r} is not built yet; hf is")
    hub.save_model(model, folder, tokenizer)


def load_weights(model: nn.Module, tensors: dict[str, Tensor] | Any) -> None:
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


def unique_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with tied tensors once, under their first name (as Hugging Face stores them)."""
    seen: dict[tuple[int, int, Any], str] = {}
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if seen.setdefault((tensor.data_ptr(), tensor.numel(), tensor.stride()), name) == name
    }


def _from_file(name: str, offered: dict[str, Any]) -> tuple[nn.Module, Loss]:
    file, _, function_name = name.partition(":")
    spec = importlib.util.spec_from_file_location("monograph_user_model", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise InputRefused(f"model.init = {name!r}: {file} is not a Python file that can be read")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputRefused(f"model.init = {name!r}: {file} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputRefused(f"model.init = {name!r}: {file} has no function {function_name!r}")
    takes = inspect.signature(function).parameters
    built = function(**{key: value for key, value in offered.items() if key in takes})
    if not isinstance(built, nn.Module):
        raise InputRefused(f"model.init = {name!r}: it returned {type(built).__name__}, expected an nn.Module")
    return built, getattr(module, "loss", token_loss)
