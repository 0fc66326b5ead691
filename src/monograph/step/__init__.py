"""The training step: gradients of micro-batches, and the update."""

from monograph.step.clip import Clip, Update
from monograph.step.layout import Layout
from monograph.step.step import Step, accumulate, closed, update

__all__ = ["Clip", "Layout", "Step", "Update", "accumulate", "closed", "update"]
