"""Run: pytest tests/decode/test_obstacles.py (needs a CUDA device)

What the kernels of a decode step cannot compute is refused by name, and so computed by the model's own
forward pass. What they compute of more rows than a tile has is torch's products.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batches import tiny_llama
from monograph.graph.lora import Lora, adapt
from monograph.graph.siblings import fuse_known, unfuse_siblings
from monograph.laws.comparisons import error_within
from monograph.model.config import LlamaConfig
from monograph.model.layer_types import FULL_ATTENTION, LINEAR_ATTENTION
from monograph.model.llama import Llama

pytestmark = pytest.mark.gpu
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 1,
}
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "small heads": ({"head_dim": 16}, "heads of 32, 64, 128 or 256 channels, not 16"),
    "heads of 48": ({"head_dim": 48}, "not 48"),
    "a part is rotated": ({"model_type": "phi3", "partial_rotary_factor": 0.5}, "rotate all"),
    "neighbours are rotated": ({"model_type": "ernie4_5"}, "do not rotate neighbouring channels"),
    "capped logits": (
        {"model_type": "gemma4_text", "final_logit_softcapping": 30.0},
        "caps its logits",
    ),
    "norms after branches": ({"model_type": "olmo2"}, "normalises what its layers add"),
    "norms over all heads": (
        {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "head_dim": None}
        | {"num_attention_heads": 2, "num_key_value_heads": 2},
        "changes queries and keys",
    ),
    "scaled logits": ({"model_type": "granite", "logits_scaling": 2.0}, "scales its logits"),
    "scaled branches": (
        {"model_type": "granite", "residual_multiplier": 0.5},
        "scales its heads or what its layers add",
    ),
    "scaled heads": (
        {"model_type": "granite", "attention_multiplier": 0.5},
        "scales its heads or what its layers add",
    ),
    "an odd width": ({"intermediate_size": 24}, "multiples of 16, not 24"),
}
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 2,
    "layer_types": (LINEAR_ATTENTION, FULL_ATTENTION),
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


def model_of(**sizes: Any) -> Llama:
    given = {name: size for name, size in (SHAPE | sizes).items() if size is not None}
    model = tiny_llama(**given).cuda()
    fuse_known(model)
    return model


def obstacle_of(model: Llama) -> str | None:
    from monograph.decode.fast_forward import obstacle  # imports Triton

    return obstacle(model)


def hook(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda *_: None)


def test_a_plain_model_has_none() -> None:
    assert obstacle_of(model_of()) is None
    assert obstacle_of(model_of(**HYBRID)) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_that_the_kernels_cannot_compute(name: str) -> None:
    sizes, reason = FAMILIES[name]
    assert reason in (obstacle_of(model_of(**sizes)) or "")


@pytest.mark.parametrize(
    "changes", [{"activation": ("hidden_act", "relu")}, {"clamped_gating": True}], ids=str
)
def test_a_family_to_come_with_another_activation(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every family of today has one that the kernels compute."""
    model = model_of()
    family = model.config.family._replace(**changes)
    monkeypatch.setattr(LlamaConfig, "family", family)
    assert "do not have this family's activation" in (obstacle_of(model) or "")


def test_a_mixer_that_is_neither_attention_nor_a_delta_net() -> None:
    model = model_of()
    model.model.layers[0].self_attn = nn.Identity()
    assert "some layers are neither" in (obstacle_of(model) or "")


def q_proj(model: Llama) -> nn.Module:
    return model.model.layers[0].self_attn.q_proj


def in_two_forms(model: Llama) -> None:
    unfuse_siblings(model)
    attention = model.model.layers[0].self_attn
    dense = deepcopy(attention.q_proj)
    adapt(model, Lora(rank=2, base="int8", targets=["v_proj"]))
    attention.q_proj = dense


CHANGES: dict[str, tuple[dict[str, Any], Callable[[Llama], object], str]] = {
    "on a CPU": ({}, lambda model: model.cpu(), "compute capability 8.0"),
    "in fp64": ({}, lambda model: model.double(), "fp32, fp16 or bf16, not torch.float64"),
    "an embedding in bf16": (
        {},
        lambda model: model.model.embed_tokens.bfloat16(),
        "several dtypes",
    ),
    "a product in bf16": (
        {},
        lambda model: model.model.layers[0].self_attn.o_proj.bfloat16(),
        "several dtypes",
    ),
    "a hook of a query": ({}, lambda model: hook(q_proj(model)), "hooks or a forward pass"),
    "a query in 16 bits and the rest in 8": ({}, in_two_forms, "stored in different forms"),
    "a bias of one product": (
        {"model_type": "qwen2"},
        lambda model: setattr(model.model.layers[0].self_attn.k_proj, "bias", None),
        "are not alike",
    ),
    "a hook of a delta net": (
        HYBRID,
        lambda model: hook(model.model.layers[0].linear_attn.out_proj),
        "adapters or hooks",
    ),
    "a hook of a delta net's input": (
        HYBRID,
        lambda model: hook(model.model.layers[0].linear_attn.in_proj_ba),
        "adapters or hooks",
    ),
    "a delta net in two dtypes": (
        HYBRID,
        lambda model: model.model.layers[0].linear_attn.norm.bfloat16(),
        "several dtypes",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed(name: str) -> None:
    sizes, change, reason = CHANGES[name]
    model = model_of(**sizes)
    change(model)
    assert reason in (obstacle_of(model) or "")


@pytest.mark.parametrize("layer", ["gate_proj", "down_proj"])
def test_a_mixture_whose_shared_expert_is_changed_is_called(layer: str) -> None:
    """It is no obstacle: the rest of the step is the kernels'."""
    from monograph.decode.fast_forward import _is_computable_mixture  # imports Triton

    model = model_of(**HYBRID)
    mixture = model.model.layers[0].mlp
    assert _is_computable_mixture(mixture, torch.float32)
    hook(getattr(mixture.shared_expert, layer))
    assert not _is_computable_mixture(mixture, torch.float32)
    assert obstacle_of(model) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_centred", [False, True])
def test_products_of_many_rows_are_as_exact_as_the_kernels(
    is_centred: bool, dtype: torch.dtype
) -> None:
    from monograph.decode import fast_projections
    from monograph.ops import layer_kernels
    from monograph.ops.decode_kernels import Norm

    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).double()

    x, gain, weight = numbers(3, 64), numbers(64), numbers(48, 64)
    bias, residual = numbers(48), numbers(3, 48)

    def computed(module: Any, dtype: torch.dtype, device: str) -> list[Tensor]:
        def on(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype)

        norm = Norm(on(gain), 1e-5, is_centred)
        project, gated = module
        return [
            project(on(x), on(weight), norm, on(bias), on(residual)).cpu(),
            project(on(x), on(weight)).cpu(),
            gated(on(x), on(weight), norm, "silu").cpu(),
            gated(on(x), on(weight), norm, "gelu").cpu(),
        ]

    by_torch = fast_projections.torch_project, fast_projections.torch_project_gated
    by_kernels = layer_kernels.project, layer_kernels.project_gated
    exact = computed(by_torch, torch.float64, "cpu")
    for ours, naive, wide in zip(
        computed(by_torch, dtype, "cuda"), computed(by_kernels, dtype, "cuda"), exact, strict=True
    ):
        assert error_within(ours, naive, wide)
