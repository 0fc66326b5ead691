"""Run: pytest tests/stream/test_graphs.py (captured: so many graphs for any depth, and no more
afterwards)
"""

from __future__ import annotations

import pytest
import torch

from batches import packed
from monograph import compat
from monograph.stream.chunked_update import chunks
from streamed import EVERY, FAMILIES, streamed

BLOCK, HEAD = 2, 2  # one graph without gradients, one with


def of_updates(engine):
    """How many graphs square and update planes: one for each shape and way of updating."""
    planes = list(engine.store.stored_planes)
    squares = {(each.plane.grad.numel(), each.plane.section_sizes) for each in planes}
    cut = (piece for stage in engine.store.stages for piece in chunks(stage))
    updates = {(stored.plane.kind, stored.splits, end - begin) for stored, begin, end in cut}
    return len(squares) + len(updates)


def captured(place, layers, micro_batches, family="llama", backend="aot_eager", **changes):
    """Graphs that the capture made; checks that nothing adds to them."""
    torch.compiler.reset()
    rows, before = 3 * micro_batches, compat.captured_graphs()
    sizes = {**FAMILIES[family], "num_hidden_layers": layers}
    engine = streamed(sizes, placement=EVERY[place], clip=None, precision="bf16", **changes)
    assert engine.capture(packed(rows), backend) is None
    graphs = compat.captured_graphs() - before
    for seed in range(3):
        engine.accumulate(packed(rows, seed))
        engine.update()
        engine.evaluate(packed(rows, seed))
    assert compat.captured_graphs() - before == graphs and compat.graph_breaks() == 0
    return graphs - of_updates(engine)


@pytest.mark.parametrize(
    ("place", "layers", "micro_batches", "backend"),
    [
        ("next forward, offloaded", 3, 1, "eager"),  # whose graphs are as many
        pytest.param("next forward, offloaded", 4, 3, "aot_eager", marks=pytest.mark.slow),
        pytest.param("on the host", 7, 1, "aot_eager", marks=pytest.mark.slow),
        pytest.param("backward", 7, 2, "aot_eager", marks=pytest.mark.slow),
        pytest.param("some stages on the device", 7, 2, "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_four_and_the_updates(place, layers, micro_batches, backend):
    assert captured(place, layers, micro_batches, backend=backend) == BLOCK + HEAD


@pytest.mark.slow
def test_stages_of_several_blocks_share_them_too():
    assert captured("on the host", 8, 2, blocks_per_stage=4) == BLOCK + HEAD


@pytest.mark.slow
def test_blocks_that_differ_have_their_own():
    """A mask is an argument, so layers with and without a window share a graph if both have one."""
    assert captured("on the host", 6, 2, "mistral") == BLOCK + HEAD
