"""Where a model's weights live: on the device if any way fits there, else streamed to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from monograph.device import Device
from monograph.errors import OutOfDeviceMemory
from monograph.measure.calibration import Calibration
from monograph.planner.candidates import Asked
from monograph.planner.choose import Plan, budget, plan
from monograph.planner.limits import Limits
from monograph.planner.streaming import streamed


def plan_anywhere(
    asked: Asked,
    device: Device,
    peak_flops: Mapping[str, float],
    calibration: Calibration | None = None,
    memory: Literal["auto", "device", "stream"] = "auto",
    limits: Limits | None = None,
) -> Plan:
    """The fastest way that fits, with its weights on the device or streamed to it.

    Args:
        asked: what is to be trained.
        device: where.
        peak_flops: FLOP/s by precision.
        calibration: what earlier runs on the device took; streamed ones are not among them.
        memory: where weights may live; "auto": they are streamed only if nothing fits otherwise.
        limits: what there is to stream with; by default this machine's host and disk.

    Raises:
        UsageError: the device has no memory to give.
    """
    found = (
        Plan(device, budget(device), None, []) if memory == "stream" else plan(asked, device, peak_flops, calibration)
    )
    resident_only = asked.scopes == ("whole",) or asked.remats == ("offload",) or asked.lora is not None
    if memory == "device" or found.chosen or resident_only:
        return found
    try:
        ways = streamed(asked, device, limits or Limits.here(device, found.budget_bytes), peak_flops)
    except OutOfDeviceMemory as refused:
        return replace(found, not_streamed=str(refused))
    return replace(found, chosen=ways[0], candidates=[*ways, *found.candidates], calibrated=False)
