# Run: pytest tests/test_muon.py
"""Muon against a float64 reference that works on singular values and against torch's own; what it
takes of a module.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batches import tiny_llama
from monograph.errors import InputRefused, UsageError
from monograph.graph.precision import Precision
from monograph.laws.comparisons import error_within, relative_error
from monograph.optim import (
    AdamW,
    Group,
    Hyperparameters,
    Muon,
    hidden_matrices,
    muon_,
    newton_schulz,
)
from monograph.resident import Resident
from monograph.step import Step
from reference import optimizers as reference

# What rounding becomes at most: f's slope at 0, once for each of the iterations.
AMPLIFIED = reference.A**5
EPS64 = torch.finfo(torch.float64).eps


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, 10), nn.LayerNorm(10), nn.Linear(10, width)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x)))


class Net(nn.Module):
    """An embedding, two blocks, a head: what Muon divides up."""

    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 7)


HIDDEN = [f"layers.{i}.{part}.weight" for i in (0, 1) for part in ("up", "down")]


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype)


def given_gradient(model, batch):
    """A loss whose gradient is the batch, whatever the parameters are."""
    return sum((p * batch[name]).sum() for name, p in model.named_parameters()), torch.tensor(1)


def gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(p.shape, generator=generator, dtype=torch.float64)
        for n, p in model.named_parameters()
    }


# ---- Newton-Schulz -------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 10**6), st.floats(-6, 6))
def test_it_acts_on_singular_values_alone(rows, cols, seed, magnitude):
    stack = torch.randn(
        2, 3, rows, cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    stack = stack * 10**magnitude
    result = newton_schulz(stack, torch.float64)
    for member in range(2):
        for each in range(3):
            exact = reference.orthogonalised(stack[member, each])
            assert relative_error(result[member, each], exact) <= AMPLIFIED * 10 * EPS64


@pytest.mark.parametrize("shape", [(16, 16), (24, 8), (8, 24), (1, 9), (9, 1)])
def test_in_fp32_it_is_as_good_as_the_plain_iteration(shape):
    stack = torch.randn(5, *shape, generator=torch.Generator().manual_seed(1))
    plain = torch.stack([reference.jordan(matrix) for matrix in stack])
    exact = torch.stack([reference.orthogonalised(matrix) for matrix in stack])
    assert error_within(newton_schulz(stack, torch.float32), plain, exact)


def test_singular_values_end_near_one():
    singular = torch.linspace(0.003, 1, 50, dtype=torch.float64)
    result = torch.linalg.svdvals(
        newton_schulz(torch.diag(singular / singular.norm())[None], torch.float64)[0]
    )
    small = singular / singular.norm() < 0.002
    assert 0.68 < float(result[: 50 - int(small.sum())].min()) and float(result.max()) < 1.21


def test_a_tall_matrix_costs_what_a_wide_one_does():
    wide = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(newton_schulz(wide.mT, torch.float32), newton_schulz(wide, torch.float32).mT)


def test_no_gradient_no_direction():
    assert not newton_schulz(torch.zeros(2, 4, 6), torch.float32).any()


# ---- the update ----------------------------------------------------------------------------------


def references(model, dtype):
    """Each parameter of `Net` under its own reference."""
    made = {}
    for name, parameter in model.named_parameters():
        tensor, decay = parameter.detach().to(dtype), 0.2 if parameter.ndim == 2 else 0.0
        made[name] = (
            reference.Muon(tensor, 0.03, 0.9, decay)
            if name in HIDDEN
            else reference.AdamW(tensor, 0.03, (0.8, 0.9), 1e-6, decay)
        )
    return made


SETTINGS = {"lr": 0.03, "momentum": 0.9, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_many_updates_equal_the_reference(dtype):
    model, updates = net(dtype), 30
    exact, naive = references(model, torch.float64), references(model, dtype)
    step = Step(model, loss=given_gradient, optim=Muon(**SETTINGS))
    for seed in range(updates):
        grads = gradients(model, seed)
        step([{name: grad.to(dtype) for name, grad in grads.items()}])
        for name, grad in grads.items():
            exact[name].update(grad.to(dtype).double())
            naive[name].update(grad.to(dtype))
    for name, parameter in model.named_parameters():
        if dtype == torch.float64:
            assert relative_error(parameter, exact[name].param) <= updates * AMPLIFIED * EPS64, name
        else:
            assert error_within(parameter, naive[name].param, exact[name].param), name


def test_a_momentum_that_warms_up_goes_along_a_line_and_a_skipped_update_is_no_step_of_it():
    """The public speedrun's: (1 - frac) 0.85 + frac 0.95 with frac = min(update / 4, 1), from update 0."""
    model = net(torch.float64)
    exact = references(model, torch.float64)
    settings = SETTINGS | {"momentum": 0.95, "momentum_warmup": 4}
    step = Step(model, loss=given_gradient, optim=Muon(**settings))
    applied = 0
    for seed in range(8):
        grads = gradients(model, seed)
        is_skipped = seed in (0, 3)
        factor = float("nan") if is_skipped else 1.0
        step([{name: factor * grad for name, grad in grads.items()}])
        if is_skipped:
            continue
        frac = min(applied / 4, 1)
        applied += 1
        for name, grad in grads.items():
            if name in HIDDEN:
                exact[name].mu = (1 - frac) * 0.85 + frac * 0.95
            exact[name].update(grad.double())
    for name, parameter in model.named_parameters():
        assert relative_error(parameter, exact[name].param) <= 8 * AMPLIFIED * EPS64, name


@pytest.mark.parametrize(
    "wrong", [{"momentum_warmup": -1}, {"momentum_warmup": 0.5}, {"first_momentum": 1}]
)
def test_a_warm_up_that_is_none_is_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Muon(**wrong)


def test_members_whose_momenta_differ_warm_up_as_they_do_alone():
    generator, members = torch.Generator().manual_seed(3), 2
    param, grad, buffer = torch.randn(3, members, 2, 5, 4, generator=generator, dtype=torch.float64)
    last, lr = torch.tensor([0.9, 0.8], dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    applied, yes = torch.tensor([2, 5]), torch.tensor(True)

    def hyper(last, applied):
        return Hyperparameters(lr, (last, 0.5, 4), 0.0, 0.0, applied, yes, torch.float64)

    stacked = param.clone(), buffer.clone()
    shape = (members, 1, 1, 1)
    muon_(stacked[0], grad, stacked[1:], hyper(last.view(shape), applied.view(shape)))
    for i, momentum in enumerate((0.5 + 0.4 * 1 / 4, 0.8)):
        alone = param[i].clone(), buffer[i].clone()
        muon_(alone[0], grad[i], alone[1:], numbers(lr, momentum, 0.0, yes))
        for ours, theirs in zip(stacked, alone, strict=True):
            assert relative_error(ours[i], theirs) <= AMPLIFIED * EPS64


def test_it_is_as_close_as_torch_s_muon():
    """torch's works in bf16 always, so ours does here; both against the float64 reference."""
    model, theirs = net(torch.float32), net(torch.float32)
    exact = references(model, torch.float64)
    step = Step(model, loss=given_gradient, optim=Muon(**SETTINGS), precision=Precision("bf16"))
    optimizer = torch.optim.Muon(
        [p for n, p in theirs.named_parameters() if n in HIDDEN],
        lr=0.03, momentum=0.9, weight_decay=0.2, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    for seed in range(20):
        grads = gradients(model, seed)
        step([{name: grad.float() for name, grad in grads.items()}])
        for name, parameter in theirs.named_parameters():
            parameter.grad = grads[name].float()
            exact[name].update(grads[name].float().double())
        optimizer.step()
    for name, parameter in theirs.named_parameters():
        if name in HIDDEN:
            ours = model.get_parameter(name)
            assert relative_error(parameter, exact[name].param) > 1e-4, (
                "torch's did not compute in bf16"
            )
            assert error_within(ours, parameter, exact[name].param), name


def numbers(lr, momentum, weight_decay, accepted):
    """Of one update of Muon, with products in fp64; how many came before makes no difference."""
    return Hyperparameters(
        lr, (momentum,), 0.0, weight_decay, torch.tensor(1), accepted, torch.float64
    )


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 64)])
def test_an_update_has_the_size_of_adamw_s(shape):
    """RMS 0.2 lr times f, between 0.68 and 1.21: what lets one learning rate serve both."""
    param = torch.zeros(1, *shape, dtype=torch.float64)
    grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    yes = torch.tensor(True)
    lr, zero = torch.tensor(0.5, dtype=torch.float64), torch.zeros_like(param)
    muon_(param, grad, [zero], numbers(lr, 0.95, 0.0, yes))
    assert 0.68 < float(param.square().mean().sqrt()) / (0.2 * 0.5) < 1.21


def test_members_with_knobs_of_their_own_equal_members_alone():
    generator, members = torch.Generator().manual_seed(3), 3
    param, grad, buffer = torch.randn(3, members, 2, 5, 4, generator=generator, dtype=torch.float64)
    knobs = {
        name: torch.tensor(values, dtype=torch.float64).view(members, 1, 1, 1)
        for name, values in {
            "lr": [0.1, 0.2, 0.3],
            "momentum": [0.9, 0.8, 0.0],
            "weight_decay": [0, 0.1, 1],
        }.items()
    }
    accepted = torch.tensor([True, False, True]).view(members, 1, 1, 1)
    stacked = param.clone(), buffer.clone()
    muon_(stacked[0], grad, stacked[1:], numbers(accepted=accepted, **knobs))
    for i in range(members):
        alone = param[i].clone(), buffer[i].clone()
        each = {name: knob[i] for name, knob in knobs.items()}
        muon_(alone[0], grad[i], alone[1:], numbers(accepted=accepted[i], **each))
        for ours, theirs, before in zip(stacked, alone, (param[i], buffer[i]), strict=True):
            assert relative_error(ours[i], theirs) <= AMPLIFIED * EPS64
            assert torch.equal(ours[i], before) == (i == 1)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_a_non_finite_gradient_skips_exactly_that_update(poison):
    clean, poisoned = (
        Step(net(torch.float32), loss=given_gradient, optim=Muon(ema=0.9), clip=1.0)
        for _ in range(2)
    )
    windows = [{n: g.float() for n, g in gradients(clean.model, seed).items()} for seed in range(5)]
    for index, window in enumerate(windows):
        clean([window])
        if index == 3:
            assert int(poisoned([{n: g * poison * poison for n, g in window.items()}]).skipped) == 1
        poisoned([window])
    for mine, its in zip(clean.planes, poisoned.planes, strict=True):
        assert torch.equal(mine.param, its.param)
        assert all(torch.equal(mine.state[k], its.state[k]) for k in mine.state)


# ---- which parameters, which names ---------------------------------------------------------------


def test_matrices_of_one_shape_share_a_plane_and_names_stay():
    model = tiny_llama()
    engine = Resident(model, optim=Muon())
    shapes = [plane.kind.matrix_shape for plane in engine.step.planes if plane.kind.matrix_shape]
    assert len(shapes) == len(set(shapes)) < len(hidden_matrices(model))
    momentum = {
        n.partition(".")[2] for n in engine.state().optimizer if n.startswith("momentum_buffer.")
    }
    moments = {n.partition(".")[2] for n in engine.state().optimizer if n.startswith("exp_avg_sq.")}
    assert momentum == {*hidden_matrices(model)}
    assert momentum | moments == {n for n, _ in model.named_parameters()} and not momentum & moments
    parameters = dict(model.named_parameters())
    for name, tensor in engine.state().optimizer.items():
        assert tensor.shape == parameters[name.partition(".")[2]].shape


def test_names_and_shapes_of_the_state_do_not_depend_on_the_grouping():
    groups = [Group("*.down_proj.*", lr=0.5), Group("*norm*", weight_decay=0.1)]
    plain, grouped = (Resident(tiny_llama(), optim=Muon(groups=g)).state() for g in ((), groups))
    for mine, its in ((plain.model, grouped.model), (plain.optimizer, grouped.optimizer)):
        assert {n: t.shape for n, t in mine.items()} == {n: t.shape for n, t in its.items()}


def test_the_embedding_s_rate_is_a_factor_of_its_group_s():
    groups = [Group("*embed_tokens*", lr=2.0), Group("*.q_proj.*", lr=0.5)]
    plain, raised = (
        Muon(groups=groups, embedding_lr=factor).kinds(tiny_llama()) for factor in (1.0, 3.0)
    )
    factors = {
        name: kind.lr / plain[name].lr for name, kind in raised.items() if kind != plain[name]
    }
    assert (
        factors == {"model.embed_tokens.weight": 3.0}
        and raised["model.embed_tokens.weight"].lr == 6.0
    )


def test_another_optimizer_s_state_is_refused_by_name():
    adamw, muon, averaged = (
        Resident(tiny_llama(), optim=o) for o in (AdamW(), Muon(), Muon(ema=0.9))
    )
    with pytest.raises(InputRefused, match=r"'exp_avg.model.layers.0.*' is unknown: .*optim.name"):
        muon.load_state(adamw.state())
    with pytest.raises(InputRefused, match=r"'exp_avg.model.layers.0.*' is missing"):
        adamw.load_state(muon.state())
    with pytest.raises(InputRefused, match=r"'ema.*' is missing: .*optim.ema"):
        averaged.load_state(muon.state())


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_head_norms_and_biases_are_adamw_s(tied):
    names = hidden_matrices(tiny_llama(tie_word_embeddings=tied))
    assert len(names) == 2 * 7 and all(name.startswith("model.layers.") for name in names)
    assert hidden_matrices(net()) == HIDDEN


def test_an_embedding_inside_a_block_is_no_matrix():
    block = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    model = nn.ModuleDict({"blocks": nn.ModuleList([block])})
    assert hidden_matrices(model) == ["blocks.0.1.weight"]
    block[1].weight.requires_grad_(False)
    assert hidden_matrices(model) == []


def test_the_matrices_can_be_named():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with pytest.raises(UsageError, match=r"no matrix inside a block.*Muon\(matrices="):
        Muon().kinds(model)
    kinds = Muon(matrices=["0.*weight"]).kinds(model)
    assert [name for name, kind in kinds.items() if kind.matrix_shape] == ["0.weight"]
    with pytest.raises(
        UsageError, match=r"'first.*' matches no trainable parameter.*such as '0.weight'"
    ):
        Muon(matrices=["0.weight", "first.*"]).kinds(model)
    with pytest.raises(UsageError, match=r"0.bias has 1 dimensions, not 2"):
        Muon(matrices=["0.*"]).kinds(model)


@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_each_expert_is_updated_as_a_matrix_of_its_own(state):
    sizes = {
        "model_type": "qwen3_moe",
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
    }
    model = tiny_llama(torch.float64, **sizes)
    names = [name for name in hidden_matrices(model) if "experts" in name]
    assert len(names) == 2 * 3 and "model.layers.0.mlp.gate.weight" in hidden_matrices(model)
    before, grads = (
        {n: p.detach().clone() for n, p in model.named_parameters()},
        gradients(model, 0),
    )
    step = Step(model, loss=given_gradient, optim=Muon(lr=0.1, state=state), clip=None)
    step([grads])
    for name in names:
        for expert, (weight, grad) in enumerate(zip(before[name], grads[name], strict=True)):
            lr, yes = torch.tensor(0.1, dtype=torch.float64), torch.tensor(True)
            zero = torch.zeros_like(grad)[None]
            muon_(weight[None], grad[None], [zero], numbers(lr, 0.95, 0.1, yes))
            assert relative_error(model.get_parameter(name)[expert], weight) < 1e-12
