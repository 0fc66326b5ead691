"""Count what a call launches on a pretended card (docs/gpu.md).

Imported under the pretended driver, before anything is compiled. Kernels compute nothing, so
numbers mean nothing here; launches, arguments, copies, waits and the compiled kernels are those of
the real torch, Inductor and Triton.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import warnings
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from issued import issued
from torch._inductor import config
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

# Where a benchmark is run by itself.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from pretended_gpu import card  # noqa: E402

LIBRARIES = ("triton", "cublas", "aten", "cudnn", "memset")
_NAMES = {"blas": "cublas", "torch": "aten"}  # by the driver's names
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")
FP8_PRODUCT = "aten::_scaled_mm"
ATTENTION = ("flex_attention", "cudnn_attention")  # parts of the names of attention's kernels
_BYTES = {
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "float": 4,
    "double": 8,
    "long int": 8,
    "int": 4,
    "bool": 1,
}


@dataclass
class Kernel:
    """A launch of a Triton kernel.

    Attributes:
        name: its function's name.
        once_bytes: what it reads and writes, each argument once.
        again_bytes: what a second and third loop over a row read again.
        warp_instructions: instructions of all warps, branches that are not taken among them; 0 if
            it is not known how often its loops run.
        registers: of a thread.
        stack_bytes: of a thread: registers that were spilled, and arrays.
        addresses: where the tensors lie that it reads or writes.
        flops: of products in a kernel that is written by hand, unused rows of its tiles among them;
            otherwise 0.
    """

    name: str
    once_bytes: float
    again_bytes: float
    warp_instructions: float
    registers: int
    stack_bytes: int
    addresses: frozenset[int] = frozenset()
    flops: float = 0.0

    @property
    def is_attention(self) -> bool:
        """Return whether the kernel computes attention, whose time is that of its FLOPs."""
        return any(part in self.name for part in ATTENTION)


class Rates(NamedTuple):
    """What a card does in a second: bytes of its memory, instructions of its warps, and FLOPs of
    products.
    """

    bytes_per_s: float
    warp_instructions_per_s: float
    product_flops_per_s: float


@dataclass
class Counted:
    """A `with` block, and what it launched afterwards.

    Attributes:
        launches: launches in their order, as (library, name).
        kernels: Triton's launches among them.
        waits: calls in which the host waited.
        waiting_copies: copies that the host waited for.
        graphs: launches of captured graphs.
    """

    launches: list[tuple[str, str]] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    waits: int = 0
    waiting_copies: int = 0
    graphs: int = 0

    def __enter__(self) -> Counted:
        _RUNNING.append(self)
        self._log = ExitStack()
        self._logged = self._log.enter_context(card.logged())
        return self

    def __exit__(self, *raised: object) -> None:
        _RUNNING.pop()
        self._log.close()
        if faults := card.faults():
            raise SystemExit(f"a call that CUDA forbids: {faults[0]}")
        log, launched = self._logged, self._logged.of(card.Launch)
        triton = (launch for launch in launched if launch.library == "triton")
        for kernel, launch in zip(self.kernels, triton, strict=True):
            kernel.warp_instructions *= math.prod(launch.grid) * -(-launch.threads // 32)
        self.launches += [
            (_NAMES.get(launch.library, launch.library), launch.name) for launch in launched
        ]
        self.launches += [("memset", "memset")] * len(log.of(card.Memset))
        self.waits += len(log.of(card.Wait))
        self.waiting_copies += sum(copy.waits for copy in log.of(card.Copy))
        self.graphs += len(log.of(card.GraphLaunch))

    def numbers(self) -> dict[str, float]:
        """Return the counts that grow linearly with the number of layers, and the largest needs of
        a kernel.
        """
        by_library = Counter(library for library, _ in self.launches)
        attention = [kernel for kernel in self.kernels if kernel.is_attention]
        others = [kernel for kernel in self.kernels if not kernel.is_attention]
        return {
            "launches": len(self.launches),
            **{library: by_library[library] for library in LIBRARIES},
            "triton_bytes": sum(kernel.once_bytes for kernel in others),
            "again_bytes": sum(kernel.again_bytes for kernel in others),
            "attention_bytes": sum(kernel.once_bytes for kernel in attention),
            "graphs": self.graphs,
            "waits": self.waits,
            "waiting_copies": self.waiting_copies,
            "registers": max((kernel.registers for kernel in self.kernels), default=0),
            "stack_bytes": max((kernel.stack_bytes for kernel in self.kernels), default=0),
        }

    def triton_s(self, rates: Rates) -> float:
        """Return the seconds of Triton's kernels but attention's: each takes that of its bytes, its
        instructions or its FLOPs, whichever is longest.
        """
        return sum(
            max(
                (kernel.once_bytes + kernel.again_bytes) / rates.bytes_per_s,
                kernel.warp_instructions / rates.warp_instructions_per_s,
                kernel.flops / rates.product_flops_per_s,
            )
            for kernel in self.kernels
            if not kernel.is_attention
        )


LARGEST = ("registers", "stack_bytes")  # the numbers that are a maximum and no sum
_RUNNING: list[Counted] = []


def watch() -> None:
    """Note Triton's kernels at each launch, and let cuDNN's attention, which cannot be pretended,
    only log itself.

    Raises:
        SystemExit: this process does not run on a pretended card, or its kernels compute, so that the
            driver sees neither their launches nor replays.
    """
    if "pretended_gpu.numbers" in sys.modules:
        raise SystemExit(
            "launches are counted where kernels compute nothing: run this without -p pretended_gpu.plugin"
        )
    if not card.PRELOADED:
        script = Path(sys.argv[0]).name
        command = f"python tests/pretended_gpu/environment.py run 90 python benchmarks/{script}"
        raise SystemExit(f"{script} counts on a pretended card (docs/gpu.md): {command}")
    from triton.runtime.jit import JITFunction  # is only where torch computes on a GPU

    # Inductor then writes the bytes that a kernel moves next to its code.
    config.benchmark_kernel = True
    # Pretended times say nothing: the first of a kernel's configurations stands for what a card
    # would choose.
    CachingAutotuner.benchmark_all_configs = lambda self, *_, **__: {  # type: ignore[method-assign]
        launcher: float(place) for place, launcher in enumerate(self.launchers)
    }
    run, run_own = CachingAutotuner.run, JITFunction.run

    @functools.wraps(run)
    def noted(self: Any, *arguments: Any, **keywords: Any) -> Any:
        result = run(self, *arguments, **keywords)
        for counted in _RUNNING:
            counted.kernels.append(_kernel(self, arguments))
        return result

    @functools.wraps(run_own)
    def noted_own(self: Any, *arguments: Any, warmup: bool, **keywords: Any) -> Any:
        compiled = run_own(self, *arguments, warmup=warmup, **keywords)
        for counted in () if warmup else _RUNNING:
            counted.kernels.append(_own_kernel(self, arguments, keywords, compiled))
        return compiled

    CachingAutotuner.run = noted  # type: ignore[method-assign]
    JITFunction.run = noted_own
    _log_cudnn()
    _fold_on_the_host()


class _OnTheHost(TorchDispatchMode):
    """Makes tensors on the host, whatever device is asked for."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if keywords.get("device") is not None:
            keywords["device"] = torch.device("cpu")
        on_host = [torch.device("cpu") if isinstance(a, torch.device) else a for a in args]
        return function(*on_host, **keywords)


def _fold_on_the_host() -> None:
    """Let Inductor compute constants on the host: it would compute them on the card, whose kernels
    compute nothing, and write what happens to lie in its memory into the code.
    """
    begin, run = UniformValueConstantFolder.__init__, UniformValueConstantFolder.run

    def begin_on_the_host(self: Any, *args: Any, **options: Any) -> None:
        with _OnTheHost():
            begin(self, *args, **options)

    def run_on_the_host(self: Any, *args: Any, **options: Any) -> Any:
        with _OnTheHost():
            return run(self, *args, **options)

    UniformValueConstantFolder.__init__ = begin_on_the_host  # type: ignore[method-assign]
    UniformValueConstantFolder.run = run_on_the_host  # type: ignore[method-assign]


def _kernel(tuner: Any, arguments: tuple[Any, ...]) -> Kernel:
    tensors = dict(zip(tuner.triton_meta["signature"], arguments, strict=False))
    sizes = {
        name: value.nbytes for name, value in tensors.items() if isinstance(value, torch.Tensor)
    }
    # Template kernels and those written by hand have no estimate: each tensor is read or written
    # once.
    estimate = tuner.inductor_meta.get("kernel_num_gb")
    if estimate is None:
        once: float = sum(sizes.values())
    elif "tl.atomic_add(" in tuner.fn.src:
        once = _bytes_with_additions(tuner.fn.src, tensors)
    else:
        once = estimate * 1e9
    launcher = tuner.launchers[0]
    trips = _trips(tuner, tensors)
    instructions = issued(_cubin(launcher.cache_hash), trips) if trips else 0
    return Kernel(
        tuner.fn.__name__,
        once,
        # Of a table, such as an embedding, only some rows are read.
        sum(
            min(sizes.get(name, 0), once) * (times - 1)
            for name, times in _passes(tuner.fn.src).items()
        ),
        instructions,
        launcher.n_regs,
        launcher.n_spills * 4 if launcher.n_spills else 0,
        frozenset(
            value.data_ptr() for value in tensors.values() if isinstance(value, torch.Tensor)
        ),
    )


def _own_kernel(
    function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], compiled: Any
) -> Kernel:
    """Return a launch of a kernel that is written by hand, behind a custom operator."""
    tensors = {
        name: value
        for name, value in zip(function.arg_names, arguments, strict=False)
        if isinstance(value, torch.Tensor)
    }
    # An argument that a launch does not use stands for another one, which counts once.
    sizes = {value.data_ptr(): value.nbytes for value in tensors.values()}
    if function.fn.__name__ == "_attend":  # reads the first blocks of its cache
        for name in ("keys", "values"):
            cache = tensors[name]
            sizes[cache.data_ptr()] = cache[: keywords["BLOCKS"]].nbytes
    # A row has an adapter of its own, of those in a bank.
    if keywords.get("BANK"):
        rows = tensors["slots"].numel()
        for name, value in tensors.items():
            if name[:2] in ("a_", "b_") and value.dim() == 3:
                sizes[value.data_ptr()] = value[0].nbytes * min(rows, len(value) - 1)
    # A kernel of a mixture reads an expert's weights once for each token that has chosen it.
    for name in ("gate_weight", "up_weight", "down_weight"):
        if name in tensors:
            weight = tensors[name]
            sizes[weight.data_ptr()] = weight[0].nbytes * tensors["experts"].numel()
    if (
        function.fn.__name__ == "_add_scaled" and not keywords["IS_FIRST"]
    ):  # writes over what it reads
        sizes[-1] = tensors["total"].nbytes
    again, instructions, flops = 0.0, 0.0, 0.0
    if function.fn.__name__ == "_multiply":
        # The tiles of rows read the same weights at the same time, so a cache has them: they count once.
        out = tensors["out"]
        rows_of_tiles = -(-len(out) // keywords["ROWS"]) * keywords["ROWS"]
        products = 2 if keywords["GATED"] else 1
        flops = 2.0 * rows_of_tiles * keywords["K"] * out.shape[1] * products
    if (
        function.fn.__name__ == "_replace_row"
    ):  # reads a part of the logits twice, and writes over all
        logits = tensors["logits"]
        kept = keywords["PARTS_KEPT"] * keywords["T"] / logits.shape[-1]
        again = logits.nbytes * (1 - kept)
        sizes[-1] = logits.nbytes
        trips = logits.shape[-1] // keywords["T"] - keywords["PARTS_KEPT"]
        instructions = issued(compiled.asm["cubin"], trips)
    return Kernel(
        function.fn.__name__,
        sum(sizes.values()),
        again,
        instructions,
        compiled.n_regs,
        compiled.n_spills * 4,
        flops=flops,
    )


def _trips(tuner: Any, arguments: dict[str, Any]) -> int:
    """Return how often each loop of a kernel of Inductor's runs: 1 without a loop, 0 if unknown."""
    if " in tl.range(" not in tuner.fn.src:
        return 1
    at_once = tuner.launchers[0].config.kwargs.get("R0_BLOCK")
    return -(-arguments["r0_numel"] // at_once) if at_once and "r0_numel" in arguments else 0


@functools.cache
def _cubin(folder: str) -> bytes:
    """Return a kernel's machine code."""
    (file,) = Path(os.environ["TRITON_CACHE_DIR"], folder).glob("*.cubin")
    return file.read_bytes()


def _bytes_with_additions(source: str, arguments: dict[str, Any]) -> float:
    """Return what a pointwise kernel moves that adds at places given by indices, such as an embedding's
    gradient: each number that it adds is read and written there.

    Inductor's estimate has these numbers once, and not at all if they are added to an argument.
    """
    numbers = math.prod(arguments.get(name, 1) for name in ("xnumel", "ynumel"))
    moved = 0
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            once = min(value.nbytes, numbers * value.itemsize)
            reads_and_writes = len(re.findall(rf"tl\.(?:load|store)\({name} \+", source))
            moved += reads_and_writes * once
            moved += (
                2
                * len(re.findall(rf"tl\.atomic_add\({name} \+", source))
                * numbers
                * value.itemsize
            )
    return moved


@functools.cache
def _passes(source: str) -> dict[str, int]:
    """Return in how many loops over the reduced dimension a kernel reads each argument, if in any."""
    loops = re.split(r"\n    for r0_offset in ", source)[1:]
    # A loop ends where the indentation does.
    bodies = [re.split(r"\n    (?=\S)", loop)[0] for loop in loops]
    return Counter(
        name for body in bodies for name in set(re.findall(r"tl\.load\((\w+_ptr\d+)", body))
    )


def _log_cudnn() -> None:
    """Replace cuDNN's two operators of attention by functions that log a launch and allocate their
    results.
    """
    library = torch.library.Library("aten", "IMPL")

    def launched(name: str) -> None:
        card.launch("cudnn", name, torch.cuda.current_stream().cuda_stream)

    def forward(
        q: Any, k: Any, v: Any, bias: Any, lse: bool, *_: Any, scale: float | None = None
    ) -> Any:
        launched("cudnn_attention")
        none, number = (
            torch.empty(size, dtype=torch.int64, device=q.device) for size in ((0,), ())
        )
        log_sums = q.new_empty(*q.shape[:3], 1, dtype=torch.float32)
        return (
            torch.empty_like(q),
            log_sums,
            none,
            none,
            q.shape[2],
            k.shape[2],
            number,
            number,
            none,
        )

    def backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, scale: float | None = None) -> Any:
        launched("cudnn_attention_backward")
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they replace torch's own
        library.impl("_scaled_dot_product_cudnn_attention", forward, "CUDA")
        library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CUDA")
    _KEPT.append(library)


_KEPT: list[Any] = []


class Products:
    """A `with` block whose matrix products are seen with their shapes: `flops` and `bytes`
    afterwards, and `fp8_flops`, those of products in fp8, which are not among the others. `operands` are the
    shape of each operand and the bytes of an element; `each` has FLOPs and bytes of each product.
    """

    flops = bytes = fp8_flops = 0.0

    def seconds(self, rates: Rates) -> float:
        """Return the seconds of products in 16 bits or more: each takes that of its bytes or its FLOPs."""
        return sum(
            max(flops / rates.product_flops_per_s, moved / rates.bytes_per_s)
            for flops, moved in self.each
        )

    def __enter__(self) -> Products:
        self.operands: list[tuple[list[int], int]] = []
        self.each: list[tuple[float, float]] = []
        self._profile = profile(
            activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True
        )
        self._profile.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._profile.__exit__(*raised)
        for event in self._profile.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == FP8_PRODUCT:
                left, right = event.shapes()[:2]
                self.fp8_flops += 2 * math.prod(left) * right[-1]
            if event.name() in PRODUCTS:
                shapes = [shape for shape in event.shapes() if shape]
                kinds = [
                    kind
                    for shape, kind in zip(event.shapes(), event.dtypes(), strict=True)
                    if shape
                ]
                pair = slice(-3, -1) if _has_out(event, shapes) else slice(-2, None)
                left, right = shapes[pair]
                self.operands += [
                    (shape, _BYTES[kind])
                    for shape, kind in zip(shapes[pair], kinds[pair], strict=True)
                ]
                flops = 2.0 * math.prod(left) * right[-1]
                moved = sum(math.prod(s) * _BYTES[k] for s, k in zip(shapes, kinds, strict=True))
                self.each.append((flops, moved))
                self.flops += flops
                self.bytes += moved


def _has_out(event: Any, shapes: list[list[int]]) -> bool:
    return len(shapes) > (2 if event.name() in PRODUCTS[:2] else 3)
