"""Which nodes of a captured graph become buffers in memory, and how long each is needed.

A compiler computes elementwise nodes where they are read, so that only what a product, an operator of its own or the
graph's caller reads is ever written to memory, and reductions, whose readers need all of them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from monograph.ops.cross_entropy import BLOCK_BYTES

# Elementwise in a compiler's eyes though torch does not tag them so: reads at computed places, casts, constants.
_ELEMENTWISE = {
    "arange", "clone", "constant_pad_nd", "convert_element_type", "copy", "embedding", "full", "full_like", "gather",
    "index", "iota", "lift_fresh_copy", "scalar_tensor", "select_scatter", "slice_scatter", "_to_copy", "_unsafe_index",
    "cat", "repeat",
}  # fmt: skip
_REDUCTIONS = {"amax", "amin", "any", "argmax", "linalg_vector_norm", "logsumexp", "mean", "prod", "sum", "var_mean"}
Name = int | str  # of a buffer: an argument's index or a node's name


@dataclass
class Kernel:
    """One buffer that a graph writes.

    Attributes:
        name: the node's.
        shape: of its first output.
        size_bytes: of all its outputs.
        fused: elementwise or a reduction: it may be written over an argument of the same size that dies with it.
        last_reads: arguments and earlier kernels that nothing reads after it.
    """

    name: str
    shape: tuple[int, ...]
    size_bytes: int
    fused: bool
    last_reads: list[Name] = field(default_factory=list)


def kernels(graph: GraphModule, device_type: str) -> list[Kernel]:
    """The buffers of a partitioned graph of aten operators, in the order in which it writes them."""
    reads: dict[Node, frozenset[Name]] = {}
    found: list[Kernel] = []
    last: dict[Name, int] = {}
    arguments = 0
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            reads[node] = frozenset([arguments])
            arguments += 1
            continue
        through = frozenset[Name]().union(*(reads[each] for each in node.all_input_nodes))
        if node.op == "output":
            last |= dict.fromkeys(through, len(found))  # the caller keeps them
        elif bases := _changed(node):
            last |= dict.fromkeys([*through, node.name], len(found))
            size_bytes = max(inner_bytes(each.meta["val"], device_type) for each in bases)
            found.append(Kernel(node.name, tuple(bases[0].meta["val"].shape), size_bytes, fused=False))
            reads[node] = frozenset[Name]().union(*(reads[each] for each in bases))
        elif _is_view(node) or not _is_written(node):
            reads[node] = through
            if _is_store(node):
                last |= dict.fromkeys(through, max(len(found) - 1, 0))
        else:
            last |= dict.fromkeys([*through, node.name], len(found))
            outputs = _tensors(node)
            size_bytes = sum(each.untyped_storage().nbytes() for each in outputs)
            found.append(Kernel(node.name, tuple(outputs[0].shape), size_bytes, not _is_extern(node)))
            reads[node] = frozenset([node.name])
    for name, at in last.items():
        if at < len(found):
            found[at].last_reads.append(name)
    return found


def _is_written(node: Node) -> bool:
    if not _tensors(node):
        return False
    return _is_extern(node) or _name(node) in _REDUCTIONS or any(map(_needs_memory, _readers(node)))


def _needs_memory(reader: Node) -> bool:
    return reader.op == "output" or _is_extern(reader)


def _readers(node: Node) -> list[Node]:
    """Who reads a node, directly or through views of it."""
    return [each for user in node.users for each in (_readers(user) if _is_view(user) else [user])]


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return bool(returns) and all(each.alias_info and not each.alias_info.is_write for each in returns)


def _is_store(node: Node) -> bool:
    return _name(node) == "copy_"  # into an argument, by the kernel that computed it


def inner_bytes(total: Tensor, device_type: str) -> int:
    """What `add_product_` of `monograph.ops.cross_entropy`, the one operator that works in place, needs beside."""
    rows = max(1, BLOCK_BYTES[device_type] // (4 * total.shape[-1]))
    return min(rows, total.shape[-2]) * total.shape[-1] * total.element_size()


def _changed(node: Node) -> list[Node]:
    """The tensors that an operator of our own writes in place, which a traced graph holds as a call by another name."""
    if not str(node.target).startswith("auto_functionalized"):
        return []
    return list(node.kwargs.get("_all_bases") or [node.kwargs["total"]])  # type: ignore[arg-type]


def _is_extern(node: Node) -> bool:
    if node.op != "call_function" or _is_view(node) or _is_store(node):
        return False
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return not pointwise and _name(node) not in _ELEMENTWISE | _REDUCTIONS


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.partition("::")[2] if schema else ""


def _tensors(node: Node) -> list[Tensor]:
    value = node.meta.get("val")
    return [each for each in (value if isinstance(value, tuple | list) else [value]) if isinstance(each, Tensor)]
