"""A feed-forward layer of experts: for each token, a router chooses a few of them.

Shape suffixes: B batch, T positions, D hidden size, N = B T tokens, E experts, k experts of a token,
P = N k pairs of a token and an expert; 1 an axis of length 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from monograph.errors import InputRefused
from monograph.graph.balance import Balance
from monograph.graph.experts import ExpertLinear, Router
from monograph.graph.grouped import permute_rows
from monograph.model.config import LlamaConfig
from monograph.model.families import LlamaCppSupport
from monograph.model.feed_forward import FeedForward
from monograph.model.layers import MLP, Linear, gating
from monograph.model.mixer import USE_HF

if TYPE_CHECKING:
    from gguf import GGUFWriter

# llama.cpp's names of the parts of a mixture. `_LLAMA_CPP_NAMES` has them by their names in a block.
_ROUTER = "ffn_gate_inp"
_SHARED_GATE = "ffn_gate_inp_shexp"
_LLAMA_CPP_NAMES = {
    "mlp.gate": _ROUTER,
    "mlp.router": _ROUTER,
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": _SHARED_GATE,
}
MixtureImpl = Literal["dense", "grouped"]
SHARED_WIDTH_KEY = "shared_expert_intermediate_size"


class Experts(nn.Module):
    """E gated layers, the experts. A token's result is a weighted sum over the k that a router chose for it.

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
        """Return the outputs of the experts.

        Args:
            input: the rows, [rows, D]. With `ends_E` they are sorted by expert.
            ends_E: the index of the row after each expert's last one; None: every expert computes all
                rows.

        Returns:
            [rows, D]; without `ends_E` [E, rows, D].
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
        inverse_P = order_P.argsort()  # `permute_rows` takes both orders, one for its backward pass
        # The end of the pairs of expert e in the sorted order is the number of pairs of experts 0 to e.
        numbers_E1 = torch.arange(self.gate_proj.experts, device=expert_P.device)[:, None]
        ends_E = (expert_P <= numbers_E1).sum(-1, dtype=torch.int32)
        pairs_PD = hidden_ND[:, None].expand(-1, experts_per_token, -1).flatten(0, 1)
        sorted_PD = permute_rows(pairs_PD, order_P, inverse_P)
        sorted_out_PD = self._expert_outputs(sorted_PD, ends_E)
        out_PD = permute_rows(sorted_out_PD, inverse_P, order_P)
        out_NkD = out_PD.unflatten(0, (-1, experts_per_token))
        return (out_NkD * weights_Nk[..., None]).sum(1).to(hidden_ND.dtype)


class Mixture(FeedForward):
    """A feed-forward layer of experts: for each token, a router chooses k of them.

    Some families add a shared expert, which computes every token. In most of them its output is
    multiplied by its own gate.

    Source: Shazeer et al. 2017, arXiv 1701.06538.

    Attributes:
        impl: "grouped" computes only the chosen experts. "dense" is the reference: every expert
            computes every token.
    """

    has_balance = True
    llama_cpp_names = MappingProxyType(_LLAMA_CPP_NAMES)
    llama_cpp_vectors = (_SHARED_GATE,)
    llama_cpp_fp32 = (f"{_ROUTER}.weight",)

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        sizes = config.num_experts, config.hidden_size, config.num_experts_per_tok
        self.gate = Router(*sizes, config.norm_topk_prob, config.family.expert_bias)
        self.experts = Experts(config)
        self.has_shared_expert = SHARED_WIDTH_KEY in config.family.optional_keys
        if self.has_shared_expert:
            self.shared_expert = MLP(config, SHARED_WIDTH_KEY)
            self.shared_expert_gate = (
                Linear(config.hidden_size, 1, bias=False)
                if config.family.gated_shared_expert
                else None
            )
        self.impl: MixtureImpl = "grouped"

    def forward(self, hidden_BTD: Tensor, balance: Balance | None = None) -> Tensor:
        """Map [B, T, D] to [B, T, D].

        With a `balance`, the backward pass adds the gradient of the balance loss to the gradient of
        the router's probabilities (`monograph.graph.balance`).
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
        shared_BTD = self.shared_expert(hidden_BTD)
        if self.shared_expert_gate is None:
            return mixed_BTD + shared_BTD
        gate_BT1 = self.shared_expert_gate(hidden_BTD).sigmoid()
        return mixed_BTD + gate_BT1 * shared_BTD

    @classmethod
    def inner_numbers(cls, config: LlamaConfig) -> int:
        """Return the sum of the widths of the experts that compute a token."""
        expert_width: int = getattr(config, config.family.expert_width_key)
        return config.num_experts_per_tok * expert_width

    @classmethod
    def routed_numbers(cls, config: LlamaConfig, number_bytes: int) -> int:
        """Return how many numbers per token a mixture keeps, apart from its inner channels.

        For each expert of a token, these are a copy of the token's input and the expert's output. The
        router's probabilities are added. They are fp32, and count as the numbers of the compute dtype that
        take the same bytes.
        """
        pairs = 2 * config.num_experts_per_tok * config.hidden_size
        return pairs + config.num_experts * 4 // number_bytes

    @classmethod
    def active_matrices(cls, config: LlamaConfig, name: str, matrices: int) -> int:
        """Return the number of a token's experts for a parameter of all experts."""
        return config.num_experts_per_tok if ".experts." in name else matrices

    @classmethod
    def require_llama_cpp(cls, config: LlamaConfig, support: LlamaCppSupport) -> None:
        """Refuse mixtures that llama.cpp computes differently or does not load."""
        # llama.cpp computes the family with these values, and does not read them from the file.
        computed = {
            "norm_topk_prob": support.norm_topk_prob,
            "mlp_only_layers": (),
            "clip_qkv": None,
        }
        if config.family.expert_bias:
            computed["attention_bias"] = True
        if config.family.head_dim_is_derived:
            computed["num_key_value_heads"] = config.num_attention_heads
        for key, computed_value in computed.items():
            value = getattr(config, key)
            if value != computed_value:
                raise InputRefused(
                    f"{key} = {value}: llama.cpp computes {config.model_type} with {computed_value}{USE_HF}"
                )

    @classmethod
    def llama_cpp_row_lengths(cls, config: LlamaConfig) -> Mapping[str, int]:
        """Return the widths of the experts and of the shared expert, which is 0 without one."""
        keys = (config.family.expert_width_key, SHARED_WIDTH_KEY)
        return {key: getattr(config, key) for key in keys}

    @classmethod
    def add_llama_cpp_sizes(cls, writer: GGUFWriter, config: LlamaConfig) -> None:
        """Add how many experts there are, how many compute a token, and how wide they are."""
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, config.family.expert_width_key))
        if config.shared_expert_intermediate_size:
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
