"""Read and write adapters in PEFT's format (a folder with adapter_config.json and weights), and
write them as GGUF.

llama.cpp adds the adapters of a GGUF file to a file of the base model (`llama-cli --lora`). Of each
weight NAME it has A as NAME.lora_a and B, in the base file's order of rows, as NAME.lora_b;
llama.cpp multiplies by alpha / rank.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from monograph.errors import InputRefused, UsageError
from monograph.graph.inspect import ALL_LINEAR
from monograph.graph.lora import (
    AdaptedExperts,
    AnyAdapted,
    Lora,
    Plain,
    adapt,
    adapters,
    measure,
    narrow,
)
from monograph.graph.precision import Precision
from monograph.graph.token_rows import ROWS, tables
from monograph.model.config import LlamaConfig
from monograph.model.files import DTYPES, new_folder, read_header, read_tensors, write_json
from monograph.model.gguf import named, package, reader_of, write_tensors
from monograph.model.llama import Llama
from monograph.model.scaling import LINEAR
from monograph.model.vocabulary import (
    KEY,
    PREFIX,
    left_out,
    own_rows,
    read_tokens,
    to_peft,
    written_tokens,
)
from monograph.storage.code import code_named, folder_named
from monograph.storage.reading import exists, inside, is_file, read_json, without_links
from monograph.text.tokenizer import Tokenizer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Monograph's own file next to PEFT's two, with digests of the base; PEFT does not read it.
BASE = "monograph_base.json"
_READ = {"r", "lora_alpha", "target_modules", "lora_dropout", "base_model_name_or_path", KEY}
# Keys that do not change the meaning of the adapter's tensors.
_IGNORED = {
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
# Keys with the only values that are read.
_ALLOWED = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "use_rslora": (None, False, True),
    "use_dora": (None, False, True),
}
MOST_RANK, MOST_ALPHA = 2**16, 10**9


class Adapter(NamedTuple):
    """The configuration of an adapter's folder; its tensors have not been read yet.

    Attributes:
        folder: the folder.
        lora: rank, alpha, targets, dropout, tokens, rslora, dora.
        base: the base model's name in the file; "" if the file names none.
        tokens: the file's value of `trainable_token_indices`.
    """

    folder: Path
    lora: Lora
    base: str
    tokens: object = None

    def require(self, config: LlamaConfig | None) -> None:
        """Compare a base's shape with that of the base that the adapter was trained on, if the
        folder records it.

        Raises:
            InputRefused: the two differ.
        """
        if config is None or not exists(self.folder / BASE):
            return
        if read_json(inside(self.folder, BASE)).get("config_sha256") != config_digest(config):
            raise InputRefused(
                f"{self.folder}: this adapter was trained on another base: {BASE} does not have the digest of this "
                "one's config.json"
            )

    @property
    def weights_sha256(self) -> str | None:
        """Return the recorded digest of the base's weights, or None, as for PEFT's own folders."""
        if not exists(self.folder / BASE):
            return None
        recorded = read_json(inside(self.folder, BASE)).get("weights_sha256")
        if recorded is not None and not isinstance(recorded, str):
            raise InputRefused(
                f"{self.folder / BASE}: weights_sha256 = {recorded!r}: expected a digest"
            )
        return recorded


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder holds an adapter and no model; a text that names code names no
    folder.
    """
    if isinstance(folder, str) and code_named(folder):
        return False
    folder = Path(folder)
    return is_file(folder / CONFIG) and not exists(folder / "config.json")


def config_digest(config: LlamaConfig) -> str:
    """Return the SHA-256 in hex of a base's config.json; an end id and a list of only that id give
    the same digest.
    """
    values = config.to_hf()
    del values["attention_dropout"], values["pad_token_id"]  # they change no weight's shape
    if len(config.ends) == 1:
        values["eos_token_id"] = config.ends[0]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_adapter(folder: str | Path) -> Adapter:
    """Return the configuration of an adapter's folder.

    Raises:
        InputRefused: another kind of adapter, an unsupported key that is set, or a wrong value; the
            message names it.
    """
    path = inside(Path(folder), CONFIG)
    values = read_json(path)
    if values.get("peft_type") != "LORA":
        raise InputRefused(f"{path}: peft_type = {values.get('peft_type')!r}: only LORA is read")
    for key, value in values.items():
        if key in _ALLOWED and value not in _ALLOWED[key]:
            raise InputRefused(
                f"{path}: {key} = {value!r} is not read: expected one of {_ALLOWED[key]}"
            )
        if key not in _READ | _IGNORED | _ALLOWED.keys() and value not in (None, False, {}, []):
            raise InputRefused(
                f"{path}: {key} = {value!r} is set, which is not read here: merge it with PEFT first"
            )
    rank = values.get("r")
    alpha = values.get("lora_alpha")
    dropout = values.get("lora_dropout", 0.0)
    if type(rank) is not int or not 0 < rank <= MOST_RANK:
        raise InputRefused(f"{path}: r = {rank!r}: expected a whole number from 1 to {MOST_RANK}")
    if not alpha or not _number(alpha) or not _number(dropout) or not 0 <= dropout < 1:
        expected = "expected a number above 0 and at most 1e9, and one from 0 and below 1"
        raise InputRefused(
            f"{path}: lora_alpha = {alpha!r}, lora_dropout = {dropout!r}: {expected}"
        )
    targets = values.get("target_modules")
    listed = (
        isinstance(targets, list) and targets and all(isinstance(target, str) for target in targets)
    )
    if not listed and not (isinstance(targets, str) and targets):
        raise InputRefused(
            f"{path}: target_modules = {targets!r}: expected a list of names or a regular expression"
        )
    assert alpha is not None
    kind: dict[str, Any] = {
        "rslora": bool(values.get("use_rslora")),
        "dora": bool(values.get("use_dora")),
    }
    chosen = tuple(sorted(targets)) if isinstance(targets, list) else str(targets)
    lora = Lora(
        rank, alpha, chosen, float(dropout), tokens=read_tokens(values.get(KEY), path), **kind
    )
    base = values.get("base_model_name_or_path")
    return Adapter(Path(folder), lora, base if isinstance(base, str) else "", values.get(KEY))


def _number(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST_ALPHA
    )


def read_weights(adapter: Adapter, module: nn.Module) -> None:
    """Copy an adapter's tensors into a module that `adapt` has prepared with the adapter's
    configuration.

    Trained rows that the adapter's configuration does not list keep the base's values.

    Raises:
        InputRefused: a missing or unexpected tensor, one of another shape, or a damaged file.
    """
    own = adapter_state(module)
    path = inside(adapter.folder, WEIGHTS)
    own = {name: own[name] for name in own.keys() - left_out(adapter.tokens, module)}
    stored = own_rows(read_header(path), module, path)
    for kind, names in (
        ("missing", own.keys() - stored.keys()),
        ("unexpected", stored.keys() - own.keys()),
    ):
        if names:
            raise InputRefused(
                f"{path}: {len(names)} {kind} tensors for this base, the first is {min(names)!r}: an adapter of "
                "another model, or of another depth"
            )
    for name, tensor in stored.items():
        if tensor.shape != own[name].shape:
            raise InputRefused(
                f"{path}: {name} is {list(tensor.shape)}, not {list(own[name].shape)} as by r and base"
            )
        if tensor.dtype not in DTYPES:
            raise InputRefused(
                f"{path}: {name} is stored as {tensor.dtype}, not as one of {', '.join(DTYPES)}"
            )
    values = read_tensors({to_peft(name): tensor for name, tensor in stored.items()}, None)
    for name in stored:
        own[name].copy_(values[to_peft(name)])


def put(
    module: nn.Module,
    lora: Lora,
    *,
    seed: int = 0,
    start: Adapter | None = None,
    precision: Precision | None = None,
    device: torch.device | None = None,
) -> None:
    """Turn a module into the one that a run with adapters trains.

    Args:
        module: the base, in fp32 or as mapped weights that become fp32.
        lora: the adapters' settings.
        seed: seeds the initial values of new adapters.
        start: a stored adapter to begin from.
        precision: the compute precision; if it has 16 bits, the base's weights are stored in them,
            too.
        device: device to which adapters, 16-bit and quantised weights are moved; None: they stay.

    Raises:
        UsageError: a target that matches nothing, or another refusal of `adapt`.
        InputRefused: the stored adapter does not fit.
    """
    if start is None:
        adapt(module, lora, seed=seed, device=device)
    else:
        try:
            adapt(module, lora, device=device)
        except UsageError as error:
            raise InputRefused(f"{start.folder / CONFIG}: {error}") from None
        read_weights(start, module)
    if precision is not None and precision.name in ("bf16", "fp16"):
        # A Llama rounds its hidden states right after the embedding, so the embedding can be stored
        # in 16 bits, too.
        narrow(
            module,
            precision.dtype,
            [module.model.embed_tokens] if isinstance(module, Llama) else [],
            device,
        )
        measure(module, fresh=start is None)


def adapter_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's adapter tensors, including trained rows of tokens, by name; they share
    memory with it.
    """
    own = {
        f"{name}.{part}": parameter.detach()
        for name, layer in adapters(module).items()
        for part, parameter in layer.named_parameters()
        if part.startswith("lora_")
    }
    return own | {
        f"{name}.{ROWS}": layer.token_rows.detach() for name, layer in tables(module).items()
    }


class Packed(NamedTuple):
    """Adapters in PEFT's format.

    Attributes:
        values: the content of adapter_config.json.
        tensors: the content of adapter_model.safetensors.
        base: the content of monograph_base.json, which describes the base; empty for a user's own
            module.
        tokenizer: a tokenizer with more tokens than the base's, or None.
    """

    values: dict[str, Any]
    tensors: dict[str, Tensor]
    base: dict[str, str]
    tokenizer: Tokenizer | None = None


def packed(module: nn.Module, lora: Lora, base: str, config: LlamaConfig | None = None) -> Packed:
    """Return copies of a module's adapters, which stay valid when the adapters are merged.

    Args:
        module: a module with adapters.
        lora: the adapters' settings.
        base: the base model, a folder's path or a hub id.
        config: the shape of the stored base; None: the module's.

    Raises:
        InputRefused: an adapter is on one of several layers that are one in the family's files, or
            on experts.
    """
    config = config or (module.config if isinstance(module, Llama) else None)
    adapted = adapters(module)
    parts = tuple(itertools.chain.from_iterable(config.family.joined.values())) if config else ()
    if experts := [name for name, layer in adapted.items() if isinstance(layer, AdaptedExperts)]:
        raise InputRefused(
            f"{experts[0]} has an adapter for each expert, for which PEFT has no form"
        )
    if names := [name for name in adapted if name.endswith(parts)]:
        raise InputRefused(
            f"{names[0]} has an adapter, and PEFT has one layer for it and others in a {config and config.model_type}"
        )
    alpha = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "target_modules": _targets(module, adapted, lora),
        "lora_dropout": lora.dropout,
        "bias": "none",
        "inference_mode": True,
    }
    values |= {f"use_{kind}": True for kind in ("rslora", "dora") if getattr(lora, kind)}
    if tokens := written_tokens(module):
        values[KEY] = tokens
    tensors = {
        to_peft(name): tensor.contiguous().clone() for name, tensor in adapter_state(module).items()
    }
    return Packed(values, tensors, {"config_sha256": config_digest(config)} if config else {})


def save_adapter(stored: Packed, folder: str | Path) -> None:
    """Write a new folder that PEFT and `read_adapter` can read; it may exist if it is empty.

    Raises:
        InputRefused: the folder exists and holds something, or cannot be written.
        DiskFull: no space left; nothing of the adapter remains.
    """
    with new_folder(Path(folder)) as new:
        write_adapter(stored, new)


def write_adapter(stored: Packed, new: Path) -> None:
    """Write the files of `save_adapter` into a folder of `new_folder`."""
    write_json(new / CONFIG, stored.values)
    if stored.base:
        write_json(new / BASE, stored.base)
    if stored.tokenizer is not None:
        for name, text in stored.tokenizer.config.files().items():
            (new / name).parent.mkdir(exist_ok=True)
            (new / name).write_text(text, encoding="utf-8")
        stored.tokenizer.save(new / "tokenizer.json")
    save_file(stored.tensors, new / WEIGHTS, metadata={"format": "pt"})
    (new / WEIGHTS).chmod((new / CONFIG).stat().st_mode & 0o777)


def _targets(module: nn.Module, adapted: Mapping[str, AnyAdapted], lora: Lora) -> list[str] | str:
    """Return `target_modules` that select the same layers in PEFT, where "all-linear" depends on
    the model's class.
    """
    if lora.targets != ALL_LINEAR:
        return lora.targets if isinstance(lora.targets, str) else sorted(lora.targets)
    ends = sorted({name.rpartition(".")[2] for name in adapted})
    layers = module.named_modules()
    others = {
        name for name, child in layers if name not in adapted and not isinstance(child, AnyAdapted)
    }
    matched = {
        name for name in others if any(name == end or name.endswith(f".{end}") for end in ends)
    }
    return sorted(adapted) if matched else ends


def resolved_base(adapter: Adapter, above: frozenset[Path] = frozenset()) -> str:
    """Return the folder of an adapter's base, which may be an adapter; `above` are the folders of
    adapters on this one.

    Raises:
        InputRefused: the base is no folder here (nothing is downloaded), or adapters are bases of
            each other.
    """
    for path in (Path(adapter.base), adapter.folder / adapter.base):
        if adapter.base and exists(path):
            base = without_links(path)
            above = above | {without_links(adapter.folder)}
            if base in above:
                raise InputRefused(
                    f"{adapter.folder / CONFIG}: its base is an adapter whose base leads back to it"
                )
            if is_adapter(base):
                resolved_base(read_adapter(base), above)
            return folder_named(base)
    raise InputRefused(
        f"{adapter.folder / CONFIG}: base_model_name_or_path = {adapter.base!r} is no folder here, and nothing is "
        "fetched: write the folder of the base there"
    )


GGUF_FILE = "adapter.gguf"


def save_gguf_adapter(stored: Packed, config: LlamaConfig, folder: str | Path) -> None:
    """Write a new folder with `GGUF_FILE`, whole or not at all; it may exist if it is empty.

    Args:
        stored: the adapters.
        config: the shape of their base.
        folder: the folder.

    Raises:
        InputRefused: the adapters have parts for which the format has no form, or the folder cannot
            be written.
        DiskFull: no space left; nothing of the adapters remains.
    """
    require_gguf_form(stored, config)
    with new_folder(Path(folder)) as new:
        write_gguf_adapter(stored, config, new)


def require_gguf_form(stored: Packed, config: LlamaConfig) -> None:
    """Refuse adapters that have parts for which a GGUF file has no form; raises InputRefused."""
    obstacles = {
        "magnitudes (lora.dora)": "use_dora" in stored.values,
        "rows of tokens": KEY in stored.values,
        f"layers of the family {config.model_type}": config.family.experts
        or config.family.others == LINEAR,
    }
    if found := [what for what, is_so in obstacles.items() if is_so]:
        raise InputRefused(f"a GGUF file of adapters has no form for {found[0]}")


def write_gguf_adapter(stored: Packed, config: LlamaConfig, new: Path) -> None:
    """Write the file of `save_gguf_adapter` into a folder of `new_folder`."""
    gguf = package()
    values = stored.values
    lora = Lora(values["r"], values["lora_alpha"], rslora="use_rslora" in values)
    own = {name.removeprefix(PREFIX): tensor for name, tensor in stored.tensors.items()}
    tensors = [*_gguf_tensors(own, config)]
    writer = gguf.GGUFWriter(new / GGUF_FILE, reader_of(config).name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, lora.scale * lora.rank)
    write_tensors(gguf, writer, tensors, dict.fromkeys([tensor.name for tensor in tensors], "F32"))


def _gguf_tensors(own: Mapping[str, Tensor], config: LlamaConfig) -> Iterator[Plain]:
    """Yield both matrices of each layer; B has a weight's rows, and so the file's order of them."""
    ends = ".lora_A.weight", ".lora_B.weight"
    layers = [name.removesuffix(ends[0]) for name in own if name.endswith(ends[0])]
    first, second = (
        [_plain(f"{layer}.weight", own[layer + end]) for layer in layers] for end in ends
    )
    for of_A, of_B in zip(first, named(second, config), strict=True):
        yield of_A._replace(name=f"{of_B.name}.lora_a")
        yield of_B._replace(name=f"{of_B.name}.lora_b")


def _plain(name: str, tensor: Tensor) -> Plain:
    return Plain(name, tensor.to("meta"), tensor.clone)
