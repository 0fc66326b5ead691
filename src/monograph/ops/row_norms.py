"""The norms of a weight's rows, and of its sum with a product of two thin matrices.

Shapes: N outputs, K inputs, R rank.
"""

import torch
from torch import Tensor

# The minimum of a squared norm. Without it, a row of zeros divided by its norm would be 0 / 0, NaN.
MIN_SQUARE = torch.finfo(torch.float32).tiny


def row_norms(weight_NK: Tensor) -> Tensor:
    """Return the Euclidean norm of each row, [N], in fp32 or wider."""
    wide = torch.promote_types(weight_NK.dtype, torch.float32)
    return torch.linalg.vector_norm(weight_NK, dim=-1, dtype=wide).clamp_min(MIN_SQUARE**0.5)


def sum_row_norms(norms_N: Tensor, product_RN: Tensor, A_RK: Tensor, B_NR: Tensor) -> Tensor:
    """Return `row_norms(W + B A)`, computed without W and without the product B A.

        ||W + B A||^2 = ||W||^2 + B (2 W A^T + B A A^T),   row by row

    `row_norms` of the sum is the reference. Where B = 0 the result has the bits of the norms of W,
    because the rounded root of a rounded square is the number itself.

    Args:
        norms_N: norms of the rows of W, in fp32 or wider.
        product_RN: A W^T, in any dtype.
        A_RK: A.
        B_NR: B.

    Returns:
        [N] in the dtype of `norms_N` or B, whichever is wider.
    """
    added_squares_N = (B_NR * (2 * product_RN.mT + B_NR @ (A_RK @ A_RK.mT))).sum(-1)
    return (norms_N.square() + added_squares_N).clamp_min(MIN_SQUARE).sqrt()
