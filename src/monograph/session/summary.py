"""A run's summary: found again when the run has ended, and as JSON."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from monograph.errors import InputRefused
from monograph.run.folder import Run
from monograph.storage.reading import is_folder


def finished(run: Run) -> dict[str, Any] | None:
    """The summary of a run that came to its end, None of one that did not or that lost its last checkpoint since."""
    last: dict[str, Any] = {}
    with suppress(InputRefused):  # a damaged row: where a checkpoint is taken up, what stays is verified
        last = next(reversed(run.rows()), {})
    summary: dict[str, Any] | None = last.get("summary")
    if summary and not is_folder(run.checkpoints / f"step-{summary['update']:08d}"):
        return None
    return summary


def standard_json(values: dict[str, Any]) -> dict[str, Any]:
    """The values with null for NaN and infinities, which JSON does not have."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
