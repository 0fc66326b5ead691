"""The private corners of torch that this package touches, in one place; tested on torch 2.11 and 2.13."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def captured_graphs() -> int:
    """How many graphs Dynamo has captured in this process; it stands still when nothing recompiles."""
    import torch._dynamo.utils as utils

    return int(utils.counters["stats"].get("unique_graphs", 0))


def graph_breaks() -> int:
    """How many graph breaks Dynamo has met in this process."""
    import torch._dynamo.utils as utils

    return int(sum(utils.counters["graph_break"].values()))


def is_capture_error(error: BaseException) -> bool:
    """Whether torch could not trace or compile a function, as opposed to the function itself failing."""
    import torch._dynamo.exc as dynamo
    import torch._inductor.exc as inductor

    return isinstance(error, (dynamo.TorchDynamoException, inductor.InductorError, inductor.CppCompileError))


def cache_custom_functions() -> None:
    """Let compiled graphs with an `autograd.Function` in them be cached between runs; torch leaves them out by default.

    The key of the cache holds the traced forward and backward code, so another function is another entry.
    """
    import torch._functorch.config as config

    config.autograd_cache_allow_custom_autograd_functions = True


def allow_variants(most: int = 64) -> None:
    """Let one function be captured for so many different arguments; torch gives up after eight."""
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, most)


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


def flops_of(operator: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of an operator's call if it is a matrix product, a convolution or attention, else 0."""
    import torch
    from torch.utils.flop_counter import flop_registry

    attention = torch.ops.aten._scaled_dot_product_flash_attention
    packet = getattr(operator, "overloadpacket", operator)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # torch's list lacks it
        packet = attention
    return int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0


def writes_in_place(operator: Any) -> bool:
    """Whether an operator changes one of its arguments."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


@functools.cache
def quiet_selective_recompute() -> None:
    """Drop torch's warning, at every capture, of results that are kept and then overwritten: none such is kept here."""
    logger = logging.getLogger("torch._higher_order_ops.wrap")
    logger.addFilter(lambda record: "context_fn is passed" not in record.getMessage())


def quiet_inputs_of_blocks() -> None:
    """Drop torch's warning, when a block alone is captured, that its input's gradient was looked at: Dynamo did."""
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed\.")


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """In the block, code that asks `torch.compiler.is_compiling()` is told that it is."""
    import torch

    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def stored_by_graph(forward: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> int:
    """Bytes that a compiled graph of a module's forward pass keeps for its backward pass, beside what it is given.

    It is the answer of the same partitioner that Inductor asks, which recomputes what fuses into the backward pass.
    """
    from torch import Tensor
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
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
        parts = min_cut_rematerialization_partition(
            graph, inputs, num_fwd_outputs=num_fwd_outputs, compiler="inductor", **options
        )
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


def without_numbers() -> bool:
    """Whether tensors that are made now have a shape and no numbers (torch's FakeTensor)."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def sums_gradients() -> bool:
    """Whether a sum that is taken now is autograd's own, of a tensor's gradients: it writes it over one of them.

    It does not where tensors have no numbers, as it does not know their class.
    """
    import torch

    return torch._C._current_graph_task_id() >= 0 and not torch.is_grad_enabled()


def without_modes() -> Any:
    """A context in which no dispatch mode of the caller is active; `torch.compile` refuses to trace inside of one."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def partitioned(forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Callable[..., Any]:
    """A backend of `torch.compile` that makes a forward and a backward graph as Inductor does and builds neither.

    `forward` and `backward` turn a graph into a function of the list of its arguments.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=lambda graph, _: forward(graph),
        bw_compiler=lambda graph, _: backward(graph),
        inference_compiler=lambda graph, _: forward(graph),
        decompositions=select_decomp_table(),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        keep_inference_input_mutations=True,
    )


@contextmanager
def functional(replaced: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """In the block functions of `torch.nn.functional` are others, for whoever looks them up there.

    A `TorchFunctionMode` would do the same officially, but Dynamo (2.13) does not trace `Tensor.unflatten` in one.
    """
    import torch.nn.functional as functional

    before = {name: getattr(functional, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(functional, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(functional, name, function)


@contextmanager
def without_fast_path() -> Iterator[None]:
    """In the block `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` run as written, also where they need not.

    Their fused path in evaluation mode has no batched form.
    """
    import torch

    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def quiet_layout_of_stacked_gradients() -> None:
    """Drop torch's warning that a parameter which is a view of a wider stack has gaps between its members."""
    warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
