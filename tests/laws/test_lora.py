# Run: pytest tests/laws/test_lora.py    (all combinations: -m slow)
"""Adapters: the base's bits, PEFT's bits, merged as good as unmerged, and laws 1, 2, 3, 9 and 10
with them.

Those with magnitudes (DoRA) have PEFT's numbers, as PEFT computes the norms from the product of its
matrices.

By day every eager choice meets; at night every combination, of two layers.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace

import pytest
import torch
from torch import nn

import daily
from adapted import KINDS, LINEAR, SMALL, adapted_llama, peft, trained
from batches import copied, packed, ragged, tiny_llama
from laws.together import (
    LAYERS,
    ROWS,
    backend_by_day,
    by_day,
    check,
    cross,
    gradient,
    members_are_alone,
    pairwise,
    separate_gradient,
)
from monograph.config import load
from monograph.graph.lora import adapt, adapted_layers, store_row_norms
from monograph.graph.lora_merge import merge
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.laws.comparisons import (
    accumulated_is_large_batch,
    differing,
    error_within,
    outcome,
    relative_error,
)
from monograph.loss import token_loss
from monograph.model.adapter import install_adapters
from monograph.ops.row_norms import row_norms
from monograph.optim import AdamW, Group, Muon
from monograph.resident import Resident
from monograph.session.adapting import rate_fields

PRECISIONS, BASES = ("fp32", "bf16", "fp16"), ("auto", "int8", "nf4")
WIDTHS = {"fp32": (torch.float32, None), "fp64": (torch.float64, None), "bf16": (torch.bfloat16, torch.bfloat16),
          "bf16 base": (torch.bfloat16, None)}  # fmt: skip


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("name", WIDTHS)
def test_fresh_adapters_change_no_bit_of_the_base(name, kind):
    dtype, of_adapters = WIDTHS[name]
    model, plain, batch = tiny_llama(dtype), tiny_llama(dtype), packed(4)
    adapt(model, KINDS[kind], dtype=of_adapters)
    assert {layer.lora_A.weight.dtype for layer in adapted_layers(model).values()} == {
        {
            "fp32": torch.float32,
            "fp64": torch.float64,
            "bf16": torch.bfloat16,
            "bf16 base": torch.float32,
        }[name]
    }
    assert torch.equal(token_loss(model, batch)[0], token_loss(plain, batch)[0])
    for precision in ("bf16", "fp16") if name == "fp32" else ():
        with torch.autocast("cpu", Precision(precision).dtype):
            assert torch.equal(token_loss(model, batch)[0], token_loss(plain, batch)[0])
    merge(model)
    assert all(
        torch.equal(one, other)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize("base", BASES)
def test_fresh_magnitudes_change_no_bit_of_a_rounded_base(base):
    models = [tiny_llama(hidden_size=64) for _ in range(2)]
    for model, kind in zip(models, ("lora", "dora"), strict=True):
        install_adapters(model, replace(KINDS[kind], base=base), precision=Precision("bf16"))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(token_loss(models[0], packed(4))[0], token_loss(models[1], packed(4))[0])
    for layer in adapted_layers(models[1]).values():
        kept = row_norms(layer.weight if base == "auto" else layer.dense())
        assert torch.equal(layer.lora_norms, kept) and torch.equal(
            layer.lora_magnitude_vector, kept
        )


def in_peft(model, theirs, of_adapters, lora=SMALL):
    """PEFT's adapters on a copy of the base, with the numbers of ours."""
    library = peft()
    config = library.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=LINEAR, lora_dropout=lora.dropout, use_rslora=lora.rslora,
        use_dora=lora.dora,
    )  # fmt: skip
    library.inject_adapter_in_model(config, theirs)
    for name, layer in adapted_layers(model).items():
        twin = theirs.get_submodule(name)
        for factor in ("lora_A", "lora_B"):
            weight = getattr(twin, factor)["default"].weight
            weight.data = getattr(layer, factor).weight.detach().clone()
            assert of_adapters is None or weight.dtype == of_adapters
        if lora.dora:
            twin.lora_magnitude_vector[
                "default"
            ].weight.data = layer.lora_magnitude_vector.detach().clone()
    return theirs


def biased(module):
    """The module with biases, if it has any, that are not zero."""
    for name, parameter in module.named_parameters():
        if name.endswith(".bias"):
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return module


def trained_of(module):
    """Its trained parameters by our names."""
    named = {n.replace(".default", ""): p for n, p in module.named_parameters() if p.requires_grad}
    return {
        name.replace("_vector.weight", "_vector"): parameter for name, parameter in named.items()
    }


NEAR_PEFT = {"fp32": 1e-5, "fp64": 1e-12, "bf16": 0.03, "bf16 base": 0.03}


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
@pytest.mark.parametrize(("name", "kind"), daily.pairwise(list(WIDTHS), list(KINDS)))
def test_loss_and_gradients_are_pefts_bits(name, dropout, kind):
    (dtype, of_adapters), lora = WIDTHS[name], replace(KINDS[kind], dropout=dropout)
    model, plain = (
        biased(tiny_llama(dtype, model_type="qwen2" if kind == "dora" else "llama"))
        for _ in range(2)
    )
    adapt(model, lora, dtype=of_adapters)
    trained(model)
    theirs, results = in_peft(model, plain, of_adapters, lora), []
    for each in (model, theirs):
        torch.manual_seed(0)
        loss, count = token_loss(each, ragged(4))
        (loss / count).backward()
        results.append(
            {"loss": (loss / count).detach()[None]}
            | {n: p.grad for n, p in trained_of(each).items()}
        )
    assert results[0].keys() == results[1].keys()
    if kind == "dora" and "bf16" in name:  # both round, at different places
        results = [
            {"all": torch.cat([each[key].flatten() for key in sorted(each)])} for each in results
        ]
    for key, found in results[0].items():
        if kind == "dora":
            assert relative_error(found, results[1][key]) <= NEAR_PEFT[name], key
        else:
            assert torch.equal(found, results[1][key]), key


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("lora", 16.0), pytest.param("dora", 1.0, marks=pytest.mark.slow), ("dora", 4.0)],
)
def test_updates_are_pefts(kind, factor):
    """LoRA+ and DoRA, in float64, each window in three micro-batches; vectors are not decayed here."""
    lora, decay = KINDS[kind], 0.1 if kind == "lora" else 0.0
    settings = load(None, {"optim.lr": 1e-3, "lora.lr_ratio": factor}, {})
    optim = AdamW(
        weight_decay=decay, **rate_fields(settings.optim.lr, settings.lora.lr_ratio, default=1.0)
    )
    model = adapted_llama(lora, dtype=torch.float64)
    theirs = in_peft(model, tiny_llama(torch.float64), None, lora)
    start = {name: p.detach().clone() for name, p in trained_of(model).items()}
    ours = Resident(model, optim=optim, micro_batch=2)
    their_optim = importlib.import_module("peft.optimizers").create_loraplus_optimizer(
        theirs,
        torch.optim.AdamW,
        lr=1e-3,
        loraplus_lr_ratio=factor,
        betas=(0.9, 0.95),
        loraplus_weight_decay=decay,
    )
    for seed in range(5):
        ours.accumulate(ragged(6, seed))
        ours.update()
        loss, count = token_loss(theirs, ragged(6, seed))
        (loss / count).backward()
        their_optim.step()
        their_optim.zero_grad()
    expected = trained_of(theirs)
    for name, found in trained_of(model).items():
        assert relative_error(found - start[name], expected[name] - start[name]) <= 1e-9, name


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
    trained(model)
    in_peft(model, theirs, None)
    results = []
    for each in (model, theirs):
        logits = each(input_ids=ragged(2)["tokens"]).logits
        logits.square().sum().backward()
        results.append([logits, *(p.grad for p in each.parameters() if p.requires_grad)])
    assert len(results[0]) == 29 and all(
        torch.equal(one, other) for one, other in zip(*results, strict=True)
    )


# By day each kind and dtype.
@pytest.mark.parametrize(
    ("dtype", "kind", "spread"),
    [
        pytest.param(
            dtype, kind, spread, marks=() if spread == 0.05 and place == at else pytest.mark.slow
        )
        for place, dtype in enumerate([torch.bfloat16, torch.float32, torch.float64])
        for at, kind in enumerate(["dora", "lora"])
        for spread in (0.02, 0.05, 0.2)
    ],
)
def test_merged_is_as_near_to_the_truth_as_unmerged(dtype, kind, spread):
    """Both against float64 of the same numbers, base and adapters; averaged over seeds, as it is a
    matter of luck.
    """
    tokens, squares = ragged(8)["tokens"], {"merged": 0.0, "unmerged": 0.0}
    for seed in range(8):
        model = tiny_llama(dtype, seed=seed, hidden_size=64)
        adapt(model, KINDS[kind])
        trained(model, seed, spread)
        exact = copy.deepcopy(model).double()
        store_row_norms(exact, reset_magnitudes=False)
        merged = copy.deepcopy(model)
        merge(merged)
        truth = exact(tokens) @ exact.lm_head.weight.T
        for name, each in (("merged", merged), ("unmerged", model)):
            squares[name] += relative_error(each(tokens) @ each.lm_head.weight.T, truth) ** 2
    assert squares["merged"] ** 0.5 <= 1.25 * squares["unmerged"] ** 0.5 + 1e-14


# ---- with laws 1, 2, 3, 9 and 10 -----------------------------------------------------------------

CROSS = cross(PRECISIONS, BASES, ("lora", "dora"))


def engine(precision, policy, split, base, kind, optim=AdamW(lr=1e-2), **sizes):  # noqa: B008 - it is frozen
    return Resident(
        adapted_llama(replace(KINDS[kind], base=base), precision, **sizes), optim=optim, clip=0.5,
        precision=Precision(precision), remat=policy, micro_batch=split,
    )  # fmt: skip


def exact_gradient(base, kind, **sizes):
    model = adapted_llama(replace(KINDS[kind], base=base), **sizes).double()
    return separate_gradient(model, model.lm_head.weight, packed(ROWS))


def laws_hold(precision, policy, scope, split, base, kind, layers=2, backend="aot_eager"):
    def made(policy, split):
        return engine(precision, policy, split, base, kind, num_hidden_layers=layers)

    check(made, exact_gradient(base, kind, num_hidden_layers=layers), policy, scope, split, backend)


# By day all that is eager; test_token_rows.py has adapters in a graph.
DAY = [each for each in pairwise(CROSS) if each[2] == "none"]


@pytest.mark.parametrize(("precision", "policy", "scope", "split", "base", "kind"), by_day(DAY))
def test_every_pair(precision, policy, scope, split, base, kind):
    laws_hold(precision, policy, scope, split, base, kind, LAYERS, backend_by_day(policy))


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "policy", "scope", "split", "base", "kind"), CROSS)
def test_every_combination(precision, policy, scope, split, base, kind):
    laws_hold(precision, policy, scope, split, base, kind)


OPTIMIZERS = {
    "adamw": AdamW(lr=1e-2), "muon": Muon(lr=1e-2), "ema": AdamW(lr=1e-2, ema=0.9),
    "lora+": AdamW(lr=1e-2, groups=(Group("*.lora_[Bm]*", 4.0),)),
    "adamw, bf16": AdamW(lr=1e-2, state="bf16"),
    "adamw, 8bit": AdamW(lr=1e-2, state="8bit"),
    "adamw, no masters": AdamW(lr=1e-2, state="bf16", master_weights=False),
}  # fmt: skip


# By day those whose state is of another form have one base each.
@pytest.mark.parametrize(
    ("name", "base"),
    [
        pytest.param(
            name,
            base,
            marks=()
            if place % 3 == at and name in ("muon", "lora+", "adamw, 8bit", "adamw, no masters")
            else pytest.mark.slow,
        )
        for place, name in enumerate(OPTIMIZERS)
        for at, base in enumerate(BASES)
    ],
)
def test_every_optimizer_resumes_and_leaves_the_base_alone(name, base):
    kind = "dora" if base == "nf4" else "lora"
    ones = [engine("bf16", Remat.Off(), 4, base, kind, OPTIMIZERS[name]) for _ in range(2)]
    frozen = {
        n: p.detach().clone() for n, p in ones[0].model.named_parameters() if not p.requires_grad
    }
    for seed in range(2):
        ones[0].accumulate(packed(ROWS, seed))
        ones[0].update()
    ones[1].load_state(copied(ones[0].state()))
    for each in ones:
        each.accumulate(packed(ROWS, 2))
        assert float(each.update().grad_norm) > 0
    assert not differing(*(outcome(each.state()) for each in ones))
    assert all(
        torch.equal(p, frozen[n]) for n, p in ones[0].model.named_parameters() if n in frozen
    )


@pytest.mark.parametrize(
    ("split", "dtype"), daily.pairwise([1, 2, 3, 6], [torch.float32, torch.float64])
)
def test_accumulated_is_large_batch(split, dtype):
    """Law 2 by its own bound: any split, ragged rows."""
    batch, found = ragged(ROWS), []
    for rows in (ROWS, split):
        each = Resident(adapted_llama(dtype=dtype), optim=AdamW(), micro_batch=rows)
        found.append(gradient(each, batch))
    assert accumulated_is_large_batch(found[1], found[0])


@pytest.mark.parametrize(
    ("base", "kind"),
    [
        pytest.param("auto", "lora", marks=pytest.mark.slow),
        pytest.param("int8", "lora", marks=pytest.mark.slow),
        ("nf4", "dora"),
    ],
)
def test_a_member_of_an_ensemble_is_alone(base, kind):
    assert members_are_alone(lambda: adapted_llama(replace(KINDS[kind], base=base))) == (
        42 if kind == "dora" else 28
    )


@pytest.mark.slow
@pytest.mark.parametrize(("base", "kind"), [("auto", "lora"), ("nf4", "lora"), ("auto", "dora")])
def test_inductor_is_eager(base, kind):
    """Law 1, once with generated code for each kind of base."""
    batch, exact = packed(ROWS), exact_gradient(base, kind)
    eager, captured = (engine("fp32", Remat.Off(), ROWS, base, kind) for _ in range(2))
    assert captured.capture(batch) is None
    found, naive = gradient(captured, batch), gradient(eager, batch)
    assert error_within(found, naive, exact, rounding=5e-7)
