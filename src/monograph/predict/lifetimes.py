"""Find in which order a compiler runs the kernels of a captured graph, and how long it keeps what
they write.

`predict.kernels` finds which kernels a graph has. A kernel here writes one buffer; if an operator has
several outputs, they are one buffer here. The compiler fuses some consecutive kernels, and the device
then runs them as one. These consecutive kernels are called a loop here, and so is a kernel that is not
fused with others.

The order follows the rules of torch._inductor that decide about memory:

- It orders nodes for a low peak (`reorder_for_peak_memory`).
- It fuses two loops if one reads the other's result, or if both read the same values. All inputs of
  the fused loop are then computed before it (`fuse_nodes`).
- It writes a kernel's result over a buffer that this kernel reads, if no other kernel of its loop
  and no later kernel reads the buffer (`decide_inplace_update`).
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

BufferName = int | str  # the name of a buffer: an argument's index or a node's name

# Two loops are not fused if more than this many nodes are between them (`are_long_distant_nodes` in
# torch._inductor).
MAX_DISTANCE = 64
# They are not fused either if reusable bytes > MAX_REUSE_RATIO * shared bytes
# (`can_fusion_increase_peak_memory`). The shared bytes are those of the values that both loops read. The
# reusable bytes are those that fusing may cost. For example, only the first loop reads a certain buffer
# of 4 MB, and only the second loop reads a certain other buffer of 4 MB. Without fusion the second buffer
# can have the memory of the first. The fused loop needs both buffers at once, so these 4 MB are reusable.
MAX_REUSE_RATIO = 32


@dataclass
class PlannedKernel:
    """A kernel of a graph, which writes one buffer.

    Attributes:
        name: the name of the graph's node, and of the buffer.
        output: the first output, a tensor that has a shape and a dtype but no data.
        loop_elements: how many elements its loop goes over.
        size_bytes: bytes of the buffer, which has all outputs.
        reads: the arguments and earlier kernels that it reads.
        fusable: whether it is elementwise, a reduction, or a write at places that are given by indices,
            so that the compiler can fuse it with other kernels. Its result may then be written over
            a value that it reads, if the value has the same size, and if neither another kernel of
            the loop nor a later kernel reads the value.
        changes: the value that it changes in place, whose memory its result takes; None if it changes
            nothing. No later result is written over the result of a kernel that changes a value
            (`decide_inplace_update`).
        not_over: values that it reads, but over which its result cannot be written, for example
            because an expensive intermediate value between them and the result has another size.
        intermediate_bytes: bytes of intermediate values. The compiler expects to need memory for
            them, but then needs none.
        is_workspace: whether this entry is no kernel, but stands for the workspace of the operator
            that follows. The compiler does not know of this workspace.
        written_over: the argument or kernel whose memory its result takes. Either the kernel reads that
            value and its result is written over it, or that value was freed earlier. None: the
            result gets new memory.
        freed_after: the values whose memory is freed after it.
    """

    name: str
    output: Tensor
    loop_elements: int
    size_bytes: int
    reads: frozenset[BufferName]
    fusable: bool
    changes: BufferName | None = None
    not_over: frozenset[BufferName] = frozenset()
    intermediate_bytes: int = 0
    is_workspace: bool = False
    written_over: BufferName | None = None
    freed_after: list[BufferName] = field(default_factory=list)


def order_kernels(
    in_graph_order: list[PlannedKernel],
    returned: set[BufferName],
    arguments: Mapping[BufferName, int],
) -> list[PlannedKernel]:
    """Set the kernels' `written_over` and `freed_after`, and return them in the compiler's order.

    Args:
        in_graph_order: the kernels in the order of the graph's nodes.
        returned: names of the values that the graph's caller keeps.
        arguments: bytes of each argument that the graph may free.
    """
    ordered = _run_order(in_graph_order, returned, arguments)
    loop_ends = _loop_ends(ordered)
    # For each value, the index of the last kernel that reads it. If none does, it is the index of the
    # kernel that writes it.
    last_use: dict[BufferName, int] = {}
    # By (end of a loop, value): how many kernels of the loop read the value.
    readers = Counter[tuple[int, BufferName]]()
    for index, kernel in enumerate(ordered):
        last_use[kernel.name] = index
        for name in kernel.reads:
            last_use[name] = index
            readers[loop_ends[index], name] += 1
    sizes: dict[BufferName, int] = {
        **arguments,
        **{kernel.name: kernel.size_bytes for kernel in ordered},
    }
    in_place_results = {kernel.name for kernel in ordered if kernel.changes is not None}
    # `sizes` has the values in the order of the arguments and kernels, so equal blocks of a model get
    # equal plans. The order of `last_use` is not used: `reads` are sets of texts, whose order is random.
    for name in sizes:
        if name not in last_use or name in returned:
            continue
        last_user = ordered[last_use[name]]
        loop_end = loop_ends[last_use[name]]
        needs_memory = last_user.fusable and last_user.written_over is None
        # If other kernels of the loop read the value, they may do so after the result is written.
        is_only_reader_in_loop = readers[loop_end, name] == 1
        may_be_overwritten = name not in last_user.not_over and name not in in_place_results
        # If nothing reads the value, `last_user` is the kernel that writes it.
        is_read = name != last_user.name
        has_equal_size = sizes[name] == last_user.size_bytes
        fits = is_read and has_equal_size
        takes_over = needs_memory and is_only_reader_in_loop and may_be_overwritten and fits
        if last_user.changes == name or takes_over:
            last_user.written_over = name
        else:
            # The inputs of a loop are needed until its last kernel.
            ordered[loop_end].freed_after.append(name)
    # In the plan above, a value that is written over is not freed. The compiler's estimate of the peak
    # assumes that nothing is written over, so in the estimate each value is freed after its last use.
    freed_at = {name: loop_ends[index] for name, index in last_use.items() if name not in returned}
    _reuse_buffers(ordered, _expected_bytes(ordered, freed_at, arguments))
    return ordered


def _reuse_buffers(ordered: list[PlannedKernel], expected_bytes: list[int]) -> None:
    """Give freed buffers to later kernels of the same dtype and size, if the compiler expects that
    the peak does not rise.

    The compiler does not know the workspace of operators, so the real peak may rise
    (`should_reuse_buffer`).
    """
    peak_bytes = max(expected_bytes, default=0)
    # Freed buffers, as (index of the kernel after which it is freed, name), by (dtype, bytes). The one
    # that was freed last is last.
    freed = dict[tuple[object, int], list[tuple[int, BufferName]]]()
    # Arguments are not in this dict: the compiler gives their memory back as soon as they are freed, so
    # no later kernel reuses it. (Their last reader may still be written over them, in `order_kernels`.)
    dtype_and_bytes: dict[BufferName, tuple[object, int]] = {
        kernel.name: (kernel.output.dtype, kernel.size_bytes)
        for kernel in ordered
        if not kernel.is_workspace
    }
    for index, kernel in enumerate(ordered):
        candidates: list[tuple[int, BufferName]] = []
        if kernel.written_over is None and kernel.name in dtype_and_bytes:
            candidates = freed.get(dtype_and_bytes[kernel.name], [])
        if candidates:
            freed_at, name = candidates[-1]
            # If the buffer is reused, its memory is also alive at the kernels after `freed_at` and before
            # `index`. At `freed_at` it already counts as the old buffer, and at `index` as the new one.
            between = range(freed_at + 1, index)
            if all(expected_bytes[step] + kernel.size_bytes <= peak_bytes for step in between):
                candidates.pop()
                ordered[freed_at].freed_after.remove(name)
                kernel.written_over = name
                for step in between:
                    expected_bytes[step] += kernel.size_bytes
        for name in kernel.freed_after:
            if name in dtype_and_bytes:
                freed.setdefault(dtype_and_bytes[name], []).append((index, name))


def _expected_bytes(
    ordered: list[PlannedKernel],
    freed_at: Mapping[BufferName, int],
    arguments: Mapping[BufferName, int],
) -> list[int]:
    """Return the bytes that the compiler expects to be alive at each kernel.

    It assumes that nothing is written over, and that operators need no workspace.

    Args:
        ordered: the kernels.
        freed_at: the index of the kernel after which a value is freed; a value that is not listed
            is never freed.
        arguments: bytes of each argument that the graph may free.
    """
    allocated_at: dict[BufferName, int] = dict.fromkeys(arguments, 0)
    for index, kernel in enumerate(ordered):
        if not kernel.is_workspace:
            # A kernel that changes a value in place allocates nothing. The value counts until this
            # kernel, and the result, which has the value's memory, counts from the next kernel on.
            allocated_at[kernel.name] = index + 1 if kernel.changes is not None else index
    sizes: dict[BufferName, int] = {
        **arguments,
        **{kernel.name: kernel.size_bytes for kernel in ordered},
    }
    # How many more bytes are alive at each kernel than at the previous one. The last entry is for the
    # time after all kernels, and is not used.
    differences = [0] * (len(ordered) + 1)
    last_kernel = len(ordered) - 1
    for name, index in allocated_at.items():
        last_alive = freed_at.get(name, last_kernel)
        differences[index] += sizes[name]
        differences[last_alive + 1] -= sizes[name]
    alive_bytes = itertools.accumulate(differences)
    return [
        alive + kernel.intermediate_bytes
        for alive, kernel in zip(alive_bytes, ordered, strict=False)
    ]


def _run_order(
    in_graph_order: list[PlannedKernel],
    returned: set[BufferName],
    arguments: Mapping[BufferName, int],
) -> list[PlannedKernel]:
    """Return the kernels in the order in which a compiler runs them.

    A kernel that frees at least as much memory as it takes comes directly after the last kernel
    that it reads. A kernel that reads the same values as an earlier loop of its size joins that
    loop. The kernel's other inputs are moved ahead of that loop, unless they need the loop's results.

    The arguments are those of `order_kernels`.
    """
    kernels = _delay_constants(in_graph_order)
    # For each value, the index of the last kernel in `kernels` that reads it.
    last_reader = {name: index for index, kernel in enumerate(kernels) for name in kernel.reads}
    # Bytes of what kernels write, and in `known_bytes` also of arguments that the graph may free.
    written_bytes: dict[BufferName, int] = {kernel.name: kernel.size_bytes for kernel in kernels}
    known_bytes: dict[BufferName, int] = {**arguments, **written_bytes}
    # For each kernel, its index in `kernels`.
    position = {kernel.name: index for index, kernel in enumerate(kernels)}
    # For each value, how many kernels read it, plus 1 if the graph's caller keeps it.
    users = Counter(name for kernel in kernels for name in kernel.reads) + Counter(returned)
    ordered: list[PlannedKernel] = []

    def single_use_sizes(kernel: PlannedKernel) -> set[int]:
        """Return the different sizes, in bytes, of the values that only this kernel reads."""
        return {known_bytes.get(name, 0) for name in kernel.reads if users[name] == 1}

    def may_join(loop: PlannedKernel, kernel: PlannedKernel) -> bool:
        """Return whether the kernel is near the loop, and the two read enough bytes that are the same
        (see MAX_DISTANCE and MAX_REUSE_RATIO).

        Arguments that the graph may not free do not count, because the two may read different parts
        of them, as chunks of a loss do.
        """
        shared = sum(known_bytes.get(name, 0) for name in loop.reads & kernel.reads)
        is_far = position[kernel.name] - position[loop.name] > MAX_DISTANCE
        # Only a buffer of the same size can have the memory of another one. As in torch._inductor, each
        # size that occurs in both sets counts once, however many buffers have it.
        sizes_in_both = single_use_sizes(loop) & single_use_sizes(kernel)
        reusable = sum(sizes_in_both)
        return shared > 0 and not is_far and reusable <= MAX_REUSE_RATIO * shared

    for index, kernel in enumerate(kernels):
        place = len(ordered)
        if kernel.fusable:
            joinable = [
                other
                for other in ordered
                if _share_a_loop(other, kernel) and may_join(other, kernel)
            ]
            _move_inputs_ahead(ordered, kernel, joinable)
            freed_bytes = sum(
                written_bytes.get(name, 0) for name in kernel.reads if last_reader[name] == index
            )
            place = _place_in_order(ordered, kernel, freed_bytes)
        ordered.insert(place, kernel)
    return ordered


def _place_in_order(ordered: list[PlannedKernel], kernel: PlannedKernel, freed_bytes: int) -> int:
    """Return the index at which a fusable kernel comes among the kernels so far.

    Args:
        ordered: the kernels so far.
        kernel: the kernel.
        freed_bytes: bytes that are freed after it.
    """
    end = len(ordered)
    input_indices = [index for index, other in enumerate(ordered) if other.name in kernel.reads]
    after_inputs = input_indices[-1] + 1 if input_indices else 0
    same_loop = [
        index for index in range(after_inputs, end) if _share_a_loop(ordered[index], kernel)
    ]
    if same_loop:
        # All inputs come before the first kernel of `same_loop`, so any place after it would be valid.
        place = same_loop[0] + 1
    elif input_indices and freed_bytes >= kernel.size_bytes:
        place = after_inputs
    else:
        place = end
    # A kernel that does not belong to a loop over rows comes after that loop, not inside of it.
    while 0 < place < end and _splits_row_loop(ordered[place - 1], ordered[place], kernel):
        place += 1
    return place


def _delay_constants(in_graph_order: list[PlannedKernel]) -> list[PlannedKernel]:
    """Move each kernel that reads nothing, such as zeros, directly before the first kernel that
    reads it, and return all kernels.
    """
    unplaced_constants = {
        kernel.name: kernel for kernel in in_graph_order if kernel.fusable and not kernel.reads
    }
    ordered = []
    for kernel in in_graph_order:
        # Names of arguments are integers; as texts they can be sorted together with other names.
        for name in sorted(map(str, kernel.reads)):
            if name in unplaced_constants:
                ordered.append(unplaced_constants.pop(name))
        # A constant itself is skipped here. It comes before its readers in the graph, so it is not yet
        # placed, and its first reader will place it.
        if kernel.name not in unplaced_constants:
            ordered.append(kernel)
    return [*ordered, *unplaced_constants.values()]  # the last ones have no reader


def _move_inputs_ahead(
    ordered: list[PlannedKernel], kernel: PlannedKernel, joinable: list[PlannedKernel]
) -> None:
    """Move a kernel's inputs ahead of the first loop that it may join. If these inputs need that
    loop's results, the next loop is tried.

    Args:
        ordered: the kernels so far, which are reordered in place.
        kernel: the kernel.
        joinable: kernels whose loops the kernel may join.
    """
    loop_ends = _loop_ends(ordered) if joinable else []
    for member in joinable:
        loop_end = loop_ends[ordered.index(member)]
        # The kernels of a loop have the same end, so the first kernel with this end begins the loop.
        begin = loop_ends.index(loop_end)
        end = loop_end + 1
        members = {other.name for other in ordered[begin:end]}
        # The kernel's own inputs that the loop computes are left out: the kernel will follow them.
        needed = set(kernel.reads) - members
        # Of the kernels after the loop, those that move ahead of it and those that stay after it. Both
        # lists are in reverse order, because what a needed kernel reads is needed, too.
        ahead = list[PlannedKernel]()
        after = list[PlannedKernel]()
        for other in reversed(ordered[end:]):
            if other.name in needed:
                ahead.append(other)
                needed |= other.reads
            else:
                after.append(other)
        # If a kernel in `ahead` reads a member, it cannot be moved ahead of the loop.
        inputs_need_loop = not needed.isdisjoint(members)
        if ahead and not inputs_need_loop:
            ordered[begin:] = [*reversed(ahead), *ordered[begin:end], *reversed(after)]
            return


def _share_a_loop(other: PlannedKernel, kernel: PlannedKernel) -> bool:
    """Return whether one loop computes both kernels, because they go over equally many elements and
    have a common input. Whether one reads the other's result is not asked here (see `_loop_ends`).

    Args:
        other: a kernel; the result is False if it is not fusable.
        kernel: another kernel. Whether it is fusable is not checked here.
    """
    has_common_input = not other.reads.isdisjoint(kernel.reads)
    return other.fusable and other.loop_elements == kernel.loop_elements and has_common_input


def _splits_row_loop(before: PlannedKernel, after: PlannedKernel, kernel: PlannedKernel) -> bool:
    """Return whether a kernel between two others would split their loop over rows, because it does
    not belong to that loop.

    On a GPU, a reduction over rows (such as a norm's) and other kernels that read the same rows are
    one loop over the elements of the rows. `predict.kernels` counts these elements as the reduction's
    `loop_elements`. For a CPU it counts the results, so that there is no such loop.
    """
    # A reduction over rows reads more elements than it writes.
    reduces_rows = before.loop_elements > before.output.numel()
    is_one_loop = reduces_rows and _share_a_loop(before, after)
    return is_one_loop and not _share_a_loop(after, kernel)


def _loop_ends(ordered: list[PlannedKernel]) -> list[int]:
    """Return for each kernel the index of the last kernel of its loop."""
    ends = list(range(len(ordered)))
    for index in reversed(range(len(ordered) - 1)):
        kernel = ordered[index]
        following = ordered[index + 1]
        if not (kernel.fusable and following.fusable):
            continue
        if kernel.name in following.reads or _share_a_loop(kernel, following):
            ends[index] = ends[index + 1]
    return ends
