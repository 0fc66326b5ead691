"""Find which nodes of a captured graph a compiler writes to memory, in which order, and how long it keeps them.

A compiler computes elementwise nodes inside the kernels that read them. It writes to memory (`kernels`) only the values
that a product, an extern operator or the graph's caller reads, and the results of reductions, as a reader needs a whole
reduction before it can begin.

The order and the lifetimes (`scheduled`) follow the rules of torch._inductor that decide about memory: it orders nodes
for a low peak (`reorder_for_peak_memory`); it fuses loops that are connected or read the same values, and computes the
fused loop's inputs first (`fuse_nodes`); and it writes a result over a buffer that nothing else in the result's loop
and nothing later reads.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from monograph.graph.matmul import workspace_bytes
from monograph.ops.cross_entropy import BLOCK_BYTES

Name = int | str  # the name of a buffer: an argument's index or a node's name

# Two loops are not fused if more than FAR nodes lie between them (`are_long_distant_nodes` in torch._inductor), or if
# the buffers that one could reuse from the other have more than REUSED times the bytes that both read
# (`can_fusion_increase_peak_memory`).
FAR, REUSED = 64, 32


@dataclass
class Kernel:
    """One buffer that a graph writes.

    Attributes:
        name: the node's name.
        output: the first output, a tensor that has a shape and a dtype but no data.
        size_bytes: bytes of all its outputs.
        reads: the arguments and earlier kernels that it reads.
        fused: whether it is elementwise, a reduction, or a write at computed places. Then it may be written over a
            value of the same size that it reads last, if nothing else in its loop reads that value.
        changes: the value that it changes in place, whose memory it takes. No reader is written over such a kernel.
        separate: values that it reads but cannot be written over.
        within_bytes: bytes of intermediate values, for which the compiler expects memory and then needs none.
        hidden: whether this is the workspace of the operator that follows, which the compiler does not know.
        over: the argument or kernel whose memory it takes, if any.
        last_reads: the other values whose memory is freed after it.
    """

    name: str
    output: Tensor
    size_bytes: int
    reads: frozenset[Name]
    fused: bool
    changes: Name | None = None
    separate: frozenset[Name] = frozenset()
    within_bytes: int = 0
    hidden: bool = False
    over: Name | None = None
    last_reads: list[Name] = field(default_factory=list)


def scheduled(written: list[Kernel], returned: set[Name], arguments: Mapping[Name, int]) -> list[Kernel]:
    """Return the kernels in the compiler's order, with `over` and `last_reads` filled in.

    Args:
        written: kernels in the order of the graph's nodes.
        returned: names of the values that the graph's caller keeps.
        arguments: bytes of each argument that the graph may free.
    """
    ordered = _early(written, returned, arguments)
    loops = _loops(ordered)
    last = {name: at for at, kernel in enumerate(ordered) for name in (*kernel.reads, kernel.name)}
    readers = Counter((loops[at], name) for at, kernel in enumerate(ordered) for name in kernel.reads)
    sizes: dict[Name, int] = {**arguments, **{kernel.name: kernel.size_bytes for kernel in ordered}}
    changed = {kernel.name for kernel in ordered if kernel.changes is not None}
    for name in sizes:  # in a fixed order, so that equal blocks choose alike
        if name not in last or name in returned:
            continue
        reader = ordered[last[name]]
        free = reader.over is None and readers[loops[last[name]], name] == 1 and name not in reader.separate | changed
        fits = reader.fused and name != reader.name and sizes[name] == reader.size_bytes
        if reader.changes == name or (free and fits):
            reader.over = name
        else:
            ordered[loops[last[name]]].last_reads.append(name)
    ends = {name: loops[at] for name, at in last.items() if name not in returned}
    _reuse(ordered, _expected(ordered, ends, arguments))
    return ordered


def _reuse(ordered: list[Kernel], expected: list[int]) -> None:
    """Give freed buffers to later kernels of the same dtype and size, where the compiler expects no higher peak for it.

    The compiler does not know the workspace of operators, so the real peak may rise (`should_reuse_buffer`).
    """
    most, freed = max(expected, default=0), dict[tuple[object, int], list[tuple[int, Name]]]()
    kinds = {kernel.name: (kernel.output.dtype, kernel.size_bytes) for kernel in ordered if not kernel.hidden}
    for at, kernel in enumerate(ordered):
        if kernel.over is None and (waiting := freed.get(kinds.get(kernel.name, (None, 0)))):
            begin, name = waiting[-1]
            between = range(begin + 1, at)
            if all(expected[step] + kernel.size_bytes <= most for step in between):
                waiting.pop()
                ordered[begin].last_reads.remove(name)
                kernel.over = name
                for step in between:
                    expected[step] += kernel.size_bytes
        for name in kernel.last_reads:
            if name in kinds:
                freed.setdefault(kinds[name], []).append((at, name))


def _expected(ordered: list[Kernel], ends: Mapping[Name, int], arguments: Mapping[Name, int]) -> list[int]:
    """Return the bytes that the compiler expects to be alive at each kernel.

    It assumes that nothing is written over, and that operators need no workspace.
    """
    begins: dict[Name, int] = dict.fromkeys(arguments, 0)
    begins |= {kernel.name: at + (kernel.changes is not None) for at, kernel in enumerate(ordered) if not kernel.hidden}
    sizes: dict[Name, int] = {**arguments, **{kernel.name: kernel.size_bytes for kernel in ordered}}
    changes = [0] * (len(ordered) + 1)
    for name, begin in begins.items():
        changes[begin] += sizes[name]
        changes[ends.get(name, len(ordered) - 1) + 1] -= sizes[name]
    alive = itertools.accumulate(changes)
    return [size_bytes + kernel.within_bytes for size_bytes, kernel in zip(alive, ordered, strict=False)]


def _early(written: list[Kernel], returned: set[Name], arguments: Mapping[Name, int]) -> list[Kernel]:
    """Return the kernels in the order in which a compiler runs them.

    A kernel that frees at least as much memory as it takes comes directly after the last kernel that it reads. A kernel
    that reads the same values as an earlier loop of its size joins that loop. The loop then waits for the kernel's
    other inputs, unless these need the loop itself.
    """
    last = {name: at for at, kernel in enumerate(written) for name in kernel.reads}
    sizes: dict[Name, int] = {kernel.name: kernel.size_bytes for kernel in written}
    known: dict[Name, int] = {**arguments, **sizes}
    order = {kernel.name: number for number, kernel in enumerate(written)}
    users = Counter(name for kernel in written for name in kernel.reads) + Counter(returned)
    ordered: list[Kernel] = []

    def may_join(loop: Kernel, kernel: Kernel) -> bool:
        """Return whether the kernel is near the loop, and common reads outweigh reads of one that could be reused.

        Arguments that the graph may not free do not count, as the two may read different parts of them: chunks of a
        loss do so.
        """
        shared = sum(known.get(name, 0) for name in loop.reads & kernel.reads)
        alone = ({known.get(name, 0) for name in other.reads if users[name] == 1} for other in (loop, kernel))
        far = order[kernel.name] - order[loop.name] > FAR
        return shared > 0 and not far and sum(set.intersection(*alone)) <= REUSED * shared

    for number, kernel in enumerate(written):
        frees = sum(sizes.get(name, 0) for name in kernel.reads if last[name] == number)
        at = len(ordered)
        if kernel.fused:
            near = [other for other in ordered if _share_a_loop(other, kernel) and may_join(other, kernel)]
            _make_ready(ordered, kernel, near)
            ready = next((place for place in range(at, 0, -1) if ordered[place - 1].name in kernel.reads), 0)
            places = (place + 1 for place in range(ready, at) if _share_a_loop(ordered[place], kernel))
            at = next(places, ready if ready and frees >= kernel.size_bytes else at)
        ordered.insert(at, kernel)
    return ordered


def _make_ready(ordered: list[Kernel], kernel: Kernel, near: list[Kernel]) -> None:
    """Move a kernel's inputs ahead of the first loop in `near` that it belongs to, unless they need its results."""
    ends = _loops(ordered) if near else []
    for place in map(ordered.index, near):
        begin, end = ends.index(ends[place]), ends[place] + 1
        members = {member.name for member in ordered[begin:end]}
        needed, ahead, after = set(kernel.reads) - members, list[Kernel](), list[Kernel]()
        for other in reversed(ordered[end:]):
            is_needed = other.name in needed
            (ahead if is_needed else after).append(other)
            needed |= other.reads if is_needed else frozenset()
        if ahead and not needed & members:
            ordered[begin:] = [*ahead[::-1], *ordered[begin:end], *after[::-1]]
            return


def _share_a_loop(loop: Kernel, kernel: Kernel) -> bool:
    """Return whether one loop computes both, because they have equally many numbers and a common input."""
    alike = loop.fused and not loop.reads.isdisjoint(kernel.reads)
    return alike and loop.output.shape.numel() == kernel.output.shape.numel()


def _loops(ordered: list[Kernel]) -> list[int]:
    """Return for each kernel the index of the last kernel of its loop; the loop's inputs are needed until then."""
    ends = list(range(len(ordered)))
    for at in range(len(ordered) - 2, -1, -1):
        this, following = ordered[at], ordered[at + 1]
        if this.fused and following.fused and (this.name in following.reads or _share_a_loop(this, following)):
            ends[at] = ends[at + 1]
    return ends


# The compiler treats these as elementwise although torch does not tag them so: reads at computed places, casts,
# constants.
_ELEMENTWISE = {
    "arange", "clone", "constant_pad_nd", "convert_element_type", "copy", "embedding", "full", "full_like", "gather",
    "index", "iota", "lift_fresh_copy", "scalar_tensor", "select_scatter", "slice_scatter", "_to_copy", "_unsafe_index",
    "cat", "repeat",
}  # fmt: skip
# These operators return their first argument, changed; the compiler writes the result over it.
_WRITES_AT_PLACES = {"index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "scatter_add"}
_REDUCTIONS = {"amax", "amin", "any", "argmax", "linalg_vector_norm", "logsumexp", "mean", "prod", "sum", "var_mean"}
# On a CPU, the compiler does not compute these values twice, nor values that read more than MOST_LOADS buffers:
# `should_realize_on_reuse` of torch._inductor, and `config.realize_reads_threshold`.
_DEAR = {"exp", "sigmoid"}
MOST_LOADS = 4


def kernels(graph: GraphModule, device_type: str, backward: bool) -> list[Kernel]:
    """Return the buffers of a partitioned graph of aten operators, in the order in which the compiler writes them.

    Only a backward graph may free its arguments.
    """
    given = enumerate(graph.graph.find_nodes(op="placeholder") if backward else [])
    arguments: dict[Name, int] = {index: sum(tensor.nbytes for tensor in _tensors(node)) for index, node in given}
    return scheduled(*_written(graph, device_type), arguments)


def _written(graph: GraphModule, device_type: str) -> tuple[list[Kernel], set[Name]]:
    """Return the kernels in the order of the graph's nodes, and the names that the caller keeps."""
    reads: dict[Node, frozenset[Name]] = {}
    loads: dict[Node, frozenset[tuple[Name, ...]]] = {}  # the buffers that a node reads, each with the views between
    behind: dict[Node, dict[Name, set[int]]] = {}  # for each buffer read: bytes of the dear values between, 0 for none
    kernels: list[Kernel] = []
    returned: frozenset[Name] = frozenset()
    arguments = 0
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            reads[node], loads[node] = frozenset([arguments]), frozenset([(arguments,)])
            behind[node] = {arguments: {0}}
            arguments += 1
            continue
        through = frozenset[Name]().union(*(reads[source] for source in node.all_input_nodes))
        loads[node] = frozenset[tuple[Name, ...]]().union(*(loads[source] for source in node.all_input_nodes))
        if _is_view(node):
            loads[node] = frozenset((*load, node.name) for load in loads[node])
        if node.op == "output":
            returned = through
        elif bases := _changed(node):
            total, left, right = (source.meta["val"] for source in (*bases, node.kwargs["left"], node.kwargs["right"]))
            product, inside = f"{node.name}'s product", inner_bytes(total, left, right, device_type)
            kernels.append(Kernel(product, total, inside, through, fused=False, hidden=True))
            changes = _only(reads[bases[0]], node)
            kernels.append(Kernel(node.name, total, total.nbytes, through | {product}, fused=False, changes=changes))
            reads[node], loads[node], behind[node] = _written_here(node)
        elif _is_view(node) or not (_is_written(node) or _is_passed_twice(node, len(loads[node]))):
            reads[node], behind[node] = through, _behind(node, behind)
            if _is_store(node) and kernels:
                kernels[-1].reads |= through
        else:
            if copy_bytes := _copied_bytes(node, device_type):
                copied = f"{node.name}'s copy"
                kernels.append(Kernel(copied, _tensors(node)[0], copy_bytes, frozenset(), fused=False, hidden=True))
                through |= {copied}
            outputs = _tensors(node)
            size_bytes = sum(source.untyped_storage().nbytes() for source in outputs)
            at_places = _name(node) in _WRITES_AT_PLACES
            base = _only(reads[node.all_input_nodes[0]], node) if at_places else None
            fused = not _is_extern(node) or at_places
            between = _behind(node, behind)
            separate = frozenset(name for name, of in between.items() if of not in ({0}, {size_bytes}))
            within = max(set[int]().union(*between.values()), default=0)
            kernels.append(Kernel(node.name, outputs[0], size_bytes, through, fused, base, separate, within))
            reads[node], loads[node], behind[node] = _written_here(node)
    return kernels, set(returned)


def _written_here(node: Node) -> tuple[frozenset[Name], frozenset[tuple[Name, ...]], dict[Name, set[int]]]:
    """Return the entries of `reads`, `loads` and `behind` for a written node: its readers read the node itself."""
    return frozenset([node.name]), frozenset([(node.name,)]), {node.name: {0}}


def _only(names: frozenset[Name], node: Node) -> Name:
    """Return the only one of these names, or the node's own name if there are several."""
    return next(iter(names)) if len(names) == 1 else node.name


def _behind(node: Node, behind: dict[Node, dict[Name, set[int]]]) -> dict[Name, set[int]]:
    """Return for each buffer that a node reads the sizes of the dear values between, 0 where it is read directly.

    A dear value that is read twice counts as a buffer of its own until its loop is made. A result is written over a
    buffer behind it only if the result, the dear value and the buffer have one size.
    """
    if len(node.users) > 1 and _name(node) in _DEAR and _on_cpu(node):
        [value] = _tensors(node)
        return {name: {value.nbytes} for source in node.all_input_nodes for name in behind[source]}
    sizes_of: dict[Name, set[int]] = {}
    for source in node.all_input_nodes:
        for name, sizes in behind[source].items():
            sizes_of[name] = sizes_of.get(name, set()) | sizes
    return sizes_of


def _on_cpu(node: Node) -> bool:
    return bool(_tensors(node)) and _tensors(node)[0].device.type == "cpu"


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
    """Return whether an elementwise node is written because a reduction reads all of it before another reader does.

    On a CPU a dear value is written instead of being computed twice. On a GPU one kernel holds the whole row.
    """
    if len(node.users) < 2 or not _on_cpu(node):
        return False
    reduced = [_name(reader) in _REDUCTIONS for reader in _readers(node)]
    return any(reduced) and not all(reduced) and (_name(node) in _DEAR or loads > MOST_LOADS)


def _readers(node: Node) -> list[Node]:
    """Return the nodes that read a node, directly or through views of it."""
    return [reader for user in node.users for reader in (_readers(user) if _is_view(user) else [user])]


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return bool(returns) and all(value.alias_info and not value.alias_info.is_write for value in returns)


def _is_store(node: Node) -> bool:
    return _name(node) == "copy_"  # into an argument, by the kernel that computed it


def inner_bytes(total_VD: Tensor, left_CV: Tensor, right_CD: Tensor, device_type: str) -> int:
    """Return the bytes of workspace of `add_product_` of `monograph.ops.cross_entropy`, the only in-place operator.

    The workspace holds some rows of the product and, where a CPU adds them to numbers of another dtype, a copy of these
    rows in that dtype.
    """
    rows = min(total_VD.shape[-2], max(1, BLOCK_BYTES[device_type] // (4 * total_VD.shape[-1])))
    numbers = rows * total_VD.shape[-1]
    cast = device_type == "cpu" and right_CD.dtype != total_VD.dtype
    return numbers * (right_CD.element_size() + total_VD.element_size() * cast)


def _changed(node: Node) -> list[Node]:
    """Return the tensors that `add_product_` writes in place; a traced graph wraps it in a call of another name."""
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
    """Return a node's tensors without states of random generators: a few kB, whose size is known only at run time."""
    value = node.meta.get("val")
    tensors = [item for item in (value if isinstance(value, tuple | list) else [value]) if isinstance(item, Tensor)]
    return [item for item in tensors if all(isinstance(size, int) for size in item.shape)]
