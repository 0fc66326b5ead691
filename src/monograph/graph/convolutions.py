"""Compute the large convolutions of an ensemble's members one member after another, in captured
graphs on a CPU.

vmap computes the convolutions of all members as one:
- If each member has its own input, the convolution has a group for each member: its input is
  [B, G C, ...], and its output is [B, G O, ...].
- If all members read the same input, the convolution has no groups. Its input is [B, C, ...], and
  its output is [B, G O, ...], too.

oneDNN takes up to four times as long for this convolution as for one convolution of each member, unless
these are tiny (dev/log.md). Also, the results of one member do not lie together in memory. In this file
each member is called a group in both cases. vmap's convolution is the reference.

Shapes: G groups (members), B rows, C input and O output channels of a group, and any further
dimensions.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg
from torch.fx.node import Argument

# From this number of multiplications in a group on, computing group by group is faster
# (dev/log.md).
MIN_MULTIPLICATIONS = 2**21
aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_LIBRARY = torch.library.Library("monograph", "FRAGMENT")
_GEOMETRY = "SymInt[] stride, SymInt[] padding, SymInt[] dilation"


def convolution(input_GBC: Tensor, weight_GOC: Tensor, *geometry: list[int]) -> Tensor:
    """Return each group's convolution, [G, B, O, ...].

    Args:
        input_GBC: [G, B, C, ...]; or [1, B, C, ...] if all groups read the same input.
        weight_GOC: the groups' weights.
        geometry: stride, padding and dilation.
    """
    bias, transposed, output_padding, groups = None, False, [0], 1
    return torch.stack(
        [
            aten.convolution(input, weight, bias, *geometry, transposed, output_padding, groups)
            for input, weight in zip(
                _expand_to_groups(input_GBC, weight_GOC), weight_GOC, strict=True
            )
        ]
    )


def gradients(
    grad_GBO: Tensor,
    input_GBC: Tensor,
    weight_GOC: Tensor,
    needs_input_grad: bool,
    *geometry: list[int],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `convolution`'s input and weight.

    Args:
        grad_GBO: the gradient of the convolutions.
        input_GBC: see `convolution`.
        weight_GOC: see `convolution`.
        needs_input_grad: whether the gradient of the input is computed; if not, an empty tensor is
            returned for it.
        geometry: see `convolution`.
    """
    bias_sizes, transposed, output_padding, groups = None, False, [0], 1
    output_mask = [needs_input_grad, True, False]  # gradients of input, weight, bias
    input_grads = []
    weight_grads = []
    for grad, input, weight in zip(
        grad_GBO, _expand_to_groups(input_GBC, weight_GOC), weight_GOC, strict=True
    ):
        input_grad, weight_grad, _ = aten.convolution_backward(
            grad,
            input,
            weight,
            bias_sizes,
            *geometry,
            transposed,
            output_padding,
            groups,
            output_mask,
        )
        input_grads.append(input_grad)
        weight_grads.append(weight_grad)
    input_grad_GBC = torch.stack(input_grads) if needs_input_grad else grad_GBO.new_empty(0)
    return input_grad_GBC, torch.stack(weight_grads)


def _expand_to_groups(input_GBC: Tensor, weight_GOC: Tensor) -> Tensor:
    """Return an input for each group, without a copy; a shared input [1, B, C, ...] is repeated."""
    return input_GBC.expand(len(weight_GOC), *input_GBC.shape[1:])


_LIBRARY.define(f"group_convolution(Tensor input, Tensor weight, {_GEOMETRY}) -> Tensor")
_LIBRARY.define(
    "group_gradients(Tensor grad, Tensor input, Tensor weight, bool needs_input_grad, "
    f"{_GEOMETRY}) -> (Tensor, Tensor)"
)
_LIBRARY.impl("group_convolution", convolution, "CPU")
_LIBRARY.impl("group_gradients", gradients, "CPU")


@torch.library.register_fake("monograph::group_convolution", lib=_LIBRARY)  # type: ignore[untyped-decorator]  # torch's has no types
def _(input_GBC: Tensor, weight_GOC: Tensor, *geometry: list[int]) -> Tensor:
    first_1BO = convolution(input_GBC[:1], weight_GOC[:1], *geometry)
    return first_1BO.new_empty(len(weight_GOC), *first_1BO.shape[1:])


@torch.library.register_fake("monograph::group_gradients", lib=_LIBRARY)  # type: ignore[untyped-decorator]  # torch's has no types
def _(
    grad_GBO: Tensor,
    input_GBC: Tensor,
    weight_GOC: Tensor,
    needs_input_grad: bool,
    *geometry: list[int],
) -> tuple[Tensor, Tensor]:
    input_grad = input_GBC.new_empty(input_GBC.shape if needs_input_grad else 0)
    return input_grad, weight_GOC.new_empty(weight_GOC.shape)


def rewrite(graph: Graph) -> None:
    """Replace a graph's convolutions and their gradients where group by group is faster.

    The graph is a forward or a joint graph.
    """
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        _rewrite_convolution(graph, node)
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        _rewrite_gradients(graph, node)
    graph.eliminate_dead_code()


def _rewrite_convolution(graph: Graph, node: Any) -> None:
    """Replace a convolution by `convolution`, if that is faster."""
    inputs, weight, bias, *geometry, transposed, _, groups = node.args
    members = groups
    if groups == 1:
        # If members share the input, a node that reads the output splits it by members.
        members = max([1, *(_members_by_split(user, node) for user in node.users)])
    if bias is not None or transposed or not _is_faster_by_group(node, weight, members):
        return
    with graph.inserting_before(node):
        operands = [
            _activations_by_group(graph, inputs, groups),  # [1, B, C, ...] if the input is shared
            _weight_by_group(graph, weight, members),
        ]
        convolution_GBO = _add_call(
            graph, torch.ops.monograph.group_convolution.default, *operands, *geometry
        )
        _replace_by(graph, node, convolution_GBO)


def _rewrite_gradients(graph: Graph, node: Any) -> None:
    """Replace the gradients of a convolution by `gradients`, if that is faster."""
    grad, inputs, weight, _, *geometry, transposed, _, groups, output_mask = node.args
    needs_input_grad, needs_weight_grad, needs_bias_grad = output_mask
    members = groups
    # If members share the input, their gradients are joined by a view. The gradient of a shared
    # input would be a sum over members, which `gradients` does not compute.
    if groups == 1 and not needs_input_grad and grad.target in _VIEWS:
        members = _members_by_split(grad.args[0], grad)
    if not needs_weight_grad or needs_bias_grad or transposed:
        return
    if not _is_faster_by_group(grad, weight, members):
        return
    with graph.inserting_before(node):
        operands = [
            _activations_by_group(graph, grad, members),
            _activations_by_group(graph, inputs, groups),  # [1, B, C, ...] if the input is shared
            _weight_by_group(graph, weight, members),
        ]
        both_grads = _add_call(
            graph,
            torch.ops.monograph.group_gradients.default,
            *operands,
            needs_input_grad,
            *geometry,
        )
        for item in [*node.users]:  # the calls of `operator.getitem` that take out a gradient
            index = item.args[1]
            grad_by_group = _add_call(graph, operator.getitem, both_grads, index)
            if index == 0:
                _replace_by(graph, item, grad_by_group)
            else:
                shape = list(item.meta["val"].shape)
                view = _add_call(graph, aten.view.default, grad_by_group, shape)
                item.replace_all_uses_with(view)


def _members_by_split(split: Node, joined: Node) -> int:
    """Return the number of members of a convolution without groups. Its arguments do not say it.

    After the convolution, vmap splits the output's channels into the members' channels. In the
    backward pass it joins the members' channels of the gradient. The shapes before and after such a
    view show G, the number of members.

    Args:
        split: the node that may have the output, or its gradient, as [B, G, O, ...].
        joined: the node that has the same as [B, G O, ...].

    Returns:
        G; 1 if the nodes do not have these shapes: then the convolution belongs to one member.
    """
    shape = list(split.meta["val"].shape)
    joined_shape = list(joined.meta["val"].shape)
    if len(shape) < 3 or [shape[0], shape[1] * shape[2], *shape[3:]] != joined_shape:
        return 1
    return int(shape[1])


def _is_faster_by_group(result: Node, weight: Node, groups: int) -> bool:
    """Return whether a convolution with this result, or gradient, is faster group by group."""
    out = result.meta["val"]
    if groups == 1 or out.device.type != "cpu" or out.dtype != torch.float32:
        return False
    elements_of_group = out.numel() // groups
    multiplications_per_element = weight.meta["val"][0].numel()
    multiplications = elements_of_group * multiplications_per_element
    return bool(multiplications >= MIN_MULTIPLICATIONS)


def _add_call(graph: Graph, target: Callable[..., Any], *args: Argument) -> Node:
    """Add a call to the graph, with the example result in `meta["val"]` that later passes read."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*map_arg(args, lambda operand: operand.meta["val"]))
    return node


def _weight_by_group(graph: Graph, weight: Node, groups: int) -> Node:
    """Return a weight [G O, C, ...] as [G, O, C, ...]."""
    rows, *rest = weight.meta["val"].shape
    return _add_call(graph, aten.view.default, weight, [groups, rows // groups, *rest])


def _activations_by_group(graph: Graph, node: Node, groups: int) -> Node:
    """Return a copy of [B, G C, ...] as [G, B, C, ...].

    In memory the copy is still [B, G, C, ...], because `clone` keeps the order of the axes in memory. So
    ATen copies a group's rows again, next to each other, when it computes the group. Memory in the
    order of the groups was no faster, and gave the same bits.
    """
    rows, channels, *rest = node.meta["val"].shape
    split = _add_call(graph, aten.reshape.default, node, [rows, groups, channels // groups, *rest])
    by_group = _add_call(graph, aten.permute.default, split, _swapped_axes(split))
    return _add_call(graph, aten.clone.default, by_group)


def _replace_by(graph: Graph, node: Node, by_group: Node) -> None:
    """Replace `node` [B, G O, ...] by `by_group` [G, B, O, ...]."""
    by_row = _add_call(graph, aten.permute.default, by_group, _swapped_axes(by_group))
    # A view that splits the groups again, [B, G, O, ...], is replaced by `by_row` itself, because
    # merging the groups first would copy all elements.
    for user in [*node.users]:
        if user.target in _VIEWS and user.meta["val"].shape == by_row.meta["val"].shape:
            user.replace_all_uses_with(by_row)
    # The views that were replaced are still users of `node`, but nothing uses them.
    remaining_users = [user for user in node.users if user.users or user.op == "output"]
    if remaining_users:
        shape = list(node.meta["val"].shape)
        node.replace_all_uses_with(_add_call(graph, aten.reshape.default, by_row, shape))


def _swapped_axes(node: Node) -> list[int]:
    """Return the order of axes that swaps the first two."""
    return [1, 0, *range(2, node.meta["val"].ndim)]
