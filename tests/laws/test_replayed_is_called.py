# Run: pytest tests/laws/test_replayed_is_called.py
"""Law 1 where a micro-step is captured once and replayed: to the bit what calling it for every micro-batch gives.

On a CPU `Tape` stands for the device that captures; what runs on one is in test_replayed_on_a_gpu.
"""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from torch import nn

from batches import copied, packed, ragged, tiny_llama
from laws.resumed import SETTINGS, cut_back, fingerprint, resume, start
from monograph.graph.capture import capture, release
from monograph.graph.capture import replayed as as_replayed
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.graph.replay import WARM_UP
from monograph.graph.static_inputs import MOST
from monograph.loss import TokenLoss
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.step import Step
from tape import Tape

ROWS = 6


def engine(model=None, *, micro_batch=2, precision="fp32", policy=None, state="fp32", loss=None):
    return Resident(
        model or tiny_llama(), loss=loss or TokenLoss(), optim=AdamW(lr=1e-2, state=state), clip=0.5,
        precision=Precision(precision), remat=policy, micro_batch=micro_batch,
    )  # fmt: skip


def replaying(made, lines=None):
    """The engine, its micro-step replayed without being compiled before."""
    step = made.step
    step.announce = lines.append if lines is not None else pytest.fail
    step.recorder = Tape()
    step.micro_step = as_replayed(step)
    return made


def trained(made, windows, between=lambda engine, index: None):
    """Everything that the windows' updates make, and their losses and norms."""
    torch.manual_seed(0)
    updates = []
    for index, window in enumerate(windows):
        made.accumulate(window)
        updates.append(made.update())
        between(made, index)
    # repr: NaN, the mean of no targets, is not equal to itself
    return made.state(), [repr((float(u.loss), float(u.grad_norm), int(u.count), int(u.skipped))) for u in updates]


def assert_same_bits(one, two):
    assert one[1] == two[1]
    assert one[0].scalars == two[0].scalars
    for mine, theirs in ((one[0].model, two[0].model), (one[0].optimizer, two[0].optimizer)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def check(make, windows, **options):
    """Called and replayed give the same, and most micro-steps were replayed."""
    expected = trained(make(), windows, **options)
    made = replaying(make())
    assert_same_bits(trained(made, windows, **options), expected)
    assert made.step.recorder.replays > made.step.recorder.called
    return made


def windows_of(batch, count=3, rows=ROWS):
    return [batch(rows, seed=seed) for seed in range(count)]


# ── what is replayed ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("micro_batch", [2, ROWS])
@pytest.mark.parametrize("batch", [ragged, packed])
def test_accumulated(precision, micro_batch, batch):
    check(lambda: engine(precision=precision, micro_batch=micro_batch), windows_of(batch, 3 if micro_batch == 2 else 6))


@pytest.mark.parametrize("policy", [Remat.Full(), Remat.Pointwise(), Remat.Budget(0.3)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputed(policy, precision):
    check(lambda: engine(precision=precision, policy=policy), windows_of(packed))


@pytest.mark.parametrize(
    ("backend", "scope", "precision", "policy"),
    [
        ("aot_eager", "whole", "fp32", Remat.Off()),
        ("aot_eager", "whole", "bf16", Remat.Full()),
        ("aot_eager", "blocks", "fp32", Remat.Off()),
        ("eager", "whole", "bf16", Remat.Off()),
    ],
)
def test_compiled(backend, scope, precision, policy):
    results = []
    for recorder in (None, Tape()):
        made = engine(precision=precision, policy=policy)
        made.step.recorder, made.step.announce = recorder, pytest.fail
        assert made.capture(packed(ROWS), backend, scope) is None
        results.append(trained(made, windows_of(packed)))
        if recorder:  # everything was warmed by the capture
            assert (recorder.called, recorder.replays, len(recorder.graphs)) == (WARM_UP, 9, 1)
    assert_same_bits(*results)


def test_a_partial_last_window_and_a_window_without_targets():
    empty = ragged(ROWS, seed=9)
    empty["targets"].fill_(-100)
    check(engine, [ragged(6), ragged(5, seed=1), empty, ragged(1, seed=2)])


def test_weights_in_bf16_whose_gradients_are_not():
    check(lambda: engine(precision="bf16", state="all-bf16"), windows_of(ragged))


def test_a_loss_scale_that_changes():
    def made():
        found = engine(precision="fp16")
        found.step.loss_scale.fill_(2.0**24)  # overflows
        return found

    check(made, windows_of(ragged, 5))


class Moving(nn.Module):
    """Random numbers of the device, and buffers that move."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(61, 16), nn.BatchNorm1d(16)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(16, 61)

    def forward(self, tokens):
        return self.head(self.drop(self.norm(self.embed(tokens).flatten(0, 1))))


def cross_entropy(model, batch):
    targets = batch["targets"].flatten()
    logits = model(batch["tokens"])
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()


def test_dropout_and_running_means():
    made = check(lambda: engine(Moving(), loss=cross_entropy), windows_of(ragged, 4))
    assert int(made.model.norm.num_batches_tracked) == 12


def test_evaluated_between_updates():
    def between(made, index):
        scores.append([float(part) for part in made.evaluate(ragged(5, seed=40 + index))])

    scores: list[list[float]] = []
    check(lambda: engine(Moving(), loss=cross_entropy), windows_of(ragged, 4), between=between)
    assert scores[:4] == scores[4:]


@pytest.mark.parametrize("at", [0, 1, 3])
def test_resumed(at):
    windows = windows_of(packed, 5)
    whole = trained(engine(), windows)
    first, second = replaying(engine()), replaying(engine())
    trained(first, windows[:at])
    second.load_state(copied(first.state()))
    assert_same_bits((trained(second, windows[at:])[0], []), (whole[0], []))


def test_a_state_that_is_loaded_where_a_graph_is():
    windows = windows_of(packed, 5)
    whole = trained(engine(), windows)
    other = replaying(engine())
    trained(other, windows_of(packed, 7)[5:])
    made = engine()
    trained(made, windows[:2])
    other.load_state(copied(made.state()))
    assert_same_bits((trained(other, windows[2:])[0], []), (whole[0], []))


# ── shapes ────────────────────────────────────────────────────────────────────────────────────────


def test_another_shape_is_another_graph_and_too_many_are_called():
    lines: list[str] = []
    windows = [ragged(4, seed=seed, length=8 + seed % (MOST + 2)) for seed in range(5 * (MOST + 2))]
    expected = trained(engine(), windows)
    made = replaying(engine(), lines)
    assert_same_bits(trained(made, windows), expected)
    assert len(made.step.recorder.graphs) == made.step.micro_step.captured == MOST
    assert lines == [f"micro-steps are launched one by one: batches have more than {MOST} shapes, the others"]


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
        results.append((made.state(), []))
    assert len(made.step.recorder.graphs) == 2
    assert_same_bits(*results)


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
    assert made.micro_batch == 2 and made.step.micro_step.captured == 0


def test_out_of_memory_before_a_capture_halves_the_rows_and_the_halves_are_replaying():
    class Full(TokenLoss):
        def __call__(self, model, batch):
            if len(batch["tokens"]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().__call__(model, batch)

    expected = trained(engine(), windows_of(packed))
    made = replaying(engine(micro_batch=4, loss=Full()))
    assert_same_bits(trained(made, windows_of(packed)), expected)
    assert made.micro_batch == 2 and made.step.micro_step.captured == 1


def test_blocks_that_are_recomputed_from_now_on_are_captured_anew():
    made = engine(micro_batch=1)
    made.step.recorder = tape = Tape()
    assert made.capture(packed(2), "eager") is None
    first = weakref.ref(tape.graphs.pop())
    assert first() is not None and made._recompute()
    gc.collect()
    assert first() is None and made.step.micro_step.captured == 0
    trained(made, windows_of(packed, 3, rows=2))
    assert made.step.micro_step.captured == 1 and tape.replays == 4


def test_what_is_released_holds_no_graph():
    made = engine()
    made.step.recorder = tape = Tape()
    assert made.capture(packed(ROWS), "eager") is None
    first = weakref.ref(tape.graphs.pop())
    release(made.step)
    gc.collect()
    assert first() is None and made.step.micro_step == made.step._micro_step


# ── what is not replayed ──────────────────────────────────────────────────────────────────────────


class Reads(TokenLoss):
    def __call__(self, model, batch):
        total, count = super().__call__(model, batch)
        return total * (2.0 if total.item() > 0 else 1.0), count


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
        (Counts, "calls is another from batch to batch: keep it in a tensor"),
        (Replaces, "mean is another from batch to batch: keep it in a tensor"),
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
    assert lines == ["micro-steps are launched one by one: the capture failed: CUDA error: out of luck"]


def test_what_changes_on_the_host_now_and_then_is_captured_anew():
    class Tempered(TokenLoss):
        heat = 1.0

        def __call__(self, model, batch):
            total, count = super().__call__(model, batch)
            return total * self.heat, count

    def between(made, index):
        if index == 1:
            made.step.loss.heat = 0.5
        if index == 3:
            made.model.model.norm.weight.requires_grad_(False)

    def made():
        loss = Tempered()
        loss.heat = 1.0
        return engine(loss=loss)

    assert len(check(made, windows_of(ragged, 6), between=between).step.recorder.graphs) == 3


@pytest.mark.parametrize("policy", [Remat.Full(), Remat.Offload()], ids=str)
def test_blocks_recomputed_between_graphs_are_called(policy):
    lines: list[str] = []
    made = engine(policy=policy)
    made.step.recorder, made.step.announce = Tape(), lines.append
    capture(made.step, "eager", "blocks")
    assert lines == ["micro-steps are launched one by one: blocks are recomputed between graphs"]
    assert made.step.micro_step == made.step._micro_step


# ── the law can fail ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("moved", ["seed", "loss_sum", "tokens", "grad"])
def test_what_is_put_elsewhere_is_not_seen(moved):
    """The tape reads and writes where the capture did, as a graph does: each of these would give other bits."""
    windows = windows_of(ragged, 4)
    expected = trained(engine(), windows)
    made = replaying(engine())

    def between(made, index):
        if index != 1:
            return
        step = made.step
        if moved == "tokens":
            step.micro_step._inputs = {
                key: (batch, [leaf.clone() for leaf in own]) for key, (batch, own) in step.micro_step._inputs.items()
            }
        elif moved == "grad":
            for plane in step.planes:
                plane.grad = plane.grad.clone()
        else:
            setattr(step, moved, getattr(step, moved).clone())

    with pytest.raises(AssertionError):
        assert_same_bits(trained(made, windows, between), expected)


# ── whole runs ────────────────────────────────────────────────────────────────────────────────────


def test_runs_called_replayed_and_taken_up_again(here, monkeypatch, capfd):
    """Law 10 too: a run that is cut and taken up captures anew, and has the bits of one that never captured."""
    capture_of, init = Resident.capture, Step.__init__
    tapes: list[Tape] = []

    def with_tape(self, *arguments, **options):
        init(self, *arguments, **options)
        tapes.append(Tape())
        self.recorder = tapes[-1]

    monkeypatch.setattr("monograph.session.setup.compiler_obstacle", lambda: None)
    monkeypatch.setattr(Resident, "capture", lambda self, window, scope: capture_of(self, window, "aot_eager", scope))
    settings = SETTINGS | {"train.compile": "whole", "train.updates": 8}
    start("called", settings)
    assert "0 graph breaks" in (shown := capfd.readouterr().err) and "replayed" not in shown
    monkeypatch.setattr(Step, "__init__", with_tape)
    start("replayed", settings)
    assert "0 graph breaks, micro-steps replayed" in capfd.readouterr().err
    cut_back("replayed", "cut", 3)
    resume("cut")
    called, replayed, resumed = (fingerprint(here / name) for name in ("called", "replayed", "cut"))
    assert called == replayed == resumed
    assert [tape.called for tape in tapes] == [WARM_UP] * 2 and tapes[0].replays > tapes[1].replays > 0
