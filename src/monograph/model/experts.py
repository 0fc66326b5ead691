"""Mixtures of experts: a router chooses for each token the few experts that compute it.

Shapes: B batch, T positions, N = B T tokens, D hidden size, E experts, k of them for each token, P = N k pairs of a
token and an expert, I an expert's width.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from monograph.graph.balance import Balance
from monograph.graph.experts import ExpertLinear, Router
from monograph.graph.grouped import rearranged
from monograph.model.config import LlamaConfig
from monograph.model.layers import MLP, Linear, gating

Way = Literal["dense", "grouped"]
SHARED = "shared_expert_intermediate_size"


class Experts(nn.Module):
    """E gated layers, and the weighted sum of those that a token's router chose.

    y = sum over a token's experts e of w_e down_e(act(gate_e x) * up_e x)

    Where the family has biases, each expert's projections do, and the gating may be another one (`gating`).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, experts = getattr(config, config.family.experts), config.num_experts
        bias = config.family.expert_bias
        self.gate_proj = ExpertLinear(experts, config.hidden_size, width, bias)
        self.up_proj = ExpertLinear(experts, config.hidden_size, width, bias)
        self.down_proj = ExpertLinear(experts, width, config.hidden_size, bias)
        self.combine = gating(config.family)

    def _gated(self, input: Tensor, ends_E: Tensor | None) -> Tensor:
        return self.down_proj(self.combine(self.gate_proj(input, ends_E), self.up_proj(input, ends_E)), ends_E)

    def dense(self, hidden_ND: Tensor, experts_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """Return y, [N, D]: every expert computes every token, with the weight 0 unless it was chosen."""
        weights_NE = weights_Nk.new_zeros(len(hidden_ND), self.gate_proj.experts).scatter(1, experts_Nk, weights_Nk)
        return (self._gated(hidden_ND, None) * weights_NE.T[..., None]).sum(0).to(hidden_ND.dtype)

    def grouped(self, hidden_ND: Tensor, experts_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """Return y, [N, D], from products of the pairs of a token and an expert, sorted by expert.

        All shapes are those of N k pairs, however they are shared out, and the host reads nothing.
        """
        expert_P, count = experts_Nk.flatten(), experts_Nk.shape[1]
        order_P = expert_P.argsort(stable=True)
        inverse_P = order_P.argsort()
        numbers_E1 = torch.arange(self.gate_proj.experts, device=expert_P.device)[:, None]
        ends_E = (expert_P <= numbers_E1).sum(-1, dtype=torch.int32)
        pairs_PD = hidden_ND[:, None].expand(-1, count, -1).flatten(0, 1)
        out_PD = self._gated(rearranged(pairs_PD, order_P, inverse_P), ends_E)
        out_NkD = rearranged(out_PD, inverse_P, order_P).unflatten(0, (-1, count))
        return (out_NkD * weights_Nk[..., None]).sum(1).to(hidden_ND.dtype)


class Mixture(nn.Module):
    """A feed-forward layer of experts, as in Shazeer et al. 2017, arXiv 1701.06538.

    Some families add a shared expert, which computes every token and is multiplied by a gate of its own.

    Attributes:
        way: "grouped" computes only the chosen experts; "dense" is the equation, in which every expert computes every
            token.
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
        """Map [B, T, D] to [B, T, D]; with a `balance` the router's gradient has that of the balance, too."""
        hidden_ND = hidden_BTD.flatten(0, -2)
        experts_Nk, weights_Nk = self.gate(hidden_ND, balance)
        way = self.experts.grouped if self.way == "grouped" else self.experts.dense
        mixed_BTD = way(hidden_ND, experts_Nk, weights_Nk).view(hidden_BTD.shape)
        if not self.shares:
            return mixed_BTD
        return mixed_BTD + self.shared_expert_gate(hidden_BTD).sigmoid() * self.shared_expert(hidden_BTD)
