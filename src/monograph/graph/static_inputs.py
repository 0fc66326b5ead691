"""A function of a batch, replayed: every batch is copied to where the capture read the first one.

A captured graph goes on with what the host knew of its modules at the capture, and decided by (`HostState`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from monograph import compat
from monograph.graph.replay import NotReplayable, Recorder, Replays

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


MOST = 4  # different shapes of a batch that are captured, and captures that a change on the host makes void


class StaticInputs:
    """`function(batch)`, whose only effect is on device memory, called at first and replayed from then on.

        copy the batch's tensors to the buffers of its shapes;  replay what function(buffers) launched

    A batch may be anything that torch's pytrees know, of tensors on the device and plain values. What cannot be
    replayed is called, and `announce` gets the reason in one line.
    """

    def __init__(
        self,
        function: Callable[[Any], None],
        recorder: Recorder,
        device: torch.device,
        host: Callable[[], HostState],
        announce: Callable[[str], None],
    ):
        """Prepare; nothing is allocated before the first batch.

        Args:
            function: what to run on a batch.
            recorder: captures it.
            device: where a batch's tensors are.
            host: looks at what the function decides by; when that has changed the function is captured anew.
            announce: gets each reason for a call once.
        """
        self.function, self._device, self._host, self._announce = function, device, host, announce
        self._replays = Replays(self._on_buffers, recorder)
        self._inputs: dict[Hashable, tuple[Any, list[Tensor]]] = {}
        self._seen: HostState | None = None
        self._changed, self._voided = "", 0
        self._stopped = False
        self._said = set[str]()

    @property
    def captured(self) -> int:
        """How many shapes of a batch are replayed."""
        return self._replays.captured

    def give_back(self) -> bool:
        """Free all memory; what held a graph is only called from then on, and the answer is True."""
        held = self.captured > 0
        self._stopped |= held
        self._forget()
        return held

    def __call__(self, batch: Any) -> None:
        """Run the function on a batch."""
        if self._stopped or compat.without_numbers():
            self.function(batch)
            return
        self._void_if_changed()
        leaves, form = tree_flatten(batch)
        variant = (str(form), *(_bound(leaf) for leaf in leaves))
        if obstacle := self._obstacle(variant, leaves):
            self._say(obstacle)
            self.function(batch)
            return
        if variant not in self._inputs:
            own = [torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self._inputs[variant] = tree_unflatten(own, form), own
        for buffer, leaf in zip(self._inputs[variant][1], leaves, strict=True):
            if isinstance(leaf, Tensor):
                buffer.copy_(leaf)
        try:
            self._replays.run(1, variant)
        except NotReplayable as reason:
            self._stop(str(reason))

    def _on_buffers(self, variant: Hashable) -> None:
        self.function(self._inputs[variant][0])

    def _obstacle(self, variant: Hashable, leaves: list[Any]) -> str | None:
        """Why this batch is only to be called with."""
        if self._voided > MOST:
            self._stopped = True
            return f"{self._changed} is another from batch to batch: keep it in a tensor"
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *PLAIN)):
                return f"a batch holds a {type(leaf).__name__}"
            if isinstance(leaf, Tensor) and leaf.device != self._device:
                return f"a batch holds a tensor on {leaf.device}, where the host may read it"
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                return "a batch holds a tensor that wants a gradient"
        full = variant not in self._inputs and len(self._inputs) == MOST
        return f"batches have more than {MOST} shapes, the others" if full else None

    def _void_if_changed(self) -> None:
        """Forget what was captured when the host has changed what the function decides by."""
        if changed := self._seen and self._seen.changed():
            self._forget()
            self._changed, self._voided = changed, self._voided + 1
        self._seen = self._seen or self._host()

    def _stop(self, reason: str) -> None:
        self._stopped = True
        self._forget()
        self._say(reason)

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            self._announce(reason)

    def _forget(self) -> None:
        self._replays.forget()
        self._inputs.clear()
        self._seen = None


def _bound(leaf: Any) -> Hashable:
    """What a graph is bound to, of a tensor or another part of a batch."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)
