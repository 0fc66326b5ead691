"""Keep a step's parameters on the host, in stages that come to the device one after another."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from monograph.errors import OutOfDeviceMemory
from monograph.graph import siblings
from monograph.graph.compilable import Compilable, Scope
from monograph.graph.lora import kept_state
from monograph.ops.fused_gradients import fusing
from monograph.optim import Plane
from monograph.step import Parameters, Step
from monograph.step.on_device import fuses
from monograph.step.parameters import Sums
from monograph.step.retries import out_of_memory
from monograph.stream.chunked_update import HALF_DONE
from monograph.stream.lanes import Lanes, executor
from monograph.stream.placement import Placement
from monograph.stream.slots import Passes
from monograph.stream.store import Store, stored
from monograph.stream.walk import Walk


class InStages(Parameters):
    """The parameters of a module that is run stage by stage; see `monograph.stream.walk`.

    Attributes:
        placement: where buffers live.
        store: the stages, whose planes are the step's.
    """

    staged = True
    replays = False  # copies differ from update to update, and a replay would repeat those of one

    store: Store

    def __init__(
        self,
        placement: Placement,
        lanes: Lanes | None,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
        passes: Callable[[Step], Passes] = Passes,
    ):
        """Take where buffers live; nothing is moved before a step asks for its planes.

        Args:
            placement: where buffers live and when weights are updated.
            lanes: the lanes that copy and compute; None: the device's own.
            sum_over_ranks: sums a tensor over the processes that train together; None for a single
                process.
            passes: returns what computes a step's passes and updates.
        """
        super().__init__()
        self.placement = placement
        self.device = placement.device
        self._lanes = lanes
        self._sum_over_ranks = sum_over_ranks
        self._passes = passes
        self._adding = False  # whether products add gradients

    @functools.cached_property
    def walk(self) -> Walk:
        """Return the walk of micro-batches through the stages; its memory is made at first use."""
        lanes = self._lanes or Lanes(executor(self.placement.device))
        return Walk(
            self.step, self.store, lanes, self.placement, self._sum_over_ranks, self._passes
        )

    def place(self, step: Step) -> list[Plane]:
        """Move the planes of all stages to their homes."""
        self.step = step
        self._adding = fuses(step, self.placement.device.type == "cuda")
        if self._adding:
            siblings.fuse_known(step.model)
        kinds = step.optim.kinds(step.model)
        rounds = step.precision.rounds
        self.store = stored(step.model, kinds, step.optim, rounds=rounds, placement=self.placement)
        return [entry.plane for entry in self.store.stored]

    def captured(self, scope: Scope) -> list[Compilable[..., Any]]:
        """Return the functions that update a part of a plane, on the device and on the host."""
        updates = self.walk.updates
        host = updates.host_update
        return [self.step.squares, updates.update_part, host.update_part, host.join, host.split]

    def fusing(self) -> AbstractContextManager[None]:
        """In the block products add gradients to the planes, if they do at all."""
        return fusing() if self._adding else nullcontext()

    def accumulate(self, batches: Sequence[object]) -> None:
        """Walk through the stages with all micro-batches."""
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

    def score(self, batches: Iterable[object]) -> list[Sums]:
        """Return the sums of each micro-batch, without gradients."""
        return self.walk.evaluate(list(batches))

    def discard(self) -> None:
        """Forget the gradient since the last update."""
        self.walk.discard()

    def begin_again(self) -> None:
        """Do one thing after another if graphs are compiled anew, as torch cannot trace in one of
        several threads.
        """
        self.walk.lanes.one_by_one = self.step.scope != "none"

    def complete(self) -> None:
        """Finish the update before, and sum over the ranks."""
        self.walk.updates.flush()  # a waiting update is made with its own learning rate
        if self._sum_over_ranks:
            self.walk.lanes.finish()  # all ranks sum in one order
            self.step.sum_window_over_ranks()

    def apply(self) -> Tensor:
        """Decide on the update from the squares of all stages, and make it when it is time."""
        return self.walk.update()

    def at_rest(self, *, written: bool) -> None:
        """Finish every update and its copies; if weights at home may be `written`, fetch them anew
        afterwards.
        """
        self.walk.updates.flush()
        self.walk.lanes.finish()
        for stage in self.store.stages if written else ():
            stage.version += 1

    def weights(self) -> dict[str, Tensor]:
        """Return the model's tensors; those of split weights are copies in fp32."""
        masters = [(entry, entry.master()) for entry in self.store.stored if entry.splits]
        views = {name: view for own, whole in masters for name, view in own.plane.views(whole)}
        return kept_state(self.step.model) | views

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Split the weights that are split, which have no fp32 memory to write to."""
        for entry in self.store.stored:
            if entry.splits:
                master = entry.master()
                for name, view in entry.plane.views(master):
                    view.copy_(weights[name])
                entry.set_master(master)

    @contextmanager
    def assembled(self) -> Iterator[nn.Module]:
        """In the block the module can be called as before it was stored: on the host, with its
        weights in fp32.
        """
        self.at_rest(written=True)
        # Split weights are bf16 at home, so a call would use the rounded weights alone; others may
        # be on the device.
        for entry in self.store.stored:
            averaged = entry.splits and self.step.holds_average
            entry.plane.hold((entry.plane.state["ema"] if averaged else entry.master()).cpu())
        try:
            yield self.step.model
        finally:
            for entry in self.store.stored:
                entry.plane.hold(entry.plane.param)
