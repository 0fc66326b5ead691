"""Choose the options of flex attention's kernels.

Two of flex attention's options are never set, because the masks of packed documents break what they
assume:

- BLOCKS_ARE_CONTIGUOUS assumes that a block mask's lists of blocks of keys have no holes. A block mask has
  two lists: blocks that are seen in full, and blocks that are seen in part. If a document begins inside a
  block, its later queries see that block and their own in part, and all blocks between the two in full. So
  the second list has a hole.
- ROWS_GUARANTEED_SAFE assumes that every query sees a key in the first tile that the kernel reads. But
  that tile may be before the query's document, and the query would get NaN.
"""

from typing import Any

import torch
from torch import Tensor

Options = dict[str, Any]
Capability = tuple[int, int]


def _forward(queries: int, keys: int, warps: int, stages: int) -> Options:
    """Return the options of the forward pass for a tile of these queries and keys."""
    return {
        "fwd_BLOCK_M": queries,
        "fwd_BLOCK_N": keys,
        "fwd_num_warps": warps,
        "fwd_num_stages": stages,
    }


def _backward(size: int, warps: int, stages: int) -> Options:
    """Return the options of the backward pass for square tiles.

    Its kernel has one tile for the gradients of keys and values, and another for those of queries.
    """
    return {
        "bwd_BLOCK_M1": size,
        "bwd_BLOCK_N1": size,
        "bwd_BLOCK_M2": size,
        "bwd_BLOCK_N2": size,
        "bwd_num_warps": warps,
        "bwd_num_stages": stages,
    }


# For heads of 64, the tiles of torch 2.11 to 2.13 have 128 keys on sm_90 and sm_100. The fp32 scores and
# the output of such a tile need more registers than its 128 threads have. The tiles below were measured
# to be faster on sm_90. On sm_100 only spilled registers were counted: torch's tiles spill 1,104 bytes,
# and these none.
_HEADS_OF_64 = _forward(128, 64, 4, 3) | _backward(64, 4, 2)
# For heads of 256, torch's tiles of the backward pass do not fit the 99 KiB of shared memory of sm_86, 89
# and 120. On sm_80 and sm_100 they spill 55 and 14 KB. The tiles below fit everywhere and spill at most
# 16 bytes.
_HEADS_OF_256 = _forward(64, 32, 8, 2) | _backward(32, 8, 2)

# The options that replace torch's own tiles for heads of 16 bits, by compute capability and head
# dimension (dev/log.md has the measurements and counts). All others have torch's tiles.
_TILES: dict[tuple[Capability, int], Options] = {
    ((9, 0), 64): _HEADS_OF_64,
    ((10, 0), 64): _HEADS_OF_64,
    # Torch's tile of the backward pass spills 15 KB.
    ((10, 0), 128): _backward(64, 8, 2),
    ((8, 0), 256): _HEADS_OF_256,
    ((8, 6), 256): _HEADS_OF_256,
    ((8, 9), 256): _HEADS_OF_256,
    ((10, 0), 256): _HEADS_OF_256,
    ((12, 0), 256): _HEADS_OF_256,
}


def flex_options(query_BHTD: Tensor) -> Options:
    """Return the options of flex attention for these queries: B rows, H heads, T positions, D channels."""
    # Without this option, torch 2.13 would use its kernel for decoding if there are fewer than 128 queries
    # and no gradients. It reads these queries with wrong strides, or finds no kernel for grouped heads.
    options: Options = {"FORCE_USE_FLEX_ATTENTION": True}
    if query_BHTD.is_cuda and query_BHTD.dtype.itemsize == 2:
        capability = torch.cuda.get_device_capability(query_BHTD.device)
        options |= _TILES.get((capability, query_BHTD.shape[-1]), {})
    return options
