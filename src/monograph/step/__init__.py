"""The training step: gradients of micro-batches, and the update."""

from monograph.step.clip import Clip
from monograph.step.result import Update
from monograph.step.step import Step, accumulate, closed, update

__all__ = ["Clip", "Step", "Update", "accumulate", "closed", "update"]
