# Run: pytest tests/predict/test_kernels.py
"""What a graph changes in an argument lies in the argument's memory. What it changes in its own
values is counted.
"""

from __future__ import annotations

import pytest
import torch

from monograph.ops.fused_gradients import add_scaled_
from monograph.predict.fake_memory import FakeMemory
from monograph.predict.kernels import planned_kernels

V, D = 96, 8
BYTES = V * D * 4


def scaled(total, grad, tokens):
    add_scaled_(total, grad, tokens.sum().float())


def rows_at_indices(total, grad, tokens):
    total.index_add_(0, tokens, grad[: len(tokens)])


def scaled_and_rows(total, grad, tokens):
    """As the gradient of a head that is tied to the embedding."""
    scaled(total, grad, tokens)
    rows_at_indices(total, grad, tokens)


def of_its_own(total, grad, tokens):
    value = total * 2
    scaled(value, grad, tokens)
    return value


def peak_bytes(function) -> int:
    """Return the largest bytes that a graph's kernels take beside its arguments."""
    with FakeMemory(vocabulary=V, device_type="cuda") as memory:
        total, grad = torch.zeros(V, D), torch.zeros(V, D)
        tokens = torch.zeros(3, dtype=torch.int64)
        before = sum(memory.curve[-1])
        memory.captured(function)(total, grad, tokens)
        return max(map(sum, memory.curve)) - before


@pytest.mark.parametrize("change", [scaled, rows_at_indices, scaled_and_rows])
def test_what_is_added_to_an_argument_takes_no_memory(change):
    assert peak_bytes(change) < BYTES


def test_what_is_added_to_a_graph_s_own_value_takes_its_memory():
    assert BYTES <= peak_bytes(of_its_own) < 2 * BYTES


@pytest.mark.parametrize("reads_later", [False, True])
def test_an_argument_whose_old_value_is_read_later_is_copied(reads_later):
    """The compiler's order, not the program's, decides what is later, so the graph is made by hand."""
    graph = torch.fx.Graph()
    total = graph.placeholder("total")
    new_value = graph.call_function(
        torch.ops.aten.index_put.default, (total, [graph.placeholder("index")], total, True)
    )
    other = total if reads_later else new_value
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (other, 2))
    graph.call_function(torch.ops.aten.copy_.default, (total, new_value))
    graph.output((doubled,))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(V, D)
    kernels = planned_kernels(torch.fx.GraphModule({}, graph), "cuda", backward=False)
    sizes = {kernel.name: kernel.size_bytes for kernel in kernels}
    assert sizes[new_value.name] == (BYTES if reads_later else 0)
