"""What a module holds: its state, its blocks, and the linear layers that adapters are for.

Layers are meant by name; what is meant and is not there is refused by name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph.frozen import Int8Linear, NF4Linear

M = TypeVar("M", bound=nn.Module)
_WRAPPED = "_orig_mod"  # under which `torch.compile(module)` holds the module


def unique_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict with tied tensors once, under their first name (as Hugging Face stores them)."""
    seen: dict[tuple[int, int, Any], str] = {}
    return {
        name: tensor
        for name, tensor in module.state_dict().items()
        if seen.setdefault((tensor.data_ptr(), tensor.numel(), tensor.stride()), name) == name
    }


def original(module: M) -> M:
    """Return the module that `torch.compile` wrapped, or the module itself; its parts may be wrapped.

    Raises:
        UsageError: it is no module, as what `torch.compile` returns of a module that is compiled already.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"model is a {type(module).__name__}: expected a torch.nn.Module")
    return original(cast(M, module._modules[_WRAPPED])) if _WRAPPED in module._modules else module


def unwrapped(module: M) -> M:
    """Return the module without `torch.compile`'s wrappers, whose names differ; the module itself stays as it is.

    Parts that hold a wrapper are copies, which share all tensors.
    """
    module = original(module)
    parts = {name: None if part is None else unwrapped(part) for name, part in module._modules.items()}
    if all(parts[name] is part for name, part in module._modules.items()):
        return module
    bare = copy.copy(module)
    bare._modules = parts
    return bare


def unwrap_(module: M) -> M:
    """Take the wrappers out of a module in place, and return it: what compiles here is the step."""
    module = original(module)
    for part in list(module.modules()):
        for name, child in list(part._modules.items()):
            if child is not None and _WRAPPED in child._modules:
                part._modules[name] = original(child)
    return module


def blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The module's blocks by name, in its own order: what stands between its embedding and its head.

    A block is a module that has parts and lies in an `nn.ModuleList` or `nn.Sequential`; what lies inside of a block is
    not another. A linear layer is none, whatever stands beside its weight.
    """
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for name, holder in module.named_modules():
        if holder in inside or not isinstance(holder, (nn.ModuleList, nn.Sequential)):
            continue
        for index, child in holder.named_children():
            if next(child.children(), None) is not None and not isinstance(child, nn.Linear):
                found[f"{name}.{index}" if name else index] = child
                inside |= set(child.modules())
    return found


def parts(module: nn.Module) -> dict[str, str]:
    """Of which block each parameter is, by name; the rest, which is no block's, is of "before" or "after" them."""
    found, owner, seen = blocks(module), dict[str, str](), False
    for name, _ in module.named_parameters():
        of_block = next((block for block in found if name.startswith(f"{block}.")), None)
        seen = seen or of_block is not None
        owner[name] = of_block or ("after" if seen else "before")
    return owner


@contextmanager
def running(module: nn.Module) -> Iterator[list[str]]:
    """In the block the list names the module's parts whose forward pass is running, innermost last, `name (Class)`.

    What raised stays in it.
    """
    stack: list[str] = []
    names = {child: name or type(module).__name__ for name, child in module.named_modules()}

    def enter(child: nn.Module, _inputs: object) -> None:
        stack.append(f"{names[child]} ({type(child).__name__})")

    def leave(_child: nn.Module, _inputs: object, _output: object) -> None:
        stack.pop()

    handles = [child.register_forward_pre_hook(enter, prepend=True) for child in names]
    handles += [child.register_forward_hook(leave) for child in names]
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Whatever runs in the block, the module's buffers (running means and the like) are afterwards what they were.

    Those that were replaced by another tensor too.
    """
    kept = [(owner, name, buffer) for owner in module.modules() for name, buffer in owner._buffers.items()]
    values = [None if buffer is None else buffer.clone() for _, _, buffer in kept]
    try:
        yield
    finally:
        for (owner, name, buffer), value in zip(kept, values, strict=True):
            owner._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)


ALL_LINEAR = "all-linear"
MOST_NAMES = 12  # of what exists, in a message


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Every plain linear layer of a module but the head, by name."""
    head = head_of(module)
    plain = {nn.Linear.forward, Int8Linear.forward, NF4Linear.forward}
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and type(layer).forward in plain and layer is not head
    }


def head_of(module: nn.Module) -> Any:
    """What gives the scores over the vocabulary, where the module says so as ours and transformers' do."""
    found = getattr(module, "get_output_embeddings", lambda: None)()
    return found if found is not None else getattr(module, "lm_head", None)


def targeted(module: nn.Module, targets: str | Iterable[str]) -> dict[str, nn.Linear]:
    """The layers that targets mean; see `monograph.graph.lora.Lora.targets`.

    Raises:
        UsageError: as `monograph.graph.lora.adapt`.
    """
    linear = linear_layers(module)
    if targets == ALL_LINEAR:
        chosen = set(linear)
    elif isinstance(targets, str):
        chosen = {name for name in linear if _matches(targets, name)}
        if not chosen:
            hint = f'; for the last part of a name write a list, ["{targets}"]' if _ends(linear, targets) else ""
            raise UsageError(
                f"lora.targets: the regular expression {targets!r} matches no whole name of a linear layer such as "
                f"{_some(linear)}{hint}"
            )
    else:
        by_target = {target: _ends(linear, target) for target in targets}
        for target in (target for target, found in by_target.items() if not found):
            raise UsageError(_idle(module, target, linear))
        chosen = set().union(*by_target.values())
    _require_own_weights(module, chosen)
    return {name: linear[name] for name in linear if name in chosen}


def _matches(expression: str, name: str) -> bool:
    try:
        return re.fullmatch(expression, name) is not None
    except re.error as error:
        raise UsageError(f"lora.targets = {expression!r} is no regular expression: {error}") from None


def _ends(names: Iterable[str], target: str) -> set[str]:
    return {name for name in names if name == target or name.endswith(f".{target}")}


def _idle(module: nn.Module, target: str, linear: Mapping[str, nn.Module]) -> str:
    found = {name: layer for name, layer in module.named_modules() if name and _ends([name], target)}
    there = f"there are {', '.join(sorted({name.rpartition('.')[2] for name in linear})[:MOST_NAMES])}"
    if not found:
        return f"lora.targets: no linear layer is called {target!r}; {there}"
    name, layer = next(iter(found.items()))
    if layer is head_of(module):
        return f"lora.targets: {name} is the head, whose weight the loss reads without calling it; {there}"
    return f"lora.targets: {name} is no plain linear layer but {type(layer).__name__}; {there}"


def _some(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:2]) or "none"


def shared_parameters(module: nn.Module) -> dict[int, list[str]]:
    """Parameters that have more than one name."""
    owners: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return {key: names for key, names in owners.items() if len(names) > 1}


def _require_own_weights(module: nn.Module, chosen: set[str]) -> None:
    for names in shared_parameters(module).values():
        if tied := [name for name in names if name.rpartition(".")[0] in chosen]:
            other = next(name for name in names if name != tied[0])
            raise UsageError(f"lora.targets: {tied[0]} is {other} too, so an adapter beside it could not be merged")
