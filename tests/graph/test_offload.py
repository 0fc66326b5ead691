# Run: pytest tests/graph/test_offload.py
"""A block's input that waits on the host: the same bits, and on the device no longer than it is
needed.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from batches import captured_to_train, flat_gradient, packed, tiny_llama
from monograph.graph import recompute
from monograph.graph.capture import CaptureFailed, capture
from monograph.graph.precision import Precision
from monograph.graph.recompute import CopyStream, OffloadedInput, checkpoint_offloaded
from monograph.graph.remat import Remat
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.step import Step

CPU = torch.device("cpu")


def trained(policy, precision="fp32", scope=None):
    engine = Resident(
        tiny_llama(num_hidden_layers=4), optim=AdamW(lr=1e-2), clip=0.5, precision=Precision(precision), remat=policy,
        micro_batch=3,
    )  # fmt: skip
    if scope:
        captured_to_train(engine, packed(6), scope=scope)
    seen = []
    for seed in range(2):
        engine.accumulate(packed(6, seed))
        seen += [flat_gradient(engine.model), engine.update().grad_norm]
    return [*seen, *engine.state().model.values()]


MIXED = Remat.PerLayer((Remat.Offload(), Remat.Off(), Remat.Offload(), Remat.Full()))


@pytest.mark.parametrize(
    ("scope", "precision", "policies"),
    [
        (None, "fp32", (Remat.Offload(), MIXED)),
        (None, "bf16", (Remat.Offload(), MIXED)),
        pytest.param("blocks", "bf16", (MIXED,), marks=pytest.mark.slow),
        pytest.param("blocks", "fp32", (Remat.Offload(), MIXED), marks=pytest.mark.slow),
        pytest.param("blocks", "bf16", (Remat.Offload(),), marks=pytest.mark.slow),
    ],
)
def test_the_bits_are_those_of_full(precision, scope, policies):
    expected = trained(Remat.Full(), precision, scope)
    for policy in policies:
        for mine, theirs in zip(trained(policy, precision, scope), expected, strict=True):
            assert torch.equal(mine, theirs)


def test_a_graph_of_the_whole_step_refuses_it():
    with pytest.raises(CaptureFailed, match="scope blocks"):
        capture(Step(tiny_llama(), remat=Remat.Offload()), "eager")([packed(3)])


def test_a_budget_is_not_asked_of_it():
    step = Step(tiny_llama(), remat=Remat.PerLayer((Remat.Offload(), Remat.Budget(0.3))))
    step([packed(3)])


class Watched(CopyStream):
    """A copy stream that notes what crosses."""

    def __init__(self):
        super().__init__(CPU)
        self.seen = []

    def to_host(self, tensor):
        self.seen.append(("out", float(tensor[0])))
        return super().to_host(tensor)

    def to_device(self, on_host, device):
        self.seen.append(("back", float(on_host[0])))
        return super().to_device(on_host, device)


def test_inputs_leave_the_device_and_each_is_called_one_block_early(monkeypatch):
    stream, alive, recomputed = Watched(), [], []
    monkeypatch.setattr(recompute, "_copy_stream", lambda device: stream)

    def block(x):
        alive.append(weakref.ref(x))
        recomputed.append([each for each in stream.seen if each[0] == "back"])
        return x.sin().cos() + 1.0

    x = torch.tensor([0.25, 0.5], requires_grad=True)
    hidden = x
    for _ in range(4):
        hidden = checkpoint_offloaded(block, lambda: (_nothing(), _nothing()), hidden)
    gc.collect()
    assert [ref() is None for ref in alive] == [False, True, True, True], (
        "only the first belongs to somebody else"
    )
    hidden.sum().backward()
    sent = [value for way, value in stream.seen if way == "out"]
    # Before block i is recomputed the inputs of blocks i and i - 1 have been called, and no other.
    assert recomputed[4:] == [
        [("back", sent[j]) for j in range(3, max(i - 1, 0) - 1, -1)] for i in (3, 2, 1, 0)
    ]
    plain = torch.tensor([0.25, 0.5], requires_grad=True)
    hidden = plain
    for _ in range(4):
        hidden = hidden.sin().cos() + 1.0
    hidden.sum().backward()
    assert torch.equal(x.grad, plain.grad)


def _nothing():
    return torch.enable_grad()


def test_an_offloaded_input_comes_back_as_often_as_it_is_taken():
    offloaded_input = OffloadedInput(torch.arange(3.0).requires_grad_(), CopyStream(CPU))
    first = offloaded_input.take()
    again, later = offloaded_input.take(), offloaded_input.take()
    assert torch.equal(first, again) and torch.equal(first, later) and again.requires_grad
    assert again.data_ptr() != first.data_ptr()


def test_a_block_that_is_given_no_tensor_is_recomputed_as_it_is():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, *, x):
            return self.inner(x).tanh()

    block, x = Block(), torch.ones(2, 3)
    out = checkpoint_offloaded(block.forward, lambda: (_nothing(), _nothing()), x=x)
    out.sum().backward()
    assert block.inner.weight.grad is not None


@pytest.mark.gpu
def test_on_a_gpu_the_bits_are_those_of_full():
    found = []
    for policy in (Remat.Full(), Remat.Offload()):
        engine = Resident(tiny_llama(num_hidden_layers=4).cuda(), remat=policy, micro_batch=3)
        for seed in range(4):
            engine.accumulate(packed(6, seed))
            engine.update()
        found.append([tensor.clone() for tensor in engine.state().model.values()])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
