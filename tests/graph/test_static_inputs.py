# Run: pytest tests/graph/test_static_inputs.py
"""Which batches and modules are captured, when captures are given back, and the line where a
micro-step is only called.

On a CPU `Tape` stands for the device that captures; tests/laws/test_replayed_is_called.py has the
law.
"""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch

from batches import captured_to_train, packed, ragged
from laws.replaying import (
    ROWS,
    Reads,
    assert_same_bits,
    check,
    engine,
    replaying,
    trained,
    windows_of,
)
from monograph.graph.capture import capture, uncapture
from monograph.graph.remat import Remat
from monograph.graph.replay import MAX_SHAPES, HostState, StaticInputs
from monograph.laws.comparisons import outcome
from monograph.loss import TokenLoss
from tape import Tape


def test_another_shape_is_another_graph_and_too_many_are_called():
    lines: list[str] = []
    windows = [
        ragged(4, seed=seed, length=8 + seed % (MAX_SHAPES + 2))
        for seed in range(5 * (MAX_SHAPES + 2))
    ]
    expected = trained(engine(), windows)
    made = replaying(engine(), lines)
    assert_same_bits(trained(made, windows), expected)
    assert len(made.step.recorder.graphs) == made.step.micro_step.graph_count == MAX_SHAPES
    assert lines == [
        f"micro-steps are launched one by one: batches have more than {MAX_SHAPES} shapes, "
        f"of which only the first {MAX_SHAPES} are replayed"
    ]


def test_segments_or_not_is_another_graph():
    windows = [packed(4, seed=seed) if seed % 2 else ragged(4, seed=seed) for seed in range(8)]
    assert len(check(engine, windows).step.recorder.graphs) == 2


@pytest.mark.parametrize(
    ("beside", "why"),
    [
        (object(), "a object"),
        (torch.ones(1, device="meta"), "a tensor on meta, where the host may read it"),
        (torch.ones(1, requires_grad=True), "a tensor that wants a gradient"),
    ],
)
def test_a_batch_of_something_else_is_called(beside, why):
    lines: list[str] = []

    def loss(model, batch):
        return TokenLoss()(model, batch[0])

    made = replaying(engine(loss=loss), lines)
    for _ in range(4):
        made.step([(ragged(2), beside)])
    assert made.step.recorder.called == 0
    assert lines == [f"micro-steps are launched one by one: a batch holds {why}"]


def test_plain_values_beside_the_tensors_are_part_of_the_shape():
    def loss(model, batch):
        total, count = TokenLoss()(model, batch[0])
        return total * batch[1], count

    results = []
    for make in (engine, lambda loss: replaying(engine(loss=loss))):
        made = make(loss=loss)
        for index in range(8):
            made.step([(ragged(2, seed=index), 0.5 if index % 2 else 1.0)])
        results.append(outcome(made.state()))
    assert len(made.step.recorder.graphs) == 2
    assert_same_bits(*results)


def test_each_mode_has_graphs_of_its_own():
    """Those of modes that come in turns are kept, with the same buffers for their batches."""
    total, modes = torch.zeros(2), ["write", "add", "add"]

    def run(batch):
        total.copy_(batch) if modes[0] == "write" else total.add_(batch)
        return total * 2

    tape = Tape()
    replay = StaticInputs(
        run, tape, torch.device("cpu"), HostState, pytest.fail, mode=lambda: modes[0]
    )
    for number in range(1, 6):
        for _ in range(3):
            doubled = replay(torch.full((2,), float(number)))
            modes.append(modes.pop(0))
        assert total.tolist() == [3.0 * number] * 2 and torch.equal(doubled, 2 * total)
    # The second one was called once. It was then captured, and replayed at once.
    assert replay.graph_count == len(tape.graphs) == 2
    assert (tape.called, tape.replays) == (3, 3 * 4)


def test_a_second_mode_that_cannot_be_captured_is_called():
    class FailsTwice(Tape):
        def record(self, work):
            if self.graphs:
                work()
                raise RuntimeError("out of memory")
            return super().record(work)

    modes, lines = ["write", "add"], []
    replay = StaticInputs(
        lambda batch: batch * (1 if modes[0] == "write" else 2),
        FailsTwice(), torch.device("cpu"), HostState, lines.append, mode=lambda: modes[0],
    )  # fmt: skip
    for number in range(1, 5):
        for factor in (1, 2):
            assert replay(torch.tensor(float(number))) == factor * number
            modes.append(modes.pop(0))
    assert lines == ["the capture failed: out of memory"] and replay.graph_count == 0


# ── memory ────────────────────────────────────────────────────────────────────────────────────────


class Hungry(TokenLoss):
    """Out of memory in an evaluation, as long as a graph holds some."""

    graph = staticmethod(lambda: None)

    def __call__(self, model, batch):
        if not model.training and self.graph() is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().__call__(model, batch)


def test_out_of_memory_gives_the_graphs_back_first():
    loss, lines = Hungry(), []
    windows = windows_of(packed, 4)
    expected = trained(engine(), windows)
    made = replaying(engine(loss=loss))
    made.announce = lines.append

    def between(made, index):
        if index == 1:
            Hungry.graph = staticmethod(weakref.ref(made.step.recorder.graphs.pop()))
            made.evaluate(packed(4))

    assert_same_bits(trained(made, windows, between), expected)
    assert lines == [
        "out of memory at 2 rows: micro-steps are launched one by one from now on, the update stays the same"
    ]
    assert made.micro_batch == 2 and made.step.micro_step.graph_count == 0


def test_out_of_memory_before_a_capture_halves_the_rows_and_the_halves_are_replaying():
    class Full(TokenLoss):
        def __call__(self, model, batch):
            if len(batch["tokens"]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().__call__(model, batch)

    expected = trained(engine(), windows_of(packed))
    made = replaying(engine(micro_batch=4, loss=Full()))
    assert_same_bits(trained(made, windows_of(packed)), expected)
    assert made.micro_batch == 2 and made.step.micro_step.graph_count == 1


@pytest.mark.slow
def test_blocks_that_are_recomputed_from_now_on_are_captured_anew():
    made = engine(micro_batch=1)
    made.step.recorder = tape = Tape()
    captured_to_train(made, packed(2), "eager")
    first = weakref.ref(tape.graphs.pop())
    assert first() is not None and made.retries._recompute(made.step)
    gc.collect()
    assert first() is None and made.step.micro_step.graph_count == 0
    trained(made, windows_of(packed, 3, rows=2))
    assert made.step.micro_step.graph_count == 1 and tape.replays == 4


@pytest.mark.slow
def test_what_is_released_holds_no_graph():
    made = engine()
    made.step.recorder = tape = Tape()
    captured_to_train(made, packed(ROWS), "eager")
    first = weakref.ref(tape.graphs.pop())
    uncapture(made.step)
    gc.collect()
    assert first() is None and made.step.micro_step == made.step._micro_step


# ── what is not replayed ──────────────────────────────────────────────────────────────────────────


class Draws(TokenLoss):
    def __call__(self, model, batch):
        total, count = super().__call__(model, batch)
        return total * (1 + random.Random.random(random._inst)), count


class Counts(TokenLoss):
    calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        total, count = super().__call__(model, batch)
        return total * self.calls, count


class Replaces(TokenLoss):
    def __init__(self):
        super().__init__()
        self.mean = torch.ones(())

    def __call__(self, model, batch):
        total, count = super().__call__(model, batch)
        self.mean = 0.9 * self.mean + 0.1 * total.detach()
        return total / self.mean, count


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (Reads, "the host waits for the device at _local_scalar_dense"),
        (Draws, "it draws random numbers on the host (Python's or NumPy's)"),
        (Counts, "calls changes from batch to batch: keep it in a tensor"),
        (Replaces, "mean changes from batch to batch: keep it in a tensor"),
    ],
)
def test_what_the_host_does_is_said_once_and_called(loss, why):
    lines: list[str] = []
    random.seed(1)
    expected = trained(engine(loss=loss()), windows_of(ragged, 5))
    random.seed(1)
    made = replaying(engine(loss=loss()), lines)
    assert_same_bits(trained(made, windows_of(ragged, 5)), expected)
    assert lines == [f"micro-steps are launched one by one: {why}"]
    assert made.step.recorder.replays == 0


def test_a_capture_that_fails_is_said_and_called():
    class Fails(Tape):
        def record(self, work):
            raise RuntimeError("CUDA error: out of luck\nmore of it")

    lines: list[str] = []
    expected = trained(engine(), windows_of(ragged))
    made = engine()
    replaying(made, lines).step.micro_step._replays._recorder = Fails()
    assert_same_bits(trained(made, windows_of(ragged)), expected)
    assert lines == [
        "micro-steps are launched one by one: the capture failed: CUDA error: out of luck"
    ]


def test_what_changes_on_the_host_now_and_then_is_captured_anew():
    class Tempered(TokenLoss):
        heat = 1.0

        def __call__(self, model, batch):
            total, count = super().__call__(model, batch)
            return total * self.heat, count

    def between(made, index):
        if index == 1:
            made.step.loss.heat = 0.5

    def made():
        loss = Tempered()
        loss.heat = 1.0
        return engine(loss=loss)

    assert len(check(made, windows_of(ragged, 6), between=between).step.recorder.graphs) == 2


def test_another_forward_pass_is_recorded_anew():
    made = replaying(engine())
    windows = windows_of(packed)
    trained(made, windows)
    before = made.step.recorder.called
    forward = made.step.forward.function
    made.step.forward.function = lambda batch, loss_factor: forward(batch, loss_factor)
    trained(made, windows[:1])
    assert made.step.recorder.called > before


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Remat.Full(), "blocks are recomputed between graphs"),
        (Remat.Offload(), "blocks are recomputed between graphs"),
        (Remat.Pointwise(), "graphs of blocks that recompute are not replayed"),
        (Remat.Budget(0.5), "graphs of blocks that recompute are not replayed"),
    ],
    ids=str,
)
def test_recomputed_blocks_are_called(policy, reason):
    lines: list[str] = []
    made = engine(policy=policy)
    made.step.recorder, made.step.announce = Tape(), lines.append
    capture(made.step, "eager", "blocks")
    assert lines == [f"micro-steps are launched one by one: {reason}"]
    assert made.step.micro_step == made.step._micro_step
