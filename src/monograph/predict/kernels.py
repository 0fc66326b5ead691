"""Find the nodes of a captured graph whose values the compiler, torch._inductor, writes to memory.

The compiler computes elementwise nodes inside the kernels that read them. It writes only two kinds of
values: those that an extern operator or the graph's caller reads, and the results of reductions, which
must be complete before a reader can begin. An extern operator is one that the compiler calls instead of
generating its code, such as a matrix product.

A buffer here is a value that the compiler writes, or an argument of the graph. An expensive value is
one that a CPU takes long to compute, so that the compiler avoids computing it twice.

Four extern operators of Monograph change a tensor in place:

    add_product_        adds a matrix product to a gradient (`monograph.ops.fused_gradients`)
    add_scaled_         adds a scaled tensor to a gradient (`monograph.ops.fused_gradients`)
    zero_if_unwritten_  may set a gradient to zeros (`monograph.ops.unwritten`)
    replace_logits_     replaces logits by their gradient, and returns the losses
                        (`monograph.ops.logits_gradient`)

What an operator returns besides the tensors that it changes is called its own result.

In a captured graph nothing changes an argument, but a store at the end may copy a changed value into it.
The compiler writes such a value in the argument's own memory and leaves out the store, if nothing reads
the argument's old value after the change (`reinplace_inplaceable_ops` of torch._inductor).
"""

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from monograph.graph.matmul import workspace_bytes
from monograph.ops.fused_gradients import block_rows
from monograph.predict.lifetimes import BufferName, PlannedKernel, order_kernels

# The compiler treats these as elementwise although torch does not tag them so: reads at places that
# are given by indices, casts, constants.
_ELEMENTWISE = {
    "arange",
    "clone",
    "constant_pad_nd",
    "convert_element_type",
    "copy",
    "embedding",
    "full",
    "full_like",
    "gather",
    "index",
    "iota",
    "lift_fresh_copy",
    "scalar_tensor",
    "select_scatter",
    "slice_scatter",
    "_to_copy",
    "_unsafe_index",
    "cat",
    "repeat",
}
# These operators write at places that are given by indices. They return their first argument, changed;
# the compiler writes the result over it.
_WRITES_AT_INDICES = {
    "index_put",
    "_unsafe_index_put",
    "_unsafe_masked_index_put_accumulate",
    "scatter_add",
}
# Those of them whose result the compiler can write into an argument of the graph.
_WRITES_INTO_ARGUMENTS = {"index_put", "_unsafe_index_put"}
_REDUCTIONS = {
    "amax",
    "amin",
    "any",
    "argmax",
    "linalg_vector_norm",
    "logsumexp",
    "mean",
    "prod",
    "sum",
    "var_mean",
}
# On a CPU, the compiler avoids computing two kinds of values twice: the results of these operators, and
# values that read more than MAX_LOADS buffers (`should_realize_on_reuse` and
# `config.realize_reads_threshold` of torch._inductor).
_EXPENSIVE = {"exp", "sigmoid"}
MAX_LOADS = 4


class _Sources(NamedTuple):
    """The buffers that a reader of a node reads.

    If the node is written, this is the node's own buffer. Otherwise the reader computes the node, so
    it reads the node's own sources.

    Attributes:
        buffers: the names of the buffers.
        loads: the buffers, each with the names of the views on the path from it to the node. The
            compiler counts two views of one buffer as two loads.
        expensive_sizes: for each buffer, the bytes of the expensive values on the paths from it to
            the node; 0 stands for a path without an expensive value.
    """

    buffers: frozenset[BufferName]
    loads: frozenset[tuple[BufferName, ...]]
    expensive_sizes: dict[BufferName, set[int]]

    @classmethod
    def of_buffer(cls, name: BufferName) -> "_Sources":
        """Return the sources of a reader of one buffer."""
        return cls(frozenset([name]), frozenset([(name,)]), {name: {0}})


def planned_kernels(graph: GraphModule, device_type: str, backward: bool) -> list[PlannedKernel]:
    """Return the kernels that the compiler makes of a graph of aten operators, in the order in which
    they run. Each of them writes one buffer.

    Args:
        graph: one of the two graphs, forward and backward, into which the partitioner has split a joint
            graph.
        device_type: "cpu" or "cuda".
        backward: whether it is the backward graph, which may free its arguments.
    """
    arguments: dict[BufferName, int] = {}
    if backward:
        for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
            arguments[index] = sum(tensor.nbytes for tensor in _tensors(node))
    written, returned = _written_kernels(graph, device_type)
    return order_kernels(written, returned, arguments)


def _written_kernels(
    graph: GraphModule, device_type: str
) -> tuple[list[PlannedKernel], set[BufferName]]:
    """Return the kernels in the order of the graph's nodes, and the names of the buffers that the
    graph returns to its caller.
    """
    sources: dict[Node, _Sources] = {}
    kernels: list[PlannedKernel] = []
    returned: frozenset[BufferName] = frozenset()
    argument_count = 0
    on_cpu = device_type == "cpu"
    in_arguments = _in_arguments(graph)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            sources[node] = _Sources.of_buffer(argument_count)
            argument_count += 1
            continue
        input_sources = [sources[input_node] for input_node in node.all_input_nodes]
        buffers = frozenset[BufferName]().union(*(source.buffers for source in input_sources))
        loads = frozenset[tuple[BufferName, ...]]().union(
            *(source.loads for source in input_sources)
        )
        if _is_view(node):
            loads = frozenset((*load, node.name) for load in loads)
        changed_tensors = _changed_in_place(node)
        if node.op == "output":
            returned = buffers
        elif _is_own_result(node):
            # The kernel that writes it was listed with the call itself.
            sources[node] = _Sources.of_buffer(_own_result_name(node.all_input_nodes[0]))
        elif changed_tensors:
            changed_buffer = _changed_buffer(sources[changed_tensors[0]].buffers, node)
            if _is_add_product(node):
                total = changed_tensors[0]
                kernels += _add_product_kernels(node, total, buffers, changed_buffer, device_type)
            elif _returns_nothing(node):
                kernels.append(_change_in_place(node, changed_tensors[0], buffers, changed_buffer))
            else:
                kernels += _replace_logits_kernels(node, buffers, changed_buffer)
            sources[node] = _Sources.of_buffer(node.name)
        elif _is_written(node, on_cpu, len(loads)):
            expensive_sizes = _expensive_sizes(node, sources, on_cpu)
            kernels += _node_kernels(node, sources, buffers, expensive_sizes, device_type)
            sources[node] = _Sources.of_buffer(node.name)
        else:
            # A view, or a value that its readers compute, or a store.
            sources[node] = _Sources(buffers, loads, _expensive_sizes(node, sources, on_cpu))
            # A store writes a value, its second input, into an argument. If the value was not written
            # yet, the store's own loop computes it. If it was written in the argument's memory, the
            # store is left out.
            is_computed = _is_store(node) and node.all_input_nodes[1].name not in buffers
            if is_computed and _selected_from(node.all_input_nodes[1]) not in in_arguments:
                [output] = _tensors(node)
                store = PlannedKernel(
                    node.name, output, output.numel(), size_bytes=0, reads=buffers, fusable=True
                )
                kernels.append(store)
    names_in_arguments = {node.name for node in in_arguments}
    for kernel in kernels:
        if kernel.name in names_in_arguments:
            kernel.size_bytes = 0
    return kernels, set(returned)


def _in_arguments(graph: GraphModule) -> set[Node]:
    """Return the nodes whose results the compiler writes in the memory of an argument of the graph.

    Such a node changes an argument into which the graph stores later, or the result of another such node.
    """
    found = set[Node]()
    for node in graph.graph.nodes:
        changed = _changed_in_place(node)
        if _operator_name(node) in _WRITES_INTO_ARGUMENTS:
            changed = [node.args[0]]
        if len(changed) != 1:
            continue
        old_value = _selected_from(changed[0])
        if old_value in found or _may_change_argument(node, old_value):
            found.add(node)
    return found


def _may_change_argument(node: Node, argument: Node) -> bool:
    """Return whether the compiler may let a node change an argument of the graph in place.

    It may if a later node stores into the argument, and no later node reads it.

    Args:
        node: the node.
        argument: the value that it changes; the result is False if it is no argument.
    """
    later = [user for user in argument.users if user > node]
    are_stores = [_is_store(user) and user.args[0] is argument for user in later]
    return argument.op == "placeholder" and bool(later) and all(are_stores)


def _selected_from(node: Node) -> Node:
    """Return the call from whose results a node selects one; any other node itself."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _add_product_kernels(
    node: Node,
    total: Node,
    buffers: frozenset[BufferName],
    changed_buffer: BufferName,
    device_type: str,
) -> list[PlannedKernel]:
    """Return the kernels of a call of `add_product_`: the product in its workspace, and the addition.

    Args:
        node: the call.
        total: the tensor to which the product is added.
        buffers: the buffers that the call reads.
        changed_buffer: the buffer of `total`.
        device_type: "cpu" or "cuda".
    """
    operands: list[Any] = [total, node.kwargs["left"], node.kwargs["right"]]
    total_VD, left_CV, right_CD = (operand.meta["val"] for operand in operands)
    product = PlannedKernel(
        f"{node.name}'s product",
        total_VD,
        total_VD.numel(),
        size_bytes=add_product_workspace_bytes(total_VD, left_CV, right_CD, device_type),
        reads=buffers,
        fusable=False,
        is_workspace=True,
    )
    addition = _change_in_place(node, total, buffers | {product.name}, changed_buffer)
    return [product, addition]


def _change_in_place(
    node: Node, changed: Node, buffers: frozenset[BufferName], changed_buffer: BufferName
) -> PlannedKernel:
    """Return the kernel of a call that changes a tensor and returns nothing else.

    Args:
        node: the call.
        changed: the tensor.
        buffers: the buffers that the call reads.
        changed_buffer: the buffer of the tensor.
    """
    tensor = changed.meta["val"]
    return PlannedKernel(
        node.name,
        tensor,
        tensor.numel(),
        size_bytes=tensor.nbytes,
        reads=buffers,
        fusable=False,
        changes=changed_buffer,
    )


def _replace_logits_kernels(
    node: Node, buffers: frozenset[BufferName], changed_buffer: BufferName
) -> list[PlannedKernel]:
    """Return the kernels of a call of `replace_logits_`: the replacement of the logits, and the losses
    that the call returns.

    The losses have a kernel of their own, so that a reader of the losses does not keep the logits.

    Args:
        node: the call.
        buffers: the buffers that the call reads.
        changed_buffer: the buffer of the logits.
    """
    losses, logits = _tensors(node)
    replacement = PlannedKernel(
        node.name,
        logits,
        logits.numel(),
        size_bytes=logits.nbytes,
        reads=buffers,
        fusable=False,
        changes=changed_buffer,
    )
    own_result = PlannedKernel(
        _own_result_name(node),
        losses,
        losses.numel(),
        size_bytes=losses.nbytes,
        reads=frozenset([node.name]),
        fusable=False,
    )
    return [replacement, own_result]


def _node_kernels(
    node: Node,
    sources: dict[Node, _Sources],
    buffers: frozenset[BufferName],
    expensive_sizes: dict[BufferName, set[int]],
    device_type: str,
) -> list[PlannedKernel]:
    """Return the kernel of a node that is written. If it needs a workspace, a kernel for that comes
    first.

    Args:
        node: the node.
        sources: the sources of all earlier nodes.
        buffers: the buffers that it reads.
        expensive_sizes: see `_Sources`.
        device_type: "cpu" or "cuda".
    """
    node_kernels = []
    workspace_size_bytes = _matmul_workspace_bytes(node, device_type)
    if workspace_size_bytes:
        workspace = PlannedKernel(
            f"{node.name}'s copy",
            _tensors(node)[0],
            loop_elements=0,
            size_bytes=workspace_size_bytes,
            reads=frozenset(),
            fusable=False,
            is_workspace=True,
        )
        node_kernels.append(workspace)
        buffers |= {workspace.name}
    outputs = _tensors(node)
    size_bytes = sum(output.untyped_storage().nbytes() for output in outputs)
    loop_elements = outputs[0].numel()
    part_elements = 0
    if device_type == "cuda":
        # Reductions over rows and concatenations have loops over other elements than their results.
        part_elements = _largest_part_elements(node)
        row_elements = _row_elements(node)
        if row_elements:
            loop_elements = row_elements
        elif part_elements:
            loop_elements = part_elements
    changes = None
    writes_at_indices = _operator_name(node) in _WRITES_AT_INDICES
    if writes_at_indices:
        changes = _changed_buffer(sources[node.all_input_nodes[0]].buffers, node)
    # The result can be written over a buffer if the paths from the buffer to the node have no expensive
    # value, or only expensive values of the result's size (see `_expensive_sizes`).
    not_over = frozenset(
        name for name, sizes in expensive_sizes.items() if sizes not in ({0}, {size_bytes})
    )
    if part_elements:
        # The result has more elements than any part, so it does not fit over a part.
        not_over = buffers
    all_expensive_sizes = set[int]().union(*expensive_sizes.values())
    largest_expensive = max(all_expensive_sizes, default=0)
    node_kernels.append(
        PlannedKernel(
            node.name,
            outputs[0],
            loop_elements,
            size_bytes=size_bytes,
            reads=buffers,
            fusable=not _is_extern(node) or writes_at_indices,
            changes=changes,
            not_over=not_over,
            intermediate_bytes=largest_expensive,
        )
    )
    return node_kernels


def _row_elements(node: Node) -> int:
    """Return how many elements a reduction over rows (the last axis) reads; 0 for any other node.

    On a GPU other kernels that read whole rows join its loop.
    """
    if _operator_name(node) not in _REDUCTIONS:
        return 0
    read = _tensors(node.all_input_nodes[0])[0]
    dims = node.args[1] if len(node.args) > 1 else None
    if not isinstance(dims, list | tuple):
        dims = [dims]
    reduces_rows = any(isinstance(dim, int) and dim in (-1, read.ndim - 1) for dim in dims)
    return read.numel() if reduces_rows else 0


def _largest_part_elements(node: Node) -> int:
    """Return how many elements the largest part of a concatenation has; 0 for any other node.

    On a GPU each part is written to its place in the result by a loop of its own, which other
    kernels of that size join.
    """
    if _operator_name(node) != "cat":
        return 0
    return max(tensor.numel() for part in node.all_input_nodes for tensor in _tensors(part))


def _changed_buffer(names: frozenset[BufferName], node: Node) -> BufferName:
    """Return the buffer that a node changes, if it is the only one of these names.

    If there are several, the changed value was not written before, and is computed from all of them.
    Then no earlier buffer is changed, and the node's own name is returned.
    """
    return next(iter(names)) if len(names) == 1 else node.name


def _expensive_sizes(
    node: Node, sources: dict[Node, _Sources], on_cpu: bool
) -> dict[BufferName, set[int]]:
    """Return for each buffer that a node reads the bytes of the expensive values on the paths from
    it, see `_Sources`.

    The compiler first plans a buffer for an expensive value that is read twice, and drops it when it
    makes the loop that computes the value. Because of this plan, a result is not always written over a
    buffer from which an expensive value is computed. It is only if the result, the expensive value and
    the buffer have the same size.
    """
    inputs = node.all_input_nodes
    if on_cpu and len(node.users) > 1 and _operator_name(node) in _EXPENSIVE and _tensors(node):
        [value] = _tensors(node)
        return {
            name: {value.nbytes} for source in inputs for name in sources[source].expensive_sizes
        }
    sizes_of: dict[BufferName, set[int]] = {}
    for source in inputs:
        for name, sizes in sources[source].expensive_sizes.items():
            sizes_of[name] = sizes_of.get(name, set()) | sizes
    return sizes_of


def _matmul_workspace_bytes(node: Node, device_type: str) -> int:
    """Return the bytes of workspace that a matrix product needs in addition to its result."""
    if _operator_name(node) != "mm" or device_type != "cpu":
        return 0
    left, right = (operand.meta["val"] for operand in node.all_input_nodes[:2])
    return workspace_bytes(left, right)


def _is_written(node: Node, on_cpu: bool, load_count: int) -> bool:
    """Return whether the compiler writes a node's value to memory.

    Args:
        node: the node.
        on_cpu: whether the graph is compiled for a CPU.
        load_count: the number of buffers that the node reads.
    """
    if _is_view(node) or not _tensors(node):
        return False
    if _is_extern(node) or _operator_name(node) in _REDUCTIONS:
        return True
    if any(reader.op == "output" or _is_extern(reader) for reader in _readers(node)):
        return True
    return on_cpu and _would_be_computed_twice(node, load_count)


def _would_be_computed_twice(node: Node, load_count: int) -> bool:
    """Return whether an expensive elementwise value is read by a reduction and by another reader. The
    reduction reads all of it before the other reader can begin.

    This is only asked for a CPU. On a GPU one kernel holds the whole row, so no value is computed twice.

    Args:
        node: the node.
        load_count: the number of buffers that it reads.
    """
    if len(node.users) < 2:
        return False
    is_expensive = _operator_name(node) in _EXPENSIVE or load_count > MAX_LOADS
    is_reduction = [_operator_name(reader) in _REDUCTIONS for reader in _readers(node)]
    return is_expensive and any(is_reduction) and not all(is_reduction)


def _readers(node: Node) -> list[Node]:
    """Return the nodes that read a node, directly or through views of it."""
    readers = []
    for user in node.users:
        readers += _readers(user) if _is_view(user) else [user]
    return readers


def _is_view(node: Node) -> bool:
    """Return whether a node's value is in the memory of another node's value."""
    if node.target is operator.getitem:  # it selects one of several results
        return True
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return bool(returns) and all(
        value.alias_info and not value.alias_info.is_write for value in returns
    )


def _is_store(node: Node) -> bool:
    """Return whether a node writes a value into an argument."""
    return _operator_name(node) == "copy_"


def add_product_workspace_bytes(
    total_VD: Tensor, left_CV: Tensor, right_CD: Tensor, device_type: str
) -> int:
    """Return the bytes of workspace of `add_product_` of `monograph.ops.fused_gradients`, which adds
    left^T @ right to a total.

    A GPU needs none. On a CPU the workspace holds some rows of the product and, if the total has
    another dtype, a copy of these rows in that dtype.

    Args:
        total_VD: the total [V, D].
        left_CV: the left matrix [C, V].
        right_CD: the right matrix [C, D].
        device_type: "cpu" or "cuda".
    """
    if device_type == "cuda":
        return 0
    rows = min(total_VD.shape[-2], block_rows("cpu", total_VD.shape[-1]))
    number_bytes = right_CD.element_size()
    if right_CD.dtype != total_VD.dtype:
        number_bytes += total_VD.element_size()
    return rows * total_VD.shape[-1] * number_bytes


def _changed_in_place(node: Node) -> list[Node]:
    """Return the tensors that a node writes in place; an empty list if it writes none.

    It is the total of a gradient, or the logits of `replace_logits_`. In a traced graph such a call is
    wrapped in a call of `auto_functionalized`.
    """
    if not str(node.target).startswith("auto_functionalized"):
        return []
    # `auto_functionalized_v2` lists the tensors in an argument `_all_bases`. The older wrapper passes
    # the operator's own argument, `total`.
    return list(node.kwargs.get("_all_bases") or [node.kwargs["total"]])  # type: ignore[arg-type]


def _is_add_product(call: Node) -> bool:
    """Return whether a call that changes a tensor is one of `add_product_`."""
    return "left" in call.kwargs


def _returns_nothing(call: Node) -> bool:
    """Return whether a call that changes a tensor returns nothing else."""
    operator_called = call.args[0]
    assert isinstance(operator_called, torch._ops.OpOverload)
    return not operator_called._schema.returns


def _is_own_result(node: Node) -> bool:
    """Return whether a node selects what a call returns besides the tensors that it changes."""
    if node.target is not operator.getitem or not _changed_in_place(node.all_input_nodes[0]):
        return False
    _, index = node.args
    return isinstance(index, int) and index == 0


def _own_result_name(call: Node) -> str:
    """Return the name of the buffer that a call returns besides the tensors that it changes."""
    return f"{call.name}'s own result"


def _is_extern(node: Node) -> bool:
    """Return whether the compiler calls the node's operator instead of generating its code."""
    if node.op != "call_function" or _is_view(node) or _is_store(node):
        return False
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return not is_pointwise and _operator_name(node) not in _ELEMENTWISE | _REDUCTIONS


def _operator_name(node: Node) -> str:
    """Return the operator's name without its namespace; "" if the node calls no operator."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.partition("::")[2] if schema else ""


def _tensors(node: Node) -> list[Tensor]:
    """Return a node's tensors, without states of random generators.

    Such a state has a few kB, and its size is known only at run time.
    """
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    tensors = [item for item in values if isinstance(item, Tensor)]
    return [tensor for tensor in tensors if all(isinstance(size, int) for size in tensor.shape)]
