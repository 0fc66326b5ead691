"""A pass over captured graphs: large fp32 matrix products by oneDNN where torch's own library, MKL, is slow.

MKL uses half of the vector width of AMD processors with AVX-512; oneDNN, which torch has built in and takes for bf16
anyway, uses all of it (docs/log.md). Eager code keeps MKL and is the reference.

Shapes: N rows, K summed, M columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monograph import compat
from monograph.device import mkl_is_slow

# Multiplications below which a call of oneDNN costs more than it saves (docs/log.md).
SMALLEST = 2**24
# Plain registration: `torch.library.custom_op` adds 10 microseconds to every call.
_LIBRARY = torch.library.Library("monograph", "DEF")
_LIBRARY.define("matmul(Tensor left, Tensor right) -> Tensor")
_LIBRARY.impl("matmul", compat.onednn_matmul, "CPU")


@torch.library.register_fake("monograph::matmul", lib=_LIBRARY)
def _(left_NK: Tensor, right_KM: Tensor) -> Tensor:
    return left_NK.new_empty(left_NK.shape[0], right_KM.shape[1])


def passes() -> dict[str, Any] | None:
    """The pass as an option of `torch.compile` with Inductor; None where MKL is as fast."""
    return {"post_grad_custom_post_pass": compat.graph_pass(rewrite, __file__)} if mkl_is_slow() else None


def rewrite(graph: torch.fx.Graph) -> None:
    """Let oneDNN compute every fp32 product on the CPU that is large enough."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        left_NK, product_NM = node.args[0].meta["val"], node.meta["val"]
        large = product_NM.numel() * left_NK.shape[1] >= SMALLEST
        if large and product_NM.dtype == torch.float32 and product_NM.device.type == "cpu":
            node.target = torch.ops.monograph.matmul.default
