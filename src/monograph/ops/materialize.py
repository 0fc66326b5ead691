"""Keep a value in memory that a compiler would otherwise recompute for every element of a loop."""

import torch
from torch import Tensor


def materialize(value: Tensor) -> Tensor:
    """Return the same tensor; a compiled graph keeps it in memory instead of fusing it.

    Inductor fuses the computation of a small tensor into the loops over large ones. So a power or a division is
    repeated for every element. On a CPU, two powers take longer than everything else in an AdamW update.
    """
    if not torch.compiler.is_compiling():
        return value
    return torch.ops.monograph.materialize(value)


@torch.library.custom_op("monograph::materialize", mutates_args=())
def _materialize(value: Tensor) -> Tensor:
    return value.clone()


@_materialize.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


@_materialize.register_vmap
def _(info, in_dims, value):  # type: ignore[no-untyped-def]
    return torch.ops.monograph.materialize(value), in_dims[0]
