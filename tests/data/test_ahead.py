"""Items made ahead by a thread: `pytest tests/data/test_ahead.py`."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest

from clocks import HANG_S
from monograph.data.encoding import prefetch


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("monograph-ahead")]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_same_items_in_the_same_order(count):
    for length in (0, 1, count, 20):
        assert list(prefetch(iter(range(length)), count)) == list(range(length))
    assert list(prefetch(iter([None, [], 0, False]), count)) == [None, [], 0, False]
    assert threads() == []


@pytest.mark.parametrize("count", [1, 3])
def test_it_is_ahead_by_that_many_and_no_more(count):
    made = []

    def items():
        for i in range(20):
            made.append(i)
            yield i

    with closing(prefetch(items(), count)) as found:
        for taken in (1, 2):
            next(found)
            deadline_s = time.monotonic() + HANG_S
            while len(made) < taken + count and time.monotonic() < deadline_s:
                time.sleep(0.001)
            time.sleep(0.02)
            assert len(made) == taken + count


def test_an_error_comes_in_its_turn_and_ends_the_thread():
    def items():
        yield 1
        yield 2
        raise ValueError("the third")

    found = prefetch(items(), 2)
    assert (next(found), next(found)) == (1, 2)
    with pytest.raises(ValueError, match="the third"):
        next(found)
    assert threads() == [] and list(found) == []


def test_closing_waits_for_one_item_and_makes_no_more():
    made, begun, going_on = [], threading.Event(), threading.Event()

    def items():
        for i in range(20):
            if i == 1:
                begun.set()
                going_on.wait(HANG_S)
            made.append(i)
            yield i

    found = prefetch(items(), 5)
    assert next(found) == 0 and begun.wait(HANG_S)
    threading.Timer(0.05, going_on.set).start()
    found.close()
    assert threads() == [] and made == [0, 1]
