"""Compute linear layers that read the same tensor in one matrix product.

Such layers, for example those of query, key and value, are siblings, and together they are a
family. Their weights lie side by side in memory, so that one view has them all. The layers keep
their names, parameters and gradients.

A family has its layers in the order of their calls. When the first layer is called, it computes the
outputs of all layers, and the family keeps the outputs of the others. Each other layer takes its
output from there if it gets the same input, and otherwise computes the output itself. So the result
is right even if a later call has another order or other inputs.

Shapes: K inputs, N outputs of all siblings together.
"""

import copy
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph import compat
from monograph.graph.inspect import storage_of
from monograph.ops.autograd import Context
from monograph.ops.fused_gradients import FusedGradient, fused_gradient_of, linear


class Sibling(nn.Linear):
    """A linear layer computed together with its siblings.

    `FusedLinears.install` gives a layer this class, and `remove` gives it its own class back.

    Attributes:
        family: the layer and its siblings.
        index_in_family: the layer's index in `family.layers`.
    """

    family: "FusedLinears"
    index_in_family: int

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., the layer's outputs] by `nn.Linear`'s equation."""
        output = self.family.output(self.index_in_family, input)
        return F.linear(input, self.weight, self.bias) if output is None else output

    # `nn.Module` calls these two to move the layer to another dtype or device, and to load a state.
    # Both may give the layer other tensors, which do not lie next to the siblings' tensors.
    def _apply(self, fn: object, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self.family.replace_parameters_of(self.index_in_family)
        return result

    def _load_from_state_dict(self, *arguments: object) -> None:
        super()._load_from_state_dict(*arguments)
        self.family.replace_parameters_of(self.index_in_family)


class _Mode(NamedTuple):
    """The global modes that change a linear layer's output."""

    is_grad_enabled: bool
    is_autocast_enabled: bool
    autocast_dtype: torch.dtype


class _WaitingOutputs(NamedTuple):
    """The outputs that are kept until the other layers are called, and what they were computed from.

    Attributes:
        input: the tensor that the layers read.
        input_version: `version_of(input)` at the time.
        mode: `mode_of(input)` at the time.
        of_others: the outputs of all layers but the first.
    """

    input: Tensor
    input_version: int
    mode: _Mode
    of_others: tuple[Tensor, ...]


class FusedLinears:
    """A family: linear layers that read one tensor, in the order of their calls.

        y = x [W_1; W_2; ...]^T + [b_1; b_2; ...]        y_i = its columns of y

    Attributes:
        layers: the modules.
        weight: [N, K], one view of all weights; None while they do not lie side by side. Each layer
            computes alone then.
        bias: [N], one view of all biases; None if they do not lie side by side, or if there are
            none.
        fused_gradient: the attribute `fused_gradient` of all weights together, see
            `monograph.ops.fused_gradients`; None if one of them does not have it.
    """

    weight: Tensor | None
    bias: Tensor | None
    fused_gradient: FusedGradient | None

    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        self.layers = list(layers)
        self.own_classes = [type(layer) for layer in self.layers]
        self.weights: list[Any] = [layer.weight for layer in self.layers]
        self.biases: list[Any] = [layer.bias for layer in self.layers if layer.bias is not None]
        self.sizes = [len(weight) for weight in self.weights]
        self._waiting: _WaitingOutputs | None = None
        self.move_side_by_side()

    def install(self) -> None:
        """Make the layers compute together."""
        for index, layer in enumerate(self.layers):
            layer.__class__ = Sibling
            layer.family, layer.index_in_family = self, index  # type: ignore[assignment]

    def remove(self) -> None:
        """Make each layer compute alone again; the parameters are not moved."""
        self._waiting = None
        for layer, layer_class in zip(self.layers, self.own_classes, strict=True):
            layer.__class__ = layer_class
            for name in ("family", "index_in_family"):
                vars(layer).pop(name, None)

    def separate_memory(self) -> None:
        """Give each parameter memory of its own again, if the family had moved them together."""
        for parameters, view in ((self.weights, self.weight), (self.biases, self.bias)):
            # Parameters in a step's planes, which do not fill the storage, stay there.
            if view is not None and fills_storage(view):
                for parameter in parameters:
                    parameter.data = parameter.data.clone()

    def replace_parameters_of(self, index: int) -> None:
        """Take over the parameters of one layer, which were moved or replaced.

        A move of the whole model calls this for one layer after another. After the last call all
        parameters have the same dtype and device, and lie side by side again.
        """
        layer = self.layers[index]
        self.weights[index] = layer.weight
        if self.biases:
            self.biases[index] = layer.bias
        self.move_side_by_side()

    def move_side_by_side(self) -> None:
        """Move the parameters next to each other, and update the views.

        They are moved if they have the same dtype and device, and nothing else uses their memory.
        """
        for parameters in (self.weights, self.biases):
            _move_side_by_side(parameters)
        self.update_views()

    def update_views(self) -> None:
        """Set `weight`, `bias` and `fused_gradient` for the memory that the parameters now use."""
        self.weight = _view_of_all(self.weights)
        self.bias = _view_of_all(self.biases)
        self.fused_gradient = None
        if self.weight is None or (self.biases and self.bias is None):
            self.weight = self.bias = None
            return
        fused_gradients = [getattr(weight, "fused_gradient", None) for weight in self.weights]
        if None not in fused_gradients:
            # Each is a pair of the weight that products read, and the total of its gradient.
            weights, totals = zip(*fused_gradients, strict=True)
            self.fused_gradient = FusedGradient(
                _view_of_all(list(weights)),  # type: ignore[arg-type]
                _view_of_all(list(totals)),  # type: ignore[arg-type]
            )

    def output(self, index: int, input: Tensor) -> Tensor | None:
        """Return the output of one layer, or None if the layer must compute it alone."""
        if index == 0:
            self._waiting = None  # may have outputs of an earlier call
            # An inference tensor has no version counter, so a change between the calls of two
            # siblings would not be noticed.
            has_no_version = not torch.compiler.is_compiling() and input.is_inference()
            if not self.views_are_current() or has_no_version:
                return None
            output, *others = self.all_outputs(input)
            self._waiting = _WaitingOutputs(input, version_of(input), mode_of(input), tuple(others))
            return output
        waiting = self._waiting
        if waiting is None:
            return None
        if index + 1 == len(self.layers):
            self._waiting = None  # frees input and outputs now, not at the next call
        is_same_input = (
            waiting.input is input
            and waiting.mode == mode_of(input)
            and waiting.input_version == version_of(input)
        )
        return waiting.of_others[index - 1] if is_same_input else None

    def views_are_current(self) -> bool:
        """Return whether `weight` and `bias` are views of the parameters that the layers have now."""
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
        # The memory of a parameter may have been replaced by an assignment to its `data`.
        is_in_view = storage_of(self.weight) == storage_of(self.weights[0])
        # `torch.func` replaces the parameters by other tensors during a call.
        return is_in_view and adjacent(self.weights) and not compat.in_transform()

    def all_outputs(self, input: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of all layers for one input."""
        bias = _with_gradients(self.bias, self.biases)
        if fused_gradient_of(self):
            output = linear(input, self.weights[0], bias, owner=self)
        else:
            output = F.linear(input, _with_gradients(self.weight, self.weights), bias)
        return output.split(self.sizes, -1)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedLinears":
        """Copy the family, and move the copies of its parameters next to each other."""
        # `deepcopy` copies parameters one by one, so the copies do not lie side by side.
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.weights, copied.biases = copy.deepcopy((self.weights, self.biases), memo)
        copied.sizes = list(self.sizes)
        copied.own_classes = list(self.own_classes)
        copied._waiting = None
        copied.move_side_by_side()
        copied.layers = copy.deepcopy(self.layers, memo)
        return copied


class _SplitGradientContext(Context):
    sizes: list[int]


class _SplitGradient(torch.autograd.Function):
    """Return the view of all parameters; the backward pass splits its gradient among them."""

    @staticmethod
    def forward(ctx: _SplitGradientContext, view: Tensor, *parameters: Tensor) -> Tensor:
        ctx.sizes = [len(parameter) for parameter in parameters]
        return view.view_as(view)

    @staticmethod
    def backward(ctx: _SplitGradientContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *grad.split(ctx.sizes))


def _with_gradients(view: Tensor | None, parameters: list[Any]) -> Any:
    """Return the view of all parameters, whose gradient goes to those that need one."""
    needs_grad = torch.is_grad_enabled() and any(
        parameter.requires_grad for parameter in parameters
    )
    # If no gradient is needed, Dynamo binds the arguments of an `autograd.Function` with
    # `*parameters` wrongly (torch 2.13).
    return _SplitGradient.apply(view, *parameters) if needs_grad else view


def mode_of(input: Tensor) -> _Mode:
    """Return the global modes that change a linear layer's output for an input."""
    device_type = input.device.type
    return _Mode(
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
    )


def version_of(input: Tensor) -> int:
    """Return how often a tensor was changed in place.

    Return 0 for a traced tensor and for an inference tensor, of which the count cannot be read.
    """
    return 0 if torch.compiler.is_compiling() or input.is_inference() else input._version


# ---- where parameters lie in memory --------------------------------------------------------------


def _move_side_by_side(tensors: list[Any]) -> None:
    """Move tensors of one dtype and device next to each other.

    Nothing is moved if the memory of one of them is also used by something else, such as a step's plane
    or a view, because that would still refer to the old memory.
    """
    are_alike = len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1
    if are_alike and all(fills_storage(tensor) for tensor in tensors):
        joined = torch.cat([tensor.detach() for tensor in tensors])
        pieces = joined.split([len(tensor) for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.data = piece


def _view_of_all(tensors: list[Tensor]) -> Tensor | None:
    """Return one view of all tensors if they lie side by side, else None."""
    are_alike = len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1
    if not are_alike or not adjacent(tensors):
        return None
    # This is a view of the first tensor, so autograd notices if the tensor changes between the forward and
    # the backward pass.
    first = tensors[0].detach()
    rows = sum(len(tensor) for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def adjacent(tensors: list[Any]) -> bool:
    """Return whether tensors are contiguous and lie one after the other in one storage."""
    return all(
        storage_of(one) == storage_of(other)
        and one.is_contiguous()
        and other.is_contiguous()
        and one.storage_offset() + one.numel() == other.storage_offset()
        for one, other in pairwise(tensors)
    )


def fills_storage(tensor: Tensor) -> bool:
    """Return whether a tensor fills its storage."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
