"""Write updates, evaluations and samples as rows of metrics.jsonl, for one run or for many."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from monograph.run.folder import Run
from monograph.step import Update
from monograph.step.parts import seconds

PATIENCE = 20  # so many skipped updates in a row are no accident


class _Pending(ABC):
    """Updates whose numbers are still on the device; one read fetches those of several."""

    def __init__(self, every: int):
        """Read and write the numbers of each `every` updates."""
        self.every = every
        self.pending: list[tuple[Update, dict[str, Any]]] = []

    def add(self, update: Update, extra: dict[str, Any]) -> bool:
        """Add an update with extra values for its row; return whether the rows were written now."""
        self.pending.append((update, extra))
        if len(self.pending) >= self.every:
            self.flush()
        return not self.pending

    def flush(self) -> None:
        """Write the pending rows. Only here does the training loop read tensors."""
        if self.pending:
            updates, extras = zip(*self.pending, strict=True)
            self._write(numbers(updates), extras)
            self.pending.clear()

    @abstractmethod
    def _write(
        self, rows: Sequence[Sequence[dict[str, Any]]], extras: Sequence[dict[str, Any]]
    ) -> None:
        """Write rows of updates, each with those of all members, and extra values for each update."""


class MetricsLog(_Pending):
    """The log of one run's updates. It writes after every `every` updates and so waits for the
    device only then.
    """

    def __init__(self, run: Run, every: int):
        """Open the log of `run` and read the metrics that a resumed run has already."""
        super().__init__(every)
        self.run = run
        rows = [row for row in run.rows() if "skipped" in row]
        self.last: dict[str, Any] = rows[-1] if rows else {}
        self.skipped = sum(row["skipped"] for row in rows)
        self.streak = sum(
            1 for _ in itertools.takewhile(lambda row: row["skipped"], reversed(rows))
        )

    def _write(
        self, rows: Sequence[Sequence[dict[str, Any]]], extras: Sequence[dict[str, Any]]
    ) -> None:
        self.write([members[0] for members in rows], extras)

    @property
    def is_lost(self) -> bool:
        """Return whether more updates in a row were skipped than an accident explains."""
        return self.streak >= PATIENCE

    def write(self, rows: Sequence[dict[str, Any]], extras: Sequence[dict[str, Any]]) -> None:
        """Write rows of updates with extra values for each; their `skipped` is the count since the
        run's start.
        """
        written = []
        for row, extra in zip(rows, extras, strict=True):
            was_skipped = row["skipped"] > self.skipped
            self.streak = self.streak + 1 if was_skipped else 0
            self.skipped = row["skipped"]
            self.last = {**row, "skipped": was_skipped, **extra}
            written.append(self.last)
        self.run.log(*written)

    def has_lost(self, updates: int) -> bool:
        """Return whether a run of `updates` updates ends skipping them, by a non-finite loss or for
        half of the run.
        """
        loss = self.last.get("train_loss")
        return self.streak > 0 and (
            loss is None or not math.isfinite(loss) or 2 * self.streak >= updates
        )


class MetricsLogs(_Pending):
    """The logs of models that train at once, whose tensors are read from the device together.

    Attributes:
        ended: the update after which each diverged member learned nothing more, by the member's
            place.
    """

    def __init__(self, runs: Sequence[Run], every: int):
        """Open the logs of `runs`, in the order of the members; see `MetricsLog`."""
        super().__init__(every)
        self.logs = [MetricsLog(run, every) for run in runs]
        self.ended = {
            i: row["diverged"]
            for i, run in enumerate(runs)
            for row in run.rows()
            if "diverged" in row
        }

    def _write(
        self, rows: Sequence[Sequence[dict[str, Any]]], extras: Sequence[dict[str, Any]]
    ) -> None:
        """Write the rows of all members that have not ended."""
        for index, log in enumerate(self.logs):
            if index not in self.ended:
                log.write([members[index] for members in rows], extras)

    def diverged(self, updates: int | None = None) -> list[int]:
        """Return the members that have diverged since the last call, by too many skipped updates in
        a row.

        They are recorded in `ended` and in their metrics, and no more rows of updates are written
        for them.

        Args:
            updates: the run's number of updates if it ends now. Then members whose loss is not
                finite, or whose updates were skipped in at least the last half of the run, count as
                diverged, too.
        """
        going = [i for i in range(len(self.logs)) if i not in self.ended]
        lost = [
            i for i in going if self.logs[i].is_lost or (updates and self.logs[i].has_lost(updates))
        ]
        for index in lost:
            log = self.logs[index]
            self.ended[index] = log.last["update"] - log.streak
            log.run.log({"update": log.last["update"], "diverged": self.ended[index]})
        return lost


def numbers(updates: Sequence[Update]) -> list[list[dict[str, Any]]]:
    """Return a row for each update and member, by one read of the device; an engine of one model
    has one member.
    """
    columns = [
        torch.stack(
            [
                torch.atleast_1d(value).double()
                for value in (u.loss, u.grad_norm, u.tokens, u.skipped)
            ]
        )
        for u in updates
    ]
    rows = []
    for update, (loss, norm, tokens, skipped) in zip(
        updates, torch.stack(columns).tolist(), strict=True
    ):
        rate = update.lr
        lr = rate if isinstance(rate, tuple) else (rate,) * len(loss)
        # Which would be those of all members.
        parts = {} if isinstance(rate, tuple) else seconds(update.marks)
        rows.append(
            [
                {
                    "update": update.index + 1,
                    "tokens": int(tokens[i]),
                    "train_loss": loss[i],
                    "lr": lr[i],
                    "grad_norm": norm[i],
                    "skipped": int(skipped[i]),
                    **parts,
                }
                for i in range(len(loss))
            ]
        )
    return rows
