"""Make a training step: add the gradients of micro-batches, then update."""

from monograph.step.clip import Clip, Update
from monograph.step.on_device import OnDevice
from monograph.step.parameters import Parameters
from monograph.step.step import Step, accumulate, finish_update, prepared_loss, update

__all__ = [
    "Clip",
    "OnDevice",
    "Parameters",
    "Step",
    "Update",
    "accumulate",
    "finish_update",
    "prepared_loss",
    "update",
]
