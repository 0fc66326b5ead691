"""Run: pytest tests/pretended_gpu/test_hook.py (what the pretended driver tells a hook, each before
its effect).

In the environment that `python tests/pretended_gpu/environment.py make` makes, under its `run`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest

from pretended_gpu import card
from pretended_gpu.card import Moment
from pretended_gpu.cuda import (
    IN_CAPTURE,
    RELAXED,
    TO_DEVICE,
    call,
    event,
    memory,
    pinned,
    recorded,
    refused,
    stream,
    work,
)

Told = list[tuple[Moment, int, int]]


def told(do: Callable[[], object]) -> Told:
    """Return what the hook is told while this is done."""
    seen: Told = []
    with card.hooked(lambda *moment: seen.append(moment)):
        do()
    return seen


def test_each_moment_is_told_with_its_stream_and_event() -> None:
    one, other, fence = stream(), stream(), event()
    target, source = memory(), pinned()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: None)

    def all_of_them() -> None:
        for name, *arguments in (
            ("cudaEventRecord", fence, one),
            ("cudaStreamWaitEvent", other, fence, 0),
            ("cudaEventSynchronize", fence),
            ("cudaEventQuery", fence),
            ("cudaStreamSynchronize", one),
            ("cudaStreamQuery", one),
            ("cudaDeviceSynchronize",),
            ("cudaMemcpyAsync", target, source, 8, TO_DEVICE, one),
            ("cudaMemcpy", target, source, 8, TO_DEVICE),
            ("cudaMemsetAsync", target, 0, 8, one),
            ("cudaLaunchHostFunc", one, function, 0),
        ):
            assert call(name, *arguments) == 0

    assert told(all_of_them) == [
        (Moment.EVENT_RECORDED, one, fence),
        (Moment.STREAM_WAITS, other, fence),
        (Moment.EVENT_SYNCHRONIZED, 0, fence),
        (Moment.EVENT_QUERIED, 0, fence),
        (Moment.STREAM_SYNCHRONIZED, one, 0),
        (Moment.STREAM_QUERIED, one, 0),
        (Moment.DEVICE_SYNCHRONIZED, 0, 0),
        (Moment.COPIED, one, 0),
        (Moment.COPIED, 0, 0),
        (Moment.COPIED, one, 0),
        (Moment.HOST_FUNCTION, one, 0),
    ]
    assert told(lambda: None) == []
    all_of_them()  # nobody is told any more


def test_a_moment_is_told_before_it_takes_effect() -> None:
    target, source = memory(), pinned()
    ctypes.memset(source, 1, 8)
    called: list[object] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called.append)
    then: list[object] = []

    def before(moment: Moment, on: int, of: int) -> None:
        # Memory that is about to be freed is still there.
        then.append((moment, ctypes.string_at(target, 1), len(called)))

    with card.hooked(before):
        assert call("cudaMemcpyAsync", target, source, 8, TO_DEVICE, 0) == 0
        assert call("cudaMemsetAsync", target, 2, 8, 0) == 0
        assert call("cudaLaunchHostFunc", 0, function, 0) == 0
        assert call("cudaFree", target) == 0
    assert then == [
        (Moment.COPIED, b"\0", 0),
        (Moment.COPIED, b"\1", 0),
        (Moment.HOST_FUNCTION, b"\2", 0),
        (Moment.DEVICE_SYNCHRONIZED, b"\2", 1),
    ]


def test_a_hook_may_say_not_ready() -> None:
    import torch

    fence, on = torch.cuda.Event(), torch.cuda.Stream()
    fence.record(on)
    with card.hooked(lambda moment, *_: True):
        assert not fence.query() and not on.query()
        fence.synchronize()  # what it says counts for queries only
        begin, end = event(0), event(0)
        assert call("cudaEventRecord", begin, 0) == call("cudaEventRecord", end, 0) == 0
        assert call("cudaEventElapsedTime", ctypes.byref(ctypes.c_float()), begin, end) == 600
    assert fence.query() and on.query()


def test_a_hook_is_called_without_the_lock() -> None:
    """Another thread may use the driver meanwhile, and the hook waits for that thread."""
    finished = []

    def use_it_elsewhere(*_: object) -> None:
        thread = threading.Thread(target=card.counts, daemon=True)
        thread.start()
        thread.join(60)  # it needs no time, unless it waits for the lock
        finished.append(not thread.is_alive())

    on = stream()
    with card.hooked(use_it_elsewhere):
        assert call("cudaEventQuery", recorded(on)) == 0
        assert call("cudaStreamSynchronize", on) == call("cudaDeviceSynchronize") == 0
        assert call("cudaMemcpyAsync", memory(), pinned(), 8, TO_DEVICE, on) == 0
        assert call("cudaFree", memory()) == 0
    assert finished == [True] * 6


def test_a_hook_that_raises_is_heard() -> None:
    with pytest.raises(ZeroDivisionError), card.hooked(lambda *_: 1 / 0):
        assert call("cudaDeviceSynchronize") == 0


def test_what_is_forbidden_is_not_told() -> None:
    origin, over = stream(), event()
    assert call("cudaEventDestroy", over) == 0

    def forbidden() -> None:
        refused(IN_CAPTURE, 900, "cudaStreamSynchronize", origin)
        refused("destroyed event", 400, "cudaEventRecord", over, origin)
        refused("in an invalid capture", 901, "cudaMemsetAsync", memory(), 0, 8, origin)

    assert call("cudaStreamBeginCapture", origin, RELAXED) == 0
    assert told(forbidden) == []
    assert call("cudaStreamEndCapture", origin, ctypes.byref(ctypes.c_void_p())) == 901


# ---- the default stream


def joins(do: Callable[[], object]) -> list[tuple[int, int]]:
    """Return which stream has waited for which."""
    return [
        (waiting, other) for moment, waiting, other in told(do) if moment == Moment.STREAM_JOINS
    ]


def test_the_default_stream_and_blocking_streams_wait_for_each_other() -> None:
    card.driver.cudaDeviceSynchronize()
    work(0)  # waits for what other tests have left
    one, other, apart = stream(flags=0), stream(flags=0), stream()
    assert joins(lambda: [work(on) for on in (one, other, apart)]) == []
    assert sorted(joins(lambda: work(0))) == sorted([(0, one), (0, other)])
    assert joins(lambda: work(0)) == []  # once is enough
    assert joins(lambda: work(one)) == [(one, 0)]
    assert joins(lambda: work(one)) == []
    assert joins(lambda: work(apart)) == []
    assert joins(lambda: work(0)) == [(0, one)]
    assert joins(lambda: work(other)) == [(other, 0)]


@pytest.mark.parametrize(
    "name",
    [
        "cudaMemcpy",
        "cudaMemcpyAsync",
        "cudaMemsetAsync",
        "cudaEventRecord",
        "cudaStreamWaitEvent",
        "cudaLaunchHostFunc",
        "cudaStreamSynchronize",
        "cudaStreamQuery",
    ],
)
def test_whatever_is_done_on_the_default_stream_waits(name: str) -> None:
    blocking = stream(flags=0)
    target, source = memory(), pinned()
    arguments = {
        "cudaMemcpy": (target, source, 8, TO_DEVICE),
        "cudaMemcpyAsync": (target, source, 8, TO_DEVICE, 0),
        "cudaMemsetAsync": (target, 0, 8, 0),
        "cudaEventRecord": (event(), 0),
        "cudaStreamWaitEvent": (0, recorded(stream()), 0),
        "cudaLaunchHostFunc": (0, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: None), 0),
        "cudaStreamSynchronize": (0,),
        "cudaStreamQuery": (0,),
    }[name]
    work(0)
    work(blocking)
    assert joins(lambda: call(name, *arguments)) == [(0, blocking)]


def test_the_default_stream_waits_for_the_event_that_a_blocking_stream_waits_for() -> None:
    blocking = stream(flags=0)
    work(0)
    assert call("cudaStreamWaitEvent", blocking, recorded(stream()), 0) == 0
    assert joins(lambda: work(0)) == [(0, blocking)]


def test_a_threads_own_default_stream_is_blocking() -> None:
    handles = []

    def use() -> None:
        handles.extend(
            on for moment, on, _ in told(lambda: call("cudaEventRecord", event(), 2)) if moment == 1
        )
        work(2)

    use()
    assert (0, handles[0]) in joins(lambda: work(0))
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert 0 not in handles and handles[0] != handles[1]


def test_what_is_captured_is_no_work_to_wait_for() -> None:
    blocking = stream(flags=0)
    work(0)
    assert call("cudaStreamBeginCapture", blocking, RELAXED) == 0
    work(blocking)
    assert call("cudaStreamEndCapture", blocking, ctypes.byref(ctypes.c_void_p())) == 0
    assert joins(lambda: work(0)) == []
