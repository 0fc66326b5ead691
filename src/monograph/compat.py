"""The private corners of torch that this package touches, in one place; tested on torch 2.11 and 2.13."""

from __future__ import annotations

import functools
from collections.abc import Callable
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


def without_modes() -> Any:
    """A context in which no dispatch mode of the caller is active; `torch.compile` refuses to trace inside of one."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def partitioned(forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Callable[..., Any]:
    """A backend of `torch.compile` that makes a forward and a backward graph as Inductor does and builds neither.

    `forward` and `backward` turn a graph into a function of the list of its arguments.
    """
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=lambda graph, _: forward(graph),
        bw_compiler=lambda graph, _: backward(graph),
        inference_compiler=lambda graph, _: forward(graph),
        decompositions=select_decomp_table(),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        keep_inference_input_mutations=True,
    )
