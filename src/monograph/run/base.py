"""Compare the model that a run begins from: its weights with those of adapters, its tokens with a tokenizer's.

Shapes: V rows of the model's embedding.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from monograph.errors import InputRefused
from monograph.graph.inspect import unique_state
from monograph.graph.lora import Lora
from monograph.model import adapter, hub
from monograph.model.adapter import BASE, Adapter
from monograph.model.llama import Llama
from monograph.model.vocabulary import extend
from monograph.run.recipe import is_weight_file, run_named
from monograph.storage.reading import is_file
from monograph.text import tokenizer_file
from monograph.text.tokenizer import Tokenizer

LONGEST = 40  # characters of a token in a message


class Vocabulary(NamedTuple):
    """The number of tokens in a model's tokenizer and in the tokenizer that is used with the model.

    Attributes:
        own: tokens of the model's tokenizer; None if it has none.
        all: tokens of the tokenizer that is used, whose first tokens are the same.
    """

    own: int | None
    all: int

    def new(self, rows: int) -> range:
        """Return the ids that a model of V rows was not trained with; if that is unknown, the ids without a row."""
        return range(min(rows if self.own is None else self.own, rows), self.all)


def tokenizer_of(folder: str | Path) -> Path:
    """Find the tokenizer.json of a run, of a Hugging Face folder, or in the folder of a weight file.

    Raises:
        InputRefused: there is no tokenizer.json.
    """
    path = own_file(folder)
    if path is None and adapter.is_adapter(folder):
        return tokenizer_of(adapter.resolved_base(adapter.read_adapter(folder)))
    if path is None or not is_file(path):
        raise InputRefused(
            f"{folder}: there is no tokenizer.json; put the model's next to its weights, "
            "or to train on it name it as data.tokenizer"
        )
    return path


def tokenizer_named(name: str) -> str:
    """Return the tokenizer.json of the run or checkpoint that a `tokenizer` setting names, else the setting itself."""
    run = None if name in ("auto", "bytes") else run_named(name)
    return str(run.tokenizer) if run else name


def own_file(folder: str | Path) -> Path | None:
    """Return the path of the tokenizer.json that belongs to a model's weights; None if a folder has none."""
    run = run_named(folder)
    return run.tokenizer if run else hub.tokenizer_file(Path(folder).parent if is_weight_file(folder) else folder)


def compared(tokenizer: Tokenizer, base: str, named: str = "data.tokenizer") -> Vocabulary:
    """Compare a tokenizer with that of the model in `base`, token by token.

    Raises:
        InputRefused: an id of both stands for different texts, or the model's file cannot be read.
    """
    path = own_file(base)
    if path is None or not is_file(path):
        return Vocabulary(None, tokenizer.vocab_size)
    own, ours = tokenizer_file.texts(tokenizer_file.read(path), str(path)), tokenizer.texts()
    for index in sorted(own.keys() & ours.keys()):
        if own[index] != ours[index]:
            raise InputRefused(
                f"{named}: another tokenizer than {path}: id {index} is {_shown(ours[index])}, and of the model "
                f"{_shown(own[index])}, whose row it has: take the model's own with tokens added at its end"
            )
    return Vocabulary(max(own, default=-1) + 1, tokenizer.vocab_size)


def extended(model: Llama, vocabulary: Vocabulary, base: str) -> list[int] | None:
    """Give a model the rows that it lacks.

    Args:
        model: the model as it was loaded.
        vocabulary: the result of `compared`.
        base: where the model comes from.

    Returns:
        The arguments for `monograph.model.vocabulary.extend`, to repeat it later; None if there was nothing to do.

    Raises:
        InputRefused: rows are missing, and which of the tokens are new cannot be known.
    """
    rows = model.config.vocab_size
    new = vocabulary.new(rows)
    if not new:
        return None
    if vocabulary.own is None:
        raise InputRefused(
            f"model.vocab_size = {rows} of {base} is smaller than the tokenizer's {vocabulary.all}, and no "
            "tokenizer.json next to its weights says which tokens are new: put the model's own there"
        )
    extend(model, new.start, new.stop)
    return [new.start, new.stop]


def _shown(text: str) -> str:
    return repr(text if len(text) <= LONGEST else text[:LONGEST] + "...")


def recorded(lora: Lora) -> dict[str, Any]:
    """Return the adapters' options as JSON values, for a recipe."""
    values = {**vars(lora), "targets": lora.targets if isinstance(lora.targets, str) else list(lora.targets)}
    values["tokens"] = list(lora.tokens)
    # Runs from before there were these lack them.
    return {key: value for key, value in values.items() if value or key not in ("tokens", "rslora", "dora")}


def digest(module: nn.Module) -> str:
    """Return the hex SHA-256 of a base's names, shapes and numbers; equal numbers in bf16 and fp32 give the same."""
    sha256 = hashlib.sha256()
    for name, tensor in sorted(unique_state(module).items()):
        narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
        numbers = (tensor.detach().float() if narrow else tensor.detach()).contiguous()
        sha256.update(f"{name} {list(tensor.shape)} ".encode())
        sha256.update(numbers.reshape(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def require_base_of(adapter: Adapter, base_sha256: str) -> None:
    """Refuse a base whose weights differ from those that a stored adapter records, if it records any.

    Raises:
        InputRefused: the base has other weights.
    """
    if adapter.weights_sha256 not in (None, base_sha256):
        raise InputRefused(
            f"{adapter.folder}: this adapter was trained on other weights than those of {adapter.base}: write the "
            f"folder of its own base into adapter_config.json, or, to put it on these all the same, remove {BASE}"
        )


def require_base(actual: str | None, expected: str | None, init: str | None, folder: Path) -> None:
    """Refuse a base whose digest differs from that of the base that a run's adapters were trained on.

    Raises:
        InputRefused: the base differs.
    """
    if actual != expected:
        raise InputRefused(
            f"{init}: its weights are not those that the adapters of {folder} were trained on: put them back, or "
            "start a new run"
        )
