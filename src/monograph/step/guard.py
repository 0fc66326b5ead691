"""Notice when somebody changes a module's parameters after a step moved them into its planes."""

from collections.abc import Sequence

from torch import SymInt, Tensor, nn

from monograph.errors import UsageError
from monograph.optim import Plane

# Storage, offset, shape and strides.
Memory = tuple[int, int | SymInt, tuple[int, ...], tuple[int, ...]]


class ParameterGuard:
    """The trainable parameters of a module when a step moved them into its planes.

    If they were replaced, frozen, moved or cast afterwards, the step would silently train memory
    that the module no longer reads, or change weights that should stay.
    """

    def __init__(self, module: nn.Module, planes: Sequence[Plane]):
        self.module = module
        self.parameters = {slot.name: slot.parameter for plane in planes for slot in plane.slots}
        self._before = trained_memory(module)

    def require(self) -> None:
        """Check that the module's parameters are still the same.

        Raises:
            UsageError: they are not; the message names the first one that changed, and says what to
                do.
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
        # Parameters are compared by identity, as a name may belong to another parameter by now.
        known = {id(parameter) for parameter in self.parameters.values()}
        for name, parameter in now.items():
            if parameter.requires_grad and id(parameter) not in known:
                return f"{name} became trainable"
        moved = [
            name for name, p in self.parameters.items() if (id(p), memory(p)) not in self._before
        ]
        if not moved:  # the parameters are the same, in other places
            return "a parameter was put in another place, tied or untied"
        return f"{moved[0]} was moved, cast or given other memory (.to(), .float(), .data = ...)"


def trained_memory(module: nn.Module) -> list[tuple[int, Memory]]:
    """Return the identities and memories of the trainable parameters, to compare with an earlier
    result.
    """
    held, waiting = [], [module]
    while waiting:  # module.parameters() would take six times as long, in every update
        part = waiting.pop()
        waiting += (child for child in part._modules.values() if child is not None)
        held += [
            (id(p), memory(p))
            for p in part._parameters.values()
            if p is not None and p.requires_grad
        ]
    return held


def memory(parameter: Tensor) -> Memory:
    """Return a parameter's storage and its place there; for a sharded parameter, those of this
    rank's shard.
    """
    own = getattr(parameter, "_local_tensor", parameter)
    return own.untyped_storage()._cdata, own.storage_offset(), own.shape, own.stride()
