"""Replace the logits of a chunk by the gradient of its loss, by one Triton kernel.

It computes what `monograph.ops.logits_gradient.replace_logits_` says. Each row has one program. Its first
loop reads the logits, and computes their largest value and the sum of exponentials. Its second loop
reads them again, from the cache, and writes the gradients. PyTorch's compiler makes two loops, too, but
with about three times as many instructions for each logit, which take longer than reading memory.

Shapes: C rows (tokens), V columns (the vocabulary), T columns that a program reads at once.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

# With 16 columns for each thread, a large vocabulary has 16 warps. The rows that a GPU then computes at the
# same time fit about into its L2 cache, from which the second loop reads. With 32 columns, registers
# would be spilled if the vocabulary is odd.
_COLUMNS_PER_THREAD: Final = 16
_THREADS_PER_WARP: Final = 32
# exp(x) = 2^(x log2 e): a GPU has an instruction for powers of two.
_LOG2_E: Final = tl.constexpr(1.4426950408889634)
_LN_2: Final = tl.constexpr(0.6931471805599453)


@triton.jit
def _add_columns(values_T, largest, total):
    """Return the largest value so far, and the sum of 2^((value - largest) log2 e) so far."""
    new_largest = tl.maximum(largest, tl.max(values_T, 0))
    # While all values are -inf, their differences to the largest would be NaN.
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    total = total * tl.exp2((largest - base) * _LOG2_E)
    return new_largest, total + tl.sum(tl.exp2((values_T - base) * _LOG2_E), 0)


@triton.jit
def _gradients(values_T, columns_T, target, largest, mask, factor):
    """Return mask * (softmax - onehot); `factor` is mask / the sum of exponentials."""
    powers_T = tl.exp2((values_T - largest) * _LOG2_E)
    return powers_T * factor - tl.where(columns_T == target, mask, 0.0)


@triton.jit
def _replace_row(logits, targets, masks, losses, stride, V, T: tl.constexpr):
    """Replace the logits of one row. `stride` is the number of elements from a row to the next one."""
    row = tl.program_id(0)
    row_logits = logits + row.to(tl.int64) * stride
    column_T = tl.arange(0, T)
    target, mask = tl.load(targets + row).to(tl.int32), tl.load(masks + row)
    # The second loop overwrites the target's logit. All threads have read it before, since they wait for
    # each other in the reductions of the first loop.
    target_logit = tl.load(row_logits + target).to(tl.float32)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    # Only the columns after the last multiple of T need a mask. Without a mask, a thread loads several
    # columns by one instruction.
    masked_begin = V // T * T
    for begin in range(0, masked_begin, T):
        logits_at_T = row_logits + begin + column_T
        # They stay in the cache for the second loop.
        values_T = tl.load(logits_at_T, eviction_policy="evict_last").to(tl.float32)
        largest, total = _add_columns(values_T, largest, total)
    last_column_T = masked_begin + column_T
    if masked_begin < V:
        is_column_T = last_column_T < V
        logits_at_T = row_logits + last_column_T
        values_T = tl.load(logits_at_T, mask=is_column_T, other=float("-inf")).to(tl.float32)
        largest, total = _add_columns(values_T, largest, total)
    tl.store(losses + row, (tl.log2(total) * _LN_2 + (largest - target_logit)) * mask)
    factor = mask / total
    dtype = logits.dtype.element_ty
    for begin in range(0, masked_begin, T):
        read_column_T = begin + column_T
        logits_at_T = row_logits + read_column_T
        values_T = tl.load(logits_at_T, eviction_policy="evict_first").to(tl.float32)
        gradients_T = _gradients(values_T, read_column_T, target, largest, mask, factor)
        tl.store(logits_at_T, gradients_T.to(dtype))
    if masked_begin < V:
        is_column_T = last_column_T < V
        logits_at_T = row_logits + last_column_T
        values_T = tl.load(logits_at_T, mask=is_column_T, other=0.0).to(tl.float32)
        gradients_T = _gradients(values_T, last_column_T, target, largest, mask, factor)
        tl.store(logits_at_T, gradients_T.to(dtype), mask=is_column_T)


def launch(
    logits_CV: Tensor, targets_C: Tensor, mask_C: Tensor, losses_C: Tensor, most_columns: int
) -> None:
    """Launch the kernel; see `monograph.ops.logits_gradient.replace_logits_`.

    Args:
        logits_CV: see there.
        targets_C: see there.
        mask_C: see there.
        losses_C: receives the losses.
        most_columns: the most columns that a program reads at once; a power of two.
    """
    rows, columns = logits_CV.shape
    if not rows:
        return
    columns_at_once = min(most_columns, triton.next_power_of_2(columns))
    warps = max(1, columns_at_once // (_COLUMNS_PER_THREAD * _THREADS_PER_WARP))
    _replace_row[(rows,)](
        logits_CV,
        targets_C,
        mask_C,
        losses_C,
        logits_CV.stride(0),
        columns,
        T=columns_at_once,
        num_warps=warps,
    )
