"""Describe what a module is built from (a shape, a folder, a Python file, an adapter), and compare
it to a run's base.

Checkpoints record the description. Of the model that a run begins from its weights are compared
with those of adapters, and its tokens with a tokenizer's.

Shapes: V rows of the model's embedding.
"""

import hashlib
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from monograph.errors import InputRefused, did_you_mean, said_by
from monograph.graph.inspect import unique_state, unwrap_
from monograph.graph.lora import Lora
from monograph.graph.trial import OTHERS
from monograph.loss import Loss, token_loss
from monograph.model import adapter, hub
from monograph.model.adapter import BASE, Adapter
from monograph.model.config import WEIGHT_FILES, LlamaConfig
from monograph.model.families import FIRST_FAMILY
from monograph.model.llama import Llama
from monograph.model.vocabulary import extend
from monograph.run.folder import Run, names_mixture
from monograph.run.run_index import checkpoint_named, resolve_checkpoint
from monograph.storage.code import Code, code_named
from monograph.storage.reading import is_file, is_folder, without_links
from monograph.text import tokenizer_file
from monograph.text.tokenizer import Tokenizer

# Entries that older checkpoints lack, or that none has.
_ADDED = ("lora", "adapter", "base_sha256", "vocabulary", "family", "norm_eps")
# The preset that gives rope, head and initialisation to a shape given by sizes alone.
SHAPE_OF_SIZES = "micro"


class Recipe(NamedTuple):
    """The inputs from which a module is built, as a checkpoint records them.

    Attributes:
        init: None for a new Llama; "file.py:function" for any module; else a Hugging Face folder, a
            file of torch.save or a run to start from.
        preset: the name of a new model's shape; "auto" if `sizes` give the whole shape.
        sizes: sizes by their Hugging Face names. They override the preset's, are passed to
            `function` if it takes them, and complete a file of torch.save.
        seed: seed of new weights, for torch's generator and for `function` if it takes a `seed`.
        sha256: digest of the file that holds the function; None if there is no such file.
        lora: the options of adapters that are trained on frozen weights; None if the module itself
            is trained.
        adapter: the folder of a stored adapter to begin from; `init` is then its base.
        base_sha256: digest of the frozen weights as they are stored, if there are adapters.
        vocabulary: (first id that the weights of `init` were not trained with, number of tokens),
            if rows were added (`monograph.model.vocabulary.extend`); None otherwise.
        family: the family of a new model.
        norm_eps: the rms_norm_eps of a new Llama that a checkpoint of its run, or of the run's
            parent, records; None if none does: presets of hybrids once had another one. It is not
            recorded itself.
        vouched: the digest of each Python file that may run, by the value of `init` that names it
            (`monograph.run.trust`). It is not recorded itself.
    """

    init: str | None
    preset: str
    sizes: dict[str, Any]
    seed: int
    sha256: str | None = None
    lora: dict[str, Any] | None = None
    adapter: str | None = None
    base_sha256: str | None = None
    vocabulary: list[int] | None = None
    family: str = FIRST_FAMILY
    norm_eps: float | None = None
    vouched: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def recorded(cls, saved: Mapping[str, Any]) -> Self:
        """Return the recipe in a run's checkpoint, which `monograph.run.recorded_state` has checked
        before.
        """
        recorded = [
            name for name in cls._fields if name in saved and name not in ("norm_eps", "vouched")
        ]
        values = {name: saved[name] for name in recorded}
        # Until version 0.2 a family was named before the preset, as in "olmo2:nano".
        family, _, preset = str(values["preset"]).rpartition(":")
        if family:
            values |= {"family": family, "preset": preset}
        return cls(**values)

    def entries(self) -> dict[str, Any]:
        """Return the recipe as a checkpoint records it, without usual values of entries that older
        ones lack.
        """
        values = self._replace(norm_eps=None)._asdict()
        del values["vouched"]
        usual = self._field_defaults
        return {
            key: value for key, value in values.items() if key not in _ADDED or value != usual[key]
        }

    @property
    def code(self) -> Code | None:
        """Return the function that builds the module, if a Python file does."""
        return code_named(self.init)

    def shape(self, **defaults: int) -> LlamaConfig:
        """Return the shape of a new Llama; `defaults` are the sizes that the recipe leaves open."""
        sizes = defaults | self.sizes
        if self.norm_eps is not None:
            sizes["rms_norm_eps"] = self.norm_eps
        if self.preset != "auto":
            return LlamaConfig.preset(self.preset, family=self.family, **sizes)
        # As in the first Llama, there are as many key-value heads as heads, and the feed-forward
        # layer has 8/3 of the width, rounded up to a multiple of 8.
        wide = -(-8 * sizes["hidden_size"] // 3 // 8) * 8
        sizes = {"num_key_value_heads": 0, "intermediate_size": wide} | sizes
        return LlamaConfig.preset(SHAPE_OF_SIZES, family=self.family, **sizes)


def lora_of(saved: Mapping[str, Any]) -> Lora:
    """Return the adapters' options that a recipe records."""
    targets = saved["targets"]
    tokens = tuple(saved.get("tokens", ()))
    targets = targets if isinstance(targets, str) else tuple(targets)
    return Lora(**{**saved, "targets": targets, "tokens": tokens})


def require_same_file(recipe: Recipe, run: Run) -> None:
    """Require that the file that built a run's module is unchanged.

    Raises:
        InputRefused: the file has changed, or cannot be read.
    """
    if recipe.code and recipe.code.digest() != recipe.sha256:
        raise InputRefused(
            f"{recipe.code.path}: not the file that {run.folder} was trained with: put it back, "
            "or start a new run from this one with --from"
        )


def run_named(folder: str | Path) -> Run | None:
    """Return the run that a folder or `last` names, or None for any other folder."""
    return Run.open(folder) if names_run(folder) else None


def names_run(folder: str | Path) -> bool:
    """Return whether a folder is a run, one of its checkpoints, a sweep, or all members of one.

    A text that names code names no folder.
    """
    if isinstance(folder, str) and code_named(folder):
        return False
    path = resolve_checkpoint(Path(folder))
    path = path if checkpoint_named(path) is None else path.parent.parent
    return path.parts[:1] == ("last",) or is_file(path / "run.lock") or names_mixture(path)


def is_weight_file(name: str | Path) -> bool:
    """Return whether a name, by its ending, is that of a file of torch.save, existing or not, and
    not a folder.
    """
    return str(name).endswith(WEIGHT_FILES) and not is_folder(name)


class _Loader(importlib.machinery.SourceFileLoader):
    """A loader of bytes that were read before. Python's own reads the file again, or compiled code
    in __pycache__.
    """

    source = b""

    def get_code(self, fullname: str) -> types.CodeType:
        """Compile the bytes."""
        return self.source_to_code(self.source, self.path)


def from_file(recipe: Recipe, code: Code) -> tuple[nn.Module, Loss]:
    """Return the module that a Python file's function builds, and the file's loss or else the loss
    of tokens.

    Raises:
        InputRefused: the file or the function cannot be used or returns no usable module, or nobody
            vouches for the file as it is.
    """
    where = f"model.init = {code.value!r}"
    function_name = code.function
    source = code.vouched_source(recipe.vouched.get(code.value))
    # Dataclasses and Dynamo look up a class's module in sys.modules, where the file's own name may
    # be taken.
    file = without_links(code.path)
    folder = str(file.parent)
    name = f"{OTHERS}{hashlib.sha256(str(file).encode()).hexdigest()[:8]}_{file.stem}"
    loader = _Loader(name, str(file))
    loader.source = source
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if folder not in sys.path:
        sys.path.append(folder)  # the file must find its neighbours, as it does when Python runs it
    try:
        loader.exec_module(module)
        function = getattr(module, function_name, None)
        if not callable(function):
            hint = did_you_mean(
                function_name, [name for name, value in vars(module).items() if callable(value)]
            )
            raise InputRefused(f"{where}: {file} has no function {function_name!r}{hint}")
        takes = inspect.signature(function).parameters
        offered = {"seed": recipe.seed, **recipe.sizes}
        built = function(**{key: value for key, value in offered.items() if key in takes})
    except InputRefused:
        raise
    except (Exception, SystemExit) as error:
        raise InputRefused(
            f"{where}: {file} failed: {type(error).__name__}: {said_by(error)}"
        ) from error
    if not isinstance(built, nn.Module):
        raise InputRefused(f"{where}: it returned {type(built).__name__}, expected an nn.Module")
    if empty := [name for name, parameter in built.named_parameters() if parameter.is_meta]:
        raise InputRefused(
            f"{where}: {empty[0]} is on the meta device, without numbers: build the module on the CPU"
        )
    if not hasattr(module, "loss") and not hasattr(built, "lm_head"):
        raise InputRefused(
            f"{where}: {file} has no loss(model, batch) -> (sum, count), and a {type(built).__name__} has no lm_head, "
            "which the loss of tokens needs: add one of them"
        )
    loss = getattr(module, "loss", token_loss)
    if not hasattr(loss, "fill"):
        # A loss that takes no attributes has short micro-batches, not filled ones.
        with suppress(AttributeError):
            loss.fill = token_loss.fill  # the content of rows without targets
    return unwrap_(built), loss


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
        """Return the ids that a model of V rows was not trained with; if that is unknown, the ids
        without a row.
        """
        return range(min(rows if self.own is None else self.own, rows), self.all)


def tokenizer_in(folder: str | Path) -> Path | None:
    """Find the tokenizer.json of a run, of a Hugging Face folder, or in a weight file's folder, or
    None.
    """
    path = own_file(folder)
    if path is None and adapter.is_adapter(folder):
        return tokenizer_in(adapter.resolved_base(adapter.read_adapter(folder)))
    return path if path is not None and is_file(path) else None


def tokenizer_of(folder: str | Path) -> Path:
    """Return `tokenizer_in` of a folder that has a tokenizer.

    Raises:
        InputRefused: there is no tokenizer.json.
    """
    path = tokenizer_in(folder)
    if path is None:
        raise without_tokenizer(folder)
    return path


def without_tokenizer(folder: str | Path) -> InputRefused:
    """Return the refusal of a folder that has no tokenizer."""
    return InputRefused(f"{folder}: there is no tokenizer.json: copy the model's own there")


def tokenizer_named(name: str) -> str:
    """Return the tokenizer.json of the run or checkpoint that a `tokenizer` setting names, else the
    setting itself.
    """
    run = None if name in ("auto", "bytes") else run_named(name)
    return str(run.tokenizer) if run else name


def own_file(folder: str | Path) -> Path | None:
    """Return the path of the tokenizer.json that belongs to a model's weights; None if a folder has
    none.
    """
    run = run_named(folder)
    return (
        run.tokenizer
        if run
        else hub.tokenizer_file(Path(folder).parent if is_weight_file(folder) else folder)
    )


def compared(tokenizer: Tokenizer, base: str, named: str = "data.tokenizer") -> Vocabulary:
    """Compare a tokenizer with that of the model in `base`, token by token.

    Raises:
        InputRefused: an id of both stands for different texts, or the model's file cannot be read.
    """
    path = own_file(base)
    if path is None or not is_file(path):
        return Vocabulary(None, tokenizer.vocab_size)
    own = tokenizer_file.texts(tokenizer_file.read(path), str(path))
    ours = tokenizer.texts()
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
        The arguments for `monograph.model.vocabulary.extend`, to repeat it later; None if there was
        nothing to do.

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
    values = {
        **vars(lora),
        "targets": lora.targets if isinstance(lora.targets, str) else list(lora.targets),
    }
    values["tokens"] = list(lora.tokens)
    # Runs from before there were these lack them.
    return {
        key: value
        for key, value in values.items()
        if value or key not in ("tokens", "rslora", "dora")
    }


def digest(module: nn.Module) -> str:
    """Return the hex SHA-256 of a base's names, shapes and numbers; equal numbers in bf16 and fp32
    give the same.
    """
    sha256 = hashlib.sha256()
    for name, tensor in sorted(unique_state(module).items()):
        narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
        numbers = (tensor.detach().float() if narrow else tensor.detach()).contiguous()
        sha256.update(f"{name} {list(tensor.shape)} ".encode())
        sha256.update(numbers.reshape(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def require_base_of(adapter: Adapter, base_sha256: str) -> None:
    """Refuse a base whose weights differ from those that a stored adapter records, if it records
    any.

    Raises:
        InputRefused: the base has other weights.
    """
    if adapter.weights_sha256 not in (None, base_sha256):
        raise InputRefused(
            f"{adapter.folder}: this adapter was trained on other weights than those of {adapter.base}: write the "
            f"folder of its own base into adapter_config.json, or, to put it on these all the same, remove {BASE}"
        )


def require_base(actual: str | None, expected: str | None, init: str | None, folder: Path) -> None:
    """Refuse a base whose digest differs from that of the base that a run's adapters were trained
    on.

    Raises:
        InputRefused: the base differs.
    """
    if actual != expected:
        raise InputRefused(
            f"{init}: its weights are not those that the adapters of {folder} were trained on: put them back, or "
            "start a new run"
        )
