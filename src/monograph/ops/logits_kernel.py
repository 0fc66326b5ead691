"""Replace the logits of a chunk by the gradient of its loss, by one Triton kernel.

It computes what `monograph.ops.logits_gradient.replace_logits_` says. The grid has one axis, with a program
for each row, which is the logits of one token. The program goes through its row twice, T columns at a
time. The first time it computes the largest logit and the sum of exponentials, and the second time it
computes and writes the gradients. The first PARTS_KEPT times T columns stay in registers in between, so
they are read once. The rest of the row is read again, from the cache. PyTorch's compiler makes two loops,
too, but reads the whole row twice, with about three times as many instructions for each logit.

Shapes: C rows (tokens), V columns (the vocabulary), T columns of a *part* of a row, which a program
computes at once, W = T / 2 words of 32 bits, each of which has two logits of 16 bits.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

# With 16 columns for each thread, a large vocabulary has 16 warps. With 32 columns, registers would be
# spilled if the vocabulary is odd.
_COLUMNS_PER_THREAD: Final = 16
_THREADS_PER_WARP: Final = 32
# The largest number of parts of a row that stay in registers. Each part takes 8 registers of every thread.
# The numbers below are for an H200.
#
# With ten parts, a thread needs 114 to 128 registers. A multiprocessor has 65,536, so it runs one program of
# 512 threads at a time. One program is enough to keep the memory busy: it requests all of its ten parts,
# 160 KB, before it needs the first number. At 4.8 TB/s and a latency of a microsecond, 36 KB in flight for
# each of the 132 multiprocessors would do. The rest of a row is read again from the L2 cache, which has
# room for the 132 rows that are computed at the same time (34 MB with a vocabulary of 128,256).
_MOST_PARTS_KEPT: Final = 10
# exp(x) = 2^(x log2 e): a GPU has an instruction for powers of two.
_LOG2_E: Final = tl.constexpr(1.4426950408889634)
_LN_2: Final = tl.constexpr(0.6931471805599453)


@triton.jit
def _add_columns(values_T, largest, total):
    """Add T values to a running softmax.

    Return the largest value so far, and the sum of exp(value - largest) of all values so far, where
    exp(x) is computed as 2^(x log2 e).
    """
    new_largest = tl.maximum(largest, tl.max(values_T, 0))
    # While all values are -inf, their differences to the largest would be NaN.
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    total = total * tl.exp2((largest - base) * _LOG2_E)
    return new_largest, total + tl.sum(tl.exp2((values_T - base) * _LOG2_E), 0)


@triton.jit
def _probabilities(values, largest, factor):
    """Return mask * softmax; `factor` is mask / the sum of exponentials."""
    return tl.exp2((values - largest) * _LOG2_E) * factor


@triton.jit
def _unpacked(words_W, dtype: tl.constexpr, T: tl.constexpr):
    """Return the logits in words of 32 bits, in fp32 and in their order in memory.

    Triton has a register for each number of 16 bits, so a row is kept as words.
    """
    first_W = (words_W & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    second_W = (words_W >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(first_W, second_W), (T,)).to(tl.float32)


@triton.jit
def _capped(values, CAP: tl.constexpr):
    """Return CAP tanh(values / CAP), or the values if there is no cap, which is a CAP of 0.

    tanh(x) = 1 - 2 / (exp(2 x) + 1), and exp(2 x) = 2^(2 x log2 e). Close to 0 the difference would lose
    digits, so tanh(x) = x - x^3 / 3 + 2 x^5 / 15 there.
    """
    if CAP > 0:
        x = values / CAP
        square = x * x
        near_zero = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315))))
        elsewhere = 1 - 2 / (tl.exp2(x * (2 * _LOG2_E)) + 1)
        values = CAP * tl.where(square < 0.01, near_zero, elsewhere)
    return values


@triton.jit
def _with_slope(gradients, capped, CAP: tl.constexpr):
    """Return the gradients times the slope of the cap, 1 - (capped / CAP)^2."""
    if CAP > 0:
        share = capped / CAP
        gradients = gradients * (1 - share * share)
    return gradients


@triton.jit
def _replace_row(
    logits,
    targets,
    masks,
    losses,
    stride,
    V,
    T: tl.constexpr,
    PARTS_KEPT: tl.constexpr,
    CAP: tl.constexpr,
):
    """Replace the logits of one row by mask * (softmax - onehot), and write its loss.

    `stride` is the number of elements from a row to the next one. `kept` are the words of the PARTS_KEPT
    parts in registers. With a CAP above 0, the logits are capped, and their gradients have the factor of
    the cap's slope.
    """
    row = tl.program_id(0)
    row_logits = logits + row.to(tl.int64) * stride
    column_T = tl.arange(0, T)
    target, mask = tl.load(targets + row).to(tl.int32), tl.load(masks + row)
    dtype: tl.constexpr = logits.dtype.element_ty
    # The target's logit is overwritten below. All threads have read it by then, since they wait for each
    # other in the reductions.
    target_logit = _capped(tl.load(row_logits + target).to(tl.float32), CAP)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    kept = ()
    if PARTS_KEPT > 0:
        words_at_W = row_logits.to(tl.pointer_type(tl.int32)) + tl.arange(0, T // 2)
        for part in tl.static_range(PARTS_KEPT):
            words_W = tl.load(words_at_W + part * (T // 2), eviction_policy="evict_first")
            kept = kept + (words_W,)  # type: ignore[assignment]
        for part in tl.static_range(PARTS_KEPT):
            # Always true. But the compiler does not know this, so it computes one part after the other. For
            # several parts at once there are too few registers.
            if part * T < V:
                values_T = _capped(_unpacked(kept[part], dtype, T), CAP)
                largest, total = _add_columns(values_T, largest, total)
    # Only the columns after the last multiple of T need a mask. Without a mask, a thread loads several
    # columns by one instruction.
    masked_begin = V // T * T
    for begin in range(PARTS_KEPT * T, masked_begin, T):
        logits_at_T = row_logits + begin + column_T
        # They stay in the cache for the second loop.
        values_T = tl.load(logits_at_T, eviction_policy="evict_last").to(tl.float32)
        values_T = _capped(values_T, CAP)
        largest, total = _add_columns(values_T, largest, total)
    last_column_T = masked_begin + column_T
    if masked_begin < V:
        is_column_T = last_column_T < V
        logits_at_T = row_logits + last_column_T
        values_T = tl.load(logits_at_T, mask=is_column_T, other=float("-inf")).to(tl.float32)
        if CAP > 0:
            values_T = tl.where(is_column_T, _capped(values_T, CAP), float("-inf"))
        largest, total = _add_columns(values_T, largest, total)
    tl.store(losses + row, (tl.log2(total) * _LN_2 + (largest - target_logit)) * mask)
    factor = mask / total
    # Always 0, but the compiler does not know it, and so unpacks the words again. Otherwise it would keep
    # the unpacked logits from above until here, in twice the registers.
    zero = (total < 0).to(tl.int32)
    for part in tl.static_range(PARTS_KEPT):
        if part * T < V:  # always true, as above
            values_T = _capped(_unpacked(kept[part] ^ zero, dtype, T), CAP)
            gradients_T = _with_slope(_probabilities(values_T, largest, factor), values_T, CAP)
            tl.store(row_logits + part * T + column_T, gradients_T.to(dtype))
    for begin in range(PARTS_KEPT * T, masked_begin, T):
        logits_at_T = row_logits + begin + column_T
        values_T = tl.load(logits_at_T, eviction_policy="evict_first").to(tl.float32)
        values_T = _capped(values_T, CAP)
        gradients_T = _with_slope(_probabilities(values_T, largest, factor), values_T, CAP)
        tl.store(logits_at_T, gradients_T.to(dtype))
    if masked_begin < V:
        is_column_T = last_column_T < V
        logits_at_T = row_logits + last_column_T
        values_T = _capped(tl.load(logits_at_T, mask=is_column_T, other=0.0).to(tl.float32), CAP)
        gradients_T = _with_slope(_probabilities(values_T, largest, factor), values_T, CAP)
        tl.store(logits_at_T, gradients_T.to(dtype), mask=is_column_T)
    # One thread subtracts the one of the target, once the thread that has its column has written it. A
    # comparison of each column with the target would be a quarter of the second loop's instructions.
    tl.debug_barrier()
    target_gradient = _probabilities(target_logit, largest, factor) - mask
    tl.store(row_logits + target, _with_slope(target_gradient, target_logit, CAP).to(dtype))


def launch(
    logits_CV: Tensor,
    targets_C: Tensor,
    mask_C: Tensor,
    losses_C: Tensor,
    most_columns: int,
    cap: float | None = None,
) -> None:
    """Launch the kernel; see `monograph.ops.logits_gradient.replace_logits_`.

    Args:
        logits_CV: see there.
        targets_C: see there.
        mask_C: see there.
        losses_C: receives the losses.
        most_columns: the most columns that a program computes at once; a power of two.
        cap: see there.
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
        PARTS_KEPT=parts_kept(logits_CV, columns_at_once),
        CAP=cap or 0.0,
        num_warps=warps,
    )


def parts_kept(logits_CV: Tensor, columns_at_once: int) -> int:
    """Return how many parts of each row stay in registers.

    They stay there as words of two logits. So logits must have 16 bits, and each row must begin at a
    multiple of four bytes; otherwise no part stays.
    """
    is_in_words = (
        logits_CV.element_size() == 2
        and columns_at_once > 1
        and logits_CV.stride(0) % 2 == 0
        and logits_CV.data_ptr() % 4 == 0
    )
    return min(_MOST_PARTS_KEPT, logits_CV.shape[1] // columns_at_once) if is_in_words else 0
