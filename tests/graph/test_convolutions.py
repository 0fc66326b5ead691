"""Run: pytest tests/graph/test_convolutions.py (large convolutions with groups, group by group)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, default_partition, make_boxed_func
from torch import Tensor, vmap
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from daily import nightly
from monograph.graph import capture, convolutions
from monograph.graph.capture import compiled

# Shapes of the members' inputs (or of the one of all, which needs no gradient) and weights, the
# convolution's steps.
CASES = {
    "images": ((3, 2, 4, 6, 5), (3, 4, 4, 3, 3), {"padding": 1}),
    "strides and dilation": (
        (2, 3, 4, 9, 9),
        (2, 6, 4, 3, 3),
        {"stride": 2, "dilation": 2, "padding": 2},
    ),
    "sequences": ((3, 2, 4, 11), (3, 4, 4, 3), {"padding": 1}),
    "one input": ((2, 4, 6, 5), (3, 4, 4, 3, 3), {"padding": 1}),
}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The graphs after the pass, which finds every convolution with groups large enough."""
    found: list[str] = []
    rewrite = convolutions.rewrite

    def rewritten(graph: torch.fx.Graph) -> None:
        rewrite(graph)
        found.append(str(graph))

    monkeypatch.setattr(convolutions, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(convolutions, "rewrite", rewritten)
    return found


def results(
    function: Callable[..., Tensor], given: list[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    leaves = [each.to(dtype, copy=True) for each in given]
    for leaf in leaves:
        leaf.requires_grad_(leaf.ndim == leaves[1].ndim)
    total_N = function(*leaves)
    total_N.sum().backward()
    return [total_N.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def example(case: str) -> tuple[list[Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """Members' inputs and weights, and the losses of all members."""
    input_shape, weight_shape, steps = CASES[case]
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator) for shape in (input_shape, weight_shape)]
    shared = is_shared(case)
    convolve: Any = F.conv1d if len(weight_shape) == 4 else F.conv2d

    def of_one(input_BC: Tensor, weight_OC: Tensor) -> Tensor:
        hidden = convolve(input_BC.sin(), weight_OC, None, **steps)
        return hidden.square().sum() + hidden.mean((0, 2)).sum()

    def step(input_NBC: Tensor, weight_NOC: Tensor) -> Tensor:
        return vmap(of_one, in_dims=(None if shared else 0, 0))(input_NBC, weight_NOC)

    return given, step


def is_shared(case: str) -> bool:
    """Whether all members have one input."""
    return len(CASES[case][0]) < len(CASES[case][1])


def require_as_exact(
    found: list[Tensor], given: list[Tensor], step: Callable[[Tensor, Tensor], Tensor]
) -> None:
    eager, exact = results(step, given, torch.float32), results(step, given, torch.float64)
    for one, other, truth in zip(found, eager, exact, strict=True):
        error, naive = ((each - truth).abs().max() for each in (one, other))
        assert error <= 2 * naive + 1e-6 * truth.abs().max()


@pytest.mark.parametrize("case", nightly(CASES, {"strides and dilation", "one input"}))
def test_a_rewritten_graph_has_the_values_and_gradients_of_groups(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "MIN_MULTIPLICATIONS", 1)
    given, step = example(case)
    rewrite = capture._inductor_options()["joint_custom_pre_pass"]
    graphs = list[str]()

    def partition(joint: GraphModule, *given: Any, **options: Any) -> Any:
        rewrite(joint.graph)
        joint.recompile()
        graphs.append(str(joint.graph))
        return default_partition(joint, *given, **options)

    as_it_is = aot_function(
        step, lambda module, _: make_boxed_func(module.forward), partition_fn=partition
    )
    found = results(as_it_is, given, torch.float32)
    [graph] = graphs
    assert "group_convolution" in graph and "group_gradients" in graph
    assert "aten.convolution" not in graph
    assert len(found) == (2 if is_shared(case) else 3)
    require_as_exact(found, given, step)


@pytest.mark.slow(reason="generates code; by day a graph is rewritten, and run as it is")
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_groups(case: str, graphs: list[str]) -> None:
    given, step = example(case)
    # A graph of the cache would not be rewritten.
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        captured = results(compiled(step), given, torch.float32)
    assert (
        "group_convolution" in graphs[0]
        and "group_gradients" in graphs[0]
        and "aten.convolution" not in graphs[0]
    )
    assert len(captured) == (2 if is_shared(case) else 3)
    require_as_exact(captured, given, step)


def test_small_ones_and_those_with_a_bias_stay() -> None:
    def step(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(inputs, weight, None, groups=2), weight, bias, groups=2)

    given = torch.randn(1, 8, 64, 64), torch.randn(8, 4, 3, 3), torch.randn(8)
    whole = make_fx(step, tracing_mode="fake")(*given).graph
    convolutions.rewrite(whole)
    assert "group_convolution" not in str(whole), "2^19 multiplications a group"
    convolutions.MIN_MULTIPLICATIONS, least = 1, convolutions.MIN_MULTIPLICATIONS
    try:
        convolutions.rewrite(whole)
    finally:
        convolutions.MIN_MULTIPLICATIONS = least
    targets = [str(node.target) for node in whole.nodes if "convolution" in str(node.target)]
    assert targets == ["monograph.group_convolution.default", "aten.convolution.default"]
