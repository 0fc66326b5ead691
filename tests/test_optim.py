# Run: pytest tests/test_optim.py
"""Planes, groups, AdamW and the moving average, against torch's optimizer and independent loops in
float64.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batches import flat_gradient, ragged, tiny_llama
from monograph.errors import UsageError
from monograph.laws.comparisons import error_within, relative_error
from monograph.optim import AdamW, Group, Hyperparameters, adamw_, ema_, planes
from monograph.optim.planes import trainable
from monograph.optim.updates import _broadcast
from monograph.resident import Resident
from monograph.step import Step
from reference import optimizers as reference


def loss(model, batch):
    return model(batch).square().sum(), torch.tensor(batch.shape[0])


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_ten_updates_equal_torch_s_adamw(clip):
    ours, theirs = network(), network()
    step = Step(
        ours,
        loss=loss,
        optim=AdamW(lr=0.03, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2),
        clip=clip,
    )
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.2},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.03, betas=(0.8, 0.9), eps=1e-6)
    for seed in range(10):
        batch = torch.randn(
            4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        result = step([batch[:1], batch[1:]])
        optimizer.zero_grad()
        (loss(theirs, batch)[0] / 4).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip if clip else math.inf)
        optimizer.step()
        assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-12)
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-13)


def test_one_scalar_by_hand():
    """The equation itself, number by number, independent of torch's optimizer."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, 2.0)
    step = Step(
        model,
        loss=lambda m, b: ((m.weight * b).sum(), torch.tensor(1)),
        optim=AdamW(0.1, (0.5, 0.75), 1e-3, 0.25),
    )
    p, m, v = 2.0, 0.0, 0.0
    for t, g in enumerate((3.0, -1.0, 0.5), start=1):
        step([torch.tensor(g, dtype=torch.float64)])
        m, v = 0.5 * m + 0.5 * g, 0.75 * v + 0.25 * g * g
        p = p * (1 - 0.1 * 0.25) - 0.1 * (m / (1 - 0.5**t)) / (math.sqrt(v / (1 - 0.75**t)) + 1e-3)
        assert model.weight.item() == pytest.approx(p, rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@given(seed=st.integers(0, 10**6), lr=st.floats(1e-5, 0.3), decay=st.floats(0, 1))
@settings(max_examples=20)
def test_many_updates_equal_the_reference(dtype, seed, lr, decay):
    """Rows are members with learning rates and decays of their own; each is one tensor under the
    reference.
    """
    generator, updates = torch.Generator().manual_seed(seed), 15
    param = torch.randn(3, 40, generator=generator, dtype=dtype)
    rates = torch.tensor([[lr], [lr / 3], [0.0]], dtype=torch.float64)
    decays = torch.tensor([[decay], [0.0], [decay]], dtype=torch.float64)
    exact, naive = (
        [
            reference.AdamW(param[i].to(d), float(rates[i]), (0.9, 0.95), 1e-8, float(decays[i]))
            for i in range(3)
        ]
        for d in (torch.float64, dtype)
    )
    m, v, yes = torch.zeros_like(param), torch.zeros_like(param), torch.tensor(True)
    for t in range(1, updates + 1):
        grad = torch.randn(param.shape, generator=generator, dtype=dtype)
        hyper = Hyperparameters(rates, (0.9, 0.95), 1e-8, decays, torch.tensor(t), yes)
        adamw_(param, grad, (m, v), hyper)
        for i in range(3):
            exact[i].update(grad[i].double())
            naive[i].update(grad[i])
    for i in range(3):
        if dtype == torch.float64:  # each update rounds a few times what it adds
            assert relative_error(param[i], exact[i].param) <= 8 * updates * torch.finfo(dtype).eps
        else:
            assert error_within(param[i], naive[i].param, exact[i].param)


def test_every_knob_may_differ_from_member_to_member():
    param, grad, m = torch.randn(
        3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    v, t = grad.square(), torch.tensor([[3], [1], [7], [2]])
    knobs = {
        "lr": [0.1, 0.2, 0.0, 0.3],
        "eps": [1e-8, 1e-3, 1e-8, 0.1],
        "weight_decay": [0.0, 0.1, 1.0, 0.5],
    }
    knobs = {
        name: torch.tensor(values, dtype=torch.float64)[:, None] for name, values in knobs.items()
    }
    betas = tuple(
        torch.tensor(values, dtype=torch.float64)[:, None]
        for values in ([0.9, 0.8, 0, 0.5], [0.95] * 4)
    )
    accepted = torch.tensor([True, True, False, True])[:, None]
    stacked = [tensor.clone() for tensor in (param, m, v)]
    hyper = Hyperparameters(betas=betas, applied=t, accepted=accepted, **knobs)
    adamw_(stacked[0], grad, stacked[1:], hyper)
    for i in range(4):
        alone = [tensor[i].clone() for tensor in (param, m, v)]
        mine = {name: float(knob[i]) for name, knob in knobs.items()} | {"lr": knobs["lr"][i]}
        mine["betas"] = tuple(float(beta[i]) for beta in betas)
        hyper = Hyperparameters(applied=t[i], accepted=accepted[i], **mine)
        adamw_(alone[0], grad[i], alone[1:], hyper)
        assert all(torch.equal(ours[i], one) for ours, one in zip(stacked, alone, strict=True))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_a_non_finite_gradient_skips_exactly_that_update(poison):
    clean, poisoned = (Step(network(torch.float32), loss=loss, clip=1.0) for _ in range(2))
    batches = [torch.randn(4, 5, generator=torch.Generator().manual_seed(s)) for s in range(6)]
    for batch in batches:
        clean([batch])
    for i, batch in enumerate(batches):
        if i == 3:
            result = poisoned([batches[0], torch.full((2, 5), poison)])
            assert int(result.skipped) == 1
        result = poisoned([batch])
    assert int(result.skipped) == 1 and result.index == 6
    for mine, its in zip(clean.planes, poisoned.planes, strict=True):
        assert torch.equal(mine.param, its.param)
        assert all(torch.equal(mine.state[k], its.state[k]) for k in mine.state)


def test_planes_keep_names_values_and_ties():
    model = tiny_llama(tie_word_embeddings=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    groups = planes(trainable(model), AdamW().kinds(model))
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(p.param.numel() for p in groups) == sum(p.numel() for p in model.parameters())
    assert [p.kind.weight_decay for p in groups] == [0.1, 0.0]
    assert all(placed.parameter.ndim >= 2 for placed in groups[0].placed) and all(
        placed.parameter.ndim < 2 for placed in groups[1].placed
    )
    groups[0].param.zero_()
    assert not model.model.embed_tokens.weight.any()


def test_gradients_that_somebody_dropped_are_linked_again():
    step = Step(network(), loss=loss)
    step.model.zero_grad(set_to_none=True)
    assert float(step([torch.ones(2, 5, dtype=torch.float64)]).grad_norm) > 0


def test_gradients_are_those_of_a_plane_that_got_other_memory():
    model = nn.Linear(3, 2)
    plane = planes(trainable(model), AdamW().kinds(model))[0]
    plane.grad = torch.ones_like(plane.grad)
    plane.link()
    assert plane.placed[0].parameter.grad.data_ptr() == plane.grad.data_ptr()


def test_gradients_are_not_views_to_autograd():
    """A compiler looks at each view's base as well, with sizes that are symbols, which takes time
    (dev/log.md).
    """
    step = Step(tiny_llama())
    for plane in step.planes:
        for _, parameter, offset in plane.placed:
            assert parameter.grad is not None and not parameter.grad._is_view()
            assert parameter.grad.data_ptr() == plane.grad[offset:].data_ptr()


def test_frozen_parameters_stay():
    model = network()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    Step(model, loss=loss)([torch.ones(2, 5, dtype=torch.float64)])
    assert torch.equal(model[0].weight, before)


def test_nothing_to_train_and_mixed_dtypes_are_refused():
    with pytest.raises(UsageError, match="no trainable parameter"):
        Step(network().requires_grad_(False), loss=loss)
    mixed = network()
    mixed[0].float()
    with pytest.raises(UsageError, match="one dtype and device"):
        Step(mixed, loss=loss)


# ---- groups --------------------------------------------------------------------------------------


def test_groups_equal_torch_s_parameter_groups():
    ours, theirs = network(), network()
    groups = [
        Group("0.bias", lr=0.1, weight_decay=0.5, eps=1e5),
        Group("2.*", lr=3.0),
        Group("*.bias", lr=7.0),
    ]
    step = Step(ours, loss=loss, optim=AdamW(lr=0.03, weight_decay=0.2, groups=groups))
    expected = {
        "0.weight": (1, 0.2),
        "0.bias": (0.1, 0.5),
        "1.weight": (1, 0),
        "1.bias": (7, 0),
        "2.weight": (3, 0.2),
    }
    expected["2.bias"] = (3, 0)  # the first group that matches counts
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [theirs.get_parameter(name)],
                "lr": 0.03 * lr,
                "weight_decay": decay,
                "eps": 1e-3 if name == "0.bias" else 1e-8,
            }
            for name, (lr, decay) in expected.items()
        ],
        betas=(0.9, 0.95),
    )
    for seed in range(5):
        batch = torch.randn(
            4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        step([batch])
        optimizer.zero_grad()
        (loss(theirs, batch)[0] / 4).backward()
        optimizer.step()
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "groups", [[Group("3.*")], [Group("*"), Group("2.bias")]], ids=["unknown", "hidden"]
)
def test_a_group_that_matches_nothing_is_refused_by_name(groups):
    with pytest.raises(
        UsageError, match=rf"group '{groups[-1].pattern[0]}.*' matches no .* such as '0.weight'"
    ):
        AdamW(groups=groups).kinds(network())


# ---- moving average ------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.9999])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_average_is_the_weighted_mean_of_all_that_the_weights_were(decay, dtype):
    step = Step(network(dtype), loss=loss, optim=AdamW(lr=0.01, ema=decay))
    history = [[] for _ in step.planes]
    for seed in range(30):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        step([batch if seed % 10 else batch * float("nan")])
        if seed % 10:
            for kept, plane in zip(history, step.planes, strict=True):
                kept.append(plane.param.clone())
    for kept, plane in zip(history, step.planes, strict=True):
        # Each of the updates rounds the average once.
        bound = 2 * len(kept) * torch.finfo(dtype).eps
        assert relative_error(plane.state["ema"], reference.moving_average(kept, decay)) <= bound


def test_an_average_per_member():
    average, param = torch.randn(
        2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    decays = torch.tensor([[0.9], [0.5], [0.99]], dtype=torch.float64)
    applied, accepted = torch.tensor([[1], [5], [2]]), torch.tensor([[True], [True], [False]])
    stacked = average.clone()
    ema_(stacked, param, decay=decays, applied=applied, accepted=accepted)
    assert torch.equal(stacked[0], param[0]) and torch.equal(stacked[2], average[2])
    torch.testing.assert_close(
        stacked[1], average[1] + 0.5 / (1 - 0.5**5) * (param[1] - average[1])
    )


def test_training_is_the_same_with_an_average_and_evaluation_is_of_the_average():
    plain, averaging = (
        Resident(tiny_llama(), optim=AdamW(lr=1e-2, ema=ema), clip=1.0) for ema in (None, 0.8)
    )
    for seed in range(4):
        for engine in (plain, averaging):
            engine.accumulate(ragged(4, seed=seed))
        assert torch.equal(flat_gradient(plain.model), flat_gradient(averaging.model))
        assert float(plain.update().loss) == float(averaging.update().loss)
    state = averaging.state()
    average = {
        n.removeprefix("ema."): t.clone()
        for n, t in state.optimizer.items()
        if n.startswith("ema.")
    }
    assert average.keys() == state.model.keys() and {*plain.state().optimizer} == {
        n for n in state.optimizer if not n.startswith("ema.")
    }
    before = {n: t.clone() for n, t in state.model.items()}
    score = averaging.evaluate(ragged(6))
    assert all(torch.equal(t, before[n]) for n, t in averaging.state().model.items())
    other = Resident(tiny_llama())
    other.model.load_state_dict(average)
    assert torch.equal(score[0], other.evaluate(ragged(6))[0]) and not torch.equal(
        score[0], plain.evaluate(ragged(6))[0]
    )
    with averaging.step.averaged():
        assert all(torch.equal(t, average[n]) for n, t in averaging.model.state_dict().items())
        assert torch.equal(averaging.evaluate(ragged(6))[0], score[0]), (
            "inside it is the same average"
        )
    with pytest.raises(ValueError, match="odd"), averaging.step.averaged():
        raise ValueError("odd")
    assert all(torch.equal(t, before[n]) for n, t in averaging.state().model.items())


def test_before_the_first_update_the_average_is_the_weights():
    engine = Resident(tiny_llama(), optim=AdamW(ema=0.9))
    assert torch.equal(engine.evaluate(ragged(4))[0], Resident(tiny_llama()).evaluate(ragged(4))[0])


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, float("nan")])
def test_a_decay_that_is_none_is_refused(decay):
    with pytest.raises(UsageError, match="ema = .*between 0 and 1"):
        Step(network(), loss=loss, optim=AdamW(ema=decay))


def test_a_member_s_number_is_spread_over_all_of_its_elements():
    stack, knob = torch.ones(2, 3, 4), torch.tensor([2.0, 5.0])
    assert torch.equal(
        _broadcast(stack, knob) * stack, torch.stack([torch.full((3, 4), each) for each in knob])
    )
    assert _broadcast(stack, 3.0) == 3.0 and _broadcast(stack, knob[1]).ndim == 0


COPYING = """
import torch
from torch import nn
from monograph.optim.optimizer import ParameterKind
from monograph.optim.planes import planes

def peak_mib():
    status = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(status["VmHWM"].split()[0]) // 1024

# 16 parameters of 16 MiB, and of one element more, so that there are gaps.
named = {f"w{n}": nn.Parameter(torch.ones(4 * 2**20 + 1)) for n in range(16)}
before = peak_mib()
zeros = torch.zeros

def gradients(*sizes, **options):
    print(peak_mib() - before)
    return zeros(*sizes, **options)

torch.zeros = gradients
planes(named, dict.fromkeys(named, ParameterKind(None, 1.0, 0.0)), "%s")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("state", [pytest.param("fp32", marks=pytest.mark.slow), "8bit"])
def test_on_a_cpu_a_plane_is_never_a_second_copy_of_its_parameters(state: str) -> None:
    # Without the variable, glibc keeps some freed parameters.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", COPYING % state]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    [more_mib] = ran.stdout.split()
    assert int(more_mib) < 3 * 16, "all parameters are 256 MiB"
