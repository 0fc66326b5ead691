"""Choose each matrix's k-quant type in a GGUF file, and quantise its rows to Q4_K, Q5_K and Q6_K.

Types and bits are those of llama.cpp's own quantizer without an importance matrix. Source:
ggml-org/llama.cpp, src/llama-quant.cpp and ggml-quants.c (MIT), whose formats and searches these
are. The bits are equal only if each product and each sum is rounded to fp32 in that file's order:
sums run over a group from its first weight to its last, and no product is fused with a sum.

Shape suffixes: B blocks of 256 neighbours of a row, G groups of a block, N = B G groups, W weights
of a group.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from monograph.model.config import LlamaConfig

BLOCK = 256
_AT_ONCE = 128  # blocks: what one search reads and writes stays in a core's cache
_DEAD = 1e-15  # Q6_K takes a group whose weights are all smaller for zeros

_Floats = NDArray[np.floating[Any]]  # of fp32, which the stubs of numpy's quotients do not say
_Bytes = NDArray[np.uint8]


def quantize(rows: _Floats, kind: str) -> _Bytes:
    """Return the bytes of rows in `kind`.

    Args:
        rows: finite, contiguous; the last axis is a multiple of 256, no magnitude is above 65,504.
        kind: "Q4_K", "Q5_K" (a weight w = d s q - m t with float16 numbers d and m of each block,
            and of each 32 weights two integers s and t of 6 bits) or "Q6_K" (w = d s q with an s of
            8 bits for each 16 weights); q has as many bits as the name says.
    """
    blocks = rows.reshape(-1, BLOCK)
    with np.errstate(all="ignore"):  # groups of zeros divide by zero, and tiny ones underflow
        parts = [blocks[begin : begin + _AT_ONCE] for begin in range(0, len(blocks), _AT_ONCE)]
        return np.concatenate(
            [_in_16s(part) if kind == "Q6_K" else _in_32s(part, int(kind[1])) for part in parts]
        )


def _groups(blocks: _Floats, size: int) -> _Floats:
    """Return [W, N], in which a sum over the first axis is added up in order."""
    return np.ascontiguousarray(blocks.reshape(-1, size).T)


def _total(values_WN: _Floats) -> _Floats:
    return np.add.reduce(values_WN, axis=0)


def _nearest(values: _Floats) -> NDArray[np.int32]:
    """Round to the nearest integer, half to even; what is beyond 22 bits becomes what it becomes
    there.
    """
    return ((values + 1.5 * 2**23).view(np.int32) & 0x7FFFFF) - 0x400000


def _levels(values: _Floats, inverse: _Floats, lowest: int, most: int) -> _Floats:
    """Round values, which are overwritten, times the inverse scale to integers of a range."""
    np.multiply(values, inverse, out=values)
    np.rint(values, out=values)
    return np.clip(values, lowest, most, out=values)


def _in_32s(blocks: _Floats, bits: int) -> _Bytes:
    x_WN = _groups(blocks, 32)
    most = 2**bits - 1
    found_N, minus_N, levels_WN = _with_minimum(
        x_WN, most, *((-1.0, 20) if bits == 4 else (-0.5, 15))
    )
    d_B, scales_BG = _in_6_bits(found_N.reshape(-1, 8))
    m_B, minima_BG = _in_6_bits(minus_N.reshape(-1, 8))
    step_N = (d_B.astype(np.float32)[:, None] * scales_BG).ravel()
    base_N = (m_B.astype(np.float32)[:, None] * minima_BG).ravel()
    nearest_WN = np.clip(_nearest((x_WN + base_N) / step_N), 0, most)
    q_BGW = np.where(step_N == 0, levels_WN, nearest_WN).astype(np.uint8).T.reshape(-1, 8, 32)
    packed = [
        scales_BG[:, :4] | scales_BG[:, 4:] >> 4 << 6,
        minima_BG[:, :4] | minima_BG[:, 4:] >> 4 << 6,
        scales_BG[:, 4:] & 15 | (minima_BG[:, 4:] & 15) << 4,
    ]
    if bits == 5:
        packed.append(
            np.bitwise_or.reduce(q_BGW >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=1)
        )
    low = (q_BGW & 15) << np.array([0, 4] * 4, np.uint8)[:, None]
    packed.append((low[:, ::2] | low[:, 1::2]).reshape(-1, 128))
    return np.concatenate(
        [d_B[:, None].view(np.uint8), m_B[:, None].view(np.uint8), *packed], axis=1
    )


def _in_6_bits(values_BG: _Floats) -> tuple[NDArray[np.float16], _Bytes]:
    """Return a float16 number of each block and an integer of 6 bits of each group, whose product
    is the value.
    """
    largest_B = np.maximum(values_BG.max(axis=1), 0)
    inverse_B = np.where(largest_B > 0, 63 / largest_B, 0)
    integers = _nearest(inverse_B[:, None] * values_BG).astype(np.uint8)
    return (largest_B / 63).astype(np.float16), np.minimum(integers, 63)


def _with_minimum(
    x_WN: _Floats, most: int, first: float, steps: int
) -> tuple[_Floats, _Floats, _Floats]:
    """Search scales a and minima b <= 0 with a small sum of v (a q + b - x)^2, where v = |x| + the group's RMS.

    A candidate rounds (x - b) (most + first + 0.1 step) / (max x - b) to integers q and solves for
    a and b.

    Returns:
        The scale and the negated minimum of each group, [N], and the integers, [W, N].
    """
    v_WN = np.sqrt(_total(x_WN * x_WN) / 32) + np.abs(x_WN)
    sum_v = _total(v_WN)
    sum_x = _total(v_WN * x_WN)
    low_N = np.minimum(x_WN.min(axis=0), 0)
    high_N = x_WN.max(axis=0)

    def candidate(part: float) -> tuple[_Floats, _Floats]:
        inverse_N = part / (high_N - low_N)
        # Of equal or subnormal weights; an infinity times zero is no number.
        inverse_N[np.isinf(inverse_N)] = 0
        return inverse_N, _levels(x_WN - low_N, inverse_N, 0, most)

    def error(q_WN: _Floats, scale_N: _Floats, low_N: _Floats) -> _Floats:
        off_WN = q_WN * scale_N
        off_WN += low_N
        off_WN -= x_WN
        return _total(off_WN * off_WN * v_WN)

    used_N, q_WN = candidate(most)
    scale_N = 1 / (most / (high_N - low_N))
    base_N = low_N.copy()
    least_N = error(q_WN, scale_N, low_N)
    for step in range(steps + 1):
        inverse_N, q_WN = candidate(most + first + 0.1 * step)
        vq_WN = v_WN * q_WN
        sum_q = _total(vq_WN)
        sum_qq = _total(vq_WN * q_WN)
        sum_xq = _total(vq_WN * x_WN)
        determinant = sum_v * sum_qq - sum_q * sum_q
        b_N = (sum_qq * sum_x - sum_q * sum_xq) / determinant
        a_N = np.where(b_N > 0, sum_xq / sum_qq, (sum_v * sum_xq - sum_x * sum_q) / determinant)
        b_N = np.minimum(b_N, 0)
        error_N = error(q_WN, a_N, b_N)
        better = (determinant > 0) & (error_N < least_N)
        new = (inverse_N, low_N, error_N, a_N, b_N)
        for best_N, new_N in zip((used_N, base_N, least_N, scale_N, low_N), new, strict=True):
            np.copyto(best_N, new_N, where=better)
    return scale_N, -low_N, _levels(x_WN - base_N, used_N, 0, most)


def _in_16s(blocks: _Floats) -> _Bytes:
    x_WN = _groups(blocks, 16)
    scale_N, levels_WN = _symmetric(x_WN)
    scale_BG = scale_N.reshape(-1, 16)
    largest_B1 = np.take_along_axis(scale_BG, np.abs(scale_BG).argmax(axis=1)[:, None], axis=1)
    dead_B1 = np.abs(largest_B1) < _DEAD
    inverse_B1 = -128 / largest_B1
    d_B1 = np.where(dead_B1, 0, 1 / inverse_B1).astype(np.float16)
    scales_BG = np.where(dead_B1, 0, np.minimum(_nearest(inverse_B1 * scale_BG), 127)).astype(
        np.int8
    )
    step_N = (d_B1.astype(np.float32) * scales_BG).ravel()
    nearest_WN = np.clip(_nearest(x_WN / step_N), -32, 31) + 32
    q_WN = np.where(step_N == 0, levels_WN, nearest_WN)
    q_BW = np.where(dead_B1, 0, q_WN.T.reshape(-1, BLOCK)).astype(np.uint8)
    q_BHKW = q_BW.reshape(-1, 2, 4, 32)
    low = (q_BHKW[:, :, :2] & 15 | q_BHKW[:, :, 2:] << 4).reshape(-1, 128)
    high = np.bitwise_or.reduce(
        q_BHKW >> 4 << np.array([[0], [2], [4], [6]], np.uint8), axis=2
    ).reshape(-1, 64)
    return np.concatenate([low, high, scales_BG.view(np.uint8), d_B1.view(np.uint8)], axis=1)


def _symmetric(x_WN: _Floats) -> tuple[_Floats, _Floats]:
    """Search scales a with a small sum of x^2 (a q - x)^2 over q from -32 to 31.

    A candidate rounds -(32 + 0.1 step) x / x_max to integers q, and the best a of these is in
    closed form.

    Returns:
        The scale of each group, [N], and q + 32, [W, N]; zeros for a group without a weight above
        1e-15.
    """
    top_N = np.take_along_axis(x_WN, np.abs(x_WN).argmax(axis=0)[None], axis=0)[0]
    squares_WN = x_WN * x_WN
    cubes_WN = squares_WN * x_WN
    best_N = np.full_like(top_N, -1)
    scale_N = np.zeros_like(top_N)
    used_N = np.zeros_like(top_N)
    for step in (0, *range(-9, 0), *range(1, 10)):
        inverse_N = -(32 + 0.1 * step) / top_N
        q_WN = _levels(x_WN.copy(), inverse_N, -32, 31)
        sum_xq = _total(cubes_WN * q_WN)
        sum_qq = _total(squares_WN * q_WN * q_WN)
        better = (sum_qq > 0) & (sum_xq * sum_xq > best_N * sum_qq)
        scale_N = np.where(better, sum_xq / sum_qq, scale_N)
        used_N = np.where(better, inverse_N, used_N)
        best_N = np.where(better, scale_N * sum_xq, best_N)
    alive_N = np.abs(top_N) >= _DEAD
    return np.where(alive_N, scale_N, 0), np.where(
        alive_N, _levels(x_WN.copy(), used_N, -32, 31) + 32, 0
    )


MIXTURES = {"q4_k_m": "Q4_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K"}
_OF_OTHER_ROWS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_VALUES = (".attn_v.weight", ".attn_qkv.weight")
_EIGHT = 8  # experts: it spends more bits on the attention of a Mixtral 8x7B


def chosen(columns: dict[str, int], dtype: str, config: LlamaConfig) -> dict[str, str]:
    """Return gguf's name of each matrix's type.

    Args:
        columns: the length of a row of each matrix, by llama.cpp's name, in the order of the
            layers.
        dtype: a name in `MIXTURES`.
        config: the model's.
    """
    values = [name for name in columns if name.endswith(_VALUES)]
    head = "output.weight" if "output.weight" in columns else "token_embd.weight"
    kinds = {}
    for name, width in columns.items():
        kind = MIXTURES[dtype]
        if name == head:
            kind = "Q6_K"
        elif name in values:
            kind = _of_values(kind, values.index(name), len(values), config)
        elif ".ffn_down" in name and _takes_more(int(name.split(".")[1]), config.num_hidden_layers):
            kind = "Q6_K"
        elif config.num_experts == _EIGHT and name.endswith(".attn_k.weight"):
            kind = "Q8_0"
        elif (
            config.num_experts == _EIGHT and name.endswith(".attn_output.weight") and kind == "Q4_K"
        ):
            kind = "Q5_K"
        kinds[name] = _OF_OTHER_ROWS.get(kind, kind) if width % BLOCK else kind
    return kinds


def _of_values(kind: str, index: int, count: int, config: LlamaConfig) -> str:
    if config.num_experts == _EIGHT:
        return "Q8_0"
    if _takes_more(index, count):
        return "Q6_K"
    its = config.family.llama_cpp
    is_grouped = config.num_key_value_heads < config.num_attention_heads
    taken = ("grouped", "all") if is_grouped else ("all",)
    of_70b = its is not None and its.of_70b in taken and config.num_hidden_layers == 80
    return "Q5_K" if of_70b and kind == "Q4_K" else kind


def _takes_more(index: int, count: int) -> bool:
    """Return whether a matrix is in the first or last eighth of the layers, or each third one
    between.
    """
    eighth = count // 8
    return index < eighth or index >= 7 * count // 8 or (index - eighth) % 3 == 2
