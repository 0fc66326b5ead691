"""The engine whose weights live on the host, and come to the device stage by stage."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor, nn

from monograph.errors import OutOfDeviceMemory
from monograph.graph import capture as graph
from monograph.graph.precision import Precision
from monograph.graph.remat import Policy
from monograph.graph.trial import Trial
from monograph.loop import EngineState
from monograph.loss import Batch, Loss, token_loss
from monograph.optim import Optimizer
from monograph.resident import Resident, out_of_memory
from monograph.schedule import Schedule
from monograph.step import Clip
from monograph.stream.lanes import Lanes
from monograph.stream.placement import Placement
from monograph.stream.renewal import HALF_DONE
from monograph.stream.step import StreamedStep
from monograph.stream.store import Stored
from monograph.stream.trial import streamed_trial


class Streamed(Resident):
    """Trains a module whose weights, gradients and optimizer state need not fit on the device, to the same bits.

    The module is run stage by stage, all micro-batches of a window through one stage before the next: see
    `monograph.stream.walk`. It needs `begin`, `end`, `parts_before` and `parts_after`, as `monograph.Llama` has them.
    Losses, norms, weights and moments are those of `Resident` with the same arguments; weights that two stages share
    (tied embeddings) may differ in their last bit.
    """

    step: StreamedStep

    def __init__(  # noqa: PLR0913 - those of Resident, and two
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
        placement: Placement | None = None,
        lanes: Lanes | None = None,
    ):
        """Move the module's parameters to where they will live.

        Args:
            model: on the host, with its weights loaded.
            loss: `loss(model, batch) -> (sum, count)`; it calls the model once.
            optim: the optimizer.
            schedule: factor of the learning rate by update index.
            clip: largest gradient norm, over all stages.
            precision: the compute dtype.
            remat: what blocks compute again inside of a stage, whose input is all that is kept in any case.
            micro_batch: rows per micro-batch; None: the whole window at once.
            placement: where buffers live and when weights are updated; all on the host by default, in a sweep.
            lanes: what copies and computes.
        """
        self.step = StreamedStep(
            model, loss=loss, optim=optim, schedule=schedule, clip=clip, precision=precision, remat=remat,
            placement=placement, lanes=lanes,
        )  # fmt: skip
        self._hold(micro_batch)

    # ── what is done stage by stage ─────────────────────────────────────────────────────────────

    def accumulate(self, window: Batch) -> None:
        """Add the window's exact gradient.

        Raises:
            OutOfDeviceMemory: a micro-batch of one row does not fit, or one when some weights were updated already.
        """

        def attempt() -> None:
            try:
                self.step.accumulate(list(self._micro_batches(window)))
            except RuntimeError as error:
                if self.step.walk.updates.repeatable or not out_of_memory(error):
                    raise
                self.step.walk.updates.failed = OutOfDeviceMemory(
                    f"a backward pass that updates weights does not fit the device's memory: {HALF_DONE}"
                )
                raise self.step.walk.updates.failed from error

        self._fitting(window, attempt)

    @property
    def model(self) -> nn.Module:
        """The original module, its parameters at home and up to date; of split weights they are the bf16 roundings."""
        self.step.at_home()
        return self.step.model

    def rehearse(self, window: Batch) -> None:
        """See `Resident.rehearse`."""
        self.step.loss_sum.fill_(math.nan)  # what is updated in the backward pass is then refused
        super().rehearse(window)
        self.step.at_home()

    def trial(self, window: Batch) -> Trial:
        """One eager pass of the first micro-batch, there and back; weights and state stay as they are.

        Raises:
            InputRefused: the forward pass raised, or the loss or a gradient is not finite.
        """
        batch = next(self._micro_batches(window))
        return self._fitting(window, lambda: streamed_trial(self.step, batch))

    def _evaluated(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        return self.step.walk.evaluate(list(self._micro_batches(batch)))

    def capture(self, window: Batch, backend: graph.Backend = "inductor", scope: graph.Scope = "blocks") -> str | None:
        """Compile one block for all of them, the head and the updates: a stage is never more than its blocks."""
        return super().capture(window, backend, "blocks")

    def state(self) -> EngineState:
        """Model, optimizer buffers by parameter name, counters; of split weights the tensors are copies."""
        return self._state()[0]

    def load_state(self, state: EngineState) -> None:
        """Take over a state, of this engine or of another with the same model and optimizer.

        Raises:
            InputRefused: a tensor or counter is missing, or a tensor is left over or has another shape.
        """
        own, masters = self._state()
        self._copy_state(own, state)
        for stored, master in masters:
            stored.set_master(master)
        self.step.changed_at_home()

    def ledger(self) -> dict[str, dict[str, int]]:
        """Bytes at home by tier, and in the device's slots and desks."""
        homes = {str(home): size for home, size in self.step.store.bytes_at().items()}
        return {"homes": homes, "device": {"slots and desks": self.step.walk.device_bytes}}

    def _state(self) -> tuple[EngineState, list[tuple[Stored, Tensor]]]:
        self.step.changed_at_home()
        found = super().state()
        masters = [(each, each.master()) for each in self.step.store.stored if each.splits]
        views = {name: view for each, master in masters for name, view in each.plane.views(master)}
        return replace(found, model={**found.model, **views}), masters
