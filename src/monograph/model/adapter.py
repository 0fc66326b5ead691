"""Read and write adapters in PEFT's format, and write them as GGUF.

The *base* is the model to which adapters are added. An adapter of LoRA adds the product B A of two
small matrices, times a scale, to a weight of the base.

PEFT is Hugging Face's library of adapters. Its format is a folder with adapter_config.json and
adapter_model.safetensors. Layers have the names of the family's files there
(`monograph.model.adapter_names`).

llama.cpp adds the adapters of a GGUF file to the model of another GGUF file (`llama-cli --lora`). For
each weight NAME the file has A as NAME.lora_a and B as NAME.lora_b, and B's rows are in the order of
the base's file. llama.cpp's scale is alpha / rank.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from monograph.errors import InputRefused, UsageError
from monograph.graph.lora import (
    AdaptedExperts,
    AnyAdapted,
    Lora,
    adapt,
    adapted_layers,
    store_row_norms,
)
from monograph.graph.lora_merge import UnreadTensor
from monograph.graph.lora_targets import ALL_LINEAR
from monograph.graph.precision import Precision
from monograph.graph.rounded_base import round_frozen_weights
from monograph.graph.token_rows import ROWS, tables_with_rows
from monograph.model.adapter_names import (
    name_in_decoder,
    name_in_files,
    shortest_targets,
    targets_in_decoder,
    targets_in_files,
)
from monograph.model.config import LlamaConfig
from monograph.model.files import DTYPES, new_folder, read_header, read_tensors, write_json
from monograph.model.gguf import import_gguf, llama_cpp_support, llama_cpp_tensors, write_gguf_file
from monograph.model.llama import Llama, kinds_of_family
from monograph.model.vocabulary import (
    PEFT_PREFIX,
    TRAINABLE_TOKENS_KEY,
    peft_name,
    read_trainable_tokens,
    tensors_by_own_names,
    trainable_tokens_value,
    unlisted_rows,
)
from monograph.storage.code import code_named, folder_named
from monograph.storage.reading import exists, file_inside, is_file, read_json, without_links
from monograph.text.tokenizer import Tokenizer

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# A file of Monograph next to PEFT's two, with digests of the base. PEFT does not read it.
BASE_FILE = "monograph_base.json"
# Keys of this file. Older folders have the second digest instead of the first.
_STRUCTURE = "structure_sha256"
_CONFIG = "config_sha256"
# The key for the base's folder on the machine that wrote the adapter. It is there if adapter_config.json
# names the base differently.
_FOLDER = "folder"
# The keys of a base's config.json that do not change what its weights compute. They are left out of the
# digest, because a run, its export, and a file that another program has written may differ in them.
_NOT_STRUCTURE = (
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "output_router_logits",
    "pad_token_id",
    "router_aux_loss_coef",
)
# The keys of adapter_config.json. These are read:
_READ_KEYS = {
    "r",
    "lora_alpha",
    "target_modules",
    "lora_dropout",
    "base_model_name_or_path",
    TRAINABLE_TOKENS_KEY,
}
# These are ignored, because they do not change what the tensors mean:
_IGNORED_KEYS = {
    "peft_type",
    "task_type",
    "inference_mode",
    "auto_mapping",
    "revision",
    "peft_version",
    "megatron_core",
    "qalora_group_size",
    "layers_pattern",
    "ensure_weight_tying",
}
# These may have only the values listed here. All other keys must be null, false or empty, because they
# switch on variants that are not computed here.
_ALLOWED_VALUES = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "use_rslora": (None, False, True),
    "use_dora": (None, False, True),
}
MAX_RANK = 2**16
MAX_ALPHA = 10**9


class Adapter(NamedTuple):
    """The configuration in an adapter's folder. The adapter's tensors are not read yet.

    Attributes:
        folder: the folder.
        lora: rank, alpha, targets, dropout, tokens, rslora and dora, as adapter_config.json has them;
            see `lora_on`.
        base: the path of the base's folder, or its id on the hub, as adapter_config.json has it; "":
            it has none.
        tokens: the value of `trainable_token_indices` in adapter_config.json, the tokens whose rows of
            the embedding are trained.
    """

    folder: Path
    lora: Lora
    base: str
    tokens: object = None

    def require_base_shape(self, config: LlamaConfig | None) -> None:
        """Require that a base has the shape of the base on which the adapter was trained.

        Nothing is compared if the folder does not record that shape, or if `config` is None.

        Raises:
            InputRefused: the two bases' shapes differ.
        """
        if config is None or not exists(self.folder / BASE_FILE):
            return
        recorded = read_json(file_inside(self.folder, BASE_FILE))
        if _STRUCTURE in recorded:
            is_same = recorded[_STRUCTURE] == structure_digest(config)
        else:
            is_same = recorded.get(_CONFIG) == _config_digest(config)
        if not is_same:
            raise InputRefused(
                f"{self.folder}: this adapter was trained on another base: {BASE_FILE} does not have the digest of "
                "the structure that this one's config.json says"
            )

    def base_folder_where_written(self) -> list[Path]:
        """Return where the base was on the machine that wrote the adapter, if the folder records it."""
        if not exists(self.folder / BASE_FILE):
            return []
        recorded = read_json(file_inside(self.folder, BASE_FILE)).get(_FOLDER)
        return [Path(recorded)] if isinstance(recorded, str) else []

    def lora_on(self, config: LlamaConfig | None) -> Lora:
        """Return `lora` with targets by the decoder's names of layers. The folder has the names of the
        files of the base's family.

        Args:
            config: the shape of the base; None: the base is no `Llama`, or is not known, and the targets
                are returned as they are.

        Raises:
            InputRefused: a target matches no layer of the base.
        """
        if config is None:
            return self.lora
        try:
            targets = targets_in_decoder(self.lora.targets, config)
        except UsageError as error:
            raise InputRefused(f"{self.folder / CONFIG_FILE}: {error}") from None
        return replace(self.lora, targets=targets)

    @property
    def weights_sha256(self) -> str | None:
        """Return the SHA-256 of the weights of the base on which the adapter was trained.

        It is None if the folder does not record it, as in folders that PEFT wrote.
        """
        if not exists(self.folder / BASE_FILE):
            return None
        recorded = read_json(file_inside(self.folder, BASE_FILE)).get("weights_sha256")
        if recorded is not None and not isinstance(recorded, str):
            raise InputRefused(
                f"{self.folder / BASE_FILE}: weights_sha256 = {recorded!r}: expected a digest"
            )
        return recorded


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder has an adapter, and not a model.

    The result is False for a text that is not a folder's path but names code, such as file.py:build.
    """
    if isinstance(folder, str) and code_named(folder):
        return False
    folder = Path(folder)
    return is_file(folder / CONFIG_FILE) and not exists(folder / "config.json")


def structure_digest(config: LlamaConfig) -> str:
    """Return the SHA-256 in hex of a base's structure: the keys of its config.json that change what its
    weights compute.
    """
    return _digest_without(config, _NOT_STRUCTURE)


def _config_digest(config: LlamaConfig) -> str:
    """Return the digest that older folders have, which do not record `structure_digest`."""
    # A file may have a single id as a number or as a list of one number. Both mean the same.
    if len(config.eos_token_ids) == 1:
        config = replace(config, eos_token_id=config.eos_token_ids[0])
    return _digest_without(config, ("attention_dropout", "pad_token_id"))


def _digest_without(config: LlamaConfig, keys: Collection[str]) -> str:
    """Return the SHA-256 in hex of a config.json without some of its keys."""
    values = {key: value for key, value in config.to_hf().items() if key not in keys}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_adapter(folder: str | Path) -> Adapter:
    """Return the configuration of an adapter's folder.

    Raises:
        InputRefused: the adapter is not a LoRA, an unsupported key is set, or a value is wrong. The
            message names the key.
    """
    path = file_inside(Path(folder), CONFIG_FILE)
    values = read_json(path)
    if values.get("peft_type") != "LORA":
        raise InputRefused(f"{path}: peft_type = {values.get('peft_type')!r}: only LORA is read")
    for key, value in values.items():
        if key in _ALLOWED_VALUES and value not in _ALLOWED_VALUES[key]:
            raise InputRefused(
                f"{path}: {key} = {value!r} is not read: expected one of {_ALLOWED_VALUES[key]}"
            )
        is_known = key in _READ_KEYS | _IGNORED_KEYS | _ALLOWED_VALUES.keys()
        is_unset = value in (None, False, {}, [])
        if not is_known and not is_unset:
            raise InputRefused(
                f"{path}: {key} = {value!r} is set, which is not read here: merge it with PEFT first"
            )
    rank = values.get("r")
    alpha = values.get("lora_alpha")
    dropout = values.get("lora_dropout", 0.0)
    if type(rank) is not int or not 0 < rank <= MAX_RANK:
        raise InputRefused(f"{path}: r = {rank!r}: expected a whole number from 1 to {MAX_RANK}")
    alpha_is_valid = _is_number_in_range(alpha) and alpha != 0
    dropout_is_valid = _is_number_in_range(dropout) and dropout < 1
    if not alpha_is_valid or not dropout_is_valid:
        expected = "expected a number above 0 and at most 1e9, and one from 0 and below 1"
        raise InputRefused(
            f"{path}: lora_alpha = {alpha!r}, lora_dropout = {dropout!r}: {expected}"
        )
    targets = values.get("target_modules")
    if isinstance(targets, list):
        targets_are_valid = bool(targets) and all(isinstance(target, str) for target in targets)
    else:
        targets_are_valid = isinstance(targets, str) and bool(targets)
    if not targets_are_valid:
        raise InputRefused(
            f"{path}: target_modules = {targets!r}: expected a list of names or a regular expression"
        )
    assert alpha is not None
    lora_targets = tuple(sorted(targets)) if isinstance(targets, list) else str(targets)
    lora = Lora(
        rank,
        alpha,
        lora_targets,
        float(dropout),
        tokens=read_trainable_tokens(values.get(TRAINABLE_TOKENS_KEY), path),
        rslora=bool(values.get("use_rslora")),
        dora=bool(values.get("use_dora")),
    )
    base = values.get("base_model_name_or_path")
    return Adapter(
        folder=Path(folder),
        lora=lora,
        base=base if isinstance(base, str) else "",
        tokens=values.get(TRAINABLE_TOKENS_KEY),
    )


def _is_number_in_range(value: object) -> bool:
    """Return whether a value is a number from 0 to `MAX_ALPHA`."""
    # `isinstance` alone would accept a bool, which is an int in Python.
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= MAX_ALPHA


def load_adapter_weights(adapter: Adapter, module: nn.Module) -> None:
    """Read an adapter's tensors and copy them into a module.

    An adapter may have trained rows of the embedding, one for each token that its configuration
    lists. The rows of all other tokens keep the base's values.

    Args:
        adapter: the adapter.
        module: the base, on which `adapt` was called with the adapter's configuration.

    Raises:
        InputRefused: a tensor is missing, unexpected, of another shape or not finite, or the file is damaged.
    """
    path = file_inside(adapter.folder, WEIGHTS_FILE)
    state = adapter_state(module)  # shares memory with the module
    expected_names = state.keys() - unlisted_rows(adapter.tokens, module)
    destinations = {_outside_name(name, module): state[name] for name in expected_names}
    stored = tensors_by_own_names(read_header(path), module, path)
    missing = destinations.keys() - stored.keys()
    unexpected = stored.keys() - destinations.keys()
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise InputRefused(
                f"{path}: {len(names)} {kind} tensors for this base, the first is {min(names)!r}: an adapter of "
                "another model, or of another depth"
            )
    for name, tensor in stored.items():
        expected_shape = destinations[name].shape
        if tensor.shape != expected_shape:
            raise InputRefused(
                f"{path}: {name} is {list(tensor.shape)}, not {list(expected_shape)} as by r and base"
            )
        if tensor.dtype not in DTYPES:
            raise InputRefused(
                f"{path}: {name} is stored as {tensor.dtype}, not as one of {', '.join(DTYPES)}"
            )
    values = read_tensors({peft_name(name): tensor for name, tensor in stored.items()}, None)
    for name in stored:
        value = values[peft_name(name)]
        require_finite(f"{path}: {peft_name(name)}", value)
        destinations[name].copy_(value)


def _outside_name(name: str, module: nn.Module) -> str:
    """Return the name that folders have for a tensor of a module's adapters, without PEFT's additions."""
    return name_in_files(name, module.config) if isinstance(module, Llama) else name


def require_finite(place: str, tensor: Tensor) -> None:
    """Refuse a tensor of an adapter that has NaN or infinity in it.

    Args:
        place: where it was read, and its name.
        tensor: the tensor.

    Raises:
        InputRefused: a number is not finite.
    """
    if not tensor.isfinite().all():
        raise InputRefused(
            f"{place} is not finite (NaN or infinity): its training diverged, or the file is damaged; take another "
            "checkpoint"
        )


def install_adapters(
    module: nn.Module,
    lora: Lora,
    *,
    seed: int = 0,
    start: Adapter | None = None,
    precision: Precision | None = None,
    device: torch.device | None = None,
) -> None:
    """Turn a base into the module that a run with adapters trains, in place.

    Args:
        module: the base, in fp32 or with mapped weights that become fp32.
        lora: the adapters' settings.
        seed: the seed of new adapters' initial values.
        start: a stored adapter from which training begins; None: adapters are new.
        precision: the compute precision. If it has 16 bits, the base's weights are stored in this
            precision. None: the weights keep their dtype.
        device: the device to which adapters, 16-bit weights and quantised weights are moved; None:
            nothing is moved.

    Raises:
        UsageError: a target matches no layer, or `adapt` refuses for another reason.
        InputRefused: the stored adapter does not fit the base.
    """
    if start is None:
        adapt(module, lora, seed=seed, device=device)
    else:
        try:
            adapt(module, lora, device=device)
        except UsageError as error:
            raise InputRefused(f"{start.folder / CONFIG_FILE}: {error}") from None
        load_adapter_weights(start, module)
    if precision is not None and precision.name in ("bf16", "fp16"):
        # A `Llama` rounds the embedded tokens to 16 bits in its forward pass, so rounding its embedding
        # here gives the same numbers. It is not known whether a user's own module does so.
        also_narrow = [module.model.embed_tokens] if isinstance(module, Llama) else []
        round_frozen_weights(module, precision.dtype, also_narrow, device)
        store_row_norms(module, reset_magnitudes=start is None)


def adapter_state(module: nn.Module) -> dict[str, Tensor]:
    """Return by name the tensors that adapters train in a module: LoRA's matrices and magnitudes, and
    rows of the embedding.

    They share memory with the module.
    """
    lora_tensors = dict[str, Tensor]()
    for name, layer in adapted_layers(module).items():
        for part, parameter in layer.named_parameters():
            if part.startswith("lora_"):
                lora_tensors[f"{name}.{part}"] = parameter.detach()
    rows = {
        f"{name}.{ROWS}": table.token_rows.detach()
        for name, table in tables_with_rows(module).items()
    }
    return lora_tensors | rows


class PeftAdapters(NamedTuple):
    """Adapters in PEFT's format, in memory.

    Attributes:
        values: the content of adapter_config.json.
        tensors: the content of adapter_model.safetensors.
        base: the content of monograph_base.json, which has digests of the base; {}: the file is not
            written, as for a user's own module.
        tokenizer: a tokenizer with more tokens than the base's; None if there is none.
    """

    values: dict[str, Any]
    tensors: dict[str, Tensor]
    base: dict[str, str]
    tokenizer: Tokenizer | None = None


def pack_adapters(
    module: nn.Module, lora: Lora, base: str, config: LlamaConfig | None = None
) -> PeftAdapters:
    """Return a copy of a module's adapters in PEFT's format.

    The copy stays valid when the adapters are merged into the module.

    Args:
        module: a module with adapters.
        lora: the adapters' settings.
        base: the base: a folder's path, or an id of the hub.
        config: the shape of the base in its folder, which may have fewer tokens than the module;
            None: the module's shape.

    Raises:
        InputRefused: an adapter is on experts, or on one of several layers that are one layer in
            the family's files, or the names that PEFT has for the family's layers are not known.
    """
    if config is None and isinstance(module, Llama):
        config = module.config
    adapted = adapted_layers(module)
    experts = [name for name, layer in adapted.items() if isinstance(layer, AdaptedExperts)]
    if experts:
        raise InputRefused(
            f"{experts[0]} has an adapter for each expert, for which PEFT has no form"
        )
    if config is not None:
        if config.family.file_prefix:
            raise InputRefused(
                f"PEFT's names for the layers of a {config.model_type} are not known here: export it merged"
            )
        joined_layers = tuple(
            part for parts in config.joined_layers.values() if len(parts) > 1 for part in parts
        )
        joined_in_files = [name for name in adapted if name.endswith(joined_layers)]
        if joined_in_files:
            raise InputRefused(
                f"{joined_in_files[0]} has an adapter, and PEFT has one layer for it and others in a "
                f"{config.model_type}"
            )
    # A whole number is written without a decimal point.
    alpha = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": peft_base(base),
        "r": lora.rank,
        "lora_alpha": alpha,
        "target_modules": _target_modules(module, adapted, lora),
        "lora_dropout": lora.dropout,
        "bias": "none",
        "inference_mode": True,
    }
    if lora.rslora:
        values["use_rslora"] = True
    if lora.dora:
        values["use_dora"] = True
    trained_tokens = trainable_tokens_value(module)
    if trained_tokens:
        values[TRAINABLE_TOKENS_KEY] = trained_tokens
    tensors = {
        peft_name(_outside_name(name, module)): tensor.contiguous().clone()
        for name, tensor in adapter_state(module).items()
    }
    base_record = {} if config is None else {_STRUCTURE: structure_digest(config)}
    if values["base_model_name_or_path"] != base:
        base_record[_FOLDER] = base
    return PeftAdapters(values, tensors, base_record)


def peft_base(base: str) -> str:
    """Return the name of a base for PEFT: the id of a folder in the Hub's cache, otherwise `base` itself.

    The cache holds OWNER/NAME in models--OWNER--NAME/snapshots/COMMIT.
    """
    prefix = "models--"
    snapshots = Path(base).parent
    repository = snapshots.parent.name
    is_in_cache = snapshots.name == "snapshots" and repository.startswith(prefix)
    return repository.removeprefix(prefix).replace("--", "/", 1) if is_in_cache else base


def save_adapter(packed: PeftAdapters, folder: str | Path) -> None:
    """Write adapters into a new folder, which PEFT and `read_adapter` can read.

    Args:
        packed: the adapters.
        folder: the folder. It may exist if it is empty.

    Raises:
        InputRefused: the folder exists and is not empty, or it cannot be written.
        DiskFull: there is no space left. Nothing of the adapters remains.
    """
    with new_folder(Path(folder)) as new:
        write_adapter(packed, new)


def write_adapter(packed: PeftAdapters, new: Path) -> None:
    """Write the files of `save_adapter` into a folder that `new_folder` has made."""
    write_json(new / CONFIG_FILE, packed.values)
    if packed.base:
        write_json(new / BASE_FILE, packed.base)
    if packed.tokenizer is not None:
        for name, text in packed.tokenizer.config.files().items():
            (new / name).parent.mkdir(exist_ok=True)
            (new / name).write_text(text, encoding="utf-8")
        packed.tokenizer.save(new / "tokenizer.json")
    save_file(packed.tensors, new / WEIGHTS_FILE, metadata={"format": "pt"})
    # safetensors chooses its own permissions, so the file gets the permissions of the other files here.
    (new / WEIGHTS_FILE).chmod((new / CONFIG_FILE).stat().st_mode & 0o777)


def _target_modules(
    module: nn.Module, adapted: Mapping[str, AnyAdapted], lora: Lora
) -> list[str] | str:
    """Return the value of `target_modules` that selects the same layers in PEFT."""
    if isinstance(module, Llama) and module.config.renamed_layers:
        return targets_in_files(adapted, module.config)
    if lora.targets != ALL_LINEAR:
        return lora.targets if isinstance(lora.targets, str) else sorted(lora.targets)
    # The targets are "all-linear". This word is not written, because in PEFT it selects different layers
    # for different classes of models.
    return shortest_targets(set(adapted), [name for name, _ in module.named_modules()])


def resolved_base(adapter: Adapter, above: frozenset[Path] = frozenset()) -> str:
    """Return the folder of an adapter's base, which may itself be an adapter.

    Args:
        adapter: the adapter.
        above: the folders of the adapters that have this adapter as their base, directly or through
            other adapters.

    Raises:
        InputRefused: the base is not a folder on this machine (nothing is downloaded), or an
            adapter is, directly or through other adapters, its own base.
    """
    # A relative path is first looked up in the working directory, as in PEFT, and then in the adapter's
    # folder.
    candidates = [
        Path(adapter.base),
        adapter.folder / adapter.base,
        *adapter.base_folder_where_written(),
    ]
    for path in candidates:
        if adapter.base and exists(path):
            base = without_links(path)
            above = above | {without_links(adapter.folder)}
            if base in above:
                raise InputRefused(
                    f"{adapter.folder / CONFIG_FILE}: its base is an adapter whose base leads back to it"
                )
            if is_adapter(base):
                # This is called only for its errors: the base of that adapter is not here, or the chain
                # of bases leads back.
                resolved_base(read_adapter(base), above)
            return folder_named(base)
    raise InputRefused(
        f"{adapter.folder / CONFIG_FILE}: base_model_name_or_path = {adapter.base!r} is no folder here, and nothing is "
        "fetched: write the folder of the base there"
    )


# The file of adapters in a folder for llama.cpp.
GGUF_FILE = "adapter.gguf"


def save_gguf_adapter(packed: PeftAdapters, config: LlamaConfig, folder: str | Path) -> None:
    """Write adapters into `GGUF_FILE` in a new folder.

    Args:
        packed: the adapters.
        config: the shape of their base.
        folder: the folder. It may exist if it is empty.

    Raises:
        InputRefused: the adapters have parts that a GGUF file cannot have, or the folder cannot be
            written.
        DiskFull: there is no space left. Nothing of the adapters remains.
    """
    require_gguf_form(packed, config)
    with new_folder(Path(folder)) as new:
        write_gguf_adapter(packed, config, new)


def require_gguf_form(packed: PeftAdapters, config: LlamaConfig) -> None:
    """Require that a GGUF file can have all parts of these adapters.

    Raises:
        InputRefused: a GGUF file has no form for some part.
    """
    obstacle = ""
    if "use_dora" in packed.values:
        obstacle = "magnitudes (lora.dora)"
    elif TRAINABLE_TOKENS_KEY in packed.values:
        obstacle = "rows of tokens"
    elif not all(kind.gguf_adapters for kind in kinds_of_family(config)):
        obstacle = f"layers of the family {config.model_type}"
    if obstacle:
        raise InputRefused(f"a GGUF file of adapters has no form for {obstacle}")


def write_gguf_adapter(packed: PeftAdapters, config: LlamaConfig, new: Path) -> None:
    """Write the file of `save_gguf_adapter` into a folder that `new_folder` has made."""
    gguf = import_gguf()
    values = packed.values
    lora = Lora(values["r"], values["lora_alpha"], rslora="use_rslora" in values)  # for its `scale`
    matrices = {
        name_in_decoder(name.removeprefix(PEFT_PREFIX), config): tensor
        for name, tensor in packed.tensors.items()
    }
    tensors = list(_gguf_tensors(matrices, config))
    writer = gguf.GGUFWriter(new / GGUF_FILE, llama_cpp_support(config).name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    # llama.cpp divides alpha by the rank. Writing scale * rank as alpha makes it use the right scale
    # even for rslora, which llama.cpp does not know (alpha / sqrt(rank)).
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, lora.scale * lora.rank)
    write_gguf_file(
        gguf, writer, tensors, dict.fromkeys([tensor.name for tensor in tensors], "F32")
    )


def _gguf_tensors(matrices: Mapping[str, Tensor], config: LlamaConfig) -> Iterator[UnreadTensor]:
    """Yield both matrices of each adapted layer, with their names in a GGUF file.

    Args:
        matrices: the matrices by their names in the module.
        config: the shape of the base.
    """
    a_end = ".lora_A.weight"
    b_end = ".lora_B.weight"
    layers = [name.removesuffix(a_end) for name in matrices if name.endswith(a_end)]
    a_matrices = [_unread(f"{layer}.weight", matrices[layer + a_end]) for layer in layers]
    b_matrices = [_unread(f"{layer}.weight", matrices[layer + b_end]) for layer in layers]
    # The weight's change is B A, so the weight's rows are the rows of B, and its columns those of A. A GGUF
    # file may have a weight's rows in another order. `llama_cpp_tensors` treats B like the weight: it
    # renames B, and reorders its rows. A keeps its numbers, and gets the name that B has got.
    converted = llama_cpp_tensors(b_matrices, config)
    for a_matrix, b_matrix in zip(a_matrices, converted, strict=True):
        yield a_matrix._replace(name=f"{b_matrix.name}.lora_a")
        yield b_matrix._replace(name=f"{b_matrix.name}.lora_b")


def _unread(name: str, tensor: Tensor) -> UnreadTensor:
    """Return a tensor in memory as an `UnreadTensor`, the form of the tensors that are exported."""
    return UnreadTensor(name, tensor.to("meta"), tensor.clone)
