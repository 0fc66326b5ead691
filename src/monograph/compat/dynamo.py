"""Adapts Dynamo's captures: counts them, recognises their errors, quiets their warnings."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


def captured_graphs() -> int:
    """Return how many graphs Dynamo has captured in this process; it stays the same when nothing recompiles."""
    import torch._dynamo.utils as utils

    return int(utils.counters["stats"].get("unique_graphs", 0))


def graphs_from_cache() -> int:
    """Return how many graphs this process has read from the compiler's cache instead of compiling them."""
    import torch._dynamo.utils as utils

    return int(utils.counters["inductor"]["fxgraph_cache_hit"] + utils.counters["aot_autograd"]["autograd_cache_hit"])


def graph_breaks() -> int:
    """Return how many graph breaks Dynamo has met in this process."""
    import torch._dynamo.utils as utils

    return int(sum(utils.counters["graph_break"].values()))


def is_capture_error(error: BaseException) -> bool:
    """Return whether torch could not trace or compile a function, as opposed to the function itself failing."""
    import torch._dynamo.exc as dynamo
    import torch._inductor.exc as inductor

    own = (dynamo.TorchDynamoException, dynamo.FailOnRecompileLimitHit, inductor.InductorError)
    return isinstance(error, (*own, inductor.CppCompileError))


@contextmanager
def hooks_kept() -> Iterator[None]:
    """Enable saved tensors' hooks again where an error inside of a transform left them disabled for good."""
    autograd: Any = torch._C._autograd
    enabled = autograd._saved_tensors_hooks_is_enabled()
    try:
        yield
    finally:
        if enabled and not autograd._saved_tensors_hooks_is_enabled():
            autograd._saved_tensors_hooks_enable()


def cache_custom_functions() -> None:
    """Let compiled graphs with an `autograd.Function` in them be cached between runs; torch leaves them out by default.

    The cache's key holds the traced forward and backward code, so another function gets another entry.
    """
    import torch._functorch.config as config

    config.autograd_cache_allow_custom_autograd_functions = True


def cache_attention_kernels() -> None:
    """Let compiled graphs that name a kernel of attention (`torch.nn.attention.sdpa_kernel`) be cached between runs.

    torch leaves them out because it does not list the two functions that Dynamo writes into the graph. Their arguments,
    and so the kernel's name, are part of the graph from which the key is made: another kernel gets another entry.
    """
    import torch._inductor.config as config

    names = ("torch.nn.attention._sdpa_kernel", "torch.nn.attention._backend_from_string")
    config.unsafe_marked_cacheable_functions |= dict.fromkeys(names, "1")


def allow_variants(most: int = 64) -> None:
    """Let one function be captured for up to `most` different arguments; torch gives up after eight."""
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, most)


def one_graph_under_ddp() -> None:
    """Let a step that DDP calls be one graph; torch would cut it where DDP's buckets of gradients end."""
    import torch._dynamo.config as config

    config.optimize_ddp = False


@functools.cache
def quiet_selective_recompute() -> None:
    """Drop torch's warning, at every capture, about kept results that are overwritten later: none is kept here."""
    logger = logging.getLogger("torch._higher_order_ops.wrap")
    logger.addFilter(lambda record: "context_fn is passed" not in record.getMessage())


def quiet_inputs_of_blocks() -> None:
    """Drop torch's warning, when one block is captured, that its input's gradient was accessed: Dynamo does that."""
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed\.")


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` return True in the block."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def without_numbers() -> bool:
    """Return whether tensors that are made now have a shape but no values (torch's FakeTensor)."""
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def without_modes() -> Any:
    """Return a context without the caller's dispatch modes, inside of which `torch.compile` refuses to trace."""
    return _disable_current_modes()
