"""`monograph check`: is this machine, or a run's files, in order?"""

from __future__ import annotations

import json as jsonlib
import platform
from typing import Any

import torch

from monograph import __version__, checkpointing
from monograph.device import compiler_obstacle, default_device, describe, measured_matmul_flops
from monograph.errors import InputRefused, NoValidCheckpoint
from monograph.run.folder import Run


def run(run: str | None, *, json: bool) -> int:
    """Say what was found, one fact a line; with `json`, the same as numbers whose names have their units."""
    found, lines, in_order = _machine() if run is None else _run(Run.open(run))
    for name, text in lines.items():
        print(f"{name:<14}{text}")
    if json:
        print(jsonlib.dumps({"schema": "monograph.check/1", **found}))
    return 0 if in_order else InputRefused.exit_code


def _machine() -> tuple[dict[str, Any], dict[str, str], bool]:
    device, machine, obstacle = default_device(), describe(), compiler_obstacle()
    rates = {
        name: measured_matmul_flops(device, dtype)
        for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items()
        if name == "fp32" or machine.has_bf16
    }
    versions = {"monograph": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    lines = {
        "machine": machine.summary,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "compiler": obstacle or "found",
        **{name: f"{rate / 1e12:.3g} TFLOP/s measured" for name, rate in rates.items()},
    }
    found = {
        "device": machine.name,
        "device_type": machine.type,
        "driver_version": machine.driver,
        "memory_bytes": machine.memory_bytes,
        "free_memory_bytes": machine.free_memory_bytes,
        "cores": machine.cores,
        "has_bf16": machine.has_bf16,
        "peak_flops_per_s": dict(machine.peak_flops),
        "measured_flops_per_s": rates,
        "bandwidth_bytes_per_s": machine.bandwidth_bytes_per_s,
        "compiler_obstacle": obstacle,
        **{f"{name.lower()}_version": version for name, version in versions.items()},
    }
    return found, lines, True


def _run(folder: Run) -> tuple[dict[str, Any], dict[str, str], bool]:
    """Verify every checkpoint of the run, byte by byte."""
    faults: dict[str, str | None] = {}
    for path in sorted(folder.checkpoints.glob("step-*")) if folder.checkpoints.is_dir() else []:
        try:
            checkpointing.verify(path)
            faults[path.name] = None
        except checkpointing.CheckpointDamaged as error:
            faults[path.name] = str(error)
    lines = {name: "sound" if fault is None else f"damaged: {fault}" for name, fault in faults.items()}
    if None not in faults.values():
        raise NoValidCheckpoint(f"{folder.checkpoints}: no sound checkpoint: {lines or 'none was saved'}")
    checkpoints = [{"name": name, "fault": fault} for name, fault in faults.items()]
    return {"run": str(folder.folder), "checkpoints": checkpoints}, lines, not any(faults.values())
