# Run: pytest tests/laws/test_streamed_state.py
"""Law 4 beside the plain run, in every bit: evaluation, trials, failing windows, states and files
for other engines.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from batches import packed, tiny_llama
from daily import nightly
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.laws.comparisons import outcome
from monograph.loop import load_checkpoint, save_checkpoint
from monograph.loss import TokenLoss
from monograph.optim import AdamW, Muon
from monograph.stream import Placement, Streamed
from streamed import (
    EVERY,
    PLACEMENTS,
    PRECISIONS,
    crossed,
    files,
    of_twin,
    other_bits,
    resident,
    streamed,
    trained,
    twin,
    unclipped,
    windows,
)


@pytest.mark.parametrize("place", nightly(PLACEMENTS, ["all on disk"]))
def test_several_windows_an_update(place):
    def twice(engine):
        for seed in (10, 20):
            engine.accumulate(windows(1, seed)[0])
            left = trained(engine, windows(1, seed + 1))
        return left

    assert not other_bits(twice(streamed(placement=PLACEMENTS[place])), twice(resident()))


@pytest.mark.parametrize("place", nightly(["on the host", "next forward"], {"next forward"}))
def test_a_loaded_state_is_what_the_next_window_reads(place):
    """A window without an update leaves its weights on the device, where the next one would find
    them.
    """
    other = streamed(placement=PLACEMENTS[place])
    trained(other, windows(2))
    engine = streamed(placement=PLACEMENTS[place])
    engine.accumulate(windows(1)[0])
    engine.load_state(other.state())
    assert not other_bits(trained(engine, windows(1, 30)), trained(other, windows(1, 30)))


def scored(engine, between):
    """After every update, and between a window and its update."""
    found = [engine.evaluate(packed(5, seed=77))]
    for window in windows():
        engine.accumulate(window)
        if between:
            found.append(engine.evaluate(packed(5, seed=77)))
        engine.update()
        found.append(engine.evaluate(packed(5, seed=77)))
    return {f"score {number}": score for number, (score, _) in enumerate(found)} | outcome(
        engine.state()
    )


EMA = {"averaged": 0.5, "plain": None}


@pytest.mark.parametrize(
    ("place", "ema"),
    # By day tests/stream/test_lanes.py evaluates averaged weights in every placement.
    crossed(
        EVERY,
        EMA,
        [("updated on both", "plain")],
    ),  # fmt: skip
)
def test_evaluated(place, ema):
    changes = {
        "optim": AdamW(lr=1e-2, ema=EMA[ema]),
        "precision": "bf16",
        **unclipped(EVERY[place]),
    }
    between = EVERY[place].when != "backward"  # which has updated already
    mine = scored(streamed(placement=EVERY[place], **changes), between)
    assert not other_bits(mine, of_twin(scored, between, **changes))


@pytest.mark.parametrize("place", nightly(EVERY, ["backward, updated on both"]))
def test_a_trial_changes_nothing(place):
    changes = unclipped(EVERY[place])
    engine = streamed(placement=EVERY[place], **changes)
    seen = [engine.trial(window) for window in windows(2)]
    assert seen[0] == resident().trial(windows(1)[0])
    left = trained(engine, windows(2))
    engine.trial(windows(1)[0])
    assert not other_bits(
        left | trained(engine, windows(1, first=2)), twin(None, windows(3), **changes)
    )


@pytest.mark.parametrize("place", nightly(PLACEMENTS, ["updated on both"]))
def test_an_update_of_no_window_changes_nothing(place):
    """Nor is the one before it lost, which may still wait for a forward pass."""
    mine = with_updates_of_nothing(streamed(placement=PLACEMENTS[place]))
    assert not other_bits(mine, of_twin(with_updates_of_nothing))


def with_updates_of_nothing(engine):
    seen = [engine.update()]
    left = trained(engine, windows(1))
    seen += [engine.update(), engine.update()]
    left |= {
        f"{n} {name}": getattr(seen[n], name)
        for n in range(3)
        for name in ("count", "grad_norm", "skipped")
    }
    return left | trained(engine, windows(1, first=2))


@pytest.mark.parametrize(
    "place", nightly(["on the host", "next forward", "updated on both"], ["updated on both"])
)
def test_an_update_right_after_another_leaves_the_first_its_learning_rate(place):
    """It waits for a forward pass that does not come, while the schedule goes on."""
    results = []
    for engine in (resident(), streamed(placement=PLACEMENTS[place])):
        engine.accumulate(windows(1)[0])
        engine.update()
        engine.update()
        results.append(outcome(engine.state()))
    assert not other_bits(*results)


def out_of_memory_at(monkeypatch, owner, name, call):
    """The owner's function runs out of memory the n-th time that it is called."""
    function, calls = getattr(owner, name), []

    def fails(*arguments, **keywords):
        calls.append(name)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return function(*arguments, **keywords)

    monkeypatch.setattr(owner, name, fails)


REPEATED = [
    *itertools.product(
        ["on the host", "next forward, offloaded"],
        ["forward_blocks", "backward_blocks", "backward_last"],
    ),
    ("backward", "forward_blocks"),
    ("backward", "backward_last"),
]
REPEATED_BY_DAY = [("next forward, offloaded", "backward_blocks")]


def then_with_fewer_rows(engine):
    trained(engine, windows(1))
    engine.micro_batch = 2
    return trained(engine, windows(2, first=1))


@pytest.mark.parametrize("call", [pytest.param(1, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param(*each, marks=() if each in REPEATED_BY_DAY else pytest.mark.slow)
        for each in REPEATED
    ],
)
def test_a_pass_that_runs_out_of_memory_is_repeated_with_fewer_rows(place, name, call, monkeypatch):
    """The stages whose update waited for it, and was made, are not updated again."""
    engine = streamed(placement=EVERY[place], **unclipped(EVERY[place]))
    trained(engine, windows(1))
    out_of_memory_at(
        monkeypatch, engine.walk.passes, name, min(call, 2 if name == "backward_last" else call)
    )
    left = trained(engine, windows(2, first=1))
    assert engine.micro_batch == 2
    assert not other_bits(left, of_twin(then_with_fewer_rows, **unclipped(EVERY[place])))


@pytest.mark.parametrize("place", nightly(["on the host", "next forward"], {"next forward"}))
def test_an_update_that_runs_out_of_memory_ends_the_run(place, monkeypatch):
    """It may be half done, and can be neither repeated nor left out."""
    engine = streamed(placement=PLACEMENTS[place])
    trained(engine, windows(1))
    out_of_memory_at(monkeypatch, engine.walk.updates.update_part, "function", 5)
    words = "^the update of block 1 does not fit the device's memory: take fewer"
    with pytest.raises(OutOfDeviceMemory, match=words):
        trained(engine, windows(2))
    no_longer_readable(engine, words)


@pytest.mark.parametrize(
    "name", nightly(["backward_blocks", "backward_first"], {"backward_blocks"})
)
def test_a_pass_that_runs_out_of_memory_between_updates_ends_the_run(name, monkeypatch):
    engine = streamed(placement=EVERY["backward"], **unclipped(EVERY["backward"]))
    trained(engine, windows(1))
    out_of_memory_at(monkeypatch, engine.walk.passes, name, 3)
    words = "^a backward pass that updates weights does not fit the device's memory: take fewer"
    with pytest.raises(OutOfDeviceMemory, match=words):
        trained(engine, windows(2))
    no_longer_readable(engine, words)


def no_longer_readable(engine, words):
    """Nor can it be saved: some of its weights are of one update and some of another."""
    for read in (
        engine.state,
        lambda: engine.model,
        engine.update,
        lambda: engine.accumulate(windows(1)[0]),
    ):
        with pytest.raises(OutOfDeviceMemory, match=words):
            read()


class Nowhere:
    def state(self):
        return {"seed": 0, "rows": 0}


PLAIN, MUON = AdamW(lr=1e-2), Muon(lr=1e-2, state="8bit", ema=0.9)
DAYS = MUON, "next forward", "bf16"


@pytest.mark.parametrize(
    ("optim", "place", "precision"),
    [
        pytest.param(
            optim,
            place,
            precision,
            marks=() if (optim, place, precision) == DAYS else pytest.mark.slow,
        )
        for optim, place, precision in itertools.product(
            [PLAIN, MUON], ["next forward", "everywhere"], PRECISIONS
        )
    ],
)
def test_streamed_then_resident_then_streamed(place, precision, optim, tmp_path):
    """By their states, and by the files of checkpoints, which are the same bytes."""
    changes = {"precision": precision, "optim": optim}

    def engines():
        yield streamed(placement=PLACEMENTS[place], **changes)
        yield resident({"initializer_range": 0.3}, **changes)
        yield streamed({"initializer_range": 0.1}, blocks_per_stage=3, **changes)

    def next_ones(turn):
        return windows(2 - turn // 2, first=2 * turn)

    by_state, by_file, whole, state, twin = {}, {}, {}, None, resident(**changes)
    for turn, engine in enumerate(engines()):
        if state:
            engine.load_state(state)
        by_state |= trained(engine, next_ones(turn))
        state = engine.state()
    for turn, engine in enumerate(engines()):
        if turn:
            load_checkpoint(engine, tmp_path / f"{turn - 1}")
        by_file |= trained(engine, next_ones(turn))
        save_checkpoint(engine, Nowhere(), tmp_path / f"{turn}")
        whole |= trained(twin, next_ones(turn))
        save_checkpoint(twin, Nowhere(), tmp_path / f"twin {turn}")
        assert files(tmp_path / f"{turn}") == files(tmp_path / f"twin {turn}")
    assert not other_bits(by_state, whole) and not other_bits(by_file, whole)


# ---- what cannot be run in stages ----------------------------------------------------------------


class Noisy(nn.Module):
    """A linear layer with something beside it that a second pass would do otherwise."""

    def __init__(self, linear, how):
        super().__init__()
        self.weight, self.how = linear.weight, how
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.how == "draws":
            x = nn.functional.dropout(x, 0.1, self.training)
        elif self.how == "writes":
            self.seen += 1
        elif self.how == "replaces":
            self.seen = self.seen + 1
        return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("draws", "draws random numbers"),
        ("writes", "writes its buffer .*seen"),
        ("replaces", "writes its buffer .*seen"),
    ],
)
@pytest.mark.parametrize("where", ["block", "before"])
def test_what_a_second_pass_would_compute_otherwise_is_refused(how, words, where):
    engine = streamed()
    model = engine.step.model
    if where == "block":
        block = model.model.layers[2]
        block.mlp.up_proj = Noisy(block.mlp.up_proj, how)
    else:
        table = model.model.embed_tokens
        table.noisy = Noisy(
            nn.Linear(model.config.hidden_size, 1, bias=False).requires_grad_(False), how
        )
        table.register_forward_hook(lambda module, inputs, out: (module.noisy(out), out)[1])
    for work in (engine.trial, engine.accumulate):
        with pytest.raises(UsageError, match=f"a second time for its gradient, and it {words}"):
            work(windows(1)[0])


@pytest.mark.gpu
def test_what_draws_a_gpu_s_random_numbers_is_refused_there():
    engine = streamed(placement=Placement(device=torch.device("cuda", 0)))
    block = engine.step.model.model.layers[2]
    block.mlp.up_proj = Noisy(block.mlp.up_proj, "draws")
    with pytest.raises(UsageError, match="draws random numbers"):
        engine.accumulate(windows(1)[0])


@pytest.mark.parametrize(
    ("calls", "words"), [(0, "did not call its model"), (2, "calls its model 2 times")]
)
def test_a_loss_that_does_not_call_its_model_once_is_refused(calls, words):
    plain = TokenLoss()

    def loss(model, batch):
        scored = [plain(model, batch) for _ in range(calls)]
        return (
            (scored[0][0], scored[0][1])
            if scored
            else (torch.zeros((), requires_grad=True), torch.ones(()))
        )

    with pytest.raises(UsageError, match=words):
        streamed(loss=loss).accumulate(windows(1)[0])
    with pytest.raises(UsageError, match=words):
        streamed(loss=loss).trial(windows(1)[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "cuda"), ("when", "never"), ("when", None), ("where", "here"), ("blocks_per_stage", 0),
        ("blocks_per_stage", 1.5), ("offload", "yes"), ("on_device", {(-1, "weights")}), ("on_device", {(0, "bogus")}),
        ("on_device", "exp_avg"), ("on_device", {("0", "exp_avg")}), ("on_disk", {"bogus"}), ("on_disk", "exp_avg"),
    ],
)  # fmt: skip
def test_a_placement_that_means_nothing_is_refused(field, value):
    with pytest.raises(UsageError, match=f"Placement: {field} = .*: expected "):
        Placement(**{field: value})


def test_places_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(UsageError, match="names stage 8, and the stages are 0 to 7"):
        Streamed(
            tiny_llama(num_hidden_layers=6),
            placement=Placement(on_device=frozenset({(8, "weights")})),
        )
    with pytest.raises(UsageError, match="expected a monograph.Placement"):
        Streamed(tiny_llama(), placement="sweep")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="torch finds no GPU"):
            Placement(torch.device("cuda"))
    with pytest.raises(InputRefused, match="nowhere: cannot hold .*: No such file"):
        streamed(placement=Placement(on_disk=frozenset({"exp_avg"}), folder=tmp_path / "nowhere"))
