"""Inspect torch's operators, autograd and transforms, and replace functions of its layers."""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint as checkpoint
from torch import Tensor

_P = ParamSpec("_P")
_T = TypeVar("_T")


def flops_of(operator: object, args: Sequence[Any], kwargs: Mapping[str, Any], out: object) -> int:
    """Return the FLOPs of a call of a matrix product, a convolution or attention.

    Args:
        operator: the operator.
        args: the call's positional arguments.
        kwargs: the call's keyword arguments.
        out: the call's result.

    Returns:
        The FLOPs; 0 for any other operator.
    """
    from torch.utils.flop_counter import flop_registry

    packet = getattr(operator, "overloadpacket", operator)
    # flop_registry lacks the first of these on torch 2.11 and 2.13, and the second on torch 2.11.
    missing_names = ("_scaled_dot_product_flash_attention_for_cpu", "flex_attention")
    if packet not in flop_registry and getattr(packet, "__name__", "") in missing_names:
        packet = torch.ops.aten._scaled_dot_product_flash_attention
    if str(packet).startswith("aten._scaled_dot_product"):
        # Torch 2.11 cannot count attention with fewer key heads than query heads. So it is given
        # shapes with as many key heads, for which the FLOPs are the same.
        query_heads = args[0].shape[1]
        args = [
            (len(arg), query_heads, *arg.shape[2:]) if getattr(arg, "ndim", 0) == 4 else arg
            for arg in args
        ]
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=out))


def writes_in_place(operator: object) -> bool:
    """Return whether an operator changes one of its arguments."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


# The decorator makes Dynamo call this function while it traces a caller. At that time, the transforms
# around the caller are on torch's stack. Without the decorator, Dynamo would trace this function, too, and
# use a stand-in for the result of `peek_interpreter_stack`. A stand-in is never None.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def in_transform() -> bool:
    """Return whether the caller runs inside a transform of `torch.func`, such as vmap or grad."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def end_failed_capture(
    graph: torch.cuda.CUDAGraph,
    device: torch.device,
    pool: tuple[int, int],
    stream: torch.cuda.Stream,
) -> None:
    """Clean up after the capture of a CUDA graph that did not end.

    torch leaves the capture's memory pool in use. torch 2.11 also leaves the pool open, and its
    random number generator still believes that a capture is going on.

    Args:
        graph: the graph whose capture failed.
        device: the GPU.
        pool: the capture's memory pool.
        stream: the stream of the capture.
    """
    with contextlib.suppress(RuntimeError):
        graph.pool()
        # If this does not raise, the capture did end, and only the captured work failed.
        return
    with contextlib.suppress(RuntimeError):  # the pool is closed already, except on torch 2.11
        torch._C._cuda_endAllocateToPool(device.index, pool)
    torch._C._cuda_releasePool(device.index, pool)
    # The end of a capture resets the random number generator. So an empty graph is captured.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of an empty graph
        with torch.cuda.graph(
            torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"
        ):
            pass


def allow_stashes_in_recomputed() -> None:
    """Let the modules of a recomputed block pass a tensor to one another through an attribute.

    By default Dynamo forbids writes to attributes in a captured block that is recomputed, since the
    recomputation does not repeat them. Fused sibling projections (`monograph.graph.siblings`) need
    such writes, and undo them before the block ends.
    """
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def is_accumulating_gradients() -> bool:
    """Return whether an addition in progress is autograd's sum of the gradients of one tensor.

    A prediction of memory has to know this. Autograd writes the sum of real tensors into the memory of
    one of them, but does not do so for fake tensors, whose class it does not know.
    """
    is_in_backward_pass = torch._C._current_graph_task_id() >= 0
    return is_in_backward_pass and not torch.is_grad_enabled()


def replace_functional(
    replacements: Mapping[str, Callable[..., Any]],
) -> AbstractContextManager[None]:
    """Replace functions of `torch.nn.functional`, by name, inside a `with` block.

    Callers that imported such a function before keep the original. A `TorchFunctionMode` would be
    the public way, but Dynamo of torch 2.13 cannot trace `Tensor.unflatten` inside of one.
    """
    return replace_attributes(torch.nn.functional, replacements)


@contextmanager
def replace_attributes(owner: object, replacements: Mapping[str, object]) -> Iterator[None]:
    """Replace attributes of a module or class, by name, inside a `with` block.

    An attribute that the class inherits is hidden by the replacement.
    """
    originals = {name: vars(owner)[name] for name in replacements if name in vars(owner)}
    try:
        for name, value in replacements.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in replacements:
            delattr(owner, name)
        for name, value in originals.items():
            setattr(owner, name, value)


def integer_parameters() -> AbstractContextManager[None]:
    """Let `Parameter(data)` make a parameter of integers inside a `with` block.

    torch refuses such a parameter unless requires_grad is False. FSDP2 of torch 2.11 first makes
    its parameters for the rows of a quantised base, and sets requires_grad to False afterwards.
    """
    original_new = torch.nn.Parameter.__new__

    def new(
        cls: type[torch.nn.Parameter], data: Tensor | None = None, requires_grad: bool = True
    ) -> torch.nn.Parameter:
        can_have_gradient = data is None or data.is_floating_point()
        return original_new(cls, data, requires_grad and can_have_gradient)

    return replace_attributes(torch.nn.Parameter, {"__new__": staticmethod(new)})


def _calling_before(function: Callable[_P, _T], notify: Callable[[], None]) -> Callable[_P, _T]:
    """Return `function` with a call of `notify` before it if gradients are enabled."""

    def notifying(*arguments: _P.args, **keywords: _P.kwargs) -> _T:
        if torch.is_grad_enabled():
            notify()
        return function(*arguments, **keywords)

    return notifying


@contextmanager
def replace_layer_functions(
    recurrent: dict[str, Callable[..., Any]],
    weight_norm: Callable[..., Any],
    cumulative_batch_norm: Callable[..., Any],
    on_recomputation: Callable[[], None],
) -> Iterator[None]:
    """Let torch's layers call the given functions, inside a `with` block.

    They replace code that vmap cannot batch.

    Args:
        recurrent: functions that recurrent layers and cells call, by torch's names: "lstm",
            "gru_cell" and so on.
        weight_norm: (direction, norm, dim) -> weight, for both of torch's implementations of weight
            norm.
        cumulative_batch_norm: the forward pass of a batch norm that trains with momentum None,
            whose running statistics are the means over all batches.
        on_recomputation: called before `torch.utils.checkpoint` runs a function that it would
            recompute in the backward pass.
    """
    # The module is imported by its name, because the attribute torch.nn.utils.weight_norm is a function
    # of the same name.
    weight_norm_module = importlib.import_module("torch.nn.utils.weight_norm")
    batch_norm = torch.nn.modules.batchnorm._BatchNorm
    original_forward = batch_norm.forward
    original_checkpoint = checkpoint._checkpoint_without_reentrant_generator

    def batch_norm_forward(self: torch.nn.modules.batchnorm._BatchNorm, x: Tensor) -> Tensor:
        counts_batches = (
            self.training and self.track_running_stats and self.num_batches_tracked is not None
        )
        if counts_batches and self.momentum is None:
            return cumulative_batch_norm(self, x)
        return original_forward(self, x)

    # A recurrent layer stores a list of its weights for cuDNN. If `functional_call` exchanges a weight,
    # the list stays as it is, so later it would have tensors of a finished transform. Therefore a
    # property replaces the list, and reads the weights at each call.
    current_weights = property(
        lambda self: [getattr(self, name) for name in self._flat_weights_names]
    )
    with (
        replace_attributes(torch._VF, recurrent),
        replace_attributes(
            torch.nn.RNNBase,
            {"_flat_weights": current_weights, "_update_flat_weights": lambda self: None},
        ),
        replace_attributes(torch, {"_weight_norm": weight_norm}),
        replace_attributes(weight_norm_module, {"_weight_norm": weight_norm}),
        replace_attributes(batch_norm, {"forward": batch_norm_forward}),
        replace_attributes(
            checkpoint,
            {
                "_checkpoint_without_reentrant_generator": _calling_before(
                    original_checkpoint, on_recomputation
                )
            },
        ),
    ):
        yield


def allow_recurrent() -> None:
    """Let Dynamo trace recurrent layers.

    By default it refuses, since torch's own kernels for them cannot be traced.
    """
    torch._dynamo.config.allow_rnn = True


def set_vmap_loop_warning(enabled: bool) -> None:
    """Set whether torch warns about each operator that vmap runs in a loop.

    The warning asks the user to file an issue with torch.
    """
    torch._C._functorch._set_vmap_fallback_warning_enabled(enabled)  # type: ignore[attr-defined]


@contextmanager
def report_vmap_loops(report: Callable[[str], None]) -> Iterator[None]:
    """Call `report` with the name of each operator that vmap runs in a loop inside a `with` block.

    torch's own warnings about them are not printed.
    """

    def show_warning(message: object, *_: object, **__: object) -> None:
        name = str(message).partition("implemented the batching rule for ")[2]
        if name:
            report(name.split(".")[0])

    set_vmap_loop_warning(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show_warning
            yield
    finally:
        set_vmap_loop_warning(False)


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Disable the fast path of torch's attention layers inside a `with` block.

    `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` take this fused path in evaluation
    mode, and vmap cannot batch it.
    """
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


def quiet_layout_of_stacked_gradients() -> None:
    """Silence torch's warning about the memory layout of gradients.

    A parameter that is a view of a stack of members is not contiguous, which is intended.
    """
    warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
