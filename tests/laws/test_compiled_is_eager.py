# Run: pytest tests/laws/test_compiled_is_eager.py
"""Law 1: the compiled step equals the eager one; no graph break, and after warm-up no recompile."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from batches import captured_to_train, flat_gradient, packed, ragged, tiny_llama
from laws import test_accumulated_is_large_batch, test_packed_is_separate, test_planned_is_measured
from laws.replaying import assert_same_bits
from monograph import compat
from monograph.graph.capture import compiled as in_graph
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.laws.comparisons import equal_in_float64, error_within, outcome, relative_error
from monograph.optim import AdamW, Group, Muon
from monograph.resident import Resident
from monograph.schedule import warmup_cosine
from monograph.step import Clip

NIGHTLY = [pytest.param(backend, marks=pytest.mark.slow) for backend in ("aot_eager", "inductor")]
# Dynamo's graphs as they are; by day `compiled_step` goes through all of a compiler.
BACKENDS = ["eager", *NIGHTLY]


BY_DAY = (Remat.Full(), "aot_eager")


def squares(model, batch):
    return model(batch["x"]).square().sum(), len(batch["x"])


class Centred(nn.Module):
    """A block that reads what it writes: a running mean, and a number of calls."""

    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.calls.add_(1)
        low, high = self.mean.chunk(2)
        peak = self.mean.view(2, 3).max(0).values.exp().sum() + (low.exp() * high.sin()).sum()
        return x + torch.tanh(self.linear(x - self.mean)) * (1 + 1 / self.calls) * peak


class Scaled(nn.Module):
    """A loss with a number of its own."""

    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, model, batch):
        self.calls.add_(1)
        return (model(batch["x"]) * self.calls).square().sum(), len(batch["x"])


class Taught(nn.Linear):
    """Its frozen parameter follows its bias, as a teacher does."""

    def __init__(self):
        super().__init__(6, 3)
        self.teacher = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher.mul_(0.9).add_(self.bias, alpha=0.1)
        return super().forward(x) * self.teacher.exp()


@pytest.mark.parametrize(
    ("remat", "scope", "backend"),
    [
        pytest.param(
            remat, scope, backend, marks=() if (remat, backend) == BY_DAY else pytest.mark.slow
        )
        for remat, scope in [
            (Remat.Off(), "whole"),
            (Remat.Full(), "whole"),
            (Remat.Pointwise(), "blocks"),
        ]
        for backend in ("aot_eager", "inductor")
    ],
)
def test_what_depends_on_a_written_buffer_is_computed_once(remat, scope, backend):
    """A second time, in the backward pass, it would be computed from what the forward pass has
    written.
    """
    torch.manual_seed(0)
    windows, outcomes = [{"x": 1 + torch.randn(8, 6)} for _ in range(2)], []
    model = nn.Sequential(Centred(), Taught())
    for captured in (False, True):
        loss = Scaled()
        engine = Resident(copy.deepcopy(model), loss=loss, optim=AdamW(lr=1e-2), remat=remat)
        engine.trial(windows[0])
        if captured:
            captured_to_train(engine, windows[0], backend, scope)
        for window in windows:
            engine.accumulate(window)
            gradient = flat_gradient(engine.model).clone()
            engine.update()
        outcomes.append([gradient, loss.calls, *engine.model.state_dict().values()])
    for mine, its in zip(*outcomes, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_a_float64_buffer_without_a_dimension_is_not_captured():
    model = nn.Linear(6, 3)
    model.register_buffer("scale", torch.ones((), dtype=torch.float64))
    engine = Resident(model, loss=squares)
    assert "the buffer scale is float64 and has no dimension" in engine.capture(
        {"x": torch.randn(2, 6)}
    )


def double(engine):
    """The float64 oracle: an eager engine with the same weights."""
    model = copy.deepcopy(engine.model).double()
    return Resident(
        model, optim=engine.step.optim, schedule=engine.step.schedule, clip=engine.step.clip
    )


@pytest.fixture(scope="module")
def compiled_step():
    """A Llama of one layer whose whole step went through Inductor, warmed on packed rows in
    micro-batches of 4.

    Compiling costs more than all that these tests do with it, so those of other laws that need it
    are here. That evaluation is captured, too, test_warming_changes_nothing_and_captures_evaluation
    shows without generated code.
    """
    model = tiny_llama(num_hidden_layers=1)
    engine = Resident(
        model, optim=AdamW(lr=1e-2), schedule=warmup_cosine(2, 50), clip=0.5, micro_batch=4
    )
    captured_to_train(engine, packed(16), "inductor")
    return engine


def test_loss_gradient_and_update(compiled_step):
    eager = Resident(
        copy.deepcopy(compiled_step.model),
        optim=AdamW(lr=1e-2),
        schedule=compiled_step.step.schedule,
        clip=0.5,
    )
    exact = double(eager)
    engines = compiled_step, eager, exact
    batch = packed(8, seed=3)
    for engine in engines:
        engine.step.discard()
        engine.accumulate(batch)
    truth = flat_gradient(exact.model)
    assert error_within(flat_gradient(compiled_step.model), flat_gradient(eager.model), truth)
    # One gradient for all three: AdamW's first step is the gradient's sign, which turns rounding
    # noise near zero into whole steps.
    for mine, theirs, true in zip(
        compiled_step.step.planes, eager.step.planes, exact.step.planes, strict=True
    ):
        mine.grad.copy_(theirs.grad)
        true.grad.copy_(theirs.grad)
    updates = [engine.update() for engine in engines]
    assert float(updates[0].loss) == pytest.approx(float(updates[2].loss), rel=1e-6)
    assert float(updates[0].grad_norm) == pytest.approx(float(updates[2].grad_norm), rel=1e-6)
    assert int(updates[0].count) == int(updates[1].count)
    for mine, theirs, true in zip(*(engine.step.planes for engine in engines), strict=True):
        for ours, naive_, exact_ in (
            (mine.param, theirs.param, true.param),
            *zip(*(p.state.values() for p in (mine, theirs, true)), strict=True),
        ):
            assert error_within(ours, naive_, exact_)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_update_of_muon_and_adamw_with_groups_and_an_average(backend):
    """Several updates with given gradients, two of them not finite; only the update is compiled
    here.
    """
    optim = Muon(
        lr=1e-2,
        ema=0.9,
        groups=[Group("*norm*", lr=2.0), Group("*.down_proj.*", lr=0.5, weight_decay=0.3)],
    )
    eager = Resident(tiny_llama(), optim=optim, clip=0.5)
    fast, exact = Resident(tiny_llama(), optim=optim, clip=0.5), double(eager)
    fast.step.apply.function = in_graph(fast.step.apply.function, backend)
    graphs = compat.captured_graphs()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        for mine, theirs, true in zip(
            *(engine.step.planes for engine in (fast, eager, exact)), strict=True
        ):
            mine.grad.normal_(generator=generator)
            if seed >= 2:
                mine.grad[0] = float("nan")
            theirs.grad.copy_(mine.grad)
            true.grad.copy_(mine.grad)
        for engine in (fast, eager, exact):
            engine.step.count.fill_(1)
            assert int(engine.update().skipped) == max(0, seed - 1)
    assert compat.captured_graphs() == graphs + 1
    for mine, theirs, true in zip(
        *(engine.step.planes for engine in (fast, eager, exact)), strict=True
    ):
        assert error_within(mine.param, theirs.param, true.param), mine.kind
        for buffer in mine.state:
            assert error_within(mine.state[buffer], theirs.state[buffer], true.state[buffer]), (
                buffer,
                mine.kind,
            )


def test_no_graph_break_and_no_recompile(compiled_step):
    # Another file's test may have emptied the compiler's caches since this step was warmed.
    compiled_step.accumulate(packed(4))
    compiled_step.update()
    graphs, breaks = compat.captured_graphs(), compat.graph_breaks()
    for seed, rows in enumerate((8, 3, 16)):
        compiled_step.accumulate(packed(rows, seed=seed))
        compiled_step.update()
    schedule = compiled_step.step.schedule
    compiled_step.step.schedule = warmup_cosine(3, 100)
    compiled_step.accumulate(packed(8))
    compiled_step.update()
    compiled_step.step.schedule = schedule
    assert breaks == compat.graph_breaks() == 0
    assert compat.captured_graphs() == graphs


@pytest.mark.parametrize("updates", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_warming_changes_nothing_and_captures_evaluation(updates):
    """Of the state that was taken up; by night also of a new engine."""
    plain, warmed = (
        Resident(
            tiny_llama(num_hidden_layers=1), optim=AdamW(lr=1e-2, ema=0.9), clip=Clip(0.5, skip_spikes=True),
            precision=Precision("fp16"), micro_batch=4,
        )
        for _ in range(2)
    )  # fmt: skip
    for seed in range(updates):
        plain.accumulate(ragged(6, seed=seed))
        plain.update()
    warmed.load_state(plain.state())
    assert warmed.capture(ragged(4), backend="eager") is None
    assert_same_bits(*(outcome(each.state()) for each in (warmed, plain)))
    graphs = compat.captured_graphs()
    for rows in (8, 3):
        warmed.evaluate(ragged(rows))
    assert compat.captured_graphs() == graphs


@pytest.mark.parametrize(
    "law",
    [
        pytest.param(test_accumulated_is_large_batch, id="law 2"),
        pytest.param(test_packed_is_separate, id="law 9"),
        # By day of an eager step.
        pytest.param(test_planned_is_measured, id="law 12", marks=pytest.mark.slow),
    ],
)
def test_another_law_holds_in_this_graph(law, compiled_step):
    law.holds_in_a_graph(compiled_step)


def test_state_dict_names_are_the_module_s_own(compiled_step):
    assert list(compiled_step.state().model) == list(tiny_llama(num_hidden_layers=1).state_dict())


@pytest.mark.parametrize(
    ("scope", "remat", "backend"),
    [
        pytest.param("whole", Remat.Off(), "inductor", marks=pytest.mark.slow),
        pytest.param("whole", Remat.Budget(0.3), "aot_eager", marks=pytest.mark.slow),
        pytest.param("blocks", Remat.Full(), "aot_eager", marks=pytest.mark.slow),
        pytest.param("blocks", Remat.Offload(), "aot_eager", marks=pytest.mark.slow),
        ("blocks", Remat.Offload(), "eager"),
    ],
)
def test_mixtures_of_experts_are_captured_once(scope, remat, backend):
    """However tokens are shared out among experts; float64, so that rounding chooses no other
    expert.
    """
    mixed = {"model_type": "qwen3_moe", "mlp_only_layers": (0,)}
    if scope == "whole":  # to compile less; with biases and sinks
        if torch.__version__.startswith("2.11."):
            pytest.skip(
                "torch 2.11's graphs take a log-sum-exp in fp64, which sinks read, for one in fp32"
            )
        mixed = {"model_type": "gpt_oss", "num_hidden_layers": 1}
    balance = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, **balance, **mixed}
    fast, eager = (
        Resident(tiny_llama(torch.float64, **sizes), optim=AdamW(), remat=remat) for _ in range(2)
    )
    captured_to_train(fast, packed(4), backend, scope)
    graphs, breaks = compat.captured_graphs(), compat.graph_breaks()
    for seed in range(3):
        for engine in (fast, eager):
            engine.accumulate(packed(4, seed=seed))
        assert equal_in_float64(flat_gradient(fast.model), flat_gradient(eager.model))
        assert equal_in_float64(*(engine.update().loss for engine in (fast, eager)))
    assert (compat.captured_graphs(), compat.graph_breaks()) == (graphs, breaks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_is_as_close_as_eager_bf16(backend):
    batch = ragged(8, seed=1)
    exact = Resident(tiny_llama(torch.float64, num_hidden_layers=1))
    exact.accumulate(batch)
    truth = flat_gradient(exact.model)
    eager, compiled = (
        Resident(tiny_llama(num_hidden_layers=1), precision=Precision("bf16"), micro_batch=8)
        for _ in range(2)
    )
    # The gradient alone, which is where bf16 computes: planes, optimizer and counters are fp32 as
    # above
    compiled.step.forward.function = in_graph(compiled.step.forward.function, backend)
    for engine in (eager, compiled):
        engine.accumulate(batch)
    naive = flat_gradient(eager.model)
    assert 1e-4 < relative_error(naive, truth) < 5e-2, "eager must really have computed in bf16"
    assert error_within(flat_gradient(compiled.model), naive, truth, rounding=0)


def test_what_cannot_be_captured_trains_eagerly_and_says_why():
    class Breaks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x):
            if x.sum().item() > 0:
                return self.inner(x)
            return -self.inner(x)

    def loss(model, batch):
        return model(batch["x"]).square().sum(), torch.tensor(len(batch["x"]))

    engine = Resident(Breaks(), loss=loss)
    window = {"x": torch.randn(3, 4)}
    why = engine.capture(window)
    assert (
        why and "data-dependent" in why and "test_compiled_is_eager.py" in why and "\n" not in why
    )
    engine.accumulate(window)
    assert float(engine.update().grad_norm) > 0
