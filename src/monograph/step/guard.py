"""Detect that a module's parameters were changed after a step moved them into its planes."""

from collections.abc import Sequence

from torch import SymInt, Tensor, nn

from monograph.errors import UsageError
from monograph.optim import Plane

# A tensor's storage address, offset, shape and strides.
MemoryRegion = tuple[int, int | SymInt, tuple[int, ...], tuple[int, ...]]


class ParameterGuard:
    """Remembers a module's trainable parameters, as a step left them in its planes.

    If the parameters are replaced, frozen, moved or cast later, the step would silently train memory
    that the module no longer reads, or change weights that should stay the same.

    Attributes:
        module: the module.
        parameters: its trainable parameters, by name.
    """

    def __init__(self, module: nn.Module, planes: Sequence[Plane]):
        self.module = module
        self.parameters = {
            placed.name: placed.parameter for plane in planes for placed in plane.placed
        }
        self._before = trained_memory(module)

    def require_unchanged(self) -> None:
        """Check that the module's parameters are still the same.

        Raises:
            UsageError: a parameter changed; the message names it, and says what to do.
        """
        if trained_memory(self.module) != self._before:
            raise UsageError(
                f"{self._change()} after the step was made: change the module first, and make a new step or engine of "
                "it afterwards"
            )

    def _change(self) -> str:
        """Return what has changed, as the beginning of the error's sentence."""
        now = dict(self.module.named_parameters())
        for name, parameter in self.parameters.items():
            if name not in now:
                return f"{name} was taken out of the module"
            if now[name] is not parameter:
                return f"{name} was replaced by another parameter"
            if not parameter.requires_grad:
                return f"{name} was frozen (requires_grad = False)"
        # Parameters are compared by identity, because a name may belong to another parameter now.
        known = {id(parameter) for parameter in self.parameters.values()}
        for name, parameter in now.items():
            if parameter.requires_grad and id(parameter) not in known:
                return f"{name} became trainable"
        moved = [
            name for name, p in self.parameters.items() if (id(p), memory_of(p)) not in self._before
        ]
        if not moved:  # the same parameters, in other modules
            return "a parameter was moved to another module, tied or untied"
        return f"{moved[0]} was moved, cast or given other memory (.to(), .float(), .data = ...)"


def trained_memory(module: nn.Module) -> list[tuple[int, MemoryRegion]]:
    """Return identity and memory of each trainable parameter, to compare with a later result."""
    parameters = []
    modules_left = [module]
    # Every update calls this, and module.parameters() would take six times as long.
    while modules_left:
        current = modules_left.pop()
        modules_left += (child for child in current._modules.values() if child is not None)
        parameters += [
            (id(p), memory_of(p))
            for p in current._parameters.values()
            if p is not None and p.requires_grad
        ]
    return parameters


def memory_of(parameter: Tensor) -> MemoryRegion:
    """Return where a parameter lies in memory; of a sharded parameter, where this rank's shard lies."""
    local = getattr(parameter, "_local_tensor", parameter)
    return local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride()
