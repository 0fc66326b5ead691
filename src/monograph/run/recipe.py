"""Describe what a run's module is built from (`ModelRecipe`), and check that a base model fits.

Each checkpoint records its run's recipe. The base is the model that a run begins from. Its weights
must be those that adapters were trained on, and its tokenizer must agree with the run's tokenizer.
"""

import hashlib
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from monograph.errors import InputRefused, did_you_mean, text_of_error
from monograph.graph.inspect import unique_state, unwrap_
from monograph.graph.lora import Lora
from monograph.graph.trial import USER_MODULE_PREFIX
from monograph.loss import Loss, token_loss
from monograph.model import adapter, hub
from monograph.model.adapter import BASE_FILE, Adapter
from monograph.model.config import TORCH_FILE_SUFFIXES, LlamaConfig
from monograph.model.families import DEFAULT_FAMILY
from monograph.model.llama import Llama
from monograph.model.mtp import MTP_PREFIX
from monograph.model.vocabulary import set_new_rows
from monograph.run.folder import Run, names_mixture
from monograph.run.run_index import resolve_checkpoint, update_of_checkpoint
from monograph.storage.code import Code, code_named
from monograph.storage.reading import is_file, is_folder, without_links
from monograph.text import tokenizer_file
from monograph.text.tokenizer import Tokenizer

# Fields of `ModelRecipe` that a checkpoint has only if they differ from the default. They were added
# after the first version, and checkpoints of runs that do not use them should stay the same.
_OMITTED_IF_DEFAULT = ("lora", "adapter", "base_sha256", "vocabulary", "family")
_NOT_RECORDED = ("norm_eps", "vouched")  # fields of `ModelRecipe` that checkpoints do not have
# The preset from which a shape takes what its sizes do not say, e.g. rope and initialisation.
SHAPE_OF_SIZES = "micro"


class ModelRecipe(NamedTuple):
    """The inputs from which a module is built, as a checkpoint records them.

    Attributes:
        init: None for a new Llama; "FILE.py:FUNCTION" for any module; otherwise the Hugging Face
            folder, file of torch.save or run to start from.
        preset: the name of a new Llama's shape; "auto" if `sizes` give the shape.
        sizes: sizes by their Hugging Face names. They override the preset's sizes. FUNCTION gets
            those that it takes. A file of torch.save gets those that it does not record.
        seed: the seed of new weights, for torch's generator and for FUNCTION if it takes a `seed`.
        sha256: the digest of FILE.py; None without FILE.py.
        lora: the options of the adapters that are trained on frozen weights; None if the module
            itself is trained.
        adapter: the folder of a stored adapter to start from, whose base is `init`; None if the run
            starts from no adapter.
        base_sha256: the `module_digest` of the base's weights as they are stored; None without
            adapters.
        vocabulary: (first new id, number of tokens) if the model got rows for new tokens
            (`monograph.model.vocabulary.set_new_rows`); otherwise None. New ids are those that the
            weights of `init` were not trained with.
        family: the family of a new Llama.
        norm_eps: the rms_norm_eps of a new Llama; None for the preset's value. In an earlier version the
            presets of hybrid models had another value. A run that began then keeps it: it is taken from
            the shape in the run's checkpoint. A recipe in a checkpoint has no such entry.
        vouched: {FILE.py:FUNCTION: digest of FILE.py}, for the Python files that may run
            (`monograph.run.trust`). A recipe in a checkpoint has no such entry.
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
    family: str = DEFAULT_FAMILY
    norm_eps: float | None = None
    vouched: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def recorded(cls, saved: Mapping[str, Any]) -> Self:
        """Return the recipe that a checkpoint records.

        Args:
            saved: the checkpoint's entry, already checked by `monograph.run.recorded_state`.
        """
        recorded_names = set(cls._fields) - set(_NOT_RECORDED)
        values = {name: value for name, value in saved.items() if name in recorded_names}
        # Until version 0.2 a preset's name contained the family, as in "olmo2:nano".
        family, _, preset = str(values["preset"]).rpartition(":")
        if family:
            values |= {"family": family, "preset": preset}
        return cls(**values)

    def entries(self) -> dict[str, Any]:
        """Return the recipe as a checkpoint records it; see `_OMITTED_IF_DEFAULT` and `_NOT_RECORDED`."""
        entries = {}
        for key, value in self._asdict().items():
            is_default = key in _OMITTED_IF_DEFAULT and value == self._field_defaults[key]
            if key not in _NOT_RECORDED and not is_default:
                entries[key] = value
        return entries

    @property
    def code(self) -> Code | None:
        """Return the Python function that builds the module; None if `init` does not name one."""
        return code_named(self.init)

    @property
    def trains_mtp(self) -> bool:
        """Return whether the module has a head for multi-token prediction."""
        return bool(self.sizes.get("mtp_num_hidden_layers"))

    def shape(self, **defaults: int) -> LlamaConfig:
        """Return the shape of a new Llama.

        Args:
            **defaults: values of the sizes that `sizes` does not give.
        """
        sizes = defaults | self.sizes
        if self.norm_eps is not None:
            sizes["rms_norm_eps"] = self.norm_eps
        if self.preset != "auto":
            return LlamaConfig.preset(self.preset, family=self.family, **sizes)
        # The defaults are those of the first Llama. There are as many key-value heads as heads: 0 means
        # that. The feed-forward layer is 8/3 times as wide as the model, rounded up to a multiple of 8:
        # (n + 2) // 3 is n / 3 rounded up.
        intermediate_size = 8 * ((sizes["hidden_size"] + 2) // 3)
        sizes = {"num_key_value_heads": 0, "intermediate_size": intermediate_size} | sizes
        return LlamaConfig.preset(SHAPE_OF_SIZES, family=self.family, **sizes)


def lora_record(lora: Lora) -> dict[str, Any]:
    """Return the options of adapters as JSON values for `ModelRecipe.lora`; see `recorded_lora`."""
    values = dict(vars(lora))
    if not isinstance(lora.targets, str):
        values["targets"] = list(lora.targets)
    values["tokens"] = list(lora.tokens)
    values["dense"] = list(lora.dense)
    # Later versions added these options. The records of older runs lack them, so they are recorded
    # only if they are on.
    for added in ("tokens", "rslora", "dora", "dense", "exact_scales"):
        if not values[added]:
            del values[added]
    return values


def recorded_lora(saved: Mapping[str, Any]) -> Lora:
    """Return the options of adapters from `ModelRecipe.lora`; the inverse of `lora_record`."""
    targets = saved["targets"]
    if not isinstance(targets, str):
        targets = tuple(targets)
    lists = {name: tuple(saved.get(name, ())) for name in ("tokens", "dense")}
    return Lora(**{**saved, **lists, "targets": targets})


def have_one_base(one: ModelRecipe, other: ModelRecipe) -> bool:
    """Return whether the adapters of two recipes can be on one base in memory.

    Such adapters may differ in rank, scale, dropout and values.
    """
    if one.lora is None or other.lora is None:
        return False
    return _with_fixed_adapters(one) == _with_fixed_adapters(other)


def _with_fixed_adapters(recipe: ModelRecipe) -> ModelRecipe:
    """Return a recipe with fixed values in place of those that may differ between adapters on one base."""
    assert recipe.lora is not None
    fixed_lora = replace(recorded_lora(recipe.lora), rank=1, alpha=1.0, rslora=False, dropout=0.0)
    # The seed is that of the new adapters, which may differ. A Python file may also have drawn weights of the
    # base from it; but then bases of different seeds differ in `base_sha256`, which is compared.
    return recipe._replace(lora=lora_record(fixed_lora), seed=0, adapter=None, vouched={})


def require_same_file(recipe: ModelRecipe, run: Run) -> None:
    """Require that the Python file that built a run's module is unchanged, if there is one.

    Raises:
        InputRefused: the file has changed, or cannot be read.
    """
    if recipe.code and recipe.code.digest() != recipe.sha256:
        raise InputRefused(
            f"{recipe.code.path}: not the file that {run.folder} was trained with: put that file back, "
            "or start a new run from this one with --from"
        )


def find_run(folder: str | Path) -> Run | None:
    """Return the run that a path or "last" names; None if it does not name a run.

    Raises:
        InputRefused: it names a whole sweep, a sweep's mixture, or a run that is not there.
    """
    return Run.open(folder) if names_run(folder) else None


def names_run(folder: str | Path) -> bool:
    """Return whether a path or "last" names a run, a checkpoint of one, a sweep, or a sweep's
    mixture.
    """
    if isinstance(folder, str) and code_named(folder):
        return False
    path = resolve_checkpoint(Path(folder))
    if update_of_checkpoint(path) is not None:
        path = path.parent.parent  # from RUN/checkpoints/step-UPDATE to RUN
    return path.parts[:1] == ("last",) or is_file(path / "run.lock") or names_mixture(path)


def is_weight_file(name: str | Path) -> bool:
    """Return whether a name has the ending of a file of torch.save, and is not a folder.

    The file need not exist.
    """
    return str(name).endswith(TORCH_FILE_SUFFIXES) and not is_folder(name)


class _BytesLoader(importlib.machinery.SourceFileLoader):
    """A loader that compiles `source`, the bytes whose digest was checked.

    Python's own loader would read the file again, or take compiled code from __pycache__.
    """

    source = b""

    def get_code(self, fullname: str) -> types.CodeType:
        """Compile `source`."""
        return self.source_to_code(self.source, self.path)


def build_from_file(recipe: ModelRecipe, code: Code) -> tuple[nn.Module, Loss]:
    """Run a Python file, and return the module that its function builds, and the module's loss.

    The loss is the function `loss` of the file, or `token_loss` if the file has none.

    Args:
        recipe: what is passed to the function, and which files may run (`ModelRecipe.vouched`).
        code: the file and the function, as `ModelRecipe.init` names them.

    Raises:
        InputRefused: the file may not run or cannot be used, or its function returns no usable
            module.
    """
    where = f"model.init = {code.value!r}"
    source = code.vouched_source(recipe.vouched.get(code.value))
    file = without_links(code.path)
    try:
        program = _import_source(file, source)
        function = getattr(program, code.function, None)
        if not callable(function):
            function_names = [name for name, value in vars(program).items() if callable(value)]
            hint = did_you_mean(code.function, function_names)
            raise InputRefused(f"{where}: {file} has no function {code.function!r}{hint}")
        parameters = inspect.signature(function).parameters
        possible_arguments = {"seed": recipe.seed, **recipe.sizes}
        arguments = {key: value for key, value in possible_arguments.items() if key in parameters}
        model = function(**arguments)
    except InputRefused:
        raise
    except (Exception, SystemExit) as error:  # the file is a user's program: it may raise anything
        raise InputRefused(
            f"{where}: {file} failed: {type(error).__name__}: {text_of_error(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise InputRefused(f"{where}: it returned {type(model).__name__}, expected an nn.Module")
    on_meta_device = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta_device:
        raise InputRefused(
            f"{where}: {on_meta_device[0]} is on the meta device, without numbers: build the module on the CPU"
        )
    if not hasattr(program, "loss") and not hasattr(model, "lm_head"):
        raise InputRefused(
            f"{where}: {file} has no loss(model, batch) -> (sum, count), and a {type(model).__name__} has no lm_head, "
            "which the loss of tokens needs: add one of them"
        )
    loss = getattr(program, "loss", token_loss)
    if not hasattr(loss, "fill"):
        # `fill` has the values of a row without targets, with which short micro-batches are padded
        # (`monograph.loss`). Some callables cannot have attributes; their micro-batches are not padded.
        with suppress(AttributeError):
            loss.fill = token_loss.fill
    return unwrap_(model), loss  # without `torch.compile`: the whole step is compiled instead


def _import_source(file: Path, source: bytes) -> types.ModuleType:
    """Run a Python file, and return it as a Python module.

    Args:
        file: the path of the file, with all links followed.
        source: its content, whose digest was checked.
    """
    # Dataclasses and Dynamo look up a class's module in sys.modules, which may already have another
    # module of the file's own name. So the module gets a name that is unique to the file's path.
    path_digest = hashlib.sha256(str(file).encode()).hexdigest()
    name = f"{USER_MODULE_PREFIX}{path_digest[:8]}_{file.stem}"
    loader = _BytesLoader(name, str(file))
    loader.source = source
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # so that the file can import files next to it
    loader.exec_module(module)
    return module


class TokenizerSizes(NamedTuple):
    """The sizes of a base model's own tokenizer and of the run's tokenizer, which extends it.

    Attributes:
        base: number of tokens of the base's tokenizer; None if the base has no tokenizer.
        run: number of tokens of the run's tokenizer. Its first `base` tokens are the base's.
    """

    base: int | None
    run: int

    def new_ids(self, rows: int) -> range:
        """Return the ids of the run's tokenizer that the base was not trained with.

        Args:
            rows: number of rows of the base's embedding. Without a tokenizer of the base, the new
                ids are those without a row.
        """
        trained_ids = rows if self.base is None else min(self.base, rows)
        return range(trained_ids, self.run)


def find_tokenizer(folder: str | Path) -> Path | None:
    """Return the tokenizer.json of a model; None if there is none.

    An adapter without a tokenizer.json has that of its base. See also `tokenizer_path`.
    """
    path = tokenizer_path(folder)
    if path is None and adapter.is_adapter(folder):
        return find_tokenizer(adapter.resolved_base(adapter.read_adapter(folder)))
    if path is None or not is_file(path):
        return None
    return path


def require_tokenizer(folder: str | Path) -> Path:
    """Return the tokenizer.json of a model; see `find_tokenizer`.

    Raises:
        InputRefused: there is no tokenizer.json.
    """
    path = find_tokenizer(folder)
    if path is None:
        raise no_tokenizer_error(folder)
    return path


def no_tokenizer_error(folder: str | Path) -> InputRefused:
    """Return the error for a model without a tokenizer.json, for the caller to raise."""
    return InputRefused(f"{folder}: there is no tokenizer.json: copy the model's own there")


def resolve_tokenizer(name: str) -> str:
    """Return the value of a `tokenizer` key, in which the name of a run becomes its tokenizer.json.

    Other values are returned as they are: paths, and the words "auto" and "bytes".
    """
    run = None if name in ("auto", "bytes") else find_run(name)
    return str(run.tokenizer) if run else name


def tokenizer_path(folder: str | Path) -> Path | None:
    """Return the path of a model's own tokenizer.json, which may not exist.

    Args:
        folder: a run, a file of torch.save or a Hugging Face folder. The tokenizer.json of a file
            of torch.save is next to it. The result may be None for a Hugging Face folder.
    """
    run = find_run(folder)
    if run:
        return run.tokenizer
    return hub.tokenizer_file(Path(folder).parent if is_weight_file(folder) else folder)


def compare_tokenizers(
    tokenizer: Tokenizer, base: str, origin: str = "data.tokenizer"
) -> TokenizerSizes:
    """Require that a tokenizer has the same text as the base's tokenizer for each id that both have.

    Args:
        tokenizer: the run's tokenizer.
        base: the base model, whose own tokenizer.json is read.
        origin: the key or file that `tokenizer` comes from, for the message.

    Returns:
        The sizes of both tokenizers.

    Raises:
        InputRefused: an id has two different texts, or the base's tokenizer.json cannot be read.
    """
    path = tokenizer_path(base)
    if path is None or not is_file(path):
        return TokenizerSizes(None, tokenizer.vocab_size)
    texts_of_base = tokenizer_file.texts(tokenizer_file.read(path), str(path))
    texts = tokenizer.texts()
    for index in sorted(texts_of_base.keys() & texts.keys()):
        if texts_of_base[index] != texts[index]:
            raise InputRefused(
                f"{origin}: another tokenizer than {path}: id {index} is {_shown(texts[index])}, but the model has "
                f"trained its row for {_shown(texts_of_base[index])}: take the model's own tokenizer, with new tokens "
                "at its end"
            )
    base_size = max(texts_of_base, default=-1) + 1
    return TokenizerSizes(base_size, tokenizer.vocab_size)


def add_missing_rows(model: Llama, sizes: TokenizerSizes, base: str) -> list[int] | None:
    """Give a model, in place, a row for each new token of the run's tokenizer.

    Args:
        model: the model as it was loaded.
        sizes: the result of `compare_tokenizers`.
        base: where the model comes from, for the message.

    Returns:
        The arguments for `monograph.model.vocabulary.set_new_rows`, to repeat it later; None if no token
        is new.

    Raises:
        InputRefused: rows are missing, but the model has no tokenizer, so it is unknown which
            tokens are new.
    """
    rows = model.config.vocab_size
    new_ids = sizes.new_ids(rows)
    if not new_ids:
        return None
    if sizes.base is None:
        raise InputRefused(
            f"model.vocab_size = {rows} of {base} is smaller than the tokenizer's {sizes.run}, and no "
            "tokenizer.json next to its weights says which tokens are new: put the model's own there"
        )
    arguments = [new_ids.start, new_ids.stop]
    set_new_rows(model, *arguments)
    return arguments


_MAX_SHOWN_CHARACTERS = 40  # of a token in a message


def _shown(text: str) -> str:
    """Return a token's text in quotes, cut after `_MAX_SHOWN_CHARACTERS`."""
    if len(text) > _MAX_SHOWN_CHARACTERS:
        text = text[:_MAX_SHOWN_CHARACTERS] + "..."
    return repr(text)


def module_digest(module: nn.Module) -> str:
    """Return the hex SHA-256 of the names, shapes and numbers of a module's state.

    Numbers of at most 32 bits are hashed as fp32, so that the same numbers in bf16 and in fp32 have
    the same digest. The head of a `Llama` for multi-token prediction does not count: adapters are trained
    on a base without it, and are used with the base as it is.
    """
    state = unique_state(module)
    if isinstance(module, Llama):
        state = {name: tensor for name, tensor in state.items() if not name.startswith(MTP_PREFIX)}
    return tensors_digest(state)


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the hex SHA-256 of the names, shapes and numbers of tensors; see `module_digest`."""
    sha256 = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        numbers = tensor.detach()
        if tensor.is_floating_point() and tensor.dtype != torch.float64:
            numbers = numbers.float()
        sha256.update(f"{name} {list(tensor.shape)} ".encode())
        # The bytes of the numbers. A 0-dimensional tensor cannot be viewed as bytes, so it is reshaped.
        number_bytes = numbers.contiguous().reshape(-1).view(torch.uint8)
        sha256.update(number_bytes.numpy().data)
    return sha256.hexdigest()


def require_base_of_adapter(adapter: Adapter, base_sha256: str) -> None:
    """Require that a base has the weights that a stored adapter was trained on.

    An adapter that does not record their digest takes any base.

    Args:
        adapter: the stored adapter.
        base_sha256: the `module_digest` of the base.

    Raises:
        InputRefused: the base has other weights.
    """
    if adapter.weights_sha256 not in (None, base_sha256):
        raise InputRefused(
            f"{adapter.folder}: this adapter was trained on other weights than those of {adapter.base}: write the "
            f"folder of its base into adapter_config.json, or, to use it with these weights all the same, remove "
            f"{BASE_FILE}"
        )


def require_base_of_run(
    actual: str | None, expected: str | None, init: str | None, folder: Path
) -> None:
    """Require that a base has the weights that a run's adapters were trained on.

    Args:
        actual: the `module_digest` of the base.
        expected: the digest that the run records.
        init: the name of the base, for the message.
        folder: the run's folder, for the message.

    Raises:
        InputRefused: the digests differ.
    """
    if actual != expected:
        raise InputRefused(
            f"{init}: its weights are not those that the adapters of {folder} were trained on: put them back, or "
            "start a new run"
        )
