"""Capture: replace an object's functions by compiled ones, in place; modules, names and checkpoints stay the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from monograph import compat
from monograph.errors import UsageError
from monograph.graph import matmul

Backend = Literal["inductor", "aot_eager", "eager"]
# What an object may have for `capture` to replace: the training step's three functions.
CAPTURED = ("forward", "apply", "evaluate")
T = TypeVar("T")


def capture(step: T, backend: Backend = "inductor") -> T:
    """Compile a step's `forward`, `apply` and `evaluate` in place: each one full graph with static shapes.

    The module itself is not wrapped, so its state dict keeps its names. Compilation happens at the first call of each
    function; load weights and run `trial` before.

    Args:
        step: an object with the functions named above (a `monograph.Step`).
        backend: "inductor", or "aot_eager" and "eager" which trace alike without generating code.

    Returns:
        The same object.

    Raises:
        CaptureFailed: at the first call of a function that cannot be captured as one graph.
    """
    for name in CAPTURED:
        setattr(step, name, compiled(getattr(step, name), backend))
    return step


class CaptureFailed(UsageError):
    """A function cannot be captured as one graph; the message is `reason`'s line."""


def compiled(function: Callable[..., Any], backend: Backend = "inductor") -> Callable[..., Any]:
    """`torch.compile` as this project uses it: one full graph, static shapes, and one line where it cannot.

    Raises:
        CaptureFailed: at a call, torch could not trace or compile the function.
    """
    compat.cache_custom_functions()
    options = matmul.passes() if backend == "inductor" else None
    graph = torch.compile(function, fullgraph=True, dynamic=False, backend=backend, options=options)

    @functools.wraps(function)
    def captured(*arguments: Any) -> Any:
        try:
            return graph(*arguments)
        except Exception as error:
            if not compat.is_capture_error(error):
                raise
            failure = CaptureFailed(reason(error))
        # Outside the except block: torch's own trace, dozens of lines, says no more (TORCH_LOGS="+dynamo" does).
        raise failure

    return captured


def reason(error: BaseException) -> str:
    """One line saying why a capture failed and how to mend it, from torch's error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if raised := next((line for line in lines if "raised exception" in line), None):
        return raised.partition("raised exception ")[2]
    complaint = next((line for line in lines if ": error:" in line or "cannot find" in line), None)
    what = complaint or next((line for line in lines if not line.endswith("raised:")), type(error).__name__)
    where = next((line for line in reversed(lines) if line.startswith("File ") and "/torch/" not in line), "")
    detail = next((line.partition(": ")[2] for line in lines if line.startswith("Explanation:")), "")
    hint = next((line.removeprefix("Hint:").strip() for line in lines if line.startswith("Hint:")), "")
    return "; ".join(part for part in (what, where, detail or hint) if part)
