"""Tells Inductor what it does not know: own passes, own operators, native code.

The partitioner, which decides what a compiled graph keeps for its backward pass, is asked here, too.
"""

from __future__ import annotations

import functools
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_WRITTEN_S = 2.0  # what another process is writing is whole after this


@functools.cache
def remove_cut_off_libraries() -> None:
    """Remove compiled libraries from Inductor's cache that are shorter than their ELF header says; once.

    A process that is killed while it compiles leaves such files, and every later one would stumble over them, or take
    the processor for one without vector instructions, as the library that tries those out is one of them.
    """
    from torch._inductor.runtime.runtime_utils import cache_dir

    found = [path for path in Path(cache_dir()).glob("*/*.so") if _cut_off(path)]
    if found:
        time.sleep(_WRITTEN_S)
    for path in filter(_cut_off, found):
        path.unlink(missing_ok=True)


def _cut_off(path: Path) -> bool:
    """Return whether a 64-bit ELF file, if it is there, ends before its table of sections does, which is at its end."""
    try:
        with path.open("rb") as file:
            header, size = file.read(64), os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(header) < 64:
        return True
    begin, (entry, count) = struct.unpack_from("<Q", header, 40)[0], struct.unpack_from("<HH", header, 58)
    return header[:4] != b"\x7fELF" or size < begin + entry * count


@functools.cache
def tell_processors_apart() -> None:
    """Put the width of the processor's vectors into the key of Inductor's cache, which has none of it.

    What was generated for wider vectors would be compiled for narrower ones and write past its buffers: where machines
    share a home, or ATEN_CPU_CAPABILITY is set.
    """
    import torch
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    if not torch.cuda.is_available():  # there, trying the compiler out would be all that comes of it
        config.cpp.simdlen = config.cpp.simdlen or pick_vec_isa().bit_width()


def graph_pass(rewrite: Callable[[Any], None], *files: str) -> object:
    """A function that rewrites traced graphs, as Inductor takes it; `files` make it, and their hash keys the cache."""
    import torch._inductor.custom_graph_pass as passes

    class Pass(passes.CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            rewrite(graph)

        def uuid(self) -> bytes:
            return passes.get_hash_for_files(files)

    return Pass()


def onednn_matmul(left: Any, right: Any) -> Any:
    """Product of left [N, K] and right [K, M], fp32 on a CPU, by oneDNN, which torch itself asks only for bf16."""
    import torch

    return torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")


def scaled_mm(left: Any, right: Any, left_unit: Any, right_unit: Any, dtype: Any, *, fast: bool = False) -> Any:
    """(left * left_unit) @ (right * right_unit) for fp8 matrices, `right` laid out by columns, in `dtype`.

    `fast` lets a GPU add up in fewer bits than fp32 between its partial sums.
    """
    import torch

    return torch._scaled_mm(left, right, left_unit, right_unit, out_dtype=dtype, use_fast_accum=fast)


def native(source: str) -> Any:
    """A C++ library, as ctypes has it, built for this processor once and kept in Inductor's cache between runs."""
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(source)


@functools.cache
def lower_to_call(operator: Any, function: Callable[..., None]) -> None:
    """Let Inductor call `function(left, right, out=...)` for a matrix product, past torch's dispatcher; once.

    That saves half of a call's 5 microseconds; graphs from the cache find the function under the operator's name.
    """
    from torch._inductor.kernel.mm_common import mm_args
    from torch._inductor.lowering import register_lowering
    from torch._inductor.select_algorithm import ExternKernelChoice

    choice = ExternKernelChoice(function, name=operator.name().replace("::", "_"))

    @register_lowering(operator, type_promotion_kind=None)  # type: ignore[untyped-decorator]
    def _(left: Any, right: Any) -> Any:
        *_, layout, left, right = mm_args(left, right)
        return choice.bind((left, right), layout).output_node()


@functools.cache
def lower_to_memory(operator: Any) -> None:
    """Let Inductor read the result of `operator(value)`, which is the value, from memory; once."""
    from torch._inductor.lowering import register_lowering

    @register_lowering(operator, type_promotion_kind=None)  # type: ignore[untyped-decorator]
    def _(value: Any) -> Any:
        value.realize()
        return value


@contextmanager
def watched_kernels() -> Iterator[None]:
    """In the block a profiler sees what graphs call on a CPU past the dispatcher, with names and arguments.

    Inductor's kernels for a GPU it sees by itself. Modules of graphs hold their kernels as globals of their own.
    """
    from torch._C._profiler import _RecordFunctionFast
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.select_algorithm import extern_kernels

    def watched(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with _RecordFunctionFast(name, arguments, {}):
                return kernel(*arguments, **options)

        return call

    found = [
        (vars(module), name, value, name)
        for module in PyCodeCache.modules
        for name, value in vars(module).items()
        if name.startswith("cpp_fused_") and callable(value)
    ]
    # What `lower_to_call` calls past the dispatcher, under the name that a trace has for it otherwise.
    found += [
        (vars(extern_kernels), name, value, name.replace("_", "::", 1))
        for name, value in vars(extern_kernels).items()
        if name.startswith("monograph_")
    ]
    for place, name, kernel, shown in found:
        place[name] = watched(shown, kernel)
    try:
        yield
    finally:
        for place, name, kernel, _ in found:
            place[name] = kernel


def quiet_profiler() -> None:
    """Keep torch's profiler from writing lines about itself to standard error; a person's own setting stands."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


# Later than any region that checkpointing marks: what a later one reads from an earlier one is kept.
_LAST_REGION = 1 << 30


def make_again(graph: Any) -> None:
    """Mark what a graph computes from integers of 8 bits, up to matrix products, to be computed again going back.

    Left alone the partitioner keeps a frozen weight that was made dense in the forward pass, as the backward pass needs
    it whole. `graph` has both passes; the marks are those of checkpointing.
    """
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    products = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}
    codes = [node for node in graph.find_nodes(op="placeholder") if _dtype(node) in (torch.int8, torch.uint8)]
    found, waiting = set[Any](), [user for node in codes for user in node.users]
    while waiting:
        node = waiting.pop()
        if node.op != "call_function" or node in found or getattr(node.target, "overloadpacket", None) in products:
            continue
        found.add(node)
        waiting += [*node.users, *node.all_input_nodes]
    for node in found:
        node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": _LAST_REGION}


def _dtype(node: Any) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def _partition(graph: Any, inputs: Any, **options: Any) -> Any:
    """As Inductor cuts a graph in two."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    make_again(graph.graph)
    return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)


def stored_by_graph(forward: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> int:
    """Bytes that a compiled graph of a module's forward pass keeps for its backward pass, beside what it is given.

    It is the answer of the same partitioner that Inductor asks, which recomputes what fuses into the backward pass.
    """
    from torch import Tensor
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import select_decomp_table
    from torch.nn.utils.stateless import _reparametrize_module
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    leaves, form = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    stored: dict[int, int] = {}

    def run(*tensors: Any) -> Any:
        given = list(leaves)
        for place, tensor in zip(places, tensors[len(own) :], strict=True):
            given[place] = tensor
        with _reparametrize_module(module, dict(zip(own, tensors, strict=False))):
            args, kwargs = tree_unflatten(given, form)
            return [leaf for leaf in tree_leaves(forward(*args, **kwargs)) if isinstance(leaf, Tensor)]

    def partition(graph: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        parts = _partition(graph, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        outputs: Any = parts[0].graph.output_node().args[0]
        kept = outputs[num_fwd_outputs:]
        for nodes, size in ((kept, None), (parts[0].graph.find_nodes(op="placeholder"), 0)):
            for value in (node.meta["val"] for node in nodes):
                if isinstance(value, Tensor):
                    storage = value.untyped_storage()
                    stored[storage._cdata] = storage.nbytes() if size is None else size
        return parts

    tensors = [*own.values(), *(leaves[place] for place in places)]
    fresh = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    aot_function(
        run,
        fw_compiler=lambda graph, _: graph,
        bw_compiler=lambda graph, _: graph,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )(*fresh)
    return sum(stored.values())


def partitioned(forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Callable[..., Any]:
    """A backend of `torch.compile` that makes a forward and a backward graph as Inductor does and builds neither.

    `forward` and `backward` turn a graph into a function of the list of its arguments.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=lambda graph, _: forward(graph),
        bw_compiler=lambda graph, _: backward(graph),
        inference_compiler=lambda graph, _: forward(graph),
        decompositions=select_decomp_table(),
        partition_fn=_partition,
        keep_inference_input_mutations=True,
    )


@contextmanager
def activations_kept(share: float) -> Iterator[None]:
    """In the block graphs are compiled so that their backward pass is left at most this share of the activations."""
    if share == 1:
        yield
        return
    import torch._functorch.config as config

    with config.patch(activation_memory_budget=share):
        yield
