"""Do what is common to all engines: cut windows into micro-batches, step, and take less memory if
necessary.

An engine is a `Step`, whose parameters say how engines differ, and this class around it.

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
from monograph.graph.inspect import buffers_kept, modes_kept, write
from monograph.graph.replay import WARM_UP
from monograph.graph.trial import Trial, trial
from monograph.loop import EngineState
from monograph.loss import Batch, fill_of
from monograph.step import Step, Update, accumulate, update
from monograph.step.fill import require_nothing_added
from monograph.step.retries import Retries, rows_of

T = TypeVar("T")


class Engine:
    """The common base of `Resident`, `Streamed`, `Ensemble` and the engines of several ranks.

    A window is a dict of tensors whose first dimension is rows; it is cut into micro-batches of
    `micro_batch` rows, of which the last one may have fewer. The loss may have an attribute `fill`,
    which gives the values of a row without targets by name (tensors without a value are zeros).
    Then the last micro-batch is filled up with such rows, so that shapes never change; else the
    loss gets it as it is, which is one more graph if the step is captured.

    If device memory runs out, the micro-batch is halved, or at one row the blocks are recomputed,
    and the window is repeated. By laws 2 and 3 this changes no gradient; the change is announced
    through `announce`.

    Attributes:
        retries: the rows of micro-batches, and what is changed when memory runs out.
    """

    def __init__(self, make: Callable[[], Step], retries: Retries, *, members: int | None = None):
        """Note how windows are cut.

        Args:
            make: makes the step, when it is first needed.
            retries: the rows of micro-batches, and what is changed when memory runs out.
            members: the number of members with rows of their own in a window, [N, R, ...]; None: a
                window is [R, ...].
        """
        self._make_step = make
        self._members = members
        self.retries = retries
        self._row_dim = 0 if members is None else 1
        # Rows of the micro-batches that the captured step was called with; another number is one
        # more graph, which is announced once.
        self._sizes = set[int]()
        self._empty_rows_scored = False

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: a copy's parameters would not be views of its planes."""
        raise UsageError(
            f"a {type(self).__name__} cannot be copied: make another, and give it load_state(state())"
        )

    @functools.cached_property
    def step(self) -> Step:
        """Return the step; it is made at first use, with gradients and moments."""
        return self._make_step()

    @property
    def model(self) -> nn.Module:
        """Return the original module, with up-to-date weights; this waits for updates and copies of
        them.

        In a `Streamed` that computes in bf16 it has only the rounded weights; `step.assembled()`
        has all digits.
        """
        self.step.parameters.at_rest(written=False)
        return self.step.model

    @property
    def micro_batch(self) -> int | None:
        """Return the rows per micro-batch; None: the whole window at once."""
        return self.retries.micro_batch

    @micro_batch.setter
    def micro_batch(self, rows: int | None) -> None:
        self.retries.micro_batch = rows

    @property
    def announce(self) -> Callable[[str], None]:
        """Return what is called with a line when the engine goes on in another way; set it to hear
        of that.
        """
        return self.retries.announce

    @announce.setter
    def announce(self, announce: Callable[[str], None]) -> None:
        self.retries.announce = announce

    @property
    def index(self) -> int:
        """Return the number of updates done so far."""
        return self.step.index

    def trial(self, window: Batch) -> Trial:
        """Run one eager step on the first micro-batch; weights and state stay as they are. See
        `monograph.trial`.
        """

        def attempt() -> Trial:
            batch = next(self._micro_batches(window))
            self._require_empty_rows_add_nothing(batch, self._rows(batch))

            def loss() -> tuple[Tensor, Tensor]:
                with self.step.context():
                    loss_sum, count = self.step.parameters.sums(batch)
                    return loss_sum.sum(), count.sum()

            with buffers_kept(self.step.loss):
                tried = trial(self.step.model, loss)
                targets = self.step.parameters.targets(batch)
            if targets is not None and not math.isclose(
                float(targets.sum()), tried.count, rel_tol=1e-4
            ):
                raise InputRefused(
                    f"the loss's count(batch) is {float(targets.sum()):g}, but its call counts {tried.count:g}: let "
                    "both count the same targets, or leave count out"
                )
            return tried

        return self._fitting(window, attempt)

    def _require_empty_rows_add_nothing(self, window: Batch, rows: int) -> None:
        if not self._empty_rows_scored and (fill := fill_of(self.step.loss, window)) is not None:
            require_nothing_added(self.step, self._empty_rows(window, rows, fill), fill)
            self._empty_rows_scored = True

    def _empty_rows(self, like: Batch, rows: int, fill: Mapping[str, float]) -> Batch:
        """Return rows without targets on the device, with the tensors of another batch and the
        values of `fill`.
        """
        dim, device = self._row_dim, self.step.device
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
        """Compile the step in place and warm every graph on the window's shapes; weights and state
        stay as they are.

        Args:
            window: an update's rows.
            backend: see `monograph.capture`.
            scope: what one graph holds, see there, too.

        Returns:
            None, or in one line the reason why the step cannot be compiled; it then stays eager.
        """
        step = self.step
        # Graphs have static shapes, so from now on windows of any length are cut into this many
        # rows, and filled up.
        self.micro_batch = self.micro_batch or self._rows(window)
        self.retries.captured = backend, scope
        try:
            graph.capture(step, backend, scope)
            with buffers_kept(self.model, step.loss):
                self._fitting(window, lambda: self._warm_all(window))
        except Exception as error:
            graph.release(step)
            step.discard()
            self.retries.captured = None
            # The step stays eager only if torch cannot compile it, as this would hide a bug or a
            # full device. torch compiles a backward pass when it first runs. Graphs of blocks keep
            # inputs that a module may write before its backward pass, which torch refuses there.
            if compat.is_capture_error(error):
                return graph.reason(error)
            if not isinstance(
                error, graph.CaptureFailed
            ) and "modified by an inplace operation" not in str(error):
                raise
            return str(error)
        return None

    def _warm_all(self, window: Batch) -> None:
        """Warm the graphs of all sizes of the window's micro-batches, of which the last may be
        shorter.

        Otherwise the last window of an epoch would compile in the middle of a run.
        """
        by_rows = {self._rows(batch): batch for batch in self._micro_batches(window)}
        self._sizes = set(by_rows)
        for batch in by_rows.values():
            self._warm(batch)

    def _warm(self, batch: Batch) -> None:
        step = self.step
        if step.recorder:
            accumulate(step, [batch] * (WARM_UP - 1))  # the next micro-step is recorded for replays
        # Counters go back to their beginnings, as the first updates decide on the loss scale and on
        # spikes.
        with step.counters_kept():
            self.rehearse(batch)
        self._scored(batch)

    def accumulate(self, window: Batch) -> None:
        """Add the window's exact gradient.

        Raises:
            OutOfDeviceMemory: a micro-batch of one row does not fit.
        """
        self._fitting(window, lambda: accumulate(self.step, self._micro_batches(window)))

    def _fitting(self, window: Batch, work: Callable[[], T]) -> T:
        """Return `work()`, a pass through a window, in less memory if it does not suffice; see
        `Retries.fitting`.
        """
        return self.retries.fitting(self.step, functools.partial(self._rows, window), work)

    def update(self) -> Update:
        """Clip and apply the accumulated gradient."""
        return update(self.step)

    def rehearse(self, window: Batch) -> None:
        """Do all the work of an update and throw it away; counters change, weights and optimizer
        state do not.
        """
        self.step.loss_sum.fill_(math.nan)  # so that updates in the backward pass are refused
        self.accumulate(window)
        self.step.discard()
        self.step.apply()  # the device refuses this update, as it has no targets
        self.step.parameters.at_rest(written=False)

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of losses and the number of targets of a batch, in the module's evaluation
        mode.

        If the optimizer keeps an average of the weights, the average is scored.
        """
        loss_sum, count = self._scored(batch)
        return self.step.sum_over_ranks(loss_sum), self.step.sum_over_ranks(count)

    def _scored(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with modes_kept(self.model), torch.no_grad(), self.step.averaged():
            self.model.eval()
            parts = self._fitting(
                batch, lambda: self.step.parameters.score(self._micro_batches(batch))
            )
        # Sums are in fp64, as a long held-out text has more losses than fp32 has digits for.
        losses, counts = zip(*parts, strict=True)
        return torch.stack([loss.double() for loss in losses]).sum(0), torch.stack(counts).sum(0)

    def state(self) -> EngineState:
        """Return model, optimizer buffers by parameter name, and counters.

        The tensors are views of the live ones, except for split weights, which are copied. Frozen
        weights of a model with adapters are left out.
        """
        step = self.step
        step.parameters.at_rest(written=True)  # the caller may write to the views
        counters = {name: counter.tolist() for name, counter in step.counters.items()}
        return EngineState(
            step.parameters.weights(), self._buffers(), {"index": step.index, **counters}
        )

    def _buffers(self) -> dict[str, Tensor]:
        """Return views of the optimizer's buffers, by buffer and parameter."""
        return {
            f"{buffer}.{name}": view
            for plane in self.step.planes
            for buffer, flat in plane.state.items()
            for name, view in plane.views(flat)
        }

    def load_state(self, state: EngineState) -> None:
        """Copy a state into the live tensors; it may come from another engine with the same model
        and optimizer.

        The gradient accumulated since the last update is forgotten.

        Raises:
            InputRefused: a tensor or counter is missing or does not fit, or a tensor is unknown.
                Nothing was copied then.
        """
        own = self.state()
        state.require_fit(own)
        counters = [
            (counter, state.counter(name, counter)) for name, counter in self.step.counters.items()
        ]
        index = int(state.counter("index", torch.tensor(0)))
        self.step.discard()
        for mine, theirs in ((own.model, state.model), (own.optimizer, state.optimizer)):
            # In the saved order, as they may be read from a file one by one.
            for name, tensor in theirs.items():
                write(mine[name].detach(), tensor)
        self.step.parameters.take_weights(own.model)
        self.step.index = index
        for counter, saved in counters:
            counter.copy_(saved)

    def _micro_batches(self, window: Batch) -> Iterator[Batch]:
        """Yield this rank's micro-batches, of which every rank has as many.

        Rank r of W computes the window's micro-batches r, r + W and so on, and one without targets
        where it would have one fewer than others. So the rows of an update do not depend on the
        number of ranks.
        """
        rows = self._rows(window)
        dim = self._row_dim
        size = self.retries.size(rows)
        ranks, rank = self.retries.share
        turns = -(-rows // (size * ranks))
        if rows < turns * size * ranks:
            self._require_fillable(window, size)
        for turn in range(turns):
            start = min((turn * ranks + rank) * size, rows)
            parts = {
                name: tensor.narrow(dim, start, min(size, rows - start))
                for name, tensor in window.items()
            }
            part = {
                name: tensor.to(self.step.device, non_blocking=True)
                for name, tensor in parts.items()
            }
            yield self._filled(part, size)

    def _require_fillable(self, window: Batch, size: int) -> None:
        """Refuse a window that cannot be cut into micro-batches of equally many rows.

        Raises:
            UsageError: rows without targets add something, or several ranks need some and the loss
                has no `fill`.
        """
        ranks = self.retries.share.ranks
        if ranks == 1:
            self._require_empty_rows_add_nothing(window, size)
        elif fill_of(self.step.loss, window) is None:
            raise UsageError(
                f"a window of {self._rows(window)} rows cannot be shared out evenly to {ranks} ranks in micro-batches "
                f"of {size}: give a multiple of {size * ranks} rows, or a `fill` to the loss: what a row without "
                "targets holds"
            )

    def _rows(self, window: Batch) -> int:
        """Return the number of a window's rows.

        Raises:
            UsageError: the window is no dict of dense tensors with equally many rows, or has no
                rows.
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
                shape = getattr(tensor, "shape", None)  # arrays of numpy have one, too
                what = (
                    repr(tensor)
                    if shape is None
                    else f"a {type(tensor).__name__} of shape {list(shape)}"
                )
                raise UsageError(
                    f"the window's {name!r} is {what}: expected a tensor that has rows as its dimension "
                    f"{self._row_dim}; what has no rows belongs into the loss, not into the window"
                )
            if tensor.layout != torch.strided or tensor.is_nested:
                kind, dense = (
                    ("nested", "to_padded_tensor") if tensor.is_nested else ("sparse", "to_dense")
                )
                raise UsageError(
                    f"the window's {name!r} is {kind}: expected a dense tensor, .{dense}()"
                )
            rows[name] = tensor.shape[self._row_dim]
        if len(set(rows.values())) != 1 or 0 in rows.values():
            raise UsageError(
                f"a window's tensors have equally many rows, 1 or more, but these have {rows}"
            )
        return next(iter(rows.values()))

    def _filled(self, batch: Batch, rows: int) -> Batch:
        """Return the batch filled up with rows without targets, if the loss has a `fill`."""
        dim, device = self._row_dim, self.step.device
        own = next(iter(batch.values())).shape[dim]
        if own == rows:
            return batch
        if (fill := fill_of(self.step.loss, batch)) is None:
            if self.retries.captured and own not in self._sizes:
                self._sizes.add(own)
                self.announce(
                    f"a micro-batch of {rows_of(own)} is one more graph, as the loss has no `fill`"
                )
            return batch
        empty = self._empty_rows(batch, rows - own, fill)
        return {
            name: torch.cat([part.to(device, non_blocking=True), empty[name]], dim)
            for name, part in batch.items()
        }


def require_member_axis(tensors: object, members: int, what: str) -> None:
    """Refuse tensors without a leading member axis.

    Raises:
        UsageError: a tensor is not [members, ...]; the message says `what` the tensors are.
    """
    leaves = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
    if odd := [list(leaf.shape) for leaf in leaves if leaf.shape[:1] != (members,)]:
        axis = f"have a leading member axis, [{members}, ...], as every member has its own"
        raise UsageError(f"each=True: the {what} {axis}; one is {odd[0]}")
