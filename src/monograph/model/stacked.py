"""Tensors that hold all experts' matrices in the decoder, and are one for each expert in files."""

import functools
import re
from collections.abc import Iterable, Iterator

from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.lora import Plain
from monograph.model.config import LlamaConfig
from monograph.model.files import Stored
from monograph.model.fused import STACK, fused, split

_EXPERT = re.compile(r"(.+\.mlp\.experts\.)(0|[1-9]\d{0,8})\.(\w+_proj\.weight)")


def apart(named: Iterable[Plain], config: LlamaConfig) -> Iterator[Plain]:
    """Yield a model's tensors with each expert's matrices as tensors of their own, or fused, as its files have them.

    A stack that is read stays in memory until another one is.
    """
    if config.family.fused_experts:
        yield from fused(named, config.family.fused_experts == "columns")
        return
    last = dict[str, Tensor]()
    for tensor in named:
        if (match := STACK.fullmatch(tensor.name)) is None:
            yield tensor
            continue
        for expert in range(len(tensor.like)):
            read = functools.partial(_expert, tensor, expert, last)
            yield Plain(f"{match[1]}{expert}.{match[2]}_proj.{match[3]}", tensor.like[expert], read)


def _expert(stack: Plain, expert: int, last: dict[str, Tensor]) -> Tensor:
    if stack.name not in last:
        last.clear()
        last[stack.name] = stack.read()
    return last[stack.name][expert]


def stacked(stored: dict[str, Stored], config: LlamaConfig) -> dict[str, Stored]:
    """Return a file's tensors as the decoder's parameters, in which all experts' matrices are one.

    Raises:
        InputRefused: an expert's matrix is missing, or differs from the first one's in shape or dtype.
    """
    if config.family.fused_experts:  # transformers 5 writes these, too, apart if the model sees
        stored = split(stored, config.family.fused_experts == "columns")
    found, stacks = dict[str, Stored](), dict[str, dict[int, tuple[str, Stored]]]()
    for name, tensor in stored.items():
        if config.family.experts and (match := _EXPERT.fullmatch(name)):
            stacks.setdefault(match[1] + match[3], {})[int(match[2])] = name, tensor
        else:
            found[name] = tensor
    for name, experts in stacks.items():
        if name in found:
            whole = found[name]
            raise InputRefused(f"{whole.path}: {whole.known_as} is there, and tensors of each expert, too")
        first_name, first = experts[min(experts)]
        if len(experts) != config.num_experts or max(experts) >= config.num_experts:
            raise InputRefused(
                f"{first.path}: there are {len(experts)} tensors such as {first_name!r}, the last of expert "
                f"{max(experts)}, but num_experts = {config.num_experts}"
            )
        for other_name, other in experts.values():
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                raise InputRefused(
                    f"{other.path}: {other_name} has shape {list(other.shape)} and dtype {other.dtype}, but "
                    f"{first_name} {list(first.shape)} and {first.dtype}"
                )
        of_stack = dict(experts[expert] for expert in range(config.num_experts))
        found[name] = Stored(first.path, (config.num_experts, *first.shape), first.dtype, pieces=of_stack)
    return found
