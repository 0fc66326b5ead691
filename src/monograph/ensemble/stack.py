"""Stack modules of one structure: each parameter and buffer holds all members' values, with a
leading member axis.

Shapes: N members.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from monograph.ensemble.agreement import DROPOUTS, hook_attributes, require_stackable
from monograph.errors import UsageError
from monograph.step.guard import MemoryRegion, memory

CHECKED_PER_UPDATE = 8  # the members that `require_views` checks before each update

TensorOwner = tuple[nn.Module, str]  # a module, and the name under which it holds a tensor


class _StackedTensor(NamedTuple):
    """A tensor of the stack.

    Attributes:
        stacked: all members' values, [N, ...].
        owners: for each member, where it holds its part.
    """

    stacked: Tensor
    owners: list[TensorOwner]


class Stack:
    """N modules of one structure.

    They are stacked one parameter at a time, so that no more than one is in memory twice.
    Afterwards they are still ordinary modules, whose tensors are views of the stack. So training
    the stack trains them.

    Attributes:
        members: the modules.
        module: a module like each of them whose parameters and buffers, by the same names, are [N,
            ...]. It cannot be called directly: see `monograph.ensemble.call`.
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
        # What `require_views` compares with: modules and parameters at this moment.
        self._identities = [_identities(member) for member in members]
        self._tensors: list[_StackedTensor] = []
        # The memo of copy.deepcopy: by an object's id, what the copy has in its place.
        memo: dict[int, Any] = {}
        # `_point_members` frees a tensor's old memory before the next tensor is stacked.
        for owners in _tensor_owners(members):
            stacked = _stack([getattr(module, name) for module, name in owners])
            tensor = _StackedTensor(stacked, owners)
            self._tensors.append(tensor)
            self._point_members(tensor)
            first_module, name = owners[0]
            memo[id(getattr(first_module, name))] = stacked
        # Attributes that are computed from parameters at each call cannot be deep-copied, as they
        # are not leaves of autograd. The copy does not need them, so it gets None.
        for part in members[0].modules():
            computed = [vars(part)[name] for name in hook_attributes(part)]
            computed += getattr(part, "_flat_weights", [])  # a recurrent layer's list
            for attribute in computed:
                memo.setdefault(id(attribute), None)
        # The memo puts the stacked tensors in place of the first member's. It goes by identity, so
        # tied tensors stay tied.
        self.module = copy.deepcopy(members[0], memo)
        # Nothing is generated in training. A key-value cache would be useless, and is a result that
        # vmap cannot return.
        for part in self.module.modules():
            config = getattr(part, "config", None)
            if config is not None and getattr(config, "use_cache", False):
                config.use_cache = False
        if not self._tensors:
            raise UsageError(
                "the members have no parameters and no buffers: there is nothing that could differ"
            )
        device = self._tensors[0].stacked.device
        for path, rates in _different_rates(members).items():
            rates_N = torch.tensor(rates, dtype=torch.float64, device=device)
            dropout = _DropoutWithRates(self.module.get_submodule(path), rates_N)
            self.module.set_submodule(path, dropout)

    @property
    def size(self) -> int:
        """Return N."""
        return len(self.members)

    def relink(self) -> None:
        """Point the members at the stack again after its parameters have moved."""
        for tensor in self._tensors:
            self._point_members(tensor)

    def require_views(self, update: int) -> None:
        """Check that members still hold views of the stack.

        Each update checks the next few members: checking all of them would take longer than
        launching an update, and this notices a change soon enough.

        Args:
            update: the update's index.

        Raises:
            UsageError: a part, parameter or buffer was replaced, frozen, moved or cast; the message
                names the first.
        """
        start = update * CHECKED_PER_UPDATE
        numbers = {(start + step) % self.size for step in range(CHECKED_PER_UPDATE)}
        for number in numbers:
            member = self.members[number]
            changed_name = None
            for stacked, owners in self._tensors:
                module, name = owners[number]
                tensor = getattr(module, name, None)
                is_view = (
                    isinstance(tensor, type(stacked))
                    and tensor.requires_grad == stacked.requires_grad
                    and memory(tensor) == _view_memory(stacked, number)
                )
                if not is_view and changed_name is None:
                    # The owner itself may have been replaced. Then it has no path.
                    paths = [path for path, part in member.named_modules() if part is module]
                    if paths:
                        changed_name = f"{paths[0]}.{name}".lstrip(".")
            if changed_name is not None or _identities(member) != self._identities[number]:
                changed_name = changed_name or "a part or parameter"
                raise UsageError(
                    f"{changed_name} of member {number} was added, replaced, frozen, moved or cast, but its ensemble "
                    "trains what the member held before: make a new ensemble of the members; to freeze a member, use "
                    "engine.freeze([...])"
                )

    def _point_members(self, tensor: _StackedTensor) -> None:
        """Make each member's tensor a view of the stack, and free its gradient."""
        for number, (module, name) in enumerate(tensor.owners):
            view = tensor.stacked.detach()[number]
            held = getattr(module, name)
            if isinstance(held, nn.Parameter):
                held.data = view
                held.grad = None
            else:
                module._buffers[name] = view


class _DropoutWithRates(nn.Module):
    """Dropout with a rate for each member.

    Attributes:
        rate: the rates, a buffer [N] outside of the state dict.
    """

    def __init__(self, dropout: nn.Module, rates_N: Tensor):
        super().__init__()
        self.training = dropout.training
        self._function = type(dropout).__name__.lower()  # Dropout1d -> dropout1d
        self.register_buffer("rate", rates_N, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply one member's dropout. It runs inside vmap, where `rate` is that member's, 0-d."""
        # The function is looked up at each call, as `Members.context` replaces it.
        dropped: Tensor = getattr(nn.functional, self._function)(hidden, self.rate, self.training)
        return dropped


def _view_memory(stacked: Tensor, number: int) -> MemoryRegion:
    """Return `memory(stacked[number])`. It is computed without making the view, as this runs for
    many tensors in each update.
    """
    storage, offset, shape, stride = memory(stacked)
    return storage, offset + number * stride[0], shape[1:], stride[1:]


def _identities(member: nn.Module) -> list[int]:
    """Return the ids of the member's modules and of their parameters."""
    return [id(item) for part in member.modules() for item in (part, *part._parameters.values())]


def _stack(tensors: list[Tensor]) -> Tensor:
    """Return the members' tensors as one; it is a parameter if they are parameters."""
    stacked = torch.stack([tensor.detach() for tensor in tensors])
    first = tensors[0]
    if isinstance(first, nn.Parameter):
        return nn.Parameter(stacked, requires_grad=first.requires_grad)
    return stacked


def _tensor_owners(members: Sequence[nn.Module]) -> Iterator[list[TensorOwner]]:
    """Yield for each parameter and buffer where each member holds it. A tied tensor is yielded
    once.
    """
    seen = set[int]()
    for modules in zip(*(member.modules() for member in members), strict=True):
        for name, tensor in (*modules[0]._parameters.items(), *modules[0]._buffers.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield [(module, name) for module in modules]


def _different_rates(members: Sequence[nn.Module]) -> dict[str, list[float]]:
    """Return, by path, the members' rates of each dropout module in which they differ."""
    different = {}
    for named in zip(*(member.named_modules() for member in members), strict=True):
        path, first = named[0]
        if not isinstance(first, DROPOUTS):
            continue
        rates = [float(module.p) for _, module in named]
        if len(set(rates)) > 1:
            different[path] = rates
    return different
