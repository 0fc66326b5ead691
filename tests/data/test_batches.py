"""Windows and resuming: `pytest tests/data/test_batches.py`."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clocks import HANG_S
from monograph.data.batches import Batches
from monograph.errors import UsageError


def rows_of(batches, windows):
    """The first `windows` windows as one list of rows."""
    return [
        row.tolist()
        for _, batch in zip(range(windows), batches, strict=False)
        for row in batch["tokens"]
    ]


def test_a_window_is_int64_tensors_of_all_rows_of_an_update(small):
    for packing, keys in (
        ("packed", "tokens targets segments positions"),
        ("padded", "tokens targets"),
    ):
        batches = small(packing=packing).batches(32 * 5 + 31)
        batch = next(batches)
        assert batches.rows_per_window == 5 and list(batch) == keys.split()
        for values in batch.values():
            assert (
                values.shape == (5, 32) and values.dtype == torch.int64 and values.is_contiguous()
            )


def test_an_epoch_is_every_row_once_in_an_order_of_its_own(small):
    rows = small().train
    everything = sorted(rows.window(np.arange(len(rows)))["tokens"].tolist())
    batches = Batches(rows, 32 * 7, seed=3, epochs=2)
    drawn = [row.tolist() for batch in batches for row in batch["tokens"]]
    assert len(drawn) == 2 * len(rows) == batches.rows_consumed
    first, second = drawn[: len(rows)], drawn[len(rows) :]
    assert sorted(first) == sorted(second) == everything
    assert first != second and rows_of(Batches(rows, 32, seed=4), len(rows)) != first


def test_the_last_window_is_what_is_left(small):
    rows = small().train
    sizes = [len(batch["tokens"]) for batch in Batches(rows, 32 * 4, epochs=1)]
    assert sizes == [4] * (len(rows) // 4) + [len(rows) % 4] * (len(rows) % 4 > 0)
    assert [len(batch["tokens"]) for batch in Batches(rows, 32 * 9999, epochs=1)] == [len(rows)]
    assert list(Batches(rows, 32, epochs=1, start=len(rows))) == []
    assert list(Batches(rows, 32, epochs=0)) == []


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    seed=st.integers(-5, 2**40),
    before=st.integers(0, 12),
    sizes=st.tuples(st.integers(32, 2000), st.integers(32, 2000)),
    epoch=st.integers(0, 3),
)
def test_resumed_is_uninterrupted_whatever_the_window(small, seed, before, sizes, epoch):
    rows = small(sequence_length=32).train
    start = max(0, epoch * len(rows) - 5)  # so that windows cross from one epoch to the next
    first = Batches(rows, sizes[0], seed=seed, start=start)
    seen = rows_of(first, before)
    state = first.state()
    assert state == {
        "seed": seed,
        "rows": start + len(seen),
    } and first.rows_consumed == start + len(seen)
    resumed = Batches(rows, sizes[1], seed=state["seed"], start=state["rows"])
    seen += rows_of(resumed, 3)
    uninterrupted = Batches(rows, 32, seed=seed, start=start)
    assert rows_of(uninterrupted, len(seen)) == seen


def test_rows_made_ahead_are_not_consumed(small):
    batches = small().batches(64)
    assert batches.state() == {"seed": 0, "rows": 0}
    next(batches)
    time.sleep(0.05)
    assert batches.rows_consumed == 2
    for _ in range(5):
        next(batches)
    assert batches.state() == {"seed": 0, "rows": 12}


def test_an_error_in_the_background_comes_in_its_turn(small, monkeypatch):
    rows = small().train
    actual = rows.window

    def window(indices):
        if len(windows) == 2:
            raise OSError("disk gone")
        windows.append(indices)
        return actual(indices)

    windows = []
    monkeypatch.setattr(rows, "window", window)
    batches = Batches(rows, 64)
    next(batches), next(batches)
    with pytest.raises(OSError, match="disk gone"):
        next(batches)
    assert batches.rows_consumed == 4


def worker_threads():
    return {
        thread for thread in threading.enumerate() if thread.name.startswith("monograph-batches")
    }


def test_the_thread_ends_with_its_batches(small):
    others = worker_threads()  # of batches that the tests before left behind
    batches = small().batches(64)
    next(batches)
    assert worker_threads() - others
    batches.close()
    assert not worker_threads() - others
    batches = small().batches(64)
    next(batches)
    del batches
    gc.collect()
    deadline_s = time.monotonic() + HANG_S
    while worker_threads() - others and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not worker_threads() - others


@pytest.mark.slow
def test_the_interpreter_ends_in_the_middle_of_an_epoch(python, texts):
    script = """
import sys
from monograph.data.corpus import corpus
batches = corpus(sys.argv[1], tokenizer="bytes", sequence_length=16, held_out=0.1).batches(1 << 14)
next(batches)
print("end")
"""
    assert python(script, str(texts)) == "end\n"


def test_in_order_is_every_row_once_in_one_shape(small):
    for packing in ("packed", "padded"):
        rows = small(packing=packing).held_out
        batches = list(rows.batches_in_order(6))
        assert len(batches) == -(-len(rows) // 6) and len(rows) % 6
        whole = rows.window(np.arange(len(rows)))
        for key, values in whole.items():
            drawn = torch.cat([batch[key] for batch in batches])
            assert all(batch[key].shape == (6, 32) for batch in batches)
            assert drawn[: len(rows)].tolist() == values.tolist()
            assert drawn[len(rows) :].unique().tolist() == rows.empty(1)[key][0, :1].tolist()
        assert sum(int((batch["targets"] != -100).sum()) for batch in batches) == rows.tokens


def test_impossible_settings_are_refused(small):
    corpus = small(held_out=0)
    with pytest.raises(
        UsageError, match="tokens_per_update = 31: must be at least one row of sequence_length = 32"
    ):
        corpus.batches(31)
    with pytest.raises(UsageError, match="tokens_per_update = 1k"):
        corpus.batches("1k")
    with pytest.raises(UsageError, match="negative"):
        corpus.batches(64, start=-1)
    with pytest.raises(UsageError, match="nothing was held out"):
        Batches(corpus.held_out, 64)


@pytest.mark.gpu
def test_pinned_windows(small):
    assert all(values.is_pinned() for values in next(small().batches(64, pin=True)).values())


@pytest.mark.parametrize("skip", [[(3, 5)], [(3, 6), (5, 9)], [(4, 9), (5, 6)]])
def test_rows_that_are_passed_over_twice_lengthen_the_epochs_once(small, skip):
    rows = small().train
    drawn = [row for batch in Batches(rows, 32, epochs=1, skip=skip) for row in batch["tokens"]]
    assert len(drawn) == len(rows)
