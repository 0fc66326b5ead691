"""Find in which order a compiler runs the kernels of a captured graph, and how long it keeps what
they write.

This follows the rules of torch._inductor that decide about memory: it orders nodes for a low peak
(`reorder_for_peak_memory`); it fuses loops that are connected or read the same values, and computes
the fused loop's inputs first (`fuse_nodes`); and it writes a result over a buffer that nothing else
in the result's loop and nothing later reads.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

Name = int | str  # the name of a buffer: an argument's index or a node's name

# Two loops are not fused if more than FAR nodes lie between them (`are_long_distant_nodes` in
# torch._inductor), or if the buffers that one could reuse from the other have more than REUSED
# times the bytes that both read (`can_fusion_increase_peak_memory`).
FAR, REUSED = 64, 32


@dataclass
class PlannedKernel:
    """One buffer that a graph writes.

    Attributes:
        name: the node's name.
        output: the first output, a tensor that has a shape and a dtype but no data.
        numbers: the numbers over which its loop goes.
        size_bytes: bytes of all its outputs.
        reads: the arguments and earlier kernels that it reads.
        fused: whether it is elementwise, a reduction, or a write at computed places. Then it may be
            written over a value of the same size that it reads last, if nothing else in its loop
            reads that value.
        changes: the value that it changes in place, whose memory it takes. No reader is written
            over such a kernel.
        separate: values that it reads but cannot be written over.
        within_bytes: bytes of intermediate values, for which the compiler expects memory and then
            needs none.
        hidden: whether this is the workspace of the operator that follows, which the compiler does
            not know.
        over: the argument or kernel whose memory it takes, if any.
        last_reads: the other values whose memory is freed after it.
    """

    name: str
    output: Tensor
    numbers: int
    size_bytes: int
    reads: frozenset[Name]
    fused: bool
    changes: Name | None = None
    separate: frozenset[Name] = frozenset()
    within_bytes: int = 0
    hidden: bool = False
    over: Name | None = None
    last_reads: list[Name] = field(default_factory=list)


def scheduled(
    written: list[PlannedKernel], returned: set[Name], arguments: Mapping[Name, int]
) -> list[PlannedKernel]:
    """Return the kernels in the compiler's order, with `over` and `last_reads` filled in.

    Args:
        written: kernels in the order of the graph's nodes.
        returned: names of the values that the graph's caller keeps.
        arguments: bytes of each argument that the graph may free.
    """
    ordered = _early(written, returned, arguments)
    loops = _loops(ordered)
    last = {name: at for at, kernel in enumerate(ordered) for name in (*kernel.reads, kernel.name)}
    readers = Counter(
        (loops[at], name) for at, kernel in enumerate(ordered) for name in kernel.reads
    )
    sizes: dict[Name, int] = {**arguments, **{kernel.name: kernel.size_bytes for kernel in ordered}}
    changed = {kernel.name for kernel in ordered if kernel.changes is not None}
    for name in sizes:  # in a fixed order, so that equal blocks choose alike
        if name not in last or name in returned:
            continue
        reader = ordered[last[name]]
        free = (
            reader.over is None
            and readers[loops[last[name]], name] == 1
            and name not in reader.separate | changed
        )
        fits = reader.fused and name != reader.name and sizes[name] == reader.size_bytes
        if reader.changes == name or (free and fits):
            reader.over = name
        else:
            ordered[loops[last[name]]].last_reads.append(name)
    ends = {name: loops[at] for name, at in last.items() if name not in returned}
    _reuse(ordered, _expected(ordered, ends, arguments))
    return ordered


def _reuse(ordered: list[PlannedKernel], expected: list[int]) -> None:
    """Give freed buffers to later kernels of the same dtype and size, where the compiler expects no
    higher peak for it.

    The compiler does not know the workspace of operators, so the real peak may rise
    (`should_reuse_buffer`).
    """
    most = max(expected, default=0)
    freed = dict[tuple[object, int], list[tuple[int, Name]]]()
    kinds = {
        kernel.name: (kernel.output.dtype, kernel.size_bytes)
        for kernel in ordered
        if not kernel.hidden
    }
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


def _expected(
    ordered: list[PlannedKernel], ends: Mapping[Name, int], arguments: Mapping[Name, int]
) -> list[int]:
    """Return the bytes that the compiler expects to be alive at each kernel.

    It assumes that nothing is written over, and that operators need no workspace.
    """
    begins: dict[Name, int] = dict.fromkeys(arguments, 0)
    begins |= {
        kernel.name: at + (kernel.changes is not None)
        for at, kernel in enumerate(ordered)
        if not kernel.hidden
    }
    sizes: dict[Name, int] = {**arguments, **{kernel.name: kernel.size_bytes for kernel in ordered}}
    changes = [0] * (len(ordered) + 1)
    for name, begin in begins.items():
        changes[begin] += sizes[name]
        changes[ends.get(name, len(ordered) - 1) + 1] -= sizes[name]
    alive = itertools.accumulate(changes)
    return [
        size_bytes + kernel.within_bytes for size_bytes, kernel in zip(alive, ordered, strict=False)
    ]


def _early(
    written: list[PlannedKernel], returned: set[Name], arguments: Mapping[Name, int]
) -> list[PlannedKernel]:
    """Return the kernels in the order in which a compiler runs them.

    A kernel that frees at least as much memory as it takes comes directly after the last kernel
    that it reads. A kernel that reads the same values as an earlier loop of its size joins that
    loop. The loop then waits for the kernel's other inputs, unless these need the loop itself.
    """
    written = _late(written)
    last = {name: at for at, kernel in enumerate(written) for name in kernel.reads}
    sizes: dict[Name, int] = {kernel.name: kernel.size_bytes for kernel in written}
    known: dict[Name, int] = {**arguments, **sizes}
    order = {kernel.name: number for number, kernel in enumerate(written)}
    users = Counter(name for kernel in written for name in kernel.reads) + Counter(returned)
    ordered: list[PlannedKernel] = []

    def may_join(loop: PlannedKernel, kernel: PlannedKernel) -> bool:
        """Return whether the kernel is near the loop, and common reads outweigh reads of one that
        could be reused.

        Arguments that the graph may not free do not count, as the two may read different parts of
        them: chunks of a loss do so.
        """
        shared = sum(known.get(name, 0) for name in loop.reads & kernel.reads)
        alone = (
            {known.get(name, 0) for name in other.reads if users[name] == 1}
            for other in (loop, kernel)
        )
        far = order[kernel.name] - order[loop.name] > FAR
        return shared > 0 and not far and sum(set.intersection(*alone)) <= REUSED * shared

    for number, kernel in enumerate(written):
        frees = sum(sizes.get(name, 0) for name in kernel.reads if last[name] == number)
        at = len(ordered)
        if kernel.fused:
            near = [
                other
                for other in ordered
                if _share_a_loop(other, kernel) and may_join(other, kernel)
            ]
            _make_ready(ordered, kernel, near)
            ready = next(
                (place for place in range(at, 0, -1) if ordered[place - 1].name in kernel.reads), 0
            )
            places = (
                place + 1 for place in range(ready, at) if _share_a_loop(ordered[place], kernel)
            )
            at = next(places, ready if ready and frees >= kernel.size_bytes else at)
            while 0 < at < len(ordered) and _is_within_rows(ordered[at - 1], ordered[at], kernel):
                at += 1
        ordered.insert(at, kernel)
    return ordered


def _late(written: list[PlannedKernel]) -> list[PlannedKernel]:
    """Return the kernels with each that reads nothing, such as zeros, directly before the first
    that reads it.
    """
    late = {kernel.name: kernel for kernel in written if kernel.fused and not kernel.reads}
    ordered = []
    for kernel in written:
        ordered += [late.pop(name) for name in sorted(map(str, kernel.reads)) if name in late]
        ordered += [] if kernel.name in late else [kernel]
    return [*ordered, *late.values()]


def _make_ready(
    ordered: list[PlannedKernel], kernel: PlannedKernel, near: list[PlannedKernel]
) -> None:
    """Move a kernel's inputs ahead of the first loop in `near` that it belongs to, unless they need
    its results.
    """
    ends = _loops(ordered) if near else []
    for place in map(ordered.index, near):
        begin = ends.index(ends[place])
        end = ends[place] + 1
        members = {member.name for member in ordered[begin:end]}
        needed = set(kernel.reads) - members
        ahead = list[PlannedKernel]()
        after = list[PlannedKernel]()
        for other in reversed(ordered[end:]):
            is_needed = other.name in needed
            (ahead if is_needed else after).append(other)
            needed |= other.reads if is_needed else frozenset()
        if ahead and not needed & members:
            ordered[begin:] = [*ahead[::-1], *ordered[begin:end], *after[::-1]]
            return


def _share_a_loop(loop: PlannedKernel, kernel: PlannedKernel) -> bool:
    """Return whether one loop computes both, because they have equally many numbers and a common
    input.
    """
    return loop.fused and loop.numbers == kernel.numbers and not loop.reads.isdisjoint(kernel.reads)


def _is_within_rows(before: PlannedKernel, after: PlannedKernel, kernel: PlannedKernel) -> bool:
    """Return whether a kernel would come between two of one loop over rows, on a GPU, to which it
    does not belong.
    """
    rows = before.numbers > before.output.numel() and _share_a_loop(before, after)
    return rows and not _share_a_loop(after, kernel)


def _loops(ordered: list[PlannedKernel]) -> list[int]:
    """Return for each kernel the index of the last kernel of its loop; the loop's inputs are needed
    until then.
    """
    ends = list(range(len(ordered)))
    for at in range(len(ordered) - 2, -1, -1):
        this, following = ordered[at], ordered[at + 1]
        if (
            this.fused
            and following.fused
            and (this.name in following.reads or _share_a_loop(this, following))
        ):
            ends[at] = ends[at + 1]
    return ends
