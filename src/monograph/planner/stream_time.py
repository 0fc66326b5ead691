"""Predict the time of a streamed model's update, in two ways.

The closed form is fast enough for a search over all ways to stream. The clock (`stream.clock`), which
simulates the engine, is for the best few ways.

A streamed model's weights live on the host. They come to the device in stages: what is before the
blocks, groups of blocks, and what is after them. A plane is a part of a stage's parameters in one
tensor. The other words (resident, slot, boundary) are those of `planner.placement_bytes`.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from monograph.graph.precision import Precision
from monograph.model.adapter import install_adapters
from monograph.model.llama import Llama
from monograph.planner.placement_bytes import META, BufferNames, StreamWay
from monograph.predict.footprint import Work
from monograph.stream import Placement, Streamed
from monograph.stream.clock import Clock, Costs, Link, TimedPasses, UpdateTiming, time_update
from monograph.stream.frozen import FROZEN
from monograph.stream.lanes import Lanes
from monograph.stream.slots import BLOCK_SLOTS
from monograph.stream.store import GRADIENT, WEIGHTS

# The clock runs at most this many micro-batches. If there are more, it runs several as one.
MAX_CLOCK_MICRO_BATCHES = 16


class StageSeconds(NamedTuple):
    """The seconds of an update, by stage, over all micro-batches.

    Attributes:
        forward: for each stage, seconds of the forward pass.
        backward: for each stage, seconds of the recomputed forward pass and the backward pass.
        device_update: for each stage, seconds of updating weights on the device.
        host_update: for each stage, seconds of updating weights on the host.
    """

    forward: list[float]
    backward: list[float]
    device_update: list[float]
    host_update: list[float]

    @property
    def wait_in_forward_s(self) -> float:
        """Return how long the forward pass waits for the host in all, if the host updates one stage
        after another during that pass.

        Before a stage's forward pass the device waits for the host's update of that stage.
        Afterwards the device updates its own planes of the next stage.
        """
        next_device_updates = [*self.device_update[1:], 0.0]
        host_done_s = 0.0
        device_done_s = self.device_update[0]
        for host_s, forward_s, next_device_s in zip(
            self.host_update, self.forward, next_device_updates, strict=True
        ):
            host_done_s += host_s
            device_done_s = max(device_done_s, host_done_s) + forward_s + next_device_s
        # What remains without the device's own work is waiting.
        return device_done_s - sum(self.forward) - sum(self.device_update)

    @property
    def wait_after_backward_s(self) -> float:
        """Return how long the next forward pass waits, if the host updates stages during the
        backward pass.

        A stage is updated when its gradient is complete, the last stage first.
        """
        device_done_s = host_done_s = 0.0
        stages = list(zip(self.backward, self.device_update, self.host_update, strict=True))
        for backward_s, device_s, host_s in reversed(stages):
            device_done_s += backward_s
            if host_s:
                host_done_s = max(host_done_s, device_done_s) + host_s
            device_done_s += device_s
        # The next forward pass waits when it comes to the first stage that the host updates. This
        # stage is the last one that the host has updated.
        on_host = [index for index, host_s in enumerate(self.host_update) if host_s]
        first_on_host = on_host[0] if on_host else 0
        forward_before_s = sum(self.forward[:first_on_host])
        return max(0.0, host_done_s - device_done_s - forward_before_s)


class _Phase(NamedTuple):
    """A part of an update in which computing and copies overlap.

    Attributes:
        compute_s: seconds of computing.
        in_bytes: bytes copied to the device.
        out_bytes: bytes copied from the device.
    """

    compute_s: float
    in_bytes: int
    out_bytes: int

    def joined(self, other: "_Phase") -> "_Phase":
        """Return the phase in which the work of both phases is done."""
        return _Phase(
            self.compute_s + other.compute_s,
            self.in_bytes + other.in_bytes,
            self.out_bytes + other.out_bytes,
        )

    def seconds(self, link: Link) -> float:
        """Return the longest of computing, copying in and copying out."""
        return max(self.compute_s, self.in_bytes / link.into, self.out_bytes / link.out)


def stage_seconds(way: StreamWay, resident: Sequence[BufferNames], costs: Costs) -> StageSeconds:
    """Return the seconds of each stage for a way to stream.

    Args:
        way: the way.
        resident: for each stage, the names of its buffers that stay on the device.
        costs: the seconds of each pass.
    """
    stages = way.stages
    micro_batches = way.work.micro_batches
    blocks = way.blocks_per_stage
    block_stages = stages.count - 2
    parameters = [sum(plane.parameters for plane in planes) for planes in stages.planes]
    host_parameters = [
        sum(plane.parameters for plane in way.planes_updated_on_host(index, resident))
        for index in range(stages.count)
    ]
    forward_of_blocks_s = micro_batches * blocks * costs.forward_s
    backward_of_blocks_s = micro_batches * blocks * costs.recompute_backward_s
    return StageSeconds(
        # The last stage runs forward only together with its backward pass: `loss_s` is for both.
        forward=[micro_batches * costs.first_s, *[forward_of_blocks_s] * block_stages, 0.0],
        backward=[
            micro_batches * costs.first_backward_s,
            *[backward_of_blocks_s] * block_stages,
            micro_batches * costs.loss_s,
        ],
        device_update=[
            costs.weight_update_s * (of_stage - on_host)
            for of_stage, on_host in zip(parameters, host_parameters, strict=True)
        ],
        host_update=[costs.host_weight_update_s * on_host for on_host in host_parameters],
    )


def closed_form_seconds(
    way: StreamWay, resident: Sequence[BufferNames], costs: Costs, link: Link
) -> float:
    """Return the seconds of an update: the sum over phases of the longest of computing, copying in
    and copying out.

    The host updates its stages during a pass, and the forward pass waits for a stage that is late.

    Args:
        way: the way.
        resident: for each stage, the names of its buffers that stay on the device.
        costs: the seconds of each pass.
        link: the rates of copies.
    """
    host_planes = [way.planes_updated_on_host(index, resident) for index in range(way.stages.count)]

    def off_device_bytes(names: Collection[str], *, host_updated: bool) -> int:
        """Return the bytes of these buffers that are not resident.

        Args:
            names: the buffers' names.
            host_updated: True counts the buffers of planes that the host updates, False those of
                planes that the device updates.
        """
        total = 0
        for index, resident_names in enumerate(resident):
            for plane in way.stages.planes[index]:
                if (plane in host_planes[index]) == host_updated:
                    off_device = [name for name in names if name not in resident_names]
                    total += sum(plane.size_bytes(name) for name in off_device)
        return total

    seconds = stage_seconds(way, resident, costs)
    forward_s = sum(seconds.forward)
    backward_s = sum(seconds.backward)
    update_s = sum(seconds.device_update)

    # All of these are bytes of buffers that are not resident. `update_bytes` are copied in both
    # directions when the device updates weights; gradients are only copied to it.
    host_weights = off_device_bytes([WEIGHTS], host_updated=True)
    weights = off_device_bytes([WEIGHTS], host_updated=False) + host_weights
    gradients = off_device_bytes([GRADIENT], host_updated=False)
    host_gradients = off_device_bytes([GRADIENT], host_updated=True)
    frozen_in_forward, frozen_in_backward = frozen_bytes(way, resident)
    update_bytes = off_device_bytes(way.stages.buffer_names, host_updated=False) - gradients
    boundaries = way.offloaded_bytes

    # Each buffer in a file is read and written once.
    disk_s = 2 * off_device_bytes(way.on_disk, host_updated=False) / link.disk
    host_disk_s = 2 * off_device_bytes(way.on_disk, host_updated=True) / link.disk

    # The host's updates overlap with the pass during which they are made: the backward pass if
    # gradients never leave their slots, else the next forward pass. The pass waits for the host's
    # computing, or for the host's files if these take longer than the whole pass.
    forward_wait_s = backward_wait_s = 0.0
    if way.gradients_stay_in_slots:
        backward_wait_s = max(seconds.wait_after_backward_s, host_disk_s - backward_s)
    else:
        forward_wait_s = max(seconds.wait_in_forward_s, host_disk_s - forward_s)

    # Gradients that left their slots come back for the update.
    returned_gradients = 0 if way.gradients_stay_in_slots else gradients
    update = _Phase(
        compute_s=max(update_s, disk_s),  # the files are read and written in the meantime
        in_bytes=update_bytes + returned_gradients,
        out_bytes=update_bytes,
    )
    forward = _Phase(
        compute_s=forward_s + forward_wait_s,
        in_bytes=weights + frozen_in_forward,
        out_bytes=boundaries,
    )
    backward = _Phase(
        compute_s=backward_s + backward_wait_s,
        in_bytes=weights + frozen_in_backward + boundaries,
        out_bytes=returned_gradients + host_gradients,
    )
    if way.when == "sweep":
        phases = [forward, backward, update]
    elif way.when == "next forward":
        # Weights that the device updates are on the device after their update, so only those that the
        # host updates are copied for the forward pass.
        forward = forward._replace(in_bytes=host_weights + frozen_in_forward)
        phases = [forward.joined(update), backward]
    else:
        phases = [forward, backward.joined(update)]
    return sum(phase.seconds(link) for phase in phases)


def frozen_bytes(way: StreamWay, resident: Sequence[BufferNames]) -> tuple[int, int]:
    """Return the bytes of frozen tensors that the forward and the backward pass copy to the device.

    Each pass finds its first BLOCK_SLOTS stages of blocks still in their slots.

    Args:
        way: the way.
        resident: for each stage, the names of its buffers that stay on the device.
    """
    sizes = [
        0 if FROZEN in names else way.stages.size_bytes(index, FROZEN)
        for index, names in enumerate(resident)
    ]
    first, *middle, last = sizes
    if way.stages.tied:
        first = last = 0  # each has a slot of its own, and stays there
    return first + sum(middle[BLOCK_SLOTS:]), last + sum(
        middle[: max(0, len(middle) - BLOCK_SLOTS)]
    )


def clock_timing(work: Work, placement: Placement, costs: Costs, link: Link) -> UpdateTiming:
    """Simulate an update by the clock, and return its timing.

    The engine's own code walks over all stages of the model, on tensors without data.

    Args:
        work: the step.
        placement: the place of each buffer.
        costs: the seconds of each pass.
        link: the rates of copies.
    """
    with META:
        model = Llama(work.config)
        if work.lora:
            install_adapters(model, work.lora, precision=Precision(work.precision))
    clock = Clock(link)
    clock_micro_batches = min(work.micro_batches, MAX_CLOCK_MICRO_BATCHES)
    # How many micro-batches the clock runs as one.
    batches_as_one = work.micro_batches / clock_micro_batches
    clock_costs = costs._asdict()
    for name in clock_costs:
        # The costs of updating a weight do not depend on micro-batches.
        if not name.endswith("weight_update_s"):
            clock_costs[name] *= batches_as_one
    # The hidden states that pass from stage to stage for one micro-batch of the clock.
    state = torch.empty(
        math.ceil(work.tokens * batches_as_one),
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
        passes=partial(TimedPasses, clock=clock, costs=Costs(**clock_costs), state=state),
        placement=replace(placement, device=META),
    )
    return time_update(engine, clock, clock_micro_batches)
