"""Extend Inductor with Monograph's passes, operators and native code, and repair its cache.

Inductor is the part of torch.compile that generates code for a graph. Its partitioner splits a
joint graph, which has both passes, into a forward and a backward graph. It decides which values the
forward graph saves for the backward graph, and which values the backward graph recomputes. Some
functions here direct the partitioner, or ask for its decision.
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
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

if TYPE_CHECKING:
    from ctypes import CDLL

    from torch._inductor.ir import TensorBox
    from torch._ops import OpOverload

_P = ParamSpec("_P")
_T = TypeVar("_T")
# A process that is writing a library finishes it within this many seconds.
_WRITE_S = 2.0


@functools.cache
def remove_truncated_libraries() -> None:
    """Remove truncated libraries from Inductor's cache, once per process.

    A process that is killed while it compiles leaves such files, and later processes would fail to
    load them. If the library that tests for vector instructions is truncated, later processes would
    believe that the processor has none.
    """
    from torch._inductor.runtime.runtime_utils import cache_dir

    truncated = [path for path in Path(cache_dir()).glob("*/*.so") if _is_truncated(path)]
    if truncated:
        # Another process may be writing one of them.
        time.sleep(_WRITE_S)
    for path in truncated:
        if _is_truncated(path):
            path.unlink(missing_ok=True)


def _is_truncated(path: Path) -> bool:
    """Return whether a file is not a complete 64-bit ELF file; False if it cannot be read.

    The section table is at the end of an ELF file, and the header says where it ends.
    """
    try:
        with path.open("rb") as file:
            header = file.read(64)
            size_bytes = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return True
    # The fields e_shoff, e_shentsize and e_shnum of the header.
    table_offset = struct.unpack_from("<Q", header, 40)[0]
    entry_bytes, entry_count = struct.unpack_from("<HH", header, 58)
    return bool(size_bytes < table_offset + entry_bytes * entry_count)


@functools.cache
def key_cache_by_vector_width() -> None:
    """Add the processor's vector width to the key of Inductor's cache, which lacks it.

    Several machines may share a home folder, or ATEN_CPU_CAPABILITY may be set. Then code that was
    generated for wide vectors would be compiled for narrow ones, and would write past the end of
    its buffers.
    """
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    # `pick_vec_isa` runs the C++ compiler, which a machine with a GPU does not need.
    if not torch.cuda.is_available():
        config.cpp.simdlen = config.cpp.simdlen or pick_vec_isa().bit_width()


@functools.cache
def key_cache_by_code(digest: str) -> None:
    """Add a digest of this package's operators to the keys of torch's caches of compiled graphs.

    Without the digest, a key has only the names of operators. But a graph also depends on each operator's
    rules: its gradient, its batched form, the shape of its result and how Inductor compiles it. If a later
    version of the package changed a rule, it would read graphs from the disk that the old rule made.
    """
    import torch.compiler.config as config

    # What the user has put there, by TORCH_COMPILE_CACHE_KEY_TAG for example, stays a part of the key.
    config.cache_key_tag = f"{config.cache_key_tag} monograph {digest}".lstrip()


@functools.cache
def split_cat_options() -> dict[str, int]:
    """Return the option that makes Inductor compute each input of a concatenation by its own kernel.

    By default one kernel on a GPU computes all inputs at every element of the result.
    """
    from torch._inductor import config

    option = "max_complex_pointwise_cat_inputs"
    if hasattr(config, option):
        return {option: 0}
    # torch 2.11 has only an option for simple inputs. The function below makes that option apply to
    # all inputs.
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    concatenate_in_one_kernel = lowering.pointwise_cat

    def concatenate(inputs: Sequence[TensorBox], axis: int) -> TensorBox:
        if config.max_pointwise_cat_inputs:
            return concatenate_in_one_kernel(inputs, axis)
        return lowering.TensorBox(lowering.ir.ConcatKernel.create(inputs, axis))

    lowering.pointwise_cat = concatenate
    return {"max_pointwise_cat_inputs": 0}


@functools.cache
def keep_strides_of_block_masks() -> None:
    """Fix the strides of a block mask's index lists before flex attention's kernel is generated.

    The kernel has these strides as constants. But if no gradients are needed, torch 2.11 may choose
    other strides for an axis of length 1 afterwards. Rows after the first one would then attend to
    the wrong keys, or read memory outside of the lists.
    """
    flex: Any = importlib.import_module("torch._inductor.kernel.flex.flex_attention")
    realize = flex.maybe_realize

    def realize_and_freeze(values: list[Any]) -> list[Any]:
        nodes = realize(values)
        # The index lists are the inputs that have integers.
        index_lists = [
            node
            for node in nodes
            if hasattr(node, "get_dtype") and not node.get_dtype().is_floating_point
        ]
        flex.freeze_irnodes(index_lists)
        return nodes

    flex.maybe_realize = realize_and_freeze


@functools.cache
def read_wide_rows_once(max_numbers: int) -> None:
    """Let GPU kernels that reduce rows hold a complete row, of up to `max_numbers`, in registers.

    By default Inductor does so for rows of up to 1,024 numbers. For wider rows a kernel has two
    loops, and the second one reads the row again, for example to normalise it.
    """
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    # A persistent reduction is one that holds complete rows.
    should_by_default = InductorChoices.should_use_persistent_reduction

    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        if should_by_default(features, cooperative_reduction):
            return True
        if cooperative_reduction or not config.triton.persistent_reductions:
            return False
        reduces_rows = features.get_reduction_hint() == ReductionHint.INNER
        fits = V.graph.sizevars.statically_known_leq(features.reduction_numel, max_numbers)
        return bool(reduces_rows and fits)

    InductorChoices.should_use_persistent_reduction = staticmethod(  # type: ignore[method-assign]
        should_use_persistent_reduction
    )


def graph_pass(rewrite: Callable[[Graph], None], *files: str, choice: str = "") -> object:
    """Return a pass for Inductor that calls `rewrite` for each graph.

    Args:
        rewrite: changes a graph in place.
        files: paths of the source files of `rewrite`. Their hash is part of the cache's key, so
            that a change of the sources compiles graphs again.
        choice: what `rewrite` depends on besides the graph. It is part of the cache's key, too.
    """
    import torch._inductor.custom_graph_pass as passes

    class Pass(passes.CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            rewrite(graph)

        def uuid(self) -> bytes:
            return bytes(passes.get_hash_for_files(files, choice))

    return Pass()


def onednn_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return left [N, K] @ right [K, M] in fp32 on a CPU, computed by oneDNN.

    torch itself uses oneDNN only for products in bf16.
    """
    # The operator multiplies by the transpose of its second argument. The others say: no bias, and no
    # elementwise function (its name, its arguments and its algorithm) of the result.
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return product


def onednn_rows_are_alone() -> bool:
    """Return whether a row of `onednn_matmul` has the same bits for any number of rows above one.

    It was compared on torch 2.13. With torch 2.11, a row's bits are others with 8 rows than with 32, and
    with many channels others with 64 rows than with 128 (dev/log.md).
    """
    return TorchVersion(torch.__version__) >= "2.13"


def scaled_mm(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> Tensor:
    """Return (left * left_scale) @ (right * right_scale) for fp8 matrices, computed by one kernel.

    Args:
        left: [N, K], fp8, row-major.
        right: [K, M], fp8, column-major.
        left_scale: 0-d, fp32.
        right_scale: 0-d, fp32.
        dtype: the dtype of the result [N, M].
        fast: whether a GPU may accumulate partial sums in less than fp32.
    """
    return torch._scaled_mm(
        left, right, left_scale, right_scale, out_dtype=dtype, use_fast_accum=fast
    )


def compile_cpp(source: str) -> CDLL:
    """Compile C++ source for this processor, and return the library for ctypes.

    The library is kept in Inductor's cache, so the same source is compiled once.
    """
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(source)


@functools.cache
def lower_to_call(operator: OpOverload, function: Callable[..., None]) -> None:
    """Let compiled graphs call `function(left, right, out=...)` for a matrix product.

    The call bypasses torch's dispatcher, which saves half of the 5 microseconds that a call takes. A
    graph from the cache finds the function by the operator's name.
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
    """Let Inductor compile `operator(value)` to the value itself, written to memory.

    Without the operator, Inductor may fuse the value's computation into each kernel that reads it.
    """
    from torch._inductor.lowering import register_lowering

    @register_lowering(operator, type_promotion_kind=None)
    def _(value: TensorBox) -> TensorBox:
        value.realize()
        return value


@contextmanager
def record_cpu_kernels() -> Iterator[None]:
    """Record each call of a compiled graph's CPU kernel for profilers, inside a `with` block.

    Such a call bypasses the dispatcher, so a profiler would not see it. Profilers see Inductor's
    GPU kernels without help.
    """
    from torch._C._profiler import _RecordFunctionFast
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.select_algorithm import extern_kernels

    def recorded(name: str, kernel: Callable[_P, _T]) -> Callable[_P, _T]:
        def call(*arguments: _P.args, **options: _P.kwargs) -> _T:
            with _RecordFunctionFast(name, arguments, {}):
                return kernel(*arguments, **options)

        return call

    # (globals, name, kernel): a kernel is a global of its graph's module.
    kernels = [
        (vars(module), name, value)
        for module in (*PyCodeCache.modules, extern_kernels)
        for name, value in vars(module).items()
        if name.startswith(("cpp_fused_", "monograph_")) and callable(value)
    ]
    for module_globals, name, kernel in kernels:
        shown_name = name
        if name.startswith("monograph_"):
            # `lower_to_call` has named this function after its operator. The profile shows the
            # operator's own name.
            shown_name = name.replace("_", "::", 1)
        module_globals[name] = recorded(shown_name, kernel)
    try:
        yield
    finally:
        for module_globals, name, kernel in kernels:
            module_globals[name] = kernel


def quiet_profiler() -> None:
    """Keep torch's profiler from writing to stderr, unless the user has set its log level."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def parse_no_events(profile: torch.profiler.profile) -> None:
    """Let a profile that has begun write its trace without parsing its events, which is slow.

    The caller has set `acc_events`, because without it torch 2.11 warns of profiling cycles that do
    not exist. But with it torch parses the events as soon as the profile ends. So it is unset here.
    """
    assert profile.profiler is not None
    profile.profiler.acc_events = False


# Activation checkpointing marks the values of a graph with the number of their checkpointed region. The
# partitioner saves a value that a later region reads. This number is larger than that of any region, so
# there is no later region for a value that is marked with it.
_LAST_REGION = 1 << 30


def mark_dequantised_values(graph: Graph) -> None:
    """Mark the values that are computed from 8-bit integers for recomputation in the backward pass.

    The backward pass reads the dequantised copy of a frozen weight. Without marks the partitioner
    saves this copy, which is larger than the integers. The results of matrix products are not
    marked.

    Args:
        graph: a joint graph.
    """
    products = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}
    inputs = graph.find_nodes(op="placeholder")
    quantised_inputs = [
        node
        for node in inputs
        if getattr(node.meta.get("val"), "dtype", None) in (torch.int8, torch.uint8)
    ]
    marked = set[Node]()
    to_visit = [user for node in quantised_inputs for user in node.users]
    while to_visit:
        node = to_visit.pop()
        is_product = getattr(node.target, "overloadpacket", None) in products
        if node.op != "call_function" or node in marked or is_product:
            continue
        marked.add(node)
        # The other operands of a marked value, such as scales, are recomputed with it.
        to_visit += [*node.users, *node.all_input_nodes]
    for node in marked:
        node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": _LAST_REGION}


def mark_readers_of_overwritten_inputs(graph: Graph) -> None:
    """Mark values for saving if they depend on an input that the forward pass overwrites, such as a
    running mean.

    Without marks the partitioner may recompute these values in the backward pass, from the
    overwritten input.

    Args:
        graph: a joint graph.
    """
    from torch._functorch.partitioners import get_default_op_list

    write = torch.ops.aten.copy_.default
    operators = get_default_op_list()
    writes = graph.find_nodes(op="call_function", target=write)
    written_values = [node.args[0] for node in writes]
    # The overwritten inputs, and values that lie in their memory.
    aliases = [
        value for value in written_values if isinstance(value, Node) and value.op == "placeholder"
    ]
    while aliases:
        for user in aliases.pop().users:
            is_alias = operators.is_view(user) or user.target is operator.getitem
            # A training batch norm reads its running mean only to update it: its output depends on
            # the batch's mean.
            is_batch_norm = "batch_norm" in str(user.target)
            if is_alias:
                # A view, or one of several results, changes together with the input.
                aliases.append(user)
            elif user.target is not write and not is_batch_norm:
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                # If the user has several results, each is a node of its own.
                for item in user.users:
                    if item.target is operator.getitem:
                        item.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def mark_recomputed(graph: Graph) -> None:
    """Mark the values of a joint graph that the partitioner must recompute, or must save."""
    mark_dequantised_values(graph)
    mark_readers_of_overwritten_inputs(graph)


def aot_eager() -> Callable[..., Any]:
    """Return a backend of `torch.compile` that traces both passes and generates no code.

    It is torch's backend "aot_eager" with the marks of `mark_recomputed`.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    return aot_autograd(
        fw_compiler=boxed_nop, partition_fn=_partition, keep_inference_input_mutations=True
    )


def _partition(
    graph: GraphModule, inputs: object, **options: Any
) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph into a forward and a backward graph, as Inductor does, with the marks of
    `mark_recomputed`.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    mark_recomputed(graph.graph)
    return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)


def bytes_saved_for_backward(
    forward: Callable[..., object],
    module: torch.nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> int:
    """Return the bytes that a module's compiled forward graph saves for the backward graph.

    Inductor's partitioner chooses the saved values. The module's inputs, parameters and buffers are
    not counted.

    Args:
        forward: the function to compile, which calls the module.
        module: the module.
        args: the positional arguments of `forward`.
        kwargs: the keyword arguments of `forward`.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import select_decomp_table
    from torch.nn.utils.stateless import _reparametrize_module

    own_tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    arguments, arguments_spec = tree_flatten((args, kwargs))
    # A BlockMask would be one leaf, and its tensors would become constants of the graph. So it is
    # replaced by a dict, whose tensors become inputs. The rule `mask_mod` of a BlockMask also reads
    # tensors, but does not change the number of bytes, so a trivial rule takes its place.
    masks_as_dicts = [
        {**vars(argument), "mask_mod": noop_mask} if isinstance(argument, BlockMask) else argument
        for argument in arguments
    ]
    leaves, leaves_spec = tree_flatten(masks_as_dicts)
    tensor_positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    # The bytes of each saved storage, by its address: two saved tensors may share a storage.
    bytes_by_storage: dict[int, int] = {}

    def run(*tensors: Tensor) -> list[Tensor]:
        """Call `forward` with other tensors, and return the tensors among its results.

        The first of `tensors` take the place of the module's own, and the others that of the tensors
        among `leaves`.
        """
        new_leaves = list(leaves)
        for index, tensor in zip(tensor_positions, tensors[len(own_tensors) :], strict=True):
            new_leaves[index] = tensor
        # `tensors` has more elements than `own_tensors`: those of `leaves`, which are not used here.
        module_tensors = dict(zip(own_tensors, tensors, strict=False))
        with _reparametrize_module(module, module_tensors):
            new_arguments = [
                BlockMask(**argument) if isinstance(argument, dict) else argument
                for argument in tree_unflatten(new_leaves, leaves_spec)
            ]
            args, kwargs = tree_unflatten(new_arguments, arguments_spec)
            results = tree_leaves(forward(*args, **kwargs))
            return [result for result in results if isinstance(result, Tensor)]

    def storages(nodes: Iterable[object]) -> list[torch.UntypedStorage]:
        """Return the storages of the tensors that the nodes compute."""
        values = [node.meta["val"] for node in nodes if isinstance(node, Node)]
        return [value.untyped_storage() for value in values if isinstance(value, Tensor)]

    def partition(
        graph: GraphModule, inputs: object, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        forward_graph, backward_graph = _partition(
            graph, inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
        # After its own outputs, the forward graph returns the values that it saves.
        outputs = forward_graph.graph.output_node().args[0]
        assert isinstance(outputs, list | tuple)
        for storage in storages(outputs[num_fwd_outputs:]):
            bytes_by_storage[storage._cdata] = storage.nbytes()
        # Inputs may be among the saved values. They are not counted.
        for storage in storages(forward_graph.graph.find_nodes(op="placeholder")):
            bytes_by_storage[storage._cdata] = 0
        return forward_graph, backward_graph

    tensors = [*own_tensors.values(), *(leaves[index] for index in tensor_positions)]
    # An argument may be the result of an earlier operator. It is detached, because autograd would
    # otherwise trace it back to the inputs of that operator.
    leaf_tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    aot_function(
        run,
        fw_compiler=lambda graph, _: graph,
        bw_compiler=lambda graph, _: graph,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )(*leaf_tensors)
    return sum(bytes_by_storage.values())


def partitioning_backend(
    forward: Callable[[Any], Any], backward: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Return a backend of `torch.compile` that partitions graphs as Inductor does, but lets the caller
    turn them into functions.

    Args:
        forward: called with a forward graph; returns a function that takes the list of the graph's
            arguments.
        backward: the same for a backward graph.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    def partition(
        graph: GraphModule, inputs: object, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        # Inductor does this first, too. An operator without effect, such as a view with the same
        # shape, would hide from the partitioner that its input is cheap to recompute, and so the
        # value would be saved.
        remove_noop_ops(graph.graph)
        return _partition(graph, inputs, **options)

    return aot_autograd(
        fw_compiler=lambda graph, _: forward(graph),
        bw_compiler=lambda graph, _: backward(graph),
        inference_compiler=lambda graph, _: forward(graph),
        decompositions=select_decomp_table(),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )


def limit_saved_activations(share: float) -> AbstractContextManager[object]:
    """Let graphs that are compiled inside a `with` block save at most a share of the activations.

    Args:
        share: from 0 to 1; 1 leaves the decision to the partitioner.
    """
    import torch._functorch.config as config

    return nullcontext() if share == 1 else config.patch(activation_memory_budget=share)
