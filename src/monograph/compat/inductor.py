"""Extend Inductor with Monograph's passes, operators and native code, and read its kernels and its
cache.

Some functions direct or ask the partitioner, which decides what a compiled graph keeps for its
backward pass.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn.attention.flex_attention import BlockMask, noop_mask
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

if TYPE_CHECKING:
    from ctypes import CDLL

    from torch._inductor.ir import TensorBox
    from torch._ops import OpOverload

_P = ParamSpec("_P")
_T = TypeVar("_T")
_WRITTEN_S = 2.0  # time in which another process finishes a library that it is writing


@functools.cache
def remove_cut_off_libraries() -> None:
    """Remove compiled libraries from Inductor's cache that are shorter than their ELF header says,
    once per process.

    A process that is killed while it compiles leaves such files. Later processes would fail on
    them, or, if the file is the one that tests for vector instructions, take the processor for one
    that has none.
    """
    from torch._inductor.runtime.runtime_utils import cache_dir

    cut = [path for path in Path(cache_dir()).glob("*/*.so") if _cut_off(path)]
    if cut:
        time.sleep(_WRITTEN_S)
    for path in filter(_cut_off, cut):
        path.unlink(missing_ok=True)


def _cut_off(path: Path) -> bool:
    """Return whether a file is no complete 64-bit ELF file, whose section table comes last."""
    try:
        with path.open("rb") as file:
            header = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(header) < 64:
        return True
    begin = struct.unpack_from("<Q", header, 40)[0]
    entry, count = struct.unpack_from("<HH", header, 58)
    return header[:4] != b"\x7fELF" or size < begin + entry * count


@functools.cache
def tell_processors_apart() -> None:
    """Add the processor's vector width to the key of Inductor's cache, which lacks it.

    Otherwise, where machines share a home or ATEN_CPU_CAPABILITY is set, code generated for wider
    vectors is compiled for narrower ones and writes past its buffers.
    """
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    # On a GPU machine this would run the C++ compiler for nothing.
    if not torch.cuda.is_available():
        config.cpp.simdlen = config.cpp.simdlen or pick_vec_isa().bit_width()


@functools.cache
def cats_in_parts() -> dict[str, int]:
    """Return the option by which each part of a concatenation has its own kernel."""
    from torch._inductor import config

    name = "max_complex_pointwise_cat_inputs"
    if hasattr(config, name):
        return {name: 0}
    # torch 2.11 has such an option for simple parts only.
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    together = lowering.pointwise_cat

    def cat(parts: Sequence[TensorBox], axis: int) -> TensorBox:
        if config.max_pointwise_cat_inputs:
            return together(parts, axis)
        return lowering.TensorBox(lowering.ir.ConcatKernel.create(parts, axis))

    lowering.pointwise_cat = cat
    return {"max_pointwise_cat_inputs": 0}


@functools.cache
def keep_strides_of_block_masks() -> None:
    """Fix the strides of a block mask's lists before flex attention's kernel is written with them.

    Without gradients Inductor may choose others for the axis of length 1 afterwards; torch 2.11
    does. Rows after the first one then see the wrong keys, or memory that is not theirs.
    """
    flex: Any = importlib.import_module("torch._inductor.kernel.flex.flex_attention")
    realize = flex.maybe_realize

    def fixed(values: list[Any]) -> list[Any]:
        found = realize(values)
        flex.freeze_irnodes(
            [x for x in found if hasattr(x, "get_dtype") and not x.get_dtype().is_floating_point]
        )
        return found

    flex.maybe_realize = fixed


def graph_pass(rewrite: Callable[[Graph], None], *files: str) -> object:
    """Return a pass for Inductor that calls `rewrite`; its key in the cache is the hash of its
    sources, `files`.
    """
    import torch._inductor.custom_graph_pass as passes

    class Pass(passes.CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            rewrite(graph)

        def uuid(self) -> bytes:
            return passes.get_hash_for_files(files)

    return Pass()


def onednn_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return left [N, K] @ right [K, M], fp32 on a CPU, computed by oneDNN, which torch itself uses
    only for bf16.
    """
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return product


def scaled_mm(
    left: Tensor,
    right: Tensor,
    left_unit: Tensor,
    right_unit: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> Tensor:
    """Return (left * left_unit) @ (right * right_unit) in `dtype` for fp8 matrices; `right` is
    column-major.

    `fast` lets a GPU accumulate partial sums in less than fp32.
    """
    return torch._scaled_mm(
        left, right, left_unit, right_unit, out_dtype=dtype, use_fast_accum=fast
    )


def native(source: str) -> CDLL:
    """Return the ctypes library of C++ source, compiled once for this processor and kept in
    Inductor's cache.
    """
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(source)


@functools.cache
def lower_to_call(operator: OpOverload, function: Callable[..., None]) -> None:
    """Let Inductor call `function(left, right, out=...)` for a matrix product, bypassing torch's
    dispatcher.

    This saves half of a call's 5 microseconds. Cached graphs find the function by the operator's
    name.
    """
    from torch._inductor.kernel.mm_common import mm_args
    from torch._inductor.lowering import register_lowering
    from torch._inductor.select_algorithm import ExternKernelChoice

    choice = ExternKernelChoice(function, name=operator.name().replace("::", "_"))

    @register_lowering(operator, type_promotion_kind=None)
    def _(left: TensorBox, right: TensorBox) -> TensorBox:
        *_, layout, left, right = mm_args(left, right)
        return choice.bind((left, right), layout).output_node()


@functools.cache
def lower_to_memory(operator: OpOverload) -> None:
    """Let Inductor compile `operator(value)` to the value itself, stored in memory and not fused
    into its readers.
    """
    from torch._inductor.lowering import register_lowering

    @register_lowering(operator, type_promotion_kind=None)
    def _(value: TensorBox) -> TensorBox:
        value.realize()
        return value


@contextmanager
def watched_kernels() -> Iterator[None]:
    """In the block, let profilers see the calls that graphs on a CPU make without the dispatcher,
    with their arguments.

    Profilers see Inductor's GPU kernels by themselves. The kernels are globals of each graph's
    module.
    """
    from torch._C._profiler import _RecordFunctionFast
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.select_algorithm import extern_kernels

    def watched(name: str, kernel: Callable[_P, _T]) -> Callable[_P, _T]:
        def call(*arguments: _P.args, **options: _P.kwargs) -> _T:
            with _RecordFunctionFast(name, arguments, {}):
                return kernel(*arguments, **options)

        return call

    places = [
        (vars(module), name, value)
        for module in (*PyCodeCache.modules, extern_kernels)
        for name, value in vars(module).items()
        if name.startswith(("cpp_fused_", "monograph_")) and callable(value)
    ]
    for place, name, kernel in places:
        # Functions of `lower_to_call` are shown under the names that the dispatcher would give
        # them.
        place[name] = watched(
            name.replace("_", "::", 1) if name.startswith("monograph_") else name, kernel
        )
    try:
        yield
    finally:
        for place, name, kernel in places:
            place[name] = kernel


def quiet_profiler() -> None:
    """Keep torch's profiler from writing lines about itself to standard error; a user's own setting
    is kept.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def parse_no_events(watching: torch.profiler.profile) -> None:
    """Have a profile that has begun only write a trace: parsing its events, which is slow, is left
    out.

    torch parses them at once with `acc_events`, without which torch 2.11 warns of cycles that there
    are not.
    """
    assert watching.profiler is not None
    watching.profiler.acc_events = False


# The partitioner keeps values that a checkpointed region reads from an earlier one, so this is
# later than all others.
_LAST_REGION = 1 << 30


def make_again(graph: Graph) -> None:
    """Mark values computed from 8-bit integers, up to matrix products, for recomputation in the
    backward pass.

    Otherwise the partitioner keeps the dequantised copy of a frozen weight, because the backward
    pass reads it. `graph` has both passes; the marks are those of checkpointing.
    """
    products = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}
    inputs = graph.find_nodes(op="placeholder")
    codes = [
        node
        for node in inputs
        if getattr(node.meta.get("val"), "dtype", None) in (torch.int8, torch.uint8)
    ]
    again = set[Node]()
    waiting = [user for node in codes for user in node.users]
    while waiting:
        node = waiting.pop()
        if (
            node.op != "call_function"
            or node in again
            or getattr(node.target, "overloadpacket", None) in products
        ):
            continue
        again.add(node)
        waiting += [*node.users, *node.all_input_nodes]
    for node in again:
        node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": _LAST_REGION}


def keep_once(graph: Graph) -> None:
    """Mark values computed from inputs that the forward pass overwrites, such as running means, to
    be kept.

    Otherwise the partitioner may recompute them in the backward pass, from the overwritten inputs.
    """
    from torch._functorch.partitioners import get_default_op_list

    write = torch.ops.aten.copy_.default
    operators = get_default_op_list()
    copies = graph.find_nodes(op="call_function", target=write)
    written = [node.args[0] for node in copies]
    reading = [value for value in written if isinstance(value, Node) and value.op == "placeholder"]
    while reading:
        for user in reading.pop().users:
            # A view, or an item of several results, changes together with the input.
            if operators.is_view(user) or user.target is operator.getitem:
                reading.append(user)
            # A training batch norm's output depends on the batch's mean, not on the running mean
            # that it writes.
            elif user.target is not write and "batch_norm" not in str(user.target):
                for node in (
                    user,
                    *(part for part in user.users if part.target is operator.getitem),
                ):
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def mark_recomputed(graph: Graph) -> None:
    """Mark the values that the backward pass must recompute or must not, in a graph of both passes."""
    make_again(graph)
    keep_once(graph)


def aot_eager() -> Callable[..., Any]:
    """Return torch's backend of this name, which traces both passes and generates no code, with
    `mark_recomputed`.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    return aot_autograd(
        fw_compiler=boxed_nop, partition_fn=_partition, keep_inference_input_mutations=True
    )


def _partition(
    graph: GraphModule, inputs: object, **options: Any
) -> tuple[GraphModule, GraphModule]:
    """Split a graph of both passes into two as Inductor does."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    mark_recomputed(graph.graph)
    return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)


def stored_by_graph(
    forward: Callable[..., object],
    module: torch.nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> int:
    """Return the bytes that a module's compiled forward graph keeps for its backward pass, without
    its inputs.

    They are chosen by Inductor's partitioner, which recomputes values that fuse into the backward
    pass.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import select_decomp_table
    from torch.nn.utils.stateless import _reparametrize_module

    own_tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    whole, form = tree_flatten((args, kwargs))
    # A graph would take a mask's tensors for constants, so they become inputs. Its rule, which
    # reads tensors as well, decides about no bytes.
    apart = [
        {**vars(leaf), "mask_mod": noop_mask} if isinstance(leaf, BlockMask) else leaf
        for leaf in whole
    ]
    leaves, inner = tree_flatten(apart)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    stored: dict[int, int] = {}

    def run(*tensors: Tensor) -> list[Tensor]:
        given = list(leaves)
        for place, tensor in zip(places, tensors[len(own_tensors) :], strict=True):
            given[place] = tensor
        with _reparametrize_module(module, dict(zip(own_tensors, tensors, strict=False))):
            again = [
                BlockMask(**leaf) if isinstance(leaf, dict) else leaf
                for leaf in tree_unflatten(given, inner)
            ]
            args, kwargs = tree_unflatten(again, form)
            return [
                leaf for leaf in tree_leaves(forward(*args, **kwargs)) if isinstance(leaf, Tensor)
            ]

    def storages(nodes: Iterable[object]) -> list[torch.UntypedStorage]:
        values = [node.meta["val"] for node in nodes if isinstance(node, Node)]
        return [value.untyped_storage() for value in values if isinstance(value, Tensor)]

    def partition(
        graph: GraphModule, inputs: object, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        parts = _partition(graph, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        outputs = parts[0].graph.output_node().args[0]
        assert isinstance(outputs, list | tuple)
        stored.update(
            (storage._cdata, storage.nbytes()) for storage in storages(outputs[num_fwd_outputs:])
        )
        stored.update(
            (storage._cdata, 0) for storage in storages(parts[0].graph.find_nodes(op="placeholder"))
        )
        return parts

    tensors = [*own_tensors.values(), *(leaves[place] for place in places)]
    fresh = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    aot_function(
        run,
        fw_compiler=lambda graph, _: graph,
        bw_compiler=lambda graph, _: graph,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )(*fresh)
    return sum(stored.values())


def partitioned(
    forward: Callable[[Any], Any], backward: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Return a backend of `torch.compile` that makes the forward and backward graphs of Inductor
    but compiles neither.

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


def activations_kept(share: float) -> AbstractContextManager[object]:
    """In the block, compile graphs that keep at most this share of the activations for the backward
    pass.
    """
    import torch._functorch.config as config

    return nullcontext() if share == 1 else config.patch(activation_memory_budget=share)
