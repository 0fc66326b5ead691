"""Run: pytest tests/sweeps/test_concurrency.py (how many at once and how long, from times that a
test makes up)
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monograph.config import load
from monograph.device import describe
from monograph.errors import InputRefused, OutOfDeviceMemory
from monograph.run.progress import Progress
from monograph.session.objectives.texts import TextTask
from monograph.session.resolve import resolve
from monograph.sweeps import members_memory
from monograph.sweeps.concurrency import TimedGroup, WidthTime, choose_updates
from monograph.sweeps.members_memory import MembersMemory
from monograph.sweeps.rehearsal import Rehearsal
from monograph.sweeps.spec import MemberGroup, groups_of, members_of

GIB = 2**30
STATS = SimpleNamespace(conversations=0)
TEXT: Any = SimpleNamespace(
    train=SimpleNamespace(per_epoch=10_000), held_out=range(100), stats=STATS
)


def groups(updates: int | None, lr: int, **axes: list[Any]) -> list[MemberGroup]:
    settings = load(None, {"train.updates": updates} if updates else {"train.minutes": 2.0}, {})
    settings = settings.resolve({"train.tokens_per_update": 1024}, "test")
    points: list[dict[str, Any]] = [{"optim.lr": 1e-3 * (i + 1)} for i in range(lr)]
    for key, values in axes.items():
        points = [point | {key.replace("__", "."): value} for value in values for point in points]
    found = members_of(settings, points)
    for member in found:
        member.plan = resolve(member.settings, describe())
    return groups_of(found)


def timed_group(
    group: MemberGroup, seconds: Callable[[int], float], monkeypatch: pytest.MonkeyPatch
) -> TimedGroup:
    """One whose times are made up: `seconds(width)` an update, 20 s to compile."""
    made: Any = TimedGroup(group, TextTask(TEXT), torch.device("cpu"), describe())

    def time(width: int, progress: Progress) -> WidthTime:
        made.held_out_row_s[width] = 0.001 * width
        made.engines[width] = ([], object())
        return WidthTime(seconds(width), 20.0)

    monkeypatch.setattr(made, "_time", time)
    return made


def progress() -> Progress:
    return Progress(io.StringIO())


def said(told: Progress) -> str:
    return " ".join(told.screen._stream._stream.getvalue().split())  # type: ignore[union-attr]


def test_updates_that_are_given_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    [group] = groups(5000, 16)
    found = timed_group(group, lambda k: 0.01 * (1 + k / 16), monkeypatch)
    assert choose_updates([found], 0, progress()) == [5000]
    assert group.round_sizes == [16] and found.engines.keys() == {16}, "what is not used is let go"
    assert group.update_s == pytest.approx(0.02) and group.compile_s == 0
    assert group.held_out_s == pytest.approx((6 * 16 + 100) * 0.016)


def test_minutes_are_those_of_the_whole_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups, one twice as slow; .95 · 120 s = members · (.1 + .2) s · updates, and 1.6 s of
    evaluations.
    """
    both = groups(None, 4, optim__name=["adamw", "muon"])
    timed_groups = [
        timed_group(both[0], lambda k: 0.1 * k, monkeypatch),
        timed_group(both[1], lambda k: 0.2 * k, monkeypatch),
    ]
    found = choose_updates(timed_groups, 0, progress())
    assert found[0] == found[1] == int((0.95 * 120 - 2 * 4 * (6 * 16 + 100) * 0.001) / 1.2) and [
        group.round_sizes for group in both
    ] == [[1] * 4, [1] * 4]


def test_every_member_learns_from_as_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    both = groups(None, 2, train__tokens_per_update=[1024, 4096])
    timed_groups = [timed_group(group, lambda k: 0.1 * k, monkeypatch) for group in both]
    small, large = choose_updates(timed_groups, 0, progress())
    assert small == pytest.approx(4 * large, rel=0.02)
    assert 0.2 * (small + large) == pytest.approx(0.95 * 120, rel=0.02)


def test_a_first_sweep_learns_from_enough_however_slow_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [group] = groups(None, 8)
    told = progress()
    assert choose_updates([timed_group(group, lambda k: 2.0 * k, monkeypatch)], 102_400, told) == [
        100
    ]
    assert "26 min 42 s instead of 2 min" in said(told)


def test_what_is_worth_compiling_is_judged_by_the_length_that_it_will_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In two minutes 16 members would have 3 updates each of 2 s, and nothing would pay; they get
    100.
    """
    [group] = groups(None, 16)
    choose_updates([timed_group(group, lambda k: 2.0, monkeypatch)], 102_400, progress())
    assert group.round_sizes == [16]


def test_evaluations_take_half_of_the_minutes_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out rows that would take longer than the sweep may: members still learn from half of its
    time.
    """
    [group] = groups(None, 4)
    found = timed_group(group, lambda k: 0.1 * k, monkeypatch)
    found.task = TextTask(SimpleNamespace(train=TEXT.train, held_out=range(10**6), stats=STATS))
    assert choose_updates([found], 0, progress()) == [pytest.approx(0.95 * 60 / 0.4, abs=1)]


def test_a_width_that_does_not_fit_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(width: int) -> float:
        if width > 4:
            raise OutOfDeviceMemory("one row does not fit")
        return 0.1

    [group], told = groups(1000, 8), progress()
    choose_updates([timed_group(group, seconds, monkeypatch)], 0, told)
    assert group.round_sizes == [4, 4] and "8 members at once: one row does not fit" in said(told)


def test_not_even_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(width: int) -> float:
        raise OutOfDeviceMemory("nothing fits 1.00 GiB")

    [group] = groups(1000, 8)
    with pytest.raises(OutOfDeviceMemory, match="nothing fits"):
        choose_updates([timed_group(group, seconds, monkeypatch)], 0, progress())


def test_what_no_graph_holds_trains_one_after_another_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(width: int) -> float:
        if width > 1:
            raise InputRefused("noise (RReLU): it draws random numbers")
        return 0.1

    [group] = groups(1000, 8)
    choose_updates([timed_group(group, seconds, monkeypatch)], 0, progress())
    assert group.round_sizes == [1] * 8
    assert group.why == "8 members, one after another: noise (RReLU): it draws random numbers"


def memory_of(limit: int, base_bytes: int, members: int = 9) -> MembersMemory:
    """Of members whose plan is 6 GiB alone; no step is traced."""
    [group] = groups(1000, members)
    work = SimpleNamespace(
        remat="none", compile="none", of_members=lambda adapters, **_: len(adapters)
    )
    expected: Any = SimpleNamespace(peak_memory_bytes=6 * GIB, work=work)
    return MembersMemory(expected, [m.plan for m in group.members if m.plan], base_bytes, limit)


def test_members_share_the_bytes_of_a_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 7B base in 4 bits and adapters of rank 16 on a card of 24 GB: one copy each fits three times."""

    def as_estimated(base_bytes: int) -> Callable[[int], dict[str, int]]:
        return lambda members: {"weights": base_bytes + members * (6 * GIB - base_bytes)}

    for limit, base_bytes, most in ((22, 0, 3), (22, 4, 9), (5, 4, 1)):
        monkeypatch.setattr(members_memory, "traced_bytes", as_estimated(base_bytes * GIB))
        assert memory_of(limit * GIB, base_bytes * GIB).most() == most


def test_only_what_may_not_fit_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace decides, whatever the estimate says."""
    traced: list[int] = []

    def trace(members: int) -> dict[str, int]:
        traced.append(members)
        return {"weights": 4 * GIB, "activations": members * 5 * GIB}

    monkeypatch.setattr(members_memory, "traced_bytes", trace)
    assert memory_of(44 * GIB, 4 * GIB).most() == 9 and not traced
    assert memory_of(30 * GIB, 4 * GIB).most() == 5 and traced == [9]


def test_a_window_that_other_work_delays_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of sampled answers take 2 s, and the first one that is timed takes 60 s."""
    now = 0.0
    seconds = iter([2.0, 60.0, 2.0, 2.0])  # the first window compiles

    def windows() -> Iterator[dict[str, torch.Tensor]]:
        nonlocal now
        for each in seconds:
            now += each
            yield {}

    monkeypatch.setattr("monograph.session.warmup.clock", lambda: now)
    rehearsal: Any = object.__new__(Rehearsal)
    rehearsal._windows, rehearsal._readers = windows(), []
    rehearsal.tasks = [SimpleNamespace(updates_per_window=1)]
    step = SimpleNamespace(scope="whole", device=torch.device("cpu"), counters_kept=nullcontext)
    rehearsal.engine = SimpleNamespace(step=step)
    assert rehearsal.window_s(updates=100) == 2.0
