"""Notices when the parameters of a module are no longer those that a step was made of."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.optim import Plane


class Held:
    """The trainable parameters of a module at the time when a step moved them into its planes.

    A step that went on after they were replaced, frozen, moved or cast would train memory that the module no longer
    reads, or change what should stay, and say nothing.
    """

    def __init__(self, module: nn.Module, planes: Sequence[Plane]):
        self.module = module
        self.parameters = {slot.name: slot.parameter for plane in planes for slot in plane.slots}
        self._before = trained_memory(module)

    def require(self) -> None:
        """Compare the module with what it was.

        Raises:
            UsageError: with the name of the first parameter that changed, and what to do.
        """
        if trained_memory(self.module) != self._before:
            raise UsageError(
                f"{self._change()} after the step was made: change the module first, and make a new step or engine of "
                "it afterwards"
            )

    def _change(self) -> str:
        now = dict(self.module.named_parameters())
        for name, parameter in self.parameters.items():
            if name not in now:
                return f"{name} was taken out of the module"
            if now[name] is not parameter:
                return f"{name} was replaced by another parameter"
            if not parameter.requires_grad:
                return f"{name} was frozen (requires_grad = False)"
        known = {id(parameter) for parameter in self.parameters.values()}
        for name, parameter in now.items():
            if parameter.requires_grad and id(parameter) not in known:
                return f"{name} became trainable"
        return f"{next(iter(self.parameters))} was moved, cast or given other memory (.to(), .float(), .data = ...)"


def trained_memory(module: nn.Module) -> list[tuple[int, int]]:
    """Which parameters are trainable, and in which memory each lies; equal as long as nobody changed that."""
    found, waiting = [], [module]
    while waiting:  # not module.parameters(), which takes six times as long, in every update
        each = waiting.pop()
        waiting += (child for child in each._modules.values() if child is not None)
        found += [(id(p), memory(p)) for p in each._parameters.values() if p is not None and p.requires_grad]
    return found


def memory(parameter: Tensor) -> int:
    """What identifies the parameter's memory; of a parameter in shards that of its own shard."""
    own = getattr(parameter, "_local_tensor", parameter)
    return int(own.untyped_storage()._cdata)
