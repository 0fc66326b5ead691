"""Run: pytest tests/graph/test_replay.py"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from monograph.graph.replay import WARM_UP, Graph, NotReplayable, Replays


class Recorder:
    """Stands for a device: work is launched in order; what is launched during a capture is recorded, not done."""

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
    assert (replays.variants, replays.captured) == (2, 2)


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
    assert device.done == ["a"] * WARM_UP and replays.captured == 0


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_the_host_are_an_obstacle(draw: Callable[[], float]) -> None:
    with pytest.raises(NotReplayable, match="random numbers on the host"):
        Replays(draw, Recorder()).run(WARM_UP)
