"""What happened, written down: updates, evaluations and samples as rows of metrics.jsonl, of one run or of many."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from monograph.run.folder import Run
from monograph.step import Update

# So many skipped updates in a row are no accident.
PATIENCE = 20


class MetricsLog:
    """Collects updates and writes them `every` updates, so that the device is waited for that often only."""

    def __init__(self, run: Run, every: int):
        """The log of `run`; what a resumed run's metrics hold already is read back."""
        self.run, self.every = run, every
        self.pending: list[tuple[Update, dict[str, Any]]] = []
        rows = [row for row in run.rows() if "skipped" in row]
        self.last: dict[str, Any] = rows[-1] if rows else {}
        self.skipped = sum(row["skipped"] for row in rows)
        self.streak = sum(1 for _ in itertools.takewhile(lambda row: row["skipped"], reversed(rows)))

    def add(self, update: Update, extra: dict[str, Any]) -> bool:
        """Note an update; True if the rows were written now."""
        self.pending.append((update, extra))
        if len(self.pending) < self.every:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Write what is pending: the one place where the training loop reads tensors."""
        if not self.pending:
            return
        self.write(
            [member[0] for member in numbers([update for update, _ in self.pending])], [e for _, e in self.pending]
        )
        self.pending.clear()

    @property
    def is_lost(self) -> bool:
        """Whether so many updates in a row were skipped that it is no accident."""
        return self.streak >= PATIENCE

    def write(self, rows: Sequence[dict[str, Any]], extras: Sequence[dict[str, Any]]) -> None:
        """Write rows of updates, whose `skipped` counts since the start, and what else is known of each."""
        written = []
        for row, extra in zip(rows, extras, strict=True):
            was_skipped = row["skipped"] > self.skipped
            self.streak = self.streak + 1 if was_skipped else 0
            self.skipped = row["skipped"]
            self.last = {**row, "skipped": was_skipped, **extra}
            written.append(self.last)
        self.run.log(*written)

    def has_lost(self, updates: int) -> bool:
        """Whether a run that ends now, after so many updates, ends without learning."""
        loss = self.last.get("train_loss")
        return self.streak > 0 and (loss is None or not math.isfinite(loss) or 2 * self.streak >= updates)

    def note(self, row: dict[str, Any]) -> None:
        """Write a row that is no update: an evaluation or a sample."""
        self.flush()
        self.run.log(row)


class MetricsLogs:
    """The logs of models that train at once: their tensors are read together."""

    def __init__(self, runs: Sequence[Run], every: int):
        """MetricsLogs of `runs`, in the order of the members; see `MetricsLog`. `ended` is read back too."""
        self.logs, self.every = [MetricsLog(run, every) for run in runs], every
        self.pending: list[tuple[Update, dict[str, Any]]] = []
        self.ended = {i: row["diverged"] for i, run in enumerate(runs) for row in run.rows() if "diverged" in row}

    def add(self, update: Update, extra: dict[str, Any]) -> bool:
        """Note an update; True if the rows were written now."""
        self.pending.append((update, extra))
        if len(self.pending) >= self.every:
            self.flush()
        return not self.pending

    def flush(self) -> None:
        """Write what is pending, but of a member that ended nothing more."""
        if not self.pending:
            return
        found, extras = numbers([update for update, _ in self.pending]), [extra for _, extra in self.pending]
        self.pending.clear()
        for index, log in enumerate(self.logs):
            if index not in self.ended:
                log.write([members[index] for members in found], extras)

    def diverged(self, of: int | None = None) -> list[int]:
        """Members of which many updates in a row were not finite, each told once; nothing of them is written any more.

        `ended` has the update after which each of them learned nothing more.

        Args:
            of: at the end of their run, how many updates it had. There is no other update to wait for: members whose
                loss is not finite, or that learned nothing in half of the run or more, have diverged as well.
        """
        going = [i for i in range(len(self.logs)) if i not in self.ended]
        lost = [i for i in going if self.logs[i].is_lost or (of and self.logs[i].has_lost(of))]
        for index in lost:
            log = self.logs[index]
            self.ended[index] = log.last["update"] - log.streak
            log.run.log({"update": log.last["update"], "diverged": self.ended[index]})
        return lost


def numbers(updates: Sequence[Update]) -> list[list[dict[str, Any]]]:
    """What each update did to each member, in one read of the device; an engine of one model has one."""
    columns = [
        torch.stack([torch.atleast_1d(each).double() for each in (u.loss, u.grad_norm, u.tokens, u.skipped)])
        for u in updates
    ]
    found = []
    for update, (loss, norm, tokens, skipped) in zip(updates, torch.stack(columns).tolist(), strict=True):
        rate: Any = update.lr
        lr = rate if isinstance(rate, tuple) else (rate,) * len(loss)
        found.append([
            {
                "update": update.index + 1, "tokens": int(tokens[i]), "train_loss": loss[i], "lr": lr[i],
                "grad_norm": norm[i], "skipped": int(skipped[i]),
            }
            for i in range(len(loss))
        ])  # fmt: skip
    return found
