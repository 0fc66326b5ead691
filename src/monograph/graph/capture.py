"""Capture: replace an object's functions by compiled ones, in place; modules, names and checkpoints stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from monograph import compat

Backend = Literal["inductor", "aot_eager", "eager"]
# What an object may have for `capture` to replace: the training step's three functions.
CAPTURED = ("forward", "apply", "evaluate")
T = TypeVar("T")


def capture(step: T, backend: Backend = "inductor") -> T:
    """Compile a step's `forward`, `apply` and `evaluate` in place: each one full graph with static shapes.

    The module itself is not wrapped, so its state dict keeps its names. Compilation happens at the first call of each
    function; load
    weights and run `trial` before.

    Args:
        step: an object with the functions named above (a `monograph.Step`).
        backend: "inductor", or "aot_eager" and "eager" which trace alike without generating code.

    Returns:
        The same object.

    Raises:
        At the first call: torch's own error when a function cannot be captured as one graph; `reason` makes one line
        of it.
    """
    for name in CAPTURED:
        setattr(step, name, compiled(getattr(step, name), backend))
    return step


def compiled(function: Callable[..., Any], backend: Backend = "inductor") -> Callable[..., Any]:
    """`torch.compile` as this project uses it: one full graph, static shapes."""
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)


def reason(error: BaseException) -> str:
    """One line saying why a capture failed and how to mend it, from torch's error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    complaint = next((line for line in lines if ": error:" in line or "cannot find" in line), None)
    what = complaint or next((line for line in lines if not line.endswith("raised:")), type(error).__name__)
    where = next((line for line in reversed(lines) if line.startswith("File ") and "/torch/" not in line), "")
    hint = next((line.removeprefix("Hint:").strip() for line in lines if line.startswith("Hint:")), "")
    return "; ".join(part for part in (what, where, hint) if part)


def is_capture_error(error: BaseException) -> bool:
    """Whether torch could not trace or compile a function, as opposed to the function failing."""
    return compat.is_capture_error(error)
