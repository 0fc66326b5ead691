"""Stack modules of one structure: each parameter and buffer holds all members' values, with a
leading member axis.

Shapes: N members.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from monograph.ensemble.agreement import DROPOUTS, agree, computed
from monograph.errors import UsageError
from monograph.step.guard import Memory, memory

AT_A_TIME = 8  # this many members are checked before an update


class Held(NamedTuple):
    """A tensor of the stack, and for each member the module and the name under which it holds its
    part.
    """

    stacked: Tensor
    owners: list[tuple[nn.Module, str]]


class Stack:
    """N modules of one structure.

    They are stacked one parameter at a time, so that no more than one is in memory twice.
    Afterwards they are still ordinary modules, whose tensors are views of the stack, so that
    training the stack trains them.

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
            InputRefused: two modules differ in more than their numbers, or have something that
                torch cannot batch; the message names the first path.
        """
        if not members:
            raise UsageError("an ensemble needs a member: the list of modules is empty")
        if len({id(member) for member in members}) < len(members):
            raise UsageError("a module stands twice among the members: build one for each")
        # This comes before anything is moved, as a refusal must leave the members as they were.
        agree(members)
        self.members = tuple(members)
        self._parts = [_parts(member) for member in members]
        self._held: list[Held] = []
        memo: dict[int, Any] = {}
        # Each tensor's old parts are freed before the next one is stacked, so only one is in memory
        # twice.
        for owners in _tensors(members):
            whole = _stacked([getattr(module, name) for module, name in owners])
            self._held.append(Held(whole, owners))
            self._point(self._held[-1])
            first, name = owners[0]
            memo[id(getattr(first, name))] = whole
        # Attributes computed from parameters at each call are no leaves, so they cannot be copied,
        # and need not be.
        for part in members[0].modules():
            of = [vars(part)[name] for name in computed(part)] + getattr(part, "_flat_weights", [])
            memo |= {id(tensor): None for tensor in of if id(tensor) not in memo}
        # By the memo the copy has stacked tensors in place of the first member's. It goes by
        # identity, so ties stay.
        self.module = copy.deepcopy(members[0], memo)
        # A key-value cache is no tensor, and useless where nothing is generated.
        for part in self.module.modules():
            config = getattr(part, "config", None)
            if config is not None and getattr(config, "use_cache", False):
                config.use_cache = False
        if not self._held:
            raise UsageError(
                "the members have no parameters and no buffers: there is nothing that could differ"
            )
        device = self._held[0].stacked.device
        for path, rates in _rates(members).items():
            own = torch.tensor(rates, dtype=torch.float64, device=device)
            self.module.set_submodule(path, _RatedDropout(self.module.get_submodule(path), own))

    @property
    def size(self) -> int:
        """Return N."""
        return len(self.members)

    def relink(self) -> None:
        """Point the members at the stack again after its parameters have moved."""
        for held in self._held:
            self._point(held)

    def require_views(self, turn: int) -> None:
        """Check that members still hold views of the stack; each turn checks the next few members.

        Raises:
            UsageError: a part, parameter or buffer was replaced, frozen, moved or cast; the message
                names the first.
        """
        # Checking all members would take longer than launching an update, and a change is noticed
        # soon enough.
        for number in {(turn * AT_A_TIME + step) % self.size for step in range(AT_A_TIME)}:
            member = self.members[number]
            changed = None
            for stacked, owners in self._held:
                module, name = owners[number]
                tensor = getattr(module, name, None)
                if not (
                    isinstance(tensor, type(stacked))
                    and tensor.requires_grad == stacked.requires_grad
                    and memory(tensor) == _share(stacked, number)
                ):
                    path = next(
                        (path for path, part in member.named_modules() if part is module), None
                    )
                    changed = changed or (None if path is None else f"{path}.{name}".lstrip("."))
            if changed or _parts(member) != self._parts[number]:
                changed = changed or "a part or parameter"
                raise UsageError(
                    f"{changed} of member {number} was added, replaced, frozen, moved or cast: its ensemble trains "
                    "what it was; make a new ensemble of the members, or engine.freeze([...])"
                )

    def _point(self, held: Held) -> None:
        for number, (module, name) in enumerate(held.owners):
            tensor = getattr(module, name)
            share = held.stacked.detach()[number]
            if isinstance(tensor, nn.Parameter):
                tensor.data = share
                tensor.grad = None
            else:
                module._buffers[name] = share


class _RatedDropout(nn.Module):
    """Dropout with a rate for each member, in a buffer [N] outside of the state dict."""

    def __init__(self, dropout: nn.Module, rates: Tensor):
        super().__init__()
        self.training = dropout.training
        self._function = type(dropout).__name__.lower()
        self.register_buffer("rate", rates, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Do what one member's dropout does."""
        dropped: Tensor = getattr(nn.functional, self._function)(hidden, self.rate, self.training)
        return dropped


def _share(stacked: Tensor, number: int) -> Memory:
    """Return the memory of `stacked[number]`, without an operator for each of many tensors in each
    update.
    """
    storage, offset, shape, stride = memory(stacked)
    return storage, offset + number * stride[0], shape[1:], stride[1:]


def _parts(member: nn.Module) -> list[int]:
    """Return the identities of the member's modules and of their parameters."""
    return [id(item) for part in member.modules() for item in (part, *part._parameters.values())]


def _stacked(tensors: list[Tensor]) -> Tensor:
    whole = torch.stack([tensor.detach() for tensor in tensors])
    first = tensors[0]
    return (
        nn.Parameter(whole, requires_grad=first.requires_grad)
        if isinstance(first, nn.Parameter)
        else whole
    )


def _tensors(members: Sequence[nn.Module]) -> Iterator[list[tuple[nn.Module, str]]]:
    """Yield for each parameter and buffer, tied ones once, the module and name under which each
    member holds it.
    """
    seen = set[int]()
    for modules in zip(*(member.modules() for member in members), strict=True):
        for name, tensor in (*modules[0]._parameters.items(), *modules[0]._buffers.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield [(module, name) for module in modules]


def _rates(members: Sequence[nn.Module]) -> dict[str, list[float]]:
    """Return the members' rates of each dropout module in which they differ, by path."""
    alike = zip(*(member.named_modules() for member in members), strict=True)
    dropouts = (parts for parts in alike if isinstance(parts[0][1], DROPOUTS))
    rates_of = {parts[0][0]: [float(module.p) for _, module in parts] for parts in dropouts}
    return {path: rates for path, rates in rates_of.items() if len(set(rates)) > 1}
