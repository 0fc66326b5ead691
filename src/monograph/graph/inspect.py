"""What a module holds."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from monograph.errors import UsageError

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
        part._modules.update({name: original(child) for name, child in part._modules.items() if child is not None})
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
