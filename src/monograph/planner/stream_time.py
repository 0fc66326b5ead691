"""Predict the time of a streamed model's update: in closed form for a search, by the clock for its
best few ways.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from monograph.graph.precision import Precision
from monograph.model.llama import Llama
from monograph.planner.placement_bytes import META, Names, StreamWay
from monograph.predict.footprint import Work
from monograph.stream import Placement, Streamed
from monograph.stream.clock import Clock, Costs, Link, Pretend, UpdateTiming, pretended
from monograph.stream.lanes import Lanes
from monograph.stream.store import GRADIENT, WEIGHTS

MOST_PLAYED = 16  # micro-batches; with more, several are played as one


class Seconds(NamedTuple):
    """The seconds of each stage in an update, over all micro-batches.

    Attributes:
        there: the forward pass.
        back: the repeated forward pass and the backward pass.
        device: updating weights on the device.
        host: updating weights on the host.
    """

    there: list[float]
    back: list[float]
    device: list[float]
    host: list[float]

    @property
    def late_s(self) -> float:
        """Return how long the forward pass waits for stages that the host updates during it, one
        after another.
        """
        ready = 0.0
        done = self.device[0]
        for host_s, there_s, next_s in zip(
            self.host, self.there, [*self.device[1:], 0.0], strict=True
        ):
            ready += host_s
            done = max(done, ready) + there_s + next_s
        return done - sum(self.there) - sum(self.device)

    @property
    def late_in_backward_s(self) -> float:
        """Return how long the next forward pass waits if the host updates stages during the
        backward pass.

        A stage is updated once its gradient is there, the last stage first.
        """
        done = ready = 0.0
        for back_s, device_s, host_s in reversed(
            list(zip(self.back, self.device, self.host, strict=True))
        ):
            done += back_s
            ready = max(ready, done) + host_s if host_s else ready
            done += device_s
        before = next((index for index, host_s in enumerate(self.host) if host_s), 0)
        return max(0.0, ready - done - sum(self.there[:before]))


def seconds_of(way: StreamWay, resident: Sequence[Names], times: Costs) -> Seconds:
    """Return the seconds of each stage for a way to stream."""
    stages = way.stages
    count = way.work.micro_batches
    blocks = way.blocks_per_stage
    numbers = [sum(plane.numbers for plane in planes) for planes in stages.planes]
    on_host = [
        sum(plane.numbers for plane in way.on_host(index, resident))
        for index in range(stages.count)
    ]
    inner = stages.count - 2
    return Seconds(
        [count * times.first_s, *[count * blocks * times.forward_s] * inner, 0.0],
        [
            count * times.first_again_s,
            *[count * blocks * times.again_s] * inner,
            count * times.loss_s,
        ],
        [times.number_s * (every - home) for every, home in zip(numbers, on_host, strict=True)],
        [times.host_number_s * home for home in on_host],
    )


def closed_form(way: StreamWay, resident: Sequence[Names], times: Costs, link: Link) -> float:
    """Return the seconds of an update: the sum over phases of the longest of computing, copying in
    and copying out.

    The host updates its stages during a pass, and the forward pass waits for a stage that is late.
    """
    on_host = [way.on_host(index, resident) for index in range(way.stages.count)]

    def away(names: Iterable[str], *, home: bool) -> int:
        """Return the bytes off the device of planes that the host updates (`home`), or of all
        others.
        """
        return sum(
            plane.size_bytes(name)
            for index, here in enumerate(resident)
            for plane in way.stages.planes[index]
            if (plane in on_host[index]) == home
            for name in names
            if name not in here
        )

    names = way.stages.names
    seconds = seconds_of(way, resident, times)
    weights, weights_home = (away([WEIGHTS], home=home) for home in (False, True))
    gradients, gradients_home = (away([GRADIENT], home=home) for home in (False, True))
    renewed_bytes = away(names, home=False) - gradients
    disk_s, disk_home_s = (2 * away(way.on_disk, home=home) / link.disk for home in (False, True))
    boundaries = way.offloaded_bytes
    there_s = sum(seconds.there)
    back_s = sum(seconds.back)
    renew_s = sum(seconds.device)
    late_there_s = 0.0 if way.at_once else max(seconds.late_s, disk_home_s - there_s)
    late_back_s = max(seconds.late_in_backward_s, disk_home_s - back_s) if way.at_once else 0.0
    # Gradients that left their slots come back for the update.
    came = 0 if way.at_once else gradients
    renewed = max(renew_s, disk_s), renewed_bytes + came, renewed_bytes
    there = there_s + late_there_s, weights + weights_home, boundaries
    back = back_s + late_back_s, weights + weights_home + boundaries, came + gradients_home
    phases = {
        "sweep": [there, back, renewed],
        "next forward": [_at_once((there[0], weights_home, boundaries), renewed), back],
        "backward": [there, _at_once(back, renewed)],
    }[way.when]
    return sum(max(work_s, into / link.into, out / link.out) for work_s, into, out in phases)


def _at_once(one: tuple[float, int, int], other: tuple[float, int, int]) -> tuple[float, int, int]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def timing(work: Work, placement: Placement, times: Costs, link: Link) -> UpdateTiming:
    """Return an update's timing by the clock, which runs the engine's own walk over the model's
    whole depth.
    """
    with META:
        model = Llama(work.config)
    clock = Clock(link)
    played = min(work.micro_batches, MOST_PLAYED)
    several = work.micro_batches / played
    costs = {
        name: seconds * (1 if name.endswith("number_s") else several)
        for name, seconds in times._asdict().items()
    }
    state = torch.empty(
        math.ceil(work.tokens * several),
        work.config.hidden_size,
        dtype=Precision(work.precision).dtype,
        device=META,
    )
    engine = Streamed(
        model,
        optim=work.optim,
        clip=work.clip,
        precision=Precision(work.precision),
        lanes=Lanes(clock),
        passes=partial(Pretend, clock=clock, costs=Costs(**costs), state=state),
        placement=replace(placement, device=META),
    )
    return pretended(engine, clock, played)
