"""How the tests compare numbers: errors measured in float64, bounds derived from the naive path's
own error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Errors:
    """The outcome of a three-way comparison: true if ours is within the bound; a failed assert
    shows its repr.
    """

    ours: float
    naive: float
    bound: float

    def __bool__(self) -> bool:
        return self.ours <= self.bound


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64; infinite for NaN, absolute where `expected` is
    zero.

    It is computed on the host, as the exact result often is there and the other one on a GPU.
    """
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    actual, expected = (tensor.detach().cpu().double() for tensor in (actual, expected))
    difference = (actual - expected).norm().item()
    scale = expected.norm().item()
    error = difference / scale if scale > 0 else difference
    return error if error == error else float("inf")


def error_within(
    ours: torch.Tensor, naive: torch.Tensor, exact: torch.Tensor, k: float = 2.0
) -> Errors:
    """Whether a fast path is as good as the naive path of the same dtype, both measured against
    float64.

    error(ours) ≤ k · (error(naive) + u), where u = eps / 2 of ours' dtype is the error of merely
    storing the exact result, so that a naive path which happens to be exact does not ask for the
    impossible.

    Use: `assert error_within(ours, naive, exact)`. After the test that ml-cross-entropy does for
    its backward (tests/test_cce_loss_backward.py) and the k = 2 of attention-gym
    (attn_gym/testing/kda.py).

    Args:
        ours: the result under test, in any floating dtype.
        naive: the same result by the obvious way in the same dtype.
        exact: the same result in float64.
        k: how many times the naive path's error is allowed.
    """
    assert ours.dtype == naive.dtype, f"{ours.dtype} is compared with {naive.dtype}"
    assert exact.dtype == torch.float64, f"the reference is {exact.dtype}, not float64"
    naive_error = relative_error(naive, exact)
    return Errors(
        relative_error(ours, exact),
        naive_error,
        k * (naive_error + torch.finfo(ours.dtype).eps / 2),
    )
