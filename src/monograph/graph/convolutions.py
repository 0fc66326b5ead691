"""Compute large convolutions with groups one group after another, in captured graphs on a CPU.

vmap makes one convolution of the convolutions of an ensemble's members. It has a group for each
member, or, if all members read one input, the output channels of all. oneDNN takes up to four times
as long for such a convolution as for the members' own convolutions, unless these are tiny
(dev/log.md), and the results of one member do not lie together in memory. vmap's convolution is the
reference.

Shapes: G groups, B rows, C input and O output channels of a group, and any further dimensions.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg
from torch.fx.node import Argument

# Multiplications of a group from which groups are faster one by one (dev/log.md).
MIN_MULTIPLICATIONS = 2**21
aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_LIBRARY = torch.library.Library("monograph", "FRAGMENT")
_STEPS = "SymInt[] stride, SymInt[] padding, SymInt[] dilation"


def convolution(input_GBC: Tensor, weight_GOC: Tensor, *steps: list[int]) -> Tensor:
    """Return each group's convolution, [G, B, O, ...].

    Args:
        input_GBC: [G, B, C, ...]; or [1, B, C, ...] if all groups read one input.
        weight_GOC: the groups' weights.
        steps: stride, padding and dilation.
    """
    groups = zip(_expand_to_groups(input_GBC, weight_GOC), weight_GOC, strict=True)
    return torch.stack([aten.convolution(*group, None, *steps, False, [0], 1) for group in groups])


def gradients(
    grad_GBO: Tensor, input_GBC: Tensor, weight_GOC: Tensor, wanted: bool, *steps: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `convolution`'s input and weight.

    Args:
        grad_GBO: the gradient of the convolutions.
        input_GBC: see `convolution`.
        weight_GOC: see `convolution`.
        wanted: whether the gradient of the input is computed; if not, it is an empty tensor.
        steps: see `convolution`.
    """
    output_mask = [wanted, True, False]  # input, weight, bias
    input_grads = []
    weight_grads = []
    for group in zip(grad_GBO, _expand_to_groups(input_GBC, weight_GOC), weight_GOC, strict=True):
        input_grad, weight_grad, _ = aten.convolution_backward(
            *group, None, *steps, False, [0], 1, output_mask
        )
        input_grads.append(input_grad)
        weight_grads.append(weight_grad)
    input_grad_GBC = torch.stack(input_grads) if wanted else grad_GBO.new_empty(0)
    return input_grad_GBC, torch.stack(weight_grads)


def _expand_to_groups(input_GBC: Tensor, weight_GOC: Tensor) -> Tensor:
    return input_GBC.expand(len(weight_GOC), *input_GBC.shape[1:])


_LIBRARY.define(f"group_convolution(Tensor input, Tensor weight, {_STEPS}) -> Tensor")
_LIBRARY.define(
    f"group_gradients(Tensor grad, Tensor input, Tensor weight, bool wanted, {_STEPS}) -> (Tensor, Tensor)"
)
_LIBRARY.impl("group_convolution", convolution, "CPU")
_LIBRARY.impl("group_gradients", gradients, "CPU")


@torch.library.register_fake("monograph::group_convolution", lib=_LIBRARY)  # type: ignore[untyped-decorator]  # torch's has no types
def _(input_GBC: Tensor, weight_GOC: Tensor, *steps: list[int]) -> Tensor:
    one = convolution(input_GBC[:1], weight_GOC[:1], *steps)
    return one.new_empty(len(weight_GOC), *one.shape[1:])


@torch.library.register_fake("monograph::group_gradients", lib=_LIBRARY)  # type: ignore[untyped-decorator]  # torch's has no types
def _(
    grad_GBO: Tensor, input_GBC: Tensor, weight_GOC: Tensor, wanted: bool, *steps: list[int]
) -> tuple[Tensor, Tensor]:
    input_grad = input_GBC.new_empty(input_GBC.shape if wanted else 0)
    return input_grad, weight_GOC.new_empty(weight_GOC.shape)


def rewrite(graph: Graph) -> None:
    """Replace a graph's convolutions and their gradients where groups are faster one by one.

    The graph is a forward or a joint graph.
    """
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        inputs, weight, bias, *steps, transposed, _, groups = node.args
        members = groups
        if groups == 1:
            members = max([1, *(_members_sharing_input(user, node) for user in node.users)])
        if bias is not None or transposed or not _is_faster_by_group(node, weight, members):
            continue
        with graph.inserting_before(node):
            operands = [
                _activations_by_group(graph, inputs, groups),
                _weight_by_group(graph, weight, members),
            ]
            convolution_GBO = _add_call(
                graph, torch.ops.monograph.group_convolution.default, *operands, *steps
            )
            _replace_by(graph, node, convolution_GBO)
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        grad, inputs, weight, _, *steps, transposed, _, groups, (wanted, *others) = node.args
        members = groups
        if groups == 1 and not wanted and grad.target in _VIEWS:
            members = _members_sharing_input(grad.args[0], grad)
        has_no_bias_grad = others == [True, False]  # of weight and bias
        if not has_no_bias_grad or transposed or not _is_faster_by_group(grad, weight, members):
            continue
        with graph.inserting_before(node):
            operands = [
                _activations_by_group(graph, grad, members),
                _activations_by_group(graph, inputs, groups),
                _weight_by_group(graph, weight, members),
            ]
            grads = _add_call(
                graph, torch.ops.monograph.group_gradients.default, *operands, wanted, *steps
            )
            for part in [*node.users]:
                index = part.args[1]
                grad_of_groups = _add_call(graph, operator.getitem, grads, index)
                if index == 0:
                    _replace_by(graph, part, grad_of_groups)
                else:
                    shape = list(part.meta["val"].shape)
                    view = _add_call(graph, aten.view.default, grad_of_groups, shape)
                    part.replace_all_uses_with(view)
    graph.eliminate_dead_code()


def _members_sharing_input(split: Node, joined: Node) -> int:
    """Return G if the shape of `split` is [B, G, O, ...] and that of `joined` [B, G O, ...]; else 1.

    Such nodes are the convolution of G members that read one input.
    """
    shape = list(split.meta["val"].shape)
    joined_shape = list(joined.meta["val"].shape)
    if len(shape) < 3 or [shape[0], shape[1] * shape[2], *shape[3:]] != joined_shape:
        return 1
    return int(shape[1])


def _is_faster_by_group(product: Node, weight: Node, groups: int) -> bool:
    out = product.meta["val"]
    if groups == 1 or out.device.type != "cpu" or out.dtype != torch.float32:
        return False
    multiplications = out.numel() // groups * weight.meta["val"][0].numel()
    return bool(multiplications >= MIN_MULTIPLICATIONS)


def _add_call(graph: Graph, target: Callable[..., Any], *args: Argument) -> Node:
    """Add a call to the graph, with the `val` that later passes read."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*map_arg(args, lambda operand: operand.meta["val"]))
    return node


def _weight_by_group(graph: Graph, weight: Node, groups: int) -> Node:
    """Return a weight [G O, C, ...] as [G, O, C, ...]."""
    rows, *rest = weight.meta["val"].shape
    return _add_call(graph, aten.view.default, weight, [groups, rows // groups, *rest])


def _activations_by_group(graph: Graph, node: Node, groups: int) -> Node:
    """Return [B, G C, ...] as [G, B, C, ...], whose memory holds one group after another."""
    rows, channels, *rest = node.meta["val"].shape
    split = _add_call(graph, aten.reshape.default, node, [rows, groups, channels // groups, *rest])
    by_group = _add_call(graph, aten.permute.default, split, _swapped_axes(split))
    return _add_call(graph, aten.clone.default, by_group)


def _replace_by(graph: Graph, node: Node, by_group: Node) -> None:
    """Replace `node` [B, G O, ...] by `by_group` [G, B, O, ...]."""
    by_row = _add_call(graph, aten.permute.default, by_group, _swapped_axes(by_group))
    # A view that splits the groups again reads [B, G, O, ...] itself, because merging the groups
    # would copy all numbers.
    for user in [*node.users]:
        if user.target in _VIEWS and user.meta["val"].shape == by_row.meta["val"].shape:
            user.replace_all_uses_with(by_row)
    if any(user.users for user in node.users) or any(user.op == "output" for user in node.users):
        shape = list(node.meta["val"].shape)
        node.replace_all_uses_with(_add_call(graph, aten.reshape.default, by_row, shape))


def _swapped_axes(node: Node) -> list[int]:
    """Return the order of axes that swaps the first two."""
    return [1, 0, *range(2, node.meta["val"].ndim)]
