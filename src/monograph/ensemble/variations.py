"""Members may differ in the numbers in their tensors, and in the few other things that this file lists: the
rates of dropout, and the scale and rank of adapters.

Shapes: N members.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from monograph.graph.lora import FACTORS, Adapted, AdaptedExperts

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
ADAPTED_LAYERS = (Adapted, AdaptedExperts)


def may_differ_in_shape(module: nn.Module) -> bool:
    """Return whether members may have this module's parameters in different shapes.

    Only the matrices A and B of adapters may, because members may have different ranks. In the stack, all
    members' matrices are as large as the largest. The rows of A and the columns of B beyond a member's rank
    are zero. They stay zero: the gradient of such a row is a product with the zeros of B's column, and the
    other way round.
    """
    return isinstance(module, FACTORS)


def varying_attributes(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's attributes in which members may differ."""
    if isinstance(module, DROPOUTS):
        return frozenset(["p"])
    if isinstance(module, ADAPTED_LAYERS):
        return frozenset(["scale"])
    if isinstance(module, FACTORS):
        return frozenset(["in_features", "out_features"])
    return frozenset()


class DropoutWithRates(nn.Module):
    """The dropout module of a stack whose members have different rates.

    Attributes:
        rate: the rates, a buffer [N] outside of the state dict.
        p: the largest rate. A module may read it to see whether there is dropout.
    """

    def __init__(self, dropout: nn.Module, rates: Sequence[float], device: torch.device):
        super().__init__()
        self.p = max(rates)
        self.training = dropout.training
        self._function = type(dropout).__name__.lower()  # Dropout1d -> dropout1d
        rates_N = torch.tensor(rates, dtype=torch.float64, device=device)
        self.register_buffer("rate", rates_N, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply one member's dropout. It runs inside vmap, where `rate` is that member's, 0-d."""
        # The function is looked up at each call, as `MemberCaller.context` replaces it.
        dropped: Tensor = getattr(nn.functional, self._function)(hidden, self.rate, self.training)
        return dropped


def put_differences_into(stack: nn.Module, members: Sequence[nn.Module]) -> None:
    """Give the module of a stack the values in which its members differ, as buffers [N].

    Args:
        stack: the module whose tensors are the members' stacked ones.
        members: the members.
    """
    for path, rates in _differing(members, DROPOUTS, lambda dropout: dropout.p).items():
        dropout = stack.get_submodule(path)
        device = next(stack.parameters()).device
        stack.set_submodule(path, DropoutWithRates(dropout, rates, device))
    for path, scales in _differing(members, ADAPTED_LAYERS, lambda layer: layer.scale).items():
        layer: Any = stack.get_submodule(path)
        A = layer.lora_A.weight
        del layer.scale
        # Inside vmap the buffer is 0-d. It has A's dtype, so that a product with it is rounded like one
        # with a number.
        scales_N = torch.tensor(scales, dtype=A.dtype, device=A.device)
        layer.register_buffer("scale", scales_N, persistent=False)


def _differing(
    members: Sequence[nn.Module], kinds: tuple[type[nn.Module], ...], value: Callable[[Any], float]
) -> dict[str, list[float]]:
    """Return, by path, the members' values of each module of these kinds in which they differ."""
    different = {}
    for named_modules in zip(*(member.named_modules() for member in members), strict=True):
        path, first = named_modules[0]
        if not isinstance(first, kinds):
            continue
        values = [float(value(module)) for _, module in named_modules]
        if len(set(values)) > 1:
            different[path] = values
    return different
