"""Compute large convolutions with groups one group after another, in captured graphs on a CPU.

vmap makes one convolution of an ensemble's members, with a group for each, or with the output
channels of all where they have one input. oneDNN takes up to four times as long for groups as for
the members' own convolutions, unless these are tiny (dev/log.md), and a member's results lie apart
in memory. vmap's convolution is the reference.

Shapes: G groups, B rows, C and O channels of a group, and any number of further dimensions.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg
from torch.fx.node import Argument

LEAST = 2**21  # multiplications of a group, from which on groups are faster one by one (dev/log.md)
aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_LIBRARY = torch.library.Library("monograph", "FRAGMENT")
_STEPS = "SymInt[] stride, SymInt[] padding, SymInt[] dilation"


def convolution(input_GBC: Tensor, weight_GOC: Tensor, *steps: list[int]) -> Tensor:
    """Return each group's convolution, [G, B, O, ...]; `steps` are stride, padding and dilation.

    An input [1, B, C, ...] is that of all groups.
    """
    groups = zip(_of_all(input_GBC, weight_GOC), weight_GOC, strict=True)
    return torch.stack([aten.convolution(*group, None, *steps, False, [0], 1) for group in groups])


def gradients(
    grad_GBO: Tensor, input_GBC: Tensor, weight_GOC: Tensor, wanted: bool, *steps: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `convolution`'s input, empty if it is not `wanted`, and of its
    weight.
    """
    mask = [wanted, True, False]
    inputs = []
    weights = []
    for group in zip(grad_GBO, _of_all(input_GBC, weight_GOC), weight_GOC, strict=True):
        of_input, of_weight, _ = aten.convolution_backward(
            *group, None, *steps, False, [0], 1, mask
        )
        inputs.append(of_input)
        weights.append(of_weight)
    return torch.stack(inputs) if wanted else grad_GBO.new_empty(0), torch.stack(weights)


def _of_all(input_GBC: Tensor, weight_GOC: Tensor) -> Tensor:
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
    return input_GBC.new_empty(input_GBC.shape if wanted else 0), weight_GOC.new_empty(
        weight_GOC.shape
    )


def rewrite(graph: Graph) -> None:
    """Replace the convolutions of a forward or joint graph that are faster group by group, and
    their gradients.
    """
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        inputs, weight, bias, *steps, transposed, _, groups = node.args
        parts = max([groups, *(_parts(user, node) for user in node.users if groups == 1)])
        if bias is None and not transposed and _pays(node, weight, parts):
            with graph.inserting_before(node):
                operands = [_apart(graph, inputs, groups), _by_group(graph, weight, parts)]
                made = _call(
                    graph, torch.ops.monograph.group_convolution.default, *operands, *steps
                )
                _put(graph, node, made)
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        grad, inputs, weight, _, *steps, transposed, _, groups, (wanted, *others) = node.args
        parts = max(
            groups,
            _parts(grad.args[0], grad)
            if groups == 1 and not wanted and grad.target in _VIEWS
            else 1,
        )
        if others == [True, False] and not transposed and _pays(grad, weight, parts):
            with graph.inserting_before(node):
                operands = [
                    _apart(graph, grad, parts),
                    _apart(graph, inputs, groups),
                    _by_group(graph, weight, parts),
                ]
                made = _call(
                    graph, torch.ops.monograph.group_gradients.default, *operands, wanted, *steps
                )
                for part in [*node.users]:
                    own = _call(graph, operator.getitem, made, part.args[1])
                    if part.args[1] == 0:
                        _put(graph, part, own)
                    else:
                        part.replace_all_uses_with(
                            _call(graph, aten.view.default, own, list(part.meta["val"].shape))
                        )
    graph.eliminate_dead_code()


def _parts(split: Node, whole: Node) -> int:
    """Return how many members share an input, if one node is [B, G, O, ...] and the other [B, G O,
    ...]; else 1.
    """
    shapes = [list(node.meta["val"].shape) for node in (split, whole)]
    if (
        len(shapes[0]) < 3
        or [shapes[0][0], shapes[0][1] * shapes[0][2], *shapes[0][3:]] != shapes[1]
    ):
        return 1
    return int(shapes[0][1])


def _pays(product: Node, weight: Node, groups: int) -> bool:
    out, each = product.meta["val"], weight.meta["val"]
    if groups == 1 or out.device.type != "cpu" or out.dtype != torch.float32:
        return False
    return bool(out.numel() // groups * each[0].numel() >= LEAST)


def _call(graph: Graph, target: Callable[..., Any], *args: Argument) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*map_arg(args, lambda operand: operand.meta["val"]))
    return node


def _by_group(graph: Graph, weight: Node, groups: int) -> Node:
    rows, *rest = weight.meta["val"].shape
    return _call(graph, aten.view.default, weight, [groups, rows // groups, *rest])


def _apart(graph: Graph, node: Node, groups: int) -> Node:
    """Return [B, G C, ...] as [G, B, C, ...], whose memory holds one group after another."""
    rows, channels, *rest = node.meta["val"].shape
    split = _call(graph, aten.reshape.default, node, [rows, groups, channels // groups, *rest])
    apart = _call(graph, aten.permute.default, split, _swapped(split))
    return _call(graph, aten.clone.default, apart)


def _put(graph: Graph, node: Node, made: Node) -> None:
    """Put `made` [G, B, O, ...] in place of `node` [B, G O, ...]."""
    together = _call(graph, aten.permute.default, made, _swapped(made))
    # A view that takes the groups apart again is read from `together`: to merge them would copy
    # all.
    for user in [*node.users]:
        if user.target in _VIEWS and user.meta["val"].shape == together.meta["val"].shape:
            user.replace_all_uses_with(together)
    if any(user.users for user in node.users) or any(user.op == "output" for user in node.users):
        node.replace_all_uses_with(
            _call(graph, aten.reshape.default, together, list(node.meta["val"].shape))
        )


def _swapped(node: Node) -> list[int]:
    return [1, 0, *range(2, node.meta["val"].ndim)]
