"""Note what the machine code of Triton's kernels needs, by what ptxas and the driver say of each
cubin.

Imported before anything is compiled, on a pretended card or a real one. A kernel may be compiled in
several configurations, of which a card takes the one that it measures to be the fastest; all of
them are noted but those that Inductor never measures, as they spill too much.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch._inductor import config
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

KINDS = {
    "poi": "pointwise",
    "per": "row in registers",
    "red": "loop over a row",
    "tem": "attention",
}
# Of local memory: Inductor measures no configuration that has more, unless all have (its default).
MEASURED_WORDS = 16


class Kernel(NamedTuple):
    """A kernel in one configuration.

    Attributes:
        name: its function's name; of a kernel that is written by hand, with what it computes.
        kind: one of KINDS, or the prefix that Inductor gave it; of a kernel that is written by hand,
            its function's name.
        registers: of a thread.
        stack_bytes: of a thread: spilled registers, and arrays of functions such as the range
            reduction of sines.
        spilled_bytes: stored to the stack because registers ran out, as ptxas counts them.
        shared_bytes: of a block.
        threads: of a block.
    """

    name: str
    kind: str
    registers: int
    stack_bytes: int
    spilled_bytes: int
    shared_bytes: int
    threads: int


# By kernel of Inductor's, all of its configurations that a card can launch.
_NOTED: dict[int, tuple[Any, list[Any]]] = {}
# Kernels that are written by hand: by their code and what they compute, the function and the code.
_NOTED_OWN: dict[tuple[str, str], tuple[Any, Any]] = {}
# What the launches of such kernels compute; see `computing`.
_COMPUTED = [""]


def watch() -> None:
    """Note all kernels that are compiled from now on, and launches of those that are written by hand;
    graphs and choices of earlier processes are not read.
    """
    from triton.runtime.jit import JITFunction  # is only where torch computes on a GPU

    # A graph from the cache has only the configuration that was chosen. Cubins are cached by Triton
    # itself.
    config.fx_graph_cache = config.autotune_local_cache = False
    make = CachingAutotuner._make_launchers

    @functools.wraps(make)
    def noted(self: Any) -> None:
        make(self)
        if len(self.launchers) == len(self.compile_results):
            _NOTED[id(self)] = self, list(self.launchers)

    CachingAutotuner._make_launchers = noted  # type: ignore[method-assign]
    run_own = JITFunction.run

    @functools.wraps(run_own)
    def noted_own(self: Any, *arguments: Any, warmup: bool, **keywords: Any) -> Any:
        code = run_own(self, *arguments, warmup=warmup, **keywords)
        _NOTED_OWN[code.hash, _COMPUTED[-1]] = self, code
        return code

    JITFunction.run = noted_own


@contextmanager
def computing(what: str) -> Iterator[None]:
    """Note what the kernels that are written by hand compute in the block."""
    _COMPUTED.append(what)
    yield
    _COMPUTED.pop()


@contextmanager
def compiled(sm: int) -> Iterator[list[Kernel]]:
    """Fill the list, at the end of the block, with the kernels that were compiled in it for a card."""
    _NOTED.clear()
    _NOTED_OWN.clear()
    kernels = list[Kernel]()
    yield kernels
    for tuner, launchers in _NOTED.values():
        measured = [one for one in launchers if (one.n_spills or 0) <= MEASURED_WORDS]
        kernels += (_kernel(tuner, launcher, sm) for launcher in measured or launchers)
    for (_, what), (function, code) in _NOTED_OWN.items():
        kernels.append(_own_kernel(function, what, code, sm))


def _kernel(tuner: Any, launcher: Any, sm: int) -> Kernel:
    name, stack_bytes = tuner.fn.__name__, 4 * (launcher.n_spills or 0)
    prefix = name.split("_")[1]
    spilled_bytes = 0
    if stack_bytes:
        (source,) = Path(os.environ["TRITON_CACHE_DIR"], launcher.cache_hash).glob("*.ptx")
        spilled_bytes = _spilled_bytes(source, sm)
    return Kernel(
        name,
        KINDS.get(prefix, prefix),
        launcher.n_regs,
        stack_bytes,
        spilled_bytes,
        launcher.shared,
        32 * launcher.config.num_warps,
    )


def _own_kernel(function: Any, what: str, code: Any, sm: int) -> Kernel:
    name, stack_bytes = function.fn.__name__, 4 * code.n_spills
    spilled_bytes = 0
    if stack_bytes:
        (source,) = (path for path in code.metadata_group.values() if str(path).endswith(".ptx"))
        spilled_bytes = _spilled_bytes(Path(source), sm, code.metadata.enable_fp_fusion)
    return Kernel(
        f"{name}: {what}" if what else name,
        name,
        code.n_regs,
        stack_bytes,
        spilled_bytes,
        code.metadata.shared,
        32 * code.metadata.num_warps,
    )


@functools.cache
def _spilled_bytes(source: Path, sm: int, fuses: bool = True) -> int:
    """Return the bytes that ptxas spills of a kernel: it assembles the kernel's PTX again, and says
    so.

    Args:
        source: the PTX.
        sm: the card.
        fuses: whether a product and a sum may be one instruction.
    """
    # A CPU's torch has no Triton.
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    # The options of Triton's own call.
    options = [
        "-lineinfo",
        "-v",
        "--regAllocOptLevel=2",
        f"--gpu-name={sm_arch_from_capability(sm)}",
    ]
    if not fuses:
        options.append("--fmad=false")
    command = [get_ptxas(sm).path, *options, source, "-o", os.devnull]
    # The assembler needs no driver.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    said = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stderr
    return int(re.findall(r"(\d+) bytes spill stores", said)[-1])
