# Run: pytest tests/test_resident.py
"""The resident engine: state in and out, out of memory, evaluation."""

from __future__ import annotations

import pytest
import torch

from batches import (
    captured_to_train,
    copied,
    flat_gradient,
    large_batch_gradient,
    ragged,
    tiny_llama,
)
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.graph.capture import capture
from monograph.graph.remat import Remat
from monograph.laws.comparisons import relative_error
from monograph.loop import train
from monograph.loss import TokenLoss
from monograph.resident import Resident


def test_state_round_trip_continues_bit_for_bit():
    windows = [ragged(6, seed=s) for s in range(6)]
    whole, first, second = (Resident(tiny_llama(), clip=1.0, micro_batch=4) for _ in range(3))
    for _ in train(whole, windows):
        pass
    for _ in train(first, windows[:3]):
        pass
    second.load_state(copied(first.state()))
    done = list(train(second, windows[3:]))
    assert [u.index for u in done] == [3, 4, 5]
    a, b = whole.state(), second.state()
    assert a.scalars == b.scalars
    assert all(torch.equal(a.model[k], b.model[k]) for k in a.model)
    assert all(torch.equal(a.optimizer[k], b.optimizer[k]) for k in a.optimizer)


@pytest.mark.parametrize(
    "dropped", ["index", "applied", "exp_avg", "exp_avg_sq", "weight", "tokens"]
)
def test_dropping_any_item_of_the_state_changes_the_run_or_is_refused(dropped):
    windows = [ragged(6, seed=s) for s in range(5)]
    from monograph.schedule import warmup_cosine

    def engine():
        return Resident(tiny_llama(), schedule=warmup_cosine(2, 5), clip=1.0)

    whole, first, second = engine(), engine(), engine()
    for _ in train(whole, windows):
        pass
    for _ in train(first, windows[:3]):
        pass
    state = copied(first.state())
    if dropped in state.scalars:
        state.scalars[dropped] = 0
    for kind in (state.model, state.optimizer):
        for name in kind:
            if name.startswith(dropped + ".") or (
                dropped == "weight" and name == "model.norm.weight"
            ):
                kind[name] = torch.zeros_like(kind[name])
    second.load_state(state)
    for window in windows[3:]:
        second.accumulate(window)
        last = second.update()
    same = all(
        torch.equal(v, second.model.state_dict()[k]) for k, v in whole.model.state_dict().items()
    )
    assert not (same and int(last.tokens) == int(whole.step.tokens) and second.index == whole.index)


def test_a_state_that_does_not_fit_is_refused_by_name():
    engine = Resident(tiny_llama())
    state = copied(engine.state())
    del state.model["model.norm.weight"]
    with pytest.raises(InputRefused, match=r"'model\.norm\.weight' is missing"):
        engine.load_state(state)
    state = copied(engine.state())
    state.optimizer["exp_avg.model.norm.weight"] = torch.zeros(3)
    with pytest.raises(InputRefused, match=r"exp_avg\.model\.norm\.weight is \[3\]"):
        engine.load_state(state)


class Hungry(TokenLoss):
    """Out of memory above a number of rows."""

    def __init__(self, fits):
        super().__init__()
        self.fits = fits

    def __call__(self, model, batch):
        if len(batch["tokens"]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().__call__(model, batch)


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_gradient():
    batch, lines = ragged(13), []  # of 13 rows, halves are 7 and 4: an odd number is rounded up
    engine = Resident(tiny_llama(torch.float64), loss=Hungry(fits=5))
    engine.announce = lines.append
    engine.accumulate(batch)
    assert engine.micro_batch == 4 and len(lines) == 2 and "micro_batch is now 4" in lines[-1]
    assert (
        relative_error(flat_gradient(engine.model), large_batch_gradient(engine.model, batch))
        <= 1e-12
    )
    assert int(engine.step.count) == int((batch["targets"] != -100).sum())


def test_out_of_memory_at_one_row_is_said():
    with pytest.raises(OutOfDeviceMemory, match="one row does not fit"):
        Resident(tiny_llama(), loss=Hungry(fits=0)).accumulate(ragged(4))


class Wasteful(TokenLoss):
    """Out of memory as long as the blocks keep what they compute."""

    def __call__(self, model, batch):
        if "forward" not in vars(model.model.layers[0]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().__call__(model, batch)


def test_out_of_memory_at_one_row_recomputes_the_blocks_and_keeps_the_bits():
    batch, lines = ragged(3), []
    engine, plain = Resident(tiny_llama(), loss=Wasteful()), Resident(tiny_llama(), micro_batch=1)
    engine.announce = lines.append
    for each in (engine, plain):
        each.accumulate(batch)
    assert (
        lines[-1]
        == "out of memory at 1 row: blocks are recomputed from now on, the update stays the same"
    )
    assert (engine.micro_batch, engine.step.remat) == (1, Remat.Full())
    assert torch.equal(flat_gradient(engine.model), flat_gradient(plain.model))


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_was_captured_is_captured_again_with_recomputed_blocks(compiles, monkeypatch):
    if not compiles:
        monkeypatch.setattr("monograph.graph.capture.compiled", lambda function, **_: function)
    engine, plain = (Resident(tiny_llama(num_hidden_layers=1), micro_batch=1) for _ in range(2))
    captured_to_train(engine, ragged(3))

    def too_much(batch, seed):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    engine.step.forward.function = too_much
    for each in (engine, plain):
        each.accumulate(ragged(3))
    assert engine.step.scope == "whole" and engine.step.remat == Remat.Full()
    assert relative_error(flat_gradient(engine.model), flat_gradient(plain.model)) <= 1e-6


def test_other_runtime_errors_are_not_swallowed():
    engine = Resident(tiny_llama())
    with pytest.raises(IndexError):
        engine.accumulate(
            {"tokens": torch.full((2, 4), 10_000), "targets": torch.zeros(2, 4, dtype=torch.long)}
        )


def test_evaluate_is_the_mean_over_all_rows_whatever_the_micro_batch():
    batch = ragged(7)
    sums = [
        Resident(tiny_llama(torch.float64), micro_batch=m).evaluate(batch) for m in (None, 1, 3, 7)
    ]
    for total, count in sums[1:]:
        torch.testing.assert_close(total, sums[0][0], rtol=1e-13, atol=0)
        assert count == sums[0][1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"micro_batch": 0}, "micro_batch = 0: expected rows"),
        ({"clip": -1.0}, "clip = -1.0: expected a norm above 0"),
        ({"clip": float("nan")}, "clip = nan"),
        ({"optim": "adamw"}, "optim is a str: expected monograph.AdamW"),
        ({"model": "nano"}, "model is a str: expected a torch.nn.Module"),
    ],
)
def test_what_an_engine_cannot_be_made_of_is_refused(change, words):
    made = {"model": tiny_llama(), **change}
    with pytest.raises(UsageError, match=words):
        Resident(made.pop("model"), **made)


def test_an_engine_is_captured_by_its_own_method():
    with pytest.raises(UsageError, match="not a Resident; an engine has its own capture"):
        capture(Resident(tiny_llama()))
