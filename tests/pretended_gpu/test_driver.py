"""Run: pytest tests/pretended_gpu/test_driver.py (memory, copies, events and counters of the
pretended driver).

In the environment that `python tests/pretended_gpu/environment.py make` makes, under its `run`.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pretended_gpu import card
from pretended_gpu.card import (
    Allocation,
    Copy,
    Grid,
    HostFunction,
    Launch,
    Memset,
    Record,
    StreamWait,
    Wait,
)
from pretended_gpu.cuda import (
    TO_DEVICE,
    Dim3,
    call,
    event,
    memory,
    pinned,
    recorded,
    refused,
    stream,
    work,
)

GIB = 2**30
HEADER = (Path(__file__).parent / "driver" / "card.h").read_text()


def declared(pattern: str) -> list[str]:
    return re.findall(pattern, HEADER, re.M)


def test_python_mirrors_the_header() -> None:
    moments = [
        name for name in declared(r"^    ([A-Z_]+)(?: = 1)?,") if name in card.Moment.__members__
    ]
    assert moments == [moment.name for moment in card.Moment] and [*card.Moment] == [*range(1, 11)]
    counted = [name for name, _ in card.Counts._fields_]
    assert declared(r"^    uint64_t (\w+);.*$")[: len(counted)] == counted


SAYS = """
import ctypes
cuda = ctypes.CDLL(None)
name, size, value = ctypes.create_string_buffer(99), ctypes.c_size_t(), ctypes.c_int()
cuda.cuDeviceGetName(name, 99, 0), cuda.cuDeviceTotalMem_v2(ctypes.byref(size), 0)
found = [cuda.cuDeviceGetAttribute(ctypes.byref(value), each, 0) or value.value for each in (75, 76, 16, 97, 39)]
cuda.cudaGetDeviceCount(ctypes.byref(value))
print(name.value.decode(), size.value, *found, value.value, sep=", ")
"""


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, f"NVIDIA H200, {int(140.4 * GIB)}, 9, 0, 132, {227 << 10}, 2048, 1"),
        ({"SM": "75"}, f"Tesla T4, {16 * GIB}, 7, 5, 40, {64 << 10}, 1024, 1"),
        (
            {"SM": "120", "CARDS": "3"},
            f"NVIDIA GeForce RTX 5090, {32 * GIB}, 12, 0, 170, {99 << 10}, 1536, 3",
        ),
        (
            {"NAME": "it", "GIB": "1.5", "SMS": "7"},
            f"it, {3 * GIB // 2}, 9, 0, 7, {227 << 10}, 2048, 1",
        ),
        ({"SM": "91"}, "the pretended driver: PRETENDED_SM is none of 75 80 86 89 90 100 120"),
        ({"CARDS": "17"}, "the pretended driver: PRETENDED_CARDS is not between 1 and 16"),
    ],
)
def test_which_card_is_pretended(settings: dict[str, str], says: str) -> None:
    others = {
        name: value for name, value in os.environ.items() if not name.startswith("PRETENDED_")
    }
    own = {f"PRETENDED_{name}": value for name, value in settings.items()}
    done = subprocess.run(
        [sys.executable, "-c", SAYS], env=others | own, capture_output=True, text=True
    )
    assert (done.stdout + done.stderr).strip() == says and (done.returncode == 2) == (
        "driver" in says
    )


# ---- memory


def test_memory_is_zero_and_counted_and_given_back() -> None:
    before = card.counts()
    address = memory(3 * 4096)
    assert card.Block(address, 3 * 4096) in card.blocks()
    assert ctypes.string_at(address, 3 * 4096) == bytes(3 * 4096)
    assert (
        card.counts().bytes == before.bytes + 3 * 4096
        and card.counts().peak_bytes >= before.bytes + 3 * 4096
    )
    assert call("cudaFree", address) == 0
    assert (
        card.counts().bytes == before.bytes and card.counts().peak_bytes >= before.bytes + 3 * 4096
    )
    assert address not in [block.at for block in card.blocks()]


def test_an_address_is_known_from_its_first_byte_to_its_last() -> None:
    class Attributes(ctypes.Structure):
        _fields_ = [
            ("type", ctypes.c_int),
            ("device", ctypes.c_int),
            ("addresses", ctypes.c_void_p * 10),
        ]

    def kind(address: int) -> int:
        found = Attributes()
        assert call("cudaPointerGetAttributes", ctypes.byref(found), address) == 0
        return found.type

    device, host = memory(), pinned()
    own = ctypes.create_string_buffer(8)
    assert [kind(device), kind(device + 4095), kind(host + 7), kind(ctypes.addressof(own))] == [
        2,
        2,
        1,
        0,
    ]
    base, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert (
        call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), device + 4095) == 0
    )
    assert (base.value, size.value) == (device, 4096)
    assert call("cudaFree", device) == call("cudaFreeHost", host) == 0
    assert kind(device) == kind(host) == 0


def test_unknown_memory_is_not_freed() -> None:
    device, host = memory(), pinned()
    own = ctypes.create_string_buffer(8192)
    before = card.counts().faults
    refused("unknown memory", 1, "cudaFree", ctypes.addressof(own))
    refused("unknown memory", 1, "cudaFree", device + 8)
    refused("unknown memory", 1, "cudaFree", host)
    refused("unknown memory", 1, "cudaFreeHost", device)
    assert call("cudaFree", device) == call("cudaFreeHost", host) == 0
    refused("unknown memory", 1, "cudaFree", device)
    assert card.counts().faults == before + 5
    assert call("cudaFree", 0) == call("cudaFreeHost", 0) == 0


def test_memory_is_registered_once() -> None:
    own = ctypes.create_string_buffer(8192)
    at = ctypes.addressof(own)
    with card.logged() as log:
        assert call("cudaHostRegister", at, 8192, 0) == 0
        refused("registered twice", 712, "cudaHostRegister", at + 4096, 4096, 0)
        refused("registered twice", 712, "cudaHostRegister", at - 8, 16, 0)
        refused("unknown memory", 713, "cudaHostUnregister", at + 8)
        assert call("cudaHostUnregister", at) == 0
        refused("unknown memory", 713, "cudaHostUnregister", at)
    assert log.of(Allocation) == [Allocation("registered", 8192, 0, refused=False)]


def test_out_of_memory_is_an_answer_and_no_fault() -> None:
    import torch

    free, total = torch.cuda.mem_get_info()
    assert free == total - card.counts().bytes - GIB // 2
    before = len(card.faults())
    with card.logged() as log:
        assert call("cudaMalloc", ctypes.byref(ctypes.c_void_p()), free + 1) == 2
        rest = memory(free)  # a card may be larger than this machine
        assert call("cudaMalloc", ctypes.byref(ctypes.c_void_p()), 1) == 2
        assert call("cudaFree", rest) == 0
    assert [each.refused for each in log.of(Allocation)] == [True, False, True]
    card.driver.cudaGetLastError()
    with pytest.raises(torch.OutOfMemoryError, match=f"total capacity of {total / GIB:.2f} GiB"):
        torch.empty(total, dtype=torch.uint8, device="cuda")
    assert len(card.faults()) == before


def test_torchs_allocator_takes_and_gives_back_the_cards_memory() -> None:
    import torch

    torch.cuda.empty_cache()
    before, kept = card.counts().bytes, torch.cuda.memory_reserved()
    with card.logged() as log:
        held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert log.of(Allocation) == [Allocation("device", 64 << 20, 0, refused=False)]
    assert card.counts().bytes - before == torch.cuda.memory_reserved() - kept == 64 << 20
    assert card.Block(held.data_ptr(), 64 << 20) in card.blocks()
    del held
    torch.cuda.empty_cache()
    assert card.counts().bytes == before and card.counts().peak_bytes >= before + (64 << 20)


# ---- copies


@pytest.mark.parametrize(
    ("source", "target", "asked", "waits"),
    [
        ("pinned", "device", "cudaMemcpyAsync", False),
        ("device", "pinned", "cudaMemcpyAsync", False),
        ("device", "device", "cudaMemcpyAsync", False),
        ("pageable", "pageable", "cudaMemcpyAsync", False),
        ("pageable", "device", "cudaMemcpyAsync", True),
        ("device", "pageable", "cudaMemcpyAsync", True),
        ("pinned", "device", "cudaMemcpy", True),
    ],
)
def test_for_which_copies_the_host_waits(source: str, target: str, asked: str, waits: bool) -> None:
    own = [ctypes.create_string_buffer(4096) for _ in range(2)]
    places = {"pageable": iter(map(ctypes.addressof, own)), "device": iter([memory(), memory()])}
    places["pinned"] = iter([pinned()])
    begin, end = next(places[source]), next(places[target])
    ctypes.memset(begin, 7, 4096)
    before = card.counts()
    with card.logged() as log:
        assert call(asked, end, begin, 4000, 4, *([0] if asked == "cudaMemcpyAsync" else [])) == 0
    assert ctypes.string_at(end, 4096) == b"\7" * 4000 + bytes(96)
    assert log.records == [Copy(f"{source}->{target}", 4000, waits, 0, 0, "-")]
    after = card.counts()
    assert (after.copies - before.copies, after.waiting_copies - before.waiting_copies) == (
        1,
        waits,
    )


def test_a_copy_of_rows() -> None:
    target, source = memory(), memory()
    ctypes.memmove(source, bytes(range(32)), 32)
    assert call("cudaMemcpy2DAsync", target, 16, source, 8, 4, 3, 3, 0) == 0
    rows = [bytes(range(first, first + 4)) + bytes(12) for first in (0, 8, 16)]
    assert ctypes.string_at(target, 64) == b"".join(rows) + bytes(16)


@pytest.mark.parametrize("value", [0, 3])
def test_memset_sets_exactly_its_bytes(value: int) -> None:
    """Also a large one of zeros, for which whole pages are given back."""
    size = (8 << 20) + 4096
    address = memory(size)
    ctypes.memset(address, 1, size)
    with card.logged() as log:
        assert call("cudaMemsetAsync", address + 5, value, size - 10, 0) == 0
    assert ctypes.string_at(address, size) == b"\1" * 5 + bytes([value]) * (size - 10) + b"\1" * 5
    assert log.records == [Memset(size - 10, 0, 0, "-")]
    assert call("cuMemsetD32Async", address, 0x01020304, 2, 0) == 0
    assert ctypes.string_at(address, 8) == b"\4\3\2\1" * 2
    assert call("cudaFree", address) == 0
    refused("unknown memory", 1, "cudaMemsetAsync", address, 0, 8, 0)


# ---- streams, events, counters


def test_what_was_destroyed_is_not_used() -> None:
    gone, over = stream(), event()
    other = stream()
    assert call("cudaStreamDestroy", gone) == call("cudaEventDestroy", over) == 0
    for name in ("cudaStreamSynchronize", "cudaStreamQuery", "cudaStreamDestroy"):
        refused("destroyed stream", 400, name, gone)
    refused("destroyed stream", 400, "cudaMemcpyAsync", memory(), pinned(), 8, TO_DEVICE, gone)
    refused("destroyed stream", 400, "cudaStreamBeginCapture", gone, 0)
    refused(
        "destroyed stream", 400, "cudaLaunchKernel", 8, Dim3(1, 1, 1), Dim3(1, 1, 1), 0, 0, gone
    )
    for name in ("cudaEventSynchronize", "cudaEventQuery", "cudaEventDestroy"):
        refused("destroyed event", 400, name, over)
    refused("destroyed event", 400, "cudaEventRecord", over, other)
    refused("destroyed event", 400, "cudaStreamWaitEvent", other, over, 0)


def test_the_time_between_events() -> None:
    import torch

    ms = ctypes.c_float()
    begin, end = event(0), event(0)
    assert call("cudaEventElapsedTime", ctypes.byref(ms), begin, end) == 400  # not recorded
    assert call("cudaEventRecord", begin, 0) == call("cudaEventRecord", end, 0) == 0
    assert call("cudaEventElapsedTime", ctypes.byref(ms), begin, end) == 0 and ms.value >= 5
    refused(
        "no time between the events",
        400,
        "cudaEventElapsedTime",
        ctypes.byref(ms),
        begin,
        recorded(0),
    )
    card.driver.cudaGetLastError()
    pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for each in pair:
        each.record()
    assert pair[1].query() and pair[0].elapsed_time(pair[1]) >= 5


def test_what_happens_is_logged_and_counted() -> None:
    one, other, fence = stream(), stream(), event()
    before = card.counts()
    called = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: called.append(data))
    with card.logged() as log:
        work(one)
        assert (
            call("cudaEventRecord", fence, one) == call("cudaStreamWaitEvent", other, fence, 0) == 0
        )
        assert call("cudaEventSynchronize", fence) == call("cudaStreamSynchronize", other) == 0
        assert call("cudaDeviceSynchronize") == call("cudaLaunchHostFunc", one, function, 5) == 0
    assert log.records == [
        Launch("test", "work", Grid(1, 1, 1), 1, 0, one, 0, "-"),
        Record(fence, one, 0, "-"),
        StreamWait(fence, other, 0, "-"),
        Wait("event", fence, 0, 0, "-"),
        Wait("stream", 0, other, 0, "-"),
        Wait("device", 0, 0, 0, "-"),
        HostFunction(one, 0, "-"),
    ]
    assert called == [5]
    after = card.counts()
    changed = {
        name: getattr(after, name) - getattr(before, name) for name, _ in card.Counts._fields_
    }
    assert {name: by for name, by in changed.items() if by} == {
        "launches": 1, "event_waits": 1, "stream_waits": 1, "device_waits": 1,
    }  # fmt: skip
    written = card.driver.card_text()
    work(one)
    assert card.driver.card_text() == written  # nothing is logged any more


def test_torchs_products_launches_and_waits() -> None:
    import torch

    side = torch.cuda.Stream()
    x = torch.zeros(3, 4, device="cuda")
    before = card.counts()
    with card.logged() as log, torch.cuda.stream(side):
        (x @ x.T).add_(1)
        x.to("cpu")
    names = [(each.library, each.stream) for each in log.of(Launch)]
    assert names == [("blas", side.cuda_stream), ("torch", side.cuda_stream)]
    assert "m3_n3_k4" in log.of(Launch)[0].name and "elementwise" in log.of(Launch)[1].name
    assert [(each.kind, each.bytes, each.waits) for each in log.of(Copy)] == [
        ("device->pageable", 48, True)
    ]
    assert [each.what for each in log.of(Wait)] == [
        "stream"
    ] and card.counts().products == before.products + 1
