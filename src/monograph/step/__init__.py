"""Make a training step: add the gradients of micro-batches, then update."""

from monograph.step.clip import Clip, Update
from monograph.step.layout import Layout
from monograph.step.step import Step, accumulate, closed, update

__all__ = ["Clip", "Layout", "Step", "Update", "accumulate", "closed", "update"]
