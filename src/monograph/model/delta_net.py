"""A layer that mixes positions by the gated delta rule, in the place of attention.

Its state has the same size for texts of every length, where attention keeps a key and a value for
each token.

Shape suffixes: B batch, T positions, D hidden size, C channels of the convolution, K taps of the
convolution, S positions of its input, H value heads, G key heads, E key dimension, V value dimension,
X any number of channels; 1 broadcasts.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.model.config import LlamaConfig
from monograph.model.layer_keys import L2_NORM_EPS
from monograph.model.layers import LayerCache, Linear, RMSNorm
from monograph.model.rope import CosSin
from monograph.ops import delta_rule
from monograph.ops.attention import Impl, Mask


class GatedDeltaNet(nn.Module):
    """A layer of three steps: a short convolution over positions, the gated delta rule for each head,
    and a gated norm.

    The rule is in `monograph.ops.delta_rule`.

    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464.
    """

    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        super().__init__()
        self.impl = impl
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        key_width = config.linear_num_key_heads * self.key_dim
        value_width = config.linear_num_value_heads * self.value_dim
        # The widths of all queries, all keys and all values. There are as many query heads as key heads.
        self.qkv_widths = key_width, key_width, value_width
        self.value_heads_per_key_head = config.linear_num_value_heads // config.linear_num_key_heads
        # Modules are added in the order of the computation, so that parameters have this order, too.
        # Whether each key head's channels are together in two projections, or there are four projections.
        self.by_key_head = config.family.projections_by_key_head
        if self.by_key_head:
            self.siblings: tuple[str, ...] = ("in_proj_qkvz", "in_proj_ba")
            self.in_proj_qkvz = Linear(
                config.hidden_size, sum(self.qkv_widths) + value_width, bias=False
            )
            self.in_proj_ba = Linear(
                config.hidden_size, 2 * config.linear_num_value_heads, bias=False
            )
        else:
            self.siblings = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            self.in_proj_qkv = Linear(config.hidden_size, sum(self.qkv_widths), bias=False)
            self.in_proj_z = Linear(config.hidden_size, value_width, bias=False)
            self.in_proj_b = Linear(config.hidden_size, config.linear_num_value_heads, bias=False)
            self.in_proj_a = Linear(config.hidden_size, config.linear_num_value_heads, bias=False)
        self.conv1d = CausalConv(sum(self.qkv_widths), config.linear_conv_kernel_dim)
        self.dt_bias = nn.Parameter(torch.empty(config.linear_num_value_heads))
        self.A_log = nn.Parameter(torch.empty(config.linear_num_value_heads))
        self.norm = RMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(value_width, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_BTD: Tensor,
        cos_sin_B1TF: CosSin | None,
        mask: Mask,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return out_proj(norm(delta_rule(conv(qkv), beta, g)) * silu(z)).

        qkv, z, a and b are projections of x, beta = sigmoid(b), and the decay is
        g = -exp(A_log) softplus(a + dt_bias). Each head's queries and keys are scaled to length 1, and
        then queries are divided by sqrt(E). With `impl` "cached" the rule is computed token by token,
        with the same bits as in decoding.

        Args:
            hidden_BTD: x.
            cos_sin_B1TF: not used, because this layer does not rotate.
            mask: the document number of each position, [B, T]; None: each row is one document.
            cache: the block's view of a cache; None: the pass has no cache.
        """
        segments_BT = cast(Tensor | None, mask)
        channels_BTC, gate_BTX, b_BTH, a_BTH = self._project(hidden_BTD)
        wide = torch.float64 if hidden_BTD.dtype == torch.float64 else torch.float32
        # beta and g are computed in float64 for two reasons. Sums of g are subtracted from each other,
        # which magnifies their errors. And in fp32, torch's functions may give the last numbers of a
        # tensor other bits than the same numbers elsewhere in it.
        beta_BTH = b_BTH.double().sigmoid().to(hidden_BTD.dtype).to(wide)
        decay_BTH = -self.A_log.double().exp() * F.softplus(a_BTH.double() + self.dt_bias)
        if cache is None:
            mixed_BTC = self.conv1d(channels_BTC, segments_BT)
            starts_BT = document_starts(segments_BT)
            # Autocast would round the rule's products to 16 bits, and each chunk of the text would pass
            # its errors on to the next.
            with torch.autocast(hidden_BTD.device.type, enabled=False):
                out_BHTV, _ = self._rule(
                    *self._heads(mixed_BTC, wide),
                    _heads_first(decay_BTH),
                    _heads_first(beta_BTH),
                    starts_BT,
                )
        else:
            out_BHTV = self._cached(channels_BTC, decay_BTH, beta_BTH, cache)
        out_BTHV = self.norm(out_BHTV.transpose(1, 2).to(hidden_BTD.dtype))
        gate_BTHV = F.silu(gate_BTX.to(wide)).unflatten(-1, (-1, self.value_dim))
        return self.out_proj((out_BTHV * gate_BTHV).to(hidden_BTD.dtype).flatten(2))

    def _project(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return qkv [B, T, C], z [B, T, H V], b [B, T, H] and a [B, T, H]."""
        if not self.by_key_head:
            return (
                self.in_proj_qkv(hidden_BTD),
                self.in_proj_z(hidden_BTD),
                self.in_proj_b(hidden_BTD),
                self.in_proj_a(hidden_BTD),
            )
        key_heads = self.qkv_widths[0] // self.key_dim
        # Each key head has a query, a key, and the values and gates of its value heads.
        values_width = self.value_heads_per_key_head * self.value_dim
        head_widths = [self.key_dim, self.key_dim, values_width, values_width]
        heads_BTGX = self.in_proj_qkvz(hidden_BTD).unflatten(-1, (key_heads, -1))
        *qkv, z_BTX = (part.flatten(2) for part in heads_BTGX.split(head_widths, dim=-1))
        ba_BTG2X = self.in_proj_ba(hidden_BTD).unflatten(-1, (key_heads, 2, -1))
        b_BTH, a_BTH = (part.flatten(2) for part in ba_BTG2X.unbind(-2))
        return torch.cat(qkv, dim=-1), z_BTX, b_BTH, a_BTH

    @property
    def _rule(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the implementation of the rule for several tokens."""
        return delta_rule.recurrent if self.impl == "cached" else delta_rule.chunked

    def _heads(self, mixed_BTC: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of each value head, given the convolution's outputs.

        Queries and keys are normalised, and repeated for each value head of their key head.

        Returns:
            Queries and keys [B, H, T, E] and values [B, H, T, V], in the dtype `wide`.
        """
        query_BTX, key_BTX, value_BTX = mixed_BTC.to(wide).split(self.qkv_widths, dim=-1)
        queries_and_keys = []
        for channels_BTX in (query_BTX, key_BTX):
            heads_BGTE = _heads_first(channels_BTX.unflatten(-1, (-1, self.key_dim)))
            squared_length_BGT1 = heads_BGTE.square().sum(dim=-1, keepdim=True)
            unit_BGTE = heads_BGTE * (squared_length_BGT1 + L2_NORM_EPS).rsqrt()
            queries_and_keys.append(
                unit_BGTE.repeat_interleave(self.value_heads_per_key_head, dim=1)
            )
        query_BHTE, key_BHTE = queries_and_keys
        value_BHTV = _heads_first(value_BTX.unflatten(-1, (-1, self.value_dim)))
        return query_BHTE / math.sqrt(self.key_dim), key_BHTE, value_BHTV

    def _cached(
        self, channels_BTC: Tensor, decay_BTH: Tensor, beta_BTH: Tensor, cache: LayerCache
    ) -> Tensor:
        """Add the pass's tokens to the cached state, and return the rule's outputs.

        A pass of one token, as a decode step is, may be repeated. A token that the state already
        includes does not change it, and gets the same output again. In a pass of several tokens, all
        must be new. Tokens at positions from the row's limit on are not added.
        """
        recurrence = cache.cache.recurrence(cache.layer_index)
        is_new_BT = (cache.positions_BT >= recurrence.count_B[:, None]) & (
            cache.positions_BT < recurrence.limit_B[:, None]
        )
        inputs_BSC = torch.cat(
            [recurrence.inputs_BKC, channels_BTC.to(recurrence.inputs_BKC.dtype)], dim=1
        )
        # For each row, the last K inputs up to its last new token.
        index_BK = is_new_BT.sum(dim=1)[:, None] + torch.arange(
            recurrence.inputs_BKC.shape[1], device=is_new_BT.device
        )
        inputs_BKC = inputs_BSC.gather(1, index_BK[..., None].expand(-1, -1, inputs_BSC.shape[-1]))
        is_one_token = channels_BTC.shape[1] == 1
        mixed_BTC = self.conv1d.convolve_inputs(inputs_BKC if is_one_token else inputs_BSC[:, 1:])
        query_BHTE, key_BHTE, value_BHTV = self._heads(mixed_BTC, recurrence.state_BHEV.dtype)
        # A token with g = 0 (no decay) and beta = 0 does not change the state.
        decay_BHT, beta_BHT = (
            _heads_first(torch.where(is_new_BT[..., None], numbers_BTH, 0.0))
            for numbers_BTH in (decay_BTH, beta_BTH)
        )
        if is_one_token:
            token = key_BHTE[:, :, 0], value_BHTV[:, :, 0], decay_BHT[..., 0], beta_BHT[..., 0]
            state_BHEV = delta_rule.step(*token, recurrence.state_BHEV)
            out_BHTV = delta_rule.read(query_BHTE[:, :, 0], state_BHEV)[:, :, None]
        else:
            out_BHTV, state_BHEV = self._rule(
                query_BHTE, key_BHTE, value_BHTV, decay_BHT, beta_BHT, None, recurrence.state_BHEV
            )
        recurrence.inputs_BKC.copy_(inputs_BKC)
        recurrence.state_BHEV.copy_(state_BHEV)
        recurrence.count_B.add_(is_new_BT.sum(dim=1))
        return out_BHTV


class CausalConv(nn.Module):
    """A causal convolution over positions, for each channel alone, and then silu."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))  # the shape of a Conv1d

    def forward(self, channels_BTC: Tensor, segments_BT: Tensor | None) -> Tensor:
        """Return silu(sum_j w[j] x[t - K + 1 + j]) over the positions of t's document, [B, T, C]."""
        total_BTC = channels_BTC * self.weight[:, 0, -1]
        indices_T = torch.arange(channels_BTC.shape[1], device=channels_BTC.device)
        for back in range(1, self.weight.shape[-1]):
            # Whether the position that is `back` positions earlier is in the same document.
            is_same_BT = (indices_T >= back)[None]
            if segments_BT is not None:
                is_same_BT = is_same_BT & (segments_BT.roll(back, dims=1) == segments_BT)
            # A compiler fuses `roll` into loops without branches, forward and backward, but not
            # `pad`.
            earlier_BTC = torch.where(is_same_BT[..., None], channels_BTC.roll(back, dims=1), 0.0)
            total_BTC = total_BTC + earlier_BTC * self.weight[:, 0, -1 - back]
        return F.silu(total_BTC)

    def convolve_inputs(self, inputs_BSC: Tensor) -> Tensor:
        """Return the outputs at the last S - K + 1 positions, which are those with all K inputs.

        Args:
            inputs_BSC: consecutive inputs of one document.
        """
        taps = self.weight.shape[-1]
        length = inputs_BSC.shape[1] - taps + 1
        total_BTC = inputs_BSC[:, taps - 1 :] * self.weight[:, 0, -1]
        for back in range(1, taps):
            begin = taps - 1 - back
            total_BTC = (
                total_BTC + inputs_BSC[:, begin : begin + length] * self.weight[:, 0, -1 - back]
            )
        return F.silu(total_BTC)


def document_starts(segments_BT: Tensor | None) -> Tensor | None:
    """Return whether each position begins a document, bool [B, T]; None without segments.

    The first position of a row is False, because no state comes before it that must be dropped.
    """
    if segments_BT is None:
        return None
    return F.pad(segments_BT[:, 1:] != segments_BT[:, :-1], (1, 0))


def _heads_first(tensor: Tensor) -> Tensor:
    """Swap positions and heads, [B, T, H, ...] to [B, H, T, ...]."""
    return tensor.transpose(1, 2)


def initial_values(name: str, uniform: Tensor) -> Tensor:
    """Return the initial values of a parameter of this layer that is not a matrix.

    The decay's parameters are initialised as in Mamba 2 (Dao and Gu, arXiv 2405.21060): A is uniform
    in [1, 16). The steps softplus(dt_bias) are between 0.001 and 0.1, and their logarithms are
    uniform. So some heads remember a few tokens, and others up to a thousand.

    Args:
        name: the parameter's name.
        uniform: random numbers, uniform in [0, 1), of the parameter's shape.
    """
    if name.endswith("A_log"):
        return (1 + 15 * uniform).log()
    if name.endswith("dt_bias"):
        step = (math.log(0.001) + uniform * math.log(100)).exp()
        # The inverse of softplus, so that softplus(dt_bias) is the step.
        return step + (-(-step).expm1()).log()
    if name.endswith("conv1d.weight"):
        return (2 * uniform - 1) / math.sqrt(uniform.shape[-1])
    return torch.ones_like(uniform)  # the factors of the norm
