"""The engine whose weights, gradients and optimizer state all live on one device."""

from collections.abc import Mapping
from typing import final

from torch import nn

from monograph.engine import Engine
from monograph.graph.precision import Precision
from monograph.graph.remat import Policy
from monograph.loss import Loss, token_loss
from monograph.optim import Optimizer
from monograph.schedule import Schedule
from monograph.step import Clip, Step
from monograph.step.on_device import OnDevice
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
        rounds_in_update: bool = False,
        block_formats: Mapping[str, str] | None = None,
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
            rounds_in_update: on a GPU in 16 bits, whether an update rounds the weights that it writes.
                Otherwise each window begins with a pass over all weights. With True, do not write
                weights through `.data`: the next window would not see it.
            block_formats: the parameters that are rounded to a format of a GGUF file, by name.
        """
        step = Step(
            model,
            loss=loss,
            optim=optim,
            schedule=schedule,
            clip=clip,
            precision=precision,
            remat=remat,
            parameters=OnDevice(rounds_in_update=rounds_in_update),
            block_formats=block_formats,
        )
        super().__init__(lambda: step, Retries(micro_batch))
