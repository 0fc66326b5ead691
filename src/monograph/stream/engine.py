"""Train with weights that live on the host and come to the device stage by stage."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from monograph.engine import Engine, out_of_memory
from monograph.errors import InputRefused, MonographError, OutOfDeviceMemory, UsageError
from monograph.graph import capture as graph
from monograph.graph.inspect import buffers_kept, running
from monograph.graph.lora import adapters, kept_state
from monograph.graph.precision import Precision
from monograph.graph.remat import Policy
from monograph.graph.trial import Trial, said
from monograph.loss import Batch, Loss, token_loss
from monograph.optim import AdamW, Optimizer, Plane
from monograph.schedule import Schedule
from monograph.step import Clip, Layout, Step, Update
from monograph.step.layout import fuse, fuses, total
from monograph.step.step import all_or_nothing
from monograph.stream.chunked_update import HALF_DONE
from monograph.stream.lanes import Lanes, executor
from monograph.stream.placement import Placement
from monograph.stream.store import stored
from monograph.stream.walk import Walk


class Streamed(Engine):
    """An engine for a module whose weights, gradients and optimizer state need not fit on the device, to the same bits.

    The module is run stage by stage, all micro-batches of a window through one stage before the next: see
    `monograph.stream.walk`. It needs `begin`, `end`, `parts_before` and `parts_after`, as `monograph.Llama` has them.
    Losses, norms, weights and moments are those of `Resident` with the same arguments; weights that two stages share
    (tied embeddings) may differ in their last bit.

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
    ):
        """Move the module's parameters to their homes.

        Args:
            model: a module on the host, with its weights loaded.
            loss: `loss(model, batch) -> (sum, count)`; it calls the model once.
            optim: the optimizer.
            schedule: factor of the learning rate for each update's index.
            clip: largest gradient norm, over all stages.
            precision: the compute dtype.
            remat: what blocks recompute within a stage; between stages only their inputs are kept in any case.
            micro_batch: rows per micro-batch; None: the whole window at once.
            placement: where buffers live and when weights are updated; by default all on the host, and in a sweep.
            lanes: the lanes that copy and compute; by default the device's own.
            sum_over_ranks: sums a tensor over the processes that train together, if there are several.
        """
        self.placement = placement or Placement()
        # This comes before anything is moved, as a refusal later would leave half of the model elsewhere.
        _require_streamable(model, self.placement, clip, optim or AdamW())
        layout = Layout(
            device=self.placement.device,
            planes=self._stored,
            captured=self._captured_functions,
            accumulate=lambda step, batches: self._walk_through(batches),
            complete=self._complete,
            discard=lambda step: self.walk.discard(),
            score=lambda step, batches: self.walk.evaluate(list(batches)),
            at_rest=self._at_rest,
            weights=self._weights,
            take_weights=self._take_weights,
            assembled=self._assembled,
        )
        step = Step(
            model, loss=loss, optim=optim, schedule=schedule, clip=clip, precision=precision, remat=remat, layout=layout
        )
        step.sum_over_ranks = sum_over_ranks or step.sum_over_ranks
        step.recorder = None  # copies differ from update to update, and a replay would repeat those of one
        self.walk = Walk(step, self.store, lanes or Lanes(executor(self.placement.device)), self.placement)
        step.apply = self.walk.update
        self.walk.sum_over_ranks = sum_over_ranks
        super().__init__(lambda: step, micro_batch)

    def accumulate(self, window: Batch) -> None:
        """Add the window's exact gradient.

        Raises:
            OutOfDeviceMemory: a micro-batch of one row does not fit, or memory ran out after some weights were updated.
        """
        # The first window's gradient has changed the weights already, so a second one would be of other weights.
        if self.placement.when == "backward" and not self.walk.fresh:
            raise UsageError("weights that are updated during the backward pass take one window an update")
        super().accumulate(window)

    def trial(self, window: Batch) -> Trial:
        """Run the first micro-batch forward and backward, eagerly; weights and state stay as they are.

        Raises:
            InputRefused: the forward pass raised, or the loss or a gradient is not finite.
        """
        batch = next(self._micro_batches(window))
        return self._fitting(window, lambda: self._tried(batch))

    def capture(self, window: Batch, backend: graph.Backend = "inductor", scope: graph.Scope = "blocks") -> str | None:
        """Compile one block for all blocks, the head and the updates; the scope is always "blocks"."""
        # torch refuses to call a compiled function in one thread while another one traces.
        self.walk.lanes.one_by_one = True
        try:
            return super().capture(window, backend, "blocks")
        finally:
            self.walk.lanes.one_by_one = False

    def _step_down(self, window: Batch, message: str) -> None:
        super()._step_down(window, message)
        self.walk.lanes.one_by_one = self._captured is not None  # what follows is compiled anew

    def update(self) -> Update:
        """Clip and apply the accumulated gradient."""
        try:
            return super().update()
        finally:
            self.walk.lanes.one_by_one = False

    def ledger(self) -> dict[str, dict[str, int]]:
        """Return the bytes of buffers by home, and those of the device's slots and staging buffers."""
        homes = {str(home): size for home, size in self.store.bytes_at().items()}
        return {"homes": homes, "device": {"slots and staging buffers": self.walk.device_bytes}}

    # ── the layout ──────────────────────────────────────────────────────────────────────────────

    def _stored(self, step: Step) -> list[Plane]:
        """Move the planes of all stages to their homes."""
        if fuses(step, self.placement.device.type == "cuda"):
            fuse(step)
        kinds = step.optim.kinds(step.model)
        rounds = step.precision.rounds
        self.store = stored(step.model, kinds, step.optim, rounds=rounds, placement=self.placement)
        return [entry.plane for entry in self.store.stored]

    def _captured_functions(self, step: Step, scope: str) -> list[tuple[Any, str]]:
        updates = self.walk.updates
        host = [(updates.host_update, name) for name in ("update_part", "join", "split")]
        return [(step, "squares"), (updates, "update_part"), *host]

    def _walk_through(self, batches: Sequence[Any]) -> None:
        if self.placement.when == "backward":
            self.walk.updates.flush()
            self.step.set_lr()  # for the update that is made during the backward pass
        try:
            self.walk.accumulate(batches)
        except RuntimeError as error:
            if self.walk.updates.repeatable or not out_of_memory(error):
                raise
            self.walk.updates.failed = OutOfDeviceMemory(
                f"a backward pass that updates weights does not fit the device's memory: {HALF_DONE}"
            )
            raise self.walk.updates.failed from error

    def _complete(self, step: Step) -> None:
        self.walk.updates.flush()  # a waiting update is made with its own learning rate
        if self.walk.sum_over_ranks:
            self.walk.lanes.finish()  # all ranks sum in one order
            total(step)

    def _at_rest(self, step: Step, written: bool) -> None:
        """Finish every update and its copies; if weights at home may be `written`, fetch them anew afterwards."""
        self.walk.updates.flush()
        self.walk.lanes.finish()
        for stage in self.store.stages if written else ():
            stage.version += 1

    def _weights(self, step: Step) -> dict[str, Tensor]:
        """Return the model's tensors; those of split weights are copies in fp32."""
        masters = [(entry, entry.master()) for entry in self.store.stored if entry.splits]
        return kept_state(step.model) | {name: view for own, whole in masters for name, view in own.plane.views(whole)}

    def _take_weights(self, step: Step, weights: Mapping[str, Tensor]) -> None:
        for entry in self.store.stored:
            if entry.splits:
                # Split weights have no fp32 memory to write to, so they are joined, changed, and split again.
                master = entry.master()
                for name, view in entry.plane.views(master):
                    view.copy_(weights[name])
                entry.set_master(master)

    @contextmanager
    def _assembled(self, step: Step) -> Iterator[nn.Module]:
        """In the block the module can be called as before it was stored: on the host, with its weights in fp32."""
        self._at_rest(step, True)
        # Split weights are bf16 at home, so a call would use the rounded weights alone; others may be on the device.
        for entry in self.store.stored:
            averaged = entry.splits and step.holds_average
            entry.plane.hold((entry.plane.state["ema"] if averaged else entry.master()).cpu())
        try:
            yield step.model
        finally:
            for entry in self.store.stored:
                entry.plane.hold(entry.plane.param)

    # ── the trial ───────────────────────────────────────────────────────────────────────────────

    def _tried(self, batch: Any) -> Trial:
        """Run a micro-batch through all stages and back, eagerly, and check each stage's gradients.

        Raises:
            InputRefused: a pass raised, or the loss or a gradient is not finite; the message names the module or
                parameter.
        """
        step = self.step
        bad = list[str]()
        missing = list[str]()
        seen = list[str]()

        def observe(planes: Sequence[Plane]) -> None:
            for name, gradient in (view for plane in planes for view in plane.views(plane.grad)):
                seen.append(name)
                if not bool(gradient.isfinite().all()):
                    bad.append(name)
                elif not bool(gradient.any()):
                    missing.append(name)

        step.choose_kept(batch)  # it runs a copy of the modules, so it comes before they are watched
        with buffers_kept(step.model), running(step.model) as stack:
            try:
                with all_or_nothing(step):
                    step.count_window([batch])
                    self.walk.accumulate([batch], observe)
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


def _require_streamable(model: nn.Module, placement: Placement, clip: float | Clip | None, optim: Optimizer) -> None:
    """Refuse a model or arguments that cannot be streamed."""
    if not isinstance(placement, Placement):
        raise UsageError(f"placement = {placement!r}: expected a monograph.Placement(...)")
    if placement.when == "backward" and clip is not None:
        raise UsageError(
            "weights that are updated during the backward pass cannot be clipped by the whole gradient's norm: "
            'clip=None, or when="next forward", which hides the update too'
        )
    if not optim.master_weights:
        raise UsageError("memory = stream keeps full-precision weights: master_weights = False is for memory = device")
    if adapters(model):
        raise UsageError("memory = stream fetches weights that are trained, not frozen ones: take memory = device")
