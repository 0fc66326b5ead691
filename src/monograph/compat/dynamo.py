"""Count Dynamo's captures, recognise their errors, set their limits and quiet their warnings."""

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from monograph.compat.operators import attributes


def captured_graphs() -> int:
    """Return how many graphs Dynamo has captured in this process; the number is constant if nothing
    recompiles.
    """
    return int(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))


def graphs_from_cache() -> int:
    """Return how many graphs this process has read from the compiler's cache instead of compiling
    them.
    """
    counters = torch._dynamo.utils.counters
    return int(
        counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    )


def graph_breaks() -> int:
    """Return how many graph breaks Dynamo has met in this process."""
    return int(sum(torch._dynamo.utils.counters["graph_break"].values()))


def is_capture_error(error: BaseException | None) -> bool:
    """Return whether an error means that torch could not trace or compile a function, not that the
    function failed.
    """
    import torch._dynamo.exc as dynamo
    import torch._inductor.exc as inductor

    own = (dynamo.TorchDynamoException, dynamo.FailOnRecompileLimitHit, inductor.InductorError)
    # A kernel needs more than this GPU has; needs Triton.
    too_large = type(error).__name__ == "NoTritonConfigsError"
    return too_large or isinstance(error, (*own, inductor.CppCompileError))


@contextmanager
def hooks_kept() -> Iterator[None]:
    """Enable saved-tensor hooks again after the block if an error in a `torch.func` transform left
    them disabled.
    """
    autograd: Any = torch._C._autograd  # its stub lacks a function
    enabled = autograd._saved_tensors_hooks_is_enabled()
    try:
        yield
    finally:
        if enabled and not autograd._saved_tensors_hooks_is_enabled():
            autograd._saved_tensors_hooks_enable()


def cache_custom_functions() -> None:
    """Let torch cache compiled graphs with an `autograd.Function` between runs, which by default it
    does not.

    The cache's key includes the traced forward and backward code, so another function gets another
    entry.
    """
    import torch._functorch.config as config

    config.autograd_cache_allow_custom_autograd_functions = True


def differentiate_outside_autocast() -> None:
    """Let compiled backward passes compute as eager ones do, after the block of autocast that the
    forward pass is in.

    By default torch compiles them inside of it, and rounds the products of code that had left
    autocast.
    """
    import torch._functorch.config as config

    config.backward_pass_autocast = "off"


def cache_attention_kernels() -> None:
    """Let torch cache compiled graphs that name a kernel of attention
    (`torch.nn.attention.sdpa_kernel`) between runs.

    torch does not list the two functions that Dynamo writes into such a graph as cacheable. Their
    arguments, and so the kernel's name, are part of the graph from which the key is made, so
    another kernel gets another entry.
    """
    import torch._inductor.config as config

    names = ("torch.nn.attention._sdpa_kernel", "torch.nn.attention._backend_from_string")
    config.unsafe_marked_cacheable_functions |= dict.fromkeys(names, "1")


def allow_variants() -> None:
    """Let one function be compiled for up to 64 kinds of arguments; torch's default limit is eight."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)


def one_graph_under_ddp() -> None:
    """Let a step under DDP be one graph; by default torch splits it where DDP's gradient buckets
    end.
    """
    torch._dynamo.config.optimize_ddp = False


@functools.cache
def quiet_selective_recompute() -> None:
    """Drop torch's warning, at every capture, that kept results may be overwritten later: such are
    not kept here.
    """
    logger = logging.getLogger("torch._higher_order_ops.wrap")
    logger.addFilter(lambda record: "context_fn is passed" not in record.getMessage())


def ignore_warning_of_block_input_grad() -> None:
    """Drop torch's warning that the gradient of a block's input is accessed: Dynamo does that in a
    capture.
    """
    warnings.filterwarnings(
        "ignore", r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed\."
    )


def quiet_missing_tf32() -> None:
    """Drop torch's advice to compute fp32 in TF32, which has fewer digits: a run in fp32 says so in
    its own words.
    """
    warnings.filterwarnings(
        "ignore", "TensorFloat32 tensor cores for float32 matrix multiplication available"
    )


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` return True in the block, where flex attention is the
    operator itself.
    """
    import torch.nn.attention.flex_attention as flex

    # Without its flag, flex attention would compile itself, which torch refuses on tensors without
    # numbers.
    alone = attributes(flex, {"_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True})
    with attributes(torch.compiler, {"_is_compiling_flag": True}), alone:
        yield


def without_numbers() -> bool:
    """Return whether new tensors are fake (torch's FakeTensor): they have a shape but no values."""
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def without_modes() -> AbstractContextManager[object]:
    """Return a context that suspends the caller's dispatch modes, in which `torch.compile` would
    refuse to trace.
    """
    return _disable_current_modes()
