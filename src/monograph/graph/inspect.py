"""Inspect a module: its state, shared memory, blocks, modes, buffers, and the linear layers that
take adapters.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

from monograph.errors import UsageError
from monograph.graph.experts import ExpertLinear
from monograph.graph.frozen import Int8Linear, NF4Linear

M = TypeVar("M", bound=nn.Module)
_OWN = {"_modules", "_parameters", "_buffers"}
_WRAPPED = "_orig_mod"  # the name by which `torch.compile(module)` holds the module


def unique_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with tied tensors once, under their first name (as Hugging Face stores
    them).

    Raises:
        UsageError: as `own_state`.
    """
    # Tied tensors share address, size and strides; a view may share the address alone.
    first_names: dict[tuple[int, int, tuple[int, ...]], str] = {}
    return {
        name: tensor
        for name, tensor in own_state(module).items()
        if first_names.setdefault((tensor.data_ptr(), tensor.numel(), tensor.stride()), name)
        == name
    }


def own_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict, if a checkpoint can hold it and be loaded into the module.

    Raises:
        UsageError: the state dict has a complex or sparse tensor, or an entry that is not one of
            the module's parameters and buffers, such as a hook's copy.
    """
    state: dict[str, Tensor] = module.state_dict()
    live = {_memory(tensor) for tensor in chain(module.parameters(), module.buffers())}
    for name, value in state.items():
        if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_complex()):
            kind = "complex" if value.is_complex() else "sparse"
            raise UsageError(
                f"{name} is {kind}, which a checkpoint cannot hold: make it a buffer with persistent=False, or keep "
                "real numbers, as torch.view_as_real gives them"
            )
        if not isinstance(value, Tensor) or _memory(value) not in live:
            raise UsageError(
                f"the module's state_dict has {name!r}, which is no parameter or buffer but a copy or other data: what "
                "is loaded would not reach the module; take out its state_dict hook, or get_extra_state"
            )
    return state


def _memory(tensor: Tensor) -> int:
    """Return a key of the tensor's storage; a sharded tensor's is that of its local shard."""
    own = getattr(tensor, "_local_tensor", tensor)
    return int(own.untyped_storage()._cdata) if own.layout == torch.strided else id(own)


def in_the_same_memory(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of a trainable parameter and of another tensor that overlap in memory, or
    None.

    The two would stop sharing numbers when the parameter is moved. The other one may be a
    parameter, a buffer or an attribute, also in lists and dicts. One tensor with two names does not
    count.
    """
    trained = {
        id(parameter): name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    by_storage = dict[int, list[tuple[int, int, str, Any, bool]]]()
    seen = set[int]()
    for path, part in module.named_modules():
        # Until its first call, spectral norm keeps the weight itself where its hook later puts the
        # normalised one.
        passing = {
            hook.name for hook in part._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)
        }
        attributes = {**part._parameters, **part._buffers, **vars(part)}
        named = [
            (f"{path}.{key}" if path else key, attributes[key])
            for key in attributes
            if key not in _OWN | passing
        ]
        for name, tensor in chain.from_iterable(
            _tensors_in(value, name, seen) for name, value in named
        ):
            if tensor.layout == torch.strided and not is_lazy(tensor):
                # The local shard of a sharded tensor.
                own = getattr(tensor, "_local_tensor", tensor)
                first = int(own.storage_offset()) * own.element_size()
                is_trained = id(tensor) in trained
                place = (first, _end_byte(own), trained.get(id(tensor), name), own, is_trained)
                by_storage.setdefault(_memory(own), []).append(place)
    for places in by_storage.values():
        # Only a tensor that begins before the end of an earlier one can overlap it; the exact test
        # is slow.
        open_before = list[tuple[int, str, Any, bool]]()
        for first, end, name, own, is_trained in sorted(places, key=itemgetter(0, 1, 2)):
            open_before = [before for before in open_before if before[0] > first]
            for _, other_name, other, other_trained in open_before:
                if (is_trained or other_trained) and np.shares_memory(
                    _bytes_of(other), _bytes_of(own)
                ):
                    return other_name, name
            open_before.append((end, name, own, is_trained))
    return None


def _tensors_in(value: object, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value, its lists and its dicts, with names; objects in `seen` are left
    out.
    """
    if not isinstance(value, Tensor | dict | list | tuple) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(item, f"{name}.{key}", seen)
    else:
        for item in value:
            yield from _tensors_in(item, name, seen)


def _end_byte(tensor: Tensor) -> int:
    """Return the offset in its storage of the first byte after a tensor."""
    steps = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (
        int(tensor.storage_offset() + (steps + 1 if tensor.numel() else 0)) * tensor.element_size()
    )


def _bytes_of(tensor: Tensor) -> Any:
    """Return a NumPy array that covers the tensor's bytes at their offsets in the storage; reading
    it would crash.
    """
    size = tensor.element_size()
    layout = {
        "shape": (*tensor.shape, size),
        "strides": (*(size * stride for stride in tensor.stride()), 1),
    }
    place = {"data": (1 + size * tensor.storage_offset(), True), "typestr": "|u1", "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=layout | place))


def original(module: M) -> M:
    """Return the module that `torch.compile` wrapped, or the module itself; its parts may be
    wrapped.

    Raises:
        UsageError: it is no module; `torch.compile` returns none for a module that is compiled
            already.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"model is a {type(module).__name__}: expected a torch.nn.Module")
    return original(cast(M, module._modules[_WRAPPED])) if _WRAPPED in module._modules else module


def unwrapped(module: M) -> M:
    """Return the module without `torch.compile`'s wrappers, which add to names; the module itself
    stays as it is.

    Modules that contain a wrapper are copied; the copies share all tensors.
    """
    module = original(module)
    parts = {
        name: None if part is None else unwrapped(part) for name, part in module._modules.items()
    }
    if all(parts[name] is part for name, part in module._modules.items()):
        return module
    bare = copy.copy(module)
    bare._modules = parts
    return bare


def unwrap_(module: M) -> M:
    """Remove `torch.compile`'s wrappers from a module in place, and return it; the step is compiled
    instead.
    """
    module = original(module)
    for part in list(module.modules()):
        for name, child in list(part._modules.items()):
            # Write only where there is a wrapper: TorchScript modules cannot be written to.
            if child is not None and _WRAPPED in child._modules:
                part._modules[name] = original(child)
    return module


def blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the module's blocks by name, in order: the layers between its embedding and its head.

    A block is a module with submodules in an `nn.ModuleList` or `nn.Sequential` that is not itself
    inside a block. A linear layer is no block, even with an adapter's submodules.
    """
    by_name: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for name, holder in module.named_modules():
        # `named_modules` yields the outermost list first.
        if holder in inside or not isinstance(holder, (nn.ModuleList, nn.Sequential)):
            continue
        for index, child in holder.named_children():
            if next(child.children(), None) is not None and not isinstance(child, nn.Linear):
                by_name[f"{name}.{index}" if name else index] = child
                inside |= set(child.modules())
    return by_name


def parts(module: nn.Module) -> dict[str, str]:
    """Return the name of each parameter's block; parameters outside of blocks are "before" or
    "after" them.
    """
    block_names = list(blocks(module))
    owner = dict[str, str]()
    outside = "before"
    for name, _ in module.named_parameters():
        block = next((block for block in block_names if name.startswith(f"{block}.")), None)
        outside = "after" if block else outside
        owner[name] = block or outside
    return owner


@contextmanager
def running(module: nn.Module) -> Iterator[list[str]]:
    """Yield a list of the modules whose forward pass is running, as `name (Class)`, innermost last.

    A module that raised stays in the list.
    """
    stack: list[str] = []
    names = {child: name or type(module).__name__ for name, child in module.named_modules()}

    def enter(child: nn.Module, _inputs: object) -> None:
        stack.append(f"{names[child]} ({type(child).__name__})")

    def leave(_child: nn.Module, _inputs: object, _output: object) -> None:
        stack.pop()

    # Before all other hooks, so that a module is in the list when a hook of its own raises.
    with ExitStack() as hooks:
        for child in names:
            hooks.enter_context(child.register_forward_pre_hook(enter, prepend=True))
            hooks.enter_context(child.register_forward_hook(leave))
        yield stack


@contextmanager
def buffers_kept(*modules: object) -> Iterator[None]:
    """Restore the modules' buffers (running means and the like) after the `with` block, also
    replaced ones.

    Frozen parameters, which a forward pass may write (as a teacher's), are restored as well, unless
    they are larger than the trained ones together: a copy of an adapter's base would take too much
    memory. Objects that are not modules, such as a loss function, are ignored.
    """
    parts = [
        part for module in modules if isinstance(module, nn.Module) for part in module.modules()
    ]
    kept = [(owner, name, buffer) for owner in parts for name, buffer in owner._buffers.items()]
    values = [None if buffer is None else buffer.clone() for _, _, buffer in kept]
    parameters = {id(p): p for part in parts for p in part.parameters(recurse=False)}.values()
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    frozen = [] if 2 * sum(p.nbytes for p in frozen) > sum(p.nbytes for p in parameters) else frozen
    copies = [parameter.detach().clone() for parameter in frozen]
    try:
        yield
    finally:
        for parameter, copied in zip(frozen, copies, strict=True):
            # Unchanged mapped weights must not be written: they lie in a file.
            if not torch.equal(parameter, copied):
                parameter.data.copy_(copied)
        for (owner, name, buffer), value in zip(kept, values, strict=True):
            owner._buffers[name] = buffer
            if buffer is not None and value is not None:
                write(buffer, value)


def write(tensor: Tensor, value: Tensor) -> None:
    """Copy a value of the same shape into a tensor, which may be expanded: each element in memory
    is written once.
    """
    if tensor.layout == torch.strided and 0 in tensor.stride():
        once = tuple(slice(None if stride else 1) for stride in tensor.stride())
        tensor, value = tensor[once], value[once]
    tensor.copy_(value)


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Restore after the `with` block which submodules are in training mode: frozen norms, for
    example, may not be.
    """
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


ALL_LINEAR = "all-linear"
MOST_NAMES = 12  # of layers that exist, in a message


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Return every plain linear layer of a module but the head, by name."""
    head = head_of(module)  # left out, because the loss reads its weight without calling it
    # The output of another forward pass may be nothing to which an adapter's could be added.
    plain = {nn.Linear.forward, Int8Linear.forward, NF4Linear.forward}
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and type(layer).forward in plain and layer is not head
    }


def expert_layers(module: nn.Module) -> dict[str, ExpertLinear]:
    """Return the layers of experts of a module's mixtures, by name."""
    return {
        name: layer for name, layer in module.named_modules() if isinstance(layer, ExpertLinear)
    }


def head_of(module: nn.Module) -> Any:
    """Return the layer that computes logits over the vocabulary, if it has transformers' usual
    name, or None.
    """
    head = getattr(module, "get_output_embeddings", lambda: None)()
    return head if head is not None else getattr(module, "lm_head", None)


def targeted(
    module: nn.Module, targets: str | Iterable[str]
) -> dict[str, nn.Linear | ExpertLinear]:
    """Return the layers that `targets` chooses, by name; see `monograph.graph.lora.Lora.targets`.

    Raises:
        UsageError: see `monograph.graph.lora.adapt`.
    """
    linear: dict[str, nn.Linear | ExpertLinear] = {**linear_layers(module)}
    if targets != ALL_LINEAR:
        linear |= expert_layers(module)
    if targets == ALL_LINEAR:
        chosen = set(linear)
    elif isinstance(targets, str):
        if not (chosen := {name for name in linear if _matches(targets, name)}):
            hint = (
                f'; for the last part of a name write a list, ["{targets}"]'
                if _ends(linear, targets)
                else ""
            )
            raise UsageError(
                f"lora.targets: the regular expression {targets!r} matches no whole name of a linear layer such as "
                f"{', '.join(list(linear)[:2]) or 'none'}{hint}"
            )
    else:
        by_target = {target: _ends(linear, target) for target in targets}
        for target in (target for target, layers in by_target.items() if not layers):
            raise UsageError(_idle(module, target, linear))
        chosen = set().union(*by_target.values())
    _require_own_weights(module, chosen)
    return {name: linear[name] for name in linear if name in chosen}


def _matches(expression: str, name: str) -> bool:
    try:
        return re.fullmatch(expression, name) is not None
    except re.error as error:
        raise UsageError(
            f"lora.targets = {expression!r} is no regular expression: {error}"
        ) from None


def _ends(names: Iterable[str], target: str) -> set[str]:
    return {name for name in names if name == target or name.endswith(f".{target}")}


def _idle(module: nn.Module, target: str, linear: Mapping[str, nn.Module]) -> str:
    layers = {
        name: layer for name, layer in module.named_modules() if name and _ends([name], target)
    }
    there = (
        f"there are {', '.join(sorted({name.rpartition('.')[2] for name in linear})[:MOST_NAMES])}"
    )
    if not layers:
        return f"lora.targets: no linear layer is called {target!r}; {there}"
    name, layer = next(iter(layers.items()))
    if layer is head_of(module):
        return f"lora.targets: {name} is the head, whose weight the loss reads without calling it; {there}"
    return f"lora.targets: {name} is no plain linear layer but {type(layer).__name__}; {there}"


def shared_parameters(module: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter that has more than one, by the parameter's id."""
    return shared(module.named_parameters(remove_duplicate=False))


def shared(named: Iterable[tuple[str, Tensor]]) -> dict[int, list[str]]:
    """Return the names of each tensor that has more than one, by the tensor's id."""
    owners: dict[int, list[str]] = {}
    for name, tensor in named:
        owners.setdefault(id(tensor), []).append(name)
    return {key: names for key, names in owners.items() if len(names) > 1}


def _require_own_weights(module: nn.Module, chosen: set[str]) -> None:
    # Merging an adapter into a shared weight would change the other layer, too.
    for names in shared_parameters(module).values():
        if tied := [name for name in names if name.rpartition(".")[0] in chosen]:
            other = next(name for name in names if name != tied[0])
            raise UsageError(
                f"lora.targets: {tied[0]} is {other} too, so an adapter on it could not be merged"
            )
