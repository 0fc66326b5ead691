"""Run: pytest tests/stream/test_lanes.py (lanes: what waits for what, judged without them)"""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch

from batches import packed
from daily import nightly
from monograph.optim import AdamW
from monograph.stream import lanes, updates, walk
from monograph.stream import parameters as in_stages
from monograph.stream.lanes import Home, LaneMark, Lanes, Space
from stream.adversary import AnyOrder, Late
from stream.races import Race, Recorder, before, poison_, races, touched, waits
from streamed import EVERY, of_twin, other_bits, streamed, trained, unclipped, windows
from tape import Watched, memory

AVERAGED = {"optim": AdamW(lr=1e-2, ema=0.9)}
SEVERAL = [
    "on the host",
    "next forward, offloaded",
    "everywhere",
    "backward, offloaded",
    "updated on both",
    "backward, updated on the host",
]

PASSING = ["next forward, offloaded", "some stages on the device", "backward, offloaded"]

# By day operations are watched where updates are made on the host and on the device; copies also
# where all is on disk: together these have weights and moments in every home.
DAY = {"updated on both", "all on disk"}


def of(place: str, executor: Any, **changes: Any) -> Any:
    """A streamed engine with that executor, its weights averaged."""
    return streamed(
        placement=EVERY[place],
        lanes=Lanes(executor),
        **AVERAGED,
        **unclipped(EVERY[place]),
        **changes,
    )


def usual(place: str, precision: str = "fp32") -> Any:
    """What `followed` finds of a resident engine."""
    placement = EVERY[place]
    return of_twin(
        followed,
        placement.when == "backward",
        precision=precision,
        **AVERAGED,
        **unclipped(placement),
    )


def followed(engine: Any, in_backward: bool) -> dict[str, torch.Tensor]:
    """Three updates, with all that happens between them."""
    left = trained(engine, windows(1))
    left["score"] = engine.evaluate(packed(5, seed=9))[0]
    engine.trial(windows(1)[0])
    if not in_backward:
        engine.accumulate(windows(1, first=5)[0])
    left |= trained(engine, windows(1, first=1))
    left["another score"] = engine.evaluate(packed(5, seed=8))[0]
    return left | trained(engine, windows(1, first=2))


# ---- the waits -----------------------------------------------------------------------------------


def test_readers_wait_for_the_writer_and_a_writer_for_all() -> None:
    recorder, space = Recorder(), Space("slot", Home.DEVICE)
    home, tensor = Space("home", Home.HOST), torch.zeros(2)
    lane = Lanes(recorder)
    lane.copy(tensor, torch.ones(2), space, home)
    assert lane.compute(lambda: "done", [space]) == "done"
    lane.compute(lambda: None, [space])
    lane.copy(torch.zeros(2), tensor, home, space)
    lane.copy(tensor, torch.ones(2), space, home)
    assert [work.waits for work in recorder.works] == [
        (),
        (LaneMark("in", 1),),
        (),  # the same lane knows
        (LaneMark("in", 1),),  # of the space, and as the reader of its home
        (LaneMark("compute", 2), LaneMark("out", 1)),
    ]
    assert lane.moved_bytes == {(Home.HOST, Home.DEVICE): 16, (Home.DEVICE, Home.HOST): 8}
    lane.finish()
    lane.compute(lambda: None, writes=[space, home])
    assert recorder.works[-1].waits == ()


@pytest.mark.parametrize("seed", nightly(range(20), range(2)))
def test_any_schedule_is_free_of_races_and_no_wait_is_superfluous(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random works on few spaces, with a short memory of marks."""
    monkeypatch.setattr(lanes, "MARKS_BEFORE_FIRST_CLEANUP", 20)
    choose, recorder = random.Random(seed), Recorder()
    lane = Lanes(recorder)
    devices = [Space(f"slot {n}", Home.DEVICE) for n in range(4)]
    homes = [Space(f"home {n}", Home.HOST) for n in range(3)]
    for _ in range(150):
        kind, tensor = choose.random(), torch.zeros(1)
        if kind < 0.4:
            some = choose.sample(devices, 2)
            lane.compute(lambda: None, some[:1], some[1:])
        elif kind < 0.6:
            some = choose.sample(homes, 2)
            lane.host(lambda: None, some[:1], some[1:])
        elif kind < 0.99:
            ends = [choose.choice(devices), choose.choice(homes)]
            lane.copy(tensor, tensor, *choose.sample(ends, 2))
        else:
            lane.finish()
    assert not list(races(recorder))
    every = waits(recorder)
    assert len(every) > 50 and all(any(races(recorder, dropped)) for dropped in every)


def test_a_lane_without_work_keeps_no_marks_and_still_waits_when_it_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "MARKS_BEFORE_FIRST_CLEANUP", 20)
    recorder = Recorder()
    lane, slot, home = Lanes(recorder), Space("slot", Home.DEVICE), Space("home", Home.HOST)
    tensor = torch.zeros(1)
    for _ in range(500):
        lane.copy(tensor, tensor, slot, home)
        lane.compute(lambda: None, writes=[slot])
        lane.copy(tensor, tensor, home, slot)
        assert len(lane._clock_at) < 60
    lane.host(lambda: None, [home])
    assert recorder.works[-1].waits == (LaneMark("out", 500),)
    lane.copy(tensor, tensor, home, slot)
    assert not list(races(recorder))


def test_the_judge_sees_what_is_not_ordered() -> None:
    recorder = Recorder()
    lane, slot, home = Lanes(recorder), Space("slot", Home.DEVICE), Space("home", Home.HOST)
    lane.copy(torch.zeros(1), torch.zeros(1), slot, home)
    lane.compute(lambda: None, [slot])
    recorder.works[1] = recorder.works[1]._replace(waits=())
    assert list(races(recorder)) == [Race("slot", 0, 1)]
    recorder.barriers.append(1)
    assert not list(races(recorder))


# ---- an update's schedule ------------------------------------------------------------------------


@pytest.mark.parametrize("place", nightly(EVERY, {"updated on both"}))
def test_no_races_where_weights_are_tied(place: str) -> None:
    recorder = Recorder()
    engine = of(place, recorder, sizes={"tie_word_embeddings": True}, blocks_per_stage=2)
    followed(engine, EVERY[place].when == "backward")
    assert len(recorder.works) > 200 and not list(races(recorder))


@pytest.mark.parametrize("place", nightly(SEVERAL, {"updated on both"}))
def test_every_single_wait_is_needed(place: str) -> None:
    recorder = Recorder()
    engine = of(place, recorder)
    trained(engine, windows(1))
    begin = len(recorder.works)
    engine.accumulate(windows(1)[0])
    engine.update()
    engine.accumulate(windows(1)[0])
    every = waits(recorder, begin)
    assert len(every) > 40 and not list(races(recorder))
    assert [dropped for dropped in every if not any(races(recorder, dropped))] == []


class Watching(Recorder):
    """Knows the work that is being done, and what of the shared memory comes and goes."""

    engine: Any = None
    work: Any = None
    passing: dict[int, Space]

    def run(self, work: Any) -> Any:
        self.work, self.passing = work, of_passes(self.engine) if self.engine else {}
        try:
            return super().run(work)
        finally:
            self.work = None


@pytest.mark.parametrize("place", nightly(EVERY, {"updated on both"}))
def test_works_touch_what_they_declare_and_the_host_nothing_before_all_is_done(place: str) -> None:
    """What works touch of the shared memory, and what the host does of it between them; nor is
    there a race.
    """
    watching, touches, odd = Watching(), 0, list[str]()
    watching.engine = engine = of(place, watching, precision="bf16")
    at_home = memories(engine)

    def seen(func: Any, args: Any, kwargs: Any, _out: Any) -> None:
        nonlocal touches
        work = watching.work
        for at, changes in touched(func, args, kwargs):
            space = at_home.get(at) or (watching.passing.get(at) if work else None)
            if space is None:
                continue
            if work is None:
                touches += 1
                declared = watching.barriers[-1] == len(watching.works)
            else:
                declared = space in work.writes or not changes and space in work.reads
            if not declared:
                odd.append(f"{space.name} is {'written' if changes else 'read'} by {func}")

    with Watched(seen):
        followed(engine, EVERY[place].when == "backward")
    assert odd == [] and touches > 50 and len(watching.works) > 300 and not list(races(watching))
    assert watching.barriers[0] == 0, (
        "what the device was given before is done before anything begins"
    )


def memories(engine: Any) -> dict[int, Space]:
    """All memory that lanes share, and what it is called there."""
    walk = engine.walk
    rooms = [
        room
        for pool in walk.slots.pools
        for slot in pool
        for room in (slot.weights, slot.gradients)
    ]
    found = [
        (tensor, room.space)
        for room in [*rooms, *walk.updates.staging_buffers.buffers]
        for tensor in room._memory.values()
    ]
    found += [buffer for each in engine.store.stored_planes for buffer in each.buffers.values()]
    return of_passes(engine) | {
        memory(tensor): space for tensor, space in found if not tensor.is_meta
    }


def of_passes(engine: Any) -> dict[int, Space]:
    """Of that memory what comes and goes while an engine trains."""
    walk = engine.walk
    found = [
        buffer for decision in walk.updates.host_update._decisions.values() for buffer in decision
    ]
    for states in (
        walk.stage_inputs._on_device,
        walk.stage_inputs._host_copies,
        walk.stage_inputs._input_sets,
    ):
        found += list(states.values())
    return {memory(tensor): space for tensor, space in found}


class Followed(Lanes):
    """Lanes that notice which memory of the device is copied for the first time, and when it is
    freed.

    Attributes:
        first: (memory, the copy's place in the schedule).
        freed: (the place of the last copy, that of the next work after it was freed).
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.recorder = recorder
        self.first: list[tuple[int, int]] = []
        self.freed: list[tuple[int, int]] = []
        self._last: dict[int, int] = {}

    def copy(self, target: torch.Tensor, source: torch.Tensor, writes: Space, reads: Space) -> None:
        on_device = target if writes.home == Home.DEVICE else source
        storage, at = on_device.untyped_storage(), len(self.recorder.works)
        if id(storage) not in self._last:
            self.first.append((memory(on_device), at))
            weakref.finalize(storage, self._free, id(storage)).atexit = False
        self._last[id(storage)] = at
        super().copy(target, source, writes, reads)

    def _free(self, key: int) -> None:
        self.freed.append((self._last.pop(key), len(self.recorder.works)))


@pytest.mark.parametrize("place", nightly(PASSING, {"backward, offloaded"}))
def test_memory_that_comes_and_goes_is_the_compute_lanes(place: str) -> None:
    """It waits for the copies before the memory is freed, and they for it before they touch what is
    new.

    So a device's allocator, which hands memory on in the order of that one lane, need not know of
    the others.
    """
    recorder = Recorder()
    followed_lanes = Followed(recorder)
    engine = streamed(placement=EVERY[place], lanes=followed_lanes, clip=None)
    from_the_start = memories(engine).keys()
    trained(engine, windows(1))
    # Another number of micro-batches, so rings are used again, and in other shapes:
    engine.accumulate(packed(5))
    engine.update()
    engine.accumulate({name: rows[:, :16].contiguous() for name, rows in packed(8).items()})
    engine.update()
    happened, computed = before(recorder), [work.mark.lane == "compute" for work in recorder.works]

    def newest(at: int) -> int:
        return max(place for place in range(at) if computed[place])

    later = [at for where, at in followed_lanes.first if where not in from_the_start]
    assert len(later) > 20 and all(happened[at] >> newest(at) & 1 for at in later)
    assert len(followed_lanes.freed) > 20
    for last, at in followed_lanes.freed:
        assert happened[newest(at)] >> last & 1 or any(
            last < barrier <= at for barrier in recorder.barriers
        )


# ---- what a device is free to do -----------------------------------------------------------------


@pytest.mark.parametrize("place", nightly(EVERY, DAY))
def test_copies_at_the_last_moment_or_in_any_order_change_nothing(place: str) -> None:
    for executor in (Late(), AnyOrder(len(place))):
        assert not other_bits(
            followed(of(place, executor), EVERY[place].when == "backward"), usual(place)
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("place", SEVERAL)
def test_many_orders(place: str, seed: int) -> None:
    left = followed(of(place, AnyOrder(seed), precision="bf16"), EVERY[place].when == "backward")
    assert not other_bits(left, usual(place, "bf16"))


@pytest.mark.parametrize("tried", nightly([3, 8], {3}))
def test_without_a_wait_the_numbers_change(tried: int) -> None:
    """Of those of the second window's forward and backward pass: every one for a copy that comes
    from the host.
    """
    recorder = Recorder()
    engine = of("next forward, offloaded", recorder)
    trained(engine, windows(1))
    begin = len(recorder.works)
    left = trained(engine, windows(1, first=1))
    missed = [
        each
        for each in waits(recorder, begin)
        if each[0].lane == "compute" and each[1].lane == "in"
    ]
    changed = 0
    for dropped in missed[:tried]:
        again = of("next forward, offloaded", Late(dropped))
        trained(again, windows(1))
        changed += bool(other_bits(trained(again, windows(1, first=1)), left))
    assert changed > 0.75 * tried


# ---- what was released ---------------------------------------------------------------------------


class Poisons:
    """Parts of a walk that make useless what is in their memory before it is given to another."""

    def __init__(self) -> None:
        self.names: list[str] = []
        poisons = self

        class Slots(walk.Slots):
            def claim(self, stage: Any) -> Any:
                held = {slot: slot.loaded for pool in self.pools for slot in pool}
                bound = super().claim(stage)
                before = held[bound.slot]
                if before is not None and before[0] is not stage:
                    poisons.room(bound.slot.weights)
                return bound

        class StagingBuffers(updates.StagingBuffers):
            def next(self) -> Any:
                room = super().next()
                poisons.room(room)
                return room

        class StageInputs(walk.StageInputs):
            def fetch_inputs(self, stage: int, count: int) -> None:
                for g in range(count):
                    if ring := self._input_sets.get((stage % 2, g)):
                        poisons.names.append(ring[1].name)
                        poison_(ring[0])
                super().fetch_inputs(stage, count)

        class Walk(walk.Walk):
            def _prepare_gradients(self, bound: Any) -> None:
                # Gradients may be read by an update until here, when the slot has long got other
                # weights.
                if not (self.store.tied and bound.stage is self.store.stages[0]):
                    for each in self._needed_stages(bound):
                        poisons.room(each.slot.gradients)
                super()._prepare_gradients(bound)

        self.parts = Slots, StagingBuffers, StageInputs
        self.walk = Walk

    def room(self, room: Any) -> None:
        self.names.append(room.space.name)
        for tensor in room._memory.values():
            poison_(tensor)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("place", nightly(EVERY, {"updated on both"}))
def test_memory_is_poisoned_when_it_is_given_to_another(
    place: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisons, placement = Poisons(), EVERY[place]
    for part in poisons.parts:
        monkeypatch.setattr(
            updates if part.__name__ == "StagingBuffers" else walk, part.__name__, part
        )
    monkeypatch.setattr(in_stages, "Walk", poisons.walk)
    left = followed(
        of(place, lanes.Immediately(), precision=precision), placement.when == "backward"
    )
    assert not other_bits(left, usual(place, precision))
    kinds = {"slot"} | ({"returned"} if placement.offload else set())
    kinds |= {"staging"} if placement.where == "device" or placement.on_device else set()
    assert {name.split()[0] for name in poisons.names} == kinds and len(poisons.names) > 50
