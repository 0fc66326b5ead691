"""Stack modules of one structure: each parameter and buffer holds all members' values, with a
leading member axis.

A tensor is not stacked if all members have it at the same place in memory and nothing changes it. This
holds for frozen parameters, and for buffers outside of the state dict. So N sets of adapters need only one
base.

Shapes: N members.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from monograph.ensemble.agreement import hook_attributes, require_stackable
from monograph.ensemble.variations import put_differences_into
from monograph.errors import UsageError
from monograph.step.guard import MemoryRegion, memory_of

CHECKED_PER_UPDATE = 4  # the number of members that `require_views` checks before each update


class _TensorLocation(NamedTuple):
    """Where a member has a parameter or buffer.

    Attributes:
        module: the member, or the part of it that has the tensor.
        name: the name under which this module has it.
    """

    module: nn.Module
    name: str

    def tensor(self) -> Tensor:
        """Return the tensor."""
        tensor: Tensor = getattr(self.module, self.name)
        return tensor


class _StackedTensor(NamedTuple):
    """A parameter or buffer of all members.

    Attributes:
        stacked: all members' values, [N, ...]. Smaller ones are padded with zeros. If the members share
            the tensor, it is that tensor itself, [...].
        locations: for each member, where it has its view of `stacked`.
        shapes: for each member, the shape of its view; a lower rank of adapters makes it smaller.
        is_shared: whether the members share one tensor.
    """

    stacked: Tensor
    locations: list[_TensorLocation]
    shapes: list[torch.Size]
    is_shared: bool


class Stack:
    """The parameters and buffers of N modules of one structure, stacked.

    The modules remain ordinary modules, whose tensors become views of the stack. So training the
    stack trains them. They are stacked one tensor at a time, so that no more than one is in memory
    twice.

    Attributes:
        members: the modules.
        module: a module of the same structure, whose parameters and buffers have the same names. They
            are [N, ...], or the members' own tensors if all members share them. It cannot be called
            directly: see `monograph.ensemble.call`.
        shared: the ids of the tensors that all members share.
    """

    def __init__(self, members: Sequence[nn.Module]):
        """Stack modules.

        Args:
            members: one or more.

        Raises:
            UsageError: there is no module, or a module is listed twice.
            InputRefused: two modules differ in more than the numbers in their tensors, or have
                something that torch cannot batch; the message names the first path.
        """
        if not members:
            raise UsageError("an ensemble needs a member: the list of modules is empty")
        if len({id(member) for member in members}) < len(members):
            raise UsageError("a module stands twice among the members: build one for each")
        # The check comes before anything is moved, as a refusal must leave the members unchanged.
        require_stackable(members)
        self.members = tuple(members)
        # `require_views` compares the members' modules and parameters with these.
        self._identities = [_identities(member) for member in members]
        self._tensors: list[_StackedTensor] = []
        for locations in _tensor_locations(members):
            is_shared = _is_shared(locations)
            member_tensors = [location.tensor() for location in locations]
            stacked = member_tensors[0] if is_shared else _stack(member_tensors)
            shapes = [member_tensor.shape for member_tensor in member_tensors]
            # Otherwise this list would keep the members' old tensors in memory.
            del member_tensors
            tensor = _StackedTensor(stacked, locations, shapes, is_shared)
            self._tensors.append(tensor)
            # This frees the tensor's old memory before the next tensor is stacked.
            self._point_members(tensor)
        if all(tensor.is_shared for tensor in self._tensors):
            raise UsageError(
                "the members have no parameters and no buffers of their own: there is nothing that could differ"
            )
        self.shared = frozenset(id(tensor.stacked) for tensor in self._tensors if tensor.is_shared)
        self.module = _copy_with_stacked_tensors(members[0], self._tensors)
        # Nothing is generated in training. A key-value cache would be useless, and is a result that
        # vmap cannot return.
        for part in self.module.modules():
            config = getattr(part, "config", None)
            if config is not None and getattr(config, "use_cache", False):
                config.use_cache = False
        # Members may also differ in dropout rates and in the scales of adapters, which are no tensors.
        put_differences_into(self.module, members)

    @property
    def size(self) -> int:
        """Return N."""
        return len(self.members)

    def padded_parameters(self) -> list[str]:
        """Return the names of the parameters that are smaller in some members than in others."""
        shapes = [
            {name: parameter.shape for name, parameter in member.named_parameters()}
            for member in self.members
        ]
        return [
            name
            for name, shape in shapes[0].items()
            if any(others[name] != shape for others in shapes)
        ]

    def relink(self) -> None:
        """Point the members at the stack again after its parameters have moved."""
        for tensor in self._tensors:
            self._point_members(tensor)

    def require_views(self, update: int) -> None:
        """Check that the tensors of members are still views of the stack.

        Each update checks the next CHECKED_PER_UPDATE members. To check all of them would take longer
        than to launch an update. This way, a change is still noticed within N / CHECKED_PER_UPDATE
        updates.

        Args:
            update: the update's index.

        Raises:
            UsageError: a part, parameter or buffer was replaced, frozen, moved or cast; the message
                names the first.
        """
        start = update * CHECKED_PER_UPDATE
        numbers = {(start + step) % self.size for step in range(CHECKED_PER_UPDATE)}
        regions = [memory_of(tensor.stacked) for tensor in self._tensors]
        for number in numbers:
            changed_name = self._changed_tensor(number, regions)
            has_other_parts = _identities(self.members[number]) != self._identities[number]
            if changed_name is not None or has_other_parts:
                changed_name = changed_name or "a part or parameter"
                raise UsageError(
                    f"{changed_name} of member {number} was added, replaced, frozen, moved or cast, but its ensemble "
                    "trains what the member held before: make a new ensemble of the members; to freeze a member, use "
                    "engine.freeze([...])"
                )

    def _changed_tensor(self, number: int, regions: Sequence[MemoryRegion]) -> str | None:
        """Return the name of a member's first tensor that is no view of the stack any more.

        The result is None if all are views. It is also None if the module that had the tensor was replaced:
        then the module has no path in the member, and the change is noticed by `_identities`.

        Args:
            number: the member's number.
            regions: where the stacked tensors are in memory.
        """
        for stacked_tensor, region in zip(self._tensors, regions, strict=True):
            stacked, locations, shapes, is_shared = stacked_tensor
            module, name = locations[number]
            # Read from the dictionaries, since `getattr` of a module searches three of them.
            tensor: Tensor | None = module._parameters.get(name)
            if tensor is None:
                tensor = module._buffers.get(name)
            expected_region = region if is_shared else _view_memory(region, number, shapes[number])
            is_view = (
                isinstance(tensor, type(stacked))
                and tensor.requires_grad == stacked.requires_grad
                and memory_of(tensor) == expected_region
            )
            if not is_view:
                for path, part in self.members[number].named_modules():
                    if part is module:
                        return f"{path}.{name}".lstrip(".")
        return None

    def _point_members(self, tensor: _StackedTensor) -> None:
        """Make each member's tensor a view of the stack, and free its gradient."""
        if tensor.is_shared:
            return
        for number, location in enumerate(tensor.locations):
            member_tensor = location.tensor()
            view = member_view(tensor.stacked.detach(), number, tensor.shapes[number])
            if isinstance(member_tensor, nn.Parameter):
                member_tensor.data = view
                member_tensor.grad = None
            else:
                location.module._buffers[location.name] = view


def member_view(stacked: Tensor, number: int, shape: torch.Size) -> Tensor:
    """Return a member's view of a stacked tensor, of the shape that the tensor has in the member.

    Args:
        stacked: [N, ...].
        number: the member's number.
        shape: the tensor's shape in this member. It may be smaller than the shape in `stacked`, if the
            member's adapters have a lower rank.
    """
    return stacked[number][tuple(slice(size) for size in shape)]


def _view_memory(region: MemoryRegion, number: int, shape: torch.Size) -> MemoryRegion:
    """Return `memory_of(member_view(stacked, number, shape))` for a stacked tensor at `region`,
    without making this view: it takes time, and this runs for many tensors in each update.
    """
    storage, offset, _, stride = region
    return storage, offset + number * stride[0], shape, stride[1:]


def _identities(member: nn.Module) -> list[int]:
    """Return the ids of the member's modules and of their parameters."""
    ids = []
    modules_left = [member]
    # Every update calls this, and member.modules() would take several times as long.
    while modules_left:
        module = modules_left.pop()
        ids.append(id(module))
        ids += map(id, module._parameters.values())
        modules_left += (child for child in module._modules.values() if child is not None)
    return ids


def _is_shared(locations: Sequence[_TensorLocation]) -> bool:
    """Return whether several members share a tensor that nothing changes.

    Training changes parameters that require gradients. A forward pass may change buffers, such as a
    batch norm's statistics, but such buffers are in the state dict. A buffer outside of the state dict
    counts as constant.
    """
    if len(locations) == 1:
        return False
    module, name = locations[0]
    tensors = [location.tensor() for location in locations]
    if name in module._parameters:
        is_constant = not tensors[0].requires_grad
    else:
        # A buffer that is not in the state dict.
        is_constant = name in module._non_persistent_buffers_set
    return is_constant and len({memory_of(tensor) for tensor in tensors}) == 1


def _stack(tensors: list[Tensor]) -> Tensor:
    """Return the members' tensors as one, smaller ones with zeros at the end of their axes. It is a
    parameter if they are parameters.
    """
    largest = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    stacked = torch.stack([_padded(tensor.detach(), largest) for tensor in tensors])
    first = tensors[0]
    if isinstance(first, nn.Parameter):
        return nn.Parameter(stacked, requires_grad=first.requires_grad)
    return stacked


def _padded(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of this shape: the given one, and zeros after it along each axis."""
    if list(tensor.shape) == list(shape):
        return tensor
    padded = tensor.new_zeros(shape)
    padded[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded


def _copy_with_stacked_tensors(member: nn.Module, tensors: list[_StackedTensor]) -> nn.Module:
    """Return a copy of the first member that has the stacked tensors in place of its own.

    Args:
        member: the first member.
        tensors: the stacked tensors, and the shared ones. The copy has these tensors themselves.
    """
    # The memo of copy.deepcopy: {an object's id: what the copy has in the object's place}. A tied tensor is
    # one object, so it stays tied.
    memo: dict[int, Any] = {id(tensor.locations[0].tensor()): tensor.stacked for tensor in tensors}
    # Some attributes are tensors that are computed from parameters at each call, such as the weight of a
    # layer with a weight norm. They cannot be deep-copied, as they are not leaves of autograd. The copy does
    # not need them, so it gets None.
    for part in member.modules():
        computed = [vars(part)[name] for name in hook_attributes(part)]
        computed += getattr(part, "_flat_weights", [])  # a recurrent layer's list
        for attribute in computed:
            memo.setdefault(id(attribute), None)
    return copy.deepcopy(member, memo)


def _tensor_locations(members: Sequence[nn.Module]) -> Iterator[list[_TensorLocation]]:
    """Yield for each parameter and buffer its location in each member.

    A tied tensor has several locations in a member; only the first one is yielded.
    """
    seen = set[int]()
    # The modules at the same path of all members.
    for modules in zip(*(member.modules() for member in members), strict=True):
        for name, tensor in (*modules[0]._parameters.items(), *modules[0]._buffers.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield [_TensorLocation(module, name) for module in modules]
