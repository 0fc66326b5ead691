"""Choose the options of flex attention's kernels.

Two of flex attention's options are never set, as its masks for packed rows break what they assume:

- BLOCKS_ARE_CONTIGUOUS: the blocks of a list follow each other without a hole. But where a document
  begins inside a block, later queries see that block and their own in part, and the blocks between
  them in full. These are in another list.
- ROWS_GUARANTEED_SAFE: every query sees a key in the first tile that its kernel reads, not only in
  some tile. But that tile may be before the query's document. The query would get NaN.
"""

from typing import Any

import torch
from torch import Tensor

# Tiles that were measured to be faster than torch's own (dev/log.md), by compute capability, dtype and
# head dimension. Elsewhere the tiles are torch's.
_TILES = {
    ((9, 0), torch.bfloat16, 64): {
        # Here torch 2.11 to 2.13 take 128 keys. Their fp32 scores and the output need more registers
        # than the 128 threads have.
        "fwd_BLOCK_M": 128,
        "fwd_BLOCK_N": 64,
        "fwd_num_warps": 4,
        "fwd_num_stages": 3,
        # The kernel of the backward pass has one tile for the gradients of keys and values, and
        # another for those of queries.
        "bwd_BLOCK_M1": 64,
        "bwd_BLOCK_N1": 64,
        "bwd_BLOCK_M2": 64,
        "bwd_BLOCK_N2": 64,
        "bwd_num_warps": 4,
        "bwd_num_stages": 2,
    },
}


def flex_options(query_BHTD: Tensor) -> dict[str, Any]:
    """Return the options of flex attention for these queries."""
    # For fewer than 128 queries without gradients, torch 2.13 would use its kernel for decoding,
    # which reads these queries with wrong strides, or would find no kernel for grouped heads.
    options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
    if query_BHTD.is_cuda:
        capability = torch.cuda.get_device_capability(query_BHTD.device)
        kind = (capability, query_BHTD.dtype, query_BHTD.shape[-1])
        options |= _TILES.get(kind, {})
    return options
