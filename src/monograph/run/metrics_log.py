"""Write updates as rows of metrics.jsonl, for one run or for the runs of several members.

A member is one of several models that one engine trains at once (`monograph.ensemble`); a model
that is trained alone is the only member of its engine. A skipped update changes no weights: its gradient
is not finite, for example (`Update.skipped`).
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from monograph.run.folder import Run
from monograph.step import Update
from monograph.step.parts import seconds

Entries: TypeAlias = dict[str, Any]  # of a row
E = TypeVar("E")

# A run has diverged after this many skipped updates in a row. Fewer may come of a few bad batches.
PATIENCE = 20


class _PendingUpdates(ABC, Generic[E]):
    """Updates whose numbers are still on the device: the base class of `MetricsLog` and `MetricsLogs`.

    The numbers of `every` updates are read from the device together, since each read waits for the
    device. E is the type of the further entries that the caller gives with an update: the entries of the
    one row in `MetricsLog`, and those of each member's row in `MetricsLogs`.
    """

    def __init__(self, every: int):
        """Start without updates.

        Args:
            every: number of updates after which their rows are written.
        """
        self.every = every
        self.pending: list[tuple[Update, E]] = []

    def add(self, update: Update, extra: E) -> bool:
        """Add an update, and write the pending rows if there are `every` of them.

        Args:
            update: the update.
            extra: further entries of its row, or of each member's row.

        Returns:
            Whether the rows were written.
        """
        self.pending.append((update, extra))
        if len(self.pending) >= self.every:
            self.flush()
        return not self.pending

    def flush(self) -> None:
        """Write the pending rows. The training loop reads tensors of updates only here."""
        if self.pending:
            updates, extras = zip(*self.pending, strict=True)
            self._write(metrics_rows(updates), extras)
            self.pending.clear()

    @abstractmethod
    def _write(self, rows: Sequence[Sequence[Entries]], extras: Sequence[E]) -> None:
        """Write rows to the metrics of all members.

        Args:
            rows: for each update, a row for each member.
            extras: for each update, what `add` was given.
        """


class MetricsLog(_PendingUpdates[Entries]):
    """The log of one run's updates.

    Attributes:
        run: the run.
        last: the row of the last update that was written; empty before the first.
        skipped: number of skipped updates since the run's start.
        skipped_in_a_row: number of skipped updates in a row up to `last`; 0 if `last` was applied.
    """

    def __init__(self, run: Run, every: int):
        """Open the log of a run, and read the rows that a resumed run already has."""
        super().__init__(every)
        self.run = run
        # Only rows of updates have "skipped"; rows of evaluations and samples are left out.
        rows = [row for row in run.rows() if "skipped" in row]
        self.last: dict[str, Any] = rows[-1] if rows else {}
        self.skipped = sum(row["skipped"] for row in rows)
        last_skipped = itertools.takewhile(lambda row: row["skipped"], reversed(rows))
        self.skipped_in_a_row = len(list(last_skipped))

    def _write(self, rows: Sequence[Sequence[Entries]], extras: Sequence[Entries]) -> None:
        # Each update has a single row here, that of the only member.
        self.write([only_row for [only_row] in rows], extras)

    @property
    def has_diverged(self) -> bool:
        """Return whether the run has diverged, by the number of skipped updates in a row."""
        return self.skipped_in_a_row >= PATIENCE

    def write(self, rows: Sequence[dict[str, Any]], extras: Sequence[dict[str, Any]]) -> None:
        """Append a row for each update to the run's metrics.

        Args:
            rows: the rows, as `metrics_rows` returns them. Their `skipped` is the number of skipped updates
                since the run's start. In the metrics `skipped` says whether this update was skipped.
            extras: further entries of each row. Those that are tensors are read from the device together.
        """
        extras = _with_numbers(extras)
        logged_rows = []
        for row, extra in zip(rows, extras, strict=True):
            was_skipped = row["skipped"] > self.skipped
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if was_skipped else 0
            self.skipped = row["skipped"]
            self.last = {**row, "skipped": was_skipped, **extra}
            logged_rows.append(self.last)
        self.run.log(*logged_rows)

    def diverges_at_end(self, updates: int) -> bool:
        """Return whether a run that ends now has diverged, although `has_diverged` may be false.

        A short run may end before PATIENCE updates in a row can be skipped. So it has also diverged if its
        last update was skipped and one of two things holds: the loss of that update is not finite, or at
        least the last half of all updates was skipped.

        Args:
            updates: the run's number of updates.
        """
        if self.skipped_in_a_row == 0:
            return False
        loss = self.last.get("train_loss")
        is_finite = loss is not None and math.isfinite(loss)
        return not is_finite or 2 * self.skipped_in_a_row >= updates


class MetricsLogs(_PendingUpdates[Sequence[Entries]]):
    """The logs of all members of one engine.

    Attributes:
        logs: the log of each member.
        divergences: {index of a diverged member: the last update that it applied}.
    """

    def __init__(self, runs: Sequence[Run], every: int):
        """Open the log of each member's run; see `MetricsLog`."""
        super().__init__(every)
        # Updates are added to this object alone, which writes rows through the members' logs.
        self.logs = [MetricsLog(run, every) for run in runs]
        self.divergences: dict[int, int] = {}
        for index, run in enumerate(runs):
            for row in run.rows():
                if "diverged" in row:
                    self.divergences[index] = row["diverged"]

    def _write(
        self, rows: Sequence[Sequence[Entries]], extras: Sequence[Sequence[Entries]]
    ) -> None:
        """Write the rows of all members that have not diverged."""
        for index, log in enumerate(self.logs):
            if index not in self.divergences:
                log.write(
                    [member_rows[index] for member_rows in rows],
                    [member_extras[index] for member_extras in extras],
                )

    def find_diverged(self, updates: int | None = None) -> list[int]:
        """Record the members that have diverged since the last call, and return their indices.

        Each of them gets an entry in `divergences` and a row with `diverged` in its metrics. No
        further rows of updates are written for it.

        Args:
            updates: the run's number of updates if the run ends now; None if it goes on. At the end
                fewer skipped updates count as divergence, see `MetricsLog.diverges_at_end`.
        """
        newly_diverged = []
        for index, log in enumerate(self.logs):
            if index in self.divergences:
                continue
            if log.has_diverged or (updates and log.diverges_at_end(updates)):
                newly_diverged.append(index)
        self.note_diverged(newly_diverged)
        return newly_diverged

    def note_diverged(self, indices: Sequence[int]) -> None:
        """Record that members have diverged, as `find_diverged` does for those that it finds."""
        for index in indices:
            log = self.logs[index]
            update = log.last.get("update", 0)
            last_applied = update - log.skipped_in_a_row
            self.divergences[index] = last_applied
            log.run.log({"update": update, "diverged": last_applied})


def _with_numbers(extras: Sequence[Entries]) -> list[Entries]:
    """Return entries with numbers in place of 0-d tensors, which are read in one read."""
    tensors = [
        value.double() for extra in extras for value in extra.values() if isinstance(value, Tensor)
    ]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    return [
        {key: next(numbers) if isinstance(value, Tensor) else value for key, value in extra.items()}
        for extra in extras
    ]


def metrics_rows(updates: Sequence[Update]) -> list[list[dict[str, Any]]]:
    """Read the numbers of some updates from the device, all in one read.

    Returns:
        For each update, a row for each member. An engine of one model has one member.
    """
    tensors = []  # for each update the four values of each member, [4, members]
    for update in updates:
        values = (update.loss, update.grad_norm, update.tokens, update.skipped)
        # The values of an engine of one model have the shape []. `atleast_1d` makes it [members], with one
        # member. In float64 a number of tokens is exact.
        tensors.append(torch.stack([torch.atleast_1d(value).double() for value in values]))
    numbers = torch.stack(tensors).tolist()  # [updates, 4, members]; the only read from the device
    rows = []
    for update, (losses, norms, tokens, skipped) in zip(updates, numbers, strict=True):
        if isinstance(update.lr, tuple):  # an ensemble has a learning rate for each member
            rates = update.lr
            times = {}  # not written, because all members are trained together
        else:
            rates = (update.lr,) * len(losses)
            times = seconds(update.marks)  # of each part of the update, such as "optimizer_s"
        member_rows = []
        for i in range(len(losses)):
            row = {
                "update": update.index + 1,
                "tokens": int(tokens[i]),
                "train_loss": losses[i],
                "lr": rates[i],
                "grad_norm": norms[i],
                "skipped": int(skipped[i]),
                **times,
            }
            member_rows.append(row)
        rows.append(member_rows)
    return rows
