"""Write trained adapters as a GGUF file, which llama.cpp adds to a file of the base model (`llama-cli --lora`).

Of each weight NAME the file has A as NAME.lora_a and B, in the base file's order of rows, as NAME.lora_b; llama.cpp
multiplies by alpha / rank.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.lora import Lora, Plain
from monograph.model.adapter import Packed
from monograph.model.config import LlamaConfig
from monograph.model.files import new_folder
from monograph.model.gguf import architecture, named, package, write_tensors
from monograph.model.scaling import LINEAR
from monograph.model.vocabulary import KEY, PREFIX

FILE = "adapter.gguf"


def save_gguf_adapter(stored: Packed, config: LlamaConfig, folder: str | Path) -> None:
    """Write a new folder with `FILE`, whole or not at all; it may exist if it is empty.

    Args:
        stored: the adapters.
        config: the shape of their base.
        folder: the folder.

    Raises:
        InputRefused: the adapters have parts for which the format has no form, or the folder cannot be written.
        DiskFull: no space left; nothing of the adapters remains.
    """
    obstacles = {
        "magnitudes (lora.rank = ...:dora)": "use_dora" in stored.values,
        "rows of tokens": KEY in stored.values,
        f"layers of the family {config.model_type}": config.family.experts or config.family.others == LINEAR,
    }
    if found := [what for what, is_so in obstacles.items() if is_so]:
        raise InputRefused(f"a GGUF file of adapters has no form for {found[0]}")
    gguf, values = package(), stored.values
    lora = Lora(values["r"], values["lora_alpha"], rslora="use_rslora" in values)
    own = {name.removeprefix(PREFIX): tensor for name, tensor in stored.tensors.items()}
    tensors = [*_tensors(own, config)]
    with new_folder(Path(folder)) as new:
        writer = gguf.GGUFWriter(new / FILE, architecture(config))
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, lora.scale * lora.rank)
        write_tensors(gguf, writer, tensors, dict.fromkeys([tensor.name for tensor in tensors], "F32"))


def _tensors(own: Mapping[str, Tensor], config: LlamaConfig) -> Iterator[Plain]:
    """Yield both matrices of each layer; B has a weight's rows, and so the file's order of them."""
    ends = ".lora_A.weight", ".lora_B.weight"
    layers = [name.removesuffix(ends[0]) for name in own if name.endswith(ends[0])]
    first, second = ([_plain(f"{layer}.weight", own[layer + end]) for layer in layers] for end in ends)
    for of_A, of_B in zip(first, named(second, config), strict=True):
        yield of_A._replace(name=f"{of_B.name}.lora_a")
        yield of_B._replace(name=f"{of_B.name}.lora_b")


def _plain(name: str, tensor: Tensor) -> Plain:
    return Plain(name, tensor.to("meta"), tensor.clone)
