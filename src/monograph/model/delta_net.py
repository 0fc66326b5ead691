"""A layer that mixes positions by the gated delta rule: its state has a fixed size, whatever the
length of the text.

Shape suffixes: B batch, T positions, D hidden size, C channels of the convolution, K its taps, H
value heads, G key heads, E key dimension, V value dimension, X a head's channels.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.model.config import LlamaConfig
from monograph.model.layer_kinds import LENGTH_EPS
from monograph.model.layers import LayerCache, Linear, RMSNorm
from monograph.model.rope import CosSin
from monograph.ops import delta_rule
from monograph.ops.attention import Impl, Mask


class GatedDeltaNet(nn.Module):
    """The gated delta rule over heads, after a short convolution over positions and before a gated
    norm.

    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464.
    """

    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        super().__init__()
        self.impl = impl
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = (
            config.linear_num_key_heads * self.key_dim,
            config.linear_num_value_heads * self.value_dim,
        )
        self.sizes = keys, keys, values
        self.groups = config.linear_num_value_heads // config.linear_num_key_heads
        # The order of parameters is that of the computation.
        self.by_key_head = config.family.by_key_head
        apart, by_key_head = (
            ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
            ("in_proj_qkvz", "in_proj_ba"),
        )
        self.siblings = by_key_head if self.by_key_head else apart
        if self.by_key_head:
            self.in_proj_qkvz = Linear(config.hidden_size, sum(self.sizes) + values, bias=False)
            self.in_proj_ba = Linear(
                config.hidden_size, 2 * config.linear_num_value_heads, bias=False
            )
        else:
            self.in_proj_qkv = Linear(config.hidden_size, sum(self.sizes), bias=False)
            self.in_proj_z = Linear(config.hidden_size, values, bias=False)
            self.in_proj_b = Linear(config.hidden_size, config.linear_num_value_heads, bias=False)
            self.in_proj_a = Linear(config.hidden_size, config.linear_num_value_heads, bias=False)
        self.conv1d = Taps(sum(self.sizes), config.linear_conv_kernel_dim)
        self.dt_bias = nn.Parameter(torch.empty(config.linear_num_value_heads))
        self.A_log = nn.Parameter(torch.empty(config.linear_num_value_heads))
        self.norm = RMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(values, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_BTD: Tensor,
        cos_sin_B1TF: CosSin | None,
        mask: Mask,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return out_proj(norm(delta_rule(conv(qkv), beta, g)) * silu(z)), where qkv, z, a and b
        are projections of x.

        beta = sigmoid(b) and g = -exp(A_log) softplus(a + dt_bias). Queries and keys of a head have
        length 1, and queries are divided by sqrt(E). The mask are the document numbers of
        positions, [B, T], or None. With `impl` "cached" the rule is computed token by token, in the
        bits of decoding.
        """
        segments_BT = cast(Tensor | None, mask)
        channels_BTC, gate_BTX, b_BTH, a_BTH = self._projected(hidden_BTD)
        wide = torch.float64 if hidden_BTD.dtype == torch.float64 else torch.float32
        # In float64, since sums of decays are subtracted from each other, and since torch's
        # functions in fp32 may have other bits for the last numbers of a tensor than for its
        # others.
        beta_BTH = b_BTH.double().sigmoid().to(hidden_BTD.dtype).to(wide)
        decay_BTH = -self.A_log.double().exp() * F.softplus(a_BTH.double() + self.dt_bias)
        if cache is None:
            mixed_BTC = self.conv1d(channels_BTC, segments_BT)
            starts_BT = starts(segments_BT)
            # Products in 16 bits would be carried from chunk to chunk.
            with torch.autocast(hidden_BTD.device.type, enabled=False):
                out_BHTV, _ = self._rule(
                    *self._heads(mixed_BTC, wide), _t(decay_BTH), _t(beta_BTH), starts_BT
                )
        else:
            out_BHTV = self._cached(channels_BTC, decay_BTH, beta_BTH, cache)
        out_BTHV = self.norm(out_BHTV.transpose(1, 2).to(hidden_BTD.dtype))
        gate_BTHV = F.silu(gate_BTX.to(wide)).unflatten(-1, (-1, self.value_dim))
        return self.out_proj((out_BTHV * gate_BTHV).to(hidden_BTD.dtype).flatten(2))

    def _projected(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k and v for the convolution, z, b and a."""
        if not self.by_key_head:
            projections = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
            return projections[0](hidden_BTD), *(each(hidden_BTD) for each in projections[1:])
        wide, keys = self.groups * self.value_dim, self.sizes[0] // self.key_dim
        heads_BTGX = self.in_proj_qkvz(hidden_BTD).unflatten(-1, (keys, -1))
        *mixed, z_BTX = (
            each.flatten(2)
            for each in heads_BTGX.split([self.key_dim, self.key_dim, wide, wide], dim=-1)
        )
        b_BTH, a_BTH = (
            each.flatten(2)
            for each in self.in_proj_ba(hidden_BTD).unflatten(-1, (keys, 2, -1)).unbind(-2)
        )
        return torch.cat(mixed, dim=-1), z_BTX, b_BTH, a_BTH

    @property
    def _rule(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return delta_rule.recurrent if self.impl == "cached" else delta_rule.chunked

    def _heads(self, mixed_BTC: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [B, H, T, E], each key head once for each of its value heads, and
        values.
        """
        query_BTX, key_BTX, value_BTX = mixed_BTC.to(wide).split(self.sizes, dim=-1)
        pairs = []
        for each_BTX in (query_BTX, key_BTX):
            heads_BGTE = _t(each_BTX.unflatten(-1, (-1, self.key_dim)))
            unit_BGTE = (
                heads_BGTE * (heads_BGTE.square().sum(dim=-1, keepdim=True) + LENGTH_EPS).rsqrt()
            )
            pairs.append(unit_BGTE.repeat_interleave(self.groups, dim=1))
        return (
            pairs[0] / math.sqrt(self.key_dim),
            pairs[1],
            _t(value_BTX.unflatten(-1, (-1, self.value_dim))),
        )

    def _cached(
        self, channels_BTC: Tensor, decay_BTH: Tensor, beta_BTH: Tensor, cache: LayerCache
    ) -> Tensor:
        """Return the rule's outputs, and take the new tokens into the layer's recurrence.

        One token that was taken before, as a step that is repeated gives, changes nothing and reads
        the same again. Several must be new, except those from the limit on, which are not taken.
        """
        taken = cache.cache.recurrence(cache.layer_index)
        fresh_BT = (cache.positions_BT >= taken.count_B[:, None]) & (
            cache.positions_BT < taken.limit_B[:, None]
        )
        inputs_BSC = torch.cat([taken.inputs_BKC, channels_BTC.to(taken.inputs_BKC.dtype)], dim=1)
        last_BK = fresh_BT.sum(dim=1)[:, None] + torch.arange(
            taken.inputs_BKC.shape[1], device=fresh_BT.device
        )
        inputs_BKC = inputs_BSC.gather(1, last_BK[..., None].expand(-1, -1, inputs_BSC.shape[-1]))
        one = channels_BTC.shape[1] == 1
        mixed_BTC = self.conv1d.of_inputs(inputs_BKC if one else inputs_BSC[:, 1:])
        query_BHTE, key_BHTE, value_BHTV = self._heads(mixed_BTC, taken.state_BHEV.dtype)
        decay_BHT, beta_BHT = (
            _t(torch.where(fresh_BT[..., None], each, 0.0)) for each in (decay_BTH, beta_BTH)
        )
        if one:
            token = key_BHTE[:, :, 0], value_BHTV[:, :, 0], decay_BHT[..., 0], beta_BHT[..., 0]
            state_BHEV = delta_rule.step(*token, taken.state_BHEV)
            out_BHTV = delta_rule.read(query_BHTE[:, :, 0], state_BHEV)[:, :, None]
        else:
            out_BHTV, state_BHEV = self._rule(
                query_BHTE, key_BHTE, value_BHTV, decay_BHT, beta_BHT, None, taken.state_BHEV
            )
        taken.inputs_BKC.copy_(inputs_BKC)
        taken.state_BHEV.copy_(state_BHEV)
        taken.count_B.add_(fresh_BT.sum(dim=1))
        return out_BHTV


class Taps(nn.Module):
    """A causal convolution of each channel over positions, and silu."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))  # the shape of a Conv1d

    def forward(self, channels_BTC: Tensor, segments_BT: Tensor | None) -> Tensor:
        """Return silu(sum_j w[j] x[t - K + 1 + j]) over the positions of t's document, [B, T, C]."""
        total_BTC = channels_BTC * self.weight[:, 0, -1]
        places_T = torch.arange(channels_BTC.shape[1], device=channels_BTC.device)
        for back in range(1, self.weight.shape[-1]):
            same_BT = (places_T >= back)[None]
            if segments_BT is not None:
                same_BT = same_BT & (segments_BT.roll(back, dims=1) == segments_BT)
            # Rolled rather than padded, which a compiler fuses into loops without branches, forward
            # and backward.
            earlier_BTC = torch.where(same_BT[..., None], channels_BTC.roll(back, dims=1), 0.0)
            total_BTC = total_BTC + earlier_BTC * self.weight[:, 0, -1 - back]
        return F.silu(total_BTC)

    def of_inputs(self, inputs_BSC: Tensor) -> Tensor:
        """Return the outputs at the last S - K + 1 positions."""
        taps = self.weight.shape[-1]
        length = inputs_BSC.shape[1] - taps + 1
        total_BTC = inputs_BSC[:, taps - 1 :] * self.weight[:, 0, -1]
        for back in range(1, taps):
            begin = taps - 1 - back
            total_BTC = (
                total_BTC + inputs_BSC[:, begin : begin + length] * self.weight[:, 0, -1 - back]
            )
        return F.silu(total_BTC)


def starts(segments_BT: Tensor | None) -> Tensor | None:
    """Return whether a position is the first of its document, without the first of the row, before
    which is nothing.
    """
    return None if segments_BT is None else F.pad(segments_BT[:, 1:] != segments_BT[:, :-1], (1, 0))


def _t(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)


def drawn(name: str, uniform: Tensor) -> Tensor:
    """Return the initial value of a parameter of this layer that is no matrix, from uniform numbers
    in [0, 1).

    The decays are those of Mamba 2 (Dao and Gu, arXiv 2405.21060): A in [1, 16), and steps
    softplus(dt_bias) between 0.001 and 0.1, evenly in their logarithm, so that heads remember from
    a few to a thousand tokens.
    """
    if name.endswith("A_log"):
        return (1 + 15 * uniform).log()
    if name.endswith("dt_bias"):
        rate = (math.log(0.001) + uniform * math.log(100)).exp()
        return rate + (-(-rate).expm1()).log()
    if name.endswith("conv1d.weight"):
        return (2 * uniform - 1) / math.sqrt(uniform.shape[-1])
    return torch.ones_like(uniform)  # factors of the norm
