"""Count the instructions that a warp issues, by a kernel's machine code and how often its loops run.

A branch that goes back makes a loop. Branches that are not taken count as if they were.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path

# A kernel ends in a branch to itself, which never runs.
SHORTEST_LOOP = 2


def issued(cubin: bytes, trips: float = 1) -> float:
    """Return the instructions of a warp.

    Args:
        cubin: the kernel's machine code.
        trips: how often each of its loops runs.
    """
    total, loops = _instructions_and_loops(cubin)
    return total + (trips - 1) * loops


@functools.cache
def _instructions_and_loops(cubin: bytes) -> tuple[int, int]:
    """Return how many instructions a kernel has, and how many of them are inside of loops."""
    # A CPU's torch has no Triton.
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-c", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    places, labels, loops = 0, dict[str, int](), set[int]()
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = places
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            places += 1
            branch = re.search(r"\bBRA\b.*?(\.L_x_\d+)", instruction[1])
            begin = labels.get(branch[1]) if branch else None
            if begin is not None and places - begin >= SHORTEST_LOOP:
                loops.update(range(begin, places))
    return places, len(loops)
