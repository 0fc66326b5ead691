"""Count Dynamo's captures, recognise their errors, set their limits and silence their warnings.

Dynamo is the part of torch.compile that traces Python code into graphs; to capture a function means
to trace it.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from monograph.compat.operators import replace_attributes


def captured_graphs() -> int:
    """Return the number of graphs that Dynamo has captured in this process.

    The number stays the same if nothing is recompiled.
    """
    return int(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))


def graphs_from_cache() -> int:
    """Return the number of graphs that this process has read from the compiler's cache."""
    counters = torch._dynamo.utils.counters
    return int(
        counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    )


def graph_breaks() -> int:
    """Return the number of graph breaks of Dynamo in this process."""
    return int(sum(torch._dynamo.utils.counters["graph_break"].values()))


def is_capture_error(error: BaseException | None) -> bool:
    """Return whether an error means that torch failed to trace or compile a function; False if the
    function itself raised it.
    """
    import torch._dynamo.exc as dynamo
    import torch._inductor.exc as inductor

    capture_errors = (
        dynamo.TorchDynamoException,
        dynamo.FailOnRecompileLimitHit,
        inductor.InductorError,
        inductor.CppCompileError,
    )
    # Triton raises this error if a kernel needs more shared memory than this GPU has. The class is
    # compared by name, because importing it needs Triton.
    kernel_is_too_large = type(error).__name__ == "NoTritonConfigsError"
    return kernel_is_too_large or isinstance(error, capture_errors)


@contextmanager
def restore_saved_tensor_hooks() -> Iterator[None]:
    """Enable autograd's saved-tensor hooks after the `with` block, if they were enabled before it.

    An error inside a `torch.func` transform leaves them disabled.
    """
    autograd: Any = torch._C._autograd  # Any, as torch's type stub lacks one of the functions
    were_enabled = autograd._saved_tensors_hooks_is_enabled()
    try:
        yield
    finally:
        if were_enabled and not autograd._saved_tensors_hooks_is_enabled():
            autograd._saved_tensors_hooks_enable()


def cache_custom_functions() -> None:
    """Let torch cache compiled graphs with an `autograd.Function` between processes.

    By default torch compiles them again in each process. Caching is safe, since the cache's key
    includes the traced code of forward and backward.
    """
    import torch._functorch.config as config

    config.autograd_cache_allow_custom_autograd_functions = True


def differentiate_outside_autocast() -> None:
    """Let compiled backward passes run outside of the forward pass's autocast, as eager ones do.

    By default torch compiles a backward pass inside of that autocast. Then it rounds the products
    of code that the forward pass had run with autocast disabled.
    """
    import torch._functorch.config as config

    config.backward_pass_autocast = "off"


def cache_attention_kernels() -> None:
    """Let torch cache compiled graphs that choose an attention kernel by `sdpa_kernel`.

    Dynamo writes two functions into such a graph that torch does not list as cacheable. They are
    safe to cache: the kernel's name is an argument in the graph, and the cache's key is made from
    the graph.
    """
    import torch._inductor.config as config

    names = ("torch.nn.attention._sdpa_kernel", "torch.nn.attention._backend_from_string")
    config.unsafe_marked_cacheable_functions |= dict.fromkeys(names, "1")


def allow_variants() -> None:
    """Let a function be compiled for up to 64 shapes and types of arguments; torch's limit is 8."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)


def forget_graphs(function: Callable[..., object]) -> None:
    """Drop the compiled graphs of a function, or of the function of a bound method.

    Graphs count toward the limit of `allow_variants`, even if nothing can call them any more.
    """
    code = getattr(function, "__code__", None)
    if code is not None:
        torch._dynamo.reset_code(code)


def one_graph_under_ddp() -> None:
    """Let a training step under DDP be one graph; by default torch splits it at DDP's buckets."""
    torch._dynamo.config.optimize_ddp = False


def leave_out_of_ddp(module: torch.nn.Module, names: list[str]) -> None:
    """Let DDP, which will wrap the module, not wait for gradients of these parameters.

    Args:
        module: the module that is wrapped.
        names: the parameters' names in it.
    """
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(module, names)


@functools.cache
def quiet_selective_recompute() -> None:
    """Silence torch's warning that a recomputed region must not contain in-place operators.

    torch prints it at each capture with selective recomputation. Monograph does not store a result
    that is overwritten later.
    """
    logger = logging.getLogger("torch._higher_order_ops.wrap")
    logger.addFilter(lambda record: "context_fn is passed" not in record.getMessage())


def ignore_warning_of_block_input_grad() -> None:
    """Silence torch's warning that the gradient of a block's input is accessed: Dynamo accesses it
    in a capture.
    """
    warnings.filterwarnings(
        "ignore", r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed\."
    )


def quiet_missing_tf32() -> None:
    """Silence torch's advice to compute fp32 products in TF32, which has fewer digits.

    A run in fp32 gives advice of its own.
    """
    warnings.filterwarnings(
        "ignore", "TensorFloat32 tensor cores for float32 matrix multiplication available"
    )


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Let `torch.compiler.is_compiling()` return True in the `with` block.

    Flex attention then calls its operator directly. Otherwise it would compile itself, which torch
    refuses for fake tensors.
    """
    import torch.nn.attention.flex_attention as flex

    uncompiled = replace_attributes(flex, {"_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True})
    with replace_attributes(torch.compiler, {"_is_compiling_flag": True}), uncompiled:
        yield


def makes_fake_tensors() -> bool:
    """Return whether new tensors are torch's FakeTensors, which have a shape but no values."""
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def without_modes() -> AbstractContextManager[object]:
    """Return a context in which the caller's dispatch modes are off. Dynamo refuses to trace while such
    a mode is on.
    """
    return _disable_current_modes()
