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
    """Return the FLOPs of an operator's call if it is a matrix product, a convolution or attention,
    else 0.
    """
    from torch.utils.flop_counter import flop_registry

    attention = torch.ops.aten._scaled_dot_product_flash_attention
    packet = getattr(operator, "overloadpacket", operator)
    # Torch's list lacks one, 2.11's both.
    lacking = ("_scaled_dot_product_flash_attention_for_cpu", "flex_attention")
    if packet not in flop_registry and getattr(packet, "__name__", "") in lacking:
        packet = attention
    # Torch 2.11 does not support fewer key heads here.
    if str(packet).startswith("aten._scaled_dot_product"):
        heads = args[0].shape[1]
        args = [(len(t), heads, *t.shape[2:]) if getattr(t, "ndim", 0) == 4 else t for t in args]
    return (
        int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0
    )


def writes_in_place(operator: object) -> bool:
    """Return whether an operator changes one of its arguments."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def in_transform() -> bool:
    """Return whether a transform of `torch.func` (vmap, grad) is being applied."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def end_failed_capture(
    graph: torch.cuda.CUDAGraph,
    device: torch.device,
    pool: tuple[int, int],
    stream: torch.cuda.Stream,
) -> None:
    """Undo what torch leaves of a CUDA graph's capture that did not end.

    Its memory pool stays in use. On torch 2.11 the pool stays open, too, and for the generator of
    random numbers the capture goes on.
    """
    with contextlib.suppress(RuntimeError):
        graph.pool()
        return  # it ended, after an error of the captured work
    with contextlib.suppress(RuntimeError):  # raised where the pool is closed
        torch._C._cuda_endAllocateToPool(device.index, pool)
    torch._C._cuda_releasePool(device.index, pool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph is empty
        with torch.cuda.graph(
            torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"
        ):
            pass


def allow_stashes_in_recomputed() -> None:
    """Let a captured, recomputed block pass a tensor from one module to another through an
    attribute.

    Dynamo forbids writes to attributes there, because the backward pass does not repeat them;
    families of siblings undo theirs before the block ends.
    """
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def sums_gradients() -> bool:
    """Return whether a sum that is being computed is autograd's, of a tensor's gradients.

    Autograd computes it in place of one of them, except for fake tensors, whose class it does not
    know.
    """
    return torch._C._current_graph_task_id() >= 0 and not torch.is_grad_enabled()


def functional(replaced: Mapping[str, Callable[..., Any]]) -> AbstractContextManager[None]:
    """In the block, replace functions of `torch.nn.functional` for callers that look them up there.

    A `TorchFunctionMode` would be the public way, but Dynamo (2.13) does not trace
    `Tensor.unflatten` in one.
    """
    return attributes(torch.nn.functional, replaced)


@contextmanager
def attributes(owner: object, replaced: Mapping[str, object]) -> Iterator[None]:
    """In the block, replace attributes of a module or class; inherited ones are shadowed."""
    before = {name: vars(owner)[name] for name in replaced if name in vars(owner)}
    try:
        for name, value in replaced.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in replaced:
            delattr(owner, name)
        for name, value in before.items():
            setattr(owner, name, value)


def integer_parameters() -> AbstractContextManager[None]:
    """In the block, let a parameter of integers be made without saying that it takes no gradient.

    FSDP2 of torch 2.11 says so only afterwards, when torch has refused, for the rows of a quantised
    base.
    """
    make = torch.nn.Parameter.__new__

    def made(
        kind: type[torch.nn.Parameter], data: Tensor | None = None, requires_grad: bool = True
    ) -> torch.nn.Parameter:
        return make(kind, data, requires_grad and (data is None or data.is_floating_point()))

    return attributes(torch.nn.Parameter, {"__new__": staticmethod(made)})


def _telling(function: Callable[_P, _T], tell: Callable[[], None]) -> Callable[_P, _T]:
    """Return a function that calls `tell` before the function, where gradients are taken."""

    def told(*arguments: _P.args, **keywords: _P.kwargs) -> _T:
        if torch.is_grad_enabled():
            tell()
        return function(*arguments, **keywords)

    return told


@contextmanager
def layers(
    recurrent: dict[str, Callable[..., Any]],
    weight_norm: Callable[..., Any],
    average_of_batches: Callable[..., Any],
    recomputing: Callable[[], None],
) -> Iterator[None]:
    """In the block, let torch's layers call the given functions in place of code that vmap cannot
    batch.

    Recurrent layers also read their weights at each call. Their stored list of weights is made for
    cuDNN: it does not notice that `functional_call` exchanges a weight, and would hold tensors of a
    finished transform.

    Args:
        recurrent: functions that recurrent layers and cells call, by torch's names: "lstm",
            "gru_cell" and so on.
        weight_norm: (direction, norm, dim) -> weight, for both of torch's implementations of weight
            norm.
        average_of_batches: the forward pass of a batch norm that trains with momentum None.
        recomputing: called where `torch.utils.checkpoint` would recompute something.
    """
    # torch.nn.utils has a function of that name.
    older = importlib.import_module("torch.nn.utils.weight_norm")
    norm = torch.nn.modules.batchnorm._BatchNorm
    forward, checkpointed = norm.forward, checkpoint._checkpoint_without_reentrant_generator

    def normed(self: torch.nn.modules.batchnorm._BatchNorm, x: Tensor) -> Tensor:
        counted = (
            self.training and self.track_running_stats and self.num_batches_tracked is not None
        )
        return (
            average_of_batches(self, x) if counted and self.momentum is None else forward(self, x)
        )

    weights = property(lambda self: [getattr(self, name) for name in self._flat_weights_names])
    with (
        attributes(torch._VF, recurrent),
        attributes(
            torch.nn.RNNBase, {"_flat_weights": weights, "_update_flat_weights": lambda self: None}
        ),
        attributes(torch, {"_weight_norm": weight_norm}),
        attributes(older, {"_weight_norm": weight_norm}),
        attributes(norm, {"forward": normed}),
        attributes(
            checkpoint,
            {"_checkpoint_without_reentrant_generator": _telling(checkpointed, recomputing)},
        ),
    ):
        yield


def allow_recurrent() -> None:
    """Let Dynamo trace recurrent layers, which by default it refuses, as torch's own kernels cannot
    be traced.
    """
    torch._dynamo.config.allow_rnn = True


def warn_of_loops(wanted: bool) -> None:
    """Set whether torch warns about each operator that vmap runs in a loop, and asks the user to
    file an issue.
    """
    torch._C._functorch._set_vmap_fallback_warning_enabled(wanted)  # type: ignore[attr-defined]


@contextmanager
def loops_told(tell: Callable[[str], None]) -> Iterator[None]:
    """In the block, call `tell` with the name of each operator that vmap runs in a loop, instead of
    a warning.
    """

    def show(message: object, *_: object, **__: object) -> None:
        name = str(message).partition("implemented the batching rule for ")[2]
        if name:
            tell(name.split(".")[0])

    warn_of_loops(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            yield
    finally:
        warn_of_loops(False)


@contextmanager
def without_fast_path() -> Iterator[None]:
    """In the block, run `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` without their fast
    path.

    vmap cannot batch that fused path, which they take in evaluation mode.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def quiet_layout_of_stacked_gradients() -> None:
    """Drop torch's warning about gradient layouts: a parameter that is a view of a stack is not
    contiguous.
    """
    warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
