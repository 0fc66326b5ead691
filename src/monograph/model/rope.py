"""Compute rotary position embeddings: the angles of positions, and the rotation of query and key
heads.

A *pair* is two channels of a head that are rotated together, by one frequency.

Shape suffixes: B batch, H heads, T positions, C all channels of a head, D its rotated channels,
X = C - D its other channels, F = D / 2 pairs; 2 is the two halves of D, and 1 an axis of length 1.
"""

import math

import torch
from torch import Tensor

from monograph import compat
from monograph.model.config import LlamaConfig
from monograph.model.scaling import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    YarnScaling,
)
from monograph.ops.materialize import materialize
from monograph.ops.rotation import (
    can_rotate_projections,
    rotate_by_operators,
    rotate_projections,
)

CosSin = tuple[Tensor, Tensor]  # cosine and sine of the angles, as `cos_sin` returns them


def inverse_frequencies(
    config: LlamaConfig, dtype: torch.dtype, device: torch.device, local: bool = False
) -> Tensor:
    """Return the frequency of each pair of channels, in radians per position.

        f[i] = rope_theta ^ (-2 i / D),   i = 0 .. D / 2 - 1

    A scaling changes f. L is the context length of pre-training in positions, and w = 2 pi / f is
    a pair's wavelength: the number of positions in which it rotates once.

        linear:   f / factor
        llama3:   f                              where w < L / high_freq_factor
                  f / factor                     where w > L / low_freq_factor
                  (1 - s) f / factor + s f       in between, with
                  s = (L / w - low_freq_factor) / (high_freq_factor - low_freq_factor)
        yarn:     (1 - k[i]) f / factor + k[i] f, with
                  k[i] = 1               where pair i makes at least beta_fast rotations in L positions
                  k[i] = 0               where it makes at most beta_slow rotations
                  k[i] linear in i       in between
        longrope: f / short_factor[i]. The model's long_factor is for texts longer than L, which this
                  package does not compute (`LongScaling`).
        proportional: f / factor, and 0 from pair floor(partial_rotary_factor D / 2) on: these pairs
                  are not rotated.

    Args:
        config: the model's rotary positions: rotary_dim, rope_theta, rope_scaling.
        dtype: float32 or float64, the dtype of the computation.
        device: the device of the result.
        local: True for layers with a window. If the model has a rope_local_theta, this is their
            base, and they have no scaling.

    Returns:
        [F] in `dtype`.

    Source: Su et al., "RoFormer", arXiv 2104.09864; `llama3` is `apply_scaling` of the Llama 3.1
    reference code (meta-llama/llama-models, models/llama3/model.py); YaRN: Peng et al., arXiv
    2309.00071, section 3.2.
    """
    # The order of operations is that of transformers, because another order would round differently.
    # At position 2,000, a frequency that differs by one rounding changes the angle by 1e-4 radians.
    exponents_F = torch.arange(0, config.rotary_dim, 2, device=device).to(dtype) / config.rotary_dim
    theta, scaling = config.theta_and_scaling(local)
    powers_F = theta**exponents_F
    frequencies_F = 1.0 / powers_F
    if scaling is None:
        return frequencies_F
    if isinstance(scaling, LinearScaling):
        return frequencies_F / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _scale_as_llama3(frequencies_F, scaling)
    if isinstance(scaling, LongScaling):
        return 1.0 / (torch.tensor(scaling.short_factor, device=device).to(dtype) * powers_F)
    if isinstance(scaling, ProportionalScaling):
        pairs_F = torch.arange(config.rotary_dim // 2, device=device)
        is_rotated_F = pairs_F < scaling.rotated_pairs(config.rotary_dim)
        return torch.where(is_rotated_F, frequencies_F, 0.0) / scaling.factor
    kept_F = _yarn_kept_share(scaling, config.rotary_dim, theta).to(exponents_F)
    stretched_F = 1.0 / (scaling.factor * powers_F)
    return stretched_F * (1 - kept_F) + frequencies_F * kept_F


def _scale_as_llama3(frequencies_F: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Return the frequencies with the scaling llama3; its formula is in `inverse_frequencies`."""
    wavelengths_F = 2 * math.pi / frequencies_F
    length = scaling.original_max_position_embeddings
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    smooth_F = (length / wavelengths_F - low) / (high - low)
    stretched_F = frequencies_F / scaling.factor
    between_F = (1 - smooth_F) * stretched_F + smooth_F * frequencies_F
    scaled_F = torch.where(wavelengths_F > length / low, stretched_F, between_F)
    return torch.where(wavelengths_F < length / high, frequencies_F, scaled_F)


def _yarn_kept_share(scaling: YarnScaling, rotary_dim: int, theta: float) -> Tensor:
    """Return the share of each pair's unscaled frequency in its scaled frequency.

    This is k in the formula for yarn of `inverse_frequencies`.

    Returns:
        [F] in float32, as in transformers.
    """

    def pair_index(rotations: float) -> float:
        """Return the index at which a pair would make `rotations` rotations in L positions.

        The index is a real number, because the equation theta^(-2 i / D) = 2 pi / wavelength is
        solved for i.
        """
        wavelength = scaling.original_max_position_embeddings / rotations
        return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first = pair_index(scaling.beta_fast)
    last = pair_index(scaling.beta_slow)
    if scaling.truncate:
        # The range in which k is linear begins and ends at whole indices.
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    # The indices of pairs end at rotary_dim / 2 - 1, so a lower bound would do. But this is transformers'
    # bound, and another one would give other frequencies.
    last = min(last, rotary_dim - 1)
    if first == last:
        # transformers adds the same number. Without it, the next division would be by zero.
        last += 0.001
    indices_F = torch.arange(rotary_dim // 2, dtype=torch.float32)
    return 1 - ((indices_F - first) / (last - first)).clamp(0, 1)


def cos_sin(
    positions_BT: Tensor, config: LlamaConfig, dtype: torch.dtype, local: bool = False
) -> CosSin:
    """Return the cosine and sine of each position's angles, position * frequency.

    A forward pass computes these two tensors once, and all blocks share them. They are not kept in a
    buffer of a module, because a buffer is saved in checkpoints or lost when a model is built on the
    meta device. Also, a cast of the model to bf16 would cast the buffer, and positions above 256
    would no longer differ from their neighbours.

    Args:
        positions_BT: position of each token, int64.
        config: the model's rotary positions: rotary_dim, rope_theta, rope_scaling.
        dtype: float32, or float64 for a float64 model.
        local: True for layers with a window, as in `inverse_frequencies`.

    Returns:
        Two tensors [B, 1, T, F] in `dtype`.
    """
    frequencies_F = inverse_frequencies(config, dtype, positions_BT.device, local)
    angles_B1TF = positions_BT[:, None, :, None].to(dtype) * frequencies_F
    cos_B1TF = angles_B1TF.cos()
    sin_B1TF = angles_B1TF.sin()
    _, scaling = config.theta_and_scaling(local)
    if isinstance(scaling, YarnScaling | LongScaling):
        cos_B1TF = cos_B1TF * scaling.attention_factor
        sin_B1TF = sin_B1TF * scaling.attention_factor
    # `materialize` keeps a compiler from fusing these computations into each rotation, which would then
    # compute a power, a cosine and a sine again for every element.
    return materialize(cos_B1TF), materialize(sin_B1TF)


def rotate(
    heads_BHTC: Tensor,
    cos_sin_B1TF: CosSin,
    device_type: str = "",
    *,
    interleaved: bool = False,
) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of every head by its angle, position * frequency i.

        y[i]       = x[i] cos - x[i + D/2] sin
        y[i + D/2] = x[i + D/2] cos + x[i] sin

    The two channels of a pair are in different halves of the head, as in most of Hugging Face's
    checkpoints. If `interleaved` is true, they are the neighbours x[2 i] and x[2 i + 1]. Only a head's
    first D = 2 F channels are rotated, and the others are returned as they are.

    Args:
        heads_BHTC: x, with all channels of the heads.
        cos_sin_B1TF: cosine and sine of the angles.
        device_type: the type of the device for which operators are chosen. "" is the device of the
            heads. A plan passes "cuda", because it traces a GPU's step on a machine without a GPU.
        interleaved: whether the channels of a pair are neighbours (`Family.interleaved_rotary`).

    Returns:
        [B, H, T, C] in the dtype of the heads. The rotation is computed in the cosine's dtype and
        rounded once.
    """
    rotary_dim = 2 * cos_sin_B1TF[0].shape[-1]
    if rotary_dim < heads_BHTC.shape[-1]:
        rotary_BHTD, rest_BHTX = heads_BHTC.tensor_split([rotary_dim], dim=-1)
        rotated_BHTD = rotate(rotary_BHTD, cos_sin_B1TF, device_type, interleaved=interleaved)
        return torch.cat([rotated_BHTD, rest_BHTX], dim=-1)
    heads_BHTD = heads_BHTC  # all channels are rotated, so C = D
    if interleaved or (device_type or heads_BHTD.device.type) == "cuda":
        # The outputs of projections have the order [B, T, H, D]. If the rotation keeps it, the
        # result of attention has it too, and the projection after attention needs no copy.
        cos_BT1F, sin_BT1F = (tensor.transpose(1, 2) for tensor in cos_sin_B1TF)
        heads_BTHD = heads_BHTD.transpose(1, 2)
        rotated_BTHD = rotate_by_operators(heads_BTHD, cos_BT1F, sin_BT1F, interleaved=interleaved)
        return rotated_BTHD.transpose(1, 2)
    cos_B1TF, sin_B1TF = cos_sin_B1TF
    first_BHTF, second_BHTF = heads_BHTD.chunk(2, dim=-1)
    rotated = (
        first_BHTF * cos_B1TF - second_BHTF * sin_B1TF,
        second_BHTF * cos_B1TF + first_BHTF * sin_B1TF,
    )
    return torch.cat(rotated, dim=-1).to(heads_BHTD.dtype)


def rotate_heads(
    query_BTX: Tensor,
    key_BTX: Tensor,
    value_BTX: Tensor,
    head_dim: int,
    cos_sin_B1TF: CosSin,
    device_type: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heads of three projections, those of queries and keys rotated as by `rotate`.

    A compiled training step on a GPU rotates them by kernels of its own. Call this only with projections
    that come directly from matrix products. If something is computed in between, call `rotate`: a compiler
    fuses it with the rotation.

    Args:
        query_BTX: the query projection of all heads.
        key_BTX: the key projection of all heads.
        value_BTX: the value projection of all heads.
        head_dim: C, the channels of a head.
        cos_sin_B1TF: see `rotate`.
        device_type: see `rotate`.

    Returns:
        Queries, keys and values, [B, heads, T, C].
    """
    if _has_kernels(query_BTX, head_dim, cos_sin_B1TF, device_type):
        cos_B1TF, sin_B1TF = cos_sin_B1TF
        rotated = rotate_projections(
            query_BTX, key_BTX, value_BTX, cos_B1TF.squeeze(1), sin_B1TF.squeeze(1)
        )
        query_BHTC, key_BKTC, value_BKTC = (each_BTHC.transpose(1, 2) for each_BTHC in rotated)
        return query_BHTC, key_BKTC, value_BKTC
    query_BHTC, key_BKTC, value_BKTC = (
        each_BTX.unflatten(-1, (-1, head_dim)).transpose(1, 2)
        for each_BTX in (query_BTX, key_BTX, value_BTX)
    )
    rotated_query_BHTC = rotate(query_BHTC, cos_sin_B1TF, device_type)
    return rotated_query_BHTC, rotate(key_BKTC, cos_sin_B1TF, device_type), value_BKTC


def _has_kernels(query_BTX: Tensor, head_dim: int, cos_sin_B1TF: CosSin, device_type: str) -> bool:
    """Return whether kernels rotate these projections."""
    cos_B1TF, _ = cos_sin_B1TF
    on_cuda = (device_type or query_BTX.device.type) == "cuda"
    # The kernels are for training. Without gradients, as in decoding, a rotation by operators is better,
    # since a compiler fuses it with what reads its result.
    is_in_step = torch.compiler.is_compiling() and torch.is_grad_enabled()
    rotates_all_channels = 2 * cos_B1TF.shape[-1] == head_dim
    can_rotate = can_rotate_projections(query_BTX, cos_B1TF) and not compat.in_transform()
    return on_cuda and is_in_step and rotates_all_channels and can_rotate
