"""Keep a value in memory that a compiler would otherwise compute again for every element that reads
it.
"""

import torch
from torch import Tensor


def materialize(value: Tensor) -> Tensor:
    """Return the same tensor; in a compiled graph it is kept in memory instead of being fused into
    its readers.

    Inductor fuses small tensors into the loops over large ones, which then repeat a power or a
    division for every
    element: on a CPU, two powers cost an AdamW update more than everything else in it.
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
