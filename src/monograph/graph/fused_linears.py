"""Compute linear layers that read the same tensor in one matrix product.

Their weights lie side by side in memory. The layers keep their names, parameters and gradients. The
first layer that is called computes the outputs of all. Each other layer takes its output if it gets
the same input, and otherwise computes its own output, so the result is always right.

Shapes: K inputs, N outputs of all siblings together.
"""

import copy
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph import compat
from monograph.graph.remat import storage_of
from monograph.ops.autograd import Context
from monograph.ops.fused_gradients import Fused, fused_of, linear


class Sibling(nn.Linear):
    """A linear layer computed together with its siblings.

    `FusedLinears.install` gives a layer this class, and `remove` gives it its own class back.

    Attributes:
        family: the layer and its siblings.
        place: the layer's number in the family.
    """

    family: "FusedLinears"
    place: int

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., the layer's outputs] by `nn.Linear`'s equation."""
        output = self.family.output(self.place, input)
        return F.linear(input, self.weight, self.bias) if output is None else output

    # These two separate the weights: moving a module to another dtype or device, and loading a
    # state by assignment.
    def _apply(self, fn: object, recurse: bool = True) -> Any:
        moved = super()._apply(fn, recurse)
        self.family.adopt(self.place)
        return moved

    def _load_from_state_dict(self, *arguments: object) -> None:
        super()._load_from_state_dict(*arguments)
        self.family.adopt(self.place)


class FusedLinears:
    """Linear layers that read one tensor, in the order of their calls.

        y = x [W_1; W_2; ...]^T + [b_1; b_2; ...]        y_i = its columns of y

    Attributes:
        layers: the modules.
        weight: [N, K], one view of all weights; None while they do not lie side by side. Each layer
            computes alone then.
        bias: [N], one view of all biases; None if they do not lie side by side, or if there are
            none.
        fused: the attribute `fused` of all weights together, see `monograph.ops.fused_gradients`;
            None if one of them does not have it.
    """

    weight: Tensor | None
    bias: Tensor | None
    fused: Fused | None

    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        self.layers = list(layers)
        self.classes = [type(layer) for layer in self.layers]
        self.weights: list[Any] = [layer.weight for layer in self.layers]
        self.biases: list[Any] = [layer.bias for layer in self.layers if layer.bias is not None]
        self.sizes = [len(weight) for weight in self.weights]
        self._left: tuple[Any, ...] | None = None
        self.lay()

    def install(self) -> None:
        """Make the layers compute together."""
        for place, layer in enumerate(self.layers):
            layer.__class__ = Sibling
            layer.family, layer.place = self, place  # type: ignore[assignment]

    def remove(self) -> None:
        """Make each layer compute alone again; the parameters are not moved."""
        self._left = None
        for layer, kind in zip(self.layers, self.classes, strict=True):
            layer.__class__ = kind
            for name in ("family", "place"):
                vars(layer).pop(name, None)

    def part(self) -> None:
        """Give each parameter its own memory, if the family had joined the parameters in memory."""
        for parameters, joined in ((self.weights, self.weight), (self.biases, self.bias)):
            # Parameters in a step's planes, which do not fill the storage, stay there.
            if joined is not None and _fills_storage(joined):
                for parameter in parameters:
                    parameter.data = parameter.data.clone()

    def adopt(self, place: int) -> None:
        """Take over the moved or replaced parameters of the layer at `place`.

        The call for the last layer of the family joins the parameters in memory again.
        """
        layer = self.layers[place]
        self.weights[place] = layer.weight
        if self.biases:
            self.biases[place] = layer.bias
        self.lay()

    def lay(self) -> None:
        """Join the parameters in memory, if they are alike and nothing else uses their memory.

        Then set the attributes as `look` does.
        """
        for parts in (self.weights, self.biases):
            _join(parts)
        self.look()

    def look(self) -> None:
        """Set `weight`, `bias` and `fused` by where the parameters lie now."""
        self.weight = _view_of_all(self.weights)
        self.bias = _view_of_all(self.biases)
        self.fused = None
        fused = [getattr(weight, "fused", None) for weight in self.weights]
        if self.weight is None or (self.biases and self.bias is None):
            self.weight = self.bias = None
            return
        if None not in fused:
            self.fused = Fused(*(_view_of_all(list(parts)) for parts in zip(*fused, strict=True)))  # type: ignore[arg-type]

    def output(self, place: int, input: Tensor) -> Tensor | None:
        """Return the output of the layer at `place`, or None if the layer must compute it alone."""
        # `_left` is (input, three modes, version, outputs of all layers but the first).
        if place == 0:
            self._left = None  # remaining outputs belong to an earlier call
            # An inference tensor has no version counter, so a change between the calls of two
            # siblings would not be noticed.
            is_uncounted = not torch.compiler.is_compiling() and input.is_inference()
            if not self.holds() or is_uncounted:
                return None
            outputs = self.products(input)
            self._left = (input, *mode_of(input), version_of(input), *outputs[1:])
            return outputs[0]
        left = self._left
        if left is None:
            return None
        if place + 1 == len(self.layers):
            self._left = None  # frees input and outputs now, not at the next call
        same = left[0] is input and left[1:4] == mode_of(input) and left[4] == version_of(input)
        return left[4 + place] if same else None

    def holds(self) -> bool:
        """Return whether `weight` and `bias` are made of the parameters that the layers have now."""
        if self.weight is None:
            return False
        if any(
            layer.weight is not weight
            for layer, weight in zip(self.layers, self.weights, strict=True)
        ):
            return False
        if self.biases and any(
            layer.bias is not bias for layer, bias in zip(self.layers, self.biases, strict=True)
        ):
            return False
        if torch.compiler.is_compiling():  # traced code cannot read addresses
            return True
        # `torch.func` replaces the parameters by other tensors during a call.
        in_place = storage_of(self.weight) == storage_of(self.weights[0]) and adjacent(self.weights)
        return in_place and not compat.in_transform()

    def products(self, input: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of all layers for one input."""
        bias = _joined(self.bias, self.biases)
        if fused_of(self):
            return linear(input, self.weights[0], bias, owner=self).split(self.sizes, -1)
        return F.linear(input, _joined(self.weight, self.weights), bias).split(self.sizes, -1)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedLinears":
        """Copy the family, and join the copies of its parameters in memory."""
        # Joined again, because parameters are copied one by one, so copies do not lie side by side.
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.weights, copied.biases = copy.deepcopy((self.weights, self.biases), memo)
        copied.sizes = list(self.sizes)
        copied.classes = list(self.classes)
        copied._left = None
        copied.lay()
        copied.layers = copy.deepcopy(self.layers, memo)
        return copied


class _JoinedContext(Context):
    sizes: list[int]


class _Joined(torch.autograd.Function):
    """Return the view of all parts; the backward pass splits its gradient among the parts."""

    @staticmethod
    def forward(ctx: _JoinedContext, joined: Tensor, *parts: Tensor) -> Tensor:
        ctx.sizes = [len(part) for part in parts]
        return joined.view_as(joined)

    @staticmethod
    def backward(ctx: _JoinedContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *grad.split(ctx.sizes))


def _joined(view_of_all: Tensor | None, parts: list[Any]) -> Any:
    """Return the view of all parts, with gradients of the parts where they need them."""
    # Not without gradients, where Dynamo binds the arguments of an `autograd.Function` with *parts
    # wrongly (torch 2.13).
    needs_grad = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    return _Joined.apply(view_of_all, *parts) if needs_grad else view_of_all


def mode_of(input: Tensor) -> tuple[bool, bool, torch.dtype]:
    """Return the modes that change a linear layer's output.

    Returns:
        Whether gradients are enabled, whether autocast is enabled, and autocast's dtype.
    """
    kind = input.device.type
    return torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def version_of(input: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for traced and inference tensors.

    These two have no readable count.
    """
    return 0 if torch.compiler.is_compiling() or input.is_inference() else input._version


# ---- where parameters lie ------------------------------------------------------------------------


def _join(parts: list[Any]) -> None:
    """Move tensors of one dtype and device next to each other.

    Nothing is moved if something else, such as a step's plane or a view, uses the memory of one of
    them: it would still have the old memory.
    """
    are_alike = len({(part.dtype, part.device) for part in parts}) == 1
    if are_alike and all(_fills_storage(part) for part in parts):
        joined = torch.cat([part.detach() for part in parts])
        for part, piece in zip(parts, joined.split([len(part) for part in parts]), strict=True):
            part.data = piece


def _view_of_all(parts: list[Tensor]) -> Tensor | None:
    """Return one view of all parts if they lie side by side, else None."""
    if not parts or len({(part.dtype, part.device) for part in parts}) > 1 or not adjacent(parts):
        return None
    # A view of the first part, so that autograd notices a change between forward and backward pass.
    first = parts[0].detach()
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def adjacent(parts: list[Any]) -> bool:
    """Return whether contiguous tensors lie one after the other in one storage."""
    return all(
        storage_of(one) == storage_of(other)
        and one.is_contiguous()
        and other.is_contiguous()
        and one.storage_offset() + one.numel() == other.storage_offset()
        for one, other in pairwise(parts)
    )


def _fills_storage(tensor: Tensor) -> bool:
    """Return whether a tensor fills its storage."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
