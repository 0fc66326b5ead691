"""How long an update of a streamed model takes: in closed form for the search, and by the clock for its best few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from monograph.graph.precision import Precision
from monograph.measure.roofline import PassTimes
from monograph.model.llama import Llama
from monograph.planner.stages import META, Names
from monograph.planner.tiers import Way
from monograph.stream import Placement
from monograph.stream.clock import Clock, Costs, Link, Timing, pretended
from monograph.stream.lanes import Lanes
from monograph.stream.step import StreamedStep
from monograph.stream.store import GRADIENT, WEIGHTS

MOST_PLAYED = 16  # micro-batches; of more, several are played as one


def closed_form(way: Way, resident: Sequence[Names], times: PassTimes, link: Link) -> float:
    """The longest of each phase, summed: computing beside what comes and what goes."""
    stages, count, layers = way.stages, way.micro_batches, way.work.config.num_hidden_layers
    sizes = {
        name: sum(stages.size_bytes(index, name) for index in range(stages.count) if name not in resident[index])
        for name in stages.names
    }
    weights, gradients, every = sizes[WEIGHTS], sizes[GRADIENT], sum(sizes.values())
    boundaries = (stages.count - 2) * count * way.state_bytes if way.offload else 0
    there_s = count * (times.first_s + layers * times.forward_s)
    back_s = count * (times.loss_s + layers * times.again_s + times.first_again_s)
    numbers = sum(plane.numbers for index in range(stages.count) for plane in stages.planes(index))
    renew_s = numbers * times.number_s
    of_disk_s = 2 * sum(sizes[name] for name in way.on_disk) / link.disk
    renewed = max(renew_s, of_disk_s), every - gradients * way.at_once, every - gradients
    there, back = (there_s, weights, boundaries), (back_s, weights + boundaries, gradients * (not way.at_once))
    phases = {
        "sweep": [there, back, renewed],
        "next forward": [_beside((there_s, 0, boundaries), renewed), back],
        "backward": [there, _beside(back, renewed)],
    }[way.when]
    return sum(max(work_s, into / link.into, out / link.out) for work_s, into, out in phases)


def _beside(one: tuple[float, int, int], other: tuple[float, int, int]) -> tuple[float, int, int]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def timing(way: Way, placement: Placement, times: PassTimes, link: Link) -> Timing:
    """An update as the clock has it, which runs the walk over the whole depth."""
    work = way.work
    with META:
        model = Llama(work.config)
    clock = Clock(link)
    step = StreamedStep(
        model, optim=work.optim, clip=work.clip, precision=Precision(work.precision), lanes=Lanes(clock),
        placement=replace(placement, device=META),
    )  # fmt: skip
    played = min(way.micro_batches, MOST_PLAYED)
    several = way.micro_batches / played
    costs = {name: seconds * (1 if name == "number_s" else several) for name, seconds in asdict(times).items()}
    state = torch.empty(
        math.ceil(work.rows * work.length * several), work.config.hidden_size,
        dtype=Precision(work.precision).dtype, device=META,
    )  # fmt: skip
    return pretended(step, clock, Costs(**costs), state, played)
