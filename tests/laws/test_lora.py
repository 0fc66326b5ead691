# Run: pytest tests/laws/test_lora.py    (all combinations: -m slow)
"""Adapters: the base's bits, PEFT's bits, merged as good as unmerged, and laws 1, 2, 3, 9 and 10 with them.

By day every choice meets, one in one graph and one by blocks; at night every combination, of two layers.
"""

from __future__ import annotations

import copy

import pytest
import torch

from adapted import LINEAR, SMALL, adapted_llama, peft, trained
from batches import copied, packed, ragged, tiny_llama
from laws.together import LAYERS, ROWS, by_day, check, cross, gradient, members_are_alone, pairwise, separate_gradient
from monograph.errors import UsageError
from monograph.graph.lora import Lora, adapt, adapters, merge
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.loss import token_loss
from monograph.optim import AdamW, Muon
from monograph.resident import Resident
from monograph.stream import Streamed
from numerics import relative_error

PRECISIONS, BASES = ("fp32", "bf16", "fp16"), ("auto", "int8", "nf4")
WIDTHS = {"fp32": (torch.float32, None), "fp64": (torch.float64, None), "bf16": (torch.bfloat16, torch.bfloat16),
          "bf16 base": (torch.bfloat16, None)}  # fmt: skip


@pytest.mark.parametrize("name", WIDTHS)
def test_fresh_adapters_change_no_bit_of_the_base(name):
    dtype, of_adapters = WIDTHS[name]
    model, plain, batch = tiny_llama(dtype), tiny_llama(dtype), packed(4)
    adapt(model, SMALL, dtype=of_adapters)
    assert {layer.lora_A.weight.dtype for layer in adapters(model).values()} == {
        {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "bf16 base": torch.float32}[name]
    }
    assert torch.equal(token_loss(model, batch)[0], token_loss(plain, batch)[0])
    for precision in ("bf16", "fp16") if name == "fp32" else ():
        with torch.autocast("cpu", Precision(precision).dtype):
            assert torch.equal(token_loss(model, batch)[0], token_loss(plain, batch)[0])


def in_peft(model, theirs, of_adapters):
    """PEFT's adapters on a copy of the base, with the numbers of ours."""
    library = peft()
    config = library.LoraConfig(
        r=SMALL.rank, lora_alpha=SMALL.alpha, target_modules=LINEAR, lora_dropout=model.rate, use_rslora=False
    )
    library.inject_adapter_in_model(config, theirs)
    for name, layer in adapters(model).items():
        twin = theirs.get_submodule(name)
        for factor in ("lora_A", "lora_B"):
            weight = getattr(twin, factor)["default"].weight
            weight.data = getattr(layer, factor).weight.detach().clone()
            assert of_adapters is None or weight.dtype == of_adapters
    return theirs


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", WIDTHS)
def test_loss_and_gradients_are_pefts_bits(name, dropout):
    dtype, of_adapters = WIDTHS[name]
    model = tiny_llama(dtype)
    adapt(model, Lora(SMALL.rank, SMALL.alpha, dropout=dropout), dtype=of_adapters)
    trained(model).rate = dropout
    theirs, results = in_peft(model, tiny_llama(dtype), of_adapters), []
    for each in (model, theirs):
        torch.manual_seed(0)
        loss, count = token_loss(each, ragged(4))
        (loss / count).backward()
        results.append({"loss": loss} | {n: p.grad for n, p in each.named_parameters() if p.requires_grad})
    for found, expected in zip(results[0].items(), results[1].items(), strict=True):
        assert expected[0] in (found[0], found[0].replace(".weight", ".default.weight"))
        assert torch.equal(found[1], expected[1]), found[0]


def test_transformers_llama_is_a_module_like_any_other():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    shape = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(shape)
    theirs = copy.deepcopy(model)
    assert len(adapt(model, SMALL)) == 14
    trained(model).rate = 0.0
    in_peft(model, theirs, None)
    results = []
    for each in (model, theirs):
        logits = each(input_ids=ragged(2)["tokens"]).logits
        logits.square().sum().backward()
        results.append([logits, *(p.grad for p in each.parameters() if p.requires_grad)])
    assert len(results[0]) == 29 and all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("spread", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_merged_is_as_near_to_the_truth_as_unmerged(dtype, spread):
    """Both against float64 of the same numbers, base and adapters; averaged over seeds, as it is a matter of luck."""
    tokens, squares = ragged(8)["tokens"], {"merged": 0.0, "unmerged": 0.0}
    for seed in range(8):
        model = tiny_llama(dtype, seed=seed, hidden_size=64)
        adapt(model, SMALL)
        trained(model, seed, spread)
        exact = copy.deepcopy(model).double()
        merged = copy.deepcopy(model)
        merge(merged)
        truth = exact(tokens) @ exact.lm_head.weight.T
        for name, each in (("merged", merged), ("unmerged", model)):
            squares[name] += relative_error(each(tokens) @ each.lm_head.weight.T, truth) ** 2
    assert squares["merged"] ** 0.5 <= 1.25 * squares["unmerged"] ** 0.5 + 1e-14


# ---- with laws 1, 2, 3, 9 and 10 -----------------------------------------------------------------------------------

CROSS = cross(PRECISIONS, BASES)


def engine(precision, policy, split, base, optim=AdamW(lr=1e-2), **sizes):  # noqa: B008 - it is frozen
    return Resident(
        adapted_llama(Lora(4, 6.0, base=base), precision, **sizes), optim=optim, clip=0.5,
        precision=Precision(precision), remat=policy, micro_batch=split,
    )  # fmt: skip


def exact_gradient(base, **sizes):
    model = adapted_llama(Lora(4, 6.0, base=base), **sizes).double()
    return separate_gradient(model, model.lm_head.weight, packed(ROWS))


def laws_hold(precision, policy, scope, split, base, layers=2):
    def made(policy, split):
        return engine(precision, policy, split, base, num_hidden_layers=layers)

    check(made, exact_gradient(base, num_hidden_layers=layers), policy, scope, split)


@pytest.mark.parametrize(("precision", "policy", "scope", "split", "base"), by_day(pairwise(CROSS)))
def test_every_pair(precision, policy, scope, split, base):
    laws_hold(precision, policy, scope, split, base, LAYERS[scope])


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "policy", "scope", "split", "base"), CROSS)
def test_every_combination(precision, policy, scope, split, base):
    laws_hold(precision, policy, scope, split, base)


OPTIMIZERS = {
    "adamw": AdamW(lr=1e-2), "muon": Muon(lr=1e-2), "ema": AdamW(lr=1e-2, ema=0.9),
    **{f"adamw:{state}": AdamW(lr=1e-2, state=state) for state in ("bf16", "8bit", "all-bf16")},
}  # fmt: skip


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_and_leaves_the_base_alone(name, base):
    ones = [engine("bf16", Remat.Off(), 4, base, OPTIMIZERS[name]) for _ in range(2)]
    frozen = {n: p.detach().clone() for n, p in ones[0].model.named_parameters() if not p.requires_grad}
    for seed in range(2):
        ones[0].accumulate(packed(ROWS, seed))
        ones[0].update()
    ones[1].load_state(copied(ones[0].state()))
    for each in ones:
        each.accumulate(packed(ROWS, 2))
        assert float(each.update().grad_norm) > 0
    assert all(torch.equal(a, b) for a, b in zip(*(each.state().model.values() for each in ones), strict=True))
    assert all(torch.equal(p, frozen[n]) for n, p in ones[0].model.named_parameters() if n in frozen)


@pytest.mark.parametrize("split", [1, 2, 3, 6])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-6), ("fp64", 1e-12)])
def test_accumulated_is_large_batch(split, precision, bound):
    """Law 2 by its own bound: any split, ragged rows."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    batch, found = ragged(ROWS), []
    for rows in (ROWS, split):
        each = Resident(adapted_llama(dtype=dtype), optim=AdamW(), micro_batch=rows)
        found.append(gradient(each, batch))
    assert relative_error(found[1], found[0]) <= bound


@pytest.mark.parametrize("base", BASES)
def test_a_member_of_an_ensemble_is_alone(base):
    assert members_are_alone(lambda: adapted_llama(Lora(4, 6.0, base=base))) == 28


@pytest.mark.slow
@pytest.mark.parametrize("base", ["auto", "nf4"])
def test_inductor_is_eager(base):
    """Law 1, once with generated code for each kind of base."""
    batch, exact = packed(ROWS), exact_gradient(base)
    eager, captured = (engine("fp32", Remat.Off(), ROWS, base) for _ in range(2))
    assert captured.capture(batch) is None
    naive = relative_error(gradient(eager, batch), exact)
    assert relative_error(gradient(captured, batch), exact) <= 2 * naive + 1e-6


def test_streaming_is_refused():
    with pytest.raises(UsageError, match="memory = stream"):
        Streamed(adapted_llama())
