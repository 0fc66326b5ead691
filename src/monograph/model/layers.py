"""The layers of which a block of the decoder is made: norms, attention, gated feed-forward layers,
mixtures of experts.

Of a mixture's experts a router chooses for each token the few that compute it.

Shape suffixes: B batch, T positions, S cache slots, D hidden size, H query heads, K key-value
heads, E head dimension, F = E / 2; 1 broadcasts. In mixtures: N = B T tokens, E experts, k of them
for each token, P = N k pairs of a token and an expert, I an expert's width.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.graph.experts import Balance, ExpertLinear, Router
from monograph.graph.grouped import permute_rows
from monograph.model.config import LlamaConfig
from monograph.model.families import Family
from monograph.model.rope import CosSin, rotate
from monograph.ops.attention import Heads, Impl, Kernel, Mask, attention
from monograph.ops.rms_norm import rms_norm


class Cache(Protocol):
    """The interface of a key-value cache; slot s holds the key and value of position s."""

    def attend(
        self,
        layer_index: int,
        heads: Heads,
        positions_BT: Tensor,
        window: int | None,
        sink_H: Tensor | None,
    ) -> Tensor:
        """Store new keys and values at their positions; return the queries' attention to the slots
        that they see.
        """
        ...

    def recurrence(self, layer_index: int) -> "Recurrence":
        """Return what a layer without attention has taken of each row."""
        ...


class Recurrence(NamedTuple):
    """A layer's state after the first tokens of each row, changed in place.

    Attributes:
        inputs_BKC: the last inputs of the convolution, the newest last.
        state_BHEV: the state of the delta rule.
        count_B: how many tokens were taken, int64.
        limit_B: how many may be taken, int64.
    """

    inputs_BKC: Tensor
    state_BHEV: Tensor
    count_B: Tensor
    limit_B: Tensor


class LayerCache(NamedTuple):
    """One block's view of a cache: its layer, the positions of the pass's tokens, and the block's
    window.
    """

    cache: Cache
    layer_index: int
    positions_BT: Tensor
    window: int | None


class Linear(nn.Linear):
    """A linear layer without initial weights, which `Llama` draws."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is: nn.Linear's own method would advance the global random state."""


class RMSNorm(nn.Module):
    """A layer that applies `rms_norm` with a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise over the last axis."""
        return rms_norm(hidden, self.weight, self.eps)


class Scale(nn.Module):
    """A layer that multiplies by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden: Tensor) -> Tensor:
        """Return factor * hidden."""
        return hidden * self.factor


def scale(factor: float) -> nn.Module:
    """Return a layer that multiplies by a number, or one that does nothing if that is 1."""
    return nn.Identity() if factor == 1 else Scale(factor)


class CentredRMSNorm(RMSNorm):
    """A layer that applies `rms_norm` with 1 + its weight."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise over the last axis."""
        return rms_norm(hidden, 1 + self.weight, self.eps)


def norm_of(config: LlamaConfig, size: int) -> RMSNorm:
    """Return a norm of the model's family."""
    return (CentredRMSNorm if config.family.centred else RMSNorm)(size, config.rms_norm_eps)


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions, and further parts if the family has them.

    These are biases, and norms, gates and sinks of heads. With gates, the query projection has a
    gate for each of a head's channels after the head.
    """

    siblings = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        super().__init__()
        query, key_value = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        bias = config.attention_bias or config.family.qkv_bias
        self.gated = config.family.gated
        self.q_proj = Linear(config.hidden_size, query * (1 + self.gated), bias=bias)
        self.k_proj = Linear(config.hidden_size, key_value, bias=bias)
        self.v_proj = Linear(config.hidden_size, key_value, bias=bias)
        self.o_proj = Linear(query, config.hidden_size, bias=config.attention_bias)
        self.norms_all = config.family.qk_norm == "all"
        self.q_norm, self.k_norm = (
            norm_of(config, width if self.norms_all else config.head_dim)
            if config.family.qk_norm
            else nn.Identity()
            for width in (query, key_value)
        )
        self.sinks = (
            nn.Parameter(torch.empty(config.num_attention_heads)) if config.family.sinks else None
        )
        self.clip = config.clip_qkv
        self.scale = scale(config.query_scale)
        self.head_dim = config.head_dim
        self.impl = impl
        self.kernel: Kernel = "torch"
        self.device_type = ""

    def forward(
        self,
        hidden_BTD: Tensor,
        cos_sin_B1TF: CosSin | None,
        mask: Mask,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return o_proj(attention(rotate(q_norm(q_proj x)), rotate(k_norm(k_proj x)), v_proj x)).

        Norms are per head or over all heads; without cosines and sines nothing is rotated. With
        gates, attention's result is multiplied by sigmoid(gate x).
        """
        query_BTX = self.q_proj(hidden_BTD)
        key_BTX = self.k_proj(hidden_BTD)
        value_BTX = self.v_proj(hidden_BTD)
        if self.gated:
            pair_BTH2E = query_BTX.unflatten(-1, (-1, 2, self.head_dim))
            query_BTX, gate_BTX = (each_BTHE.flatten(2) for each_BTHE in pair_BTH2E.unbind(-2))
        if self.norms_all:
            query_BTX = self.q_norm(query_BTX)
            key_BTX = self.k_norm(key_BTX)
        if self.clip is not None:
            query_BTX, key_BTX, value_BTX = (
                each_BTX.clamp(-self.clip, self.clip)
                for each_BTX in (query_BTX, key_BTX, value_BTX)
            )
        query_BHTE, key_BKTE, value_BKTE = (
            each_BTX.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for each_BTX in (query_BTX, key_BTX, value_BTX)
        )
        if not self.norms_all:
            query_BHTE = self.q_norm(query_BHTE)
            key_BKTE = self.k_norm(key_BKTE)
        if cos_sin_B1TF is not None:
            query_BHTE = rotate(query_BHTE, cos_sin_B1TF, self.device_type)
            key_BKTE = rotate(key_BKTE, cos_sin_B1TF, self.device_type)
        heads = self.scale(query_BHTE), key_BKTE, value_BKTE
        if cache is None:
            mixed_BHTE = attention(*heads, mask, self.impl, self.kernel, self.sinks)
        else:
            mixed_BHTE = cache.cache.attend(
                cache.layer_index, heads, cache.positions_BT, cache.window, self.sinks
            )
        mixed_BTX = mixed_BHTE.transpose(1, 2).flatten(2)
        return self.o_proj(mixed_BTX * gate_BTX.sigmoid() if self.gated else mixed_BTX)


ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}
STEEPNESS, LIMIT = 1.702, 7.0  # of gpt-oss


def gating(family: Family) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what combines the two projections of a gated layer, gate and up: act(gate) * up, or
    gpt-oss' way.
    """
    return (
        _clamped if family.clamped else functools.partial(_gated, ACTIVATIONS[family.activation[1]])
    )


def _gated(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return act(gate) * up


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    """Return g sigmoid(1.702 g) (u + 1) with g = min(gate, 7) and u = max(-7, min(up, 7))."""
    gate = gate.clamp(max=LIMIT)
    up = up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * (gate * STEEPNESS).sigmoid())


class MLP(nn.Module):
    """A gated layer, down(act(gate x) * up x) (Shazeer, "GLU Variants Improve Transformer", arXiv
    2002.05202).
    """

    siblings = ("gate_proj", "up_proj")

    def __init__(self, config: LlamaConfig, inner: str = "intermediate_size") -> None:
        super().__init__()
        width = getattr(config, inner)
        self.gate_proj = Linear(config.hidden_size, width, bias=False)
        self.up_proj = Linear(config.hidden_size, width, bias=False)
        self.down_proj = Linear(width, config.hidden_size, bias=False)
        self.combine = gating(config.family)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        return self.down_proj(self.combine(self.gate_proj(hidden_BTD), self.up_proj(hidden_BTD)))


Way = Literal["dense", "grouped"]
SHARED = "shared_expert_intermediate_size"


class Experts(nn.Module):
    """E gated layers, and the weighted sum of those that a token's router chose.

    y = sum over a token's experts e of w_e down_e(act(gate_e x) * up_e x)

    Where the family has biases, each expert's projections do, and the gating may be another one
    (`gating`).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = getattr(config, config.family.experts)
        experts = config.num_experts
        bias = config.family.expert_bias
        self.gate_proj = ExpertLinear(experts, config.hidden_size, width, bias)
        self.up_proj = ExpertLinear(experts, config.hidden_size, width, bias)
        self.down_proj = ExpertLinear(experts, width, config.hidden_size, bias)
        self.combine = gating(config.family)

    def _gated(self, input: Tensor, ends_E: Tensor | None) -> Tensor:
        return self.down_proj(
            self.combine(self.gate_proj(input, ends_E), self.up_proj(input, ends_E)), ends_E
        )

    def dense(self, hidden_ND: Tensor, experts_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """Return y, [N, D]: every expert computes every token, with the weight 0 unless it was
        chosen.
        """
        weights_NE = weights_Nk.new_zeros(len(hidden_ND), self.gate_proj.experts).scatter(
            1, experts_Nk, weights_Nk
        )
        return (self._gated(hidden_ND, None) * weights_NE.T[..., None]).sum(0).to(hidden_ND.dtype)

    def grouped(self, hidden_ND: Tensor, experts_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """Return y, [N, D], from products of the pairs of a token and an expert, sorted by expert.

        All shapes are those of N k pairs, however they are shared out, and the host reads nothing.
        """
        expert_P = experts_Nk.flatten()
        count = experts_Nk.shape[1]
        order_P = expert_P.argsort(stable=True)
        inverse_P = order_P.argsort()
        numbers_E1 = torch.arange(self.gate_proj.experts, device=expert_P.device)[:, None]
        ends_E = (expert_P <= numbers_E1).sum(-1, dtype=torch.int32)
        pairs_PD = hidden_ND[:, None].expand(-1, count, -1).flatten(0, 1)
        out_PD = self._gated(permute_rows(pairs_PD, order_P, inverse_P), ends_E)
        out_NkD = permute_rows(out_PD, inverse_P, order_P).unflatten(0, (-1, count))
        return (out_NkD * weights_Nk[..., None]).sum(1).to(hidden_ND.dtype)


class Mixture(nn.Module):
    """A feed-forward layer of experts, as in Shazeer et al. 2017, arXiv 1701.06538.

    Some families add a shared expert, which computes every token and is multiplied by a gate of its
    own.

    Attributes:
        way: "grouped" computes only the chosen experts; "dense" is the equation, in which every
            expert computes every token.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        sizes = config.num_experts, config.hidden_size, config.num_experts_per_tok
        self.gate = Router(*sizes, config.norm_topk_prob, config.family.expert_bias)
        self.experts = Experts(config)
        self.shares = SHARED in config.family.keys
        if self.shares:
            self.shared_expert = MLP(config, SHARED)
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)
        self.way: Way = "grouped"

    def forward(self, hidden_BTD: Tensor, balance: Balance | None = None) -> Tensor:
        """Map [B, T, D] to [B, T, D]; with a `balance` the router's gradient has that of the
        balance, too.
        """
        hidden_ND = hidden_BTD.flatten(0, -2)
        experts_Nk, weights_Nk = self.gate(hidden_ND, balance)
        way = self.experts.grouped if self.way == "grouped" else self.experts.dense
        mixed_BTD = way(hidden_ND, experts_Nk, weights_Nk).view(hidden_BTD.shape)
        if not self.shares:
            return mixed_BTD
        return mixed_BTD + self.shared_expert_gate(hidden_BTD).sigmoid() * self.shared_expert(
            hidden_BTD
        )
