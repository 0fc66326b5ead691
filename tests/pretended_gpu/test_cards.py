"""Run: pytest tests/pretended_gpu/test_cards.py (several pretended cards: memory, streams, events
and peers of each).

In the environment that `python tests/pretended_gpu/environment.py make` makes, under its `run`; it
starts a process with two cards for itself.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pretended_gpu import card
from pretended_gpu.card import Allocation, Copy, Launch, Moment
from pretended_gpu.cuda import (
    Dim3,
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

TWO = os.environ.get("PRETENDED_CARDS") == "2"
needs_two = pytest.mark.skipif(not (card.PRELOADED and TWO), reason="test_on_two_cards runs it")


@pytest.mark.skipif(TWO, reason="two cards are pretended already")
def test_on_two_cards() -> None:
    environment = os.environ | {"PRETENDED_CARDS": "2"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout and "1 skipped" in done.stdout  # only this one


@contextmanager
def on(number: int) -> Iterator[None]:
    """In the block this is the thread's card."""
    assert call("cudaSetDevice", number) == 0
    try:
        yield
    finally:
        assert call("cudaSetDevice", 0) == 0


def current() -> int:
    number = ctypes.c_int()
    assert call("cudaGetDevice", ctypes.byref(number)) == 0
    return number.value


@needs_two
def test_each_thread_has_its_own_card() -> None:
    number, seen = ctypes.c_int(), []
    assert call("cudaGetDeviceCount", ctypes.byref(number)) == 0 and number.value == 2
    assert call("cudaSetDevice", 2) == 101 and call("cudaSetDevice", -1) == 101
    with on(1):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        assert current() == 1 and seen == [0]


@needs_two
def test_a_card_has_a_context_when_it_is_used() -> None:
    """In a process of its own, where nothing has used a card yet."""
    program = (
        "import ctypes\n"
        "cuda, flags, active = ctypes.CDLL(None), ctypes.c_uint(), ctypes.c_int()\n"
        "def used(card):\n"
        "    cuda.cuDevicePrimaryCtxGetState(card, ctypes.byref(flags), ctypes.byref(active))\n"
        "    return active.value\n"
        "before = used(0), used(1)\n"
        "cuda.cudaSetDevice(1)\n"
        "print(*before, used(0), used(1))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["0", "0", "0", "1"]


@needs_two
def test_contexts_are_cards() -> None:
    context, own = ctypes.c_void_p(), made("cuCtxGetCurrent")
    assert call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 1) == 0 and context.value != own
    assert call("cuCtxPushCurrent_v2", context) == 0 and current() == 1
    assert made("cuCtxGetCurrent") == context.value
    assert call("cuCtxPopCurrent_v2", 0) == 0 and current() == 0
    assert call("cuCtxSetCurrent", context) == 0 and current() == 1
    assert call("cuCtxSetCurrent", own) == 0 and current() == 0
    assert call("cuCtxPopCurrent_v2", 0) == 201


@needs_two
def test_each_card_has_its_own_memory() -> None:
    class Attributes(ctypes.Structure):
        _fields_ = [
            ("type", ctypes.c_int),
            ("device", ctypes.c_int),
            ("addresses", ctypes.c_void_p * 10),
        ]

    found, before = Attributes(), [card.counts(number) for number in (0, 1)]
    with on(1), card.logged() as log:
        address = memory(8192)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total)) == 0
    assert log.of(Allocation) == [Allocation("device", 8192, 1, refused=False)]
    assert free.value == total.value - (512 << 20) - card.counts(1).bytes
    assert [card.counts(n).bytes - before[n].bytes for n in (0, 1)] == [0, 8192]
    assert [card.counts(n).mallocs - before[n].mallocs for n in (0, 1)] == [0, 1]
    assert address in [block.at for block in card.blocks(1)] and address not in [
        block.at for block in card.blocks(0)
    ]
    assert call("cudaPointerGetAttributes", ctypes.byref(found), address) == 0 and (
        found.type,
        found.device,
    ) == (2, 1)
    assert call("cudaFree", address) == 0 and card.counts(1).bytes == before[1].bytes
    with on(1):
        rest = memory(free.value)  # as much as if nothing had been allocated on the other card
        assert call("cudaMalloc", ctypes.byref(ctypes.c_void_p()), 8193) == 2
        assert call("cudaFree", rest) == 0


@needs_two
def test_a_launch_on_a_stream_of_another_card_is_refused() -> None:
    with on(1):
        theirs = stream()
        work(theirs)
    with card.logged() as log:
        refused(
            "wrong card", 400, "cudaLaunchKernel", 8, Dim3(1, 1, 1), Dim3(1, 1, 1), 0, 0, theirs
        )
        with on(1):
            work(theirs)
            work(0)
    assert [(each.stream, each.card) for each in log.of(Launch)] == [(theirs, 1), (0, 1)]


@needs_two
def test_events_and_streams_of_two_cards() -> None:
    with on(1):
        theirs, their_event = stream(), event()
        their_fence = recorded(theirs)
    refused("wrong card", 400, "cudaEventRecord", their_event, stream())
    # Everything else may be mixed.
    assert (
        call("cudaEventRecord", their_event, theirs)
        == call("cudaEventSynchronize", their_fence)
        == 0
    )
    assert (
        call("cudaStreamWaitEvent", stream(), their_fence, 0)
        == call("cudaStreamSynchronize", theirs)
        == 0
    )
    timed = [event(0)]
    with on(1):
        timed.append(event(0))
        assert call("cudaEventRecord", timed[1], 0) == 0
    assert call("cudaEventRecord", timed[0], 0) == 0
    refused(
        "no time between the events",
        400,
        "cudaEventElapsedTime",
        ctypes.byref(ctypes.c_float()),
        *timed,
    )


@needs_two
def test_the_default_stream_waits_for_its_own_cards_streams() -> None:
    ours = stream(flags=0)
    with on(1):
        theirs = stream(flags=0)
        work(theirs)
    work(ours)
    joins = []
    with card.hooked(
        lambda moment, *streams: joins.append(streams) if moment == Moment.STREAM_JOINS else None
    ):
        work(0)
        with on(1):
            work(0)
    assert joins == [(0, ours), (0, theirs)]


@needs_two
def test_copies_between_cards() -> None:
    ours, host = memory(), pinned()
    with on(1):
        theirs = memory()
    ctypes.memset(ours, 5, 8)
    with card.logged() as log:
        assert call("cudaMemcpyPeerAsync", theirs, 1, ours, 0, 8, 0) == 0
        assert call("cudaMemcpyAsync", ours, theirs, 8, 4, 0) == 0
        assert call("cudaMemcpyAsync", ours, theirs, 8, 4, 0) == 0
    assert ctypes.string_at(theirs, 9) == b"\5" * 8 + b"\0"
    assert log.of(Copy)[:2] == [Copy("device->peer", 8, False, 0, 0, "-")] * 2
    refused("wrong card", 1, "cudaMemcpyPeerAsync", theirs, 0, ours, 0, 8, 0)
    refused("wrong card", 1, "cudaMemcpyPeerAsync", theirs, 1, ours, 1, 8, 0)
    refused("wrong card", 1, "cudaMemcpyPeerAsync", theirs, 1, host, 0, 8, 0)


@needs_two
def test_torch_copies_between_cards() -> None:
    import torch

    x = torch.zeros(16, device="cuda:0")
    assert torch.cuda.can_device_access_peer(0, 1)
    with card.logged() as log:
        y = x.to("cuda:1")
    assert [each.kind for each in log.of(Copy)] == ["device->peer"]
    assert torch.cuda.memory_allocated(1) == 512 and y.device.index == 1
    before = torch.cuda.max_memory_allocated(0)
    torch.empty(1 << 20, device="cuda:1")
    assert torch.cuda.max_memory_allocated(0) == before < torch.cuda.max_memory_allocated(1)


@needs_two
def test_a_kernel_reaches_its_peers_memory_when_that_is_enabled(tmp_path: Path) -> None:
    with on(1):
        theirs = memory()
    can = ctypes.c_int(-1)
    assert call("cudaDeviceCanAccessPeer", ctypes.byref(can), 0, 1) == 0 and can.value == 1
    assert call("cudaDeviceCanAccessPeer", ctypes.byref(can), 1, 1) == 0 and can.value == 0
    assert call("cudaDeviceCanAccessPeer", ctypes.byref(can), 0, 2) == 101
    function = made("cuModuleGetFunction", made("cuModuleLoadData", cubin(tmp_path)), b"probe")
    slots = [ctypes.c_uint64(memory()), ctypes.c_uint32(7), ctypes.c_uint64(theirs)]
    parameters = (ctypes.c_void_p * 3)(*map(ctypes.addressof, slots))
    launch = ("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, parameters, 0)
    call("cudaDeviceDisablePeerAccess", 1)  # torch has enabled it where it has copied before
    assert call("cudaDeviceDisablePeerAccess", 1) == 705
    gemm = (
        "cublasSgemm_v2",
        made("cublasCreate_v2"),
        0,
        0,
        1,
        1,
        1,
        0,
        slots[0].value,
        1,
        theirs,
        1,
        0,
        0,
        1,
    )
    refused_launch(launch, 700)
    refused_launch(gemm, 13)
    refused("wrong card", 1, "cudaMemsetAsync", theirs, 0, 8, 0)
    with on(1):
        assert call("cudaDeviceEnablePeerAccess", 0, 0) == 0  # the other way round is not enough
    refused_launch(launch, 700)
    assert call("cudaDeviceEnablePeerAccess", 0, 0) == 101
    assert (
        call("cudaDeviceEnablePeerAccess", 1, 0) == 0
        and call("cudaDeviceEnablePeerAccess", 1, 0) == 704
    )
    assert call(*launch) == call("cudaMemsetAsync", theirs, 0, 8, 0) == 0


def refused_launch(launch: tuple[object, ...], error: int) -> None:
    before = len(card.faults())
    assert call(*launch) == error
    assert [fault.rule for fault in card.faults()[before:]] == ["wrong card"]
