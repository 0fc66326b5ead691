"""In which order a compiler writes a graph's buffers, and until when it keeps them.

These are the rules of torch._inductor, as far as they decide about memory: nodes are ordered for a low peak
(`reorder_for_peak_memory`); loops that are connected or read the same become one, for which what they need is computed
first (`fuse_nodes`); and results are written over what they alone of their loop are the last to read.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

Name = int | str  # of a buffer: an argument's index or a node's name

# Loops are not joined over more nodes than this, nor if memory that each alone reads, and that the one could leave to
# the other, is so many times what both read: `are_long_distant_nodes`, `can_fusion_increase_peak_memory`.
FAR, REUSED = 64, 32


@dataclass
class Kernel:
    """One buffer that a graph writes.

    Attributes:
        name: the node's.
        output: the first, of shape and dtype alone.
        size_bytes: of all its outputs.
        reads: arguments and earlier kernels.
        fused: elementwise, a reduction, or a write at computed places: it may be written over an argument of the same
            size that dies with it, if no other of its loop reads that.
        changes: it works in place: it is written over what it changes, and what reads it is not written over it.
        beside: what it reads and is not written over all the same.
        within_bytes: of values between, for which the compiler expects memory and then needs none.
        hidden: memory inside of the operator that follows, of which the compiler does not know.
        over: the argument or kernel that it is written over, whose memory becomes its own.
        last_reads: the others whose memory is given back after it.
    """

    name: str
    output: Tensor
    size_bytes: int
    reads: frozenset[Name]
    fused: bool
    changes: Name | None = None
    beside: frozenset[Name] = frozenset()
    within_bytes: int = 0
    hidden: bool = False
    over: Name | None = None
    last_reads: list[Name] = field(default_factory=list)


def scheduled(written: list[Kernel], returned: set[Name], arguments: Mapping[Name, int]) -> list[Kernel]:
    """Put kernels in order and say when memory is given back; it fills in `last_reads`.

    Args:
        written: in the order of the graph's nodes.
        returned: what the caller keeps.
        arguments: bytes of each that the graph may free.
    """
    ordered = _early(written, returned, arguments)
    loops = _loops(ordered)
    last = {name: at for at, kernel in enumerate(ordered) for name in (*kernel.reads, kernel.name)}
    readers = Counter((loops[at], name) for at, kernel in enumerate(ordered) for name in kernel.reads)
    sizes: dict[Name, int] = {**arguments, **{kernel.name: kernel.size_bytes for kernel in ordered}}
    changed = {kernel.name for kernel in ordered if kernel.changes is not None}
    for name in sizes:  # in this order, so that equal blocks choose alike
        if name not in last or name in returned:
            continue
        reader = ordered[last[name]]
        free = reader.over is None and readers[loops[last[name]], name] == 1 and name not in reader.beside | changed
        if reader.changes == name:
            reader.over = name
        elif reader.fused and free and name != reader.name and sizes[name] == reader.size_bytes:
            reader.over = name
        else:
            ordered[loops[last[name]]].last_reads.append(name)
    ends = {name: loops[at] for name, at in last.items() if name not in returned}
    _reuse(ordered, _expected(ordered, ends, arguments))
    return ordered


def _reuse(ordered: list[Kernel], expected: list[int]) -> None:
    """Keep dead buffers for later ones of the same kind, where that does not raise the peak that the compiler expects.

    It does not know what operators need inside, so that the real peak may be higher for it: `should_reuse_buffer`.
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
    """Bytes alive at each kernel in the compiler's eyes: nothing is written over anything, nor needed by operators."""
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
    """The kernels in the order in which a compiler runs them.

    What frees no less memory than it takes is computed at once, after the last kernel that it reads; and what reads the
    same as an earlier loop of its size in that loop, which waits for what it reads, unless that needs the loop itself.
    """
    last = {name: at for at, kernel in enumerate(written) for name in kernel.reads}
    sizes: dict[Name, int] = {kernel.name: kernel.size_bytes for kernel in written}
    known: dict[Name, int] = {**arguments, **sizes}
    order = {kernel.name: number for number, kernel in enumerate(written)}
    users = Counter(name for kernel in written for name in kernel.reads) + Counter(returned)
    ordered: list[Kernel] = []

    def may_join(loop: Kernel, kernel: Kernel) -> bool:
        """Whether it is near, and what both read is worth keeping what each alone reads and could be reused.

        Of a caller's own tensor they may read different parts, as chunks of a loss do, so that it does not count.
        """
        shared = sum(known.get(name, 0) for name in loop.reads & kernel.reads)
        alone = ({known.get(name, 0) for name in each.reads if users[name] == 1} for each in (loop, kernel))
        far = order[kernel.name] - order[loop.name] > FAR
        return shared > 0 and not far and sum(set.intersection(*alone)) <= REUSED * shared

    for number, kernel in enumerate(written):
        frees = sum(sizes.get(name, 0) for name in kernel.reads if last[name] == number)
        at = len(ordered)
        if kernel.fused:
            near = [each for each in ordered if _beside(each, kernel) and may_join(each, kernel)]
            _make_ready(ordered, kernel, near)
            ready = next((place for place in range(at, 0, -1) if ordered[place - 1].name in kernel.reads), 0)
            beside = (place + 1 for place in range(ready, at) if _beside(ordered[place], kernel))
            at = next(beside, ready if ready and frees >= kernel.size_bytes else at)
        ordered.insert(at, kernel)
    return ordered


def _make_ready(ordered: list[Kernel], kernel: Kernel, near: list[Kernel]) -> None:
    """Move what a kernel reads ahead of the first of these loops that it belongs to, unless it needs their results."""
    ends = _loops(ordered) if near else []
    for place in map(ordered.index, near):
        begin, end = ends.index(ends[place]), ends[place] + 1
        members = {each.name for each in ordered[begin:end]}
        needed, ahead, after = set(kernel.reads) - members, list[Kernel](), list[Kernel]()
        for other in reversed(ordered[end:]):
            is_needed = other.name in needed
            (ahead if is_needed else after).append(other)
            needed |= other.reads if is_needed else frozenset()
        if ahead and not needed & members:
            ordered[begin:] = [*ahead[::-1], *ordered[begin:end], *after[::-1]]
            return


def _beside(loop: Kernel, kernel: Kernel) -> bool:
    """Whether one loop computes both, as they are as long and read the same."""
    alike = loop.fused and not loop.reads.isdisjoint(kernel.reads)
    return alike and loop.output.shape.numel() == kernel.output.shape.numel()


def _loops(ordered: list[Kernel]) -> list[int]:
    """For each kernel, the last one of the same loop, to whose end the loop's inputs are needed."""
    ends = list(range(len(ordered)))
    for at in range(len(ordered) - 2, -1, -1):
        this, following = ordered[at], ordered[at + 1]
        if this.fused and following.fused and (this.name in following.reads or _beside(this, following)):
            ends[at] = ends[at + 1]
    return ends
