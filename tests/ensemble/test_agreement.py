# Run: pytest tests/ensemble/test_agreement.py
"""Members that cannot share a graph are refused, with the path that differs; what may differ does
not hinder.
"""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import torch
from torch import nn

from monograph.ensemble import Ensemble, grid
from monograph.ensemble.stack import Stack
from monograph.errors import InputRefused, UsageError
from monograph.graph.siblings import fuse_siblings
from monograph.loop import train
from monograph.optim import AdamW, Muon
from monograph.profiling.memory import LiveBytes
from monograph.resident import Resident
from monograph.schedule import constant
from zoo import MLP, of_classes, zoo


class Two(nn.Module):
    def __init__(self, change=None):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 5), nn.ReLU())
        self.scale, self.shape = 2.0, {"sides": (1, 2)}
        self.register_buffer("mean", torch.zeros(3))
        if change:
            change(self)

    def forward(self, x):
        return self.inner(self.second(self.first(x)) * self.scale)


def put(path, value):
    def change(module):
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, value() if callable(value) else value)

    return change


def tie(module):
    module.second.weight = module.first.weight


DIFFERENT = {
    "another class": (put("inner.1", nn.Tanh), r"inner\.1 is ReLU in one and Tanh in the other"),
    "another shape": (
        put("inner.0", lambda: nn.Linear(8, 6)),
        r"inner\.0\.weight is \[5, 8\] float32 .*\[6, 8\]",
    ),
    "no bias": (
        put("second", lambda: nn.Linear(8, 8, bias=False)),
        r"second\.bias is \[8\] .* and none in the other",
    ),
    "another dtype": (lambda m: m.first.double(), r"first\.weight is .*float32 .* float64"),
    "a frozen weight": (
        lambda m: m.first.weight.requires_grad_(False),
        r"first\.weight is .* \[8, 8\] .*frozen",
    ),
    "another mode": (lambda m: m.inner.eval(), r"inner\.training is True in one and False"),
    "a tie": (tie, r"first\.weight is not tied in one and tied to second\.weight"),
    "another number": (put("scale", 3.0), r"scale is 2\.0 in one and 3\.0 in the other"),
    "a deep attribute": (put("shape", lambda: {"sides": (1, 3)}), r"shape is another dict"),
    "a missing attribute": (lambda m: delattr(m, "scale"), r"scale is 2\.0 in one and absent"),
    "one more part": (put("third", nn.ReLU), r"third is absent in one and ReLU"),
    "a buffer's shape": (
        lambda m: m.register_buffer("mean", torch.zeros(4)),
        r"mean is \[3\] .* \[4\]",
    ),
    "a tensor that is no buffer": (
        put("table", lambda: torch.ones(2)),
        r"table is absent in one and another Tensor",
    ),
    "a function": (put("act", lambda: lambda x: x + 1), r"act is absent"),
    "a hook": (lambda m: m.first.register_forward_hook(print), r"first\.hooks is 0 of its own"),
}


class Config:
    def __init__(self, **values):
        self._name_or_path, self.deep = "here", Odd(1)
        vars(self).update(values)


def test_what_differs_in_a_config_is_named_and_where_it_came_from_is_no_difference():
    with pytest.raises(InputRefused, match=r"config\.eps is 0\.1 in one and 0\.2 in the other"):
        Stack([Two(put("config", Config(eps=eps))) for eps in (0.1, 0.2)])
    with pytest.raises(InputRefused, match=r"config\.deep\.value is 1 in one and 2 in the other"):
        Stack([Two(put("config", Config(deep=Odd(value)))) for value in (1, 2)])
    Stack([Two(put("config", Config(_name_or_path=path))) for path in ("one", "other")])


def test_members_that_share_what_changes_are_refused():
    def of_both(part):
        return [Two(put("second", lambda: part)) for _ in range(2)]

    for part, said in (
        (nn.Linear(8, 8), r"second\.weight"),
        (nn.BatchNorm1d(8, affine=False), "second"),
    ):
        with pytest.raises(InputRefused, match=f"members 0 and 1 share {said}: build one for each"):
            Stack(of_both(part))
    Stack(of_both(nn.Linear(8, 8).requires_grad_(False)))


@pytest.mark.parametrize("name", DIFFERENT)
def test_members_that_differ_are_refused_with_the_path(name):
    change, said = DIFFERENT[name]
    with pytest.raises(
        InputRefused, match=rf"members 0 and 2 cannot share a graph: .*{said}"
    ) as refusal:
        Stack([Two(), Two(), Two(change)])
    assert "\n" not in str(refusal.value)


class Odd:
    """A value without __eq__ of its own, as many configurations are."""

    def __init__(self, value):
        self.value, self.self = value, self

    def times(self, x):
        return x * self.value


def closure(value):
    return lambda x: x * value


def functions(value):
    """A function with the value in each of the places where a function keeps one."""

    def by_keyword(x, *, k=value):
        return x * k

    def labelled(x):
        return x * labelled.k

    labelled.k = value
    default = lambda x, k=value: x * k  # noqa: E731
    of_others = [
        functools.partial(default, 1, k=value),
        functools.lru_cache(default),
        functools.wraps(default)(by_keyword),
    ]
    return [default, by_keyword, labelled, Odd(value).times, *of_others]


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (Odd(1), Odd(1), True),
        (Odd(1), Odd(2), False),
        (closure(2), closure(2), True),
        (closure(2), closure(3), False),
        *((one, same, True) for one, same in zip(functions(2), functions(2), strict=True)),
        *((one, other, False) for one, other in zip(functions(2), functions(3), strict=True)),
        (float("nan"), float("nan"), True),
        (float("nan"), 2.0, False),
        (0.0, -0.0, False),
        (np.ones(3), np.ones(3), True),
        (np.ones(3), np.zeros(3), False),
        (torch.ones(3), torch.ones(3), True),
        (torch.ones(3), torch.zeros(3), False),
        ([1, {2}], [1, {2}], True),
        (1, True, False),
    ],
)
def test_plain_values_are_compared_by_what_they_hold(one, other, alike):
    members = [Two(put("held", value)) if not callable(value) else Two() for value in (one, other)]
    for member, value in zip(members, (one, other), strict=True):
        member.held = value
    if alike:
        Stack(members)
    else:
        with pytest.raises(InputRefused, match=r"held(\.\w+)? is"):
            Stack(members)


class Deciding(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.head, self.how = nn.Linear(8, 5), how

    def forward(self, x):
        scores = self.head(x)
        if self.how == "value" and scores.sum() > 0:
            return -scores
        if self.how == "item":
            return scores * scores.sum().item()
        if self.how == "gradient":
            return (
                scores
                + torch.autograd.grad(self.head(x.detach().requires_grad_()).sum(), self.head.bias)[
                    0
                ]
            )
        if self.how == "batched gradient":
            return torch.func.grad(lambda x: self.head(x).square().sum())(x)
        return scores + torch.rand_like(scores) if self.how == "random" else scores


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("value", "by a tensor's value"),
        ("item", "a tensor's value"),
        ("random", "torch's generator"),
        ("gradient", "torch.func.grad has"),
    ],
)
def test_what_cannot_be_batched_is_refused_with_reason(how, said):
    ensemble = Ensemble([Deciding(how) for _ in range(2)], loss=of_classes)
    with pytest.raises(
        InputRefused, match=rf"cannot be batched: in Deciding \(Deciding\): it .*{said}"
    ) as refusal:
        ensemble(torch.randn(3, 8))
    assert "\n" not in str(refusal.value)


def test_a_gradient_that_a_forward_takes_by_torch_func_is_batched():
    members, x = [Deciding("batched gradient") for _ in range(2)], torch.randn(3, 8)
    expected = torch.stack([member(x) for member in members])
    torch.testing.assert_close(Ensemble(members, loss=of_classes)(x), expected)


def add_nothing(*_):
    return None


BACKWARD_HOOKS = {
    "head.weight has": lambda part: part.weight.register_hook(add_nothing),
    "head.bias has": lambda part: part.bias.register_post_accumulate_grad_hook(add_nothing),
    "head has": lambda part: part.register_full_backward_hook(add_nothing),
    "head has ": lambda part: part.register_full_backward_pre_hook(add_nothing),
}


@pytest.mark.parametrize("where", BACKWARD_HOOKS)
def test_a_hook_of_a_gradient_is_refused_and_what_it_changes_is_not_lost(where):
    members = [Deciding(None) for _ in range(2)]
    for member in members:
        BACKWARD_HOOKS[where](member.head)
    with pytest.raises(
        InputRefused,
        match=f"{where.strip()} a hook for its gradient, and no gradient is one member's",
    ):
        Stack(members)


def test_fused_siblings_are_refused():
    member = zoo()["our llama"].build(0)
    fuse_siblings(member, torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(InputRefused, match="fused with its siblings: unfuse_siblings"):
        Stack([member])


def mlps(count=2):
    return [MLP() for _ in range(count)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Ensemble([]), "an ensemble needs a member"),
        (lambda: Ensemble([MLP()] * 2), "a module stands twice among the members"),
        (lambda: Ensemble(mlps(), [{"lr": 1.0}]), "1 knobs for 2 members"),
        (lambda: Ensemble(mlps(), optim=[AdamW()]), "1 optimizers for 2 members"),
        (lambda: Ensemble(mlps(), schedule=[lambda index: 1.0]), "1 schedules for 2 members"),
        (lambda: Ensemble(mlps(), optim=[AdamW(), Muon(matrices=["*.weight"])]), "have different optimizers"),
        (lambda: Ensemble(mlps(), optim=[AdamW(), AdamW(ema=0.9)]), "differ in the optimizer's ema, which"),
        (lambda: Ensemble(mlps(), optim=AdamW(state="8bit")).step, "keeps its moments in fp32, not '8bit'"),
        (lambda: Ensemble(mlps()).capture({}, scope="blocks"), "an ensemble's step is one graph"),
        (lambda: Ensemble(mlps())(torch.zeros(2, 8), reduce="sum"), "reduce = 'sum': expected stack, mean"),
        (lambda: Ensemble(mlps(), optim="adamw"), "optim = 'adamw': expected one of this package's"),
        (lambda: Ensemble(mlps(), optim=torch.optim.AdamW), "expected one of this package's"),
        (lambda: Ensemble(mlps(), [{"seed": 0.5}] * 2), "seed = 0.5: expected a whole number"),
        (lambda: Ensemble([nn.ReLU(), nn.ReLU()]), "the members have no parameters"),
        (lambda: Ensemble(mlps())(torch.zeros(3, 8), each=True), "the inputs have a leading member axis, [2, ...]"),
        (lambda: Ensemble(mlps(), each=True).accumulate({"x": torch.zeros(3, 8)}), "the windows have a leading member"),
        (lambda: Ensemble(lambda of: MLP(), grid(lrr=[1.0, 2.0])), "the knob lrr changes nothing"),
        (lambda: Ensemble(lambda of: MLP(), grid(momentum=[0.8, 0.9])), "of AdamW a member has its own lr, betas"),
    ],
)  # fmt: skip
def test_what_an_ensemble_cannot_be_is_said(make, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        make()


def test_a_knob_that_something_may_have_read_is_not_refused():
    """What builds a member read it; or a schedule, the windows or a list of modules may have been
    made from it.
    """
    knobs = grid(width=[1.0, 2.0])
    Ensemble(lambda of: (of.width, MLP())[1], knobs)
    for options in (
        {"schedule": [constant(), constant()]},
        {"optim": [AdamW(), AdamW()]},
        {"each": True},
    ):
        Ensemble(lambda of: MLP(), grid(width=[1.0, 2.0]), **options)
    assert [of["width"] for of in Ensemble(mlps(), grid(width=[1.0, 2.0])).knobs] == [1.0, 2.0]


def test_stacking_takes_one_parameter_more_than_the_members():
    with LiveBytes() as live:
        members = [
            nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))) for _ in range(4)
        ]
        stack = Stack(members)
    stacked = 4 * 64 * 64 * 4
    assert live.peak_bytes <= (8 + 1.05) * stacked and live.kept_bytes <= 8.05 * stacked
    assert members[3][7].weight.data_ptr() == stack.module[7].weight[3].data_ptr()


def held_bytes(engine):
    """What an engine keeps for training, each storage once."""
    tensors = [*engine.model.buffers(), *engine.step.counters.values()]
    tensors += [
        tensor
        for plane in engine.step.planes
        for tensor in (plane.param, plane.grad, *plane.state.values())
    ]
    tensors += list(engine.model.parameters())
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


def test_training_keeps_what_the_members_keep_each_alone():
    build = zoo()["conv"].build
    alone = held_bytes(Resident(build(0), loss=of_classes))
    assert (
        held_bytes(Ensemble([build(seed) for seed in range(8)], loss=of_classes))
        <= 8 * 1.05 * alone
    )


def test_members_are_live_views_and_their_states_are_ordinary():
    kind = zoo()["conv"]
    members = [kind.build(seed).train() for seed in range(3)]
    before = [
        {name: tensor.clone() for name, tensor in member.state_dict().items()} for member in members
    ]
    engine = Ensemble(members, loss=kind.loss, optim=AdamW(lr=1e-2))
    list(train(engine, [kind.batch(0)]))
    for i, member in enumerate(engine.members):
        assert member is members[i] and member.state_dict().keys() == before[i].keys()
        assert not torch.equal(member.head.weight, before[i]["head.weight"])
        assert not torch.equal(member.norm.running_mean, before[i]["norm.running_mean"])
        state = engine.member_state(i).model
        assert all(torch.equal(tensor, state[name]) for name, tensor in member.state_dict().items())
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in state.values())
    with torch.no_grad():
        members[1].head.bias.fill_(7.0)
    assert bool((engine.model.head.bias[1] == 7).all()) and not bool(
        (engine.model.head.bias[0] == 7).any()
    )


def test_outputs_are_reduced_over_members():
    members = mlps(5)
    x = torch.randn(6, 8)
    stacked = torch.stack([member(x) for member in members])
    ensemble = Ensemble(members)
    assert torch.allclose(ensemble(x, reduce="mean"), stacked.mean(0), atol=1e-6)
    assert torch.allclose(ensemble(x, reduce="variance"), stacked.var(0), atol=1e-6)
    votes = torch.nn.functional.one_hot(stacked.argmax(-1)).sum(0)
    chosen = ensemble(x, reduce="vote")
    assert torch.equal(votes.gather(-1, chosen[:, None])[:, 0], votes.max(-1).values)
