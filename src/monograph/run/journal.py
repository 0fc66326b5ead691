"""What happened, written down: updates, evaluations and samples as rows of metrics.jsonl."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from monograph.errors import Diverged
from monograph.run.folder import Run
from monograph.step import Update

# So many skipped updates in a row are no accident.
PATIENCE = 20


class Journal:
    """Collects updates and writes them `every` updates, so that the device is waited for that often only."""

    def __init__(self, run: Run, every: int):
        """A journal of `run`; what a resumed run's metrics hold already is read back."""
        self.run, self.every = run, every
        self.pending: list[tuple[Update, dict[str, Any]]] = []
        rows = [row for row in run.rows() if "skipped" in row]
        self.last: dict[str, Any] = rows[-1] if rows else {}
        self.skipped = sum(row["skipped"] for row in rows)
        self.streak = sum(1 for _ in itertools.takewhile(lambda row: row["skipped"], reversed(rows)))

    def add(self, update: Update, extra: dict[str, Any]) -> bool:
        """Note an update; True if the rows were written now.

        Raises:
            Diverged: many updates in a row had a non-finite loss or gradient.
        """
        self.pending.append((update, extra))
        if len(self.pending) < self.every:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Write what is pending: the one place where the training loop reads tensors."""
        if not self.pending:
            return
        columns = [torch.stack([u.loss, u.grad_norm, u.tokens.double(), u.skipped.double()]) for u, _ in self.pending]
        for (update, extra), (loss, grad_norm, tokens, skipped) in zip(
            self.pending, torch.stack(columns).tolist(), strict=True
        ):
            was_skipped = int(skipped) > self.skipped
            self.streak = self.streak + 1 if was_skipped else 0
            self.skipped = int(skipped)
            self.last = {
                "update": update.index + 1,
                "tokens": int(tokens),
                "train_loss": loss,
                "lr": update.lr,
                "grad_norm": grad_norm,
                "skipped": was_skipped,
                **extra,
            }
            self.run.log(self.last)
        self.pending.clear()
        if self.streak >= PATIENCE:
            raise Diverged(
                f"{self.streak} updates in a row, up to {self.last['update']}, were skipped (not finite): "
                "lower optim.lr, and look for bad data around there; the last checkpoint is sound"
            )

    def note(self, row: dict[str, Any]) -> None:
        """Write a row that is no update: an evaluation or a sample."""
        self.flush()
        self.run.log(row)
