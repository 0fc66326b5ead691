"""Provide what all engines share: micro-batches, retries with less memory, capture and state.

An engine is this class around a `Step`. What differs between engines is in the step's `Parameters`.

Shapes: R rows of a window, M rows of a micro-batch, N members of an ensemble.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from monograph import compat
from monograph.errors import InputRefused, UsageError
from monograph.graph import capture as graph
from monograph.graph.compilable import Scope
from monograph.graph.inspect import buffers_kept, modes_kept, write_tensor
from monograph.graph.replay import WARM_UP
from monograph.graph.trial import Trial, trial
from monograph.loop import EngineState
from monograph.loss import Batch, Loss, fill_of
from monograph.optim import round_parameters
from monograph.step import Step, Update, accumulate, update
from monograph.step.fill import require_nothing_added
from monograph.step.retries import Retries, rows_text

T = TypeVar("T")


class Engine:
    """The common base of `Resident`, `Streamed`, `Ensemble` and the engines of several ranks.

    A window is a dict of tensors whose first dimension is rows. It is cut into micro-batches of
    `micro_batch` rows; the last one may have fewer. If the loss has an attribute `fill`, the last
    micro-batch is padded with rows without targets, so that shapes never change. `fill` holds the
    values of such a row by tensor name; tensors that it does not name are zeros. Without `fill` the
    loss gets the shorter micro-batch, which needs one more graph if the step is captured.

    If device memory runs out, the micro-batch is halved. If it has one row already, the backward pass
    recomputes the model's blocks from then on. Then the window is repeated. By laws 2 and 3
    (docs/laws.md) this changes no gradient. `announce` is called with a line that describes the change.

    Attributes:
        retries: the size of micro-batches, and what changes when memory runs out.
    """

    def __init__(self, make: Callable[[], Step], retries: Retries, *, members: int | None = None):
        """Set how windows are cut; the step is made at first use.

        Args:
            make: makes the step.
            retries: the size of micro-batches, and what changes when memory runs out.
            members: the number N of members, if each has its own rows in a window, whose tensors
                are then [N, R, ...]; None: they are [R, ...].
        """
        self._make_step = make
        self._members = members
        self.retries = retries
        self._row_dim = 0 if members is None else 1
        # The numbers of rows that the captured step was called with. A new number needs one more
        # graph, which is announced once.
        self._captured_sizes = set[int]()
        self._empty_rows_checked = False

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copying and pickling.

        A step keeps parameters in large flat tensors, its planes. The parameters of a copy would not be
        views of the copy's planes.
        """
        raise UsageError(
            f"a {type(self).__name__} cannot be copied: make another, and give it load_state(state())"
        )

    @functools.cached_property
    def step(self) -> Step:
        """Return the step; its gradients and moments are allocated at first use."""
        return self._make_step()

    @property
    def model(self) -> nn.Module:
        """Return the original module, after waiting until updates and copies of weights are done.

        In a `Streamed` engine that computes in bf16 the module has only rounded weights;
        `step.assembled()` gives full precision.
        """
        self.step.parameters.wait_for_planes(to_write=False)
        return self.step.model

    @property
    def loss(self) -> Loss:
        """Return the loss of the model."""
        return self.step.loss

    @property
    def tokens(self) -> int:
        """Return the number of targets that the model was trained on so far."""
        return int(self.step.tokens)

    @property
    def micro_batch(self) -> int | None:
        """Return the rows per micro-batch; None: the whole window at once."""
        return self.retries.micro_batch

    @micro_batch.setter
    def micro_batch(self, rows: int | None) -> None:
        self.retries.micro_batch = rows

    @property
    def announce(self) -> Callable[[str], None]:
        """Return the function that gets one line when the engine repeats a pass in another way."""
        return self.retries.announce

    @announce.setter
    def announce(self, announce: Callable[[str], None]) -> None:
        self.retries.announce = announce

    @property
    def index(self) -> int:
        """Return the number of updates so far, including skipped ones."""
        return self.step.index

    def trial(self, window: Batch) -> Trial:
        """Run one eager step on the first micro-batch, and return its findings; see `monograph.trial`.

        Weights and state do not change.
        """

        def try_first_micro_batch() -> Trial:
            batch = next(self._micro_batches(window))
            self._require_empty_rows_add_nothing(batch, self._row_count(batch))

            def loss() -> tuple[Tensor, Tensor]:
                with self.step.context():
                    loss_sum, count = self.step.parameters.sums(batch)
                    return loss_sum.sum(), count.sum()  # over the members of an ensemble

            with buffers_kept(self.step.loss):
                findings = trial(self.step.model, loss)
                # What the loss's method `count` says; None if it has no such method.
                targets = self.step.parameters.targets(batch)
            # Nearly equal is enough, because counts may be sums of weights, which are rounded.
            if targets is not None and not math.isclose(
                float(targets.sum()), findings.count, rel_tol=1e-4
            ):
                raise InputRefused(
                    f"the loss's count(batch) is {float(targets.sum()):g}, but its call counts {findings.count:g}: let "
                    "both count the same targets, or leave count out"
                )
            return findings

        return self._with_retries(window, try_first_micro_batch)

    def _require_empty_rows_add_nothing(self, window: Batch, rows: int) -> None:
        """Check once, by a pass over `rows` empty rows, that they add nothing to sum and count."""
        if self._empty_rows_checked:
            return
        fill = fill_of(self.step.loss, window)
        if fill is not None:
            require_nothing_added(self.step, self._empty_rows(window, rows, fill), fill)
            self._empty_rows_checked = True

    def _empty_rows(self, like: Batch, rows: int, fill: Mapping[str, float]) -> Batch:
        """Return rows without targets on the device.

        Args:
            like: a batch with the tensors' names, dtypes and other dimensions.
            rows: the number of rows to return.
            fill: the value of each tensor, by name; tensors that it does not name are zeros.
        """
        dim = self._row_dim
        device = self.step.device
        shapes = {
            name: (*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :])
            for name, tensor in like.items()
        }
        return {
            name: tensor.new_full(shapes[name], fill.get(name, 0), device=device)
            for name, tensor in like.items()
        }

    def capture(
        self, window: Batch, backend: graph.Backend = "inductor", scope: Scope = "whole"
    ) -> str | None:
        """Compile the step in place, and run every graph once on the window's shapes.

        Weights and state do not change.

        Args:
            window: an update's rows.
            backend: the compiler's backend; see `monograph.capture`.
            scope: what one graph holds; see `monograph.capture`.

        Returns:
            None, or the reason in one line why the step cannot be compiled and stays eager.
        """
        step = self.step
        # Graphs have static shapes, so from now on every window is cut into micro-batches of this
        # size, and the last micro-batch is padded.
        self.micro_batch = self.micro_batch or self._row_count(window)
        self.retries.captured = backend, scope
        try:
            graph.capture(step, backend, scope)
            with buffers_kept(self.model, step.loss):
                self._with_retries(window, lambda: self._warm_all(window))
        except Exception as error:
            graph.uncapture(step)
            step.discard()
            self.retries.captured = None
            # The step stays eager only if torch cannot compile it. Other errors are raised: a bug
            # or a full device must not be hidden.
            if compat.is_capture_error(error):
                return graph.failure_reason(error)
            # Graphs of blocks keep their inputs for the backward pass. If the module writes to such
            # an input in place, torch refuses only when the backward pass first runs.
            input_was_written = "modified by an inplace operation" in str(error)
            if isinstance(error, graph.CaptureFailed) or input_was_written:
                return str(error)
            raise
        return None

    def _warm_all(self, window: Batch) -> None:
        """Compile and run the graphs for every size of the window's micro-batches.

        The last micro-batch may be shorter. Its graph would otherwise be compiled in the middle of
        a run.
        """
        by_rows = {self._row_count(batch): batch for batch in self._micro_batches(window)}
        self._captured_sizes = set(by_rows)
        for batch in by_rows.values():
            self._warm(batch)

    def _warm(self, batch: Batch) -> None:
        """Compile and run the graphs of an update and of a score for the shapes of a micro-batch."""
        step = self.step
        # What is rehearsed must not change the counters, by which later updates set the loss scale, detect
        # spikes and draw the dropout of an ensemble.
        with step.counters_kept():
            if step.recorder:
                # On a GPU, a recorder records the kernels of a micro-step, and replays them later. The
                # first WARM_UP calls only run. `rehearse` below makes the last of these.
                calls = WARM_UP - 1
                if step.parameters.begins_sums:
                    # A window's first micro-step has a recording, and those that add to its gradients have
                    # another.
                    calls += WARM_UP
                accumulate(step, [batch] * calls)
                step.discard()
            self.rehearse(batch)
            if step.recorder and step.parameters.replays_update:
                # The first WARM_UP updates only run, too. `rehearse` has made one of them.
                for _ in range(WARM_UP - 1):
                    step.apply()
        self._score(batch)

    def gathered_model(self) -> nn.Module:
        """Return a model with all current weights, the same object each time; call on every rank."""
        return self.step.parameters.gathered()

    def accumulate(self, window: Batch) -> None:
        """Add the exact gradient of a window to the accumulated gradient.

        Raises:
            OutOfDeviceMemory: a micro-batch of one row does not fit.
        """
        self._with_retries(window, lambda: accumulate(self.step, self._micro_batches(window)))

    def _with_retries(self, window: Batch, work: Callable[[], T]) -> T:
        """Return the result of `work`, a pass over a window. If memory runs out, it is called again with
        less memory.

        See `Retries.run`.
        """
        return self.retries.run(self.step, functools.partial(self._row_count, window), work)

    def update(self) -> Update:
        """Clip and apply the accumulated gradient."""
        return update(self.step)

    def rehearse(self, window: Batch) -> None:
        """Do all the work of an update, and discard the result.

        Counters change. Weights and the optimizer's state do not.
        """
        # A streamed model may be updated in the backward pass. The device refuses these updates because the
        # loss is NaN.
        self.step.loss_sum.fill_(math.nan)
        self.accumulate(window)
        # `discard` sets the number of targets to 0, and the device refuses an update without targets.
        self.step.discard()
        self.step.apply()
        self.step.parameters.wait_for_planes(to_write=False)

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of a batch's losses and the number of its targets, in evaluation mode.

        If the optimizer keeps an average of the weights, the averaged weights are used.
        """
        loss_sum, count = self._score(batch)
        return self.step.sum_over_ranks(loss_sum), self.step.sum_over_ranks(count)

    def _score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and the number of targets of this rank's micro-batches."""
        with modes_kept(self.model), torch.no_grad(), self.step.averaged():
            self.model.eval()
            sums_of_batches = self._with_retries(
                batch, lambda: self.step.parameters.score(self._micro_batches(batch))
            )
        losses, counts = zip(*sums_of_batches, strict=True)
        # The sum is in fp64, because fp32 has too few digits for the losses of a long held-out text.
        return torch.stack([loss.double() for loss in losses]).sum(0), torch.stack(counts).sum(0)

    def state(self) -> EngineState:
        """Return the model's tensors, the optimizer's buffers by parameter name, and the counters.

        The tensors are views of the engine's own tensors, except split weights, which are copies. The
        frozen weights of a model with adapters are left out.
        """
        step = self.step
        step.parameters.wait_for_planes(to_write=True)  # the caller may write to the views
        counters = {name: counter.tolist() for name, counter in step.counters.items()}
        return EngineState(
            model=step.parameters.weights(),
            optimizer=self._buffers(),
            scalars={"index": step.index, **counters},
        )

    def _buffers(self) -> dict[str, Tensor]:
        """Return views of the optimizer's buffers, by "<buffer>.<parameter>"."""
        return {
            f"{buffer}.{name}": view
            for plane in self.step.planes
            for buffer, flat in plane.state.items()
            for name, view in plane.views(flat)
        }

    def load_state(self, state: EngineState) -> None:
        """Copy a state into the engine's own tensors, and discard the accumulated gradient.

        Args:
            state: the state of an engine of any kind that has the same model and optimizer.

        Raises:
            InputRefused: a tensor or counter is missing or does not fit, or a tensor is unknown.
                Nothing has been copied then.
        """
        own = self.state()
        state.require_fit(own)
        saved_counters = {
            name: state.counter(name, counter) for name, counter in self.step.counters.items()
        }
        index = int(state.counter("index", torch.tensor(0)))
        self.step.discard()
        for live, saved in ((own.model, state.model), (own.optimizer, state.optimizer)):
            # In the saved order, because the tensors may be read from a file one by one.
            for name, tensor in saved.items():
                # `copy_` would not do, because torch refuses to write to an expanded tensor.
                write_tensor(live[name].detach(), tensor)
        # Split weights in `own` are copies, so the engine has not got their new values yet.
        self.step.parameters.take_weights(own.model)
        # The state may be that of an engine that rounded to another format.
        for plane in self.step.planes:
            round_parameters(plane)
        self.step.index = index
        for name, counter in self.step.counters.items():
            counter.copy_(saved_counters[name])

    def _micro_batches(self, window: Batch) -> Iterator[Batch]:
        """Yield this rank's micro-batches; every rank gets the same number of them.

        Rank r of W ranks computes the window's micro-batches r, r + W and so on. A rank that would
        have one fewer than others gets a micro-batch without targets. So the rows of an update do
        not depend on the number of ranks.
        """
        rows = self._row_count(window)
        dim = self._row_dim
        size = self.retries.rows_per_micro_batch(rows)
        ranks, rank = self.retries.share
        batches_per_rank = math.ceil(rows / (size * ranks))
        if rows < batches_per_rank * size * ranks:
            self._require_fillable(window, size)
        for i in range(batches_per_rank):
            # A micro-batch that lies beyond the window has no rows; `_padded` fills it.
            start = min((i * ranks + rank) * size, rows)
            batch_rows = min(size, rows - start)
            # If members have rows of their own, the narrowed tensor is not contiguous. But a padded batch
            # is, and a graph is compiled for certain strides, so all batches are made contiguous.
            batch = {
                name: tensor.narrow(dim, start, batch_rows)
                .to(self.step.device, non_blocking=True)
                .contiguous()
                for name, tensor in window.items()
            }
            yield self._padded(batch, size)

    def _require_fillable(self, window: Batch, size: int) -> None:
        """Check that a window's last micro-batches may be padded to `size` rows.

        Raises:
            InputRefused: on one rank, the loss's empty rows add something.
            UsageError: several ranks need padding, and the loss has no `fill`.
        """
        ranks = self.retries.share.ranks
        if ranks == 1:
            self._require_empty_rows_add_nothing(window, size)
        elif fill_of(self.step.loss, window) is None:
            rows = self._row_count(window)
            raise UsageError(
                f"a window of {rows} rows cannot be shared out evenly to {ranks} ranks in micro-batches "
                f"of {size}: give a multiple of {size * ranks} rows, or a `fill` to the loss: what a row without "
                "targets holds"
            )

    def _row_count(self, window: Batch) -> int:
        """Return the number of a window's rows.

        Raises:
            UsageError: the window is not a dict of dense tensors with the same number of rows, at
                least 1.
        """
        if self._members is not None:
            require_member_axis(window, self._members, "windows")
        if not isinstance(window, Mapping):
            raise UsageError(
                f"a window is a {type(window).__name__}: expected a dict of tensors, by name"
            )
        rows = dict[str, int]()
        for name, tensor in window.items():
            if not isinstance(tensor, Tensor) or tensor.ndim <= self._row_dim:
                shape = getattr(tensor, "shape", None)  # numpy's arrays have a shape as well
                if shape is None:
                    description = repr(tensor)
                else:
                    description = f"a {type(tensor).__name__} of shape {list(shape)}"
                raise UsageError(
                    f"the window's {name!r} is {description}: expected a tensor that has rows as its dimension "
                    f"{self._row_dim}; a tensor without rows belongs in the loss, not in the window"
                )
            if tensor.layout != torch.strided or tensor.is_nested:
                if tensor.is_nested:
                    kind = "nested"
                    method = "to_padded_tensor"
                else:
                    kind = "sparse"
                    method = "to_dense"
                raise UsageError(
                    f"the window's {name!r} is {kind}: expected a dense tensor, .{method}()"
                )
            rows[name] = tensor.shape[self._row_dim]
        if len(set(rows.values())) != 1 or 0 in rows.values():
            raise UsageError(
                f"a window's tensors have equally many rows, 1 or more, but these have {rows}"
            )
        return next(iter(rows.values()))

    def _padded(self, batch: Batch, rows: int) -> Batch:
        """Pad a batch on the device to `rows` rows, with rows without targets.

        If the loss has no `fill`, the batch stays as it is.
        """
        dim = self._row_dim
        batch_rows = next(iter(batch.values())).shape[dim]
        if batch_rows == rows:
            return batch
        fill = fill_of(self.step.loss, batch)
        if fill is None:
            if self.retries.captured and batch_rows not in self._captured_sizes:
                self._captured_sizes.add(batch_rows)
                self.announce(
                    f"a micro-batch of {rows_text(batch_rows)} needs one more graph, as the loss has no `fill`"
                )
            return batch
        empty = self._empty_rows(batch, rows - batch_rows, fill)
        return {name: torch.cat([tensor, empty[name]], dim) for name, tensor in batch.items()}


def require_member_axis(tensors: object, members: int, what: str) -> None:
    """Refuse tensors without a leading member axis.

    Args:
        tensors: a tensor, or tensors in dicts and lists.
        members: the number of members.
        what: what the message calls the tensors.

    Raises:
        UsageError: a tensor is not [members, ...].
    """
    leaves = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
    wrong_shapes = [list(leaf.shape) for leaf in leaves if leaf.shape[:1] != (members,)]
    if wrong_shapes:
        raise UsageError(
            f"each=True: the {what} have a leading member axis, [{members}, ...], as every member has its own; one is "
            f"{wrong_shapes[0]}"
        )
