"""Replace the logits of a chunk by the gradient of its loss, by one Triton kernel.

It computes what `monograph.ops.logits_gradient.replace_logits_` says. A row is one program. Its first
loop reads the logits for their largest value and the sum of exponentials, its second loop reads them
again, from the cache, and writes the gradients. PyTorch's compiler makes two loops of it, too, but
has about three times as many instructions for each logit, which take longer than the memory does.

Shapes: C rows (tokens), V columns (the vocabulary), T columns that a program reads at once.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

# A thread has so many columns. With the 16 warps of a large vocabulary, the rows that a GPU computes at
# once fit about into its L2 cache, from which the second loop reads. With 32, registers would be
# spilled where the vocabulary is odd.
_COLUMNS_OF_THREAD: Final = 16
_THREADS_OF_WARP: Final = 32
# exp(x) = 2^(x log2 e): a GPU has an instruction for powers of two.
_LOG2_E: Final = tl.constexpr(1.4426950408889634)
_LN_2: Final = tl.constexpr(0.6931471805599453)


@triton.jit
def _add_columns(values_T, largest, total):
    """Return the largest value so far, and the sum of 2^((value - largest) log2 e) so far."""
    new = tl.maximum(largest, tl.max(values_T, 0))
    # While all values are -inf, their differences would be NaN.
    base = tl.where(new == float("-inf"), 0.0, new)
    total = total * tl.exp2((largest - base) * _LOG2_E)
    return new, total + tl.sum(tl.exp2((values_T - base) * _LOG2_E), 0)


@triton.jit
def _gradients(values_T, columns_T, target, largest, mask, factor):
    """Return mask * (softmax - onehot)."""
    powers_T = tl.exp2((values_T - largest) * _LOG2_E)
    return powers_T * factor - tl.where(columns_T == target, mask, 0.0)


@triton.jit
def _replace_row(logits, targets, masks, losses, stride, V, T: tl.constexpr):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    column_T = tl.arange(0, T)
    target, mask = tl.load(targets + row).to(tl.int32), tl.load(masks + row)
    # It is read before the first reduction, which all threads of a program wait for, because the
    # second loop overwrites it.
    target_logit = tl.load(line + target).to(tl.float32)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    # Only the last columns need a mask. Without one, a load has several columns.
    whole = V // T * T
    for begin in range(0, whole, T):
        values_T = tl.load(line + begin + column_T, eviction_policy="evict_last").to(tl.float32)
        largest, total = _add_columns(values_T, largest, total)
    rest_T = whole + column_T
    if whole < V:
        values_T = tl.load(line + rest_T, mask=rest_T < V, other=float("-inf")).to(tl.float32)
        largest, total = _add_columns(values_T, largest, total)
    tl.store(losses + row, (tl.log2(total) * _LN_2 + (largest - target_logit)) * mask)
    factor = mask / total
    for begin in range(0, whole, T):
        at_T = begin + column_T
        values_T = tl.load(line + at_T, eviction_policy="evict_first").to(tl.float32)
        gradients_T = _gradients(values_T, at_T, target, largest, mask, factor)
        tl.store(line + at_T, gradients_T.to(logits.dtype.element_ty))
    if whole < V:
        values_T = tl.load(line + rest_T, mask=rest_T < V, other=0.0).to(tl.float32)
        gradients_T = _gradients(values_T, rest_T, target, largest, mask, factor)
        tl.store(line + rest_T, gradients_T.to(logits.dtype.element_ty), mask=rest_T < V)


def launch(
    logits_CV: Tensor, targets_C: Tensor, mask_C: Tensor, losses_C: Tensor, most_columns: int
) -> None:
    """Launch the kernel; see `monograph.ops.logits_gradient.replace_logits_`.

    Args:
        logits_CV: see there.
        targets_C: see there.
        mask_C: see there.
        losses_C: receives the losses.
        most_columns: how many columns a program reads at once, at most; a power of two.
    """
    rows, columns = logits_CV.shape
    if not rows:
        return
    at_once = min(most_columns, triton.next_power_of_2(columns))
    warps = max(1, at_once // (_COLUMNS_OF_THREAD * _THREADS_OF_WARP))
    _replace_row[(rows,)](
        logits_CV,
        targets_C,
        mask_C,
        losses_C,
        logits_CV.stride(0),
        columns,
        T=at_once,
        num_warps=warps,
    )
