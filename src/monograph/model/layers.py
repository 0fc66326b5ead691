"""The layers in a block of the decoder: norms, attention, gated feed-forward layers, and mixtures of
experts.

Shape suffixes: B batch, T positions, D hidden size, H query heads, K key-value heads, E head
dimension, F rotated pairs of a head, X any number of channels; 1 broadcasts. Some letters stand for
other sizes in two places. In mixtures: N = B T tokens, E experts, k experts of a token, P = N k pairs
of a token and an expert. In `Recurrence`: H value heads, K taps of the convolution, C its channels,
E key dimension, V value dimension.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.graph.balance import Balance
from monograph.graph.experts import ExpertLinear, Router
from monograph.graph.grouped import permute_rows
from monograph.model.config import LlamaConfig
from monograph.model.families import Family
from monograph.model.rope import CosSin, rotate
from monograph.ops.attention import AttentionKernel, Heads, Impl, Mask, attention
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
        """Store new keys and values at their positions, and return the attention of the queries.

        Args:
            layer_index: the layer.
            heads: the queries, keys and values of the new tokens.
            positions_BT: the new tokens' positions.
            window: number of positions that a query sees, its own the last of them; None: it sees
                all positions up to its own.
            sink_H: the heads' sinks; None: the family has none.
        """
        ...

    def recurrence(self, layer_index: int) -> "Recurrence":
        """Return the state of a layer that is a delta net. The layer changes it in place."""
        ...


class Recurrence(NamedTuple):
    """The state of a delta net after some tokens of each row.

    Attributes:
        inputs_BKC: the last K inputs of the convolution, the newest last.
        state_BHEV: the state of the delta rule.
        count_B: number of tokens that the state includes, int64.
        limit_B: largest number of tokens that it may include, int64.
    """

    inputs_BKC: Tensor
    state_BHEV: Tensor
    count_B: Tensor
    limit_B: Tensor


class LayerCache(NamedTuple):
    """One block's view of a cache.

    Attributes:
        cache: the cache of all layers.
        layer_index: the block's layer.
        positions_BT: the positions of the pass's tokens.
        window: the block's window; None: a query sees all positions up to its own.
    """

    cache: Cache
    layer_index: int
    positions_BT: Tensor
    window: int | None


class Linear(nn.Linear):
    """A linear layer whose weights `Llama` initialises."""

    def reset_parameters(self) -> None:
        """Do nothing, because nn.Linear's own method would advance the global random state."""


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


def make_scale(factor: float) -> nn.Module:
    """Return a layer that multiplies by `factor`; the identity if the factor is 1."""
    return nn.Identity() if factor == 1 else Scale(factor)


class CentredRMSNorm(RMSNorm):
    """A layer that applies `rms_norm` with 1 + its weight, so that weights are centred at 0."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise over the last axis."""
        return rms_norm(hidden, 1 + self.weight, self.eps)


def make_norm(config: LlamaConfig, size: int) -> RMSNorm:
    """Return a norm over `size` channels, of the class that the model's family has."""
    norm_class = CentredRMSNorm if config.family.centred_norms else RMSNorm
    return norm_class(size, config.rms_norm_eps)


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions.

    Some families also have biases, norms of queries and keys, gates, or sinks. With gates, the
    query projection gives for each head its query and then its gate, which have the same width.
    """

    # The projections of the same input, which `monograph.graph.siblings` can fuse.

    siblings = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        super().__init__()
        query_width = config.num_attention_heads * config.head_dim
        key_value_width = config.num_key_value_heads * config.head_dim
        qkv_bias = config.attention_bias or config.family.qkv_bias
        self.is_gated = config.family.gated_attention
        query_and_gate_width = 2 * query_width if self.is_gated else query_width
        self.q_proj = Linear(config.hidden_size, query_and_gate_width, bias=qkv_bias)
        self.k_proj = Linear(config.hidden_size, key_value_width, bias=qkv_bias)
        self.v_proj = Linear(config.hidden_size, key_value_width, bias=qkv_bias)
        self.o_proj = Linear(query_width, config.hidden_size, bias=config.attention_bias)
        # Whether queries and keys are normalised over all heads together, and not over each head.
        self.norms_over_all_heads = config.family.qk_norm == "all"
        self.q_norm: nn.Module
        self.k_norm: nn.Module
        if self.norms_over_all_heads:
            self.q_norm = make_norm(config, query_width)
            self.k_norm = make_norm(config, key_value_width)
        elif config.family.qk_norm == "heads":
            self.q_norm = make_norm(config, config.head_dim)
            self.k_norm = make_norm(config, config.head_dim)
        else:
            self.q_norm = nn.Identity()
            self.k_norm = nn.Identity()
        self.sinks = (
            nn.Parameter(torch.empty(config.num_attention_heads))
            if config.family.attention_sinks
            else None
        )
        self.clip = config.clip_qkv
        self.scale_query = make_scale(config.query_scale)
        self.head_dim = config.head_dim
        self.impl = impl
        self.kernel: AttentionKernel = "torch"
        # The type of the device whose operators `rotate` uses; "": that of the input.
        self.device_type = ""

    def forward(
        self,
        hidden_BTD: Tensor,
        cos_sin_B1TF: CosSin | None,
        mask: Mask,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return o_proj(attention(rotate(q_norm(q_proj x)), rotate(k_norm(k_proj x)), v_proj x)).

        With gates, attention's result is multiplied by sigmoid(gate) before o_proj.

        Args:
            hidden_BTD: x.
            cos_sin_B1TF: cosine and sine of the positions; None: queries and keys are not rotated.
            mask: see `monograph.model.llama.attention_mask`; not read with a cache.
            cache: the block's view of a cache; None: the pass has no cache.
        """
        query_BTX = self.q_proj(hidden_BTD)
        key_BTX = self.k_proj(hidden_BTD)
        value_BTX = self.v_proj(hidden_BTD)
        if self.is_gated:
            query_and_gate_BTH2E = query_BTX.unflatten(-1, (-1, 2, self.head_dim))
            query_BTX, gate_BTX = (
                part_BTHE.flatten(2) for part_BTHE in query_and_gate_BTH2E.unbind(-2)
            )
        if self.norms_over_all_heads:
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
        if not self.norms_over_all_heads:
            query_BHTE = self.q_norm(query_BHTE)
            key_BKTE = self.k_norm(key_BKTE)
        if cos_sin_B1TF is not None:
            # What is computed in between is fused with a rotation by operators.
            of_product = isinstance(self.q_norm, nn.Identity) and self.clip is None
            query_BHTE = rotate(query_BHTE, cos_sin_B1TF, self.device_type, of_product=of_product)
            key_BKTE = rotate(key_BKTE, cos_sin_B1TF, self.device_type, of_product=of_product)
        heads = self.scale_query(query_BHTE), key_BKTE, value_BKTE
        if cache is None:
            mixed_BHTE = attention(*heads, mask, self.impl, self.kernel, self.sinks)
        else:
            mixed_BHTE = cache.cache.attend(
                cache.layer_index, heads, cache.positions_BT, cache.window, self.sinks
            )
        mixed_BTX = mixed_BHTE.transpose(1, 2).flatten(2)
        if self.is_gated:
            mixed_BTX = mixed_BTX * gate_BTX.sigmoid()
        return self.o_proj(mixed_BTX)


ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}
# The constants of gpt-oss' gating (`_clamped_gating`).
_STEEPNESS = 1.702
_LIMIT = 7.0


def gating(family: Family) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function with which a family's gated layers combine their projections gate and up.

    It is act(gate) * up, except in gpt-oss (`_clamped_gating`).
    """
    if family.clamped_gating:
        return _clamped_gating
    _, activation = family.activation
    return functools.partial(_activation_gating, ACTIVATIONS[activation])


def _activation_gating(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return act(gate) * up


def _clamped_gating(gate: Tensor, up: Tensor) -> Tensor:
    """Return g sigmoid(1.702 g) (u + 1) with g = min(gate, 7) and u = max(-7, min(up, 7))."""
    gate = gate.clamp(max=_LIMIT)
    up = up.clamp(-_LIMIT, _LIMIT)
    return (up + 1) * (gate * (gate * _STEEPNESS).sigmoid())


class MLP(nn.Module):
    """A gated layer, down(act(gate x) * up x).

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.

    Args:
        config: the shape of the model.
        width_key: the key of `config` that is the layer's inner width.
    """

    siblings = ("gate_proj", "up_proj")

    def __init__(self, config: LlamaConfig, width_key: str = "intermediate_size") -> None:
        super().__init__()
        width = getattr(config, width_key)
        self.gate_proj = Linear(config.hidden_size, width, bias=False)
        self.up_proj = Linear(config.hidden_size, width, bias=False)
        self.down_proj = Linear(width, config.hidden_size, bias=False)
        self.combine = gating(config.family)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        return self.down_proj(self.combine(self.gate_proj(hidden_BTD), self.up_proj(hidden_BTD)))


MixtureImpl = Literal["dense", "grouped"]
SHARED_WIDTH_KEY = "shared_expert_intermediate_size"


class Experts(nn.Module):
    """E gated layers, and the weighted sum of the k of them that a router chose for each token.

        y = sum over a token's experts e of w_e down_e(act(gate_e x) * up_e x)

    Some families have biases in the projections, or combine gate and up differently (`gating`).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = getattr(config, config.family.expert_width_key)
        experts = config.num_experts
        bias = config.family.expert_bias
        self.gate_proj = ExpertLinear(experts, config.hidden_size, width, bias)
        self.up_proj = ExpertLinear(experts, config.hidden_size, width, bias)
        self.down_proj = ExpertLinear(experts, width, config.hidden_size, bias)
        self.combine = gating(config.family)

    def _expert_outputs(self, input: Tensor, ends_E: Tensor | None) -> Tensor:
        """Return the output of each expert for its rows of the input, or for all rows.

        Args:
            input: the rows, sorted by expert; or, if every expert computes all rows, in any order.
            ends_E: the index after each expert's last row; None: every expert computes all rows.
        """
        inner = self.combine(self.gate_proj(input, ends_E), self.up_proj(input, ends_E))
        return self.down_proj(inner, ends_E)

    def dense(self, hidden_ND: Tensor, experts_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """Return y, [N, D], where every expert computes every token.

        The weights of experts that were not chosen are 0.
        """
        zeros_NE = weights_Nk.new_zeros(len(hidden_ND), self.gate_proj.experts)
        weights_NE = zeros_NE.scatter(1, experts_Nk, weights_Nk)
        outputs_END = self._expert_outputs(hidden_ND, None)
        return (outputs_END * weights_NE.T[..., None]).sum(0).to(hidden_ND.dtype)

    def grouped(self, hidden_ND: Tensor, experts_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """Return y, [N, D], where each expert computes only the tokens that chose it.

        The pairs of a token and an expert are sorted by expert. Shapes depend only on the number of
        pairs and not on how many pairs each expert has, so the host does not wait for the device.
        """
        experts_per_token = experts_Nk.shape[1]
        expert_P = experts_Nk.flatten()
        order_P = expert_P.argsort(stable=True)
        inverse_P = order_P.argsort()
        # An expert's last pair comes after all pairs of the experts up to it.
        numbers_E1 = torch.arange(self.gate_proj.experts, device=expert_P.device)[:, None]
        ends_E = (expert_P <= numbers_E1).sum(-1, dtype=torch.int32)
        pairs_PD = hidden_ND[:, None].expand(-1, experts_per_token, -1).flatten(0, 1)
        sorted_out_PD = self._expert_outputs(permute_rows(pairs_PD, order_P, inverse_P), ends_E)
        out_NkD = permute_rows(sorted_out_PD, inverse_P, order_P).unflatten(
            0, (-1, experts_per_token)
        )
        return (out_NkD * weights_Nk[..., None]).sum(1).to(hidden_ND.dtype)


class Mixture(nn.Module):
    """A feed-forward layer of experts, of which a router chooses k for each token.

    Some families add a shared expert, which computes every token and whose output is multiplied by
    its own gate.

    Source: Shazeer et al. 2017, arXiv 1701.06538.

    Attributes:
        impl: "grouped" computes only the chosen experts; "dense" is the reference, in which every
            expert computes every token.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        sizes = config.num_experts, config.hidden_size, config.num_experts_per_tok
        self.gate = Router(*sizes, config.norm_topk_prob, config.family.expert_bias)
        self.experts = Experts(config)
        self.has_shared_expert = SHARED_WIDTH_KEY in config.family.optional_keys
        if self.has_shared_expert:
            self.shared_expert = MLP(config, SHARED_WIDTH_KEY)
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)
        self.impl: MixtureImpl = "grouped"

    def forward(self, hidden_BTD: Tensor, balance: Balance | None = None) -> Tensor:
        """Map [B, T, D] to [B, T, D].

        With a `balance`, the backward pass adds the gradient of the balance to the router's.
        """
        hidden_ND = hidden_BTD.flatten(0, -2)
        experts_Nk, weights_Nk = self.gate(hidden_ND, balance)
        if self.impl == "grouped":
            mixed_ND = self.experts.grouped(hidden_ND, experts_Nk, weights_Nk)
        else:
            mixed_ND = self.experts.dense(hidden_ND, experts_Nk, weights_Nk)
        mixed_BTD = mixed_ND.view(hidden_BTD.shape)
        if not self.has_shared_expert:
            return mixed_BTD
        gate_BT1 = self.shared_expert_gate(hidden_BTD).sigmoid()
        return mixed_BTD + gate_BT1 * self.shared_expert(hidden_BTD)
