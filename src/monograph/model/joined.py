"""Tensors that are several of the decoder's, one below another, in the files of some families (`Family.joined`)."""

import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.lora import Plain
from monograph.model.config import LlamaConfig
from monograph.model.files import Stored
from monograph.model.parameters import layer_shapes


def joined(named: Iterable[Plain], config: LlamaConfig) -> Iterator[Plain]:
    """Yield a model's tensors as its family's files have them; a joined one comes where its last part came."""
    whole_of = {part: (name, parts) for name, parts in config.family.joined.items() for part in parts}
    waiting: dict[str, Plain] = {}
    for tensor in named:
        block, inner, kind = _place(tensor.name)
        if inner not in whole_of:
            yield tensor
            continue
        whole, parts = whole_of[inner]
        waiting[tensor.name] = tensor
        if inner == parts[-1]:
            taken = [waiting.pop(f"{block}{part}{kind}") for part in parts]
            like = torch.cat([each.like for each in taken])
            yield Plain(f"{block}{whole}{kind}", like, functools.partial(_below, taken))


def _below(parts: list[Plain]) -> Tensor:
    return torch.cat([part.read() for part in parts])


def parted(stored: dict[str, Stored], config: LlamaConfig) -> dict[str, Stored]:
    """Return a file's tensors as the decoder's parameters, each with its rows of a joined one.

    Raises:
        InputRefused: a joined tensor has not as many rows as its parts.
    """
    # The layers of a family that joins tensors are alike.
    shapes, found = layer_shapes(config, 0), dict[str, Stored]()
    for name, tensor in stored.items():
        block, inner, kind = _place(name)
        if (parts := config.family.joined.get(inner)) is None:
            found[name] = tensor
            continue
        sizes = [shapes[f"{part}{kind}"][0] for part in parts]
        if tensor.shape[:1] != (sum(sizes),):
            raise InputRefused(
                f"{tensor.path}: {name} has shape {list(tensor.shape)}, expected {' + '.join(map(str, sizes))} rows, "
                f"those of {', '.join(parts)} by config.json"
            )
        begin, tensor = 0, tensor._replace(known_as=tensor.known_as or name)
        for part, rows in zip(parts, sizes, strict=True):
            if (own := f"{block}{part}{kind}") in stored:
                raise InputRefused(f"{tensor.path}: {tensor.known_as} and {own} are one tensor of the model")
            shape = (rows, *tensor.shape[1:])
            found[f"{block}{part}{kind}"] = tensor._replace(shape=shape, part=(begin, begin + rows, 1, 0))
            begin += rows
    return found


def _place(name: str) -> tuple[str, str, str]:
    """Return the block, the module in it, and ".weight" or ".bias" of a parameter's name."""
    module, _, kind = name.rpartition(".")
    inner = ".".join(module.split(".")[-2:])
    return module.removesuffix(inner), inner, f".{kind}"
