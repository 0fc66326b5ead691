"""Run: pytest tests/graph/test_replay.py"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from monograph.graph.replay import WARM_UP, CudaGraphs, Graph, NotReplayable, Replays


class Recorder:
    """Stands for a device: work is launched in order; what is launched during a capture is
    recorded, not done.
    """

    def __init__(self, obstacle: str | None = None) -> None:
        self.done: list[str] = []
        self.recording: list[str] | None = None
        self.obstacle = obstacle

    def launch(self, *variant: str) -> None:
        (self.done if self.recording is None else self.recording).append("".join(variant))

    def warm_up(self, work: Callable[[], None]) -> str | None:
        work()
        return self.obstacle

    def record(self, work: Callable[[], None]) -> Graph:
        self.recording = recorded = list[str]()
        work()
        self.recording = None
        device = self

        class Recorded:
            def replay(self) -> None:
                device.done += [each + "'" for each in recorded]

        return Recorded()


def test_captured_after_the_warm_up_and_never_run_in_vain() -> None:
    device = Recorder()
    replays = Replays(device.launch, device)
    replays.run(4, "a")
    replays.run(1, "b")
    replays.run(2, "a")
    replays.run(3, "b")
    assert device.done == ["a"] * WARM_UP + ["a'"] * 2 + ["b"] + ["a'"] * 2 + ["b"] + ["b'"] * 2
    assert (replays.variant_count, replays.graph_count) == (2, 2)


def test_without_a_recorder_it_is_called() -> None:
    device = Recorder()
    Replays(device.launch, None).run(5, "a")
    assert device.done == ["a"] * 5


def test_what_is_forgotten_is_warmed_up_again() -> None:
    device = Recorder()
    replays = Replays(device.launch, device)
    replays.run(3, "a")
    replays.forget()
    replays.run(3, "a")
    assert device.done == [*["a"] * WARM_UP, "a'"] * 2


def test_an_obstacle_counts_from_the_last_warm_up_on_and_the_call_is_done() -> None:
    device = Recorder("it waits")
    replays = Replays(device.launch, device)
    replays.run(WARM_UP - 1, "a")
    with pytest.raises(NotReplayable, match="^it waits$"):
        replays.run(1, "a")
    assert device.done == ["a"] * WARM_UP and replays.graph_count == 0


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_the_host_are_an_obstacle(draw: Callable[[], float]) -> None:
    with pytest.raises(NotReplayable, match="random numbers on the host"):
        Replays(draw, Recorder()).run(WARM_UP)


class Card:
    """What `CudaGraphs` asks of torch.cuda, in the order in which it asks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
        monkeypatch.setattr(
            torch.cuda, "set_sync_debug_mode", lambda mode: self.asked.append(f"watch {mode}")
        )

    def wait_stream(self, stream: object) -> None:
        self.asked.append("wait")


CARD = torch.device("cuda", 0)


def test_a_warm_up_is_watched_and_only_waited_for_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How long launching and computing take decides nothing: the same run is replayed on every
    machine and day.
    """
    card = Card(monkeypatch)
    assert CudaGraphs(CARD).warm_up(lambda: card.asked.append("launch")) is None
    assert card.asked == ["wait", "watch warn", "launch", "watch 0", "wait"]


def test_where_the_host_waits_is_named_and_other_warnings_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Card(monkeypatch)

    def work() -> None:
        warnings.warn(
            "called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1
        )
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    with pytest.warns(UserWarning) as warned:
        obstacle = CudaGraphs(CARD).warm_up(work)
    assert [str(each.message) for each in warned] == ["something else"]
    line = work.__code__.co_firstlineno + 1
    assert obstacle == f"the host waits for the device at {__file__}:{line}"


def test_work_that_fails_is_waited_for_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)

    def work() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        CudaGraphs(CARD).warm_up(work)
    assert card.asked[-2:] == ["watch 0", "wait"]


def test_torch_s_random_numbers_of_the_host_are_an_obstacle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Card(monkeypatch)
    assert (
        CudaGraphs(CARD).warm_up(lambda: torch.rand(1))
        == "it draws random numbers on the host (torch)"
    )
