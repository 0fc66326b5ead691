"""The engine whose weights, gradients and optimizer state all live on one device."""

from typing import final

from torch import nn

from monograph.engine import Engine
from monograph.graph.precision import Precision
from monograph.graph.remat import Policy
from monograph.loss import Loss, token_loss
from monograph.optim import Optimizer
from monograph.schedule import Schedule
from monograph.step import Clip, Step
from monograph.step.retries import Retries


@final
class Resident(Engine):
    """Trains a module whose weights, gradients and optimizer state live on one device; see `Engine`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss = token_loss,
        optim: Optimizer | None = None,
        schedule: Schedule | None = None,
        clip: float | Clip | None = None,
        precision: Precision | None = None,
        remat: Policy | None = None,
        micro_batch: int | None = None,
    ):
        """Build the step on the module's device; `monograph.Step` describes the arguments in full.

        Args:
            model: any module, already on its device with its weights loaded.
            loss: `loss(model, batch) -> (sum, count)`.
            optim: the optimizer.
            schedule: factor of the learning rate by update index.
            clip: largest gradient norm; None: no clipping.
            precision: the compute dtype.
            remat: which activations the backward pass recomputes.
            micro_batch: rows per micro-batch; None: the whole window at once.
        """
        step = Step(
            model,
            loss=loss,
            optim=optim,
            schedule=schedule,
            clip=clip,
            precision=precision,
            remat=remat,
        )
        super().__init__(lambda: step, Retries(micro_batch))
