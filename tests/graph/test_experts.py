"""Run: pytest tests/graph/test_experts.py    Adapters of experts, and experts in few bits, are those of each expert."""

from __future__ import annotations

import copy

import pytest
import torch

from batches import captured_to_train, ragged, tiny_llama
from monograph.errors import InputRefused
from monograph.graph.experts import ExpertLinear, Int8Experts, NF4Experts
from monograph.graph.frozen import Int8Linear, NF4Linear, parameter_count
from monograph.graph.lora import Lora, adapt, adapted_layers
from monograph.graph.lora_merge import merge, merged_weight
from monograph.graph.precision import Precision
from monograph.laws.comparisons import relative_error
from monograph.model.adapter import install_adapters, pack_adapters
from monograph.optim import AdamW, Muon, hidden_matrices
from monograph.resident import Resident

MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
TARGETS = ("gate_proj", "up_proj", "down_proj", "q_proj")
ENDS = torch.tensor([3, 3, 4, 9], dtype=torch.int32)


def stack(kind=ExpertLinear, dtype=torch.float64):
    torch.manual_seed(0)
    layer = ExpertLinear(4, 24, 32).to(dtype)
    with torch.no_grad():
        layer.weight.normal_()
    if kind is not ExpertLinear:
        weight, layer.__class__ = layer.weight, kind
        layer.freeze(weight)
    return layer, torch.randn(9, 24, dtype=dtype, requires_grad=True)


def trained(model):
    """Adapters far from their start, where B is zero."""
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize(("kind", "single"), [(Int8Experts, Int8Linear), (NF4Experts, NF4Linear)])
@pytest.mark.parametrize("ends", [ENDS, None])
def test_experts_in_few_bits_are_those_of_their_dense_weight(kind, single, ends):
    layer, rows = stack(kind, torch.float32)
    dense = ExpertLinear(4, 24, 32)
    dense.weight.data = layer.dense()
    out, expected = layer(rows, ends), dense(rows, ends)
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    mine, its = (torch.autograd.grad(each, rows, grad)[0] for each in (out, expected))
    assert relative_error(mine, its) < 1e-6
    assert parameter_count(layer) == 4 * 24 * 32
    for expert, weight in enumerate(stack(dtype=torch.float32)[0].weight):
        alone = torch.nn.Linear(24, 32, bias=False)
        alone.__class__ = single
        alone.freeze(weight)
        bound = 0 if kind is Int8Experts else 0.1  # the mean of all scales rounds those of a block
        assert relative_error(layer.dense()[expert], alone.dense()) <= bound


def test_no_dense_weight_waits_for_the_backward_pass():
    layer, rows = stack(NF4Experts, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t
    ):
        layer(rows, ENDS)
    assert max(kept) < 4 * 24 * 32


@pytest.mark.parametrize("base", ["auto", "int8", "nf4"])
def test_an_adapter_of_experts_is_each_experts_own(base):
    model = tiny_llama(**MIXTURE)
    tokens = ragged(3)["tokens"]
    before = model(tokens)
    adapt(model, Lora(4, targets=TARGETS, base=base))
    assert (
        len(adapted_layers(model)) == 2 * 4
        and adapted_layers(model)["model.layers.0.mlp.experts.up_proj"].lora_A.weight.ndim == 3
    )
    if base == "auto":
        assert torch.equal(model(tokens), before)
    trained(model)
    unmerged, plain = model(tokens), copy.deepcopy(model)
    layer = adapted_layers(model)["model.layers.1.mlp.experts.down_proj"]
    weight = layer.dense() if base != "auto" else layer.weight
    for expert in range(5):
        change = layer.scale * layer.lora_B.weight[expert] @ layer.lora_A.weight[expert]
        assert relative_error(merged_weight(layer)[expert], weight[expert] + change) < 1e-6
    merge(plain)
    assert not adapted_layers(plain) and relative_error(
        plain(tokens), unmerged
    ) < 1e-5 < relative_error(unmerged, before)
    if base == "auto":
        assert list(plain.state_dict()) == list(tiny_llama(**MIXTURE).state_dict())


def test_all_linear_layers_are_not_experts_as_in_peft_but_experts_are_quantised():
    model = tiny_llama(**MIXTURE)
    adapt(model, Lora(4, base="nf4"))
    assert {name.rpartition(".")[2] for name in adapted_layers(model)} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    assert isinstance(model.model.layers[0].mlp.experts.up_proj, NF4Experts)
    assert not model.model.layers[0].mlp.gate.weight.requires_grad


def test_peft_has_no_form_of_them():
    model, lora = tiny_llama(**MIXTURE), Lora(4, targets=TARGETS)
    adapt(model, lora)
    with pytest.raises(
        InputRefused, match=r"gate_proj has an adapter for each expert, for which PEFT has no form"
    ):
        pack_adapters(model, lora, "base")


@pytest.mark.parametrize("base", ["auto", "nf4"])
def test_muon_takes_the_adapters_of_experts(base):
    model = tiny_llama(**MIXTURE)
    adapt(model, Lora(4, targets=TARGETS, base=base))
    names = hidden_matrices(model)
    assert names == [
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    engine = Resident(model, optim=Muon())
    engine.accumulate(ragged(3))
    assert float(engine.update().grad_norm) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    ["eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor"))],
)
def test_adapters_next_to_experts_in_four_bits_train_captured_as_eagerly(backend):
    engines = []
    for captured in (False, True):
        model = tiny_llama(num_hidden_layers=1, **MIXTURE)
        install_adapters(model, Lora(4, targets=TARGETS, base="nf4"), precision=Precision("fp32"))
        engines.append(Resident(trained(model), optim=AdamW(lr=1e-2), micro_batch=4))
        if captured:
            captured_to_train(engines[1], ragged(4), backend)
    for seed in range(2):
        for engine in engines:
            engine.accumulate(ragged(6, seed=seed))
        eager, fast = (engine.update() for engine in engines)
        assert (
            relative_error(fast.loss, eager.loss) < 1e-5
            and relative_error(fast.grad_norm, eager.grad_norm) < 1e-4
        )


def test_members_of_an_ensemble_may_have_experts_in_few_bits():
    layer, rows = stack(NF4Experts, torch.float32)
    both = torch.stack([rows, 2 * rows]).detach()
    out = torch.vmap(lambda each: layer(each, ENDS))(both)
    assert all(torch.equal(mine, layer(each, ENDS)) for mine, each in zip(out, both, strict=True))
