"""Train with weights that live on the host and come to the device stage by stage."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from monograph.engine import Engine
from monograph.errors import InputRefused, MonographError, UsageError
from monograph.graph import capture as graph
from monograph.graph.compilable import Scope
from monograph.graph.inspect import buffers_kept, running_modules
from monograph.graph.lora import adapted_layers
from monograph.graph.precision import Precision
from monograph.graph.remat import Policy
from monograph.graph.trial import Trial, place_and_message
from monograph.loss import Batch, Loss, token_loss
from monograph.optim import AdamW, Optimizer, Plane
from monograph.schedule import Schedule
from monograph.step import Clip, Step, Update
from monograph.step.retries import Retries
from monograph.step.step import discard_on_failure, sum_of_one_rank
from monograph.stream.lanes import Lanes
from monograph.stream.parameters import InStages
from monograph.stream.placement import Placement
from monograph.stream.slots import Passes
from monograph.stream.store import adapters_on_device


class Streamed(Engine):
    """Trains a module whose weights, gradients and optimizer state need not fit on the device, or
    adapters of one.

    The module runs stage by stage, and all micro-batches of a window pass one stage before the next
    stage (`monograph.stream.walk`). It must have `begin`, `end`, `parts_before` and `parts_after`,
    like `monograph.Llama`. Losses, norms, weights and moments have the same bits as those of
    `Resident` with the same arguments; only weights that two stages share (tied embeddings) may
    differ in the last bit.

    Attributes:
        placement: where buffers live.
        store: the stages, whose planes are the step's.
        walk: the walk of micro-batches through the stages.
    """

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
        placement: Placement | None = None,
        lanes: Lanes | None = None,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
        retries: Retries | None = None,
        passes: Callable[[Step], Passes] = Passes,
    ):
        """Move the module's parameters to their homes.

        Args:
            model: a module on the host, with its weights loaded.
            loss: `loss(model, batch) -> (sum, count)`; it calls the model once.
            optim: the optimizer.
            schedule: factor of the learning rate for each update's index.
            clip: largest gradient norm, over all stages.
            precision: the compute dtype.
            remat: what blocks recompute within a stage. Between stages only the stages' inputs are
                kept, whatever `remat` is.
            micro_batch: rows per micro-batch; None: the whole window at once.
            placement: where buffers live and when weights are updated; by default all buffers are
                on the host, except what adapters need, and `when` is "sweep".
            lanes: the lanes that copy and compute; None: new lanes of the device.
            sum_over_ranks: sums a tensor over all ranks; None: there is one rank.
            retries: the size of micro-batches, and what changes when memory runs out; replaces
                `micro_batch`.
            passes: makes the object that computes a step's passes and updates.
        """
        if placement is None:
            placement = Placement()
            if adapted_layers(model):
                placement = adapters_on_device(model, placement)
        self.placement = placement
        # Arguments are checked before anything is moved. A later error would leave half of the model
        # in another place.
        _require_streamable(model, self.placement, clip, optim or AdamW())
        parameters = InStages(self.placement, lanes, sum_over_ranks, passes)
        step = Step(
            model,
            loss=loss,
            optim=optim,
            schedule=schedule,
            clip=clip,
            precision=precision,
            remat=remat,
            sum_over_ranks=sum_over_ranks or sum_of_one_rank,
            parameters=parameters,
        )
        self.store = parameters.store
        self.walk = parameters.walk
        super().__init__(lambda: step, retries or Retries(micro_batch))

    def accumulate(self, window: Batch) -> None:
        """Add the window's exact gradient.

        Raises:
            OutOfDeviceMemory: a micro-batch of one row does not fit, or memory ran out after some
                weights were updated.
        """
        # The first window has already changed the weights, so a second window would compute the
        # gradient of different weights.
        if self.placement.when == "backward" and not self.walk.gradient_is_empty:
            raise UsageError(
                "weights that are updated during the backward pass take one window an update"
            )
        if self.walk.sum_over_ranks and not self.walk.gradient_is_empty:
            # The first window's gradient, already a sum over ranks, would be summed again.
            raise UsageError("several ranks take one window an update")
        super().accumulate(window)

    def trial(self, window: Batch) -> Trial:
        """Run the first micro-batch forward and backward, eagerly; weights and state do not change.

        Raises:
            InputRefused: the forward pass raised, or the loss or a gradient is not finite.
        """
        batch = next(self._micro_batches(window))
        return self._with_retries(window, lambda: self._try_stages(batch))

    def capture(
        self, window: Batch, backend: graph.Backend = "inductor", scope: Scope = "blocks"
    ) -> str | None:
        """Compile one block for all blocks, the head and the updates; `scope` is not used."""
        # The caller waits for the host's thread, because torch refuses to call a compiled function in
        # one thread while another thread traces.
        self.walk.lanes.host_blocks = True
        try:
            return super().capture(window, backend, "blocks")
        finally:
            self.walk.lanes.host_blocks = False

    def update(self) -> Update:
        """Clip and apply the accumulated gradient."""
        try:
            return super().update()
        finally:
            # `InStages.begin_again` may have set `host_blocks` for this window.
            self.walk.lanes.host_blocks = False

    def ledger(self) -> dict[str, dict[str, int]]:
        """Return the bytes of buffers by home, and the bytes of the device's slots and staging."""
        homes = {str(home): size for home, size in self.store.bytes_at().items()}
        return {"homes": homes, "device": {"slots and staging buffers": self.walk.device_bytes}}

    # ── the trial ───────────────────────────────────────────────────────────────────────────────

    def _try_stages(self, batch: Batch) -> Trial:
        """Run a micro-batch through all stages and back, eagerly, and check each stage's gradients.

        Raises:
            InputRefused: a pass raised, or the loss or a gradient is not finite; the message names
                the module or parameter.
        """
        step = self.step
        # Names of parameters, in the order of the backward pass, from the last stage to the first.
        names = list[str]()
        names_not_finite = list[str]()
        names_without_gradient = list[str]()

        def observe(planes: Sequence[Plane]) -> None:
            named_gradients = (view for plane in planes for view in plane.views(plane.grad))
            for name, gradient in named_gradients:
                names.append(name)
                if not bool(gradient.isfinite().all()):
                    names_not_finite.append(name)
                elif not bool(gradient.any()):
                    names_without_gradient.append(name)

        # `choose_kept_results` runs a copy of the modules, so it comes before the modules are watched.
        step.choose_kept_results(batch)
        with buffers_kept(step.model), running_modules(step.model) as stack:
            try:
                with discard_on_failure(step):
                    step.count_window([batch])
                    self.walk.accumulate([batch], observe)
            except MonographError:
                raise
            except Exception as error:
                where = stack[-1] if stack else type(step.model).__name__
                raise InputRefused(
                    f"the trial step failed in {where}{place_and_message(error)}"
                ) from error
        count = float(step.count)
        # Without a target, the count is 0.
        mean = float(step.loss_sum) / (count or 1.0)
        step.discard()
        if not math.isfinite(mean):
            raise InputRefused(f"the loss is {mean}")
        if names_not_finite:
            # The last name is from the stage that is closest to the model's input.
            raise InputRefused(
                f"the loss is {mean:.4g}, but the gradient of {names_not_finite[-1]} is not finite "
                f"({len(names_not_finite)} such)"
            )
        gradient_count = len(names) - len(names_without_gradient)
        return Trial(mean, count, gradient_count, tuple(reversed(names_without_gradient)))


def _require_streamable(
    model: nn.Module, placement: Placement, clip: float | Clip | None, optim: Optimizer
) -> None:
    """Refuse a model or arguments that cannot be streamed."""
    if not isinstance(placement, Placement):
        raise UsageError(f"placement = {placement!r}: expected a monograph.Placement(...)")
    if placement.when == "backward" and clip is not None:
        raise UsageError(
            "weights that are updated during the backward pass cannot be clipped by the whole gradient's norm: "
            'clip=None, or when="next forward", which hides the update too'
        )
    if not optim.master_weights:
        raise UsageError(
            "memory = stream keeps full-precision weights: master_weights = False is for memory = device"
        )
