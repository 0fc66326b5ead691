"""Run: pytest tests/decode/test_replay.py"""

from __future__ import annotations

from collections.abc import Callable

from monograph.decode.replay import WARM_UP, Graph, Replays


class Recorder:
    """Stands for a device: work is launched in order; what is launched during a capture is recorded, not done."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.recording: list[str] | None = None

    def launch(self, *variant: str) -> None:
        (self.done if self.recording is None else self.recording).append("".join(variant))

    def capture(self, work: Callable[[], None]) -> Graph:
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
    replays = Replays(device.launch, device.capture)
    replays.run(4, "a")
    replays.run(1, "b")
    replays.run(2, "a")
    replays.run(3, "b")
    assert device.done == ["a"] * WARM_UP + ["a'"] * 2 + ["b"] + ["a'"] * 2 + ["b"] + ["b'"] * 2
    assert replays.variants == 2


def test_without_a_capture_it_is_called() -> None:
    device = Recorder()
    Replays(device.launch, None).run(5, "a")
    assert device.done == ["a"] * 5
