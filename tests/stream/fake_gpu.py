"""A GPU with streams and events whose copies happen when they must, on a CPU; several threads may
use it.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

CARD = torch.device("cuda", 0)


class FakeEvent:
    """Of an event that is recorded again, who waited for it before waits for the recording that was
    there then.
    """

    made = 0

    def __init__(self, blocking: bool = False) -> None:
        assert blocking, "who waits for it would keep a core busy"
        type(self).made += 1
        self.recorded = self.done = 0
        self.gpu: FakeGpu | None = None

    def record(self, stream: FakeStream) -> None:
        self.recorded, self.gpu = self.recorded + 1, stream.gpu
        stream.do(lambda number=self.recorded: setattr(self, "done", number))

    def synchronize(self) -> None:
        assert self.gpu
        self.gpu.until(self, self.recorded)
        self.gpu.synchronized += 1


class FakeStream:
    """Does its work in order; the first of all, on which is computed, at once."""

    def __init__(self, gpu: FakeGpu, *, at_once: bool = False) -> None:
        self.gpu, self.at_once = gpu, at_once
        self.left: deque[Callable[[], Any]] = deque()
        self.waiting = False
        gpu.streams.append(self)

    def do(self, work: Callable[[], Any]) -> None:
        with self.gpu.lock:
            if self.at_once:
                work()
            else:
                self.left.append(work)

    def wait_event(self, event: FakeEvent) -> None:
        self.do(lambda number=event.recorded: self.gpu.until(event, number))

    def next(self) -> None:
        self.waiting = True
        self.left.popleft()()
        self.waiting = False


class FakeGpu(TorchDispatchMode):
    """What `torch.cuda` is in the block. Copies on other streams than the first are done later, in
    a random order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        super().__init__()
        self.streams: list[FakeStream] = []
        self.random = random.Random(seed)
        self.current = FakeStream(self, at_once=True)
        self.deferred = self.waited = self.synchronized = 0
        self.lock = threading.RLock()
        FakeEvent.made = 0
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(self))
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.synchronize())

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def until(self, event: FakeEvent, number: int) -> None:
        with self.lock:
            self.waited += 1
            while event.done < number:
                busy = [stream for stream in self.streams if stream.left and not stream.waiting]
                assert busy, "a stream waits for ever"
                self.random.choice(busy).next()

    def synchronize(self) -> None:
        with self.lock:
            for stream in self.streams:
                while stream.left:
                    stream.next()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and not self.current.at_once:
            assert args[2] is True, "a copy that waits for the device"
            self.deferred += 1
            self.current.do(lambda: func(*args, **(kwargs or {})))
            return args[0]
        return func(*args, **(kwargs or {}))
