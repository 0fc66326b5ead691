"""Compute root-mean-square layer normalisation."""

import torch
from torch import Tensor


def rms_norm(hidden: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Scale each vector of the last axis to a root mean square of one, then by a learned weight.

        y = x / sqrt(mean(x^2) + eps) * weight

    It is computed in fp32 and rounded once, at the end. Float64 inputs are computed in float64. (In
    transformers they are rounded to fp32, but then no test of exactness could have a bound below 6e-8.)
    There is no other implementation, because Inductor fuses this one into one kernel, and
    `torch.nn.functional.rms_norm` was not faster on a CPU.

    Args:
        hidden: x, [..., D], floating.
        weight: [D], floating; None: all ones.
        eps: added to the mean square.

    Returns:
        y, [..., D], in the dtype of `hidden`.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    normed = wide * scale
    return (normed if weight is None else normed * weight).to(hidden.dtype)
