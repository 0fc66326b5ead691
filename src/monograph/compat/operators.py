"""What torch computes and how: its operators, its functions, its autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def flops_of(operator: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of an operator's call if it is a matrix product, a convolution or attention, else 0."""
    import torch
    from torch.utils.flop_counter import flop_registry

    attention = torch.ops.aten._scaled_dot_product_flash_attention
    packet = getattr(operator, "overloadpacket", operator)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # torch's list lacks it
        packet = attention
    if str(packet).startswith("aten._scaled_dot_product"):  # torch 2.11 knows no attention with fewer key heads
        heads = args[0].shape[1]
        args = [(len(t), heads, *t.shape[2:]) if getattr(t, "ndim", 0) == 4 else t for t in args]
    return int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0


def writes_in_place(operator: Any) -> bool:
    """Whether an operator changes one of its arguments."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def in_transform() -> bool:
    """Whether a transform of `torch.func` (vmap, grad) is being applied."""
    import torch

    return torch._C._functorch.peek_interpreter_stack() is not None


def allow_stashes_in_recomputed() -> None:
    """Let a captured block that is recomputed hand a tensor from one module to another through an attribute.

    Dynamo refuses all writes to attributes there, since it does not repeat them in the backward pass; such a one is
    taken back before the block ends.
    """
    import torch._dynamo.config as config

    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def sums_gradients() -> bool:
    """Whether a sum that is taken now is autograd's own, of a tensor's gradients: it writes it over one of them.

    It does not where tensors have no numbers, as it does not know their class.
    """
    import torch

    return torch._C._current_graph_task_id() >= 0 and not torch.is_grad_enabled()


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
