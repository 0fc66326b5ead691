"""Run: pytest tests/pretended_gpu/test_capture.py (each rule of capture in the pretended driver,
kept and broken).

In the environment that `python tests/pretended_gpu/environment.py make` makes, under its `run`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pretended_gpu import card
from pretended_gpu.card import Capture, GraphLaunch, Launch
from pretended_gpu.cuda import (
    GLOBAL,
    IN_CAPTURE,
    RELAXED,
    THREAD_LOCAL,
    TO_DEVICE,
    call,
    cubin,
    event,
    made,
    memory,
    pinned,
    recorded,
    refused,
    stream,
    work,
)

(
    UNSUPPORTED,
    INVALIDATED,
    MERGE,
    UNMATCHED,
    UNJOINED,
    ISOLATION,
    IMPLICIT,
    CAPTURED,
    WRONG_THREAD,
) = range(900, 909)


class Graph:
    """What became of a capture: the error of its end, and the graph."""

    error = -1
    handle = 0

    def end(self, origin: int) -> int:
        graph = ctypes.c_void_p()
        self.error = call("cudaStreamEndCapture", origin, ctypes.byref(graph))
        self.handle = graph.value or 0
        assert (self.error == 0) == bool(graph.value)
        return self.error

    @property
    def nodes(self) -> int:
        number = ctypes.c_size_t()
        assert call("cudaGraphGetNodes", self.handle, 0, ctypes.byref(number)) == 0
        return number.value


@contextmanager
def captured(origin: int, mode: int = GLOBAL) -> Iterator[Graph]:
    graph = Graph()
    assert call("cudaStreamBeginCapture", origin, mode) == 0
    try:
        yield graph
    finally:
        if graph.error == -1:
            graph.end(origin)


def wait(waiting: int, fence: int) -> None:
    assert call("cudaStreamWaitEvent", waiting, fence, 0) == 0


def status(of: int) -> int:
    """Return 0 for a stream that is not captured, 1 for one that is, 2 if its capture is invalid."""
    found = ctypes.c_int()
    assert call("cudaStreamIsCapturing", of, ctypes.byref(found)) == 0
    return found.value


def on_another_thread(what: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(what()))
    thread.start()
    thread.join()
    return results[0]


# ---- calls that may be unsafe


def unsafe_calls(folder: Path) -> dict[str, tuple[Any, ...]]:
    out = ctypes.byref(ctypes.c_void_p())
    own = ctypes.create_string_buffer(8192)
    registered = ctypes.create_string_buffer(8192)
    assert call("cudaHostRegister", ctypes.addressof(registered), 8192, 0) == 0
    return {
        "cudaMalloc": (out, 8),
        "cudaFree": (memory(),),
        "cudaHostAlloc": (out, 8, 0),
        "cudaFreeHost": (pinned(),),
        "cudaHostRegister": (ctypes.addressof(own), 8192, 0),
        "cudaHostUnregister": (ctypes.addressof(registered),),
        "cudaMemcpy": (memory(), pinned(), 8, TO_DEVICE),
        "cudaDeviceSynchronize": (),
        "cudaStreamSynchronize": (stream(),),
        "cudaStreamQuery": (stream(),),
        "cudaEventSynchronize": (recorded(stream()),),
        "cudaEventQuery": (recorded(stream()),),
        "cuModuleLoadData": (out, cubin(folder)),
    }


def test_calls_that_may_be_unsafe(tmp_path: Path) -> None:
    origin = stream()
    for name, arguments in unsafe_calls(tmp_path).items():
        with captured(origin) as graph:
            refused(IN_CAPTURE, UNSUPPORTED, name, *arguments)
            assert status(origin) == 2
        assert (name, graph.error) == (name, INVALIDATED)
        with captured(origin, RELAXED) as graph:
            assert call(name, *arguments) == 0
        assert (name, graph.error) == (name, 0)


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("own_mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("own_thread", [True, False])
def test_whom_a_capture_forbids_them(mode: int, own_mode: int, own_thread: bool) -> None:
    """As in the comment on cudaThreadExchangeStreamCaptureMode: `mode` is the capture's, `own_mode`
    the caller's.
    """

    def asks() -> int:
        value = ctypes.c_int(own_mode)
        call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(value))
        error = call("cudaDeviceSynchronize")
        call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(value))
        assert value.value == own_mode
        return error

    with captured(stream(), mode) as graph:
        error = asks() if own_thread else on_another_thread(asks)
    forbidden = mode != RELAXED if own_thread else own_mode == GLOBAL and mode == GLOBAL
    assert error == (UNSUPPORTED if forbidden and own_mode != RELAXED else 0)
    assert (graph.error == INVALIDATED) == (error != 0)


# ---- what a captured stream and what stands beside it may do


def test_a_captured_stream_takes_work_and_others_work_beside_it() -> None:
    origin, other = stream(), stream()
    source, target = pinned(), memory()
    with card.logged() as log, captured(origin) as graph:
        assert status(origin) == 1 and status(other) == 0
        work(origin)
        assert call("cudaMemcpyAsync", target, source, 8, TO_DEVICE, origin) == 0
        assert call("cudaMemsetAsync", target, 0, 8, origin) == 0
        called: list[int] = []
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called.append)
        assert call("cudaLaunchHostFunc", origin, function, 0) == 0 and not called
        work(other)
        work(0)  # the default stream, for which a stream that is not blocking is nothing
    assert graph.error == 0 and graph.nodes == 4 and status(origin) == 0
    assert [each.place for each in log.of(Launch)] == ["captured", "beside", "beside"]
    assert [(each.what, each.nodes, each.result) for each in log.of(Capture)] == [
        ("begin", 0, "ok"),
        ("end", 4, "ok"),
    ]
    replayed, beside = (
        made("cudaGraphInstantiateWithFlags", graph.handle, 0),
        card.counts().graph_launches,
    )
    with card.logged() as log:
        assert call("cudaGraphLaunch", replayed, other) == 0
    assert (
        log.records == [GraphLaunch(4, other, 0, "-")]
        and card.counts().graph_launches == beside + 1
    )


def test_what_a_captured_stream_cannot_do() -> None:
    origin = stream()
    with captured(stream()) as graph:
        pass
    pageable = ctypes.create_string_buffer(8)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(
        lambda *_: None
    )
    for name, arguments in {
        "cudaStreamSynchronize": (origin,),
        "cudaStreamQuery": (origin,),
        "cudaStreamAddCallback": (origin, function, 0, 0),
        "cudaMemcpyAsync": (memory(), ctypes.addressof(pageable), 8, TO_DEVICE, origin),
        "cudaGraphLaunch": (made("cudaGraphInstantiateWithFlags", graph.handle, 0), origin),
    }.items():
        with captured(origin, RELAXED) as broken:
            refused(IN_CAPTURE, UNSUPPORTED, name, *arguments)
        assert (name, broken.error) == (name, INVALIDATED)


def test_an_invalid_capture_is_of_no_use_until_it_is_ended() -> None:
    origin, other = stream(), stream()
    target, source = memory(), pinned()
    with captured(origin) as graph:
        fence = recorded(origin)
        assert call("cudaDeviceSynchronize") == UNSUPPORTED
        refused(
            "in an invalid capture",
            INVALIDATED,
            "cudaMemcpyAsync",
            target,
            source,
            8,
            TO_DEVICE,
            origin,
        )
        refused("in an invalid capture", INVALIDATED, "cudaEventRecord", event(), origin)
        refused("in an invalid capture", INVALIDATED, "cudaStreamWaitEvent", other, fence, 0)
        work(other)
    assert graph.error == INVALIDATED and status(origin) == status(other) == 0
    with captured(origin) as graph:
        work(origin)
    assert graph.error == 0 and graph.nodes == 1


def test_an_event_of_a_capture_is_never_done() -> None:
    origin = stream()
    for name in ("cudaEventQuery", "cudaEventSynchronize"):
        with captured(origin, RELAXED) as graph:
            fence = recorded(origin)
            refused(IN_CAPTURE, CAPTURED, name, fence)
        assert graph.error == INVALIDATED
        refused("after a capture", CAPTURED, name, fence)
    refused("after a capture", CAPTURED, "cudaStreamWaitEvent", stream(), fence, 0)
    assert call("cudaEventRecord", fence, origin) == call("cudaEventQuery", fence) == 0


def test_the_default_stream_cannot_be_used_beside_a_blocking_one() -> None:
    blocking = stream(flags=0)
    with captured(blocking, RELAXED) as graph:
        assert call("cudaStreamIsCapturing", 0, ctypes.byref(ctypes.c_int())) == IMPLICIT
        assert status(blocking) == 1  # to ask does no harm
        refused(IN_CAPTURE, IMPLICIT, "cudaMemcpyAsync", memory(), pinned(), 8, TO_DEVICE, 0)
    assert graph.error == INVALIDATED
    work(0)


# ---- forks and joins


def test_a_fork_that_is_joined() -> None:
    """The second branch is joined by way of the third, which has done nothing itself."""
    origin, second, third = stream(), stream(), stream()
    with captured(origin) as graph:
        work(origin)
        wait(second, recorded(origin))
        assert status(second) == 1
        work(second)
        wait(third, recorded(second))
        work(origin)
        wait(origin, recorded(third))
    assert graph.error == 0 and graph.nodes == 3 and status(second) == status(third) == 0


def test_a_fork_without_work_need_not_be_joined() -> None:
    """Whatever the same stream has done in an earlier capture."""
    earlier, origin, second = stream(), stream(), stream()
    with captured(earlier):
        wait(second, recorded(earlier))
        work(second)
        wait(earlier, recorded(second))
    with captured(origin) as graph:
        work(origin)
        wait(second, recorded(origin))
    assert graph.error == 0 and status(second) == 0


@pytest.mark.parametrize("joined", ["never", "too early", "elsewhere"])
def test_a_fork_that_is_not_joined(joined: str) -> None:
    origin, second, third = stream(), stream(), stream()
    with card.logged() as log, captured(origin) as graph:
        wait(second, recorded(origin))
        wait(third, recorded(origin))
        if joined == "too early":
            work(second)
            wait(origin, recorded(second))
        work(second)
        if joined == "elsewhere":
            wait(third, recorded(second))
        before = len(card.faults())
        assert graph.end(origin) == UNJOINED
    assert [(fault.rule, fault.error) for fault in card.faults()[before:]] == [
        ("unjoined", UNJOINED)
    ]
    assert [each.result for each in log.of(Capture)] == ["ok", "unjoined"] and status(second) == 0


def test_a_capture_waits_for_nothing_outside() -> None:
    origin, other = stream(), stream()
    outside = recorded(other)
    with captured(origin) as graph:
        wait(origin, event())  # never recorded: nothing to wait for
        refused(IN_CAPTURE, ISOLATION, "cudaStreamWaitEvent", origin, outside, 0)
    assert graph.error == INVALIDATED
    with captured(origin) as graph:
        inside = recorded(origin)
        wait(origin, inside)
        refused(IN_CAPTURE, IMPLICIT, "cudaStreamWaitEvent", 0, inside, 0)
    assert graph.error == INVALIDATED


def test_captures_do_not_merge() -> None:
    one, other = stream(), stream()
    with captured(one) as first, captured(other) as second:
        before = len(card.faults())
        assert call("cudaStreamWaitEvent", other, recorded(one), 0) == MERGE
        assert [fault.error for fault in card.faults()[before:]] == [MERGE, MERGE]
    assert first.error == second.error == INVALIDATED


# ---- begin and end


def test_where_a_capture_begins_and_ends() -> None:
    origin, second = stream(), stream()
    refused(IN_CAPTURE, UNSUPPORTED, "cudaStreamBeginCapture", 0, GLOBAL)
    refused("no capture", 1, "cudaStreamEndCapture", origin, ctypes.byref(ctypes.c_void_p()))
    with captured(origin) as graph:
        refused(IN_CAPTURE, 1, "cudaStreamBeginCapture", origin, GLOBAL)
    assert graph.error == INVALIDATED
    with captured(origin) as graph:
        wait(second, recorded(origin))
        refused(
            IN_CAPTURE, UNMATCHED, "cudaStreamEndCapture", second, ctypes.byref(ctypes.c_void_p())
        )
    assert graph.error == INVALIDATED
    assert (
        call("cudaGraphInstantiateWithFlags", ctypes.byref(ctypes.c_void_p()), graph.handle, 0) == 1
    )


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_which_thread_ends_a_capture(mode: int) -> None:
    origin = stream()
    with captured(origin, mode) as graph:
        error = on_another_thread(lambda: Graph().end(origin))
        assert error == (0 if mode == RELAXED else WRONG_THREAD)
        if error:
            assert graph.end(origin) == INVALIDATED
        graph.error = 0  # it is over
    assert status(origin) == 0


def test_two_captures_have_two_numbers() -> None:
    def number(of: int) -> int:
        found, own = ctypes.c_int(), ctypes.c_uint64()
        assert (
            call("cudaStreamGetCaptureInfo", of, ctypes.byref(found), ctypes.byref(own), 0, 0, 0, 0)
            == 0
        )
        return own.value

    one, other = stream(), stream()
    with captured(one), captured(other):
        assert 0 != number(one) != number(other) != 0
    assert number(one) == number(other) == 0


# ---- torch


def test_torch_captures_and_replays() -> None:
    import torch

    x, side = torch.zeros(64, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with card.logged() as log:
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            x.add_(1)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.mul_(2)
            torch.cuda.current_stream().wait_stream(side)
        graph.replay()
    launches = [each for each in log.of(Launch) if each.place == "captured"]
    (begin, end), (replay,) = log.of(Capture), log.of(GraphLaunch)
    assert (
        len(launches) == 2
        and launches[1].stream == side.cuda_stream != launches[0].stream == begin.stream
    )
    assert end.result == "ok" and end.nodes == replay.nodes >= 2


def test_torch_says_what_is_wrong_with_a_capture() -> None:
    import torch

    with pytest.raises(
        torch.AcceleratorError, match="operation failed due to a previous error during capture"
    ):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            with pytest.raises(
                torch.AcceleratorError, match="operation not permitted when stream is capturing"
            ):
                torch.cuda.synchronize()
    assert not torch.cuda.is_current_stream_capturing()
