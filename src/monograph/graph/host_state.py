"""What the host knows of modules and may decide by: a captured graph goes on with what it was at the capture."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

PLAIN = (bool, int, float, str, type(None))


class HostState:
    """The plain values, the tensors' identities and the `requires_grad` of all parts of modules, as they are now.

    Numbers in tensors are not looked at: they may change, as a graph reads them where they are. What a function keeps
    outside of its owners, in a global variable or on a class, is not seen.
    """

    def __init__(self, *owners: Any, **named: Any):
        """Of owners: modules with all of their parts, and other objects with attributes.

        Args:
            owners: the objects.
            named: further attributes that must stay the objects they are: name of the attribute = whose it is.
        """
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        self._names: list[tuple[dict[str, Any], frozenset[str]]] = []
        self._gradients: list[tuple[nn.Parameter, bool]] = []
        for owner in owners:
            for part in owner.modules() if isinstance(owner, nn.Module) else (owner,):
                self._look(part)
        self._values += [(vars(owner), name, vars(owner).get(name)) for name, owner in named.items()]

    def _look(self, part: Any) -> None:
        held = getattr(part, "__dict__", {})
        tensors = {name: value for name, value in held.items() if isinstance(value, Tensor)}
        plain = {name: value for name, value in held.items() if isinstance(value, PLAIN)}
        self._values += [(held, name, value) for name, value in (tensors | plain).items()]
        self._names.append((held, frozenset(held)))
        if isinstance(part, nn.Module):
            for registered in (part._parameters, part._buffers):
                self._values += [(registered, name, value) for name, value in registered.items()]
            self._gradients += [(p, p.requires_grad) for p in part._parameters.values() if p is not None]

    def changed(self) -> str | None:
        """The name of an attribute that is not what it was or is new, None if there is none."""
        for held, name, value in self._values:
            now = held.get(name)
            if now is not value and (isinstance(value, Tensor) or type(now) is not type(value) or now != value):
                return name
        for held, names in self._names:
            if len(held) != len(names):
                return min(held.keys() ^ names)
        return "requires_grad" if any(p.requires_grad is not flag for p, flag in self._gradients) else None
