"""Choose the k-quant type of each matrix in a GGUF file, and quantise rows to Q4_K, Q5_K and Q6_K.

A file has the same types and the same bytes as one of llama.cpp's own quantizer without an importance
matrix. The formats and the searches are those of ggml-org/llama.cpp, src/llama-quant.cpp and
ggml-quants.c (MIT).

The bytes are equal only if products and sums are rounded to fp32 in the same order as in ggml-quants.c: a
sum runs over a group from its first weight to its last, and no product is fused with a sum. So no
expression below may be rewritten, even if the new one is equal in exact arithmetic.

A *block* is 256 consecutive weights of a row. A *group* is 32 consecutive weights of a block in
Q4_K and Q5_K, and 16 in Q6_K.

Shape suffixes: B blocks, G groups of a block, N = B G groups, W weights of a group, H halves of a
block, K quarters of a half, Q weights of a quarter.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from monograph.model.config import LlamaConfig

BLOCK = 256
# The number of blocks that are quantised together. What a search reads and writes for them fits into the
# cache of a core.
_BLOCKS_PER_PART = 128
# In Q6_K, a group whose weights are all smaller than this becomes zeros.
_NEGLIGIBLE = 1e-15

# Arrays of fp32. The type is wider because numpy's annotations do not say that the quotient of two fp32
# arrays is fp32.
_Floats = NDArray[np.floating[Any]]
_Bytes = NDArray[np.uint8]


def quantize(rows: _Floats, kind: str) -> _Bytes:
    """Return the bytes of quantised rows.

    In "Q4_K" and "Q5_K", a weight is w = d s q - m t. Each block has two float16 numbers d and m, and
    each group has two integers s and t of 6 bits. So d s is a group's scale, and -m t its minimum. In
    "Q6_K", a weight is w = d s q. Each block has a float16 number d, and each group has an integer s of 8
    bits. In all three, each weight has an integer q, of 4, 5 or 6 bits as the name says.

    Args:
        rows: finite and contiguous. The last axis is a multiple of 256, and no magnitude is above
            65,504.
        kind: "Q4_K", "Q5_K" or "Q6_K".
    """
    blocks = rows.reshape(-1, BLOCK)
    begins = range(0, len(blocks), _BLOCKS_PER_PART)
    parts = [blocks[begin : begin + _BLOCKS_PER_PART] for begin in begins]
    # Groups of zeros divide by zero, and tiny weights underflow. Both are handled below.
    with np.errstate(all="ignore"):
        if kind == "Q6_K":
            return np.concatenate([_quantize_symmetric(part) for part in parts])
        bits = int(kind[1])  # the digit of "Q4_K" or "Q5_K"
        return np.concatenate([_quantize_with_minimum(part, bits) for part in parts])


def _groups(blocks: _Floats, size: int) -> _Floats:
    """Return the groups as columns, [W, N].

    Numpy sums over the first axis in order, from the first weight of a group to its last.
    """
    return np.ascontiguousarray(blocks.reshape(-1, size).T)


def _sum_of_groups(values_WN: _Floats) -> _Floats:
    """Return the sum of each group, [N], added up from its first weight to its last."""
    return np.add.reduce(values_WN, axis=0)


def _nearest(values: _Floats) -> NDArray[np.int32]:
    """Round to the nearest integer, and halves to even integers.

    This is `nearest_int` of llama.cpp. Adding 1.5 * 2^23 moves the integer into the low 23 bits of the
    number, which then hold it plus 2^22. Numbers beyond 22 bits become wrong integers, the same wrong ones
    as in llama.cpp.
    """
    return ((values + 1.5 * 2**23).view(np.int32) & 0x7FFFFF) - 0x400000


def _round_to_range_(values: _Floats, inverse_scale: _Floats, lowest: int, highest: int) -> _Floats:
    """Multiply values by the inverse scale, and round to integers from lowest to highest, in place."""
    np.multiply(values, inverse_scale, out=values)
    np.rint(values, out=values)
    return np.clip(values, lowest, highest, out=values)


def _quantize_with_minimum(blocks: _Floats, bits: int) -> _Bytes:
    """Return the bytes of blocks in Q4_K (4 bits) or Q5_K (5 bits)."""
    x_WN = _groups(blocks, 32)
    highest = 2**bits - 1
    # llama.cpp's constants for the search, see `_search_with_minimum`.
    if bits == 4:
        offset = -1.0
        last_step = 20
    else:
        offset = -0.5
        last_step = 15
    scale_N, minus_minimum_N, searched_q_WN = _search_with_minimum(x_WN, highest, offset, last_step)
    d_B, scales_BG = _quantize_to_6_bits(scale_N.reshape(-1, 8))
    m_B, minima_BG = _quantize_to_6_bits(minus_minimum_N.reshape(-1, 8))
    # The weights are rounded again, with the scales and minima as they are stored.
    stored_scale_N = (d_B.astype(np.float32)[:, None] * scales_BG).ravel()
    stored_minus_minimum_N = (m_B.astype(np.float32)[:, None] * minima_BG).ravel()
    rounded_q_WN = np.clip(_nearest((x_WN + stored_minus_minimum_N) / stored_scale_N), 0, highest)
    # As in llama.cpp, a group whose stored scale is 0 keeps the integers of the search.
    q_WN = np.where(stored_scale_N == 0, searched_q_WN, rounded_q_WN).astype(np.uint8)
    q_BGW = q_WN.T.reshape(-1, 8, 32)
    # The 8 scales and 8 minima of a block, of 6 bits each, are packed into 12 bytes. The scales and minima
    # of groups 0 to 3 are the low 6 bits of the first 8 bytes. Those of groups 4 to 7 are split: their
    # high 2 bits are the high bits of the first 8 bytes, and their low 4 bits are in the last 4 bytes.
    packed = [
        scales_BG[:, :4] | ((scales_BG[:, 4:] >> 4) << 6),
        minima_BG[:, :4] | ((minima_BG[:, 4:] >> 4) << 6),
        (scales_BG[:, 4:] & 15) | ((minima_BG[:, 4:] & 15) << 4),
    ]
    if bits == 5:
        # Byte w has the fifth bits of the integers at place w of the 8 groups. Bit g of it is for group g.
        fifth_bits = (q_BGW >> 4) << np.arange(8, dtype=np.uint8)[:, None]
        packed.append(np.bitwise_or.reduce(fifth_bits, axis=1))
    # A byte has the low 4 bits of two integers, at the same place in two neighbouring groups.
    low = (q_BGW & 15) << np.array([0, 4] * 4, np.uint8)[:, None]
    packed.append((low[:, ::2] | low[:, 1::2]).reshape(-1, 128))
    return np.concatenate(
        [d_B[:, None].view(np.uint8), m_B[:, None].view(np.uint8), *packed], axis=1
    )


def _quantize_to_6_bits(values_BG: _Floats) -> tuple[NDArray[np.float16], _Bytes]:
    """Return a float16 number for each block and an integer of 6 bits for each group.

    Their product is approximately the group's value.
    """
    largest_B = np.maximum(values_BG.max(axis=1), 0)
    inverse_B = np.where(largest_B > 0, 63 / largest_B, 0)
    integers = _nearest(inverse_B[:, None] * values_BG).astype(np.uint8)
    return (largest_B / 63).astype(np.float16), np.minimum(integers, 63)


def _search_with_minimum(
    x_WN: _Floats, highest: int, offset: float, last_step: int
) -> tuple[_Floats, _Floats, _Floats]:
    """Search for a scale a and a minimum b <= 0 of each group that make the error small.

        error = sum of v (a q + b - x)^2,    v = |x| + root mean square of the group

    Each step 0, 1, ... rounds (x - b) (highest + offset + 0.1 step) / (max x - b) to integers q, with the
    best b so far. Then it solves for the a and b with the smallest error for these q.

    Args:
        x_WN: the weights.
        highest: the largest integer q.
        offset: see above.
        last_step: the number of the last step.

    Returns:
        The scale and the negated minimum of each group, [N], and the integers, [W, N].
    """
    v_WN = np.sqrt(_sum_of_groups(x_WN * x_WN) / 32) + np.abs(x_WN)
    # All sums below are weighted by v.
    sum_v = _sum_of_groups(v_WN)
    sum_x = _sum_of_groups(v_WN * x_WN)
    minimum_N = np.minimum(x_WN.min(axis=0), 0)  # b of the best step so far
    maximum_N = x_WN.max(axis=0)

    def round_range_to(target: float, minimum_N: _Floats) -> tuple[_Floats, _Floats]:
        """Map a group's range, from its minimum to its largest weight, to 0 ... target, and round.

        Returns:
            The inverse scale, [N], and the integers, [W, N].
        """
        inverse_N = target / (maximum_N - minimum_N)
        # A range of 0, or a subnormal one, gives an infinity, and an infinity times zero is a NaN.
        inverse_N[np.isinf(inverse_N)] = 0
        return inverse_N, _round_to_range_(x_WN - minimum_N, inverse_N, 0, highest)

    def error(q_WN: _Floats, scale_N: _Floats, minimum_N: _Floats) -> _Floats:
        """Return the error of each group, [N]."""
        error_WN = q_WN * scale_N
        error_WN += minimum_N
        error_WN -= x_WN
        return _sum_of_groups(error_WN * error_WN * v_WN)

    # A step rounds with one scale and minimum, and then solves for others. `rounding_inverse_N` and
    # `rounding_minimum_N` are those with which the best step has rounded. `scale_N` and `minimum_N` are
    # those for which it has solved.
    rounding_inverse_N, q_WN = round_range_to(highest, minimum_N)
    rounding_minimum_N = minimum_N.copy()
    # Like llama.cpp, this divides twice, which rounds differently from one division.
    scale_N = 1 / (highest / (maximum_N - minimum_N))
    least_error_N = error(q_WN, scale_N, minimum_N)
    for step in range(last_step + 1):
        inverse_N, q_WN = round_range_to(highest + offset + 0.1 * step, minimum_N)
        vq_WN = v_WN * q_WN
        sum_q = _sum_of_groups(vq_WN)
        sum_qq = _sum_of_groups(vq_WN * q_WN)
        sum_xq = _sum_of_groups(vq_WN * x_WN)
        determinant = sum_v * sum_qq - sum_q * sum_q
        b_N = (sum_qq * sum_x - sum_q * sum_xq) / determinant
        # If the best minimum is above 0, it is set to 0, and the scale is solved for alone.
        a_N = np.where(b_N > 0, sum_xq / sum_qq, (sum_v * sum_xq - sum_x * sum_q) / determinant)
        b_N = np.minimum(b_N, 0)
        error_N = error(q_WN, a_N, b_N)
        is_better_N = (determinant > 0) & (error_N < least_error_N)
        np.copyto(rounding_inverse_N, inverse_N, where=is_better_N)
        np.copyto(rounding_minimum_N, minimum_N, where=is_better_N)
        np.copyto(least_error_N, error_N, where=is_better_N)
        np.copyto(scale_N, a_N, where=is_better_N)
        # This is last, because `rounding_minimum_N` above needs the minimum before the step.
        np.copyto(minimum_N, b_N, where=is_better_N)
    searched_q_WN = _round_to_range_(x_WN - rounding_minimum_N, rounding_inverse_N, 0, highest)
    return scale_N, -minimum_N, searched_q_WN


def _quantize_symmetric(blocks: _Floats) -> _Bytes:
    """Return the bytes of blocks in Q6_K."""
    x_WN = _groups(blocks, 16)
    scale_N, searched_q_WN = _search_symmetric(x_WN)
    scale_BG = scale_N.reshape(-1, 16)
    largest_B1 = _of_largest_magnitude(scale_BG, axis=1)
    is_negligible_B1 = np.abs(largest_B1) < _NEGLIGIBLE
    inverse_B1 = -128 / largest_B1
    d_B1 = np.where(is_negligible_B1, 0, 1 / inverse_B1).astype(np.float16)
    integers_BG = np.minimum(_nearest(inverse_B1 * scale_BG), 127)
    scales_BG = np.where(is_negligible_B1, 0, integers_BG).astype(np.int8)
    # The weights are rounded again, with the scales as they are stored.
    stored_scale_N = (d_B1.astype(np.float32) * scales_BG).ravel()
    rounded_q_WN = np.clip(_nearest(x_WN / stored_scale_N), -32, 31) + 32
    # As in llama.cpp, a group whose stored scale is 0 keeps the integers of the search.
    q_WN = np.where(stored_scale_N == 0, searched_q_WN, rounded_q_WN)
    block_q = np.where(is_negligible_B1, 0, q_WN.T.reshape(-1, BLOCK)).astype(np.uint8)
    # The low 4 bits of the first and the third quarter of a half share bytes, and so do those of
    # the second and the fourth. The high 2 bits of all four quarters share bytes.
    q_BHKQ = block_q.reshape(-1, 2, 4, 32)
    low_BHKQ = q_BHKQ & 15
    low = (low_BHKQ[:, :, :2] | (low_BHKQ[:, :, 2:] << 4)).reshape(-1, 128)
    shifted = (q_BHKQ >> 4) << np.array([[0], [2], [4], [6]], np.uint8)
    high = np.bitwise_or.reduce(shifted, axis=2).reshape(-1, 64)
    return np.concatenate([low, high, scales_BG.view(np.uint8), d_B1.view(np.uint8)], axis=1)


def _of_largest_magnitude(values: _Floats, axis: int) -> _Floats:
    """Return the value of the largest magnitude along an axis, with its sign; the axis has length 1."""
    index = np.expand_dims(np.abs(values).argmax(axis=axis), axis)
    return np.take_along_axis(values, index, axis=axis)


def _search_symmetric(x_WN: _Floats) -> tuple[_Floats, _Floats]:
    """Search for a scale a of each group that makes the error small.

        error = sum of x^2 (a q - x)^2,    -32 <= q <= 31

    Each step rounds -(32 + 0.1 step) x / x_max to integers q, where x_max is the weight of the
    largest magnitude. The best a for these q has a closed form.

    Returns:
        The scale of each group, [N], and q + 32, [W, N]. Both are zeros for a group without a
        weight of at least 1e-15.
    """
    x_max_N = _of_largest_magnitude(x_WN, axis=0)[0]
    squares_WN = x_WN * x_WN
    cubes_WN = squares_WN * x_WN
    # The error is smallest where the gain, sum_xq^2 / sum_qq, is largest. Both sums are weighted by x^2.
    best_gain_N = np.full_like(x_max_N, -1)
    scale_N = np.zeros_like(x_max_N)
    best_inverse_N = np.zeros_like(x_max_N)
    # This is llama.cpp's order. Of steps with equal errors the first one is kept.
    for step in (0, *range(-9, 0), *range(1, 10)):
        inverse_N = -(32 + 0.1 * step) / x_max_N
        q_WN = _round_to_range_(x_WN.copy(), inverse_N, -32, 31)
        sum_xq = _sum_of_groups(cubes_WN * q_WN)
        sum_qq = _sum_of_groups(squares_WN * q_WN * q_WN)
        # Like llama.cpp, this compares gains without dividing.
        is_better_N = (sum_qq > 0) & (sum_xq * sum_xq > best_gain_N * sum_qq)
        scale_N = np.where(is_better_N, sum_xq / sum_qq, scale_N)
        best_inverse_N = np.where(is_better_N, inverse_N, best_inverse_N)
        best_gain_N = np.where(is_better_N, scale_N * sum_xq, best_gain_N)
    searched_q_WN = _round_to_range_(x_WN.copy(), best_inverse_N, -32, 31) + 32
    has_weight_N = np.abs(x_max_N) >= _NEGLIGIBLE
    return np.where(has_weight_N, scale_N, 0), np.where(has_weight_N, searched_q_WN, 0)


# The type that most matrices of a file have, by the file's dtype.
K_QUANTS = {"q4_k_m": "Q4_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K"}
# A block of the types above has 256 weights. If the length of a row is not a multiple of 256, these types
# replace them.
_FALLBACK_TYPES = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# The ends of llama.cpp's names of value projections.
_VALUE_NAMES = (".attn_v.weight", ".attn_qkv.weight")
# llama.cpp takes a model with this number of experts for Mixtral 8x7B, and gives its attention more bits.
_MIXTRAL_EXPERTS = 8


def choose_types(row_lengths: dict[str, int], dtype: str, config: LlamaConfig) -> dict[str, str]:
    """Return gguf's name of the type of each matrix.

    Args:
        row_lengths: the length of the rows of each matrix, by llama.cpp's names, in the order of the
            layers.
        dtype: the file's dtype, a key of `K_QUANTS`.
        config: the model's configuration.
    """
    value_names = [name for name in row_lengths if name.endswith(_VALUE_NAMES)]
    # In a model without experts, llama.cpp counts the feed-forward layers instead of reading their layers from
    # their names. Only in a model where some blocks have none is that another number.
    down_names = [name for name in row_lengths if ".ffn_down" in name]
    # If the head is tied to the embedding, a file may have only the embedding, which is then the head.
    head = "output.weight" if "output.weight" in row_lengths else "token_embd.weight"
    is_mixtral = config.num_experts == _MIXTRAL_EXPERTS
    types = {}
    for name, length in row_lengths.items():
        kind = K_QUANTS[dtype]
        if name == head:
            kind = "Q6_K"
        elif name in value_names:
            kind = _type_of_values(kind, value_names.index(name), len(value_names), config)
        elif name in down_names:
            index = _layer(name) if config.num_experts else down_names.index(name)
            if _gets_more_bits(index, config.num_hidden_layers):
                kind = "Q6_K"
        elif is_mixtral and name.endswith(".attn_k.weight"):
            kind = "Q8_0"
        elif is_mixtral and name.endswith(".attn_output.weight") and kind == "Q4_K":
            kind = "Q5_K"
        if length % BLOCK:
            kind = _FALLBACK_TYPES.get(kind, kind)
        types[name] = kind
    return types


def _layer(name: str) -> int:
    """Return the number of the layer in a name such as blk.3.ffn_down.weight."""
    return int(name.split(".")[1])


def _type_of_values(kind: str, index: int, count: int, config: LlamaConfig) -> str:
    """Return the type of a value projection.

    Args:
        kind: the type of most matrices.
        index: the number of this projection among all value projections, from 0.
        count: the number of value projections.
        config: the model's configuration.
    """
    if config.num_experts == _MIXTRAL_EXPERTS:
        return "Q8_0"
    if _gets_more_bits(index, count):
        return "Q6_K"
    if kind == "Q4_K" and _is_treated_as_70b(config):
        return "Q5_K"
    return kind


def _is_treated_as_70b(config: LlamaConfig) -> bool:
    """Return whether llama.cpp's quantizer treats a model as a 70B model.

    Only models of 80 layers can be treated so. In some families all of them are, in others only those
    with fewer key-value heads than query heads.
    """
    llama_cpp = config.family.llama_cpp
    if llama_cpp is None or config.num_hidden_layers != 80:
        return False
    if llama_cpp.treated_as_70b == "grouped":
        return config.num_key_value_heads < config.num_attention_heads
    return llama_cpp.treated_as_70b == "all"


def _gets_more_bits(index: int, count: int) -> bool:
    """Return whether llama.cpp gives more bits to a matrix, given its index among `count` of its kind.

    It does so for the first and the last eighth of them, and for every third one between these.
    """
    eighth = count // 8
    is_at_an_end = index < eighth or index >= 7 * count // 8
    return is_at_an_end or (index - eighth) % 3 == 2
