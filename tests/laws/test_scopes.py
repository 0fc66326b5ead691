# Run: pytest tests/laws/test_scopes.py    (through Inductor, every policy and precision: -m slow)
"""Law 1 where one graph holds a block: the step equals the eager one, and blocks that are alike
share the graph.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from batches import captured_to_train, flat_gradient, packed, ragged, tiny_llama
from monograph import compat
from monograph.errors import UsageError
from monograph.graph.capture import capture, release
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.laws.comparisons import error_within, relative_error
from monograph.loss import token_loss
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.step import Step

POLICIES = [Remat.Off(), Remat.Full(), Remat.Pointwise(), Remat.Budget(0.3)]
LAYERS = 3


def engine(policy=None, precision="fp32", dtype=torch.float32, **sizes):
    model = tiny_llama(dtype, num_hidden_layers=LAYERS, **sizes)
    return Resident(
        model,
        optim=AdamW(lr=1e-2),
        clip=0.5,
        precision=Precision(precision),
        remat=policy,
        micro_batch=3,
    )


def compare(policy, precision, backend):
    """Gradients of a packed window in two micro-batches, and how many graphs it took."""
    batch, exact = packed(6), engine(dtype=torch.float64)
    eager, captured = engine(precision=precision), engine(policy, precision)
    before = compat.captured_graphs()
    assert captured.capture(batch, backend, "blocks") is None
    # Training and evaluation are different graphs of block and head.
    assert compat.captured_graphs() - before <= 5, "blocks that are alike share a graph"
    for each in (exact, eager, captured):
        each.accumulate(batch)
    truth = flat_gradient(exact.model)
    assert torch.isfinite(truth).all()
    rounding = None if precision == "fp32" else 0
    found, naive = (flat_gradient(each.model) for each in (captured, eager))
    assert error_within(found, naive, truth, rounding=rounding)
    captured.update()
    graphs = compat.captured_graphs()
    captured.accumulate(packed(6, seed=1))
    captured.update()
    captured.evaluate(packed(6, seed=2))
    assert compat.captured_graphs() == graphs and compat.graph_breaks() == 0


# By day the two policies that keep most and least; test_recomputed_is_stored.py captures the others
# by blocks.
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(each, marks=() if each == Remat.Full() else pytest.mark.slow)
        for each in POLICIES
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_gradients_of_every_policy(policy):
    # AOT autograd partitions what a budget keeps; the other policies keep the same under any
    # backend.
    compare(policy, "fp32", "aot_eager" if isinstance(policy, Remat.Budget) else "eager")


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "precision"), [*itertools.product(POLICIES, ["fp32", "bf16"])])
def test_gradients_through_inductor(policy, precision):
    compare(policy, precision, "inductor")


def test_a_family_with_windows_takes_one_graph_for_each_kind_of_layer():
    sizes = {
        "model_type": "qwen3",
        "sliding_window": 4,
        "layer_types": ("sliding_attention", "full_attention", "full_attention"),
    }
    captured, eager = engine(**sizes), engine(**sizes)
    before = compat.captured_graphs()
    captured_to_train(captured, ragged(6), "eager", "blocks")
    assert compat.captured_graphs() - before <= 4
    for each in (captured, eager):
        each.accumulate(ragged(6))
    assert relative_error(flat_gradient(captured.model), flat_gradient(eager.model)) <= 1e-6


def test_checkpoints_and_the_loss_that_was_given_stay_as_they_were():
    step = Step(tiny_llama())
    names = list(step.model.state_dict())
    capture(step, "eager", "blocks")
    assert list(step.model.state_dict()) == names
    assert step.loss is not token_loss and step.scope == "blocks"
    twin = copy.deepcopy(step.model)
    step([ragged(3)])
    release(step)
    assert (
        step.loss is token_loss
        and step.scope == "none"
        and "forward" not in vars(step.model.model.layers[0])
    )
    assert list(twin.state_dict()) == names


def test_a_module_without_blocks_is_told_so():
    step = Step(nn.Linear(3, 1), loss=lambda model, batch: (model(batch).sum(), torch.tensor(2)))
    with pytest.raises(UsageError, match="no block.*as a whole"):
        capture(step, "eager", "blocks")
    assert step.scope == "none"


def test_blocks_of_an_own_module():
    """Of two kinds, one of which changes its buffers; its loss has no head."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if i % 2 else nn.Tanh())
                for i in range(4)
            )

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def loss(model, batch):
        return model(batch["x"]).square().sum(), torch.tensor(len(batch["x"]))

    window = {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(1))}
    captured, eager = (Resident(Own(), loss=loss) for _ in range(2))
    assert captured.capture(window, "eager", "blocks") is None
    for each in (captured, eager):
        each.accumulate(window)
        each.update()
    for (name, one), two in zip(
        captured.model.state_dict().items(), eager.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), name
