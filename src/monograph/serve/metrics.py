"""Counts and durations of requests, for /metrics."""

import itertools
from bisect import bisect_left
from collections import Counter

from starlette.types import Message, Scope, Send


class Counted:
    """Counts requests by status.

    Attributes:
        by_status: how many were answered so.
    """

    def __init__(self) -> None:
        self.by_status: Counter[int] = Counter()

    def watched(self, scope: Scope, send: Send) -> Send:
        """Return a `send` that counts; `scope["answered"]` becomes whether an answer has begun."""
        scope["answered"] = False

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["answered"] = True
                self.by_status[message["status"]] += 1
            await send(message)

        return sent


_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds


class Histogram:
    """Counts durations by size, as Prometheus does."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(_BOUNDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        """Return its lines in Prometheus' text."""
        bounds = (*map(str, _BOUNDS), "+Inf")
        totals = [*itertools.accumulate(self._counts)]
        buckets = (
            f'{name}_bucket{{le="{bound}"}} {total}'
            for bound, total in zip(bounds, totals, strict=True)
        )
        return [
            f"# TYPE {name} histogram",
            *buckets,
            f"{name}_sum {self._sum:.6f}",
            f"{name}_count {totals[-1]}",
        ]
