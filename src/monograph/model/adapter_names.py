"""Translate the names of adapted layers between the decoder and its family's files.

Some families' files have other names for layers of the decoder (`LlamaConfig.renamed_layers`): the
gate_proj of an LFM2 is feed_forward.w1 there. PEFT adds adapters to transformers' model, whose layers
have the names of the files. So folders of adapters have these names, in their tensors and in their
targets, and everything else has the decoder's.
"""

import re
from collections.abc import Iterable, Mapping

import torch

from monograph.graph.lora_merge import plain_parameters
from monograph.graph.lora_targets import ALL_LINEAR, chosen_names, linear_layers
from monograph.model.config import LlamaConfig
from monograph.model.layouts import to_file_tensors
from monograph.model.llama import Llama

# The name of something in a block. The groups are the block, and the name in it.
_IN_BLOCK = re.compile(r"(.*\blayers\.\d+\.)(.+)")


def name_in_files(name: str, config: LlamaConfig) -> str:
    """Return the name that files have for a layer, or for a tensor of its adapter."""
    return _renamed(name, config.renamed_layers)


def _renamed(name: str, new_names: Mapping[str, str]) -> str:
    """Return a name in which a layer has its new name, if it has one."""
    match = _IN_BLOCK.fullmatch(name)
    if match is None:
        return name
    block, name_in_block = match.groups()
    for old, new in new_names.items():
        if f"{name_in_block}.".startswith(f"{old}."):
            return block + new + name_in_block.removeprefix(old)
    return name


def name_in_decoder(name: str, config: LlamaConfig) -> str:
    """Return the decoder's name for what has another name in files; the reverse of `name_in_files`."""
    return _renamed(name, {new: old for old, new in config.renamed_layers.items()})


def targets_in_files(names: Iterable[str], config: LlamaConfig) -> list[str]:
    """Return the list of targets with which PEFT selects these layers, and no others.

    Args:
        names: the decoder's names of the layers.
        config: the shape of the model.
    """
    parameters = to_file_tensors(plain_parameters(_skeleton(config)), config)
    layers = {parameter.name.rpartition(".")[0] for parameter in parameters}
    return shortest_targets({name_in_files(name, config) for name in names}, layers)


def targets_in_decoder(
    targets: str | tuple[str, ...], config: LlamaConfig
) -> str | tuple[str, ...]:
    """Return targets that select in the decoder the layers that PEFT selects by the files' names.

    Args:
        targets: the targets of a folder of adapters, in one of the three forms of `Lora.targets`.
        config: the shape of the base.

    Raises:
        UsageError: a target matches no layer.
    """
    if targets == ALL_LINEAR or not config.renamed_layers:
        return targets
    skeleton = _skeleton(config)
    own_names = {name_in_files(name, config): name for name in linear_layers(skeleton)}
    chosen = {own_names[name] for name in chosen_names(own_names, targets)}
    return tuple(shortest_targets(chosen, {name for name, _ in skeleton.named_modules()}))


def _skeleton(config: LlamaConfig) -> Llama:
    """Return a model of this shape whose weights have no numbers."""
    with torch.device("meta"):
        return Llama(config)


def shortest_targets(chosen: set[str], layers: Iterable[str]) -> list[str]:
    """Return targets that select the chosen layers of all layers, in ascending order.

    A target selects each layer whose name it is, and each whose name ends with it. So the last parts
    of names, such as q_proj, are taken. If a last part would select another layer, too, the whole names
    are taken instead.

    Args:
        chosen: the names of the chosen layers. None of them ends the name of another layer.
        layers: the names of all layers.
    """
    last_names_of_others = {_last_name(name) for name in layers if name not in chosen}
    return sorted(
        {name if _last_name(name) in last_names_of_others else _last_name(name) for name in chosen}
    )


def _last_name(name: str) -> str:
    """Return the last part of a layer's name."""
    return name.rpartition(".")[2]
