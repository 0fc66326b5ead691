# Run: pytest tests/laws/test_replayed_is_called.py
"""Law 1 where a micro-step is captured once and replayed: to the bit what calling it for every
micro-batch gives.

On a CPU `Tape` stands for the device that captures; what runs on one is in test_replayed_on_a_gpu.
"""

from __future__ import annotations

import pytest

from batches import captured_to_train, copied, packed, ragged
from daily import nightly
from laws.replaying import (
    ROWS,
    Moving,
    assert_same_bits,
    check,
    cross_entropy,
    engine,
    replaying,
    trained,
    windows_of,
)
from laws.resumed import SETTINGS, cut_back, fingerprint, resume, start
from monograph.graph.capture import stop_replaying
from monograph.graph.remat import Remat
from monograph.graph.replay import WARM_UP
from monograph.laws.comparisons import outcome
from monograph.step import Step
from tape import Tape


# By day every second precision is packed and the others are ragged, and each policy has one of the
# two.
@pytest.mark.parametrize(
    ("precision", "micro_batch", "batch"),
    [
        pytest.param(precision, *rows, marks=() if place % 3 == at else pytest.mark.slow)
        for place, precision in enumerate(["fp32", "bf16", "fp16", "fp8", "fp8_head"])
        for at, rows in enumerate([(2, packed), (ROWS, ragged)])
    ],
)
def test_accumulated(precision, micro_batch, batch):
    check(
        lambda: engine(precision=precision, micro_batch=micro_batch),
        windows_of(batch, 3 if micro_batch == 2 else 6),
    )


@pytest.mark.parametrize(
    ("precision", "policy"),
    [
        pytest.param(precision, policy, marks=() if place == 2 * at else pytest.mark.slow)
        for place, policy in enumerate([Remat.Full(), Remat.Pointwise(), Remat.Budget(0.3)])
        for at, precision in enumerate(["bf16", "fp32"])
    ],
    ids=str,
)
def test_recomputed(policy, precision):
    check(lambda: engine(precision=precision, policy=policy), windows_of(packed))


@pytest.mark.parametrize(
    ("backend", "scope", "precision", "policy"),
    [
        pytest.param("aot_eager", "whole", "fp32", Remat.Off(), marks=pytest.mark.slow),
        pytest.param("aot_eager", "whole", "bf16", Remat.Full(), marks=pytest.mark.slow),
        pytest.param("aot_eager", "blocks", "fp32", Remat.Off(), marks=pytest.mark.slow),
        ("eager", "whole", "bf16", Remat.Off()),
    ],
)
def test_compiled(backend, scope, precision, policy):
    """The same graphs, replayed and then called."""
    made, recorder = engine(precision=precision, policy=policy), Tape()
    made.step.recorder, made.step.announce, begun = recorder, pytest.fail, copied(made.state())
    captured_to_train(made, packed(ROWS), backend, scope)
    replayed = trained(made, windows_of(packed))
    # everything was warmed by the capture
    assert (recorder.called, recorder.replays, len(recorder.graphs)) == (WARM_UP, 9, 1)
    assert stop_replaying(made.step)
    made.load_state(begun)
    assert_same_bits(trained(made, windows_of(packed)), replayed)
    assert recorder.replays == 9


def test_a_partial_last_window_and_a_window_without_targets():
    empty = ragged(ROWS, seed=9)
    empty["targets"].fill_(-100)
    check(engine, [ragged(6), ragged(5, seed=1), empty, ragged(1, seed=2)])


def test_weights_in_bf16_whose_gradients_are_not():
    check(lambda: engine(precision="bf16", state="bf16", master_weights=False), windows_of(ragged))


def test_a_loss_scale_that_changes():
    def made():
        found = engine(precision="fp16")
        found.step.loss_scale.fill_(2.0**24)  # overflows
        return found

    check(made, windows_of(ragged, 5))


def test_dropout_and_running_means():
    made = check(lambda: engine(Moving(), loss=cross_entropy), windows_of(ragged, 4))
    assert int(made.model.norm.num_batches_tracked) == 12


def test_evaluated_between_updates():
    def between(made, index):
        scores.append([float(part) for part in made.evaluate(ragged(5, seed=40 + index))])

    scores: list[list[float]] = []
    check(lambda: engine(Moving(), loss=cross_entropy), windows_of(ragged, 4), between=between)
    assert scores[:4] == scores[4:]


@pytest.mark.parametrize("at", nightly([0, 1, 3], {1}))
def test_resumed(at):
    windows = windows_of(packed, 5)
    whole = engine()
    trained(whole, windows)
    first, second = replaying(engine()), replaying(engine())
    trained(first, windows[:at])
    second.load_state(copied(first.state()))
    trained(second, windows[at:])
    assert_same_bits(*(outcome(made.state()) for made in (second, whole)))


def test_a_state_that_is_loaded_where_a_graph_is():
    windows = windows_of(packed, 5)
    whole = engine()
    trained(whole, windows)
    other = replaying(engine())
    trained(other, windows_of(packed, 7)[5:])
    made = engine()
    trained(made, windows[:2])
    other.load_state(copied(made.state()))
    trained(other, windows[2:])
    assert_same_bits(*(outcome(made.state()) for made in (other, whole)))


# ── the law can fail ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "moved", nightly(["loss_factor", "loss_sum", "tokens", "grad"], {"loss_factor", "grad"})
)
def test_what_is_put_elsewhere_is_not_seen(moved):
    """The tape reads and writes where the capture did, as a graph does: each of these would give
    other bits.
    """
    windows = windows_of(ragged, 4)
    expected = trained(engine(), windows)
    made = replaying(engine())

    def between(made, index):
        if index != 1:
            return
        step = made.step
        if moved == "tokens":
            step.micro_step._inputs = {
                key: buffers._replace(leaves=[leaf.clone() for leaf in buffers.leaves])
                for key, buffers in step.micro_step._inputs.items()
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
    """Law 10 too: a run that is cut and taken up captures anew, and has the bits of one that never
    replayed.

    Nothing is compiled, as test_compiled shows that graphs replayed are graphs called.
    """
    init = Step.__init__
    tapes: list[Tape] = []

    def with_tape(self, *arguments, **options):
        init(self, *arguments, **options)
        tapes.append(Tape())
        self.recorder = tapes[-1]

    monkeypatch.setattr("monograph.session.warmup.compiler_obstacle", lambda: None)
    monkeypatch.setattr("monograph.graph.capture.compiled", lambda function, **_: function)
    settings = SETTINGS | {"train.compile": "whole", "train.updates": 8, "optim.name": "adamw"}
    start("called", settings)
    assert "0 graph breaks" in (shown := capfd.readouterr().err) and "replayed" not in shown
    monkeypatch.setattr(Step, "__init__", with_tape)
    start("replayed", settings)
    assert "0 graph breaks, micro-steps replayed" in capfd.readouterr().err
    cut_back("replayed", "cut", 3)
    resume("cut")
    called, replayed, resumed = (fingerprint(here / name) for name in ("called", "replayed", "cut"))
    assert called == replayed == resumed
    assert [tape.called for tape in tapes] == [WARM_UP] * 2 and tapes[0].replays > tapes[
        1
    ].replays > 0
