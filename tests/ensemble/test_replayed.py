"""Run: pytest tests/ensemble/test_replayed.py

An ensemble whose updates and calls are captured once and replayed gives the bits of one that is
called. On a CPU `Tape` stands for the device that captures.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batches import captured_to_train
from monograph.ensemble import Ensemble
from monograph.ensemble.replayed_calls import MAX_SETTINGS, ReplayedCalls, _layout
from monograph.graph.capture import stop_replaying
from monograph.graph.replay import MAX_DISCARDED, WARM_UP, CudaGraphs, StaticInputs
from monograph.laws.comparisons import differing, outcome
from monograph.optim import AdamW
from monograph.schedule import warmup_cosine
from tape import Tape

MEMBERS = 3
# By day what is replayed is Dynamo's graph as it is, and has the bits of what nobody compiled; at night
# a compiler takes it apart, and both go through it.
BY_DAY, AT_NIGHT = "eager", "aot_eager"
on_a_gpu = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize("device", ["cpu", on_a_gpu])


class Net(nn.Module):
    """Has what differs between calls: dropout, running means, and a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, rows):
        return self.down(self.drop(F.relu(self.up(self.norm(rows)))))


def plain():
    """What compiles in a third of the time, where nothing has to differ between calls."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), batch["y"].numel()


def ensemble(device, *, schedule=None, made=Net, **options) -> Ensemble:
    torch.manual_seed(0)
    members = [made().to(device) for _ in range(MEMBERS)]
    # With decays that differ, no 0-d fp64 tensor is compared on a CPU: Dynamo would read its value in a
    # guard, which `Tape` takes for a wait.
    knobs = [{"lr": 1e-2 * (1 + n), "weight_decay": 0.1 * n} for n in range(MEMBERS)]
    return Ensemble(members, knobs, loss=loss, optim=AdamW, schedule=schedule, **options)


def recorder_on(device):
    return CudaGraphs(torch.device("cuda", 0)) if device == "cuda" else Tape()


def window(device, seed=0, rows=6):
    drawn = torch.Generator().manual_seed(seed)
    shapes = {"x": (rows, 4), "y": (rows, 2)}
    return {name: torch.randn(shape, generator=drawn).to(device) for name, shape in shapes.items()}


def trained(engine, device, updates=6):
    found = []
    for seed in range(updates):
        engine.accumulate(window(device, seed))
        found.append(engine.update())
    return outcome(engine.state(), found)


# ── an update ─────────────────────────────────────────────────────────────────────────────────────


@DEVICES
@pytest.mark.parametrize(
    ("schedule", "clip", "backend"),
    [
        (None, None, BY_DAY),
        pytest.param(None, None, AT_NIGHT, marks=pytest.mark.slow),
        pytest.param(warmup_cosine(2, 6), 0.5, AT_NIGHT, marks=pytest.mark.slow),
    ],
)
def test_an_update_that_is_replayed(device, schedule, clip, backend):
    results = []
    for recorder in (None, recorder_on(device)):
        engine = ensemble(device, schedule=schedule, clip=clip, micro_batch=3)
        engine.step.recorder, engine.step.announce = recorder, pytest.fail
        if recorder is not None or backend == AT_NIGHT:
            captured_to_train(engine, window(device), backend)
        results.append(trained(engine, device))
    assert isinstance(engine.step.apply.function, StaticInputs)
    assert engine.step.apply.function.graph_count == 1
    assert not differing(*results)


@pytest.mark.slow
def test_replayed_as_often_as_it_runs():
    engine = ensemble("cpu", micro_batch=3)
    engine.step.recorder = tape = Tape()
    captured_to_train(engine, window("cpu"), AT_NIGHT)
    # Both are warm, so no update of the run is called.
    assert tape.called == 2 * WARM_UP
    trained(engine, "cpu")
    assert tape.called == 2 * WARM_UP and tape.replays == 6 * 2 + 6
    assert stop_replaying(engine.step) and not stop_replaying(engine.step)


@pytest.mark.slow
def test_a_frozen_member_and_a_clip_that_is_changed():
    """What a capture decided by is compared before each replay; what is on the device is read."""
    results = []
    for recorder in (None, Tape()):
        engine = ensemble("cpu", clip=1e-3, micro_batch=3)
        engine.step.recorder = recorder
        captured_to_train(engine, window("cpu"), AT_NIGHT)
        trained(engine, "cpu", 3)
        engine.freeze([1])
        trained(engine, "cpu", 2)
        engine.step.clip = engine.step.clip._replace(norm=1e3)
        results.append(trained(engine, "cpu"))
    assert not differing(*results)


# ── the learning rates ────────────────────────────────────────────────────────────────────────────


def test_a_schedule_is_called_once_an_update_and_rates_are_written_when_they_change():
    calls = []

    def schedule(index):
        calls.append(index)
        return 1.0 if index < 3 else 0.5

    engine = ensemble("cpu", schedule=schedule)
    for seed in range(5):
        engine.accumulate(window("cpu", seed))
        expected = tuple(1e-2 * (1 + n) * (1.0 if seed < 3 else 0.5) for n in range(MEMBERS))
        assert engine.update().lr == expected
        assert engine.step.lr.tolist() == list(expected)
    assert calls == [0, 1, 2, 3, 4]


# ── a call ────────────────────────────────────────────────────────────────────────────────────────


def replaying(device, lines=None, made=Net, backend=BY_DAY):
    """An ensemble whose calls are replayed, and another that is called."""
    pair = ensemble(device, made=made), ensemble(device, made=made)
    for engine in pair:
        engine.announce = lines.append if lines is not None else pytest.fail
        if engine is pair[0] or backend == AT_NIGHT:
            engine.compile(backend)
    pair[1]._infer = pair[1]._call_in_context
    pair[0]._replay_calls(recorder_on(device))
    return pair


def graphs(engine) -> int:
    assert isinstance(engine._infer, ReplayedCalls)
    return engine._infer.graph_count


@DEVICES
@pytest.mark.parametrize("training", [False, True])
def test_a_call_that_is_replayed(device, training):
    replayed, called = replaying(device)
    kept = []
    for engine in (replayed, called):
        engine.model.train(training)
    with torch.no_grad():
        for seed in range(6):
            rows = window(device, seed)["x"]
            kept.append((replayed(rows), called(rows)))
    assert graphs(replayed) == 1
    for found, expected in kept:  # a later replay has not overwritten an earlier result
        assert torch.equal(found, expected) and not found.requires_grad
    for name, buffer in called.model.named_buffers():
        assert torch.equal(replayed.model.get_buffer(name), buffer)


@DEVICES
def test_weights_that_are_written_or_moved(device):
    """Training writes weights in place; the first update moves them."""
    replayed, called = replaying(device, made=plain)
    for engine in (replayed, called):
        engine.model.eval()
    rows = window(device, 9)["x"]
    for update in range(6):
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(replayed(rows), called(rows))
        assert graphs(replayed) == 1
        for engine in (replayed, called):
            engine.model.train()
            engine.accumulate(window(device, update))
            engine.update()
            engine.model.eval()
        with torch.no_grad():
            assert torch.equal(replayed(rows), called(rows))


def test_each_mode_keeps_its_graph_however_often_it_changes():
    """A graph that two modes share is thrown away at each change, and after a few never made again."""
    replayed, called = replaying("cpu", made=plain)
    rows = window("cpu")["x"]
    with torch.no_grad():
        for _ in range(MAX_DISCARDED):
            for training in (True, False):
                for engine in (replayed, called):
                    engine.model.train(training)
                assert torch.equal(replayed(rows), called(rows))
    assert graphs(replayed) == 2


@pytest.mark.slow
def test_shapes_keywords_and_own_rows():
    replayed, called = replaying("cpu", backend=AT_NIGHT)
    for engine in (replayed, called):
        engine.model.eval()
    rows = window("cpu")["x"]
    own = rows.expand(MEMBERS, *rows.shape).contiguous()
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(replayed(rows), called(rows))
            assert torch.equal(replayed(rows[:5]), called(rows[:5]))
            assert torch.equal(replayed(rows=rows), called(rows=rows))
            assert torch.equal(replayed(own, each=True), called(own, each=True))
            assert torch.equal(replayed(rows, reduce="mean"), called(rows, reduce="mean"))
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(replayed(rows), called(rows))
    # With autocast the same shape is captured again.
    assert graphs(replayed) == 5


@pytest.mark.slow
def test_rows_that_are_not_contiguous_are_called():
    replayed, called = replaying("cpu", backend=AT_NIGHT)
    for engine in (replayed, called):
        engine.model.eval()
    strided = torch.randn(6, 8)[:, ::2]
    expanded = torch.randn(1, 4).expand(6, 4)
    with torch.no_grad():
        for rows in (strided, expanded):
            for _ in range(3):
                assert torch.equal(replayed(rows), called(rows))
    assert graphs(replayed) == 0


def test_only_a_layout_that_a_buffer_can_have_has_a_name():
    """Rows of another layout are called: a buffer's strides may be others, and so may sums be."""
    pictures = torch.ones(2, 3, 4, 5)
    assert _layout(pictures) == "contiguous"
    assert _layout(pictures.to(memory_format=torch.channels_last)) == "channels_last"
    for tensor in (pictures[..., ::2], torch.ones(2, 3).T, torch.ones(2, 3).to_sparse()):
        assert _layout(tensor) is None


def test_a_call_whose_gradient_is_wanted_is_not_replayed():
    replayed, _ = replaying("cpu", made=plain)
    rows = window("cpu")["x"]
    for _ in range(4):
        assert replayed(rows).requires_grad
    assert graphs(replayed) == 0


@pytest.mark.slow
def test_inference_mode():
    replayed, called = replaying("cpu", backend=AT_NIGHT)
    for engine in (replayed, called):
        engine.model.eval()
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        for seed in range(3):
            with mode():
                rows = window("cpu", seed)["x"]
                assert torch.equal(replayed(rows), called(rows))
    assert graphs(replayed) == 1


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, rows):
        rows.add_(1.0)
        return rows * self.scale


def test_a_member_that_writes_to_its_input_is_called():
    lines: list[str] = []
    # Compiled both, as the first call that is not makes a trial of itself, which writes, too.
    replayed, called = replaying("cpu", lines, Writes, AT_NIGHT)
    with torch.no_grad():
        for seed in range(4):
            ours, theirs = window("cpu", seed)["x"], window("cpu", seed)["x"]
            assert torch.equal(replayed(ours), called(theirs))
            assert torch.equal(ours, theirs) and not torch.equal(ours, window("cpu", seed)["x"])
    assert graphs(replayed) == 0 and len(lines) == 1 and "writes to its inputs" in lines[0]


def test_inputs_and_settings_that_cannot_be_replayed():
    lines: list[str] = []
    replayed, called = replaying("cpu", lines, plain)
    for engine in (replayed, called):
        engine.model.eval()
    rows = window("cpu")["x"]
    with torch.no_grad():
        wanted = rows.clone().requires_grad_()
        assert torch.equal(replayed(wanted), called(wanted))
        assert "wants a gradient" in lines[0]
        replayed._infer._replays.update(dict.fromkeys(range(MAX_SETTINGS)))
        replayed.model.train()
        called.model.train()
        assert torch.equal(replayed(rows), called(rows))
        assert len(replayed._infer._replays) == MAX_SETTINGS + 1


@pytest.mark.gpu
def test_inside_a_capture_and_on_another_stream_it_is_called():
    replayed, called = replaying("cuda")
    for engine in (replayed, called):
        engine.model.eval()
    rows = window("cuda")["x"]
    other, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        for _ in range(3):
            expected = replayed(rows)
        assert torch.equal(expected, called(rows))
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            for _ in range(3):
                on_other = replayed(rows)
        other.synchronize()
        with torch.cuda.graph(graph, stream=other):
            out = replayed(rows)
        graph.replay()
    assert torch.equal(on_other, expected) and torch.equal(out, expected)
    assert graphs(replayed) == 1
