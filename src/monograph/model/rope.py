"""Compute rotary position embeddings: angles from positions, and the rotation of query and key
heads by them.

Shape suffixes: B batch, H heads, T positions, D head dimension, F = D / 2 frequencies; 1
broadcasts.
"""

import math

import torch
from torch import Tensor

from monograph.model.config import LlamaConfig
from monograph.model.scaling import LinearScaling, Llama3Scaling, LongScaling, YarnScaling
from monograph.ops.materialize import materialize

CosSin = tuple[Tensor, Tensor]


def inverse_frequencies(
    config: LlamaConfig, dtype: torch.dtype, device: torch.device, local: bool = False
) -> Tensor:
    """Return the radians per position of each pair of channels.

        f[i] = rope_theta ^ (-2 i / D),   i = 0 .. D / 2 - 1

    With `linear` scaling every pair gets f / factor. With `llama3` scaling a pair of wavelength w =
    2 pi / f keeps f where w < L / high_freq_factor, gets f / factor where w > L / low_freq_factor,
    and in between (1 - s) f / factor + s f with s = (L / w - low_freq_factor) / (high_freq_factor -
    low_freq_factor); L is the context length of pre-training. With `yarn` pair i gets (1 - k[i]) f
    / factor + k[i] f, where k falls from 1 to 0 between the pairs that turn beta_fast and beta_slow
    times in that context. With `longrope` pair i gets f / short_factor[i].

    Args:
        config: head_dim, rope_theta, rope_scaling.
        dtype: float32 or float64, the dtype of the computation.
        device: the device of the result.
        local: whether for layers with a window, whose base is rope_local_theta if there is one,
            without scaling.

    Returns:
        [F] in `dtype`.

    Source: Su et al., "RoFormer", arXiv 2104.09864; `llama3` is `apply_scaling` of the Llama 3.1
    reference code (meta-llama/llama-models, models/llama3/model.py); YaRN: Peng et al., arXiv
    2309.00071, section 3.2.
    """
    # The order of operations is transformers': at position 2,000, one rounding of a frequency is
    # 1e-4 radians.
    exponents_F = torch.arange(0, config.rotary_dim, 2, device=device).to(dtype) / config.rotary_dim
    theta, scaling = config.rope(local)
    powers_F = theta**exponents_F
    frequencies_F = 1.0 / powers_F
    if scaling is None:
        return frequencies_F
    if isinstance(scaling, LinearScaling):
        return frequencies_F / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(frequencies_F, scaling)
    if isinstance(scaling, LongScaling):
        return 1.0 / (torch.tensor(scaling.short_factor, device=device).to(dtype) * powers_F)
    kept_F = _kept_by_yarn(scaling, config.rotary_dim, theta).to(exponents_F)
    return 1.0 / (scaling.factor * powers_F) * (1 - kept_F) + frequencies_F * kept_F


def _llama3(frequencies_F: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths_F = 2 * math.pi / frequencies_F
    length = scaling.original_max_position_embeddings
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    smooth_F = (length / wavelengths_F - low) / (high - low)
    stretched_F = frequencies_F / scaling.factor
    between_F = (1 - smooth_F) * stretched_F + smooth_F * frequencies_F
    scaled_F = torch.where(wavelengths_F > length / low, stretched_F, between_F)
    return torch.where(wavelengths_F < length / high, frequencies_F, scaled_F)


def _kept_by_yarn(scaling: YarnScaling, head_dim: int, theta: float) -> Tensor:
    """Return the share of each pair's own frequency, [F] in float32 as in transformers."""

    def pair(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low = pair(scaling.beta_fast)
    high = pair(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as there
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def cos_sin(
    positions_BT: Tensor, config: LlamaConfig, dtype: torch.dtype, local: bool = False
) -> CosSin:
    """Return the cosine and sine of position * frequency, computed once per forward pass and shared
    by all blocks.

    They are not kept in a buffer, which would get into checkpoints or be lost on the meta device,
    and which casting the model to bf16 would cast as well, so that neighbouring positions above 256
    coincide.

    Args:
        positions_BT: position of each token, int64.
        config: head_dim, rope_theta, rope_scaling.
        dtype: float32, or float64 for a float64 model.
        local: see `inverse_frequencies`.

    Returns:
        Two tensors [B, 1, T, F] in `dtype`.
    """
    frequencies_F = inverse_frequencies(config, dtype, positions_BT.device, local)
    angles_B1TF = positions_BT[:, None, :, None].to(dtype) * frequencies_F
    # Fused into each rotation, a power, a cosine and a sine would be computed again for every
    # element that is rotated.
    cos_B1TF = angles_B1TF.cos()
    sin_B1TF = angles_B1TF.sin()
    if isinstance(scaling := config.rope(local)[1], YarnScaling | LongScaling):
        cos_B1TF, sin_B1TF = (
            cos_B1TF * scaling.attention_factor,
            sin_B1TF * scaling.attention_factor,
        )
    return materialize(cos_B1TF), materialize(sin_B1TF)


def rotate(heads_BHTD: Tensor, cos_sin_B1TF: CosSin, device_type: str = "") -> Tensor:
    """Rotate the pair (x[i], x[i + D/2]) of every head by the angle of its position and frequency
    i.

        y[i]       = x[i] cos - x[i + D/2] sin
        y[i + D/2] = x[i + D/2] cos + x[i] sin

    Pairs are halves of the head, as in Hugging Face checkpoints, not neighbours as in Meta's own.
    With a `device_type` it is computed as on such a device. Channels beyond twice the number of
    frequencies stay as they are.

    Returns:
        [B, H, T, D] in the dtype of the heads; the rotation is computed in the cosine's dtype and
        rounded once.
    """
    if (rotated := 2 * cos_sin_B1TF[0].shape[-1]) < heads_BHTD.shape[-1]:
        first_BHTD, rest_BHTD = heads_BHTD.tensor_split([rotated], dim=-1)
        return torch.cat([rotate(first_BHTD, cos_sin_B1TF, device_type), rest_BHTD], dim=-1)
    if (device_type or heads_BHTD.device.type) == "cuda":
        # In the order [B, T, H, D] of the projections' outputs, attention's result needs no copy
        # for the one after it.
        cos_BT1F, sin_BT1F = (tensor.transpose(1, 2) for tensor in cos_sin_B1TF)
        return _rotated_on_cuda(heads_BHTD.transpose(1, 2), cos_BT1F, sin_BT1F).transpose(1, 2)
    cos_B1TF, sin_B1TF = cos_sin_B1TF
    first_BHTF, second_BHTF = heads_BHTD.chunk(2, dim=-1)
    turned = (
        first_BHTF * cos_B1TF - second_BHTF * sin_B1TF,
        second_BHTF * cos_B1TF + first_BHTF * sin_B1TF,
    )
    return torch.cat(turned, dim=-1).to(heads_BHTD.dtype)


def _rotated_on_cuda(heads_BTHD: Tensor, cos_BT1F: Tensor, sin_BT1F: Tensor) -> Tensor:
    """Return the same by elementwise operators, so that a compiler fuses the backward pass with
    what reads it.
    """
    pairs_BTH2F = heads_BTHD.unflatten(-1, (2, -1))
    first_21 = torch.arange(2, device=heads_BTHD.device).unsqueeze(-1) == 0
    cos_BT11F = cos_BT1F.unsqueeze(-2)
    sin_BT11F = sin_BT1F.unsqueeze(-2)
    turned = pairs_BTH2F * cos_BT11F + pairs_BTH2F.flip(-2) * torch.where(
        first_21, -sin_BT11F, sin_BT11F
    )
    return turned.flatten(-2).to(heads_BTHD.dtype)
