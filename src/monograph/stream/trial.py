"""The trial step of a streamed model: every stage once, there and back, and what its gradients were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from monograph.errors import InputRefused, MonographError
from monograph.graph.inspect import buffers_kept, running
from monograph.graph.trial import Trial, said
from monograph.optim import Plane
from monograph.stream.step import StreamedStep


def streamed_trial(step: StreamedStep, batch: Any) -> Trial:
    """Run a micro-batch through all stages and back, eagerly; weights and state stay as they are.

    Raises:
        InputRefused: a pass raised, or the loss or a gradient is not finite; the message names the module or parameter.
    """
    bad, missing, seen = list[str](), list[str](), list[str]()

    def observe(planes: Sequence[Plane]) -> None:
        for name, gradient in (view for plane in planes for view in plane.views(plane.grad)):
            seen.append(name)
            if not bool(gradient.isfinite().all()):
                bad.append(name)
            elif not bool(gradient.any()):
                missing.append(name)

    step.settle(batch)  # before modules are watched: it runs a twin of them
    with buffers_kept(step.model), running(step.model) as stack:
        try:
            step.accumulate([batch], observe)
        except MonographError:
            raise
        except Exception as error:
            where = stack[-1] if stack else type(step.model).__name__
            raise InputRefused(f"the trial step failed in {where}{said(error)}") from error
    count = float(step.count)
    mean = float(step.loss_sum) / (count or 1.0)
    step.discard()
    if not math.isfinite(mean):
        raise InputRefused(f"the loss is {mean}")
    if bad:
        raise InputRefused(f"the loss is {mean:.4g}, but the gradient of {bad[-1]} is not finite ({len(bad)} such)")
    return Trial(mean, count, len(seen) - len(missing), tuple(reversed(missing)))
