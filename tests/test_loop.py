# Run: pytest tests/test_loop.py
"""The loop stops where it is told, and a library user's own run resumes bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch

import monograph as mono
from batches import ragged, tiny_llama
from monograph.errors import NoValidCheckpoint
from monograph.loop import load_checkpoint, save_checkpoint, train
from monograph.resident import Resident


class Windows:
    """Windows 0, 1, 2, ... that know where they stand."""

    def __init__(self, start=0):
        self.next = start

    def __iter__(self):
        return self

    def __next__(self):
        self.next += 1
        return ragged(4, seed=self.next)

    def state(self):
        return {"rows": self.next}


def engine():
    return Resident(tiny_llama(tie_word_embeddings=True), clip=1.0)


def test_a_run_of_one_s_own_resumes_bit_for_bit(tmp_path):
    whole, first, second = engine(), engine(), engine()
    for _ in train(whole, Windows(), updates=5):
        pass
    windows = Windows()
    for _ in train(first, windows, updates=3):
        save_checkpoint(first, windows, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    position = load_checkpoint(second, tmp_path)
    assert position == {"rows": 3} and second.index == 3
    assert [u.index for u in train(second, Windows(position["rows"]), updates=5)] == [3, 4]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name])


def ensemble():
    return mono.Ensemble([tiny_llama(tie_word_embeddings=True)], clip=1.0)


def one_graph():
    engine = ensemble()
    assert engine.capture(ragged(4), "eager") is None
    return engine


def streamed():
    return mono.Streamed(tiny_llama(tie_word_embeddings=True), micro_batch=2)


@pytest.mark.parametrize(
    "made", [engine, ensemble, pytest.param(one_graph, marks=pytest.mark.slow), streamed]
)
def test_a_window_of_before_the_loading_is_forgotten(made):
    own, outcomes = made(), []
    begun = copy.deepcopy(own.state())
    for interrupted in (False, True):
        own.load_state(begun)
        if interrupted:
            own.accumulate(ragged(4, seed=8))
            own.load_state(begun)
        own.accumulate(ragged(4, seed=9))
        update = own.update()
        outcomes.append([update.count, update.loss, *copy.deepcopy(own.state()).model.values()])
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def test_a_tied_head_is_saved_once():
    assert "lm_head.weight" not in engine().state().model


def test_nothing_to_load_is_said(tmp_path):
    with pytest.raises(NoValidCheckpoint):
        load_checkpoint(engine(), tmp_path)


def test_no_window_is_taken_beyond_the_last_update():
    made, windows = engine(), Windows()
    assert len(list(train(made, windows, updates=2))) == 2
    for done in (2, 1):  # as many as the engine has made, and fewer
        assert not list(train(made, windows, updates=done))
    assert windows.next == 2


def test_windows_that_end_end_the_run():
    assert len(list(train(engine(), [ragged(4), ragged(2)], updates=9))) == 2
