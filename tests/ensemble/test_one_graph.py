"""Run: pytest tests/ensemble/test_one_graph.py (gradient and update of small members in one graph)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monograph as mono
from batches import captured_to_train, tiny_llama
from monograph import compat
from monograph.ensemble import Ensemble
from monograph.ensemble.stacked_parameters import StackedParameters
from monograph.loop import train

WINDOWS = [
    {"x": torch.randn(6, 8, dtype=torch.float64), "y": torch.randn(6, 3, dtype=torch.float64)}
    for _ in range(4)
]


def build(knobs: Any) -> nn.Module:
    torch.manual_seed(knobs.seed)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    errors = (model(batch["x"]) - batch["y"]) ** 2
    return errors.sum(), errors.numel()


def made(**options: Any) -> Ensemble:
    knobs = mono.grid(lr=[1e-2, 3e-2], seed=range(2))
    return Ensemble(build, knobs, loss=loss, optim=mono.AdamW, clip=1.0, **options)


@pytest.mark.parametrize(
    ("micro_batch", "graphs", "backend"),
    [
        (None, 1, "eager"),  # Dynamo's graph as it is
        pytest.param(None, 1, "aot_eager", marks=pytest.mark.slow),
        pytest.param(3, 2, "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_a_window_of_one_micro_batch_is_one_graph(
    micro_batch: int | None, graphs: int, backend: str
) -> None:
    """Law 1: it equals the eager step. The capture falls back to two graphs if torch cannot trace one, so
    the number is checked, too.
    """
    eager = made(micro_batch=micro_batch)
    captured = made(micro_batch=micro_batch)
    captured.announce = pytest.fail
    captured_to_train(captured, WINDOWS[0], backend)
    assert captured._updates_in_one_graph == (graphs == 1)
    for ours, reference in zip(train(captured, WINDOWS), train(eager, WINDOWS), strict=True):
        torch.testing.assert_close(ours.loss, reference.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(ours.grad_norm, reference.grad_norm, rtol=1e-10, atol=0)
    for one, other in zip(captured.members, eager.members, strict=True):
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(tensor, other.state_dict()[name], rtol=1e-9, atol=1e-12)


def test_a_fall_back_to_two_graphs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot_be_traced(self: StackedParameters, batch: object, factor: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        raise AssertionError("a capture is one full graph")

    monkeypatch.setattr(StackedParameters, "_gradient_and_update", cannot_be_traced)
    engine, lines = made(), list[str]()
    engine.announce = lines.append
    captured_to_train(engine, WINDOWS[0], "eager")
    assert not engine._updates_in_one_graph
    [line] = lines
    assert line.startswith("gradient and update are compiled as two graphs: ")
    assert "graph_break" in line


def test_a_padded_micro_batch_of_each_member_has_the_graph_of_the_others() -> None:
    members = [tiny_llama(seed=seed, num_hidden_layers=1) for seed in range(2)]
    engine = Ensemble(members, micro_batch=2, each=True)
    tokens = torch.randint(32, (2, 5, 8))
    window = {"tokens": tokens, "targets": tokens}
    captured_to_train(engine, {name: rows[:, :4] for name, rows in window.items()}, "eager")
    graphs = compat.captured_graphs()
    engine.accumulate(window)
    engine.update()
    assert compat.captured_graphs() == graphs


@pytest.mark.slow
def test_language_models_have_two_graphs() -> None:
    """Which the planner assumes."""
    engine = Ensemble([tiny_llama(seed=seed) for seed in range(2)])
    tokens = torch.randint(32, (2, 8))
    window = {"tokens": tokens, "targets": tokens}
    assert engine.capture(window, "aot_eager") is None
    assert not engine._updates_in_one_graph
