"""Run: pytest tests/ops/test_expert_kernels.py (needs a CUDA device)

The kernels of a mixture are as exact as the model's own layer, and a token has the same bits alone as
among others.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batches import tiny_llama
from monograph.graph.experts import Router
from monograph.laws.comparisons import error_within
from monograph.model.layers import CentredRMSNorm, RMSNorm
from monograph.model.mixture import Mixture

pytestmark = pytest.mark.gpu
TOKENS = 5
SHAPE = {"hidden_size": 48, "num_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 80},
    "gpt_oss": {"intermediate_size": 80, "attention_bias": True},
}


class Case:
    """A norm and a mixture in float64 on the CPU, and its tokens."""

    def __init__(self, family: str, centred: bool = False):
        self.mixture = (
            tiny_llama(**SHAPE, model_type=family, **FAMILIES[family]).model.layers[0].mlp
        )
        self.mixture.double()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.mixture.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        self.norm = (CentredRMSNorm if centred else RMSNorm)(48, 1e-5).double()
        nn.init.normal_(self.norm.weight, generator=generator)
        self.x_BD = torch.randn(TOKENS, 48, generator=generator, dtype=torch.float64)

    def to(self, kind: torch.dtype) -> tuple[RMSNorm, Mixture, Tensor]:
        return deepcopy(self.norm).to(kind), deepcopy(self.mixture).to(kind), self.x_BD.to(kind)


def by_module(norm: RMSNorm, mixture: Mixture, x_BD: Tensor, chosen_BC: Tensor) -> Tensor:
    """The layer's sum for given experts, since a rounding may choose another one."""
    normed_BD = norm(x_BD)
    router = mixture.gate
    probabilities_BE = nn.functional.linear(normed_BD, router.weight, router.bias).softmax(
        -1, dtype=torch.promote_types(x_BD.dtype, torch.float32)
    )
    weights_BC = probabilities_BE.gather(1, chosen_BC)
    if router.normalised:
        weights_BC = weights_BC / weights_BC.sum(-1, keepdim=True)
    return x_BD + mixture.experts.grouped(normed_BD, chosen_BC, weights_BC)


def by_kernels(norm: RMSNorm, mixture: Mixture, x_BD: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's sum on the card, and the experts that its router chose."""
    from monograph.decode.fast_projections import norm_of  # imports Triton
    from monograph.ops.expert_kernels import expert_inner, expert_sum, route
    from monograph.ops.layer_kernels import project

    norm, mixture, x_BD = norm.cuda(), mixture.cuda(), x_BD.cuda()
    router, experts = mixture.gate, mixture.experts
    logits_BE = project(x_BD, router.weight, norm_of(norm), router.bias)
    chosen_BC, weights_BC = route(logits_BE, router.top_k, router.normalised)
    gate, up, down = experts.gate_proj, experts.up_proj, experts.down_proj
    biases = None if gate.bias is None else (gate.bias, up.bias)
    combination: Any = "silu" if gate.bias is None else "clamped"
    inner_BCM = expert_inner(
        x_BD, norm_of(norm), chosen_BC, (gate.weight, up.weight), biases, combination
    )
    out_BD = expert_sum(inner_BCM, chosen_BC, weights_BC, down.weight, down.bias, x_BD)
    return out_BD.cpu(), chosen_BC.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("centred", [False, True])
def test_the_kernels_are_as_exact_as_the_layer(
    family: str, centred: bool, dtype: torch.dtype
) -> None:
    case = Case(family, centred)
    ours, chosen_BC = by_kernels(*case.to(dtype))
    naive = by_module(*case.to(dtype), chosen_BC)
    exact = by_module(*case.to(torch.float64), chosen_BC)
    assert error_within(ours, naive, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_with_gelu_are_as_exact_as_the_formula(dtype: torch.dtype) -> None:
    """No family of today has them."""
    from monograph.decode.fast_projections import norm_of  # imports Triton
    from monograph.ops.expert_kernels import expert_inner

    chosen_BC = torch.arange(TOKENS * 2).view(TOKENS, 2) % 6

    def by_formula(norm: RMSNorm, mixture: Mixture, x_BD: Tensor) -> Tensor:
        gate_EMD, up_EMD = mixture.experts.gate_proj.weight, mixture.experts.up_proj.weight
        normed_BCD1 = norm(x_BD)[:, None, :, None]
        gate_BCM, up_BCM = (
            (weight[chosen_BC] @ normed_BCD1).squeeze(-1) for weight in (gate_EMD, up_EMD)
        )
        return nn.functional.gelu(gate_BCM, approximate="tanh") * up_BCM

    case = Case("qwen3_moe")
    norm, mixture, x_BD = case.to(dtype)
    experts = mixture.cuda().experts
    weights = experts.gate_proj.weight, experts.up_proj.weight
    ours = expert_inner(x_BD.cuda(), norm_of(norm.cuda()), chosen_BC.cuda(), weights, None, "gelu")
    assert error_within(
        ours.cpu(), by_formula(*case.to(dtype)), by_formula(*case.to(torch.float64))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_has_the_same_bits_alone(dtype: torch.dtype) -> None:
    norm, mixture, x_BD = Case("gpt_oss").to(dtype)
    together, _ = by_kernels(norm, mixture, x_BD)
    alone = [by_kernels(norm, mixture, x_BD[row : row + 1])[0] for row in range(TOKENS)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("experts", "count"), [(128, 8), (60, 10), (2, 1)])
def test_the_router_chooses_the_likeliest_experts(
    experts: int, count: int, normalised: bool
) -> None:
    from monograph.ops.expert_kernels import route

    logits_BE = 3 * torch.randn(4, experts, generator=torch.Generator().manual_seed(0))
    router = Router(experts, experts, count, normalised)
    nn.init.eye_(router.weight)
    expected_BC, expected_weights_BC = router(logits_BE)
    chosen_BC, weights_BC = route(logits_BE.cuda(), count, normalised)
    assert torch.equal(chosen_BC.cpu(), expected_BC)
    torch.testing.assert_close(weights_BC.cpu(), expected_weights_BC)


def test_of_equal_experts_the_first_is_chosen() -> None:
    from monograph.ops.expert_kernels import route

    chosen_BC, weights_BC = route(torch.zeros(1, 7, device="cuda"), 3, True)
    assert chosen_BC.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights_BC.cpu(), torch.full((1, 3), 1 / 3))
