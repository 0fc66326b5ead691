"""Inspect any module: its state dict, memory that tensors share, blocks, training modes, buffers."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

from monograph.errors import UsageError

M = TypeVar("M", bound=nn.Module)
# Attributes of every module that hold its submodules, parameters and buffers.
_REGISTRIES = {"_modules", "_parameters", "_buffers"}
# The submodule of `torch.compile(module)` that is the module itself.
_COMPILED_SUBMODULE = "_orig_mod"


def unique_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with each tied tensor once, under its first name, as Hugging Face does.

    Raises:
        UsageError: see `loadable_state`.
    """
    first_names: dict[tuple[int, int, Any], str] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in loadable_state(module).items():
        # Tied tensors share address, size and strides; a view may share the address alone.
        key = (tensor.data_ptr(), tensor.numel(), tensor.stride())
        first_name = first_names.setdefault(key, name)
        if first_name == name:
            state[name] = tensor
    return state


def loadable_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict, after checking that it can be saved and loaded into the module.

    Raises:
        UsageError: the state dict has a complex or sparse tensor, or an entry that is not one of
            the module's parameters and buffers, such as a hook's copy.
    """
    state: dict[str, Tensor] = module.state_dict()
    module_storages = {
        _storage_key(tensor) for tensor in chain(module.parameters(), module.buffers())
    }
    for name, value in state.items():
        if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_complex()):
            kind = "complex" if value.is_complex() else "sparse"
            raise UsageError(
                f"{name} is {kind}, which a checkpoint cannot hold: make it a buffer with persistent=False, or store "
                "it as real numbers with torch.view_as_real"
            )
        if not isinstance(value, Tensor) or _storage_key(value) not in module_storages:
            raise UsageError(
                f"the module's state_dict has {name!r}, which is not a parameter or buffer but a copy or other data. "
                "A loaded value would not reach the module: remove its state_dict hook or get_extra_state"
            )
    return state


def storage_of(tensor: Tensor) -> int:
    """Return a key of a tensor's storage, which views share; it is unique among living tensors."""
    return tensor.untyped_storage()._cdata


def _storage_key(tensor: Tensor) -> int:
    """Return `storage_of` the tensor, or of its local shard if it is sharded; an id if it is sparse."""
    local = getattr(tensor, "_local_tensor", tensor)
    return storage_of(local) if local.layout == torch.strided else id(local)


class _Extent(NamedTuple):
    """The bytes of a storage that a tensor spans.

    Attributes:
        begin_byte: offset of the tensor's first byte.
        end_byte: offset of the byte after its last one.
        name: the tensor's name in the module.
        tensor: the tensor, or its local shard if it is sharded.
        is_trained: whether the tensor is a trainable parameter.
    """

    begin_byte: int
    end_byte: int
    name: str
    tensor: Any
    is_trained: bool


def overlapping_tensors(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of a trainable parameter and of a tensor that overlaps it in memory, or None.

    An engine moves parameters to other memory, and then the two would no longer share numbers. The
    second tensor may be a parameter, a buffer or an attribute, including attributes in lists and dicts.
    One tensor under two names does not count.
    """
    extents_by_storage = dict[int, list[_Extent]]()
    for extent in _extents(module):
        extents_by_storage.setdefault(_storage_key(extent.tensor), []).append(extent)
    for extents in extents_by_storage.values():
        # Only tensors whose spans intersect can overlap, so the slow exact test runs for them alone.
        in_order = sorted(extents, key=lambda each: (each.begin_byte, each.end_byte, each.name))
        intersecting = list[_Extent]()  # the earlier ones that reach into the current one
        for extent in in_order:
            intersecting = [other for other in intersecting if other.end_byte > extent.begin_byte]
            for other in intersecting:
                if not (extent.is_trained or other.is_trained):
                    continue
                if np.shares_memory(_address_map(other.tensor), _address_map(extent.tensor)):
                    return other.name, extent.name
            intersecting.append(extent)
    return None


def _extents(module: nn.Module) -> Iterator[_Extent]:
    """Yield the extent of every dense tensor of a module once, attributes included."""
    trained_names = {
        id(parameter): name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    seen = set[int]()
    for path, submodule in module.named_modules():
        # The hook of spectral norm writes the normalised weight to an attribute at each call. Before
        # the first call this attribute has the weight itself, which is no overlap, so it is skipped.
        replaced_in_forward = {
            hook.name
            for hook in submodule._forward_pre_hooks.values()
            if isinstance(hook, SpectralNorm)
        }
        skipped = _REGISTRIES | replaced_in_forward
        attributes = {**submodule._parameters, **submodule._buffers, **vars(submodule)}
        for key, value in attributes.items():
            if key in skipped:
                continue
            attribute_name = f"{path}.{key}" if path else key
            for name, tensor in _tensors_in(value, attribute_name, seen):
                if tensor.layout != torch.strided or is_lazy(tensor):
                    continue
                local = getattr(tensor, "_local_tensor", tensor)
                # A trainable parameter has its name in `named_parameters`, wherever it was found.
                yield _Extent(
                    begin_byte=int(local.storage_offset()) * local.element_size(),
                    end_byte=_end_byte(local),
                    name=trained_names.get(id(tensor), name),
                    tensor=local,
                    is_trained=id(tensor) in trained_names,
                )


def _tensors_in(value: object, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in a value, its lists and its dicts, with a name.

    Objects whose id is in `seen` are skipped; the ids of all others are added to it.
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
    if tensor.numel() == 0:
        return int(tensor.storage_offset()) * tensor.element_size()
    last_element = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return int(tensor.storage_offset() + last_element + 1) * tensor.element_size()


def _address_map(tensor: Tensor) -> Any:
    """Return a NumPy array for `np.shares_memory` that has a tensor's shape and strides, in bytes.

    Its address is the tensor's offset in its storage, not a real address: reading the array would crash.
    """
    size = tensor.element_size()
    interface = {
        "shape": (*tensor.shape, size),
        "strides": (*(size * stride for stride in tensor.stride()), 1),
        # Plus 1, because NumPy refuses the address 0.
        "data": (1 + size * tensor.storage_offset(), True),
        "typestr": "|u1",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def uncompiled_module(module: M) -> M:
    """Return the module that `torch.compile` wrapped, or the module itself if it is not wrapped.

    Its submodules may still be wrapped.

    Raises:
        UsageError: `module` is not a module. `torch.compile` returns a function for a module that
            is already compiled.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"model is a {type(module).__name__}: expected a torch.nn.Module")
    if _COMPILED_SUBMODULE not in module._modules:
        return module
    return uncompiled_module(cast(M, module._modules[_COMPILED_SUBMODULE]))


def unwrapped(module: M) -> M:
    """Return the module without `torch.compile`'s wrappers, whose names would be in the state dict.

    The module itself is not changed: modules that contain a wrapper are copied. The copies share
    all tensors.
    """
    module = uncompiled_module(module)
    children = {
        name: None if child is None else unwrapped(child) for name, child in module._modules.items()
    }
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    module_copy = copy.copy(module)
    module_copy._modules = children
    return module_copy


def unwrap_(module: M) -> M:
    """Remove `torch.compile`'s wrappers from a module in place, and return it.

    A capture compiles the whole step instead.
    """
    module = uncompiled_module(module)
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            # Write only where there is a wrapper: TorchScript modules cannot be written to.
            if child is not None and _COMPILED_SUBMODULE in child._modules:
                parent._modules[name] = uncompiled_module(child)
    return module


def blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the module's blocks by name, in order: the layers between its embedding and its head.

    A block is an element of an `nn.ModuleList` or `nn.Sequential`, and has submodules. Nothing inside a
    block is a block. A linear layer is never a block, even if it has an adapter's submodules.
    """
    blocks_by_name: dict[str, nn.Module] = {}
    inside_blocks: set[nn.Module] = set()
    for name, container in module.named_modules():
        # `named_modules` yields the outermost container first.
        if container in inside_blocks or not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        for index, child in container.named_children():
            has_submodules = next(child.children(), None) is not None
            if has_submodules and not isinstance(child, nn.Linear):
                block_name = f"{name}.{index}" if name else index
                blocks_by_name[block_name] = child
                inside_blocks |= set(child.modules())
    return blocks_by_name


def parameter_blocks(module: nn.Module) -> dict[str, str]:
    """Return the name of each parameter's block, by the parameter's name.

    For a parameter before the first block this is "before". For any other parameter that is in no block
    it is "after".
    """
    block_names = list(blocks(module))
    block_of = dict[str, str]()
    name_outside_blocks = "before"
    for name, _ in module.named_parameters():
        block = next((block for block in block_names if name.startswith(f"{block}.")), None)
        if block:
            name_outside_blocks = "after"
        block_of[name] = block or name_outside_blocks
    return block_of


@contextmanager
def running_modules(module: nn.Module) -> Iterator[list[str]]:
    """Yield a list of the modules whose forward pass is running, as `name (Class)`, innermost last.

    The list changes as modules run. A module that raises an error stays in it.
    """
    stack: list[str] = []
    # The module itself, whose name is "", is called by its class.
    names = {child: name or type(module).__name__ for name, child in module.named_modules()}

    def enter(child: nn.Module, _inputs: object) -> None:
        stack.append(f"{names[child]} ({type(child).__name__})")

    def leave(_child: nn.Module, _inputs: object, _output: object) -> None:
        stack.pop()

    with ExitStack() as hooks:
        for child in names:
            # This hook runs before the module's own, so that the module is in the list if one of
            # them raises an error.
            hooks.enter_context(child.register_forward_pre_hook(enter, prepend=True))
            hooks.enter_context(child.register_forward_hook(leave))
        yield stack


@contextmanager
def buffers_kept(*modules: object) -> Iterator[None]:
    """Restore the modules' buffers, such as running means, after the `with` block.

    Buffers that the `with` block replaced by other tensors are restored, too. So are frozen parameters,
    because a forward pass may write to them, for example to those of a teacher. But if the frozen
    parameters are together larger than the trained ones, as the base of adapters is, they are neither
    copied nor restored: the copy would take too much memory. Objects that are not modules, such as a
    loss function, are ignored.
    """
    torch_modules = [module for module in modules if isinstance(module, nn.Module)]
    submodules = [submodule for module in torch_modules for submodule in module.modules()]
    buffers = [
        (owner, name, buffer) for owner in submodules for name, buffer in owner._buffers.items()
    ]
    buffer_copies = [None if buffer is None else buffer.clone() for _, _, buffer in buffers]
    parameters = {
        id(parameter): parameter
        for owner in submodules
        for parameter in owner.parameters(recurse=False)
    }.values()
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    frozen_bytes = sum(parameter.nbytes for parameter in frozen)
    trained_bytes = sum(parameter.nbytes for parameter in parameters) - frozen_bytes
    if frozen_bytes > trained_bytes:
        frozen = []
    frozen_copies = [parameter.detach().clone() for parameter in frozen]
    try:
        yield
    finally:
        for parameter, parameter_copy in zip(frozen, frozen_copies, strict=True):
            # An unchanged parameter is not written: it may lie in a mapped file.
            if not torch.equal(parameter, parameter_copy):
                parameter.data.copy_(parameter_copy)
        for (owner, name, buffer), buffer_copy in zip(buffers, buffer_copies, strict=True):
            owner._buffers[name] = buffer
            if buffer is not None and buffer_copy is not None:
                write_tensor(buffer, buffer_copy)


def write_tensor(tensor: Tensor, value: Tensor) -> None:
    """Copy a value of the same shape into a tensor, which may be expanded.

    torch refuses to write an expanded tensor, so each element in memory is written once.
    """
    if tensor.layout == torch.strided and 0 in tensor.stride():
        # All indices of an expanded dimension, whose stride is 0, are one element: the first is
        # enough.
        distinct = tuple(slice(None if stride else 1) for stride in tensor.stride())
        tensor = tensor[distinct]
        value = value[distinct]
    tensor.copy_(value)


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Restore each submodule's training mode after the `with` block.

    The modes may differ: frozen norms, for example, may be in evaluation mode.
    """
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


def head_of(module: nn.Module) -> Any:
    """Return the layer that computes logits over the vocabulary, or None if it is not found.

    It is found by the names that transformers uses.
    """
    head = getattr(module, "get_output_embeddings", lambda: None)()
    return head if head is not None else getattr(module, "lm_head", None)


def shared_parameters(module: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter that has several names, by the parameter's id."""
    return shared_tensors(module.named_parameters(remove_duplicate=False))


def shared_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[int, list[str]]:
    """Return the names of each tensor that has several names, by the tensor's id."""
    names_by_id: dict[int, list[str]] = {}
    for name, tensor in named_tensors:
        names_by_id.setdefault(id(tensor), []).append(name)
    return {key: names for key, names in names_by_id.items() if len(names) > 1}
