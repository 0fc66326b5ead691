"""A run's folder as those ranks see it that only compute: one of them writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from monograph.run.folder import Run


class Follower(Run):
    """A run that is read and never written."""

    @contextmanager
    def lock(self, new: bool = False) -> Iterator[None]:
        """Nothing: rank 0 holds it."""
        yield

    def log(self, *rows: Mapping[str, Any]) -> None:
        """Nothing."""

    def rows(self) -> list[dict[str, Any]]:
        """None: rank 0 may be writing them."""
        return []

    def sync_metrics(self) -> int:
        """Nothing."""
        return self.metrics_offset

    def metrics_digest(self, offset: int | None = None) -> str:
        """Nothing: rank 0 records it."""
        return ""

    def truncate_metrics(self, offset: int, sha256: str | None = None) -> None:
        """Nothing."""
