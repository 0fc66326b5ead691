"""Find which nodes of a captured graph a compiler writes to memory.

A compiler computes elementwise nodes inside the kernels that read them. It writes only the values
that a product, an extern operator or the graph's caller reads, and the results of reductions, as a
reader needs a whole reduction before it can begin.
"""

import operator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from monograph.graph.matmul import workspace_bytes
from monograph.ops.fused_gradients import block_rows
from monograph.predict.lifetimes import Name, PlannedKernel, scheduled

# The compiler treats these as elementwise although torch does not tag them so: reads at computed
# places, casts, constants.
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
# These operators return their first argument, changed; the compiler writes the result over it.
_WRITES_AT_PLACES = {
    "index_put",
    "_unsafe_index_put",
    "_unsafe_masked_index_put_accumulate",
    "scatter_add",
}
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
# On a CPU, the compiler does not compute these values twice, nor values that read more than
# MOST_LOADS buffers: `should_realize_on_reuse` of torch._inductor, and
# `config.realize_reads_threshold`.
_DEAR = {"exp", "sigmoid"}
MOST_LOADS = 4


def kernels(graph: GraphModule, device_type: str, backward: bool) -> list[PlannedKernel]:
    """Return the buffers of a partitioned graph of aten operators, in the order in which the
    compiler writes them.

    Only a backward graph may free its arguments.
    """
    given = enumerate(graph.graph.find_nodes(op="placeholder") if backward else [])
    arguments: dict[Name, int] = {
        index: sum(tensor.nbytes for tensor in _tensors(node)) for index, node in given
    }
    return scheduled(*_written(graph, device_type), arguments)


def _written(graph: GraphModule, device_type: str) -> tuple[list[PlannedKernel], set[Name]]:
    """Return the kernels in the order of the graph's nodes, and the names that the caller keeps."""
    reads: dict[Node, frozenset[Name]] = {}
    # The buffers that a node reads, each with the views between.
    loads: dict[Node, frozenset[tuple[Name, ...]]] = {}
    # For each buffer read: bytes of the dear values between, 0 for none.
    behind: dict[Node, dict[Name, set[int]]] = {}
    kernels: list[PlannedKernel] = []
    returned: frozenset[Name] = frozenset()
    arguments = 0
    on_cpu = device_type == "cpu"
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            reads[node], loads[node] = frozenset([arguments]), frozenset([(arguments,)])
            behind[node] = {arguments: {0}}
            arguments += 1
            continue
        through = frozenset[Name]().union(*(reads[source] for source in node.all_input_nodes))
        loads[node] = frozenset[tuple[Name, ...]]().union(
            *(loads[source] for source in node.all_input_nodes)
        )
        if _is_view(node):
            loads[node] = frozenset((*load, node.name) for load in loads[node])
        if node.op == "output":
            returned = through
        elif bases := _changed(node):
            total, left, right = (
                source.meta["val"] for source in (*bases, node.kwargs["left"], node.kwargs["right"])
            )
            product = f"{node.name}'s product"
            inside = inner_bytes(total, left, right, device_type)
            size = total.numel()
            changes = _only(reads[bases[0]], node)
            kernels.append(
                PlannedKernel(product, total, size, inside, through, fused=False, hidden=True)
            )
            through |= {product}
            kernels.append(
                PlannedKernel(
                    node.name, total, size, total.nbytes, through, fused=False, changes=changes
                )
            )
            reads[node], loads[node], behind[node] = _written_here(node)
        elif _is_view(node) or not (
            _is_written(node) or (on_cpu and _is_passed_twice(node, len(loads[node])))
        ):
            reads[node], behind[node] = through, _behind(node, behind, on_cpu)
            # What was not written yet is computed by the loop that stores it.
            if _is_store(node) and node.all_input_nodes[1].name not in through:
                [output] = _tensors(node)
                kernels.append(
                    PlannedKernel(node.name, output, output.numel(), 0, through, fused=True)
                )
        else:
            if copy_bytes := _copied_bytes(node, device_type):
                copied = f"{node.name}'s copy"
                kernels.append(
                    PlannedKernel(
                        copied,
                        _tensors(node)[0],
                        0,
                        copy_bytes,
                        frozenset(),
                        fused=False,
                        hidden=True,
                    )
                )
                through |= {copied}
            outputs = _tensors(node)
            size_bytes = sum(source.untyped_storage().nbytes() for source in outputs)
            at_places = _name(node) in _WRITES_AT_PLACES
            base = _only(reads[node.all_input_nodes[0]], node) if at_places else None
            fused = not _is_extern(node) or at_places
            between = _behind(node, behind, on_cpu)
            separate = frozenset(
                name for name, of in between.items() if of not in ({0}, {size_bytes})
            )
            within = max(set[int]().union(*between.values()), default=0)
            numbers = (device_type == "cuda" and _row_numbers(node)) or outputs[0].numel()
            kernels.append(
                PlannedKernel(
                    node.name,
                    outputs[0],
                    numbers,
                    size_bytes,
                    through,
                    fused,
                    base,
                    separate,
                    within,
                )
            )
            reads[node], loads[node], behind[node] = _written_here(node)
    return kernels, set(returned)


def _row_numbers(node: Node) -> int:
    """Return the numbers that a reduction over rows reads, else 0: on a GPU what reads whole rows
    joins its loop.
    """
    if _name(node) not in _REDUCTIONS:
        return 0
    [source, *_] = node.all_input_nodes
    [read, *_] = _tensors(source)
    given = node.args[1] if len(node.args) > 1 else None
    dims = given if isinstance(given, list | tuple) else [given]
    return (
        read.numel() if {dim for dim in dims if isinstance(dim, int)} & {-1, read.ndim - 1} else 0
    )


def _written_here(
    node: Node,
) -> tuple[frozenset[Name], frozenset[tuple[Name, ...]], dict[Name, set[int]]]:
    """Return the entries of `reads`, `loads` and `behind` for a written node: its readers read the
    node itself.
    """
    return frozenset([node.name]), frozenset([(node.name,)]), {node.name: {0}}


def _only(names: frozenset[Name], node: Node) -> Name:
    """Return the only one of these names, or the node's own name if there are several."""
    return next(iter(names)) if len(names) == 1 else node.name


def _behind(
    node: Node, behind: dict[Node, dict[Name, set[int]]], on_cpu: bool
) -> dict[Name, set[int]]:
    """Return for each buffer that a node reads the sizes of the dear values between, 0 where it is
    read directly.

    A dear value that is read twice counts as a buffer of its own until its loop is made. A result
    is written over a buffer behind it only if the result, the dear value and the buffer have one
    size.
    """
    if on_cpu and len(node.users) > 1 and _name(node) in _DEAR and _tensors(node):
        [value] = _tensors(node)
        return {name: {value.nbytes} for source in node.all_input_nodes for name in behind[source]}
    sizes_of: dict[Name, set[int]] = {}
    for source in node.all_input_nodes:
        for name, sizes in behind[source].items():
            sizes_of[name] = sizes_of.get(name, set()) | sizes
    return sizes_of


def _copied_bytes(node: Node, device_type: str) -> int:
    """Return the bytes of workspace that a matrix product needs in addition to its result."""
    if _name(node) != "mm" or device_type != "cpu":
        return 0
    left, right = (operand.meta["val"] for operand in node.all_input_nodes[:2])
    return workspace_bytes(left, right)


def _is_written(node: Node) -> bool:
    if not _tensors(node):
        return False
    needed = any(reader.op == "output" or _is_extern(reader) for reader in _readers(node))
    return needed or _is_extern(node) or _name(node) in _REDUCTIONS


def _is_passed_twice(node: Node, loads: int) -> bool:
    """Return whether a CPU writes an elementwise node, because a reduction reads all of it before
    another reader does.

    Then a dear value is written instead of being computed twice. On a GPU one kernel holds the
    whole row.
    """
    if len(node.users) < 2 or not _tensors(node):
        return False
    reduced = [_name(reader) in _REDUCTIONS for reader in _readers(node)]
    return any(reduced) and not all(reduced) and (_name(node) in _DEAR or loads > MOST_LOADS)


def _readers(node: Node) -> list[Node]:
    """Return the nodes that read a node, directly or through views of it."""
    return [
        reader for user in node.users for reader in (_readers(user) if _is_view(user) else [user])
    ]


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return bool(returns) and all(
        value.alias_info and not value.alias_info.is_write for value in returns
    )


def _is_store(node: Node) -> bool:
    return _name(node) == "copy_"  # into an argument, by the kernel that computed it


def inner_bytes(total_VD: Tensor, left_CV: Tensor, right_CD: Tensor, device_type: str) -> int:
    """Return the bytes of workspace of `add_product_` of `monograph.ops.fused_gradients`, the only
    in-place operator.

    A GPU needs none. A CPU's holds some rows of the product and, where it adds them to numbers of
    another dtype, a copy of these rows in that dtype.
    """
    if device_type == "cuda":
        return 0
    numbers = min(total_VD.shape[-2], block_rows("cpu", total_VD.shape[-1])) * total_VD.shape[-1]
    return numbers * (
        right_CD.element_size() + total_VD.element_size() * (right_CD.dtype != total_VD.dtype)
    )


def _changed(node: Node) -> list[Node]:
    """Return the tensors that `add_product_` writes in place; a traced graph wraps it in a call of
    another name.
    """
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
    """Return a node's tensors without states of random generators: a few kB, whose size is known
    only at run time.
    """
    value = node.meta.get("val")
    tensors = [
        item
        for item in (value if isinstance(value, tuple | list) else [value])
        if isinstance(item, Tensor)
    ]
    return [item for item in tensors if all(isinstance(size, int) for size in item.shape)]
