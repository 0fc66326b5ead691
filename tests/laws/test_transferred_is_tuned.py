# Run: pytest tests/laws/test_transferred_is_tuned.py [-m slow]
"""Law 14: with width transfer the base does not change, the rule is that of the theory, activations
and their updates keep their size at every width, and the best learning rate stays where it is.

The first two are algebra and hold in bits or in float64. The third is the coordinate check of Yang
et al. 2022, "Tensor Programs V" (arXiv 2203.03466), appendix D: slopes of log RMS in log width. It
sees rates and initial weights, and is blind to decay and eps, which the second holds. The fourth is
nightly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monograph as mono
from batches import copied, ragged
from monograph.laws.comparisons import relative_error
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW, Muon, Optimizer
from monograph.resident import Resident
from monograph.step import Step
from monograph.transfer import WidthTransfer, narrowed
from reference import multipliers as reference
from scripts import ROOT, script

FAMILIES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
}
OPTIMIZERS: dict[str, Optimizer] = {
    # An eps and a decay that matter within a few updates.
    "adamw": AdamW(lr=0.02, eps=1e-4, weight_decay=0.5),
    "muon": Muon(lr=0.02, eps=1e-4, weight_decay=0.5),
}
UPDATES = 4
# By day every family and every optimizer, but not every one with every other.
PAIRS = [
    pytest.param(rule, family, marks=() if (one + other) % 2 == 0 else pytest.mark.slow)
    for one, rule in enumerate(OPTIMIZERS)
    for other, family in enumerate(FAMILIES)
]


def shape(times: int, **changes: Any) -> LlamaConfig:
    """`times` as wide as the base, 16; its initial spread is a power of two."""
    return LlamaConfig(
        **{
            "vocab_size": 61,
            "hidden_size": 16 * times,
            "intermediate_size": 24 * times,
            "num_hidden_layers": 2,
            "num_attention_heads": 2 * times,
            "num_key_value_heads": times,
            "max_position_embeddings": 64,
            "initializer_range": 2.0**-3,
            **changes,
        }
    )


def trajectory(model: Llama, optim: Optimizer, loss: Any = reference.dense_loss) -> list[float]:
    step = Step(model, loss=loss, optim=optim)
    return [float(step([ragged(4)]).loss) for _ in range(UPDATES)]


# ---- (a) at the base nothing changes -------------------------------------------------------------


@pytest.mark.parametrize(("rule", "family"), PAIRS)
def test_at_the_base_nothing_changes(rule: str, family: str) -> None:
    config, optim = shape(2, **FAMILIES[family]), OPTIMIZERS[rule]
    transfer, plain, model = WidthTransfer(config, config), Llama(config), Llama(config)
    transfer.initialise_(model)
    assert all(
        torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True)
    )
    assert transfer.optimizer(optim).kinds(model) == optim.kinds(model)
    states = []
    for each, chosen in ((plain, optim), (model, transfer.optimizer(optim))):
        engine = Resident(each, optim=chosen, clip=1.0)
        for seed in range(3):
            engine.accumulate(ragged(4, seed=seed))
            engine.update()
        states.append(copied(engine.state()))
    for kind in ("model", "optimizer"):
        one, other = (getattr(state, kind) for state in states)
        assert one.keys() == other.keys() and all(
            torch.equal(one[name], other[name]) for name in one
        )


# ---- (b) the rule is that of the theory ----------------------------------------------------------


def folded(
    times: int,
    family: str,
    rule: str,
    change: Callable[[Optimizer], Optimizer] = lambda optim: optim,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and last weights of the model as it is trained."""
    config = shape(times, **FAMILIES[family])
    transfer, model = WidthTransfer(config, narrowed(config, 16)), Llama(config).double()
    transfer.initialise_(model)
    losses = trajectory(model, change(transfer.optimizer(OPTIMIZERS[rule])))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@cache
def multiplied(times: int, family: str, rule: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same of the one with multipliers in its forward pass."""
    config, muon = shape(times, **FAMILIES[family]), rule == "muon"
    theta = Llama(config).double()
    reference.theta(theta, times, narrowed(config, 16).initializer_range, muon)
    optim = reference.optimizer(OPTIMIZERS[rule], theta, times)
    losses = trajectory(theta, optim, reference.loss_with_multipliers(theta, times, muon))
    tied = config.tie_word_embeddings
    return losses, {
        n: reference.multiplier(n, times, tied, muon) * p.detach()
        for n, p in theta.named_parameters()
    }


@pytest.mark.parametrize(("rule", "family"), PAIRS)
def test_powers_of_two_fold_in_bits(rule: str, family: str) -> None:
    (losses, weights), (expected, scaled) = (way(4, family, rule) for way in (folded, multiplied))
    assert losses == expected
    assert losses[-1] < losses[0] - 0.1, "nothing was learned, so nothing was compared"
    for name, weight in weights.items():
        assert torch.equal(weight, scaled[name]), name


@pytest.mark.parametrize(("rule", "family"), PAIRS)
def test_other_widths_fold_within_rounding(rule: str, family: str) -> None:
    (losses, weights), (expected, scaled) = (way(3, family, rule) for way in (folded, multiplied))
    # Newton-Schulz amplifies rounding by up to 3.4445^5 = 490 an update (tests/test_muon.py).
    bound = 1e-12 * (490 if rule == "muon" else 1)
    assert max(abs(one - other) for one, other in zip(losses, expected, strict=True)) <= bound
    assert (
        max(relative_error(weight, scaled[name]) for name, weight in weights.items()) <= 10 * bound
    )


def unscaled(optim: Optimizer, pattern: str, column: str, base: Optimizer) -> Optimizer:
    """The rule with one of its entries left as in the base."""
    value = base.weight_decay if column == "weight_decay" else 1.0
    groups = [
        replace(group, **{column: value}) if group.pattern == pattern else group
        for group in optim.groups
    ]
    assert groups != [*optim.groups]
    return replace(optim, groups=groups)


Q, GATE, DOWN = (
    f"model.layers.*.{name}.weight"
    for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")
)
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ENTRIES = [
    *[
        ("adamw", "untied", tensor, column)
        for tensor in (Q, GATE, DOWN)
        for column in ("lr", "weight_decay", "eps")
    ],
    *[
        ("muon", "untied", tensor, column)
        for tensor in (Q, GATE, DOWN)
        for column in ("lr", "weight_decay")
    ],
    *[("adamw", "untied", HEAD, column) for column in ("lr", "weight_decay")],
    *[("adamw", family, EMBEDDING, "eps") for family in ("untied", "tied")],
    ("adamw", "untied", NORM, "eps"),
    ("adamw", "tied", NORM, "lr"),
    ("adamw", "untied", "model.layers.*.input_layernorm.weight", "eps"),
    ("adamw", "qwen2", "model.layers.*.self_attn.v_proj.bias", "eps"),
    ("adamw", "qwen3", "model.layers.*.self_attn.q_norm.weight", "eps"),
]


# By day every third entry.
@pytest.mark.parametrize(
    ("rule", "family", "pattern", "column"),
    [
        pytest.param(*entry, marks=() if place % 6 == 0 else pytest.mark.slow)
        for place, entry in enumerate(ENTRIES)
    ],
)
def test_every_entry_of_the_table_counts(rule: str, family: str, pattern: str, column: str) -> None:
    losses, _ = folded(
        4, family, rule, lambda optim: unscaled(optim, pattern, column, OPTIMIZERS[rule])
    )
    expected, _ = multiplied(4, family, rule)
    assert max(abs(one - other) for one, other in zip(losses, expected, strict=True)) > 1e-6


# ---- (c) the coordinate check --------------------------------------------------------------------

LADDER = (32, 128)
SEEDS, FEW_SEEDS, CHECKED = 2, 1, (1, 8)
# Half of what a missing factor adds: of m, of its root in Muon's rate, of its root in initial
# weights. Below zero it is 0.5 for all: the few directions of a batch overlap by chance, the more
# the narrower the model.
ALLOWED, ALLOWED_BELOW, ALLOWED_AT_FIRST = {"adamw": 0.5, "muon": 0.25}, 0.5, 0.25
BLOCKS = "model.layers.0", "model.layers.1"
HEADS = [
    ("adamw", False), ("muon", True),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in [("adamw", True), ("muon", False)]),
]  # fmt: skip
RATES: dict[str, Optimizer] = {
    "adamw": AdamW(lr=2**-6, weight_decay=0.0),
    "muon": Muon(lr=2**-5, weight_decay=0.0),
}


def rung(width: int, tied: bool) -> LlamaConfig:
    top = LlamaConfig(
        vocab_size=128,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=16,
        max_position_embeddings=64,
        initializer_range=512**-0.5,
        tie_word_embeddings=tied,
    )
    return narrowed(top, width)


def rows(seed: int) -> dict[str, Tensor]:
    """Eight tokens that come round and round: equal tokens pull a weight the same way, so that
    updates add up.
    """
    kinds = torch.randperm(128, generator=torch.Generator().manual_seed(seed))[:8]
    tokens = kinds[(torch.arange(65) + torch.tensor([[0], [3]])) % 8]
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


@torch.no_grad()
def activations(
    model: Llama, tokens: Tensor, before: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every module's output, blocks' included, by the module's name; and what each matrix's change
    since `before` adds.

    The second is (W - W_before) x, which a sum over all that changed may hide.
    """
    outputs: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}

    def watch(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        outputs[name] = output.clone()
        if isinstance(module, nn.Linear):
            own[f"{name}, its own"] = inputs[0] @ (module.weight - before[f"{name}.weight"]).mT

    watched = {n: m for n, m in model.named_modules() if not [*m.children()] or n in BLOCKS}
    hooks = [module.register_forward_hook(partial(watch, name)) for name, module in watched.items()]
    model.logits(model(tokens))
    for hook in hooks:
        hook.remove()
    return outputs, own


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def sizes(
    width: int, tied: bool, seed: int, rule: str, transferred: Any
) -> dict[tuple[int, str], float]:
    """RMS of the activations at the start, as update 0, and of their change after some updates."""
    config = rung(width, tied)
    model, batch = Llama(config, seed), rows(seed)
    transfer = WidthTransfer(config, rung(LADDER[0], tied))
    step = Step(model, optim=transferred(model, transfer, RATES[rule]))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    start, _ = activations(model, batch["tokens"], before)
    found = {(0, name): rms(values) for name, values in start.items()}
    for update in range(1, CHECKED[-1] + 1):
        step([batch])
        if update in CHECKED:
            now, own = activations(model, batch["tokens"], before)
            found |= {(update, name): rms(now[name] - start[name]) for name in start}
        if update == 1:  # later there is less left to learn where more can be learned
            found |= {(update, name): rms(values) for name, values in own.items()}
    return found


def with_transfer(model: Llama, transfer: WidthTransfer, optim: Optimizer) -> Optimizer:
    transfer.initialise_(model)
    return transfer.optimizer(optim)


def without_transfer(model: Llama, transfer: WidthTransfer, optim: Optimizer) -> Optimizer:
    return optim


def slopes(
    rule: str, tied: bool, transferred: Any, seeds: int = SEEDS
) -> dict[tuple[int, str], float]:
    """Of log2 RMS in log2 width, over the ladder, the mean of seeds."""
    x = torch.tensor([math.log2(width) for width in LADDER], dtype=torch.float64)
    x -= x.mean()
    measured = [
        [sizes(width, tied, seed, rule, transferred) for seed in range(seeds)] for width in LADDER
    ]
    found = {}
    for key in measured[0][0]:
        y = torch.tensor(
            [sum(math.log2(each[key]) for each in those) / seeds for those in measured],
            dtype=x.dtype,
        )
        found[key] = float(x @ y / (x @ x))
    return found


def outside(
    found: dict[tuple[int, str], float], rule: str, tied: bool
) -> dict[tuple[int, str], float]:
    """Slopes that are not what they should be."""
    odd = {}
    for (update, name), slope in found.items():
        lowest = highest = 0.0
        # The tied head's share of 1/m is the final gain's. With it the logits of random weights
        # fall as m^-1/2; what is learned does not, and outgrows them.
        if tied and name in ("model.norm", "scale_last"):
            lowest = highest = -1.0
        elif tied and name == "lm_head":
            lowest, highest = -0.5, (0.0 if update else -0.5)
        below, above = (
            (ALLOWED_BELOW, ALLOWED[rule]) if update else (ALLOWED_AT_FIRST, ALLOWED_AT_FIRST)
        )
        if not lowest - below <= slope <= highest + above:
            odd[update, name] = slope
    return odd


@pytest.mark.parametrize(("rule", "tied"), HEADS, ids=str)
def test_activations_and_their_updates_keep_their_size(rule: str, tied: bool) -> None:
    assert not outside(slopes(rule, tied, with_transfer), rule, tied)


@pytest.mark.parametrize(("rule", "tied"), HEADS, ids=str)
def test_without_transfer_they_do_not(rule: str, tied: bool) -> None:
    """The check has power: at one rate for all widths the residual stream moves by more the wider,
    and ever more.
    """
    found = slopes(rule, tied, without_transfer, FEW_SEEDS)
    odd = outside(found, rule, tied)
    assert (0, "model.embed_tokens") in odd and (1, f"{BLOCKS[0]}.self_attn.q_proj") in odd
    first, last = (found[update, BLOCKS[0]] for update in CHECKED)
    assert last > max(first, ALLOWED[rule])


MUTANTS = [
    pytest.param("adamw", HEAD, 1.0, marks=pytest.mark.slow),
    ("adamw", DOWN, 1.0),
    pytest.param("adamw", Q, 1.0, marks=pytest.mark.slow),
    pytest.param("adamw", EMBEDDING, -1.0, marks=pytest.mark.slow),
    pytest.param("muon", DOWN, 0.5, marks=pytest.mark.slow),
    pytest.param("muon", HEAD, 1.0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("rule", "pattern", "power"), MUTANTS)
def test_it_sees_a_wrong_rate(rule: str, pattern: str, power: float) -> None:
    """Too high by that power of m: as in the base, where the table says 1/m or m^-1/2; or too low
    by 1/m.
    """

    def mutated(model: Llama, transfer: WidthTransfer, optim: Optimizer) -> Optimizer:
        right, factor = with_transfer(model, transfer, optim), transfer.width_ratio**power
        groups = [
            replace(group, lr=group.lr * factor) if group.pattern == pattern else group
            for group in right.groups
        ]
        return replace(right, groups=groups)

    assert outside(slopes(rule, False, mutated, FEW_SEEDS), rule, False)


# ---- (d) the best rate stays where it is ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_best_rate_stays_within_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """At four times the width, judged by the vertex; without transfer it moves by one step for each
    doubling.
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sweep = script("benchmarks/transfer.py")
    text = mono.corpus(
        sweep.source(), tokenizer="bytes", sequence_length=sweep.LENGTH, held_out=0.1
    )
    grid = (tuple(2.0**k for k in range(-9, -3)), sweep.SEEDS, sweep.UPDATES)
    way = sweep.Way("adamw", tied=False, transfer=True)
    narrow, carried = (sweep.measured(way, width, 32, text, grid) for width in (32, 128))
    plain = sweep.measured(replace(way, transfer=False), 128, 32, text, grid)
    assert narrow["bracketed"] and carried["bracketed"]
    assert (
        abs(carried["vertex_log2"] - narrow["vertex_log2"])
        <= 1
        < narrow["vertex_log2"] - plain["vertex_log2"]
    )
