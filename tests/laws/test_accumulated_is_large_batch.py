# Run: pytest tests/laws/test_accumulated_is_large_batch.py
"""Law 2: any split of an update's rows into micro-batches gives the large batch's gradient, token
for token.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from batches import flat_gradient, large_batch_gradient, packed, ragged, rows_of, tiny_llama
from monograph.compat import captured_graphs
from monograph.ensemble import Ensemble
from monograph.errors import InputRefused, UsageError
from monograph.graph.capture import capture
from monograph.laws.comparisons import accumulated_is_large_batch, relative_error
from monograph.loss import fill_of
from monograph.resident import Resident
from monograph.step import Step, accumulate

ROWS = 16
MIXTURE = {"model_type": "olmoe", "num_experts": 5, "num_experts_per_tok": 2}


def split(batch, cuts):
    edges = [0, *cuts, len(batch["tokens"])]
    return [rows_of(batch, a, b) for a, b in zip(edges, edges[1:], strict=False)]


def accumulated(step, micro_batches):
    step.discard()
    accumulate(step, micro_batches)
    return flat_gradient(step.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("size", "sizes"),
    [*((size, {}) for size in (1, 2, 4, 8, 16)), *((size, MIXTURE) for size in (1, 8))],
)
def test_equal_splits(dtype, size, sizes):
    batch, step = ragged(ROWS), Step(tiny_llama(dtype, **sizes))
    exact = large_batch_gradient(step.model, batch)
    assert accumulated_is_large_batch(
        accumulated(step, split(batch, range(size, ROWS, size))), exact
    )


@pytest.mark.parametrize(
    ("dtype", "cases"),
    [
        (torch.float64, 20),
        pytest.param(torch.float64, 200, marks=pytest.mark.slow),
        pytest.param(torch.float32, 200, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_random_splits(dtype, cases):
    step, rng = Step(tiny_llama(dtype, num_hidden_layers=1)), random.Random(0)
    for case in range(cases):
        if case % 10 == 0:
            batch = ragged(rng.randint(2, ROWS), seed=case)
            exact = large_batch_gradient(step.model, batch)
        rows = len(batch["tokens"])
        cuts = sorted(rng.sample(range(1, rows), rng.randint(0, rows - 1)))
        assert accumulated_is_large_batch(accumulated(step, split(batch, cuts)), exact)


@pytest.mark.parametrize("rows", [16, 13, 5])
@pytest.mark.parametrize("micro_batch", [4, 7])
def test_engine_fills_the_last_micro_batch_without_changing_anything(rows, micro_batch):
    batch = ragged(rows, seed=rows)
    engine = Resident(tiny_llama(torch.float64), micro_batch=micro_batch)
    exact = large_batch_gradient(engine.model, batch)
    engine.accumulate(batch)
    assert accumulated_is_large_batch(flat_gradient(engine.model), exact)
    assert int(engine.step.count) == int((batch["targets"] != -100).sum())


def holds_in_a_graph(engine):
    """The law for a captured engine: test_compiled_is_eager.py has one."""
    for seed, rows in enumerate((16, 12, 9)):
        batch = packed(rows, seed=seed)
        exact = large_batch_gradient(engine.model, batch)
        engine.step.discard()
        engine.accumulate(batch)
        assert accumulated_is_large_batch(flat_gradient(engine.model), exact)


def test_a_loss_that_cannot_count_gives_the_same_update():
    def loss(model, batch):
        hidden = model(batch["tokens"])
        logits = hidden @ model.lm_head.weight.T
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"
        )
        return total, (batch["targets"] != -100).sum()

    batch = ragged(ROWS)
    counted, uncounted = (
        Step(tiny_llama(torch.float64), clip=0.5, **kw) for kw in ({}, {"loss": loss})
    )
    for _ in range(3):
        updates = counted(split(batch, [3, 9])), uncounted(split(batch, [1, 2, 11]))
        one, other = (asdict(replace(update, marks=())) for update in updates)
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    for name, tensor in counted.model.state_dict().items():
        torch.testing.assert_close(tensor, uncounted.model.state_dict()[name], rtol=0, atol=1e-9)


# ---- losses of one's own: float targets, counts of any kind, weights -----------------------------


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def measured(rows, seed=0):
    """Rows whose tensors have the names that a window of text has, and other kinds of numbers."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets, weights = torch.randn(rows, 5, generator=generator, dtype=torch.float64).split(
        [3, 1, 1], dim=1
    )
    return {"tokens": tokens, "targets": targets.squeeze(1), "weights": weights.squeeze(1).square()}


def errors(model, batch):
    return (model(batch["tokens"]).squeeze(-1) - batch["targets"]).square()


def weighted(model, batch):
    return (errors(model, batch) * batch["weights"]).sum(), batch["weights"].sum()


class Counted:
    """The same, and it knows the sum of the weights before; a row without weight adds nothing."""

    fill = {"weights": 0.0}  # noqa: RUF012

    def __call__(self, model, batch):
        return weighted(model, batch)

    def count(self, batch):
        return batch["weights"].sum()


OWN = {
    "float targets": lambda model, batch: (
        errors(model, batch).sum(),
        torch.tensor(len(batch["targets"])),
    ),
    "len": lambda model, batch: (errors(model, batch).sum(), len(batch["targets"])),
    "numpy": lambda model, batch: (errors(model, batch).sum(), np.int64(len(batch["targets"]))),
    "weights": weighted,
    "weights in numpy": lambda model, batch: (
        weighted(model, batch)[0],
        batch["weights"].numpy().sum(),
    ),
    "weights, filled": Counted(),
}


def one_member(model, **options):
    return Ensemble([model], **options)


def large_batch(model, loss, window):
    """(mean, count, gradient) of the one large batch."""
    model.zero_grad()
    total, count = loss(model, window)
    mean = total / float(count)
    mean.backward()
    return float(mean.detach()), float(count), flat_gradient(model)


@pytest.mark.parametrize("rows, micro_batch", [(7, 3), (5, 4), (8, None)])
@pytest.mark.parametrize("loss", OWN)
def test_a_loss_of_ones_own_gives_the_large_batch_whatever_its_tensors_are_called(
    loss, rows, micro_batch
):
    """sum(w l) / sum(w), and the mean over any targets, for a short last micro-batch, alone and as
    a member.
    """
    window, exact = measured(rows), functools.partial(pytest.approx, rel=1e-12)
    mean, count, gradient = large_batch(network(), OWN[loss], window)
    options = {"loss": OWN[loss], "micro_batch": micro_batch}
    alone, together = Resident(network(), **options), Ensemble([network(), network()], **options)
    total, counted = alone.evaluate(window)
    assert float(total / counted) == exact(mean)
    alone.accumulate(window)
    divisor = 1.0 if isinstance(OWN[loss], Counted) else alone.step.count
    assert accumulated_is_large_batch(flat_gradient(alone.model) / divisor, gradient)
    together.accumulate(window)
    for done in (alone.update(), together.update()):
        for found, expected in (
            (done.loss, mean),
            (done.count, count),
            (done.grad_norm, float(gradient.norm())),
        ):
            assert found.flatten().tolist() == [exact(expected)] * found.numel()


def test_tiny_weights_are_not_rounded_up_to_one_target():
    window = measured(6)
    window["weights"] *= 1e-6 / float(window["weights"].sum())
    engine = Resident(network(), loss=Counted(), micro_batch=4)
    first = large_batch(network(), weighted, {name: tensor[:4] for name, tensor in window.items()})[
        0
    ]
    assert engine.trial(window).loss == pytest.approx(first, rel=1e-12)
    engine.accumulate(window)
    assert accumulated_is_large_batch(
        flat_gradient(engine.model), large_batch(network(), weighted, window)[2]
    )
    assert int(engine.update().skipped) == 0


@pytest.mark.parametrize(
    "count",
    [
        -1,
        -0.5,
        math.nan,
        math.inf,
        pytest.param(10**400, id="huge"),
        "three",
        True,
        np.float64("nan"),
    ]
    + [torch.ones(2), torch.tensor(True)],
)
def test_a_count_that_is_none_is_refused(count):
    engine = Resident(network(), loss=lambda model, batch: (errors(model, batch).sum(), count))
    with pytest.raises(UsageError, match="its count is .*expected"):
        engine.accumulate(measured(3))


def test_a_complex_sum_is_refused():
    engine = Resident(network(), loss=lambda model, batch: (errors(model, batch).sum() * 1j, 3))
    with pytest.raises(UsageError, match="its sum is complex, expected a real number"):
        engine.accumulate(measured(3))


@pytest.mark.parametrize(
    ("kind", "captured"),
    [
        ("resident", False),
        ("resident", True),
        ("ensemble", False),
        pytest.param("ensemble", True, marks=pytest.mark.slow),
    ],
)
def test_a_count_that_depends_on_the_parameters_is_refused(kind, captured):
    """The sum is divided by a number: the gradient of sum / count would be another one, and nobody
    would notice.
    """

    def normalised(model, batch):
        weights = model(batch["tokens"]).squeeze(-1).sigmoid()
        return (errors(model, batch) * weights).sum(), (
            weights.detach() if detached else weights
        ).sum()

    for detached in (True, False):
        engine = (Resident if kind == "resident" else one_member)(network(), loss=normalised)
        if captured:
            reason = engine.capture(measured(3), "eager")
            assert reason is None if detached else "its count requires a gradient" in reason
        with (
            contextlib.nullcontext()
            if detached
            else pytest.raises(UsageError, match="a gradient: .* detach it")
        ):
            engine.accumulate(measured(3))
            engine.update()


@pytest.mark.parametrize("number", [-1, -3.5, math.nan, math.inf])
@pytest.mark.parametrize("counted", [False, True])
def test_a_tensor_below_0_or_not_finite_as_a_count_costs_its_update(number, counted):
    """It stays on the device, which decides: even where the window's other counts make up for it."""
    loss = (lambda: Counted if counted else type("Loss", (), {"__call__": Counted.__call__}))()()
    engine, window = Resident(network(), loss=loss, micro_batch=2), measured(4)
    window["weights"] = torch.tensor([number, 0.0, 50.0, 50.0], dtype=torch.float64)
    before = [parameter.clone() for parameter in engine.model.parameters()]
    engine.accumulate(window)
    assert int(engine.update().skipped) == 1
    assert all(torch.equal(*pair) for pair in zip(engine.model.parameters(), before, strict=True))


def test_a_micro_batch_without_targets_may_have_a_constant_loss():
    def loss(model, batch):
        real = batch["weights"] > 0
        if not real.any():
            return torch.zeros(()), 0
        return errors(model, batch)[real].sum(), int(real.sum())

    window = measured(6)
    window["weights"][2:4] = 0
    engine = Resident(network(), loss=loss, micro_batch=2)
    engine.accumulate(window)
    gradient = flat_gradient(engine.model) / engine.step.count
    assert accumulated_is_large_batch(gradient, large_batch(network(), loss, window)[2])
    window["weights"][:] = 0
    engine.step.discard()
    engine.accumulate(window)
    assert int(engine.update().skipped) == 1


def test_a_constant_loss_with_targets_is_refused():
    engine = Resident(network(), loss=lambda model, batch: (errors(model, batch).sum().detach(), 3))
    with pytest.raises(UsageError, match="the loss does not depend on any trainable parameter"):
        engine.accumulate(measured(3))


def test_short_micro_batches_are_one_more_graph_which_is_said_once_and_warmed_before():
    engine, lines = Resident(network(), loss=weighted, micro_batch=3), []
    engine.announce = lines.append
    assert engine.capture(measured(7), "eager") is None
    graphs = captured_graphs()
    for seed in range(3):
        engine.accumulate(measured(7, seed))
        engine.update()
    assert captured_graphs() == graphs, "the last micro-batch's size was warmed"
    assert lines == ["a micro-batch of 1 row needs one more graph, as the loss has no `fill`"]
    for _ in range(2):
        engine.accumulate(measured(8))
        engine.update()
    assert lines[1:] == ["a micro-batch of 2 rows needs one more graph, as the loss has no `fill`"]


def test_a_fill_is_what_the_loss_says_and_its_promise_is_tried():
    class Broken(Counted):
        fill = {"targets": -100}  # noqa: RUF012

        def count(self, batch):
            return len(batch["targets"])

    class Elsewhere(Counted):
        fill = {"mask": 0}  # noqa: RUF012

    with pytest.raises(
        InputRefused, match="the loss counts 4 targets in rows that have none, .*fill = None"
    ):
        Resident(network(), loss=Broken(), micro_batch=4).trial(measured(6))
    with pytest.raises(
        UsageError, match="fill names 'mask', which is not in the window: it has tokens, "
    ):
        Resident(network(), loss=Elsewhere(), micro_batch=4).accumulate(measured(6))


class Regularised(Counted):
    """Adds something for each row, with targets or without."""

    def __call__(self, model, batch):
        loss_sum, count = super().__call__(model, batch)
        return loss_sum + 0.1 * len(batch["targets"]), count


@pytest.mark.parametrize("work", ["accumulate", "trial", "evaluate"])
def test_a_loss_that_is_not_0_without_targets_is_refused_before_such_rows_are_added(work):
    """Its sum would depend on how many rows a short last micro-batch is filled up with."""
    engine = Resident(network(), loss=Regularised(), micro_batch=4)
    for _ in range(2):
        with pytest.raises(
            InputRefused, match="the loss is 0.4 for rows that have no targets, .*fill = None"
        ):
            getattr(engine, work)(measured(6))
    getattr(Resident(network(), loss=Regularised(), micro_batch=3), "accumulate")(measured(6))  # noqa: B009


class Divided(Counted):
    """The loss of rows without targets is 0, and its gradient NaN: torch.where gives the branch it
    drops 0 times it.
    """

    def __call__(self, model, batch):
        loss_sum, count = super().__call__(model, batch)
        return torch.where(count > 0, loss_sum * count / count, loss_sum), count


def test_a_gradient_that_is_not_finite_without_targets_is_refused_before_such_rows_are_added():
    engine = Resident(network(), loss=Divided(), micro_batch=4)
    with pytest.raises(
        InputRefused,
        match="the loss has a gradient that is not finite for rows that have no targets",
    ):
        engine.accumulate(measured(6))


def test_a_count_that_is_not_the_loss_s_own_is_refused_at_the_trial():
    class Twice(Counted):
        def count(self, batch):
            return 2 * super().count(batch)

    with pytest.raises(
        InputRefused, match=r"the loss's count\(batch\) is [\d.]+, but its call counts [\d.]+: "
    ):
        Resident(network(), loss=Twice(), micro_batch=4).trial(measured(8))


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.int64, torch.float16, torch.float32]
)
def test_a_fill_is_a_number_that_its_tensor_can_hold(dtype):
    """The same is taken from Python and from numpy; anything else would be cut off, or torch's
    error.
    """

    def given(value):
        return fill_of(SimpleNamespace(fill={"x": value}), window)["x"]

    window = {"x": torch.zeros(2, dtype=dtype)}
    held = {
        torch.uint8: [0, 255],
        torch.bool: [0, True],
        torch.int64: [-100, 2**62],
        torch.float16: [0.1, -6e4],
    }
    for value in held.get(dtype, [0.1, 1e38, np.float32(0.5), np.int64(-3)]):
        for number in (given(value), given(np.asarray(value)[()])):
            assert torch.full((), number, dtype=dtype) == torch.tensor(value, dtype=dtype)
    left = {
        torch.uint8: [300, -1],
        torch.bool: [2],
        torch.int64: [2**63, 0.5],
        torch.float16: [1e5],
    }
    for value in [
        *left.get(dtype, [1e39]),
        math.nan,
        math.inf,
        10**400,
        "0",
        None,
        torch.zeros(()),
    ]:
        with pytest.raises(UsageError, match="the loss's fill .*(expected|holds)"):
            given(value)


def test_no_target_at_all_changes_nothing():
    step = Step(tiny_llama())
    before = {k: v.clone() for k, v in step.model.state_dict().items()}
    batch = ragged(4)
    batch["targets"].fill_(-100)
    result = step([batch])
    assert int(result.skipped) == 1 and all(
        torch.equal(v, before[k]) for k, v in step.model.state_dict().items()
    )


@pytest.mark.parametrize("size, at_least", [(8, 0.05), (4, 0.05), (2, 0.1), (1, 0.2)])
def test_mean_of_means_would_fail(size, at_least):
    """The rule that most trainers use is off by tens of per cent on the same rows: the bound above
    can fail.
    """
    batch, model = ragged(ROWS), tiny_llama(torch.float64)
    means = [large_batch_gradient(model, part) for part in split(batch, range(size, ROWS, size))]
    assert relative_error(torch.stack(means).mean(0), large_batch_gradient(model, batch)) > at_least


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 5, 16])
def test_on_a_gpu(size):
    batch = {name: tensor.cuda() for name, tensor in ragged(ROWS).items()}
    step = capture(Step(tiny_llama().cuda()))
    exact = large_batch_gradient(step.model, batch)
    assert accumulated_is_large_batch(
        accumulated(step, split(batch, range(size, ROWS, size))), exact
    )
