"""In which order a compiler writes a graph's buffers, and until when it keeps them.

These are the rules of torch._inductor, as far as they decide about memory: nodes are ordered for a low peak
(`reorder_for_peak_memory`), connected loops become one, and results are written over what they are the last to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

Name = int | str  # of a buffer: an argument's index or a node's name


@dataclass
class Kernel:
    """One buffer that a graph writes.

    Attributes:
        name: the node's.
        output: the first, of shape and dtype alone.
        size_bytes: of all its outputs.
        reads: arguments and earlier kernels.
        fused: elementwise, a reduction, or a write at computed places: it may be written over an argument of the same
            size that dies with it.
        over: the argument or kernel that it is written over, whose memory becomes its own.
        last_reads: the others whose memory is given back after it.
    """

    name: str
    output: Tensor
    size_bytes: int
    reads: frozenset[Name]
    fused: bool
    over: Name | None = None
    last_reads: list[Name] = field(default_factory=list)


def scheduled(written: list[Kernel], returned: set[Name], arguments: Mapping[Name, int]) -> list[Kernel]:
    """Put kernels in order and say when memory is given back; it fills in `last_reads`.

    Args:
        written: in the order of the graph's nodes.
        returned: what the caller keeps.
        arguments: bytes of each that the graph may free.
    """
    ordered = _early(written)
    loops = _loops(ordered)
    last = {name: at for at, kernel in enumerate(ordered) for name in (*kernel.reads, kernel.name)}
    sizes: dict[Name, int] = {**arguments, **{kernel.name: kernel.size_bytes for kernel in ordered}}
    for name in sizes:  # in this order, so that equal blocks choose alike
        if name not in last or name in returned:
            continue
        reader = ordered[last[name]]
        if reader.fused and reader.over is None and name != reader.name and sizes[name] == reader.size_bytes:
            reader.over = name
        else:
            ordered[loops[last[name]]].last_reads.append(name)
    return ordered


def _early(written: list[Kernel]) -> list[Kernel]:
    """The kernels in the order in which a compiler runs them.

    What frees no less memory than it takes is computed at once, after the last kernel that it reads; and what reads the
    same as an earlier loop of its size in that loop, if all that it reads is there by then.
    """
    last = {name: at for at, kernel in enumerate(written) for name in kernel.reads}
    sizes: dict[Name, int] = {kernel.name: kernel.size_bytes for kernel in written}
    ordered: list[Kernel] = []
    for number, kernel in enumerate(written):
        frees = sum(sizes.get(name, 0) for name in kernel.reads if last[name] == number)
        at = len(ordered)
        if kernel.fused:
            ready = next((place for place in range(at, 0, -1) if ordered[place - 1].name in kernel.reads), 0)
            beside = (place + 1 for place in range(ready, at) if _beside(ordered[place], kernel))
            at = next(beside, ready if ready and frees >= kernel.size_bytes else at)
        ordered.insert(at, kernel)
    return ordered


def _beside(loop: Kernel, kernel: Kernel) -> bool:
    """Whether one loop computes both, as they are as long and read the same."""
    return loop.fused and loop.output.shape.numel() == kernel.output.shape.numel() and bool(loop.reads & kernel.reads)


def _loops(ordered: list[Kernel]) -> list[int]:
    """For each kernel, the last one of the same loop, to whose end the loop's inputs are needed."""
    ends = list(range(len(ordered)))
    for at in range(len(ordered) - 2, -1, -1):
        this, following = ordered[at], ordered[at + 1]
        if this.fused and following.fused and (this.name in following.reads or _beside(this, following)):
            ends[at] = ends[at + 1]
    return ends
