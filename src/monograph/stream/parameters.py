"""Keep a step's parameters on the host, in stages that come to the device one after another.

A weight of a linear layer may be *split*: its fp32 number is stored as two halves of 16 bits. The
high half is the weight rounded to bf16, with which passes compute (`monograph.stream.store`).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from monograph.errors import OutOfDeviceMemory
from monograph.graph import siblings
from monograph.graph.compilable import Compilable, Scope
from monograph.graph.lora import checkpoint_state
from monograph.ops.fused_gradients import fused_gradients
from monograph.optim import Plane
from monograph.step import Parameters, Step
from monograph.step.on_device import can_fuse_gradients
from monograph.step.parameters import Sums
from monograph.step.retries import out_of_memory
from monograph.stream.chunked_update import ADVICE_AFTER_PARTIAL_UPDATE
from monograph.stream.lanes import Lanes, executor
from monograph.stream.placement import Placement
from monograph.stream.slots import Passes
from monograph.stream.store import Store, store_in_stages
from monograph.stream.walk import Walk


class InStages(Parameters):
    """The parameters of a module that is run stage by stage; see `monograph.stream.walk`.

    Attributes:
        placement: where buffers live.
        store: the stages, whose planes (flat buffers of parameters) are the step's.
    """

    staged = True
    # A recorded micro-step is not replayed, because a replay would repeat the copies of one update, and
    # copies differ from update to update.
    replays = False

    store: Store

    def __init__(
        self,
        placement: Placement,
        lanes: Lanes | None,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
        passes: Callable[[Step], Passes] = Passes,
        fused: bool | None = None,
    ):
        """Set where buffers will live; `place` moves them.

        Args:
            placement: where buffers live and when weights are updated.
            lanes: the lanes that copy and compute; None: new lanes of the device.
            sum_over_ranks: sums a tensor over all ranks; None: there is one rank.
            passes: makes the object that computes a step's passes and updates.
            fused: whether matrix products add gradients to the planes; None: only if that saves
                work.
        """
        super().__init__()
        self.placement = placement
        self.device = placement.device
        self._lanes = lanes
        self._sum_over_ranks = sum_over_ranks
        self._passes = passes
        self._fused_argument = fused
        # Whether matrix products add gradients to the planes; `place` decides.
        self._fuses_gradients = False

    @functools.cached_property
    def walk(self) -> Walk:
        """Return the walk through the stages; its memory is allocated at first use."""
        lanes = self._lanes or Lanes(executor(self.placement.device))
        return Walk(
            self.step, self.store, lanes, self.placement, self._sum_over_ranks, self._passes
        )

    def place(self, step: Step) -> list[Plane]:
        """Move the planes of all stages to their homes."""
        self.step = step
        if self._fused_argument is None:
            self._fuses_gradients = can_fuse_gradients(step, self.placement.device.type == "cuda")
        else:
            self._fuses_gradients = self._fused_argument
        if self._fuses_gradients:
            siblings.fuse_known(step.model)
        kinds = step.optim.kinds(step.model)
        rounds_weights = step.precision.rounds_weights
        self.store = store_in_stages(
            step.model, kinds, step.optim, rounds_weights=rounds_weights, placement=self.placement
        )
        return [entry.plane for entry in self.store.stored_planes]

    def captured(self, scope: Scope) -> list[Compilable[..., Any]]:
        """Return the functions that update a part of a plane, on the device and on the host."""
        updates = self.walk.updates
        host = updates.host_update
        return [self.step.squares, updates.update_part, host.update_part, host.join, host.split]

    def fused_gradients(self) -> AbstractContextManager[None]:
        """Make matrix products within the `with` block add gradients to the planes.

        If `place` has decided against it, the block changes nothing.
        """
        return fused_gradients() if self._fuses_gradients else nullcontext()

    def accumulate(self, batches: Sequence[object]) -> None:
        """Walk through the stages with all micro-batches."""
        if self.placement.when == "backward":
            self.walk.updates.flush()
            self.step.set_lr()  # for the update that is made during the backward pass
        try:
            self.walk.accumulate(batches)
        except RuntimeError as error:
            # While no weight is changed yet, the engine can try again with smaller micro-batches.
            if self.walk.updates.repeatable or not out_of_memory(error):
                raise
            self.walk.updates.failed = OutOfDeviceMemory(
                "a backward pass that updates weights does not fit the device's memory: "
                f"{ADVICE_AFTER_PARTIAL_UPDATE}"
            )
            raise self.walk.updates.failed from error

    def score(self, batches: Iterable[object]) -> list[Sums]:
        """Return the sums of each micro-batch, without gradients."""
        return self.walk.evaluate(list(batches))

    def discard(self) -> None:
        """Discard the gradient accumulated since the last update."""
        self.walk.discard()

    def begin_again(self) -> None:
        """Make the caller wait for each piece of the host's work, if the step is captured.

        The repeated pass compiles its graphs again. Meanwhile the host's thread must be idle,
        because torch refuses to call a compiled function in one thread while another thread traces.
        """
        self.walk.lanes.host_blocks = self.step.scope != "none"

    def complete(self) -> None:
        """Finish the previous update, and sum the window's loss and count over all ranks."""
        self.walk.updates.flush()  # before `set_lr` overwrites that update's learning rate
        if self._sum_over_ranks:
            # Without queued work all ranks do their sums in the same order.
            self.walk.lanes.finish()
            self.step.sum_window_over_ranks()

    def apply(self) -> Tensor:
        """Decide on the update, and make it now or later as `placement.when` says.

        Returns:
            The gradient's norm before clipping.
        """
        return self.walk.update()

    def wait_for_planes(self, *, to_write: bool) -> None:
        """Finish all updates and their copies.

        Args:
            to_write: whether the caller may write to the weights at home. Then their copies in slots,
                the device memory for stages, are outdated, and the weights are fetched again.
        """
        self.walk.updates.flush()
        self.walk.lanes.finish()
        if to_write:
            for stage in self.store.stages:
                stage.version += 1
                stage.frozen.version += 1

    def weights(self) -> dict[str, Tensor]:
        """Return the model's tensors, by name; split weights are copies in fp32."""
        joined_weights = dict[str, Tensor]()
        for entry in self.store.stored_planes:
            if entry.splits:
                joined_weights |= dict(entry.plane.views(entry.master()))
        return checkpoint_state(self.step.model) | joined_weights

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Store split weights again. The caller has changed copies of them, which `weights` returned."""
        for entry in self.store.stored_planes:
            if entry.splits:
                master = entry.master()
                for name, view in entry.plane.views(master):
                    view.copy_(weights[name])
                entry.set_master(master)

    @contextmanager
    def assembled(self) -> Iterator[nn.Module]:
        """Yield the module on the host, with all weights in full precision.

        After the `with` block its parameters are the stored weights again.
        """
        self.wait_for_planes(to_write=True)
        # Split weights are bf16 at home, so a call would use rounded weights. Other weights may be
        # on the device.
        for entry in self.store.stored_planes:
            # While planes hold the moving average instead of the weights, "weights" are the average's
            # high halves, and "rest" still has the low halves of the weights. All bits of the average
            # are in "ema".
            if entry.splits and self.step.holds_average:
                full_weights = entry.plane.state["ema"]
            else:
                full_weights = entry.master()
            entry.plane.rebind_parameters(full_weights.cpu())
        for stage in self.store.stages:
            stage.frozen.bind(stage.frozen.memory.cpu())
        try:
            yield self.step.model
        finally:
            for entry in self.store.stored_planes:
                entry.plane.rebind_parameters(entry.plane.param)
            for stage in self.store.stages:
                stage.frozen.bind(stage.frozen.memory)
