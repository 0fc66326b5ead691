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
    """Say what was found, one fact a line."""
    facts = _machine() if run is None else _run(Run.open(run))
    for name, value in facts.items():
        print(f"{name:<14}{value}")
    damaged = [value for value in facts.values() if str(value).startswith("damaged")]
    if json:
        print(jsonlib.dumps({"schema": "monograph.check/1", **facts}))
    return InputRefused.exit_code if damaged else 0


def _machine() -> dict[str, Any]:
    device, machine = default_device(), describe()
    rates = {
        name: f"{measured_matmul_flops(device, dtype) / 1e12:.3g} TFLOP/s measured"
        for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items()
        if name == "fp32" or machine.has_bf16
    }
    return {
        "machine": machine.summary,
        "versions": f"monograph {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "compiler": compiler_obstacle() or "found",
        **rates,
    }


def _run(folder: Run) -> dict[str, Any]:
    """Verify every checkpoint of the run, byte by byte."""
    found: dict[str, Any] = {}
    for path in sorted(folder.checkpoints.glob("step-*")) if folder.checkpoints.is_dir() else []:
        try:
            checkpointing.verify(path)
            found[path.name] = "sound"
        except checkpointing.CheckpointDamaged as error:
            found[path.name] = f"damaged: {error}"
    if "sound" not in found.values():
        raise NoValidCheckpoint(f"{folder.checkpoints}: no sound checkpoint: {found or 'none was saved'}")
    return found
