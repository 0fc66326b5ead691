"""Control the pretended driver (driver/card.h) from Python: its log, counters, memory, and a hook
for asynchrony.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, get_type_hints

# What is preloaded is found here, and so are the functions of CUDA that it pretends.
driver = ctypes.CDLL(None)
PRELOADED = hasattr(driver, "card_log")
if PRELOADED:
    driver.card_text.restype = driver.card_faults.restype = ctypes.c_char_p
    driver.card_waits.restype = driver.card_done_by.restype = ctypes.c_uint64


def holds(first: int, end: int) -> bool:
    """Return whether one piece of memory that a card reaches has all bytes from an address to the
    last before `end`.
    """
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    if driver.cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(first)
    ):
        return False
    return end <= base.value + size.value


class Grid(NamedTuple):
    x: int
    y: int
    z: int


class Launch(NamedTuple):
    """A kernel, or a matrix product of the library "blas"."""

    library: str
    name: str
    grid: Grid
    threads: int
    shared_bytes: int
    stream: int
    card: int
    place: str  # "captured", "beside" the capture of another stream, or "-"


class GraphLaunch(NamedTuple):
    nodes: int
    stream: int
    card: int
    place: str


class Copy(NamedTuple):
    kind: str  # "pageable->device", "device->peer"
    bytes: int
    waits: bool  # the host, for the copy
    stream: int
    card: int
    place: str


class Memset(NamedTuple):
    bytes: int
    stream: int
    card: int
    place: str


class Wait(NamedTuple):
    """The host waits for a "stream", an "event" or the whole "device"."""

    what: str
    event: int
    stream: int
    card: int
    place: str


class StreamWait(NamedTuple):
    event: int
    stream: int
    card: int
    place: str


class Record(NamedTuple):
    event: int
    stream: int
    card: int
    place: str


class HostFunction(NamedTuple):
    stream: int
    card: int
    place: str


class Capture(NamedTuple):
    """The "begin" or the "end" of a capture, whose result is "ok", "invalid" or "unjoined"."""

    what: str
    mode: int
    nodes: int
    result: str
    stream: int
    card: int
    place: str


class Allocation(NamedTuple):
    home: str  # "device", "pinned" or "registered"
    bytes: int
    card: int
    refused: bool


class Fault(NamedTuple):
    """Something that CUDA forbids."""

    rule: str
    error: int
    card: int
    what: str


_KINDS: dict[str, type] = {
    "launch": Launch,
    "graph_launch": GraphLaunch,
    "copy": Copy,
    "memset": Memset,
    "wait": Wait,
    "stream_wait": StreamWait,
    "record": Record,
    "host_function": HostFunction,
    "capture": Capture,
    "allocation": Allocation,
    "fault": Fault,
}
_READ: dict[type, Callable[[str], Any]] = {
    str: str,
    int: lambda text: int(text, 0),
    bool: lambda text: text == "1",
    Grid: lambda text: Grid(*map(int, text.split(","))),
}
T = TypeVar("T")


def _record(line: str) -> Any:
    name, *fields = line.split("\t")
    kind = _KINDS[name]
    values = dict(field.split("=", 1) for field in fields)
    return kind(
        **{field: _READ[type_](values[field]) for field, type_ in get_type_hints(kind).items()}
    )


def _records(text: bytes) -> list[Any]:
    return [_record(line) for line in text.decode().splitlines()]


class Log:
    """What happened in a block, in order; empty until its end."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def of(self, kind: type[T]) -> list[T]:
        return [record for record in self.records if isinstance(record, kind)]


@contextmanager
def logged() -> Iterator[Log]:
    """Write down what happens in the block. One block at a time: the driver has one log."""
    log = Log()
    driver.card_log(1)
    try:
        yield log
    finally:
        driver.card_log(0)
        log.records = _records(driver.card_text())


def faults() -> list[Fault]:
    """Return all since the process began, whether they were logged or not."""
    return _records(driver.card_faults())


class Counts(ctypes.Structure):
    """What has happened on a card since the process began; the driver's own struct, field by field."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "launches",
            "products",
            "graph_launches",
            "copies",
            "waiting_copies",
            "memsets",
            "stream_waits",
            "device_waits",
            "event_waits",
            "mallocs",
            "host_allocations",
            "faults",
            "bytes",
            "peak_bytes",
        )
    ]


def counts(card: int = 0) -> Counts:
    found = Counts()
    driver.card_counts(card, ctypes.byref(found))
    return found


class Block(NamedTuple):
    at: int
    bytes: int


def blocks(card: int = 0) -> list[Block]:
    """Return the memory that is allocated on a card."""
    most = driver.card_blocks(card, None, None, 0)
    at, sizes = (ctypes.c_uint64 * most)(), (ctypes.c_uint64 * most)()
    driver.card_blocks(card, at, sizes, most)
    return [Block(*block) for block in zip(at, sizes, strict=True)]


def launch(library: str, name: str, stream: int) -> None:
    """Launch something that is computed elsewhere, under the rules for launches."""
    driver.card_launch(library.encode(), name.encode(), ctypes.c_void_p(stream))


class Moment(enum.IntEnum):
    """What a hook is told of, as in card.h."""

    EVENT_RECORDED = 1
    STREAM_WAITS = 2
    STREAM_JOINS = 3
    EVENT_SYNCHRONIZED = 4
    EVENT_QUERIED = 5
    STREAM_SYNCHRONIZED = 6
    STREAM_QUERIED = 7
    DEVICE_SYNCHRONIZED = 8
    COPIED = 9
    HOST_FUNCTION = 10


_HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


@contextmanager
def hooked(told: Callable[[Moment, int, int], object]) -> Iterator[None]:
    """In the block call `told(moment, stream, event)` before each moment; what is true means "not
    ready" to a query.

    It is called on the thread whose call it is, without the driver's lock, so it may call CUDA. The
    first exception of it is raised at the end of the block, as it cannot pass through the driver.
    """
    raised: list[BaseException] = []

    def called(moment: int, stream: int | None, event: int | None) -> int:
        try:
            return int(bool(told(Moment(moment), stream or 0, event or 0)))
        except BaseException as error:  # noqa: B902
            raised.append(error)
            return 0

    kept = _HOOK(called)
    driver.card_hook(kept)
    try:
        yield
    finally:
        driver.card_hook(None)
    if raised:
        raise raised[0]
