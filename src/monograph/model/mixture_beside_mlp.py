"""A mixture of experts beside a gated layer, as in the Gemma 4 26B-A4B: both compute every token.

With the residual stream x, four norms n_1 .. n_4 and the experts of a token e,

    y = n_2(mlp(n_1 x)) + n_4(sum over e of w_e expert_e(n_3 x))

The router reads x itself, not a normed x: with s [D], the weights W [E, D] and c [E],

    p = softmax(W (x / rms(x) * s / sqrt(D)))
    w_e = c_e p_e / (sum of p over the token's experts)

So the layer has its norms itself, and a block gives it the residual stream.

Shape suffixes: B batch, T positions, D hidden size, N = B T tokens, E experts, k experts of a token.
Source: transformers' modeling_gemma4.py (`Gemma4TextRouter`, `Gemma4TextDecoderLayer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from monograph.graph.balance import Balance
from monograph.graph.experts import Router
from monograph.model.config import LlamaConfig
from monograph.model.layers import MLP, UnweightedRMSNorm, make_norm
from monograph.model.mixture import Experts, Mixture, MixtureImpl

if TYPE_CHECKING:
    from gguf import GGUFWriter


class ScaledRouter(nn.Module):
    """Choose k experts for each token from its normed and scaled x, and weight them.

    Attributes:
        norm: divides x by its root mean square.
        scale: s, [D].
        proj: the router of the scaled x, with W.
        per_expert_scale: c, [E].
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = UnweightedRMSNorm(config.rms_norm_eps)
        self.scale = nn.Parameter(torch.empty(config.hidden_size))
        sizes = config.num_experts, config.hidden_size, config.num_experts_per_tok
        self.proj = Router(*sizes, config.norm_topk_prob)
        self.per_expert_scale = nn.Parameter(torch.empty(config.num_experts))
        self.factor = config.hidden_size**-0.5

    def forward(self, hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts, [N, k] int64, and their weights, [N, k]."""
        scaled_ND = self.norm(hidden_ND) * self.scale * self.factor
        # s stays in fp32 where matrices are in 16 bits, and would widen the product.
        experts_Nk, weights_Nk = self.proj(scaled_ND.to(hidden_ND.dtype))
        return experts_Nk, weights_Nk * self.per_expert_scale[experts_Nk]


class MixtureBesideMLP(MLP):
    """A gated layer and a mixture of experts, whose normed outputs are added.

    Attributes:
        impl: how the experts are computed, as that of `Mixture`.
    """

    norms_its_input = True
    # A file of adapters would have no names for those of experts.
    gguf_adapters = False
    llama_cpp_names = MappingProxyType(
        {
            **MLP.llama_cpp_names,
            "mlp.pre_feedforward_layernorm": "ffn_norm",
            "mlp.post_feedforward_layernorm_1": "post_ffw_norm_1",
            "mlp.pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "mlp.post_feedforward_layernorm_2": "post_ffw_norm_2",
            "mlp.router": "ffn_gate_inp",
            "mlp.router.proj": "ffn_gate_inp",
            "mlp.router.per_expert_scale": "ffn_down_exps",
            "mlp.experts.gate_proj": "ffn_gate_exps",
            "mlp.experts.up_proj": "ffn_up_exps",
            "mlp.experts.down_proj": "ffn_down_exps",
        }
    )
    llama_cpp_fp32: ClassVar[tuple[str, ...]] = ("ffn_gate_inp.weight",)

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.pre_feedforward_layernorm = make_norm(config, config.hidden_size)
        self.post_feedforward_layernorm_1 = make_norm(config, config.hidden_size)
        self.pre_feedforward_layernorm_2 = make_norm(config, config.hidden_size)
        self.post_feedforward_layernorm_2 = make_norm(config, config.hidden_size)
        self.router = ScaledRouter(config)
        self.experts = Experts(config)
        self.impl: MixtureImpl = "grouped"

    def forward(self, hidden_BTD: Tensor, balance: Balance | None = None) -> Tensor:
        """Map the residual stream, [B, T, D], to y, [B, T, D].

        `balance` is not read: the family has no key for a loss of uneven use.
        """
        gated_BTD = super().forward(self.pre_feedforward_layernorm(hidden_BTD))
        hidden_ND = hidden_BTD.flatten(0, -2)
        experts_Nk, weights_Nk = self.router(hidden_ND)
        normed_ND = self.pre_feedforward_layernorm_2(hidden_ND)
        if self.impl == "grouped":
            mixed_ND = self.experts.grouped(normed_ND, experts_Nk, weights_Nk)
        else:
            mixed_ND = self.experts.dense(normed_ND, experts_Nk, weights_Nk)
        mixed_BTD = mixed_ND.view(hidden_BTD.shape)
        return self.post_feedforward_layernorm_1(gated_BTD) + self.post_feedforward_layernorm_2(
            mixed_BTD
        )

    @classmethod
    def inner_numbers(cls, config: LlamaConfig) -> int:
        """Return the width of the gated layer and of a token's experts together."""
        return MLP.inner_numbers(config) + Mixture.inner_numbers(config)

    @classmethod
    def routed_numbers(cls, config: LlamaConfig, number_bytes: int) -> int:
        """Return the numbers per token that the mixture keeps (`Mixture.routed_numbers`), with the inputs
        of the experts and of the router, and what the two norms of outputs read.
        """
        of_norms = 4 * config.hidden_size
        return Mixture.routed_numbers(config, number_bytes) + of_norms

    @classmethod
    def active_matrices(cls, config: LlamaConfig, name: str, matrices: int) -> int:
        """Return the number of a token's experts for a parameter of all experts."""
        return Mixture.active_matrices(config, name, matrices)

    @classmethod
    def llama_cpp_row_lengths(cls, config: LlamaConfig) -> Mapping[str, int]:
        """Return the widths of the gated layer and of the experts."""
        return {
            **MLP.llama_cpp_row_lengths(config),
            "moe_intermediate_size": config.moe_intermediate_size,
        }

    @classmethod
    def add_llama_cpp_sizes(cls, writer: GGUFWriter, config: LlamaConfig) -> None:
        """Add how many experts there are, how many compute a token, and how wide they are."""
        Mixture.add_llama_cpp_sizes(writer, config)
